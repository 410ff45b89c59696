"""How long a run of the harness's own loop is said to take, before it begins."""

from pathlib import Path

import pytest
from runs import outcome_of

from harness.cli import compose
from harness.commands import run_time
from harness.commands.run_lifecycle import load_prompts
from harness.commands.run_time import RunTime, say_left, sweep_work
from harness.config import AuditionConfig, SweepConfig
from harness.measurement.round_times import LEAST_ROUNDS
from harness.theory.cost import pair_forwards, timing_forwards

SMALL = (
    *("k=[1,4]", "temperature=[0]", "new_tokens=12", "threads=1"),
    *("prompts.sets=[easy]", "prompts.limit=24"),
)


def expected(command: str, *words: str) -> RunTime | None:
    config = compose(command, list(words))
    assert isinstance(config, SweepConfig | AuditionConfig)
    drafts = [config.draft] if isinstance(config, SweepConfig) else [compose("sweep", []).draft]
    return run_time.run_time(config, drafts, load_prompts(config))


def test_the_work_of_a_sweep_is_its_texts_pairs_scores_steps_and_visits() -> None:
    config = compose("sweep", [*SMALL, "prompts.limit=4", "until=all"])
    assert isinstance(config, SweepConfig)
    prompts = load_prompts(config)
    work = sweep_work(config, prompts)
    assert not work.texts, "the plain generations are the texts"
    in_looks = compose("sweep", [*SMALL, "prompts.limit=4"])
    assert isinstance(in_looks, SweepConfig)
    texts = sweep_work(in_looks, prompts).texts
    assert sum(each.count * each.batch for each in texts if each.tokens == 1) == 4 * 12
    pairs = pair_forwards([0, 1, 4], 4, 12)
    assert all(each in work.rest for each in [*pairs, *timing_forwards(4, "draft")])
    visits = [each for each in work.rest if each.tokens == 5 and each.count % LEAST_ROUNDS == 0]
    assert visits, "rounds of K = 4 are timed too"
    slow = sweep_work(config, prompts, lambda _: 1.0)
    assert sum(each.count for each in slow.rest) < sum(each.count for each in work.rest)


def test_a_run_that_asks_for_more_takes_longer() -> None:
    base = expected("sweep", *SMALL)
    assert base is not None
    for more in ("new_tokens=24", "temperature=[0,1]", "k=[1,2,4]", "repetitions=3"):
        longer = expected("sweep", *SMALL, more)
        assert longer is not None
        assert longer.texts_s + longer.rest_s > base.texts_s + base.rest_s, more
    audition = expected("audition", *SMALL)
    assert audition is not None
    assert audition.rest_s < base.rest_s, "nothing is measured pair by pair"


def test_nothing_is_said_of_a_card_or_of_what_is_measured_elsewhere(tmp_path: Path) -> None:
    for words in (["gpu=h100"], [f"latency_from={tmp_path}", "mode=replay"]):
        assert expected("sweep", *SMALL, *words) is None


@pytest.mark.usefixtures("few_samples")
def test_a_sweep_says_how_long_it_takes_and_so_does_its_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for dry in ("dry_run=true", "dry_run=false"):
        outcome_of("sweep", tmp_path, *SMALL, "prompts.limit=4", dry)
        printed = capsys.readouterr()
        said = printed.out + printed.err
        assert "at most about" in " ".join(said.split()), dry


def test_what_the_texts_took_corrects_what_the_drafts_will_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = RunTime(texts_s=10.0, rest_s=30.0, needed_bytes=1e6)
    say_left(said, texts_s=20.0)
    assert "at most about 60 s left" in capsys.readouterr().err
    say_left(said, texts_s=1.0)
    say_left(None, texts_s=20.0)
    assert not capsys.readouterr().err

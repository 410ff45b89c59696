"""How long a run of the harness's own loop is said to take, before it begins."""

from dataclasses import replace
from pathlib import Path

import pytest
from runs import outcome_of, ran, sample

from harness.cli import compose, draft_confs
from harness.commands import run_time, sweep
from harness.commands.run_lifecycle import load_prompts
from harness.commands.run_time import RunTime, Work, say_left, work_of
from harness.commands.tasks import planned_turns, sweep_tasks
from harness.config import AuditionConfig, SweepConfig
from harness.measurement.round_times import LEAST_ROUNDS
from harness.theory.cost import Forwards, pair_forwards, timing_forwards

SMALL = (
    *("k=[1,4]", "temperature=[0]", "new_tokens=12", "threads=1"),
    *("prompts.sets=[easy]", "prompts.limit=24"),
)


def expected(command: str, *words: str) -> RunTime | None:
    config = compose(command, list(words))
    assert isinstance(config, SweepConfig | AuditionConfig)
    drafts = [config.draft] if isinstance(config, SweepConfig) else draft_confs(config)
    return run_time.run_time(config, drafts, load_prompts(config))


def test_the_work_of_a_sweep_is_its_texts_pairs_scores_steps_and_visits() -> None:
    config = compose("sweep", [*SMALL, "prompts.limit=4", "until=all"])
    assert isinstance(config, SweepConfig)
    prompts = load_prompts(config)
    work = work_of(config, [config.draft], prompts)
    assert not work.texts, "the plain generations are the texts"
    in_looks = compose("sweep", [*SMALL, "prompts.limit=4"])
    assert isinstance(in_looks, SweepConfig)
    texts = work_of(in_looks, [in_looks.draft], prompts).texts
    assert sum(each.count * each.batch for each in texts if each.tokens == 1) == 4 * 12
    pairs = pair_forwards([0, 1, 4], 4, 12)
    assert all(each in work.rest for each in [*pairs, *timing_forwards(4, "draft")])
    visits = [each for each in work.rest if each.tokens == 5 and each.count % LEAST_ROUNDS == 0]
    assert visits, "rounds of K = 4 are timed too"
    slow = work_of(config, [config.draft], prompts, lambda _: 1.0)
    assert sum(each.count for each in slow.rest) < sum(each.count for each in work.rest)


def test_a_run_that_asks_for_more_takes_longer() -> None:
    base = expected("sweep", *SMALL)
    assert base is not None
    for more in ("new_tokens=24", "temperature=[0,1]", "k=[1,2,4]", "repetitions=3"):
        longer = expected("sweep", *SMALL, more)
        assert longer is not None
        assert sum(longer.seconds()) > sum(base.seconds()), more
    audition = expected("audition", *SMALL, "drafts=[tiny_good]")
    assert audition is not None
    assert audition.seconds()[1] < base.seconds()[1], "nothing is measured pair by pair"
    drafts = "drafts=[tiny_good,tiny_small]"
    several = expected("audition", *SMALL, drafts)
    assert several is not None
    assert several.decided is not None, "the second draft is dropped at the first look"
    assert audition.seconds()[1] < several.decided.seconds()[1] < several.seconds()[1]
    assert "if the first look decides, at most about" in str(replace(several, again_s=1e3))
    assert base.seconds(pace=100.0)[1] < 50.0 * base.seconds()[1], "slow rounds are timed less"


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


def test_what_the_texts_took_corrects_what_the_rest_will_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def said(
        texts_s: float,
        *lengths: int,
        budget_s: float = 1e9,
        decided: float | None = None,
        **timed: float,
    ) -> str:
        work = lambda tokens, _: Work(  # noqa: E731
            [Forwards("target", tokens)], [Forwards("target", 3 * tokens)]
        )
        price = lambda work: 0.1 * sum(each.count for each in work)  # noqa: E731
        expected = RunTime(work, price, new_tokens=100, needed_bytes=1e6, again_s=20.0)
        if decided is not None:
            less = lambda work: decided * price(work)  # noqa: E731
            expected = replace(expected, decided=replace(expected, price=less, again_s=2.0))
        say_left(expected, texts_s, lengths, budget_s=budget_s, **timed)
        return capsys.readouterr().err

    assert "left: at most about 80 s" in said(20.0, 100, 100), "twice as long, but what is repeated"
    assert "left: at most about 50 s" in said(20.0, 100, token_s=0.1), "but no plain token is"
    assert "left: at most about 35 s" in said(20.0, 50, token_s=0.1), "texts that end early"
    assert "left: at most about 12 s" in said(20.0, 100, budget_s=12.0)
    assert not said(1.0, 100)
    first = "about 14 s if the first look decides, at most about 80 s"
    assert f"left: {first}" in said(20.0, 100, 100, decided=0.2), "of a fifth of the rest"
    say_left(None, 20.0, [100], budget_s=1e9)
    assert not capsys.readouterr().err


@pytest.mark.usefixtures("few_samples")
@pytest.mark.parametrize(
    "words", sample(["until=all", "until=decided", "mode=replay"], "until=all", "mode=replay")
)
def test_a_dry_run_counts_the_generations_that_a_sweep_makes(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In looks all of them where nothing is decided before the last, and fewer where it is."""
    asked = (*SMALL, "temperature=[0,1]", "repetitions=2", "prompts.limit=4", words)
    config = compose("sweep", list(asked))
    assert isinstance(config, SweepConfig)
    planned = sweep_tasks(planned_turns(load_prompts(config), config), config)
    outcome_of("sweep", tmp_path, *asked, "dry_run=true", "verbose=true")
    assert f"{planned.count} (repetitions=2)" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr(sweep, "decided", lambda *_: frozenset())
    assert len(ran("sweep", tmp_path, *asked).trials) == planned.count
    if words == "until=decided":
        assert len(planned.texts) == 4 * (1 + 2)
        monkeypatch.setattr(sweep, "decided", lambda *_: {0.0, 1.0})
        made = len(ran("sweep", tmp_path, *asked).trials)
        assert len(planned.texts) < made < planned.count
        monkeypatch.setattr(sweep, "CELL_S", 1e9)
        monkeypatch.setattr(sweep, "PRECISE", 0.0)
        made = len(ran("sweep", tmp_path, *asked).trials)
        assert planned.count < made <= planned.count + planned.repeats


@pytest.mark.usefixtures("few_samples")
@pytest.mark.parametrize(
    ("command", "words", "says"),
    [
        ("snapshot", ("temperature=[0]", "k=[1,4]"), "generations {} (temperature 0)"),
        ("audition", ("temperature=[0,1]", "drafts=[ngram]"), "texts of the target {}"),
        ("profile", ("contexts=[16]", "batches=[1]"), "generations, plain {} (each model"),
        (
            "server",
            ("temperature=[0]", "engine=own", "until=all"),
            "one at a time {}, of up to 12 tokens",
        ),
    ],
)
def test_a_dry_run_counts_the_generations_of_every_command(
    command: str,
    words: tuple[str, ...],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ("new_tokens=12", "threads=1", "prompts.sets=[easy]", "prompts.limit=2", *words)
    asked = (*asked, "repetitions=2")
    outcome_of(command, tmp_path, *asked, "dry_run=true", "verbose=true")
    plan = " ".join(capsys.readouterr().out.split())
    run = ran(command, tmp_path, *asked)
    assert says.format(len(run.trials)) in plan
    if command == "server":
        assert f"to time rounds {len(run.starts) + len(run.rounds)} more requests" in plan

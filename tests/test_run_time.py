"""How long a run of the harness's own loop is said to take, before it begins."""

from pathlib import Path

import pytest
from runs import outcome_of

from harness.cli import compose
from harness.commands import run_time
from harness.commands.run_lifecycle import load_prompts
from harness.commands.run_time import ForwardTime, Machine, RunTime, say_again
from harness.config import AuditionConfig, SweepConfig
from harness.theory.architecture import architecture_of
from harness.theory.cost import ModelSize

SMALL = (
    *("k=[1,4]", "temperature=[0]", "new_tokens=12", "threads=1"),
    *("prompts.sets=[easy]", "prompts.limit=24"),
)
MACHINE = Machine(bytes_s=10e9, operations_s=100e9)


def expected(command: str, *words: str) -> RunTime | None:
    config = compose(command, list(words))
    assert isinstance(config, SweepConfig | AuditionConfig)
    drafts = [config.draft] if isinstance(config, SweepConfig) else [compose("sweep", []).draft]
    return run_time.run_time(config, drafts, load_prompts(config))


def test_a_forward_reads_every_weight_once_and_multiplies_with_each_for_every_position() -> None:
    shape = architecture_of(
        {
            "family": "qwen3",
            "layers": 28,
            "hidden": 1024,
            "heads": 16,
            "kv_heads": 8,
            "head_dim": 128,
            "ffn": 3072,
            "vocab": 151_936,
            "tied_embeddings": True,
        }
    )
    forward = ForwardTime.of(ModelSize(shape, 2.0), MACHINE)
    read_s = 2.0 * shape.parameters / 10e9
    assert forward(1) == pytest.approx(read_s + 28 * run_time.LAYER_S)
    assert forward(11) - forward(1) == pytest.approx(10 * 2 * shape.parameters / 100e9)
    assert ForwardTime.of(None, MACHINE)(5) == 0.0


def test_a_run_that_asks_for_more_takes_longer() -> None:
    base = expected("sweep", *SMALL)
    assert base is not None
    for more in ("new_tokens=24", "temperature=[0,1]", "k=[1,2,4]", "repetitions=3"):
        longer = expected("sweep", *SMALL, more)
        assert longer is not None
        assert longer.total_s > base.total_s, more
    audition = expected("audition", *SMALL)
    assert audition is not None
    assert audition.drafts_s < base.drafts_s, "nothing is measured pair by pair"


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
    said = RunTime(texts_s=10.0, drafts_s=30.0, needed_bytes=1e6)
    say_again(said, texts_s=20.0)
    assert "at most about 60 s left" in capsys.readouterr().err
    say_again(said, texts_s=1.0)
    say_again(None, texts_s=20.0)
    assert not capsys.readouterr().err

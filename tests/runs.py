"""Commands run in this process and what they stored, and the runs that are stored here."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from harness.analysis import analyse
from harness.cli import compose, work
from harness.commands.run_lifecycle import Outcome
from harness.records import CopyBandwidth
from harness.storage import StoredRun, load
from harness.summary import Summary, TextLikelihood, from_json, to_json

FROZEN = Path(__file__).parent / "frozen"
EXAMPLES = Path(__file__).parents[1] / "results" / "examples"
# llama.cpp's flags for caches of both models in float32 and plain attention, as the loaded models
EXACT = (
    *("--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off"),
    *("--spec-draft-type-k", "f32", "--spec-draft-type-v", "f32"),
)
EXACT_FLAGS = f"flags=[{','.join(EXACT)}]"
needs_llamacpp = pytest.mark.skipif(
    find_spec("xllamacpp") is None, reason="needs the llamacpp extra"
)


# Where the processes of a run of tests keep what each of them would analyse; set by conftest
SHARED: Path | None = None


@cache
def analysed(name: str) -> Summary:
    """What the analysis says of a run in tests/frozen or results/examples."""
    file = None if SHARED is None else SHARED / f"analysed_{name}.json"
    if file is not None and file.is_file():
        return from_json(file.read_bytes())
    made = analyse(load((FROZEN if (FROZEN / name).is_dir() else EXAMPLES) / name))
    if file is not None:
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(to_json(made), encoding="utf-8")
        part.replace(file)
    return made


@contextmanager
def without_plots() -> Iterator[None]:
    """Commands draw no plots, which take most of the time of a small run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.reporting.plots.draw", lambda *_, **__: ())
        yield


@contextmanager
def timed_little() -> Iterator[None]:
    """Commands time each step three times, rounds in two short visits, and nothing again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.measurement.step_times.REPETITIONS", 3)
        patch.setattr("harness.measurement.step_times.WARMUP", 1)
        patch.setattr("harness.measurement.step_times.MOST_REPEATS", 0)
        patch.setattr("harness.measurement.round_times.MOST_VISITS", 2)
        patch.setattr("harness.measurement.round_times.LEAST_ROUNDS", 4)
        patch.setattr("harness.measurement.round_times.MOST_TOKENS", 8)
        patch.setattr("harness.commands.sweep.LEAST_VISITS", 1)
        patch.setattr("harness.commands.sweep.REQUESTS_PER_VISIT", 10_000)
        patch.setattr("harness.commands.sweep.CELL_S", 0.0)
        patch.setattr(
            "harness.commands.timing.copy_bandwidth", lambda *_: CopyBandwidth(10.0, 1, 1)
        )
        yield


def sample(values: Iterable[Any], *kept: Any) -> list[Any]:
    """The values of a parameter of which `make test` takes these, and `make test-all` every one."""
    exhaustive = pytest.mark.exhaustive
    return [value if value in kept else pytest.param(value, marks=exhaustive) for value in values]


def outcome_of(command: str, *words: str | Path) -> Outcome:
    """How a command ends on these overrides; a path is the folder that its run goes to."""
    typed = [f"results_root={word}" if isinstance(word, Path) else word for word in words]
    return work(command, compose(command, typed))


def stored(outcome: Outcome) -> StoredRun:
    """The run folder that a command wrote, read back."""
    assert outcome.folder is not None
    return load(outcome.folder)


def ran(command: str, *words: str | Path, status: int = 0) -> StoredRun:
    """What a command stored that ends with this status; words as of `outcome_of`."""
    outcome = outcome_of(command, *words)
    assert outcome.status == status, outcome
    return stored(outcome)


def assert_replay_is_exact(run: StoredRun, *, accepted: bool = True) -> None:
    """At temperature 0 the counts of every K are those replayed, and some tokens were accepted."""
    greedy = run.results[(run.results.temperature == 0.0) & (run.results.k > 0)]
    assert len(greedy)
    measured, replayed = (
        greedy[greedy.source == source].set_index(["prompt_set", "k"])
        for source in ("measured", "replayed")
    )
    for name in ("rounds", "drafted", "accepted", "rejected"):
        assert measured[name].astype(float).to_dict() == replayed[name].astype(float).to_dict()
    assert (measured.accepted.max() > 0) == accepted


def assert_texts_are_unchanged(run: StoredRun) -> None:
    """A snapshot compared texts, and found no difference in them or in what was drawn."""
    results = [each.result for each in run.checks if not isinstance(each, TextLikelihood)]
    assert "PASS" in results
    assert {*results} <= {"PASS", "UNTESTED"}

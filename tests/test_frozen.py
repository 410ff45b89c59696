"""Six stored runs are analysed to the numbers that were derived from them when they were made."""

import csv
import json
import math
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from harness.analysis import analyse
from harness.storage import load
from harness.summary import Summary, from_json, to_json

FROZEN = Path(__file__).parent / "frozen"
RUNS = ("breakeven", "profile", "snapshot")


@cache
def summary(kind: str) -> Summary:
    return analyse(load(FROZEN / kind))


def expected(kind: str) -> dict[str, Any]:
    return json.loads((FROZEN / kind / "expected" / "summary.json").read_text())


def same(one: Any, other: Any) -> bool:
    """Equal, numbers to 1e-9."""
    if isinstance(one, float) or isinstance(other, float):
        return None not in (one, other) and math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)
    return one == other


def differences(record: Any, stored: dict[str, Any], keys: tuple[str, ...]) -> list[str]:
    return [
        f"{key}: {getattr(record, key)} for {stored[key]}"
        for key in keys
        if not same(getattr(record, key), stored[key])
    ]


@pytest.mark.parametrize("kind", RUNS)
def test_results_are_those_that_were_derived_when_the_run_was_made(kind: str) -> None:
    with (FROZEN / kind / "expected" / "results.csv").open() as file:
        stored = list(csv.DictReader(file))
    rows = summary(kind).results
    assert len(rows) == len(stored)
    for row, line in zip(rows, stored, strict=True):
        for name, value in asdict(row).items():
            text = line[name]
            if isinstance(value, int | float):
                assert text, f"{name} of {line}: {value} for nothing"
                assert same(float(value), float(text)), f"{name} of {line}: {value} for {text}"
            else:
                assert text == (value or ""), f"{name} of {line}"


@pytest.mark.parametrize("kind", RUNS)
def test_verdicts_are_those_that_were_derived(kind: str) -> None:
    keys = ("speculate", "decision", "draft", "k", "temperature", "prompt_set")
    numbers = ("speedup", "speedup_lo", "speedup_hi")
    stored, found = expected(kind), summary(kind)
    verdicts = [*([found.verdict] if found.verdict else []), *found.per_temperature]
    verdicts += found.per_prompt_set
    entries = [*([stored["verdict"]] if stored["verdict"] else []), *stored["per_temperature"]]
    entries += stored["per_prompt_set"]
    assert len(verdicts) == len(entries)
    for verdict, entry in zip(verdicts, entries, strict=True):
        assert differences(verdict, entry, keys + numbers) == []


@pytest.mark.parametrize("kind", RUNS)
def test_a_summary_is_written_and_read_back_as_it_is(kind: str) -> None:
    assert from_json(to_json(summary(kind))) == summary(kind)


def test_a_profile_has_its_bounds_and_rounds() -> None:
    found, headline = summary("profile"), expected("profile")["headline"]
    (steps,) = found.steps
    assert same(steps.draft_step_s * 1e3, headline["draft_step_ms"])
    assert same(steps.c, headline["c"])
    assert steps.context_tokens == headline["context_tokens"]
    shares = {b.role: b.overhead_share for b in reversed(found.step_bounds)}
    assert same(shares["target"], headline["target_step_overhead_share"])
    assert same(shares["draft"], headline["draft_step_overhead_share"])
    largest = max((entry.unexplained_share for entry in found.rounds), key=abs)
    assert same(largest, headline["largest_unexplained_share"])
    assert [entry.k for entry in found.rounds] == [1, 2, 4]
    for entry in found.rounds:
        product = math.prod(step.factor for step in entry.waterfall)
        assert same(entry.waterfall[0].speedup * product, entry.speedup)
    assert [asdict(cell) for cell in found.skipped_cells] == expected("profile")["skipped_cells"]
    codes = [caveat.code for caveat in found.caveats]
    assert codes == ["embedded_models", "launch_bound", "launch_bound"]


def test_a_breakeven_has_its_ceilings_and_best_k() -> None:
    found, stored = summary("breakeven"), expected("breakeven")
    for ceiling, entry in zip(found.ceilings, stored["by_k"], strict=True):
        assert differences(ceiling, entry, ("k", "v", "ideal_speedup", "breakeven_alpha")) == []
    for best, entry in zip(found.best_k, stored["best_k"], strict=True):
        assert differences(best, entry, ("alpha", "k", "speedup")) == []
    assert found.caveats == ()


def test_a_snapshot_has_its_comparisons() -> None:
    keys = ("prompt_set", "prompt", "k", "result", "first_difference", "acceptance_rate")
    checks, stored = summary("snapshot").text_checks, expected("snapshot")["prompts"]
    assert len(checks) == len(stored)
    for check, entry in zip(checks, stored, strict=True):
        assert differences(check, entry, keys) == []

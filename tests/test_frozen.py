"""Six stored runs are analysed to the numbers that were derived from them when they were made."""

import csv
import json
import math
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from harness.analysis import analyse
from harness.storage import StoredRun, load
from harness.summary import Summary, from_json, to_json

FROZEN = Path(__file__).parent / "frozen"
RESAMPLED = 0.02
RUNS = ("breakeven", "profile", "snapshot", "sweep", "sweep_replay", "audition")


@cache
def summary(kind: str) -> Summary:
    return analyse(load(FROZEN / kind))


def expected(kind: str) -> dict[str, Any]:
    return json.loads((FROZEN / kind / "expected" / "summary.json").read_text())


def same(one: Any, other: Any, tolerance: float = 1e-9) -> bool:
    """Equal, numbers to a relative or absolute tolerance."""
    if isinstance(one, float) or isinstance(other, float):
        return None not in (one, other) and one == pytest.approx(
            other, rel=tolerance, abs=tolerance
        )
    return one == other


def tolerance(name: str) -> float:
    """What replay resamples has other resamples today; all else is exact."""
    return RESAMPLED if name.endswith(("_lo", "_hi")) or name == "probability_best" else 1e-9


def differences(record: Any, stored: dict[str, Any], keys: tuple[str, ...]) -> list[str]:
    return [
        f"{key}: {getattr(record, key)} for {stored[key]}"
        for key in keys
        if not same(getattr(record, key), stored[key], tolerance(key))
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
                allowed = tolerance(name) if row.source == "replayed" else 1e-9
                said = f"{name} of {line}: {value} for {text}"
                assert same(float(value), float(text), allowed), said
            else:
                assert text == (value or ""), f"{name} of {line}"


@pytest.mark.parametrize("kind", RUNS)
def test_verdicts_are_those_that_were_derived(kind: str) -> None:
    keys = ("speculate", "decision", "draft", "k", "temperature", "prompt_set", "speedup")
    stored, found = expected(kind), summary(kind)
    verdicts = [*([found.verdict] if found.verdict else []), *found.per_temperature]
    verdicts += found.per_prompt_set
    entries = [*([stored["verdict"]] if stored["verdict"] else []), *stored["per_temperature"]]
    entries += stored["per_prompt_set"]
    # A replayed sweep resampled its step times with seed 0, whatever the run's seed; resamples that
    # equal the estimate count as half, whatever their rounding (docs/decisions/0008)
    tolerance = 1e-3 if kind in ("sweep_replay", "audition") else 1e-9
    assert len(verdicts) == len(entries)
    for verdict, entry in zip(verdicts, entries, strict=True):
        assert differences(verdict, entry, keys) == []
        bounds = [verdict.speedup_lo, verdict.speedup_hi]
        stored_bounds = [entry["speedup_lo"], entry["speedup_hi"]]
        assert bounds == (
            [None, None] if kind == "breakeven" else pytest.approx(stored_bounds, rel=tolerance)
        )


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


def test_a_sweep_is_checked_against_replay_and_explained() -> None:
    found, stored = summary("sweep"), expected("sweep")
    keys = ("prompt_set", "temperature", "k", "prompts", "p_value")
    keys += ("measured_tokens_per_round", "replayed_tokens_per_round")
    for check, entry in zip(found.replay_checks, stored["replay_gaps"], strict=True):
        assert differences(check, entry, keys) == []
        assert same(check.gap_in_standard_errors, entry["gap_standard_errors"])
    assert [check.result for check in found.text_checks].count("PASS") == 48
    headline = stored["headline"]
    assert found.best_cell is not None
    assert same(found.best_cell.speedup, headline["best_cell_speedup"])
    assert found.least_regret[0].k == headline["least_regret_k"]
    rates = next(
        entry.non_increasing
        for entry in found.acceptance_by_position
        if (entry.prompt_set, entry.temperature, entry.k) == ("all", 0.0, 4)
    )
    assert rates == pytest.approx(stored["acceptance_rates"], rel=1e-9)
    explanation = found.explanation
    assert explanation is not None
    assert (explanation.draft, explanation.k, explanation.decision) == ("tiny_good", 4, "speculate")
    assert f"alpha stays above {explanation.breakeven_alpha:.2f}" in stored["advice"][0]
    assert f"would be {explanation.floor_c:.2f}" in stored["advice"][1]
    assert [rule.met for rule in found.rules_of_thumb] == [
        entry["met"] for entry in stored["rules_of_thumb"]
    ]


@pytest.mark.parametrize("kind", ["sweep", "sweep_replay"])
def test_a_sweep_has_a_leaderboard_for_every_rule_and_temperature(kind: str) -> None:
    boards = {(b.rule, b.temperature): b.rows[0] for b in summary(kind).leaderboards}
    assert len(boards) == 6
    for entry in expected(kind)["engines"]:  # at temperature 0, where all rules coincide
        assert boards[entry["rule"], 0.0].draft == entry["draft"]
    assert boards["exact_match", 1.0].speedup < boards["ratio", 1.0].speedup
    rules = {answer.rule for answer in summary(kind).answers}
    assert rules == {"ratio", "exact_match", "greedy_draft"}


def test_an_audition_ranks_its_drafts_under_every_rule() -> None:
    found, stored = summary("audition"), expected("audition")
    keys = ("rank", "draft", "k", "speedup", "speedup_lo", "speedup_hi", "alpha", "alpha_lo")
    keys += ("breakeven_alpha", "probability_best")
    assert len(found.leaderboards) == len(stored["leaderboards"])
    for board, entry in zip(found.leaderboards, stored["leaderboards"], strict=True):
        assert differences(board, entry, ("rule", "temperature")) == []
        for row, ranked in zip(board.rows, entry["rows"], strict=True):
            assert differences(row, ranked, keys) == []
            assert row.draft_memory_bytes == ranked["extra_memory_bytes"]


def test_an_audition_shows_drafts_by_category_request_and_memory() -> None:
    found, stored = summary("audition"), expected("audition")
    keys = ("temperature", "draft", "k", "category", "accepted", "judged", "alpha", "alpha_lo")
    for row, entry in zip(found.category_alpha, stored["category_alpha"], strict=True):
        assert differences(row, entry, keys) == []
    replayed = [e for e in found.acceptance_by_position if e.source == "replayed"]
    for curve, entry in zip(replayed, stored["acceptance_by_position"], strict=True):
        assert curve.shares == pytest.approx(entry["positions"], rel=1e-9)
    assert found.request is not None
    assert same(found.request.plain_p95_s, stored["request_view"]["p95_baseline_s"])
    assert same(found.request.slower_share, stored["request_view"]["share_slower"])
    keys = ("draft", "context_tokens_lost", "sequences_lost", "weights_bytes")
    for row, entry in zip(found.memory, stored["memory_view"], strict=True):
        assert differences(row, entry, keys) == []
    for regret, entry in zip(found.least_regret, stored["least_regret"], strict=True):
        assert differences(regret, entry, ("draft", "k", "temperature")) == []


def interrupted(run: StoredRun, trials: int, traces: int) -> StoredRun:
    """The run as it would be had it been stopped that early, with the step times or without."""
    cut = replace(run, trials=run.trials[:trials], parts=(), summary=None)
    cut.__dict__["traces"] = run.traces[:traces]
    return cut


@pytest.mark.parametrize("kind", ["profile", "snapshot", "sweep", "sweep_replay", "audition"])
@pytest.mark.parametrize(("trials", "traces"), [(0, 0), (1, 0), (20, 20), (40, 40)])
def test_a_run_that_stopped_early_is_analysed_as_far_as_it_got(
    kind: str, trials: int, traces: int
) -> None:
    run = interrupted(load(FROZEN / kind), trials, traces)
    untimed = replace(run, latency=run.latency[:0], latency_samples=run.latency_samples[:0])
    for early in (run, untimed):
        found = analyse(early)
        assert from_json(to_json(found)) == found
        assert len(found.results) <= len(summary(kind).results)

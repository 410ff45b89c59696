"""Stored runs of every command are analysed, whole or stopped early, and their summaries read back.

What is derived from them is held by the golden reports (test_reports).
"""

import math
from dataclasses import replace

import pytest
from runs import FROZEN, analysed

from harness.analysis import analyse
from harness.storage import StoredRun, load
from harness.summary import from_json, to_json

RUNS = ("breakeven", "profile", "snapshot", "sweep", "sweep_replay", "audition", "server")


@pytest.mark.parametrize("kind", RUNS)
def test_a_summary_is_written_and_read_back_as_it_is(kind: str) -> None:
    assert analysed(kind).results
    assert from_json(to_json(analysed(kind))) == analysed(kind)


def test_a_waterfall_leads_from_the_ideal_to_the_measured_speedup() -> None:
    rounds = analysed("profile").rounds
    assert [entry.k for entry in rounds] == [1, 2, 4]
    for entry in rounds:
        product = math.prod(step.factor for step in entry.waterfall)
        assert entry.waterfall[0].speedup * product == pytest.approx(entry.speedup)


def test_a_sweep_agrees_with_replay_and_with_plain_decoding() -> None:
    sweep = analysed("sweep")
    assert {check.result for check in sweep.text_checks} == {"PASS"}
    assert len(sweep.text_checks) == 48
    gaps = [abs(check.gap_in_standard_errors or 0.0) for check in sweep.replay_checks]
    assert len(gaps) == 12
    assert max(gaps) < 3


@pytest.mark.parametrize("kind", ["sweep", "sweep_replay", "audition"])
def test_every_rule_and_temperature_has_a_leaderboard_and_an_answer(kind: str) -> None:
    boards = {(b.rule, b.temperature): b.rows[0] for b in analysed(kind).leaderboards}
    assert len(boards) == 6
    assert len({(boards[rule, 0.0].draft, boards[rule, 0.0].k) for rule, _ in boards}) == 1
    assert boards["exact_match", 1.0].speedup < boards["ratio", 1.0].speedup
    rules = {answer.rule for answer in analysed(kind).answers}
    assert rules == {"ratio", "exact_match", "greedy_draft"}


def interrupted(run: StoredRun, trials: int, traces: int) -> StoredRun:
    """The run as it would be had it been stopped that early."""
    cut = replace(run, trials=run.trials[:trials], parts=(), summary=None)
    cut.__dict__["traces"] = run.traces[:traces]
    return cut


@pytest.mark.parametrize("kind", ["profile", "snapshot", "sweep", "sweep_replay", "audition"])
@pytest.mark.parametrize(("trials", "traces"), [(0, 0), (1, 0), (20, 20), (40, 40)])
def test_a_run_that_stopped_early_is_analysed_as_far_as_it_got(
    kind: str, trials: int, traces: int
) -> None:
    run = interrupted(load(FROZEN / kind), trials, traces)
    without_rounds = replace(run, rounds=())
    untimed = replace(
        without_rounds, latency=run.latency[:0], latency_samples=run.latency_samples[:0]
    )
    for early in (run, without_rounds, untimed):
        early_summary = analyse(early)
        assert from_json(to_json(early_summary)) == early_summary
        assert len(early_summary.results) <= len(analysed(kind).results)

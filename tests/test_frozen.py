"""Stored runs of every command are analysed, whole or stopped early, and their summaries read back.

What is derived from them is held by the golden reports (test_reports).
"""

from dataclasses import replace

import pytest
from runs import FROZEN, analysed

from harness.analysis import analyse
from harness.records import RULES, where
from harness.storage import StoredRun, load
from harness.summary import from_json, to_json

RUNS = ("breakeven", "profile", "snapshot", "sweep", "sweep_replay", "audition", "server")


@pytest.mark.parametrize("kind", RUNS)
def test_a_summary_is_written_and_read_back_as_it_is(kind: str) -> None:
    assert analysed(kind).results
    assert from_json(to_json(analysed(kind))) == analysed(kind)


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
    assert len(boards) == 2 * len(RULES)
    assert len({(boards[rule, 0.0].draft, boards[rule, 0.0].k) for rule, _ in boards}) == 1
    assert boards["exact_match", 1.0].tokens_per_round < boards["ratio", 1.0].tokens_per_round
    assert {answer.rule for answer in analysed(kind).answers} == {*RULES}


def test_a_server_has_one_break_even_alpha_for_each_k_and_none_where_no_acceptance_pays() -> None:
    """Not another one for each prompt set, from what the others' rounds took."""
    server = analysed("server")
    assert server.served is not None
    for entry in server.round_times:
        assert (entry.engine, entry.run) == (server.served.engine, None)
        at = [row for row in server.alone if row.temperature == entry.temperature]
        for k, round_s in entry.round_s.items():
            needed = {row.breakeven_alpha for row in at if row.k == k}
            assert len(needed) == 1
            assert (needed == {None}) == (round_s > (k + 1) * entry.plain_s)


def test_what_rounds_of_a_server_emit_is_of_the_weighted_workload() -> None:
    run = load(FROZEN / "server")
    emitted = dict[str, float]()
    for name, shares in {"both": (1.0, 1.0), "easy": (1.0, 0.0), "hard": (0.0, 1.0)}.items():
        weights = dict(zip(("easy", "hard"), shares, strict=True))
        prompts = {**run.config["prompts"], "weights": weights}
        made = analyse(replace(run, config={**run.config, "prompts": prompts}))
        assert made.served is not None
        (of_k,) = where(made.served.by_k, k=2, temperature=0.0)
        emitted[name] = of_k.tokens_per_round or 0.0
        for row in where(made.alone, source="measured", k=2, temperature=0.0, prompt_set=name):
            assert emitted[name] == pytest.approx(row.tokens_per_round)
        under_load = [row for row in made.results if row.concurrency > 1]
        for row in where(under_load, prompt_set=name):
            at = {"temperature": row.temperature, "concurrency": row.concurrency, "k": row.k}
            (cell,) = where(made.served.load, **at)
            assert cell.throughput_ratio == pytest.approx(row.speedup)
    assert emitted["hard"] < emitted["both"] < emitted["easy"]


def interrupted(run: StoredRun, trials: int, traces: int) -> StoredRun:
    """The run as it would be had it been stopped that early."""
    cut = replace(run, trials=run.trials[:trials], summary=None)
    cut.__dict__["traces"] = run.traces[:traces]
    return cut


@pytest.mark.parametrize("kind", ["profile", "snapshot", "sweep", "sweep_replay", "audition"])
@pytest.mark.parametrize(
    ("trials", "traces"),
    [(0, 0), (1, 0), (20, 20), pytest.param(40, 40, marks=pytest.mark.exhaustive)],
)
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

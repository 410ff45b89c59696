"""A latency goal at a rate of requests: what a stored server run says of it."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import ceil
from pathlib import Path

import numpy as np
import pytest
from runs import FROZEN, outcome_of, ran

from harness.analysis import planning
from harness.analysis.batch_schedule import LoadCosts
from harness.analysis.planned_server import Server
from harness.analysis.planning import plan_of
from harness.analysis.server_run import ServedRun
from harness.cli import compose
from harness.commands.plan import recorded_times
from harness.records import LoadTiming, UserError
from harness.reporting.sentences.plan import verdicts
from harness.simulation.policies import Fixed
from harness.simulation.server import simulate
from harness.storage import StoredRun, load
from harness.summary import Caveat, Plan, PlanChoice, ServedGate
from harness.theory.batching import BatchTimes
from harness.theory.speedup import RoundTimes

FEW = ("seeds=2", "requests=100")
KS = (0, 1, 2, 4)


def known_costs() -> LoadCosts:
    """A verify that gets expensive with the batch: K pays alone, and not four at a time."""
    times = {
        batch: RoundTimes(
            (3 + 0.5 * batch) * 1e-3,
            tuple((k, (3 + 0.5 * batch + 0.2 * k + 0.6 * k * batch) * 1e-3) for k in KS[1:]),
        )
        for batch in (1, 4)
    }
    return LoadCosts(5e-3, 6e-3, BatchTimes(times))


@cache
def timed(*, unified: bool = True) -> StoredRun:
    """The stored run, had its greedy closed loops cost these, by the server's own clock."""
    run = load(FROZEN / "server")
    engine = run.manifest.engine
    assert engine is not None
    flag = " --kv-unified" if unified else ""
    commands = tuple(replace(each, line=each.line + flag) for each in engine.commands)
    engine = replace(engine, commands=commands, clock="engine")
    run = replace(run, manifest=replace(run.manifest, engine=engine))
    server, traces = Server.of(run, 0.0), {}
    for trace in server.traces:
        traces[f"{trace.prompt_set}/{trace.prompt}"] = trace

    def priced(timing: LoadTiming) -> LoadTiming:
        sent = planning._sent(server, timing, traces, max(KS))
        assert sent is not None
        costs = server.prices(known_costs(), 4, KS)[min(timing.k, 1)]
        done = simulate(sent, np.zeros(len(sent)), costs, Fixed(timing.k), timing.concurrency or 1)
        decode_s = tuple((done.ended_s - done.first_s).tolist())
        return replace(timing, seconds=float(done.ended_s.max()), user_decode_s=decode_s)

    greedy = [priced(timing) for timing in run.loads if timing.temperature == 0.0]
    return replace(run, loads=tuple(greedy))


@cache
def planned(
    *words: str, recorded: tuple[float, ...] | None = None, unified: bool = True, price: float = 2.0
) -> Plan:
    config = compose("plan", ["run=x", *FEW, *words])
    run = timed(unified=unified)
    return plan_of(run, config, recorded=recorded, price_per_hour=price)[0]


def by_name(plan: Plan) -> dict[str, PlanChoice]:
    return {f"{each.policy} {each.k}": each for each in plan.choices}


@pytest.mark.parametrize("unified", [True, False])
def test_closed_loops_are_simulated_again_at_costs_of_the_other_prompts(unified: bool) -> None:
    checks = planned("rate=20", "tpot_ms=10", unified=unified).checks
    assert {(check.k, check.concurrency) for check in checks} == {
        (k, concurrency) for k in KS for concurrency in (1, 4)
    }
    for check in checks:
        assert check.simulated_tokens_per_second == pytest.approx(check.tokens_per_second, rel=0.03)
        assert check.per_token is not None
        assert check.simulated_per_token.p95 == pytest.approx(check.per_token.p95, rel=0.08)


def moderate() -> Plan:
    return planned("rate=60", "tpot_ms=6", "ttft_ms=60")


def test_a_goal_is_met_up_to_the_largest_rate_and_the_fleet_follows_from_it() -> None:
    plan = moderate()
    assert [*by_name(plan)] == [
        *("fixed 0", "fixed 1", "fixed 2", "fixed 4", "by_load 4", "tiers 4", "oracle 4")
    ]
    for choice in plan.choices:
        assert 0.0 < choice.largest_rate < choice.capacity
        assert choice.cards == ceil(60 / choice.largest_rate - 1e-9)
        within = [point for point in choice.points if point.rate < choice.largest_rate]
        beyond = [point for point in choice.points if point.rate > choice.largest_rate]
        assert all(plan.excess(point) <= 1.01 for point in within)
        assert beyond
        assert plan.excess(beyond[-1]) > 1.0
        assert choice.points[-1].rate < choice.capacity
        assert (choice.largest_rate_lo is None) == (choice.policy == "oracle")
    assert plan.best is not None
    assert plan.best.policy != "oracle"
    assert all(plan.best.largest_rate >= each.largest_rate for each in plan.servable)


def test_k_is_large_for_one_request_and_small_for_four_and_by_load_takes_the_best_of_both() -> None:
    choices = by_name(moderate())
    assert choices["by_load 4"].ks[0] > choices["by_load 4"].ks[-1]
    alone = {name: choice.points[0].tpot_s for name, choice in choices.items()}
    assert alone["by_load 4"] == pytest.approx(min(alone[f"fixed {k}"] for k in KS), rel=0.02)
    held = {name: choice.capacity for name, choice in choices.items()}
    assert held["by_load 4"] >= 0.97 * max(held[f"fixed {k}"] for k in KS)
    assert held["fixed 4"] < held["fixed 0"]
    # At the least rate nearly every plain request is alone: 3.5 ms a token
    assert alone["fixed 0"] == pytest.approx(3.5e-3, rel=0.1)
    stops = moderate().stops_paying
    assert stops is None or stops > moderate().plain.points[0].rate


def test_the_same_seed_gives_the_same_plan_and_choices_see_the_same_requests() -> None:
    one = planned("rate=60", "tpot_ms=6")
    assert one == planned.__wrapped__("rate=60", "tpot_ms=6")
    other = planned("rate=60", "tpot_ms=6", "seed=1")
    assert other.plain.points[3].tpot_s != one.plain.points[3].tpot_s
    assert one.plain.rate_ratio == 1.0
    assert (one.plain.rate_ratio_lo, one.plain.rate_ratio_hi) == (1.0, 1.0)


def test_slots_of_their_own_caches_cost_more_than_those_of_one() -> None:
    unified, apart = (
        planned("rate=20", "tpot_ms=10", unified=value).plain for value in (True, False)
    )
    # Half full, active slots are not always neighbours
    middle = len(unified.points) // 2
    assert apart.points[middle].tpot_s > 1.02 * unified.points[middle].tpot_s


def test_bursts_wait_longer_than_requests_that_come_one_by_one() -> None:
    one, together = (planned("rate=20", "ttft_ms=100", f"together={n}") for n in (1, 4))
    assert (one.arrivals, together.arrivals) == ("poisson", "bursts")
    assert together.plain.points[0].ttft_s > 2 * one.plain.points[0].ttft_s
    steady = planned("rate=20", "ttft_ms=100", recorded=tuple(range(50)))
    middle = len(steady.plain.points) // 2
    assert steady.arrivals == "recorded"
    assert steady.plain.points[middle].ttft_s < one.plain.points[middle].ttft_s


def test_a_card_has_a_price_for_the_whole_rate() -> None:
    plan = planned("rate=60", "tpot_ms=6")
    best = plan.best
    assert best is not None
    assert best.usd_per_hour is not None
    assert best.usd_per_hour == 2.0 * (best.cards or 0)
    tokens_per_hour = 60 * plan.tokens * 3600
    assert best.usd_per_million_tokens == pytest.approx(1e6 * best.usd_per_hour / tokens_per_hour)


# ---- what it says --------------------------------------------------------------------------------


def test_the_answer_names_choice_and_cards_and_what_plain_decoding_needs() -> None:
    plan = moderate()
    best, plain = plan.best, plan.plain
    assert best is not None
    first, second, *_ = verdicts(plan)
    assert first.startswith("At 60 requests/s and p95 TPOT <= 6.00 ms and TTFT <= 60 ms: ")
    assert f"on {best.cards} card" in first
    assert second.startswith("One card holds ")
    swapped = replace(plan, choices=(replace(plain, cards=None), *plan.choices[1:]))
    assert verdicts(swapped)[0].endswith("without a draft no number meets it.")
    alone = tuple(replace(each, cards=None) for each in plan.choices[1:])
    assert "no draft, on " in verdicts(replace(plan, choices=(plain, *alone)))[0]


def test_a_goal_that_nothing_meets_names_the_closest_and_by_how_much_it_fails() -> None:
    plan = planned("rate=20", "tpot_ms=0.1")
    assert plan.best is None
    assert {choice.cards for choice in plan.choices} == {None}
    closest = plan.closest
    above = 100 * (closest.points[0].tpot_s / 1e-4 - 1)
    said = verdicts(plan)[0]
    assert said.startswith("Nothing meets p95 TPOT <= 0.100 ms, on any number of cards: ")
    assert f"{above:.1f} % above it" in said
    assert all(plan.excess(closest.points[0]) <= plan.excess(c.points[0]) for c in plan.servable)


@pytest.mark.usefixtures("no_plots")
def test_the_command_stores_a_plan_that_a_report_renders_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("rate=20", "tpot_ms=30", "percentile=90", "temperature=1")
    words = (f"run={FROZEN / 'server'}", *asked, *FEW)
    made = ran("plan", tmp_path, *words)
    summary = made.summary
    assert summary is not None
    plan = summary.plan
    assert plan is not None
    assert "p90 TPOT <= 30 ms" in capsys.readouterr().out
    assert {caveat.code for caveat in summary.caveats} == {
        "plan_processor_time",
        "plan_separate_passes",
    }
    report = (made.folder / "report.md").read_text(encoding="utf-8")
    lines = (made.folder / "plan.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + sum(len(choice.points) for choice in plan.choices)
    (made.folder / "report.md").unlink()
    assert outcome_of("report", f"run={made.folder}").status == 0
    assert (made.folder / "report.md").read_text(encoding="utf-8") == report
    assert load(made.folder).summary == summary
    assert outcome_of("report", f"index={tmp_path}").status == 0
    assert "At 20 requests/s and p90 TPOT" in (tmp_path / "index.html").read_text(encoding="utf-8")


# ---- what is refused -----------------------------------------------------------------------------


def refused(words: Sequence[str], says: str, run: StoredRun | None = None) -> None:
    config = compose("plan", ["run=x", "rate=20", "tpot_ms=30", *words])
    with pytest.raises(UserError) as error:
        plan_of(run or timed(), config)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rate=0", "tpot_ms=30"], "rate: 0.0 is not a number above 0"),
        (["rate=20"], "tpot_ms: no goal is given"),
        (["rate=20", "tpot_ms=3", "temperature=[0,1]"], "a plan is for one"),
        (["rate=20", "tpot_ms=-1"], "tpot_ms: -1.0 is not a number above 0"),
        (["tpot_ms=30"], "rate: no value and no default"),
        (["rate=2", "tpot_ms=3", "arrivals=x", "together=2"], "together: not with arrivals="),
    ],
)
def test_a_goal_that_cannot_be_meant_is_refused(words: list[str], says: str) -> None:
    with pytest.raises(UserError) as error:
        compose("plan", ["run=x", *words])
    assert says in str(error.value)


def test_a_run_that_does_not_say_what_requests_side_by_side_cost_is_refused() -> None:
    run = timed()
    refused([], "no R(K, B) at temperature 0", replace(run, loads=()))
    refused([], "python -m harness.server", replace(run, loads=()))
    refused([], "concurrency=[1,2,4]", replace(run, loads=()))
    refused(
        [],
        "made by sweep; name a server run, or an audition with latency_from=SERVER_RUN",
        load(FROZEN / "sweep"),
    )
    refused(["slots=8"], "timed up to 4 requests side by side")
    refused(["temperature=0.5"], "has 0, 1")
    unscored = replace(run)
    unscored.__dict__["traces"] = []
    refused([], "texts are not scored", unscored)
    # Loads that waited for a slot say nothing
    waited = tuple(replace(timing, slots=1) for timing in run.loads if timing.concurrency == 4)
    refused([], "no R(K, B)", replace(run, loads=waited))


def test_a_k_that_changes_what_is_generated_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    gates = tuple(ServedGate(0.0, k, texts=8, lossless=False) for k in KS[1:])
    config = compose("plan", ["run=x", "rate=20", "tpot_ms=30", *FEW])
    monkeypatch.setattr(ServedRun, "failed_gates", gates[1:])
    plan, caveats = plan_of(timed(), config)
    assert [each.k for each in plan.choices] == [0, 1, 1, 1, 1]
    assert {check.k for check in plan.checks} == {0, 1}
    assert caveats[0] == Caveat("plan_without_ks", {"ks": "2, 4"})
    monkeypatch.setattr(ServedRun, "failed_gates", gates)
    refused([], "every K changes what is generated at temperature 0")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1\n2\n\n1.5\n", "line 4: 1.5 comes after 2; sort the file"),
        ("1\nnoon\n", "line 2: 'noon' is no time in seconds"),
        ("5\n5\n", "needs at least two times that differ"),
        ("", "needs at least two times that differ"),
    ],
)
def test_recorded_times_that_are_out_of_order_or_none_are_refused(
    text: str, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "times.txt"
    file.write_text(text)
    with pytest.raises(UserError, match="arrivals=") as error:
        recorded_times(str(file))
    assert says in str(error.value)


def test_recorded_times_are_read_as_they_stand(tmp_path: Path) -> None:
    file = tmp_path / "times.txt"
    file.write_text("0.5\n1\n\n1\n3e0\n")
    assert recorded_times(str(file)) == [0.5, 1.0, 1.0, 3.0]
    with pytest.raises(UserError, match="cannot be read"):
        recorded_times(str(tmp_path / "no.txt"))


def test_a_dry_run_says_what_the_run_knows_and_simulates_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"run={FROZEN / 'server'}", "rate=20", "tpot_ms=30", f"results_root={tmp_path}"]
    outcome = outcome_of("plan", *words, "dry_run=true")
    assert (outcome.status, outcome.folder, [*tmp_path.iterdir()]) == (0, None, [])
    printed = capsys.readouterr().out
    assert re.search(r"requests side by side, timed\s+1, 4", printed)
    assert re.search(r"drafts\s+tiny_good", printed)
    with pytest.raises(UserError, match="name a server run, or an audition"):
        outcome_of("plan", f"run={FROZEN / 'sweep'}", *words[1:], "dry_run=true")

"""A latency goal at a rate of requests: what a stored server run says of it."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import ceil, exp, factorial
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import pytest
from runs import FROZEN, outcome_of, ran
from timed_server import KS, RATE, known_costs, plan_of, stored_timed, timed, told

from harness.analysis import analyse, plan_simulation
from harness.analysis.iteration_costs import evenly_emitted, fit_iterations
from harness.analysis.plan import caveats_of
from harness.analysis.plan_simulation import facts_of, load_checks
from harness.analysis.planned_server import Server
from harness.cli import compose
from harness.commands.plan import recorded_times
from harness.engine_facts.engines import spec_of
from harness.records import LoadTiming, UserError
from harness.reporting.content import content_of
from harness.reporting.sentences.plan import verdicts, whether_served
from harness.simulation import Costs, Request, Text, sent_at_once, simulate
from harness.storage import StoredRun, load
from harness.summary import Caveat, Plan, PlanChoice, RunFacts, ServedGate, Summary
from harness.theory.speedup import BatchTimes

FEW = ("seeds=2", "requests=100")


@cache
def planned(*words: str, recorded: tuple[float, ...] | None = None, price: float = 2.0) -> Plan:
    config = compose("plan", ["run=x", *FEW, *words])
    return plan_of(timed(), config, recorded=recorded, price=price)[0]


@cache
def usual_server() -> Server:
    return Server.of(timed(), 0.0)


def by_name(plan: Plan) -> dict[str, PlanChoice]:
    return {f"{each.policy} {each.k}": each for each in plan.choices}


def test_loads_are_simulated_again_at_costs_of_the_other_prompts() -> None:
    checks = planned("rate=20", "tpot_ms=10").checks
    assert {(check.k, check.concurrency, check.rate) for check in checks} == {
        (k, *load) for k in KS for load in ((1, None), (4, None), (None, RATE))
    }
    for check in checks:
        pairs = [
            (check.per_token, check.simulated_per_token),
            (check.first_token, check.simulated_first_token),
        ]
        for measured, simulated in pairs:
            assert measured is not None
            assert simulated is not None
            assert simulated.p50 == pytest.approx(measured.p50, rel=0.02)
            # One request more or less in an iteration moves a p95 by a few percent
            assert simulated.p95 == pytest.approx(measured.p95, rel=0.06)
        if check.concurrency:
            assert check.simulated_tokens_per_second == pytest.approx(
                check.tokens_per_second, rel=0.01
            )


def test_costs_are_found_again_from_what_the_servers_clock_says() -> None:
    expected, costs = known_costs(), usual_server().costs
    for batch, times in expected.times.by_batch.items():
        for k in KS:
            assert costs.times.at(k, batch) == pytest.approx(times.at(k), rel=0.03)
    assert costs.client_s == pytest.approx(expected.client_s, rel=0.01)
    for fitted, true in ((costs.plain, expected.plain), (costs.speculative, expected.speculative)):
        assert fitted.token_s == pytest.approx(true.token_s, rel=0.1)
        assert fitted.alone_s == pytest.approx(true.alone_s, rel=0.05)
        assert fitted.mixed_s == pytest.approx(true.mixed_s, abs=4e-4)


def moderate() -> Plan:
    return planned("rate=60", "tpot_ms=6", "ttft_ms=60")


def test_a_goal_is_met_up_to_the_largest_rate_and_the_fleet_follows_from_it() -> None:
    plan = moderate()
    assert [*by_name(plan)] == ["fixed 0", "fixed 1", "fixed 2", "fixed 4", "by_load 4"]
    for choice in plan.choices:
        assert 0.0 < choice.largest_rate < choice.capacity
        assert choice.cards == ceil(60 / choice.largest_rate - 1e-9)
        within = [point for point in choice.points if point.rate < choice.largest_rate]
        beyond = [point for point in choice.points if point.rate > choice.largest_rate]
        assert all(plan.excess(point) <= 1.01 for point in within)
        assert beyond
        assert plan.excess(beyond[-1]) > 1.0
        assert choice.points[-1].rate < choice.capacity
        assert choice.largest_rate_lo is not None
    assert plan.best is not None
    assert all(plan.best.largest_rate >= each.largest_rate for each in plan.servable)


def test_a_plan_recommends_k_by_load_only_where_the_engine_has_it() -> None:
    plan = moderate()
    # llama.cpp has one K
    assert {each.policy for each in plan.servable} == {"fixed"}
    states = {each.policy: whether_served(each) for each in plan.choices}
    assert states == {"fixed": "", "by_load": "not on this engine"}
    assert plan.best in plan.servable
    assert all("K by load" not in verdict for verdict in verdicts(plan))
    kinds = ("model", "eagle3", "dspark", "medusa")
    has = {
        name: [kind for kind in kinds if spec_of(name).has_k_by_load(kind)]
        for name in ("vllm", "sglang", "llamacpp")
    }
    assert has == {"vllm": ["model", "eagle3"], "sglang": ["eagle3"], "llamacpp": []}


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


@pytest.mark.exhaustive
def test_the_same_seed_gives_the_same_plan_and_choices_see_the_same_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goal = ("rate=60", "tpot_ms=6", "ttft_ms=60")
    one = moderate()
    with monkeypatch.context() as patch:
        patch.setattr(plan_simulation, "MOST_KEPT", 0)  # requests are drawn again, and are the same
        assert one == planned.__wrapped__(*goal)
    other = planned(*goal, "seed=1")
    assert other.plain.points[3].tpot_s != one.plain.points[3].tpot_s
    assert one.plain.rate_ratio == 1.0
    assert (one.plain.rate_ratio_lo, one.plain.rate_ratio_hi) == (1.0, 1.0)


@pytest.mark.exhaustive
def test_requests_that_come_evenly_wait_less_than_those_at_random() -> None:
    goal = ("rate=20", "tpot_ms=10")
    one = planned(*goal)
    assert one.arrivals == "poisson"
    steady = planned(*goal, recorded=tuple(range(50)))
    middle = len(steady.plain.points) // 2
    assert steady.arrivals == "recorded"
    assert steady.plain.points[middle].ttft_s < one.plain.points[middle].ttft_s


@pytest.mark.exhaustive
def test_a_draft_that_leaves_less_room_for_caches_holds_less() -> None:
    def held(*words: str) -> list[float]:
        choices = by_name(planned("rate=20", "tpot_ms=10", *words))
        return [choices[name].capacity for name in ("fixed 0", "fixed 2")]

    plain, drafting = held()
    less_plain, less_drafting = held("cache_tokens=[100000,60]")
    assert less_plain == plain
    assert less_drafting < 0.9 * drafting


def test_a_card_has_a_price_for_the_whole_rate() -> None:
    plan = moderate()
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
    assert not re.search(r"\d{3}\.\d|\d\d\.\d\d", second), "three digits at most"
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
    root = stored_timed(tmp_path)
    made = ran("plan", tmp_path, f"run={root}", *asked, *FEW)
    summary = made.summary
    assert summary is not None
    plan = summary.plan
    assert plan is not None
    assert "p90 TPOT <= 30 ms" in capsys.readouterr().out
    assert {caveat.code for caveat in summary.caveats} == {
        *("plan_few_beyond", "plan_not_measured")
    }
    report = (made.folder / "report.md").read_text(encoding="utf-8")
    # All of it is derived from what the folder stores, of which the server run is no part
    rmtree(root)
    for name in ("report.md", "summary.json"):
        (made.folder / name).unlink()
    assert outcome_of("report", f"run={made.folder}").status == 0
    assert (made.folder / "report.md").read_text(encoding="utf-8") == report
    assert load(made.folder).summary == summary
    assert outcome_of("report", f"index={tmp_path}").status == 0
    assert "At 20 requests/s and p90 TPOT" in (tmp_path / "index.html").read_text(encoding="utf-8")


def curve(texts: Sequence[Text], slots: int, requests: int, *words: str) -> plan_simulation._Curve:
    """Of plain decoding; an iteration takes 10 ms however many requests share it."""
    asked = ["run=x", "rate=1", "tpot_ms=25", f"requests={requests}", "seeds=2", *words]
    config = compose("plan", asked)
    shares = dict.fromkeys({text.prompt_set for text in texts}, 0.5)
    costs = Costs([[0.01]] * (slots + 1), 0.002, mixed_start_s=[0.002] * (slots + 1))
    choice = plan_simulation._Choice(None, "fixed", 0, [costs], [0])
    return plan_simulation._Curve(
        plan_simulation._Traffic(texts, shares, config, None), choice, config
    )


def rejected(prompt_set: str, number: int, tokens: int) -> list[Text]:
    """So many texts of which no draft token is accepted."""
    most = np.zeros(tokens, dtype=np.intp)
    return [Text(prompt_set, str(each), 100, np.zeros((tokens, 1)), most) for each in range(number)]


@pytest.mark.parametrize("slots", [4, 32])
def test_a_capacity_is_what_a_server_ends_while_more_comes(slots: int) -> None:
    of_few, of_many = (curve(rejected("a", 8, 64), slots, n) for n in (400, 6000))
    served = of_many._traffic.served(of_many.choice, 2.0 * of_few.capacity, 0)
    ended = np.sort(served.ended_s)
    sustained = 3000 / (ended[4500] - ended[1500])
    # Requests that begin together also end together, and would share their prompts' iterations
    assert of_few.capacity == pytest.approx(sustained, rel=0.03)


def test_a_percentile_is_of_the_requests_of_all_seeds() -> None:
    # One slot and texts that are alike: an M/D/1 queue, whose waits are known (Crommelin, 1932)
    service_s, load = 0.002 + 64 * 0.01, 0.6

    def share_within(services: float) -> float:
        later = (load * (n - services) for n in range(int(services) + 1))
        return (1.0 - load) * sum((x**n / factorial(n)) * exp(-x) for n, x in enumerate(later))

    of_short = curve(rejected("a", 8, 64), 1, 100, "seeds=60", "percentile=99")
    waited_s = of_short.at(load / service_s)[1] - 0.002
    assert share_within(waited_s / service_s) == pytest.approx(0.99, abs=0.003)


def test_a_plan_says_where_too_few_simulated_requests_are_beyond_its_percentile() -> None:
    server, plan = usual_server(), planned("rate=20", "tpot_ms=10")
    for percentile, requests, values in (
        (95.0, 400, None),
        (99.0, 1600, None),
        (99.0, 400, {"percentile": 99.0, "beyond": 26, "requests": 1600}),
    ):
        asked = replace(plan, percentile=percentile, seeds=8, requests=requests)
        made = {each.code: each for each in caveats_of(facts_of(server), asked)}
        few = made.get("plan_few_beyond")
        assert (few and few.values) == values


def test_a_group_of_prompts_is_replaced_by_others_of_its_set() -> None:
    texts = [*rejected("a", 4, 40), *rejected("b", 8, 160)]
    made = curve(texts, 8, 400).made()
    # Texts of a set are alike, so that other prompts would change nothing
    without = [*made.capacity_without_prompts]
    assert without == pytest.approx([made.capacity] * plan_simulation.GROUPS)


def with_others(processors: float) -> StoredRun:
    run = timed()
    return replace(run, loads=tuple(replace(each, others=processors) for each in run.loads))


def said(run: StoredRun) -> dict[str, Caveat]:
    """The caveats of a plan of other costs; which choices hold what does not matter to them."""
    server, plan = Server.of(run, 0.0), planned("rate=20", "tpot_ms=10")
    return {each.code: each for each in caveats_of(facts_of(server), plan)}


def test_loads_that_others_disturbed_are_not_compared_and_a_plan_says_so() -> None:
    quiet, disturbed = with_others(0.05), with_others(0.3)
    for run in (quiet, disturbed):
        assert ("loads_disturbed" in said(run)) == (run is disturbed)
    summary = analyse(disturbed)
    assert summary.served is not None
    assert not summary.served.schedules
    assert [each.code for each in summary.caveats].count("loads_disturbed") == 1
    assert not [*load_checks(Server.of(disturbed, 0.0), KS)]
    facts = RunFacts("plan", "", "complete", None, "tiny", "tiny_good")
    plan = planned("rate=20", "tpot_ms=10")
    of_busy = Summary(facts, plan=plan, caveats=(said(disturbed)["loads_disturbed"],))
    banner = content_of(of_busy).banner
    assert banner is not None
    assert "so no K is named" in banner
    assert content_of(replace(of_busy, caveats=())).banner is None
    # By processor time others do not count
    assert disturbed.manifest.engine is not None
    by_cpu = replace(disturbed.manifest.engine, clock="cpu")
    summary = analyse(replace(disturbed, manifest=replace(disturbed.manifest, engine=by_cpu)))
    assert summary.served is not None
    assert summary.served.schedules
    assert "loads_disturbed" not in {caveat.code for caveat in summary.caveats}


@pytest.mark.exhaustive
def test_a_server_may_count_more_rounds_than_emitted_tokens() -> None:
    run = timed()
    loads = [
        replace(each, rounds=(each.returned[0], *each.rounds[1:])) if each.k else each
        for each in run.loads
    ]
    costs, usual = Server.of(replace(run, loads=tuple(loads)), 0.0).costs, usual_server().costs
    for k in KS:
        assert costs.times.at(k, 1) == pytest.approx(usual.times.at(k, 1), rel=0.05)


def slowed(timing: LoadTiming, factor: float) -> LoadTiming:
    """The load on a machine that took so many times as long for everything, arrivals too."""

    def times(seconds: Sequence[float | None]) -> tuple[Any, ...]:
        return tuple(factor * (each or 0.0) for each in seconds)

    return replace(
        timing,
        seconds=factor * timing.seconds,
        user_s=times(timing.user_s),
        user_decode_s=times(timing.user_decode_s),
        user_prefill_s=times(timing.user_prefill_s),
        due_s=times(timing.due_s),
        sent_s=times(timing.sent_s),
        alone_s=(0.0098 * factor, 0.0102 * factor),
    )


@pytest.mark.exhaustive
def test_a_machine_that_was_slow_in_some_loads_is_known_by_what_it_decoded_alone() -> None:
    steady = timed()
    phases = [1.0, 1.0, 1.4]
    loads = tuple(slowed(each, phases[row % 3]) for row, each in enumerate(steady.loads))
    run = replace(steady, loads=loads)
    usual, known = usual_server().costs, Server.of(run, 0.0).costs
    for batch, k in product((1, 2, 3, 4), KS):
        assert known.times.at(k, batch) == pytest.approx(usual.times.at(k, batch), rel=0.02)
    assert max(map(abs, _errors(run))) < 0.05
    # Without the reference these loads disagree
    blind = replace(run, loads=tuple(replace(each, alone_s=()) for each in loads))
    assert max(map(abs, _errors(blind))) > 0.05


def _errors(run: StoredRun) -> list[float]:
    """Of the simulated median time per output token, by load; simulated / measured - 1."""
    errors: list[float] = []
    for check in load_checks(Server.of(run, 0.0), KS):
        assert check.per_token is not None
        assert check.simulated_per_token is not None
        measured, simulated = check.per_token.p50, check.simulated_per_token.p50
        assert measured is not None
        assert simulated is not None
        errors.append(simulated / measured - 1.0)
    assert len(errors) == 3 * len(KS)
    return errors


def test_references_that_share_nothing_change_nothing() -> None:
    steady = timed()
    loads = tuple(
        replace(each, alone_s=[(0.01, 0.012), (0.012, 0.01)][row % 2])
        for row, each in enumerate(steady.loads)
    )
    server = Server.of(replace(steady, loads=loads), 0.0)
    assert {server.pace(each) for each in loads} == {1.0}


@pytest.mark.exhaustive
def test_costs_add_up_to_what_all_requests_took_together() -> None:
    """Medians alone would not know that the machine is slow for a third of the time."""
    steady = timed()
    loads = tuple(
        replace(slowed(each, [1.0, 1.0, 1.3][row % 3]), alone_s=())
        for row, each in enumerate(steady.loads)
    )
    usual, found = usual_server().costs, Server.of(replace(steady, loads=loads), 0.0).costs
    # A third of the loads, of about a third of the time
    more = [found.times.at(k, b) / usual.times.at(k, b) for k in KS for b in (1, 2, 3, 4)]
    assert 1.05 < float(np.median(more)) < 1.2


@pytest.mark.exhaustive
def test_loads_at_a_rate_of_servers_with_more_slots_are_not_compared() -> None:
    run = timed()

    def on(slots: int) -> StoredRun:
        return replace(
            run,
            loads=tuple(replace(each, slots=slots) if each.rate else each for each in run.loads),
        )

    rates = [{check.rate for check in load_checks(Server.of(on(n), 0.0), KS)} for n in (4, 8)]
    assert rates == [{None, RATE}, {None}]
    of_more = said(on(8))["plan_not_measured"].values
    assert (of_more["slots"], of_more["slots_timed"], of_more["largest_rate"]) == ("8", 4, None)
    assert said(on(4))["plan_not_measured"].values["slots"] is None


@pytest.mark.exhaustive
def test_a_plan_beyond_what_was_measured_says_so() -> None:
    run = timed()
    beyond = said(run)["plan_not_measured"].values
    assert beyond["rate"] is not None
    assert beyond["largest_rate"] == RATE
    assert (beyond["slots"], beyond["context"], beyond["mean_prompts"]) == (None, None, False)
    closed = tuple(each for each in run.loads if each.rate is None)
    none = said(replace(run, loads=closed))["plan_not_measured"].values
    assert none["largest_rate"] is None
    measured = tuple(replace(each, rate=1000.0) if each.rate else each for each in run.loads)
    assert "plan_not_measured" not in said(replace(run, loads=measured))
    least = min(sum(each.budgets) for each in closed)
    few = tuple(each for each in closed if sum(each.budgets) < 3 * least)
    context = said(replace(run, loads=few))["plan_not_measured"].values
    assert int(str(context["context"])) > int(str(context["context_timed"]))


@pytest.mark.exhaustive
def test_percentiles_have_in_them_what_prefills_take_more_or_less_than_they_cost() -> None:
    run, random = timed(), np.random.default_rng(6)
    usual_s = float(np.median([each for line in run.loads for each in line.user_prefill_s if each]))

    def scattered(timing: LoadTiming) -> LoadTiming:
        prefill_s = np.array(timing.user_prefill_s, dtype=np.float64)
        more_s = random.uniform(-0.5, 0.5, len(prefill_s)) * usual_s
        more_s = np.maximum(more_s, -prefill_s / 2.0)
        return replace(
            timing,
            user_s=tuple((timing.user_s + more_s).tolist()),
            user_prefill_s=tuple((prefill_s + more_s).tolist()),
        )

    made = replace(run, loads=tuple(map(scattered, run.loads)))
    server, exact = Server.of(made, 0.0), usual_server()
    for costs, spread in ((server.costs, 0.3), (exact.costs, 0.0)):
        assert np.std(costs.prefill_scatter_s) == pytest.approx(spread * usual_s, abs=0.1 * usual_s)
    alone = {c.k: c for c in plan_simulation.load_checks(server, KS) if c.concurrency == 1}
    at_costs = {c.k: c for c in plan_simulation.load_checks(exact, KS) if c.concurrency == 1}
    assert {*alone} == {*KS}
    for k, check in alone.items():
        each = check.first_token, check.simulated_first_token, at_costs[k].simulated_first_token
        waits, simulated, without = (percentiles.p95 for percentiles in each if percentiles)
        assert simulated == pytest.approx(waits, rel=0.15)
        assert simulated is not None
        assert without is not None
        assert simulated > 1.1 * without


def test_costs_of_a_context_are_found_where_texts_differ_in_length() -> None:
    costs = replace(known_costs(), context_tokens=300.0, context_token_s=2e-6)
    random, loads = np.random.default_rng(3), []
    for k, concurrency, repeat in product(KS, (1, 2, 4), range(2)):
        tokens = random.integers(30, 60, 24)
        prompts = random.choice([20, 900], 24)
        sent = [
            evenly_emitted(int(prompt), int(size), int(size if not k else 0.6 * size), most)
            for prompt, size in zip(prompts, tokens, strict=True)
            for most in [np.full(size, k, dtype=np.intp)]
        ]
        arrivals = sent_at_once(24, concurrency)
        done = simulate(sent, arrivals, costs.priced(4, 4)[min(k, 1)], [k], concurrency)
        load = replace(
            timed().loads[0],
            visit=repeat,
            k=k,
            concurrency=concurrency,
            texts=tuple(map(str, range(24))),
            rounds=tuple(done.rounds.tolist()),
        )
        loads.append((told(load, done), sent))
    fitted = fit_iterations(loads, 4, mixes=True)
    assert fitted is not None
    assert fitted.context_token_s == pytest.approx(2e-6, rel=0.1)
    at = fitted.context_token_s * (fitted.context_tokens - 300.0)
    for batch, k in product((1, 2, 3, 4), KS):
        expected = known_costs().times.at(k, batch) + batch * at
        assert fitted.times.at(k, batch) == pytest.approx(expected, rel=0.05)


def test_costs_of_rounds_in_which_a_lookup_finds_nothing_are_found_by_iterations() -> None:
    known, ks = known_costs(), (2, 4)
    by_batch = {
        b: replace(times, round_s=((0, 1.3 * times.plain_s), *times.round_s))
        for b, times in known.times.by_batch.items()
    }
    costs = replace(known, times=BatchTimes(by_batch))
    random, loads = np.random.default_rng(3), []
    for k, concurrency, repeat in product((0, *ks), (1, 2, 3, 4), range(2)):
        sizes = random.integers(30, 60, 24).tolist()
        sent = []
        for size in sizes:
            found = np.where(random.random(size) < 0.6, 0, k)
            sent.append(Request(20, np.minimum(random.integers(0, 5, size), found), found))
        done = simulate(
            sent,
            sent_at_once(24, concurrency),
            costs.priced(4, 4)[min(k, 1)],
            [k],
            concurrency,
        )
        load = replace(
            timed().loads[0],
            visit=repeat,
            draft="ngram",
            k=k,
            concurrency=concurrency,
            texts=tuple(map(str, range(24))),
            rounds=tuple(done.rounds.tolist()),
        )
        loads.append((told(load, done), sent))
    fitted = fit_iterations(loads, 4, mixes=True)
    assert fitted is not None
    for batch, n in product((1, 2, 3, 4), (0, *ks)):
        assert fitted.times.at(n, batch) == pytest.approx(costs.times.at(n, batch), rel=0.02)
        plain_s = costs.times.plain.at(0, batch)
        assert fitted.times.plain.at(0, batch) == pytest.approx(plain_s, rel=0.02)
    plain, speculative = fitted.priced(4, 4)
    assert plain.iteration_s[2][0] < speculative.iteration_s[2][0]


# ---- what is refused -----------------------------------------------------------------------------


def refused(words: Sequence[str], says: str, run: StoredRun | None = None) -> None:
    config = compose("plan", ["run=x", "rate=20", "tpot_ms=30", *words])
    with pytest.raises(UserError) as error:
        plan_of(run or timed(), config)
    assert says in str(error.value)


def test_a_run_that_does_not_say_what_requests_side_by_side_cost_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = timed()
    refused([], "timed no requests side by side at temperature 0", replace(run, loads=()))
    refused([], "python -m harness.server", replace(run, loads=()))
    refused([], "concurrency=[1,2,4]", replace(run, loads=()))
    refused(
        [],
        "made by sweep; name a server run with concurrency=[1,2,4]",
        load(FROZEN / "sweep"),
    )
    refused(["slots=8"], "timed up to 4 requests side by side")
    monkeypatch.setattr(plan_simulation, "REQUESTS_PER_SLOT", 200)
    refused(["requests=400"], "too few to keep 4 slots busy; give requests=800 or more")
    refused(["temperature=0.5"], "has 0, 1")
    unscored = replace(run)
    unscored.__dict__["traces"] = []
    refused([], "texts are not scored", unscored)
    # Loads that waited for a slot say nothing
    waited = tuple(replace(timing, slots=1) for timing in run.loads if timing.concurrency == 4)
    refused([], "no requests side by side", replace(run, loads=waited))
    refused([], "by processor time; run it again with clock=engine", load(FROZEN / "server"))
    assert run.manifest.engine is not None
    lines = [replace(each, line="llama-server") for each in run.manifest.engine.commands]
    apart = replace(run.manifest.engine, commands=tuple(lines))
    apart_run = replace(run, manifest=replace(run.manifest, engine=apart))
    refused([], "measure it again without flags=[--no-kv-unified]", apart_run)
    untold = tuple(replace(timing, user_prefill_s=()) for timing in run.loads)
    refused([], "this llama.cpp does not tell them", replace(run, loads=untold))


def test_a_k_that_changes_what_is_generated_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    gates = tuple(ServedGate(0.0, k, texts=8, lossless=False) for k in KS[1:])
    config = compose("plan", ["run=x", "rate=20", "tpot_ms=30", *FEW])
    monkeypatch.setattr("harness.analysis.planned_server.gates", lambda _: gates[1:])
    plan, caveats = plan_of(timed(), config)
    assert [each.k for each in plan.choices] == [0, 1, 1]
    assert {check.k for check in plan.checks} == {0, 1}
    assert caveats[0] == Caveat("k_left_out", {"ks": "2, 4", "why": "not_lossless"})
    monkeypatch.setattr("harness.analysis.planned_server.gates", lambda _: gates)
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
    results = tmp_path / "results"
    run = stored_timed(tmp_path, rates=False)
    words = [f"run={run}", "rate=20", "tpot_ms=30", f"results_root={results}"]
    outcome = outcome_of("plan", *words, "dry_run=true")
    assert (outcome.status, outcome.folder, results.exists()) == (0, None, False)
    printed = capsys.readouterr().out
    assert re.search(r"requests side by side, timed\s+1, 4", printed)
    assert re.search(r"draft\s+tiny_good", printed)
    # What was not measured, each with the command that does
    told = " ".join(printed.split())
    assert "missing: waits at a rate" in told
    assert "python -m harness.server engine=llamacpp" in told
    with pytest.raises(UserError, match="name a server run with concurrency"):
        outcome_of("plan", f"run={FROZEN / 'sweep'}", *words[1:], "dry_run=true")

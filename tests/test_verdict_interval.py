"""A verdict from replayed rounds and measured pairs: by hand, against scipy, and simulated."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from simulated_sweeps import TRUTHS, Design, at_look, simulated, two_phases, verdict_on

from harness.analysis.verdict import closed, in_turn
from harness.stats.jackknife import Interval, exponential, log_speedup
from harness.stats.verdict_interval import (
    BLOCKS,
    DRIFTS,
    LOOKS,
    Pairs,
    TwoPhase,
    largest_quantile,
    look_shares,
    nominal_error,
    spread_winsorised,
    two_phase,
)
from harness.stats.workload import Workload, visit_error
from harness.summary import Answer

ALL = Design(64, 26)


def pairs(log_prices, cost=1.0) -> Pairs:
    """Pairs of the first prompts, whose rounds took so much longer than predicted."""
    ones = np.ones(len(log_prices))
    return beside(np.exp(log_prices) * cost, cost * ones, ones, ones)


def beside(*columns) -> Pairs:
    """Seconds and costs, and seconds and tokens of plain decoding, of the first prompts."""
    return Pairs(tuple(range(len(columns[0]))), *columns)


def workload(seconds, **changes) -> Workload:
    """[candidate, prompt] predicted seconds of texts for which plain decoding takes 1."""
    ones = np.ones(seconds.shape)
    return Workload(ones[0], ones[0], seconds, ones, ("s",) * len(ones[0]), **changes)


def judged(work: Workload, measured: Pairs | None = None, candidate=None, seed=0) -> TwoPhase:
    candidate = 0 if measured is not None and candidate is None else candidate
    fit = two_phase(work, measured, candidate=candidate, seed=seed)
    assert fit is not None
    return fit


def interval_of(*columns) -> Interval:
    """The jackknife's, of a speedup."""
    interval = exponential(log_speedup(*columns).interval(skew=True))
    assert interval is not None
    return interval


# The estimate


def test_the_log_speedup_is_that_of_the_rounds_less_what_they_cost_more_than_predicted():
    seconds = np.full((1, 16), 0.5)
    fit = judged(workload(seconds), pairs(np.full(8, 0.1)))
    assert fit.scores == pytest.approx([math.log(2.0) - 0.1])
    assert fit.optimism == 0.0
    assert fit.interval(0.95) == pytest.approx((fit.speedup, fit.speedup))


def test_round_times_that_are_wrong_change_nothing():
    rng = np.random.default_rng(0)
    seconds, prices = rng.uniform(0.3, 0.9, (3, 24)), rng.normal(0.0, 0.1, 12)
    right = judged(workload(seconds), pairs(prices))
    wrong = judged(workload(0.7 * seconds), pairs(prices - math.log(0.7), cost=0.7))
    assert wrong.scores == pytest.approx(right.scores)
    assert wrong.interval(0.95) == pytest.approx(right.interval(0.95))


def test_a_disturbed_generation_moves_the_price_no_further_than_its_neighbours():
    prices = np.arange(-4.0, 6.0)
    values = spread_winsorised(np.append(prices[:-1], 1e6))
    middle = np.median(prices)
    kept = middle + np.clip(prices - middle, -2.5, 2.5)
    assert values.mean() == pytest.approx(kept.mean())
    # Dixon and Tukey: 6 of 10 values are as they were
    assert values.std() == pytest.approx(kept.std() * 9 / 5)
    few = np.array([1.0, 2.0, 9.0])
    assert spread_winsorised(few) == pytest.approx(few)


def test_the_variance_is_that_of_the_rounds_and_of_the_price():
    rng = np.random.default_rng(3)
    logs, prices = rng.normal(0.0, 0.2, 40), rng.normal(0.0, 0.05, 6)
    fit = judged(workload(np.exp(logs)[None]), pairs(prices))
    # Blocks of time of one pair each are the pairs
    by_hand = stats.sem(spread_winsorised(prices)) ** 2
    assert fit.of_named(fit.timing).value == pytest.approx(by_hand)
    both = stats.sem(np.exp(logs)) ** 2 / np.exp(logs).mean() ** 2 + by_hand
    assert fit.variance.value == pytest.approx(both, rel=0.15)


def test_drift_that_the_scatter_of_the_pairs_does_not_show_widens_the_interval():
    rng = np.random.default_rng(0)
    steady = rng.normal(0.0, 0.05, 40)
    work = workload(np.exp(rng.normal(0.0, 0.2, (1, 40))))
    mixed, drifting = (judged(work, pairs(each)) for each in (steady, np.sort(steady)))
    timing, drift = (fit.of_named(fit.timing) for fit in (mixed, drifting))
    assert drift.value > 1.5 * timing.value
    assert drift.degrees == pytest.approx(BLOCKS - 1)
    # The same pairs: what the blocks add comes on top of the rounds' part, once
    rest = mixed.variance.value - timing.value
    assert drifting.variance.value == pytest.approx(rest + drift.value, rel=0.2)


def test_what_disturbs_one_side_of_a_pair_leaves_the_other_side_as_it_is():
    rng = np.random.default_rng(2)
    slow, plain = rng.normal(0.0, 0.05, (2, 40))
    price = beside(np.exp(slow), np.ones(40), np.exp(plain), np.ones(40)).log_prices
    disturbed = np.exp(slow)
    disturbed[::9] *= 5.0
    moved = beside(disturbed, np.ones(40), np.exp(plain), np.ones(40)).log_prices
    assert abs(moved.mean() - price.mean()) < 0.02
    assert stats.sem(moved) < 1.3 * stats.sem(price)


def test_drift_in_common_is_kept_where_outliers_are_taken_off():
    drift = np.linspace(0.0, 1.0, 60)
    values = spread_winsorised(drift)
    assert values == pytest.approx(drift, abs=0.1)
    assert np.std(values[5:-5] - drift[5:-5]) < 0.01


def test_few_blocks_that_differ_by_chance_do_not_widen_the_interval():
    rng = np.random.default_rng(1)
    work = workload(np.exp(rng.normal(0.0, 0.2, (1, 40))))
    fits = [judged(work, pairs(rng.normal(0.0, 0.05, 40))) for _ in range(100)]
    by_blocks = [math.isclose(fit.timing.degrees[0], BLOCKS - 1) for fit in fits]
    # As often as the test is wrong
    assert np.mean(by_blocks) < DRIFTS + 3 * np.sqrt(DRIFTS * (1 - DRIFTS) / len(fits))


def test_pairs_of_prompts_outside_the_workload_tell_its_price():
    """One set is judged at the price that all pairs measured."""
    work = workload(np.exp(np.random.default_rng(0).normal(0.0, 0.1, (1, 12))))
    inside = pairs(np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.5]))
    outside = replace(inside, prompts=tuple(range(12, 18)))
    inside, outside = judged(work, inside), judged(work, outside)
    assert inside.scores == pytest.approx(outside.scores)
    assert inside.timing.value == pytest.approx(outside.timing.value)


def test_too_few_prompts_replayed_or_measured_have_no_interval():
    seconds = np.exp(np.random.default_rng(0).normal(0.0, 0.1, (1, 12)))
    few = replace(pairs(np.zeros(12)), prompts=(0,) * 12)
    assert two_phase(workload(seconds), few, candidate=0, seed=0) is None
    assert two_phase(workload(seconds[:, :6]), pairs(np.zeros(6)), candidate=0, seed=0) is None


# The choice


def test_a_single_candidate_has_its_own_speedup_and_the_jackknifes_interval():
    """But for the term for skew, which puts the lower bound further off."""
    rng = np.random.default_rng(0)
    seconds = np.exp(rng.normal([[-0.5]], 0.05, (1, 16)))
    fit = judged(workload(seconds))
    assert fit.named == 0
    assert fit.speedup == pytest.approx(16 / seconds[0].sum())
    ones = np.ones(16)
    expected = interval_of(ones, ones, seconds[0], ones)
    found = fit.interval(0.95)
    assert found.hi == pytest.approx(expected.hi)
    assert found.lo == pytest.approx(expected.lo)


def test_a_candidate_that_is_clearly_the_best_pays_nothing_for_the_choice():
    rng = np.random.default_rng(0)
    seconds = np.exp(rng.normal([[-0.5], [0.2]], 0.05, (2, 16)))
    alone, of_two = (judged(workload(each)) for each in (seconds[:1], seconds))
    assert of_two.interval(0.95) == pytest.approx(alone.interval(0.95))


def test_the_optimism_of_choosing_is_taken_off():
    """Each candidate is fast on one prompt only, another one for each."""
    seconds = np.where(np.eye(16), 0.2, 1.1)
    fit = judged(workload(seconds))
    assert 16 / seconds[0].sum() == pytest.approx(0.96, abs=0.01)
    assert fit.speedup < 0.93


def test_a_lucky_visit_that_favours_one_candidate_is_neither_trusted_nor_forgotten():
    """Rounds of the second candidate were fast in two visits of six; that is all its lead."""
    seconds = np.stack([np.ones(16), np.full(16, 0.95)])
    costs = np.ones((2, 6))
    costs[1, :2] = 0.75
    timing = (visit_error(costs / costs.mean(axis=1, keepdims=True)),)
    fit, exact = (judged(workload(seconds, timing=each)) for each in (timing, ()))
    assert (exact.interval(0.95).lo > 1.0, fit.interval(0.95).lo > 1.0) == (True, False)
    assert fit.of_named(fit.timing).value > 0.0


def test_draws_vary_as_the_intervals_say_and_share_what_candidates_share():
    rng = np.random.default_rng(0)
    shared, apart = rng.normal(0.0, 0.2, 24), rng.normal(0.0, 0.02, (2, 24))
    costs = 1.0 + 0.03 * rng.normal(size=(1, 12))
    timing = (visit_error(costs / costs.mean()).among(2, [1]),)
    work = workload(np.exp(shared + apart), timing=timing)
    drawn = work.drawn(20_000, 0)
    assert drawn.mean(axis=0) == pytest.approx(work.log_speedups.value, abs=0.002)
    assert drawn.var(axis=0) == pytest.approx(work.variance().value, rel=0.05)
    assert (drawn[:, 0] - drawn[:, 1]).std() < 0.8 * drawn[:, 0].std()


def test_the_best_of_eight_nulls_would_win_far_more_often_on_the_prompts_it_was_chosen_on():
    """The reason for bounds that allow for the choice."""
    plain, fitted, size, simulations = 0, 0, 16, 100
    sets = ("easy",) * 8 + ("hard",) * 8
    tokens = np.full(size, 48.0)
    for seed in range(simulations):
        rng = np.random.default_rng(seed)
        baseline = np.exp(rng.normal(0.0, 0.1, size))
        seconds = np.exp(rng.normal(0.0, 0.1, size) + rng.normal(0.0, 0.2, (8, size)))
        work = Workload(baseline, tokens, seconds, np.tile(tokens, (8, 1)), sets)
        best = seconds[int(np.argmax(work.log_speedups.value))]
        chosen = interval_of(baseline, tokens, best, tokens, work.prompt_sets)
        plain += chosen.lo > 1.0
        fitted += judged(work, seed=seed).interval(0.95).lo > 1.0
    assert fitted <= simulations * 0.05
    assert plain > 2 * fitted + 5


def test_the_best_of_ties_is_too_high_by_what_the_choice_adds():
    rng = np.random.default_rng(1)
    seconds = np.exp(rng.normal(0.0, 0.1, (8, 64)))
    fits = [judged(workload(seconds), pairs(np.zeros(8)), candidate=k) for k in range(8)]
    # The mean of the largest of eight normal numbers, of the same size as the scores' errors
    assert 0.4 < fits[0].optimism / (0.1 / 8.0) < 1.5
    apart = judged(workload(seconds * np.linspace(1.0, 2.0, 8)[:, None]), pairs(np.zeros(8)))
    assert abs(apart.optimism) < 0.002


@pytest.mark.parametrize("error", [0.0125, 1e-6])
def test_the_largest_of_independent_errors_is_sidaks(error):
    quantile = largest_quantile(np.eye(8), 1e6, error, 0)
    assert quantile == pytest.approx(stats.norm.isf(-np.expm1(np.log1p(-error) / 8)), abs=0.02)


def test_errors_in_common_are_one_and_few_prompts_widen_it():
    shared = np.ones((8, 8))
    assert largest_quantile(shared, 9.0, 0.01, 0) == pytest.approx(stats.t.isf(0.01, 9), abs=0.02)
    rng = np.random.default_rng(0)
    errors = np.concatenate([np.full((8, 4), 1.0), rng.normal(0.0, 1.0, (8, 4))], axis=1)
    unit = errors / np.linalg.norm(errors, axis=1, keepdims=True)
    # Means of ten samples, each over its own standard error
    drawn = (rng.standard_normal((1_000_000, 8), np.float32) @ unit.T).reshape(-1, 10, 8)
    largest = (drawn.mean(axis=1) * math.sqrt(10.0) / drawn.std(axis=1, ddof=1)).max(axis=1)
    expected = np.quantile(largest, 0.99)
    assert largest_quantile(errors @ errors.T, 9.0, 0.01, 0) == pytest.approx(expected, rel=0.03)


def test_what_other_candidates_cost_is_known_from_visits_alone():
    rng = np.random.default_rng(0)
    seconds = np.exp(rng.normal(0.1, 0.01, (2, 40)))
    costs = 1.0 + 0.2 * rng.normal(size=(2, 12))
    timing = (visit_error(costs / costs.mean(axis=1, keepdims=True)),)
    exact = judged(workload(seconds), pairs(np.zeros(8)))
    fit = judged(workload(seconds, timing=timing), pairs(np.zeros(8)))
    assert fit.variance.value == pytest.approx(exact.variance.value)
    assert (exact.ceiling(0.95) < 1.0, fit.ceiling(0.95) < 1.0) == (True, False)


# Looks


def test_by_every_look_the_square_of_its_share_of_the_error_is_spent():
    """By the distribution of all statistics so far, which has its own integral in scipy."""
    shares = np.arange(1, LOOKS + 1) / LOOKS
    errors = [nominal_error(0.025, look_shares(n + 1)) for n in range(LOOKS)]
    bounds = np.asarray(stats.norm.isf(errors))
    covariance = np.sqrt(np.minimum.outer(shares, shares) / np.maximum.outer(shares, shares))
    for look in range(1, LOOKS + 1):
        inside = stats.multivariate_normal(cov=covariance[:look, :look], seed=0)
        spent = 1.0 - inside.cdf(bounds[:look])
        assert spent == pytest.approx(0.025 * shares[look - 1] ** 2, abs=2e-5)


def test_a_run_without_looks_spends_all_of_its_error():
    assert nominal_error(0.0125, (1.0,)) == pytest.approx(0.0125)


@pytest.mark.parametrize("error", [0.0125, 1e-5])
def test_looks_err_as_often_as_they_may(error):
    """By importance sampling: the drift that makes crossing likely, weighed back."""
    rng, size, drift = np.random.default_rng(0), 200_000, stats.norm.isf(error)
    steps = rng.normal(drift / LOOKS, math.sqrt(1.0 / LOOKS), (size, LOOKS))
    paths = steps.cumsum(axis=1)
    shares = np.arange(1, LOOKS + 1) / LOOKS
    errors = [nominal_error(error, look_shares(look)) for look in range(1, LOOKS + 1)]
    crossed = (paths > stats.norm.isf(errors) * np.sqrt(shares)).any(axis=1)
    weights = np.exp(-drift * paths[:, -1] + drift**2 / 2.0)
    assert (crossed * weights).mean() == pytest.approx(error, rel=0.03)


def test_bounds_fall_from_look_to_look():
    evidence = two_phases(np.random.default_rng(0), "plain", ALL, TRUTHS["1.10x"], 1.0)
    errors = [nominal_error(0.0125, look_shares(look)) for look in range(1, LOOKS + 1)]
    assert errors == sorted(errors)
    widths = [
        math.log(verdict.speedup_hi / verdict.speedup_lo)
        for look in range(1, LOOKS + 1)
        for verdict in [verdict_on(at_look(evidence, look), "all", 0.0125)]
        if verdict.speedup_hi is not None and verdict.speedup_lo is not None
    ]
    assert widths == sorted(widths, reverse=True)


# Verdicts


def test_the_measured_k_is_named_and_decided_by_its_own_bound():
    evidence = two_phases(np.random.default_rng(0), "plain", ALL, 1.5 * TRUTHS["1.20x"], 1.0)
    assert evidence.pairs is not None
    assert evidence.named is not None
    verdict = verdict_on(evidence, "all", 0.0125)
    assert (verdict.decision, verdict.draft, verdict.k) == (
        "speculate",
        *evidence.named[:2],
    )
    slower = replace(evidence.pairs, seconds=4.0 * evidence.pairs.seconds)
    assert verdict_on(replace(evidence, pairs=slower), "all", 0.0125).decision == "does_not_pay"
    assert verdict_on(evidence, "easy", 0.0125).decision == "speculate"


def test_a_decision_holds_at_every_larger_error():
    evidence = two_phases(np.random.default_rng(5), "plain", ALL, TRUTHS["1.10x"], 1.0)
    decisions = [
        verdict_on(evidence, "all", error).decision for error in np.geomspace(1e-6, 0.3, 12)
    ]
    assert decisions == sorted(decisions, key=["undecided", "speculate"].index)
    assert len(set(decisions)) == 2


def test_sets_come_after_the_workload_and_leave_their_part_to_the_others():
    asked: list[tuple[str, float]] = []

    def decided_if(least: dict[str, float]):
        def verdict_on_set(name: str, error: float) -> Answer:
            asked.append((name, round(error, 9)))
            verdict = Answer.undecided(0.0, name, "interval_spans_one", {})
            return replace(verdict, decision="speculate") if error >= least[name] else verdict

        return verdict_on_set

    never = {"all": 1.0, "a": 1.0, "b": 1.0}
    verdicts = [*in_turn(decided_if(never), ("a", "b"), 0.02)]
    assert asked == [("all", 0.018), ("a", 0.001), ("b", 0.001)]
    assert [verdict.prompt_set for verdict in verdicts] == ["all", "a", "b"]
    asked.clear()
    assert len([*in_turn(decided_if({**never, "all": 0.0, "b": 0.0}), ("a", "b"), 0.02)]) == 3
    assert asked == [("all", 0.018), ("a", 0.01), ("b", 0.01), ("a", 0.02)]
    asked.clear()
    assert len([*in_turn(decided_if(never), (), 0.02)]) == 1
    assert asked == [("all", 0.02)]


def test_a_run_may_stop_where_nothing_would_change():
    verdict = Answer.undecided(0.0, "all", "interval_spans_one", {})
    assert not closed(verdict)
    assert closed(replace(verdict, reason="near_one"))
    assert closed(replace(verdict, decision="does_not_pay"))


def test_intervals_hold_the_truth_and_ties_seldom_win():
    ties = simulated("plain", "near ties", ALL, 30, [1])
    gain = simulated("heavy tails", "1.20x", ALL, 10, [1])
    assert ties["reports with speculate"] <= 2
    assert gain["workload speculate"] >= 0.9 * gain["workload verdicts"]
    for kind in ("workload", "set"):
        covered, number = (ties[f"{kind} {name}"] for name in ("covered", "intervals"))
        assert covered >= 0.9 * number
    assert gain["looks"] < LOOKS * gain["reports"]


def test_texts_count_in_the_price_by_what_their_tokens_cost():
    """As in the ratio of sums, where rounds that accept more take longer."""
    cost = np.tile([10.0, 30.0], 16)
    pairs = beside(cost * np.tile([1.2, 1.0], 16), cost, np.full(32, 20.0), np.full(32, 20.0))
    kept = pairs.log_prices
    assert pairs.log_price == pytest.approx((kept[::2].mean() + 3 * kept[1::2].mean()) / 4)


def test_what_measured_rounds_cost_beyond_their_price_is_in_every_candidates_speedup():
    evidence = two_phases(np.random.default_rng(2), "R biased 3 %", ALL, TRUTHS["1.20x"], 1.0)
    answer = verdict_on(evidence, "all", 0.0125)
    beyond = [each.speedup / each.predicted for each in answer.candidates]
    assert beyond == pytest.approx([beyond[0]] * len(beyond))
    assert abs(beyond[0] - 1.0) > 0.01
    (named,) = (each for each in answer.candidates if (each.draft, each.k) == answer.named)
    assert named.source == "measured"
    assert named.speedup == pytest.approx(answer.speedup, rel=0.02), "but for the optimism"

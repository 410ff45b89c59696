"""The bootstrap, the error of a ratio, and cross-fitting: against scipy, by hand and simulated."""

import math

import numpy as np
import pytest
from scipy import stats

from harness.records import UserError
from harness.stats import ratios
from harness.stats.bootstrap import (
    CONFIDENCE,
    MIN_PROMPTS,
    Interval,
    expanded_level,
    only,
    ratio_interval,
    resample,
    set_weights,
    speedup_interval,
)
from harness.stats.crossfit import Workload, cross_fit, deal_folds

SETS = ("easy",) * 12 + ("hard",) * 20


def prompts(rng, size, effect=1.0, noise=0.1):
    """Seconds and tokens of both runs of `size` prompts; prompts differ much, a pair little."""
    baseline = rng.gamma(4.0, 0.25, size)
    seconds = baseline / effect * np.exp(rng.normal(-(noise**2) / 2, noise, size))
    return baseline, np.full(size, 48.0), seconds, np.full(size, 48.0)


def width(interval: Interval | None) -> float:
    assert interval is not None
    return interval.hi - interval.lo


# The bootstrap


@pytest.mark.parametrize("sets", [("",) * 32, SETS])
def test_the_interval_is_the_bca_of_scipy_at_the_expanded_level(sets):
    rng = np.random.default_rng(0)
    accepted, judged = rng.gamma(2.0, 1.0, 32), rng.gamma(9.0, 1.0, 32)
    rows = [np.flatnonzero(np.array(sets) == name) for name in sorted(set(sets))]

    def pooled(*samples, axis):
        picked = [row[sample.astype(int)] for row, sample in zip(rows, samples, strict=True)]
        above, below = (sum(x[p].sum(axis) for p in picked) for x in (accepted, judged))
        return above / below

    expected = stats.bootstrap(
        [np.arange(len(row)) for row in rows],
        pooled,
        n_resamples=4000,
        confidence_level=expanded_level(32, len(rows)),
        rng=np.random.default_rng(5),
    ).confidence_interval
    assert ratio_interval(accepted, judged, sets, seed=5) == pytest.approx(tuple(expected))


def test_intervals_of_few_prompts_cover_the_truth_as_often_as_they_say():
    """Prompts of uneven length are hard on a ratio: a level not widened misses 14 % of the time."""
    rng = np.random.default_rng(1)
    missed = 0
    for _ in range(300):
        interval = speedup_interval(*prompts(rng, MIN_PROMPTS, 1.3, 0.2))
        assert interval is not None
        missed += not interval.lo <= 1.3 <= interval.hi
    assert missed / 300 <= 0.11


def test_the_level_widens_for_few_prompts_and_tends_to_95_percent():
    quantile = stats.t.ppf(0.975, 14) * math.sqrt(16 / 14)
    assert expanded_level(16, 2) == pytest.approx(2 * stats.norm.cdf(quantile) - 1)
    assert expanded_level(100_000, 2) == pytest.approx(CONFIDENCE, abs=1e-4)


def test_a_prompts_two_runs_are_resampled_together():
    rng = np.random.default_rng(2)
    baseline, tokens, seconds, _ = prompts(rng, 24, 1.3, noise=0.02)
    paired = speedup_interval(baseline, tokens, seconds, tokens)
    broken = speedup_interval(baseline, tokens, seconds[rng.permutation(24)], tokens)
    assert width(paired) < 0.2 * width(broken)


def test_prompts_are_resampled_within_their_set():
    """Two sets that differ in level only: all variation lies between them, so none is left."""
    numerator = np.array([1.0] * 8 + [5.0] * 8)
    within = ratio_interval(numerator, np.ones(16), ["easy"] * 8 + ["hard"] * 8)
    assert within == pytest.approx((3.0, 3.0))
    assert width(ratio_interval(numerator, np.ones(16))) > 1.0


def test_weights_move_a_workloads_ratio_and_its_interval():
    rng = np.random.default_rng(3)
    easy, hard = prompts(rng, 12, 2.0, 0.05), prompts(rng, 20, 0.8, 0.05)
    one, two, seconds, tokens = (np.concatenate(pair) for pair in zip(easy, hard, strict=True))
    columns = (one, two, seconds, tokens)
    by_weight = {
        share: speedup_interval(*columns, SETS, {"easy": share, "hard": 10 - share}, seed=1)
        for share in (1.0, 5.0, 9.0)
    }
    low, equal, high = by_weight.values()
    assert low is not None
    assert high is not None
    assert low.hi < high.lo
    assert speedup_interval(*columns, SETS, seed=1) == equal
    assert speedup_interval(*columns, SETS, seed=2) != equal
    parts = [seconds[:12].sum() / tokens[:12].sum(), seconds[12:].sum() / tokens[12:].sum()]
    resamples = resample(SETS, {"easy": 1.0, "hard": 3.0}, draws=5)
    assert resamples.ratio(seconds, tokens)[0] == pytest.approx(0.25 * parts[0] + 0.75 * parts[1])
    some = only(SETS, None, np.array([0, 1, 31]))
    expected = (seconds[:2].sum() / tokens[:2].sum() + seconds[31] / tokens[31]) / 2
    assert some.ratio(seconds, tokens) == pytest.approx([expected])
    assert len(resample(SETS, {"easy": 1.0, "hard": 0.0}).members) == 1


def test_too_few_prompts_or_too_few_of_a_set_have_no_interval():
    columns = prompts(np.random.default_rng(5), MIN_PROMPTS)
    assert speedup_interval(*columns) is not None
    one, two, three, four = (column[1:] for column in columns)
    assert speedup_interval(one, two, three, four) is None
    more = prompts(np.random.default_rng(6), 11)
    assert speedup_interval(*more, ["easy"] * 8 + ["hard"] * 3) is None


def test_prompts_that_are_alike_have_a_percentile_interval_and_zero_over_zero_has_none():
    assert ratio_interval(np.full(10, 3.0), np.full(10, 4.0)) == (0.75, 0.75)
    assert ratio_interval(np.zeros(10), np.zeros(10)) is None


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({"a": 1.0}, "no weight for prompt set 'b'"),
        ({"a": 1.0, "b": -1.0}, "0 or more"),
        ({"a": 1.0, "b": math.nan}, "finite"),
        ({"a": 0.0, "b": 0.0}, "one above 0"),
    ],
)
def test_weights_are_normalised_and_those_that_do_not_fit_are_refused(weights, says):
    assert set_weights(["b", "a"], {"a": 3, "b": 1, "other": 5}) == {"a": 0.75, "b": 0.25}
    with pytest.raises(UserError, match=f"^prompts.weights: .*{says}"):
        resample(["a", "b"], weights)


# The error of a ratio


def test_the_error_of_a_mean_is_students():
    values = np.random.default_rng(0).normal(0.4, 1.0, 20)
    mean = ratios.ratio(values, np.ones(20))
    assert mean.standard_error == pytest.approx(stats.sem(values))
    assert mean.p_value == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue)


def test_the_error_of_a_difference_on_the_same_prompts_is_the_paired_one():
    rng = np.random.default_rng(1)
    one, two = rng.normal(0.0, 1.0, 12), rng.normal(1.0, 1.0, 12)
    gap = ratios.ratio(one, np.ones(12)) - ratios.ratio(two, np.ones(12))
    expected = stats.ttest_rel(one, two)
    assert gap.in_standard_errors == pytest.approx(expected.statistic)
    assert gap.p_value == pytest.approx(expected.pvalue)


def test_the_error_of_a_workloads_log_ratio_is_the_bootstraps():
    before_s, tokens, after_s, _ = prompts(np.random.default_rng(2), 32, 1.2)
    one = ratios.workload_ratio(before_s, tokens, SETS)
    gain = one.log() - ratios.workload_ratio(after_s, tokens, SETS).log()
    draws = resample(SETS)
    logs = np.log(draws.ratio(before_s, tokens) / draws.ratio(after_s, tokens))
    assert gain.value == pytest.approx(logs[0])
    assert gain.standard_error == pytest.approx(logs.std(), rel=0.05)


def test_prompts_that_agree_have_no_error_and_a_single_one_an_unknown_one():
    same = ratios.ratio(np.full(5, 3.0), np.full(5, 4.0))
    assert (same.standard_error, same.in_standard_errors) == (0.0, ratios.LARGE)
    assert same.p_value == pytest.approx(0.0, abs=1e-9)
    nothing = same - same
    assert (nothing.in_standard_errors, nothing.p_value) == (0.0, 1.0)
    single = ratios.ratio(np.array([3.0]), np.array([4.0]))
    assert (single.standard_error, single.p_value) == (None, None)


def test_holm_by_hand():
    assert ratios.holm([0.01, 0.04, 0.03, None]) == pytest.approx([0.03, 0.06, 0.06, None])


# Cross-fitting


def test_folds_hold_every_set_in_equal_parts():
    sets = ["easy"] * 10 + ["hard"] * 6
    fold = deal_folds(sets, 4, 0)
    assert sorted(np.bincount(fold)) == [4, 4, 4, 4]
    assert max(np.bincount(fold[:10])) - min(np.bincount(fold[:10])) <= 1
    assert (deal_folds(sets, 4, 1) != fold).any()


def test_held_out_times_are_those_of_the_candidate_the_other_folds_chose():
    """Each fold prefers what the other loses with, so a choice loses on the other fold."""
    sets, ones = ("easy",) * 8, np.ones(8)
    fold = deal_folds(sets, 2, 0)
    seconds = np.stack([np.where(fold == good, 0.5, 4.0) for good in (0, 1)])
    fit = cross_fit(Workload(ones, ones, seconds, np.ones((2, 8)), sets), 2, 0)
    assert fit is not None
    assert fit.speedup == pytest.approx(0.25)
    assert (fit.chose, fit.folds) == (2, 2)


def test_the_best_of_eight_nulls_would_win_far_more_often_on_the_prompts_it_was_chosen_on():
    """The reason for cross-fitting."""
    plain, fitted, size = 0, 0, 16
    for seed in range(60):
        rng = np.random.default_rng(seed)
        tokens, noise = np.full(size, 48.0), rng.normal(0.0, 0.2, (8, size))
        baseline = np.exp(rng.normal(0.0, 0.1, size))
        seconds = np.exp(rng.normal(0.0, 0.1, size) + noise)
        workload = Workload(baseline, tokens, seconds, np.tile(tokens, (8, 1)), SETS[4 : 4 + size])
        best = seconds[int(np.argmax(workload.speedups()))]
        chosen = speedup_interval(baseline, tokens, best, tokens, workload.prompt_sets, seed=seed)
        fit = cross_fit(workload, 4, seed)
        assert chosen is not None
        assert fit is not None
        plain += chosen.lo > 1.0
        fitted += fit.chose == fit.folds and fit.interval.lo > 1.0
    assert fitted <= 60 * 0.05 + 3 * (60 * 0.05 * 0.95) ** 0.5
    assert plain > 2 * fitted

"""The jackknife and the bounds of a choice: against scipy, by hand and simulated."""

import math

import numpy as np
import pytest
from scipy import stats

from harness.analysis.server_lossless import normal_z
from harness.records import UserError
from harness.stats import jackknife
from harness.stats.jackknife import (
    MIN_PROMPTS,
    Interval,
    exponential,
    log_speedup,
    set_weights,
    share_interval,
    workload_ratio,
)

SETS = ("easy",) * 12 + ("hard",) * 20


def prompts(rng, size, effect=1.0, noise=0.1):
    """Seconds and tokens of both runs of `size` prompts; prompts differ much, a pair little."""
    baseline = rng.gamma(4.0, 0.25, size)
    seconds = baseline / effect * np.exp(rng.normal(-(noise**2) / 2, noise, size))
    return baseline, np.full(size, 48.0), seconds, np.full(size, 48.0)


def speedup_interval(*columns) -> Interval | None:
    return exponential(log_speedup(*columns).interval(skew=True))


def width(interval: Interval | None) -> float:
    assert interval is not None
    return interval.hi - interval.lo


# The jackknife


def test_the_error_of_a_mean_is_students():
    values = np.random.default_rng(0).normal(0.4, 1.0, 20)
    mean = workload_ratio(values, np.ones(20))
    assert mean.standard_error == pytest.approx(stats.sem(values))
    assert mean.p_value == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue)
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert mean.interval() == pytest.approx(tuple(expected))


def test_the_error_of_a_difference_on_the_same_prompts_is_the_paired_one():
    rng = np.random.default_rng(1)
    one, two = rng.normal(0.0, 1.0, 12), rng.normal(1.0, 1.0, 12)
    gap = workload_ratio(one, np.ones(12)) - workload_ratio(two, np.ones(12))
    expected = stats.ttest_rel(one, two)
    assert gap.in_standard_errors == pytest.approx(expected.statistic)
    assert gap.p_value == pytest.approx(expected.pvalue)


def test_the_error_of_two_sets_is_welchs():
    rng = np.random.default_rng(4)
    one, two = rng.normal(0.0, 1.0, 6), rng.normal(1.0, 3.0, 14)
    values, sets = np.concatenate([one, -two]), ("a",) * 6 + ("b",) * 14
    gap = workload_ratio(values, np.ones(20), sets)
    assert gap.p_value == pytest.approx(stats.ttest_ind(one, two, equal_var=False).pvalue)


def test_a_workloads_interval_is_about_the_bootstraps():
    before_s, tokens, after_s, _ = prompts(np.random.default_rng(2), 40, 1.2)
    sets = ("easy",) * 20 + ("hard",) * 20

    def log_speedup(*samples, axis):
        easy, hard = (sample.astype(int) for sample in samples)
        times = [
            sum(seconds[rows].sum(axis) / tokens[rows].sum(axis) for rows in (easy, hard + 20))
            for seconds in (before_s, after_s)
        ]
        return np.log(times[0] / times[1])

    expected = stats.bootstrap(
        [np.arange(20), np.arange(20)], log_speedup, rng=np.random.default_rng(0)
    ).confidence_interval
    interval = speedup_interval(before_s, tokens, after_s, tokens, sets)
    assert interval is not None
    assert np.log(interval) == pytest.approx(tuple(expected), abs=0.015)


def test_prompts_that_agree_have_no_error_and_a_single_one_an_unknown_one():
    same = workload_ratio(np.full(5, 3.0), np.full(5, 4.0))
    assert (same.standard_error, same.in_standard_errors) == (0.0, jackknife.LARGE)
    assert same.p_value == pytest.approx(0.0, abs=1e-9)
    nothing = same - same
    assert (nothing.in_standard_errors, nothing.p_value) == (0.0, 1.0)
    single = workload_ratio(np.array([3.0]), np.array([4.0]))
    assert (single.standard_error, single.p_value) == (None, None)


def test_texts_of_uneven_length_count_as_fewer():
    """One long text among eight leaves hardly more than one degree of freedom."""
    rng = np.random.default_rng(3)
    sizes = np.array([1.0] * 7 + [20.0])
    interval = speedup_interval(sizes * rng.gamma(9.0, 1.0, 8), sizes, sizes, sizes)
    estimate = workload_ratio(sizes * rng.gamma(9.0, 1.0, 8), sizes)
    assert estimate.variance is not None
    assert estimate.variance.degrees == pytest.approx(max(1.0, 27**2 / 407 - 1))
    assert width(interval) > 1.0


def test_a_prompts_two_runs_are_left_out_together():
    rng = np.random.default_rng(2)
    baseline, tokens, seconds, _ = prompts(rng, 24, 1.3, noise=0.02)
    paired = speedup_interval(baseline, tokens, seconds, tokens)
    broken = speedup_interval(baseline, tokens, seconds[rng.permutation(24)], tokens)
    assert width(paired) < 0.2 * width(broken)


def test_prompts_vary_within_their_set():
    """Two sets that differ in level only: all variation lies between them, so none is left."""
    numerator = np.array([0.1] * 8 + [0.5] * 8)
    ones, sets = np.ones(16), ["easy"] * 8 + ["hard"] * 8
    within = speedup_interval(ones, ones, numerator, ones, sets)
    assert within == pytest.approx((1 / 0.3, 1 / 0.3))
    assert width(speedup_interval(ones, ones, numerator, ones)) > 1.0


def test_weights_move_a_workloads_ratio_and_its_interval():
    rng = np.random.default_rng(3)
    easy, hard = prompts(rng, 12, 2.0, 0.05), prompts(rng, 20, 0.8, 0.05)
    one, two, seconds, tokens = (np.concatenate(pair) for pair in zip(easy, hard, strict=True))
    columns = (one, two, seconds, tokens)
    low, equal, high = (
        speedup_interval(*columns, SETS, {"easy": share, "hard": 10 - share})
        for share in (1.0, 5.0, 9.0)
    )
    assert low is not None
    assert high is not None
    assert low.hi < high.lo
    assert speedup_interval(*columns, SETS) == equal
    parts = [seconds[:12].sum() / tokens[:12].sum(), seconds[12:].sum() / tokens[12:].sum()]
    weighted = workload_ratio(seconds, tokens, SETS, {"easy": 1.0, "hard": 3.0})
    assert weighted.value == pytest.approx(0.25 * parts[0] + 0.75 * parts[1])
    alone = speedup_interval(*columns, SETS, {"easy": 1.0, "hard": 0.0})
    assert alone == speedup_interval(*easy)


def test_too_few_prompts_or_too_few_of_a_set_have_no_interval():
    columns = prompts(np.random.default_rng(5), MIN_PROMPTS)
    assert speedup_interval(*columns) is not None
    one, two, three, four = (column[1:] for column in columns)
    assert speedup_interval(one, two, three, four) is None
    more = prompts(np.random.default_rng(6), 11)
    assert speedup_interval(*more, ["easy"] * 8 + ["hard"] * 3) is None


def test_a_share_stays_between_0_and_1_and_zero_over_zero_has_no_interval():
    total = np.full(10, 4.0)
    assert share_interval(np.full(10, 3.0), total) == pytest.approx((0.75, 0.75))
    assert share_interval(total, total) == (1.0, 1.0)
    assert share_interval(np.zeros(10), np.zeros(10)) is None
    for one in (np.array([4.0] * 9 + [3.0]), np.array([4.0] * 8 + [3.0, 2.0])):
        interval = share_interval(one, total)
        assert interval is not None
        assert 0.5 < interval.lo < one.sum() / 40 < interval.hi < 1.0


def test_a_workloads_share_varies_as_its_sets_do_at_their_weights():
    # A set of 4 and one of 28, which count alike: the first one's prompts vary most of it
    rng, sets = np.random.default_rng(2), ("few",) * 4 + ("many",) * 28
    tokens = rng.integers(20, 80, 32).astype(float)
    judged = 0.8 * tokens
    accepted = judged * rng.beta(20, 10, 32)
    interval = share_interval(accepted, judged, sets, tokens=tokens)
    assert interval is not None
    assert interval.lo < 2 / 3 < interval.hi
    few, many = np.arange(32) < 4, np.arange(32) >= 4
    errors = [workload_ratio(accepted[rows], judged[rows]).standard_error for rows in (few, many)]
    # Student's quantile, of 3 to 30 degrees of freedom
    assert (
        2.0 < width(interval) / 2.0 / (0.5 * math.hypot(*(error or 0.0 for error in errors))) < 3.3
    )


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
        workload_ratio(np.ones(2), np.ones(2), ["a", "b"], weights)


def test_holm_by_hand():
    assert jackknife.holm([0.01, 0.04, 0.03, None]) == pytest.approx([0.03, 0.06, 0.06, None])


# Sums of skew terms


@pytest.mark.parametrize("terms", [16, 64])
@pytest.mark.parametrize("tail", [1e-4, 0.01, 0.99, 1 - 1e-4])
def test_a_sum_of_skew_terms_is_the_normal_number_with_its_tail(terms, tail):
    # Waiting times, each of variance 1 and third cumulant 2: their sum is a gamma variable
    total = stats.gamma.ppf(tail, terms) - terms
    expected = stats.norm.ppf(tail)
    assert normal_z(total, terms, 2 * terms) == pytest.approx(expected, abs=0.05)
    assert normal_z(-total, terms, -2 * terms) == pytest.approx(-expected, abs=0.05)


def test_false_alarms_of_a_sure_targets_texts_are_as_rare_as_a_normal_numbers():
    # Every way to draw 100 tokens from these probabilities, each with its own
    probs, tokens = np.array([0.9, 0.08, 0.02]), 100
    logs = np.log(probs)
    centred = logs - probs @ logs
    variance, third = (float(tokens * (probs @ centred**power)) for power in (2, 3))
    second, last = (part.ravel() for part in np.indices((tokens + 1, tokens + 1)))
    counts = np.stack([tokens - second - last, second, last], -1)[second + last <= tokens]
    chance = np.asarray(stats.multinomial.pmf(counts, tokens, probs))
    sums = counts @ centred
    corrected = np.array([normal_z(total, variance, third) for total in sums])
    nominal = stats.norm.sf(3)
    for beyond in (corrected <= -3, corrected >= 3):
        assert chance[beyond].sum() == pytest.approx(nominal, rel=0.2)
    uncorrected = sums / math.sqrt(variance)
    assert chance[uncorrected <= -3].sum() > 2.5 * nominal
    assert chance[uncorrected >= 3].sum() < nominal / 20
    # Texts that ignore the temperature: the most likely token every time
    assert normal_z(tokens * centred[0], variance, third) > uncorrected.max() + 0.5


def test_the_lower_bound_of_few_skew_times_is_further_off():
    """By Johnson's term, of a lognormal of the sample's own spread at least."""
    errors = np.array([[0.1, -0.1, 0.1, -0.1], [0.3, -0.1, -0.1, -0.1]])
    variance = (errors**2).sum(axis=1)
    terms = jackknife.skew_term(errors, variance, 4, 2.0)
    growth = np.exp(4 * variance[0])
    lognormal = (growth + 2.0) * np.sqrt((growth - 1.0) / 4)
    assert terms[0] == pytest.approx(lognormal * 9.0 / 6.0)
    own = jackknife.skew_term(100.0 * errors[1], 1e4 * variance[1], 10_000, 2.0)
    assert own == pytest.approx((0.3**3 - 3 * 0.1**3) / variance[1] ** 1.5 * 9.0 / 6.0)
    assert jackknife.skew_term(np.zeros(4), np.zeros(()), 4, 2.0) == 0.0

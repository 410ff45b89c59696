"""Bootstrap intervals: coverage, pairing, strata, and where there is none."""

import math
import time

import numpy as np
import pytest
from scipy import stats

from harness.records import UserError
from harness.stats.intervals import (
    CONFIDENCE,
    MIN_PROMPTS,
    Interval,
    bootstrap_interval,
    expanded_level,
    ratio_interval,
    set_weights,
    speedup_interval,
    strata_indices,
    workload_ratio,
)


def prompts(rng, n, effect=1.0, noise=0.1):
    """Seconds and tokens of n prompts, plain and judged; prompts differ much, a pair little."""
    baseline = rng.gamma(4.0, 0.25, n)
    seconds = baseline / effect * np.exp(rng.normal(-(noise**2) / 2, noise, n))
    return baseline, np.full(n, 48.0), seconds, np.full(n, 48.0)


def found(interval: Interval | None) -> Interval:
    assert interval is not None
    return interval


def test_the_interval_of_a_mean_is_about_as_wide_as_students():
    values = np.random.default_rng(0).normal(10.0, 1.0, 12)
    lo, hi = found(ratio_interval(values, np.ones(12)))
    student = stats.t.interval(0.95, 11, values.mean(), stats.sem(values))
    assert hi - lo == pytest.approx(student[1] - student[0], rel=0.12)
    assert lo < values.mean() < hi


def test_intervals_of_few_prompts_cover_the_truth_as_often_as_they_say():
    """Prompts of uneven length are hard on a ratio: a level not widened misses 14 % of the time."""
    rng = np.random.default_rng(1)
    missed = 0
    for _ in range(300):
        lo, hi = found(speedup_interval(*prompts(rng, MIN_PROMPTS, 1.3, 0.2)))
        missed += not lo <= 1.3 <= hi
    assert missed / 300 <= 0.11


def test_the_level_widens_for_few_prompts_and_tends_to_95_percent():
    levels = [expanded_level(n, 2) for n in (8, 16, 64, 100_000)]
    assert levels == sorted(levels, reverse=True)
    assert levels[-1] == pytest.approx(CONFIDENCE, abs=1e-4)
    quantile = stats.t.ppf(0.975, 14) * math.sqrt(16 / 14)
    assert levels[1] == pytest.approx(2 * stats.norm.cdf(quantile) - 1)


def test_a_prompts_two_runs_are_resampled_together():
    rng = np.random.default_rng(2)
    baseline, tokens, seconds, _ = prompts(rng, 24, 1.3, noise=0.02)
    paired = found(speedup_interval(baseline, tokens, seconds, tokens))
    shuffled = seconds[rng.permutation(24)]
    broken = found(speedup_interval(baseline, tokens, shuffled, tokens))
    assert paired.hi - paired.lo < 0.2 * (broken.hi - broken.lo)


def test_prompts_are_resampled_within_their_set():
    """Two sets that differ in level only: all variation lies between them, so none is left."""
    numerator = np.array([1.0] * 8 + [5.0] * 8)
    strata = ["easy"] * 8 + ["hard"] * 8
    lo, hi = found(ratio_interval(numerator, np.ones(16), strata))
    assert lo == pytest.approx(3.0)
    assert hi == pytest.approx(3.0)
    pooled = found(ratio_interval(numerator, np.ones(16)))
    assert pooled.hi - pooled.lo > 1.0


def test_a_workloads_weights_move_its_interval():
    rng = np.random.default_rng(3)
    easy, hard = prompts(rng, 12, 2.0, 0.05), prompts(rng, 20, 0.8, 0.05)
    one, two, three, four = (np.concatenate(pair) for pair in zip(easy, hard, strict=True))
    strata = ["easy"] * 12 + ["hard"] * 20

    def interval(weights):
        return found(speedup_interval(one, two, three, four, strata, weights))

    assert interval({"easy": 1.0, "hard": 9.0}).hi < interval({"easy": 9.0, "hard": 1.0}).lo
    assert interval(None) == interval({"easy": 2.0, "hard": 2.0})


def test_a_workload_ratio_is_a_weighted_sum_of_ratios_of_sums():
    sums = [np.array([6.0, 3.0]), np.array([5.0, 10.0])]
    value = workload_ratio(sums, {"easy": 0.25, "hard": 0.75}, 0)
    assert value == pytest.approx(0.25 * 2.0 + 0.75 * 0.5)


def test_the_same_seed_gives_the_same_interval_and_another_seed_another():
    columns = prompts(np.random.default_rng(4), 16)
    assert speedup_interval(*columns, seed=1) == speedup_interval(*columns, seed=1)
    assert speedup_interval(*columns, seed=1) != speedup_interval(*columns, seed=2)


def test_fewer_prompts_than_the_minimum_have_no_interval():
    columns = prompts(np.random.default_rng(5), MIN_PROMPTS)
    assert isinstance(speedup_interval(*columns), Interval)
    one, two, three, four = (column[1:] for column in columns)
    assert speedup_interval(one, two, three, four) is None


def test_a_set_of_a_single_prompt_has_no_interval():
    columns = prompts(np.random.default_rng(6), 9)
    assert speedup_interval(*columns, ["easy"] * 8 + ["hard"]) is None


def test_prompts_that_are_all_alike_fall_back_to_the_percentile_interval():
    assert ratio_interval(np.full(10, 3.0), np.full(10, 4.0)) == (0.75, 0.75)


def test_zero_over_zero_has_no_interval():
    assert ratio_interval(np.zeros(10), np.zeros(10)) is None


def test_another_method_can_be_asked_for():
    columns = np.random.default_rng(7).gamma(2.0, 1.0, (20, 1))
    names = ["easy"] * 20

    def total(sums):
        return sums[0][..., 0]

    bca = bootstrap_interval(columns, names, total)
    assert bootstrap_interval(columns, names, total, methods=["percentile"]) != bca


def test_strata_come_in_order_of_name():
    listed = [(name, index.tolist()) for name, index in strata_indices(["b", "a", "b"])]
    assert listed == [("a", [1]), ("b", [0, 2])]


def test_weights_are_normalised_and_equal_by_default():
    assert set_weights(["b", "a", "b"], None) == {"a": 0.5, "b": 0.5}
    assert set_weights(["b", "a"], {"a": 3, "b": 1, "other": 5}) == {"a": 0.75, "b": 0.25}


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({"a": 1.0}, "no weight for prompt set 'b'"),
        ({"a": 1.0, "b": -1.0}, "0 or more"),
        ({"a": 1.0, "b": math.nan}, "finite"),
        ({"a": 0.0, "b": 0.0}, "one above 0"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, says):
    with pytest.raises(UserError, match=f"^prompts.weights: .*{says}"):
        set_weights(["a", "b"], weights)


def test_an_interval_of_64_prompts_is_cheap():
    columns = prompts(np.random.default_rng(8), 64)
    strata = ["easy"] * 32 + ["hard"] * 32
    started = time.process_time()
    for _ in range(5):
        speedup_interval(*columns, strata)
    assert (time.process_time() - started) / 5 < 0.15

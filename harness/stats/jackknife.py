"""The jackknife over prompts: the error of every ratio in a report, its interval and its p-value.

The prompt is the unit: tokens of one text are not independent, so counting tokens or rounds as
samples would give intervals that are far too narrow. Everything measured for a prompt (its
baseline, its speculative run, all repetitions) is left out together.

An `Estimate` is a number with the values that it takes when one prompt at a time is left out. So
any function of estimates is taken value by value, and what two of them have in common cancels: the
estimate of a speedup is log(plain) - log(speculative), whatever the weights of the prompt sets.
Its variance is the jackknife's, within prompt sets, so that a workload keeps its mix (Efron and
Stein, "The jackknife estimate of variance", 1981; stratified as in Wolter, "Introduction to
Variance Estimation", 2007, section 4.5).

Intervals are Student's t. A ratio whose prompts differ in length rests on fewer prompts than there
are, so a set of sizes T has the degrees of freedom of Kish's effective sample size, (sum T)^2 /
sum T^2 - 1, and sets are joined by Welch and Satterthwaite. A speedup is taken on the log scale.
Simulated (benchmarks/interval_coverage.py), they hold the truth as often as they say under heavy
tails, outliers, drift and uneven lengths, where BCa bootstrap intervals missed up to 16 %. A sample
without a slow prompt has both a speedup that is too large and an error that is too small, so the
lower bound of a speedup is further off by a term for skewness (`skew_term`).

Fewer than MIN_PROMPTS prompts, or a set of fewer than MIN_SET, which leaving one out can hardly
vary, have no interval: none is better than a wrong one. In a speedup of the whole workload small
sets are varied together (`pooled`), so that they keep their weight and take no interval from the
others.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, stdtr, stdtrit

from harness.records import UserError

Array = NDArray[np.float64]
Index = NDArray[np.intp]
# Of prompt sets; equal if None
Weights = Mapping[str, float] | None

MIN_PROMPTS = 8
# Two or three prompts of a set cannot show how much they vary: with four sets of two, nulls said
# `speculate` in 19 % of simulations.
MIN_SET = 4
CONFIDENCE = 0.95
# The largest log standard deviation between prompts for which Johnson's expansion is used
MOST_LOG_SD = 0.6
# Rounding of sums that are equal on paper
ZERO = 1e-9
# A difference in standard errors of 0
LARGE = 1e6


class Interval(NamedTuple):
    """A two-sided interval."""

    lo: float
    hi: float


class Variance(NamedTuple):
    """The variance of one number or several, [...], with the degrees of freedom of its estimate."""

    value: Array
    degrees: Array


def set_members(prompt_sets: Sequence[str]) -> list[tuple[str, Index]]:
    """For each prompt set, in order of name, the positions of its prompts."""
    names = np.asarray(prompt_sets, dtype=object)
    return [(name, np.flatnonzero(names == name)) for name in sorted(set(prompt_sets))]


def set_weights(prompt_sets: Sequence[str], weights: Weights) -> dict[str, float]:
    """The weight of each prompt set in the workload, summing to 1; equal weights if None."""
    names = sorted(set(prompt_sets))
    if weights is None:
        return {name: 1.0 / len(names) for name in names}
    missing = [name for name in names if name not in weights]
    if missing:
        raise UserError(f"prompts.weights: no weight for prompt set {missing[0]!r}; add one")
    chosen = {name: float(weights[name]) for name in names}
    total = sum(chosen.values())
    if not all(0.0 <= value < np.inf for value in chosen.values()) or not 0.0 < total < np.inf:
        raise UserError("prompts.weights: each must be finite and 0 or more, and one above 0")
    return {name: value / total for name, value in chosen.items()}


def token_weights(prompt_sets: Sequence[str], tokens: Array, weights: Weights) -> Array:
    """The weight of each token of a prompt, [prompt], so that the workload sums to 1.

    Sets count by their weights, equal if None, whatever their number of tokens [prompt].
    """
    shares, factors = set_weights(prompt_sets, weights), np.empty(len(prompt_sets))
    for name, members in set_members(prompt_sets):
        factors[members] = shares[name] / float(tokens[members].sum())
    return factors


class Pooled(NamedTuple):
    """A workload whose small sets are joined to one; sums of each prompt are multiplied."""

    prompt_sets: tuple[str, ...]
    weights: dict[str, float]
    small: NDArray[np.bool_]  # [prompt] whether its set is one of the joined

    def factors(self, prompt_sets: Sequence[str], tokens: Array, weights: Weights) -> Array:
        """[..., prompt] what multiplies sums of a prompt, so that every set keeps its weight.

        Args:
            prompt_sets: before they were joined.
            tokens: [..., prompt].
            weights: of these sets.
        """
        shares, factors = set_weights(prompt_sets, weights), np.ones(tokens.shape)
        for name, members in set_members(prompt_sets):
            if self.small[members[0]]:
                total = tokens[..., members].sum(axis=-1, keepdims=True)
                factors[..., members] = shares[name] / total
        return factors


def pooled(prompt_sets: Sequence[str], weights: Weights) -> Pooled:
    """Join the sets of fewer than MIN_SET prompts, and with them the smallest other if need be.

    With `Pooled.factors` a ratio of sums over joined sets is the weighted mean of the sets' own
    ratios, so that no number changes. What changes is the error: prompts are left out of the joined
    sets together, how much these sets differ counts into it, and a prompt of a large share makes
    the effective number of prompts small.

    Source: collapsed strata, Cochran, "Sampling Techniques", 1977, section 5A.12.
    """
    shares, sets = set_weights(prompt_sets, weights), set_members(prompt_sets)
    joined_sets: list[str] = []
    number = 0
    for members, name in sorted((len(members), name) for name, members in sets):
        if members >= MIN_SET and (not joined_sets or number >= MIN_SET):
            break
        joined_sets.append(name)
        number += members
    if len(joined_sets) < 2:  # a single small one remains where there is no other
        joined_sets = []
    label = "+".join(sorted(joined_sets))
    names = {name: label if name in joined_sets else name for name, _ in sets}
    of_strata = dict.fromkeys(names.values(), 0.0)
    for name, stratum in names.items():
        of_strata[stratum] += shares[name]
    small = np.array([name in joined_sets for name in prompt_sets], dtype=np.bool_)
    return Pooled(tuple(names[name] for name in prompt_sets), of_strata, small)


def enough_prompts(prompt_sets: Sequence[str]) -> bool:
    """True where these prompts can have an interval."""
    sizes = [len(members) for _, members in set_members(prompt_sets)]
    return sum(sizes) >= MIN_PROMPTS and min(sizes) >= MIN_SET


# ---- variances -----------------------------------------------------------------------------------


def left_out_variance(without: Array, sizes: Array) -> Variance:
    """The jackknife variance of what rests on n independent samples.

    Args:
        without: [..., n] the values without each sample.
        sizes: [n] how much each counts, for Kish's effective number of samples.
    """
    squares = (independent_errors(without) ** 2).sum(axis=-1)
    effective = float(sizes.sum() ** 2 / ((sizes**2).sum() or 1.0))
    degrees = max(1.0, effective - 1.0)
    return Variance(squares, np.full_like(squares, degrees))


def independent_errors(without: Array) -> Array:
    """[..., n] parts of the error of what rests on n samples: the variance is their sum of squares.

    `without` are the values without each sample, [..., n].
    """
    number = without.shape[-1]
    return math.sqrt((number - 1) / number) * (without - without.mean(axis=-1, keepdims=True))


def prompt_errors(without: Array, prompt_sets: Sequence[str]) -> Array:
    """[..., prompt] independent parts of the error within prompt sets; `without` as there."""
    errors = np.empty_like(without)
    for _, members in set_members(prompt_sets):
        errors[..., members] = independent_errors(without[..., members])
    return errors


def prompt_variance(without: Array, prompt_sets: Sequence[str], sizes: Array) -> Variance:
    """The jackknife variance within prompt sets.

    Args:
        without: [..., prompt] the values without each prompt.
        prompt_sets: the set of each prompt; at least 2 prompts in each.
        sizes: [prompt] how much each counts within its set.
    """
    return joined(
        left_out_variance(without[..., members], sizes[members])
        for _, members in set_members(prompt_sets)
    )


def joined(variances: Iterable[Variance]) -> Variance:
    """The variance of a sum of independent parts.

    Source: degrees of freedom by Welch, "The generalization of Student's problem when several
    different population variances are involved", 1947, and Satterthwaite, 1946.
    """
    parts = list(variances)
    total = np.asarray(sum(part.value for part in parts))
    squares = sum(part.value**2 / part.degrees for part in parts)
    with np.errstate(invalid="ignore"):
        degrees = np.where(total > 0.0, total**2 / squares, sum(part.degrees for part in parts))
    return Variance(total, degrees)


def skew_term(errors: Array, variance: Array, number: int, quantile: Array | float) -> Array:
    """By how many standard errors the lower bound of a log speedup is further off, [...].

    Few prompts do not show the skewness that they lack: it is taken to be that of a lognormal of
    the sample's own log standard deviation at least.

    Source: Johnson, "Modified t tests and confidence intervals for asymmetrical populations", 1978.

    Args:
        errors: [..., n] by part, as `independent_errors`: leaving a part out has the other sign.
        variance: [...] of the log speedup.
        number: of prompts.
        quantile: standard errors of the bound without it.
    """
    scale = np.where(variance > ZERO**2, variance, np.inf)
    growth = np.exp(np.minimum(number * variance, MOST_LOG_SD**2))
    lognormal = (growth + 2.0) * np.sqrt((growth - 1.0) / number)
    own = (errors**3).sum(axis=-1) / scale**1.5
    return np.maximum(own, lognormal) * (1.0 + 2.0 * np.square(quantile)) / 6.0


def lower_half_width(
    variance: Variance, half: Array, without: Array, prompt_sets: Sequence[str]
) -> Array:
    """How far the lower bound of a log speedup is off, [...]; `half` without its skewness.

    `without` are the values without each prompt, [..., prompt].
    """
    deviation, errors = np.sqrt(variance.value), prompt_errors(without, prompt_sets)
    quantile = half / np.where(deviation > 0.0, deviation, 1.0)
    term = skew_term(errors, variance.value, without.shape[-1], quantile)
    return np.asarray(half + deviation * term)


def half_width(variance: Variance, level: float) -> Array:
    """Half the width of Student's interval, [...]."""
    quantile = stdtrit(variance.degrees, (1.0 + level) / 2.0)
    return np.asarray(quantile * np.sqrt(variance.value), dtype=np.float64)


def chance_above_zero(value: float, variance: Variance) -> float:
    """The chance that the estimated value is above 0, by Student's distribution around it."""
    deviation = math.sqrt(float(variance.value))
    if deviation == 0.0:
        return float(value > 0.0)
    return float(stdtr(float(variance.degrees), value / deviation))


# ---- estimates -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Estimate:
    """A number made of sums over prompts, and what it is without each of them."""

    value: float  # on all prompts
    without: Array  # [prompt] without that prompt
    sizes: Array  # [prompt] how much each counts within its set
    prompt_sets: tuple[str, ...]  # the set of each prompt

    def __neg__(self) -> "Estimate":
        return replace(self, value=-self.value, without=-self.without)

    def __sub__(self, other: "Estimate") -> "Estimate":
        value, without = self.value - other.value, self.without - other.without
        return replace(self, value=value, without=without, sizes=self.sizes + other.sizes)

    def log(self) -> "Estimate":
        """The logarithm of a value above 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return replace(self, value=float(np.log(self.value)), without=np.log(self.without))

    @cached_property
    def variance(self) -> Variance | None:
        """None with a prompt set of fewer than 2 prompts, or a value that is not finite."""
        sizes = [len(members) for _, members in set_members(self.prompt_sets)]
        if min(sizes) < 2 or not np.isfinite([self.value, *self.without]).all():
            return None
        variance = prompt_variance(self.without, self.prompt_sets, self.sizes)
        return variance if variance.value > ZERO**2 else variance._replace(value=np.zeros(()))

    @property
    def standard_error(self) -> float | None:
        """None as `variance`; 0.0 where every prompt agrees."""
        return None if self.variance is None else math.sqrt(float(self.variance.value))

    @property
    def in_standard_errors(self) -> float | None:
        """The value over its error; 0.0 where both are 0, +-LARGE where only the error is."""
        if self.standard_error is None:
            return None
        if abs(self.value) < ZERO:
            return 0.0
        if self.standard_error == 0.0:
            return math.copysign(LARGE, self.value)
        return self.value / self.standard_error

    @property
    def p_value(self) -> float | None:
        """Two-sided, that the value is 0."""
        score = self.in_standard_errors
        if self.variance is None or score is None:
            return None
        return 2.0 * float(stdtr(float(self.variance.degrees), -abs(score)))

    def interval(
        self,
        level: float = CONFIDENCE,
        shared: Variance | None = None,
        *,
        of_speedup: bool = False,
    ) -> Interval | None:
        """Student's interval; None with too few prompts, or a value that is not finite.

        Args:
            level: of both sides.
            shared: an error that all prompts have in common, such as that of a price of rounds.
            of_speedup: whether it is of a log speedup, which is skew.
        """
        if self.variance is None or not enough_prompts(self.prompt_sets):
            return None
        parts = [self.variance] if shared is None else [self.variance, shared]
        variance = joined(parts)
        half = half_width(variance, level)
        lower = half
        if of_speedup:
            lower = lower_half_width(variance, half, self.without, self.prompt_sets)
        return Interval(self.value - float(lower), self.value + float(half))


def ratio(
    numerator: Array, denominator: Array, prompt_sets: Sequence[str] | None = None
) -> Estimate:
    """sum(numerator) / sum(denominator) over the prompts of all sets; one set if None."""
    with np.errstate(divide="ignore", invalid="ignore"):
        value = np.float64(numerator.sum()) / denominator.sum()
        without = (numerator.sum() - numerator) / (denominator.sum() - denominator)
    sets = ("",) * len(numerator) if prompt_sets is None else tuple(prompt_sets)
    return Estimate(float(value), without, denominator, sets)


def workload_ratio(
    numerator: Array,
    denominator: Array,
    prompt_sets: Sequence[str],
    weights: Weights = None,
) -> Estimate:
    """The weighted mean over prompt sets of sum(numerator) / sum(denominator), each [prompt].

    Weights are equal if None; the prompts of a set of weight 0 are left out.
    """
    shares = set_weights(prompt_sets, weights)
    counted = np.array([shares[name] > 0.0 for name in prompt_sets], dtype=bool)
    kept = tuple(name for name in prompt_sets if shares[name] > 0.0)
    parts = {
        name: ratio(numerator[members], denominator[members])
        for name, members in set_members(prompt_sets)
        if shares[name] > 0.0
    }
    value = sum(shares[name] * part.value for name, part in parts.items())
    without = np.empty(len(kept))
    for name, members in set_members(kept):
        without[members] = value + shares[name] * (parts[name].without - parts[name].value)
    return Estimate(value, without, denominator[counted], kept)


def log_speedup(
    baseline_s: Array,
    baseline_tokens: Array,
    seconds: Array,
    tokens: Array,
    prompt_sets: Sequence[str] | None = None,
    weights: Weights = None,
) -> Estimate:
    """The logarithm of a workload's speedup, a prompt's two runs left out together.

    The statistic is sum over sets of weight * (baseline seconds / tokens), each a ratio of sums,
    divided by the same of the other run. With one set that is the plain ratio of ms_per_token.

    Args:
        baseline_s, baseline_tokens: [prompt] decode seconds and tokens of plain decoding,
            repetitions summed.
        seconds, tokens: [prompt] of the run that is judged.
        prompt_sets: the set of each prompt; one set if None.
        weights: of the sets.
    """
    sets = ("",) * len(seconds) if prompt_sets is None else prompt_sets
    before = workload_ratio(baseline_s, baseline_tokens, sets, weights)
    return before.log() - workload_ratio(seconds, tokens, sets, weights).log()


def speedup_interval(
    baseline_s: Array,
    baseline_tokens: Array,
    seconds: Array,
    tokens: Array,
    prompt_sets: Sequence[str] | None = None,
    weights: Weights = None,
    *,
    shared: Variance | None = None,
) -> Interval | None:
    """The interval of a speedup as of `log_speedup`; None with too few prompts.

    `shared` is an error of its logarithm that all prompts have in common.
    """
    log = log_speedup(baseline_s, baseline_tokens, seconds, tokens, prompt_sets, weights)
    return exponential(log.interval(shared=shared, of_speedup=True))


def exponential(interval: Interval | None) -> Interval | None:
    """The interval of a number from that of its logarithm."""
    return None if interval is None else Interval(*map(math.exp, interval))


def share_interval(
    part: Array,
    total: Array,
    prompt_sets: Sequence[str] | None = None,
    *,
    tokens: Array | None = None,
    weights: Weights = None,
) -> Interval | None:
    """The interval of sum(part) / sum(total), a share such as accepted / (accepted + rejected).

    Taken on the log odds: near 0 and 1 an interval of the share itself misses the truth up to a
    third of the time.

    Args:
        part, total: [prompt].
        prompt_sets: the set of each prompt; one set if None.
        tokens: [prompt] for a workload's share, in which sets count by their weights, whatever
            their number of tokens: both sums are per token of the workload.
        weights: of the sets in a workload, equal if None.

    Returns:
        None with too few prompts, and where the share is 0 / 0. A share of exactly 0 or 1, on
        which all prompts agree, has an interval without width.
    """
    sets = ("",) * len(total) if prompt_sets is None else tuple(prompt_sets)
    factors = np.ones(len(total)) if tokens is None else token_weights(sets, tokens, weights)
    share, counts = ratio(factors * part, factors * total, sets), (part, total - part)
    if share.value in (0.0, 1.0) or math.isnan(share.value):
        return share.interval()
    if tokens is None:
        sums = [Estimate(float(n.sum()), n.sum() - n, n, sets) for n in counts]
    else:  # a set keeps its weight where one of its prompts is left out
        sums = [workload_ratio(n, tokens, sets, weights) for n in counts]
    # Where one prompt holds all that was rejected (or accepted), half the smallest count of any
    # prompt keeps odds finite without it.
    scaled, total_sum = factors * np.stack(counts), sums[0].value + sums[1].value
    alone = min(each.without.min() for each in sums) <= ZERO * total_sum
    half = 0.5 * float(scaled[scaled > 0.0].min()) if alone else 0.0
    odds = [replace(n, value=n.value + half, without=n.without + half) for n in sums]
    log_odds = (odds[0].log() - odds[1].log()).interval()
    if log_odds is None:
        return None
    lo, hi = (float(expit(bound)) for bound in log_odds)
    return Interval(min(lo, share.value), max(hi, share.value))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """P-values adjusted for how many there are; None stays None and does not count.

    Source: Holm, "A simple sequentially rejective multiple test procedure", 1979.
    """
    known = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        adjusted[index] = largest
    return adjusted

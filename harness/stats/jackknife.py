"""The jackknife over prompts: the error of every ratio in a report, its interval and its p-value.

The prompt is the unit: tokens of one text are not independent, so counting tokens or rounds as
samples would give intervals that are far too narrow. Everything measured for a prompt (its
baseline, its speculative run, all repetitions) is left out together, within prompt sets, so that a
workload keeps its mix (Efron and Stein, "The jackknife estimate of variance", 1981; stratified as
in Wolter, "Introduction to Variance Estimation", 2007, section 4.5). An `Estimate` has the values
without each prompt, so that in a function of estimates what they have in common cancels.

Intervals are Student's t, those of speedups on the log scale. Prompts of unequal sizes T count as
fewer: a set has the degrees of freedom of Kish's effective sample size, (sum T)^2 / sum T^2 - 1,
and sets are joined by Welch and Satterthwaite. Simulated, these intervals hold the truth as often
as they say, where BCa bootstrap intervals missed up to 16 % (docs/decisions/0012, 0030). A sample
without a slow prompt has both a speedup that is too large and an error that is too small, so the
lower bound of a speedup is further off by a term for skewness (`skew_term`).

Fewer than MIN_PROMPTS prompts, or a set of fewer than MIN_SET, have no interval: none is better
than a wrong one. In a speedup of the whole workload small sets are joined (`strata`), so that they
keep their weight and take no interval from the others.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
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
    """The weight of each token of a prompt, so that the workload sums to 1; as `tokens`.

    Sets count by their weights, equal if None, whatever their number of tokens, [..., prompt].
    """
    shares, factors = set_weights(prompt_sets, weights), np.empty(tokens.shape)
    for name, members in set_members(prompt_sets):
        factors[..., members] = shares[name] / tokens[..., members].sum(axis=-1, keepdims=True)
    return factors


def strata(prompt_sets: Sequence[str]) -> dict[str, str]:
    """The stratum of each prompt set: itself, but for small sets, which are joined.

    Joined are the sets of fewer than MIN_SET prompts, and with them the smallest other if need be.
    Of sums that are multiplied by `token_weights`, a ratio over joined sets is the weighted mean of
    the sets' own ratios, so that no number changes. What changes is the error: prompts are left out
    of the joined sets together, how much these sets differ counts into it, and a prompt of a large
    share makes the effective number of prompts small.

    Source: collapsed strata, Cochran, "Sampling Techniques", 1977, section 5A.12.
    """
    sizes = sorted((len(members), name) for name, members in set_members(prompt_sets))
    joined_sets: list[str] = []
    number = 0
    for size, name in sizes:
        if size >= MIN_SET and (not joined_sets or number >= MIN_SET):
            break
        joined_sets.append(name)
        number += size
    label = "+".join(sorted(joined_sets))  # of a single small one, where there is no other: itself
    return {name: label if name in joined_sets else name for _, name in sizes}


def enough_prompts(prompt_sets: Sequence[str]) -> bool:
    sizes = [len(members) for _, members in set_members(prompt_sets)]
    return sum(sizes) >= MIN_PROMPTS and min(sizes) >= MIN_SET


# ---- variances -----------------------------------------------------------------------------------


def independent_errors(without: Array, prompt_sets: Sequence[str] | None = None) -> Array:
    """Independent parts of the jackknife's error, [..., n]; their squares sum to the variance.

    Args:
        without: [..., n] the values without each sample.
        prompt_sets: the set of each, where they are prompts left out within sets; one set if None.
    """
    errors = np.empty_like(without)
    for _, members in set_members(prompt_sets or ("",) * without.shape[-1]):
        values, number = without[..., members], len(members)
        mean = values.mean(axis=-1, keepdims=True)
        errors[..., members] = math.sqrt((number - 1) / number) * (values - mean)
    return errors


def left_out_variance(
    without: Array, sizes: Array, prompt_sets: Sequence[str] | None = None
) -> Variance:
    """The jackknife variance of what rests on n samples; arguments as of `independent_errors`.

    `sizes` are how much each counts within its set, [n], for Kish's effective number of samples.
    """
    squares, parts = independent_errors(without, prompt_sets) ** 2, list[Variance]()
    for _, members in set_members(prompt_sets or ("",) * len(sizes)):
        effective = sizes[members].sum() ** 2 / ((sizes[members] ** 2).sum() or 1.0)
        value = squares[..., members].sum(axis=-1)
        parts.append(Variance(value, np.full_like(value, max(1.0, effective - 1.0))))
    return joined(parts)


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


def half_width(variance: Variance, level: float) -> Array:
    """Half the width of Student's interval, [...]."""
    quantile = stdtrit(variance.degrees, (1.0 + level) / 2.0)
    return np.asarray(quantile * np.sqrt(variance.value), dtype=np.float64)


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


# ---- estimates -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Estimate:
    """One number or several, [...], made of sums over prompts, and what they are without each."""

    value: Array  # [...] on all prompts
    without: Array  # [..., prompt] without that prompt
    sizes: Array  # [prompt] how much each counts within its set
    prompt_sets: tuple[str, ...]  # the set of each prompt

    def __sub__(self, other: "Estimate") -> "Estimate":
        value, without = self.value - other.value, self.without - other.without
        return replace(self, value=value, without=without, sizes=self.sizes + other.sizes)

    def log(self) -> "Estimate":
        with np.errstate(divide="ignore", invalid="ignore"):
            return replace(self, value=np.log(self.value), without=np.log(self.without))

    @property
    def errors(self) -> Array:
        """[..., prompt] independent parts of the error; leaving a prompt out has the other sign."""
        return independent_errors(self.without, self.prompt_sets)

    @cached_property
    def variance(self) -> Variance | None:
        """None with a prompt set of fewer than 2 prompts, or a value that is not finite."""
        sizes = [len(members) for _, members in set_members(self.prompt_sets)]
        finite = np.isfinite(self.value).all() and np.isfinite(self.without).all()
        if min(sizes) < 2 or not finite:
            return None
        value, degrees = left_out_variance(self.without, self.sizes, self.prompt_sets)
        return Variance(np.where(value > ZERO**2, value, 0.0), degrees)

    @property
    def standard_error(self) -> float | None:
        """None as `variance`; 0.0 where every prompt agrees."""
        return None if self.variance is None else math.sqrt(float(self.variance.value))

    @property
    def in_standard_errors(self) -> float | None:
        """The value over its error; 0.0 where both are 0, +-LARGE where only the error is."""
        value, error = float(self.value), self.standard_error
        if error is None:
            return None
        if abs(value) < ZERO:
            return 0.0
        return value / error if error else math.copysign(LARGE, value)

    @property
    def p_value(self) -> float | None:
        """Two-sided, that the value is 0."""
        score = self.in_standard_errors
        if self.variance is None or score is None:
            return None
        return 2.0 * float(stdtr(float(self.variance.degrees), -abs(score)))

    def bounds(self, shared: Variance | None = None, *, skew: bool = False) -> Array | None:
        """[2, ...] Student's interval at the level CONFIDENCE; None with too few prompts.

        Args:
            shared: an error that all prompts have in common, such as that of a price of rounds.
            skew: whether it is of a log speedup, whose lower bound has the term for skewness.
        """
        if self.variance is None or not enough_prompts(self.prompt_sets):
            return None
        variance = joined(filter(None, [self.variance, shared]))
        lower = upper = np.asarray(stdtrit(variance.degrees, (1.0 + CONFIDENCE) / 2.0), np.float64)
        if skew:
            errors = self.errors
            lower = upper + skew_term(errors, variance.value, errors.shape[-1], upper)
        return self.value + np.sqrt(variance.value) * np.stack([-lower, upper])

    def interval(self, shared: Variance | None = None, *, skew: bool = False) -> Interval | None:
        """The bounds of a single number."""
        bounds = self.bounds(shared, skew=skew)
        return None if bounds is None else Interval(*bounds.tolist())


def workload_ratio(
    numerator: Array,
    denominator: Array,
    prompt_sets: Sequence[str] | None = None,
    weights: Weights = None,
) -> Estimate:
    """The weighted mean over prompt sets of sum(numerator) / sum(denominator), each [..., prompt].

    One set if None. Weights are equal if None; the prompts of a set of weight 0 are left out.
    """
    sets = prompt_sets or ("",) * numerator.shape[-1]
    shares = set_weights(sets, weights)
    counted = np.array([shares[name] > 0.0 for name in sets], dtype=bool)
    kept = tuple(compress(sets, counted))
    above, below = numerator[..., counted], denominator[..., counted]
    value, changes = np.zeros(above.shape[:-1]), np.empty(above.shape)
    for name, members in set_members(kept):
        parts = [sums[..., members] for sums in (above, below)]
        totals = [part.sum(axis=-1, keepdims=True) for part in parts]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = totals[0] / totals[1]
            without = (totals[0] - parts[0]) / (totals[1] - parts[1])
        value = value + shares[name] * ratio[..., 0]
        changes[..., members] = shares[name] * (without - ratio)
    return Estimate(value, value[..., None] + changes, below, kept)


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
        seconds, tokens: [..., prompt] of the run that is judged.
        prompt_sets: the set of each prompt; one set if None.
        weights: of the sets.
    """
    before = workload_ratio(baseline_s, baseline_tokens, prompt_sets, weights)
    return before.log() - workload_ratio(seconds, tokens, prompt_sets, weights).log()


def exponential(interval: Interval | None) -> Interval | None:
    """The interval of a number from that of its logarithm."""
    return None if interval is None else Interval(*map(math.exp, interval))


def share_interval(
    part: Array,
    total: Array,
    prompt_sets: Sequence[str] = (),
    *,
    tokens: Array | None = None,
    weights: Weights = None,
) -> Interval | None:
    """The interval of sum(part) / sum(total), a share such as accepted / (accepted + rejected).

    Taken on the log odds: near 0 and 1 an interval of the share itself misses the truth up to a
    third of the time.

    Args:
        part, total: [prompt].
        prompt_sets: the set of each prompt in a workload, with `tokens`; else they are of one set.
        tokens: [prompt] for a workload's share, in which sets count by their weights, whatever
            their number of tokens: both sums are per token of the workload.
        weights: of the sets in a workload, equal if None.

    Returns:
        None with too few prompts, and where the share is 0 / 0. A share of exactly 0 or 1, on
        which all prompts agree, has an interval without width.
    """
    counts = np.stack([part, total - part])
    if tokens is None:
        totals = counts.sum(axis=1)
        sums = Estimate(totals, totals[:, None] - counts, total, ("",) * len(total))
    else:  # a set keeps its weight where one of its prompts is left out
        sums = workload_ratio(counts, tokens, prompt_sets, weights)
        counts = counts * token_weights(prompt_sets, tokens, weights)
    both = float(sums.value.sum())
    if not both:
        return None
    share, rounding = float(sums.value[0]) / both, ZERO * both
    if share in (0.0, 1.0):
        known = enough_prompts(sums.prompt_sets) and sums.without.sum(axis=0).min() > rounding
        return Interval(share, share) if known else None
    # Where one prompt holds all that was rejected (or accepted), half the smallest count of any
    # prompt keeps odds finite without it.
    half = 0.5 * counts[counts > 0.0].min() if sums.without.min() <= rounding else 0.0
    logs = replace(sums, value=sums.value + half, without=sums.without + half).log()
    value, without = (each[0] - each[1] for each in (logs.value, logs.without))
    log_odds = replace(logs, value=value, without=without).interval()
    if log_odds is None:
        return None
    lo, hi = (float(expit(bound)) for bound in log_odds)
    return Interval(min(lo, share), max(hi, share))


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

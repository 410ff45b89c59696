"""The bootstrap over prompts: one way of resampling, for every interval in a report.

The prompt is the unit: tokens of one text are not independent, so resampling tokens or rounds would
give intervals that are far too narrow. Everything measured for a prompt (its baseline, its
speculative run, all repetitions) is resampled together, and prompts are resampled within their
prompt set, so that a workload keeps its mix.

A resample is how often each prompt was drawn (`Resamples.counts`), so any statistic of sums over
prompts is a small matrix product, and two statistics of the same `Resamples` are paired: "A is
faster than B" is the share of resamples in which it is.

Intervals are BCa (Efron 1987; the formulas and the resamples of `scipy.stats.bootstrap`), or the
percentile interval where BCa is undefined (all prompts equal, say) or where other things than
prompts were resampled as well. Fewer than MIN_PROMPTS prompts, or a set of fewer than MIN_SET,
which resampling cannot vary, give None: no interval is better than a wrong one.

A bootstrap of few prompts is too narrow: it divides by n, and knows no t distribution. The level is
widened accordingly (Hesterberg, "What Teachers Should Know About the Bootstrap", 2015, the expanded
percentile interval), which makes the interval of a mean as wide as Student's. Simulated with 8
prompts of uneven length, a plain 95 % BCa interval misses the truth 14 % of the time, this one 9 %.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri, stdtrit

from harness.records import UserError

Array = NDArray[np.float64]
Index = NDArray[np.intp]

MIN_PROMPTS = 8
# Resampling two or three prompts of a set cannot show how much they vary: with four sets of two,
# nulls said `speculate` in 19 % of simulations.
MIN_SET = 4
CONFIDENCE = 0.95
RESAMPLES = 4000
ROUNDING = 1e-12


class Interval(NamedTuple):
    """A two-sided 95 % interval."""

    lo: float
    hi: float


def set_members(prompt_sets: Sequence[str]) -> list[tuple[str, Index]]:
    """For each prompt set, in order of name, the positions of its prompts."""
    names = np.asarray(prompt_sets, dtype=object)
    return [(name, np.flatnonzero(names == name)) for name in sorted(set(prompt_sets))]


def set_weights(
    prompt_sets: Sequence[str], weights: Mapping[str, float] | None
) -> dict[str, float]:
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


def expanded_level(prompts: int, sets: int) -> float:
    """The bootstrap level whose interval for a mean is as wide as Student's at 95 %.

    Source: Hesterberg 2015, section 3.3 (expanded percentile interval), with prompts - sets degrees
    of freedom.
    """
    degrees = prompts - sets
    student = float(stdtrit(degrees, (1.0 + CONFIDENCE) / 2.0))
    return math.erf(student * math.sqrt(prompts / degrees) / math.sqrt(2.0))


@dataclass(frozen=True, eq=False)
class Resamples:
    """How often each prompt counts in each resample, and the weights of the prompt sets.

    Attributes:
        members: by prompt set, the positions of its prompts.
        counts: by prompt set, [resample, member].
        shares: by prompt set, its weight; they sum to 1.
    """

    members: tuple[Index, ...]
    counts: tuple[Array, ...]
    shares: tuple[float, ...]

    @property
    def prompts(self) -> int:
        """How many there are in all sets."""
        return sum(len(members) for members in self.members)

    @property
    def level(self) -> float | None:
        """Of an expanded percentile interval; None where there are too few prompts for one."""
        if self.prompts < MIN_PROMPTS or min(len(members) for members in self.members) < MIN_SET:
            return None
        return expanded_level(self.prompts, len(self.members))

    def ratio(self, numerator: Array, denominator: Array) -> Array:
        """Weighted mean over sets of sum(numerator) / sum(denominator), [resample].

        Args:
            numerator: [prompt], or [prompt, column] for several at once: [resample, column].
            denominator: [prompt].
        """
        total = np.zeros(())
        for share, members, counts in zip(self.shares, self.members, self.counts, strict=True):
            above, below = counts @ numerator[members], counts @ denominator[members]
            total = total + share * (above.T / below).T
        return total

    def pooled(self, numerator: Array, denominator: Array) -> Array:
        """sum(numerator) / sum(denominator) over all prompts of all sets, [resample]."""
        parts = list(zip(self.members, self.counts, strict=True))
        above = sum(counts @ numerator[members] for members, counts in parts)
        below = sum(counts @ denominator[members] for members, counts in parts)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(above / below, dtype=np.float64)

    def interval(self, values: Array) -> Interval | None:
        """The percentile interval of a statistic's [resample] values, the first of them left out.

        None with too few prompts, or values that are not all finite.
        """
        if self.level is None or not np.isfinite(values).all():
            return None
        tail = (1.0 - self.level) / 2.0
        lo, hi = np.quantile(values[1:], [tail, 1.0 - tail])
        return Interval(float(lo), float(hi))

    def left_out(self) -> "Resamples":
        """The jackknife: a resample per prompt, without it; the first set's prompts first."""
        counts: list[Array] = []
        first = 0
        for members in self.members:
            without = np.ones((self.prompts, len(members)))
            without[first + np.arange(len(members)), np.arange(len(members))] = 0.0
            counts.append(without)
            first += len(members)
        return Resamples(self.members, tuple(counts), self.shares)


def resample(
    prompt_sets: Sequence[str],
    weights: Mapping[str, float] | None = None,
    *,
    draws: int = RESAMPLES,
    seed: int = 0,
) -> Resamples:
    """The prompts as they are, each once, and then `draws` resamples within their sets.

    Args:
        prompt_sets: the set of each prompt.
        weights: of the sets, equal if None; a set of weight 0 is left out.
        draws: how many resamples; the same seed draws the same ones.
    """
    shares = set_weights(prompt_sets, weights)
    sets = [(name, members) for name, members in set_members(prompt_sets) if shares[name] > 0.0]
    rng = np.random.default_rng(seed)
    counts: list[Array] = []
    for _, members in sets:
        size = len(members)
        drawn = rng.integers(0, size, (draws, size)) + size * np.arange(draws)[:, None]
        times = np.bincount(drawn.ravel(), minlength=draws * size).astype(np.float64)
        counts.append(np.concatenate([np.ones((1, size)), times.reshape(draws, size)]))
    return Resamples(
        members=tuple(members for _, members in sets),
        counts=tuple(counts),
        shares=tuple(shares[name] for name, _ in sets),
    )


def only(prompt_sets: Sequence[str], weights: Mapping[str, float] | None, rows: Index) -> Resamples:
    """A single resample that holds some of the prompts once; every set must have one among them."""
    once = resample(prompt_sets, weights, draws=0)
    counts = tuple(np.isin(members, rows)[None].astype(np.float64) for members in once.members)
    return Resamples(once.members, counts, once.shares)


def bootstrap_interval(
    statistic: Callable[[Resamples], Array],
    prompt_sets: Sequence[str],
    weights: Mapping[str, float] | None = None,
    *,
    seed: int = 0,
) -> Interval | None:
    """The BCa interval of a statistic of sums over prompts, which are resampled within their sets.

    Args:
        statistic: its value in every resample, [resample].
        prompt_sets: the set of each prompt.
        weights: of the sets, equal if None.

    Returns:
        None with too few prompts, or where the statistic is not finite in every resample.
    """
    resamples = resample(prompt_sets, weights, seed=seed)
    if resamples.level is None:
        return None
    with np.errstate(all="ignore"):
        values, without = statistic(resamples), statistic(resamples.left_out())
        if not np.isfinite(values).all():
            return None
        sizes = [len(members) for members in resamples.members]
        tails = _bca_tails(values, np.split(without, np.cumsum(sizes)[:-1]), resamples.level)
    if not np.isfinite(tails).all():
        return resamples.interval(values)
    lo, hi = np.quantile(values[1:], tails)
    return Interval(float(lo), float(hi))


def _bca_tails(values: Array, without: Sequence[Array], level: float) -> Array:
    """The two quantiles of the resamples that bound a BCa interval (Efron 1987).

    Args:
        values: the estimate, then the resamples.
        without: by prompt set, the jackknife's values.
    """
    estimate, resampled = values[0], values[1:]
    # Where counts are whole, many resamples equal the estimate but for the rounding of their sums.
    rounding = ROUNDING * abs(estimate)
    less, equal_too = resampled < estimate - rounding, resampled <= estimate + rounding
    below = (less.mean() + equal_too.mean()) / 2.0
    bias = float(ndtri(np.float64(below)))
    cubes, squares = 0.0, 0.0
    for left_out in without:
        influence = (len(left_out) - 1) / len(left_out) * (left_out.mean() - left_out)
        cubes += float((influence**3).sum())
        squares += float((influence**2).sum())
    acceleration = np.float64(cubes) / np.float64(squares) ** 1.5 / 6.0
    tails: Array = ndtri(np.array([(1.0 - level) / 2.0, (1.0 + level) / 2.0]))
    normal = bias + tails
    return np.asarray(ndtr(bias + normal / (1.0 - acceleration * normal)), dtype=np.float64)


def ratio_interval(
    numerator: Array, denominator: Array, prompt_sets: Sequence[str] | None = None, *, seed: int = 0
) -> Interval | None:
    """The interval of sum(numerator) / sum(denominator), such as accepted / (accepted + rejected).

    Args:
        numerator, denominator: [prompt]; a prompt's two entries are resampled together.
        prompt_sets: the set of each prompt; one set if None.

    Returns:
        None as `bootstrap_interval`, and where the ratio is 0 / 0.
    """
    sets = [""] * len(numerator) if prompt_sets is None else prompt_sets
    return bootstrap_interval(lambda r: r.pooled(numerator, denominator), sets, seed=seed)


def speedup_interval(
    baseline_s: Array,
    baseline_tokens: Array,
    seconds: Array,
    tokens: Array,
    prompt_sets: Sequence[str] | None = None,
    weights: Mapping[str, float] | None = None,
    *,
    seed: int = 0,
) -> Interval | None:
    """The interval of a workload's speedup, a prompt's two runs resampled together.

    The statistic is sum over sets of weight * (baseline seconds / tokens), each a ratio of sums,
    divided by the same of the other run. With one set that is the plain ratio of ms_per_token.

    Args:
        baseline_s, baseline_tokens: [prompt] decode seconds and tokens of plain decoding,
            repetitions summed.
        seconds, tokens: [prompt] of the run that is judged.
        prompt_sets: the set of each prompt; one set if None.
        weights: of the sets; equal if None.

    Returns:
        None as `bootstrap_interval`.
    """

    def speedup(resamples: Resamples) -> Array:
        return resamples.ratio(baseline_s, baseline_tokens) / resamples.ratio(seconds, tokens)

    sets = [""] * len(seconds) if prompt_sets is None else prompt_sets
    return bootstrap_interval(speedup, sets, weights, seed=seed)

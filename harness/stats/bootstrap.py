"""The bootstrap over prompts, for what needs a distribution: which of several drafts is the best.

A resample is how often each prompt was drawn (`Resamples.counts`), within its prompt set, so any
statistic of sums over prompts is a small matrix product, and two statistics of the same `Resamples`
are paired: "A is faster than B" is the share of resamples in which it is. Round times are resampled
with the prompts.

A bootstrap of few prompts is too narrow: it divides by n, and knows no t distribution. The level of
its percentile interval is widened accordingly (Hesterberg, "What Teachers Should Know About the
Bootstrap", 2015), which makes the interval of a mean as wide as Student's. Intervals of measured
numbers and of verdicts are the jackknife's (`harness.stats.jackknife`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from harness.stats.jackknife import (
    CONFIDENCE,
    Array,
    Index,
    Interval,
    enough_prompts,
    set_members,
    set_weights,
)

RESAMPLES = 4000


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
        if not enough_prompts([str(row) for row, part in enumerate(self.members) for _ in part]):
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

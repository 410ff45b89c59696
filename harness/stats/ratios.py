"""The standard error of a ratio of sums over prompts, of what is made of such ratios, and p-values.

A ratio R = sum(y) / sum(x) is linearised prompt by prompt: prompt i moves it by its influence,
(y_i - R x_i) / sum(x), and the influences of a prompt set sum to 0. So the variance of R is that of
a sum of independent influences, n times their sample variance (Cochran, "Sampling Techniques",
1977, section 6.4; the delta method). Influences of the same prompts add up: those of a difference
of two ratios are the differences, which cancels what the prompts have in common, and those of a
logarithm are divided by the value. Student's t with one degree of freedom less per set.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import stdtr

from harness.stats.bootstrap import Array, set_members, set_weights

# Rounding of sums that are equal on paper.
ZERO = 1e-9
# A difference in standard errors of 0.
LARGE = 1e6


@dataclass(frozen=True, eq=False)
class Estimate:
    """A smooth function of sums over prompts.

    Attributes:
        value: on all prompts.
        influence: [prompt] how far each moves it, to first order.
        prompt_sets: the set of each prompt; the influences of a set sum to 0.
    """

    value: float
    influence: Array
    prompt_sets: tuple[str, ...]

    def __add__(self, other: "Estimate") -> "Estimate":
        return Estimate(
            self.value + other.value, self.influence + other.influence, self.prompt_sets
        )

    def __neg__(self) -> "Estimate":
        return Estimate(-self.value, -self.influence, self.prompt_sets)

    def __sub__(self, other: "Estimate") -> "Estimate":
        return self + -other

    def log(self) -> "Estimate":
        """The logarithm of a value above 0."""
        return Estimate(math.log(self.value), self.influence / self.value, self.prompt_sets)

    @cached_property
    def standard_error(self) -> float | None:
        """None with a prompt set of fewer than 2 prompts; 0.0 where every prompt agrees."""
        parts = [self.influence[members] for _, members in set_members(self.prompt_sets)]
        if min(len(part) for part in parts) < 2:
            return None
        error = math.sqrt(sum(len(part) * float(part.var(ddof=1)) for part in parts))
        return 0.0 if error < ZERO else error

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
        degrees = len(self.prompt_sets) - len(set(self.prompt_sets))
        return None if score is None else 2.0 * float(stdtr(degrees, -abs(score)))


def ratio(numerator: Array, denominator: Array) -> Estimate:
    """sum(numerator) / sum(denominator) over prompts of one set."""
    return workload_ratio(numerator, denominator, ("",) * len(numerator))


def workload_ratio(
    numerator: Array,
    denominator: Array,
    prompt_sets: Sequence[str],
    weights: Mapping[str, float] | None = None,
) -> Estimate:
    """The weighted mean over prompt sets of sum(numerator) / sum(denominator).

    Args:
        numerator, denominator: [prompt].
        prompt_sets: the set of each prompt.
        weights: of the sets, equal if None.
    """
    shares = set_weights(prompt_sets, weights)
    value, influence = 0.0, np.zeros(len(numerator))
    for name, members in set_members(prompt_sets):
        above, below = numerator[members], denominator[members]
        of_set = float(above.sum() / below.sum())
        value += shares[name] * of_set
        influence[members] = shares[name] * (above - of_set * below) / below.sum()
    return Estimate(value, influence, tuple(prompt_sets))


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

"""One cell of two runs on the prompts that both have: ratios, differences, and how sure they are.

The p-value is Student's on the log of a product of workload ratios, linearised prompt by prompt
(Cochran, "Sampling Techniques", 1977, section 6.4), as in `harness.analysis.paired`; intervals are
those of `harness.stats.intervals`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr

from harness.stats.intervals import (
    Array,
    Interval,
    bootstrap_interval,
    strata_indices,
    workload_ratio,
)

# Rounding of sums that are equal on paper.
ZERO = 1e-12
# Numerator columns, (reference, other run); each denominator is the next column.
CELL = (0, 2)
BASELINE = (4, 6)
ACCEPTED_JUDGED = (8, 12)
ACCEPTED_DRAFTED = (10, 14)


@dataclass(frozen=True)
class PairedCell:
    """The shared prompts of one cell and the statistics its row is made of.

    A factor (column, sign) stands for the workload's sum(column) / sum(column + 1), to that power.

    Attributes:
        columns: [n, 16]: decode seconds and tokens of the cell in either run, then of either's
            baseline; accepted, judged, accepted again and drafted of the reference, then of the
            other run, so that every denominator follows its numerator.
        strata: the prompt set of each prompt.
        shares: `set_weights` of them.
        seed: of the bootstrap.
    """

    columns: Array
    strata: Sequence[str]
    shares: Mapping[str, float]
    seed: int

    def value(self, column: int) -> float:
        """The workload's ratio at a column: seconds per token."""
        sums = [self.columns[members].sum(axis=0) for _, members in strata_indices(self.strata)]
        return float(workload_ratio(sums, self.shares, column))

    def interval(self, factors: Sequence[tuple[int, int]]) -> Interval | None:
        """Of the product of factors, prompts resampled within their sets."""

        def product(sums: Sequence[Array]) -> Array:
            terms = [workload_ratio(sums, self.shares, column) ** sign for column, sign in factors]
            return np.prod(np.stack(terms), axis=0)

        return bootstrap_interval(self.columns, self.strata, product, seed=self.seed)

    def p_value(self, factors: Sequence[tuple[int, int]]) -> float | None:
        """That the product of factors is 1: Student's, on its log. None with too few prompts."""
        parts = strata_indices(self.strata)
        degrees = len(self.columns) - len(parts)
        if min(len(members) for _, members in parts) < 2:
            return None
        log = sum(sign * math.log(self.value(column)) for column, sign in factors)
        variance = 0.0
        for name, members in parts:
            own, moved = self.columns[members], np.zeros(len(members))
            for column, sign in factors:
                top, bottom = own[:, column], own[:, column + 1]
                slope = top - bottom * (top.sum() / bottom.sum())
                scale = self.shares[name] / (bottom.sum() * self.value(column))
                moved += sign * slope * scale
            variance += float((moved**2).sum()) * len(members) / (len(members) - 1)
        if abs(log) < ZERO:
            return 1.0
        error = math.sqrt(variance)
        return 2.0 * float(stdtr(degrees, -abs(log) / error)) if error > ZERO else 0.0

    def pooled(self, column: int) -> float | None:
        """Sum of a column / sum of the next over all prompts; None where that is 0 / 0."""
        top, bottom = self.columns[:, column].sum(), self.columns[:, column + 1].sum()
        return float(top / bottom) if bottom else None

    def difference(self, before: int, after: int) -> tuple[float | None, Interval | None]:
        """`pooled(after)` - `pooled(before)` and its interval."""
        values = self.pooled(before), self.pooled(after)
        if values[0] is None or values[1] is None:
            return None, None

        def gap(sums: Sequence[Array]) -> Array:
            total = sum(sums[1:], start=sums[0])
            return total[..., after] / total[..., after + 1] - (
                total[..., before] / total[..., before + 1]
            )

        return values[1] - values[0], bootstrap_interval(
            self.columns, self.strata, gap, seed=self.seed
        )

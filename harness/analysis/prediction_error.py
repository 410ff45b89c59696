"""The error of predictions, by the cells that the same run measured; it widens their intervals.

A prediction's interval covers what replay and the timing of rounds leave open: other prompts, other
visits. It knows nothing of what both share and generations do not, such as rounds that were timed
on another text, or a machine that had another speed. A run that measured cells knows: each measured
cell's gap, log(predicted / measured speedup) on the same prompts, has a sampling error of its own,
and what the gaps vary by beyond it is the error of predictions. It is estimated without weights, so
that no cell decides alone, as the mean of gap^2 - its sampling variance (as the variance between
studies in a meta-analysis: Hedges, "A random effects model for effect sizes", 1983; about 0, which
predictions claim). It is added to the variance of every prediction at that temperature, of cells
that were not measured too: rounds are timed for each temperature apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.special import bdtrc

from harness.analysis.cells import PromptId
from harness.records import Cell, grouped
from harness.stats.jackknife import (
    CONFIDENCE,
    Array,
    Estimate,
    Variance,
    half_width,
    joined,
    log_speedup,
)

# A caveat says that gaps exceed their intervals where chance would have it so this rarely
RARE = 0.025


@dataclass(frozen=True, eq=False)
class Gap:
    """One measured cell's log(predicted / measured speedup), and the variance of its own."""

    value: float
    variance: Variance

    @classmethod
    def of(
        cls,
        predicted: Mapping[PromptId, Array],
        measured: Mapping[PromptId, Array],
        costs: Variance,
    ) -> "Gap | None":
        """On the prompts of one set that both have; None where these are too few to tell its error.

        Args:
            predicted, measured: [4] of each prompt, as `paired_sums` gives them.
            costs: the error of what rounds cost.
        """
        names = [name for name in predicted if name in measured]
        if not names:
            return None

        def log(sums: Mapping[PromptId, Array]) -> Estimate:
            return log_speedup(*np.array([sums[name] for name in names]).T)

        gap = log(predicted) - log(measured)
        if gap.variance is None:
            return None
        return cls(float(gap.value), joined([gap.variance, costs]))

    @property
    def exceeds(self) -> bool:
        """True where it is beyond its interval."""
        return abs(self.value) > float(half_width(self.variance, CONFIDENCE))


@dataclass(frozen=True, eq=False)
class PredictionError:
    """The gaps of the measured cells of one temperature, at least one."""

    gaps: Mapping[Cell, Gap]

    @property
    def variance(self) -> Variance:
        """The variance of any prediction's logarithm, besides its own."""
        squares = [gap.value**2 - float(gap.variance.value) for gap in self.gaps.values()]
        return Variance(np.array(max(0.0, np.mean(squares))), np.array(float(len(squares))))

    @property
    def outside(self) -> int:
        """The number of measured cells outside of their predictions' intervals."""
        return sum(gap.exceeds for gap in self.gaps.values())

    @property
    def off(self) -> bool:
        """True where more cells are outside than by chance."""
        outside, cells = self.outside, len(self.gaps)
        return outside > 0 and bool(bdtrc(outside - 1, cells, 1.0 - CONFIDENCE) <= RARE)

    @property
    def worst(self) -> tuple[Cell, Gap]:
        """The cell that differs most."""
        return max(self.gaps.items(), key=lambda item: abs(item[1].value))


def prediction_errors(gaps: Mapping[Cell, Gap | None]) -> dict[float, PredictionError]:
    """By temperature, what the cells say whose gap is known; of those that have any."""
    known = {cell: gap for cell, gap in gaps.items() if gap is not None}
    cells = grouped(known, lambda cell: cell.temperature)
    return {at: PredictionError({cell: known[cell] for cell in of}) for at, of in cells.items()}

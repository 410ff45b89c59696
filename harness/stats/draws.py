"""Joint resampling of prompts and step times: one set of draws for every draft, K and rate.

All candidates are read off the same resamples, so that the difference of two drafts has the
interval of a paired comparison (the same prompts, the same text, the same target steps), and "A
beats B" the share of resamples in which it does. A resample is a vector of how often each prompt
was drawn, so a candidate costs one small matrix product.

Prompts are resampled within their prompt set; the interval is the percentile one at the expanded
level (Hesterberg 2015, as in `harness.stats.intervals`), whose coverage on simulated workloads is
in benchmarks/interval_coverage.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from harness.stats.intervals import (
    MIN_PROMPTS,
    MIN_SET,
    Array,
    Index,
    Interval,
    expanded_level,
    set_weights,
    strata_indices,
)

DRAWS = 4000


@dataclass(frozen=True, eq=False)
class PromptDraws:
    """Resampled prompts, and the workload's weights.

    Attributes:
        parts: for each prompt set, its members and how often each was drawn, [draws, members];
            the first row is the prompts as they are, each once.
        shares: weight of each set, in the same order.
        level: of the expanded percentile interval; None where there are too few prompts for one.
    """

    parts: tuple[tuple[Index, Array], ...]
    shares: Mapping[str, float]
    level: float | None

    def ratio(self, numerator: Array, denominator: Array) -> Array:
        """Weighted mean over sets of sum(numerator) / sum(denominator), [1 + draws].

        Args:
            numerator: per prompt, [n], or [n, m] for m columns at once ([1 + draws, m]).
            denominator: per prompt, [n].
        """
        total = 0.0
        for share, (members, times) in zip(self.shares.values(), self.parts, strict=True):
            below = times @ denominator[members]
            above = times @ numerator[members]
            total = total + share * above / (below[:, None] if above.ndim == 2 else below)
        return np.asarray(total, dtype=np.float64)

    def pooled(self, numerator: Array, denominator: Array) -> Array:
        """sum(numerator) / sum(denominator) over all prompts of all sets, [1 + draws]."""
        above = sum(times @ numerator[members] for members, times in self.parts)
        below = sum(times @ denominator[members] for members, times in self.parts)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(above / below, dtype=np.float64)

    def interval(self, values: Array) -> Interval | None:
        """The interval from [1 + draws] values; None with too few prompts or not all finite."""
        if self.level is None or not np.isfinite(values).all():
            return None
        tail = (1.0 - self.level) / 2.0
        lo, hi = np.quantile(values[1:], [tail, 1.0 - tail])
        return Interval(float(lo), float(hi))


def draw_prompts(
    prompt_sets: tuple[str, ...],
    weights: Mapping[str, float] | None,
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> PromptDraws:
    """Resample prompts within their sets.

    Args:
        prompt_sets: the set of each prompt, n.
        weights: of the sets, equal if None; a set of weight 0 is not looked at.
        draws: resamples.
        seed: of the resampling.

    Raises:
        UserError: weights that do not fit the prompt sets.
    """
    shares = {name: w for name, w in set_weights(prompt_sets, weights).items() if w > 0.0}
    rng = np.random.default_rng([seed, 0])
    parts: list[tuple[Index, Array]] = []
    for name, members in strata_indices(prompt_sets):
        if name in shares:
            size = len(members)
            drawn = rng.multinomial(size, np.full(size, 1.0 / size), draws).astype(np.float64)
            parts.append((members, np.concatenate([np.ones((1, size)), drawn])))
    sizes = [len(members) for members, _ in parts]
    enough = sum(sizes) >= MIN_PROMPTS and min(sizes) >= MIN_SET
    level = expanded_level(sum(sizes), len(sizes)) if enough else None
    return PromptDraws(tuple(parts), shares, level)

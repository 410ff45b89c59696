"""Bootstrap intervals over prompts.

The prompt is the unit: tokens of one text are not independent, so resampling tokens or rounds would
give intervals that are far too narrow. Everything measured for a prompt (its baseline, its
speculative run, all repetitions) is resampled together, and prompts are resampled within their
prompt set, so that a workload keeps its mix. BCa (Efron 1987), by `scipy.stats.bootstrap`; where it
is undefined (all prompts equal, say) the percentile interval. Fewer than MIN_PROMPTS prompts, or a
set of a single prompt, which resampling cannot vary, give None: no interval is better than a wrong
one.

A bootstrap of few prompts is too narrow: it divides by n, and knows no t distribution. The level is
widened accordingly (Hesterberg, "What Teachers Should Know About the Bootstrap", 2015, the expanded
percentile interval), which makes the interval of a mean as wide as Student's. Simulated with 8
prompts of uneven length, a plain 95 % BCa interval misses the truth 14 % of the time, this one 9 %.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit
from scipy.stats import bootstrap

from harness.records import UserError

Array = NDArray[np.float64]
Index = NDArray[np.intp]

MIN_PROMPTS = 8
# Resampling two or three prompts of a set cannot show how much they vary: with four sets of two,
# nulls said `speculate` in 19 % of simulations.
MIN_SET = 4
CONFIDENCE = 0.95
RESAMPLES = 4000


class Interval(NamedTuple):
    """A two-sided 95 % interval."""

    lo: float
    hi: float


def strata_indices(strata: Sequence[str]) -> list[tuple[str, Index]]:
    """For each stratum, in order of name, the positions of its members.

    Args:
        strata: the stratum (prompt set) of each prompt, n names.
    """
    names = np.asarray(strata, dtype=object)
    return [(name, np.flatnonzero(names == name)) for name in sorted(set(strata))]


def set_weights(strata: Sequence[str], weights: Mapping[str, float] | None) -> dict[str, float]:
    """The weight of each stratum in the workload, summing to 1; equal weights if None.

    Raises:
        UserError: a stratum without weight, a weight below 0 or not finite, or all weights 0.
    """
    names = sorted(set(strata))
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


def expanded_level(n: int, strata: int) -> float:
    """The bootstrap level whose interval for a mean of n prompts is as wide as Student's at 95 %.

    Source: Hesterberg 2015, section 3.3 (expanded percentile interval), with n - strata degrees of
    freedom.
    """
    degrees = n - strata
    student = float(stdtrit(degrees, (1.0 + CONFIDENCE) / 2.0))
    return math.erf(student * math.sqrt(n / degrees) / math.sqrt(2.0))


def workload_ratio(sums: Sequence[Array], shares: Mapping[str, float], column: int) -> Array:
    """Weighted mean over sets of sum(column) / sum(column + 1): ms_per_token of a whole workload.

    Args:
        sums: column sums of each set, in order of its name, each of shape (..., m).
        shares: `set_weights`, in the same order.
        column: the numerator's; the denominator is the next one.
    """
    terms = [
        share * part[..., column] / part[..., column + 1]
        for share, part in zip(shares.values(), sums, strict=True)
    ]
    return np.sum(terms, axis=0)


def bootstrap_interval(
    columns: Array,
    strata: Sequence[str],
    combine: Callable[[Sequence[Array]], Array],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
    methods: Sequence[Literal["BCa", "percentile"]] = ("BCa", "percentile"),
) -> Interval | None:
    """The interval of a function of per-stratum column sums, prompts resampled within strata.

    Args:
        columns: shape (n, m), a row per prompt: its seconds, tokens, counts.
        strata: the stratum of each row.
        combine: maps the column sums of each stratum (in order of its name), each of shape
            (..., m), to the statistic, shape (...).
        seed: of the resampling.
        resamples: how many.
        methods: tried in turn until one gives finite bounds.

    Returns:
        None for fewer than MIN_PROMPTS rows, a stratum of one row, or a statistic that is not
        finite on every resample.
    """
    parts = [columns[members] for _, members in strata_indices(strata)]
    if len(columns) < MIN_PROMPTS or min(len(part) for part in parts) < MIN_SET:
        return None
    level = expanded_level(len(columns), len(parts))

    def statistic(*samples: Array, axis: int = -1) -> Array:
        sums = [
            part[sample.astype(np.intp)].sum(axis=axis - 1)
            for part, sample in zip(parts, samples, strict=True)
        ]
        return combine(sums)

    for method in methods:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            # An undefined BCa interval is handled here, not warned about.
            warnings.simplefilter("ignore")
            result = bootstrap(
                [np.arange(len(part)) for part in parts],
                statistic,
                n_resamples=resamples,
                vectorized=True,
                confidence_level=level,
                method=method,
                rng=np.random.default_rng(seed),
            )
        lo, hi = (float(bound) for bound in result.confidence_interval)
        if np.isfinite(lo) and np.isfinite(hi):
            return Interval(lo, hi)
    return None


def ratio_interval(
    numerator: Array, denominator: Array, strata: Sequence[str] | None = None, *, seed: int = 0
) -> Interval | None:
    """The interval of sum(numerator) / sum(denominator), such as accepted / (accepted + rejected).

    Args:
        numerator: one entry per prompt, n.
        denominator: likewise; a prompt's two entries are resampled together.
        strata: the prompt set of each prompt; one set if None.
        seed: of the resampling.

    Returns:
        None as `bootstrap_interval`, and where the ratio is 0 / 0.
    """

    def ratio(sums: Sequence[Array]) -> Array:
        total = sum(sums[1:], start=sums[0])
        return total[..., 0] / total[..., 1]

    names = [""] * len(numerator) if strata is None else strata
    return bootstrap_interval(np.stack([numerator, denominator], axis=1), names, ratio, seed=seed)


def speedup_interval(
    baseline_s: Array,
    baseline_tokens: Array,
    seconds: Array,
    tokens: Array,
    strata: Sequence[str] | None = None,
    weights: Mapping[str, float] | None = None,
    *,
    seed: int = 0,
) -> Interval | None:
    """The interval of a workload's speedup, a prompt's two runs resampled together.

    The statistic is sum over sets of weight * (baseline seconds / tokens), each a ratio of sums,
    divided by the same of the other run. With one set that is the plain ratio of ms_per_token.

    Args:
        baseline_s: decode seconds of plain decoding per prompt, n, repetitions summed.
        baseline_tokens: the tokens it emitted.
        seconds: decode seconds of the run that is judged, same prompts in the same order.
        tokens: the tokens it emitted.
        strata: the prompt set of each prompt; one set if None.
        weights: of the sets; equal if None.
        seed: of the resampling.

    Returns:
        None as `bootstrap_interval`.

    Raises:
        UserError: as `set_weights`.
    """
    names = [""] * len(seconds) if strata is None else strata
    shares = set_weights(names, weights)

    def workload_speedup(sums: Sequence[Array]) -> Array:
        return workload_ratio(sums, shares, 0) / workload_ratio(sums, shares, 2)

    columns = np.stack([baseline_s, baseline_tokens, seconds, tokens], axis=1)
    return bootstrap_interval(columns, names, workload_speedup, seed=seed)

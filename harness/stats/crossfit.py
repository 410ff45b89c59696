"""Choose on some prompts, score on the others: a speedup without the optimism of its choice.

The prompts are dealt into folds within each prompt set. For each fold the best candidate on all
other folds is chosen, and its times on this fold are what counts. Few folds are on purpose: when
one prompt at a time is held out, the choice hardly ever changes and is scored on prompts that made
it, so the interval is too narrow.

Predicted seconds rest on step times as well, and a lucky sample of those favours a candidate on
every prompt alike. So their samples are dealt into the same folds: chosen on the samples outside a
fold, scored with those inside, and the interval widened by their scatter.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.analysis.evidence import Candidate, Evidence, FoldTimes, StepNoise
from harness.stats.intervals import (
    Array,
    Index,
    Interval,
    bootstrap_interval,
    set_weights,
    speedup_interval,
    strata_indices,
    workload_ratio,
)

PART_PROMPTS = 4
# Normal quantile of a two-sided 95 % interval.
NORMAL = 1.96


@dataclass(frozen=True, eq=False)
class Workload:
    """Evidence as a table: seconds and tokens of the baseline, then of each candidate.

    Attributes:
        columns: shape (n, 2 + 2 C).
        strata: prompt set of each row, n.
        shares: weight of each set, in order of name, summing to 1.
        candidates: C names, in the order of the columns.
        step_noise: of predicted seconds, or None.
    """

    columns: Array
    strata: tuple[str, ...]
    shares: Mapping[str, float]
    candidates: tuple[Candidate, ...]
    step_noise: StepNoise | None = None

    def speedups(self, sums: Sequence[Array]) -> Array:
        """Each candidate's workload speedup, shape (..., C), from column sums of each set."""
        baseline = workload_ratio(sums, self.shares, 0)
        each = [
            baseline / workload_ratio(sums, self.shares, 2 + 2 * index)
            for index in range(len(self.candidates))
        ]
        return np.stack(each, axis=-1)

    def over(self, rows: Index) -> Array:
        """Each candidate's speedup over some rows, C; every set must have one among them."""
        sets = [np.intersect1d(members, rows) for _, members in strata_indices(self.strata)]
        return self.speedups([self.columns[members].sum(axis=0) for members in sets])

    def plain(self) -> Array:
        """Each candidate's speedup over all prompts, C."""
        return self.over(np.arange(len(self.columns)))


def workload_of(evidence: Evidence, weights: Mapping[str, float] | None) -> Workload:
    """The table of an evidence, sets of weight 0 left out.

    Raises:
        UserError: weights that do not fit the prompt sets.
    """
    shares = {name: w for name, w in set_weights(evidence.prompt_sets, weights).items() if w > 0}
    evidence = evidence.only(list(shares))
    timed = [evidence.baseline, *evidence.candidates.values()]
    columns = [column for times in timed for column in (times.seconds, times.tokens)]
    return Workload(
        np.stack(columns, axis=1).astype(np.float64),
        evidence.prompt_sets,
        shares,
        tuple(evidence.candidates),
        evidence.step_noise,
    )


@dataclass(frozen=True)
class Held:
    """Outcome of a cross-fit.

    Attributes:
        chose: how many folds preferred a candidate over K = 0.
        folds: how many folds there were.
        speedup: of the held-out times of each fold's best candidate.
        interval: of that speedup.
        ceiling: upper bound of the best candidate's speedup over resamples of the prompts.
    """

    chose: int
    folds: int
    speedup: float
    interval: Interval
    ceiling: float


def deal(strata: Sequence[str], folds: int, seed: int) -> Index:
    """The fold of each prompt, n: every set is shuffled and dealt out in turn.

    Args:
        strata: prompt set of each prompt.
        folds: how many.
        seed: of the shuffle.
    """
    rng = np.random.default_rng(seed)
    fold = np.empty(len(strata), dtype=np.intp)
    dealt = 0
    for _, members in strata_indices(strata):
        # The next set goes on where the last one stopped, so that folds stay of equal size.
        fold[rng.permutation(members)] = (dealt + np.arange(len(members))) % folds
        dealt += len(members)
    return fold


def cross_fit(workload: Workload, folds: int, seed: int) -> Held | None:
    """Score each fold's best candidate, chosen on the other folds.

    Args:
        workload: at least 2 prompts in each set.
        folds: at most so many; fewer, but 2, where a part would hold under PART_PROMPTS prompts.
        seed: of the dealing and of the resampling.

    Returns:
        None where there is no interval: see `bootstrap_interval`.
    """
    columns, strata = workload.columns, workload.strata
    ceiling = bootstrap_interval(
        columns,
        strata,
        lambda sums: workload.speedups(sums).max(axis=-1),
        seed=seed,
        methods=["percentile"],
    )
    if ceiling is None:
        return None
    folds = max(2, min(folds, len(strata) // PART_PROMPTS))
    fold = deal(strata, folds, seed)
    scored = columns[:, :4].copy()
    used = [int(part) for part in np.unique(fold)]
    noise: Mapping[Candidate, FoldTimes] = {}
    if workload.step_noise is not None:
        noise = workload.step_noise.by_fold(folds)
    exact = FoldTimes(np.ones(folds), np.ones(folds), np.zeros(folds))
    times = [noise.get(name, exact) for name in workload.candidates]
    chose, errors = 0, list[float]()
    for part in used:
        seen = np.array([time.chosen[part] for time in times])
        speedups = workload.over(np.flatnonzero(fold != part)) / seen
        best = int(np.argmax(speedups))
        chose += bool(speedups[best] > 1.0)
        mine = fold == part
        scored[mine, 2:] = columns[mine, 2 + 2 * best : 4 + 2 * best]
        scored[mine, 2] *= times[best].scored[part]
        errors.append(float(times[best].spread[part]))
    return _held(workload, scored, chose, errors, ceiling.hi, seed)


def _held(
    workload: Workload,
    scored: Array,
    chose: int,
    errors: Sequence[float],
    ceiling: float,
    seed: int,
) -> Held | None:
    """The held-out speedup with its interval, both bounds widened by the step times' error.

    The folds' step times are independent samples, so their errors average out over the folds.
    """
    strata, shares = workload.strata, workload.shares
    sums = [scored[members].sum(axis=0) for _, members in strata_indices(strata)]
    speedup = float(workload_ratio(sums, shares, 0) / workload_ratio(sums, shares, 2))
    before_s, before_tokens, after_s, after_tokens = scored.T
    interval = speedup_interval(
        before_s, before_tokens, after_s, after_tokens, strata, shares, seed=seed
    )
    if interval is None:
        return None
    error = NORMAL * math.sqrt(sum(value**2 for value in errors)) / len(errors)
    lo, hi = (_widened(speedup, bound, error) for bound in interval)
    best = float(workload.plain().max())
    return Held(chose, len(errors), speedup, Interval(lo, hi), _widened(best, ceiling, error))


def _widened(value: float, bound: float, error: float) -> float:
    """The bound moved away from the value: the logs of both half widths added in quadrature."""
    if error == 0.0:
        return bound
    width = math.log(bound / value)
    return value * math.exp(math.copysign(math.hypot(width, error), width))

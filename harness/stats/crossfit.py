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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.stats.bootstrap import (
    Array,
    Index,
    Interval,
    Resamples,
    only,
    resample,
    set_members,
    speedup_interval,
)

FOLD_PROMPTS = 4
# Normal quantile of a two-sided 95 % interval.
NORMAL = 1.96


@dataclass(frozen=True, eq=False)
class FoldTimes:
    """Predicted seconds had the steps been timed on part of the samples, relative to all of them.

    Attributes:
        chosen: [candidate, fold] on the samples outside each fold, which is what a choice may see.
        scored: [candidate, fold] on the fold's own samples, which the choice is scored with.
        spread: [candidate, fold] standard deviation of log(scored) from the samples' scatter.
    """

    chosen: Array
    scored: Array
    spread: Array


# Deals the samples of every step into so many folds; candidates as in the workload
TimesByFold = Callable[[int], FoldTimes]


@dataclass(frozen=True, eq=False)
class Workload:
    """What plain decoding and every candidate took, prompt by prompt.

    Attributes:
        baseline_s, baseline_tokens: [prompt] decode seconds and tokens of plain decoding.
        seconds, tokens: [candidate, prompt].
        prompt_sets: the set of each prompt.
        weights: of the sets, equal if None; none of them 0.
        times_by_fold: of predicted seconds, or None.
    """

    baseline_s: Array
    baseline_tokens: Array
    seconds: Array
    tokens: Array
    prompt_sets: tuple[str, ...]
    weights: Mapping[str, float] | None = None
    times_by_fold: TimesByFold | None = None

    def speedups(self, resamples: Resamples | None = None) -> Array:
        """Each candidate's speedup in each resample, [resample, candidate].

        Over all prompts, [candidate], if None.
        """
        if resamples is None:
            return self.speedups(resample(self.prompt_sets, self.weights, draws=0))[0]
        plain = resamples.ratio(self.baseline_s, self.baseline_tokens)
        pairs = zip(self.seconds, self.tokens, strict=True)
        each = [plain / resamples.ratio(seconds, tokens) for seconds, tokens in pairs]
        return np.stack(each, axis=-1)


@dataclass(frozen=True)
class CrossFit:
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


def deal_folds(prompt_sets: Sequence[str], folds: int, seed: int) -> Index:
    """The fold of each prompt: every set is shuffled and dealt out in turn."""
    rng = np.random.default_rng(seed)
    fold = np.empty(len(prompt_sets), dtype=np.intp)
    dealt = 0
    for _, members in set_members(prompt_sets):
        # The next set goes on where the last one stopped, so that folds stay of equal size.
        fold[rng.permutation(members)] = (dealt + np.arange(len(members))) % folds
        dealt += len(members)
    return fold


def cross_fit(workload: Workload, folds: int, seed: int) -> CrossFit | None:
    """Score each fold's best candidate, chosen on the other folds.

    Args:
        workload: at least 2 prompts in each set.
        folds: at most so many; fewer, but 2, where a fold would hold under FOLD_PROMPTS prompts.
        seed: of the dealing and of the resampling.

    Returns:
        None where there is no interval: see `bootstrap_interval`.
    """
    prompt_sets, weights = workload.prompt_sets, workload.weights
    resamples = resample(prompt_sets, weights, seed=seed)
    ceiling = resamples.interval(workload.speedups(resamples).max(axis=-1))
    if ceiling is None:
        return None
    folds = max(2, min(folds, len(prompt_sets) // FOLD_PROMPTS))
    fold_of_prompt = deal_folds(prompt_sets, folds, seed)
    shape = (len(workload.seconds), folds)
    times = FoldTimes(np.ones(shape), np.ones(shape), np.zeros(shape))
    if workload.times_by_fold is not None:
        times = workload.times_by_fold(folds)
    seconds, tokens = np.empty_like(workload.baseline_s), np.empty_like(workload.baseline_s)
    chose, variances = 0, list[float]()
    used = [int(fold) for fold in np.unique(fold_of_prompt)]
    for fold in used:
        others = only(prompt_sets, weights, np.flatnonzero(fold_of_prompt != fold))
        speedups = workload.speedups(others)[0] / times.chosen[:, fold]
        best = int(np.argmax(speedups))
        chose += bool(speedups[best] > 1.0)
        held_out = fold_of_prompt == fold
        seconds[held_out] = workload.seconds[best, held_out] * times.scored[best, fold]
        tokens[held_out] = workload.tokens[best, held_out]
        variances.append(float(times.spread[best, fold]) ** 2)
    before = (workload.baseline_s, workload.baseline_tokens)
    interval = speedup_interval(*before, seconds, tokens, prompt_sets, weights, seed=seed)
    if interval is None:
        return None
    scored = Workload(*before, seconds[None], tokens[None], prompt_sets, weights)
    speedup = float(scored.speedups()[0])
    # The folds' step times are independent samples, so their errors average out over the folds.
    error = NORMAL * math.sqrt(sum(variances)) / len(used)
    return CrossFit(
        chose=chose,
        folds=len(used),
        speedup=speedup,
        interval=Interval(*(_widened(speedup, bound, error) for bound in interval)),
        ceiling=_widened(float(workload.speedups().max()), ceiling.hi, error),
    )


def _widened(value: float, bound: float, error: float) -> float:
    """The bound moved away from the value: the logs of both half widths added in quadrature."""
    if error == 0.0:
        return bound
    width = math.log(bound / value)
    return value * math.exp(math.copysign(math.hypot(width, error), width))

"""Times of plain decoding and of every candidate, prompt by prompt, and the errors of timing.

Seconds are measured, or predicted from replayed rounds and from round times. Predicted ones err by
the prompts and by the visits that timed the rounds, which all K of a draft share; those of another
engine by what its requests tell of its costs. On the log scale these parts are independent.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from harness.stats.jackknife import (
    CONFIDENCE,
    Array,
    Index,
    Interval,
    Variance,
    enough_prompts,
    half_width,
    independent_errors,
    joined,
    left_out_variance,
    lower_half_width,
    prompt_errors,
    prompt_variance,
    set_members,
    set_weights,
)

# Share of the visits at either end that the mean of round times leaves out
TRIMMED = 0.25
# Degrees of freedom of an error whose size is known
KNOWN = 1e9


@dataclass(frozen=True, eq=False)
class VisitCosts:
    """Round costs of some candidates in each visit that timed them."""

    candidates: Index  # their positions in the workload
    costs: Array  # [candidate of these, visit] relative to the mean over visits

    @property
    def without(self) -> Array:
        """The change of the log of the mean cost by leaving out each visit, [candidate, visit]."""
        values = _pseudo_values(self.costs)
        return np.log((values.sum(axis=1, keepdims=True) - values) / (values.shape[1] - 1))

    @property
    def sizes(self) -> Array:
        """Sizes of the visits, for degrees of freedom; trimmed ones add none."""
        visits = int(self.costs.shape[1])
        return np.ones(visits - 2 * _trimmed(visits))

    @property
    def variance(self) -> Variance:
        """The variance of the log of the mean cost, [candidate of these]."""
        return left_out_variance(self.without, self.sizes)


@dataclass(frozen=True, eq=False)
class SharedError:
    """An error of what candidates cost that is the same on every prompt, and at every choice."""

    # [candidate, factor] by how much a standard deviation of each independent factor moves the
    # logarithm of a candidate's cost
    moves: Array
    degrees: float  # of freedom of these standard deviations

    @property
    def variance(self) -> Variance:
        """The variance of the logarithm of each candidate's cost, [candidate]."""
        value = (self.moves**2).sum(axis=1)
        return Variance(value, np.full_like(value, self.degrees))


@dataclass(frozen=True, eq=False)
class Workload:
    """Times of plain decoding and every candidate, prompt by prompt."""

    # baseline_s, baseline_tokens: [prompt] decode seconds and tokens of plain decoding
    baseline_s: Array
    baseline_tokens: Array
    # seconds, tokens: [candidate, prompt]
    seconds: Array
    tokens: Array
    prompt_sets: tuple[str, ...]  # the set of each prompt
    weights: Mapping[str, float] | None = None  # of the sets, equal if None; none of them 0
    # Of predicted seconds; each candidate is in one of them, or its rounds are exact
    visits: tuple[VisitCosts, ...] = ()
    shared: tuple[SharedError, ...] = ()  # further errors of predicted seconds
    # Of the logarithm of any predicted speedup, besides prompts and visits
    error: Variance | None = None

    def log_speedups(self, kept: Array | None = None) -> Array:
        """Each candidate's log speedup, [candidate]; [candidate, case] with prompts left out.

        `kept` is [case, prompt], 1.0 but for the prompts that are left out.
        """
        if kept is None:
            return self.log_speedups(np.ones((1, len(self.prompt_sets))))[:, 0]
        shares = set_weights(self.prompt_sets, self.weights)
        plain, costs = np.zeros(()), np.zeros(())
        for name, rows in set_members(self.prompt_sets):
            keep = kept[:, rows]
            before = (keep @ self.baseline_s[rows]) / (keep @ self.baseline_tokens[rows])
            after = (keep @ self.seconds[:, rows].T) / (keep @ self.tokens[:, rows].T)
            plain, costs = plain + shares[name] * before, costs + shares[name] * after.T
        return np.log(plain / costs)

    @cached_property
    def without(self) -> Array:
        """Each candidate's log speedup without each prompt, [candidate, prompt]."""
        return self.log_speedups(1.0 - np.eye(len(self.prompt_sets)))

    def log_speedup_variance(self, to: int | None = None) -> Variance:
        """The variance of each candidate's log speedup, [candidate].

        With `to` that of its difference to this candidate's, in which cancels what the two have in
        common: the prompts, the visits of one draft, errors that all predictions share.
        """
        without = _less(self.without, to)
        prompts = prompt_variance(without, self.prompt_sets, self.baseline_tokens)
        return joined([prompts, self.timing_variance(to)])

    def visit_variance(self, to: int | None = None) -> Variance:
        """The part of `log_speedup_variance` that is due to visits, [candidate]."""
        candidates = len(self.seconds)
        parts = [Variance(np.zeros(candidates), np.ones(candidates))]
        for group in self.visits:
            without = np.zeros((candidates, group.costs.shape[1]))
            without[group.candidates] = group.without
            parts.append(left_out_variance(_less(without, to), group.sizes))
        return joined(parts)

    def timing_variance(self, to: int | None = None) -> Variance:
        """The part of `log_speedup_variance` that is not the prompts', [candidate]."""
        shared = [replace(error, moves=_less(error.moves, to)).variance for error in self.shared]
        of_all = self.error if to is None else None
        return joined(filter(None, [self.visit_variance(to), of_all, *shared]))

    def timing_errors(self) -> tuple[Array, float]:
        """Independent parts of the errors that are not the prompts', and a variance of each's own.

        [candidate, part], by standard deviations: what the candidates of a draft share by its
        visits, and all of them by other errors.
        """
        parts = [np.zeros((len(self.seconds), 0)), *(error.moves for error in self.shared)]
        for group in self.visits:
            errors = np.zeros((len(self.seconds), group.costs.shape[1]))
            errors[group.candidates] = independent_errors(group.without)
            parts.append(errors)
        return np.hstack(parts), 0.0 if self.error is None else float(self.error.value)

    def drawn(self, draws: int, seed: int) -> Array:
        """Log speedups as they may be, [draw, candidate]: normal, as the jackknife has them vary.

        What candidates share, prompts, a draft's visits and other errors, moves them together.
        """
        prompts = prompt_errors(self.without, self.prompt_sets)
        timing, own = self.timing_errors()
        moves = np.hstack([prompts, timing, math.sqrt(own) * np.eye(len(prompts))])
        rng = np.random.default_rng(seed)
        return self.log_speedups() + rng.normal(size=(draws, moves.shape[1])) @ moves.T

    def intervals(self) -> list[Interval] | None:
        """Intervals of each candidate's speedup, unadjusted; None with too few prompts."""
        if not enough_prompts(self.prompt_sets):
            return None
        logs, variance = self.log_speedups(), self.log_speedup_variance()
        half = half_width(variance, CONFIDENCE)
        lower = lower_half_width(variance, half, self.without, self.prompt_sets)
        bounds = np.exp([logs - lower, logs + half]).T
        return [Interval(float(lo), float(hi)) for lo, hi in bounds]


def _less(values: Array, to: int | None) -> Array:
    """[candidate, ...] values less those of one candidate; themselves if None."""
    return values if to is None else values - values[to]


def _trimmed(number: int) -> int:
    """The number of visits that a trimmed mean leaves out at either end."""
    return int(TRIMMED * number)


def _pseudo_values(costs: Array) -> Array:
    """Values whose mean is 1, and whose plain mean errs as the trimmed mean of the costs does.

    Of [candidate, visit] costs. Source: Tukey and McLaughlin, 1963: winsorised values over the
    share that is not trimmed.
    """
    number = costs.shape[1]
    cut = _trimmed(number)
    ordered = np.sort(costs, axis=1)
    kept = np.clip(costs, ordered[:, [cut]], ordered[:, [number - 1 - cut]])
    relative = kept / kept.mean(axis=1, keepdims=True)
    return 1.0 + (relative - 1.0) / (1.0 - 2.0 * cut / number)

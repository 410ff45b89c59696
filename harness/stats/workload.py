"""Times of plain decoding and of every candidate, prompt by prompt, and the errors of timing.

Seconds are measured, or predicted from replayed rounds and from round times. Predicted ones err by
the prompts and by the visits that timed the rounds, which all K of a draft share; those of another
engine by what its requests tell of its costs. On the log scale these parts are independent.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from harness.stats.jackknife import (
    Array,
    Estimate,
    Interval,
    Variance,
    independent_errors,
    joined,
    left_out_variance,
    log_speedup,
)

# Share of the visits at either end that the mean of round times leaves out
TRIMMED = 0.25
# Degrees of freedom of an error whose size is known
KNOWN = 1e9


@dataclass(frozen=True, eq=False)
class SharedError:
    """An error of what candidates cost that is the same on every prompt."""

    # [candidate, factor] by how much a standard deviation of each independent factor moves the
    # logarithm of a candidate's cost
    moves: Array
    degrees: float  # of freedom of these standard deviations

    @property
    def variance(self) -> Variance:
        """The variance of the logarithm of each candidate's cost, [candidate]."""
        value = (self.moves**2).sum(axis=1)
        return Variance(value, np.full_like(value, self.degrees))

    def among(self, number: int, rows: Sequence[int]) -> "SharedError":
        """The same among so many candidates, of which it moves these."""
        moves = np.zeros((number, self.moves.shape[1]))
        moves[rows] = self.moves
        return replace(self, moves=moves)


def visit_error(costs: Array) -> SharedError:
    """The error of mean round costs, by leaving out one visit at a time.

    The mean is trimmed: it errs as the plain mean of winsorised costs over the share that is not
    trimmed does (Tukey and McLaughlin, 1963).

    `costs` are [candidate, visit], of two visits or more; candidates of a draft share visits.
    """
    number = costs.shape[1]
    cut = int(TRIMMED * number)
    ordered = np.sort(costs, axis=1)
    kept = np.clip(costs, ordered[:, [cut]], ordered[:, [number - 1 - cut]])
    relative = kept / kept.mean(axis=1, keepdims=True)
    values = 1.0 + (relative - 1.0) / (1.0 - 2.0 * cut / number)
    without = np.log((number - values) / (number - 1))
    return SharedError(independent_errors(without), max(1.0, number - 2.0 * cut - 1.0))


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
    timing: tuple[SharedError, ...] = ()  # of predicted seconds; none where rounds are exact
    names: tuple[Hashable, ...] = ()  # of the prompts, as of pairs; their numbers if empty

    @cached_property
    def log_speedups(self) -> Estimate:
        """The logarithms of the speedups, [candidate], as they vary with the prompts."""
        times = self.baseline_s, self.baseline_tokens, self.seconds, self.tokens
        logs = log_speedup(*times, self.prompt_sets, self.weights)
        return replace(logs, sizes=self.baseline_tokens)

    def variance(self, to: int | None = None) -> Variance:
        """The variance of each candidate's log speedup, [candidate].

        With `to` that of its difference to this candidate's, in which cancels what the two have in
        common: the prompts, the visits of one draft, errors that all predictions share.
        """
        return joined([self.prompt_variance(to), self.timing_variance(to)])

    def prompt_variance(self, to: int | None = None) -> Variance:
        """The part of `variance` that is the prompts'."""
        without = self.log_speedups.without
        without = without if to is None else without - without[to]
        return left_out_variance(without, self.baseline_tokens, self.prompt_sets)

    def timing_variance(self, to: int | None = None, alike: Array | float = 1.0) -> Variance:
        """The part of `variance` that is not the prompts'.

        `alike` are 0.0 for candidates whose difference is not taken, else 1.0, [candidate].
        """
        none = np.zeros(len(self.seconds))
        parts = [Variance(none, none + 1.0)]
        for error in self.timing:
            taken_off = 0.0 if to is None else np.outer(alike + none, error.moves[to])
            parts.append(replace(error, moves=error.moves - taken_off).variance)
        return joined(parts)

    @property
    def errors(self) -> Array:
        """[candidate, part] independent parts of the errors: of the prompts, then of timing."""
        return np.hstack([self.log_speedups.errors, *(error.moves for error in self.timing)])

    def drawn(self, draws: int, seed: int) -> Array:
        """Log speedups as they may be, [draw, candidate]: normal, as the jackknife has them vary.

        What candidates share, prompts, a draft's visits and other errors, moves them together.
        """
        errors = self.errors
        normal = np.random.default_rng(seed).normal(size=(draws, errors.shape[1]))
        return self.log_speedups.value + normal @ errors.T

    def intervals(self) -> list[Interval] | None:
        """Intervals of each candidate's speedup, unadjusted; None with too few prompts."""
        bounds = self.log_speedups.bounds(self.timing_variance(), skew=True)
        return None if bounds is None else [Interval(*each) for each in np.exp(bounds).T.tolist()]

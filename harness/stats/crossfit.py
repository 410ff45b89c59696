"""Choose on some prompts, score on the others: a speedup without the optimism of its choice.

The prompts are dealt into folds within each prompt set. For each fold the best candidate on all
other folds is chosen, and what it took on this fold is what counts. Few folds are on purpose: when
one prompt at a time is held out, the choice hardly ever changes and is scored on prompts that made
it. One deal depends on its luck, so there are DEALS of them.

Predicted seconds rest on round times as well, and lucky ones favour a candidate on every prompt
alike. So the visits that timed the rounds are dealt into the same folds: a choice sees the visits
outside a fold and is scored with those inside.

The candidate that is named is the best on all prompts, whatever the deals, and the number beside it
is its speedup there, less the optimism of choosing, which is how much better the choices did on all
prompts than on those held out of them. The error is the jackknife's over prompts and over
visits, every choice made again without the one left out, on the log scale.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
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
    prompt_variance,
    set_members,
    set_weights,
)

FOLDS = 4
# A fold of fewer prompts scores a choice too coarsely
FOLD_PROMPTS = 4
# How often prompts are dealt: as often as that many candidates times prompts times deals, between
# the two. Few candidates and prompts take little time, and there the luck of a deal is largest.
DEALS_WORK = 400_000
LEAST_DEALS, MOST_DEALS = 240, 3840
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

    def log_speedup_variance(self, to: int | None = None) -> Variance:
        """The variance of each candidate's log speedup, [candidate].

        With `to` that of its difference to this candidate's, in which cancels what the two have in
        common: the prompts, the visits of one draft, errors that all predictions share.
        """
        without = self.log_speedups(1.0 - np.eye(len(self.prompt_sets)))
        prompts = prompt_variance(_less(without, to), self.prompt_sets, self.baseline_tokens)
        shared = [replace(error, moves=_less(error.moves, to)).variance for error in self.shared]
        of_all = self.error if to is None else None
        return joined(filter(None, [prompts, self.visit_variance(to), of_all, *shared]))

    def visit_variance(self, to: int | None = None) -> Variance:
        """The part of `log_speedup_variance` that is due to visits, [candidate]."""
        candidates = len(self.seconds)
        parts = [Variance(np.zeros(candidates), np.ones(candidates))]
        for group in self.visits:
            without = np.zeros((candidates, group.costs.shape[1]))
            without[group.candidates] = group.without
            parts.append(left_out_variance(_less(without, to), group.sizes))
        return joined(parts)

    def further_errors(self, candidate: int) -> Iterator[Variance]:
        """Variances of one candidate's log speedup, besides prompts and visits."""
        if self.error is not None:
            yield self.error
        for value, degrees in (error.variance for error in self.shared):
            yield Variance(value[candidate], degrees[candidate])

    def drawn(self, draws: int, seed: int) -> Array:
        """Log speedups as they may be, [draw, candidate]: normal, as the jackknife has them vary.

        What candidates share, prompts, a draft's visits and other errors, moves them together.
        """
        without = self.log_speedups(1.0 - np.eye(len(self.prompt_sets)))
        parts = [(slice(None), without[:, rows]) for _, rows in set_members(self.prompt_sets)]
        parts += [(group.candidates, group.without) for group in self.visits]
        rng = np.random.default_rng(seed)
        logs = np.tile(self.log_speedups(), (draws, 1))
        for candidates, values in parts:
            moves = independent_errors(values)
            logs[:, candidates] += rng.normal(size=(draws, moves.shape[1])) @ moves.T
        for error in self.shared:
            logs += rng.normal(size=(draws, error.moves.shape[1])) @ error.moves.T
        if self.error is not None:
            logs += rng.normal(size=logs.shape) * math.sqrt(float(self.error.value))
        return logs

    def intervals(self) -> list[Interval] | None:
        """Intervals of each candidate's speedup, unadjusted; None with too few prompts."""
        if not enough_prompts(self.prompt_sets):
            return None
        logs, half = self.log_speedups(), half_width(self.log_speedup_variance(), CONFIDENCE)
        bounds = np.exp([logs - half, logs + half]).T
        return [Interval(float(lo), float(hi)) for lo, hi in bounds]


def _less(values: Array, to: int | None) -> Array:
    """[candidate, ...] values less those of one candidate; themselves if None."""
    return values if to is None else values - values[to]


@dataclass(frozen=True, eq=False)
class CrossFit:
    """Outcome of a cross-fit; speedups are logarithms, variances those of the logarithms."""

    named: int  # the candidate, the best on all prompts and visits unless another one was asked for
    prefers_plain: bool  # whether at least half of the choices are K = 0
    score: float  # the named candidate's on all prompts and visits, less the optimism of choosing
    # prompts, visits: the two parts of its variance, all that is not the prompts' in the second
    prompts: Variance
    visits: Variance
    plain_scores: Array  # [candidate] on all prompts and visits, with the optimism of a choice
    plain_variances: Variance  # of these

    @property
    def speedup(self) -> float:
        """The speedup of the named candidate."""
        return math.exp(self.score)

    @property
    def variance(self) -> Variance:
        """The variance of the speedup's logarithm."""
        return joined([self.prompts, self.visits])

    def interval(self, level: float) -> Interval:
        """The interval of the speedup."""
        half = float(half_width(self.variance, level))
        return Interval(math.exp(self.score - half), math.exp(self.score + half))

    def ceiling(self, level: float) -> float:
        """The largest upper bound of any candidate's speedup on all prompts."""
        return math.exp((self.plain_scores + half_width(self.plain_variances, level)).max())


def deal_folds(
    prompt_sets: Sequence[str], folds: int, deals: int, rng: np.random.Generator
) -> Index:
    """The fold of each prompt, [deal, prompt]: every set is shuffled and dealt out in turn."""
    fold = np.empty((deals, len(prompt_sets)), dtype=np.intp)
    dealt = 0
    for _, members in set_members(prompt_sets):
        # The next set goes on where the last one stopped, so that folds stay of equal size.
        in_turn = np.tile((dealt + np.arange(len(members))) % folds, (deals, 1))
        fold[:, members] = rng.permuted(in_turn, axis=1)
        dealt += len(members)
    return fold


def deals_for(workload: Workload) -> int:
    """The number of times that prompts are dealt."""
    return min(MOST_DEALS, max(LEAST_DEALS, DEALS_WORK // workload.seconds.size))


def cross_fit(
    workload: Workload, seed: int, *, deals: int, named: int | None = None
) -> CrossFit | None:
    """Score the best candidate, less what choices on the other folds were too optimistic by.

    None where there are too few prompts for an interval.

    Args:
        workload: at least one candidate.
        deals: how often the prompts, and the visits, are dealt into folds.
        named: the candidate to score instead of the best.
    """
    if not enough_prompts(workload.prompt_sets):
        return None
    splits = _deal(workload, np.random.default_rng(seed), deals)
    costs = splits.prompt_costs * splits.factors.chosen
    choice = _cheapest(costs)
    plain_scores = workload.log_speedups()
    named = int(plain_scores.argmax()) if named is None else named
    return CrossFit(
        named=named,
        prefers_plain=2 * int((costs.min(axis=0) >= splits.plain_cost).sum()) >= len(choice),
        score=splits.score(choice, named, splits.factors),
        prompts=splits.prompt_variance(named),
        visits=joined([splits.visit_variance(named), *workload.further_errors(named)]),
        plain_scores=plain_scores,
        plain_variances=workload.log_speedup_variance(),
    )


# ---- the splits into what chooses and what scores ----


@dataclass(frozen=True, eq=False)
class _Set:
    """One prompt set: its members, its weight, and what those outside and inside splits sum to."""

    members: Index
    share: float
    baseline_s: Array  # [split] outside
    baseline_tokens: Array
    seconds: Array  # [candidate, split] outside
    tokens: Array
    scored_s: Array  # [candidate, split] inside
    scored_tokens: Array


@dataclass(frozen=True, eq=False)
class _Factors:
    """Round costs by some of the visits, relative to all of them."""

    chosen: Array  # [candidate, split] by the visits outside each split, which a choice sees
    scored: Array  # [candidate, split] by those inside
    every: Array  # [candidate] by both

    def copy(self) -> "_Factors":
        """Another one, to `replace` in."""
        return _Factors(self.chosen.copy(), self.scored.copy(), self.every.copy())

    def replace(self, candidates: Index, group: "_Factors") -> None:
        """Put those of some candidates in place."""
        self.chosen[candidates] = group.chosen
        self.scored[candidates] = group.scored
        self.every[candidates] = group.every


def _group_factors(inside: Array, costs: Array, left_out: int | None = None) -> _Factors:
    """Factors of one group of visits: by all of them, or without one.

    Args:
        inside: [split, visit] 1.0 where the split holds the visit out.
        costs: [candidate of the group, visit].
        left_out: the visit.
    """
    kept = np.ones(costs.shape[1])
    if left_out is not None:
        kept[left_out] = 0.0
    counts, sums = inside @ kept, (costs * kept) @ inside.T
    number, total = kept.sum(), (costs @ kept)[:, None]

    def mean(sums: Array, counts: Array) -> Array:
        means = np.where(counts > 0.0, sums / np.maximum(counts, 1.0), total / number)
        return np.asarray(means, dtype=np.float64)

    every = total[:, 0] / number
    return _Factors(mean(total - sums, number - counts), mean(sums, counts), every)


def _cheapest(costs: Array) -> Index:
    """The candidate of the lowest cost, the first of several, [split] of [candidate, split]."""
    lowest, choice = costs[0].copy(), np.zeros(costs.shape[1], dtype=np.intp)
    for candidate, cost in enumerate(costs[1:], start=1):
        choice[cost < lowest] = candidate
        np.minimum(lowest, cost, out=lowest)
    return choice


@dataclass(frozen=True, eq=False)
class _Splits:
    """Every fold of every deal, which is held out of one choice."""

    workload: Workload
    folds: int  # of each deal
    inside: Array  # [split, prompt] 1.0 where the split holds the prompt out
    sets: tuple[_Set, ...]
    visits: tuple[VisitCosts, ...]  # the workload's, as pseudo-values
    visits_inside: tuple[Array, ...]  # by group of visits, [split, visit]

    @property
    def plain_cost(self) -> Array:
        """Seconds per token of plain decoding outside each split, [split]."""
        parts = [part.share * part.baseline_s / part.baseline_tokens for part in self.sets]
        return np.sum(parts, axis=0)

    @cached_property
    def prompt_costs(self) -> Array:
        """Seconds per token of each candidate outside each split, [candidate, split]."""
        return np.sum([part.share * part.seconds / part.tokens for part in self.sets], axis=0)

    @cached_property
    def factors(self) -> _Factors:
        """The factors by all visits; 1 for candidates without visits."""
        ones = np.ones((len(self.workload.seconds), len(self.inside)))
        factors = _Factors(ones, ones, np.ones(len(ones))).copy()
        for inside, group in zip(self.visits_inside, self.visits, strict=True):
            factors.replace(group.candidates, _group_factors(inside, group.costs))
        return factors

    def score(
        self, choice: Index, named: int, factors: _Factors, left_out: int | None = None
    ) -> float:
        """The named candidate's log speedup less the optimism of the choices, [split].

        `left_out` is a prompt.
        """
        work = self.workload
        # In arrays of [candidate, split], laid flat
        chosen = choice * len(choice) + np.arange(len(choice))
        counts = np.bincount(choice, minlength=len(work.seconds))
        scored = factors.scored.take(chosen)
        # Seconds per token: plain decoding; the named candidate; the choices on what was held out
        # of them, and on everything
        plain = of_named = held_out = every = 0.0
        for part in self.sets:
            rows = part.members[part.members != left_out]
            seconds, tokens = work.seconds[:, rows].sum(axis=1), work.tokens[:, rows].sum(axis=1)
            held_s, held_tokens = part.scored_s.take(chosen), part.scored_tokens.take(chosen)
            if len(rows) < len(part.members):
                held_s = held_s - self.inside[:, left_out] * work.seconds[choice, left_out]
                held_tokens = held_tokens - self.inside[:, left_out] * work.tokens[choice, left_out]
            seconds *= factors.every
            plain += part.share * work.baseline_s[rows].sum() / work.baseline_tokens[rows].sum()
            of_named += part.share * seconds[named] / tokens[named]
            held_out += part.share * (scored @ held_s) / held_tokens.sum()
            every += part.share * (counts @ seconds) / (counts @ tokens)
        # The named candidate was chosen on all prompts and not on (1 - 1 / folds) of them, and what
        # luck is worth to a choice goes with the square root of their number; luck that held-out
        # prompts do not see is that much more.
        more = 1.0 / math.sqrt(1.0 - 1.0 / self.folds)
        return float(np.log(plain / of_named) - more * np.log(held_out / every))

    def prompt_variance(self, named: int) -> Variance:
        """Every choice and score again without each prompt."""
        work = self.workload
        without = np.empty(len(work.prompt_sets))
        for part in self.sets:
            of_others = self.prompt_costs - part.share * part.seconds / part.tokens
            for prompt in part.members:
                outside = 1.0 - self.inside[:, prompt]
                seconds = part.seconds - work.seconds[:, prompt, None] * outside
                tokens = part.tokens - work.tokens[:, prompt, None] * outside
                costs = of_others + part.share * seconds / tokens
                choice = _cheapest(costs * self.factors.chosen)
                without[prompt] = self.score(choice, named, self.factors, prompt)
        return prompt_variance(without, work.prompt_sets, work.baseline_tokens)

    def visit_variance(self, named: int) -> Variance:
        """Every choice and score again without each visit."""
        variances = [Variance(np.zeros(()), np.ones(()))]
        for inside, group in zip(self.visits_inside, self.visits, strict=True):
            without, factors = np.empty(group.costs.shape[1]), self.factors.copy()
            costs = self.prompt_costs * factors.chosen
            for visit in range(len(without)):
                factors.replace(group.candidates, _group_factors(inside, group.costs, visit))
                of_group = factors.chosen[group.candidates]
                costs[group.candidates] = self.prompt_costs[group.candidates] * of_group
                choice = _cheapest(costs)
                without[visit] = self.score(choice, named, factors)
            variances.append(left_out_variance(without, group.sizes))
        return joined(variances)


def _deal(workload: Workload, rng: np.random.Generator, deals: int) -> _Splits:
    folds = max(2, min(FOLDS, len(workload.prompt_sets) // FOLD_PROMPTS))

    def inside(prompt_sets: Sequence[str]) -> Array:
        fold = deal_folds(prompt_sets, folds, deals, rng)
        splits = fold[:, None] == np.arange(folds)[:, None]
        return splits.reshape(deals * folds, -1).astype(np.float64)

    held_out = inside(workload.prompt_sets)
    shares, outside = set_weights(workload.prompt_sets, workload.weights), 1.0 - held_out
    sets = tuple(
        _Set(
            members,
            shares[name],
            outside[:, members] @ workload.baseline_s[members],
            outside[:, members] @ workload.baseline_tokens[members],
            workload.seconds[:, members] @ outside[:, members].T,
            workload.tokens[:, members] @ outside[:, members].T,
            workload.seconds[:, members] @ held_out[:, members].T,
            workload.tokens[:, members] @ held_out[:, members].T,
        )
        for name, members in set_members(workload.prompt_sets)
    )
    visits = tuple(
        VisitCosts(group.candidates, _pseudo_values(group.costs)) for group in workload.visits
    )
    visits_inside = tuple(inside([""] * group.costs.shape[1]) for group in visits)
    return _Splits(workload, folds, held_out, sets, visits, visits_inside)


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

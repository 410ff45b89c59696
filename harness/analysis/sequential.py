"""Score prompts in batches and stop a draft as soon as it is dominated.

After each batch every draft still running has predicted seconds on the prompts so far. A draft
stops when every one of its K is slower than the leader beyond doubt: the one-sided upper bound of
log(leader's seconds / its seconds), paired over prompts, is below 0. Plain decoding is in the race
too, at no cost, so the race also ends when speculation is decided either way. When one competitor
is left, the rest of the prompts is saved.

The bound is Student's on the linearised log ratio, prompts stratified by set. Its level is
error / (competitors - 1) / looks (Bonferroni over the pairs that a wrong stop can come from, and
over the looks), so that the true best is stopped with a probability of at most about `error`;
simulated in tests/test_coverage_simulation.py. Step times are taken at their medians: batches of
prompts do not sharpen those. A race that stops when it is ahead overstates the leader a little, so
report the survivors' intervals as those of the prompts they were scored on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from scipy.special import stdtrit

from harness.analysis.evidence import Candidate, Evidence
from harness.records import UserError
from harness.stats.intervals import MIN_PROMPTS, MIN_SET, Array, Index, set_weights, strata_indices

ERROR = 0.05
BATCH = 8


@dataclass(frozen=True)
class Stopped:
    """A competitor that was stopped (draft None: plain decoding).

    Attributes:
        prompts: after how many.
        leader, leader_k: what it was dominated by (None and 0: plain decoding).
        behind: leader's speedup / its own at its best K, at that look.
        behind_at_least: that ratio's lower bound, above 1.
    """

    draft: str | None
    prompts: int
    leader: str | None
    leader_k: int
    behind: float
    behind_at_least: float


@dataclass(frozen=True)
class Race:
    """Where a sequential audition stands.

    Attributes:
        drafts: all of them.
        looks: how many batches there are at most.
        running: competitors not stopped yet, None for plain decoding.
        stopped: the others, in order.
        scored: by draft, prompts it was scored on.
    """

    drafts: tuple[str, ...]
    looks: int
    running: tuple[str | None, ...]
    stopped: tuple[Stopped, ...]
    scored: Mapping[str, int]

    @property
    def to_score(self) -> tuple[str, ...]:
        """The drafts that the next batch of prompts is for; none once the order is decided."""
        left = tuple(draft for draft in self.running if draft is not None)
        return left if len(self.running) > 1 else ()

    def without(self, draft: str) -> "Race":
        """The race after a draft broke down: it is neither scored nor ranked any more."""
        return replace(
            self,
            running=tuple(name for name in self.running if name != draft),
            scored={name: count for name, count in self.scored.items() if name != draft},
        )

    def savings(self, prompts: int) -> "Savings":
        """What was saved of scoring every draft on this many prompts."""
        done, full = sum(self.scored.values()), len(self.drafts) * prompts
        return Savings(done, full, 1.0 - done / full if full else 0.0)


@dataclass(frozen=True)
class Savings:
    """Draft-prompt scorings done, those of a full audition, and the share that was saved."""

    done: int
    full: int
    saved_share: float


def start_race(drafts: Sequence[str], looks: int) -> Race:
    """A race in which nothing was scored yet.

    Args:
        drafts: their names.
        looks: how many batches there are at most.

    Raises:
        UserError: no draft, one twice, or no batch.
    """
    twice = [draft for draft in drafts if list(drafts).count(draft) > 1]
    if twice or not drafts:
        raise UserError(f"drafts: {twice[0]!r} is listed twice" if twice else "drafts: none given")
    if looks < 1:
        raise UserError(f"prompts: {looks} batches; give at least one prompt")
    return Race(tuple(drafts), looks, (*drafts, None), (), dict.fromkeys(drafts, 0))


def batches(prompt_sets: Sequence[str], size: int = BATCH, seed: int = 0) -> list[Index]:
    """Deal the prompts into batches, each with the mix of the sets.

    Args:
        prompt_sets: the set of each prompt, n.
        size: prompts of a batch; the first has at least MIN_PROMPTS.
        seed: of the shuffle within the sets.

    Raises:
        UserError: a size below 1.
    """
    if size < 1:
        raise UserError(f"batch={size}: must be 1 prompt or more")
    rng = np.random.default_rng(seed)
    place = np.empty(len(prompt_sets))
    for _, members in strata_indices(prompt_sets):
        # Even spacing over the whole audition keeps every batch's mix.
        place[rng.permutation(members)] = (np.arange(len(members)) + 0.5) / len(members)
    order = np.argsort(place, kind="stable")
    first = max(size, MIN_PROMPTS)
    cuts = [0, *range(first, len(order), size), len(order)]
    return [order[a:b] for a, b in pairwise(cuts) if b > a]


def look(
    race: Race,
    evidence: Evidence,
    weights: Mapping[str, float] | None = None,
    *,
    error: float = ERROR,
) -> Race:
    """Stop the competitors that the prompts so far show to be dominated.

    Args:
        race: before this batch.
        evidence: of the drafts in `race.to_score`, on all prompts they were scored on so far.
        weights: of the prompt sets, equal if None.
        error: probability at which the true best may be stopped, over the whole race.

    Returns:
        The race after this batch. Nobody is stopped on fewer than MIN_PROMPTS prompts, or where a
        prompt set has a single one.

    Raises:
        UserError: evidence that lacks a draft, or weights that do not fit.
    """
    size = len(evidence.prompts)
    missing = [d for d in race.to_score if all(name != d for name, _ in evidence.candidates)]
    if missing:
        raise UserError(f"drafts: {missing[0]!r} was not scored on this batch; score or drop it")
    scored = {**race.scored, **dict.fromkeys(race.to_score, size)}
    strata = strata_indices(evidence.prompt_sets)
    stopped: list[Stopped] = []
    if size >= MIN_PROMPTS and min(len(members) for _, members in strata) >= MIN_SET:
        level = error / len(race.drafts) / race.looks
        stopped = _dominated(race.running, _costs(evidence, weights), strata, level)
    gone = [entry.draft for entry in stopped]
    return Race(
        race.drafts,
        race.looks,
        tuple(draft for draft in race.running if draft not in gone),
        (*race.stopped, *stopped),
        scored,
    )


Costs = Mapping[tuple[str | None, int], Array]


def _costs(evidence: Evidence, weights: Mapping[str, float] | None) -> Costs:
    """Each prompt's part of the workload's seconds per token, by candidate; (None, 0) is plain."""
    shares = set_weights(evidence.prompt_sets, weights)
    sets = np.asarray(evidence.prompt_sets, dtype=object)
    tokens = evidence.baseline.tokens
    scale = np.zeros(len(tokens))
    for name, share in shares.items():
        scale[sets == name] = share / tokens[sets == name].sum()
    plain: tuple[str | None, int] = (None, 0)
    timed: dict[tuple[str | None, int], Array] = {plain: evidence.baseline.seconds * scale}
    return timed | {name: run.seconds * scale for name, run in evidence.candidates.items()}


def _dominated(
    running: Sequence[str | None],
    costs: Costs,
    strata: Sequence[tuple[str, Index]],
    level: float,
) -> list[Stopped]:
    """The competitors that are slower than the leader at every K, at this level."""
    by_draft: dict[str | None, list[Candidate | tuple[None, int]]] = {}
    for draft, k in costs:
        if draft in running:
            by_draft.setdefault(draft, []).append((draft, k))  # type: ignore[arg-type]
    best = {d: min(names, key=lambda n: float(costs[n].sum())) for d, names in by_draft.items()}
    leader = min(best.values(), key=lambda name: float(costs[name].sum()))
    found: list[Stopped] = []
    for draft, names in by_draft.items():
        if draft == leader[0]:
            continue
        uppers = [_upper(costs[leader], costs[name], strata, level) for name in names]
        if max(uppers) < 0.0:
            size = len(costs[leader])
            behind = float(costs[best[draft]].sum() / costs[leader].sum())
            found.append(Stopped(draft, size, *leader, behind, math.exp(-max(uppers))))
    return found


def _upper(leader: Array, other: Array, strata: Sequence[tuple[str, Index]], level: float) -> float:
    """Upper bound of log(leader's seconds / the other's), one-sided, paired over prompts."""
    influence = leader / leader.sum() - other / other.sum()
    variance = sum(len(members) * float(influence[members].var(ddof=1)) for _, members in strata)
    degrees = len(leader) - len(strata)
    student = float(stdtrit(degrees, 1.0 - level))
    return math.log(float(leader.sum() / other.sum())) + student * math.sqrt(variance)

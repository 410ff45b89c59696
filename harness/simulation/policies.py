"""How many tokens to draft, round by round: fixed, by load, and as engines adapt it.

Each says in `reads` what it decides by. `Oracle` knows what will be accepted, which no policy does:
it shows what is left to gain.

Upstream, read in October 2026:
- SGLang, python/sglang/srt/speculative/adaptive_spec_params.py and adaptive_step_router.py. With
  CUDA graphs it rounds the batch up to a recorded one before it looks the tier up; here it does
  not.
- vLLM, vllm/v1/worker/gpu/spec_decode/adaptive_verification.py, docs/features/speculative_decoding/
  adaptive_verification.md. There the draft drafts K tokens always, and fewer are verified; here a
  round costs what one costs that drafts as many. Its estimates of acceptance are of a head that was
  trained for it, or calibrated while it serves; here they are the draft's own probabilities.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import ClassVar

import numpy as np

from harness.simulation.server import Costs, Policy, Reads, Slot


@dataclass(frozen=True)
class Fixed(Policy):
    """K draft tokens in every round; 0 decodes plainly."""

    k: int

    def choose(self, active: Sequence[Slot]) -> Sequence[int]:
        """K for each."""
        return [self.k] * len(active)


@dataclass(frozen=True)
class ByLoad(Policy):
    """A K for each number of active requests: `ks[b]` where b are, the last for more."""

    ks: Sequence[int]
    reads: ClassVar[frozenset[Reads]] = frozenset({"active"})

    def choose(self, active: Sequence[Slot]) -> Sequence[int]:
        """The K of this load for each."""
        return [self.ks[min(len(active), len(self.ks) - 1)]] * len(active)


@dataclass(frozen=True)
class Threshold(Policy):
    """Up to K, and no more after a token to which the draft gave less than a probability."""

    k: int
    threshold: float
    reads: ClassVar[frozenset[Reads]] = frozenset({"confidences"})

    def choose(self, active: Sequence[Slot]) -> Sequence[int]:
        """Up to the first unlikely token of each, that one included."""
        drafted = [slot.request.until_unlikely(self.threshold)[slot.position] for slot in active]
        return [min(each, self.k) for each in drafted]


# ---- SGLang: tiers by an exponential average -----------------------------------------------------


@dataclass(frozen=True)
class Tier:
    """The K to choose from while at least so many requests are active, up to the next tier."""

    batch: int  # from which on
    ks: tuple[int, ...]  # ascending
    # up, down: what is added to the thresholds of a larger and a smaller K
    up: float = 0.0
    down: float = 0.0


# DEFAULT_ADAPTIVE_CONFIG
SGLANG_TIERS = (
    Tier(1, (1, 3, 5, 7), down=-0.25),
    Tier(8, (0, 1, 3)),
    Tier(32, (0, 1)),
    Tier(64, (0,)),
)
# Of the average; batches before the first decision, and between two
SHARE, WARM_UP, INTERVAL = 0.2, 10, 5


class AcceptedAverage:
    """One tier's K, by an exponential average of accepted lengths (`AdaptiveStepSlot`)."""

    def __init__(self, tier: Tier, k: int) -> None:
        self.tier = tier
        # To draft now; the middle K of the tier where it has no such
        self.k = k if k in tier.ks else tier.ks[len(tier.ks) // 2]
        self.average, self._batches = float(self.k - 1), 0  # of accepted tokens per round

    def update(self, accepted: Sequence[int]) -> None:
        """Learn the accepted lengths of one iteration, one per request."""
        if self.k > 0:
            mean = sum(accepted) / len(accepted)
            self.average = (1.0 - SHARE) * self.average + SHARE * mean
        self._batches += 1
        if self._batches > WARM_UP and (self._batches - WARM_UP) % INTERVAL == 0:
            self.k = self._next()

    def _next(self) -> int:
        ks = self.tier.ks
        before = at = ks.index(self.k)
        if self.k == 0:  # try the smallest K again
            k = ks[min(at + 1, len(ks) - 1)]
            if k > 0 and self.average < 0.0:
                self.average = float(k - 1)
            return k
        while at > 0:
            lower = ks[at - 1]
            if self.average > (0.5 if lower == 0 else lower - 0.5) + self.tier.down:
                break
            at -= 1
        while at >= before and at < len(ks) - 1 and self.average > ks[at] - 0.5 + self.tier.up:
            at += 1
        return ks[at]


class Tiers(Policy):
    """SGLang's adaptive K: a tier by the number of active requests, its K by what was accepted."""

    reads: ClassVar[frozenset[Reads]] = frozenset({"active", "accepted"})

    def __init__(self, k: int, tiers: Sequence[Tier] = SGLANG_TIERS) -> None:
        """Begin with k (SGLang's speculative_num_steps) where a tier has it."""
        self._from = [tier.batch for tier in tiers]
        self._averages = [AcceptedAverage(tier, k) for tier in tiers]
        self._accepted: list[int] = []

    def choose(self, active: Sequence[Slot]) -> Sequence[int]:
        """The K of the tier, once it has learnt the last iteration."""
        if self._accepted:
            self._tier(len(self._accepted)).update(self._accepted)
            self._accepted = []
        return [self._tier(len(active)).k] * len(active)

    def _tier(self, batch: int) -> AcceptedAverage:
        return self._averages[max(0, bisect_right(self._from, batch) - 1)]

    def seen(self, slot: Slot, drafted: int, accepted: int) -> None:  # noqa: ARG002
        """Keep it for the next choice."""
        self._accepted.append(accepted)


# ---- vLLM: a budget of draft tokens by survival probability and cost -----------------------------


class Budgets:
    """How many draft tokens of all requests together give the most tokens per second.

    An iteration of d draft tokens for b requests costs that of d / b for each.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        # By requests active
        self._seconds, self._sure = cache(self._seconds_of), cache(self._best_of_all_sure)

    def best(self, batch: int, chances: Sequence[float]) -> int:
        """Of so many active requests.

        `chances` [draft token] of all of them, descending, are that it is accepted, all before it
        in its round being so.
        """
        seconds = self._seconds(batch)
        tokens, most, budget = float(batch), batch / seconds[0], 0
        for drafted, chance in enumerate(chances, start=1):
            tokens += chance
            if tokens > most * seconds[drafted]:
                most, budget = tokens / seconds[drafted], drafted
        return budget

    def best_of_sure(self, batch: int, number: int) -> int:
        """The same where so many draft tokens would be accepted for certain, and no other."""
        return self._sure(batch)[number]

    def _best_of_all_sure(self, batch: int) -> list[int]:
        plain_s, *drafting_s = self._seconds(batch)
        best, most = [0], batch / plain_s
        for drafted, seconds in enumerate(drafting_s, start=1):
            more = batch + drafted > most * seconds
            best.append(drafted if more else best[-1])
            most = (batch + drafted) / seconds if more else most
        return best

    def _seconds_of(self, batch: int) -> list[float]:
        """By draft tokens of all requests."""
        row = self._costs.iteration_s[batch]
        at = np.arange(batch * (len(row) - 1) + 1) / batch
        return np.interp(at, range(len(row)), row).tolist()


def allocated(survivals: Sequence[Sequence[float]], budget: int) -> list[int]:
    """Draft tokens of each request: the budget goes to those most likely to be accepted.

    Of equal chances the earlier token of its round comes first, then the earlier request. The
    chances of a request never increase.
    """
    if not budget:
        return [0] * len(survivals)
    sizes = [*map(len, survivals)]
    if budget >= sum(sizes):
        return sizes
    if len(sizes) == 1:
        return [budget]
    # The largest chance of those that are left out
    least = sorted(chain.from_iterable(survivals), reverse=True)[budget]
    ks: list[int] = []
    for row in survivals:
        drafted = 0
        for chance in row:
            if chance <= least:
                break
            drafted += 1
        ks.append(drafted)
    left = budget - sum(ks)
    if left:
        equal = sorted(
            (offset, place)
            for place, row in enumerate(survivals)
            for offset in range(ks[place], len(row))
            if row[offset] == least
        )
        for _, place in equal[:left]:
            ks[place] += 1
    return ks


class SurvivalBudget(Policy):
    """vLLM's adaptive verification, up to K tokens of a request.

    The budget rests on the confidences of each request's round before, as those of this one are not
    on the host yet; the allocation on this one's.
    """

    reads: ClassVar[frozenset[Reads]] = frozenset({"active", "confidences", "costs"})

    def __init__(self, k: int, costs: Costs) -> None:
        self._k, self._budgets = k, Budgets(costs)
        self._new = [1.0] * k
        # By slot: the chances of its request's rounds by start, and those of the round before
        self._known: dict[int, tuple[Sequence[Sequence[float]], Sequence[float]]] = {}

    def choose(self, active: Sequence[Slot]) -> Sequence[int]:
        """What is allocated to each."""
        known = self._known
        before: list[float] = []
        now: list[Sequence[float]] = []
        for slot in active:
            position, number = slot.position, slot.number
            if position:
                rows, last = known[number]
            else:
                rows, last = slot.request.survivals(self._k), self._new
            row = rows[position]
            before += last[: len(row)]
            known[number] = rows, row
            now.append(row)
        before.sort(reverse=True)
        return allocated(now, self._budgets.best(len(active), before))


class Oracle(Policy):
    """Drafts no token that will be rejected, of the others up to k that pay in this iteration."""

    reads: ClassVar[frozenset[Reads]] = frozenset({"active", "costs", "flags"})

    def __init__(self, k: int, costs: Costs) -> None:
        self._k, self._budgets = k, Budgets(costs)

    def choose(self, active: Sequence[Slot]) -> Sequence[int]:
        """As many as will be accepted and pay."""
        accepted = [slot.request.rounds[self._k].accepted[slot.position] for slot in active]
        total = sum(accepted)
        budget = self._budgets.best_of_sure(len(active), total)
        if budget == total:
            return accepted
        return allocated([[1.0] * each for each in accepted], budget)

"""The clock of a continuously batching server: who is active, what an iteration costs, who ends.

State: a clock, a queue (first in, first out), and numbered slots with the requests in them. An
iteration begins with what has arrived: as long as a slot is free the first of the queue enters, and
its start (its prefill among it) stalls everybody; its first token is there when that ends. Then
every active request takes one round, of as many draft tokens as the policy chooses, or emits one
plain token. Who has emitted all leaves its slot.

Where a policy's choice hangs on the number of active requests alone, nothing is decided until one
of them ends or another enters, so all iterations up to there are one step. That makes it fast.

A closed loop of B requests is the special case in which all have arrived at 0 and B are in flight:
`harness.theory.batching.closed_loop` gives the same seconds where rounds are whole numbers. It
stays for expected rounds, which are not.

Assumed: a request enters the slot that has been free for longest (llama.cpp, tools/server: the slot
least recently used); starts are one after the other, never shared; memory does not run out.
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from harness.simulation.requests import Request, Rounds
from harness.theory.batching import neighbours

Array = NDArray[np.float64]


class Slot:
    """A slot of the server while a request is in it.

    Attributes:
        number: from 0.
        place: of the request, among all, in the order of arrival.
        request: itself.
        position: in its text, at which the next round begins.
    """

    __slots__ = ("number", "place", "position", "request")

    def __init__(self, number: int, place: int, request: Request) -> None:
        """With the request at the beginning of its text."""
        self.number, self.place, self.request, self.position = number, place, request, 0


class Policy(Protocol):
    """Decides how many tokens rounds draft.

    Attributes:
        steady: whether its choice hangs on the number of active requests alone; then it is asked
            only when that may have changed, and is told of no round.
    """

    steady: ClassVar[bool]

    def choose(self, active: Sequence[Slot], waiting: int) -> Sequence[int]:
        """Draft tokens of each active slot's next round at most, while so many requests wait."""
        ...

    def seen(self, slot: Slot, drafted: int, accepted: int) -> None:
        """Learn what became of a slot's round, whose start is still the slot's position."""
        ...


@dataclass(frozen=True, eq=False)
class Costs:
    """What a server takes, in seconds.

    Attributes:
        iteration_s: [slots + 1][K + 1] of an iteration by how many requests are active and how many
            tokens each drafts, 0 being a plain token; the first row is not read. Where they draft
            different numbers, it is the mean over them.
        start_s: of a request besides its rounds, its prompt's tokens left out.
        prompt_token_s: of each of these.
        by_runs: whether each run of neighbouring active slots is an iteration of its own, as in
            llama.cpp without a unified cache.
    """

    iteration_s: Sequence[Sequence[float]]
    start_s: float = 0.0
    prompt_token_s: float = 0.0
    by_runs: bool = False

    @property
    def slots(self) -> int:
        """Requests that are decoded side by side at most."""
        return len(self.iteration_s) - 1

    def start_of(self, request: Request) -> float:
        """Seconds until its first token, once it has a slot."""
        return max(0.0, self.start_s + self.prompt_token_s * request.prompt_tokens)

    def iteration_of(self, active: Sequence[Slot], drafts: Sequence[int]) -> float:
        """Seconds of one iteration, by the draft tokens of each active slot, ascending."""
        if not self.by_runs:
            return self._pass_s(drafts)
        runs = neighbours([slot.number for slot in active])
        return sum(self._pass_s(drafts[run]) for run in runs)

    def _pass_s(self, drafts: Sequence[int]) -> float:
        row = self.iteration_s[len(drafts)]
        return sum([row[n] for n in drafts]) / len(drafts)


@dataclass(frozen=True, eq=False)
class Served:
    """What became of n requests, in the order of arrival; times are on the server's clock.

    Attributes:
        arrived_s, entered_s, first_s, ended_s: [n] when each came, got a slot, had its first token,
            and had its last.
        tokens: [n] that its rounds emitted, all after its first.
        rounds: [n] that it took.
    """

    arrived_s: Array
    entered_s: Array
    first_s: Array
    ended_s: Array
    tokens: NDArray[np.intp]
    rounds: NDArray[np.intp]

    @property
    def first_token_s(self) -> Array:
        """[n] from its arrival to its first token."""
        return self.first_s - self.arrived_s

    @property
    def per_token_s(self) -> Array:
        """[n] of each token after the first; NaN where there is none."""
        tokens = np.where(self.tokens > 0, self.tokens, np.nan)
        return (self.ended_s - self.first_s) / tokens


def simulate(
    requests: Sequence[Request],
    arrived_s: Sequence[float] | Array,
    costs: Costs,
    policy: Policy,
    in_flight: int | None = None,
) -> Served:
    """Serve requests until all have ended.

    Args:
        requests: in the order of arrival.
        arrived_s: when each does, ascending; all 0 for a closed loop.
        costs: of the server; their table has a row for each of its slots.
        policy: a fresh one, where it learns.
        in_flight: requests in slots at most; None for as many as there are slots.
    """
    number, steady, most = len(requests), policy.steady, in_flight or costs.slots
    arrivals = np.asarray(arrived_s, dtype=np.float64).tolist()
    entered_s, first_s, ended_s = ([0.0] * number for _ in range(3))
    rounds = [0] * number
    free = deque(range(costs.slots))
    active: list[Slot] = []
    clock, due = 0.0, 0
    while due < number or active:
        if not active:
            clock = max(clock, arrivals[due])
        while due < number and len(active) < most and arrivals[due] <= clock:
            entered_s[due] = clock
            clock += costs.start_of(requests[due])
            first_s[due] = ended_s[due] = clock
            if requests[due].tokens:
                insort(active, Slot(free.popleft(), due, requests[due]), key=_number)
            due += 1
        if not active:
            continue
        ks = policy.choose(active, 0 if steady else bisect_right(arrivals, clock, due) - due)
        paths = [slot.request.rounds(k) for slot, k in zip(active, ks, strict=True)]
        drafts = [path.drafted[slot.position] for slot, path in zip(active, paths, strict=True)]
        seconds = costs.iteration_of(active, drafts)
        steps = _alike(active, paths) if steady else 1
        if steps > 1 and len(active) < most and due < number:
            steps = max(1, min(steps, ceil((arrivals[due] - clock) / seconds)))
        clock += steps * seconds
        ended = False
        for slot, path, drafted in zip(active, paths, drafts, strict=True):
            position, after = slot.position, path.after
            if not steady:
                policy.seen(slot, drafted, path.accepted[position])
            for _ in range(steps):
                position = after[position]
            slot.position = position
            rounds[slot.place] += steps
            if position == slot.request.tokens:
                ended_s[slot.place], ended = clock, True
                free.append(slot.number)
        if ended:
            active = [slot for slot in active if slot.position < slot.request.tokens]
    return Served(
        *(np.array(times) for times in (arrivals, entered_s, first_s, ended_s)),
        tokens=np.array([request.tokens for request in requests], dtype=np.intp),
        rounds=np.array(rounds, dtype=np.intp),
    )


def _number(slot: Slot) -> int:
    return slot.number


def _alike(active: Sequence[Slot], paths: Sequence[Rounds]) -> int:
    """Iterations until a text ends, or a round drafts another number of tokens; one at least."""
    return max(1, min([path.alike[s.position] for s, path in zip(active, paths, strict=True)]))

"""Requests decoded side by side: how many iterations a server makes, and of how many requests.

A server with continuous batching decodes all active requests in one iteration: each takes one
round (plainly: emits one token), and a request that ends makes place for the next. So in a closed
loop, where B requests are always in flight while any are waiting, the iterations follow from the
rounds of each request and their order alone, whatever an iteration takes:

1. every active request advances by one round per iteration, so a request of r rounds that begins at
   iteration i ends at i + r, and the next one begins there;
2. towards the end fewer than B are active; these iterations cost less, and are counted apart;
3. seconds = sum over iterations of the cost of one with so many requests, R(K, b), and a start for
   each request (its prefill).

Rounds stay per request: what one accepts does not depend on who is decoded next to it. What a batch
changes is R. A batch whose requests wait for the slowest of them (static batching) makes max(r)
iterations for each batch instead, so texts of unequal rounds lose there.

Expected rounds (`harness.theory.replay`) serve in place of whole ones.
"""

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.theory.speedup import RoundTimes

Array = NDArray[np.float64]


def closed_loop(proposals: Array, concurrency: int) -> Array:
    """Iterations of a closed loop, by how many requests are active and what their rounds draft.

    Args:
        proposals: shape (requests, N): rounds of each request that draft n = 0..N - 1 tokens, in
            the order of sending; plain decoding has N = 1, its tokens. A request without rounds
            takes no place.

    Returns:
        Shape (concurrency + 1, N): iterations with b active requests; one whose requests draft
        different numbers of tokens is shared among these.
    """
    rounds = proposals.sum(axis=1)
    waiting = [row for row in range(len(rounds) - 1, -1, -1) if rounds[row] > 0.0]
    iterations = np.zeros((concurrency + 1, proposals.shape[1]))
    free = deque(range(concurrency))
    drafts: dict[int, Array] = {}  # of the next round of each active slot
    active: list[tuple[float, int]] = []
    now = 0.0
    while waiting or active:
        while waiting and len(active) < concurrency:
            row, slot = waiting.pop(), free.popleft()
            heapq.heappush(active, (now + float(rounds[row]), slot))
            drafts[slot] = proposals[row] / rounds[row]
        end, slot = heapq.heappop(active)
        together = [drafts[number] for number in sorted(drafts)]
        iterations[len(together)] += (end - now) * (np.add.reduce(together) / len(together))
        free.append(slot)
        del drafts[slot]
        now = end
    return iterations


def neighbours(slots: Sequence[int]) -> list[slice]:
    """Where the runs of neighbouring numbers are among ascending ones."""
    ends = [at for at in range(1, len(slots)) if slots[at] > slots[at - 1] + 1]
    return [slice(first, end) for first, end in zip([0, *ends], [*ends, len(slots)], strict=True)]


@dataclass(frozen=True)
class BatchTimes:
    """What iterations cost by how many requests are active: R(n, B), seconds."""

    # R of each timed number of requests, ascending. In between it lies on a line, and outside it is
    # that of the nearest.
    by_batch: Mapping[int, RoundTimes]

    @property
    def plain(self) -> "BatchTimes":
        """Of a server that drafts nothing: without its look-ups that find nothing."""
        return BatchTimes({b: RoundTimes(each.plain_s, ()) for b, each in self.by_batch.items()})

    def at(self, n: int, batch: int) -> float:
        """Seconds of an iteration whose rounds draft n tokens, 0 as in `RoundTimes.at`."""
        known = sorted(self.by_batch)
        return float(np.interp(batch, known, [self.by_batch[b].at(n) for b in known]))

    def seconds(self, iterations: Array) -> float:
        """Of the iterations of `closed_loop`."""
        return sum(
            float(count) * self.at(n, batch)
            for (batch, n), count in np.ndenumerate(iterations)
            if count > 0.0
        )

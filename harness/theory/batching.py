"""Requests decoded side by side: what an iteration costs by how many there are, R(n, B).

A server with continuous batching decodes all active requests in one iteration: each takes one
round (plainly: emits one token), and a request that ends makes place for the next. Rounds stay per
request: what one accepts does not depend on who is decoded next to it. What a batch changes is R.
Which iterations a load makes is simulated (`harness.simulation`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.theory.speedup import RoundTimes


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

"""What this process waits for that is not its own work: servers' answers, and their start.

Whoever waits says so here, in any thread; `harness.commands.progress` shows it. Nothing is imported
that takes time.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Wait:
    """Something that is waited for.

    Attributes:
        what: with its address.
        since: when that began, on the monotonic clock.
        most_s: seconds after which it is given up.
    """

    what: str
    since: float
    most_s: float


_waits: dict[object, Wait] = {}


@contextmanager
def waiting_for(what: str, most_s: float) -> Iterator[None]:
    """Note that the block waits for something, for so many seconds at most."""
    key = object()
    _waits[key] = Wait(what, time.monotonic(), most_s)
    try:
        yield
    finally:
        del _waits[key]


def waits(longer_than_s: float) -> list[Wait]:
    """What is waited for since more than so many seconds, the oldest first."""
    before = time.monotonic() - longer_than_s
    return sorted((w for w in [*_waits.values()] if w.since < before), key=lambda w: w.since)

"""The pending waits of this process for other work: the start of servers, and their answers.

Every thread that waits registers here; `harness.commands.progress` shows the list. The module
imports nothing that takes time.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Wait:
    """A pending wait."""

    what: str  # the event that is waited for, with its address
    since: float  # on the monotonic clock
    most_s: float  # seconds after which the wait is given up


_waits: dict[object, Wait] = {}


@contextmanager
def waiting_for(what: str, most_s: float) -> Iterator[None]:
    """Register a wait of at most `most_s` seconds for as long as the block runs."""
    key = object()
    _waits[key] = Wait(what, time.monotonic(), most_s)
    try:
        yield
    finally:
        del _waits[key]


def waits(longer_than_s: float) -> list[Wait]:
    """The waits that have lasted longer than `longer_than_s` seconds, the oldest first."""
    before = time.monotonic() - longer_than_s
    return sorted((w for w in [*_waits.values()] if w.since < before), key=lambda w: w.since)

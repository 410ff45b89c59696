"""Processor time of a server while it decodes, apart from the prefill before it.

That clock knows nothing of a request's parts, and the engine's own clock tells how long they took.
So the processor time is read every few milliseconds while a request is answered, and the reading
at which decoding began is interpolated between two of them.

It is exact to some milliseconds: an engine's times leave out what a request takes on its way there
and back, and half of that is taken to follow decoding. A short prefill (`LONG_PREFILL_S`) is better
measured by a request for one token and taken off; of a long one, whose processor time varies from
request to request by more than a short answer takes, nothing is left that way.
"""

import threading
from collections.abc import Callable
from time import perf_counter
from typing import Self

import numpy as np

# A prefill from which on decoding is read apart. On a busy machine the processor time of a prefill
# of 1.5 s varied by 25 %, and that of one of 6 ms by 2 %.
LONG_PREFILL_S = 0.05
# Seconds between two readings; and those that one takes at most, unless it was interrupted
EVERY_S, LONGEST_S = 0.01, 0.0005


class CpuReadings:
    """Processor time of a server, read again and again while the block runs."""

    def __init__(self, read: Callable[[], float | None]) -> None:
        """Read the clock with `read`, seconds; None where there is none."""
        self._read = read
        self._at: list[float] = []
        self._cpu_s: list[float] = []
        self._over = threading.Event()
        self._reader = threading.Thread(target=self._keep_reading, daemon=True)

    def __enter__(self) -> Self:
        self._note(interrupted=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._reader.join()
        self._note(interrupted=True)

    def decode_s(self, prefill_s: float | None, decode_s: float | None) -> float | None:
        """Processor seconds of decoding, from what the engine's clock says of the request.

        None where it does not say, where the prefill is short, and where there is no such clock.
        """
        if prefill_s is None or decode_s is None or prefill_s < LONG_PREFILL_S:
            return None
        if len(self._at) < 2:
            return None
        elsewhere_s = max(0.0, self._at[-1] - self._at[0] - prefill_s - decode_s)
        began = self._at[-1] - elsewhere_s / 2 - decode_s
        return self._cpu_s[-1] - float(np.interp(began, self._at, self._cpu_s))

    def _keep_reading(self) -> None:
        while not self._over.wait(EVERY_S):
            self._note(interrupted=False)

    def _note(self, *, interrupted: bool) -> None:
        """Read once; `interrupted`: also where it took long, so that nobody knows just when."""
        before = perf_counter()
        cpu_s, after = self._read(), perf_counter()
        if cpu_s is not None and (interrupted or after - before < LONGEST_S):
            self._at.append((before + after) / 2)
            self._cpu_s.append(cpu_s)

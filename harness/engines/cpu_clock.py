"""The processor time of a server's decoding, without the prefill before it.

The processor clock does not know the parts of a request, but the engine reports how long each part
took. The processor time is therefore read every few milliseconds during a request, and its value at
the begin of decoding is interpolated between two readings.

The result is exact to some milliseconds: an engine's times leave out the way of a request to the
server and back, and half of that time is assumed to follow decoding. A short prefill (below
`LONG_PREFILL_S`) is better measured by a request for one token and subtracted. The processor time
of a long prefill varies between requests by more than a short answer takes, so it cannot be
subtracted.
"""

import threading
from collections.abc import Callable
from time import perf_counter
from typing import Self

import numpy as np

# From this length of a prefill on, decoding is read with this clock. On a busy machine the
# processor time of a prefill of 1.5 s varied by 25 %, that of a prefill of 6 ms by 2 %.
LONG_PREFILL_S = 0.05
# Seconds between two readings; the longest time of one reading that was not interrupted
EVERY_S, LONGEST_S = 0.01, 0.0005


class CpuReadings:
    """Regular readings of a server's processor time while a `with` block runs."""

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
        """The processor seconds of decoding, given both parts of the request by the engine's clock.

        None without these parts, with a short prefill, and without a processor clock.
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
        """Store a reading; with `interrupted` also one that took too long to date it exactly."""
        before = perf_counter()
        cpu_s, after = self._read(), perf_counter()
        if cpu_s is not None and (interrupted or after - before < LONGEST_S):
            self._at.append((before + after) / 2)
            self._cpu_s.append(cpu_s)

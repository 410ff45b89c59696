"""A server process: its start, its processor time, its log and its end; it ends with the run.

The processor clock does not know the parts of a request, but the engine reports how long each part
took. To read decoding without the prefill, the clock is therefore read every few milliseconds
during a request, and its value at the begin of decoding is interpolated between two readings. The
result is exact to some milliseconds: an engine's times leave out the way of a request to the server
and back, and half of that time is assumed to follow decoding. A short prefill (below
`LONG_PREFILL_S`) is better measured by a request for one token and subtracted. The processor time
of a long prefill varies between requests by more than a short answer takes, so it cannot be
subtracted.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Self

import numpy as np
import psutil

from harness.records import NotInstalledError, UserError

LOOPBACK = "127.0.0.1"
# Longer than the supervisor needs to stop a server, which is three times its grace period
STOP_S = 20.0
# The prefix of a line in servers' logs: process, severity, time and place
LOG_PREFIX = re.compile(r"(\(\w+ pid=\d+\) )?((ERROR|CRITICAL) \S+ \S+ \[[^\]]*\] |\[[^\]]*\] )?")
# Libraries that a process on a card has loaded: CUDA, HIP, Vulkan, SYCL, OpenCL
CARD_LIBRARIES = ("libcuda.so", "libamdhip64", "libvulkan.so", "libze_loader", "libOpenCL.so")
SHOWN_LINES, SHOWN_CHARACTERS = 3, 200
REFUSED = "  Value error, "  # pydantic's text before the reason of a refusal
# From this length of a prefill on, decoding is read apart. On a busy machine the processor time of
# a prefill of 1.5 s varied by 25 %, that of a prefill of 6 ms by 2 %.
LONG_PREFILL_S = 0.05
# Seconds between two readings; the longest time of one reading that was not interrupted
EVERY_S, LONGEST_S = 0.01, 0.0005


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def on_path(engine: str) -> str:
    """The path of the program with the engine's name; raises NotInstalledError without one."""
    found = shutil.which(engine)
    if found is None:
        raise NotInstalledError(
            f"engine={engine}: no {engine} on PATH; install it, or give url= of a server that runs"
        )
    return found


class ServerProcess:
    """A server under a supervisor, with its log."""

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start a command with variables in addition to those of this process.

        Its output is appended to `log`, since an error of an earlier server may refer to it.
        """
        self._log = log
        self._log_begin = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-m", "harness.engines.supervisor", *command],
                env={**os.environ, **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
            )
        assert self._supervisor.stdout is not None
        first_line = self._supervisor.stdout.readline()
        if not first_line.strip().isdigit():
            self.stop()
            raise UserError(f"{command[0]}: does not start; {self.last_words()}")
        self.pid = int(first_line)
        self._processes: tuple[int, ...] = ()

    @property
    def alive(self) -> bool:
        return self._supervisor.poll() is None

    @cached_property
    def pausable(self) -> bool:
        """True where stopping its processes stops all computation; not on a card."""
        if sys.platform != "linux":
            return False
        try:
            mapped = [each.path for each in psutil.Process(self.pid).memory_maps()]
        except psutil.Error:
            return False
        return not any(name in path for path in mapped for name in CARD_LIBRARIES)

    def cpu_s(self) -> float | None:
        """The processor time so far in seconds; None where the system has no clock for it.

        It is that of all threads, also ended ones, of the server and of the child processes that it
        had at the first call.
        """
        if sys.platform != "linux":
            return None
        try:
            if not self._processes:
                children = psutil.Process(self.pid).children(recursive=True)
                self._processes = (self.pid, *(child.pid for child in children))
            # The clock of another process's processor time: clock_getcpuclockid(3)
            return sum(time.clock_gettime((~pid << 3) | 2) for pid in self._processes)
        except (OSError, psutil.NoSuchProcess):
            return None

    def last_words(self) -> str:
        """The end of its log, in one line that names the log.

        These are the last different lines on errors, since a server of several processes logs the
        cause first, and at last that one of them ended. The lines of a traceback are left out: they
        are indented. The reason of a refusal by pydantic is indented, too, and stays.
        """
        text = self._log.read_bytes()[self._log_begin :].decode(errors="replace")
        lines = [LOG_PREFIX.sub("", line, count=1).rstrip() for line in text.splitlines()]
        lines = [line for line in lines if line and (not line[0].isspace() or REFUSED in line)]
        lowered = (line.lower() for line in lines)
        is_error = [
            ("error" in line or "fail" in line) and "warning" not in line for line in lowered
        ]
        errors = [line for line, wanted in zip(lines, is_error, strict=True) if wanted]
        last = dict.fromkeys(reversed(errors or lines[-1:] or ["nothing was printed"]))
        shown = [" ".join(line.split())[:SHOWN_CHARACTERS] for line in [*last][:SHOWN_LINES]]
        return f"its log ends: {'; '.join(reversed(shown))} ({self._log})"

    def stop(self) -> None:
        """End the server; a second call does nothing."""
        assert self._supervisor.stdin is not None
        assert self._supervisor.stdout is not None
        self._supervisor.stdin.close()
        try:
            self._supervisor.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
        self._supervisor.stdout.close()


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

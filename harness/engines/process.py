"""A server process: its start, its processor time, its log and its end; it ends with the run."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

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


def free_port() -> int:
    """A port of this machine that nothing listens on."""
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
        """Start a command, with its output in `log`.

        Args:
            command: the program and its arguments.
            log: file; it is appended to, since an error of an earlier server may refer to it.
            environment: variables in addition to those of this process.
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
        """True while the server runs."""
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

"""Runs commands and kills them at seeded moments; started by test_kills.py, prints what it saw.

    python tests/killer.py COMMAND ROOT SEED SIGNALS OVERRIDES...

Torch is imported once here and every attempt is a fork, so an attempt costs what its command does.
A run that comes to its end before its signal does is followed by a new one.
"""

import json
import os
import random
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from runs import without_plots

from harness.cli import run_app
from harness.commands import sweep, timing
from harness.measurement import round_times, step_times


def main() -> None:
    command, root, seed, names, overrides = (
        sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:]
    )  # fmt: skip
    # A background job of a shell starts with SIGINT ignored, and so would the attempts
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import_module(f"harness.commands.{command}")
    import_module("harness.commands.draft_scoring")
    attempt = Attempts(command, root, overrides)
    begin = time.monotonic()
    calm = attempt.run(None, None, "calm")
    longest = time.monotonic() - begin
    rng = random.Random(seed)
    waiting = [signal.Signals[f"SIG{name}"] for name in names.split(",") if name]
    seen: list[dict[str, Any]] = []
    while waiting:
        unfinished = attempt.unfinished("killed")
        end = attempt.run(waiting[0], rng.uniform(0, longest), "killed", *unfinished)
        if end["signalled"]:
            seen.append({**end, "signal": waiting.pop(0).name})
    while unfinished := attempt.unfinished("killed"):
        end = attempt.run(None, None, "killed", *unfinished)
        if end["status"] != 0:
            seen.append({**end, "signal": "none"})
            break
    json.dump({"calm": calm, "seconds": longest, "ends": seen}, sys.stdout)


class Attempts:
    """Attempts of one command with one configuration."""

    def __init__(self, command: str, root: Path, overrides: list[str]) -> None:
        self.command, self.root, self.overrides = command, root, overrides

    def unfinished(self, name: str) -> list[str]:
        """The key that resumes the run which has not ended, if there is one."""
        for file in sorted((self.root / name).glob("*/manifest.json")):
            if json.loads(file.read_text())["status"] != "complete":
                return [f"resume={file.parent}"]
        return []

    def run(
        self, number: signal.Signals | None, wait: float | None, name: str, *extra: str
    ) -> dict[str, Any]:
        """One attempt: how it ended, what it said, whether anything of it was left running."""
        said = self.root / "stderr"
        child = os.fork()
        if child == 0:
            self._become_command(name, said, extra)
        ended, status = False, 0
        if number is not None and wait is not None:
            deadline = time.monotonic() + wait
            while not ended and time.monotonic() < deadline:
                done, status = os.waitpid(child, os.WNOHANG)
                ended = done != 0
                time.sleep(0.002)
            if not ended:
                os.kill(child, number)
        if not ended:
            _, status = os.waitpid(child, 0)
        return {
            "status": os.waitstatus_to_exitcode(status),
            "signalled": number is not None and not ended,
            "stderr": [line for line in said.read_text().splitlines() if line.startswith("error")],
            "traceback": "Traceback" in said.read_text(),
            "left_running": group_exists(child),
        }

    def _become_command(self, name: str, said: Path, extra: tuple[str, ...]) -> None:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), 2)
        sys.argv = [self.command, f"results_root={self.root / name}", *self.overrides, *extra]
        status = 1
        try:
            run_app(self.command)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        finally:
            sys.stderr.flush()
            os._exit(status)


def group_exists(child: int) -> bool:
    try:
        os.killpg(child, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    step_times.REPETITIONS, step_times.MOST_REPEATS, round_times.MOST_VISITS = 3, 0, 3
    round_times.LEAST_ROUNDS, round_times.MOST_TOKENS = 4, 8
    sweep.LEAST_VISITS, sweep.REQUESTS_PER_VISIT = 2, 10
    # How often something is measured again depends on the machine
    sweep.CELL_S, timing.timed_precisely = 0.0, lambda *_: True
    with without_plots():
        main()

"""What an experiment hands back to its door: where the run is, and how the process should exit."""

import signal
from dataclasses import dataclass
from pathlib import Path

from harness.records import in_one_line


class Interrupted(KeyboardInterrupt):
    """A signal asked the process to end; a file being written is completed or restored first."""

    def __init__(self, number: int) -> None:
        """For the signal of this number."""
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass(frozen=True)
class Outcome:
    """The end of a door's work.

    Attributes:
        folder: the run folder, or None when nothing was stored (a dry run).
        status: 0 when all that was asked for is complete, 1 when cells failed or a check did, 2
            when the user must fix something.
        error: what failed after everything was measured: the folder holds the measurements, but not
            its results or its report.
    """

    folder: Path | None
    status: int = 0
    error: Exception | None = None

    @property
    def reason(self) -> str | None:
        """The error in one line; None where there is none."""
        return None if self.error is None else in_one_line(self.error)

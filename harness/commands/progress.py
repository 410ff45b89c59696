"""Progress and remaining time, on standard error.

On a terminal every block that is under way has a bar, all of them in one display. Elsewhere, where
standard error is a file or a pipe, a line says the same after half a second and then at least every
ten: the time since the command began, what is done, how many of how many, and about how long that
will take.

Nothing here imports torch or rich at the top: `--help` of every command imports this module.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.engines.waiting import waits

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

# Seconds between two lines; to the first of a command; to that of what may wait for the network or
# a server; and until it is said which of them has not answered
EVERY_S, FIRST_S, SOON_S, LATE_S = 10.0, 0.4, 2.0, 5.0
# How often a bar is drawn, or looked at whether a line is due: rarely, since models are being timed
LOOKS_PER_S = 2


class Bar:
    """The progress of one block: a call counts one, `say` changes its label."""

    def __init__(
        self, display: "_Display", label: str, total: int | None, sizes: Sequence[float] = ()
    ) -> None:
        self.label, self.total, self.done = label, total, 0  # total None: unknown
        self.due = float("inf")  # when a line about it must be written, on the monotonic clock
        self._display, self._sizes = display, sizes
        self._begun = self._counted = time.monotonic()

    def __call__(self, count: int = 1) -> None:
        self._counted = time.monotonic()
        self.done += count

    def say(self, label: str, *, soon: bool = False) -> None:
        """Show another label; `soon`: within seconds, because it may wait for something else."""
        self.label, self.due = label, time.monotonic() + (SOON_S if soon else float("inf"))
        self._display.refresh()

    def expect(self, more: int) -> None:
        self.total = (self.total or 0) + more

    @property
    def counts(self) -> str:
        """Done and total, as 3/8; empty where the total is unknown."""
        return f"{self.done}/{self.total}" if self.total else ""

    @property
    def left(self) -> str:
        """About how long it takes, by the mean pace so far, that of what is under way if slower.

        Empty before the second, and where the last one takes longer than that.
        """
        if not self.total or self.done < 2 or self.done >= self.total:
            return ""
        now, size = time.monotonic(), self._size
        done, begun_too = size(0, self.done), size(0, self.done + 1)
        pace = max((self._counted - self._begun) / done, (now - self._begun) / begun_too)
        left_s = pace * size(self.done, self.total) - (now - self._counted)
        return f"about {_clock(left_s)} left" if left_s > 0.0 else ""

    def _size(self, begin: int, end: int) -> float:
        known = self._sizes[begin:end]
        return sum(known) + max(0, end - begin - len(known))

    def __str__(self) -> str:
        counted = f"{self.label} {self.counts}".strip()
        return f"{counted}, {self.left}" if self.left else counted


class _Display:
    """The bars that are under way, outermost first, drawn or written as lines."""

    def __init__(self) -> None:
        """Begin with none; the command began about now, since its start imports this module."""
        self._bars: list[Bar] = []
        self.begin_clock()
        self._live: Live | None = None
        self._over = threading.Event()
        self._writer: threading.Thread | None = None

    def push(self, bar: Bar) -> None:
        self._bars.append(bar)
        if len(self._bars) == 1:
            self._begin()
        self.refresh()

    def pop(self, bar: Bar) -> None:
        self._bars.remove(bar)
        if self._bars:
            self.refresh()
            return
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._writer is not None:
            self._over.set()
            self._writer.join()
            self._writer = None

    def refresh(self) -> None:
        if self._live is not None:
            self._live.refresh()

    def write(self, line: str) -> None:
        line = f"{_clock(time.monotonic() - self._began)} {line}"
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False)
            return
        with suppress(OSError, ValueError):  # nobody reads it any more
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()

    def _begin(self) -> None:
        if sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
            from rich.console import Console
            from rich.live import Live

            # Standard output is not redirected: it carries the answer
            self._live = Live(
                console=Console(stderr=True),
                get_renderable=self._drawn,
                refresh_per_second=LOOKS_PER_S,
                transient=True,
                redirect_stdout=False,
            )
            self._live.start()
            return
        self._over.clear()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def begin_clock(self) -> None:
        self._began = time.monotonic()
        self._written = self._began - EVERY_S + FIRST_S  # so that the first line comes soon

    def _shown(self) -> list[Bar]:
        """The innermost bar, and those around it that count."""
        bars = list(self._bars)
        return [bar for bar in bars[:-1] if bar.total] + bars[-1:]

    def _drawn(self) -> "Table":
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 1))
        for bar in self._shown():
            cells: list[Any] = [Text(bar.label)]
            if bar.total:
                cells.append(ProgressBar(bar.total, bar.done, width=30))
            cells += [Text(text) for text in (bar.counts, bar.left) if text]
            table.add_row(*cells)
        table.add_row(Text(f"{_clock(time.monotonic() - self._began)}{_late_request()}"))
        return table

    def _write(self) -> None:
        while not self._over.wait(1 / LOOKS_PER_S):
            now, bars = time.monotonic(), self._shown()
            if not bars or now < min(self._written + EVERY_S, *(bar.due for bar in bars)):
                continue
            self._written = now
            for bar in bars:
                bar.due = float("inf")
            self.write("; ".join(map(str, bars)) + _late_request())


_DISPLAY = _Display()


def next_command() -> None:
    """Count the time from now, where another command begins in the same process."""
    _DISPLAY.begin_clock()


def say(line: str) -> None:
    """Write a line to standard error, with the time since the command began."""
    _DISPLAY.write(line)


@contextmanager
def progress(
    label: str, total: int | None = None, *, soon: bool = False, sizes: Sequence[float] = ()
) -> Iterator[Bar]:
    """Show what is being done while the block runs; yields what counts to `total`.

    Blocks may be nested. `soon` is that of `Bar.say`. `sizes`: of what is counted, in its order; by
    default all are alike.
    """
    bar = Bar(_DISPLAY, label, total, sizes)
    if soon:
        bar.say(label, soon=True)
    _DISPLAY.push(bar)
    try:
        yield bar
    finally:
        _DISPLAY.pop(bar)


@contextmanager
def fetching(doing: str, source: str | None) -> Iterator[Bar]:
    """Show that the block reads from `source`, and that it waits if that is an id of the hub."""
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    asks = source is not None and not offline and not Path(source).exists()
    if asks:
        doing = (
            f"{doing}: asking the Hugging Face hub for {source} "
            "(to skip it: a local folder, or HF_HUB_OFFLINE=1 and what is in the cache)"
        )
    with progress(doing, soon=asks) as bar:
        yield bar


def _late_request() -> str:
    """The request that has waited longer than an answer usually takes; empty where none has."""
    late = waits(LATE_S)
    if not late:
        return ""
    oldest, others = late[0], f" and {len(late) - 1} more" if len(late) > 1 else ""
    for_s, most_s = _clock(time.monotonic() - oldest.since), _clock(oldest.most_s)
    return f"; waiting for {oldest.what}{others}, {for_s} of {most_s} at most"


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(max(0.0, seconds))))

"""A progress bar with time left, on a terminal; silence elsewhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Bar:
    """A progress bar: called, it counts one; it can say what is being done."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        """Count on `task` of `bar`."""
        self._bar, self._task = bar, task

    def __call__(self) -> None:
        """Count one."""
        self._bar.advance(self._task)

    def say(self, label: str) -> None:
        """Show another label."""
        self._bar.update(self._task, description=label)


@contextmanager
def progress(label: str, total: int | None) -> Iterator[Bar]:
    """Show a bar for `total` ticks (None: unknown) while the block runs; yields what ticks it.

    It goes to standard error, so that standard output stays the door's result.
    """
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(label, total=total)
        yield Bar(bar, task)


@contextmanager
def opening(backend: str, device: str, *names: str) -> Iterator[None]:
    """Show that models are compiled while the block opens them, where they may be."""
    if backend == "eager" or (backend != "cuda_graphs" and device != "cuda"):
        yield
        return
    with progress(f"compiling {' and '.join(names)}, the first time takes minutes", None):
        yield

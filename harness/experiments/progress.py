"""A progress bar with time left, on a terminal; silence elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar for `total` ticks while the block runs; yields the function that ticks it.

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
        yield lambda: bar.advance(task)

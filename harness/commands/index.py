"""One page over every run of a results folder; runs without a report get theirs first."""

import re
from pathlib import Path

from rich.console import Console

from harness import reporting
from harness.analysis import analyse
from harness.commands.run_lifecycle import Outcome
from harness.records import UserError
from harness.reporting import index
from harness.reporting.index import Entry
from harness.storage import load

_MARKS = ("manifest.json", "config.yaml")


def run(root: str) -> Outcome:
    """Write index.html over the runs in a results folder and say where it is.

    A run that cannot be read keeps a row that says so; it stops no other.

    Returns:
        No folder: no run was made.

    Raises:
        UserError: no such folder, no run in it, or it cannot be written.
    """
    folder = Path(root)
    if not folder.is_dir():
        raise UserError(f"index={root}: no such folder; name the one that your runs are in")
    runs = [path for path in folder.iterdir() if any((path / name).is_file() for name in _MARKS)]
    if not runs:
        raise UserError(f"index={root}: no run folder in it; runs are put there by results_root=")
    entries = sorted((_entry(path) for path in runs), key=_when, reverse=True)
    try:
        file = index.render(folder, entries)
    except OSError as error:
        raise UserError(f"index={root}: cannot write there ({error.strerror})") from error
    unread = sum(entry.summary is None for entry in entries)
    unreadable = f", {unread} of them unreadable" if unread else ""
    Console(highlight=False, soft_wrap=True).print(
        f"{len(entries)} runs{unreadable}: {file}", markup=False
    )
    return Outcome(None)


def _when(entry: Entry) -> tuple[str, str]:
    """When it was made, as digits; of a run that cannot be read as far as its name tells."""
    stored = entry.summary.run.created_utc if entry.summary else None
    return re.sub(r"\D", "", str(stored or entry.folder.name))[:14], entry.folder.name


def _entry(path: Path) -> Entry:
    try:
        stored = load(path)
        summary = analyse(stored)
        if summary.run.status == "running" or not (path / "report.html").is_file():
            reporting.render(summary, path)
    except UserError as error:
        return Entry(path, None, str(error))
    except Exception as error:  # one damaged folder must not hide the others; its row says it
        return Entry(path, None, f"{path}: damaged ({type(error).__name__}: {error})")
    return Entry(path, summary)

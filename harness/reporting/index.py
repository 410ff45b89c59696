"""index.html: every run of a results folder on one page, newest first, and how it went over time.

What it says of a run is what the run's own summary and manifest say. A folder that cannot be read
(written by a newer version, say) keeps its row, with the reason.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from harness.reporting import files, wording
from harness.reporting import formatting as fmt
from harness.reporting.content import measured_with
from harness.reporting.definitions import closure
from harness.reporting.html_page import drawing, page
from harness.reporting.html_table import html_table, linked, marked
from harness.reporting.plots import style, trend
from harness.reporting.reading import door_of, summary_of
from harness.reporting.tables.model import Column, Row, Table

if TYPE_CHECKING:
    from harness.storage import StoredRun

FILE = "index.html"
COLUMNS = (
    Column("run", "left", key=True),
    Column("date", "left"),
    Column("verdict", "left", flexible=True),
    Column("temperature"),
    Column("speedup\n[lo, hi]"),
    Column("status", "left"),
    Column("door", "left"),
    Column("model", "left"),
    Column("draft", "left"),
    Column("device", "left"),
    Column("commit", "left"),
)
WHOLE = "complete"
_SHORT = 10  # characters of a commit
_MINUTES = 16  # characters of an ISO date and time


@dataclass(frozen=True)
class Entry:
    """A folder of the results folder.

    Attributes:
        folder: where it lies.
        run: what it holds; None where it cannot be read.
        error: why it cannot be read; empty where it can.
    """

    folder: Path
    run: "StoredRun | None"
    error: str = ""


def render(root: Path, entries: Sequence[Entry]) -> Path:
    """Write index.html into `root`, replacing an earlier one.

    Args:
        root: the results folder.
        entries: its runs, newest first.

    Returns:
        The file.

    Raises:
        OSError: the folder cannot be written.
    """
    rows = [_row(entry) for entry in entries]
    table = html_table(Table("Runs", COLUMNS, tuple(rows)), "runs")
    table = linked(table, [_link(root, entry) for entry in entries])
    table = marked(table, "status", {WHOLE: ""}, "bad")
    readable = [entry.run for entry in entries if entry.run is not None]
    with style.styled():
        plot = trend.draw(readable)
    text = page(
        "index.html.j2",
        title=f"Runs in {root.resolve().name}",
        skip_to="the runs",
        table=table,
        plots=[drawing(plot.svg, plot.caption, "trend")] if plot else [],
        definitions=closure(table.definitions),
        troubles=[entry.error for entry in entries if entry.error],
    )
    file = root / FILE
    files.write(file, text)
    return file


def _row(entry: Entry) -> Row:
    name = entry.folder.name
    if entry.run is None:
        cells = dict.fromkeys((column.title for column in COLUMNS), fmt.EMPTY)
        return Row((*(cells | {"run": name, "status": "unreadable"}).values(),))
    run = entry.run
    known, verdict = dict(measured_with(run)[0]), summary_of(run).get("verdict") or {}
    bounds = [verdict.get(key) for key in ("speedup", "speedup_lo", "speedup_hi")]
    return Row(
        (
            name,
            str(run.manifest.get("created_utc") or fmt.EMPTY)[:_MINUTES].replace("T", " "),
            _said(run),
            fmt.temperature(verdict.get("temperature")),
            fmt.speedup(*bounds),
            _state(run),
            door_of(run),
            *(_name(run, role) for role in ("model", "draft")),
            known.get("device", fmt.EMPTY),
            known.get("harness commit", fmt.EMPTY)[:_SHORT],
        )
    )


def _name(run: "StoredRun", role: str) -> str:
    """A model's name; of an audition the draft that its verdict names."""
    own = run.config.get(role)
    name = own.get("name") if isinstance(own, dict) else None
    chosen = (summary_of(run).get("verdict") or {}).get("draft") if role == "draft" else None
    return fmt.text(name or chosen)


def _said(run: "StoredRun") -> str:
    """What the run decided, in a few words: its first sentence up to the colon."""
    sentences = wording.verdicts(run)
    return sentences[0].partition(": ")[0].rstrip(".") if sentences else fmt.EMPTY


def _state(run: "StoredRun") -> str:
    trouble = wording.status(run)
    return trouble.split(" ")[0].lower() if trouble else WHOLE


def _link(root: Path, entry: Entry) -> str:
    """Its report, from the results folder; the folder itself where it has none."""
    folder = Path(os.path.relpath(entry.folder.resolve(), root.resolve()))
    report = (entry.folder / "report.html").is_file()
    return quote((folder / "report.html" if report else folder).as_posix())

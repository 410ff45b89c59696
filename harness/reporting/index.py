"""index.html: every run of a results folder on one page, newest first.

What it says of a run is what the run's summary says. A folder that cannot be read
(written by a newer version, say) keeps its row, with the reason.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from harness.reporting import formatting as fmt
from harness.reporting.content import measured_with
from harness.reporting.html import glossary, page
from harness.reporting.sentences import run, verdict
from harness.reporting.tables.specification import Column, table
from harness.storage import files
from harness.summary import Summary

FILE = "index.html"
COMPLETE = "complete"
_COMMIT = 10  # characters of a commit
_MINUTES = 16  # characters of an ISO date and time


@dataclass(frozen=True)
class Line:
    """What the page says of one run; texts are empty and numbers None where it does not say."""

    folder: str
    status: str
    date: str = ""
    verdict: str = ""
    temperature: float | None = None
    speedup: tuple[float | None, float | None, float | None] = (None, None, None)
    command: str = ""
    model: str = ""
    draft: str = ""
    device: str = ""
    commit: str = ""


COLUMNS: tuple[Column[Line], ...] = (
    Column("run", lambda line: line.folder, key=True),
    Column("date", lambda line: line.date),
    Column("verdict", lambda line: line.verdict, flexible=True),
    Column("temperature", lambda line: line.temperature, fmt.temperature),
    Column("speedup\n[lo, hi]", lambda line: line.speedup, fmt.speedup),
    Column("status", lambda line: line.status),
    Column("command", lambda line: line.command),
    Column("model", lambda line: line.model),
    Column("draft", lambda line: line.draft),
    Column("device", lambda line: line.device),
    Column("commit", lambda line: line.commit),
)


@dataclass(frozen=True)
class Entry:
    """A folder of the results folder."""

    folder: Path
    summary: Summary | None  # what it says; None where it cannot be read
    error: str = ""  # why it cannot be read; empty where it can


def render(root: Path, entries: Sequence[Entry]) -> Path:
    """Write index.html into `root`, replacing an earlier one.

    Entries are in the order of the page, newest first.
    """
    listed = table("Runs", COLUMNS, [_line(entry) for entry in entries])
    text = page(
        "index.html.j2",
        title=f"Runs in {root.resolve().name}",
        skip_to="the runs",
        table=listed,
        links=[_link(root, entry) for entry in entries],
        definitions=glossary([listed]),
        troubles=[entry.error for entry in entries if entry.error],
    )
    file = root / FILE
    files.write(file, text.encode())
    return file


def _line(entry: Entry) -> Line:
    summary = entry.summary
    if summary is None:
        return Line(entry.folder.name, "unreadable")
    facts, decision = summary.run, summary.verdict
    known, sentences = dict(measured_with(summary)[0]), verdict.verdicts(summary)
    trouble = run.status(facts)
    draft = facts.draft or (decision.draft if decision else None)
    return Line(
        folder=entry.folder.name,
        status=trouble.partition(" ")[0].lower() if trouble else COMPLETE,
        date=(facts.created_utc or "")[:_MINUTES].replace("T", " "),
        verdict=sentences[0].partition(": ")[0].rstrip(".") if sentences else "",
        temperature=decision.temperature if decision else None,
        speedup=(decision.speedup, decision.speedup_lo, decision.speedup_hi)
        if decision
        else (None, None, None),
        command=facts.command,
        model=facts.model or "",
        draft=draft or "",
        device=known.get("device", ""),
        commit=known.get("harness commit", "")[:_COMMIT],
    )


def _link(root: Path, entry: Entry) -> str:
    """Its report, from the results folder; the folder itself where it has none."""
    folder = Path(os.path.relpath(entry.folder.resolve(), root.resolve()))
    report = (entry.folder / "report.html").is_file()
    return quote((folder / "report.html" if report else folder).as_posix())

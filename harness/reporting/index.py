"""index.html: every run of a results folder on one page, in a table for each kind of evidence.

Measured speedups, predicted ones and those at a synthetic acceptance are in separate tables. All
values come from the runs' summaries. A folder that cannot be read (for example, one written by a
newer version) has a row with the reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import quote

from harness import formatting as fmt
from harness.records import where
from harness.reporting import grid
from harness.reporting.html import glossary, page
from harness.reporting.pages import page_of
from harness.reporting.sentences import run, verdict
from harness.reporting.tables.leaderboard import targets_table
from harness.reporting.tables.specification import Column, Table, table
from harness.storage import files
from harness.summary import CheckResult, ComparedRun, Summary, from_json

FILE = "index.html"
COMPLETE = "complete"
_COMMIT = 7  # characters of a commit
_DAY = 10  # characters of an ISO date
Kind = Literal["measured", "replayed", "typed", "synthetic", "check", "profile", "unreadable"]
# In the order of the page
TITLES: dict[Kind, str] = {
    "measured": "Measured: the speculative loop ran",
    "replayed": "Predicted: acceptance by replay, round times of the run",
    "typed": "From numbers that were typed or read from a server's log",
    "synthetic": "Synthetic acceptance or random weights: no recommendation",
    "check": "Checks of the output, and comparisons of runs",
    "profile": "Profiles: what rounds and steps cost",
    "unreadable": "Not readable",
}
OUTCOMES = {"pass": "PASS", "unclear": "PASS, unclear", "fail": "FAIL"}
# By column, the values that are not marked
GOOD = {"status": (COMPLETE,), "check": ("-", "PASS", "PASS, unclear", "TIE", "UNTESTED")}


@dataclass(frozen=True)
class Line:
    """The row of one run; texts are empty and numbers None where they do not apply."""

    folder: str  # its name in the results folder
    status: str
    kind: Kind = "unreadable"
    created: str = ""  # ISO date and time
    check: str = ""  # the result of its check; empty where it has none
    verdict: str = ""
    temperature: float | None = None
    speedup: fmt.Bounded = (None, None, None)
    model: str = ""
    draft: str = ""
    device: str = ""
    commit: str = ""
    error: str = ""  # why it cannot be read; empty where it can


# The answer comes first, since a phone shows the first columns only. A folder's name has the
# command.
COLUMNS: tuple[Column[Line], ...] = (
    Column("run", lambda line: line.folder, key=True),
    Column("verdict", lambda line: line.verdict, flexible=True),
    Column("speedup\n[lo, hi]", lambda line: line.speedup, fmt.speedup),
    Column("T", lambda line: line.temperature, fmt.temperature),
    Column("check", lambda line: line.check),
    Column("status", lambda line: line.status),
    Column("date", lambda line: line.created[:_DAY]),
    Column("model", lambda line: line.model),
    Column("draft", lambda line: line.draft),
    Column("device", lambda line: line.device, flexible=True),
    Column("commit", lambda line: line.commit),
)


def render(root: Path, lines: Sequence[Line]) -> Path:
    """Write index.html into `root`, replacing an earlier one.

    Lines are in the order of the page, newest first.
    """
    sections = [
        (table(title, COLUMNS, of_kind), [_link(root, line) for line in of_kind])
        for kind, title in TITLES.items()
        if (of_kind := where(lines, kind=kind))
    ]
    text = page(
        "index.html.j2",
        title=f"Runs in {root.resolve().name}",
        skip_to="the runs",
        runs=len(lines),
        sections=sections,
        good=GOOD,
        definitions=glossary(listed for listed, _ in sections),
        troubles=[line.error for line in lines if line.error],
    )
    file = root / FILE
    files.write(file, text.encode(errors="backslashreplace"))
    return file


def unreadable(folder: str, error: str) -> Line:
    return Line(folder, "unreadable", error=error)


def line_of(folder: str, summary: Summary) -> Line:
    """The row of a run in a folder of this name."""
    facts, decision = summary.run, summary.headline
    trouble = run.status(facts)
    draft = facts.draft or (decision.draft if decision else None)
    return Line(
        folder=folder,
        status=trouble.partition(" ")[0].lower() if trouble else COMPLETE,
        kind=_kind(summary),
        created=str(facts.created_utc or ""),
        check=_check(summary),
        verdict=_verdict_cell(summary),
        temperature=decision.temperature if decision else None,
        speedup=fmt.bounded(decision) if decision else (None, None, None),
        model=facts.model or "",
        draft=draft or "",
        device=facts.made_with.device or "",
        commit=(facts.made_with.commit or "")[:_COMMIT],
    )


def jobs_tables(jobs: Sequence[tuple[str, str | None, int]]) -> list[Table]:
    """The answers of a multirun's jobs, and its targets where several were auditioned.

    Args:
        jobs: of each the keys that it alone has, its run folder and its exit status.
    """
    lines: list[Line] = []
    summaries: list[Summary] = []
    for words, folder, status in jobs:
        file, line = Path(folder or "") / "summary.json", unreadable(words, "")
        if folder is not None and file.is_file():
            summaries.append(from_json(file.read_bytes()))
            line = line_of(words, summaries[-1])
        lines.append(replace(line, status=f"exit {status}" if status else COMPLETE))
    keys = replace(COLUMNS[0], title="keys", flexible=True)
    answered = lines if any(line.verdict for line in lines) else []
    answers = table("Every job", (keys, *COLUMNS[1:3], COLUMNS[5]), answered)
    return [made for made in (answers, targets_table(summaries)) if made.rows]


def _kind(summary: Summary) -> Kind:
    facts, kind = summary.run, page_of(summary).kind
    if kind != "check" and (facts.synthetic or facts.dummies):
        return "synthetic"
    if kind is not None:
        return kind
    answer = summary.headline
    predicted = facts.replay_only if answer is None else answer.source == "replayed"
    return "replayed" if predicted else "measured"


def _check(summary: Summary) -> str:
    """The result of comparing the output with plain decoding's, or the ratio with `fail_below`."""
    if summary.comparison is not None:
        outcomes = [run.outcome for run in summary.comparison.runs if run.outcome is not None]
        return next((word for key, word in reversed(OUTCOMES.items()) if key in outcomes), "")
    checks = verdict.snapshot_checks(summary)
    return verdict.snapshot_result(checks) if checks else ""


def _verdict_cell(summary: Summary) -> str:
    """The verdict in few words: the decision, else the first sentence of the report.

    For compared runs it is the ratio of each.
    """
    if summary.comparison is not None:
        return "; ".join(
            _ratio(run, summary.comparison.reference) for run in summary.comparison.runs
        )
    shown = grid.marked(summary)
    if shown is not None:
        return f"{grid.words_of_row(shown.answer, name_draft=False)} {grid.at_place(shown.answer)}"
    first = next(iter(page_of(summary).verdicts(summary)), "")
    if summary.plan is not None:
        return first
    decision, _, rest = first.partition(": ")
    if _kind(summary) == "check":
        return rest if decision in (*get_args(CheckResult),) else first
    return (first if summary.headline is None else decision).rstrip(".")


def _ratio(run: ComparedRun, reference: str) -> str:
    """A compared run's speedup / the reference's, and the threshold where there is one."""
    row = run.row
    if row is None or row.speedup_ratio is None:
        return f"{run.name}: no speedup to compare"
    gain = fmt.gain(row, "speedup_ratio")
    threshold = "" if run.threshold is None else f"fail_below={run.threshold:g}: "
    return f"{threshold}{gain} the speedup of {reference}"


def _link(root: Path, line: Line) -> str:
    """The path from the results folder to a run's report, or to its folder without a report."""
    report = f"{line.folder}/report.html"
    return quote(report if (root / report).is_file() else line.folder)

"""Reports of a `Summary`: files in the run folder, and the text that a command prints at its end.

`render` writes report.md, report.html and the plots; `show` prints the short report, and `document`
is the answer and the rows as JSON, which `json=true` prints. All read the Summary alone, so a
report can be made again without any model.

    sentences/  every sentence, by subject          tables/  every table, as column specifications
    plots/      every plot                          picture  the first picture, a bar for each K
    pages       the title, tables and plots of each command's report
    content     the parts of a report, in order     grid     the rows of the answers' table
    definitions  metrics.md as data                 serving_commands  those of the engines
    console, markdown, html  the layout of each     index    every run of a folder on one page
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.records import SCHEMA_VERSION, Verbose
from harness.reporting import console, markdown
from harness.reporting.content import content_of
from harness.storage import files
from harness.summary import Summary, to_json

if TYPE_CHECKING:
    from rich.console import Console

# Of summary.json: the answer, every answer, and the rows of results.csv
FIELDS = ("verdict", "answers", "results", "failures")


def render(summary: Summary, folder: Path, *, png: bool = False) -> None:
    """Write report.md, report.html and plots/*.svg into a run's folder, replacing earlier ones.

    With `png` the plots are written as png files too.

    Raises:
        UserError: the folder cannot be written, or its plots are a link out of it.
    """
    # Importing matplotlib takes a second, so only a caller that draws plots waits for it
    from harness.reporting import html, plots

    with files.writing(folder):
        drawn = plots.draw(summary, folder / "plots", png=png)
        content = content_of(summary)
        files.write(
            folder / "report.md",
            markdown.report(content, drawn, folder).encode(errors="backslashreplace"),
        )
        files.write(
            folder / "report.html", html.report(content, drawn).encode(errors="backslashreplace")
        )


def show(summary: Summary, out: "Console | None" = None, *, verbose: Verbose = False) -> None:
    """Print a run's answer, with `verbose` more of its report; to standard output by default."""
    console.show(content_of(summary), out, verbose=verbose)


def document(
    command: str,
    status: int,
    *,
    summary: Summary | None = None,
    folder: Path | None = None,
    errors: Sequence[str] = (),
    printed: str = "",
) -> str:
    """One line of JSON.

    Args:
        command: its name.
        status: the exit status.
        summary: of the run; None where the command made or read none.
        folder: the run folder.
        errors: lines of standard error on what failed.
        printed: what a command without a run prints otherwise, as a dry run does.
    """
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "status": status,
        "error": " ".join(errors) or None,
        "run": None if folder is None else str(folder),
    }
    if summary is not None:
        stored = json.loads(to_json(summary))
        record["sentences"] = list(content_of(summary).verdicts)
        record |= {name: stored[name] for name in FIELDS}
    elif printed:
        record["text"] = printed.splitlines()
    return json.dumps(record, ensure_ascii=False)

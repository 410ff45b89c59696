"""Reports of a `Summary`: files in the run folder, and the text that a command prints at its end.

`render` writes report.md, report.html and the plots; `show` prints the short report. Both read the
Summary alone, so a report can be made again without any model.

    sentences/  every sentence, by subject          tables/  every table, as column specifications
    plots/      every plot
    grid        the rows of the answers' table      serving  the serving commands of the engines
    content     the parts of a report, in order     definitions  metrics.md as data
    console, markdown, html  the layout of each     index    every run of a folder on one page
"""

from pathlib import Path
from typing import TYPE_CHECKING

from harness.records import Verbose
from harness.reporting import console, markdown
from harness.reporting.content import content_of
from harness.storage import files
from harness.summary import Summary

if TYPE_CHECKING:
    from rich.console import Console


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

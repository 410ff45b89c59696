"""A `Summary` in, files and a printed report out.

`render` writes report.md, report.html and the plots; `show` prints what a person reads at the end
of a command. Both read the Summary alone: a report can be made again without any model.

    sentences/  every sentence, by subject          tables/  every table, as column specifications
    plots/      every plot
    grid        which answer is shown where     serving  what to paste into a server
    content     what a report says, in order
    console, markdown, html  lay it out             definitions  metrics.md as data
    index       every run of a folder on one page
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


def render(summary: Summary, folder: Path) -> None:
    """Write report.md, report.html and plots/*.svg into a run's folder, replacing earlier ones.

    Raises:
        UserError: the folder cannot be written, or its plots are a link out of it.
    """
    # matplotlib takes a second: only who draws waits for it
    from harness.reporting import html, plots

    with files.writing(folder):
        drawn = plots.draw(summary, folder / "plots")
        content = content_of(summary)
        files.write(folder / "report.md", markdown.report(content, drawn, folder).encode())
        files.write(folder / "report.html", html.report(content, drawn).encode())


def show(summary: Summary, out: "Console | None" = None, *, verbose: Verbose = False) -> None:
    """Print a run's answer, with `verbose` more of its report; to standard output by default."""
    console.show(content_of(summary), out, verbose=verbose)

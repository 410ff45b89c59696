"""Stored records in, files and tables out.

`render` writes a run's report.md and plots; `show` prints what a person reads at the end of a
door. Both say only what is stored: the numbers come from results.csv, latency.csv, summary.json
and the trials, so a report can be made again, without any model, wherever the folder lies. A run
that stopped early is rendered as far as it goes and marked at the top.

    formatting   numbers as text       reading    frames as records again
    tables/      one module a table    plots/     one module a plot
    wording      the sentences         content    what a report says, in order
    console      lays it out in rich   markdown   lays it out in report.md
    html_report  in report.html        definitions  metrics.md as data
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.reporting import files, markdown
from harness.reporting.console import show
from harness.reporting.content import content_of
from harness.reporting.reading import summary_of
from harness.storage.files import writing

if TYPE_CHECKING:
    from harness.reporting.index import Entry
    from harness.storage import StoredRun

__all__ = ["render", "render_index", "show"]


def render(run: "StoredRun") -> None:
    """Write report.md, report.html and plots/*.svg into the run's folder, replacing earlier ones.

    Args:
        run: what was stored, complete or not.

    Raises:
        UserError: the folder cannot be written, or its plots are a link out of it.
    """
    # matplotlib takes a second: only who draws waits for it
    from harness.reporting import html_report, plots

    with writing(run.folder):
        drawn = plots.draw(run, run.folder / "plots")
        content = content_of(run)
        files.write(run.folder / "report.md", markdown.report(content, drawn, run.folder))
        page = html_report.report(content, drawn, run.folder, summary_of(run).get("verdict"))
        files.write(run.folder / "report.html", page)


def render_index(root: Path, entries: "Sequence[Entry]") -> Path:
    """Write index.html over these runs into `root`; see `harness.reporting.index`."""
    from harness.reporting import index  # matplotlib again

    return index.render(root, entries)

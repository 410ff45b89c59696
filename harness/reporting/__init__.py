"""Stored records in, files and tables out.

`render` writes a run's report.md and plots; `show` prints what a person reads at the end of a
door. Both say only what is stored: the numbers come from results.csv, latency.csv, summary.json
and the trials, so a report can be made again, without any model, wherever the folder lies. A run
that stopped early is rendered as far as it goes and marked at the top.

    formatting   numbers as text       reading    frames as records again
    tables/      one module a table    plots/     one module a plot
    wording      the sentences         content    what a report says, in order
    console      lays it out in rich   markdown   lays it out in report.md
"""

from typing import TYPE_CHECKING

from harness.reporting import files, markdown
from harness.reporting.console import show
from harness.reporting.content import content_of

if TYPE_CHECKING:
    from harness.storage import StoredRun

__all__ = ["render", "show"]


def render(run: "StoredRun") -> None:
    """Write report.md and plots/*.svg into the run's folder, replacing earlier ones.

    Args:
        run: what was stored, complete or not.

    Raises:
        OSError: the folder cannot be written.
    """
    from harness.reporting import plots  # matplotlib takes a second: only who draws waits for it

    drawn = plots.draw(run, run.folder / "plots")
    text = markdown.report(content_of(run), drawn, run.folder)
    files.write(run.folder / "report.md", text)

"""Plots as SVG files; a plot whose data is missing is not drawn.

To add one: a function from `Summary` and the most panels in a row to `style.Plot | None`, in
`MAKERS` under the name of its file, which the pages name that show it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from harness.reporting.pages import page_of
from harness.reporting.plots import acceptance, latency, load, speedup, style
from harness.storage import files
from harness.summary import Summary

Maker = Callable[[Summary, int], style.Plot | None]
MAKERS: Mapping[str, Maker] = {
    "speedup_vs_k.svg": speedup.draw_by_k,
    "leaderboard.svg": speedup.draw_leaderboard,
    "acceptance_by_category.svg": acceptance.draw_by_category,
    "acceptance_by_position.svg": acceptance.draw_by_position,
    "load.svg": load.draw_load,
    "ceilings.svg": speedup.draw_ceilings,
    "waterfall.svg": latency.draw_waterfall,
    "verify_curves.svg": latency.draw_verify_curves,
    "latency_by_rate.svg": load.draw_plan,
    "speedup_by_engine.svg": speedup.draw_engines,
    "speedup_ratio.svg": speedup.draw_ratios,
}
# Only what earlier renderings may have left is removed; a file of the user's stays.
LEFT = ("breakeven_vs_measured.svg", "acceptance_vs_temperature.svg", "verify_cost.svg")
NAMES = (*MAKERS, *LEFT)


class Drawn(NamedTuple):
    """A plot that was written: as its file has it, and as a phone shows it."""

    file: str  # relative to the run folder
    caption: str
    svg: str
    narrow: str  # the same with its panels in one column


def drawn(summary: Summary, across: int = style.WIDE) -> tuple[style.Plot, ...]:
    """Every plot that the run has data for, in reading order, so many panels in a row."""
    with style.styled():
        made = (MAKERS[name](summary, across) for name in page_of(summary).plots)
        return tuple(plot for plot in made if plot is not None)


def draw(summary: Summary, folder: Path) -> tuple[Drawn, ...]:
    """Write the plots directly into `folder`, in reading order; remove those whose data is gone."""
    plots = drawn(summary)
    files.directory(folder)
    for name in set(NAMES) - {plot.name for plot in plots}:
        (folder / name).unlink(missing_ok=True)
    for plot in plots:
        files.write(folder / plot.name, plot.svg.encode())
    return tuple(
        Drawn(f"{folder.name}/{plot.name}", plot.caption, plot.svg, narrow.svg)
        for plot, narrow in zip(plots, drawn(summary, style.NARROW), strict=True)
    )

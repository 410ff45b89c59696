"""Plots as SVG files; a plot whose data is missing is not drawn.

To add one: a function from `Summary` and the most panels in a row to `style.Plot | None`, named in
`PLOTS` under the commands that show it.
"""

from pathlib import Path
from typing import NamedTuple

from harness.reporting.plots import acceptance, latency, load, speedup, style
from harness.storage import files
from harness.summary import Summary

_DEFAULT = (
    speedup.draw_by_k,
    load.draw_load,
    speedup.draw_alpha,
    acceptance.draw_by_position,
    acceptance.draw_by_temperature,
)
PLOTS = {
    "audition": (
        speedup.draw_leaderboard,
        speedup.draw_by_k,
        acceptance.draw_by_category,
        acceptance.draw_by_position,
    ),
    "breakeven": (speedup.draw_ceilings, *_DEFAULT),
    "profile": (
        speedup.draw_ceilings,
        latency.draw_waterfall,
        latency.draw_verify_cost,
        latency.draw_verify_curves,
    ),
    "report": (speedup.draw_engines, speedup.draw_ratios),
    "plan": (load.draw_plan,),
}
# Only what earlier renderings may have left is removed; a file of the user's stays.
NAMES = (
    "speedup_vs_k.svg",
    "breakeven_vs_measured.svg",
    "acceptance_by_position.svg",
    "acceptance_vs_temperature.svg",
    "verify_cost.svg",
    "leaderboard.svg",
    "acceptance_by_category.svg",
    "waterfall.svg",
    "verify_curves.svg",
    "ceilings.svg",
    "load.svg",
    "speedup_by_engine.svg",
    "speedup_ratio.svg",
    "latency_by_rate.svg",
)


class Drawn(NamedTuple):
    """A plot that was written: as its file has it, and as a phone shows it."""

    file: str  # relative to the run folder
    caption: str
    svg: str
    narrow: str  # the same with its panels in one column


def drawn(summary: Summary, across: int = style.WIDE) -> tuple[style.Plot, ...]:
    """Every plot that the run has data for, in reading order, so many panels in a row."""
    makers = PLOTS.get(summary.run.command, _DEFAULT)
    with style.styled():
        return tuple(plot for make in makers if (plot := make(summary, across)) is not None)


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

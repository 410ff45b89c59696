"""Plots as SVG files; a plot whose data is missing is not drawn.

To add a plot, write a function of `Summary` that returns a `style.Plot` or None, put it in `MAKERS`
under its file's name, and name the file in `reporting.pages`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from harness.reporting.pages import page_of
from harness.reporting.plots import latency, speedup, style
from harness.storage import files
from harness.summary import Summary

MAKERS: Mapping[str, Callable[[Summary], style.Plot | None]] = {
    "speedup_vs_k.svg": speedup.draw_by_k,
    "leaderboard.svg": speedup.draw_leaderboard,
    "load.svg": latency.draw_load,
    "verify_curves.svg": latency.draw_verify_curves,
    "latency_by_rate.svg": latency.draw_plan,
    "speedup_ratio.svg": speedup.draw_ratios,
}


def drawn(summary: Summary) -> tuple[style.Plot, ...]:
    """Every plot that the run has data for, in reading order."""
    with style.styled():
        made = (MAKERS[name](summary) for name in page_of(summary).plots)
        return tuple(plot for plot in made if plot is not None)


def draw(summary: Summary, folder: Path, *, png: bool = False) -> tuple[style.Plot, ...]:
    """Write the plots into `folder` and return them in reading order; remove outdated ones."""
    plots = drawn(summary)
    files.directory(folder)
    for name in MAKERS.keys() - {plot.name for plot in plots}:  # never a user's file
        (folder / name).unlink(missing_ok=True)
    for plot in plots:
        files.write(folder / plot.name, plot.svg.encode())
        if png:
            files.write((folder / plot.name).with_suffix(".png"), style.as_png(plot))
    return plots

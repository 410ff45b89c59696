"""The style of all plots, and their SVG text: the same data give the same bytes.

Every series has a colour and a marker of its own.
"""

import io
import re
import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from harness.formatting import COLOURS, Bounded

MARKERS = ("o", "s", "^", "D", "v", "P")
INK, GREY, FAINT = "#1a1a1a", "#6b6b6b", "#e4e4e4"
DASHED = (0, (4, 3))
SMALL = 9.5
LETTERS_PER_INCH = 12  # of small text
LEGEND_LETTERS_PER_INCH, LEGEND_KEY_INCHES = 11, 0.75  # the space of an entry of the legend
MOST_ACROSS = 3  # panels in a row
_RULES: dict[Any, Any] = {
    "svg.hashsalt": "speculative-decoding",  # ids inside the file follow from the content
    "svg.fonttype": "none",  # text stays text: searchable, and sharp at any size
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 11,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
}


class Plot(NamedTuple):
    """A drawn plot: its file name, its caption (also the alternative text), and the SVG."""

    name: str
    caption: str
    svg: str
    figure: Figure


def as_png(plot: Plot) -> bytes:
    """The plot as a png file."""
    buffer = io.BytesIO()
    with styled():
        FigureCanvasAgg(plot.figure).print_png(buffer)
    return buffer.getvalue()


def styled() -> AbstractContextManager[None]:
    """A context with the project's matplotlib settings; the caller's are restored after it."""
    return rc_context(_RULES)


def panels(
    number: int,
    *,
    width: float = 4.2,
    height: float = 3.9,
    y: str = "",
    share_y: bool = True,
) -> tuple[Figure, list[Axes]]:
    """A figure without pyplot, and its panels.

    Args:
        number: how many panels.
        width: inches of a panel.
        height: inches of a panel.
        y: label of the y axis.
        share_y: whether all panels have one scale.
    """
    columns = 2 if number == 4 else min(number, MOST_ACROSS)
    rows = -(-number // columns)
    wide = width * columns + (1.6 if columns == 1 else 0.6)
    figure = Figure(figsize=(wide, height * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=share_y, squeeze=False)
    for axes in grid[:, 0]:
        axes.set_ylabel(y)
    listed = grid.ravel().tolist()
    for unused in listed[number:]:
        unused.set_visible(False)
    return figure, listed[:number]


def plot(name: str, caption: str, figure: Figure, under: str) -> Plot:
    """The figure as SVG text without date or random ids.

    Every labelled series of its panels gets one entry in a shared legend. `under` is the text below
    the plot, which explains how to read it.
    """
    named: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    width = figure.get_figwidth()
    if named:
        entry = LEGEND_KEY_INCHES + max(map(len, named)) / LEGEND_LETTERS_PER_INCH
        columns = max(1, int(width / entry))
        figure.legend(named.values(), named.keys(), loc="outside upper left", ncols=columns)
    lines = "\n".join(textwrap.wrap(under, int(width * LETTERS_PER_INCH)))
    figure.supxlabel(lines, fontsize=SMALL, color=GREY)
    buffer = io.StringIO()
    # Not savefig: it would draw the figure a second time for its layout
    FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None})
    text = "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())
    return Plot(name, caption, f"{text}\n", figure)


def look(index: int) -> dict[str, Any]:
    """The colour and marker of a series by its index; no two series have both in common."""
    marker = index + index // len(COLOURS)
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[marker % len(MARKERS)]}


def ticks(axes: Axes, values: Sequence[float], label: str, *, log: bool = False) -> None:
    """Set the x axis's ticks to these values alone, with its label."""
    if log:
        axes.set_xscale("log", base=2)
        axes.set_xlim(min(values) / 1.4, max(values) * 1.4)
    axes.set_xticks([], minor=True)
    axes.set_xticks(list(values), [f"{value:g}" for value in values])
    axes.set_xlabel(label)


def points(axes: Axes, x: Sequence[float], values: Sequence[Bounded], **kwargs: Any) -> None:
    """Draw (value, low, high) with error bars; no bar where there is no interval."""
    value, low, high = np.array(values, dtype=float).reshape(-1, 3).T
    bars = np.clip([value - low, high - value], 0.0, None)
    axes.errorbar(x, value, yerr=bars, capsize=3, elinewidth=1.4, **kwargs)


def dodge(ks: Sequence[int], index: int, number: int) -> list[float]:
    """The K values, shifted a little for each series so that error bars do not overlap."""
    return [k * 1.045 ** (index - (number - 1) / 2) for k in ks]


def folded(name: str, letters: int) -> str:
    """A name in lines of at most `letters`, broken at spaces, underscores, slashes and hyphens."""
    parts = re.findall(r"[^\s_/-]*[\s_/-]?", name)
    lines = [""]
    for part in parts:
        if lines[-1] and len((lines[-1] + part).rstrip()) > letters:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip(" ") for line in lines)


def note_at(axes: Axes, text: str, where: tuple[float, float], **kwargs: Any) -> None:
    """Write small text above a point on a white ground; `kwargs` are those of `annotate`."""
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    settings = {"xytext": (0, 6), "ha": "center", "fontsize": SMALL, "bbox": paper} | kwargs
    axes.annotate(text, where, textcoords="offset points", **settings)

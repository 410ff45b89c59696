"""How every plot looks, and how it is written so that the same data give the same bytes.

Colours are those of Okabe and Ito, told apart by people with any colour vision; every series has a
marker of its own and is labelled where it ends, so that none is told by colour alone.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#806000", "#3a8fb7")
MARKERS = ("o", "s", "^", "D", "v", "P")
INK, GREY, FAINT = "#1a1a1a", "#6b6b6b", "#e4e4e4"
PANEL_INCHES, HEIGHT_INCHES = 4.2, 3.9
_RULES: dict[Any, Any] = {
    "svg.hashsalt": "speculative-decoding",  # ids inside the file follow from the content
    "svg.fonttype": "none",  # text stays text: searchable, and sharp at any size
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
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
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
}


class Plot(NamedTuple):
    """A drawn plot: its file name, what it shows in words (the alternative text), and the SVG."""

    name: str
    caption: str
    svg: str


class Label(NamedTuple):
    """A direct label at the end of a series: the end's height and place, the name, the colour."""

    y: float
    x: float
    text: str
    colour: str
    weight: str = "bold"


@contextmanager
def styled() -> Iterator[None]:
    """The project's look while a figure is made; the caller's settings come back after."""
    from matplotlib import rc_context

    with rc_context(_RULES):
        yield


def panels(
    number: int,
    *,
    share_y: bool = True,
    width: float = PANEL_INCHES,
    height: float = HEIGHT_INCHES,
) -> tuple[Figure, list[Axes]]:
    """A figure of `number` panels, at most three in a row, without any global state.

    Args:
        number: of panels.
        share_y: whether all have one y axis.
        width: of a panel, inches.
        height: of a panel, inches.
    """
    columns = 2 if number == 4 else min(number, 3)
    rows = -(-number // columns)
    across = width * columns + (1.6 if columns == 1 else 0.6)
    figure = Figure(figsize=(across, height * rows), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots(rows, columns, sharey=share_y, squeeze=False).ravel().tolist()
    for unused in axes[number:]:
        unused.set_visible(False)
    return figure, axes[:number]


def svg(figure: Figure) -> str:
    """The figure as SVG text: no date, no random ids."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def k_axis(axes: Axes, ks: Sequence[int], *, label: str = "K (draft tokens per round)") -> None:
    """A logarithmic K axis with a tick at each K that was run."""
    axes.set_xscale("log", base=2)
    number_axis(axes, ks, label)
    axes.set_xlim(min(ks) / 1.4, max(ks) * 1.4)


def number_axis(axes: Axes, values: Sequence[float], label: str) -> None:
    """Ticks at these values and nowhere else."""
    axes.xaxis.set_major_locator(FixedLocator(list(values)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel(label)


def dodge(ks: Sequence[int], index: int, number: int) -> list[float]:
    """The K values, shifted a little per series so that whiskers do not lie on one another."""
    return [k * 1.045 ** (index - (number - 1) / 2) for k in ks]


def whiskers(
    values: Sequence[float], low: Sequence[float | None], high: Sequence[float | None]
) -> list[list[float]]:
    """Distances for error bars; no whisker where there is no interval."""
    entries = list(zip(values, low, high, strict=True))
    return [
        [0.0 if bound is None else max(0.0, value - bound) for value, bound, _ in entries],
        [0.0 if bound is None else max(0.0, bound - value) for value, _, bound in entries],
    ]


def direct_labels(axes: Axes, labels: Sequence[Label], *, gap: float = 0.075) -> None:
    """Names beside the series' ends, in their colours, pushed apart where they would overlap.

    Args:
        axes: with its limits already set.
        labels: one per series.
        gap: least distance between two labels, as a share of the axis.
    """
    bottom, top = axes.get_ylim()
    ordered = sorted(labels)
    heights = spread([label.y for label in ordered], gap * (top - bottom))
    for label, height in zip(ordered, heights, strict=True):
        axes.annotate(
            label.text,
            (label.x, height),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=label.colour,
            fontweight=label.weight,
            annotation_clip=False,
        )


def spread(heights: Sequence[float], least: float) -> list[float]:
    """Ascending heights moved as little as they need to lie `least` apart (pool adjacent ones)."""
    blocks: list[tuple[float, int]] = []
    for index, height in enumerate(heights):
        blocks.append((height - index * least, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (above, many), (below, few) = blocks.pop(), blocks.pop()
            blocks.append(((above * many + below * few) / (many + few), many + few))
    levels = [level for level, size in blocks for _ in range(size)]
    return [level + index * least for index, level in enumerate(levels)]


def caption_under(figure: Figure, text: str) -> None:
    """One grey line under the panels that says how to read them."""
    figure.supxlabel(text, fontsize=9.5, color=GREY)

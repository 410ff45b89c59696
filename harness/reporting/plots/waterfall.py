"""waterfall.svg: from the ideal speedup to the measured one, a bar per cause."""

from itertools import pairwise
from typing import TYPE_CHECKING

from harness.analysis.waterfall import headline_round, round_parts, waterfall
from harness.reporting import formatting as fmt
from harness.reporting.plots import style

if TYPE_CHECKING:
    from harness.storage import StoredRun

CAPTION = (
    "From the ideal speedup at K = {k} to the measured one: what the verify, the acceptance that"
    " was got and every other part of a round take away"
)
UNDER = "grey: speedups; orange: what a cause takes away; green: what it adds; dashed: no gain"
BAR = 0.62


def draw(run: "StoredRun") -> style.Plot | None:
    """Horizontal bars, top to bottom; None where the parts of a round were not timed."""
    entry = headline_round(round_parts(run.parts))
    if entry is None:
        return None
    falls = waterfall(entry)
    figure, (axes,) = style.panels(1, width=7.4, height=0.42 * (len(falls) + 1) + 1.1)
    axes.barh(0, falls[0].speedup, BAR, color=style.GREY)
    _label(axes, 0, falls[0].speedup, fmt.speedup(falls[0].speedup))
    names = [falls[0].cause]
    for index, (before, fall) in enumerate(pairwise(falls), start=1):
        low, high = sorted((before.speedup, fall.speedup))
        gains = fall.speedup > before.speedup
        axes.barh(index, high - low, BAR, left=low, color=style.COLOURS[2 if gains else 1])
        _label(axes, index, high, f"x {fmt.decimal(fall.factor, 3)}")
        names.append(fall.cause)
    axes.barh(len(falls), entry.speedup, BAR, color=style.GREY)
    _label(axes, len(falls), entry.speedup, fmt.speedup(entry.speedup))
    axes.set_yticks(range(len(falls) + 1), [*names, "measured"])
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.axvline(1.0, color=style.INK, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set_xlim(0.0, 1.18 * max(fall.speedup for fall in falls))
    axes.set_xlabel("speedup over plain decoding")
    axes.set_title(f"K = {entry.k}, {entry.rounds} rounds", loc="left")
    style.caption_under(figure, UNDER)
    return style.Plot("waterfall.svg", CAPTION.format(k=entry.k), style.svg(figure))


def _label(axes: style.Axes, place: int, end: float, text: str) -> None:
    axes.annotate(
        text,
        (end, place),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=9.5,
        color=style.INK,
    )

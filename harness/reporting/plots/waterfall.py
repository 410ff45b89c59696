"""waterfall.svg: from the ideal speedup to the measured one, a bar per cause."""

from itertools import pairwise

from harness.reporting import formatting as fmt
from harness.reporting.plots import style
from harness.reporting.tables.rounds import fastest_round, named_waterfall
from harness.summary import Summary

CAPTION = (
    "From the ideal speedup at K = {k} to the measured one: what the verify, the acceptance and"
    " every other part of a round take away"
)
UNDER = "grey: speedups; orange: what a cause takes away; green: what it adds; dashed: no gain"
BAR = 0.62


def draw(summary: Summary) -> style.Plot | None:
    """Horizontal bars, top to bottom; None where the parts of a round were not timed."""
    entry = fastest_round(summary)
    if entry is None:
        return None
    names, steps = zip(*named_waterfall(entry), strict=True)
    last = len(steps)
    figure, (axes,) = style.panels(1, width=7.4, height=0.42 * (last + 1) + 1.1)
    bars = [(0, 0.0, steps[0].speedup, style.GREY, fmt.speedup(steps[0].speedup))]
    for index, (before, after) in enumerate(pairwise(steps), start=1):
        low, high = sorted((before.speedup, after.speedup))
        colour = style.COLOURS[2 if after.speedup > before.speedup else 1]
        bars.append((index, low, high, colour, f"x {fmt.decimal(after.factor, 3)}"))
    bars.append((last, 0.0, entry.speedup, style.GREY, fmt.speedup(entry.speedup)))
    for place, low, high, colour, text in bars:
        axes.barh(place, high - low, BAR, left=low, color=colour)
        style.note_at(axes, text, (high, place), xytext=(4, 0), ha="left", va="center")
    axes.set_yticks(range(last + 1), [*names, "measured"])
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.axvline(1.0, color=style.INK, linewidth=1.0, linestyle=style.DASHED)
    axes.set_xlim(0.0, 1.18 * max(step.speedup for step in steps))
    axes.set_xlabel("speedup over plain decoding")
    axes.set_title(f"K = {entry.k}, {entry.rounds} rounds")
    return style.plot("waterfall.svg", CAPTION.format(k=entry.k), figure, UNDER)

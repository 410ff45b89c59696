"""Plots of the cost of forwards, and of the waterfall from the ideal speedup to timed rounds."""

from itertools import pairwise

from harness import formatting as fmt
from harness.records import grouped
from harness.reporting.plots import style
from harness.reporting.tables import stability
from harness.reporting.tables.latency import fastest_round, named_waterfall
from harness.summary import StepCurve, Summary

CURVES_CAPTION = "v(n) = target forward over n positions / target step, by context and batch"
CURVES_UNDER = "dashed: v = 1, a verify that costs one step, as most calculators assume"
POSITIONS = "n (positions in one target forward)"


def draw_verify_curves(summary: Summary) -> style.Plot | None:
    """A panel per context, a line per batch; None where no verifies were timed."""
    if not summary.step_curves:
        return None
    panels = grouped(summary.step_curves, lambda curve: curve.context_tokens)
    batches = sorted({curve.batch for curve in summary.step_curves})
    figure, axes = style.panels(len(panels), y="v(n)")
    for panel, (context, curves) in zip(axes, panels.items(), strict=True):
        for curve in curves:
            look = style.look(batches.index(curve.batch))
            v = {
                n: seconds / curve.target_step_s
                for n, seconds in enumerate(curve.verify_s, start=1)
                if not _unstable(summary, curve, n)
            }
            panel.plot(list(v), list(v.values()), label=f"batch {curve.batch}", **look)
        panel.axhline(1.0, color=style.GREY, linewidth=1.0, linestyle=style.DASHED)
        panel.set_xlabel(POSITIONS)
        panel.set_title(f"{context} tokens of context")
    axes[0].set_ylim(bottom=0.0)
    return style.plot("verify_curves.svg", CURVES_CAPTION, figure, CURVES_UNDER)


def _unstable(summary: Summary, curve: StepCurve, n: int) -> bool:
    """Whether v(n), or the step that it is divided by, is a timing that cannot be right."""
    timed = (curve.context_tokens, curve.batch)
    return any(
        stability.of_step(summary, "target", kind, *timed, tokens) is not None
        for kind, tokens in (("verify", n), ("step", 1))
    )


WATERFALL_CAPTION = (
    "From the ideal speedup at K = {k} to that of the timed rounds: what the verify, the acceptance"
    " and every other part of a round take away"
)
FALL_UNDER = "grey: speedups; orange: what a cause takes away; green: what it adds; dashed: no gain"
BAR_WIDTH = 0.62


def draw_waterfall(summary: Summary) -> style.Plot | None:
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
        axes.barh(place, high - low, BAR_WIDTH, left=low, color=colour)
        style.note_at(axes, text, (high, place), xytext=(4, 0), ha="left", va="center")
    axes.set_yticks(range(last + 1), [*names, "timed rounds"])
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.axvline(1.0, color=style.INK, linewidth=1.0, linestyle=style.DASHED)
    axes.set_xlim(0.0, 1.18 * max(step.speedup for step in steps))
    axes.set_xlabel("speedup over plain decoding")
    axes.set_title(f"K = {entry.k}, {entry.rounds} rounds")
    return style.plot("waterfall.svg", WATERFALL_CAPTION.format(k=entry.k), figure, FALL_UNDER)

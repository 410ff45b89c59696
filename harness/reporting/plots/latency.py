"""What forwards cost, and the waterfall from ideal to timed rounds."""

from itertools import pairwise

from harness import formatting as fmt
from harness.records import grouped, where
from harness.reporting.plots import style
from harness.reporting.tables import stability
from harness.reporting.tables.latency import Forward, fastest_round, named_waterfall, verify_curves
from harness.summary import StepCurve, Summary

COST_CAPTION = (
    "Time of a target forward over n positions, with v(n) written at the points, next to one"
    " target step and one draft step"
)
COST_UNDER = (
    "points: median, with p10 to p90; the number at a point is v(n) = forward / target step"
)
CURVES_CAPTION = "v(n) = target forward over n positions / target step, by context and batch"
CURVES_UNDER = "dashed: v = 1, a verify that costs one step, as most calculators assume"
POSITIONS = "n (positions in one target forward)"
POINT_INCHES = 0.48  # what the number at a point needs
NARROW_POINTS = 6  # numbers next to each other on a phone


def draw_verify_cost(summary: Summary, across: int) -> style.Plot | None:
    """A panel per (context, batch) that was timed; None without a verify curve."""
    every_curve = (_stable(summary, curve) for curve in verify_curves(summary))
    curves = [curve for curve in every_curve if curve]
    if not curves:
        return None
    curves = curves if len(curves) <= 3 else curves[:1]  # a profile's have a plot of their own
    widest = max(len(curve) for curve in curves)
    width = max(4.2, POINT_INCHES * widest)
    figure, axes = style.panels(len(curves), across, width=width, y="ms")
    every = 1 if across == style.WIDE else -(-widest // NARROW_POINTS)
    highest = max(forward.row.p90_ms for curve in curves for forward in curve)
    axes[0].set_ylim(0.0, 1.15 * highest)
    for panel, curve in zip(axes, curves, strict=True):
        step = curve[0].step
        rows = [forward.row for forward in curve]
        values = [(row.median_ms, row.p10_ms, row.p90_ms) for row in rows]
        ns = [row.tokens for row in rows]
        style.points(panel, ns, values, label="target forward", **style.look(0))
        for forward in curve[::every]:
            point = (forward.row.tokens, forward.row.p90_ms)
            style.note_at(panel, fmt.decimal(forward.v), point, color=style.COLOURS[0])
        timed = {"context_tokens": step.context_tokens, "batch": step.batch}
        drafts = where(summary.latency, role="draft", kind="step", **timed)
        levels = {"target step": step} | {f"{row.model or 'draft'} step": row for row in drafts}
        for index, (name, row) in enumerate(levels.items()):
            colour = style.GREY if index == 0 else style.COLOURS[index % len(style.COLOURS)]
            label = f"{name} {fmt.milliseconds(row.median_ms)} ms"
            panel.axhline(row.median_ms, color=colour, lw=1.0, linestyle=style.DASHED, label=label)
        style.ticks(panel, ns if len(ns) <= 12 else ns[:: -(-len(ns) // 12)], POSITIONS)
        batch = f", batch {step.batch}" if step.batch > 1 else ""
        panel.set_title(f"after {step.context_tokens} tokens of context{batch}")
    return style.plot("verify_cost.svg", COST_CAPTION, figure, COST_UNDER)


def _stable(summary: Summary, curve: list[Forward]) -> list[Forward]:
    """The forwards whose time can be right; none where that of the step cannot."""
    if stability.of_forward(summary, curve[0].step):
        return []
    return [forward for forward in curve if stability.of_forward(summary, forward.row) is None]


def draw_verify_curves(summary: Summary, across: int) -> style.Plot | None:
    """A panel per context, a line per batch; None where a single context and batch was timed."""
    if len(summary.step_curves) < 2:
        return None
    panels = grouped(summary.step_curves, lambda curve: curve.context_tokens)
    batches = sorted({curve.batch for curve in summary.step_curves})
    figure, axes = style.panels(len(panels), across, y="v(n)")
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
    """Whether v(n) is one that cannot be right, or its step is."""
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
NARROW_LETTERS = 18  # of a cause's name in one line on a phone


def draw_waterfall(summary: Summary, across: int) -> style.Plot | None:
    """Horizontal bars, top to bottom; None where the parts of a round were not timed."""
    entry = fastest_round(summary)
    if entry is None:
        return None
    names, steps = zip(*named_waterfall(entry), strict=True)
    last = len(steps)
    narrow = across == style.NARROW
    height = (0.5 if narrow else 0.42) * (last + 1) + 1.1
    figure, (axes,) = style.panels(1, across, width=7.4, height=height)
    bars = [(0, 0.0, steps[0].speedup, style.GREY, fmt.speedup(steps[0].speedup))]
    for index, (before, after) in enumerate(pairwise(steps), start=1):
        low, high = sorted((before.speedup, after.speedup))
        colour = style.COLOURS[2 if after.speedup > before.speedup else 1]
        bars.append((index, low, high, colour, f"x {fmt.decimal(after.factor, 3)}"))
    bars.append((last, 0.0, entry.speedup, style.GREY, fmt.speedup(entry.speedup)))
    for place, low, high, colour, text in bars:
        axes.barh(place, high - low, BAR_WIDTH, left=low, color=colour)
        style.note_at(axes, text, (high, place), xytext=(4, 0), ha="left", va="center")
    folded = [style.folded(name, NARROW_LETTERS) if narrow else name for name in names]
    axes.set_yticks(range(last + 1), [*folded, "timed rounds"])
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.axvline(1.0, color=style.INK, linewidth=1.0, linestyle=style.DASHED)
    axes.set_xlim(0.0, (1.5 if narrow else 1.18) * max(step.speedup for step in steps))
    axes.set_xlabel("speedup over plain decoding")
    axes.set_title(f"K = {entry.k}, {entry.rounds} rounds")
    return style.plot("waterfall.svg", WATERFALL_CAPTION.format(k=entry.k), figure, FALL_UNDER)

"""Plots of the cost of forwards."""

from harness.records import grouped
from harness.reporting.plots import style
from harness.reporting.tables import stability
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
    """True where v(n), or the step that it is divided by, is a timing that cannot be right."""
    timed = (curve.context_tokens, curve.batch)
    return any(
        stability.of_step(summary, "target", kind, *timed, tokens) is not None
        for kind, tokens in (("verify", n), ("step", 1))
    )

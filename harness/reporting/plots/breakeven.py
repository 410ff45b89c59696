"""breakeven_vs_measured.svg: the alpha that was measured against the alpha each K needs.

Both are alphas. An acceptance_rate has no place in this plot.
"""

from itertools import pairwise

from matplotlib.axes import Axes

from harness.reporting import formatting as fmt
from harness.reporting.plots import style
from harness.reporting.tables.specification import grouped
from harness.summary import Summary

CAPTION = (
    "{} alpha with its interval against the alpha that each K needs to break even:"
    " for a point inside its bar the step times predict a loss"
)
UNDER = (
    "points: {} alpha, with 95 % interval; bars: the alpha each K needs"
    " (none: even alpha = 1 loses). For a point inside its bar the step times predict a loss."
)


def draw(summary: Summary) -> style.Plot | None:
    """A panel per temperature; None without an alpha or a break-even alpha to compare it with."""
    points = [row for row in summary.generated if row.k > 0 and row.alpha is not None]
    theory = [row for row in summary.results if row.k > 0 and row.source == "theory"]
    needs = points if summary.run.replay_only else theory  # a replayed row has its own break-even
    if not points or not needs:
        return None
    panels = grouped(points, lambda row: row.temperature or 0.0)
    sets = list(dict.fromkeys(row.prompt_set for row in points))
    figure, axes = style.panels(len(panels))
    style.percent_axis(axes[0])
    axes[0].yaxis.set_major_formatter("{x:g}")  # an alpha is never written in percent
    axes[0].set_ylabel("alpha")
    for panel, temperature in zip(axes, sorted(panels), strict=True):
        needed = {r.k: r.breakeven_alpha for r in needs if (r.temperature or 0.0) == temperature}
        rows = panels[temperature]
        ks = sorted({row.k for row in rows} | set(needed))
        style.ticks(panel, ks, "K (draft tokens per round)", log=True)
        _bars(panel, needed)
        for prompt_set, series in grouped(rows, lambda row: row.prompt_set).items():
            index = sets.index(prompt_set)
            at = style.dodge([row.k for row in series], index, len(sets))
            values = [(row.alpha, row.alpha_lo, row.alpha_hi) for row in series]
            look = style.look(index)
            style.points(panel, at, values, label=str(prompt_set), linestyle="none", **look)
        panel.set_title(f"temperature {fmt.temperature(temperature)}")
    how = "replayed" if summary.run.replay_only else "measured"
    caption = CAPTION.format(how.capitalize())
    return style.plot("breakeven_vs_measured.svg", caption, figure, UNDER.format(how))


def _bars(axes: Axes, needed: dict[int, float | None]) -> None:
    """A bar per K up to the alpha it needs, its value at the foot; full where none is enough."""
    closest = min((high / low for low, high in pairwise(sorted(needed))), default=2.0)
    half = min(closest, 2.0) ** 0.4
    for k, root in sorted(needed.items()):
        top = axes.get_ylim()[1] if root is None else root
        axes.bar(k / half, top, k * half - k / half, align="edge", color=style.FAINT, linewidth=0)
        if root is not None:
            axes.plot([k / half, k * half], [top, top], color=style.INK, linewidth=1.6)
        text = fmt.NO_ROOT if root is None else fmt.decimal(root)
        style.note_at(axes, text, (k, 0.0), color=style.GREY)

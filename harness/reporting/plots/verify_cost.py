"""verify_cost.svg: what a target forward over n positions takes, beside one step of each model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from harness.records import LatencyRow
from harness.reporting import formatting as fmt
from harness.reporting.plots import style
from harness.reporting.reading import latency_of
from harness.reporting.tables.latency import verify_curves, verify_ratio

if TYPE_CHECKING:
    from harness.storage import StoredRun

CAPTION = (
    "Time of a target forward over n positions, with v(n) written at the points, beside one"
    " target step and one draft step"
)
UNDER = "points: median, with p10 to p90; the number at a point is v(n) = forward / target step"


POINT_INCHES = 0.48  # what the number at a point needs


def draw(run: "StoredRun") -> style.Plot | None:
    """One panel per (context, batch) that was timed; None without a verify curve."""
    latency = latency_of(run)
    curves = verify_curves(latency)
    if len(curves) > 3:  # a profile's curves have a plot of their own
        curves = dict(list(curves.items())[:1])
    if not curves:
        return None
    most = max(len(forwards) for _, forwards in curves.values())
    width = max(style.PANEL_INCHES, POINT_INCHES * most)
    figure, axes = style.panels(len(curves), width=width)
    highest = max(row.p90_ms for _, forwards in curves.values() for row in forwards)
    axes[0].set_ylim(0.0, highest * 1.15)
    for panel, ((context, batch), (step, forwards)) in zip(axes, curves.items(), strict=True):
        _curve(panel, step, forwards)
        draft = [row for row in latency if row.role == "draft" and row.kind == "step"]
        same = [row for row in draft if (row.context_tokens, row.batch) == (context, batch)]
        if len(same) > 1:
            _levels(panel, [step, *same])
        else:
            _level(panel, step.median_ms, f"target step {fmt.milliseconds(step.median_ms)} ms")
            for row in same:
                _level(panel, row.median_ms, f"draft step {fmt.milliseconds(row.median_ms)} ms")
        several = f", batch {batch}" if batch > 1 else ""
        typed = step.samples == 0
        title = "step times as typed" if typed else f"after {context} tokens of context{several}"
        panel.set_title(title, loc="left")
    axes[0].set_ylabel("ms")
    style.caption_under(figure, UNDER)
    return style.Plot("verify_cost.svg", CAPTION, style.svg(figure))


def _curve(axes: Axes, step: LatencyRow, forwards: list[LatencyRow]) -> None:
    values = [row.median_ms for row in forwards]
    bars = style.whiskers(
        values, [row.p10_ms for row in forwards], [row.p90_ms for row in forwards]
    )
    positions = [row.tokens for row in forwards]
    colour = style.COLOURS[0]
    axes.errorbar(positions, values, yerr=bars, fmt="o-", color=colour, capsize=3, elinewidth=1.4)
    for row in forwards:
        axes.annotate(
            fmt.decimal(verify_ratio(row, step)),
            (row.tokens, row.p90_ms),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=9.5,
            color=colour,
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    axes.set_xlabel("n (positions in one target forward)")


def _level(axes: Axes, value: float, text: str) -> None:
    _line(axes, value)
    axes.annotate(
        text,
        (0.99, value),
        xycoords=axes.get_yaxis_transform(),
        xytext=(0, -3),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=9.5,
        color=style.GREY,
    )


def _levels(axes: Axes, steps: Sequence[LatencyRow]) -> None:
    """The steps of several drafts, named beside the plot, where they can be pushed apart."""
    labels, end = [], axes.get_xlim()[1]
    for row in steps:
        _line(axes, row.median_ms)
        name = "target" if row.role == "target" else row.model
        text = f"{name} step {fmt.milliseconds(row.median_ms)} ms"
        labels.append(style.Label(row.median_ms, end, text, style.GREY, "normal"))
    style.direct_labels(axes, labels)


def _line(axes: Axes, value: float) -> None:
    axes.axhline(value, color=style.GREY, linewidth=1.0, linestyle=(0, (4, 3)), zorder=0)

"""breakeven_vs_measured.svg: the alpha that was measured against the alpha each K needs.

Both are alphas. An acceptance_rate has no place in this plot.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from harness.records import ResultRow
from harness.reporting import formatting as fmt
from harness.reporting.plots import style
from harness.reporting.reading import ran, replays_only, results_of

if TYPE_CHECKING:
    from harness.storage import StoredRun

CAPTION = (
    "{} alpha with its interval against the alpha that each K needs to break even:"
    " for a point inside its bar the step times predict a loss"
)
UNDER = (
    "points: {} alpha, with 95 % interval; bars: the alpha each K needs"
    " (none: even alpha = 1 loses).\nFor a point inside its bar the step times predict a loss."
)


def draw(run: "StoredRun") -> style.Plot | None:
    """One panel per draft and temperature; None without an alpha or anything to hold it against."""
    results = results_of(run)
    found = [row for row in ran(results) if row.k > 0 and row.alpha is not None]
    replayed = replays_only(results)
    theory = [row for row in results if row.k > 0 and row.source == "theory"]
    theory = found if replayed else theory  # a replayed row carries its own break-even
    if not found or not theory:
        return None
    cells = list(dict.fromkeys((row.draft, row.temperature) for row in found))
    cells.sort(key=lambda cell: (str(cell[0]), cell[1] or 0.0))
    sets = list(dict.fromkeys(row.prompt_set for row in found))
    figure, axes = style.panels(len(cells))
    for panel, cell in zip(axes, cells, strict=True):
        panel.set_ylim(0.0, 1.04)
        measured = [row for row in found if (row.draft, row.temperature) == cell]
        needed = [row for row in theory if (row.draft, row.temperature) == cell]
        style.k_axis(panel, sorted({row.k for row in measured + needed}))
        _needed(panel, needed)
        _measured(panel, measured, sets)
        draft = f"{cell[0]}, " if len({name for name, _ in cells}) > 1 else ""
        panel.set_title(f"{draft}temperature {fmt.temperature(cell[1])}", loc="left")
    axes[0].set_ylabel("alpha")
    how = "replayed" if replayed else "measured"
    style.caption_under(figure, UNDER.format(how))
    caption = CAPTION.format(how.capitalize())
    return style.Plot("breakeven_vs_measured.svg", caption, style.svg(figure))


def _needed(axes: Axes, rows: Sequence[ResultRow]) -> None:
    """A bar per K up to the alpha it needs, its value at the foot; full where none is enough."""
    needed = {row.k: row.breakeven_alpha for row in rows}
    ks = sorted(needed)
    closest = min((high / low for low, high in pairwise(ks)), default=2.0)
    half = min(closest, 2.0) ** 0.4
    for k in ks:
        root = needed[k]
        top = axes.get_ylim()[1] if root is None else root
        axes.bar(k / half, top, k * half - k / half, align="edge", color=style.FAINT, linewidth=0)
        if root is not None:
            axes.plot([k / half, k * half], [top, top], color=style.INK, linewidth=1.6)
        text = fmt.NO_ROOT if root is None else fmt.decimal(root)
        axes.text(k, 0.02, text, ha="center", va="bottom", fontsize=9.5, color=style.GREY)


def _measured(axes: Axes, rows: Sequence[ResultRow], sets: Sequence[str | None]) -> None:
    labels = []
    for index, prompt_set in enumerate(sets):
        mine = sorted((row for row in rows if row.prompt_set == prompt_set), key=lambda row: row.k)
        if not mine:
            continue
        colour = style.COLOURS[index % len(style.COLOURS)]
        values = [row.alpha or 0.0 for row in mine]
        axes.errorbar(
            style.dodge([row.k for row in mine], index, len(sets)),
            values,
            yerr=style.whiskers(
                values, [row.alpha_lo for row in mine], [row.alpha_hi for row in mine]
            ),
            fmt=style.MARKERS[index % len(style.MARKERS)],
            color=colour,
            capsize=3,
            elinewidth=1.4,
        )
        end = mine[-1].k * 1.4  # clear of its bar
        labels.append(style.Label(values[-1], end, str(prompt_set or "all"), colour))
    style.direct_labels(axes, labels)

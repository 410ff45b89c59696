"""speedup_by_k.svg: what each K of each draft would give, as replayed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from harness.records import ResultRow
from harness.reporting import formatting as fmt
from harness.reporting.plots import style
from harness.reporting.reading import drafts_of, ran, results_of

if TYPE_CHECKING:
    from harness.storage import StoredRun

CAPTION = (
    "Predicted speedup against K, one curve per draft, by prompt set and temperature, and the line"
    " at 1 where there is no speculation"
)
UNDER = "replayed, not run; filled: the draft's best K on those prompts"


def draw(run: "StoredRun") -> style.Plot | None:
    """One panel per temperature and prompt set, under the verdict's rule; None without rows."""
    rows = [row for row in ran(results_of(run)) if row.k > 0 and row.speedup is not None]
    rows = [row for row in rows if row.rule == rows[0].rule]
    if not rows:
        return None
    drafts = drafts_of(run)
    cells = list(dict.fromkeys((row.temperature or 0.0, row.prompt_set) for row in rows))
    cells.sort(key=lambda cell: cell[0])
    figure, axes = style.panels(len(cells))
    axes[0].set_ylim(0.0, 1.08 * max(1.25, *(row.speedup or 0.0 for row in rows)))
    for panel, (temperature, prompt_set) in zip(axes, cells, strict=True):
        mine = [
            row
            for row in rows
            if (row.temperature or 0.0, row.prompt_set) == (temperature, prompt_set)
        ]
        style.k_axis(panel, sorted({row.k for row in mine}))
        _panel(panel, mine, drafts)
        name = f"{prompt_set or 'all'} prompts"
        panel.set_title(f"temperature {fmt.temperature(temperature)}, {name}", loc="left")
    axes[0].set_ylabel("speedup")
    rule = f"rule {rows[0].rule}; " if rows[0].rule else ""
    style.caption_under(figure, rule + UNDER)
    return style.Plot("speedup_by_k.svg", CAPTION, style.svg(figure))


def _panel(axes: Axes, rows: Sequence[ResultRow], drafts: Sequence[str]) -> None:
    first, last = axes.get_xlim()[0], max(row.k for row in rows) * 1.05
    axes.plot([first, last], [1.0, 1.0], color=style.INK, linewidth=1.2, linestyle=(0, (5, 3)))
    labels = [style.Label(1.0, last, "no speculation", style.INK, "normal")]
    for index, draft in enumerate(drafts):
        mine = sorted((row for row in rows if str(row.draft) == draft), key=lambda row: row.k)
        if not mine:
            continue
        colour = style.COLOURS[index % len(style.COLOURS)]
        marker = style.MARKERS[index % len(style.MARKERS)]
        speedups = [row.speedup or 0.0 for row in mine]
        ks = [row.k for row in mine]
        axes.plot(ks, speedups, color=colour, marker=marker, markersize=5, markerfacecolor="white")
        best = speedups.index(max(speedups))
        axes.plot(ks[best], speedups[best], color=colour, marker=marker, markersize=8, zorder=4)
        labels.append(style.Label(speedups[-1], last, draft, colour))
    style.direct_labels(axes, labels)

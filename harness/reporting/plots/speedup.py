"""speedup_vs_k.svg: what was measured, what was predicted, and the line of no speculation."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from harness.records import ResultRow
from harness.reporting import formatting as fmt
from harness.reporting.plots import style
from harness.reporting.reading import ran, replays_only, results_of

if TYPE_CHECKING:
    from harness.storage import StoredRun

CAPTION = (
    "Speedup over plain decoding against K: measured points with their intervals, the prediction"
    " as a line, and the line at 1 where there is no speculation"
)
UNDER = "points: measured, with 95 % interval; lines: predicted from acceptance and step times"
REPLAYED_CAPTION = (
    "Speedup over plain decoding against K, replayed and not run, with its interval, and the line"
    " at 1 where there is no speculation"
)
REPLAYED_UNDER = "replayed, not run: acceptance on the target's texts, timed steps; 95 % interval"


def draw(run: "StoredRun") -> style.Plot | None:
    """One panel per draft and temperature, one series per prompt set; None without a speedup."""
    known = [row for row in results_of(run) if row.speedup is not None]
    shown = [row for row in ran(known) if row.k > 0]
    if not shown:
        return None
    replayed = replays_only(known)
    rows = [*shown, *(row for row in known if row.k > 0 and row.source == "theory")]
    cells = list(dict.fromkeys((row.draft, row.temperature) for row in shown))
    cells.sort(key=lambda cell: (str(cell[0]), cell[1] or 0.0))
    sets = list(dict.fromkeys(row.prompt_set for row in shown))
    figure, axes = style.panels(len(cells))
    _limits(axes[0], rows)
    for panel, cell in zip(axes, cells, strict=True):
        mine = [row for row in rows if (row.draft, row.temperature) == cell]
        style.k_axis(panel, sorted({row.k for row in mine}))
        _panel(panel, mine, sets)
        draft = f"{cell[0]}, " if len({name for name, _ in cells}) > 1 else ""
        panel.set_title(f"{draft}temperature {fmt.temperature(cell[1])}", loc="left")
    axes[0].set_ylabel("speedup")
    style.caption_under(figure, REPLAYED_UNDER if replayed else UNDER)
    caption = REPLAYED_CAPTION if replayed else CAPTION
    return style.Plot("speedup_vs_k.svg", caption, style.svg(figure))


def _limits(axes: Axes, rows: Sequence[ResultRow]) -> None:
    values = [value for row in rows for value in (row.speedup, row.speedup_lo, row.speedup_hi)]
    known = [value for value in values if value is not None]
    axes.set_ylim(min(0.0, *known), max(1.25, *known) * 1.08)


def _panel(axes: Axes, rows: Sequence[ResultRow], sets: Sequence[str | None]) -> None:
    first, last = axes.get_xlim()[0], max(row.k for row in rows) * 1.03
    axes.plot([first, last], [1.0, 1.0], color=style.INK, linewidth=1.2, linestyle=(0, (5, 3)))
    labels = [style.Label(1.0, last, "no speculation", style.INK, "normal")]
    for index, prompt_set in enumerate(sets):
        mine = sorted((row for row in rows if row.prompt_set == prompt_set), key=lambda row: row.k)
        if not mine:
            continue
        colour = style.COLOURS[index % len(style.COLOURS)]
        replayed = [row for row in mine if row.source == "replayed"]
        predicted = [row for row in mine if row.source == "theory"] or replayed
        speedups = [row.speedup or 0.0 for row in predicted]
        ks = [row.k for row in predicted]
        marker = "" if replayed else "_"  # replayed points have a marker of their own
        axes.plot(ks, speedups, color=colour, alpha=0.65, marker=marker, markersize=11)
        _points(axes, [row for row in mine if row.source != "theory"], index, len(sets))
        end = max(mine, key=lambda row: (row.k, row.source != "theory"))
        name = str(prompt_set or "all")
        labels.append(style.Label(end.speedup or 0.0, end.k * 1.03, name, colour))
    style.direct_labels(axes, labels)


def _points(axes: Axes, rows: Sequence[ResultRow], index: int, number: int) -> None:
    values = [row.speedup or 0.0 for row in rows]
    low, high = [row.speedup_lo for row in rows], [row.speedup_hi for row in rows]
    axes.errorbar(
        style.dodge([row.k for row in rows], index, number),
        values,
        yerr=style.whiskers(values, low, high),
        fmt=style.MARKERS[index % len(style.MARKERS)],
        color=style.COLOURS[index % len(style.COLOURS)],
        capsize=3,
        elinewidth=1.4,
    )

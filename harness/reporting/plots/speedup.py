"""speedup_vs_k.svg: what was generated or replayed, what was predicted, and no speculation at 1."""

from harness.records import ResultRow
from harness.reporting import formatting as fmt
from harness.reporting.plots import style
from harness.reporting.tables.specification import grouped
from harness.summary import Summary

CAPTION = (
    "Speedup over plain decoding against K: {points}, and the line at 1 where there is no"
    " speculation"
)
MEASURED = "measured points with their intervals, the prediction as a line"
REPLAYED = "replayed and not run"
UNDER = "points: measured, with 95 % interval; lines: predicted from acceptance and step times"
REPLAYED_UNDER = "replayed, not run: acceptance on the target's completions, timed steps{rule}"


def draw(summary: Summary) -> style.Plot | None:
    """A panel per temperature with a series per prompt set; None without a speedup.

    With several drafts a panel per temperature and prompt set, with a series per draft.
    """
    points = [row for row in summary.generated if row.k > 0 and row.speedup is not None]
    if not points:
        return None
    replayed = summary.run.replay_only
    points = [row for row in points if not replayed or row.rule == points[0].rule]
    theory = [row for row in summary.results if row.source == "theory" and row.k > 0]
    lines = points if replayed else [row for row in theory if row.speedup is not None]
    drafts = [name for name in summary.drafts if name in {row.draft for row in points}]
    several = len(drafts) > 1

    def panel_of(row: ResultRow) -> tuple[float, str]:
        return row.temperature or 0.0, (row.prompt_set or "all") if several else ""

    def series_of(row: ResultRow) -> str:
        return str(row.draft if several else row.prompt_set or "all")

    names = drafts if several else list(dict.fromkeys(map(series_of, points)))
    by_panel = grouped(points, panel_of)
    lines_of = grouped(lines, lambda row: (panel_of(row), series_of(row)))
    figure, axes = style.panels(len(by_panel))
    known = [v for r in points + lines for v in (r.speedup, r.speedup_hi) if v is not None]
    axes[0].set_ylim(0.0, 1.08 * max(1.25, *known))
    axes[0].set_ylabel("speedup")
    for panel, where in zip(axes, sorted(by_panel), strict=True):
        rows = by_panel[where]
        ks = sorted({row.k for row in rows})
        style.ticks(panel, ks, "K (draft tokens per round)", log=True)
        style.no_gain_line(panel)
        for name, series in grouped(rows, series_of).items():
            index = names.index(name)
            look = style.look(index)
            line = sorted(lines_of.get((where, name), ()), key=lambda row: row.k)
            speedups = [row.speedup or 0.0 for row in line]
            panel.plot([row.k for row in line], speedups, color=look["color"], alpha=0.65)
            at = style.dodge([row.k for row in series], index, len(names))
            values = [(row.speedup, row.speedup_lo, row.speedup_hi) for row in series]
            style.points(panel, at, values, label=name, linestyle="none", **look)
        prompts = f", {where[1]} prompts" if several else ""
        panel.set_title(f"temperature {fmt.temperature(where[0])}{prompts}")
    rule = f"; rule {points[0].rule}" if several and points[0].rule else ""
    under = REPLAYED_UNDER.format(rule=rule) if replayed else UNDER
    caption = CAPTION.format(points=REPLAYED if replayed else MEASURED)
    return style.plot("speedup_vs_k.svg", caption, figure, under)

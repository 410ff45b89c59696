"""The plot of the acceptance by position."""

from harness import formatting as fmt
from harness.records import grouped
from harness.reporting.plots import style
from harness.summary import AcceptanceByPosition, Summary

POSITION_CAPTION = "Share of rounds in which at least j draft tokens were accepted, j = 1..K"


def draw_by_position(summary: Summary) -> style.Plot | None:
    """A panel per temperature: a curve per prompt set at the largest K, or per replayed draft."""
    curves = [
        entry
        for entry in summary.acceptance_by_position
        if entry.source == "measured" and entry.prompt_set != "all"
    ]
    largest = max((entry.k for entry in curves), default=0)
    curves = [entry for entry in curves if entry.k == largest]
    measured = bool(curves)
    if not curves:
        curves = [e for e in summary.acceptance_by_position if e.source == "replayed"]
        largest = max((entry.k for entry in curves), default=0)
    if not curves:
        return None

    def name_of(entry: AcceptanceByPosition) -> str:
        return entry.prompt_set if measured else entry.draft

    names = list(dict.fromkeys(map(name_of, curves))) if measured else summary.drafts
    panels = grouped(curves, lambda entry: entry.temperature)
    figure, axes = style.panels(len(panels), y="rounds that accept at least j")
    style.percent_axis(axes[0])
    for panel, temperature in zip(axes, sorted(panels), strict=True):
        for entry in panels[temperature]:
            positions = range(1, len(entry.shares) + 1)
            look = style.look(names.index(name_of(entry)))
            panel.plot(positions, entry.shares, label=name_of(entry), **look)
        step = 1 if largest <= 12 else 2 if largest <= 24 else 4
        style.ticks(panel, range(1, largest + 1, step), "draft position j")
        at = f", K={largest}" if all(e.k == largest for e in curves) else ", each at its best K"
        panel.set_title(f"temperature {fmt.temperature(temperature)}{at}")
    under = "of the rounds with at least j text positions left"
    under = under if measured else f"by replay, {under}"
    return style.plot("acceptance_by_position.svg", POSITION_CAPTION, figure, under)

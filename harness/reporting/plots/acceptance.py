"""Plots of the acceptance by position and by category of prompts."""

from collections.abc import Iterable

import numpy as np
from matplotlib.colors import LinearSegmentedColormap

from harness import formatting as fmt
from harness.records import grouped
from harness.reporting.plots import style
from harness.summary import AcceptanceByPosition, CategoryAlpha, Summary

POSITION_CAPTION = "Share of rounds in which at least j draft tokens were accepted, j = 1..K"
CATEGORY_CAPTION = (
    "alpha of every draft on every category of prompts, written in the cell and shaded by it"
)
CATEGORY_UNDER = "alpha, the probability that a draft token is accepted: darker is higher"
# One hue from light to dark, so that it reads in grey as well.
SHADES = LinearSegmentedColormap.from_list("alpha", ["#f4f8fb", "#9cc3de", "#0a5a94"])
DARK = 0.8
LETTERS = 12  # letters of a draft's name in one line


def draw_by_position(summary: Summary, across: int) -> style.Plot | None:
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
    figure, axes = style.panels(len(panels), across, y="rounds that accept at least j")
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


def draw_by_category(summary: Summary, across: int) -> style.Plot | None:
    """A panel per temperature, a row per category, a column per draft; None without alphas."""
    entries = [entry for entry in summary.category_alpha if entry.alpha is not None]
    if not entries:
        return None
    drafts = list(dict.fromkeys(entry.draft for entry in entries))
    categories = list(dict.fromkeys(entry.category for entry in entries))
    panels = grouped(entries, lambda entry: entry.temperature)
    size = (1.2 + 1.15 * len(drafts), 1.5 + 0.46 * len(categories))
    figure, axes = style.panels(len(panels), across, width=size[0], height=size[1])
    letters = LETTERS if across == style.WIDE else int(2 * LETTERS / len(drafts))
    for panel, (temperature, cells) in zip(axes, panels.items(), strict=True):
        alphas = np.full((len(categories), len(drafts)), np.nan)
        for entry in cells:
            column, row = drafts.index(entry.draft), categories.index(entry.category)
            alphas[row, column] = entry.alpha
            ink = "white" if alphas[row, column] > DARK else style.INK
            panel.text(column, row, fmt.decimal(entry.alpha), ha="center", va="center", color=ink)
        panel.imshow(alphas, cmap=SHADES, vmin=0.0, vmax=1.0, aspect="auto")
        names = [style.folded(name, letters) for name in drafts]
        panel.set_xticks(range(len(drafts)), names)
        panel.set_yticks(range(len(categories)), categories)
        panel.tick_params(length=0)
        panel.grid(visible=False)
        panel.set_title(f"temperature {fmt.temperature(temperature)}{_at_k(cells)}")
    return style.plot("acceptance_by_category.svg", CATEGORY_CAPTION, figure, CATEGORY_UNDER)


def _at_k(entries: Iterable[CategoryAlpha]) -> str:
    """The common K of the entries as ", K=4"; "" where they differ."""
    ks = {entry.k for entry in entries}
    return f", K={ks.pop()}" if len(ks) == 1 else ""

"""The plot of alpha by category of prompts."""

from collections.abc import Iterable

import numpy as np
from matplotlib.colors import LinearSegmentedColormap

from harness import formatting as fmt
from harness.records import grouped
from harness.reporting.plots import style
from harness.summary import CategoryAlpha, Summary

CATEGORY_CAPTION = (
    "alpha of every draft on every category of prompts, written in the cell and shaded by it"
)
CATEGORY_UNDER = "alpha, the probability that a draft token is accepted: darker is higher"
# One hue from light to dark, so that it reads in grey as well.
SHADES = LinearSegmentedColormap.from_list("alpha", ["#f4f8fb", "#9cc3de", "#0a5a94"])
DARK = 0.8
LETTERS = 12  # letters of a draft's name in one line


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

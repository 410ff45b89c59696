"""acceptance_by_category.svg: alpha of every draft on every category, as a shaded table."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Rectangle

from harness.reporting import formatting as fmt
from harness.reporting.plots import style
from harness.reporting.reading import summary_of

if TYPE_CHECKING:
    from harness.storage import StoredRun

CAPTION = "alpha of every draft on every category of prompts, written in the cell and shaded by it"
UNDER = "alpha, the probability that a draft token is accepted: darker is higher"
CELL_INCHES = (1.15, 0.46)
LETTERS = 12
# One hue from light to dark, so that it reads in grey as well.
SHADES = LinearSegmentedColormap.from_list("alpha", ["#f4f8fb", "#9cc3de", "#0a5a94"])
DARK = 0.8


def draw(run: "StoredRun") -> style.Plot | None:
    """One panel per temperature, a row per category, a column per draft; None without alphas."""
    entries: Sequence[Mapping[str, Any]] = [
        entry
        for entry in summary_of(run).get("category_alpha") or ()
        if entry.get("alpha") is not None
    ]
    if not entries:
        return None
    drafts = list(dict.fromkeys(str(entry.get("draft")) for entry in entries))
    categories = list(dict.fromkeys(str(entry.get("category")) for entry in entries))
    temperatures = list(dict.fromkeys(entry.get("temperature") for entry in entries))
    figure, axes = style.panels(
        len(temperatures),
        width=1.2 + CELL_INCHES[0] * len(drafts),
        height=1.5 + CELL_INCHES[1] * len(categories),
    )
    for panel, temperature in zip(axes, temperatures, strict=True):
        mine = [entry for entry in entries if entry.get("temperature") == temperature]
        _table(panel, mine, drafts, categories)
        ks = {entry.get("k") for entry in mine}
        at_k = f", K={next(iter(ks))}" if len(ks) == 1 and None not in ks else ""
        title = f"temperature {fmt.temperature(temperature)}{at_k}"
        panel.set_title(title, loc="left", pad=12)
    style.caption_under(figure, UNDER)
    return style.Plot("acceptance_by_category.svg", CAPTION, style.svg(figure))


def _table(
    axes: Axes,
    entries: Sequence[Mapping[str, Any]],
    drafts: Sequence[str],
    categories: Sequence[str],
) -> None:
    for entry in entries:
        column = drafts.index(str(entry.get("draft")))
        row = categories.index(str(entry.get("category")))
        alpha = float(entry["alpha"])
        axes.add_patch(
            Rectangle(
                (column - 0.5, row - 0.5), 1, 1, facecolor=SHADES(alpha), edgecolor="white", lw=2
            )
        )
        ink = "white" if alpha > DARK else style.INK
        axes.text(column, row, fmt.decimal(alpha), ha="center", va="center", color=ink)
    axes.set_xlim(-0.5, len(drafts) - 0.5)
    axes.set_ylim(len(categories) - 0.5, -0.5)
    axes.set_xticks(range(len(drafts)), [_folded(draft) for draft in drafts], va="bottom")
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(categories)), categories)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _folded(name: str) -> str:
    """A long name in two lines, broken behind the underscore nearest its middle."""
    breaks = [place for place, letter in enumerate(name, start=1) if letter in "_-"]
    if len(name) <= LETTERS or not breaks:
        return name
    place = min(breaks, key=lambda place: abs(2 * place - len(name)))
    return f"{name[:place]}\n{name[place:]}"

"""leaderboard.svg: each draft's speedup at its best K, and not speculating, in order of rank."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes

from harness.reporting import formatting as fmt
from harness.reporting.plots import style
from harness.reporting.reading import drafts_of, summary_of
from harness.reporting.tables.leaderboard import Board, boards, name_of

if TYPE_CHECKING:
    from harness.storage import StoredRun

CAPTION = (
    "Predicted speedup of each draft at its best K with its interval, in order of rank, beside not"
    " speculating at 1"
)
UNDER = "predicted, with 95 % interval; filled: the best; the dashed line: no speculation"
ROW_INCHES, WIDTH_INCHES = 0.4, 5.2
# The numbers stand to the right of the intervals; engines are named above the panel.
ROOM, ENGINE_LETTERS = 1.3, 46


def draw(run: "StoredRun") -> style.Plot | None:
    """One panel per leaderboard, all on one scale; None without a leaderboard."""
    found = boards(summary_of(run).get("leaderboards") or ())
    if not found:
        return None
    names = drafts_of(run)
    deepest = max(len(board.entries) for board in found)
    figure, axes = style.panels(
        len(found), share_y=False, width=WIDTH_INCHES, height=1.9 + ROW_INCHES * deepest
    )
    engines = [_engines(board) for board in found]
    most = max(len(lines) for lines in engines)
    for panel, board, lines in zip(axes, found, engines, strict=True):
        _panel(panel, board, names)
        _title(panel, board.name, lines, most)
        panel.set_xlim(0.0, ROOM * max(_reach(board) for board in found))
        panel.set_ylim(deepest - 0.4, -0.6)
    style.caption_under(figure, UNDER)
    return style.Plot("leaderboard.svg", CAPTION, style.svg(figure))


def _reach(board: Board) -> float:
    """The end of the longest interval."""
    values = [row.get(key) for row in board.entries for key in ("speedup", "speedup_hi")]
    return max(1.0, *(value for value in values if value is not None))


def _panel(axes: Axes, board: Board, names: Sequence[str]) -> None:
    axes.axvline(1.0, color=style.INK, linewidth=1.2, linestyle=(0, (5, 3)), zorder=1)
    for place, row in enumerate(board.entries):
        _row(axes, place, row, names)
    axes.set_yticks(range(len(board.entries)), [_name(row) for row in board.entries])
    for label, row in zip(axes.get_yticklabels(), board.entries, strict=True):
        label.set_fontweight("bold" if row.get("rank") == 1 else "normal")
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.set_xlabel("speedup")


def _engines(board: Board) -> list[str]:
    """The engines that a leaderboard is for, in lines that fit a panel."""
    engines = "every engine" if board.every_rule else ", ".join(board.engines)
    return textwrap.wrap(engines, ENGINE_LETTERS)


def _title(axes: Axes, name: str, engines: list[str], most: int) -> None:
    """A panel's name and below it its engines, level with panels of `most` lines."""
    above = 9 + 13 * most
    axes.set_title(name, loc="left", pad=above)
    axes.annotate(
        "\n".join(engines),
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, above - 4),
        textcoords="offset points",
        va="top",
        fontsize=9.5,
        color=style.GREY,
    )


def _row(axes: Axes, place: int, row: Any, names: Sequence[str]) -> None:
    value, best = row.get("speedup"), row.get("rank") == 1
    if value is None:
        return
    plain = row.get("draft") is None
    index = 0 if plain else names.index(name_of(row))
    colour = style.INK if plain else style.COLOURS[index % len(style.COLOURS)]
    axes.errorbar(
        [value],
        [place],
        xerr=style.whiskers([value], [row.get("speedup_lo")], [row.get("speedup_hi")]),
        fmt="X" if plain else style.MARKERS[index % len(style.MARKERS)],
        markersize=8,
        markeredgewidth=1.4,
        markerfacecolor=colour if best else "white",
        color=colour,
        capsize=3,
        elinewidth=1.6,
        zorder=3,
    )
    end = row.get("speedup_hi") or value
    axes.annotate(
        fmt.speedup(value) + (" best" if best else ""),
        (end, place),
        xytext=(9, 0),
        textcoords="offset points",
        va="center",
        color=colour,
        fontweight="bold" if best else "normal",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        annotation_clip=False,
    )


def _name(row: Any) -> str:
    plain = row.get("draft") is None
    return name_of(row) if plain else f"{name_of(row)}, K={fmt.text(row.get('k'))}"

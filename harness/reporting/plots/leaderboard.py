"""leaderboard.svg: each draft's speedup at its best K, and not speculating, in order of rank."""

from typing import Any

from matplotlib.axes import Axes

from harness.reporting import formatting as fmt
from harness.reporting.plots import style
from harness.reporting.tables.leaderboard import PLAIN, Board, boards
from harness.summary import LeaderboardRow, Summary

CAPTION = (
    "Predicted speedup of each draft at its best K with its interval, in order of rank, next to not"
    " speculating at 1"
)
UNDER = "predicted, with 95 % interval; filled: the best; the dashed line: no speculation"
LETTERS, NARROW_LETTERS = 23, 16  # of a draft's name in one line; engines have twice as many


def draw(summary: Summary, across: int) -> style.Plot | None:
    """A panel per leaderboard, all on one scale; None without a leaderboard."""
    ranked = boards(summary)
    if not ranked:
        return None
    longest = max(len(board.rows) for board in ranked)
    height = 1.9 + 0.4 * longest
    figure, axes = style.panels(len(ranked), across, share_y=False, width=5.2, height=height)
    narrow = across == style.NARROW
    ends = [
        value for board in ranked for row in board.rows for value in (row.speedup, row.speedup_hi)
    ]
    for panel, board in zip(axes, ranked, strict=True):
        _panel(panel, board, summary.drafts, NARROW_LETTERS if narrow else LETTERS)
        # The numbers stand to the right of the intervals
        most = max(value for value in (1.0, *ends) if value is not None)
        panel.set_xlim(0.0, (1.6 if narrow else 1.3) * most)
        panel.set_ylim(longest - 0.4, -0.6)
    return style.plot("leaderboard.svg", CAPTION, figure, UNDER)


def _panel(axes: Axes, board: Board, drafts: tuple[str, ...], letters: int) -> None:
    axes.axvline(1.0, color=style.INK, linewidth=1.2, linestyle=style.DASHED, zorder=1)
    for place, row in enumerate(board.rows):
        _row(
            axes,
            place,
            row,
            {"color": style.INK, "marker": "X"}
            if row.draft is None
            else style.look(drafts.index(row.draft)),
        )
    names = [PLAIN if row.draft is None else f"{row.draft}, K={row.k}" for row in board.rows]
    axes.set_yticks(range(len(names)), [style.folded(name, letters) for name in names])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.set_xlabel("speedup")
    lines = style.folded("" if board.every_rule else board.acceptance, 2 * letters)
    axes.set_title(style.folded(board.name, 2 * letters - 6), pad=9 + 13 * (lines.count("\n") + 1))
    style.note_at(axes, lines, (0, 1), xycoords="axes fraction", ha="left", color=style.GREY)


def _row(axes: Axes, place: int, row: LeaderboardRow, look: dict[str, Any]) -> None:
    best = row.rank == 1
    low, high = row.speedup_lo, row.speedup_hi
    bar = None
    if low is not None and high is not None:
        bar = [[max(0.0, row.speedup - low)], [max(0.0, high - row.speedup)]]
    axes.errorbar(
        [row.speedup],
        [place],
        xerr=bar,
        markersize=8,
        markeredgewidth=1.4,
        markerfacecolor=look["color"] if best else "white",
        capsize=3,
        elinewidth=1.6,
        zorder=3,
        **look,
    )
    text = fmt.speedup(row.speedup) + (" best" if best else "")
    weight = "bold" if best else "normal"
    settings = {"xytext": (9, 0), "ha": "left", "va": "center", "fontweight": weight}
    style.note_at(axes, text, (high or row.speedup, place), color=look["color"], **settings)

"""Plots of speedups: by K, of each draft at its best K, and of compared runs."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from harness import formatting as fmt
from harness.records import ResultRow, grouped, where
from harness.reporting import grid
from harness.reporting.plots import style
from harness.reporting.tables.leaderboard import PLAIN, Board, boards, name_of
from harness.reporting.tables.sweep import cells_of
from harness.summary import LeaderboardRow, Summary

GAIN_CAPTION = (
    "Speedup over plain decoding against K: {points}, and the line at 1 where there is no"
    " speculation"
)
BY_MEASUREMENT = "measured points{intervals}{lines}"
BY_REPLAY = "predicted by replay, not run"
GAIN_UNDER = (
    "points: measured{intervals}; lines: predicted, tokens per round by replay x R(0) / R(K)"
)
REPLAYED_UNDER = "predicted: tokens per round by replay x R(0) / R(K){engines}"
DRAFT_TOKENS = "K (draft tokens per round)"


def draw_by_k(summary: Summary) -> style.Plot | None:
    """A panel per temperature with a series per prompt set; None without a speedup.

    With several drafts a panel per temperature and prompt set, with a series per draft.
    """
    cells = [each for each in cells_of(summary) if each.unstable is None]
    speedups = {id(each.row): each.speedup for each in cells if each.speedup and each.speedup[0]}
    points = [each.row for each in cells if id(each.row) in speedups]
    if not points:
        return None
    replayed = summary.run.replay_only
    points = [row for row in points if not replayed or row.rule == points[0].rule]
    lines = points if replayed else _predicted(summary)
    drafts = [name for name in summary.drafts if name in {row.draft for row in points}]
    several = len(drafts) > 1

    def panel_of(row: ResultRow) -> tuple[float, str]:
        return row.temperature or 0.0, (row.prompt_set or "all") if several else ""

    def series_of(row: ResultRow) -> str:
        return str(row.draft if several else row.prompt_set or "all")

    names = drafts if several else list(dict.fromkeys(map(series_of, points)))
    by_panel = grouped(points, panel_of)
    lines_of = grouped(lines, lambda row: (panel_of(row), series_of(row)))
    figure, axes = style.panels(len(by_panel), y="speedup")
    known = [value for each in speedups.values() for value in each if value is not None]
    known += [row.speedup for row in lines if row.speedup is not None]
    axes[0].set_ylim(0.0, 1.08 * max(1.25, *known))
    for panel, (at, rows) in zip(axes, sorted(by_panel.items()), strict=True):
        ks = sorted({row.k for row in points + lines if panel_of(row) == at})
        style.ticks(panel, ks, DRAFT_TOKENS, log=True)
        line = {"color": style.INK, "linewidth": 1.2, "linestyle": style.DASHED}
        panel.axhline(1.0, **line, label="no speculation", zorder=1)
        for name, series in grouped(rows, series_of).items():
            index = names.index(name)
            _prediction_line(panel, lines_of.get((at, name), ()), style.look(index)["color"])
            at_ks = style.dodge([row.k for row in series], index, len(names))
            values = [speedups[id(row)] for row in series]
            style.points(panel, at_ks, values, label=name, linestyle="none", **style.look(index))
        prompts = f", {at[1]} prompts" if several else ""
        panel.set_title(f"temperature {fmt.temperature(at[0])}{prompts}")
    rule = points[0].rule
    engines = f" (accepted as on {grid.engines_by_rule()[rule]})" if several and rule else ""
    under, shown = REPLAYED_UNDER.format(engines=engines), BY_REPLAY
    if not replayed:
        bars = any(low is not None for _, low, _ in speedups.values())
        under = GAIN_UNDER.format(intervals=", with interval" if bars else "")
        shown = BY_MEASUREMENT.format(
            intervals=" with their intervals" if bars else "",
            lines=", the prediction as a line" if lines else "",
        )
    caption = GAIN_CAPTION.format(points=shown)
    return style.plot("speedup_vs_k.svg", caption, figure, under)


def _predicted(summary: Summary) -> list[ResultRow]:
    return [
        row
        for row in summary.alone
        if row.source != "measured" and row.k > 0 and row.speedup is not None
    ]


def _prediction_line(axes: Axes, rows: Sequence[ResultRow], colour: str) -> None:
    ordered = sorted(rows, key=lambda row: row.k)
    speedups = [row.speedup or 0.0 for row in ordered]
    axes.plot([row.k for row in ordered], speedups, color=colour, alpha=0.65)


BOARD_CAPTION = (
    "Predicted speedup of each draft at its best K with its interval, in order of rank, next to not"
    " speculating at 1"
)
BOARD_UNDER = (
    "predicted, with 95 % interval; filled: the best that an engine has; the dashed line: no"
    " speculation"
)
LETTERS = 23  # letters of a draft's name in one line
# Letters of a bold title, and of the small text below it, in the width of one letter of a name
BOLD, SMALL = 1.45, 2


def draw_leaderboard(summary: Summary) -> style.Plot | None:
    """A panel per leaderboard, all on one scale; None without a leaderboard."""
    ranked = boards(summary)
    if not ranked:
        return None
    longest = max(len(board.rows) for board in ranked)
    height = 1.9 + 0.4 * longest
    figure, axes = style.panels(len(ranked), share_y=False, width=5.2, height=height)
    ends = [end for board in ranked for row in board.rows for end in (row.speedup, row.speedup_hi)]
    for panel, board in zip(axes, ranked, strict=True):
        _board(panel, board, summary.drafts)
        # The numbers stand to the right of the intervals
        most = max(value for value in (1.0, *ends) if value is not None)
        panel.set_xlim(0.0, 1.3 * most)
        panel.set_ylim(longest - 0.4, -0.6)
    return style.plot("leaderboard.svg", BOARD_CAPTION, figure, BOARD_UNDER)


def _board(axes: Axes, board: Board, drafts: tuple[str, ...]) -> None:
    axes.axvline(1.0, color=style.INK, linewidth=1.2, linestyle=style.DASHED, zorder=1)
    for place, row in enumerate(board.rows):
        plain = {"color": style.INK, "marker": "X"}
        look = plain if row.draft is None else style.look(drafts.index(row.draft))
        _board_row(axes, place, row, look, best=row is board.best)
    names = [
        PLAIN if row.draft is None else f"{name_of(row, board.marks)}, K={row.k}"
        for row in board.rows
    ]
    axes.set_yticks(range(len(names)), [style.folded(name, LETTERS) for name in names])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.set_xlabel("speedup")
    lines = style.folded("" if board.every_rule else board.acceptance, SMALL * LETTERS)
    title = style.folded(board.name[0].upper() + board.name[1:], int(BOLD * LETTERS))
    axes.set_title(title, pad=9 + 13 * (lines.count("\n") + 1))
    style.note_at(axes, lines, (0, 1), xycoords="axes fraction", ha="left", color=style.GREY)


def _board_row(
    axes: Axes, place: int, row: LeaderboardRow, look: dict[str, Any], *, best: bool
) -> None:
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
    text = fmt.speedup(row.speedup) + (" best" if best else " dropped" if row.dropped else "")
    weight = "bold" if best else "normal"
    settings = {"xytext": (9, 0), "ha": "left", "va": "center", "fontweight": weight}
    style.note_at(axes, text, (high or row.speedup, place), color=look["color"], **settings)


RATIO_CAPTION = (
    "Speedup of each run / speedup of the reference against K, on the whole workload: below the"
    " line at 1 the run is slower"
)
RATIO_UNDER = "run / {reference}, over the prompts that both have, with 95 % interval"


def draw_ratios(summary: Summary) -> style.Plot | None:
    """A panel per temperature with a series per compared run; None without a speedup ratio."""
    compared = summary.comparison
    if compared is None:
        return None
    whole = [row for row in compared.rows if row.prompt_set in (None, "all") and row.speedup_ratio]
    if not whole:
        return None
    runs = [run.name for run in compared.runs]
    thresholds = {run.threshold for run in compared.runs if run.threshold is not None}
    panels = grouped(whole, lambda row: row.temperature or 0.0)
    figure, axes = style.panels(len(panels), y="speedup ratio")
    ks = sorted({row.k for row in whole})
    for panel, (temperature, rows) in zip(axes, sorted(panels.items()), strict=True):
        line = {"color": style.INK, "linewidth": 1.2, "zorder": 1}
        panel.axhline(1.0, linestyle=style.DASHED, **line)
        for level in thresholds:
            panel.axhline(level, linestyle=":", label=f"fail_below={level:g}", **line)
        for index, name in enumerate(runs):
            points = {row.k: fmt.bounded(row, "speedup_ratio") for row in where(rows, run=name)}
            at = style.dodge(list(points), index, len(runs))
            look = style.look(index)
            style.points(panel, at, [*points.values()], label=name, linestyle="none", **look)
        style.ticks(panel, ks, DRAFT_TOKENS, log=True)
        panel.set_title(f"temperature {fmt.temperature(temperature)}")
    axes[0].set_ylim(bottom=0.0)
    under = RATIO_UNDER.format(reference=compared.reference)
    return style.plot("speedup_ratio.svg", RATIO_CAPTION, figure, under)

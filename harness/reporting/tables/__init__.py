"""Tables of a summary: which command shows which, in the order a person reads them.

`specification` says what a table is; every other module holds the tables of one subject. To add a
column, add a `Column` to the subject's tuple; to add a table, a function from `Summary` to `Table`
named below. A table without rows is not shown.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from harness.reporting.tables import (
    adaptive,
    answers,
    breakeven,
    cards,
    comparison,
    latency,
    leaderboard,
    served,
    sweep,
)
from harness.reporting.tables.specification import Table
from harness.summary import Summary


def _sweep(summary: Summary) -> list[Table]:
    return [
        *sweep.sweep_tables(summary),
        leaderboard.thumb_table(summary),
        sweep.replay_table(summary),
        *adaptive.adaptive_tables(summary),
        leaderboard.prompt_set_table(summary),
        latency.rounds_table(summary),
        leaderboard.costs_table(summary),
        *latency.verify_tables(summary),
    ]


def _server(summary: Summary) -> list[Table]:
    return [
        *served.served_tables(summary),
        *sweep.sweep_tables(summary),
        leaderboard.prompt_set_table(summary),
        latency.rounds_table(summary),
        leaderboard.costs_table(summary),
        *leaderboard.position_tables(summary),
    ]


def _audition(summary: Summary) -> list[Table]:
    return [
        *cards.card_tables(summary),
        *leaderboard.leaderboard_tables(summary),
        leaderboard.ineligible_table(summary),
        leaderboard.prompt_set_table(summary),
        *adaptive.adaptive_tables(summary),
        leaderboard.thumb_table(summary),
        latency.rounds_table(summary),
        leaderboard.costs_table(summary),
        *leaderboard.category_tables(summary),
        *leaderboard.length_tables(summary),
        *leaderboard.position_tables(summary),
        leaderboard.request_table(summary),
        *latency.verify_tables(summary),
    ]


def _profile(summary: Summary) -> list[Table]:
    return [
        latency.alone_table(summary),
        latency.rounds_table(summary),
        leaderboard.costs_table(summary),
        latency.bounds_table(summary),
        latency.reads_table(summary),
        *latency.verify_tables(summary)[:1],
        breakeven.ideal_table(summary),
        latency.waterfall_table(summary),
        latency.parts_table(summary),
        latency.curve_table(summary),
        latency.batch_table(summary),
    ]


def _breakeven(summary: Summary) -> list[Table]:
    fit = summary.round_fit
    return [
        *(breakeven.server_tables(fit) if fit else ()),
        breakeven.measured_table(summary),
        breakeven.ideal_table(summary),
        breakeven.rules_table(summary),
        latency.rounds_table(summary),
        leaderboard.costs_table(summary),
    ]


def _snapshot(summary: Summary) -> list[Table]:
    return [sweep.text_table(summary), sweep.distribution_table(summary)]


def _report(summary: Summary) -> list[Table]:
    compared = summary.comparison
    return list(comparison.comparison_tables(compared)) if compared else []


TABLES: dict[str, Callable[[Summary], Sequence[Table]]] = {
    "sweep": _sweep,
    "audition": _audition,
    "server": _server,
    "profile": _profile,
    "breakeven": _breakeven,
    "snapshot": _snapshot,
    "report": _report,
}


def tables_of(summary: Summary) -> tuple[Table, ...]:
    """Every table of a run that has at least one row, most important first.

    A note that several tables share is made under the last of them only.
    """
    made = [table for table in TABLES.get(summary.run.command, _sweep)(summary) if table.rows]
    last = {note: index for index, table in enumerate(made) for note in table.notes}
    return tuple(
        replace(table, notes=tuple(note for note in table.notes if last[note] == index))
        for index, table in enumerate(made)
    )


def brief_tables(summary: Summary) -> tuple[Table, ...]:
    """What the console shows where it does not print every table: the grid, then by importance."""
    command = summary.run.command
    made: Sequence[Table] = ()
    if command in ("sweep", "audition", "server"):
        made = (answers.short_grid(summary), *served.brief_tables(summary))
        made += (answers.sets_table(summary),)
        made += (answers.drafts_table(summary),) if command == "audition" else ()
    elif command in ("profile", "breakeven"):
        made = (breakeven.measured_table(summary), breakeven.ideal_table(summary))
    elif summary.comparison is not None:
        compared = summary.comparison
        made = (comparison.brief_engines(compared), comparison.brief_table(compared))
    return tuple(entry for entry in made if entry.rows)

"""Tables of a summary: which command shows which, in the order a person reads them.

`specification` says what a table is; every other module holds the tables of one subject. To add a
column, add a `Column` to the subject's tuple; to add a table, a function from `Summary` to `Table`
named below. A table without rows is not shown.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from harness.reporting.tables import (
    answers,
    breakeven,
    cards,
    comparison,
    latency,
    leaderboard,
    plan,
    running,
    served,
    sweep,
)
from harness.reporting.tables.specification import Table
from harness.summary import Summary

Maker = Callable[[Summary], Table | Sequence[Table]]
SWEEP: tuple[Maker, ...] = (
    sweep.sweep_tables,
    answers.emits_table,
    sweep.replay_table,
    sweep.adaptive_tables,
    leaderboard.prompt_set_table,
    latency.rounds_table,
    leaderboard.costs_table,
)
# By command; a sweep's for every other.
TABLES: dict[str, tuple[Maker, ...]] = {
    "audition": (
        cards.card_tables,
        leaderboard.leaderboard_tables,
        answers.emits_table,
        leaderboard.ineligible_table,
        leaderboard.prompt_set_table,
        sweep.adaptive_tables,
        latency.rounds_table,
        leaderboard.costs_table,
        leaderboard.category_tables,
        leaderboard.position_tables,
    ),
    "server": (
        served.served_tables,
        sweep.sweep_tables,
        leaderboard.prompt_set_table,
        latency.rounds_table,
        leaderboard.costs_table,
        leaderboard.position_tables,
    ),
    "profile": (
        latency.alone_table,
        latency.rounds_table,
        leaderboard.costs_table,
        latency.bounds_table,
        latency.verify_table,
        breakeven.ideal_table,
        latency.waterfall_table,
        latency.parts_table,
        latency.curve_table,
    ),
    "breakeven": (
        breakeven.measured_table,
        breakeven.ideal_table,
        breakeven.rules_table,
        breakeven.thumb_table,
        latency.rounds_table,
        leaderboard.costs_table,
    ),
    "snapshot": (sweep.text_table, sweep.distribution_table),
    "metrics": (
        running.by_k_table,
        running.positions_table,
        latency.rounds_table,
    ),
    "plan": (plan.choices_table, plan.waits_tables),
    "report": (comparison.comparison_tables,),
}


# Those that the answer is read from; the others say how it was measured, or go further
MAIN = frozenset[Maker](
    (
        cards.card_tables,
        leaderboard.leaderboard_tables,
        leaderboard.ineligible_table,
        leaderboard.prompt_set_table,
        sweep.sweep_tables,
        sweep.text_table,
        sweep.distribution_table,
        served.served_tables,
        latency.alone_table,
        breakeven.measured_table,
        breakeven.ideal_table,
        running.by_k_table,
        running.positions_table,
        plan.choices_table,
        comparison.comparison_tables,
    )
)
_ANSWERS: tuple[Maker, ...] = (answers.short_grid, served.brief_tables, answers.sets_table)
_TIMES: tuple[Maker, ...] = (breakeven.measured_table, breakeven.ideal_table)
# What the console shows where it does not print every table
BRIEF: dict[str, tuple[Maker, ...]] = {
    "sweep": _ANSWERS,
    "audition": (answers.short_grid, answers.drafts_table, answers.sets_table),
    "server": _ANSWERS,
    "profile": _TIMES,
    "breakeven": _TIMES,
    "metrics": (running.by_k_table,),
    "plan": (plan.brief_table,),
    "report": (comparison.brief_tables,),
}


def tables_of(summary: Summary, *, main: bool = False) -> tuple[Table, ...]:
    """Every table of a run that has at least one row, most important first.

    With `main` those that the answer is read from. A note that several tables share is made under
    the last of them only.
    """
    makers = TABLES.get(summary.run.command, SWEEP)
    made = list(_made([m for m in makers if not main or m in MAIN], summary))
    last = {note: index for index, table in enumerate(made) for note in table.notes}
    return tuple(
        replace(table, notes=tuple(note for note in table.notes if last[note] == index))
        for index, table in enumerate(made)
    )


def brief_tables(summary: Summary) -> tuple[Table, ...]:
    """The console's tables: the grid in short, then by importance."""
    return tuple(_made(BRIEF.get(summary.run.command, ()), summary))


def _made(makers: Sequence[Maker], summary: Summary) -> Iterator[Table]:
    for maker in makers:
        tables = maker(summary)
        for table in [tables] if isinstance(tables, Table) else tables:
            if table.rows:
                yield table

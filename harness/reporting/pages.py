"""The report of each command: title, sentences, tables and plots, one record for each command.

A table without rows and a plot without data are not shown. To add a table, write a function from
`Summary` to `Table` and name it here. Plots are named by their files (`plots.MAKERS`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from harness.reporting.sentences import verdict
from harness.reporting.sentences.verdict import NextStep
from harness.reporting.tables import (
    answers,
    breakeven,
    cards,
    comparison,
    latency,
    leaderboard,
    plan,
    served,
    sweep,
)
from harness.reporting.tables.specification import Table
from harness.summary import Summary

Maker = Callable[[Summary], Table | Sequence[Table]]
# The kind of evidence of a command's numbers, where it does not follow from the answer
Kind = Literal["typed", "replayed", "check", "profile"]


@dataclass(frozen=True)
class Page:
    """The report of one command: its title, sentences, tables and plots."""

    title: str  # with {pair} for the models
    verdicts: Callable[[Summary], tuple[str, ...]]  # the main one first; none where none applies
    next_step: Callable[[Summary], NextStep | None]
    main: tuple[Maker, ...]  # tables that the answer is read from, most important first
    more: tuple[Maker, ...] = ()  # further tables, such as how the numbers were measured
    brief: tuple[Maker, ...] = ()  # tables of the console
    plots: tuple[str, ...] = ()  # the first one is shown next to the verdict
    decides: bool = False  # whether it has answers by temperature and engine
    serves: bool = False  # whether the report has serving commands
    computes: bool = False  # whether nothing was timed: numbers were given, or are of stored runs
    kind: Kind | None = None


PAGES: Mapping[str, Page] = {
    "sweep": Page(
        "Sweep of {pair}: which K to serve, or none",
        verdict.of_answers,
        verdict.after_answers,
        main=(sweep.cells_table, leaderboard.threshold_tables, leaderboard.prompt_set_table),
        more=(
            answers.emits_table,
            latency.rounds_table,
            leaderboard.costs_table,
        ),
        plots=("speedup_vs_k.svg",),
        decides=True,
        serves=True,
    ),
    "audition": Page(
        "Audition of {pair}: which draft to serve",
        verdict.of_answers,
        verdict.after_an_audition,
        main=(
            cards.card_tables,
            leaderboard.leaderboard_tables,
            leaderboard.threshold_tables,
            leaderboard.prompt_set_table,
        ),
        more=(
            answers.emits_table,
            latency.rounds_table,
            leaderboard.costs_table,
        ),
        plots=("leaderboard.svg", "speedup_vs_k.svg"),
        decides=True,
        serves=True,
    ),
    "server": Page(
        "Server run of {pair}: which K to serve, or none",
        verdict.of_answers,
        verdict.after_answers,
        main=(
            sweep.cells_table,
            served.gates_table,
            served.schedule_table,
            served.load_table,
            served.waits_table,
            leaderboard.prompt_set_table,
        ),
        more=(latency.rounds_table, leaderboard.costs_table),
        plots=("speedup_vs_k.svg", "load.svg"),
        decides=True,
        serves=True,
    ),
    "profile": Page(
        "Profile of {pair}: what speculation could gain",
        verdict.of_times,
        verdict.after_a_profile,
        main=(latency.alone_table, breakeven.ideal_table),
        more=(latency.rounds_table, latency.bounds_table, latency.curve_table),
        brief=(breakeven.ideal_table,),
        plots=("verify_curves.svg",),
        kind="profile",
    ),
    "breakeven": Page(
        "Break-even: the arithmetic of two latencies",
        verdict.of_times,
        verdict.after_arithmetic,
        main=(breakeven.measured_table, breakeven.ideal_table),
        more=(
            breakeven.rules_table,
            breakeven.thumb_table,
            latency.rounds_table,
            leaderboard.costs_table,
        ),
        brief=(breakeven.ideal_table,),
        computes=True,
        kind="typed",
    ),
    "snapshot": Page(
        "Snapshot of {pair}: does speculation leave the output unchanged?",
        verdict.of_checks,
        verdict.nothing_next,
        main=(sweep.text_table, sweep.distribution_table),
        kind="check",
    ),
    "metrics": Page(
        "A running server of {pair}: its acceptance, and which K pays",
        verdict.of_counters,
        verdict.after_counters,
        main=(breakeven.by_k_table,),
        more=(latency.rounds_table,),
        brief=(breakeven.by_k_table,),
    ),
    "plan": Page(
        "Plan: which K meets a latency goal, and on how many cards",
        verdict.of_a_plan,
        verdict.nothing_next,
        main=(plan.choices_table,),
        brief=(plan.brief_table,),
        plots=("latency_by_rate.svg",),
        computes=True,
        kind="replayed",
    ),
    "report": Page(
        "Runs compared: did anything change?",
        verdict.of_a_comparison,
        verdict.nothing_next,
        main=(comparison.comparison_tables,),
        brief=(comparison.brief_tables,),
        plots=("speedup_ratio.svg",),
        computes=True,
        kind="check",
    ),
}


def page_of(summary: Summary) -> Page:
    return PAGES[summary.run.command]


def title_of(summary: Summary) -> str:
    run = summary.run
    pair = " with ".join(name for name in (run.model, run.draft) if name) or "a pair"
    return page_of(summary).title.format(pair=pair)


def tables_of(summary: Summary, *, main: bool = False) -> tuple[Table, ...]:
    """The tables of a run that have rows; with `main` only those that the answer is read from.

    A note that several tables share is shown under the last of them only.
    """
    page = page_of(summary)
    made = list(_made(page.main if main else (*page.main, *page.more), summary))
    last = {note: index for index, table in enumerate(made) for note in table.notes}
    return tuple(
        replace(table, notes=tuple(note for note in table.notes if last[note] == index))
        for index, table in enumerate(made)
    )


def brief_tables(summary: Summary) -> tuple[Table, ...]:
    """The console's tables after the grid, most important first."""
    return tuple(_made(page_of(summary).brief, summary))


def _made(makers: Sequence[Maker], summary: Summary) -> Iterator[Table]:
    for maker in makers:
        tables = maker(summary)
        for table in [tables] if isinstance(tables, Table) else tables:
            if table.rows:
                yield table

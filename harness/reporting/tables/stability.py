"""Timings that cannot be right though they were repeated: marked in tables, left out of plots."""

from collections.abc import Callable
from typing import TypeVar

from harness.records import LatencyRow, ResultRow
from harness.reporting.tables.specification import Column
from harness.summary import Summary, Unstable

R = TypeVar("R")

UNSTABLE = "unstable"
REASONS = {
    "verify_below_step": "a verify below one step",
    "verify_falls": "a verify below a shorter one",
    "step_unlike_plain_token": "a step far from the plain token's time",
    "speedup_above_most": "a speedup above what a round emits",
}
NOTE = (
    "unstable: cannot be right though it was timed again ({}); plots leave it out. Time it again on"
    " a quiet machine."
)


def of_forward(summary: Summary, row: LatencyRow) -> Unstable | None:
    """What is wrong with a timed forward."""
    return of_step(summary, row.role, row.kind, row.context_tokens, row.batch, row.tokens)


def of_step(
    summary: Summary, role: str, kind: str, context: int | None, batch: int, tokens: int = 1
) -> Unstable | None:
    """What is wrong with a forward over so many positions after so much context."""
    wanted = (role, kind, context, batch, tokens)
    return next(
        (
            entry
            for entry in summary.unstable
            if (entry.role, entry.kind, entry.context_tokens, entry.batch, entry.tokens) == wanted
        ),
        None,
    )


def of_cell(summary: Summary, row: ResultRow) -> Unstable | None:
    """What is wrong with a measured cell."""
    wanted = (row.prompt_set, row.temperature, row.k)
    return next(
        (
            entry
            for entry in summary.unstable
            if entry.kind == "cell"
            and (entry.prompt_set, entry.temperature, entry.tokens) == wanted
        ),
        None,
    )


def column(found: Callable[[R], Unstable | None]) -> Column[R]:
    """The column that marks unstable rows; a table without one has no such column."""
    return Column("timing", lambda record: UNSTABLE if found(record) else None)


def notes(summary: Summary, *kinds: str) -> tuple[str, ...]:
    """The remark under a table that may mark timings of these kinds."""
    found = dict.fromkeys(e.reason for e in summary.unstable if e.kind in kinds)
    return (NOTE.format(", ".join(REASONS[reason] for reason in found)),) if found else ()

"""Timings that cannot be right despite repetition: marked in tables, left out of plots."""

from collections.abc import Callable
from typing import TypeVar

from harness.records import ResultRow, first
from harness.reporting.tables.specification import Column
from harness.summary import Summary, Unstable

R = TypeVar("R")

UNSTABLE = "unstable"
REASONS = {
    "verify_unlike_step": "a verify of one position unlike the step, which is the same forward",
    "verify_below_step": "a verify below one step",
    "verify_falls": "a verify below a shorter one",
    "step_unlike_plain_token": "a step far from the plain token's time",
    "speedup_above_most": "a speedup above what a round emits",
}
NOTE = (
    "unstable: cannot be right though it was timed again ({}); plots leave it out. Time it again on"
    " a quiet machine."
)


def of_step(
    summary: Summary, role: str, kind: str, context: int | None, batch: int, tokens: int = 1
) -> Unstable | None:
    """The unstable timing of a forward over `tokens` positions after this context; or None."""
    wanted = {"role": role, "kind": kind, "context_tokens": context}
    return first(summary.unstable, **wanted, batch=batch, tokens=tokens)


def of_cell(summary: Summary, row: ResultRow) -> Unstable | None:
    """The unstable timing of a measured cell; or None."""
    cell = {"prompt_set": row.prompt_set, "temperature": row.temperature, "tokens": row.k}
    return first(summary.unstable, kind="cell", **cell)


def column(found: Callable[[R], Unstable | None]) -> Column[R]:
    """The column that marks unstable rows; a table without such rows does not show it."""
    return Column("timing", lambda record: UNSTABLE if found(record) else None)


def note(summary: Summary, *kinds: str) -> str:
    """The note under a table that marks unstable timings of these kinds; "" without any."""
    found = dict.fromkeys(e.reason for e in summary.unstable if e.kind in kinds)
    return NOTE.format(", ".join(REASONS[reason] for reason in found)) if found else ""

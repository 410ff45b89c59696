"""A running server's counters: acceptance by position, every K up to its own."""

from itertools import count
from typing import NamedTuple

from harness import formatting as fmt
from harness.records import ResultRow
from harness.reporting.tables.specification import Column, Table, table
from harness.summary import Summary
from harness.theory.acceptance import conditional

BY_K: tuple[Column[ResultRow], ...] = (
    Column("K", lambda row: row.k, fmt.count, key=True),
    Column("tokens/\nround", lambda row: row.tokens_per_round, fmt.decimal),
    Column("acceptance\n_rate", lambda row: row.acceptance_rate, fmt.percent),
    Column("alpha", lambda row: row.alpha, fmt.alpha),
    Column("ms/tok", lambda row: row.ms_per_token, fmt.milliseconds),
    Column("speedup", lambda row: row.speedup, fmt.speedup),
    Column("break-even\nalpha", lambda row: row.breakeven_alpha, fmt.alpha),
)
BY_K_NOTE = "A K pays while its round costs less than its tokens per round in plain tokens."


class Position(NamedTuple):
    """What was accepted at one position of the rounds."""

    number: int
    rounds: int  # that accepted it
    share: float
    conditional: float


POSITIONS: tuple[Column[Position], ...] = (
    Column("position", lambda row: row.number, fmt.count, key=True),
    Column("rounds that\naccepted it", lambda row: row.rounds, fmt.count, definition="rounds"),
    Column("share", lambda row: row.share, fmt.alpha, definition="acceptance by position"),
    Column("of those before", lambda row: row.conditional, fmt.alpha, definition="alpha"),
)
POSITIONS_NOTE = "share: of all rounds; of those before: of the rounds that accepted all before it."


def by_k_table(summary: Summary) -> Table:
    """Tokens per round at every K up to the server's, and the speedup where times are known."""
    best = {answer.k for answer in summary.answers if answer.speculates}
    rows = summary.from_acceptance if summary.running else ()
    title = "By K, from what was counted"
    return table(title, BY_K, rows, best=lambda row: row.k in best, notes=(BY_K_NOTE,))


def positions_table(summary: Summary) -> Table:
    """Acceptance by position."""
    total, rows = summary.running and summary.running.total, list[Position]()
    if total and total.accepted_at:
        shares = total.acceptance_by_position
        rows = list(map(Position, count(1), total.accepted_at, shares, conditional(shares)))
    return table("Acceptance by position", POSITIONS, rows, notes=(POSITIONS_NOTE,))

"""The table of a running server's counters, by K."""

from harness import formatting as fmt
from harness.records import ResultRow
from harness.reporting.tables.specification import Column, Table, table
from harness.summary import Summary

BY_K: tuple[Column[ResultRow], ...] = (
    Column("K", lambda row: row.k, fmt.count, key=True),
    Column("tokens/\nround", lambda row: row.tokens_per_round, fmt.decimal),
    Column("acceptance\n_rate", lambda row: row.acceptance_rate, fmt.percent),
    Column("alpha", lambda row: row.alpha, fmt.alpha),
    Column("ms/tok", lambda row: row.ms_per_token, fmt.milliseconds),
    Column("speedup", lambda row: row.speedup, fmt.speedup),
    Column("break-even\nalpha", lambda row: row.breakeven_alpha, fmt.alpha),
)
BY_K_NOTE = (
    "A K pays while its round costs less than its tokens per round in plain tokens. Round times are"
    " taken to be those of one request at a time."
)


def by_k_table(summary: Summary) -> Table:
    """Tokens per round at every K up to the server's, and the speedup where times are known."""
    best = {answer.k for answer in summary.answers if answer.speculates}
    rows = summary.from_acceptance if summary.running else ()
    title = "By K, from what was counted"
    return table(title, BY_K, rows, best=lambda row: row.k in best, notes=(BY_K_NOTE,))

"""Tables from two latencies, or a running server's counters: what each K gains, and needs.

The linear rule of thumb takes an acceptance_rate. With an alpha in its place, as it is often used,
it gives too high a speedup at every K above 1.
"""

from harness import formatting as fmt
from harness.records import ResultRow
from harness.reporting.sentences.explanation import rule_of_thumb
from harness.reporting.tables.specification import Column, Table, columns_by, table
from harness.summary import CeilingAtK, RuleOfThumb, SpeedupByK, Summary


def _needed(row: CeilingAtK | ResultRow) -> float | str:
    no_root = "none: even alpha = 1 loses"
    return no_root if row.breakeven_alpha is None else row.breakeven_alpha


IDEAL: tuple[Column[CeilingAtK], ...] = (
    Column("K", lambda ceiling: ceiling.k, fmt.count, key=True),
    Column("ideal ms/tok", lambda ceiling: ceiling.ideal_seconds_per_token, fmt.in_ms),
    Column("ideal speedup", lambda ceiling: ceiling.ideal_speedup, fmt.speedup),
    Column("break-even alpha", _needed, fmt.alpha),
)


def _measured_columns(summary: Summary) -> tuple[Column[ResultRow], ...]:
    server = summary.server_speedups
    computed = "predicted\nspeedup" if server else "speedup"
    return (
        Column("K", lambda row: row.k, fmt.count, key=True),
        Column("acceptance\n_rate", lambda row: row.acceptance_rate, fmt.percent),
        Column("alpha", lambda row: row.alpha, fmt.alpha),
        Column("tokens/\nround", lambda row: row.tokens_per_round, fmt.decimal),
        Column("ms/tok", lambda row: None if server else row.ms_per_token, fmt.milliseconds),
        Column("measured\nspeedup", lambda row: server.get(row.k), fmt.speedup),
        Column(computed, lambda row: row.speedup, fmt.speedup),
        Column("break-even\nalpha", _needed, fmt.alpha),
    )


BY_K: tuple[Column[ResultRow], ...] = (
    Column("K", lambda row: row.k, fmt.count, key=True),
    Column("tokens/\nround", lambda row: row.tokens_per_round, fmt.decimal),
    Column("acceptance\n_rate", lambda row: row.acceptance_rate, fmt.percent),
    Column("alpha", lambda row: row.alpha, fmt.alpha),
    Column("ms/tok", lambda row: row.ms_per_token, fmt.milliseconds),
    Column("speedup", lambda row: row.speedup, fmt.speedup),
    Column("break-even\nalpha", lambda row: row.breakeven_alpha, fmt.alpha),
)

MET = {True: "yes", False: "no", None: None}
THUMBS: tuple[Column[RuleOfThumb], ...] = (
    Column("rule of thumb", lambda row: rule_of_thumb(row).rule, key=True, flexible=True),
    Column("here", lambda row: rule_of_thumb(row).value),
    Column("met", lambda row: MET[row.met]),
    Column("what the arithmetic says", lambda row: rule_of_thumb(row).result, flexible=True),
)

IDEAL_NOTE = "ideal: every draft token accepted (alpha = 1)."
MEASURED_NOTE = (
    "{computed} = tokens per round / (K c + v), which for a given acceptance_rate a is the linear"
    " rule (1 + K a) / (K c + v). Compare alpha, not acceptance_rate, with the break-even alpha."
)
ESTIMATED_NOTE = "K whose rate was not given: by the iid model, at the alpha of the nearest K."
SERVER_NOTE = "measured speedup: by the server's own times, which the verdict is of."
BY_K_NOTE = (
    "A K pays while its round costs less than its tokens per round in plain tokens. Round times are"
    " taken to be those of one request at a time."
)
THUMB_NOTE = (
    "Rules that people use (harness/reporting/metrics.md names them); the verdict does not use"
    " them."
)
RULES_NOTES = (
    "geometric: (1 - alpha^(K+1)) / (1 - alpha) / (K c + v), the iid model.",
    "best K 0: do not speculate.",
)


def ideal_table(summary: Summary) -> Table:
    """The speedup at alpha = 1 and the break-even alpha, by each K whose rounds were timed."""
    title = "What each K could gain, and the alpha it needs"
    timed = next((entry for entry in summary.round_times if entry.source == "rounds"), None)
    rows = [each for each in summary.ceilings if timed is None or each.k in timed.round_s]
    return table(title, IDEAL, rows, notes=(IDEAL_NOTE,))


def measured_table(summary: Summary) -> Table:
    """The speedups that follow from an acceptance measured elsewhere, without the iid model."""
    title, columns = "From the acceptance that was given", _measured_columns(summary)
    server = summary.server_speedups
    computed = "predicted speedup" if server else "speedup"
    rows = summary.from_acceptance
    estimated = len({row.alpha for row in rows}) < len(rows)
    notes = (
        SERVER_NOTE if server else "",
        MEASURED_NOTE.format(computed=computed),
        ESTIMATED_NOTE if estimated else "",
    )
    return table(title, columns, rows, notes=notes)


def by_k_table(summary: Summary) -> Table:
    """Tokens per round at every K up to the server's, and the speedup where times are known."""
    best = {answer.k for answer in summary.answers if answer.speculates}
    rows = summary.from_acceptance if summary.running else ()
    title = "By K, from what was counted"
    return table(title, BY_K, rows, best=lambda row: row.k in best, notes=(BY_K_NOTE,))


def rules_table(summary: Summary) -> Table:
    rows = summary.speedups_by_k
    ks = sorted({k for row in rows for k in row.speedups})
    columns: tuple[Column[SpeedupByK], ...] = (
        Column("alpha", lambda row: row.alpha, lambda alpha: f"{alpha:.4g}", key=True),
        Column("best\nK", lambda row: row.best_k, fmt.count),
        *columns_by(ks, "K={}", lambda row, k: row.speedups.get(k), fmt.speedup, "speedup"),
    )
    return table("Speedup by alpha and K", columns, rows, notes=RULES_NOTES)


def thumb_table(summary: Summary) -> Table:
    return table("Rules of thumb", THUMBS, summary.rules_of_thumb, notes=(THUMB_NOTE,))

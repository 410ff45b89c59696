"""Tables of adaptive drafting: a threshold beside a fixed K, and what no choice of K could beat."""

from typing import NamedTuple

from harness.reporting import formatting as fmt
from harness.reporting.tables.specification import Column, Table, table
from harness.summary import AdaptiveDrafting, AdaptiveRow, Summary


class Threshold(NamedTuple):
    """One threshold of one draft."""

    drafting: AdaptiveDrafting
    row: AdaptiveRow


DRAFTS: tuple[Column[AdaptiveDrafting], ...] = (
    Column("draft", lambda entry: entry.draft, key=True),
    Column("T", lambda entry: entry.temperature, fmt.temperature, key=True),
    Column("best\nK", lambda entry: entry.fixed.k, fmt.count),
    Column("speedup", lambda entry: entry.fixed.speedup, fmt.speedup),
    Column("best\nthreshold", lambda entry: entry.best.threshold, fmt.decimal),
    Column("K at\nmost", lambda entry: entry.best.k, fmt.count),
    Column("adaptive\nspeedup", lambda entry: entry.best.speedup, fmt.speedup),
    Column("best K\nper round", lambda entry: entry.best_k_per_round, fmt.speedup),
    Column("flag\noracle", lambda entry: entry.flag_oracle, fmt.speedup),
)
THRESHOLDS: tuple[Column[Threshold], ...] = (
    Column("draft", lambda entry: entry.drafting.draft, key=True),
    Column("T", lambda entry: entry.drafting.temperature, fmt.temperature, key=True),
    Column("K at\nmost", lambda entry: entry.row.k, fmt.count, key=True),
    Column("threshold", lambda entry: entry.row.threshold, fmt.decimal),
    Column("tokens/\nround", lambda entry: entry.row.tokens_per_round, fmt.decimal),
    Column("drafted/\nround", lambda entry: entry.row.drafted_per_round, fmt.decimal),
    Column("adaptive\nspeedup", lambda entry: entry.row.speedup, fmt.speedup),
)
NOTES = (
    "Replayed, and priced by timed rounds of a fixed number of draft tokens. Reading every draft"
    " step back, which a threshold needs, is in those of a sweep with decode.stop=threshold, not in"
    " those of an audition. Chosen on the prompts shown, not held out.",
    "Bounds for any rule, at this K at most: best K per round knows the accept probabilities of the"
    " text, the flag oracle which draft tokens will be accepted.",
)
WITHOUT = "it gives its tokens no probability that a threshold could be compared with."


def adaptive_tables(summary: Summary) -> list[Table]:
    """The best threshold of each draft, then every threshold at its K."""
    rows = [Threshold(entry, row) for entry in summary.adaptive for row in entry.thresholds]
    title = "Adaptive drafting (decode.stop=threshold)"
    ranked = dict.fromkeys(row.draft for board in summary.leaderboards for row in board.rows)
    known = {None, *(entry.draft for entry in summary.adaptive)}
    without = ", ".join(str(draft) for draft in ranked if draft not in known)
    notes = (*NOTES, f"Not available for {without}: {WITHOUT}") if without else NOTES
    return [
        table(title, DRAFTS, summary.adaptive, notes=notes),
        table("Adaptive drafting by threshold", THRESHOLDS, rows),
    ]

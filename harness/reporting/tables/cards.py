"""A target on several cards that were measured, and the modelled cost of a run."""

from collections.abc import Sequence

from harness import formatting as fmt
from harness.records import grouped
from harness.reporting import grid
from harness.reporting.tables.specification import Column, Table, table
from harness.summary import CardRow, Summary
from harness.theory.cost import ALPHA, SECONDS_PER_LAYER, Estimate


def _serve(row: CardRow) -> str:
    draft = f"{row.draft} K={row.k}"
    if row.decision == "speculate":
        return draft
    if row.decision in ("undecided", "not_measured"):
        return f"plain ({grid.DECISIONS[row.decision]}: {draft})"
    return "plain"


CARDS: tuple[Column[CardRow], ...] = (
    Column("place", lambda row: row.place, fmt.count, key=True),
    Column("card", lambda row: row.card, key=True),
    Column("serve", _serve),
    Column("speedup\n[lo, hi]", fmt.bounded, fmt.speedup),
    Column("ms/\ntoken", lambda row: row.seconds_per_token, fmt.in_ms),
    Column("plain\nms/token", lambda row: row.plain_s, fmt.in_ms),
    Column("USD per\n10^6 tokens", lambda row: row.usd_per_million_tokens, fmt.dollars),
    Column("plain USD per\n10^6 tokens", lambda row: row.plain_usd_per_million_tokens, fmt.dollars),
    Column("USD per\nhour", lambda row: row.price_per_hour_usd, fmt.dollars),
    Column("rented", lambda row: row.rented_s, fmt.seconds),
    Column("spent", lambda row: row.spent_usd, fmt.dollars),
    Column("device", lambda row: row.device),
)
PLACE_NOTE = (
    "place: by USD per 10^6 tokens, of one sequence at a time; by ms/token where a card has no"
    " price. A server that batches pays less for a token, and gains less from speculation."
)
SERVE_NOTE = (
    "serve: the card's own verdict; plain where it does not pay. The verdict"
    " of this report is that of {card}."
)
SPENT_NOTE = "rented, spent: of the containers that measured this, at the card's price alone."


def card_tables(summary: Summary) -> list[Table]:
    """The measured cards, best first, a table for each temperature."""
    notes = [PLACE_NOTE, *(SERVE_NOTE.format(card=row.card) for row in summary.cards[:1])]
    if any(row.rented_s is not None for row in summary.cards):
        notes.append(SPENT_NOTE)
    ranked = grouped(summary.cards, lambda row: row.temperature)
    return [
        table(
            f"Which card, temperature {fmt.temperature(temperature)}",
            CARDS,
            rows,
            best=lambda row: row.place == 1,
            notes=notes,
        )
        for temperature, rows in ranked.items()
    ]


COST_NOTE = (
    "Modelled: from the card's memory bandwidth alone to"
    f" {SECONDS_PER_LAYER * 1e3:g} ms a layer of kernel launches; alpha {ALPHA:g} and whole budgets"
    " are assumed."
)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f}" if seconds < 600 else f"{seconds / 60:.0f}"


def _too_large(row: Estimate) -> str:
    return f"does not fit: {fmt.memory(row.needed_bytes)}"


COSTS: tuple[Column[Estimate], ...] = (
    Column("card", lambda row: row.card, key=True),
    Column(
        "time",
        lambda row: (row.low_s, row.low_s, row.high_s) if row.fits else _too_large(row),
        lambda low, _, high: f"{_minutes(low)} to {_minutes(high)} min",
    ),
    Column(
        "cost",
        lambda row: (row.low_usd, row.low_usd, row.high_usd) if row.fits else None,
        lambda low, _, high: f"{fmt.dollars(low)} to {fmt.dollars(high)}",
    ),
)


def cost_table(estimates: Sequence[Estimate]) -> Table:
    """The modelled time and cost of a run, a row for each card, cheapest first."""
    return table("Time and cost (modelled)", COSTS, estimates, notes=(COST_NOTE,))

"""One target on several cards: ranked by what was measured on each, and modelled by data sheets."""

from collections.abc import Mapping
from typing import Any

from harness.reporting import formatting as fmt
from harness.reporting.tables.leaderboard import PLAIN
from harness.reporting.tables.specification import Column, Table, grouped, table
from harness.summary import CardDraftRow, CardRow, Summary

Planned = Mapping[str, Any]


def _serve(row: CardRow) -> str:
    draft = f"{row.draft} K={row.k}"
    if row.decision == "speculate":
        return draft
    return f"plain (undecided: {draft})" if row.decision == "undecided" else "plain"


CARDS: tuple[Column[CardRow], ...] = (
    Column("place", lambda row: row.place, fmt.count, key=True),
    Column("card", lambda row: row.card, key=True),
    Column("temperature", lambda row: row.temperature, fmt.temperature, key=True),
    Column("serve", _serve),
    Column(
        "speedup\n[lo, hi]", lambda row: (row.speedup, row.speedup_lo, row.speedup_hi), fmt.speedup
    ),
    Column("ms/\ntoken", lambda row: row.seconds_per_token, fmt.in_ms),
    Column("plain\nms/token", lambda row: row.target_step_s, fmt.in_ms),
    Column("USD per\n10^6 tokens", lambda row: row.usd_per_million_tokens, fmt.dollars),
    Column("plain USD per\n10^6 tokens", lambda row: row.plain_usd_per_million_tokens, fmt.dollars),
    Column("USD per\nhour", lambda row: row.price_per_hour_usd, fmt.dollars),
    Column("rented", lambda row: row.rented_s, fmt.seconds),
    Column("spent", lambda row: row.spent_usd, fmt.dollars),
    Column("device", lambda row: row.device),
)
DRAFTS: tuple[Column[CardDraftRow], ...] = (
    Column("card", lambda row: row.card, key=True),
    Column("draft", lambda row: row.draft or PLAIN, key=True),
    Column("best\nK", lambda row: row.k, fmt.count),
    Column(
        "speedup\n[lo, hi]", lambda row: (row.speedup, row.speedup_lo, row.speedup_hi), fmt.speedup
    ),
    Column("ms/\ntoken", lambda row: row.seconds_per_token, fmt.in_ms),
    Column("USD per\n10^6 tokens", lambda row: row.usd_per_million_tokens, fmt.dollars),
    Column("draft\nstep, ms", lambda row: row.draft_step_s, fmt.in_ms),
)
PLACE_NOTE = (
    "place: by USD per 10^6 tokens, of one sequence at a time; by ms/token where a card has no"
    " price. A server that batches pays less for a token, and gains less from speculation."
)
SERVE_NOTE = (
    "serve: the card's own verdict, on held-out prompts; plain where it does not pay. The verdict"
    " of this report is that of {card}."
)
SPENT_NOTE = "rented, spent: of the containers that measured this, at the card's price alone."
MODELLED_NOTES = (
    "modelled, not measured: every forward at the longer of bytes read / bandwidth and operations /"
    " bf16 rate (both from the data sheet), experts touched under uniform routing. Engines are"
    " slower, small drafts most of all, so speedups are upper bounds at that alpha.",
    "fits: weights and caches of both models in 90 % of the memory; cards needed by memory alone."
    " USD: per 10^6 tokens of all sequences together, the card's price alone.",
    "stops at: the batch (1, 2, 4, ...) from which on no K pays, of those that fit, up to 1024.",
)


def card_tables(summary: Summary) -> list[Table]:
    """The cards, best first, and every draft on every card, temperature by temperature."""
    notes = [PLACE_NOTE, *(SERVE_NOTE.format(card=row.card) for row in summary.cards[:1])]
    if any(row.rented_s is not None for row in summary.cards):
        notes.append(SPENT_NOTE)
    ranked = table("Which card", CARDS, summary.cards, best=lambda row: row.place == 1, notes=notes)
    drafts = grouped(summary.card_drafts, lambda row: row.temperature)
    title = "Every draft on every card, temperature {}"
    return [
        ranked,
        *(table(title.format(fmt.temperature(t)), DRAFTS, rows) for t, rows in drafts.items()),
    ]


def cards_table(planned: Planned) -> Table:
    """The pair on cards that are not at hand; the one that gpu= names says so.

    Args:
        planned: what was planned for, and the rows.
    """
    rows: list[Planned] = planned["rows"]
    chosen = {planned["chosen"]: " (gpu=)"}
    columns: tuple[Column[Planned], ...] = (
        Column("card", lambda row: f"{row['card']}{chosen.get(row['card'], '')}", key=True),
        Column("fits", lambda row: "yes" if row["fits"] else f"no ({row['cards_needed']} cards)"),
        Column("needed", lambda row: row["needed_bytes"], lambda b: f"{b / 1e9:,.3g} GB"),
        Column("target\nms", lambda row: row["target_ms"], fmt.milliseconds),
        Column("draft\nms", lambda row: row["draft_ms"], fmt.milliseconds),
        Column("c", lambda row: row["c"], lambda c: fmt.decimal(c, 3)),
        Column(f"v(K={rows[0]['largest_k']})", lambda row: row["v"], fmt.decimal),
        Column("USD,\nplain", lambda row: row["usd_per_million_tokens"], fmt.dollars),
        *(
            column
            for index, gain in enumerate(rows[0]["gains"])
            for column in _gain_columns(index, gain["alpha"])
        ),
    )
    several = f" x {planned['batch']} sequences" if planned["batch"] > 1 else ""
    dtype = "bf16" if planned["bytes_per_parameter"] == 2 else "float32"
    title = f"Cards (modelled): {planned['context_tokens']} tokens of context{several}, {dtype}"
    return table(title, columns, rows, notes=MODELLED_NOTES)


def _gain_columns(index: int, alpha: float) -> tuple[Column[Planned], ...]:
    """What speculation gains on each card at one alpha."""
    at = f"alpha {alpha:g}:\n"

    def stops_at(row: Planned) -> float | str | None:
        if not row["sequences"]:
            return None
        return row["gains"][index]["stops_at_batch"] or f"> {row['largest_batch']}"

    return (
        Column(f"{at}best K", lambda row: row["gains"][index]["k"], fmt.count),
        Column(f"{at}speedup", lambda row: row["gains"][index]["speedup"], fmt.speedup),
        Column(f"{at}USD", lambda row: row["gains"][index]["usd_per_million_tokens"], fmt.dollars),
        Column(f"{at}stops at", stops_at, fmt.count),
    )

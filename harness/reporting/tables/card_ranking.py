"""One target on several cards: what a token takes and costs on each, with and without a draft."""

from collections.abc import Sequence

from harness.reporting import formatting as fmt
from harness.reporting.tables.model import BEST, Column, Row, Table, without_empty
from harness.summary import CardDraftRow, CardRow

CARD_COLUMNS = (
    Column("place", "left", key=True),
    Column("card", "left", key=True),
    Column("temperature", key=True),
    Column("serve", "left"),
    Column("speedup\n[lo, hi]"),
    Column("ms/\ntoken"),
    Column("plain\nms/token"),
    Column("USD per\n10^6 tokens"),
    Column("plain USD per\n10^6 tokens"),
    Column("USD per\nhour"),
    Column("rented"),
    Column("spent"),
    Column("device", "left"),
)
DRAFT_COLUMNS = (
    Column("card", "left", key=True),
    Column("draft", "left", key=True),
    Column("best\nK"),
    Column("speedup\n[lo, hi]"),
    Column("ms/\ntoken"),
    Column("USD per\n10^6 tokens"),
    Column("draft\nstep, ms"),
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


def card_tables(cards: Sequence[CardRow], drafts: Sequence[CardDraftRow]) -> tuple[Table, ...]:
    """The cards, best first, and every draft on every card, temperature by temperature."""
    if not cards:
        return ()
    notes = [PLACE_NOTE, SERVE_NOTE.format(card=cards[0].card)]
    notes += [SPENT_NOTE] if any(row.rented_s is not None for row in cards) else []
    table = Table("Which card", CARD_COLUMNS, tuple(map(_card, cards)), tuple(notes))
    by_temperature = [
        Table(
            f"Every draft on every card, temperature {fmt.temperature(value)}",
            DRAFT_COLUMNS,
            tuple(_draft(row) for row in drafts if row.temperature == value),
        )
        for value in dict.fromkeys(row.temperature for row in drafts)
    ]
    return tuple(without_empty(table, fmt.EMPTY) for table in (table, *by_temperature))


def _card(row: CardRow) -> Row:
    draft = f"{row.draft} K={row.k}"
    serve = {"speculate": draft, "undecided": f"plain (undecided: {draft})"}
    return Row(
        (
            f"{row.place} {BEST}" if row.place == 1 else str(row.place),
            row.card,
            fmt.temperature(row.temperature),
            serve.get(row.decision, "plain"),
            fmt.speedup(row.speedup, row.speedup_lo, row.speedup_hi),
            fmt.milliseconds(1e3 * row.seconds_per_token),
            fmt.milliseconds(1e3 * row.target_step_s),
            fmt.dollars(row.usd_per_million_tokens),
            fmt.dollars(row.plain_usd_per_million_tokens),
            fmt.dollars(row.price_per_hour_usd),
            fmt.seconds(row.rented_s),
            fmt.dollars(row.spent_usd),
            row.device,
        ),
        best=row.place == 1,
    )


def _draft(row: CardDraftRow) -> Row:
    return Row(
        (
            row.card,
            row.draft or "do not speculate",
            fmt.text(row.k),
            fmt.speedup(row.speedup, row.speedup_lo, row.speedup_hi),
            fmt.milliseconds(1e3 * row.seconds_per_token),
            fmt.dollars(row.usd_per_million_tokens),
            fmt.milliseconds(None if row.draft_step_s is None else 1e3 * row.draft_step_s),
        )
    )

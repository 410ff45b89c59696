"""One target on several cards: what a token takes and costs on each, with and without a draft."""

from collections.abc import Iterable, Mapping
from typing import Any

from harness.reporting import formatting as fmt
from harness.reporting.tables.leaderboard import name_of
from harness.reporting.tables.model import BEST, Column, Row, Table, without_empty

Entry = Mapping[str, Any]

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
SERVE_NOTE = "serve: the card's own verdict, on held-out prompts; plain where it does not pay."
SPENT_NOTE = "rented, spent: of the containers that measured this, at the card's price alone."


def fleet_tables(cards: Iterable[Entry], drafts: Iterable[Entry]) -> tuple[Table, ...]:
    """The cards, best first, and every draft on every card, temperature by temperature.

    Args:
        cards: summary.json's `cards`, in order of temperature and place.
        drafts: summary.json's `card_drafts`, in order.
    """
    rows = tuple(_card(entry) for entry in cards)
    if not rows:
        return ()
    table = Table("Which card", CARD_COLUMNS, rows, (PLACE_NOTE, SERVE_NOTE, SPENT_NOTE))
    shown = without_empty(table, fmt.EMPTY)
    if not any(column.one_line in ("rented", "spent") for column in shown.columns):
        shown = Table(shown.title, shown.columns, shown.rows, (PLACE_NOTE, SERVE_NOTE))
    return (shown, *_draft_tables(list(drafts)))


def _card(entry: Entry) -> Row:
    place = fmt.text(entry.get("place"))
    first = entry.get("place") == 1
    gain = (entry.get("speedup"), entry.get("speedup_lo"), entry.get("speedup_hi"))
    return Row(
        (
            f"{place} {BEST}" if first else place,
            fmt.text(entry.get("card")),
            fmt.temperature(entry.get("temperature")),
            _serve(entry),
            fmt.speedup(*gain),
            fmt.milliseconds(entry.get("ms_per_token")),
            fmt.milliseconds(entry.get("target_step_ms")),
            fmt.dollars(entry.get("usd_per_million_tokens")),
            fmt.dollars(entry.get("plain_usd_per_million_tokens")),
            fmt.dollars(entry.get("price_per_hour_usd")),
            fmt.seconds(entry.get("rented_s")),
            fmt.dollars(entry.get("spent_usd")),
            fmt.text(entry.get("device")),
        ),
        best=first,
    )


def _serve(entry: Entry) -> str:
    draft = f"{entry.get('draft')} K={entry.get('k')}"
    if entry.get("decision") == "speculate":
        return draft
    return f"plain (undecided: {draft})" if entry.get("decision") == "undecided" else "plain"


def _draft_tables(drafts: list[Entry]) -> list[Table]:
    temperatures = list(dict.fromkeys(entry.get("temperature") for entry in drafts))
    return [
        without_empty(
            Table(
                f"Every draft on every card, temperature {fmt.temperature(value)}",
                DRAFT_COLUMNS,
                tuple(_draft(entry) for entry in drafts if entry.get("temperature") == value),
            ),
            fmt.EMPTY,
        )
        for value in temperatures
    ]


def _draft(entry: Entry) -> Row:
    gain = (entry.get("speedup"), entry.get("speedup_lo"), entry.get("speedup_hi"))
    return Row(
        (
            fmt.text(entry.get("card")),
            name_of(entry),
            fmt.text(entry.get("k")),
            fmt.speedup(*gain),
            fmt.milliseconds(entry.get("ms_per_token")),
            fmt.dollars(entry.get("usd_per_million_tokens")),
            fmt.milliseconds(entry.get("draft_step_ms")),
        )
    )

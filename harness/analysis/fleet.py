"""One target on several cards: where is a token fastest, and where is it cheapest?

A speedup is a ratio within one card and says nothing between cards: a slow card may have the larger
one. What compares is a token's time and, where the card has a price, a token's price, each with
what the evidence says to serve there: the draft if speculation pays, plain decoding if it does not
or is undecided.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from harness.analysis.views import LeaderboardRow
from harness.records import Decision, Rule, Verdict
from harness.theory.cost import usd_per_million_tokens


@dataclass(frozen=True)
class CardRow:
    """What to serve with on one card at one temperature.

    Attributes:
        place: from 1, cheapest token first (fastest, where a card has no price).
        card, device: its short name, and what it calls itself.
        decision, draft, k, speedup, speedup_lo, speedup_hi: the card's verdict.
        target_step_ms: plain decoding's time per token.
        ms_per_token: of what the verdict says to serve; plain decoding's unless it pays.
        price_per_hour_usd: of the card; None if unknown.
        plain_usd_per_million_tokens, usd_per_million_tokens: plain decoding's, and of what the
            verdict says to serve.
    """

    place: int
    card: str
    device: str
    temperature: float | None
    decision: Decision
    draft: str | None
    k: int
    speedup: float | None
    speedup_lo: float | None
    speedup_hi: float | None
    target_step_ms: float
    ms_per_token: float
    price_per_hour_usd: float | None
    plain_usd_per_million_tokens: float | None
    usd_per_million_tokens: float | None


@dataclass(frozen=True)
class CardDraftRow:
    """One draft at its best K on one card; plain decoding where draft is None.

    Attributes:
        card, draft, k, rule, temperature: which.
        speedup, speedup_lo, speedup_hi: of the leaderboard, so against plain decoding there.
        ms_per_token: target step / speedup.
        draft_step_ms: one draft step; None for plain decoding.
        usd_per_million_tokens: at the card's price; None if unknown.
    """

    card: str
    draft: str | None
    k: int
    rule: Rule
    temperature: float
    speedup: float
    speedup_lo: float | None
    speedup_hi: float | None
    ms_per_token: float
    draft_step_ms: float | None
    usd_per_million_tokens: float | None


def card_row(
    card: str, device: str, verdict: Verdict, target_step_s: float, price_per_hour: float | None
) -> CardRow:
    """A card's row, not yet placed.

    Args:
        card: its short name.
        device: what it calls itself.
        verdict: on the whole workload.
        target_step_s: plain decoding's time per token, seconds.
        price_per_hour: of the card, US dollars.
    """
    plain_ms = 1e3 * target_step_s
    gain = verdict.speedup if verdict.speculate and verdict.speedup else 1.0
    return CardRow(
        place=0,
        card=card,
        device=device,
        temperature=verdict.temperature,
        decision=verdict.decision,
        draft=verdict.draft,
        k=verdict.k,
        speedup=verdict.speedup,
        speedup_lo=verdict.speedup_lo,
        speedup_hi=verdict.speedup_hi,
        target_step_ms=plain_ms,
        ms_per_token=plain_ms / gain,
        price_per_hour_usd=price_per_hour,
        plain_usd_per_million_tokens=_price(plain_ms, price_per_hour),
        usd_per_million_tokens=_price(plain_ms / gain, price_per_hour),
    )


def card_draft_rows(
    card: str,
    leaderboard: Iterable[LeaderboardRow],
    target_step_s: float,
    price_per_hour: float | None,
) -> list[CardDraftRow]:
    """A card's leaderboard in milliseconds and money, "do not speculate" among its rows."""
    return [
        CardDraftRow(
            card=card,
            draft=row.draft,
            k=row.k,
            rule=row.rule,
            temperature=row.temperature,
            speedup=row.speedup,
            speedup_lo=row.speedup_lo,
            speedup_hi=row.speedup_hi,
            ms_per_token=1e3 * target_step_s / row.speedup,
            draft_step_ms=row.draft_step_ms,
            usd_per_million_tokens=_price(1e3 * target_step_s / row.speedup, price_per_hour),
        )
        for row in leaderboard
    ]


def placed(rows: Iterable[CardRow]) -> list[CardRow]:
    """Rows of one temperature by price, cheapest first; by time if any card has no price."""
    entries = list(rows)
    priced = all(row.usd_per_million_tokens is not None for row in entries)

    def order(row: CardRow) -> tuple[float, float]:
        price = row.usd_per_million_tokens if priced else None
        return (row.ms_per_token if price is None else price, row.ms_per_token)

    ordered = sorted(entries, key=order)
    return [replace(row, place=place) for place, row in enumerate(ordered, start=1)]


def draft_order(rows: Sequence[CardDraftRow]) -> list[CardDraftRow]:
    """Every draft on every card: temperature by temperature, the cheapest (or fastest) first."""
    priced = all(row.usd_per_million_tokens is not None for row in rows)

    def order(row: CardDraftRow) -> tuple[float, float]:
        price = row.usd_per_million_tokens if priced else None
        return (row.ms_per_token if price is None else price, row.ms_per_token)

    temperatures = list(dict.fromkeys(row.temperature for row in rows))
    return [
        row
        for value in temperatures
        for row in sorted((row for row in rows if row.temperature == value), key=order)
    ]


def _price(ms_per_token: float, price_per_hour: float | None) -> float | None:
    if price_per_hour is None:
        return None
    return usd_per_million_tokens(ms_per_token / 1e3, price_per_hour)

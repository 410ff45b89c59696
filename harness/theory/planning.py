"""A pair on cards that nobody has at hand: what fits, what a step takes, what speculation gains.

Everything here follows from the sizes of two models and the data sheet of a card, so it can be
asked before anything is rented or downloaded. It is a model, not a measurement: both models are
taken at their roofs, which flatters small drafts most, since those are the farthest from theirs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from harness.records import UserError
from harness.theory.hardware import Architecture
from harness.theory.memory import USABLE_SHARE, cost_per_million_tokens
from harness.theory.roofline import Card, Roof, modelled_forward
from harness.theory.speedup import best_k

# Larger batches than this are beyond what one asks of a single card
LARGEST_BATCH = 1024


@dataclass(frozen=True)
class Wanted:
    """What is planned for.

    Attributes:
        target, draft: sizes of the pair.
        ks: numbers of draft tokens to choose from, each 1 or more.
        alphas: acceptances to plan for.
        context_tokens: positions in each sequence's cache, prompt and answer.
        batch: sequences side by side.
        bytes_per_parameter: 2 for bf16, of weights and cache alike.

    Raises:
        UserError: a batch or context below 1.
    """

    target: Architecture
    draft: Architecture
    ks: tuple[int, ...]
    alphas: tuple[float, ...]
    context_tokens: int = 1024
    batch: int = 1
    bytes_per_parameter: float = 2.0

    def __post_init__(self) -> None:
        """Refuse a batch or a context that cannot be."""
        for key in ("context_tokens", "batch"):
            if getattr(self, key) < 1:
                raise UserError(f"{key}={getattr(self, key)}: must be 1 or more")


@dataclass(frozen=True)
class PlannedGain:
    """What speculation gains on one card at one alpha; all of it modelled.

    Attributes:
        alpha: assumed.
        k, speedup: the best K and its speedup; 0 and 1 where speculation does not pay.
        v: verify of k + 1 positions / target step; None where k is 0.
        ms_per_token: of one sequence at that K.
        usd_per_million_tokens: of all sequences together; None without a price, or if the pair
            does not fit.
        stops_at_batch: the power of two from which on speculation does not pay, among the batches
            up to `largest_batch`; None if it still pays there, or nothing fits.
    """

    alpha: float
    k: int
    speedup: float
    v: float | None
    ms_per_token: float
    usd_per_million_tokens: float | None
    stops_at_batch: int | None


@dataclass(frozen=True)
class PlannedCard:
    """A pair on one card; all of it modelled.

    Attributes:
        card: its name.
        fits: whether weights and caches of both models do, in `usable_bytes`.
        needed_bytes, usable_bytes: weights and caches; what may be filled of the card.
        cards_needed: by memory alone.
        sequences: concurrent sequences of the asked context that fit; 0 if the weights do not.
        largest_batch: the largest batch looked at: what fits, at most 1024.
        target_ms, draft_ms: one step.
        c: draft step / target step.
        largest_k, v: verify of largest_k + 1 positions / target step.
        verify_roof: what sets the time of that verify.
        usd_per_million_tokens: plain decoding's, as in PlannedGain.
        gains: one per alpha.
    """

    card: str
    fits: bool
    needed_bytes: float
    usable_bytes: float
    cards_needed: int
    sequences: int
    largest_batch: int
    target_ms: float
    draft_ms: float
    c: float
    largest_k: int
    v: float
    verify_roof: Roof
    usd_per_million_tokens: float | None
    gains: tuple[PlannedGain, ...]


class _Times(NamedTuple):
    target_ms: float
    c: float
    v: dict[int, float]


def plan_card(card: Card, wanted: Wanted) -> PlannedCard:
    """What `wanted` comes to on `card`."""
    weights, per_sequence = _bytes(wanted)
    needed, usable = weights + wanted.batch * per_sequence, card.memory_gb * 1e9 * USABLE_SHARE
    sequences = max(0, math.floor((usable - weights) / per_sequence))
    times, largest = _times(card, wanted, wanted.batch), max(wanted.ks)
    fits, reach = needed <= usable, min(sequences, LARGEST_BATCH)
    return PlannedCard(
        card=card.name,
        fits=fits,
        needed_bytes=needed,
        usable_bytes=usable,
        cards_needed=math.ceil(needed / usable),
        sequences=sequences,
        largest_batch=reach,
        target_ms=times.target_ms,
        draft_ms=times.c * times.target_ms,
        c=times.c,
        largest_k=largest,
        v=times.v[largest],
        verify_roof=modelled_forward(
            wanted.target,
            card,
            tokens=largest + 1,
            context_tokens=wanted.context_tokens,
            batch=wanted.batch,
            bytes_per_parameter=wanted.bytes_per_parameter,
        ).roof,
        usd_per_million_tokens=_price(card, wanted.batch, times.target_ms) if fits else None,
        gains=tuple(_gain(card, wanted, times, alpha, reach, fits=fits) for alpha in wanted.alphas),
    )


def plan_cards(cards: Sequence[Card], wanted: Wanted) -> tuple[PlannedCard, ...]:
    """Every card, those that fit first, the cheapest token first (fastest, without a price)."""
    planned = [plan_card(card, wanted) for card in cards]

    def order(plan: PlannedCard) -> tuple[bool, float, float]:
        last = plan.gains[-1] if plan.gains else None
        price = last.usd_per_million_tokens if last else plan.usd_per_million_tokens
        return (not plan.fits, math.inf if price is None else price, plan.target_ms)

    return tuple(sorted(planned, key=order))


def _bytes(wanted: Wanted) -> tuple[float, float]:
    """Bytes of both models' weights, and of both caches per sequence, the last drafts included."""
    models, unit = (wanted.target, wanted.draft), wanted.bytes_per_parameter
    positions = wanted.context_tokens + max(wanted.ks) + 1
    weights = sum(model.parameters for model in models) * unit
    return weights, sum(model.kv_bytes_read(positions, unit) for model in models)


def _times(card: Card, wanted: Wanted, batch: int) -> _Times:
    def ms(shape: Architecture, tokens: int) -> float:
        return modelled_forward(
            shape,
            card,
            tokens=tokens,
            context_tokens=wanted.context_tokens,
            batch=batch,
            bytes_per_parameter=wanted.bytes_per_parameter,
        ).ms

    step = ms(wanted.target, 1)
    verify = {k: ms(wanted.target, k + 1) / step for k in wanted.ks}
    return _Times(step, ms(wanted.draft, 1) / step, verify)


def _gain(
    card: Card, wanted: Wanted, times: _Times, alpha: float, largest: int, *, fits: bool
) -> PlannedGain:
    k, speedup = best_k(alpha, wanted.ks, times.c, times.v)
    ms = times.target_ms / speedup
    return PlannedGain(
        alpha=alpha,
        k=k,
        speedup=speedup,
        v=times.v[k] if k else None,
        ms_per_token=ms,
        usd_per_million_tokens=_price(card, wanted.batch, ms) if fits else None,
        stops_at_batch=_stops_at(card, wanted, alpha, largest),
    )


def _stops_at(card: Card, wanted: Wanted, alpha: float, largest: int) -> int | None:
    """The power of two after the last, among 1, 2, 4, ..., `largest`, at which some K pays."""
    batch, stop = 1, 1
    while batch <= largest:
        times = _times(card, wanted, batch)
        if best_k(alpha, wanted.ks, times.c, times.v)[0] > 0:
            stop = 2 * batch
        batch *= 2
    return stop if stop <= largest else None


def _price(card: Card, batch: int, ms_per_token: float) -> float | None:
    if card.price_per_hour_usd is None:
        return None
    return cost_per_million_tokens(ms_per_token / batch, card.price_per_hour_usd)

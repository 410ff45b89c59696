"""A pair on cards, modelled from data sheets: memory, step times and the gain from speculation.

Times follow from the sizes of two models and the data sheet of a card (`plan_cards`), so they are
known before anything is rented or downloaded. They are modelled, not measured: both models are
taken at their floors. That is too optimistic for small drafts most of all, which are the farthest
above their floors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.records import UserError
from harness.theory.architecture import Architecture
from harness.theory.cost import ModelSize, usd_per_million_tokens
from harness.theory.memory import MemoryFit, usable_bytes
from harness.theory.roofline import Card, forward_floor
from harness.theory.speedup import RoundTimes, StepTimes

# The largest batch that is considered on one card
LARGEST_BATCH = 1024


@dataclass(frozen=True)
class PlanRequest:
    """The request of a plan by card."""

    target: Architecture
    draft: Architecture
    ks: tuple[int, ...]  # numbers of draft tokens to choose from, each 1 or more
    alphas: tuple[float, ...]  # acceptances to plan for
    context_tokens: int = 1024  # positions in each sequence's cache, prompt and answer
    batch: int = 1  # sequences side by side
    bytes_per_parameter: float = 2.0  # 2 for bf16, of weights and cache alike

    def __post_init__(self) -> None:
        for key in ("context_tokens", "batch"):
            if getattr(self, key) < 1:
                raise UserError(f"{key}={getattr(self, key)}: must be 1 or more")


@dataclass(frozen=True)
class PlannedGain:
    """The modelled gain from speculation on one card at one alpha."""

    alpha: float
    # k, speedup: the best K and its speedup; 0 and 1 where speculation does not pay
    k: int
    speedup: float
    # Of all sequences together; None without a price, or if the pair does not fit
    usd_per_million_tokens: float | None
    # The batch (a power of two up to `largest_batch`) from which on speculation does not pay; None
    # if it still pays there, or nothing fits
    stops_at_batch: int | None


@dataclass(frozen=True)
class PlannedCard:
    """The modelled memory, times and gains of a pair on one card."""

    card: str
    fits: bool  # whether weights and KV caches of both models fit into the usable memory
    needed_bytes: float  # weights and caches
    cards_needed: int  # by memory alone
    sequences: int  # concurrent sequences of the asked context that fit; 0 if the weights do not
    largest_batch: int  # the largest batch considered: the largest that fits, at most 1024
    # target_ms, draft_ms: one step
    target_ms: float
    draft_ms: float
    c: float  # draft step / target step
    # largest_k, v: verify of largest_k + 1 positions / target step
    largest_k: int
    v: float
    usd_per_million_tokens: float | None  # plain decoding's, as in PlannedGain
    gains: tuple[PlannedGain, ...]  # one per alpha


def plan_card(card: Card, request: PlanRequest) -> PlannedCard:
    """The plan of `request` on `card`."""
    models = (request.target, request.draft)
    memory = MemoryFit(
        usable_bytes(card.memory_gb),
        tuple(ModelSize(model, request.bytes_per_parameter).memory for model in models),
        request.context_tokens + max(request.ks) + 1,  # with the tokens of the last verify
        request.batch,
    )
    floors, largest = _floors(card, request, request.batch), max(request.ks)
    largest_batch = min(memory.most_sequences, LARGEST_BATCH)

    def price(seconds_per_token: float) -> float | None:
        if card.price_per_hour_usd is None or not memory.fits:
            return None
        return usd_per_million_tokens(seconds_per_token / request.batch, card.price_per_hour_usd)

    gains: list[PlannedGain] = []
    for alpha in request.alphas:
        k, speedup = _best_k(floors, request, alpha)
        stops = _stops_at(card, request, alpha, largest_batch)
        cost = price(floors.target_s / speedup)
        gains.append(PlannedGain(alpha, k, speedup, cost, stops))
    return PlannedCard(
        card=card.name,
        fits=memory.fits,
        needed_bytes=memory.needed_bytes,
        cards_needed=math.ceil(memory.needed_bytes / memory.room_bytes),
        sequences=memory.most_sequences,
        largest_batch=largest_batch,
        target_ms=floors.target_s * 1e3,
        draft_ms=floors.draft_s * 1e3,
        c=floors.c,
        largest_k=largest,
        v=floors.v(largest),
        usd_per_million_tokens=price(floors.target_s),
        gains=tuple(gains),
    )


def plan_cards(cards: Sequence[Card], request: PlanRequest) -> tuple[PlannedCard, ...]:
    """The plans of all cards, those that fit first, by token price (by speed without a price)."""

    def order(plan: PlannedCard) -> tuple[bool, float, float]:
        last = plan.gains[-1] if plan.gains else plan
        price = last.usd_per_million_tokens
        return (not plan.fits, math.inf if price is None else price, plan.target_ms)

    return tuple(sorted((plan_card(card, request) for card in cards), key=order))


def _floors(card: Card, request: PlanRequest, batch: int) -> StepTimes:
    def floor_s(model: Architecture, tokens: int = 1) -> float:
        return forward_floor(
            model,
            card,
            tokens=tokens,
            context_tokens=request.context_tokens,
            batch=batch,
            bytes_per_parameter=request.bytes_per_parameter,
        )

    verify_s = (floor_s(request.target, n) for n in range(1, max(request.ks) + 2))
    return StepTimes(floor_s(request.draft), floor_s(request.target), tuple(verify_s))


def _best_k(floors: StepTimes, request: PlanRequest, alpha: float) -> tuple[int, float]:
    return RoundTimes.from_steps(floors, max(request.ks)).best_k(alpha, request.ks)


def _stops_at(card: Card, request: PlanRequest, alpha: float, largest: int) -> int | None:
    """The batch after the last of 1, 2, 4, ... at which some K pays; None beyond `largest`."""
    batch, stop = 1, 1
    while batch <= largest:
        if _best_k(_floors(card, request, batch), request, alpha)[0] > 0:
            stop = 2 * batch
        batch *= 2
    return stop if stop <= largest else None

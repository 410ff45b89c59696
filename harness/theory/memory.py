"""What a draft costs in memory, said in what it takes away: the target's context or concurrency.

A draft's weights and its keys and values sit on the same device as the target's. What is left of
the memory after both models' weights holds cached tokens; each costs the target's bytes and, with
speculation, the draft's as well. And the price of a token, where an hour of the device has one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from harness.records import UserError
from harness.theory.hardware import Architecture

# Servers leave part of the memory to activations and the allocator; vLLM's default is 0.9.
USABLE_SHARE = 0.9


@dataclass(frozen=True)
class MemoryRow:
    """Memory with one draft, or without any (draft None).

    Attributes:
        draft_weight_bytes, draft_kv_bytes_per_token: of the draft; 0 for an n-gram or none.
        fits: whether the weights alone do.
        context_tokens: tokens of cache that one sequence can have, or all of them together.
        sequences: concurrent sequences at the asked context.
        context_tokens_lost, sequences_lost: against no draft.
    """

    draft: str | None
    draft_weight_bytes: float
    draft_kv_bytes_per_token: float
    fits: bool
    context_tokens: int
    sequences: int
    context_tokens_lost: int
    sequences_lost: int


def memory_view(
    target: Architecture,
    drafts: Mapping[str, Architecture | None],
    memory_bytes: float,
    *,
    context_tokens: int,
    bytes_per_parameter: float = 2.0,
    bytes_per_value: float = 2.0,
    usable_share: float = USABLE_SHARE,
) -> tuple[MemoryRow, ...]:
    """What each draft leaves of the memory; the first row is the target alone.

    Args:
        target: its sizes.
        drafts: their sizes; None for a drafter without a model.
        memory_bytes: of the device.
        context_tokens: of each concurrent sequence, prompt and answer.
        bytes_per_parameter: 2 for bf16 weights.
        bytes_per_value: 2 for a bf16 cache.
        usable_share: part of the memory that weights and cache may fill.

    Raises:
        UserError: a memory, context or share that cannot be.
    """
    if not (math.isfinite(memory_bytes) and memory_bytes > 0.0):
        raise UserError(f"memory_bytes={memory_bytes}: must be above 0")
    if context_tokens < 1:
        raise UserError(f"context_tokens={context_tokens}: must be 1 or more")
    if not 0.0 < usable_share <= 1.0:
        raise UserError(f"usable_share={usable_share}: must be above 0 and at most 1")
    free = memory_bytes * usable_share - target.parameters * bytes_per_parameter
    own = target.kv_bytes_read(1, bytes_per_value)
    without = _room(free, own, context_tokens)
    rows = [MemoryRow(None, 0.0, 0.0, free >= 0.0, *without, 0, 0)]
    for name, draft in drafts.items():
        weights = draft.parameters * bytes_per_parameter if draft else 0.0
        kv = draft.kv_bytes_read(1, bytes_per_value) if draft else 0.0
        tokens, sequences = _room(free - weights, own + kv, context_tokens)
        lost = without[0] - tokens, without[1] - sequences
        rows.append(MemoryRow(name, weights, kv, free >= weights, tokens, sequences, *lost))
    return tuple(rows)


def _room(free_bytes: float, bytes_per_token: float, context_tokens: int) -> tuple[int, int]:
    """Cached tokens that fit, and sequences of that many tokens."""
    tokens = max(0, math.floor(free_bytes / bytes_per_token))
    return tokens, tokens // context_tokens


def cost_per_million_tokens(ms_per_token: float, price_per_hour: float) -> float:
    """Price of 10^6 emitted tokens of one sequence at a time, in the currency of the price.

    Args:
        ms_per_token: decode time.
        price_per_hour: of the device.

    Raises:
        UserError: a time that is not above 0, or a price below 0.
    """
    if not (math.isfinite(ms_per_token) and ms_per_token > 0.0):
        raise UserError(f"ms_per_token={ms_per_token}: must be above 0")
    if not (math.isfinite(price_per_hour) and price_per_hour >= 0.0):
        raise UserError(f"price_per_hour={price_per_hour}: must be 0 or more")
    return ms_per_token * price_per_hour / 3.6

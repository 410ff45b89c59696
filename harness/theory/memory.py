"""The memory of models: whether they fit, and the KV cache that they leave.

All checks use this calculation: of a card to rent, of the free memory of a device, and of the cost
of a draft. The draft's weights and KV cache are on the same card as the target's, and the memory
left after both models' weights holds cached tokens, each with the bytes of both models. So a draft
costs context or concurrency (`memory_view`).
"""

import math
from dataclasses import dataclass

from harness.records import UserError
from harness.summary import DraftMemory

# Servers leave a part of the memory to activations and the allocator; vLLM's default is 0.9
USABLE_SHARE = 0.9


@dataclass(frozen=True)
class ModelBytes:
    """The bytes of a model in memory: its own weights, and KV cache for every token of a text."""

    weights: float = 0.0
    kv_per_token: float = 0.0


@dataclass(frozen=True)
class MemoryFit:
    """Models that share a memory."""

    room_bytes: float  # the memory that they may fill
    models: tuple[ModelBytes, ...]  # each with a KV cache
    context_tokens: int = 0  # of each sequence
    sequences: int = 1  # side by side

    @property
    def weights_bytes(self) -> float:
        """Bytes of the weights of all models."""
        return sum(model.weights for model in self.models)

    @property
    def cache_bytes(self) -> float:
        """Bytes of the caches of all models and sequences."""
        per_token = sum(model.kv_per_token for model in self.models)
        return self.sequences * self.context_tokens * per_token

    @property
    def needed_bytes(self) -> float:
        """Bytes of the weights and the caches."""
        return self.weights_bytes + self.cache_bytes

    @property
    def fits(self) -> bool:
        """True where weights and caches fit."""
        return self.needed_bytes <= self.room_bytes

    @property
    def most_tokens(self) -> int:
        """Tokens that the caches can hold in the memory that the weights leave."""
        left = self.room_bytes - self.weights_bytes
        return max(0, math.floor(left / sum(model.kv_per_token for model in self.models)))

    @property
    def most_sequences(self) -> int:
        """Sequences of `context_tokens` that the caches can hold."""
        return self.most_tokens // self.context_tokens


def usable_bytes(memory_gb: float) -> float:
    """The part of a card's memory that models may fill."""
    return USABLE_SHARE * memory_gb * 1e9


def memory_view(
    name: str, draft: ModelBytes, target: ModelBytes, memory_bytes: float, *, context_tokens: int
) -> DraftMemory:
    """The memory of a draft, and the context and sequences lost compared with no draft.

    USABLE_SHARE of `memory_bytes` may be filled. `context_tokens` are those of each concurrent
    sequence, prompt and answer.
    """
    if not (math.isfinite(memory_bytes) and memory_bytes > 0.0):
        raise UserError(f"memory_bytes={memory_bytes}: must be above 0")
    if context_tokens < 1:
        raise UserError(f"context_tokens={context_tokens}: must be 1 or more")
    room = memory_bytes * USABLE_SHARE
    alone, both = (MemoryFit(room, each, context_tokens) for each in ((target,), (target, draft)))
    return DraftMemory(
        draft=name,
        weights_bytes=draft.weights,
        context_tokens_lost=alone.most_tokens - both.most_tokens,
        sequences_lost=alone.most_sequences - both.most_sequences,
    )

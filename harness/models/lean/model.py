"""LeanModel: the lean forward with its position on the host, and caches sliced to their length.

Attention then needs no mask for a single token, and a rewind only changes the length.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from harness.models.cached import LAST_OUTPUT, CachedModel
from harness.models.lean.layers import heads_of, mlp, project, project_onto, rms_norm, unfold
from harness.models.lean.weights import Weights, rotary_tables, weights_of

# The least positions of a cache, and the least by which it grows
CAPACITY = 512
# Forwards of more positions build their own mask
SHORT = 32
# Positions that attend to a filled cache at once, which limits the size of a mask
CHUNK = 128
# Torch's memory-efficient attention reads a mask 16 bytes at a time: it refuses (or misreads) one
# whose pointer is not a multiple of 16 bytes, and copies one, in every layer, whose row stride is
# not a multiple of 8 elements (`preprocess_mask` in ATen's attention.cpp, `check_supported` in
# mem_eff_attention/kernel_forward.h). Eight elements serve all dtypes.
ALIGNED = 8


class LeanModel(CachedModel):
    """A causal language model of the Llama family with a preallocated cache."""

    engine = "lean"

    def __init__(self, network: PreTrainedModel, vocab_size: int) -> None:
        super().__init__(network, vocab_size)
        self.weights: Weights = weights_of(network, vocab_size)
        self._sizes = (self.weights.heads, self.weights.kv_heads, self.weights.head_dim)
        self._dtype = self.weights.embedding.dtype
        # By the capacity of the cache and the number of positions; of all copies of the model
        self._masks: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self._home = self.weights.embedding.device
        self._allocate(1, CAPACITY)

    @property
    def device(self) -> torch.device:
        return self._home

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int]) -> None:
        self._length = 0
        if self._keys[0].shape[0] != 1:
            self._allocate(1, CAPACITY)
        if tokens:
            self._hidden(torch.tensor([tokens], device=self._home))

    @torch.inference_mode()
    def forward(self, tokens: Tensor) -> Tensor:
        return self._logits(self._hidden(tokens.to(self._home).unsqueeze(0)))

    def rewind(self, count: int) -> None:
        self._length -= count

    @torch.inference_mode()
    def fill(self, batch: int, context_tokens: int) -> None:
        """The content is arbitrary, so nothing is computed."""
        self._allocate(batch, context_tokens + CAPACITY)
        self._length = context_tokens

    @torch.inference_mode()
    def forward_batch(self, tokens: Tensor) -> Tensor:
        logits = self._logits(self._hidden(tokens.to(self._home)))
        return logits.view(*tokens.shape, -1)

    @torch.inference_mode()
    def read_as(self, other: CachedModel) -> None:
        assert isinstance(other, LeanModel)
        if self._keys[0].shape[0] != 1 or self._keys[0].shape[2] < other._length:
            self._allocate(1, other._length + CAPACITY)
        self._length, self.states = other._length, other.states
        copied = zip([*self._keys, *self._values], [*other._keys, *other._values], strict=True)
        for own, read in copied:
            own[:, :, : self._length] = read[:, :, : self._length]

    def _clear(self) -> None:
        self._length = 0
        self._allocate(1, CAPACITY)

    def _logits(self, hidden: Tensor) -> Tensor:
        return project(rms_norm(hidden, self.weights.norm, self.weights.eps), self.weights.head)

    def _hidden(self, tokens: Tensor) -> Tensor:
        """Run tokens [B, n] through every layer; [B * n, hidden], before the last norm."""
        weights, (batch, count) = self.weights, tokens.shape
        if self._length and count > CHUNK:
            parts: list[Tensor] = []
            chunks: list[Tensor] = []
            for part in tokens.split(CHUNK, 1):
                parts.append(self._hidden(part).view(batch, part.shape[1], -1))
                chunks += [] if self.states is None else [self.states]
            self.states = torch.cat(chunks) if chunks else None
            return torch.cat(parts, 1).view(batch * count, -1)
        start, end = self._length, self._length + count
        if end > self._keys[0].shape[2]:
            self._grow(end)
        cos, sin = self._cos[start:end], self._sin[start:end]
        causal = start == 0 and count > SHORT
        mask = None if causal else self._mask(start, count)
        x = F.embedding(tokens, weights.embedding).view(batch * count, -1)
        states: dict[int, Tensor] = {}
        for index, (layer, keys, values) in enumerate(
            zip(weights.layers, self._keys, self._values, strict=True)
        ):
            if index in self._kept_layers:
                states[index] = x
            query, key, value = heads_of(x, layer, cos, sin, self._sizes, weights.eps)
            keys.narrow(2, start, count).copy_(key)
            values.narrow(2, start, count).copy_(value)
            keys, values = keys.narrow(2, 0, end), values.narrow(2, 0, end)
            if causal:
                attended = _causal_attention(query, keys, values)
            else:
                attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
            x = project_onto(x, unfold(attended, count), layer.output)
            x = mlp(x, layer, weights.eps)
        self._length = end
        states[LAST_OUTPUT] = x
        if len(weights.layers) in self._kept_layers:
            states[len(weights.layers)] = rms_norm(x, weights.norm, weights.eps)
        kept = [states[index] for index in self._kept_layers]
        self.states = torch.cat(kept, dim=-1) if kept else None
        return x

    def _mask(self, start: int, count: int) -> Tensor | None:
        """The additive mask [G * n, end]; None for one token, which attends to all columns.

        Position i attends to columns up to start + i. A template that is wider than the cache has
        the masks of many starts as slices. There are ALIGNED templates, each shifted by one column,
        so that every slice begins at a multiple of ALIGNED.
        """
        if count == 1:
            return None
        if count > SHORT:
            return self._templates(1, start, count)[0][:, : start + count]
        capacity, shift = self._keys[0].shape[2], start % ALIGNED
        key = capacity, count
        if key not in self._masks:
            self._masks[key] = self._templates(ALIGNED, capacity, count).unbind()
        first = capacity - start + shift
        return self._masks[key][shift][:, first : first + start + count]

    def _templates(self, shifts: int, start: int, count: int) -> Tensor:
        """Masks [shifts, G * n, columns]: in mask s, position i attends up to start + s + i."""
        groups = self.weights.heads // self.weights.kv_heads
        shift = torch.arange(shifts, device=self._home).view(-1, 1, 1)
        position = torch.arange(count, device=self._home).view(-1, 1)
        column = torch.arange(_aligned(start + shifts - 1 + count), device=self._home)
        hidden = torch.zeros(shifts, count, len(column), dtype=self._dtype, device=self._home)
        hidden.masked_fill_(column > start + shift + position, float("-inf"))
        return hidden.repeat(1, groups, 1)

    def _allocate(self, batch: int, capacity: int) -> None:
        weights, capacity = self.weights, _aligned(capacity)
        shape = (batch, weights.kv_heads, capacity, weights.head_dim)
        layers = range(len(weights.layers))
        self._keys = [torch.zeros(shape, dtype=self._dtype, device=self._home) for _ in layers]
        self._values = [torch.zeros(shape, dtype=self._dtype, device=self._home) for _ in layers]
        self._cos, self._sin = rotary_tables(self.network, capacity)

    def _grow(self, needed: int) -> None:
        keys, values, length = self._keys, self._values, self._length
        self._allocate(keys[0].shape[0], 2 * needed)
        for new, old in zip([*self._keys, *self._values], [*keys, *values], strict=True):
            new[:, :, :length] = old[:, :, :length]


def _aligned(count: int) -> int:
    """The least multiple of ALIGNED that is at least `count`."""
    return -(-count // ALIGNED) * ALIGNED


def _causal_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of query [B, KV, G * n, D] over keys and values [B, KV, n, D], without a mask.

    A mask for n positions has G n^2 elements. Each key head is passed as a sequence whose G
    heads share it (stride 0), a form that every kernel takes as it is.
    """
    batch, kv_heads, count, width = keys.shape
    by_head = query.reshape(batch * kv_heads, -1, count, width)
    attended = F.scaled_dot_product_attention(
        by_head,
        keys.flatten(0, 1).unsqueeze(1).expand_as(by_head),
        values.flatten(0, 1).unsqueeze(1).expand_as(by_head),
        is_causal=True,
    )
    return attended.reshape(batch, kv_heads, -1, width)

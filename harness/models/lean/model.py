"""LeanModel: the lean forward with its position on the host and its caches cut to what is filled.

Attention then needs no mask for a single token, and a rewind is a smaller number.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from harness.models.cached import CachedModel
from harness.models.lean.layers import heads_of, mlp, project, project_onto, rms_norm, unfold
from harness.models.lean.weights import Weights, rotary_tables, weights_of

# Cache positions allocated at least, and by which a cache that is too short grows
CAPACITY = 512
# Longer pieces than this build their mask on the spot
SHORT = 64


class LeanModel(CachedModel):
    """A causal language model of the Llama family with a preallocated cache of its own."""

    engine = "lean"

    def __init__(self, network: PreTrainedModel, vocab_size: int) -> None:
        """Take the network's weights; logits are cut to `vocab_size`.

        Raises:
            AttributeError: the network is not built as its family is.
        """
        super().__init__(network, vocab_size)
        self.weights: Weights = weights_of(network, vocab_size)
        self._sizes = (self.weights.heads, self.weights.kv_heads, self.weights.head_dim)
        self._dtype = self.weights.embedding.dtype
        self._masks: dict[int, Tensor] = {}
        self._length = 0
        self._home = self.weights.embedding.device
        self._allocate(1, CAPACITY)

    @property
    def device(self) -> torch.device:
        """Where the logits live."""
        return self._home

    @property
    def cached_tokens(self) -> int:
        """How many tokens the cache holds."""
        return self._length

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int]) -> None:
        """Forget everything and fill the cache with `tokens` (which may be empty)."""
        self._length = 0
        if self._keys[0].shape[0] != 1:
            self._allocate(1, CAPACITY)
        if tokens:
            self._hidden(torch.tensor([tokens], device=self._home))

    @torch.inference_mode()
    def forward(self, tokens: Tensor) -> Tensor:
        """Append `tokens` [n]; return the logits after each, [n, vocab]."""
        return self._logits(self._hidden(tokens.to(self._home).unsqueeze(0)))

    def rewind(self, count: int) -> None:
        """Forget the last `count` cached tokens."""
        self._length -= count

    @torch.inference_mode()
    def fill(self, batch: int, context_tokens: int) -> None:
        """Make the cache one of `batch` sequences with `context_tokens` each, for timing.

        What they hold is arbitrary, so nothing is computed.
        """
        self._allocate(batch, context_tokens + CAPACITY)
        self._length = context_tokens

    @torch.inference_mode()
    def forward_batch(self, tokens: Tensor) -> Tensor:
        """Append `tokens` [batch, n]; return the logits after each, [batch, n, vocab]."""
        logits = self._logits(self._hidden(tokens.to(self._home)))
        return logits.view(*tokens.shape, -1)

    def _logits(self, hidden: Tensor) -> Tensor:
        return project(rms_norm(hidden, self.weights.norm, self.weights.eps), self.weights.head)

    def _hidden(self, tokens: Tensor) -> Tensor:
        """Run tokens [B, n] through every layer; [B * n, hidden], before the last norm."""
        weights, (batch, count) = self.weights, tokens.shape
        start, end = self._length, self._length + count
        if end > self._keys[0].shape[2]:
            self._grow(end)
        cos, sin = self._cos[start:end], self._sin[start:end]
        mask = self._mask(start, count)
        x = F.embedding(tokens, weights.embedding).view(batch * count, -1)
        for layer, keys, values in zip(weights.layers, self._keys, self._values, strict=True):
            query, key, value = heads_of(x, layer, cos, sin, self._sizes, weights.eps)
            keys[:, :, start:end] = key
            values[:, :, start:end] = value
            attended = F.scaled_dot_product_attention(
                query, keys[:, :, :end], values[:, :, :end], attn_mask=mask
            )
            x = project_onto(x, unfold(attended, count), layer.output)
            x = mlp(x, layer, weights.eps)
        self._length = end
        return x

    def _mask(self, start: int, count: int) -> Tensor | None:
        """Additive mask [G * n, end], or None for one token, which sees everything.

        Position i may see column c up to start + i. A template that is wider than the cache holds
        every start: the mask for one is a slice of it.
        """
        if count == 1:
            return None
        capacity = self._keys[0].shape[2]
        if count > SHORT:
            return self._template(start, count)
        if count not in self._masks:
            self._masks[count] = self._template(capacity, count)
        return self._masks[count][:, capacity - start :]

    def _template(self, start: int, count: int) -> Tensor:
        groups = self.weights.heads // self.weights.kv_heads
        rows = torch.arange(count, device=self._home).unsqueeze(1)
        columns = torch.arange(start + count, device=self._home)
        hidden = torch.zeros(count, start + count, dtype=self._dtype, device=self._home)
        hidden.masked_fill_(columns > rows + start, float("-inf"))
        return hidden.repeat(groups, 1)

    def _allocate(self, batch: int, capacity: int) -> None:
        weights = self.weights
        shape = (batch, weights.kv_heads, capacity, weights.head_dim)
        layers = range(len(weights.layers))
        self._keys = [torch.zeros(shape, dtype=self._dtype, device=self._home) for _ in layers]
        self._values = [torch.zeros(shape, dtype=self._dtype, device=self._home) for _ in layers]
        self._masks = {}
        self._cos, self._sin = rotary_tables(self.network, capacity)

    def _grow(self, needed: int) -> None:
        """Move what is cached into a cache with room for `needed` positions and as many again."""
        keys, values, length = self._keys, self._values, self._length
        self._allocate(keys[0].shape[0], 2 * needed)
        for new, old in zip([*self._keys, *self._values], [*keys, *values], strict=True):
            new[:, :, :length] = old[:, :, :length]

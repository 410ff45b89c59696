"""Heads of Llama layers, EAGLE's and EAGLE-3's, which draft token by token.

A row is a token and a feature; kinds differ in the input of the layer's projections (`project`).
Positions are rotary and those of the text: row t, or t + j for the j-th row of a chain. `passes`
returns the drafts from every start of a given text: pass j runs the j-th row of every chain at
once, fed with the text's tokens; it attends to the rows of pass 0 up to its own start, and to its
own chain's earlier rows, which are a diagonal of each earlier pass. `LayerHead` runs the same with
a cache, for the loop.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

from harness.models.heads.base import ChainHead, Head, HeadNetwork
from harness.theory.architecture import HeadArchitecture

# Queries of `passes` that attend to a text at once
QUERIES = 256
CAPACITY = 512

Angles = tuple[Tensor, Tensor]


class Projected(NamedTuple):
    """Query [B, heads, n, D], key and value [B, KV, n, D], and the residual [B, n, hidden]."""

    query: Tensor
    key: Tensor
    value: Tensor
    residual: Tensor


class Attention(nn.Module):
    """The projections of a layer; its caller computes the attention."""

    def __init__(self, config: Any, width: int, head_dim: int, *, bias: bool) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(width, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, config.hidden_size, bias=False)


class Layer(nn.Module):
    """A decoder layer whose projections read `width` numbers, without norms of this input."""

    def __init__(self, config: Any, width: int, head_dim: int, *, bias: bool = False) -> None:
        super().__init__()
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, width, head_dim, bias=bias)
        self.mlp = LlamaMLP(config)


class LayerNetwork(HeadNetwork):
    """The weights and arithmetic of a head.

    Attributes:
        midlayer: the first layer, mostly the only one; the later ones are `more`.
        embed_tokens: the target's embedding [V, hidden], or its own.
    """

    midlayer: Any
    fc: nn.Linear

    def __init__(self, config: LlamaConfig, layers: Sequence[int], width: int) -> None:
        super().__init__()
        self.config, self.layers, self.width = config, tuple(layers), width
        self.head_dim: int = config.head_dim or config.hidden_size // config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads or config.num_attention_heads
        self.cached_numbers = 2 * self.kv_heads * self.head_dim
        # Layers after the first
        self.more = nn.ModuleList()
        self.embed_tokens: Any = None
        self.own_embedding = False
        self.rotary = LlamaRotaryEmbedding(config)

    @abstractmethod
    def project(self, tokens: Tensor, features: Tensor, angles: Angles) -> Projected:
        """From tokens [B, n] and features [B, n, hidden]."""

    @property
    def weights(self) -> list[Tensor]:
        return [
            weight
            for name, weight in self.named_parameters()
            if self.own_embedding or not name.startswith("embed_tokens")
        ]

    def angles(self, positions: Tensor) -> Angles:
        """Cosines and sines [B, n, D] of positions [B, n]."""
        return self.rotary(self.fc.weight, positions)

    def attended_by(
        self, row: Tensor, residual: Tensor, angles: Angles, layer: Any = None
    ) -> Projected:
        """Query, key and value of rows [B, n, width], with the residual; of the first layer."""
        attention = (layer or self.midlayer).self_attn
        shape = (*row.shape[:2], -1, self.head_dim)
        query, key, value = (
            part(row).view(shape).transpose(1, 2)
            for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *angles)
        return Projected(query, key, value, residual)

    def next_layer(self, layer: Any, hidden: Tensor, angles: Angles) -> Projected:
        """Queries, keys, values and residuals of a later layer from outputs [B, n, hidden]."""
        return self.attended_by(layer.input_layernorm(hidden), hidden, angles, layer)

    def finish(self, attended: Tensor, residual: Tensor, layer: Any = None) -> Tensor:
        """The outputs [B, n, hidden] of a layer (the first) from attention [B, heads, n, D]."""
        layer = layer or self.midlayer
        rows = attended.transpose(1, 2).flatten(2)
        hidden = residual + layer.self_attn.o_proj(rows)
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def with_cache(self, vocab_size: int) -> Head:
        return LayerHead(self, vocab_size)

    def passes(self, tokens: Tensor, states: Tensor, depth: int, first: int = 0) -> list[Tensor]:
        count, features = states.shape[1], self.features(states)
        tokens = tokens.to(features.device)
        places = torch.arange(count, device=features.device).unsqueeze(0)
        base = self.project(tokens[:, 1:], features, self.angles(places))
        query, residual = base.query[:, :, first:], base.residual[:, first:]
        chain: list[tuple[Tensor, Tensor]] = []
        outputs: list[Tensor] = []
        for number in range(min(depth, count - first)):
            if number:
                rows = count - first - number
                own = self.project(
                    tokens[:, first + 1 + number :],
                    outputs[-1][:, :rows],
                    self.angles(places[:, first : count - number] + number),
                )
                query, residual = own.query, own.residual
                chain = [(key[:, :, :rows], value[:, :, :rows]) for key, value in chain]
                chain.append((own.key, own.value))
            attended = attend_from_every_start(query, base.key, base.value, chain, first)
            outputs.append(self.finish(attended, residual))
        return outputs


def shape_of_layer(layer: LlamaConfig, vocab: int, states: int) -> HeadArchitecture:
    """The sizes of a head of one layer; an upper bound for EAGLE, of half as wide an attention."""
    return HeadArchitecture(
        layers=1,
        hidden=layer.hidden_size,
        heads=layer.num_attention_heads,
        kv_heads=layer.num_key_value_heads or layer.num_attention_heads,
        head_dim=layer.head_dim or layer.hidden_size // layer.num_attention_heads,
        ffn=layer.intermediate_size,
        vocab=vocab,
        tied=True,
        states=states,
    )


def attend_from_every_start(
    query: Tensor, keys: Tensor, values: Tensor, chain: Sequence[tuple[Tensor, Tensor]], first: int
) -> Tensor:
    """The attention of query i to rows up to first + i, and to entry i of each chain's passes.

    Args:
        query: [B, heads, n, D].
        keys, values: [B, KV, rows, D] of pass 0.
        chain: keys and values [B, KV, n, D] of the passes 1, 2, ...
        first: the row of query 0.
    """
    groups = query.shape[1] // keys.shape[1]
    keys, values = repeat_kv(keys, groups), repeat_kv(values, groups)
    own = [(repeat_kv(key, groups), repeat_kv(value, groups)) for key, value in chain]
    rows = torch.arange(keys.shape[2], device=query.device)
    scale = query.shape[-1] ** -0.5
    attended: list[Tensor] = []
    for begin in range(0, query.shape[2], QUERIES):
        part = query[:, :, begin : begin + QUERIES]
        end = begin + part.shape[2]
        starts = torch.arange(first + begin, first + end, device=query.device)
        scores = torch.matmul(part, keys.transpose(2, 3)) * scale
        scores = scores.masked_fill(rows > starts.unsqueeze(1), float("-inf"))
        diagonals = [(part * key[:, :, begin:end]).sum(-1, keepdim=True) * scale for key, _ in own]
        shares = torch.softmax(torch.cat([scores, *diagonals], -1).float(), -1).to(part.dtype)
        total = torch.matmul(shares[..., : len(rows)], values)
        for index, (_, value) in enumerate(own, start=len(rows)):
            total = total + shares[..., index : index + 1] * value[:, :, begin:end]
        attended.append(total)
    return torch.cat(attended, dim=2)


class LayerCache:
    """Preallocated keys and values of a head's layers, and the angles of their positions.

    Attributes:
        length: the rows in use.
        keys, values: [layers, KV, capacity, D].
    """

    def __init__(self, network: Any, layers: int) -> None:
        """For the sizes, dtype, device and angles of a head."""
        self.length, self._network = 0, network
        shape = (layers, network.kv_heads, 0, network.head_dim)
        self.keys = self.values = network.fc.weight.new_zeros(shape)
        self.reserve(CAPACITY // 2)

    def reserve(self, rows: int) -> None:
        """Make room for as many rows, and then for twice as many; those in use are kept."""
        if rows <= self.keys.shape[2]:
            return
        keys, values = self.keys, self.values
        shape = (*keys.shape[:2], 2 * rows, keys.shape[3])
        self.keys, self.values = keys.new_zeros(shape), keys.new_zeros(shape)
        self.keys[:, :, : self.length] = keys[:, :, : self.length]
        self.values[:, :, : self.length] = values[:, :, : self.length]
        with torch.no_grad():
            places = torch.arange(2 * rows, device=keys.device).unsqueeze(0)
            self._cosines, self._sines = self._network.angles(places)

    def angles(self, begin: int, end: int) -> Angles:
        """Cosines and sines [1, n, D] of positions."""
        return self._cosines[:, begin:end], self._sines[:, begin:end]

    def written(self, layer: int, begin: int, keys: Tensor, values: Tensor) -> list[Tensor]:
        """All keys and values [1, KV, n, D] of a layer after its rows from `begin` are written."""
        end, one = begin + keys.shape[2], slice(layer, layer + 1)
        self.keys[one, :, begin:end], self.values[one, :, begin:end] = keys, values
        return [self.keys[one, :, :end], self.values[one, :, :end]]


class LayerHead(ChainHead):
    """The head with a cache of preallocated keys and values."""

    network: LayerNetwork

    def __init__(self, network: LayerNetwork, vocab_size: int) -> None:
        super().__init__(network, vocab_size)
        self._cache = LayerCache(network, 1 + len(network.more))

    def rewind(self, count: int) -> None:
        self._cache.length -= count

    def _forget_rows(self) -> None:
        self._cache.length = 0

    def _append(self, tokens: Tensor, features: Tensor) -> Tensor:
        cache, count = self._cache, tokens.shape[1]
        start, end = cache.length, cache.length + count
        cache.reserve(end)
        angles = cache.angles(start, end)
        mask, causal = None, start == 0 and count > 1
        if count > 1 and not causal:
            places = torch.arange(end, device=self.device)
            mask = places <= places[start:].unsqueeze(1)
        network, hidden = self.network, features
        for index, layer in enumerate((network.midlayer, *network.more)):
            if index:
                row = network.next_layer(layer, hidden, angles)
            else:
                row = network.project(tokens, features, angles)
            keys, values = cache.written(index, start, row.key, row.value)
            attended = F.scaled_dot_product_attention(
                row.query, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=True
            )
            hidden = network.finish(attended, row.residual, layer)
        cache.length = end
        return hidden

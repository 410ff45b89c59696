"""A decoder layer in fixed shapes with its cache write inside, and the last norm with the head.

Each is one function, so that a compiler may fuse everything between two matrix products. The number
of cached pieces varies within one compiled variant, as does the number of positions above one: a
model needs one variant for a single position and one for several, whatever the context.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from harness.models.lean.layers import (
    heads_of,
    mlp,
    project,
    project_onto,
    rms_norm,
    unfold,
)
from harness.models.lean.weights import Layer, Projection

# One code object serves every layer of every model; each kind of layer and batch is a variant
COMPILED_VARIANTS = 64
# Score of a hidden position: finite, so that a piece in which all are hidden has no 0 / 0
HIDDEN = -1e30

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Pieces(NamedTuple):
    """The parts of a forward that may be compiled: a layer, and what follows the last one."""

    layer: Callable[..., Tensor]
    finish: Callable[..., Tensor]


def run_layer(
    x: Tensor,
    layer: Layer,
    keys: Tensor,
    values: Tensor,
    index: Tensor,
    cos: Tensor,
    sin: Tensor,
    sizes: tuple[int, int, int],
    eps: float,
    attention: str,
) -> Tensor:
    """Run x [B, n, hidden] through a layer, writing its keys and values into the cache.

    Args:
        x: the layer's input.
        layer: its weights.
        keys: the cache [B, KV, S, P, D], S pieces of P positions.
        values: the same.
        index: [n] the cache positions of x.
        cos: [n, 1, D].
        sin: [n, 1, D], see `layers.rotate`.
        sizes: (heads, kv_heads, D).
        eps: of the norms.
        attention: a key of `ATTENTIONS`.

    Returns:
        [B, n, hidden].
    """
    batch, count, width = x.shape
    flat = x.reshape(batch * count, width)
    query, key, value = heads_of(flat, layer, cos, sin, sizes, eps)
    keys.flatten(2, 3).index_copy_(2, index, key)
    values.flatten(2, 3).index_copy_(2, index, value)
    attended = ATTENTIONS[attention](query, keys, values, index)
    flat = project_onto(flat, unfold(attended, count), layer.output)
    return mlp(flat, layer, eps).view(batch, count, width)


def finish(x: Tensor, norm: Tensor, head: Projection, eps: float) -> Tensor:
    """Logits [rows, vocab] of the last layer's output x [rows, hidden]."""
    return project(rms_norm(x, norm, eps), head)


def split_attention(query: Tensor, keys: Tensor, values: Tensor, index: Tensor) -> Tensor:
    """Attention over a whole cache, piece by piece, in matrix products and what a compiler fuses.

    Each piece has a softmax of its own, and the pieces are then weighted, so that a long context
    keeps the whole card busy (Dao et al. 2023, "Flash-Decoding").

    Args:
        query: [B, KV, G * n, D], rows (group, position).
        keys: [B, KV, S, P, D].
        values: the same.
        index: [n] the positions of the query; it sees these and what is before them.

    Returns:
        [B, KV, G * n, D].
    """
    batch, kv_heads, rows, width = query.shape
    splits, piece = keys.shape[2:4]
    scores = product(query.flatten(0, 1), keys.flatten(2, 3).flatten(0, 1).transpose(1, 2))
    # [B * KV, S, G, n, P]
    scores = scores.view(batch * kv_heads, -1, len(index), splits, piece).permute(0, 3, 1, 2, 4)
    places = torch.arange(splits * piece, device=index.device).view(splits, 1, 1, piece)
    scores = torch.where(places > index.view(-1, 1), HIDDEN, scores * width**-0.5)
    highest = scores.amax(-1, keepdim=True)
    shares = torch.exp(scores - highest)
    parts = product(
        shares.to(query.dtype).reshape(-1, rows, piece), values.flatten(0, 2)
    )  # [B * KV * S, G * n, D]
    weights = torch.exp(highest - highest.amax(1, keepdim=True))
    weights = weights / (weights * shares.sum(-1, keepdim=True)).sum(1, keepdim=True)
    parts = parts.view(batch, kv_heads, splits, rows, width)
    return (parts * weights.view(batch, kv_heads, splits, rows, 1)).sum(2).to(query.dtype)


def fused_attention(query: Tensor, keys: Tensor, values: Tensor, index: Tensor) -> Tensor:
    """The same in torch's flex attention, which is one kernel and the sum over its splits."""
    batch, kv_heads, rows, width = query.shape

    def causal(score: Tensor, _batch: Tensor, _head: Tensor, row: Tensor, place: Tensor) -> Tensor:
        return torch.where(place <= index[row], score, -float("inf"))

    heads = query.view(batch, kv_heads * rows // len(index), len(index), width)
    attended: Any = flex_attention(
        heads, keys.flatten(2, 3), values.flatten(2, 3), score_mod=causal, enable_gqa=True
    )
    return attended.reshape(batch, kv_heads, rows, width)


ATTENTIONS: dict[str, Attention] = {"split": split_attention, "fused": fused_attention}


def product(a: Tensor, b: Tensor) -> Tensor:
    """Batched matrix product in float32, without rounding it to the inputs' dtype on the way."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a, b).float()


def let_vary(tensor: Tensor, *dimensions: int) -> None:
    """Tell the compiler which sizes vary, so that they do not make a new variant.

    One is left out: it is a variant of its own, with fewer operations.
    """
    for dimension in dimensions:
        if tensor.shape[dimension] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, dimension)


@lru_cache(maxsize=1)
def compiled_pieces() -> Pieces:
    """The parts of a forward, compiled when first called; every model shares them."""
    torch._dynamo.config.recompile_limit = max(
        COMPILED_VARIANTS, torch._dynamo.config.recompile_limit
    )
    # Matrix times vector is bound by memory; the tuning finds the tile that reads fastest
    options: dict[str, Any] = {"coordinate_descent_tuning": True}
    compiled = partial(
        torch.compile,
        fullgraph=True,
        # Otherwise what differs from the last model, its widths, is assumed to vary, and kernels
        # read weights of unknown width two bytes at a time
        dynamic=False,
        options=options if torch.cuda.is_available() else None,
    )
    return Pieces(compiled(run_layer), compiled(finish))

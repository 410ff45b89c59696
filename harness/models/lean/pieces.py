"""A decoder layer in fixed shapes with its cache write inside, and the last norm with the head.

Each is one function, so that a compiler may fuse everything between two matrix products. The number
of cached pieces may vary within one compiled variant, and so may the number of positions above one:
a model needs one variant for a single position and one for several, at any context.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.models.lean.layers import heads_of, mlp, project, project_onto, rms_norm, unfold
from harness.models.lean.weights import Layer, Projection

# The limit of compiled variants of a function: all layers of all models share one, and each kind of
# layer and batch is a variant
COMPILED_VARIANTS = 64
# Score of a hidden position: finite, so that a piece in which all are hidden has no 0 / 0
HIDDEN = -1e30


class Positions(NamedTuple):
    """The places and angles of n positions, the same for every layer.

    Attributes:
        places: [n] in the cache.
        cos: [n, 1, D].
        sin: [n, 1, D], see `layers.rotate`.
    """

    places: Tensor
    cos: Tensor
    sin: Tensor


class Pieces(NamedTuple):
    """The parts of a forward that may be compiled: a layer, and the last norm with the head."""

    layer: Callable[..., Tensor]
    finish: Callable[..., Tensor]


def run_layer(
    x: Tensor,
    layer: Layer,
    cache: Tensor,
    positions: Positions,
    sizes: tuple[int, int, int],
    eps: float,
) -> Tensor:
    """Run x [B, n, hidden] through a layer, writing its keys and values into the cache.

    Args:
        cache: keys, then values [2, B, KV, S, P, D], in S pieces of P positions.
        sizes: (heads, kv_heads, D).
    """
    batch, count, width = x.shape
    index, cos, sin = positions.places, positions.cos, positions.sin
    # One variable, so that a compiler may simplify expressions of it
    assert len(index) == len(cos) == len(sin) == count
    assert cache.shape[1] == batch
    flat = x.view(batch * count, width)
    query, key, value = heads_of(flat, layer, cos, sin, sizes, eps)
    # Not torch.stack, which for one position would be three kernels
    is_key = torch.arange(2, device=x.device).view(2, 1, 1, 1, 1) == 0
    cache.flatten(3, 4).index_copy_(3, index, torch.where(is_key, key, value))
    attended = attention(query, cache[0], cache[1], index)
    flat = project_onto(flat, unfold(attended, count), layer.output)
    return mlp(flat, layer, eps).view(batch, count, width)


def finish(x: Tensor, norm: Tensor, head: Projection, eps: float) -> Tensor:
    """Logits [rows, vocab] of the last layer's output x [rows, hidden]."""
    return project(rms_norm(x, norm, eps), head)


def attention(query: Tensor, keys: Tensor, values: Tensor, places: Tensor) -> Tensor:
    """Attention over a whole cache, piece by piece, in matrix products and what a compiler fuses.

    Each piece has a softmax of its own, and the pieces are then weighted, so that a long context
    keeps the whole card busy (Dao et al. 2023, "Flash-Decoding").

    Args:
        query: [B, KV, G * n, D], rows (group, position); the result has its shape.
        keys, values: [B, KV, S, P, D].
        places: [n] of the query in the cache; each attends to positions up to its own.
    """
    batch, kv_heads, rows, width = query.shape
    splits, piece = keys.shape[2:4]
    scores = product(query.flatten(0, 1), keys.flatten(2, 3).flatten(0, 1).transpose(1, 2))
    by_piece = scores.view(batch * kv_heads, rows, splits, piece).transpose(1, 2)
    cached = torch.arange(splits * piece, device=places.device).view(splits, 1, piece)
    seen = cached <= places.repeat(rows // len(places)).view(rows, 1)
    scores = torch.where(seen, by_piece * width**-0.5, HIDDEN)  # [B * KV, S, G * n, P]
    highest = scores.amax(-1, keepdim=True)
    shares = torch.exp(scores - highest)
    sums = shares.sum(-1, keepdim=True)
    parts = product(
        shares.to(query.dtype).reshape(batch * kv_heads * splits, rows, piece), values.flatten(0, 2)
    ).view(batch * kv_heads, splits, rows, width)
    # As wide as the parts, so that both reductions over the pieces are one kernel
    highest, sums = highest.expand_as(parts), sums.expand_as(parts)
    weights = torch.exp(highest - highest.amax(1, keepdim=True))
    attended = (parts * weights).sum(1) / (sums * weights).sum(1)
    return attended.to(query.dtype).view(batch, kv_heads, rows, width)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Batched matrix product in float32, without rounding it to the inputs' dtype on the way."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a, b).float()


def let_vary(tensor: Tensor, *dimensions: int) -> None:
    """Mark sizes as varying for the compiler, so that they do not make new variants.

    A size of one is not marked: it is its own variant, with fewer operations.
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
    return Pieces(tuned(run_layer), tuned(finish))


def tuned(piece: Callable[..., Any]) -> Callable[..., Any]:
    """The piece compiled; for a single row with coordinate descent, which takes minutes.

    A matrix times a vector is a kernel of the compiler's own, bound by memory, and the tuning finds
    the tile that reads fastest. The products of several rows are a library's.
    """
    # Without dynamic=False the compiler assumes that widths vary, since they differ between models,
    # and kernels read weights of unknown width two bytes at a time
    compiled = partial(torch.compile, piece, fullgraph=True, dynamic=False)
    options: dict[str, Any] = {"coordinate_descent_tuning": True}
    one_row = compiled(options=options if torch.cuda.is_available() else None)
    rows = compiled()

    def chosen(x: Tensor, *rest: Any) -> Any:
        return (one_row if x.numel() == x.shape[-1] else rows)(x, *rest)

    return chosen

"""The arithmetic between launches in fixed shapes: a layer as three pieces, compiled or not.

The cache's length is a shape of the middle piece alone, so that the other two are compiled once for
one position and once for several, whatever the context.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.models.lean.layers import heads_of, mlp, project_onto, unfold
from harness.models.lean.weights import Layer

# One code object serves every layer of every model; each batch and length of a piece is a variant
COMPILED_VARIANTS = 64


class Pieces(NamedTuple):
    """The compiled parts of a layer: before attention, attention's own, and after it."""

    before: Callable[..., tuple[Tensor, Tensor]]
    attend: Callable[..., Tensor]
    after: Callable[..., Tensor]


def before(
    x: Tensor, layer: Layer, cos: Tensor, sin: Tensor, sizes: tuple[int, int, int], eps: float
) -> tuple[Tensor, Tensor]:
    """Query [B, KV, G * n, D], and key and value together [2, B, KV, n, D]."""
    query, key, value = heads_of(x, layer, cos, sin, sizes, eps)
    return query, torch.stack((key, value))


def attend(query: Tensor, cache: Tensor, hidden: Tensor, splits: int) -> Tensor:
    """Attention of query [B, KV, R, D] over a whole cache [2, B, KV, L, D], in `splits` pieces.

    Args:
        query: rows of one key head together.
        cache: keys, then values.
        hidden: [R, L] what a row must not see.
        splits: pieces of the cache; L is a multiple of it.

    Returns:
        [B, KV, R, D].
    """
    batch, kv_heads, rows, width = query.shape
    piece = cache.shape[3] // splits
    keys, values = cache[0].reshape(-1, piece, width), cache[1].reshape(-1, piece, width)
    spread = (query * width**-0.5).unsqueeze(2).expand(-1, -1, splits, -1, -1)
    scores = torch.bmm(spread.reshape(-1, rows, width), keys.transpose(1, 2)).float()
    scores = scores.view(batch, kv_heads, splits, rows, piece)
    apart = hidden.view(rows, splits, piece).transpose(0, 1)
    scores = scores.masked_fill(apart, float("-inf"))
    shares = torch.exp(scores - scores.amax((2, 4), keepdim=True))
    parts = torch.bmm(shares.to(query.dtype).view(-1, rows, piece), values)
    summed = parts.view(batch, kv_heads, splits, rows, width).float().sum(2)
    return (summed / shares.sum((2, 4)).unsqueeze(-1)).to(query.dtype)


def after(
    x: Tensor, attended: Tensor, layer: Layer, sizes: tuple[int, int, int], eps: float
) -> Tensor:
    """Sum of x [B * n, hidden], the attention's output and the MLP."""
    count = attended.shape[2] * sizes[1] // sizes[0]
    return mlp(project_onto(x, unfold(attended, count), layer.output), layer, eps)


def let_vary(x: Tensor, *tables: Tensor) -> None:
    """Tell the compiler that rows and positions vary, so that every verify is one variant."""
    for tensor in (x, *tables):
        if tensor.shape[0] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)


@lru_cache(maxsize=1)
def compiled_pieces() -> Pieces:
    """The parts of a layer, compiled when first called; every model shares them."""
    torch._dynamo.config.recompile_limit = max(
        COMPILED_VARIANTS, torch._dynamo.config.recompile_limit
    )
    return Pieces(tuned(before), torch.compile(attend, fullgraph=True), tuned(after))


def tuned(piece: Callable[..., Any]) -> Callable[..., Any]:
    """The piece compiled; for a single row with coordinate descent, which takes minutes.

    A matrix times a vector is a kernel of the compiler's own, bound by memory, and the tuning finds
    the tile that reads fastest. The products of several rows are a library's.
    """
    options: dict[str, Any] = {"coordinate_descent_tuning": True}
    one_row = torch.compile(
        piece, fullgraph=True, options=options if torch.cuda.is_available() else None
    )
    rows = torch.compile(piece, fullgraph=True)

    def chosen(x: Tensor, *rest: Any) -> Any:
        return (one_row if x.numel() == x.shape[-1] else rows)(x, *rest)

    return chosen

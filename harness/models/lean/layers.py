"""The arithmetic of a decoder layer: pure functions of tensors, no cache object, no configuration.

The order of operations and of roundings is that of transformers' Llama and Qwen modules
(models/llama/modeling_llama.py, models/qwen3/modeling_qwen3.py): norms and softmax in float32, the
rest in the weights' dtype. There are fewer operations: query, key and value are one product, gate
and up another, a residual is added by the product that makes it, and query heads that share a key
head are folded into rows, so that attention reads each key once.

Two of them are whole parts of a forward, so that a compiler may fuse everything between two matrix
products: a layer in fixed shapes with its cache write inside, and the last norm with the head. The
number of cached pieces may vary within one compiled variant, and so may the number of positions
above one: a model needs one variant for a single position and one for several, at any context.

Shapes: B sequences, n positions, H query heads over G = H / KV groups, D the head's width.
"""

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from harness.models.lean.weights import Experts, Layer, Projection

# The limit of compiled variants of a function: all layers of all models share one, and each kind of
# layer and batch is a variant
COMPILED_VARIANTS = 64
# Score of a hidden position: finite, so that a piece in which all are hidden has no 0 / 0
HIDDEN = -1e30


def project(x: Tensor, projection: Projection) -> Tensor:
    if projection.bias is None:
        return torch.mm(x, projection.weight)
    return torch.addmm(projection.bias, x, projection.weight)


def project_onto(residual: Tensor, x: Tensor, projection: Projection) -> Tensor:
    """Sum of residual [rows, out] and x [rows, in] projected."""
    if x.is_cuda and torch.compiler.is_compiling():
        # In float32, which rounds to the same values: the compiler then fuses the sum into the next
        # operation. Otherwise it makes an addmm of it, which copies the residual first.
        return (residual.float() + project(x, projection).float()).to(x.dtype)
    if x.is_cuda:
        # Not addmm, which reads the residual once more
        return residual + project(x, projection)
    if projection.bias is not None:
        residual = residual + projection.bias
    return torch.addmm(residual, x, projection.weight)


@cache
def _scalar(value: float) -> Tensor:
    """A number as operations take it without making a tensor of it at every call."""
    return torch.tensor(value)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dimension, in float32; the weight in x's dtype."""
    if x.dtype == torch.float32 and x.is_cpu and not torch.compiler.is_compiling():
        # The fewest calls, which take the time here
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        mean = torch.addcmul(_scalar(eps), norm, norm, value=1.0 / x.shape[-1])
        return (x * mean.rsqrt_()).mul_(weight)
    wide = x.float()
    mean = torch.linalg.vecdot(wide, wide).unsqueeze(-1) * (1.0 / x.shape[-1])
    return (wide * torch.rsqrt(mean + eps)).to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, n, heads, D]; cos and sin [n, 1, D], sin's first half negated."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def heads_of(
    x: Tensor, layer: Layer, cos: Tensor, sin: Tensor, sizes: tuple[int, int, int], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of one layer.

    Args:
        x: the layer's input [B * n, hidden]; cos and sin [n, 1, D] say what n is.
        sizes: (heads, kv_heads, D).

    Returns:
        query [B, KV, G * n, D] with rows (group, position), key and value [B, KV, n, D].
    """
    heads, kv_heads, width = sizes
    count = cos.shape[0]
    batch = x.shape[0] // count
    normed = rms_norm(x, layer.attention_norm, eps)
    qkv = project(normed, layer.qkv).view(batch, count, heads + 2 * kv_heads, width)
    query_key, value = qkv.split_with_sizes((heads + kv_heads, kv_heads), 2)
    if layer.qk_norm is not None:
        query_key = rms_norm(query_key, layer.qk_norm, eps)
    query_key = rotate(query_key, cos, sin)
    groups = heads // kv_heads
    query, key = query_key.split_with_sizes((heads, kv_heads), 2)
    if count > 1:
        parts = query.view(batch, count, kv_heads, groups, width)
        query = parts.permute(0, 2, 3, 1, 4)
    # Sizes are written out, so that a compiler knows their factors
    folded = query.reshape(batch, kv_heads, groups * count, width)
    return folded, key.transpose(1, 2), value.transpose(1, 2)


def unfold(attended: Tensor, count: int) -> Tensor:
    """[B, KV, G * n, D] -> [B * n, H * D]."""
    batch, kv_heads, rows, width = attended.shape
    if count == 1:
        return attended.reshape(batch, -1)
    parts = attended.view(batch, kv_heads, rows // count, count, width)
    return parts.permute(0, 3, 1, 2, 4).reshape(batch * count, -1)


def mlp(x: Tensor, layer: Layer, eps: float) -> Tensor:
    """Sum of x [rows, hidden] and the layer's MLP of its norm."""
    normed = rms_norm(x, layer.mlp_norm, eps)
    if layer.experts is not None:
        return x + mixture(normed, layer.experts)
    assert layer.gate_up is not None
    assert layer.down is not None
    gate, up = project(normed, layer.gate_up).chunk(2, -1)
    return project_onto(x, F.silu(gate) * up, layer.down)


def mixture(x: Tensor, experts: Experts) -> Tensor:
    """The chosen experts of each row of x [rows, hidden], weighted.

    Rows are sorted by expert, and each expert's rows are one product of a grouped matrix product
    where torch has one; elsewhere, and for one row when compiled, the chosen experts' weights are
    gathered, a few rows at a time. Neither needs a host read of the chosen experts.
    """
    scores = torch.softmax(F.linear(x, experts.router), dim=-1, dtype=torch.float32)
    shares, chosen = torch.topk(scores, experts.top_k, dim=-1)
    if experts.normalise:
        shares = shares / shares.sum(-1, keepdim=True)
    shares = shares.to(x.dtype)
    # Compiled for one row, a gather is a read inside the product; otherwise it is a copy
    in_place = torch.compiler.is_compiling() and x.shape[0] == 1
    if experts.grouped and not in_place:
        return _grouped_mixture(x, experts, shares, chosen)
    if x.shape[0] <= GATHERED_ROWS:
        return _gathered_mixture(x, experts, shares, chosen)
    parts = zip(*(t.split(GATHERED_ROWS) for t in (x, shares, chosen)), strict=True)
    return torch.cat([_gathered_mixture(rows, experts, *rest) for rows, *rest in parts])


# Rows whose experts' weights are copied at once: a prompt's would not fit
GATHERED_ROWS = 16


def _gathered_mixture(x: Tensor, experts: Experts, shares: Tensor, chosen: Tensor) -> Tensor:
    gate_up = experts.gate_up[chosen]  # [rows, k, 2 ffn, hidden]
    gate, up = torch.einsum("rkfh,rh->rkf", gate_up, x).chunk(2, -1)
    inner = F.silu(gate) * up
    return torch.einsum("rkhf,rkf,rk->rh", experts.down[chosen], inner, shares)


_grouped_mm: Any = getattr(torch, "_grouped_mm", None)


def _grouped_mixture(x: Tensor, experts: Experts, shares: Tensor, chosen: Tensor) -> Tensor:
    rows, top_k = chosen.shape
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)
    every = torch.arange(experts.gate_up.shape[0], device=x.device)
    ends = torch.searchsorted(flat[order], every, right=True).to(torch.int32)
    sorted_rows = x[order // top_k]
    gate, up = _grouped_mm(sorted_rows, experts.gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    out = _grouped_mm(F.silu(gate) * up, experts.down.transpose(1, 2), offs=ends)
    back = torch.empty_like(out)
    back[order] = out
    return (back.view(rows, top_k, -1) * shares.unsqueeze(-1)).sum(1)


# ---- parts of a forward that are compiled --------------------------------------------------------


class Positions(NamedTuple):
    """The places [n] in the cache, and the angles [n, 1, D], of positions for every layer."""

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

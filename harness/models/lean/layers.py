"""The arithmetic of a decoder layer: pure functions of tensors, no cache object, no configuration.

The order of operations and of roundings is that of transformers' Llama and Qwen modules
(models/llama/modeling_llama.py, models/qwen3/modeling_qwen3.py): norms and softmax in float32, the
rest in the weights' dtype. There are fewer operations: query, key and value are one product, gate
and up another, a residual is added by the product that makes it, and query heads that share a key
head are folded into rows, so that attention reads each key once.

Shapes: B sequences, n positions, H query heads over G = H / KV groups, D the head's width.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from harness.models.lean.weights import Experts, Layer, Projection


def project(x: Tensor, projection: Projection) -> Tensor:
    """Project x [rows, in] to [rows, out]."""
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

"""A network's weights for the lean forward: query, key and value fused, and gate and up fused.

Fusing takes no memory: the fused matrix replaces its parts, and the network's own parameters become
views of its rows, so that transformers' forward still works. On a card the parts are freed layer by
layer, so at most one layer is in memory twice.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

FAMILIES = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
    | {"Qwen3MoeForCausalLM"}
)
# Kinds of rotary embedding that do not depend on the length of the text
ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})


@dataclass(frozen=True)
class Projection:
    """A linear layer: `weight` is [in, out] (a transposed view), `bias` [out] or None."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Experts:
    """A mixture of experts, of which `top_k` are used for a token."""

    router: Tensor  # [experts, hidden]
    gate_up: Tensor  # [experts, 2 * ffn, hidden]
    down: Tensor  # [experts, hidden, ffn]
    top_k: int
    normalise: bool  # the chosen experts' shares are made to sum to one
    grouped: bool  # torch has a grouped matrix product for them


@dataclass(frozen=True)
class Layer:
    """One decoder layer, with a dense MLP (`gate_up` and `down`) or with experts."""

    attention_norm: Tensor  # [hidden]
    qkv: Projection  # hidden -> (heads + 2 * kv_heads) * head_dim
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim], if the family has one
    output: Projection  # heads * head_dim -> hidden
    mlp_norm: Tensor  # [hidden]
    gate_up: Projection | None
    down: Projection | None
    experts: Experts | None


@dataclass(frozen=True)
class Weights:
    """A whole network."""

    layers: tuple[Layer, ...]
    embedding: Tensor  # [vocab, hidden]
    norm: Tensor  # [hidden], the last one
    head: Projection  # hidden -> vocab, cut to the width in use
    heads: int
    kv_heads: int
    head_dim: int
    eps: float  # of every norm


def unsupported(network: PreTrainedModel) -> str | None:
    """The reason why the lean forward cannot replace this network's own; None if it can."""
    name, config = type(network).__name__, network.config
    if name not in FAMILIES:
        return f"{name} is not of the Llama family"
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantized"
    if len({(tensor.device, tensor.dtype) for tensor in network.parameters()}) != 1:
        return "its weights are spread over devices or dtypes"
    if next(network.parameters()).device.type == "meta" or hasattr(network, "hf_device_map"):
        return "its weights are offloaded"
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        return "not all of its layers attend to everything"
    if name == "MistralForCausalLM" and getattr(config, "sliding_window", None):
        return "its attention slides"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return None if rope in ROPE_TYPES else f"its rotary embedding is {rope}"


@torch.no_grad()
def weights_of(network: PreTrainedModel, vocab_size: int) -> Weights:
    """Take the weights, fusing projections in place; the head is cut to `vocab_size`."""
    inner: Any = network.model
    config: Any = network.config
    head: Any = network.get_output_embeddings()
    bias = None if head.bias is None else head.bias[:vocab_size]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers: list[Layer] = []
    for layer in inner.layers:
        layers.append(_layer(layer, config))
        torch.cuda.empty_cache()  # has no effect where no card is in use
    return Weights(
        layers=tuple(layers),
        embedding=inner.embed_tokens.weight,
        norm=inner.norm.weight,
        head=Projection(head.weight[:vocab_size].t(), bias),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        eps=config.rms_norm_eps,
    )


def _layer(layer: Any, config: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qk_norm = None
    if hasattr(attention, "q_norm"):
        counts = (config.num_attention_heads, config.num_key_value_heads)
        norms = (attention.q_norm.weight, attention.k_norm.weight)
        qk_norm = torch.cat([norm.expand(n, -1) for n, norm in zip(counts, norms, strict=True)])
    dense = hasattr(mlp, "gate_proj")
    return Layer(
        attention_norm=layer.input_layernorm.weight,
        qkv=_fused(attention.q_proj, attention.k_proj, attention.v_proj),
        qk_norm=qk_norm,
        output=_fused(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=_fused(mlp.gate_proj, mlp.up_proj) if dense else None,
        down=_fused(mlp.down_proj) if dense else None,
        experts=None if dense else _experts(mlp),
    )


def _experts(mlp: Any) -> Experts:
    return Experts(
        router=mlp.gate.weight,
        gate_up=mlp.experts.gate_up_proj,
        down=mlp.experts.down_proj,
        top_k=mlp.gate.top_k,
        normalise=mlp.gate.norm_topk_prob,
        grouped=_has_grouped_product(mlp.experts.gate_up_proj),
    )


def _has_grouped_product(weight: Tensor) -> bool:
    """True where torch multiplies rows by their own experts at once: bfloat16 on Hopper."""
    return (
        weight.is_cuda
        and weight.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(weight.device) >= (9, 0)
    )


def _fused(*parts: Any) -> Projection:
    """The fused projection of several with the same input; these become views of its rows."""
    if len(parts) == 1:
        return Projection(parts[0].weight.t(), parts[0].bias)
    weight = _joined([part.weight for part in parts])
    biases = [part.bias for part in parts]
    return Projection(weight.t(), None if biases[0] is None else _joined(biases))


def _joined(tensors: list[Tensor]) -> Tensor:
    """The concatenated rows of tensors, which then share the result's memory.

    The tensors of a network that was opened before are already joined, and are not copied again.
    """
    first, end = tensors[0], 0
    rows = sum(tensor.shape[0] for tensor in tensors)
    pointer, joined = first.data_ptr(), True
    for tensor in tensors:
        joined = joined and tensor.data_ptr() == pointer + end * first.element_size()
        end += tensor.numel()
    storage = first.untyped_storage().nbytes() // first.element_size() - first.storage_offset()
    if joined and storage >= end:
        return first.data.as_strided((rows, *first.shape[1:]), first.stride())
    result = torch.cat([tensor.data for tensor in tensors])
    for tensor, part in zip(
        tensors, result.split([tensor.shape[0] for tensor in tensors]), strict=True
    ):
        tensor.data = part
    return result


def rotary_tables(network: PreTrainedModel, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, 1, D] of the network's own rotary embedding.

    The first half of the sines is negated, so that a rotation is x * cos + roll(x) * sin.
    """
    inner: Any = network.model
    probe = inner.embed_tokens.weight[:1].unsqueeze(0)
    ids = torch.arange(positions, device=probe.device).unsqueeze(0)
    with torch.no_grad():
        cos, sin = inner.rotary_emb(probe, ids)
    half = sin.shape[-1] // 2
    signed = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)
    return cos[0].unsqueeze(1), signed.unsqueeze(1)

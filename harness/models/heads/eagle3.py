"""An EAGLE-3 head: one decoder layer that drafts from three hidden states of its target.

Row t takes the embedding of token x[t + 1] and a feature, and gives an output [hidden], which is
the next row's feature and, through the last norm and the head's output matrix, the distribution of
x[t + 2]. The feature of a row that starts afresh is `fc` of the target's residual stream at t after
three of its layers. The layer's query, key and value take the normed embedding and the normed
feature side by side. Positions are rotary and those of the text: row t, or t + j for the j-th row
of a chain. The output is over a reduced vocabulary; `d2t` gives the distance of each of its tokens
to the target's id (Li et al. 2025, EAGLE-3; tensors and conventions as in SGLang's SpecForge and
vllm-project/speculators).

`Eagle3Network` holds the arithmetic, `Eagle3Head` is the same with a cache, for the loop. `passes`
is what training and replay need: the drafts from every start of a given text. Pass j runs the j-th
row of every chain at once, fed with the text's tokens; it attends to the rows of pass 0 up to its
own start, and to its own chain's earlier rows, which is a diagonal of each earlier pass.

Two layouts are read. SpecForge's (SGLang) is a config of the layer itself with `architectures:
[LlamaForCausalLMEagle3]`, and tensors `midlayer.*`. That of vllm-project/speculators has
`speculators_model_type: eagle3`, the layer's config under `transformer_layer_config`, and tensors
`layers.0.*`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

from harness.config import ModelConf
from harness.models.checkpoint import explained
from harness.models.heads.base import ChainHead, HeadNetwork, LoadedHead, in_target_ids
from harness.models.heads.files import HeadFiles, config_of, found_in, unknown_layout
from harness.models.load import LoadedModel
from harness.records import UserError
from harness.theory.architecture import HeadArchitecture

# Of the target, as both training frameworks take them where a checkpoint names no others
STATES = 3
# Queries of `passes` that attend to a text at once
QUERIES = 256
CAPACITY = 512


def default_layers(layers: int) -> tuple[int, ...]:
    """The target's layers whose inputs a head reads where its config names none."""
    return (2, layers // 2, layers - 3)


class _Projected(NamedTuple):
    """Query [B, heads, n, D], key and value [B, KV, n, D], and the residual [B, n, hidden]."""

    query: Tensor
    key: Tensor
    value: Tensor
    residual: Tensor


class _Attention(nn.Module):
    """The projections of the layer; what attends to what is its caller's."""

    def __init__(self, config: Any, head_dim: int) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        width = 2 * config.hidden_size
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, config.hidden_size, bias=False)


class _Layer(nn.Module):
    """The decoder layer."""

    def __init__(self, config: Any, head_dim: int) -> None:
        super().__init__()
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config, head_dim)
        self.mlp = LlamaMLP(config)


class Eagle3Network(HeadNetwork):
    """The head's weights and arithmetic; parameters are named as SpecForge names them.

    Attributes:
        config: of the layer.
        layers: of the target, whose inputs it reads.
        norm_before_residual: whether the residual is the feature after `hidden_norm`.
        embed_tokens: the target's embedding [V, hidden], or one of its own.
        own_embedding: which of the two.
        d2t: [draft vocabulary] the target's id of each token, minus its own.
        t2d: [V] which of the target's tokens it can draft.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(
        self,
        config: LlamaConfig,
        *,
        target_hidden: int,
        layers: Sequence[int],
        draft_vocabulary: int,
        vocabulary: int,
        norm_before_residual: bool,
    ) -> None:
        super().__init__()
        self.config, self.layers = config, tuple(layers)
        self.norm_before_residual = norm_before_residual
        self.head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
        self.width = len(self.layers) * target_hidden
        self.fc = nn.Linear(self.width, config.hidden_size, bias=False)
        self.midlayer = _Layer(config, self.head_dim)
        self.cached_numbers = 2 * self.midlayer.self_attn.k_proj.out_features
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocabulary, bias=False)
        self.register_buffer("d2t", torch.zeros(draft_vocabulary, dtype=torch.long))
        self.register_buffer("t2d", torch.ones(vocabulary, dtype=torch.bool))
        self.embed_tokens: nn.Module | None = None
        self.own_embedding = False
        self.rotary = LlamaRotaryEmbedding(config)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, n, D] of positions [B, n]."""
        return self.rotary(self.norm.weight, positions)

    def project(
        self, tokens: Tensor, features: Tensor, angles: tuple[Tensor, Tensor]
    ) -> _Projected:
        """What the layer makes of tokens [B, n] and features [B, n, hidden] before it attends."""
        assert self.embed_tokens is not None
        layer, shape = self.midlayer, (*tokens.shape, -1, self.head_dim)
        normed = layer.hidden_norm(features)
        embedded = layer.input_layernorm(self.embed_tokens(tokens))
        row = torch.cat([embedded, normed], dim=-1)
        attention = layer.self_attn
        query, key, value = (
            part(row).view(shape).transpose(1, 2)
            for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *angles)
        return _Projected(query, key, value, normed if self.norm_before_residual else features)

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """The outputs [B, n, hidden] of what was attended [B, heads, n, D]."""
        layer = self.midlayer
        rows = attended.transpose(1, 2).flatten(2)
        hidden = residual + layer.self_attn.o_proj(rows)
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def draft_logits(self, outputs: Tensor) -> Tensor:
        """Logits [..., draft vocabulary] of outputs [..., hidden]."""
        return self.lm_head(self.norm(outputs))

    def logits(self, outputs: Tensor, vocabulary: int, offset: int) -> Tensor:
        """Logits [..., vocabulary] in the target's ids; -inf of tokens that it cannot draft."""
        del offset
        ids = self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
        return in_target_ids(self.draft_logits(outputs), ids, vocabulary)

    @property
    def weights(self) -> list[Tensor]:
        """Its own, without the embedding where that is the target's."""
        return [
            weight
            for name, weight in self.named_parameters()
            if self.own_embedding or not name.startswith("embed_tokens")
        ]

    def features(self, states: Tensor) -> Tensor:
        """The features [..., hidden] of the target's states [..., width]."""
        return self.fc(states.to(self.fc.weight.device, self.fc.weight.dtype))

    def with_cache(self, vocab_size: int) -> "Eagle3Head":
        """The head for the loop."""
        return Eagle3Head(self, vocab_size)

    def passes(self, tokens: Tensor, states: Tensor, depth: int, first: int = 0) -> list[Tensor]:
        """The outputs of `depth` drafts from every start of a text; see `HeadNetwork.passes`."""
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
            attended = _attend_from_every_start(query, base.key, base.value, chain, first)
            outputs.append(self.finish(attended, residual))
        return outputs


def _attend_from_every_start(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    chain: Sequence[tuple[Tensor, Tensor]],
    first: int,
) -> Tensor:
    """Query i attends to rows up to first + i, and to entry i of each of its chain's passes.

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


class Eagle3Head(ChainHead):
    """The head with a cache of preallocated keys and values."""

    engine = "eagle3"
    network: Eagle3Network

    def __init__(self, network: Eagle3Network, vocab_size: int) -> None:
        super().__init__(network, vocab_size)
        self._length = 0
        self._allocate(CAPACITY)

    def rewind(self, count: int) -> None:
        """Forget the last `count` rows."""
        self._length -= count

    def _forget_rows(self) -> None:
        self._length = 0

    def _append(self, tokens: Tensor, features: Tensor) -> Tensor:
        count = tokens.shape[1]
        start, end = self._length, self._length + count
        if end > self._keys.shape[2]:
            keys, values = self._keys, self._values
            self._allocate(2 * end)
            self._keys[:, :, :start] = keys[:, :, :start]
            self._values[:, :, :start] = values[:, :, :start]
        angles = self._cosines[:, start:end], self._sines[:, start:end]
        row = self.network.project(tokens, features, angles)
        self._keys[:, :, start:end], self._values[:, :, start:end] = row.key, row.value
        mask, causal = None, start == 0 and count > 1
        if count > 1 and not causal:
            places = torch.arange(end, device=self.device)
            mask = places <= places[start:].unsqueeze(1)
        attended = F.scaled_dot_product_attention(
            row.query,
            self._keys[:, :, :end],
            self._values[:, :, :end],
            attn_mask=mask,
            is_causal=causal,
            enable_gqa=True,
        )
        self._length = end
        return self.network.finish(attended, row.residual)

    def _allocate(self, capacity: int) -> None:
        network, dtype = self.network, self.network.lm_head.weight.dtype
        kv_heads = network.midlayer.self_attn.k_proj.out_features // network.head_dim
        shape = (1, kv_heads, capacity, network.head_dim)
        self._keys = torch.zeros(shape, dtype=dtype, device=self.device)
        self._values = torch.zeros(shape, dtype=dtype, device=self.device)
        places = torch.arange(capacity, device=self.device).unsqueeze(0)
        with torch.no_grad():
            self._cosines, self._sines = network.angles(places)


# ---- reading -------------------------------------------------------------------------------------

# What it is, and the layouts of it that are read
EAGLE3 = (
    "an EAGLE-3 head",
    "SpecForge's (config.json with architectures [LlamaForCausalLMEagle3], tensors midlayer.*) and "
    "speculators' (speculators_model_type eagle3, tensors layers.0.*)",
)
EAGLE3_CLASS = re.compile("eagle-?3", re.IGNORECASE)
# What a config.json may ask for, as vLLM reads it, that is not computed here
UNREAD = ("norm_output", "norm_before_fc", "fc_norm")


@dataclass(frozen=True)
class _Layout:
    """What a head's config.json says.

    Attributes:
        name: of the layout.
        layer: the decoder layer's config.
        layers: of the target, whose inputs are read; None where it takes the usual ones.
        norm_before_residual: see `Eagle3Network`.
        vocabulary: of the target; None where it does not say.
        draft_vocabulary: tokens that it can draft; None where it is the target's vocabulary.
    """

    name: str
    layer: LlamaConfig
    layers: tuple[int, ...] | None
    norm_before_residual: bool
    vocabulary: int | None
    draft_vocabulary: int | None

    @property
    def shape(self) -> HeadArchitecture:
        """The sizes; of a target as wide as the layer, where the config names no other width."""
        layer = self.layer
        target_hidden = getattr(layer, "target_hidden_size", None) or layer.hidden_size
        return HeadArchitecture(
            layers=1,
            hidden=layer.hidden_size,
            heads=layer.num_attention_heads,
            kv_heads=layer.num_key_value_heads or layer.num_attention_heads,
            head_dim=layer.head_dim or layer.hidden_size // layer.num_attention_heads,
            ffn=layer.intermediate_size,
            vocab=self.draft_vocabulary or layer.vocab_size,
            tied=True,
            states=len(self.layers or range(STATES)) * target_hidden,
        )


def load_eagle3(conf: ModelConf, target: LoadedModel, key: str = "draft") -> LoadedHead:
    """Read the EAGLE-3 head that `conf` names, for this target, onto its device and in its dtype.

    Raises:
        UserError: it is no EAGLE-3 head in a known layout, incomplete, or for another target.
    """
    files = HeadFiles(conf, key, target, *EAGLE3)
    with explained(conf, key):
        layout = _layout(config_of(conf, key), files.where)
    network = _network(layout, _by_specforge(files.tensors()), files)
    facts = {
        "architecture": "EAGLE-3",
        "layout": layout.name,
        "draft_vocab": len(network.d2t),
        "norm_before_residual": network.norm_before_residual,
    }
    context_tokens = getattr(layout.layer, "max_position_embeddings", None)
    return files.loaded(network, facts, context_tokens)


def eagle3_shape(config: Mapping[str, Any], where: str) -> HeadArchitecture:
    """The sizes that a head's config.json says; errors call it `where`."""
    return _layout(config, where).shape


def _layout(config: Mapping[str, Any], where: str) -> _Layout:
    """Which layout it is, and what it says."""
    names = [str(name) for name in config.get("architectures") or ()]
    kind = str(config.get("speculators_model_type") or "")
    if kind != "eagle3" and (kind or not any(EAGLE3_CLASS.search(name) for name in names)):
        raise unknown_layout(where, *EAGLE3, found_in(config))
    of_eagle = config.get("eagle_config") or {}
    settings = {**config, **of_eagle}
    unread = [name for name in UNREAD if settings.get(name)]
    unread += ["logit_scale"] if settings.get("logit_scale", 1.0) != 1.0 else []
    if unread:
        raise UserError(
            f"{where}: an EAGLE-3 head with {', '.join(unread)}, which is not read here; give one "
            "without"
        )
    layers = _layer_ids(config.get("eagle_aux_hidden_state_layer_ids"), 0)
    if kind:
        layer = config.get("transformer_layer_config")
        if not isinstance(layer, Mapping):
            raise UserError(f"{where}: its config.json has no transformer_layer_config")
        return _Layout(
            "speculators",
            LlamaConfig(**layer),
            layers,
            bool(config.get("norm_before_residual", True)),
            layer.get("vocab_size"),
            config.get("draft_vocab_size"),
        )
    return _Layout(
        "specforge",
        LlamaConfig(**config),
        # As SGLang reads it, which counts the layers whose output it is
        layers or _layer_ids(of_eagle.get("eagle_aux_hidden_state_layer_ids"), 1),
        bool(config.get("norm_before_residual", False)),
        config.get("vocab_size"),
        config.get("draft_vocab_size"),
    )


def _layer_ids(given: Any, shift: int) -> tuple[int, ...] | None:
    # Whatever their order, engines take the states as the target computes them
    return tuple(sorted(int(layer) + shift for layer in given)) if given else None


def _by_specforge(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights by SpecForge's names."""
    return {
        re.sub(r"^(layers\.0\.)?", lambda m: "midlayer." if m[1] else "", name): tensor
        for name, tensor in tensors.items()
    }


def _network(layout: _Layout, tensors: dict[str, Tensor], files: HeadFiles) -> Eagle3Network:
    """The head, its weights filled in, after all that can be compared with the target."""
    config, vocabulary = files.target_config, files.target.vocab_size
    layers = layout.layers or default_layers(config.num_hidden_layers)
    if min(layers) < 0 or max(layers) >= config.num_hidden_layers or len(set(layers)) < len(layers):
        raise files.other_layers(layers, "" if layout.layers else " by default")
    files.check_width(tensors, layers)
    files.check_vocabulary(layout.vocabulary)
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if t2d is not None and len(t2d) != vocabulary:
        raise files.other_vocabulary(len(t2d))
    if d2t is None and "lm_head.weight" in tensors and len(tensors["lm_head.weight"]) != vocabulary:
        raise files.other_vocabulary(len(tensors["lm_head.weight"]))
    network = Eagle3Network(
        layout.layer,
        target_hidden=config.hidden_size,
        layers=layers,
        draft_vocabulary=vocabulary if d2t is None else len(d2t),
        vocabulary=vocabulary,
        norm_before_residual=layout.norm_before_residual,
    )
    shared: Any = files.target.network.get_input_embeddings()
    hidden = layout.layer.hidden_size
    own = files.own_matrix(tensors, "embed_tokens.weight", shared, vocabulary, hidden)
    network.embed_tokens = shared if own is None else nn.Embedding.from_pretrained(own)
    network.own_embedding = own is not None
    files.fill(network, tensors, given=("embed_tokens.",), optional=("d2t", "t2d"))
    files.check_ids(network.d2t + torch.arange(len(network.d2t)))
    return network

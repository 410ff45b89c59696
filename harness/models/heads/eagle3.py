"""An EAGLE-3 head: one decoder layer that drafts from three hidden states of its target.

Row t takes the embedding of token x[t + 1] and a feature, and gives an output [hidden], which is
the next row's feature and, through the last norm and the head's output matrix, the distribution of
x[t + 2]. The feature of a row that starts afresh is `fc` of the target's residual stream at t after
three of its layers. The layer's query, key and value take the normed embedding and the normed
feature side by side. The output is over a reduced vocabulary; `d2t` gives the distance of each of
its tokens to the target's id (Li et al. 2025, EAGLE-3; tensors and conventions as in SGLang's
SpecForge and vllm-project/speculators).

Two layouts are read. SpecForge's (SGLang) is a config of the layer itself with `architectures:
[LlamaForCausalLMEagle3]`, and tensors `midlayer.*`. That of vllm-project/speculators has
`speculators_model_type: eagle3`, the layer's config under `transformer_layer_config`, and tensors
`layers.0.*`. Without `lm_head` the target's output matrix serves, or the head's own embedding where
the two are tied (`llama_eagle3.py` of SGLang).

Layer ids may end with the last boundary: the output of the last layer, before the last norm (vLLM's
`EagleModelMixin`; sgl-project/sglang#32334 for nvidia/gpt-oss-120b-Eagle3-v3).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from harness.config import ModelConf
from harness.models.cached import LAST_OUTPUT
from harness.models.checkpoint import explained
from harness.models.heads.base import LoadedHead, in_target_ids
from harness.models.heads.decoder_layer import (
    Angles,
    Layer,
    LayerNetwork,
    Projected,
    shape_of_layer,
)
from harness.models.heads.files import HeadFiles, check_reads_states, found_in, unknown_layout
from harness.models.load import LoadedModel
from harness.records import UserError
from harness.theory.architecture import HeadArchitecture

# The number of the target's states that a head reads, in both training frameworks by default
STATES = 3


def default_layers(layers: int) -> tuple[int, ...]:
    """The target's layers whose inputs a head reads where its config names none."""
    return (2, layers // 2, layers - 3)


class _Layer(Layer):
    """The decoder layer, which reads a normed embedding and a normed feature."""

    def __init__(self, config: Any, head_dim: int) -> None:
        super().__init__(config, 2 * config.hidden_size, head_dim)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)


class Eagle3Network(LayerNetwork):
    """The head's weights and arithmetic; parameters are named as SpecForge names them.

    Attributes:
        norm_before_residual: whether the residual is the feature after `hidden_norm`.
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
        output: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """With this output, the target's given as its `__call__`, or a new matrix."""
        super().__init__(config, layers, len(layers) * target_hidden)
        self.norm_before_residual = norm_before_residual
        self.fc = nn.Linear(self.width, config.hidden_size, bias=False)
        self.midlayer = _Layer(config, self.head_dim)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head: Any = output or nn.Linear(config.hidden_size, draft_vocabulary, bias=False)
        self.register_buffer("d2t", torch.zeros(draft_vocabulary, dtype=torch.long))
        self.register_buffer("t2d", torch.ones(vocabulary, dtype=torch.bool))

    def project(self, tokens: Tensor, features: Tensor, angles: Angles) -> Projected:
        normed = self.midlayer.hidden_norm(features)
        embedded = self.midlayer.input_layernorm(self.embed_tokens(tokens))
        row = torch.cat([embedded, normed], dim=-1)
        return self.attended_by(row, normed if self.norm_before_residual else features, angles)

    def draft_logits(self, outputs: Tensor) -> Tensor:
        return self.lm_head(self.norm(outputs))

    def logits(self, outputs: Tensor, vocabulary: int, offset: int) -> Tensor:
        del offset
        ids = self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
        return in_target_ids(self.draft_logits(outputs), ids, vocabulary)

    def features(self, states: Tensor) -> Tensor:
        return self.fc(states.to(self.fc.weight.device, self.fc.weight.dtype))


# ---- reading -------------------------------------------------------------------------------------

# The kind of head, and its supported layouts, for errors
EAGLE3 = (
    "an EAGLE-3 head",
    "SpecForge's (config.json with architectures [LlamaForCausalLMEagle3], tensors midlayer.*) and "
    "speculators' (speculators_model_type eagle3, tensors layers.0.*)",
)
EAGLE3_CLASS = re.compile("eagle-?3", re.IGNORECASE)
# Settings that vLLM reads from a config.json, and that are not supported here
UNREAD = ("norm_output", "norm_before_fc", "fc_norm")


@dataclass(frozen=True)
class Layout:
    """The configuration of a head, from its config.json.

    Attributes:
        layers: the target's layers whose inputs are read, the number of layers being the output of
            the last; None: the default ones.
        of_outputs: whether `layers` were given as the layers whose outputs are read.
    """

    name: str
    layer: LlamaConfig
    layers: tuple[int, ...] | None
    of_outputs: bool
    norm_before_residual: bool
    vocabulary: int | None
    draft_vocabulary: int | None


def load_eagle3(conf: ModelConf, target: LoadedModel) -> LoadedHead:
    """Read an EAGLE-3 head; UserError: another layout, incomplete, or for another target."""
    files = HeadFiles(conf, target, *EAGLE3)
    with explained(conf):
        layout = _layout(files.config, files.where)
        network = filled(Eagle3Network, layout, by_specforge(files.tensors()), files)
        facts = {
            "architecture": "EAGLE-3",
            "layout": layout.name,
            "draft_vocab": len(network.d2t),
            "norm_before_residual": network.norm_before_residual,
        }
        context_tokens = getattr(layout.layer, "max_position_embeddings", None)
        return files.loaded(network, facts, context_tokens)


def eagle3_shape(config: Mapping[str, Any], where: str) -> HeadArchitecture:
    layout = _layout(config, where)
    layer = layout.layer
    # Of a target as wide as the layer, where the config names no other width
    target_hidden = getattr(layer, "target_hidden_size", None) or layer.hidden_size
    states = len(layout.layers or range(STATES)) * target_hidden
    return shape_of_layer(layer, layout.draft_vocabulary or layer.vocab_size, states)


def _layout(config: Mapping[str, Any], where: str) -> Layout:
    kind = config.get("speculators_model_type")
    if kind != "eagle3" and (kind or not is_specforge(config)):
        raise unknown_layout(where, *EAGLE3, found_in(config))
    return layout_of(config, where, "an EAGLE-3 head", norm_before_residual=bool(kind))


def is_specforge(config: Mapping[str, Any]) -> bool:
    return any(EAGLE3_CLASS.search(str(name)) for name in config.get("architectures") or ())


def layout_of(
    config: Mapping[str, Any], where: str, what: str, *, norm_before_residual: bool
) -> Layout:
    """The settings of a config.json in either layout; `where` and `what` name it in errors."""
    of_eagle = config.get("eagle_config") or {}
    settings = {**config, **of_eagle}
    check_reads_states(config, where, what)
    unread = [name for name in UNREAD if settings.get(name)]
    unread += ["logit_scale"] if settings.get("logit_scale", 1.0) != 1.0 else []
    if unread:
        raise UserError(
            f"{where}: {what} with {', '.join(unread)}, which is not read here; give one without"
        )
    layers, of_outputs = _layer_ids(config.get("eagle_aux_hidden_state_layer_ids"), 0), False
    normed = bool(config.get("norm_before_residual", norm_before_residual))
    if config.get("speculators_model_type"):
        name, layer = "speculators", config.get("transformer_layer_config")
        if not isinstance(layer, Mapping):
            raise UserError(f"{where}: its config.json has no transformer_layer_config")
    else:
        name, layer = "specforge", config
        # As in SGLang, whose numbers are those of the layers whose outputs are read
        if layers is None:
            layers = _layer_ids(of_eagle.get("eagle_aux_hidden_state_layer_ids"), 1)
            of_outputs = layers is not None
    vocabulary, drafted = layer.get("vocab_size"), config.get("draft_vocab_size")
    return Layout(name, LlamaConfig(**layer), layers, of_outputs, normed, vocabulary, drafted)


def _layer_ids(given: Any, shift: int) -> tuple[int, ...] | None:
    # Sorted, since engines take the states in the order in which the target computes them
    return tuple(sorted(int(layer) + shift for layer in given)) if given else None


def by_specforge(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights by SpecForge's names."""
    return {re.sub(r"^layers\.0\.", "midlayer.", name): t for name, t in tensors.items()}


def filled(
    kind: Callable[..., Any], layout: Layout, tensors: dict[str, Tensor], files: HeadFiles
) -> Any:
    config, vocabulary = files.target_config, files.target.vocab_size
    last = config.num_hidden_layers
    layers = layout.layers or default_layers(last)
    if layout.of_outputs and max(layers) == last + 1:
        # NVIDIA's gpt-oss heads number inputs there, too ([24, 30, 36] of 36 layers)
        layers = tuple(layer - 1 for layer in layers)
    files.check_layers(tensors, layers, "" if layout.layers else " by default")
    files.check_vocabulary(layout.vocabulary)
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if t2d is not None and len(t2d) != vocabulary:
        raise files.other_vocabulary(len(t2d))
    ids = None if d2t is None else files.check_ids(d2t + torch.arange(len(d2t)))
    no_matrix = ids is None and "lm_head.weight" not in tensors
    if no_matrix and layout.draft_vocabulary not in (None, layout.vocabulary, vocabulary):
        raise files.unknown_layout("it lacks d2t, lm_head.weight")
    hidden, tied = layout.layer.hidden_size, bool(layout.layer.tie_word_embeddings)
    embed, own_embedding, output = files.matrices(tensors, hidden, ids, tied=tied)
    network = kind(
        layout.layer,
        target_hidden=config.hidden_size,
        # As engines read it: before the last norm
        layers=[LAST_OUTPUT if layer == last else layer for layer in layers],
        draft_vocabulary=vocabulary if d2t is None else len(d2t),
        vocabulary=vocabulary,
        norm_before_residual=layout.norm_before_residual,
        output=output,
    )
    network.embed_tokens, network.own_embedding = embed, own_embedding
    files.fill(network, tensors, given=("embed_tokens.", "lm_head."), optional=("d2t", "t2d"))
    return network

"""An EAGLE head: one Llama layer that drafts from the final hidden state of its target.

Row t takes the embedding of token x[t + 1] and a feature, side by side through `fc`, and the layer,
which has no norm before its attention, gives an output [hidden]: the next row's feature, and
through the target's output matrix, without a last norm, the distribution of x[t + 2]. The feature
of a row that starts afresh is the target's hidden state at t after its last norm (Li et al. 2024,
EAGLE; `eagle/model/cnets1.py` of SafeAILab/EAGLE, and the same in vLLM's and SGLang's
`llama_eagle.py`). EAGLE-2 drafts a tree with the same checkpoints; a chain of K tokens is drafted
here, as vLLM does and SGLang at topk 1.

The layout that is read is SafeAILab's: config.json of a Llama of one layer, tensors `fc.*`,
`layers.0.*` and mostly a copy of the target's embedding, often in pytorch_model.bin alone, which
`draft.allow_pickle=true` reads. `fc` has a bias in some of them (vLLM's has none, and refuses
them), and the projections of heads for Qwen2 have one. SGLang's conversions have the same tensors
under `architectures: [LlamaForCausalLMEagle]`. Refused are heads of other layers (those of
DeepSeek, MiniCPM or Llama 4), HASS's with norms before `fc`, and the format that vllm-project/
speculators no longer writes (`speculators_model_type: eagle`).
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from harness.config import ModelConf
from harness.models.checkpoint import explained
from harness.models.heads.base import LoadedHead
from harness.models.heads.decoder_layer import (
    Angles,
    Layer,
    LayerNetwork,
    Projected,
    shape_of_layer,
)
from harness.models.heads.files import HeadFiles, found_in, unknown_layout
from harness.models.load import LoadedModel
from harness.records import UserError
from harness.theory.architecture import HeadArchitecture

EAGLE = (
    "an EAGLE head",
    "SafeAILab's and SGLang's (config.json of a Llama of one layer, tensors fc.* and layers.0.*)",
)
# `architectures` of heads whose layer is Llama's
LLAMA_LAYER = re.compile(r"(Eagle)?(Llama|Qwen2|Mixtral)ForCausalLM(Eagle)?$")


class EagleNetwork(LayerNetwork):
    """The head's weights and arithmetic; `output` is its output matrix, or the target's."""

    def __init__(
        self,
        config: LlamaConfig,
        *,
        target_layers: int,
        output: Callable[[Tensor], Tensor],
        fc_bias: bool,
        attention_bias: bool,
    ) -> None:
        """A module of the target is given as its `__call__`, so that it is no submodule."""
        hidden = config.hidden_size
        super().__init__(config, (target_layers,), hidden)
        self.fc = nn.Linear(2 * hidden, hidden, bias=fc_bias)
        self.midlayer = Layer(config, hidden, self.head_dim, bias=attention_bias)
        self.output = output

    def project(self, tokens: Tensor, features: Tensor, angles: Angles) -> Projected:
        row = self.fc(torch.cat([self.embed_tokens(tokens), features], dim=-1))
        return self.attended_by(row, row, angles)

    def logits(self, outputs: Tensor, vocabulary: int, offset: int) -> Tensor:
        del offset
        return self.output(outputs)[..., :vocabulary]


# ---- reading -------------------------------------------------------------------------------------


def load_eagle(conf: ModelConf, target: LoadedModel) -> LoadedHead:
    """Read an EAGLE head; UserError: another layout, incomplete, or for another target."""
    files = HeadFiles(conf, target, *EAGLE)
    with explained(conf):
        config = _config(files.config, files.where)
        tensors = {
            name.replace("layers.0.", "midlayer.", 1): tensor
            for name, tensor in files.tensors().items()
        }
        fc = tensors.get("fc.weight")
        if fc is not None and fc.shape[1] == 3 * files.target_config.hidden_size:
            raise UserError(
                f"{files.where}: its fc takes three hidden states, as an EAGLE-3 head's; give"
                f" {conf.keys.of('kind', 'eagle3')}"
            )
        network = _network(config, tensors, files)
        facts = {
            "architecture": "EAGLE",
            "layout": "SafeAILab",
            "fc_bias": network.fc.bias is not None,
        }
        return files.loaded(network, facts, config.max_position_embeddings)


def eagle_shape(config: Mapping[str, Any], where: str) -> HeadArchitecture:
    layer = _config(config, where)
    return shape_of_layer(layer, layer.vocab_size, layer.hidden_size)


def _config(config: Mapping[str, Any], where: str) -> LlamaConfig:
    names = [str(name) for name in config.get("architectures") or ()]
    of_llama = names and all(LLAMA_LAYER.match(name) for name in names)
    if config.get("speculators_model_type") or not of_llama:
        raise unknown_layout(where, *EAGLE, found_in(config))
    if config.get("num_hidden_layers") != 1:
        raise unknown_layout(
            where, *EAGLE, f"its config.json has {config.get('num_hidden_layers')} layers"
        )
    return LlamaConfig(**config)


def _network(config: LlamaConfig, tensors: dict[str, Tensor], files: HeadFiles) -> EagleNetwork:
    hidden = config.hidden_size
    if hidden != files.target_config.hidden_size:
        raise files.other_target(
            f"it has a hidden size of {hidden}, and {files.target_name} one of"
            f" {files.target_config.hidden_size}"
        )
    files.check_vocabulary(config.vocab_size)
    embed, own_embedding, output = files.matrices(tensors, hidden)
    network = EagleNetwork(
        config,
        target_layers=files.target_config.num_hidden_layers,
        output=output,
        fc_bias="fc.bias" in tensors,
        attention_bias="midlayer.self_attn.q_proj.bias" in tensors,
    )
    network.embed_tokens, network.own_embedding = embed, own_embedding
    files.fill(network, tensors, given=("embed_tokens.", "output."))
    return network

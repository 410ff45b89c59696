"""Medusa heads: each drafts one further token from the target's last hidden state alone.

Head j reads h[t], what enters the target's output head for token x[t], and predicts x[t + 2 + j];
the target itself predicts x[t + 1] from it. So no draft depends on another, nor on x[t + 1]. A head
is residual blocks, h + silu(W h + b), then a matrix onto the vocabulary (Cai et al. 2024, Medusa,
section 2.1; `medusa/model/medusa_model.py` of FasterDecoding/Medusa, where training shifts the
labels of head j by 2 + j: `medusa/train/train_legacy.py`). The paper verifies a tree of the heads'
best tokens; here, as in vLLM's `v1/spec_decode/medusa.py`, it is a chain of one token per head.

Two layouts are published, told by the names of their tensors:

- FasterDecoding's: config.json has `medusa_num_heads`, and medusa_lm_head.pt (or .safetensors, as
  text-generation-inference wants it) has `{head}.{layer}.linear.weight` and `.bias`, then
  `{head}.{layers}.weight`. Names may begin with `medusa_heads.` (NVIDIA's ModelOpt). Some of its
  configs give another number of heads than the file has, so the tensors are counted.
- vLLM's (`model_executor/models/medusa.py`): `model_type: medusa`, model.safetensors with
  `blocks.{head}.layers.{layer}.weight` and `lm_heads.{head}.weight`. With `original_lm_head` one
  matrix, `lm_head.weight` or `lm_heads.0.weight`, serves all heads, or the target's where there is
  none; with `token_map` they draft these tokens alone, the rows of the others being there or not.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.config import ModelConf
from harness.models.checkpoint import explained
from harness.models.heads.base import BlockHead, HeadNetwork, LoadedHead, in_target_ids
from harness.models.heads.files import HeadFiles, is_of
from harness.models.load import LoadedModel

MEDUSA_FILES = ("medusa_lm_head.safetensors", "model.safetensors")
MEDUSA_PICKLES = ("medusa_lm_head.pt", "pytorch_model.bin")
MEDUSA = (
    "Medusa heads",
    "FasterDecoding's (medusa_num_heads, tensors 0.0.linear.weight) and vLLM's (model_type medusa, "
    "tensors blocks.0.layers.0.weight)",
)


class _Residual(nn.Module):
    def __init__(self, hidden: int, depth: int, *, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden, bias) for _ in range(depth))

    def forward(self, state: Tensor) -> Tensor:
        for layer in self.layers:
            state = state + F.silu(layer(state))
        return state


class MedusaNetwork(HeadNetwork):
    """The heads' weights and arithmetic; parameters are named as in vLLM's layout.

    Attributes:
        layers: that after the target's last one, for the input of its output head.
        token_map: [draft vocabulary] the target's ids of the tokens that it can draft; None: all.
    """

    token_map: Tensor | None

    def __init__(
        self,
        *,
        heads: int,
        depth: int,
        hidden: int,
        target_layers: int,
        draft_vocabulary: int,
        token_map: Tensor | None = None,
        bias: bool = True,
        one_output: bool = False,
        of_target: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Heads of `depth` residual blocks; one vocabulary matrix for all, or one for each.

        The target's matrix is given as its module's `__call__`, so that it is no submodule.
        """
        super().__init__()
        self.layers, self.drafts, self.width = (target_layers,), heads, hidden
        self.blocks = nn.ModuleList(_Residual(hidden, depth, bias=bias) for _ in range(heads))
        outputs = [nn.Linear(hidden, draft_vocabulary, bias=False)] * heads
        if not one_output:
            outputs = [nn.Linear(hidden, draft_vocabulary, bias=False) for _ in range(heads)]
        self.lm_heads: Any = [of_target] * heads if of_target else nn.ModuleList(outputs)
        self.register_buffer("token_map", token_map, persistent=False)

    def with_cache(self, vocab_size: int) -> "MedusaHead":
        return MedusaHead(self, vocab_size)

    def passes(self, tokens: Tensor, states: Tensor, depth: int, first: int = 0) -> list[Tensor]:
        del tokens
        features, count = self.features(states), states.shape[1]
        offsets = range(min(depth, self.drafts, count - first))
        return [self.blocks[offset](features[:, first : count - offset]) for offset in offsets]

    def logits(self, outputs: Tensor, vocabulary: int, offset: int) -> Tensor:
        return in_target_ids(self.lm_heads[offset](outputs), self.token_map, vocabulary)


class MedusaHead(BlockHead):
    """The heads for the loop; their context is the state of one token."""

    network: MedusaNetwork

    def __init__(self, network: MedusaNetwork, vocab_size: int) -> None:
        super().__init__(network, vocab_size, network.drafts)
        self._state = network.features(torch.zeros(1, network.width))

    def _read(self, features: Tensor) -> None:
        self._state = features[-1:]

    def _draft(self, offset: int, token: Tensor) -> Tensor:
        del token
        outputs = self.network.blocks[offset](self._state)
        return self.network.logits(outputs, self.vocab_size, offset)


# ---- reading -------------------------------------------------------------------------------------


def load_medusa(conf: ModelConf, target: LoadedModel) -> LoadedHead:
    """Read Medusa heads; UserError: another layout, incomplete, or for another target."""
    with explained(conf):
        files = HeadFiles(conf, target, *MEDUSA)
        tensors = files.tensors(MEDUSA_FILES, MEDUSA_PICKLES)
        layout = "vllm" if is_of(files.config, "medusa") else "fasterdecoding"
        if layout != "vllm" and "medusa_num_heads" not in files.config:
            raise files.unknown_layout()
        network = _medusa(_medusa_names(tensors), files)
        facts = {"architecture": "Medusa", "layout": layout, "heads": network.drafts}
        return files.loaded(network, facts, None)


def _medusa_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        known = re.sub(r"^medusa_heads?\.", "", name)
        known = re.sub(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$", r"blocks.\1.layers.\2.\3", known)
        renamed[re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", known)] = tensor
    return renamed


def _medusa(tensors: dict[str, Tensor], files: HeadFiles) -> MedusaNetwork:
    config = files.config
    places = [re.match(r"blocks\.(\d+)\.layers\.(\d+)\.", name) for name in tensors]
    found = [(int(match[1]), int(match[2])) for match in places if match]
    heads = 1 + max((head for head, _ in found), default=0)
    one = tensors.pop("lm_head.weight", None)
    if one is None and config.get("original_lm_head"):
        one = tensors.get("lm_heads.0.weight")
    if one is not None:
        tensors |= {f"lm_heads.{head}.weight": one for head in range(heads)}
    output, token_map = tensors.get("lm_heads.0.weight"), tensors.pop("token_map", None)
    shared: Any = None
    if output is None and token_map is None and config.get("original_lm_head"):
        shared = files.target.network.get_output_embeddings()
        output = shared.weight[: files.target.vocab_size]
    if not found or output is None or config.get("logit_scale", 1.0) != 1.0:
        raise files.unknown_layout()
    hidden = files.target_config.hidden_size
    if output.shape[1] != hidden:
        raise files.other_target(
            f"they take hidden states of {output.shape[1]}, and {files.target_name} has a hidden "
            f"size of {hidden}"
        )
    if token_map is None and len(output) != files.target.vocab_size:
        raise files.other_vocabulary(len(output))
    if token_map is not None and len(output) > len(files.check_ids(token_map)):
        # The rows of tokens that are not drafted are left out
        tensors |= {
            name: tensor[token_map]
            for name, tensor in tensors.items()
            if name.startswith("lm_heads.")
        }
    network = MedusaNetwork(
        heads=heads,
        depth=1 + max(layer for _, layer in found),
        hidden=hidden,
        target_layers=files.target_config.num_hidden_layers,
        draft_vocabulary=len(output) if token_map is None else len(token_map),
        token_map=token_map,
        bias=any(name.endswith(".bias") for name in tensors),
        one_output=one is not None,
        of_target=None if shared is None else shared.__call__,
    )
    files.fill(network, tensors)
    return network

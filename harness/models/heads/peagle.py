"""A P-EAGLE head: an EAGLE-3 head of some layers that drafts a block in one pass.

The first draft is an EAGLE-3 head's. Each further row, which there takes the token and the output
of the row before, takes a mask token and a learned state, `mask_hidden`, in place of the target's
states. So all rows of a round are one pass, and none depends on what is drafted; attention stays
causal, so that the first drafts are the same at every K. The layers after the first are plain
Llama layers (Hui et al. 2026, P-EAGLE; `src/speculators/models/peagle` of vllm-project/speculators;
vLLM's `model_executor/models/llama_eagle3.py` with `parallel_drafting`).

Two layouts are read: speculators' (`speculators_model_type: peagle`, `mask_token_id`), and
SpecForge's EAGLE-3 layout with a mask token (`ptd_token_id`, `pard_token` or `mask_token_id`). Both
have tensors of an EAGLE-3 head, `layers.1.*` and on, and `mask_hidden`. A round drafts at most
`draft.block` tokens, or the config's `speculative_tokens`, or 8, the default of the training.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from harness.config import ModelConf
from harness.models.checkpoint import explained
from harness.models.heads.base import LoadedHead, MaskHead
from harness.models.heads.decoder_layer import Layer, LayerHead, Projected, attend_from_every_start
from harness.models.heads.eagle3 import Eagle3Network, by_specforge, filled, is_specforge, layout_of
from harness.models.heads.files import HeadFiles
from harness.models.load import LoadedModel
from harness.records import UserError

PEAGLE = (
    "a P-EAGLE head",
    "speculators' (speculators_model_type peagle) and SpecForge's EAGLE-3 layout with a mask token "
    "(ptd_token_id, pard_token or mask_token_id)",
)
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
DRAFTS = 8


class PeagleNetwork(Eagle3Network):
    """The head's weights and arithmetic; it drafts at most `drafts` tokens from a start."""

    def __init__(self, config: LlamaConfig, *, mask_token: int, drafts: int, **parts: Any) -> None:
        super().__init__(config, **parts)
        self.mask_token, self.drafts = mask_token, drafts
        for _ in range(1, config.num_hidden_layers):
            layer = Layer(config, config.hidden_size, self.head_dim)
            layer.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.more.append(layer)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, self.width))
        self.cached_numbers *= config.num_hidden_layers

    def with_cache(self, vocab_size: int) -> "PeagleHead":
        return PeagleHead(self, vocab_size)

    def masks(self, count: int) -> tuple[Tensor, Tensor]:
        """The tokens [1, n] and features [1, n, hidden] of rows of masks."""
        features = self.features(self.mask_hidden)
        tokens = torch.full((1, count), self.mask_token, device=features.device)
        return tokens, features.expand(1, count, -1)

    def passes(self, tokens: Tensor, states: Tensor, depth: int, first: int = 0) -> list[Tensor]:
        """Layer by layer, the rows of the text and of each pass run from all starts. B is 1."""
        count, features = states.shape[1], self.features(states)
        depth = min(depth, self.drafts, count - first)
        places = torch.arange(count, device=features.device).unsqueeze(0)
        angles = [
            self.angles(places),
            *(self.angles(places[:, first:] + n) for n in range(1, depth)),
        ]
        rows = [self.project(tokens[:, 1:].to(features.device), features, angles[0])]
        rows += [self.project(*self.masks(count - first), each) for each in angles[1:]]
        hidden: list[Tensor] = []
        for index, layer in enumerate((self.midlayer, *self.more)):
            if index:
                rows = [self.next_layer(layer, *each) for each in zip(hidden, angles, strict=True)]
            hidden = self._attended(layer, rows, first)
        return [
            hidden[0][:, first:],
            *(h[:, : count - first - n] for n, h in enumerate(hidden) if n),
        ]

    def _attended(self, layer: Any, rows: list[Projected], first: int) -> list[Tensor]:
        """A layer's outputs of the text's rows, and of each pass from all starts."""
        text, *passes = rows
        chain = [(each.key, each.value) for each in passes]
        outputs = [attend_from_every_start(text.query, text.key, text.value, [], 0)]
        outputs += [
            attend_from_every_start(each.query, text.key, text.value, chain[:number], first)
            for number, each in enumerate(passes, start=1)
        ]
        return [
            self.finish(each, row.residual, layer) for each, row in zip(outputs, rows, strict=True)
        ]


class PeagleHead(MaskHead, LayerHead):
    """The head for the loop."""

    def __init__(self, network: PeagleNetwork, vocab_size: int) -> None:
        super().__init__(network, vocab_size)
        self.drafts = network.drafts

    def _clear(self) -> None:
        MaskHead._clear(self)
        LayerHead._clear(self)

    def _round(self, tokens: Tensor, rows: int) -> Tensor:
        network, features = self.network, self._features
        assert isinstance(network, PeagleNetwork)
        tokens = tokens.to(self.device).unsqueeze(0)
        masks, without_states = network.masks(rows - 1)
        if features is None:  # only in timing
            features = network.masks(tokens.shape[1])[1]
        outputs = self._append(
            torch.cat([tokens, masks], dim=1), torch.cat([features, without_states], dim=1)
        )
        self._features = None
        self._cache.length -= masks.shape[1]
        return network.logits(outputs[0, -rows:], self.vocab_size, 0)


# ---- reading -------------------------------------------------------------------------------------


def load_peagle(conf: ModelConf, target: LoadedModel) -> LoadedHead:
    """Read a P-EAGLE head; UserError: another layout, incomplete, or for another target."""
    files = HeadFiles(conf, target, *PEAGLE)
    with explained(conf):
        config = files.config
        kind = config.get("speculators_model_type")
        mask_token = next(
            (config[name] for name in MASK_TOKENS if config.get(name) is not None), None
        )
        if kind != "peagle" and (kind or mask_token is None or not is_specforge(config)):
            raise files.unknown_layout()
        if mask_token is None:
            raise UserError(f"{files.where}: its config.json has no mask_token_id")
        layout = layout_of(config, files.where, PEAGLE[0], norm_before_residual=False)
        methods = (config.get("speculators_config") or {}).get("proposal_methods") or ()
        stated = (each.get("speculative_tokens") for each in methods)
        trained = next((int(value) for value in stated if value is not None), None)
        drafts = conf.block or trained or DRAFTS
        mask_token = files.check_mask_token(int(mask_token))
        tensors: dict[str, Tensor] = {}
        for name, tensor in by_specforge(files.tensors()).items():
            part, _, rest = name.removeprefix("layers.").partition(".")
            later = name.startswith("layers.") and part.isdigit()
            tensors[f"more.{int(part) - 1}.{rest}" if later else name] = tensor
        if "mask_hidden" in tensors:
            tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
        made = partial(PeagleNetwork, mask_token=mask_token, drafts=drafts)
        network = filled(made, layout, tensors, files)
        facts = {"architecture": "P-EAGLE", "layout": layout.name, "draft_vocab": len(network.d2t)}
        return files.loaded(network, facts, getattr(layout.layer, "max_position_embeddings", None))

"""A DSpark drafter: a DFlash drafter whose drafts of a block depend on those before them.

One pass fills the block as DFlash's does (`harness.models.heads.dflash`). Then tokens are drafted
one after the other: the logits of a position get a bias from the token before it, which is the
text's last for the first and a drafted one for the others. The bias is of a low rank r: `markov_w2`
of a vector [r], which for a `vanilla` Markov head is `markov_w1` of that token; a `gated` one gates
it by the position's hidden state; an `rnn` one carries a state along the block. Unless
`sample_from_anchor` says otherwise every position of the block drafts the token after it, the first
one too, which holds the text's last token: a block of B positions drafts B tokens (DeepSeek 2026,
DSpark; `deepspec/modeling/dspark` and `deepspec/eval/dspark/draft_ops.py` of deepseek-ai/DeepSpec;
`specforge/modeling/draft/dspark.py` of SGLang's SpecForge; `src/speculators/models/dspark/core.py`
of vllm-project/speculators). Its confidence head, by which engines draft fewer tokens, is not read.

While drafts are accepted the tokens before them are the text's, so one pass scores all drafts from
a start, as for DFlash; an output here is a hidden state with the vector that `markov_w2` takes.

Two layouts are read:

- DeepSpec's, and SpecForge's: config.json of Qwen3 layers with `architectures: [Qwen3DSparkModel]`
  or `[DSparkDraftModel]`, and `block_size`, `mask_token_id`, `target_layer_ids`, `markov_rank` and
  `markov_head_type`, or these in `dflash_config` or `dspark_config`.
- speculators': `speculators_model_type: dspark`, as of DFlash drafters.

Drafters of other layers than Qwen3's are refused (Gemma 4's, and those in DeepSeek-V4's own
checkpoint).
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from harness.config import ModelConf
from harness.models.checkpoint import explained
from harness.models.heads.base import LoadedHead, in_target_ids
from harness.models.heads.dflash import Block, DFlashHead, DFlashNetwork, block_of, filled
from harness.models.heads.files import HeadFiles, check_reads_states
from harness.models.load import LoadedModel
from harness.records import UserError

DSPARK = (
    "a DSpark drafter",
    "DeepSpec's and SpecForge's (architectures [Qwen3DSparkModel] or [DSparkDraftModel] of the "
    "model type qwen3) and speculators' (speculators_model_type dspark)",
)
ARCHITECTURES = re.compile(r"(Qwen3DSparkModel|DSparkDraftModel)$")
MARKOV_HEADS = ("vanilla", "gated", "rnn")
# Sections of a config.json that may contain the settings of the block and its heads
NESTED = ("dflash_config", "dspark_config")
# Entries besides those of the block; others in dflash_config or dspark_config are not read
KNOWN = frozenset(
    {"markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"}
)


class MarkovHead(nn.Module):
    """A Markov head: the logits that a token adds at the next position."""

    def __init__(self, kind: str, rank: int, hidden: int, tokens: int, drafted: int) -> None:
        """For `tokens` of the target, of which `drafted` can be drafted; `kind` of MARKOV_HEADS."""
        super().__init__()
        self.kind, self.rank = kind, rank
        self.markov_w1 = nn.Embedding(tokens, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(hidden + 2 * rank, 3 * rank)

    def forward(self, token: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The input of `markov_w2` [n, rank], and the state [n, rank] for the next position.

        `token` [n] is the one before the position, `hidden` [n, hidden] its own after the last
        norm, `state` that of the position before; None at the first.
        """
        before = self.markov_w1(token)
        state = torch.zeros_like(before) if state is None else state
        if self.kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, before], dim=-1)))
            return gate * before, state
        if self.kind == "rnn":
            joint = self.joint_proj(torch.cat([state, before, hidden], dim=-1))
            gate, candidate, output = joint.chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            return torch.tanh(output), gate * state + (1.0 - gate) * torch.tanh(candidate)
        return before, state


class DSparkNetwork(DFlashNetwork):
    """The drafter's weights; without a Markov head, drafts do not depend on each other."""

    def __init__(
        self, config: Qwen3Config, *, markov_head: MarkovHead | None = None, **parts: Any
    ) -> None:
        super().__init__(config, **parts)
        self.markov_head = markov_head

    def with_cache(self, vocab_size: int) -> "DSparkHead":
        return DSparkHead(self, vocab_size)

    def passes(self, tokens: Tensor, states: Tensor, depth: int, first: int = 0) -> list[Tensor]:
        """The outputs of a DFlash drafter, each with the input of `markov_w2`."""
        outputs, state = super().passes(tokens, states, depth, first), None
        for offset, rows in enumerate(outputs):
            count = rows.shape[1]
            before = tokens[0, first + 1 + offset :][:count].to(rows.device)
            outputs[offset], state = self.biased(rows[0], before, state)
            outputs[offset] = outputs[offset].unsqueeze(0)
            state = None if state is None else state[: count - 1]
        return outputs

    def biased(
        self, rows: Tensor, before: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The outputs [n, hidden] of a position with the input of `markov_w2`; the next state."""
        if self.markov_head is None:
            return rows, None
        bias, state = self.markov_head(before, self.norm(rows), state)
        return torch.cat([rows, bias], dim=-1), state

    def logits(self, outputs: Tensor, vocabulary: int, offset: int) -> Tensor:
        """Logits [..., vocabulary] of outputs [..., hidden (+ rank)], in the target's ids."""
        if self.markov_head is None:
            return super().logits(outputs, vocabulary, offset)
        rank = self.markov_head.rank
        rows, bias = outputs[..., :-rank], outputs[..., -rank:]
        logits = self.output(self.norm(rows)) + self.markov_head.markov_w2(bias)
        return in_target_ids(logits, self.ids, vocabulary)


class DSparkHead(DFlashHead):
    """The drafter with a cache of the context of one text, for the loop."""

    # Of the round: the block's outputs [drafts, hidden], and the Markov head's state [1, rank]
    _outputs: Tensor | None = None
    _state: Tensor | None = None

    def _draft(self, offset: int, token: Tensor) -> Tensor:
        if offset == 0:
            self._outputs, self._state = self._block(token)[0], None
        network, outputs = self.network, self._outputs
        assert isinstance(network, DSparkNetwork)
        assert outputs is not None
        rows, before = outputs[offset : offset + 1], token.to(self.device)
        rows, self._state = network.biased(rows, before, self._state)
        return network.logits(rows, self.vocab_size, offset)


# ---- reading -------------------------------------------------------------------------------------


def load_dspark(conf: ModelConf, target: LoadedModel) -> LoadedHead:
    """Read a DSpark drafter; UserError: another layout, incomplete, or for another target."""
    files = HeadFiles(conf, target, *DSPARK)
    with explained(conf):
        check_reads_states(files.config, files.where, files.kind)
        nested = [files.config.get(name) or {} for name in NESTED]
        settings = {**files.config, **nested[0], **nested[1]}
        block = _block_config(nested, settings, files)
        rank, kind = int(settings.get("markov_rank") or 0), settings.get("markov_head_type")
        if rank and kind not in MARKOV_HEADS:
            raise UserError(
                f"{files.where}: a Markov head of the type {kind}, which is not read here; read "
                f"are {', '.join(MARKOV_HEADS)}"
            )
        tensors = {
            name: tensor
            for name, tensor in files.tensors().items()
            if not name.startswith("confidence_head.")
        }
        d2t, hidden, tokens = tensors.get("d2t"), block.layer.hidden_size, files.target.vocab_size
        drafted = tokens if d2t is None else len(d2t)
        markov = MarkovHead(str(kind), rank, hidden, tokens, drafted) if rank else None
        network = filled(partial(DSparkNetwork, markov_head=markov), block, tensors, files)
        facts = {"architecture": "DSpark", "layout": block.layout, "block": block.block}
        facts |= {"markov_head": kind if rank else None}
        return files.loaded(network, facts, block.layer.max_position_embeddings)


def _block_config(
    nested: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], files: HeadFiles
) -> Block:
    config, kind = files.config, files.config.get("speculators_model_type")
    asked = {
        name: value
        for part in nested
        for name, value in part.items()
        if name not in KNOWN and (name, value) != ("projector_type", "dspark")
    }
    names = [str(name) for name in config.get("architectures") or ()]
    of_qwen3 = config.get("model_type") == "qwen3" and any(map(ARCHITECTURES.match, names))
    if kind not in (None, "", "dspark") or not (kind or of_qwen3):
        raise files.unknown_layout()
    if not kind:
        asked.pop("sample_from_anchor", None)
    first = 0 if settings.get("sample_from_anchor", True) else 1
    return block_of("deepspec", settings, asked, files, first)

"""A DFlash drafter: a small transformer that fills a block of masked positions in one pass.

It reads the target's residual stream after some of its layers, side by side: `fc` and a norm turn a
token's states into one context vector, from which every layer takes a key and a value. The block
after a text x[0 .. t + 1] is the embedding of x[t + 1], at position t + 1, then of mask tokens.
Its positions attend to the context of x[0 .. t] (the target has not read x[t + 1] yet) and to all
of the block, in both directions. Position t + 2 + j of the block's output, through the last norm
and an output matrix, is the distribution of x[t + 2 + j]. So a block of B positions drafts B - 1
tokens in one pass, and none depends on another (Chen et al. 2026, DFlash, arXiv 2602.06036;
`dflash/model.py` of z-lab/dflash; `specforge/modeling/draft/dflash.py` of SGLang's SpecForge;
`src/speculators/models/dflash/core.py` of vllm-project/speculators). The layers are Qwen3's.

The block has the same length at every K: `draft.block`, or by default that of the training. A round
of fewer drafts takes the first of them, as in z-lab's code and transformers'
`DFlashTokenCandidateGenerator`. Acceptance then depends on start and offset alone, and one scoring
serves every K. vLLM (`v1/spec_decode/dflash.py`), SGLang
(`speculative/dflash_worker_v2.py`) and llama.cpp (`common/speculative.cpp`) fill K + 1 positions:
the same at K = B - 1.

Two layouts are read:

- z-lab's, and SpecForge's: config.json of Qwen3 layers with `architectures: [DFlashDraftModel]`,
  `block_size`, and `dflash_config` with `mask_token_id` and `target_layer_ids`, the layers whose
  output is read. The embedding and the output matrix are the target's.
- speculators' (`src/speculators/models/dflash/config.py`): `speculators_model_type: dflash`, the
  layers' config under `transformer_layer_config`, `aux_hidden_state_layer_ids`, the layers whose
  input is read, and an embedding and output matrix of its own, over the tokens of `d2t` and `t2d`.

Drafters with a sliding window are not read: engines differ in the positions of a block that it
hides (vLLM is causal there, transformers is not).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    repeat_kv,
    rotate_half,
)

from harness.config import ModelConf
from harness.models.checkpoint import explained
from harness.models.heads.base import BlockHead, HeadNetwork, LoadedHead, in_target_ids
from harness.models.heads.decoder_layer import Angles, LayerCache
from harness.models.heads.files import HeadFiles, check_reads_states, is_of
from harness.models.load import LoadedModel
from harness.records import UserError

# Positions of blocks in memory at a time, when the starts of a text are scored
QUERIES = 512


class KeysValues(NamedTuple):
    """Keys and values of one layer, each [B, KV heads, n, D]."""

    keys: Tensor
    values: Tensor


# (queries [B, heads, n, D], the block's own keys and values) -> the attention's output, of the
# queries' shape
Attend = Callable[[Tensor, KeysValues], Tensor]


def _rotated(rows: Tensor, angles: Angles) -> Tensor:
    """Rows [B, heads, n, D] rotated by cosines and sines [B or 1, n, D]."""
    cos, sin = angles
    return rows * cos.unsqueeze(1) + rotate_half(rows) * sin.unsqueeze(1)


def _keys_values(attention: Any, rows: Tensor, angles: Angles) -> KeysValues:
    """A layer's keys and values of rows [B, n, hidden], of the context or of the block."""
    keys = _rotated(attention.k_norm(_by_head(attention.k_proj, rows, attention)), angles)
    return KeysValues(keys, _by_head(attention.v_proj, rows, attention))


def _by_head(project: Any, rows: Tensor, attention: Any) -> Tensor:
    """Projected rows, [B, heads, n, D]."""
    return project(rows).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)


def _layer_output(layer: Any, hidden: Tensor, angles: Angles, attend: Attend) -> Tensor:
    """The outputs [B, n, hidden] of one of Qwen3's layers, with another attention."""
    rows, attention = layer.input_layernorm(hidden), layer.self_attn
    query = _rotated(attention.q_norm(_by_head(attention.q_proj, rows, attention)), angles)
    attended = attend(query, _keys_values(attention, rows, angles))
    hidden = hidden + attention.o_proj(attended.transpose(1, 2).flatten(2))
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


class DFlashNetwork(HeadNetwork):
    """The drafter's weights and arithmetic.

    Attributes:
        block, first: positions of a block, with the text's last token; the first that drafts.
        embed, output: its embedding and its output matrix, or the target's.
        ids: [draft vocabulary] the target's ids of the tokens that it can draft; None: all.
    """

    ids: Tensor | None

    def __init__(
        self,
        config: Qwen3Config,
        *,
        target_hidden: int,
        layers: Sequence[int],
        block: int,
        mask_token: int,
        embed: Callable[[Tensor], Tensor],
        output: Callable[[Tensor], Tensor],
        ids: Tensor | None = None,
        first: int = 1,
    ) -> None:
        """Modules of the target are given as their `__call__`, so that they are no submodules."""
        super().__init__()
        self.config, self.layers = config, tuple(layers)
        self.block, self.first, self.mask_token = block, first, mask_token
        self.drafts = block - first
        self.width = len(self.layers) * target_hidden
        hidden, eps = config.hidden_size, config.rms_norm_eps
        config.head_dim = config.head_dim or hidden // config.num_attention_heads
        self.head_dim: int = config.head_dim
        self.fc = nn.Linear(self.width, hidden, bias=False)
        self.hidden_norm, self.norm = Qwen3RMSNorm(hidden, eps), Qwen3RMSNorm(hidden, eps)
        self.body = nn.ModuleList(
            Qwen3DecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.kv_heads: int = config.num_key_value_heads or config.num_attention_heads
        self.cached_numbers = 2 * config.num_hidden_layers * self.kv_heads * self.head_dim
        self.embed, self.output = embed, output
        self.register_buffer("ids", ids, persistent=False)
        self._rotary = Qwen3RotaryEmbedding(config)

    def with_cache(self, vocab_size: int) -> "DFlashHead":
        return DFlashHead(self, vocab_size)

    def features(self, states: Tensor) -> Tensor:
        weight = self.fc.weight
        return self.hidden_norm(self.fc(states.to(weight.device, weight.dtype)))

    def angles(self, positions: Tensor) -> Angles:
        """Cosines and sines [B, n, D] of positions [B, n]."""
        return self._rotary(self.norm.weight, positions)

    def context(self, features: Tensor, angles: Angles) -> list[KeysValues]:
        """Keys and values of each layer from context vectors [B, n, hidden]."""
        layers: list[Any] = list(self.body)
        return [_keys_values(layer.self_attn, features, angles) for layer in layers]

    def blocks(self, tokens: Tensor, angles: Angles, attend: Sequence[Attend]) -> Tensor:
        """The outputs [B, drafts, hidden] of blocks behind the last tokens [B] of texts.

        `angles` [B or 1, block, D] are of the positions, `attend` the attention of each layer.
        """
        masks = tokens.new_full((len(tokens), self.block - 1), self.mask_token)
        hidden = self.embed(torch.cat([tokens.unsqueeze(1), masks], dim=1))
        for layer, attended in zip(self.body, attend, strict=True):
            hidden = _layer_output(layer, hidden, angles, attended)
        return hidden[:, self.first :]

    def passes(self, tokens: Tensor, states: Tensor, depth: int, first: int = 0) -> list[Tensor]:
        """The blocks of many starts are one batch, each with the context up to its own. B is 1."""
        device, count = self.fc.weight.device, states.shape[1]
        places, own = torch.arange(count, device=device), torch.arange(self.block, device=device)
        context = self.context(self.features(states), self.angles(places.unsqueeze(0)))
        last = tokens[0, 1:].to(device)
        parts: list[Tensor] = []
        for starts in places[first:].split(max(1, QUERIES // self.block)):
            seen = places <= starts.unsqueeze(1)
            parts.append(
                self.blocks(
                    last[starts],
                    self.angles(starts.unsqueeze(1) + 1 + own),
                    [partial(_attend_up_to, seen=seen, context=layer) for layer in context],
                )
            )
        rows = torch.cat(parts)
        offsets = range(min(depth, self.drafts, count - first))
        return [rows[: count - first - offset, offset].unsqueeze(0) for offset in offsets]

    def logits(self, outputs: Tensor, vocabulary: int, offset: int) -> Tensor:
        del offset
        return in_target_ids(self.output(self.norm(outputs)), self.ids, vocabulary)


def _attend_up_to(query: Tensor, own: KeysValues, *, seen: Tensor, context: KeysValues) -> Tensor:
    """The attention of blocks [B, heads, block, D] to rows of one text, and to all of themselves.

    `own` are each block's keys and values, `context` the text's, [1, KV heads, n, D]; `seen` [B, n]
    are the rows of the text that a block attends to.
    """
    groups = query.shape[1] // own.keys.shape[1]
    scale, rows = query.shape[-1] ** -0.5, seen.shape[1]
    scores = torch.matmul(query, repeat_kv(context.keys, groups).transpose(2, 3)) * scale
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    within = torch.matmul(query, repeat_kv(own.keys, groups).transpose(2, 3)) * scale
    shares = torch.softmax(torch.cat([scores, within], -1).float(), -1).to(query.dtype)
    attended = torch.matmul(shares[..., :rows], repeat_kv(context.values, groups))
    return attended + torch.matmul(shares[..., rows:], repeat_kv(own.values, groups))


class DFlashHead(BlockHead):
    """The drafter with a cache of the context of one text, for the loop."""

    network: DFlashNetwork

    def __init__(self, network: DFlashNetwork, vocab_size: int) -> None:
        super().__init__(network, vocab_size, network.drafts)
        # [drafts, vocab] of the round's block
        self._logits: Tensor | None = None
        self._cache = LayerCache(network, len(network.body))

    def _clear(self) -> None:
        super()._clear()
        self._cache.length = 0

    def _read(self, features: Tensor) -> None:
        cache = self._cache
        start, end = cache.length, cache.length + len(features)
        cache.reserve(end + self.network.block)
        rows = self.network.context(features.unsqueeze(0), cache.angles(start, end))
        for layer, row in enumerate(rows):
            cache.written(layer, start, *row)
        cache.length = end

    def _draft(self, offset: int, token: Tensor) -> Tensor:
        if offset == 0:
            self._logits = self.network.logits(self._block(token), self.vocab_size, 0)[0]
        assert self._logits is not None
        return self._logits[offset : offset + 1]

    def _block(self, token: Tensor) -> Tensor:
        """The outputs [1, drafts, hidden] of the block that begins with a token [1]."""
        cache, block = self._cache, self.network.block

        def attend(layer: int, query: Tensor, own: KeysValues) -> Tensor:
            # Written behind the context, where the next states are written, too
            keys, values = cache.written(layer, cache.length, *own)
            return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

        layers = range(len(self.network.body))
        angles = cache.angles(cache.length, cache.length + block)
        return self.network.blocks(
            token.to(self.device), angles, [partial(attend, layer) for layer in layers]
        )


# ---- reading -------------------------------------------------------------------------------------

DFLASH = (
    "a DFlash drafter",
    "z-lab's (architectures [DFlashDraftModel] with dflash_config) and speculators' "
    "(speculators_model_type dflash)",
)
# Entries of dflash_config that are read; other ones, with other values than these, would change the
# arithmetic
READ = frozenset({"mask_token_id", "target_layer_ids", "block_size", "use_aux_hidden_state"})
PLAIN = (None, False, 0, "dflash")


@dataclass(frozen=True)
class Block:
    """The configuration of a DFlash drafter, or one of its kind, from its config.json.

    Attributes:
        layers: the target's layers whose inputs are read.
        block, first: positions of a block, as trained or of `draft.block`; the first that drafts.
    """

    layout: str
    layer: Qwen3Config
    layers: tuple[int, ...]
    block: int
    mask_token: int
    vocabulary: int | None
    first: int = 1


def load_dflash(conf: ModelConf, target: LoadedModel) -> LoadedHead:
    """Read a DFlash drafter; UserError: another layout, incomplete, or for another target."""
    files = HeadFiles(conf, target, *DFLASH)
    with explained(conf):
        config = files.config
        check_reads_states(config, files.where, files.kind)
        settings: dict[str, Any] = dict(config.get("dflash_config") or {})
        kind, asked = config.get("speculators_model_type"), settings
        if kind:
            asked = {"sample_from_anchor": config.get("sample_from_anchor")}
        if kind not in (None, "", "dflash") or not (kind or is_of(config, "dflash")):
            raise files.unknown_layout()
        settings["block_size"] = config.get("block_size") or settings.get("block_size")
        block = block_of("z-lab", settings, asked, files)
        network = filled(DFlashNetwork, block, files.tensors(), files)
        facts = {"architecture": "DFlash", "layout": block.layout, "block": block.block}
        return files.loaded(network, facts, block.layer.max_position_embeddings)


def block_of(
    layout: str,
    settings: Mapping[str, Any],
    asked: Mapping[str, Any],
    files: HeadFiles,
    first: int = 1,
) -> Block:
    """The checked configuration of a drafter, in a layout or in that of speculators.

    `settings` have `block_size`, `mask_token_id` and `target_layer_ids`, the layers whose outputs
    are read; `asked` are others, which may change the arithmetic.
    """
    config, conf = files.config, files.conf
    layer, layers = config, [int(number) + 1 for number in settings.get("target_layer_ids") or ()]
    if config.get("speculators_model_type"):
        layout, settings, layer = "speculators", config, config.get("transformer_layer_config")
        layer, layers = dict(layer or {}), config.get("aux_hidden_state_layer_ids")
        if layer.get("model_type") != "qwen3":  # other configs have another default
            head_dim = layer.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"]
            layer["head_dim"] = head_dim
    size, mask_token = settings.get("block_size"), settings.get("mask_token_id")
    needed = {"block_size": size, "mask_token_id": mask_token, "the target's layer ids": layers}
    missing = [name for name, value in needed.items() if value in (None, [], ())]
    if size is None or mask_token is None or not layers:
        raise UserError(
            f"{files.where}: its config.json has no {missing[0]}, which {files.kind} needs"
        )
    parsed, asked = Qwen3Config(**layer), dict(asked)
    if "sliding_attention" in (parsed.layer_types or ()):
        asked["layer_types: sliding_attention"] = True
    unread = sorted(name for name in asked.keys() - READ if asked[name] not in PLAIN)
    if unread:
        raise UserError(
            f"{files.where}: {files.kind} with {', '.join(unread)}, which is not read here; "
            "give one of full attention without further settings"
        )
    if conf.block is not None and conf.block > int(size):
        raise UserError(
            f"{conf.keys.of('block', conf.block)}: {conf.name} was trained with blocks of"
            f" {size} positions; give fewer"
        )
    read = tuple(map(int, layers))
    block, vocabulary = conf.block or int(size), layer.get("vocab_size")
    return Block(layout, parsed, read, block, int(mask_token), vocabulary, first)


def filled(
    kind: Callable[..., Any], block: Block, tensors: dict[str, Tensor], files: HeadFiles
) -> Any:
    if block.block <= block.first:
        raise UserError(
            f"{files.where}: blocks of {block.block} positions draft no token; give block_size in"
            " its config.json, or draft.block, a larger number"
        )
    files.check_layers(tensors, block.layers)
    files.check_vocabulary(block.vocabulary)
    d2t, _ = tensors.pop("d2t", None), tensors.pop("t2d", None)
    ids = None if d2t is None else files.check_ids(d2t + torch.arange(len(d2t)))
    embed, own_embedding, output = files.matrices(
        tensors, block.layer.hidden_size, ids, tied=bool(block.layer.tie_word_embeddings)
    )
    network = kind(
        block.layer,
        target_hidden=files.target_config.hidden_size,
        layers=block.layers,
        block=block.block,
        mask_token=files.check_mask_token(block.mask_token),
        # The target's modules must be no submodules of the drafter
        embed=embed if own_embedding else embed.__call__,
        output=output,
        ids=ids,
        first=block.first,
    )
    renamed = {re.sub("^layers", "body", name): tensor for name, tensor in tensors.items()}
    files.fill(network, renamed, given=("embed.", "output."))
    return network

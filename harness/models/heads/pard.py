"""A PARD draft: a causal model that drafts all tokens of a round in one pass, from mask tokens.

After the text it reads K - 1 mask tokens, and row j of the last K is the distribution of the j-th
draft (An et al. 2025, PARD, arXiv 2504.18583; `pard/pard_infer.py` of AMD-AGI/PARD; vLLM's
`draft_model` with `parallel_drafting`, v1/spec_decode/llm_base_proposer.py). Attention is causal,
so a draft depends on the text and on the number of masks before it, but on no other draft and not
on K. The masks' keys and values are removed; the emitted tokens are read in the next round.

The layout is that of the model that it was trained from, any causal one, with `pard_token`, the id
of the mask token, in its config.json. It reads no state of its target, and one draft serves every
target with its tokenizer. It runs here as a head, because its drafts depend on the start of a
round, as a head's do; so nothing is drafted after a prompt of one token until the text has a
second one. A round of K reads K - 1 masks, as in the engines; AMD's drafts were trained
with 7 (`para_num` of config/train/*.yaml), and evaluated with 11 (`draft_k`). `draft.block` limits
them.

A PARD-2 draft (An et al. 2026, arXiv 2605.08632; `pard/pard2_infer.py`) has in addition a
projection of the target's states, added to its embeddings (`warp_model.bin`). vLLM 0.32 does not
read that file, and neither does this module: the draft runs in its target-independent mode.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from harness.config import ModelConf
from harness.models.cached import CachedModel, output_weight, split_network, takes
from harness.models.checkpoint import PARD_KEY
from harness.models.heads.base import HeadNetwork, LoadedHead, MaskHead, in_target_ids
from harness.models.heads.files import found_in, head_config, unknown_layout
from harness.models.load import LoadedModel, check_tokenizers, load
from harness.models.probe import cached_model
from harness.records import UserError

PARD = ("a PARD draft", "causal models with pard_token in their config.json")
# Rows of masks in memory at a time, when the starts of a text are scored
ROWS = 512
SAMPLE_TOKENS = 12
# The allowed difference between rows of many starts at once and the same rows one by one, relative
# to the largest number
SAME_ROWS = {torch.float32: 1e-4, torch.float64: 1e-9}
COARSE_SAME_ROWS = 5e-2


class PardNetwork(HeadNetwork):
    """The model, and its drafts, at most `drafts` or any number, from every start of a text."""

    # Texts for heads are stored with a state of the target; the embedding is the cheapest one
    layers = (0,)

    def __init__(
        self, network: PreTrainedModel, mask_token: int, drafts: int | None, width: int
    ) -> None:
        """`width` is the target's hidden size."""
        super().__init__()
        self.network, self.mask_token, self.drafts, self.width = network, mask_token, drafts, width
        config: Any = network.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        self.cached_numbers = 2 * config.num_hidden_layers * heads * head_dim

    def passes(self, tokens: Tensor, states: Tensor, depth: int, first: int = 0) -> list[Tensor]:
        """The text is read once, and the masks of many starts together. B is 1."""
        count, backbone = states.shape[1], self.network.base_model
        depth = min(depth, self.drafts or depth, count - first)
        tokens = tokens[:, : count + 1].to(self.weights[0].device)
        cache = DynamicCache()
        text = backbone(input_ids=tokens, past_key_values=cache, use_cache=True)
        # The row of the last known token drafts the first token
        outputs = [text.last_hidden_state[:, first + 1 :]]
        if depth == 1:
            return outputs
        parts: list[Tensor] = []
        for starts in torch.arange(first, count).split(max(1, ROWS // (depth - 1))):
            parts.append(self._masks_after(starts.to(tokens.device), depth - 1, cache))
            cache.crop(-len(starts) * (depth - 1))
        masks = torch.cat(parts)
        outputs += [masks[: count - first - j, j - 1].unsqueeze(0) for j in range(1, depth)]
        return outputs

    def _masks_after(self, starts: Tensor, masks: int, cache: DynamicCache) -> Tensor:
        """The outputs [starts, masks, hidden] of masks after each start; start t knows t + 2."""
        text, weight = int(cache.get_seq_length()), self.weights[0]
        known = (starts + 2).repeat_interleave(masks)
        offset = torch.arange(masks, device=starts.device).repeat(len(starts))
        place = torch.arange(len(known), device=starts.device)
        on_text = torch.arange(text, device=starts.device) < known.unsqueeze(1)
        of_start = place // masks
        on_masks = (of_start.unsqueeze(1) == of_start) & (place.unsqueeze(1) >= place)
        seen = torch.cat([on_text, on_masks], dim=1)
        unseen = torch.finfo(weight.dtype).min
        hidden = self.network.base_model(
            input_ids=torch.full_like(known, self.mask_token).unsqueeze(0),
            position_ids=(known + offset).unsqueeze(0),
            attention_mask=torch.where(seen, 0.0, unseen).to(weight.dtype)[None, None],
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        return hidden[0].unflatten(0, (len(starts), masks))

    def logits(self, outputs: Tensor, vocabulary: int, offset: int) -> Tensor:
        del offset
        head: Any = self.network.get_output_embeddings()
        return in_target_ids(head(outputs), None, vocabulary)

    def with_cache(self, vocab_size: int) -> "PardHead":
        return PardHead(self, vocab_size)


class PardHead(MaskHead):
    """The draft for the loop."""

    network: PardNetwork

    def __init__(self, network: PardNetwork, vocab_size: int) -> None:
        super().__init__(network, vocab_size)
        self.drafts = network.drafts
        causal = network.network
        self._model: CachedModel = cached_model(causal, len(output_weight(causal)), "draft")
        # The first token of a text, until further tokens are read
        self._unread: list[int] = []

    def start(self, first: Sequence[int]) -> None:
        self._clear()
        self._unread = list(first)

    def extend(self, tokens: Tensor) -> None:
        self._model.prefill([*self._unread, *tokens.tolist()])
        self._unread = []

    def _round(self, tokens: Tensor, rows: int) -> Tensor:
        masks = [self.network.mask_token] * (rows - 1)
        read = torch.tensor([*self._unread, *tokens.tolist(), *masks], device=self.device)
        logits = self._model.forward(read)[-rows:]
        self._model.rewind(len(masks))
        self._unread = []
        return in_target_ids(logits, None, self.vocab_size)

    def _read(self, features: Tensor) -> None:
        """Do nothing: it reads no states."""

    def _clear(self) -> None:
        super()._clear()
        self._model.prefill([])
        self._unread = []


# ---- reading -------------------------------------------------------------------------------------


def load_pard(conf: ModelConf, target: LoadedModel) -> LoadedHead:
    """Read a PARD draft.

    Raises:
        NotEligible: another tokenizer than the target's.
        UserError: no mask token, or layers that do not run as `PardNetwork.passes` needs it.
    """
    where, config = conf.where, head_config(conf)
    mask_token = config.get(PARD_KEY)
    if not isinstance(mask_token, int):
        raise unknown_layout(where, *PARD, f"{found_in(config)} and no {PARD_KEY}")
    dtype = str(target.network.dtype).removeprefix("torch.")
    loaded = load(replace(conf, dtype=dtype), target.network.device)
    check_tokenizers(target, loaded)
    if not 0 <= mask_token < loaded.vocab_size:
        raise UserError(
            f"{where}: its {PARD_KEY} is {mask_token}, and it has {loaded.vocab_size} embeddings;"
            " give a folder whose files belong together"
        )
    of_target: Any = target.network.config.get_text_config()
    network = PardNetwork(loaded.network, mask_token, conf.block, of_target.hidden_size).eval()
    if not runs_from_every_start(network):
        raise UserError(
            f"{where}: a {loaded.network.config.model_type} model, whose drafts from many starts"
            " cannot be computed at once here; PARD drafts of full attention can (Llama, Qwen)"
        )
    is_pard2 = bool(config.get("pard2")) or config.get("spd_type") == "pard2"
    architecture = "PARD-2, target-independent" if is_pard2 else "PARD"
    facts = {"architecture": architecture, "mask_token": mask_token}
    return LoadedHead.of(conf, target, network, facts, loaded.context_tokens)


@torch.inference_mode()
def runs_from_every_start(network: PardNetwork) -> bool:
    """True where the logits of `passes` are those of the model, fed a text and masks."""
    causal: Any = network.network
    config = causal.config.get_text_config()
    layers = getattr(config, "layer_types", None)
    plain = (
        getattr(config, "sliding_window", None) is None
        if layers is None
        else set(layers) == {"full_attention"}
    )
    if not plain or not takes(causal.base_model, "position_ids"):
        return False
    width, device = len(output_weight(causal)), causal.device
    tokens = torch.arange(SAMPLE_TOKENS).unsqueeze(0) * 7 % min(width, 997)
    if split_network(CachedModel(causal, width), tokens[0].tolist()) is None:
        return False
    depth = min(3, network.drafts or 3)
    states = torch.zeros(1, SAMPLE_TOKENS - 1, network.width)
    rows = network.passes(tokens, states, depth)
    allowed = SAME_ROWS.get(causal.dtype, COARSE_SAME_ROWS)
    start = SAMPLE_TOKENS // 2
    masks = torch.full((1, depth - 1), network.mask_token)
    fed = torch.cat([tokens[:, : start + 2], masks], dim=1).to(device)
    expected = causal(input_ids=fed, use_cache=False).logits[0, -depth:]
    drafted = torch.stack([network.logits(row[0, start], width, 0) for row in rows])
    return bool((drafted - expected).abs().amax() <= allowed * expected.abs().amax())

"""A model's own MTP layer as a head: one more decoder layer in its checkpoint.

Multi-token prediction (DeepSeek-V3 report 2024, section 2.2) trains a layer to predict one token
further. Row t takes the normed embedding of token x[t + 1] and the normed final hidden state of the
target at t, side by side in this order, through a projection, the layer and a last norm; the
target's output matrix then gives the distribution of x[t + 2]. To draft more than one token, the
one layer is run again for each: its output after the last norm is the next row's hidden state.

As transformers runs it (modeling_layers.py, `MtpLayer`: it reads `hidden_states[-1]`, after the
last norm, and feeds back what its own last norm gives), and SGLang (deepseek_nextn.py,
glm4_moe_nextn.py, qwen3_next_mtp.py). vLLM's deepseek_mtp.py, qwen3_next_mtp.py and qwen3_5_mtp.py
do the same; its glm4_moe_mtp.py feeds back what enters the last norm, so from its second draft on
acceptances of GLM-4.x differ there. For DeepSeek and GLM, vLLM also takes zeros for the embedding
in row 0, transformers and SGLang do not.

Two layouts are published. Both hold the layer under the names of the target's own layers:

- `mtp.*` (Qwen3-Next, Qwen3.5): `fc`, `pre_fc_norm_embedding`, `pre_fc_norm_hidden`, `layers.0.*`
  and `norm`.
- `model.layers.N.*` (DeepSeek-V3, GLM-4.x), where N is the target's number of layers: `eh_proj`,
  `enorm`, `hnorm`, `shared_head.norm`, and copies of the embedding and the output matrix.

transformers leaves these tensors out when it loads a target, so they are read here. The layer is
run as a network of the target's own class that has one layer: attention (q/k norms, gates, latent),
experts and rotary positions are transformers'. Row t is at position t of that network's cache.
"""

import copy
import re
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from harness.config import ModelConf
from harness.models.cached import cache_argument
from harness.models.checkpoint import check_tensors, explained, quiet_transformers, weight_files
from harness.models.heads.base import ChainHead, HeadNetwork, LoadedHead
from harness.models.load import LoadedModel, check_on_one_device, source_of
from harness.models.memory import MemoryNeed, check_fits
from harness.records import UserError

# Model types of targets whose MTP layers are read
MODEL_TYPES = (
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)
# Chains that `passes` runs at once
STARTS = 256
# The number of an MTP layer, or of a layer of the target, and the tensor's name in it
NAME = re.compile(
    r"(?:model\.)?(?:language_model\.)?(?:mtp\.(?:layers\.(?P<mtp>\d+)\.)?|layers\.(?P<layer>\d+)\.)"
    r"(?P<part>.+)"
)
# The tensors besides the decoder layer, by their names in both layouts
PARTS = {
    "fc.weight": "fc.weight",
    "eh_proj.weight": "fc.weight",
    "pre_fc_norm_embedding.weight": "norm_embedding.weight",
    "enorm.weight": "norm_embedding.weight",
    "pre_fc_norm_hidden.weight": "norm_hidden.weight",
    "hnorm.weight": "norm_hidden.weight",
    "norm.weight": "network.model.norm.weight",
    "shared_head.norm.weight": "network.model.norm.weight",
    "embed_tokens.weight": "embed_tokens.weight",
    "shared_head.head.weight": "lm_head.weight",
}
PROJECTION = ("fc.weight", "norm_embedding.weight", "norm_hidden.weight")
# Tensors that may be the target's: the embedding and the output matrix
SHARED = ("embed_tokens.weight", "lm_head.weight")
REPLACED = ("model.embed_tokens.", "lm_head.")
SHOWN = 3


class MtpNetwork(HeadNetwork):
    """The layer as a network of the target's class, whose last norm is the MTP layer's."""

    def __init__(self, network: PreTrainedModel, target_layers: int, shared: list[Tensor]) -> None:
        """Take a one-layer network; `shared` are those of its weights that are the target's."""
        super().__init__()
        self.network, self.layers = network, (target_layers,)
        norm: Any = network.base_model.norm
        self.width = network.config.hidden_size
        self.fc = nn.Linear(2 * self.width, self.width, bias=False, dtype=network.dtype)
        self.norm_embedding, self.norm_hidden = copy.deepcopy(norm), copy.deepcopy(norm)
        self._shared = {id(weight) for weight in shared}

    @property
    def weights(self) -> list[Tensor]:
        return [self.fc.weight] + [
            weight
            for weight in self.parameters()
            if id(weight) not in self._shared and weight is not self.fc.weight
        ]

    @property
    @torch.inference_mode()
    def kv_bytes_per_token(self) -> int:
        """Cache bytes per token, counted on one row: attention may keep a latent, not keys."""
        cache, token = self.new_cache(), torch.zeros(1, 1, dtype=torch.long)
        device = self.fc.weight.device
        self.rows(token.to(device), self.features(torch.zeros(1, 1, self.width)), cache)
        kept: Any = cache.layers[0]
        return sum(each.numel() * each.element_size() for each in (kept.keys, kept.values))

    def new_cache(self) -> DynamicCache:
        return DynamicCache(config=self.network.config)

    def rows(self, tokens: Tensor, features: Tensor, cache: DynamicCache, **where: Any) -> Tensor:
        """The outputs [B, n, hidden], after the last norm, of tokens and features [B, n, hidden].

        They are appended to the cache; `where` has position_ids and a 4-D attention_mask of rows
        that do not follow it.
        """
        embedded = self.network.get_input_embeddings()(tokens)
        row = self.fc(torch.cat([self.norm_embedding(embedded), self.norm_hidden(features)], -1))
        where[cache_argument(self.network) or ""] = cache
        output = self.network.base_model(inputs_embeds=row, use_cache=True, **where)
        return output.last_hidden_state

    def logits(self, outputs: Tensor, vocabulary: int, offset: int) -> Tensor:
        del offset
        head: Any = self.network.get_output_embeddings()
        return head(outputs)[..., :vocabulary]

    def with_cache(self, vocab_size: int) -> "MtpHead":
        return MtpHead(self, vocab_size)

    def passes(self, tokens: Tensor, states: Tensor, depth: int, first: int = 0) -> list[Tensor]:
        """A block of chains is appended to the cache of pass 0, pass by pass, and then removed."""
        features = self.features(states)
        tokens, count = tokens.to(features.device), features.shape[1]
        cache = self.new_cache()
        base = self.rows(tokens[:, 1:], features, cache)
        outputs: list[list[Tensor]] = [[base[:, first:]], *([] for _ in range(depth - 1))]
        for begin in range(first, count, STARTS):
            drafted = base[:, begin : begin + STARTS]
            widths: list[int] = []
            for number in range(1, depth):
                rows = min(drafted.shape[1], count - number - begin)
                if rows <= 0:
                    break
                widths.append(rows)
                starts = torch.arange(begin, begin + rows, device=features.device)
                drafted = self.rows(
                    tokens[:, begin + number + 1 :][:, :rows],
                    drafted[:, :rows],
                    cache,
                    position_ids=(starts + number).expand(len(tokens), -1),
                    attention_mask=_chains(starts, count, widths, features.dtype),
                )
                outputs[number].append(drafted)
            if widths:
                cache.crop(-sum(widths))
        return [torch.cat(parts, dim=1) for parts in outputs if parts]


def _chains(starts: Tensor, count: int, widths: list[int], dtype: torch.dtype) -> Tensor:
    """The additive mask [1, 1, n, count + sum of widths] of the last pass of a block of chains.

    Chain i attends to the rows of pass 0 up to its start, and to entry i of each of its passes.
    """
    base = torch.arange(count, device=starts.device) <= starts.unsqueeze(1)
    rows = len(starts)
    own = [torch.eye(rows, width, dtype=torch.bool, device=starts.device) for width in widths]
    hidden = ~torch.cat([base, *own], dim=1)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=starts.device)
    return mask.masked_fill(hidden, torch.finfo(dtype).min)[None, None]


class MtpHead(ChainHead):
    """The layer with transformers' cache."""

    network: MtpNetwork

    def __init__(self, network: MtpNetwork, vocab_size: int) -> None:
        super().__init__(network, vocab_size)
        self._cache = network.new_cache()

    def rewind(self, count: int) -> None:
        if count:
            self._cache.crop(-count)

    def _forget_rows(self) -> None:
        self._cache = self.network.new_cache()

    def _append(self, tokens: Tensor, features: Tensor) -> Tensor:
        return self.network.rows(tokens, features, self._cache)


# ---- reading -------------------------------------------------------------------------------------


def load_mtp(conf: ModelConf, target: LoadedModel) -> LoadedHead:
    """Read the MTP layer from the checkpoint that `conf` names, the target's or a similar one.

    Raises:
        UserError: the target is of another type, or the checkpoint has no supported MTP layer.
    """
    named = target.shown
    where = conf.shown
    config: Any = target.network.config.get_text_config()
    known = f"MTP layers are read of {', '.join(MODEL_TYPES)}"
    if config.model_type not in MODEL_TYPES:
        raise UserError(
            f"{where}: {named} is of the model type {config.model_type}, of which no MTP layer is "
            f"known; {known}"
        )
    check_on_one_device(conf, target)
    source = source_of(conf)
    with quiet_transformers(), explained(conf):
        tensors, layers = _tensors(source, conf, config.num_hidden_layers)
    if len(layers) != 1:
        found = f"{len(layers)} MTP layers" if layers else "no MTP layer"
        raise UserError(
            f"{where}: {found} in {conf.id}; read is one, in tensors named mtp.* or "
            f"model.layers.{config.num_hidden_layers}.* (eh_proj, enorm, hnorm, shared_head); "
            f"{known}"
        )
    dtype, device = target.network.dtype, target.network.device
    size = float(sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize)
    check_fits([MemoryNeed(conf.keys, conf.name, device, dtype, size, 0)], 0)
    with quiet_transformers():
        where = f"{where}: the MTP layer in {conf.id}"
        check_tensors(where, {name: str(each.dtype) for name, each in tensors.items()})
        network = _network(config, tensors, target, where)
    facts = {"architecture": "MTP", "layout": layers.pop(), "draft_vocab": target.vocab_size}
    network = network.to(device).eval()
    return LoadedHead.of(conf, target, network, facts, target.context_tokens)


def _tensors(source: str, conf: ModelConf, layers: int) -> tuple[dict[str, Tensor], set[str]]:
    """The tensors of MTP layers by their names in `MtpNetwork`, and the names of these layers."""
    tensors: dict[str, Tensor] = {}
    found: set[str] = set()
    files = weight_files(conf, source, wanted=lambda name: _part_of(name, layers) is not None)
    for path in files:
        with safe_open(str(path), framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  # not a dict
                match = _part_of(name, layers)
                if match is None:
                    continue
                if match["mtp"] or match["layer"]:
                    found.add(name.removesuffix(match["part"]) + "*")
                part = match["part"]
                known = PARTS.get(part, f"network.model.layers.0.{part}")
                tensors[known] = stored.get_tensor(name)
    return tensors, found


def _part_of(name: str, layers: int) -> re.Match[str] | None:
    """The match of a tensor's name in an MTP layer of a target with `layers` layers, or None."""
    match = NAME.fullmatch(name)
    if match is None or (match["layer"] is not None and int(match["layer"]) < layers):
        return None
    return match


def _network(
    config: Any, tensors: dict[str, Tensor], target: LoadedModel, where: str
) -> MtpNetwork:
    """The layer with its weights; every tensor must be there, and none left over."""
    inside = "network."
    layer = {name.removeprefix(inside): t for name, t in tensors.items() if name.startswith(inside)}
    made_of: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    network, report = made_of.from_pretrained(
        None,
        config=_of_one_layer(config),
        state_dict=layer,
        dtype=target.network.dtype,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    of_target: Any = target.network
    shared = of_target.get_input_embeddings(), of_target.get_output_embeddings()
    for module, name in zip(shared, SHARED, strict=True):
        own = tensors.get(name)
        if own is not None and own.shape != module.weight.shape:
            raise UserError(
                f"{where} is for another target: {name} is {list(own.shape)}, and that of "
                f"{target.shown} {list(module.weight.shape)}"
            )
    network.set_input_embeddings(_own_or_shared(tensors.get(SHARED[0]), shared[0]))
    network.set_output_embeddings(_own_or_shared(tensors.get(SHARED[1]), shared[1]))
    mtp = MtpNetwork(network, config.num_hidden_layers, [module.weight for module in shared])
    projection = {name: weight for name, weight in mtp.state_dict().items() if name in PROJECTION}
    missing = sorted(projection.keys() - tensors.keys())
    missing += sorted(name for name in report["missing_keys"] if not name.startswith(REPLACED))
    wrong = [
        name
        for name in projection.keys() & tensors.keys()
        if tensors[name].shape != projection[name].shape
    ]
    wrong += [entry[0] for entry in report["mismatched_keys"]]
    left = sorted(report["unexpected_keys"])
    for names, fault in ((missing, "lacks"), (wrong, "has in another shape"), (left, "also has")):
        if names:
            raise UserError(
                f"{where} {fault} {', '.join(names[:SHOWN])}; give a checkpoint of "
                f"{target.shown} whose MTP layer is neither quantized nor cut off"
            )
    mtp.load_state_dict({name: tensors[name] for name in projection}, strict=False)
    return mtp


def _of_one_layer(config: Any) -> Any:
    """The target's config for one layer of full attention, with experts if it has any."""
    config = copy.deepcopy(config)
    attention = "eager" if config._attn_implementation == "eager" else "sdpa"  # take 4-D masks
    # The vocabulary's matrices are replaced by the target's
    changes = {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse"],
        "mlp_only_layers": [],
        "first_k_dense_replace": 0,
        "vocab_size": 1,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "_attn_implementation": attention,
    }
    for name, value in changes.items():
        if hasattr(config, name):
            setattr(config, name, value)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _own_or_shared(own: Tensor | None, shared: Any) -> nn.Module:
    """The target's module, or one with its own weight where that is no copy of the target's."""
    weight: Tensor = shared.weight
    if own is None or torch.equal(own.to(weight), weight):
        return shared
    module = copy.copy(shared)
    module._parameters = {**shared._parameters, "weight": nn.Parameter(own.to(weight))}
    return module

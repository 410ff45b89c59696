"""Read Medusa heads and DFlash drafters from a folder or the hub, for one target.

Medusa heads are published in two layouts, told by the names of their tensors:

- FasterDecoding's: config.json has `medusa_num_heads`, and medusa_lm_head.pt (or .safetensors, as
  text-generation-inference wants it) has `{head}.{layer}.linear.weight` and `.bias`, then
  `{head}.{layers}.weight`. Names may begin with `medusa_heads.` (NVIDIA's ModelOpt). Some of its
  configs give another number of heads than the file has, so the tensors are counted.
- vLLM's (`model_executor/models/medusa.py`): `model_type: medusa`, model.safetensors with
  `blocks.{head}.layers.{layer}.weight` and `lm_heads.{head}.weight`. With `original_lm_head` one
  matrix, `lm_head.weight` or `lm_heads.0.weight`, serves all heads; with `token_map` they draft
  these tokens alone, the rows of the others being there or not.

DFlash drafters too:

- z-lab's, and SpecForge's: config.json of Qwen3 layers with `architectures: [DFlashDraftModel]`,
  `block_size`, and `dflash_config` with `mask_token_id` and `target_layer_ids`, the layers whose
  output is read. The embedding and the output matrix are the target's.
- speculators' (`src/speculators/models/dflash/config.py`): `speculators_model_type: dflash`, the
  layers' config under `transformer_layer_config`, `aux_hidden_state_layer_ids`, the layers whose
  input is read, and an embedding and output matrix of its own, over the tokens of `d2t` and `t2d`.

A sliding window is not read: engines differ in what of a block it hides (vLLM is causal there,
transformers is not).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from harness.config import ModelConf
from harness.models.checkpoint import explained
from harness.models.dflash import DFlashNetwork
from harness.models.head_files import HeadFiles, config_of, found_in
from harness.models.heads import LoadedHead
from harness.models.load import LoadedModel
from harness.models.medusa import MedusaNetwork
from harness.records import UserError

MEDUSA_FILES = ("medusa_lm_head.safetensors", "model.safetensors")
MEDUSA_PICKLES = ("medusa_lm_head.pt", "pytorch_model.bin")
MEDUSA = (
    "Medusa heads",
    "FasterDecoding's (medusa_num_heads, tensors 0.0.linear.weight) and vLLM's (model_type medusa, "
    "tensors blocks.0.layers.0.weight)",
)
DFLASH = (
    "a DFlash drafter",
    "z-lab's (architectures [DFlashDraftModel] with dflash_config) and speculators' "
    "(speculators_model_type dflash)",
)
# Of dflash_config; what else is set there, to something else than these, changes the arithmetic
READ = frozenset({"mask_token_id", "target_layer_ids", "block_size"})
PLAIN = (None, False, 0, "dflash")


def load_medusa(conf: ModelConf, target: LoadedModel, key: str = "draft") -> LoadedHead:
    """Read the Medusa heads that `conf` names, for this target, onto its device and in its dtype.

    Raises:
        UserError: no Medusa heads in a known layout, incomplete, or for another target.
    """
    files, config = HeadFiles(conf, key, target, *MEDUSA), config_of(conf, key)
    tensors = files.tensors(MEDUSA_FILES, MEDUSA_PICKLES)
    layout = "vllm" if _is(config, "medusa") else "fasterdecoding"
    if layout != "vllm" and "medusa_num_heads" not in config:
        raise files.unknown_layout(found_in(config))
    network = _medusa(config, _medusa_names(tensors), files)
    facts = {"architecture": "Medusa", "layout": layout, "heads": network.drafts}
    return files.loaded(network, facts, None)


def _medusa_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by vLLM's names."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        known = re.sub(r"^medusa_heads?\.", "", name)
        known = re.sub(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$", r"blocks.\1.layers.\2.\3", known)
        renamed[re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", known)] = tensor
    return renamed


def _medusa(
    config: Mapping[str, Any], tensors: dict[str, Tensor], files: HeadFiles
) -> MedusaNetwork:
    """The heads, their weights filled in, after all that can be compared with the target."""
    places = [re.match(r"blocks\.(\d+)\.layers\.(\d+)\.", name) for name in tensors]
    found = [(int(match[1]), int(match[2])) for match in places if match]
    heads = 1 + max((head for head, _ in found), default=0)
    one = tensors.pop("lm_head.weight", None)
    if one is None and config.get("original_lm_head"):
        one = tensors.get("lm_heads.0.weight")
    if one is not None:
        tensors |= {f"lm_heads.{head}.weight": one for head in range(heads)}
    output, token_map = tensors.get("lm_heads.0.weight"), tensors.pop("token_map", None)
    if not found or output is None or config.get("logit_scale", 1.0) != 1.0:
        raise files.unknown_layout(found_in(config))
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
    )
    files.fill(network, tensors)
    return network


@dataclass(frozen=True)
class _Block:
    """What a DFlash drafter's config.json says.

    Attributes:
        layout: whose.
        layer: the config of its layers.
        layers: of the target, whose inputs are read.
        block: positions of a block.
        mask_token: the id of the token that stands for what is to be drafted.
        vocabulary: of the target; None where it does not say.
    """

    layout: str
    layer: Qwen3Config
    layers: tuple[int, ...]
    block: int
    mask_token: int
    vocabulary: int | None


def load_dflash(conf: ModelConf, target: LoadedModel, key: str = "draft") -> LoadedHead:
    """Read the DFlash drafter that `conf` names, for this target, onto its device, in its dtype.

    Raises:
        UserError: no DFlash drafter in a known layout, incomplete, or for another target.
    """
    files = HeadFiles(conf, key, target, *DFLASH)
    with explained(conf, key):
        block = _block(config_of(conf, key), files)
    if conf.block is not None:
        if conf.block > block.block:
            raise UserError(
                f"{key}.block={conf.block}: {conf.name} was trained with blocks of {block.block} "
                "positions; give fewer"
            )
        block = replace(block, block=conf.block)
    network = _dflash(block, files.tensors(), files)
    facts = {"architecture": "DFlash", "layout": block.layout, "block": block.block}
    return files.loaded(network, facts, block.layer.max_position_embeddings)


def _block(config: Mapping[str, Any], files: HeadFiles) -> _Block:
    """What the config.json says, in either layout."""
    settings: dict[str, Any] = dict(config.get("dflash_config") or {})
    if config.get("speculators_model_type") == "dflash":
        layout, layer = "speculators", dict(config.get("transformer_layer_config") or {})
        if layer.get("model_type") != "qwen3":  # other configs have another default
            layer["head_dim"] = layer.get("head_dim") or (
                layer["hidden_size"] // layer["num_attention_heads"]
            )
        layers = config.get("aux_hidden_state_layer_ids") or ()
        mask_token = config.get("mask_token_id")
        settings = {"sample_from_anchor": config.get("sample_from_anchor")}
    elif _is(config, "dflash") and not config.get("speculators_model_type"):
        layout, layer = "z-lab", dict(config)
        # The output of a layer is the input of the next
        layers = [int(number) + 1 for number in settings.get("target_layer_ids") or ()]
        mask_token = settings.get("mask_token_id")
    else:
        raise files.unknown_layout(found_in(config))
    size = config.get("block_size") or settings.get("block_size")
    needed = {"block_size": size, "mask_token_id": mask_token, "the target's layer ids": layers}
    missing = [name for name, value in needed.items() if value in (None, [], ())]
    if size is None or mask_token is None or missing:
        raise UserError(
            f"{files.where}: its config.json has no {missing[0]}, which a DFlash drafter needs"
        )
    parsed = Qwen3Config(**layer)
    if "sliding_attention" in (parsed.layer_types or ()):
        settings["layer_types: sliding_attention"] = True
    unread = sorted(name for name in settings.keys() - READ if settings[name] not in PLAIN)
    if unread:
        raise UserError(
            f"{files.where}: a DFlash drafter with {', '.join(unread)}, which is not read here; "
            "give one of full attention without further settings"
        )
    vocabulary = layer.get("vocab_size")
    return _Block(layout, parsed, tuple(map(int, layers)), int(size), int(mask_token), vocabulary)


def _dflash(block: _Block, tensors: dict[str, Tensor], files: HeadFiles) -> DFlashNetwork:
    """The drafter, its weights filled in, after all that can be compared with the target."""
    of_target, vocabulary = files.target_config, files.target.vocab_size
    if min(block.layers) < 0 or max(block.layers) > of_target.num_hidden_layers:
        raise files.other_layers(block.layers)
    files.check_width(tensors, block.layers)
    files.check_vocabulary(block.vocabulary)
    d2t, _ = tensors.pop("d2t", None), tensors.pop("t2d", None)
    ids = None if d2t is None else files.check_ids(d2t + torch.arange(len(d2t)))
    drafted = vocabulary if ids is None else len(ids)
    target: Any = files.target.network
    embed, output = target.get_input_embeddings(), target.get_output_embeddings()
    hidden = block.layer.hidden_size
    own_embed = files.own_matrix(tensors, "embed_tokens.weight", embed, vocabulary, hidden)
    own_output = files.own_matrix(tensors, "lm_head.weight", output, drafted, hidden)
    network = DFlashNetwork(
        block.layer,
        target_hidden=of_target.hidden_size,
        layers=block.layers,
        block=block.block,
        mask_token=block.mask_token,
        # The target's modules must be no part of this one
        embed=embed.__call__ if own_embed is None else nn.Embedding.from_pretrained(own_embed),
        output=output.__call__ if own_output is None else _linear(own_output),
        ids=ids,
    )
    if block.mask_token >= vocabulary:
        raise files.other_vocabulary(block.mask_token + 1)
    renamed = {re.sub("^layers", "body", name): tensor for name, tensor in tensors.items()}
    files.fill(network, renamed, given=("embed.", "output."))
    return network


def _linear(weight: Tensor) -> nn.Module:
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


def _is(config: Mapping[str, Any], kind: str) -> bool:
    names = [config.get("model_type"), *(config.get("architectures") or ())]
    return any(kind in str(name).lower() for name in names)

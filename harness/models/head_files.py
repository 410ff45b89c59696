"""Read an EAGLE-3 head from a folder or the hub, for one target, in both published layouts.

SpecForge's (SGLang) is a config of the layer itself with `architectures: [LlamaForCausalLMEagle3]`,
and tensors `midlayer.*`. That of vllm-project/speculators has `speculators_model_type: eagle3`, the
layer's config under `transformer_layer_config`, and tensors `layers.0.*`. Neither has a tokenizer:
a head's tokens are its target's. A head that was trained for another target would draft nonsense
without an error, so everything that can be compared with the target is.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.utils.hub import cached_file

from harness.config import ModelConf
from harness.models.checkpoint import explained, quiet_transformers, small_file
from harness.models.eagle3 import STATES, Eagle3Network, default_layers
from harness.models.heads import LoadedHead
from harness.models.load import LoadedModel, source_of
from harness.models.memory import MemoryNeed, check_fits
from harness.records import UserError
from harness.theory.architecture import HeadArchitecture

LAYOUTS = (
    "SpecForge's (config.json with architectures [LlamaForCausalLMEagle3], tensors midlayer.*) and "
    "speculators' (speculators_model_type eagle3, tensors layers.0.*)"
)
EAGLE3 = re.compile("eagle-?3", re.IGNORECASE)
WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"
# Of tensors that only training needs
UNUSED = frozenset({"verifier_lm_head.weight", "verifier_norm.weight"})


@dataclass(frozen=True)
class _Layout:
    """What a head's config.json says.

    Attributes:
        name: of the layout.
        layer: the decoder layer's config.
        layers: of the target, whose inputs are read; None where it takes the usual ones.
        norm_before_residual: see `Eagle3Network`.
        draft_vocabulary: tokens that it can draft; None where it is the target's vocabulary.
    """

    name: str
    layer: LlamaConfig
    layers: tuple[int, ...] | None
    norm_before_residual: bool
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


def load_head(conf: ModelConf, target: LoadedModel, key: str = "draft") -> LoadedHead:
    """Read the head that `conf` names, for this target, onto its device and in its dtype.

    Raises:
        UserError: it is no EAGLE-3 head in a known layout, incomplete, or for another target.
    """
    where, dtype, device = f"{key}.id={conf.id}", target.network.dtype, target.network.device
    layout = _layout_of(conf, key)
    check_fits([MemoryNeed.of(layout.shape, dtype, device, key, conf.name)], 0)
    with quiet_transformers(), explained(conf, key):
        tensors = _tensors(source_of(conf, key), conf)
    network = _network(layout, tensors, target, where)
    network.to(device, dtype)
    return LoadedHead(
        key=key,
        name=conf.name,
        tokenizer=target.tokenizer,
        eos=target.eos,
        context_tokens=getattr(layout.layer, "max_position_embeddings", None),
        network=network.eval(),
        facts={
            "architecture": "EAGLE-3",
            "layout": layout.name,
            "draft_vocab": len(network.d2t),
            "norm_before_residual": network.norm_before_residual,
        },
    )


def memory_need(conf: ModelConf, key: str, target: MemoryNeed) -> MemoryNeed:
    """What memory a head will take, from its config before its weights are read.

    That of an embedding of its own is not known before.
    """
    shape = _layout_of(conf, key).shape
    return MemoryNeed.of(shape, target.dtype, target.device, key, conf.name)


def head_shape(config: Mapping[str, Any], where: str) -> HeadArchitecture:
    """The sizes that a head's config.json says; errors call it `where`."""
    return _layout(config, where).shape


def _layout_of(conf: ModelConf, key: str) -> _Layout:
    where = f"{key}.id={conf.id}"
    with quiet_transformers(), explained(conf, key):
        config = small_file(source_of(conf, key), "config.json", conf)
        if config is None:
            raise UserError(f"{where}: no config.json there; give a folder or hub id of a head")
        return _layout(config, where)


def _layout(config: Mapping[str, Any], where: str) -> _Layout:
    """Which layout it is, and what it says."""
    names = [str(name) for name in config.get("architectures") or ()]
    kind = str(config.get("speculators_model_type") or "")
    if kind == "eagle3":
        layer = config.get("transformer_layer_config")
        if not isinstance(layer, Mapping):
            raise UserError(f"{where}: its config.json has no transformer_layer_config")
        return _Layout(
            "speculators",
            LlamaConfig(**layer),
            _layer_ids(config.get("eagle_aux_hidden_state_layer_ids"), 0),
            bool(config.get("norm_before_residual", True)),
            config.get("draft_vocab_size"),
        )
    if not kind and any(EAGLE3.search(name) for name in names):
        # As SGLang reads it, which counts the layers whose output it is
        nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        ids = _layer_ids(config.get("eagle_aux_hidden_state_layer_ids"), 0)
        return _Layout(
            "specforge",
            LlamaConfig(**config),
            ids or _layer_ids(nested, 1),
            bool(config.get("norm_before_residual", False)),
            config.get("draft_vocab_size"),
        )
    found = f"speculators_model_type {kind}" if kind else f"architectures {names}"
    raise UserError(
        f"{where}: not an EAGLE-3 head in a layout that is known: its config.json has {found}; "
        f"read here are {LAYOUTS}"
    )


def _layer_ids(given: Any, shift: int) -> tuple[int, ...] | None:
    # Whatever their order, engines take the states as the target computes them
    return tuple(sorted(int(layer) + shift for layer in given)) if given else None


def _tensors(source: str, conf: ModelConf) -> dict[str, Tensor]:
    """The weights by SpecForge's names."""
    name = PICKLED if conf.allow_pickle and not _has(source, conf) else WEIGHTS
    file = Path(source) / name
    if not Path(source).is_dir():
        file = Path(str(cached_file(source, name, revision=conf.revision)))
    elif not file.is_file():
        raise OSError(f"no file named {name} in {source}")
    tensors = load_file(file) if name == WEIGHTS else torch.load(file, weights_only=True)
    return {
        re.sub(r"^(model\.)?(layers\.0\.)?", lambda m: "midlayer." if m[2] else "", name): tensor
        for name, tensor in tensors.items()
        if name not in UNUSED
    }


def _has(source: str, conf: ModelConf) -> bool:
    """Whether its weights are in safetensors."""
    if Path(source).is_dir():
        return (Path(source) / WEIGHTS).is_file()
    return (
        cached_file(
            source, WEIGHTS, revision=conf.revision, _raise_exceptions_for_missing_entries=False
        )
        is not None
    )


def _network(
    layout: _Layout, tensors: dict[str, Tensor], target: LoadedModel, where: str
) -> Eagle3Network:
    """The head, its weights filled in, after all that can be compared with the target."""
    named = f"{target.key}={target.name}"
    config: Any = target.network.config.get_text_config()
    layers = layout.layers or default_layers(config.num_hidden_layers)
    usual = "" if layout.layers else " by default"
    if min(layers) < 0 or max(layers) >= config.num_hidden_layers or len(set(layers)) < len(layers):
        raise UserError(
            f"{where}: it reads layers {list(layers)}{usual}, and {named} has "
            f"{config.num_hidden_layers}; give the head of this target"
        )
    width = len(layers) * config.hidden_size
    fc = tensors.get("fc.weight")
    if fc is not None and fc.shape[1] != width:
        raise UserError(
            f"{where}: a head for another target: it takes {fc.shape[1] // len(layers)} numbers of "
            f"each of {len(layers)} layers, and {named} has a hidden size of {config.hidden_size}"
        )
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    vocabulary = target.vocab_size
    if t2d is not None and len(t2d) != vocabulary:
        raise _other_vocabulary(where, len(t2d), named, vocabulary)
    if d2t is None and "lm_head.weight" in tensors:
        rows = len(tensors["lm_head.weight"])
        if rows != vocabulary:
            raise _other_vocabulary(where, rows, named, vocabulary)
    network = Eagle3Network(
        layout.layer,
        target_hidden=config.hidden_size,
        layers=layers,
        draft_vocabulary=vocabulary if d2t is None else len(d2t),
        vocabulary=vocabulary,
        norm_before_residual=layout.norm_before_residual,
    )
    _embed(network, tensors, target, where)
    _fill(network, tensors, where)
    places = network.d2t + torch.arange(len(network.d2t))
    if int(places.min()) < 0 or int(places.max()) >= vocabulary:
        raise _other_vocabulary(where, int(places.max()) + 1, named, vocabulary)
    return network


def _other_vocabulary(where: str, tokens: int, target: str, vocabulary: int) -> UserError:
    return UserError(
        f"{where}: a head for another target: its tokens are of a vocabulary of {tokens}, and "
        f"{target} has {vocabulary}"
    )


def _embed(
    network: Eagle3Network, tensors: dict[str, Tensor], target: LoadedModel, where: str
) -> None:
    """Give it an embedding of its own where its files hold one, else the target's."""
    own = tensors.pop("embed_tokens.weight", None)
    if own is not None:
        if len(own) != target.vocab_size:
            named = f"{target.key}={target.name}"
            raise _other_vocabulary(where, len(own), named, target.vocab_size)
        network.embed_tokens, network.own_embedding = nn.Embedding.from_pretrained(own), True
        return
    shared: Any = target.network.get_input_embeddings()
    hidden = network.config.hidden_size
    if shared.weight.shape[1] != hidden:
        raise UserError(
            f"{where}: it has no embedding of its own and a hidden size of {hidden}, and "
            f"{target.key}={target.name} embeds in {shared.weight.shape[1]}; give the head of this "
            "target"
        )
    network.embed_tokens = shared


def _fill(network: Eagle3Network, tensors: Mapping[str, Tensor], where: str) -> None:
    """Load the weights; every tensor must be there, and none left over."""
    wanted = {
        name: tensor for name, tensor in network.state_dict().items() if "embed_tokens" not in name
    }
    needed = wanted.keys() - {"d2t", "t2d"}
    missing, left = sorted(needed - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or left:
        found = f"it lacks {', '.join(missing[:3])}" if missing else f"it has {', '.join(left[:3])}"
        raise UserError(
            f"{where}: not an EAGLE-3 head in a layout that is known: {found}; read here are "
            f"{LAYOUTS}"
        )
    wrong = [
        name for name in wanted if name in tensors and tensors[name].shape != wanted[name].shape
    ]
    if wrong:
        name = wrong[0]
        raise UserError(
            f"{where}: {name} is {list(tensors[name].shape)}, and its config.json makes it "
            f"{list(wanted[name].shape)}; give a folder whose files belong together"
        )
    network.load_state_dict(dict(tensors), strict=False)

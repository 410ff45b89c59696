"""A model's sizes as `conf/model/*.yaml` writes them: read once, checked once, by name.

The same mapping gives the memory floor of a step, the memory a model needs, and the network that is
built where `weights=dummy` asks for one, so none of them can disagree with another.
"""

from collections.abc import Mapping
from typing import Any

from harness.records import UserError
from harness.theory.hardware import Architecture

FAMILIES = ("qwen3", "qwen3_moe", "llama", "qwen2")
# Families that publish a head_dim of their own; the others divide the hidden size by the heads.
HEAD_DIM = {"qwen3": 128, "qwen3_moe": 128}
NUMBERS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")
NUMBERS_OF_EXPERTS = ("experts", "experts_per_token", "moe_ffn")
# What only a built network needs: harness.models.dummy says what is assumed where they are absent.
BUILDING = ("rope_theta", "rope_scaling", "norm_eps", "max_positions")
KNOWN = frozenset({"family", "tied_embeddings", *NUMBERS, *NUMBERS_OF_EXPERTS, *BUILDING})


def architecture_of(conf: Mapping[str, Any], key: str = "model.architecture") -> Architecture:
    """The sizes in a config's `architecture`.

    Args:
        conf: the mapping. `ffn` of a mixture of experts is one expert's, unless `moe_ffn` is given.
        key: where it stands, for error messages.

    Raises:
        UserError: an unknown family or entry, a size that is missing, no whole number or cannot be.
    """
    _check_names(conf, key)
    family = conf["family"]
    wanted = [name for name in NUMBERS if name != "head_dim" or "head_dim" in conf]
    sizes = {name: _whole(conf, name, key) for name in wanted}
    if "head_dim" not in sizes:
        sizes["head_dim"] = HEAD_DIM.get(family, sizes["hidden"] // max(1, sizes["heads"]))
    if family == "qwen3_moe":
        sizes |= {name: _whole(conf, name, key) for name in NUMBERS_OF_EXPERTS[:2]}
        sizes["moe_ffn"] = _whole(conf, "moe_ffn" if "moe_ffn" in conf else "ffn", key)
    try:
        shape = Architecture(tied=bool(conf.get("tied_embeddings", False)), **sizes)
    except UserError as error:
        raise UserError(str(error).replace("architecture", key, 1)) from error
    if shape.heads % shape.kv_heads:
        raise UserError(f"{key}.kv_heads={shape.kv_heads}: must divide heads={shape.heads}")
    return shape


def _check_names(conf: Mapping[str, Any], key: str) -> None:
    family = conf.get("family")
    if family not in FAMILIES:
        raise UserError(f"{key}.family={family}: use one of {', '.join(FAMILIES)}")
    unknown = sorted(str(name) for name in conf if name not in KNOWN)
    if unknown:
        raise UserError(f"{key}.{unknown[0]}: no such entry; there are {', '.join(sorted(KNOWN))}")
    if family != "qwen3_moe" and conf.get("experts"):
        raise UserError(f"{key}.experts: family={family} has none; use family=qwen3_moe")


def _whole(conf: Mapping[str, Any], name: str, key: str) -> int:
    value = conf.get(name)
    if value is None:
        raise UserError(f"{key}.{name}: missing; give a whole number of at least 1")
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{key}.{name}={value}: give a whole number of at least 1")
    return value

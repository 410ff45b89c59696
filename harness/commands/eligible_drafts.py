"""`drafts=auto`: the shipped drafts that can serve a target, known before any weight is loaded.

Every draft of conf/ is looked at. A model must share the target's tokenizer, which the field
`tokenizer_family` of its config says, have fewer parameters, and read fewer bytes of weights per
token, or its steps could not be cheaper than the target's. A head serves the target that it was
made for, MTP layers a target whose config.json names some. A drafter without a model, and the
target's own first layers, serve every target. The family is a claim: where models are loaded, their
tokenizers are compared (`harness.models.tokenizer.tokenizer_difference`), and a draft whose
ordinary tokens differ is left out with the difference.
"""

import json
import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from omegaconf import OmegaConf

from harness.config import CONF_DIR, DraftsEntry, GpuConf, ModelConf, checked
from harness.models.embedded import folder_of
from harness.models.memory import shape_of
from harness.records import UserError
from harness.theory.architecture import MemoryFit, architecture_of, usable_bytes
from harness.theory.cost import ModelSize

_log = logging.getLogger(__name__)

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "int4": 0.5}
SERVED_BYTES = 2.0  # bfloat16, what a server would load
# A draft that reads a larger share of the target's bytes per token seldom pays
LARGE_SHARE = 0.5
# How config.json says how many MTP layers there are: DeepSeek, GLM and MiMo; Qwen; transformers
MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


@dataclass(frozen=True)
class Pairing:
    """A draft with a target, as far as their configurations say.

    `result` is "named" where it is taken although it is not eligible by its configuration.
    """

    conf: DraftsEntry
    result: Literal["eligible", "with a note", "named", "not eligible"]
    why: str  # the note, or what it lacks
    parameters: float | None = None
    weight_bytes: float | None = None


def eligible_drafts(target: ModelConf, card: GpuConf | None = None) -> list[DraftsEntry]:
    """The shipped drafts that can serve a target, small ones before large ones; see `pairings`."""
    if target.tokenizer_family is None:
        families = {conf.tokenizer_family for conf in shipped_drafts() if conf.tokenizer_family}
        _log.warning(
            "drafts=auto: model=%s names no tokenizer family, so no models are compared with it;"
            " give model.tokenizer_family= (shipped: %s)",
            target.name,
            ", ".join(sorted(families)),
        )
    return [entry.conf for entry in pairings(target, card) if entry.result != "not eligible"]


def pairings(
    target: ModelConf, card: GpuConf | None = None, named: Collection[str] = ()
) -> list[Pairing]:
    """Every shipped draft with a target: the eligible ones first, small ones before large ones.

    A card's memory must hold both. Drafts that are `named` are taken whatever their configurations
    say.
    """

    def place(entry: Pairing) -> tuple[bool, bool, float]:
        other_family = entry.conf.tokenizer_family not in (None, target.tokenizer_family)
        return entry.result == "not eligible", other_family, entry.parameters or 0.0

    found = [_pairing(target, conf, card) for conf in shipped_drafts()]
    for index, entry in enumerate(found):
        if entry.result == "not eligible" and entry.conf.name in named:
            found[index] = replace(entry, result="named")
    return sorted(found, key=place)


def draft_files() -> dict[str, Path]:
    return {file.stem: file for file in sorted((CONF_DIR / "draft").glob("*.yaml"))}


def shipped_drafts() -> list[DraftsEntry]:
    """The drafts of conf/draft, without the entries that stand for any other model or head."""
    return [conf for file in draft_files().values() if (conf := shipped_draft(file)) is not None]


def shipped_draft(file: Path) -> DraftsEntry | None:
    """The draft of a file of conf/draft; None where the user says which model or head it is."""
    stored = OmegaConf.load(file)
    if "defaults" in stored:  # the same as a model, as the draft
        stored = OmegaConf.load(CONF_DIR / "model" / file.name)
    if OmegaConf.is_missing(stored, "id"):
        return None
    conf = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DraftsEntry), stored))
    assert isinstance(conf, DraftsEntry)
    return checked(conf)


def _pairing(target: ModelConf, draft: DraftsEntry, card: GpuConf | None) -> Pairing:
    numbers: tuple[float, float] | tuple[()] = ()

    def no(why: str) -> Pairing:
        return Pairing(draft, "not eligible", why, *numbers)

    if draft.spec.looks_up:
        if not draft.spec.replayed:
            return no("measured on llama.cpp alone, and not replayed")
        if draft.spec.least_k > 1:
            return no(f"drafts {draft.spec.least_k} tokens or more; name it")
        if draft.spec.least_text:
            return no("drafts as llama.cpp alone does; name it")
        return Pairing(draft, "eligible", "looks its tokens up")
    weights = draft.spec.weights
    if weights == "target_checkpoint" and not mtp_layers(target):
        return no("no config.json in a local folder names MTP layers")
    size, target_size = draft_size(draft, target), sizes_of(target)
    if size is not None:
        numbers = float(size.shape.parameters), size.weight_bytes
    if weights == "target_checkpoint":
        return Pairing(draft, "eligible", "the target's own", *numbers)
    if draft.spec.reads_states:
        if draft.head_of != target.id:
            return no(f"a head of {draft.head_of or 'another target'}")
        return Pairing(draft, "eligible", "a head of this target", *numbers)
    if weights == "copy":
        return no("a copy of the target, taken where it is named")
    if weights == "target_layers":
        return Pairing(draft, "with a note", "if the target is trained for early exit", *numbers)
    if draft.id == target.id:
        return no("the target itself")
    if target.tokenizer_family is None:
        return no("not compared: give model.tokenizer_family=")
    if draft.tokenizer_family is None:
        return no("its config names no tokenizer_family")
    if other := other_tokenizer(target, draft):
        return no(other)
    if size is None or target_size is None:
        unknown = draft if size is None else target
        return Pairing(draft, "with a note", f"the size of {unknown.name} is not known", *numbers)
    read = size.shape.weight_bytes_read(1, size.bytes_per_parameter)
    share = read / target_size.shape.weight_bytes_read(1, target_size.bytes_per_parameter)
    if size.shape.parameters >= target_size.shape.parameters:
        return no("has no fewer parameters than the target")
    if share >= 1.0:
        return no(f"reads {share:.2g} times the target's bytes per token")
    if card is not None:
        both = MemoryFit(usable_bytes(card.memory_gb), (size.memory, target_size.memory))
        if not both.fits:
            needed, room = (f"{n / 1e9:,.3g} GB" for n in (both.needed_bytes, both.room_bytes))
            return no(f"with the target {needed}, and {card.name} has {room} for models")
    if share > LARGE_SHARE:
        why = f"reads {share:.0%} of the target's bytes per token"
        return Pairing(draft, "with a note", why, *numbers)
    return Pairing(draft, "eligible", "", *numbers)


def other_tokenizer(target: ModelConf, draft: ModelConf) -> str | None:
    """That the configurations claim two tokenizers; None where they do not."""
    one, other = draft.tokenizer_family, target.tokenizer_family
    if one is None or other is None or one == other:
        return None
    return f"another tokenizer ({one}) than {target.shown} ({other})"


def draft_size(draft: ModelConf, target: ModelConf) -> ModelSize | None:
    """A draft's sizes, where they are known; those of layers of the target follow from its own.

    A head's weights have the target's dtype.
    """
    size = sizes_of(target)
    if draft.spec.shape:
        stored = _stored_config(draft)
        if stored is None or size is None:
            return None
        return ModelSize(draft.spec.read_shape(stored, draft.where), size.bytes_per_parameter)
    if draft.spec.weights not in ("target_layers", "target_checkpoint"):
        return sizes_of(draft)
    if size is None:
        return None
    shared = draft.spec.weights == "target_layers"
    layers = (draft.layers or max(1, size.shape.layers // 4)) if shared else 1
    return replace(size, shape=replace(size.shape, layers=layers), shared=shared)


def mtp_layers(target: ModelConf) -> int:
    """The number of MTP layers that the config.json next to a target's weights names, or 0."""
    stored = _stored_config(target) or {}
    text = stored.get("text_config") or stored
    return max((int(text.get(name) or 0) for name in MTP_LAYERS), default=0)


def sizes_of(conf: ModelConf) -> ModelSize | None:
    """A model's sizes, from its configuration or the config.json next to its weights; else None."""
    if isinstance(conf.architecture, dict):
        each = BYTES.get(conf.quantization or conf.dtype, SERVED_BYTES)
        return ModelSize(architecture_of(conf.architecture), each)
    stored = _stored_config(conf)
    if stored is None:
        return None
    text = SimpleNamespace(**stored)
    text.get_text_config = lambda: text
    try:
        shape = shape_of(text)
    except (UserError, TypeError, KeyError, AttributeError):
        return None
    dtype = stored.get("dtype") or stored.get("torch_dtype") if conf.dtype == "auto" else conf.dtype
    each = BYTES.get(conf.quantization or str(dtype), SERVED_BYTES)
    return None if shape is None else ModelSize(shape, each)


def _stored_config(conf: ModelConf) -> dict[str, Any] | None:
    folder = folder_of(conf.id) or Path(conf.id)
    try:
        stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return stored if isinstance(stored, dict) else None

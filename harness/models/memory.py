"""A model's sizes, and whether it fits the device's memory: computed before anything is loaded.

A model that does not fit would fail after minutes of loading, with an error of the allocator. Where
memory runs out nevertheless, `is_out_of_memory` recognises the error.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from harness.config import ModelKeys
from harness.records import UserError
from harness.theory.architecture import (
    COUNTED,
    Architecture,
    MemoryFit,
    ModelBytes,
    architecture_from,
)

# Sizes that decide step time and memory: the harness's names, and those of transformers' configs
NAMES: dict[str, str | tuple[str, ...]] = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "tied": "tie_word_embeddings",
    "experts": ("num_experts", "n_routed_experts"),
    "experts_per_token": "num_experts_per_tok",
    "moe_ffn": "moe_intermediate_size",
}
# The share that a device_map fills of the only device with weights (`get_balanced_memory` in
# transformers/integrations/accelerate.py, except for sequential); of several cards it may fill all
FILLED_BY_WEIGHTS = 0.9
# How messages of a plain RuntimeError begin when memory ran out: those of the CPU allocator
# (torch's and the system's), of Apple's, and of CUDA's libraries, which allocate workspaces of
# their own. Other errors also name memory ("an illegal memory access was encountered").
OUT_OF_MEMORY = (
    "defaultcpuallocator: not enough memory",
    "defaultcpuallocator: can't allocate memory",
    "cannot allocate memory",
    "mps backend out of memory",
    "cuda out of memory",
    "cuda error: out of memory",
    "cuda driver error: out of memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)


def model_sizes(config: Any) -> dict[str, Any]:
    """The sizes under the manifest's names; None where the config has none, or one per layer."""
    text = config.get_text_config()
    return {name: _size(text, entry) for name, entry in NAMES.items()}


def _size(config: Any, names: str | tuple[str, ...]) -> Any:
    for name in (names,) if isinstance(names, str) else names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:  # transformers refuses to read what differs between layers (Gemma 4)
            return None
        if isinstance(value, int | float):
            return value
    return None


def shape_of(config: Any) -> Architecture | None:
    """The sizes of a model of a family whose parameters the theory counts; None for others."""
    if getattr(config, "model_type", None) not in COUNTED:
        return None
    return architecture_from({**model_sizes(config), "vocab": config.vocab_size}, counted=True)


def context_tokens(config: Any) -> int | None:
    """The number of positions that the model was made for; None if the config does not say."""
    return _size(config.get_text_config(), "max_position_embeddings")


@dataclass(frozen=True)
class MemoryNeed:
    """The memory that a model takes.

    Attributes:
        cards: on which a device_map may place its layers; empty where all of it is on `device`.
        largest_bytes: the largest part that is on one card: a layer, or the embedding.
    """

    keys: ModelKeys
    name: str
    device: torch.device
    dtype: torch.dtype
    weight_bytes: float
    kv_bytes_per_token: float
    cards: tuple[torch.device, ...] = ()
    largest_bytes: float = 0.0

    @property
    def shown(self) -> str:
        return self.keys.named(self.name)

    @classmethod
    def of(
        cls,
        shape: Architecture,
        dtype: torch.dtype,
        device: torch.device,
        keys: ModelKeys,
        name: str,
        cards: tuple[torch.device, ...] = (),
    ) -> "MemoryNeed":
        embedding = shape.vocab * shape.hidden
        tables = embedding if shape.tied else 2 * embedding
        largest = max(embedding, (shape.parameters - tables) / shape.layers)
        return cls(
            keys=keys,
            name=name,
            device=device,
            dtype=dtype,
            weight_bytes=float(shape.parameters) * dtype.itemsize,
            kv_bytes_per_token=shape.kv_bytes_read(1, dtype.itemsize),
            cards=cards,
            largest_bytes=float(largest) * dtype.itemsize,
        )


def is_out_of_memory(error: BaseException) -> bool:
    """True where an error is that of memory running out, from any allocator."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in OUT_OF_MEMORY)


def check_fits(
    needs: Sequence[MemoryNeed], cached_tokens: int, *, batch: int = 1, loaded: bool = False
) -> None:
    """Refuse models that do not fit: weights, and KV caches of `cached_tokens` x `batch`.

    Models on one device share its memory. A model that is spread over several cards may take the
    free memory of all of them, next to the models on one. A model that a device_map would offload
    in part is refused, too: offloaded weights are copied to the card for each forward, so that its
    times would be those of the host's link. With `loaded`, only the caches must fit.
    """

    def places(need: MemoryNeed) -> tuple[torch.device, ...]:
        current = need.device.type == "cuda" and need.device.index is None
        return need.cards or (torch.device("cuda", 0) if current else need.device,)

    for devices in dict.fromkeys(map(places, needs)):
        # For a model on several cards, also those of models on one of these
        models = [need for need in needs if {*places(need)} <= {*devices}]
        known = [free for device in devices if (free := free_bytes(device)) is not None]
        if len(known) < len(devices):
            continue
        free, largest = sum(known), max(need.largest_bytes for need in models)
        kept = tuple(
            ModelBytes(0.0 if loaded else need.weight_bytes, need.kv_bytes_per_token)
            for need in models
        )
        memory = MemoryFit(free, kept, cached_tokens, batch)
        names = " and ".join(need.shown for need in models)
        where = str(devices[0]) if len(devices) == 1 else f"{len(devices)} cards"
        placed = 0.0 if loaded else sum(need.weight_bytes for need in models if need.cards)
        fillable = free * FILLED_BY_WEIGHTS if len(devices) == 1 else math.inf
        if not memory.fits or placed > fillable:
            texts = f"{batch} texts of {cached_tokens:,}" if batch > 1 else f"{cached_tokens:,}"
            parts = [f"{_gb(need.weight_bytes)} for {need.shown}" for need in models if not loaded]
            parts.append(f"{_gb(memory.cache_bytes)} for the cache of {texts} tokens")
            filled = f", of which device_map fills {FILLED_BY_WEIGHTS:.0%} with weights"
            raise UserError(
                f"{names}: {_gb(memory.needed_bytes)} of memory needed ({', '.join(parts)}),"
                f" {_gb(free)} free on {where}{filled if placed > fillable else ''};"
                f" {_way_out(models, memory.weights_bytes > free or placed > fillable)}"
            )
        if len(devices) > 1 and not loaded and largest > max(known):
            raise UserError(
                f"{names}: one card must hold {_gb(largest)}, a layer or the embedding, and the"
                f" emptiest of {where} has {_gb(max(known))} free; use larger cards"
            )


def _way_out(models: Sequence[MemoryNeed], weights_alone: bool) -> str:
    if weights_alone:
        heaviest = max(models, key=lambda need: need.weight_bytes)
        keys = heaviest.keys
        if heaviest.cards:
            larger = "more or larger cards" if heaviest.device.type == "cuda" else "more memory"
            return (
                f"use a smaller model, {keys.of('dtype', 'bfloat16')}, or {larger}: what device_map"
                " leaves elsewhere is copied for each forward, and that would be timed"
            )
        spread = f"{keys.of('device_map', 'auto')} (pretrained weights only)"
        return f"use a smaller model, {keys.of('dtype', 'bfloat16')}, a larger device or {spread}"
    return "lower new_tokens, the batch or the context, or use a smaller model"


def free_bytes(device: torch.device) -> float | None:
    """The memory that can still be allocated on `device`; None where it is not known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # torch uses its reserved memory before it allocates more
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    if device.type == "cpu":
        return float(psutil.virtual_memory().available)
    return None


def _gb(count: float) -> str:
    return f"{count / 1e9:,.3g} GB" if count >= 1e9 else f"{count / 1e6:,.3g} MB"

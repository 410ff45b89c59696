"""The device of a run, and what models take of its memory."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields

from harness.analysis.setup import Setup
from harness.storage.manifest import ModelEntry
from harness.summary import DraftMemory
from harness.theory.architecture import (
    COUNTED,
    Architecture,
    ModelBytes,
    architecture_from,
    memory_view,
)
from harness.theory.roofline import Card, is_card

# Per weight and cached number, where a manifest does not say it
SERVED_BYTES = 2
# Per cached number by llama.cpp's type; of q8_0 a block of 32 has a scale of two bytes
KV_BYTES: Mapping[str, float] = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32}


def card_of(setup: Setup) -> Card | None:
    """The card that `gpu` names."""
    gpu = setup.conf("gpu")
    return Card(**{field.name: gpu[field.name] for field in fields(Card)}) if gpu else None


def ran_on(setup: Setup, card: Card) -> bool:
    """True where the step times can be those of the card.

    Times that were typed in, or are another run's, are taken at the user's word.
    """
    if setup.typed_latency or setup.latency_from is not None:
        return True
    machine = setup.environment
    return is_card(card.name, card.memory_gb, machine.device_name, machine.device_memory_bytes)


def price_per_hour(setup: Setup) -> float | None:
    """US dollars per hour; None where the device is not known to be the named card."""
    card = card_of(setup)
    return card.price_per_hour_usd if card and ran_on(setup, card) else None


def architecture(entry: ModelEntry) -> Architecture | None:
    """A model's sizes; None where the manifest does not say them all."""
    sizes = {field.name: getattr(entry, field.name) for field in fields(Architecture)}
    return architecture_from(sizes, counted=entry.architecture in COUNTED.values())


def model_bytes(setup: Setup, name: str | None = None) -> ModelBytes | None:
    """Weights and cache of a draft, or the target; None where the manifest does not say them."""
    entry = setup.target if name is None else setup.described_draft(name)
    sizes, width = architecture(entry), entry.bytes_per_parameter or SERVED_BYTES
    kv, weights = entry.kv_bytes_per_token, entry.weights_bytes
    if kv is None and sizes is not None:
        kv = sizes.kv_bytes_read(1, width)
    if weights is None and sizes is not None:
        weights = sizes.parameters * width
    return None if kv is None or weights is None else ModelBytes(weights, kv)


def kv_bytes_per_token(setup: Setup, name: str | None, kv_type: str | None) -> float | None:
    """Bytes of a token in the cache of a draft, or the target, of this type.

    None is the type that the model was loaded in. None where the manifest does not say it, or a
    value of the type has no known size.
    """
    kept = model_bytes(setup, name)
    if kept is None or (kv_type and kv_type not in KV_BYTES):
        return None
    entry = setup.target if name is None else setup.described_draft(name)
    loaded = entry.bytes_per_parameter or SERVED_BYTES
    return kept.kv_per_token * (KV_BYTES[kv_type] / loaded if kv_type else 1.0)


def draft_memory(
    setup: Setup, names: Sequence[str], context_tokens: int, *, lookups: Collection[str] = ()
) -> Iterator[DraftMemory]:
    """The device's memory with each draft, as far as the sizes are known."""
    target, card, machine = model_bytes(setup), card_of(setup), setup.environment
    available = machine.device_memory_bytes or machine.memory_bytes
    if card is not None:
        available = card.memory_gb * 1e9
    for name in names:
        kept = ModelBytes() if name in lookups else model_bytes(setup, name)
        weights = setup.described_draft(name).weights_bytes
        if kept is not None and target is not None and available is not None:
            yield memory_view(name, kept, target, available, context_tokens=context_tokens)
        elif weights is not None:
            yield DraftMemory(name, weights)

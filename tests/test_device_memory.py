"""What loading and fusing leave of a card's memory: the product's own code on fake CUDA tensors.

transformers loads a checkpoint of which the header alone exists, and every tensor that this and our
fusing make is given to a simulated caching allocator (`caching_allocator`).
"""

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from caching_allocator import CachingAllocator, watching
from fake_cuda import DEVICE, fake_cuda
from random_models import copy_tokenizer, qwen3, save, small
from stubs import decoded, generation_of
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, modeling_utils

from harness.cli import compose
from harness.config import ModelConf
from harness.models import load as loading
from harness.models import memory
from harness.models.dummy import config_of
from harness.models.lean.weights import Weights, unsupported, weights_of
from harness.models.load import load
from harness.models.probe import cached_model

CARD_BYTES = 85_000_000_000
WEIGHTS = "model.safetensors"

# A card's allocator, and what has it notice all that was dropped
Card = tuple[CachingAllocator, Callable[[], None]]


class HeaderOnly:
    """A safetensors file whose tensors are made when they are read, as fake ones of the CPU."""

    def __init__(self, file: Any, **_: Any) -> None:
        self._tensors = json.loads(Path(file).read_bytes())

    def __enter__(self) -> "HeaderOnly":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def metadata(self) -> dict[str, str]:
        return {"format": "pt"}

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> "HeaderOnly.Slice":
        return self.Slice(self._tensors[name])

    class Slice:
        def __init__(self, shape: list[int]) -> None:
            self._shape = shape

        def get_shape(self) -> list[int]:
            return self._shape

        def get_dtype(self) -> str:
            return "BF16"

        def __getitem__(self, _: object) -> torch.Tensor:
            return torch.empty(self._shape, dtype=torch.bfloat16)


def checkpoint(name: str, folder: Path) -> ModelConf:
    """A shipped model as a folder in bfloat16, without its weights."""
    conf = compose("sweep", [f"model={name}"]).model
    config = config_of(conf.architecture)
    config.dtype, config.architectures = torch.bfloat16, ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    copy_tokenizer(folder)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shapes = {key: list(weight.shape) for key, weight in network.named_parameters()}
    (folder / WEIGHTS).write_text(json.dumps(shapes))
    conf.id = str(folder)
    return conf


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    """A card of 85 GB."""
    allocator = CachingAllocator(CARD_BYTES)
    monkeypatch.setattr(modeling_utils, "safe_open", HeaderOnly)
    # Fake tensors are made in the main thread alone
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    monkeypatch.setattr(memory, "free_bytes", lambda _: float(CARD_BYTES))
    monkeypatch.setattr(loading, "check_dtype", lambda *_: None)
    for name, answer in {
        "mem_get_info": lambda *_: (CARD_BYTES - allocator.reserved, CARD_BYTES),
        "memory_reserved": lambda *_: allocator.reserved,
        "memory_allocated": lambda *_: allocator.allocated,
        "current_device": lambda: 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    with fake_cuda(monkeypatch), watching(allocator) as settle:

        def empty_cache() -> None:
            settle()
            allocator.empty_cache()

        monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
        yield allocator, settle


def loaded_and_fused(name: str, folder: Path, card: Card) -> tuple[CachingAllocator, Weights]:
    allocator, settle = card
    network = load(checkpoint(name, folder), DEVICE).network
    assert unsupported(network) is None
    fused = weights_of(network, 151936)
    settle()
    return allocator, fused


@pytest.mark.parametrize(
    ("name", "weights_bytes", "layer_bytes"),
    [
        ("qwen3_4b", 8.04e9, 0.15e9),
        pytest.param("qwen3_32b", 65.52e9, 0.65e9, marks=pytest.mark.exhaustive),
    ],
)
def test_loading_and_fusing_leave_no_holes_in_a_cards_memory(
    name: str, weights_bytes: float, layer_bytes: float, tmp_path: Path, card: Card
) -> None:
    allocator, fused = loaded_and_fused(name, tmp_path, card)
    assert fused.layers[0].qkv.weight.device == DEVICE
    assert allocator.allocated == pytest.approx(weights_bytes, rel=0.01)
    assert allocator.reserved - allocator.allocated < 0.02e9
    # One layer is held twice at most
    assert allocator.most_reserved < 1.01 * weights_bytes + layer_bytes


@pytest.mark.parametrize(
    ("name", "holes"),
    [("qwen3_4b", 1.0e9), pytest.param("qwen3_32b", 6.0e9, marks=pytest.mark.exhaustive)],
)
def test_a_block_allocated_ahead_would_leave_holes(
    name: str, holes: float, tmp_path: Path, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above can fail, and transformers still does what `without_warm_up` prevents."""
    monkeypatch.setattr(loading, "without_warm_up", nullcontext)
    allocator, _ = loaded_and_fused(name, tmp_path, card)
    assert allocator.reserved - allocator.allocated > holes


def qwen2() -> PreTrainedModel:
    """With biases, and an output head of its own."""
    return small(Qwen2Config, vocab_size=1024, tie_word_embeddings=False)


@pytest.mark.parametrize("build", [qwen3, qwen2])
def test_accelerates_loading_gives_the_weights_and_texts_of_the_plain_one(
    build: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    """On a card weights go through accelerate's device_map; here the CPU takes its place."""
    conf = ModelConf(name="x", id=str(save(build(), tmp_path / "x")))
    plain, network = (
        load(replace(conf, device_map=placed), torch.device("cpu")).network
        for placed in (None, "cpu")
    )
    before, after = plain.state_dict(), network.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    # As a card's: fused, and not taken for offloaded
    models = [cached_model(each, 1024, "model=x", "auto") for each in (plain, network)]
    assert [model.engine for model in models] == ["lean", "lean"]
    texts = [decoded(model, None, generation_of([3, 1, 4], 12, 0)) for model in models]
    assert texts[0] == texts[1]

"""What loading leaves of a card's memory, and that a card's way of loading changes nothing."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from random_models import qwen3, save, small
from stubs import CPU, decoded, generation_of
from transformers import PreTrainedModel, Qwen2Config, modeling_utils

from harness.config import ModelConf
from harness.models import load as loading
from harness.models.load import load
from harness.models.probe import cached_model


def test_nothing_is_allocated_ahead_while_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one block of the weights' size our fusing would leave holes (decision 0016)."""
    ahead: list[object] = []
    conf = ModelConf(name="x", id=str(save(qwen3(), tmp_path / "x")), device_map="cpu")
    monkeypatch.setattr(modeling_utils, "caching_allocator_warmup", lambda *_: ahead.append(_))
    load(conf, CPU)
    assert not ahead
    monkeypatch.setattr(loading, "without_warm_up", nullcontext)
    load(conf, CPU)
    assert ahead, "transformers still does what is prevented"


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
        load(replace(conf, device_map=placed), CPU).network for placed in (None, "cpu")
    )
    before, after = plain.state_dict(), network.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    # As a card's: fused, and not taken for offloaded
    models = [cached_model(each, 1024, "model=x", "auto") for each in (plain, network)]
    assert [model.engine for model in models] == ["lean", "lean"]
    texts = [decoded(model, None, generation_of([3, 1, 4], 12, 0)) for model in models]
    assert texts[0] == texts[1]

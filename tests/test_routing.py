"""Mixtures of experts in 16 bits: rounding decides between experts whose scores nearly tie."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from random_models import small
from stubs import REQUEST
from transformers import Qwen3MoeConfig

from harness.measurement.generations import run_trial
from harness.measurement.lossless import compare_texts
from harness.models.cached import CachedModel
from harness.models.lean.model import LeanModel
from harness.models.lean.static import StaticModel
from harness.models.probe import allowed_error, cache_error, cached_model, probe_tokens
from harness.models.routing import pinned, routers, tie_spread

VOCAB = 128


def mixture(seed: int = 0, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
    """A mixture whose experts come in pairs that a router can only tell apart by rounding."""
    sizes = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
    more = {"num_hidden_layers": 4, "hidden_size": 64, "head_dim": 32, **more}
    network: Any = small(Qwen3MoeConfig, seed, **{**sizes, **more})
    random = torch.Generator().manual_seed(seed)
    for layer in network.model.layers:
        weight = layer.mlp.gate.weight.data
        other = 1.0 + 2e-3 * torch.randn(weight[::2].shape, generator=random)
        weight[1::2] = weight[::2] * other
    return network.to(dtype).eval()


class Stale(LeanModel):
    """A model that forgets less than it is told to: its cache keeps rejected drafts."""

    def rewind(self, count: int) -> None:
        super().rewind(max(0, count - 1))


STATIC = partial(StaticModel, compiled=False)
SEEDS = range(3)


def test_routing_ties_are_what_the_probe_would_refuse_a_sound_mixture_for() -> None:
    """What the next tests rest on: without pinned routers sound forwards differ too much."""
    errors = [cache_error(LeanModel(mixture(seed), VOCAB)) for seed in SEEDS]
    assert max(errors) > allowed_error(mixture())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", [CachedModel, LeanModel, STATIC])
def test_a_sound_mixture_passes_the_probe_however_its_routers_tie(kind: Any, seed: int) -> None:
    network = mixture(seed)
    before = [router.weight.clone() for router in routers(network)]
    assert len(before) == 4
    with pinned(network, probe_tokens(network, VOCAB)):
        assert cache_error(kind(network, VOCAB)) < allowed_error(network) / 2
        assert not torch.equal(routers(network)[0].weight, before[0])
    for router, weight in zip(routers(network), before, strict=True):
        assert torch.equal(router.weight, weight)
    opened = cached_model(network, VOCAB, "model=mixture")
    assert (opened.engine, opened.engine_reason) == ("lean", None)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_wrong_cache_of_a_mixture_is_still_found(seed: int) -> None:
    network = mixture(seed)
    with pinned(network, probe_tokens(network, VOCAB)):
        assert cache_error(Stale(network, VOCAB)) > 2 * allowed_error(network)


def test_dense_networks_and_mixtures_in_32_bits_have_no_such_ties() -> None:
    wide = mixture(dtype=torch.float32)
    assert routers(wide) == []
    assert tie_spread(wide, [1, 2, 3], VOCAB) == 0.0
    weight = wide.model.layers[0].mlp.gate.weight
    with pinned(wide, [1, 2, 3]):
        assert weight is wide.model.layers[0].mlp.gate.weight
        kept = weight.clone()
    assert torch.equal(weight, kept)


def texts_of(network: Any, prompt: Sequence[int], model: Any) -> dict[int, tuple[int, ...]]:
    request = replace(REQUEST, tokens=tuple(prompt), budget=40, draft="draft")
    draft = LeanModel(network, VOCAB)
    return {
        k: run_trial(replace(request, k=k), model, draft if k else None).tokens or () for k in (0, 4)
    }


def compared(network: Any, model: Any, prompts: int, *, judge: Any = None) -> list[Any]:
    random = torch.Generator().manual_seed(5)
    found = []
    for _ in range(prompts):
        prompt = torch.randint(VOCAB, (12,), generator=random).tolist()
        plain = texts_of(network, prompt, LeanModel(network, VOCAB))[0]
        other = texts_of(network, prompt, model)[4]
        sound = judge or model
        found.append(
            compare_texts(sound, prompt, plain, other, 4, network.dtype, network=network)
        )
    return found

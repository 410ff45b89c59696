"""Mixtures of experts in 16 bits: rounding decides between experts whose scores nearly tie."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from random_models import small
from stubs import REQUEST
from transformers import GraniteMoeConfig, Qwen3Config, Qwen3MoeConfig

from harness.analysis.caveats.texts import greedy_texts_differ, routing_ties
from harness.analysis.lossless import distrust
from harness.measurement.generations import run_trial
from harness.measurement.lossless import compare_texts
from harness.models.cached import CachedModel
from harness.models.lean.model import LeanModel
from harness.models.lean.static import StaticModel
from harness.models.probe import (
    allowed_error,
    cache_error,
    cached_model,
    check_length,
    probe_tokens,
)
from harness.models.routing import pinned, routers, tie_spread
from harness.records import UserError
from harness.reporting.sentences import verdict
from harness.summary import TextCheck

VOCAB = 128
CHECK = TextCheck("easy", "p", 0, 4, "OPEN")


def mixture(seed: int = 0, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
    """A mixture whose experts come in pairs that a router can only tell apart by rounding."""
    sizes = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
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
SEEDS = range(2)


def test_routing_ties_are_what_the_probe_would_refuse_a_sound_mixture_for() -> None:
    """What the next tests rest on: without pinned routers sound forwards differ too much."""
    errors = [cache_error(LeanModel(mixture(seed), VOCAB)) for seed in SEEDS]
    assert max(errors) > allowed_error(mixture())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", [CachedModel, LeanModel, STATIC])
def test_a_sound_mixture_passes_the_probe_however_its_routers_tie(kind: Any, seed: int) -> None:
    network = mixture(seed)
    gates: list[Any] = routers(network)
    before = [gate.weight.clone() for gate in gates]
    assert len(before) == 2
    with pinned(network, probe_tokens(network, VOCAB)):
        assert cache_error(kind(network, VOCAB)) < allowed_error(network) / 2
        assert not torch.equal(gates[0].weight, before[0])
    for gate, weight in zip(gates, before, strict=True):
        assert torch.equal(gate.weight, weight)
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


def differing(target: LeanModel, prompts: int = 24, budget: int = 12) -> tuple[Any, ...]:
    """A prompt with greedy texts by plain decoding and at K = 4 that differ.

    The draft has the weights of the target, and rounds its steps otherwise than a verify; some
    processors round both alike.
    """
    network = target.network
    draft, plainly = LeanModel(network, VOCAB), LeanModel(network, VOCAB)
    random = torch.Generator().manual_seed(5)
    for _ in range(prompts):
        prompt = tuple(torch.randint(VOCAB, (12,), generator=random).tolist())
        request = replace(REQUEST, tokens=prompt, budget=budget, draft="draft")
        plain = run_trial(request, plainly, None).tokens
        other = run_trial(replace(request, k=4), target, draft).tokens
        if plain != other:
            return prompt, plain, other
    pytest.skip("this processor rounds narrow and wide forwards alike")


@pytest.fixture(scope="module")
def deep() -> Any:
    """A mixture whose greedy texts change with the width of a forward."""
    sizes: Any = {"num_hidden_layers": 4, "hidden_size": 64, "head_dim": 32}
    return mixture(moe_intermediate_size=64, **sizes)


def test_texts_that_routing_ties_change_are_ties_and_said_to_be(
    deep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = LeanModel(deep, VOCAB)
    each = differing(target)
    compare = partial(compare_texts, target, check=CHECK, dtype=deep.dtype)
    assert compare(*each).result == "FAIL"  # as a network without routers is judged
    tie = compare(*each, network=deep)
    assert tie.result == "TIE"
    assert tie.routing is not None
    # Where ties may do as much as a fault, it is not known which of them it was
    monkeypatch.setattr("harness.measurement.lossless.MOST_BY_ROUTING", 0.0)
    unjudged = compare(*each, network=deep)
    assert unjudged.result == "UNJUDGED"
    checks = [tie, unjudged]
    (ties,), (counts,) = routing_ties.of(checks), greedy_texts_differ.of(checks)
    assert ties.values == {"tie": 1, "unjudged": 1}
    assert counts.values["not_judged"] == 1
    assert verdict.snapshot_result([check.result for check in checks]) == "UNJUDGED"
    # Neither is a fault, so the pair keeps its verdict
    assert distrust(checks) is None


def test_a_mixture_whose_routers_are_not_found_is_not_judged(deep: Any) -> None:
    target = LeanModel(deep, VOCAB)
    each = differing(target)
    unknown: Any = small(Qwen3Config)
    unknown = unknown.to(torch.bfloat16)
    unknown.config.num_experts = 8  # as of a family that keeps its routers elsewhere
    assert routers(unknown) == []
    judged = compare_texts(target, *each, check=CHECK, dtype=deep.dtype, network=unknown)
    assert (judged.result, judged.routing) == ("UNJUDGED", None)
    (caveat,) = routing_ties.of([judged])
    assert caveat.values == {"tie": 0, "unjudged": 1}


def test_routers_that_are_a_layer_of_a_module_are_found() -> None:
    sizes: Any = {"num_local_experts": 8, "num_experts_per_tok": 3}
    network: Any = small(GraniteMoeConfig, **sizes)
    network = network.to(torch.bfloat16).eval()
    assert len(routers(network)) == network.config.num_hidden_layers
    tokens = probe_tokens(network, VOCAB)
    with pinned(network, tokens):
        assert cache_error(CachedModel(network, VOCAB)) < allowed_error(network)
    assert tie_spread(network, tokens, VOCAB)


def test_pinning_a_long_text_solves_no_system_larger_than_the_hidden_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network, sizes = mixture(), list[int]()
    solve = torch.linalg.solve

    def counted(matrix: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(len(matrix))
        return solve(matrix, *rest)

    monkeypatch.setattr(torch.linalg, "solve", counted)
    model = CachedModel(network, VOCAB)
    assert model.engine == "transformers"
    check_length(model, 300, "model=mixture")
    assert sizes == [network.config.hidden_size] * 2


def test_a_mixture_that_cannot_run_on_token_ids_is_refused_in_one_line() -> None:
    network = mixture()

    def failing(*_: Any, **__: Any) -> Any:
        raise KeyError("pixels")

    network.model.layers[0].mlp.forward = failing
    with pytest.raises(UserError, match=r"model=mixture: .* cannot be run on token ids .*KeyError"):
        cached_model(network, VOCAB, "model=mixture")


def test_a_text_that_no_tie_explains_is_a_fail(deep: Any) -> None:
    """Of another token than the likeliest by far, as a wrong cache makes them."""
    target = LeanModel(deep, VOCAB)
    prompt = tuple(range(1, 13))
    plain = run_trial(replace(REQUEST, tokens=prompt, budget=12), target, None).tokens
    assert plain is not None
    target.prefill(prompt[:-1])
    worst = int(target.forward(torch.tensor(prompt[-1:]))[-1].argmin())
    wrong = (worst, *plain[1:])
    judged = compare_texts(target, prompt, plain, wrong, CHECK, deep.dtype, network=deep)
    assert (judged.result, judged.first_difference) == ("FAIL", 0)

"""The lean forward agrees with transformers' own, for every family it accepts."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3MoeConfig,
)

from harness.decoding.sampling import SamplingParameters
from harness.models.cached import CachedModel
from harness.models.lean.layers import attention, compiled_pieces
from harness.models.lean.model import CAPACITY, CHUNK, SHORT, LeanModel
from harness.models.lean.static import PIECE, StaticModel
from harness.models.lean.weights import unsupported
from harness.models.probe import cached_model, lean_model
from harness.records import Round, UserError
from tests.random_models import qwen3, small
from tests.stubs import decoded, generation_of


def grouped(kind: type[PreTrainedConfig], **more: Any) -> PreTrainedModel:
    """Three query heads for each of two key heads, of 8 numbers each."""
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
    return small(kind, **{"hidden_size": 48, "max_position_embeddings": 2048, **heads, **more})


def llama() -> PreTrainedModel:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return grouped(LlamaConfig, rope_parameters=rope, tie_word_embeddings=True)


def biased_llama() -> PreTrainedModel:
    return shaken(grouped(LlamaConfig, attention_bias=True, mlp_bias=True))


def qwen2() -> PreTrainedModel:
    return shaken(grouped(Qwen2Config))


def mistral() -> PreTrainedModel:
    return grouped(MistralConfig, sliding_window=None)


def mixture(*, normalise: bool = True) -> PreTrainedModel:
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    layers = {"norm_topk_prob": normalise, "mlp_only_layers": [1], "head_dim": 16}
    return grouped(Qwen3MoeConfig, **experts, **layers)


def plain_mixture() -> PreTrainedModel:
    return mixture(normalise=False)


def shaken(network: PreTrainedModel) -> PreTrainedModel:
    """Biases and norms start as zeros and ones, which would hide that they are not used."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in network.named_parameters():
            if name.endswith("bias") or "norm" in name:
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return network


def shaken_qwen3() -> PreTrainedModel:
    return shaken(qwen3(vocab=128))


FAMILIES = [llama, biased_llama, qwen2, mistral, shaken_qwen3, mixture, plain_mixture]
TOKENS = [(37 * index + 11) % 101 for index in range(CHUNK + SHORT + 20)]


def reference(network: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    return CachedModel(network, 100).forward(torch.tensor(tokens))


def check_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-3)


def lean(network: PreTrainedModel) -> CachedModel:
    return LeanModel(network, 100)


def static(network: PreTrainedModel, *, compiled: bool = False) -> StaticModel:
    model = StaticModel(network, 100, compiled=compiled)
    model.reserve(3 * PIECE)
    return model


Make = Callable[[PreTrainedModel], CachedModel]
COMPILED = pytest.param(
    lambda network: static(network, compiled=True),
    marks=(pytest.mark.compiled, pytest.mark.filterwarnings("default")),
)


@pytest.mark.parametrize("make", [lean, static, COMPILED])
@pytest.mark.parametrize("build", FAMILIES)
def test_logits_are_those_of_transformers_also_after_a_rewind(
    build: Callable[[], PreTrainedModel], make: Make
) -> None:
    network = build()
    assert unsupported(network) is None
    expected = reference(network, TOKENS)
    check_forward(make(network), expected)


def check_forward(model: CachedModel, expected: torch.Tensor) -> None:
    for cut in (1, 7, SHORT + 30, PIECE - 3):
        model.prefill(TOKENS[:cut])
        logits = [model.forward(torch.tensor(TOKENS[cut : cut + 1]))]
        model.forward(torch.tensor([3, 4, 5, 6]))
        model.rewind(4)
        for start, end in ((1, 5), (5, 6), (6, None)):
            end = len(TOKENS) if end is None else cut + end
            logits.append(model.forward(torch.tensor(TOKENS[cut + start : end])))
        check_close(torch.cat(logits), expected[cut:])


def test_a_cache_grows_without_forgetting() -> None:
    network = llama()
    model = LeanModel(network, 100)
    tokens = (TOKENS * 6)[: CAPACITY + 8]
    model.prefill(tokens[: CAPACITY - 2])
    logits = model.forward(torch.tensor(tokens[CAPACITY - 2 :]))
    expected = reference(network, tokens)[CAPACITY - 2 :]
    assert torch.allclose(logits, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("make", [lambda network: CachedModel(network, 100), lean, static])
def test_a_batch_computes_each_row_alone_and_a_filled_cache_holds_every_context(make: Make) -> None:
    network = shaken_qwen3()
    model = make(network)
    rows = torch.tensor([TOKENS[: CHUNK + 12], TOKENS[30 : CHUNK + 42]])
    for first in (len(rows[0]), 5):  # in one forward, and in a short one and a long one
        model.fill(2, 0)
        parts = [part for part in rows.tensor_split([first], dim=1) if part.numel()]
        logits = torch.cat([model.forward_batch(part) for part in parts], dim=1)
        for row, tokens in zip(logits, rows.tolist(), strict=True):
            check_close(row, reference(network, tokens))
    model.fill(3, 40)
    assert model.forward_batch(torch.ones(3, 2, dtype=torch.long)).shape == (3, 2, 100)
    assert model.cached_tokens == 42
    model.rewind(2)
    assert model.cached_tokens == 40
    model.prefill(TOKENS[:9])
    check_close(model.forward(torch.tensor(TOKENS[9:10])), reference(network, TOKENS[:10])[9:])


def test_fusing_shares_memory_and_leaves_the_network_and_its_ties_as_they_were() -> None:
    network = biased_llama()
    before = reference(network, TOKENS[:10])
    first = LeanModel(network, 100)
    second = LeanModel(network, 100)
    attention = network.model.layers[0].self_attn  # type: ignore[union-attr]
    fused = first.weights.layers[0].qkv.weight
    assert attention.q_proj.weight.data_ptr() == fused.data_ptr()
    assert second.weights.layers[0].qkv.weight.data_ptr() == fused.data_ptr()
    assert torch.equal(reference(network, TOKENS[:10]), before)
    attention.v_proj.weight.data.zero_()
    attention.v_proj.bias.data.zero_()
    assert not fused[:, -16:].any()
    tied: Any = llama()
    LeanModel(tied, 100)
    assert tied.lm_head.weight.data_ptr() == tied.model.embed_tokens.weight.data_ptr()


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("kind", "more", "reason"),
    [
        (LlamaConfig, {"hidden_act": "gelu"}, "activation is gelu"),
        (MistralConfig, {"sliding_window": 8}, "slides"),
        (LlamaConfig, {"rope_parameters": DYNAMIC}, "rotary embedding is dynamic"),
    ],
)
def test_what_the_lean_forward_does_not_compute_keeps_transformers_forward(
    kind: type[PreTrainedConfig], more: dict[str, Any], reason: str
) -> None:
    model = cached_model(small(kind, **more), 100, "x")
    assert model.engine == "transformers"
    assert model.describe()["engine_reason"].endswith(reason)


def test_a_forward_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = LeanModel._logits
    monkeypatch.setattr(LeanModel, "_logits", lambda self, hidden: logits(self, hidden * 1.5) + 1)
    lean, reason = lean_model(qwen3(), 1024)
    assert lean is None
    assert reason is not None
    assert "off by" in reason
    assert cached_model(qwen3(), 1024, "x").engine == "transformers"


@pytest.mark.parametrize("penalty", [None, 1.3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [1, 3])
def test_recorded_rounds_are_the_rounds_of_the_loop(
    temperature: float, k: int, penalty: float | None
) -> None:
    target, draft = shaken_qwen3(), shaken(qwen3(3, vocab=128, layers=1))
    sampling = SamplingParameters(temperature, repetition_penalty=penalty)

    def rounds(make: Make, k: int) -> list[Round]:
        generation = generation_of(TOKENS[:10], 40, k, sampling=sampling, eos={5})
        return decoded(make(target), make(draft) if k else None, generation)

    assert rounds(static, k) == rounds(lean, k)
    assert rounds(static, 0) == rounds(lean, 0)


def test_what_recorded_work_closed_over_is_kept_alive() -> None:
    model = static(shaken_qwen3())
    kept = torch.ones(1)
    alive = weakref.ref(kept)

    def work(tokens: torch.Tensor, kept: torch.Tensor = kept) -> tuple[torch.Tensor]:
        return (model.forward(tokens) * kept,)

    model.recorded("x", work, torch.tensor([3]))
    del work, kept
    assert alive() is not None


def test_a_full_static_cache_says_so() -> None:
    model = static(shaken_qwen3())
    model.fill(1, PIECE)
    model.forward(torch.tensor([1] * (PIECE - 1)))
    model.forward(torch.tensor([1]))
    with pytest.raises(ValueError, match="holds 256 positions; reserve more"):
        model.forward(torch.tensor([1]))


def test_graphs_need_a_cuda_device() -> None:
    with pytest.raises(UserError, match="backend=cuda_graphs: model=x is on cpu"):
        cached_model(qwen3(), 1024, "model=x", "cuda_graphs")


def test_attention_is_a_softmax_over_the_positions_seen() -> None:
    batch, kv_heads, groups, count, splits, width = 2, 3, 4, 5, 3, 16
    query = torch.randn(batch, kv_heads, groups * count, width)
    keys, values = torch.randn(2, batch, kv_heads, splits, PIECE, width).unbind(0)
    for first in (0, PIECE - 2, splits * PIECE - count):
        index = torch.arange(first, first + count)
        seen = torch.arange(splits * PIECE) <= index.repeat(groups).unsqueeze(1)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, keys.flatten(2, 3), values.flatten(2, 3), attn_mask=seen
        )
        attended = attention(query, keys, values, index)
        assert torch.allclose(attended, expected, atol=1e-5)


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Lets dynamo trace and compiles nothing; the placeholders of each graph, by name."""
    graphs: list[dict[str, torch.Tensor]] = []

    def spy(graph: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        graphs.append({node.name: node.meta["example_value"] for node in nodes})
        return graph.forward

    def traced(function: Callable[..., Any], **settings: Any) -> Any:
        return compiler(function, **{**settings, "options": None, "backend": spy})

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", traced)
    torch._dynamo.reset()
    compiled_pieces.cache_clear()
    yield graphs
    compiled_pieces.cache_clear()
    torch._dynamo.reset()


@pytest.mark.exhaustive
def test_no_weight_of_a_second_model_is_compiled_with_symbolic_sizes(
    spied: list[dict[str, torch.Tensor]],
) -> None:
    """A kernel that does not know a weight's width reads it two bytes at a time."""
    wider = shaken(qwen3(1, vocab=128, layers=1, hidden_size=64, num_attention_heads=4))
    wider.config.rms_norm_eps = 1e-5
    for network in (shaken(qwen3(vocab=128, layers=1)), wider):
        model = static(network, compiled=True)
        model.prefill(TOKENS[:9])
        for count in (1, 3):
            model.forward(torch.tensor(TOKENS[:count]))
    weights = [
        value
        for graph in spied
        for name, value in graph.items()
        if any(part in name.lower() for part in ("layer_", "norm", "head", "eps"))
    ]
    assert len(weights) > 30
    for weight in weights:
        assert isinstance(weight, torch.Tensor)
        assert all(isinstance(size, int) for size in weight.shape)


@pytest.mark.exhaustive
def test_context_and_positions_share_one_compiled_variant(
    spied: list[dict[str, torch.Tensor]],
) -> None:
    model = static(qwen3(vocab=128, layers=1), compiled=True)
    for tokens in (PIECE, 9 * PIECE):
        model.reserve(tokens)
        model.prefill(TOKENS[:30])
        for count in (1, 2, 9, 1, 17):
            model.forward(torch.tensor(TOKENS[:count]))
    # A layer and the head, for one position and for several
    assert len(spied) == 4
    for batch in (2, 5):
        model.fill(batch, 40)
        for count in (1, 4):
            model.forward_batch(torch.ones(batch, count, dtype=torch.long))
    # And these for a batch of several
    assert len(spied) <= 7

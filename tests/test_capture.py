"""What is recorded as a CUDA graph, checked on fake CUDA tensors: see fake_cuda."""

import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from fake_cuda import DEVICE, FakeCuda, fake_cuda, moved
from random_models import qwen3, small
from stubs import decoded, generation_of
from torch._inductor import config as inductor_settings
from torch.torch_version import TorchVersion
from transformers import PreTrainedModel, Qwen3MoeConfig

from harness.config import DraftConf, ModelKeys
from harness.decoding import loops
from harness.decoding.drafters import ModelDrafter
from harness.decoding.sampling import SamplingParameters, sampler_for
from harness.decoding.verification import rates_on
from harness.models import probe
from harness.models.cached import CachedModel, SplitNetwork
from harness.models.heads.mtp import load_mtp
from harness.models.lean.layers import compiled_pieces
from harness.models.lean.static import WARMUP, StaticModel
from harness.models.load import LoadedModel, early_exit
from harness.records import RULES, Rule, UserError
from tests.generated_code import code_for_a_card

PROMPT = [3, 1, 4, 1, 5]
K = 2


def dense(seed: int = 0) -> PreTrainedModel:
    return qwen3(seed, vocab=128, layers=1)


def mixture(seed: int = 0) -> PreTrainedModel:
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    return small(Qwen3MoeConfig, seed, num_hidden_layers=1, **experts)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Fake CUDA, on which a loop's host read says that every draft token was rejected."""
    monkeypatch.setattr(loops, "host_tokens", lambda tokens: [0] * len(tokens))
    caches = (rates_on, sampler_for)  # of tensors, which are fake in here and real elsewhere
    for kept in caches:
        kept.cache_clear()
    with fake_cuda(monkeypatch) as fake:
        yield fake
    for kept in caches:
        kept.cache_clear()


def static(network: PreTrainedModel) -> StaticModel:
    return StaticModel(moved(network), 100, compiled=False)


RATES = (0.9, 0.8)
SAMPLED = [
    (dense, SamplingParameters(0.0), "ratio", None),
    (mixture, SamplingParameters(1.0), "ratio", RATES),
    (mixture, SamplingParameters(0.8, top_k=20, top_p=0.9), "greedy_draft", None),
]
SAMPLINGS = [
    SamplingParameters(0.0),
    SamplingParameters(1.0),
    SamplingParameters(0.8, top_k=20),
    SamplingParameters(0.8, top_p=0.9),
    SamplingParameters(0.8, top_k=20, top_p=0.9),
]
EVERY = itertools.product([dense, mixture], SAMPLINGS, RULES, [None, RATES])


@pytest.mark.parametrize(
    ("build", "sampling", "rule", "synthetic"),
    [*SAMPLED, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in EVERY)],
)
def test_a_capture_runs_what_the_warm_up_ran_and_asks_the_host_nothing(
    cuda: FakeCuda,
    build: Callable[[int], PreTrainedModel],
    sampling: SamplingParameters,
    rule: Rule,
    synthetic: tuple[float, ...] | None,
) -> None:
    target, draft = static(build(0)), static(dense(1))
    more: Any = {"sampling": sampling, "rule": rule, "synthetic": synthetic, "device": DEVICE}
    generation = generation_of(PROMPT, 2, K, **more)
    assert len(decoded(target, None, generation)) == 2
    drafter = ModelDrafter(draft, sampling, rule)
    drafter.prepare(K)
    assert len(decoded(target, drafter, generation)) == 2
    # A plain step; K drafts after a rejection and after a bonus; verify with the accept step
    assert len(cuda.captured) == 4
    assert cuda.launches == 2 + 2 + 2 * 2
    assert gc.isenabled()


class Failing:
    """Work that does `fault` in its last pass, which is the captured one."""

    def __init__(self, model: StaticModel, fault: Callable[[], object]) -> None:
        self._model, self._fault, self._passes = model, fault, 0

    def __call__(self, tokens: torch.Tensor) -> tuple[torch.Tensor]:
        logits = self._model.forward(tokens)
        self._passes += 1
        if self._passes > WARMUP:
            self._fault()
        return (logits,)


def raising(error: Exception) -> Callable[[], object]:
    def fault() -> None:
        raise error

    return fault


@pytest.mark.parametrize(
    ("error", "raised", "collects"),
    [
        (KeyError("a weight"), "recording a CUDA graph failed: KeyError: 'a weight'", True),
        (torch.OutOfMemoryError("CUDA out of memory"), "^CUDA out of memory", False),
    ],
)
def test_a_capture_that_fails_names_the_cause_and_leaves_the_model_usable(
    cuda: FakeCuda, error: Exception, raised: str, collects: bool
) -> None:
    model = static(dense())
    model.prefill(PROMPT)
    tokens = torch.tensor([3], device=DEVICE)
    kind = torch.OutOfMemoryError if isinstance(error, torch.OutOfMemoryError) else RuntimeError
    try:
        (gc.enable if collects else gc.disable)()
        with pytest.raises(kind, match=raised):
            model.recorded("failing", Failing(model, raising(error)), tokens)
        assert gc.isenabled() == collects
    finally:
        gc.enable()
    assert not model.knows("failing")
    assert model.cached_tokens == len(PROMPT)
    assert model.forward(tokens).shape == (1, 100)
    assert len(cuda.captured) == 1


def test_what_would_compile_inside_a_capture_raises(cuda: FakeCuda) -> None:
    model = static(dense())
    compiled = torch.compile(lambda x, count: x * count, backend="eager", dynamic=False)
    values = torch.ones(2, device=DEVICE)
    work = Failing(model, lambda: compiled(values, 3))
    with pytest.raises(RuntimeError, match=r"recording a CUDA graph failed.*fail_on_recompile"):
        model.recorded("compiles", work, torch.tensor([3], device=DEVICE))
    assert not cuda.captured


@pytest.mark.compiled
@pytest.mark.filterwarnings("default")
def test_a_capture_of_compiled_layers_runs_what_the_warm_up_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attention in pieces, as every command runs it, through what inductor makes for a card."""
    pytest.importorskip("triton", reason="needs the Triton wheel (extra gpu-tests)")
    if torch.__version__ < TorchVersion("2.13"):
        pytest.skip(f"torch {torch.__version__} compiles for no fake tensors of another's mode")
    network: Any = dense()
    model = StaticModel(network.to("meta", torch.bfloat16), 100)
    with code_for_a_card() as (on_card, graphs), torch.inference_mode():
        for name in ("weights", "_caches", "_cos", "_sin", "_places", "_base"):
            setattr(model, name, on_card(getattr(model, name)))
        model._home = DEVICE
        with mock.patch("torch.cuda.is_available", return_value=True):
            model._pieces = compiled_pieces.__wrapped__()
        with fake_cuda(monkeypatch, fakes=False) as cuda:
            # A layer and the head, for one position and for several, whatever their number
            for count, compiled, captured in ((1, 2, 1), (3, 4, 2), (1, 4, 2), (5, 4, 3)):
                tokens = torch.zeros(count, dtype=torch.long, device=DEVICE)
                assert model.forward(tokens).shape == (count, 100)
                assert (len(graphs), len(cuda.captured)) == (compiled, captured)
                # What the compiled layers run on their inputs is in what was watched
                assert len(cuda.captured[-1]) > 100
    assert all("bmm_dtype" in code for code in graphs[::2])


# Of several cards


@pytest.mark.usefixtures("cuda")
def test_the_loop_runs_a_target_whose_layers_are_on_two_cards() -> None:
    """Operations on tensors of two cards raise, as on cards: also a head's on the target's states.

    accelerate moves what enters each part, and the whole network's logits back to the first card.
    """
    accelerate = pytest.importorskip("accelerate", reason="needs the extra accelerate")
    network: Any = qwen3(vocab=128, tie_word_embeddings=False)
    second = torch.device("cuda:1")
    parts = {f"model.{part}": DEVICE for part in ("embed_tokens", "rotary_emb", "layers.0")}
    parts |= dict.fromkeys(("model.layers.1", "model.norm", "lm_head"), second)
    for part, device in parts.items():
        moved(network.get_submodule(part), device)
    skipped = network._skip_keys_device_placement
    network = accelerate.dispatch_model(network, parts, skip_keys=skipped)
    loaded = LoadedModel(ModelKeys("model"), "big", None, frozenset(), 256, network)
    assert loaded.devices == (DEVICE, second)
    target, draft = CachedModel(network, 100), static(dense(1))
    for sampling in (SamplingParameters(0.0), SamplingParameters(1.0)):
        generation = generation_of(PROMPT, 3, K, sampling=sampling, device=target.device)
        assert len(decoded(target, None, generation)) == 3
        assert len(decoded(target, ModelDrafter(draft, sampling), generation)) == 3
    split = SplitNetwork(target)
    hidden = split.hidden(input_ids=torch.tensor([PROMPT], device=DEVICE))
    for states in (hidden, torch.zeros(hidden.shape)):
        assert split.logits(states).device == target.device
    assert network.lm_head(hidden.to(DEVICE)).device == DEVICE
    for make, kind in ((early_exit, "early_exit"), (load_mtp, "mtp")):
        network.config.model_type = "glm4_moe"
        with pytest.raises(UserError, match=f"^draft={kind}: .* spread over cuda:0, cuda:1; leave"):
            make(DraftConf(name=kind, kind=kind), loaded)


# What is compiled with which options


@pytest.mark.parametrize("rows", [1, 5])
def test_only_what_runs_on_a_single_row_is_tuned_by_coordinate_descent(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[bool] = []

    def spy(piece: Callable[..., Any], options: Any = None, **_: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            ran.append("coordinate_descent_tuning" in (options or {}))
            return piece(*arguments)

        return run

    monkeypatch.setattr(torch, "compile", spy)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    compiled_pieces.cache_clear()
    try:
        model = StaticModel(dense(), 100)
    finally:
        compiled_pieces.cache_clear()
    model.forward(torch.arange(rows))
    assert any(ran) == (rows == 1)


@pytest.mark.compiled
@pytest.mark.filterwarnings("default")
def test_a_missing_compiler_is_named_and_what_runs_is_right_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile's own failure; without a CUDA device it looks for a C++ compiler."""
    monkeypatch.setattr(probe, "check_graphs", lambda *_: None)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing compiled before
    torch._dynamo.reset()
    with inductor_settings.patch({"cpp.cxx": (None, "no-such-compiler")}):
        model = probe.cached_model(dense(), 100, "model=x", "cuda_graphs")
    torch._dynamo.reset()
    described = model.describe()
    assert described["compiled"] is False
    reason = described["engine_reason"]
    assert reason.startswith("compiling failed (InductorError: ")
    assert "no-such-compiler" in reason
    expected = CachedModel(dense(), 100).forward(torch.tensor(PROMPT))
    model.prefill([])
    assert torch.allclose(model.forward(torch.tensor(PROMPT)), expected, atol=2e-4, rtol=1e-3)

"""What CUDA's attention kernels require of their inputs, checked without a card.

On the CPU scaled_dot_product_attention takes any strides and any pointer, so that what a card would
refuse passes unseen. Here every call is checked against the rules of torch's CUDA kernels first.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from random_models import qwen3
from runs import ran
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from harness.decoding.drafters import ModelDrafter
from harness.decoding.sampling import SamplingParameters
from harness.measurement.target_texts import in_batches
from harness.models.cached import CachedModel
from harness.models.device import kernel_settings, settle_kernels
from harness.models.lean.model import CAPACITY, CHUNK, SHORT, LeanModel
from harness.models.lean.static import StaticModel
from harness.models.memory import is_out_of_memory
from harness.models.probe import cached_model

# The vector that a CUDA kernel loads at once, and what SDPA asks of a mask's row stride
VECTOR_BYTES = 16
MASK_STRIDE = 8
WIDEST = 17
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

computing = F.scaled_dot_product_attention


def check_rules(query: Any, key: Any, value: Any, attn_mask: Any = None, **more: Any) -> Any:
    """Raises where the memory-efficient kernel would refuse, misread or first copy an input.

    `preprocess_mask` in ATen/native/transformers/attention.cpp, `check_supported` in
    cuda/mem_eff_attention/kernel_forward.h.
    """
    assert query.dim() == key.dim() == value.dim() == 4
    assert query.shape[:2] == key.shape[:2] == value.shape[:2], "the fused kernels share no heads"
    for tensor in (query, key, value):
        aligned = VECTOR_BYTES // tensor.element_size()
        assert tensor.stride(-1) == 1
        assert tensor.data_ptr() % VECTOR_BYTES == 0
        assert not any(step % aligned for step in tensor.stride()[:-1])
    if more.get("is_causal"):
        assert attn_mask is None
        assert query.shape[2] == key.shape[2], "elsewhere is_causal is aligned to the first row"
    if attn_mask is not None:
        rows, columns = attn_mask.shape
        assert attn_mask.dtype == query.dtype
        assert (rows, columns) == (query.shape[2], key.shape[2])
        assert attn_mask.data_ptr() % VECTOR_BYTES == 0, "attn_bias_ptr is not correctly aligned"
        assert attn_mask.stride(1) == 1
        assert attn_mask.stride(0) % MASK_STRIDE == 0, "the mask would be copied in every layer"
        # The last vector of the last row reads beyond the last column
        read = (rows - 1) * attn_mask.stride(0) + -(-columns // MASK_STRIDE) * MASK_STRIDE
        stored = attn_mask.untyped_storage().nbytes() // attn_mask.element_size()
        assert attn_mask.storage_offset() + read <= stored
    return computing(query, key, value, attn_mask=attn_mask, **more)


@pytest.fixture
def cuda_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    checked = Mock(side_effect=check_rules)
    monkeypatch.setattr(F, "scaled_dot_product_attention", checked)
    yield
    assert checked.called, "no attention call was checked"


def lean(dtype: torch.dtype = torch.float32, **more: Any) -> LeanModel:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab": 64, "layers": 1, **more}
    network: Any = qwen3(**sizes)
    return LeanModel(network.to(dtype), 64)


def tokens_of(count: int) -> list[int]:
    return [(37 * index + 11) % 61 for index in range(count)]


@pytest.mark.usefixtures("cuda_rules")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)])
def test_every_call_of_a_verify_obeys_the_rules_of_the_cuda_kernels(
    dtype: torch.dtype, heads: tuple[int, int]
) -> None:
    model = lean(dtype, num_attention_heads=heads[0], num_key_value_heads=heads[1])
    grown = CAPACITY - WIDEST // 2
    for context in (1, 2, 3, 5, 8, 13, 22, 31, 40, 100, 127, 260, grown, grown + 40):
        model.prefill(tokens_of(context))
        for count in range(1, WIDEST + 1):
            model.forward(torch.tensor(tokens_of(count)))
            model.rewind(count)


@pytest.mark.usefixtures("cuda_rules")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 3])
def test_filled_caches_of_any_context_and_batch_obey_them(dtype: torch.dtype, batch: int) -> None:
    model = lean(dtype)
    for context in (0, 7, 61, 130):
        model.fill(batch, context)
        for count in (*range(1, WIDEST + 1), SHORT + 1, CHUNK + 3):
            model.forward_batch(torch.tensor([tokens_of(count)] * batch))
            model.rewind(count)


@pytest.mark.usefixtures("cuda_rules")
@pytest.mark.parametrize("kind", [LeanModel, StaticModel])
def test_prefills_of_any_length_obey_them(kind: type[LeanModel]) -> None:
    network = qwen3(num_attention_heads=4, num_key_value_heads=2)
    model = kind(network, 64) if kind is LeanModel else StaticModel(network, 64, compiled=False)
    for count in (1, 2, 3, 8, SHORT, SHORT + 1, 2 * SHORT, CHUNK + 1, CAPACITY + 3):
        model.prefill(tokens_of(count))
        assert model.cached_tokens == count


class Largest(TorchDispatchMode):
    """Refuses tensors of more than `most` elements, intermediate ones too."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for entry in result if isinstance(result, tuple | list) else [result]:
            if isinstance(entry, torch.Tensor):
                assert entry.numel() <= self.most, f"{func}: {tuple(entry.shape)}"
        return result


@pytest.mark.parametrize("kind", [LeanModel, StaticModel])
def test_a_long_prefill_allocates_nothing_that_grows_with_the_square_of_its_length(
    kind: type[LeanModel],
) -> None:
    positions, width = 32_768, 32
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    network = qwen3(layers=1, vocab=64, hidden_size=width, intermediate_size=width, **sizes)
    model = kind(network, 64) if kind is LeanModel else StaticModel(network, 64, compiled=False)
    with Largest(2 * positions * 2 * width):  # a growing cache is twice as long; gate and up
        model.prefill(tokens_of(positions))
    assert model.cached_tokens == positions


# cuDNN attention builds a plan per pair of lengths

Lengths = dict[bool, set[int]]


@pytest.fixture
def key_lengths(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lengths]:
    """Key lengths of every attention call, apart for cuDNN allowed and off; it starts allowed."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    seen: Lengths = {True: set(), False: set()}

    def recording(query: Any, key: Any, *more: Any, **options: Any) -> Any:
        seen[torch.backends.cuda.cudnn_sdp_enabled()].add(key.shape[-2])
        return computing(query, key, *more, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recording)
    yield seen
    settle_kernels()


OTHER_COMMANDS = ("sweep", "profile", "snapshot")


def check_varying_lengths_never_reach_cudnn(seen: Lengths) -> None:
    # One length is that of the call that finds out what a device can compute
    assert len(seen[True]) <= 1
    assert len(seen[False]) > 5


# Few samples of a step time can be so far apart that a plot's axes do not fit
@pytest.mark.usefixtures("few_samples")
@pytest.mark.filterwarnings("ignore:constrained_layout not applied")
@pytest.mark.parametrize(
    "name",
    ["audition", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in OTHER_COMMANDS)],
)
def test_no_command_lets_key_lengths_that_vary_reach_cudnn(
    name: str, key_lengths: Lengths, tmp_path: Path
) -> None:
    words = ["k=[2]", "new_tokens=8", "prompts.limit=1", "threads=1", f"results_root={tmp_path}"]
    words += ["contexts=[12]", "batches=[1]"] if name == "profile" else ["temperature=[0]"]
    words += ["drafts=[tiny_good]"] if name == "audition" else []
    run = ran(name, *words)
    check_varying_lengths_never_reach_cudnn(key_lengths)
    kernels = run.manifest.environment.entries["kernels"]
    assert set(kernels) == set(kernel_settings())
    assert not any(kernels.values())


def test_transformers_own_forward_does_not_either(
    key_lengths: Lengths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.models.probe.unsupported", lambda _network: "asked for")
    model = cached_model(qwen3(), 64, "x")
    assert type(model) is CachedModel
    drafter = ModelDrafter(model, SamplingParameters(0.0))
    drafter.begin(tokens_of(9))
    drafter.propose(8, torch.empty(8))
    check_varying_lengths_never_reach_cudnn(key_lengths)
    assert not any(kernel_settings().values())


# Errors of running out of memory, and errors that only name memory

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    MemoryError(),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 4000000000000000 bytes. Error code 12 (Cannot allocate memory)"
    ),
    RuntimeError("[enforce fail] data. DefaultCPUAllocator: not enough memory: you tried to"),
    RuntimeError("MPS backend out of memory (MPS allocated: 5.56 GB, max allowed: 6.80 GB)"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]
OTHER = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: misaligned address; the memory may be corrupted"),
    RuntimeError("Expected all tensors to use the same memory format"),
    RuntimeError("p.attn_bias_ptr is not correctly aligned"),
    ValueError("CUDA out of memory"),
]


@pytest.mark.parametrize("error", [*OUT_OF_MEMORY, *OTHER], ids=str)
def test_only_a_batch_that_runs_out_of_memory_is_halved(error: Exception) -> None:
    sizes: list[int] = []

    def work(items: Any) -> list[int]:
        sizes.append(len(items))
        if len(items) > 1:
            raise error
        return [0]

    expected = error in OUT_OF_MEMORY
    assert is_out_of_memory(error) == expected
    if expected:
        in_batches(range(4), 4, lambda _first, _item: True, work, "model=x")
        assert sizes == [4, 2, 1, 1, 1, 1]
    else:
        with pytest.raises(type(error)) as raised:
            in_batches(range(4), 4, lambda _first, _item: True, work, "model=x")
        assert raised.value is error


def test_what_the_cpu_allocator_raises_now_is_recognised() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50)
    assert is_out_of_memory(raised.value)

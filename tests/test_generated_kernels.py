"""What inductor generates for a card: how many launches, whether each fits, and its numbers.

No card is needed: code is generated for stand-in cards (generated_code), its Triton kernels are
compiled to cubins, and the code of one layer is run in Triton's interpreter in another process
(interpreted_code). It takes minutes, so it is no part of make test:

    pip install -e ".[test,gpu-tests]" && pytest -m compiled -s tests/test_generated_kernels.py

-s shows what was measured (docs/LOG.md has it for the versions it names). That a kernel is fast, or
that a driver loads it, shows on a card alone (benchmarks/gpu.py --smoke).
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from harness.models.lean.pieces import Pieces, compiled_pieces, finish, run_layer
from harness.models.lean.static import PIECE, StaticModel
from tests.generated_code import (
    A10G,
    H100,
    Cubin,
    Graph,
    code_for_a_card,
    cubins,
    launches,
    mapped,
    tensors_in,
)
from tests.random_models import qwen3

ROOT = Path(__file__).parents[1]

pytestmark = [pytest.mark.compiled, pytest.mark.filterwarnings("default")]


@pytest.fixture(autouse=True)
def _needs_triton(tmp_path_factory: pytest.TempPathFactory, monkeypatch: Any) -> None:
    triton = pytest.importorskip("triton", reason="needs the Triton wheel (extra gpu-tests)")
    if torch.__version__ < TorchVersion("2.13"):
        pytest.skip(f"torch {torch.__version__} compiles for no fake tensors of another's mode")
    for tool in ("ptxas", "cuobjdump"):
        try:
            getattr(triton.knobs.nvidia, tool)
        except RuntimeError as error:
            pytest.skip(f"needs {tool}, which the Triton wheel brings: {error}")
    # Kernels are compiled once in a session, and never taken from another one
    kept = tmp_path_factory.getbasetemp()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(kept / "triton"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(kept / "inductor"))


SMALL: dict[str, Any] = {"vocab_size": 1024, "num_hidden_layers": 1}
WIDE: dict[str, Any] = {**SMALL, "num_attention_heads": 32, "head_dim": 128}
QWEN3_4B = Qwen3Config(**WIDE, hidden_size=2560, intermediate_size=9728, num_key_value_heads=8)
QWEN3_30B_A3B = Qwen3MoeConfig(
    **WIDE,
    hidden_size=2048,
    num_key_value_heads=4,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
)
LLAMA_1B = LlamaConfig(
    **SMALL,
    hidden_size=2048,
    intermediate_size=8192,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
)
QWEN2_500M = Qwen2Config(
    **SMALL,
    hidden_size=896,
    intermediate_size=4864,
    num_attention_heads=14,
    num_key_value_heads=2,
)


def generated(
    model: StaticModel, tokens: Tensor, card: Any, arguments: list[tuple[Any, ...]] | None = None
) -> list[Graph]:
    """What a card would run for `tokens` [B, n]: one layer, and what follows the last one.

    Args:
        model: of one layer; its tensors may be on the meta device. It cannot be used afterwards.
        arguments: the real ones of these two (`eager_arguments`), for the graphs' inputs.
    """
    known: dict[int, Tensor] = {}
    fakes: list[Any] = []  # kept, so that ids stay theirs

    def noting(piece: Callable[..., Any], real: tuple[Any, ...]) -> Callable[..., Any]:
        def run(*fake: Any) -> Any:
            fakes.append(fake)
            pairs = zip(tensors_in(fake), tensors_in(real), strict=True)
            known.update((id(tensor), value) for tensor, value in pairs)
            return piece(*fake)

        return run

    with code_for_a_card(card) as (on_card, graphs), torch.inference_mode():
        for name in ("weights", "_caches", "_cos", "_sin", "_places", "_base"):
            setattr(model, name, on_card(getattr(model, name)))
        experts = model.weights.layers[0].experts
        if experts is not None:
            experts = replace(experts, grouped=card.major >= 9)
            layer = replace(model.weights.layers[0], experts=experts)
            model.weights = replace(model.weights, layers=(layer,))
        with mock.patch("torch.cuda.is_available", return_value=True):
            pieces = compiled_pieces.__wrapped__()
        if arguments is not None:
            pieces = Pieces(*map(noting, pieces, arguments))
        model._pieces = pieces
        model._offset = 0
        logits = model._logits(model._hidden(on_card(tokens)))
        assert logits.shape == (tokens.numel(), model.vocab_size)
    for graph in graphs:
        graph.inputs = [known.get(id(value), value) for value in graph.inputs]
    return graphs


def generated_for(config: PreTrainedConfig, batch: int, count: int, card: Any) -> list[Graph]:
    """The same for a network of which only the shapes are known, in bfloat16."""
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model = StaticModel(network, 1000)
    model.reserve(1100)
    if batch > 1:
        model.fill(batch, 1000)
    return generated(model, torch.zeros(batch, count, dtype=torch.long), card)


@pytest.mark.parametrize(
    ("config", "count", "most"),
    [(QWEN3_4B, 1, 12), (QWEN3_4B, 9, 15), (QWEN3_30B_A3B, 1, 17), (QWEN3_30B_A3B, 9, 24)],
)
def test_a_layer_takes_few_launches(config: PreTrainedConfig, count: int, most: int) -> None:
    graphs = generated_for(config, 1, count, H100)
    layer, finish = (launches(graph.code) for graph in graphs)
    assert 0 < len(layer) <= most, layer
    assert 0 < len(finish) <= 2, finish
    # Scores leave their product in float32, and one row of a mixture reads its experts in place
    assert any("bmm_dtype" in name for name in layer)
    assert any("_grouped_mm" in name for name in layer) == (config is QWEN3_30B_A3B and count > 1)


# Registers of a multiprocessor, which a block's threads must share
REGISTERS = 65536


def refused(made: list[Cubin], card: Any) -> list[Cubin]:
    """Those that the card's driver would not launch."""
    return [
        cubin
        for cubin in made
        if cubin.shared_bytes > card.shared_memory_per_block_optin
        or cubin.threads > card.max_threads_per_block
        or cubin.registers * cubin.threads > REGISTERS
    ]


# Every kind of layer for one position and for several; a batch
VARIANTS: dict[str, tuple[PreTrainedConfig, int, int]] = {
    "Qwen3-4B": (QWEN3_4B, 1, 1),
    "Qwen3-4B verify": (QWEN3_4B, 1, 9),
    "Qwen3-4B batch": (QWEN3_4B, 4, 1),
    "Qwen3-4B batch verify": (QWEN3_4B, 4, 5),
    "Llama, no norm of queries": (LLAMA_1B, 1, 1),
    "Llama verify": (LLAMA_1B, 1, 9),
    "Qwen2, biases": (QWEN2_500M, 1, 1),
    "Qwen2 verify": (QWEN2_500M, 1, 9),
    "mixture": (QWEN3_30B_A3B, 1, 1),
    "mixture verify": (QWEN3_30B_A3B, 1, 9),
}


@pytest.mark.parametrize("card", [A10G, H100], ids=lambda card: card.name)
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_kernel_compiles_to_a_cubin_that_the_card_can_launch(variant: str, card: Any) -> None:
    """In each configuration that the card would time, within shared memory, threads, registers."""
    graphs = generated_for(*VARIANTS[variant], card)
    made = [cubin for graph in graphs for cubin in cubins(graph.code)]
    launched = {name for graph in graphs for name in launches(graph.code) if "triton_" in name}
    assert {cubin.kernel for cubin in made} == launched != set()
    assert {cubin.architecture for cubin in made} == {f"sm_{card.major}{card.minor}"}
    widest, spilling = max(made, key=lambda cubin: cubin.shared_bytes), spilled(made)
    print(
        f"{variant}, {card.name}: {len(launched)} kernels in {len(made)} configurations, at most "
        f"{widest.shared_bytes} bytes of shared memory ({widest.kernel}); spilled: {spilling}"
    )
    assert not refused(made, card)
    assert not spilling


def spilled(made: list[Cubin]) -> dict[str, int]:
    """Bytes of a thread that kernels keep outside registers in their best configuration."""
    least: dict[str, int] = {}
    for cubin in made:
        least[cubin.kernel] = min(cubin.spilled_bytes, least.get(cubin.kernel, cubin.spilled_bytes))
    return {kernel: count for kernel, count in least.items() if count}


@pytest.mark.parametrize("card", [A10G, H100], ids=lambda card: card.name)
def test_a_kernel_with_more_shared_memory_than_the_card_has_is_noticed(card: Any) -> None:
    layer, _ = generated_for(*VARIANTS["Qwen3-4B verify"], card)
    made = cubins(layer.code)
    most = max(cubin.shared_bytes for cubin in made)
    smaller = SimpleNamespace(**{**vars(card), "shared_memory_per_block_optin": most - 1})
    assert not refused(made, card)
    assert {cubin.shared_bytes for cubin in refused(made, smaller)} == {most}


# Numbers


def eager_arguments(model: StaticModel, tokens: Tensor) -> list[tuple[Any, ...]]:
    """Copies of what a layer, and what follows the last one, are called with for `tokens` [n]."""
    calls: list[tuple[Any, ...]] = []

    def keeping(piece: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            calls.append(mapped(Tensor.clone, arguments))
            return piece(*arguments)

        return run

    model._pieces = Pieces(keeping(run_layer), keeping(finish))
    model.forward(tokens)
    return calls[:2]


def widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor.clone()


def interpreted(folder: Path, jobs: list[tuple[str, list[Any]]]) -> Any:
    """Of each (code, inputs): outputs, and inputs as they were left, by Triton's interpreter."""
    file = folder / "jobs.pt"
    torch.save(jobs, file)
    command = [sys.executable, "-m", "tests.interpreted_code", str(file)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(file, weights_only=False)


def units(value: Tensor, reference: Tensor) -> float:
    """Largest error, in units in the last place of the largest value of the reference."""
    assert value.shape == reference.shape
    error, largest = (value.float() - reference).abs().max(), reference.abs().max()
    return float(error / (largest * torch.finfo(value.dtype).eps))


# Mistakes: (pattern in the layer's code, replacement). Scores that are not divided by the root of
# the head's width, and a mask that hides a position from itself.
SCALE = (r"0\.17677669529663\d+", "1.0")
CAUSAL = (r"(tmp\d+ = tmp\d+) <= (tmp\d+)\n", r"\1 < \2\n")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [1, 9])
def test_generated_kernels_compute_the_eager_forward(count: int, tmp_path: Path) -> None:
    """Within two units in the last place of the largest value, of the eager forward in float32.

    A layer rounds to its dtype in nine places (two norms, query and key twice, attention's shares
    and result, the inner layer, two sums), each by half a unit of that value at most; about one
    unit was seen, as in the eager forward in the same dtype. Code with a mistake is further away.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    network: Any = qwen3(layers=1, vocab=128, **sizes, **heads)
    model = StaticModel(network.bfloat16(), 100, compiled=False)
    model.reserve(3 * PIECE)  # of which the last holds nothing
    model.prefill([(37 * index + 11) % 97 for index in range(PIECE + 13)])
    tokens = torch.tensor([(29 * index + 3) % 97 for index in range(count)])
    arguments = eager_arguments(model, tokens)
    wide: Any = [mapped(widened, call) for call in arguments]
    layer, last = generated(model, tokens.unsqueeze(0), H100, arguments)
    with torch.inference_mode():
        hidden, logits = run_layer(*wide[0]), finish(*wide[1])
        same_dtype = units(run_layer(*mapped(Tensor.clone, arguments[0])), hidden)

    mutants = [re.sub(*mistake, layer.code) for mistake in (SCALE, CAUSAL)]
    assert layer.code not in mutants
    jobs = [(code, layer.inputs) for code in (layer.code, *mutants)]
    right, *wrong, after = interpreted(tmp_path, [*jobs, (last.code, last.inputs)])
    cache = wide[0][2]
    (written,) = [value for value in right[1] if getattr(value, "shape", None) == cache.shape]
    errors = {
        "hidden": units(right[0][0], hidden),
        "cache": units(written, cache),
        "logits": units(after[0][0], logits),
    }
    mistaken = [units(outputs[0], hidden) for outputs, _ in wrong]
    print(f"n={count}, in units: {errors}, eager {same_dtype}, {mistaken}")
    assert max(errors.values()) <= 2
    assert min(mistaken) > 2
    assert (written != arguments[0][2]).any(), "keys and values were written"

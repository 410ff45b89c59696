"""What inductor generates for an NVIDIA card, without one: fake tensors and a stand-in card.

Inductor asks torch.cuda for a card's properties and Triton for its target; both are answered here.
The code is kept, and what it would compute is done on fake tensors, so that a whole forward goes
through every compiled part of it. Needs the Triton wheel, no CUDA build of torch. The code's Triton
kernels can then be compiled to cubins (`cubins`: Triton brings the assembler) and, in a process of
its own, the code be run in Triton's interpreter (`interpreted_code`).
"""

import ast
import re
import subprocess
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor

from tests.fake_cuda import part_of

# Of every architecture since Volta
SHARED: dict[str, Any] = {
    "gcnArchName": "",
    "regs_per_multiprocessor": 65536,
    "max_threads_per_block": 1024,
    "warp_size": 32,
    "shared_memory_per_block": 48 << 10,
}
# Compute capabilities and limits: CUDA C++ Programming Guide, "Compute Capabilities"
H100 = types.SimpleNamespace(
    **SHARED,
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    total_memory=80 << 30,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
    L2_cache_size=50 << 20,
)
A10G = types.SimpleNamespace(
    **SHARED,
    name="NVIDIA A10G",
    major=8,
    minor=6,
    multi_processor_count=80,
    max_threads_per_multi_processor=1536,
    total_memory=24 << 30,
    shared_memory_per_block_optin=99 << 10,
    shared_memory_per_multiprocessor=100 << 10,
    L2_cache_size=6 << 20,
)
INTERFACE = "torch._dynamo.device_interface.CudaInterface"


def stand_ins(card: Any) -> dict[str, Any]:
    """What is asked about a card, by name, with the answer for `card`."""
    capability = (card.major, card.minor)
    return {
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.get_device_properties": lambda *_: card,
        "torch.cuda.get_device_capability": lambda *_: capability,
        f"{INTERFACE}.Worker.get_device_properties": lambda *_: card,
        f"{INTERFACE}.get_device_properties": lambda *_: card,
        f"{INTERFACE}.get_compute_capability": lambda *_: 10 * card.major + card.minor,
        f"{INTERFACE}.is_available": lambda *_: True,
        f"{INTERFACE}.current_device": lambda *_: 0,
        f"{INTERFACE}.is_bf16_supported": lambda *_, **__: True,
        f"{INTERFACE}.is_triton_capable": lambda *_: True,
        f"{INTERFACE}.raise_if_triton_unavailable": lambda *_: None,
        # Patterns for attention, padding and shuffles: traced on a real card, and nothing of ours
        "torch._inductor.fx_passes.joint_graph.lazy_init": lambda *_: None,
    }


# Folding constants would compute them on the card; padding products would time them there, where an
# earlier compilation of this process has registered its pattern
SETTINGS = {
    "force_disable_caches": True,
    "joint_graph_constant_folding": False,
    "shape_padding": False,
}


def put(tensor: Tensor, index: Tensor, value: Tensor) -> None:
    """tensor[index] = value, as `part_of` reads it."""
    torch.ops.aten.index_put_(tensor, [index], value)


def copy(tensor: Tensor, value: Tensor, non_blocking: bool = False) -> Tensor:
    """tensor.copy_(value), likewise."""
    return torch.ops.aten.copy_.default(tensor, value, non_blocking)


@dataclass
class Graph:
    """One compiled graph.

    Attributes:
        code: of a module whose `call` runs it on a list of inputs.
        inputs: what it was called with, as far as `generated` knows their values.
    """

    code: str
    inputs: list[Any]


def mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The value with `function` of each tensor in it, in dataclasses and sequences too."""
    if isinstance(value, Tensor):
        return function(value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: mapped(function, getattr(value, f.name)) for f in fields(value)}
        return replace(value, **parts)
    if isinstance(value, tuple | list):
        make = getattr(type(value), "_make", type(value))
        return make(mapped(function, part) for part in value)
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """Each tensor in it, in the order of `mapped`."""
    tensors: list[Tensor] = []
    mapped(tensors.append, value)
    return tensors


@contextmanager
def code_for_a_card(card: Any = H100) -> Iterator[tuple[Callable[[Any], Any], list[Graph]]]:
    """Inside, torch.compile on fake CUDA tensors keeps its code.

    Yields:
        What turns tensors, alone or in dataclasses and sequences, into fake ones on the card, and
        the list that each compiled graph is added to when it is first called.
    """
    from torch._inductor.graph import GraphLowering

    # Not every installation has Triton
    gpu_target = import_module("triton.backends.compiler").GPUTarget
    driver = import_module("triton.runtime.driver").driver

    graphs: list[Graph] = []
    fake = FakeTensorMode()

    def keep_code(graph: Any) -> Any:
        wrapper = graph.codegen()[0]
        kept = Graph(getattr(wrapper, "value", wrapper), [])
        graphs.append(kept)
        module = graph.module if hasattr(graph, "module") else graph.orig_gm

        def call(args: list[Any]) -> list[Any]:
            values = list(args)
            args.clear()
            kept.inputs = kept.inputs or values
            with fake:
                return list(torch.fx.Interpreter(module).run(*values))

        return types.SimpleNamespace(call=call, __file__="code", recursively_apply_fns=None)

    def placed(tensor: Tensor) -> Tensor:
        with fake:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda:0"
            )

    architecture = 10 * card.major + card.minor
    target = types.SimpleNamespace(
        get_current_target=lambda: gpu_target("cuda", architecture, card.warp_size),
        get_current_device=lambda: 0,
    )
    torch._dynamo.reset()
    with ExitStack() as stack:
        for name, value in stand_ins(card).items():
            stack.enter_context(mock.patch(name, value))
        for kind in (FakeTensor, FunctionalTensor):
            stack.enter_context(mock.patch.object(kind, "__getitem__", part_of, create=True))
            stack.enter_context(mock.patch.object(kind, "__setitem__", put, create=True))
            stack.enter_context(mock.patch.object(kind, "copy_", copy, create=True))
        active = "_active" if hasattr(driver, "_active") else "active"  # up to Triton 3.4
        stack.enter_context(mock.patch.object(driver, active, target))
        stack.enter_context(mock.patch.object(GraphLowering, "compile_to_module", keep_code))
        stack.enter_context(config.patch(SETTINGS))
        stack.enter_context(fake)
        stack.callback(forget_what_this_machine_has)
        forget_what_this_machine_has()
        yield partial(mapped, placed), graphs
    torch._dynamo.reset()


def forget_what_this_machine_has() -> None:
    """Have torch ask again which card there is, and whether there is a Triton that works for it."""
    from torch._inductor.runtime.hints import DeviceProperties
    from torch.utils import _triton

    DeviceProperties.create.cache_clear()
    for answer in vars(_triton).values():
        if hasattr(answer, "cache_clear"):
            answer.cache_clear()


def launches(code: str) -> list[str]:
    """What one call of generated code launches, in order: Triton kernels and library products."""
    body = code[code.index("async_compile.wait(globals())") :].split("\ndef get_args")[0]
    body = body.split("\ndef benchmark_compiled_module")[0]
    called = r"(triton_\w+)\.run\(|((?:extern_kernels|torch\.ops)\.[\w.]+)\("
    return [kernel or product for kernel, product in re.findall(called, body)]


def kernels(code: str) -> list[tuple[str, str]]:
    """Name and source of each Triton kernel in generated code; each source is a module."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    texts = [
        [str(part.value) for part in call.args if isinstance(part, ast.Constant)]
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "triton"
    ]
    return [(name, source) for name, source in texts]


@dataclass(frozen=True)
class Cubin:
    """A kernel in one of the configurations that a card would time, compiled to machine code.

    Attributes:
        configuration: block sizes and warps.
        architecture: for example "sm_90".
        threads: of a block.
        shared_bytes: shared memory of a block.
        registers: of a thread.
        spilled_bytes: of a thread, in local memory for want of registers.
    """

    kernel: str
    configuration: str
    architecture: str
    threads: int
    shared_bytes: int
    registers: int
    spilled_bytes: int


def cubins(code: str) -> list[Cubin]:
    """Compile each kernel of generated code in each of its configurations, without a driver.

    Triton refuses what a card cannot launch when it loads a cubin, which needs the card; so nothing
    is refused here. Coordinate descent, which starts from these configurations, does need it.
    """
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime import triton_helpers

    made: list[Cubin] = []
    with (
        mock.patch.object(triton_helpers, "set_driver_to_gpu"),
        config.patch(use_static_cuda_launcher=False),  # what it keeps has no metadata
    ):
        for name, source in kernels(code):
            tuner: Any = getattr(PyCodeCache.load(source), name)
            tuner.precompile(warm_cache_only=True)
            made += [_cubin(name, result) for result in tuner.compile_results]
    return made


def _cubin(name: str, result: Any) -> Cubin:
    metadata = result.kernel.metadata
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.kernel.asm["cubin"])
        file.flush()
        tool = import_module("triton").knobs.nvidia.cuobjdump.path
        shown = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    # Triton's kernels call no functions, so that all local memory of a thread is spilled
    usage = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", shown)}
    architecture = re.search(r"^\.target (sm_\d+)", result.kernel.asm["ptx"], re.MULTILINE)
    assert architecture is not None
    return Cubin(
        kernel=name,
        configuration=f"{result.config.kwargs}, {metadata.num_warps} warps",
        architecture=architecture[1],
        threads=metadata.num_warps * metadata.target.warp_size,
        shared_bytes=metadata.shared,
        registers=usage["REG"],
        spilled_bytes=usage["STACK"] + usage["LOCAL"],
    )

"""What inductor generates for an NVIDIA card, without one: fake tensors and a stand-in card.

Inductor asks torch.cuda for a card's properties and Triton for its target; both are answered here.
The code is kept, and what it would compute is done on fake tensors, so that a whole forward goes
through every compiled part of it. Needs the Triton wheel, no CUDA build of torch.
"""

import re
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
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


@contextmanager
def code_for_a_card(card: Any = H100) -> Iterator[tuple[Callable[[Any], Any], list[str]]]:
    """Inside, torch.compile on fake CUDA tensors keeps its code.

    Yields:
        What turns tensors, alone or in dataclasses and sequences, into fake ones on the card, and
        the list that the code of each compiled graph is added to.
    """
    from torch._inductor.graph import GraphLowering

    # Not every installation has Triton
    gpu_target = import_module("triton.backends.compiler").GPUTarget
    driver = import_module("triton.runtime.driver").driver

    graphs: list[str] = []
    fake = FakeTensorMode()

    def keep_code(graph: Any) -> Any:
        wrapper = graph.codegen()[0]
        graphs.append(getattr(wrapper, "value", wrapper))
        module = graph.module if hasattr(graph, "module") else graph.orig_gm

        def call(args: list[Any]) -> list[Any]:
            values = list(args)
            args.clear()
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

"""Runs what inductor generated for a card in Triton's interpreter, on a machine without one.

    TRITON_INTERPRET=1 python -m tests.interpreted_code FILE

FILE holds a list of (code, inputs) by torch.save; it is replaced by a list of (outputs, inputs as
they were left). It is a process of its own, since Triton decides when it is imported whether to
interpret. Each kernel runs as it was generated, in one of its configurations, over its own grid.
Replaced are the calls of the card (device guard, allocation, the library product that only CUDA
has), the device's mathematical functions, which the interpreter does not know, and its rounding to
bfloat16, which cuts digits off where a card rounds to nearest. `tl.dot` of the interpreter (Triton
3.9) multiplies bfloat16 by its bits, so that code with it is to be run in float16.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.select_algorithm import extern_kernels

# Not every installation has Triton
tl: Any = import_module("triton.language")
interpreter: Any = import_module("triton.runtime.interpreter")


class Kernel:
    """A Triton kernel as the generated code calls it."""

    def __init__(self, function: Any, configuration: Any, meta: dict[str, Any]) -> None:
        self._function, self._configuration, self._meta = function, configuration, meta

    def run(self, *arguments: Any, stream: object) -> None:
        """Run every program of the grid, one after the other; the stream is nobody's."""
        del stream
        settings = self._configuration.kwargs
        names = [name for name in self._function.arg_names if name not in settings]
        of_kernel = dict(zip(names, arguments, strict=False))
        # A template's grid is passed behind its arguments
        of_grid = self._meta.get("extra_launcher_args", [])
        sizes = dict(zip(of_grid, arguments[len(names) :], strict=True))
        grid = triton_heuristics.GridExpr.from_meta(self._meta, self._configuration)
        programs = grid.eval_slow({**of_kernel, **sizes, **settings})
        self._function[programs](**of_kernel, **settings)


def cached_autotune(
    _sizes: Any, configs: list[Any], *, inductor_meta: dict[str, Any], **_: Any
) -> Callable[[Any], Kernel]:
    """Stand in for what every heuristic of inductor ends in; nothing is timed.

    The widest block: the interpreter's time is by the program and by the step of a reduction.
    """
    widest = max(configs, key=lambda config: config.kwargs.get("XBLOCK", 1))
    return lambda function: Kernel(function, widest, inductor_meta)


class AsyncCompile:
    """Stands in for inductor's pool of compiling processes."""

    def triton(self, name: str, source: str, **_: Any) -> Kernel:
        return getattr(PyCodeCache.load(source), name)

    def wait(self, scope: dict[str, Any]) -> None:
        pass


def bmm_dtype(a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
    """Batched product of two half-precision tensors that is not rounded to their dtype."""
    return out.copy_(torch.bmm(a.to(out_dtype), b.to(out_dtype)))


# Looked up when called: the interpreter replaces Triton's own while a kernel runs
LIBDEVICE = SimpleNamespace(
    rsqrt=lambda x: tl.rsqrt(x), exp=lambda x: tl.exp(x), exp2=lambda x: tl.exp2(x)
)


def largest(values: Any, dimension: Any) -> Any:
    """inductor's `max2`, which is a reduction by a function: in the interpreter, by the element."""
    return tl.max(values, dimension)


converting = interpreter._convert_float


def convert_float(values: Any, source: Any, target: Any, mode: Any) -> Any:
    """Bits of an array of another floating-point type; to bfloat16 rounded to nearest."""
    if source == tl.float32 and target == tl.bfloat16:
        wide = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
        return wide.bfloat16().view(torch.int16).numpy().view(np.uint16)
    return converting(values, source, target, mode)


STAND_INS: dict[str, Any] = {
    "torch._C._cuda_getCurrentRawStream": lambda _index: None,
    "torch._C._dynamo.guards._empty_strided_cuda": (
        lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)
    ),
    "torch.cuda._DeviceGuard": nullcontext,
    "torch.cuda.set_device": lambda _index: None,
    "torch._inductor.async_compile.AsyncCompile": AsyncCompile,
}


def run(code: str, inputs: list[Any]) -> tuple[list[Tensor], list[Any]]:
    """Outputs of generated code, and its inputs, some of which it wrote to."""
    with ExitStack() as stack:
        for name, value in STAND_INS.items():
            stack.enter_context(mock.patch(name, value, create=True))
        for owner, name, value in (
            (extern_kernels, "bmm_dtype", bmm_dtype),
            (triton_helpers, "libdevice", LIBDEVICE),
            (triton_helpers, "max2", largest),
            (triton_helpers, "set_driver_to_gpu", lambda: None),
            (triton_heuristics, "cached_autotune", cached_autotune),
            (interpreter, "_convert_float", convert_float),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        outputs = PyCodeCache.load(code).call(list(inputs))
    return list(outputs), inputs


if __name__ == "__main__":
    file = Path(sys.argv[1])
    jobs = torch.load(file, weights_only=False)
    torch.save([run(code, inputs) for code, inputs in jobs], file)

"""A CUDA device that computes nothing: fake tensors on cuda:0, and a capture that watches.

Fake tensors have shapes, dtypes and a device but no values, so whatever reads one on the host
raises. torch.cuda's streams and graphs are replaced by stand-ins that note which operations each
pass of recorded work runs, and hold the pass that is captured against the passes before it.
"""

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from harness.models.lean.static import WARMUP, StaticModel

DEVICE = torch.device("cuda:0")
Operation = tuple[str, tuple[Any, ...]]


class FakeCuda:
    """What was recorded.

    Attributes:
        passes: the operations of every pass of recorded work since the last capture.
        captured: of every graph, its operations.
        launches: how often graphs were replayed.
    """

    def __init__(self) -> None:
        self.passes: list[list[Operation]] = []
        self.captured: list[list[Operation]] = []
        self.launches = 0

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Stand in for `torch.cuda.graph`, whose end raises too if something raised in it."""
        assert len(self.passes) == WARMUP, "warmed up, once per capture"
        self._check()
        try:
            yield
            self._check()
        except Exception as error:
            raise RuntimeError("operation failed due to a previous error during capture") from error
        finally:
            passes, self.passes = self.passes, []
        *_, warm, captured = passes
        assert captured, "nothing was captured"
        assert captured == warm, "the captured operations are those of the last warm-up"
        for name, described in captured:
            assert "_local_scalar_dense" not in name, "a value is read on the host"
            elsewhere = [entry for entry in described if _is_elsewhere(entry)]
            assert not elsewhere, f"{name} touches the host: {elsewhere}"
        self.captured.append(captured)

    def _check(self) -> None:
        assert not gc.isenabled(), "garbage may be collected inside a capture"
        assert eval_frame._stance.stance == "fail_on_recompile", "a capture may compile"

    def note(self, operations: list[Operation]) -> None:
        """One pass of recorded work."""
        self.passes.append(operations)


def _is_elsewhere(entry: Any) -> bool:
    """Whether a described argument is a tensor on another device."""
    return isinstance(entry, tuple) and entry[:1] == ("tensor",) and entry[3] != str(DEVICE)


class _Watch(TorchDispatchMode):
    """Notes every operation with its arguments and results, tensors by shape, type and device."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Under any other mode torch.compile steps aside."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves, _ = tree_flatten((args, kwargs, result))
        self.operations.append((str(func), tuple(_described(leaf) for leaf in leaves)))
        return result


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return ("tensor", tuple(leaf.shape), str(leaf.dtype), str(leaf.device))
    return leaf if isinstance(leaf, bool | int | float | str | None) else str(leaf)


class _WithoutGuards(TorchFunctionMode):
    """What asks a torch without CUDA for a device guard before the operation, done otherwise."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.data_ptr:  # fake tensors share no memory
            return 0
        if func is torch.tensor and args[0] == []:  # a constant, whose data is made on the card
            return torch.empty(0, **(kwargs or {}))
        if func is Tensor.copy_:
            return torch.ops.aten.copy_.default(*args)
        if func is Tensor.contiguous:
            return args[0].clone(memory_format=torch.contiguous_format)
        if func is Tensor.__getitem__:
            return part_of(*args)
        if func is Tensor.__setitem__:
            tensor, index, value = args
            part = part_of(tensor, index)
            if isinstance(value, Tensor):
                torch.ops.aten.copy_.default(part, value)
            else:
                torch.ops.aten.fill_.Scalar(part, value)
            return None
        return func(*args, **(kwargs or {}))


def part_of(tensor: Tensor, index: Any) -> Tensor:
    """tensor[index] in calls that a CPU build of torch can make for a CUDA tensor.

    Indexing itself enters the tensor's device first, which needs a CUDA build.
    """
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, Tensor) for part in parts):
        indices = [part if isinstance(part, Tensor) else None for part in parts]
        return torch.ops.aten.index.Tensor(tensor, indices)
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        missing = tensor.dim() + 1 - sum(part is not None for part in parts)
        parts = (*parts[:at], *[slice(None)] * missing, *parts[at + 1 :])
    dimension = 0
    for part in parts:
        if isinstance(part, slice):
            bounds = (part.start, part.stop, part.step or 1)
            tensor = torch.ops.aten.slice.Tensor(tensor, dimension, *bounds)
        elif part is None:
            tensor = tensor.unsqueeze(dimension)
        else:
            tensor = torch.ops.aten.select.int(tensor, dimension, part)
            continue
        dimension += 1
    return tensor


class _Stream:
    def __init__(self, *_: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


@contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch, *, fakes: bool = True) -> Iterator[FakeCuda]:
    """Within the block a StaticModel made of a network `moved` here records on fake CUDA.

    Without `fakes` its tensors are already those of another mode (`generated_code`).
    """
    fake = FakeCuda()

    class Graph:
        def replay(self) -> None:
            fake.launches += 1

        def pool(self) -> object:
            return "pool"

    once = StaticModel._once

    def watched(self: StaticModel, *arguments: Any) -> Any:
        with _Watch() as watch:
            try:
                return once(self, *arguments)
            finally:
                fake.note(watch.operations)

    monkeypatch.setattr(StaticModel, "_once", watched)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", _Stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: fake.capture())
    with ExitStack() as stack:
        for mode in (FakeTensorMode, _WithoutGuards) if fakes else ():
            stack.enter_context(mode())
        yield fake


Module = TypeVar("Module", bound=nn.Module)


def moved(network: Module, device: torch.device = DEVICE) -> Module:
    """The network, or a part of one, with fake weights on a card; call it within `fake_cuda`."""

    def fake(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    for module in network.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                made = fake(weight)
                assert made is not None
                module._parameters[name] = nn.Parameter(made, requires_grad=False)
        module._buffers = tree_map(fake, module._buffers)
    return network

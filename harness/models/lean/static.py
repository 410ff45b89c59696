"""StaticModel: the lean forward with its position on the device, in shapes that never change.

A step of a launch-bound model waits for Python to launch some five hundred kernels. Recorded once
as a CUDA graph they are one launch. This requires the same shapes and addresses every time:
preallocated caches, attention over the whole cache under a mask, and the position as a number on
the device. Callers may record more than a forward (`recorded`): the K draft steps with their
sampling, or a verify with the accept step, become one graph each.

Between launches a layer is compiled as one function (torch.compile, inductor), which fuses norms,
rotary embedding, cache write and activations; the cache's length may vary, so it is compiled once
for one position and once for several. Explicit capture rather than
mode="reduce-overhead": its graph trees copy inputs and guard on addresses per call, and its limit
of graphs per code object is shared by target and draft.
"""

import gc
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from harness.models.lean.layers import (
    Pieces,
    Positions,
    compiled_pieces,
    finish,
    let_vary,
    run_layer,
)
from harness.models.lean.model import LeanModel
from harness.models.lean.weights import rotary_tables
from harness.records import first_line

# Positions of a piece of a cache. Attention computes the pieces in parallel, so that a long context
# keeps the whole card busy (Dao et al. 2023, "Flash-Decoding").
PIECE = 128
WARMUP = 3

Recorded = tuple[Tensor | None, ...]


@dataclass
class Recording:
    """Recorded work: a launch reads `inputs`, writes `outputs` and appends tokens to the cache.

    `work` is kept alive, because a graph reads the memory of every tensor in its closure.
    """

    inputs: tuple[Tensor | None, ...]
    outputs: Recorded
    launch: Callable[[], None]
    appended: int
    work: Callable[..., Recorded]


class StaticModel(LeanModel):
    """A lean model whose work is recorded and replayed as CUDA graphs.

    On the CPU the same fixed-shape code runs again without a graph, for tests.
    """

    engine = "cuda_graphs"

    def __init__(self, network: PreTrainedModel, vocab_size: int, *, compiled: bool = True) -> None:
        """Take the network's weights; layers, and the last norm with the head, may be compiled."""
        self._compiled = compiled
        self._pieces = compiled_pieces() if compiled else Pieces(run_layer, finish)
        self._recordings: dict[Hashable, Recording] = {}
        self._reserved = PIECE
        self._offset: int | None = None
        self._pool: Any = None
        self._stream: Any = None
        super().__init__(network, vocab_size)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "compiled": self._compiled}

    @property
    def recorder(self) -> "StaticModel":
        """The model itself, as a `Recorder`."""
        return self

    @torch.inference_mode()
    def reserve(self, tokens: int) -> None:
        """Allocate a cache of `tokens` positions; recordings for another size are dropped."""
        self._reserved = tokens
        if whole_pieces(tokens) != self._capacity or self._keys[0].shape[0] != 1:
            self._allocate(1, tokens)
            self._length = 0

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int]) -> None:
        self.reserve(max(self._reserved, len(tokens) + 1))
        super().prefill(tokens)

    @torch.inference_mode()
    def fill(self, batch: int, context_tokens: int) -> None:
        self._allocate(batch, context_tokens + PIECE)
        self._length = context_tokens

    @torch.inference_mode()
    def forward(self, tokens: Tensor) -> Tensor:
        return self.forward_batch(tokens.unsqueeze(0))[0]

    @torch.inference_mode()
    def forward_batch(self, tokens: Tensor) -> Tensor:
        def work(ids: Tensor) -> tuple[Tensor]:
            return (self._logits(self._hidden(ids)).view(*ids.shape, -1),)

        if self._offset is not None:
            return work(tokens.to(self._home))[0]
        (logits,) = self.recorded(("batch", *tokens.shape), work, tokens)
        assert logits is not None
        return logits

    def knows(self, key: Hashable) -> bool:
        return key in self._recordings

    @torch.inference_mode()
    def recorded(
        self, key: Hashable, work: Callable[..., Recorded], *inputs: Tensor | None
    ) -> Recorded:
        """The outputs of `work(*inputs)`, recorded the first time, one launch from then on.

        They are copies, which the next launch does not change; ValueError: the cache is full.
        """
        recording = self._recordings.get(key)
        if recording is None:
            begin = time.perf_counter()
            try:
                recording = self._recordings[key] = self._record(work, inputs)
            finally:
                self.recording_s += time.perf_counter() - begin
        if self._length + recording.appended > self._capacity:
            raise ValueError(f"the cache holds {self._capacity} positions; reserve more")
        for stored, given in zip(recording.inputs, inputs, strict=True):
            if stored is not None and given is not None:
                stored.copy_(given, non_blocking=True)
        self._base.fill_(self._length)
        recording.launch()
        self._length += recording.appended
        return tuple(None if output is None else output.clone() for output in recording.outputs)

    def _record(self, work: Callable[..., Recorded], inputs: Sequence[Tensor | None]) -> Recording:
        stored = tuple(
            None if given is None else given.to(self._home, copy=True) for given in inputs
        )
        self._base.fill_(self._length)
        if self._home.type != "cuda":
            return self._rerun(work, stored)
        # One stream for warm-up and capture, so that libraries have allocated their buffers on it
        side = self._stream = self._stream or torch.cuda.Stream(self._home)
        side.wait_stream(torch.cuda.current_stream(self._home))
        with torch.cuda.stream(side):
            for _ in range(WARMUP):  # compiles, and lets libraries take their workspaces
                self._once(work, stored)
        torch.cuda.current_stream(self._home).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with self._capture(graph):
            outputs, appended = self._once(work, stored)
        self._pool = self._pool or graph.pool()
        return Recording(stored, outputs, graph.replay, appended, work)

    @contextmanager
    def _capture(self, graph: Any) -> Iterator[None]:
        """Record the kernels that the block launches into `graph`, without garbage collection.

        Nothing may be compiled in the block. Since torch 2.9 a capture no longer collects garbage
        before it begins. If a dropped graph or kernel is collected during a capture, it is unloaded
        by a call that invalidates the capture. Collecting takes tenths of a second, so it is done
        once for all recordings of one cache size.

        Raises:
            torch.OutOfMemoryError: memory ran out.
            RuntimeError: the capture failed; the first error names the cause.
        """
        outside = torch.cuda.current_stream(self._home)
        cause: Exception | None = None
        if not self._recordings:
            gc.collect()
        collects = gc.isenabled()
        gc.disable()
        try:
            with (
                torch.compiler.set_stance("fail_on_recompile"),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream),
            ):
                try:
                    yield
                except Exception as error:
                    cause = error
                    raise
        except Exception as error:
            # Ending an invalid capture raises as well, and leaves its stream current and its pool
            # in use; earlier recordings keep that pool and still work
            torch.cuda.set_stream(outside)
            self._pool = self._stream = None
            cause = cause or error
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            raise RuntimeError(
                f"recording a CUDA graph failed: {type(cause).__name__}: {first_line(cause)}"
            ) from cause
        finally:
            if collects:
                gc.enable()

    def _once(
        self, work: Callable[..., Recorded], stored: tuple[Tensor | None, ...]
    ) -> tuple[Recorded, int]:
        """Do the work at the device's position; its outputs, and the number of appended tokens."""
        self._offset = 0
        try:
            outputs = work(*stored)
            return outputs, self._offset
        finally:
            self._offset = None

    def _rerun(self, work: Callable[..., Recorded], stored: tuple[Tensor | None, ...]) -> Recording:
        """A recording without a graph: a launch does the work again on the same tensors."""
        outputs, appended = self._once(work, stored)

        def launch() -> None:
            for kept, new in zip(outputs, self._once(work, stored)[0], strict=True):
                if kept is not None and new is not None:
                    kept.copy_(new)

        return Recording(stored, outputs, launch, appended, work)

    def _hidden(self, tokens: Tensor) -> Tensor:
        if self._offset is None:  # a prefill, which is not recorded
            return super()._hidden(tokens)
        weights, count = self.weights, tokens.shape[1]
        places = self._places.narrow(0, self._offset, count)
        # Tokens beyond the cache are refused after the launch; they must not be written elsewhere
        index = (self._base + places).clamp(max=self._capacity - 1)
        self._offset += count
        positions = Positions(
            index, self._cos.index_select(0, index), self._sin.index_select(0, index)
        )
        for tensor in positions:
            let_vary(tensor, 0)
        x = F.embedding(tokens, weights.embedding)
        for layer, cache in zip(weights.layers, self._caches, strict=True):
            let_vary(x, 0, 1)
            let_vary(cache, 1, 3)
            x = self._pieces.layer(x, layer, cache, positions, self._sizes, weights.eps)
        return x.flatten(0, 1)

    def _logits(self, hidden: Tensor) -> Tensor:
        if self._offset is None:
            return super()._logits(hidden)
        let_vary(hidden, 0)
        return self._pieces.finish(hidden, self.weights.norm, self.weights.head, self.weights.eps)

    def _allocate(self, batch: int, capacity: int) -> None:
        """Allocate keys and values of a layer together, [2, B, KV, S, PIECE, D]."""
        weights = self.weights
        self._recordings, self._pool = {}, None
        # The old cache is freed before the new one is allocated
        self._caches, self._keys, self._values = [], [], []
        self._capacity = whole_pieces(capacity)
        shape = (2, batch, weights.kv_heads, self._capacity // PIECE, PIECE, weights.head_dim)
        self._caches = [
            torch.zeros(shape, dtype=self._dtype, device=self._home) for _ in weights.layers
        ]
        # A prefill writes them as one stretch
        self._keys = [cache[0].flatten(2, 3) for cache in self._caches]
        self._values = [cache[1].flatten(2, 3) for cache in self._caches]
        self._masks = {}
        self._cos, self._sin = rotary_tables(self.network, self._capacity)
        self._places = torch.arange(self._capacity, device=self._home)
        self._base = torch.zeros((), dtype=torch.long, device=self._home)


def whole_pieces(tokens: int) -> int:
    """The least multiple of PIECE that holds `tokens` positions, of two at least.

    A single piece would be a variant of its own to compile.
    """
    return max(2, -(-tokens // PIECE)) * PIECE

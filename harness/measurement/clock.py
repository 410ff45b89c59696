"""The clock that every measurement reads, and what must not disturb what it times."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from time import perf_counter, process_time

import torch
from torch import Tensor

from harness.decoding.protocols import CausalModel
from harness.records import LoopClock


class Clock:
    """Seconds, read only after the devices have finished their work: the one place that waits."""

    def __init__(self, *timed: CausalModel | Tensor, kind: LoopClock = "wall") -> None:
        """Wait for the devices of what is timed at every reading.

        A clock of kind `cpu` counts what the threads of this process ran, and not what they waited
        for a processor: steadier where other work runs.
        """
        self._devices = {each.device for each in timed if each.device.type != "cpu"}
        self._kind = kind

    def now(self) -> float:
        """Finish all queued work, then read the clock, seconds."""
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            elif device.type == "mps":
                torch.mps.synchronize()
        return perf_counter() if self._kind == "wall" else process_time()


# Python 3.12 begins with some hundred objects frozen
FROZEN_BY_PYTHON = 1000


@cache
def _froze_itself() -> bool:
    """True where the process had frozen what it imported before the first block, as tests do."""
    return gc.get_freeze_count() > FROZEN_BY_PYTHON


@contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage collection while the block runs; within another such block, one at its beginning.

    A collection looks at every object of the process, 0.1 s with torch and transformers imported,
    as long as a whole generation of a small model. So the outermost block sets all that exists
    aside without looking at it, and the collections at the beginning of the blocks within it look
    only at what was made since: microseconds. What the process has frozen itself stays so.
    """
    if not gc.isenabled():
        gc.collect()
        yield
        return
    freezes = not _froze_itself()
    if freezes:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if freezes:
            gc.unfreeze()

"""When is the device done? The one place that knows how to wait for it."""

from time import perf_counter

import torch

from harness.decoding.protocols import CausalModel

__all__ = ["Clock"]


class Clock:
    """Seconds, read only after the devices have finished their work."""

    def __init__(self, *models: CausalModel) -> None:
        """Wait for the devices of `models` at every reading."""
        self._devices = {model.device for model in models if model.device.type != "cpu"}

    @classmethod
    def at(cls, device: torch.device) -> "Clock":
        """A clock that waits for `device`."""
        clock = cls()
        clock._devices = set() if device.type == "cpu" else {device}
        return clock

    def now(self) -> float:
        """Finish all queued work, then read the clock, seconds."""
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            elif device.type == "mps":
                torch.mps.synchronize()
        return perf_counter()

"""What machine is this? Recorded with every run, because a latency means nothing without it."""

import os
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from harness.decoding.protocols import CausalModel
from harness.measurement.clock import Clock
from harness.measurement.host import cpu_name, describe_host
from harness.models.kernels import kernel_settings
from harness.models.memory import nvidia_driver, why_no_cuda
from harness.records import UserError

THREAD_STEPS = 7


def describe(device: torch.device) -> dict[str, Any]:
    """Everything about the machine that a reader of the numbers may ask for."""
    driver = nvidia_driver()
    return {
        **describe_host(),
        "device": device.type,
        "device_name": device_name(device),
        "device_memory_bytes": (
            torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
        ),
        "cuda": torch.version.cuda,
        "driver": driver.version if driver else None,
        "kernels": kernel_settings(),
        "unused_card": why_no_cuda() if device.type == "cpu" else None,
        "threads": torch.get_num_threads(),
    }


def device_name(device: torch.device) -> str:
    """The card's own name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_name() if device.type == "cpu" else f"{device.type} ({cpu_name()})"


def settle_threads(setting: Any, models: Sequence[CausalModel], context: Sequence[int]) -> int:
    """Set torch's CPU threads: the number given, or the one that makes these models' steps fastest.

    More threads are not faster as a matter of course: an oversubscribed machine ran a 1M-parameter
    model twenty times slower with two than with one.

    Args:
        setting: "auto" or a positive integer.
        models: whose single-token steps are timed, one after the other.
        context: token ids that fill the caches.

    Returns:
        The number of threads now in force.

    Raises:
        UserError: neither auto nor a positive integer.
    """
    if setting != "auto":
        if isinstance(setting, bool) or not isinstance(setting, int) or setting < 1:
            raise UserError(f"threads={setting}: give auto or a whole number of at least 1")
        torch.set_num_threads(setting)
        return setting
    if all(model.device.type != "cpu" for model in models):
        return torch.get_num_threads()
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    candidates = sorted({1, *(2**power for power in range(1, 7) if 2**power < cores), cores})
    times = {count: _step_seconds(count, models, context) for count in candidates}
    best = min(candidates, key=times.__getitem__)
    torch.set_num_threads(best)
    return best


def _step_seconds(threads: int, models: Sequence[CausalModel], context: Sequence[int]) -> float:
    """Seconds for one step of each model, the best of a few (noise only ever adds)."""
    torch.set_num_threads(threads)
    clock = Clock(*models)
    total = 0.0
    for model in models:
        model.prefill(context)
        token = torch.tensor(context[-1:], device=model.device)
        durations: list[float] = []
        for _ in range(THREAD_STEPS):
            start = clock.now()
            model.forward(token)
            durations.append(clock.now() - start)
            model.rewind(1)
        total += min(durations)
    return total

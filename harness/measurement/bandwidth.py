"""How fast does this device copy memory? The yardstick under every step time of the same run.

A copy reads as much as it writes, so its traffic is twice the buffer. A data sheet's bandwidth is
never reached, by a copy no more than by a model; held against a copy, a step that is bound by
memory comes close to 1. (On a processor a plain store also reads the line it overwrites, which is
not counted, so a step, which only reads, may come out a little above 1.)
"""

import torch

from harness.measurement.clock import Clock
from harness.models.memory import free_bytes
from harness.records import CopyBandwidth

# Well beyond the caches: 50 MB on an H200, some 100 MB on large server processors
BUFFER_BYTES = {"cuda": 2 * 1024**3, "mps": 512 * 1024**2, "cpu": 512 * 1024**2}
SHARE_OF_FREE = 1 / 16
SAMPLES = 9
LEAST_SAMPLE_BYTES = 64 * 1024**2


def copy_bandwidth(device: torch.device, buffer_bytes: int | None = None) -> CopyBandwidth:
    """Copy a buffer several times, with the threads now in force.

    Args:
        device: whose memory.
        buffer_bytes: of one buffer; by default well beyond the device's caches, but never more than
            a sixteenth of what is free. A small one that stays in the caches tells how fast a small
            model can be read.
    """
    wanted = BUFFER_BYTES.get(device.type, BUFFER_BYTES["cpu"])
    if buffer_bytes is not None:
        wanted = buffer_bytes
    elif (free := free_bytes(device)) is not None:
        wanted = min(wanted, int(free * SHARE_OF_FREE))
    size = max(1, wanted // 4)
    # Both are written first: memory that was never touched is not there yet
    source, copy = (torch.full((size,), value, device=device) for value in (1.0, 0.0))
    clock, repeats = Clock.at(device), max(1, LEAST_SAMPLE_BYTES // (4 * size))
    seconds: list[float] = []
    for _ in range(1 + SAMPLES):
        start = clock.now()
        for _ in range(repeats):
            copy.copy_(source)
        seconds.append((clock.now() - start) / repeats)
    median = sorted(seconds[1:])[SAMPLES // 2]
    return CopyBandwidth(2 * 4 * size / median / 1e9, 4 * size, SAMPLES)

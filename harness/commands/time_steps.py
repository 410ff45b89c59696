"""Time the steps of a pair, and the memory that they read from; stored once.

A floor is the time that reading a forward's bytes takes at the device's bandwidth, which is
measured on the same run by copying memory (or, where that cannot be, the named card's data sheet).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import numpy as np
import torch

from harness.analysis.latency import visits_of
from harness.analysis.unstable import unstable_steps
from harness.commands.drafted import Drafted
from harness.commands.progress import progress
from harness.config import AuditionConfig, PairConfig, ProfileConfig, SweepConfig
from harness.measurement import environment
from harness.measurement.environment import copy_bandwidth
from harness.measurement.step_times import time_forwards
from harness.models.load import LoadedModel
from harness.models.memory import is_out_of_memory
from harness.records import GREEDY, CopyBandwidth, StepTiming, UserError
from harness.storage import RunFolder
from harness.storage.manifest import MemoryBandwidth
from harness.theory.roofline import is_card

# A model this much smaller than the copied buffer may be read from a cache
IN_CACHE = 4


def measure_steps(
    folder: RunFolder, pair: Drafted, config: ProfileConfig | SweepConfig
) -> list[StepTiming]:
    """Time single steps, unless the folder has them, and the bandwidth that floors are of."""
    if folder.manifest.bandwidth is None:
        with progress("measuring the bandwidth of the memory"):
            measured = asdict(_bandwidth(pair, config))
        folder.note(bandwidth={key: value for key, value in measured.items() if value is not None})
    timings = folder.timings()
    if not timings:
        with enough_memory("single steps"):
            has_steps = any(timed.role == "draft" for timed in pair.timed)
            name = None if has_steps else pair.draft_name
            timings = timed_steps(folder, pair, config, paired_with=name, doing="timing steps")
        folder.write_timings(timings)
    return timings


def timed_steps(
    folder: RunFolder,
    pair: Drafted,
    config: PairConfig | AuditionConfig,
    *,
    paired_with: str | None,
    repetitions: int | None = None,
    doing: str,
) -> list[StepTiming]:
    """Steps, verifies and prefills of a pair; those that cannot be right are timed again.

    The first visit that timed rounds of the draft says what a plain token takes. `paired_with` and
    `repetitions` are those of `time_forwards`. `doing` is shown.
    """
    visits = visits_of(folder.rounds.read(), pair.draft_name, GREEDY)
    plain_s = None if visits is None else float(np.median(visits.plain_s))
    lengths = sorted({len(entry.tokens) for entry in pair.prompts})
    max_k, context = max(config.k), pair.typical_context(config.new_tokens)
    with progress(doing) as bar:
        timings = time_forwards(
            pair.timed,
            max_k,
            context=context,
            prefills=sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]}),
            repetitions=repetitions,
            seed=config.seed,
            paired_with=paired_with,
            doubtful=lambda timings: bool(unstable_steps(timings, plain_s)),
            clock=config.loop_clock,
            expect=bar.expect,
            tick=bar,
        )
    return [*timings, *pair.time_proposals(max_k, context, config.loop_clock)]


@contextmanager
def enough_memory(doing: str) -> Iterator[None]:
    """Turn an allocator's error into one line of advice."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"out of memory while timing {doing}; lower new_tokens or k, leave out long prompts "
            "(prompts.limit), or use a smaller model or model.dtype=bfloat16"
        ) from error


def _bandwidth(pair: Drafted, config: ProfileConfig | SweepConfig) -> MemoryBandwidth:
    """Measured on the target's device, else the named card's data sheet."""
    device = pair.target_model.device
    copied = _copied(device)
    if copied is None:
        memory = environment.describe(device)["device_memory_bytes"]
        name = environment.device_name(device)
        if config.gpu and is_card(config.gpu.name, config.gpu.memory_gb, name, memory):
            return MemoryBandwidth(config.gpu.bandwidth_gb_s, source="datasheet")
        return MemoryBandwidth()
    speeds = {role: _in_cache(model, device, copied) for role, (model, _) in pair.opened.items()}
    return MemoryBandwidth(
        copied.gb_s,
        copied.buffer_bytes,
        copied.samples,
        "measured",
        speeds.get("target"),
        speeds.get("draft"),
    )


def _copied(device: torch.device, buffer_bytes: int | None = None) -> CopyBandwidth | None:
    """The copy bandwidth; None where there is no memory for a copy."""
    try:
        return copy_bandwidth(device, buffer_bytes)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None


def _in_cache(loaded: LoadedModel, device: torch.device, copied: CopyBandwidth) -> float | None:
    """The bandwidth at which a small model is read, where that is above the memory's: in GB/s.

    Source and copy together are as large as the model, so they stay where its weights would.
    """
    size = sum(weight.numel() * weight.element_size() for weight in loaded.network.parameters())
    if loaded.network.device != device or size * IN_CACHE > copied.buffer_bytes:
        return None
    cached = _copied(device, size // 2)
    return cached.gb_s if cached is not None and cached.gb_s > copied.gb_s else None

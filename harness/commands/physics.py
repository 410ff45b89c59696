"""What a profile measures besides single steps: bandwidth, curves, and the parts of a round."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from harness.analysis.latency import latency_rows, merged
from harness.analysis.setup import is_card
from harness.commands import execute
from harness.commands.pair import Pair, longest_generation
from harness.commands.progress import progress
from harness.commands.running import unless_broken
from harness.config import ProfileConfig, SweepConfig, rates_for
from harness.decoding.sampling import SamplingParameters
from harness.measurement import environment, round_parts, step_times
from harness.measurement.environment import copy_bandwidth
from harness.models.architecture import shape_of
from harness.models.load import LoadedModel
from harness.models.memory import check_fits, is_out_of_memory
from harness.records import CopyBandwidth, PartTiming, SkippedCell, StepTiming, UserError
from harness.storage import RunFolder, load
from harness.theory.acceptance import conditional
from harness.theory.architecture import Architecture, experts_touched
from harness.theory.roofline import ReadingModel, with_floors

AUTO_CONTEXTS = (128, 512, 2048)
AUTO_BATCHES = (1, 4, 16)
# What the curves may take where nobody asked for any in particular
AUTO_SECONDS = 45.0
# What recording and compiling them may take on top of that
AUTO_RECORDING_SECONDS = 300.0
# A model this much smaller than the copied buffer may be read from a cache
IN_CACHE = 4
GREEDY = SamplingParameters(0.0)


def measure(folder: RunFolder, pair: Pair, config: ProfileConfig) -> list[StepTiming]:
    """Time steps, curves and parts, unless the folder holds them; store all, floors included.

    Raises:
        UserError: memory ran out while single steps or parts were timed.
    """
    cells = curve_cells(pair, config)
    readers = _readers(folder, pair, config)
    with enough_memory("single steps"):
        timings = execute.measure_steps(folder, pair, config)
    if "bytes_read" not in folder.manifest:
        context = next(t.context_tokens for t in timings if t.kind == "step")
        folder.update_manifest({"bytes_read": _reads(pair, readers, context, max(config.k) + 1)})
    # An interrupted run may have noted its curves in the manifest but not stored them
    expected = folder.manifest.get("timed_forwards", len(timings))
    if "skipped_cells" not in folder.manifest or expected != len(timings):
        timed, skipped = _curves(pair, config, cells)
        timings = merged([*timings, *timed])
        entries = [_entry(cell) for cell in skipped]
        folder.update_manifest({"skipped_cells": entries, "timed_forwards": len(timings)})
        folder.write_latency(with_floors(latency_rows(timings), readers), timings)
    if not load(folder.path).parts:
        with (
            enough_memory("the parts of a round"),
            unless_broken(folder, "the parts of a round"),
        ):
            folder.write_parts(_parts(pair, config))
    return timings


def measure_steps(folder: RunFolder, pair: Pair, config: SweepConfig) -> list[StepTiming]:
    """Time single steps, unless the folder holds them; store them with their floors.

    Raises:
        UserError: memory ran out.
    """
    stored = folder.timings()
    if stored and "bandwidth" not in folder.manifest:
        return stored  # from a version that measured no bandwidth
    readers = _readers(folder, pair, config)
    with enough_memory("single steps"):
        timings = stored or execute.measure_steps(folder, pair, config)
    # Without floors, the run was stopped before they were added
    if not stored or load(folder.path).latency["floor_ms"].isna().all():
        folder.write_latency(with_floors(latency_rows(timings), readers), timings)
    return timings


@contextmanager
def enough_memory(doing: str) -> Iterator[None]:
    """Turn an allocator's error into one line of advice.

    Raises:
        UserError: memory ran out.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"out of memory while timing {doing}; lower new_tokens or k, leave out long prompts "
            "(prompts.limit), or use a smaller model or model.dtype=bfloat16"
        ) from error


def _entry(cell: SkippedCell) -> dict[str, Any]:
    return {"context_tokens": cell.context_tokens, "batch": cell.batch, "reason": cell.reason}


def _readers(
    folder: RunFolder, pair: Pair, config: ProfileConfig | SweepConfig
) -> dict[str, ReadingModel]:
    """Target and draft with the bandwidth they are read at; those whose bytes can be counted."""
    stored = folder.manifest.get("bandwidth")
    if stored is None:
        stored = _bandwidth(pair, config)
        folder.update_manifest({"bandwidth": stored})
    readers: dict[str, ReadingModel] = {}
    confs = {"target": config.model, "draft": config.draft}
    for role, loaded in (("target", pair.target), ("draft", pair.draft)):
        shape = shape_of(loaded.network.config)
        speed = stored.get(f"{role}_gb_s") or stored.get("gb_s")
        if shape is None or speed is None or confs[role].quantization is not None:
            continue
        unit = float(loaded.network.dtype.itemsize)
        readers[role] = ReadingModel(shape, unit, speed, stored["source"])
    return readers


def _reads(
    pair: Pair, readers: Mapping[str, ReadingModel], context: int, positions: int
) -> list[dict[str, Any]]:
    """The manifest's entry: what a step, and the target's widest verify, must read."""
    names = {"target": pair.target.name, "draft": pair.draft.name}
    entries: list[dict[str, Any]] = []
    for role, reader in readers.items():
        for tokens in (1, positions) if role == "target" else (1,):
            shape, unit = reader.shape, reader.bytes_per_parameter
            entries.append(
                {
                    "role": role,
                    "model": names[role],
                    "tokens": tokens,
                    "context_tokens": context,
                    "weights_bytes": shape.weight_bytes_read(tokens, unit),
                    "kv_bytes": shape.kv_bytes_read(context, unit),
                    "experts": shape.experts or None,
                    "experts_touched": touched(shape, tokens),
                }
            )
    return entries


def touched(shape: Architecture, tokens: int) -> float | None:
    """Experts of a layer that a forward over `tokens` positions reads; None in a dense model."""
    if not shape.experts:
        return None
    return experts_touched(shape.experts, shape.experts_per_token, tokens)


def _bandwidth(pair: Pair, config: ProfileConfig | SweepConfig) -> dict[str, Any]:
    """The manifest's entry: measured on the target's device, else the named card's data sheet."""
    copied = _copied(pair.device)
    if copied is None:
        memory = environment.describe(pair.device)["device_memory_bytes"]
        name = environment.device_name(pair.device)
        if config.gpu and is_card(config.gpu.name, config.gpu.memory_gb, name, memory):
            return {"gb_s": config.gpu.bandwidth_gb_s, "source": "datasheet"}
        return {}
    entry: dict[str, Any] = {
        "gb_s": copied.gb_s,
        "buffer_bytes": copied.buffer_bytes,
        "samples": copied.samples,
        "source": "measured",
    }
    for role, loaded in (("target", pair.target), ("draft", pair.draft)):
        own = _in_cache(loaded, pair.device, copied)
        if own is not None:
            entry[f"{role}_gb_s"] = own
    return entry


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
    own = _copied(device, size // 2)
    return own.gb_s if own is not None and own.gb_s > copied.gb_s else None


def curve_cells(pair: Pair, config: ProfileConfig) -> list[step_times.CurveCell]:
    """(context, batch), cheapest first; typed contexts must fit the models' positions.

    Raises:
        UserError: a typed context does not.
    """
    contexts = AUTO_CONTEXTS if config.contexts == "auto" else config.contexts
    batches = AUTO_BATCHES if config.batches == "auto" else config.batches
    if config.contexts != "auto":
        for context in contexts:
            reason = _beyond(pair, config, context)
            if reason:
                raise UserError(f"contexts: {reason}; give fewer")
    return sorted(
        ((context, batch) for context in contexts for batch in batches),
        key=lambda cell: (cell[1], cell[0]),
    )


def _beyond(pair: Pair, config: ProfileConfig, context: int) -> str | None:
    """Why a context with its drafts does not fit the models' positions; None if it does."""
    for loaded in (pair.target, pair.draft):
        limit = loaded.context_tokens
        if limit is not None and context + max(config.k) + 1 > limit:
            tokens = f"{context} tokens with K + 1 = {max(config.k) + 1} more"
            return f"{tokens} are beyond the {limit:,} positions of {loaded.key}={loaded.name}"
    return None


def _curves(
    pair: Pair, config: ProfileConfig, cells: Sequence[step_times.CurveCell]
) -> tuple[list[StepTiming], list[SkippedCell]]:
    auto = config.contexts == "auto" and config.batches == "auto"
    with progress(step_times.TIMING_CURVES, step_times.CURVE_VISITS * len(cells)) as tick:
        return step_times.time_curves(
            pair.timed,
            max(config.k),
            cells,
            refused=_refusal(pair, config),
            budget_s=AUTO_SECONDS if auto else None,
            recording_budget_s=AUTO_RECORDING_SECONDS if auto else None,
            tick=tick,
            say=tick.say,
        )


def _refusal(pair: Pair, config: ProfileConfig) -> Callable[[int, int], str | None]:
    """Says why a cell must not be tried, or None."""
    needs = [one for one in (pair.target.memory_need, pair.draft.memory_need) if one is not None]

    def refused(context: int, batch: int) -> str | None:
        for model in (pair.target_model, pair.draft_model):
            if model.rewinding != "crop":
                return "a recurrent state cannot be rewound for several sequences"
        beyond = _beyond(pair, config, context)
        if beyond:
            return beyond
        try:
            check_fits(needs, context + max(config.k) + 1, batch=batch, loaded=True)
        except UserError as error:
            return str(error)
        return None

    return refused


def _parts(pair: Pair, config: ProfileConfig) -> list[PartTiming]:
    """Whole rounds and their parts, greedy, on prompts spread over the run's own."""
    ks = sorted(k for k in set(config.k) if k > 0)
    count = min(round_parts.MOST_VISITS, len(pair.prompts))
    prompts = [pair.prompts[index * len(pair.prompts) // count].tokens for index in range(count)]
    given = config.decode.acceptance
    synthetic = {} if given is None else {k: conditional(rates_for(given, k)) for k in ks}
    timed = round_parts.TimedPair(
        pair.target_model, pair.draft_model, GREEDY, config.seed, synthetic
    )
    positions = config.new_tokens + max(ks)
    for model in (pair.target_model, pair.draft_model):
        model.reserve(longest_generation(pair.prompts, config.new_tokens, max(config.k)))
    with progress("timing parts of a round", round_parts.MOST_VISITS) as tick:
        return round_parts.time_rounds(timed, prompts, ks, positions=positions, tick=tick)

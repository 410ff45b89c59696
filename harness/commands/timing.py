"""Timing of a pair and where it is stored: single steps, and rounds of the running loop.

A floor of a step is the time that reading its bytes takes at the device's bandwidth, which is
measured on the same run by copying memory (or, where that cannot be, the named card's data sheet).
`harness.measurement.round_times` makes the visits that time rounds; the commands spread them over
what they measure.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace

import numpy as np
import torch

from harness.analysis.round_costs import can_pay, timed_precisely, visits_of
from harness.analysis.unstable import unstable_steps
from harness.commands.pair import Pair, SideBySide, Target
from harness.commands.progress import progress
from harness.commands.requests import completion, drafted, side_by_side
from harness.commands.tasks import Config, EncodedPrompt
from harness.config import AuditionConfig, ModelConf, PairConfig, ProfileConfig, SweepConfig
from harness.decoding.protocols import Drafter
from harness.measurement import environment
from harness.measurement.environment import copy_bandwidth
from harness.measurement.generations import Draft, Request
from harness.measurement.round_times import (
    LEAST_VISITS,
    Counted,
    RoundVisits,
    TimedLoop,
    pair_ks,
    timed_ks,
    visits_for,
)
from harness.measurement.step_times import time_forwards
from harness.models.load import LoadedModel
from harness.models.memory import is_out_of_memory
from harness.records import GREEDY, CopyBandwidth, StepTiming, UserError, grouped
from harness.storage import RunFolder
from harness.summary import MemoryBandwidth
from harness.theory.roofline import is_card

# A model this much smaller than the copied buffer may be read from a cache
IN_CACHE = 4


def measure_steps(
    folder: RunFolder, pair: Pair, config: ProfileConfig | SweepConfig
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
    folder: RunFolder, pair: Pair, config: Config, *, paired_with: str | None, doing: str
) -> list[StepTiming]:
    """Steps, verifies and prefills of a pair; those that cannot be right are timed again.

    The first visit that timed rounds of the draft says what a plain token takes. They are stored
    as `paired_with` a draft where several are timed one after the other.
    """
    visits = visits_of(folder.rounds.read(), pair.draft_name, GREEDY)
    plain_s = None if visits is None else float(np.median(visits.plain_s))
    lengths = sorted(len(entry.tokens) for entry in pair.prompts)
    max_k, context = max(config.k), pair.typical_context(config.new_tokens)
    with progress(doing) as bar:
        timings = time_forwards(
            pair.timed,
            max_k,
            context=context,
            prefills=[lengths[len(lengths) // 2]],
            doubtful=lambda timings: bool(unstable_steps(timings, plain_s)),
            clock=config.loop_clock,
            expect=bar.expect,
            tick=bar,
        )
    timings = [replace(timing, beside=paired_with) for timing in timings]
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


def _bandwidth(pair: Pair, config: ProfileConfig | SweepConfig) -> MemoryBandwidth:
    """Measured on the target's device, else the named card's data sheet."""
    device = pair.target_model.device
    copied, card = _copied(device), config.gpu
    if copied is None:
        memory = environment.describe(device)["device_memory_bytes"]
        name = environment.device_name(device)
        if card and is_card(card.name, card.memory_gb, name, memory):
            return MemoryBandwidth(card.bandwidth_gb_s, source="datasheet")
        return MemoryBandwidth()
    speeds = {role: _in_cache(model, device, copied) for role, (model, _) in pair.opened.items()}
    cached = (speeds.get("target"), speeds.get("draft"))
    return MemoryBandwidth(copied.gb_s, copied.buffer_bytes, copied.samples, "measured", *cached)


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


# ---- rounds --------------------------------------------------------------------------------------


# A threshold that no token which is drafted is below
NEVER = 1e-300


def visits_of_pair(
    folder: RunFolder,
    pair: Pair,
    config: PairConfig,
    temperatures: Sequence[float],
    *,
    in_looks: bool = False,
) -> RoundVisits:
    """The visits of a run of one pair, at every K of its list.

    At a threshold a round proposes any number of tokens up to K, so that one is timed, too. In
    looks visits end when their ratios are known precisely.
    """
    ks = pair_ks(config.speculative_ks, pair.most, shorter=bool(config.thresholds))
    name = pair.draft_name
    return RoundVisits(
        _timed_loop(folder, pair, pair.timed_drafting, name, config, ks, temperatures),
        folder,
        visits=visits_for(len(pair.prompts) * config.repetitions),
        counted=progress,
        enough=lambda timings: in_looks and timed_precisely(timings, name),
    )


def visits_of_draft(
    folder: RunFolder,
    target: Target,
    conf: ModelConf,
    draft: Draft | None,
    config: AuditionConfig,
    most: int | None = None,
    *,
    takes_turns: bool = False,
    in_turn: bool = False,
    counted: Counted = progress,
) -> RoundVisits:
    """The visits of one draft of an audition.

    Few of them where it cannot pay at any acceptance, half where their ratios are known precisely.

    Args:
        draft: the loaded model, or what makes the drafter of a request; None while there is none,
            to see what is missing.
        most: tokens that it drafts a round at most; None: any number.
        takes_turns: whether it is visited in turn with the other drafts later; until then by few.
        in_turn: whether these are those visits (`harness.commands.draft_scoring`).
        counted: as of `RoundVisits`.
    """

    def no_draft(_: Request) -> Drafter:
        raise AssertionError("rounds are timed with a draft")

    visits = visits_for(len(target.prompts) * config.repetitions, among_many=True)
    if takes_turns:
        visits = min(visits, LEAST_VISITS)
    if config.latency.target_ms is not None or config.latency_from is not None:
        visits = 0
    ks, at = timed_ks(config.k, most), config.temperature
    return RoundVisits(
        _timed_loop(folder, target, draft or no_draft, conf.name, config, ks, at),
        folder,
        visits=visits,
        counted=counted,
        enough=lambda timings: not in_turn and timed_precisely(timings, conf.name),
        loses=lambda timings: not (in_turn or conf.spec.looks_up or can_pay(timings, conf.name)),
        in_turn=in_turn,
    )


def _timed_loop(
    folder: RunFolder,
    target: Target,
    draft: Draft,
    name: str,
    config: Config,
    ks: Sequence[int],
    temperatures: Sequence[float],
) -> TimedLoop:
    """The loop that times plain decoding and every K at every temperature.

    At a threshold every draft step is read back, for a threshold that none is below.
    """
    p_min = NEVER if config.thresholds else 0.0

    def asked(entry: EncodedPrompt, k: int, temperature: float) -> Request:
        plain = completion(target.target, config, entry, temperature, 0)
        return drafted(plain, config, k, name, p_min)

    by_set = grouped(target.prompts, lambda entry: entry.prompt.prompt_set)
    cells = [(k, temperature) for k in (0, *ks) for temperature in temperatures]
    requests = {key: [asked(each[0], *cell) for cell in cells] for key, each in by_set.items()}
    prompts = {key: [entry.tokens for entry in each] for key, each in by_set.items()}
    models = None
    if isinstance(target, Pair) and side_by_side(folder, target, ks):
        models = SideBySide(target, timed=True).models
    return TimedLoop(
        target.target_model, draft, name, requests, prompts, target.positions, beside=models
    )

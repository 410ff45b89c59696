"""From raw step samples to the rows of latency.csv and the three numbers the formulas need."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from harness.records import LatencyRow, StepTiming
from harness.theory.speedup import StepTimes

VERIFY = ("target", "verify")


def merged(timings: Sequence[StepTiming]) -> list[StepTiming]:
    """One timing per forward, with the samples of all that are of the same, in their order."""
    pooled: dict[StepTiming, tuple[float, ...]] = {}
    for timing in timings:
        key = replace(timing, samples_s=())
        pooled[key] = pooled.get(key, ()) + timing.samples_s
    return [replace(key, samples_s=samples) for key, samples in pooled.items()]


def latency_rows(timings: Sequence[StepTiming]) -> list[LatencyRow]:
    """Summarise raw samples into latency.csv's rows: median, p10 and p90 in ms.

    A forward that was timed beside several drafts is one row over all its samples.
    """
    rows: list[LatencyRow] = []
    for timing in merged([replace(timing, beside=None) for timing in timings]):
        p10, median, p90 = np.percentile(np.array(timing.samples_s) * 1e3, [10, 50, 90])
        rows.append(
            LatencyRow(
                timing.role,
                timing.model,
                timing.kind,
                timing.tokens,
                timing.context_tokens,
                timing.batch,
                float(median),
                float(p10),
                float(p90),
                len(timing.samples_s),
            )
        )
    return rows


def reference(timings: Sequence[StepTiming]) -> list[StepTiming]:
    """The timings at the context and batch of the first step: those a prediction is made from.

    A profile times further contexts and batches behind them.
    """
    first = next((timing for timing in timings if timing.kind == "step"), None)
    if first is None:
        return list(timings)
    where = (first.context_tokens, first.batch)
    return [
        timing
        for timing in timings
        if timing.kind == "prefill" or (timing.context_tokens, timing.batch) == where
    ]


def step_times(timings: Sequence[StepTiming]) -> StepTimes:
    """Medians as the formulas want them: draft step, target step, verify by positions.

    Of several contexts or batches the first counts.

    Raises:
        KeyError: the timings lack a draft step or a target step.
    """
    medians = {
        (timing.role, timing.kind, timing.tokens): float(np.median(timing.samples_s))
        for timing in reference(timings)
    }
    verify = sorted(tokens for role, kind, tokens in medians if (role, kind) == VERIFY)
    return StepTimes(
        draft_s=medians["draft", "step", 1],
        target_s=medians["target", "step", 1],
        verify_s=tuple(medians["target", "verify", tokens] for tokens in verify),
    )

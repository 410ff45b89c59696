"""From raw step samples to the rows of latency.csv and the three numbers the formulas need."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from harness.records import LatencyRow, StepTiming
from harness.theory.speedup import StepTimes

VERIFY = ("target", "verify")


def latency_rows(timings: Sequence[StepTiming]) -> list[LatencyRow]:
    """Summarise raw samples into latency.csv's rows: median, p10 and p90 in ms.

    A forward that was timed beside several drafts is one row over all its samples.
    """
    pooled: dict[tuple[object, ...], StepTiming] = {}
    for timing in timings:
        key = (
            timing.role,
            timing.model,
            timing.kind,
            timing.tokens,
            timing.context_tokens,
            timing.batch,
        )
        before = pooled[key].samples_s if key in pooled else ()
        pooled[key] = replace(timing, samples_s=before + timing.samples_s)
    rows: list[LatencyRow] = []
    for timing in pooled.values():
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


def step_times(timings: Sequence[StepTiming]) -> StepTimes:
    """Medians as the formulas want them: draft step, target step, verify by positions.

    Raises:
        KeyError: the timings lack a draft step or a target step.
    """
    medians = {
        (timing.role, timing.kind, timing.tokens): float(np.median(timing.samples_s))
        for timing in timings
    }
    verify = sorted(tokens for role, kind, tokens in medians if (role, kind) == VERIFY)
    return StepTimes(
        draft_s=medians["draft", "step", 1],
        target_s=medians["target", "step", 1],
        verify_s=tuple(medians["target", "verify", tokens] for tokens in verify),
    )

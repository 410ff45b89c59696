"""Timings and cells that cannot be right."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from harness.analysis.unstable import impossible, unstable_cells, unstable_steps
from harness.records import ResultRow, StepTiming


def test_a_speedup_above_what_rounds_emit_cannot_be_nor_carry_a_verdict() -> None:
    row = ResultRow(prompt_set="easy", temperature=0.0, k=2, source="measured", speedup=3.1)
    rows = [row, replace(row, speedup=2.9), replace(row, source="replayed"), replace(row, k=0)]
    few = replace(row, speedup=2.1, tokens_per_round=1.7)
    rows += [few, replace(few, speedup=1.9)]
    unstable = list(unstable_cells(rows))
    assert [(each.reason, each.kind, each.tokens, each.value) for each in unstable] == [
        ("speedup_above_most", "cell", 2, 3.1),
        ("speedup_above_most", "cell", 2, 2.1),
    ]
    for temperature, doubt in ((0.0, 3.1), (1.0, None)):
        said = impossible(unstable, temperature)
        assert (None if said is None else said[1]["speedup"]) == doubt


def forwards(medians: dict[int, float], noise: float = 0.01, size: int = 40) -> list[StepTiming]:
    """A target's step (0 positions) and verifies."""
    rng = np.random.default_rng(0)
    return [
        StepTiming(
            "target", "big", "verify" if n else "step", n or 1, 64, 1,
            tuple(seconds * np.exp(noise * rng.normal(size=size))),
        )
        for n, seconds in medians.items()
    ]  # fmt: skip


def elsewhere(timings: Sequence[StepTiming]) -> list[StepTiming]:
    return [replace(timing, context_tokens=999) for timing in timings]


@pytest.mark.parametrize(
    ("timings", "plain_s", "reasons"),
    [
        (forwards({0: 1.0, 1: 1.0, 2: 1.1, 3: 1.2}), 1.05, []),
        (forwards({0: 1.0, 1: 0.9, 2: 1.1}), None, ["verify_unlike_step"]),
        (forwards({0: 1.0, 1: 1.1, 2: 1.15}), None, ["verify_unlike_step"]),
        (forwards({0: 1.0, 2: 0.9}), None, ["verify_below_step"]),
        (forwards({0: 1.0, 1: 0.0, 2: 1.1}), None, []),  # a clock too coarse for one forward
        (forwards({0: 1.0, 1: 1.0, 2: 1.3, 3: 1.1}), None, ["verify_falls"]),
        (forwards({0: 1.0, 1: 0.9}, noise=0.5), None, []),  # within its noise
        (forwards({0: 1.0, 1: 0.9}, size=3), None, []),  # too few samples to tell
        (forwards({0: 1.0, 1: 1.0}), 1.2, ["step_unlike_plain_token"]),
        (forwards({0: 1.0, 1: 1.0}), 0.8, ["step_unlike_plain_token"]),
        ([*forwards({0: 1.0}), *elsewhere(forwards({1: 0.9}))], None, []),  # another context
    ],
)
def test_a_forward_that_is_faster_than_a_part_of_it_cannot_be(timings, plain_s, reasons) -> None:
    assert [entry.reason for entry in unstable_steps(timings, plain_s)] == reasons

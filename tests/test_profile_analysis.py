"""What a profile says of its steps."""

from dataclasses import replace

import pytest

from harness.analysis.caveats.timing import launch_bound
from harness.analysis.profile_and_snapshot import step_curves
from harness.analysis.round_costs import latency_rows, merged, reference, step_times
from harness.records import LatencyRow, StepTiming
from harness.summary import StepBound
from harness.theory.speedup import StepTimes


def timing(role, kind, tokens, seconds, context, batch):
    return StepTiming(role, role, kind, tokens, context, batch, (seconds,))


def test_a_prediction_takes_the_first_context_and_batch_of_a_profile():
    timings = [timing("target", "prefill", 44, 9.0, 0, 1)]
    for slower, (context, batch) in enumerate([(44, 1), (512, 16)], start=1):
        timings += [
            timing("target", "step", 1, 2.0 * slower, context, batch),
            timing("draft", "step", 1, 0.5 * slower, context, batch),
            timing("target", "verify", 2, 3.0 * slower, context, batch),
        ]
    times = step_times(timings)
    assert (times.target_s, times.draft_s, times.verify_s) == (2.0, 0.5, (3.0,))
    assert len(reference(timings)) == 4


def test_timings_of_one_forward_are_merged_with_all_their_samples():
    one, other = timing("target", "step", 1, 1.0, 44, 1), timing("target", "step", 1, 3.0, 44, 1)
    (both,) = merged([one, other])
    assert both.samples_s == (1.0, 3.0)
    assert len(merged([one, replace(other, batch=2)])) == 2
    assert latency_rows([one, replace(other, beside="small")])[0].samples == 2


def test_a_curve_is_as_long_as_its_verifies_and_has_both_steps():
    rows = [
        LatencyRow(role, role, kind, tokens, 100, batch, ms, ms, ms, 5)
        for batch in (1, 16)
        for role, kind, tokens, ms in (
            ("target", "step", 1, 10.0),
            ("draft", "step", 1, 1.0),
            *(("target", "verify", n, 10.0 * n) for n in range(1, 6)),
        )
    ]
    one, many = step_curves(rows)
    assert (one.batch, many.batch) == (1, 16)
    assert one.c == pytest.approx(0.1)
    assert one.verify_s == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05])


def test_a_launch_bound_step_is_a_caveat_with_its_model():
    bound = StepBound(
        role="target", model="big", context_tokens=64, batch=1, step_s=0.06, floor_s=0.0134,
        mbu=0.22, positions=9, positions_ratio=1.02, arithmetic_share=0.0, overhead_share=0.78,
        bound="overhead", launch_bound=True,
    )  # fmt: skip
    near = replace(bound, role="draft", launch_bound=False)
    (caveat,) = launch_bound.of([bound, near], StepTimes(0.022, 0.06))
    assert caveat.values["roles"] == "target"
    assert caveat.values["c"] == pytest.approx(0.022 / 0.06)

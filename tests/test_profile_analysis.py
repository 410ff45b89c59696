"""What a profile says: the waterfall of a round, and what it makes of its steps."""

from dataclasses import replace

import numpy as np
import pytest

from harness.analysis.caveats.timing import launch_bound
from harness.analysis.profile import round_breakdowns, step_curves
from harness.analysis.round_costs import latency_rows, merged, reference, step_times
from harness.records import LatencyRow, PartTiming, StepTiming
from harness.summary import StepBound
from harness.theory.speedup import RoundTimes, StepTimes


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
    assert (one.c, one.largest_k) == (pytest.approx(0.1), 4)
    assert one.verify_s == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05])


def timed(round_ms=10.0, rounds=8):
    """K = 3: draft 4.5, verify 4, accept .5, host .2, rewind .1; step 3, plain token 3.3, ms."""
    parts = {"draft": 4.5, "verify": 4.0, "accept": 0.5, "host": 0.2, "rewind": 0.1}
    tokens = (3,) * rounds
    return [
        PartTiming(0, "round", (3.3e-3,) * rounds, (1,) * rounds),
        PartTiming(0, "step", (3e-3,) * rounds),
        *(PartTiming(3, name, (ms / 1e3,) * rounds) for name, ms in parts.items()),
        PartTiming(3, "round", (round_ms / 1e3,) * rounds, tokens),
    ]


def test_the_parts_and_what_they_leave_unexplained_make_up_the_round():
    (entry,) = round_breakdowns(timed())
    parts = sum(part.seconds for part in entry.parts)
    assert parts + entry.unexplained_s == pytest.approx(0.010)
    assert entry.unexplained_share == pytest.approx(0.07)
    assert entry.speedup == pytest.approx(3 * 3.3 / 10)
    assert round_breakdowns(timed()[2:]) == []  # without plain decoding


def test_the_waterfall_falls_from_a_free_round_to_the_largest_and_the_measured_speedup():
    (entry,) = round_breakdowns(timed())
    plain = 3.3
    expected = [4.0, 4 * plain / (4.5 + plain), 4 * plain / 8.5]
    steps = entry.waterfall
    assert [step.speedup for step in steps[:3]] == pytest.approx(expected)
    assert [step.value for step in steps[:3]] == [
        None,
        pytest.approx(4.5 / plain),
        pytest.approx(4.0 / plain),
    ]
    causes = "free draft verify accept rewind host unexplained acceptance"
    assert [step.cause for step in steps] == causes.split()
    assert steps[-2].speedup == pytest.approx(4 * plain / 10)  # (K + 1) R(0) / R(K)
    factors = np.prod([step.factor for step in steps])
    assert steps[0].speedup * factors == pytest.approx(entry.speedup)


def test_parts_explain_the_round_of_the_running_loop_at_its_pace():
    """R is of a machine half as fast as when the parts were timed, and a round is a bit longer."""
    (entry,) = round_breakdowns(timed(), RoundTimes(6.6e-3, ((3, 19e-3),)))
    assert (entry.plain_s, entry.round_s) == (pytest.approx(6.6e-3), 19e-3)
    assert sum(part.seconds for part in entry.parts) == pytest.approx(2 * 9.3e-3)
    assert entry.unexplained_s == pytest.approx(0.4e-3)
    assert entry.speedup == pytest.approx(3 * 6.6 / 19)


def test_rounds_that_the_machine_interrupted_do_not_count():
    slow = [replace(t, samples_s=(*t.samples_s[:6], 1.0, 1.0)) for t in timed()]
    assert round_breakdowns(slow)[0].round_s == pytest.approx(0.010)


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

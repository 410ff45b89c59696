"""What a profile says: the waterfall of a round, and where speculation stops paying by batch."""

from dataclasses import replace

import numpy as np
import pytest
import workloads

from harness.analysis.caveats import launch_bound
from harness.analysis.latency import latency_rows, merged, reference, step_times
from harness.analysis.profile import (
    assumed_gains,
    replayed_gains,
    round_breakdowns,
    step_curves,
    stopping_batches,
)
from harness.analysis.replayed import replayed
from harness.records import LatencyRow, PartTiming, StepTiming
from harness.summary import StepBound
from harness.theory.acceptance import expected_tokens_per_round
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


def batched(paying, losing):
    """c .1 everywhere; a verify of n positions costs one step, and at batch `losing` n steps."""
    rows = []
    for batch in (paying, losing):
        steps = {("target", "step", 1): 10.0, ("draft", "step", 1): 1.0}
        verify = {
            ("target", "verify", n): 10.0 * (1 if batch == paying else n) for n in range(1, 6)
        }
        rows += [
            LatencyRow(role, role, kind, tokens, 100, batch, ms, ms, ms, 5)
            for (role, kind, tokens), ms in {**steps, **verify}.items()
        ]
    return rows


def test_speculation_stops_paying_at_the_batch_whose_verify_costs_its_positions():
    one, many = assumed_gains(batched(1, 16), [0.8])
    assert (one.k, one.speedup) == (4, pytest.approx(expected_tokens_per_round(0.8, 4) / 1.4))
    assert (many.k, many.speedup, many.v) == (0, 1.0, 5.0)
    assert (one.tokens_per_second, many.tokens_per_second) == pytest.approx((100, 1600))
    assert [curve.batch for curve in step_curves(batched(1, 16))] == [1, 16]


def test_texts_are_replayed_at_every_batch_each_with_its_own_rounds():
    rng = np.random.default_rng(0)
    traces = [
        workloads.trace("draft", "easy", f"{n}", (rng.random(20 + n) < 0.9).astype(float))
        for n in range(40)
    ]
    one, many = replayed_gains(batched(1, 16), traces, None)
    tokens_per_round = {k: r.tokens_per_round for k, r in replayed(traces, "ratio", (2, 4)).items()}
    assert (one.alpha, one.k) == (None, 4)
    assert one.speedup == pytest.approx(tokens_per_round[4] / 1.4)
    assert (many.k, many.speedup) == (0, 1.0)
    # A batch of 16 is not full to its end
    assert one.tokens_per_second == pytest.approx(100)
    assert 0.8 * 1600 < many.tokens_per_second < 1600


@pytest.mark.parametrize(
    ("paying", "losing", "alpha", "stop"),
    [(1, 16, 0.8, (1, 16, ())), (16, 1, 0.8, (16, None, (1,))), (16, 1, 0.0, (None, 1, ()))],
)
def test_the_largest_batch_that_pays_is_named_with_those_that_do_not(paying, losing, alpha, stop):
    (found,) = stopping_batches(assumed_gains(batched(paying, losing), [alpha]))
    assert (found.pays_up_to, found.stops_at, found.not_at) == stop


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


def test_a_launch_bound_step_is_a_caveat_with_its_numbers():
    bound = StepBound(
        role="target", model="big", context_tokens=64, batch=1, step_s=0.06, floor_s=0.0134,
        mbu=0.22, positions=9, positions_ratio=1.02, arithmetic_share=0.0, overhead_share=0.78,
        bound="overhead", launch_bound=True,
    )  # fmt: skip
    near = replace(bound, role="draft", launch_bound=False)
    (caveat,) = launch_bound([bound, near], StepTimes(0.022, 0.06))
    assert (caveat.values["role"], caveat.values["mbu"]) == ("target", 0.22)
    assert caveat.values["c"] == pytest.approx(0.022 / 0.06)

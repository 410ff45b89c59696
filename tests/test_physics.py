"""Latency physics: floors, what bounds a step, curves, the parts of a round, and modelled cards."""

# Tables that may be None and stand-ins for pairs: a wrong one fails the test that reads it
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportOptionalOperand=false

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from random_models import qwen3
from stubs import TableModel
from test_roofline import QWEN3

from harness.analysis.batching import batch_gains, stopping_batches
from harness.analysis.latency import latency_rows, merged, reference, step_times
from harness.analysis.waterfall import round_parts, waterfall
from harness.commands import profile
from harness.commands.step_times import enough_memory
from harness.config import ProfileConfig
from harness.decoding.drafters import ModelDrafter
from harness.decoding.sampling import SamplingParameters
from harness.measurement import round_parts as timed_rounds
from harness.measurement import step_times as curves
from harness.measurement.environment import copy_bandwidth
from harness.measurement.round_parts import TimedPair, time_rounds
from harness.measurement.step_times import TimedModel
from harness.models.cached import CachedModel
from harness.models.lean import static
from harness.models.lean.model import LeanModel
from harness.models.lean.static import StaticModel
from harness.profile import unknown_card
from harness.records import LatencyRow, PartTiming, StepTiming, UserError
from harness.theory.planning import PlanRequest
from harness.theory.roofline import (
    Card,
    ReadingModel,
    step_bounds,
    with_floors,
)
from harness.theory.speedup import speedup

A10G = Card("a10g", 600, 70, 24, 1.1)
H200 = Card("h200", 4800, 989, 141, 4.5)
GREEDY = SamplingParameters(0.0)


def row(role, kind, tokens, ms, context=100, batch=1):
    return LatencyRow(role, role, kind, tokens, context, batch, ms, ms, ms, 5)


def curve(step_ms, widest_ms, role="target", **where):
    return [row(role, "step", 1, step_ms, **where), row(role, "verify", 9, widest_ms, **where)]


def reader(name="4B", bandwidth=600.0):
    return ReadingModel(QWEN3[name], 2.0, bandwidth, "measured")


# Floors and what bounds a step


def bound_of(step_ms, widest_ms, name="4B"):
    (bound,) = step_bounds(with_floors(curve(step_ms, widest_ms), {"target": reader(name)}))
    return bound


# Several contexts and batches in one run


def timing(role, kind, tokens, seconds, context, batch):
    return StepTiming(role, role, kind, tokens, context, batch, (seconds,))


def test_a_prediction_takes_the_first_context_and_batch_of_a_profile():
    cells = [(44, 1), (512, 16)]
    timings = [timing("target", "prefill", 44, 9.0, 0, 1)]
    for slower, (context, batch) in enumerate(cells, start=1):
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
    assert latency_rows([one, other])[0].samples == 2


def batched():
    """c .1 everywhere; a verify of n positions costs one step, and at batch 16 n steps."""
    rows = []
    for batch, v in ((1, lambda _: 1.0), (16, float)):
        rows += [row("target", "step", 1, 10.0, batch=batch)]
        rows += [row("draft", "step", 1, 1.0, batch=batch)]
        rows += [row("target", "verify", n, 10.0 * v(n), batch=batch) for n in range(1, 6)]
    return rows


def test_speculation_stops_paying_at_the_batch_whose_verify_costs_its_positions():
    gains = batch_gains(batched(), [0.8])
    assert (gains[0].k, gains[0].speedup) == (4, pytest.approx(speedup(0.8, 4, 0.1)))
    assert (gains[1].k, gains[1].speedup) == (0, 1.0)
    assert gains[0].tokens_per_second == pytest.approx(100)
    assert gains[1].tokens_per_second == pytest.approx(1600)
    (stop,) = stopping_batches(gains)
    assert (stop.pays_up_to, stop.stops_at) == (1, 16)


def test_a_smaller_batch_at_which_speculation_loses_is_named_beside_the_largest_that_pays():
    turned = [replace(row, batch=17 - row.batch) for row in batched()]
    (stop,) = stopping_batches(batch_gains(turned, [0.8]))
    assert (stop.pays_up_to, stop.stops_at, stop.not_at) == (16, None, (1,))
    (nowhere,) = stopping_batches(batch_gains(turned, [0.0]))
    assert (nowhere.pays_up_to, nowhere.stops_at) == (None, 1)


# Measuring


def test_running_out_of_memory_is_one_line_of_advice_and_other_errors_stay():
    advice = r"^out of memory while timing single steps; lower"
    with pytest.raises(UserError, match=advice), enough_memory("single steps"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(RuntimeError, match="broken"), enough_memory("single steps"):
        raise RuntimeError("broken")


def test_a_typed_context_beyond_the_model_is_refused_and_an_automatic_one_is_left_out():
    model = SimpleNamespace(context_tokens=1024, key="model", name="tiny")
    pair = SimpleNamespace(target=model, draft=model)
    typed = ProfileConfig(k=[8], contexts=[64, 1016])
    with pytest.raises(
        UserError, match=r"contexts: 1016 tokens with .* beyond the 1,024 positions"
    ):
        profile._curve_cells(pair, typed)
    cells = profile._curve_cells(pair, ProfileConfig(k=[8], contexts=[64, 1015], batches=[2, 1]))
    assert cells == [(64, 1), (1015, 1), (64, 2), (1015, 2)]
    assert (2048, 1) in profile._curve_cells(pair, ProfileConfig(k=[8]))


def player(role, seed=0):
    return TimedModel(role, role, CachedModel(qwen3(seed), 1024))


def test_the_copy_bandwidth_counts_what_is_read_and_what_is_written():
    copied = copy_bandwidth(torch.device("cpu"), 1 << 20)
    assert copied.buffer_bytes == 1 << 20
    assert 0.01 < copied.gb_s < 10_000


def test_curves_time_every_forward_of_every_cell_and_leave_the_models_usable():
    pair = [player("target"), player("draft", 1)]
    timings, skipped = curves.time_curves(pair, 2, [(16, 1), (16, 3)])
    assert skipped == []
    found = {(t.role, t.kind, t.tokens, t.batch) for t in timings}
    assert found == {
        (role, kind, tokens, batch)
        for batch in (1, 3)
        for role, kind, tokens in (
            ("target", "step", 1), ("target", "verify", 1), ("target", "verify", 2),
            ("target", "verify", 3), ("draft", "step", 1), ("draft", "verify", 3),
        )
    }  # fmt: skip
    assert len({len(t.samples_s) for t in timings if t.batch == 1}) == 1
    assert pair[0].model.cached_tokens == 0


def test_the_drafts_step_is_timed_in_a_row_in_curves_too(monkeypatch):
    draft = StaticModel(qwen3(), 1024, compiled=False)
    forward_batch, steps = StaticModel.forward_batch, []

    def counted(self, tokens):
        steps.append(tuple(tokens.shape))
        return forward_batch(self, tokens)

    monkeypatch.setattr(StaticModel, "forward_batch", counted)
    now = curves.Clock.now
    between = []

    def reading(self):
        between.append(tuple(steps))
        steps.clear()
        return now(self)

    monkeypatch.setattr(curves.Clock, "now", reading)
    curves.time_curves([TimedModel("draft", "small", draft)], 3, [(16, 2)])
    # What is recorded is run again at every launch
    assert {((2, 1),) * 3, ((2, 4),)} <= set(between)
    assert ((2, 1),) not in between


def test_a_cell_out_of_memory_is_skipped_with_its_reason_and_the_others_go_on(monkeypatch):
    fill = CachedModel.fill

    def full(self, batch, context):
        if batch == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        fill(self, batch, context)

    monkeypatch.setattr(CachedModel, "fill", full)
    timings, skipped = curves.time_curves([player("target")], 1, [(8, 2), (8, 1)])
    assert [(cell.batch, cell.reason) for cell in skipped] == [(2, "out of memory")]
    assert {t.batch for t in timings} == {1}


def test_a_cell_that_is_refused_or_late_is_never_filled():
    def refused(_context, batch):
        return "does not fit" if batch == 2 else None

    timings, skipped = curves.time_curves(
        [player("target")], 1, [(8, 2), (8, 1)], refused=refused, budget_s=0.0
    )
    assert timings == []
    assert skipped[0].reason == "does not fit"
    assert "no time left" in skipped[1].reason


class Clockwork:
    """Time that passes only where it is told to."""

    now = 0.0

    def perf_counter(self):
        self.now += 1e-6
        return self.now


def curves_with_slow_recording(monkeypatch, cells, **budgets):
    """Curves of a model whose every recording takes 100 s; what was skipped, and what was said."""
    clock = Clockwork()
    rerun = StaticModel._rerun

    def slow(self, work, own):
        clock.now += 100.0
        return rerun(self, work, own)

    monkeypatch.setattr(StaticModel, "_rerun", slow)
    monkeypatch.setattr(curves, "perf_counter", clock.perf_counter)
    monkeypatch.setattr(static, "time", clock)
    said = []
    model = StaticModel(qwen3(), 1024, compiled=False)
    players = [TimedModel("target", "big", model)]
    timings, skipped = curves.time_curves(players, 1, cells, say=said.append, **budgets)
    return {(t.context_tokens, t.batch) for t in timings}, skipped, said


def test_compiling_does_not_use_up_the_time_for_measuring(monkeypatch):
    cells = [(8, 1), (8, 2), (16, 2)]
    timed, skipped, said = curves_with_slow_recording(monkeypatch, cells, budget_s=45.0)
    assert timed == set(cells)
    assert skipped == []
    assert said[0] == "compiling for batch 1 after 8 tokens, the first time takes minutes"
    assert said[1] == curves.TIMING_CURVES


def test_compiling_has_a_budget_of_its_own(monkeypatch):
    cells = [(8, 1), (8, 2), (16, 2)]
    timed, skipped, _ = curves_with_slow_recording(
        monkeypatch, cells, budget_s=45.0, recording_budget_s=350.0
    )
    assert timed == {(8, 1), (8, 2)}
    assert [cell.reason for cell in skipped] == [
        "no time left of the 350 s for recording and compiling; "
        "name it in contexts= and batches= to time it"
    ]


def rounds_of(synthetic=None, ks=(1, 3)):
    bench = TimedPair(TableModel(), TableModel(strangeness=0.3), GREEDY, synthetic=synthetic or {})
    return {(t.k, t.part): t for t in time_rounds(bench, [(1, 2, 3), (4, 5)], ks, positions=8)}


def test_every_part_is_timed_once_per_whole_round(monkeypatch):
    monkeypatch.setattr(timed_rounds, "MOST_VISITS", 3)
    found = rounds_of()
    for k in (1, 3):
        whole = found[k, "round"]
        assert len(whole.samples_s) == len(whole.tokens) == 3 * 2
        for name in ("draft", "verify", "accept", "host", "rewind"):
            assert len(found[k, name].samples_s) == len(whole.samples_s)
    assert len(found[0, "step"].samples_s) == len(found[0, "round"].samples_s)


def test_the_pieces_go_through_the_rounds_of_the_real_loop(monkeypatch):
    """The same caches after every round, so the same text: any slip changes every later logit."""
    monkeypatch.setattr(timed_rounds, "MOST_VISITS", 1)
    ends = []
    for arm in ("_whole", "_pieces"):
        target, draft = TableModel(), TableModel(strangeness=0.3)
        bench = TimedPair(target, draft, GREEDY)
        book = timed_rounds._Samples()
        getattr(timed_rounds, arm)(bench, (1, 2, 3), 3, 4, timed_rounds.Clock(), book)
        ends.append((tuple(target.cache), tuple(draft.cache)))
    assert ends[0] == ends[1]


def test_imposed_acceptance_is_what_the_rounds_get(monkeypatch):
    monkeypatch.setattr(timed_rounds, "MOST_VISITS", 2)
    assert set(rounds_of({3: (1.0, 1.0, 1.0)})[3, "round"].tokens) == {4}
    assert set(rounds_of({3: (0.0, 0.0, 0.0)})[3, "round"].tokens) == {1}


def test_a_recorded_verify_is_timed_with_its_accept_step_and_says_so(monkeypatch):
    monkeypatch.setattr(timed_rounds, "MOST_VISITS", 1)

    class Recording(TableModel):
        @property
        def recorder(self):
            return self

        def recorded(self, _key, work, *inputs):
            return work(*inputs)

    bench = TimedPair(Recording(), TableModel(strangeness=0.3), GREEDY)
    timings = time_rounds(bench, [(1, 2)], [2], positions=8)
    names = {t.part for t in timings if t.k == 2}
    assert names == {"draft", "verify + accept", "host", "rewind", "round"}


def test_a_round_after_a_full_acceptance_is_recorded_before_it_is_timed(monkeypatch):
    """Such a round comes late or never while the rounds are warmed up."""
    monkeypatch.setattr(timed_rounds, "MOST_VISITS", 1)
    target, draft = (StaticModel(qwen3(seed), 1024, compiled=False) for seed in (0, 1))
    for model in (target, draft):
        model.reserve(64)
    time_rounds(TimedPair(target, draft, GREEDY), [(5, 6, 7)], [2], positions=8)
    drafter = ModelDrafter(draft, GREEDY)
    assert all(draft.knows(drafter._key(pending, 2)) for pending in (1, 2))


# A round in parts, and the waterfall


def timed(round_ms=10.0, rounds=8):
    """K = 3: draft 4.5, verify 4, accept .5, host .2, rewind .1; step 3, plain turn 3.3, ms."""
    given = {
        "draft": 4.5, "verify": 4.0, "accept": 0.5, "host": 0.2, "rewind": 0.1, "round": round_ms
    }  # fmt: skip
    own = [
        PartTiming(3, name, (ms / 1e3,) * rounds, (3,) * rounds if name == "round" else ())
        for name, ms in given.items()
    ]
    plain = PartTiming(0, "round", (3.3e-3,) * rounds, (1,) * rounds)
    return [plain, PartTiming(0, "step", (3e-3,) * rounds), *own]


def test_the_parts_and_what_they_leave_unexplained_make_up_the_round():
    (entry,) = round_parts(timed())
    assert sum(ms for _, ms in entry.parts) + entry.unexplained_ms == pytest.approx(10.0)
    assert entry.unexplained_ms == pytest.approx(0.7)
    assert entry.unexplained_share == pytest.approx(0.07)
    assert entry.speedup == pytest.approx(3 * 3.3 / 10)


def test_the_waterfall_falls_from_the_formulas_to_the_measured_speedup():
    (entry,) = round_parts(timed())
    falls = waterfall(entry)
    c, v = 1.5 / 3.0, 4.0 / 3.0
    expected = [speedup(1.0, 3, c), speedup(1.0, 3, c, v), 3 / (3 * c + v)]
    assert [fall.speedup for fall in falls[:3]] == pytest.approx(expected)
    assert falls[-1].speedup == pytest.approx(entry.speedup)
    assert np.prod([fall.factor for fall in falls]) * falls[0].speedup == pytest.approx(
        entry.speedup
    )


def test_without_plain_decoding_there_is_no_waterfall():
    assert round_parts(timed()[2:]) == []


# Cards that are not at hand


def wanted(target="8B", draft="0.6B", **more):
    return PlanRequest(QWEN3[target], QWEN3[draft], (1, 2, 3, 4), (0.6, 0.8), **more)


def test_an_unknown_card_is_one_line_that_lists_the_known_ones():
    line = unknown_card("gpu=h900")
    assert line.startswith("gpu=h900: no such card; there are a100_40")
    assert "\n" not in line
    assert unknown_card("gpu=h200") is None
    assert unknown_card("gpu.memory_gb=3") is None


@pytest.mark.parametrize("engine", ["lean", "static"])
def test_curves_then_rounds_on_the_models_with_caches_of_their_own(engine, monkeypatch):
    """A fill drops what was recorded and changes the batch; generating must go on all the same."""
    monkeypatch.setattr(timed_rounds, "MOST_VISITS", 2)
    made = {
        "lean": LeanModel,
        "static": lambda network, vocab: StaticModel(network, vocab, compiled=False),
    }[engine]
    target, draft = made(qwen3(0), 1024), made(qwen3(1), 1024)
    pair = [TimedModel("target", "big", target), TimedModel("draft", "small", draft)]
    timings, skipped = curves.time_curves(pair, 2, [(16, 2)])
    assert skipped == []
    assert {t.batch for t in timings} == {2}
    for model in (target, draft):
        model.reserve(64)
    found = time_rounds(TimedPair(target, draft, GREEDY), [(5, 6, 7)], [2], positions=12)
    names = {t.part for t in found if t.k == 2}
    assert ("verify + accept" in names) == (engine == "static")
    (whole,) = [t for t in found if (t.k, t.part) == (2, "round")]
    plain = CachedModel(qwen3(0), 1024)
    draft_of = CachedModel(qwen3(1), 1024)
    again = time_rounds(TimedPair(plain, draft_of, GREEDY), [(5, 6, 7)], [2], positions=12)
    (expected,) = [t for t in again if (t.k, t.part) == (2, "round")]
    assert whole.tokens == expected.tokens

"""Measuring what a step costs: memory, copy bandwidth, curves, and the parts of a round."""

# Tables that may be None and stand-ins for pairs: a wrong one fails the test that reads it
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportOptionalOperand=false

import pytest
import torch
from random_models import qwen3
from stubs import TableModel

from harness.commands.timing import enough_memory
from harness.decoding.model_drafter import ModelDrafter
from harness.decoding.sampling import SamplingParameters
from harness.measurement import round_parts as timed_rounds
from harness.measurement import step_times as curves
from harness.measurement.environment import copy_bandwidth
from harness.measurement.round_parts import RoundTimer, TimedPair, time_rounds
from harness.measurement.step_times import TimedModel
from harness.models.cached import CachedModel
from harness.models.lean import static
from harness.models.lean.model import LeanModel
from harness.models.lean.static import StaticModel
from harness.records import UserError

GREEDY = SamplingParameters(0.0)


# Measuring


def test_running_out_of_memory_is_one_line_of_advice_and_other_errors_stay():
    advice = r"^out of memory while timing single steps; lower"
    with pytest.raises(UserError, match=advice), enough_memory("single steps"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(RuntimeError, match="broken"), enough_memory("single steps"):
        raise RuntimeError("broken")


def timed_model(role, seed=0):
    return TimedModel(role, role, CachedModel(qwen3(seed), 1024))


def test_the_copy_bandwidth_counts_what_is_read_and_what_is_written():
    copied = copy_bandwidth(torch.device("cpu"), 1 << 20)
    assert copied.buffer_bytes == 1 << 20
    assert 0.01 < copied.gb_s < 10_000


def test_curves_time_every_forward_of_every_cell_and_leave_the_models_usable():
    pair = [timed_model("target"), timed_model("draft", 1)]
    timings, skipped = curves.time_curves(pair, 2, [(16, 1), (16, 3)])
    assert skipped == []
    measured = {(t.role, t.kind, t.tokens, t.batch) for t in timings}
    assert measured == {
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
    timings, skipped = curves.time_curves([timed_model("target")], 1, [(8, 2), (8, 1)])
    assert [(cell.batch, cell.reason) for cell in skipped] == [(2, "out of memory")]
    assert {t.batch for t in timings} == {1}


def test_a_cell_that_is_refused_or_late_is_never_filled():
    def refused(_context, batch):
        return "does not fit" if batch == 2 else None

    timings, skipped = curves.time_curves(
        [timed_model("target")], 1, [(8, 2), (8, 1)], refused=refused, budget_s=0.0
    )
    assert timings == []
    assert skipped[0].reason == "does not fit"
    assert "no time left" in skipped[1].reason


class Clockwork:
    """Time that passes only where a test lets it."""

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
    timed = [TimedModel("target", "big", model)]
    timings, skipped = curves.time_curves(timed, 1, cells, say=said.append, **budgets)
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
    pair = TimedPair(TableModel(), TableModel(strangeness=0.3), GREEDY, synthetic=synthetic or {})
    return {(t.k, t.part): t for t in time_rounds(pair, [(1, 2, 3), (4, 5)], ks, positions=8)}


def test_every_part_is_timed_once_per_whole_round(monkeypatch):
    monkeypatch.setattr(timed_rounds, "MOST_VISITS", 3)
    measured = rounds_of()
    for k in (1, 3):
        round_timing = measured[k, "round"]
        assert len(round_timing.samples_s) == len(round_timing.tokens) == 3 * 2
        for name in ("draft", "verify", "accept", "host", "rewind"):
            assert len(measured[k, name].samples_s) == len(round_timing.samples_s)
    assert len(measured[0, "step"].samples_s) == len(measured[0, "round"].samples_s)


def test_the_parts_go_through_the_rounds_of_the_real_loop():
    """The same caches after every round, so the same text: any slip changes every later logit."""
    ends = []
    for method in (RoundTimer.whole_rounds, RoundTimer.parts):
        target, draft = TableModel(), TableModel(strangeness=0.3)
        method(RoundTimer(TimedPair(target, draft, GREEDY)), (1, 2, 3), 3, 4)
        ends.append((tuple(target.cache), tuple(draft.cache)))
    assert ends[0] == ends[1]


def test_synthetic_acceptance_is_what_the_rounds_get(monkeypatch):
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

    pair = TimedPair(Recording(), TableModel(strangeness=0.3), GREEDY)
    timings = time_rounds(pair, [(1, 2)], [2], positions=8)
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
    measured = time_rounds(TimedPair(target, draft, GREEDY), [(5, 6, 7)], [2], positions=12)
    names = {t.part for t in measured if t.k == 2}
    assert ("verify + accept" in names) == (engine == "static")
    (round_timing,) = [t for t in measured if (t.k, t.part) == (2, "round")]
    plain = CachedModel(qwen3(0), 1024)
    draft_of = CachedModel(qwen3(1), 1024)
    again = time_rounds(TimedPair(plain, draft_of, GREEDY), [(5, 6, 7)], [2], positions=12)
    (expected,) = [t for t in again if (t.k, t.part) == (2, "round")]
    assert round_timing.tokens == expected.tokens

"""Measuring what a step costs: memory, copy bandwidth and curves."""

# Tables that may be None and stand-ins for pairs: a wrong one fails the test that reads it
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportOptionalOperand=false

from dataclasses import replace

import pytest
import torch
from random_models import qwen3
from stubs import REQUEST

from harness.commands.timing import enough_memory
from harness.measurement import step_times as curves
from harness.measurement.environment import copy_bandwidth
from harness.measurement.generations import run_trial
from harness.measurement.step_times import TimedModel
from harness.models.cached import CachedModel
from harness.models.lean import static
from harness.models.lean.model import LeanModel
from harness.models.lean.static import StaticModel
from harness.records import UserError

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


@pytest.mark.parametrize(("recording_s", "late"), [(None, 0), (350.0, 1)])
def test_compiling_has_a_budget_of_its_own_and_uses_none_of_that_for_measuring(
    recording_s, late, monkeypatch
):
    """Every recording takes 100 s."""
    clock = Clockwork()
    rerun = StaticModel._rerun

    def slow(self, work, own):
        clock.now += 100.0
        return rerun(self, work, own)

    monkeypatch.setattr(StaticModel, "_rerun", slow)
    monkeypatch.setattr(curves, "perf_counter", clock.perf_counter)
    monkeypatch.setattr(static, "time", clock)
    said = []
    timed = [TimedModel("target", "big", StaticModel(qwen3(), 1024, compiled=False))]
    cells, how = [(8, 1), (8, 2), (16, 2)], {"budget_s": 45.0, "say": said.append}
    timings, skipped = curves.time_curves(timed, 1, cells, recording_budget_s=recording_s, **how)
    assert {(t.context_tokens, t.batch) for t in timings} == {*cells[: len(cells) - late]}
    assert said[0] == "compiling for batch 1 after 8 tokens, the first time takes minutes"
    assert said[1] == curves.TIMING_CURVES
    assert [cell.reason for cell in skipped] == late * [
        "no time left of the 350 s for recording and compiling; "
        "name it in contexts= and batches= to time it"
    ]


@pytest.mark.parametrize("engine", ["lean", "static"])
def test_curves_then_rounds_on_the_models_with_caches_of_their_own(engine):
    """A fill drops what was recorded and changes the batch; generating must go on all the same."""
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
    plain = CachedModel(qwen3(0), 1024), CachedModel(qwen3(1), 1024)
    asked = replace(REQUEST, tokens=(5, 6, 7), k=2, draft="draft", budget=12)
    assert run_trial(asked, target, draft).tokens == run_trial(asked, *plain).tokens

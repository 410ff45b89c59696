"""Time the forwards that a round is made of: the draft's step, the target's step, the verify.

A verify of n positions is timed for every n = 1..K + 1, because v(n) = verify(n) / step is what
peers take for 1 and what a mixture of experts or a slow attention makes of it. Kinds are
interleaved within each repetition, so that drift hits all alike, and every repetition permutes
their order anew: what ran just before a forward decides what the processor's caches hold, and must
not be the same every time. Every raw sample is kept.

A round waits only for the target: its K draft steps run one after the other, as one launch where
the model records graphs. So the draft's steps are timed K in a row, and a sample is their mean.
Plain decoding reads every token back to the host, so the target's step is timed alone.

`time_forwards` times one text at one context. `time_curves` does so over contexts and batches. The
forwards of one (context, batch) share a cache that takes a while to fill, and with CUDA graphs a
fill drops what was recorded; so their samples are taken in a few visits: each fills the caches,
warms up, and times every forward in turn. A second visit, with every other cell between the two,
shows the drift of the machine as scatter. New work is compiled and recorded first, which can take
longer than all the timing, so the two have separate budgets.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

from harness.decoding.protocols import CausalModel, Drafter, recorded, recorder_of
from harness.measurement.clock import Clock, undisturbed
from harness.models.cached import CachedModel
from harness.models.memory import is_out_of_memory
from harness.records import LoopClock, SkippedCell, StepTiming

WARMUP = 3
# Samples of each forward of a pair; of slow models only as many as this time allows, since their
# steps explain rounds, which are timed themselves. They warm up no longer than a part of it
REPETITIONS, LEAST_REPETITIONS, REPETITIONS_S, WARMUP_S = 20, 3, 5.0, 1.0
# Prefills are timed in one repetition of so many
PREFILL_EVERY = 4
# How often timings that cannot be right are taken again
MOST_REPEATS = 2
CURVE_VISITS = 2
CURVE_WARMUP = 2
# Rounds over all forwards of a cell, per visit: as many as this time allows
SECONDS_PER_VISIT = 1.0
LEAST_ROUNDS, MOST_ROUNDS = 3, 10
TIMING_CURVES = "timing curves"

# Context in tokens and batch
CurveCell = tuple[int, int]


@dataclass(frozen=True)
class TimedModel:
    """A model to be timed, with its name and its role in the pair."""

    role: Literal["target", "draft"]
    name: str
    model: CausalModel


@dataclass(frozen=True)
class Forward:
    """One kind of forward: `tokens` new positions per sequence, `times` in a row.

    A sample is the mean over the forwards in a row.
    """

    timed: TimedModel
    kind: Literal["step", "verify", "prefill"]
    tokens: int
    times: int = 1

    def timing(self, context: int, batch: int, samples: Sequence[float]) -> StepTiming:
        """The stored record of its samples, seconds."""
        timed, context = self.timed, 0 if self.kind == "prefill" else context
        what = (timed.role, timed.name, self.kind, self.tokens, context, batch)
        return StepTiming(*what, tuple(samples))


def _forwards(
    models: Sequence[TimedModel], max_k: int, verifies_of_draft: Sequence[int] = ()
) -> list[Forward]:
    """Forwards timed after a context: steps of each model, verifies of the target, up to K + 1."""
    forwards: list[Forward] = []
    for timed in models:
        drafts = timed.role == "draft"
        # A round runs K draft steps without waiting in between
        forwards.append(Forward(timed, "step", 1, max(1, max_k) if drafts else 1))
        widths = verifies_of_draft if drafts else range(1, max_k + 2)
        forwards += [Forward(timed, "verify", width) for width in widths]
    return forwards


def time_forwards(
    models: Sequence[TimedModel],
    max_k: int,
    *,
    context: Sequence[int],
    prefills: Sequence[int] = (),
    repetitions: int | None = None,
    doubtful: Callable[[Sequence[StepTiming]], bool] = lambda _: False,
    clock: LoopClock = "wall",
    expect: Callable[[int], None] = lambda _: None,
    tick: Callable[[], None] = lambda: None,
) -> list[StepTiming]:
    """Time every forward `repetitions` times, interleaved; verifies go up to max_k + 1 positions.

    Args:
        context: token ids that fill the cache; its length is context_tokens.
        prefills: lengths of prompts whose prefill is timed, each at most once.
        repetitions: samples of each, after warm-up; None for REPETITIONS. Of a prefill, which can
            take as long as a whole text, a quarter as many.
        doubtful: whether timings cannot be right; then all but the prefills are timed again, while
            there is time, and what the last attempt gave stays. All of them, since they are read
            as ratios.
        expect, tick: called before each attempt with the number of its repetitions, and after each.
    """
    repetitions = REPETITIONS if repetitions is None else repetitions
    reading = Clock(*(timed.model for timed in models), kind=clock)
    timer = _PairTimer(models, context, reading, repetitions, expect, tick)
    prompts = [Forward(timed, "prefill", length) for timed in models for length in prefills]
    others = _forwards(models, max_k)
    with undisturbed():
        timings = timer.timings(others, prompts)
        for _ in range(MOST_REPEATS):
            if timer.late() or not doubtful(timings):
                break
            kept = [timing for timing in timings if timing.kind == "prefill"]
            timings = [*kept, *timer.timings(others)]
    return timings


@dataclass(frozen=True)
class _PairTimer:
    """Times forwards after one context, in an order drawn anew for each repetition."""

    models: Sequence[TimedModel]
    context: Sequence[int]
    clock: Clock
    repetitions: int
    expect: Callable[[int], None]
    tick: Callable[[], None]
    order: random.Random = field(default_factory=lambda: random.Random(0))
    begun: float = field(default_factory=lambda: perf_counter())

    def late(self, most_s: float | None = None) -> bool:
        return perf_counter() - self.begun > (REPETITIONS_S if most_s is None else most_s)

    def timings(
        self, forwards: Sequence[Forward], prompts: Sequence[Forward] = ()
    ) -> list[StepTiming]:
        """Warm up, then time every forward in turn; prefills of prompts in some repetitions."""
        samples: dict[Forward, list[float]] = {}
        self.expect(WARMUP + self.repetitions)
        for repetition in range(-WARMUP, self.repetitions):
            if repetition >= LEAST_REPETITIONS and self.late():
                self.expect(repetition - self.repetitions)  # the others are left out
                break
            if -WARMUP < repetition < 0 and self.late(WARMUP_S):
                self.tick()
                continue
            due = repetition == 0 or (repetition % PREFILL_EVERY == 0 and not self.late())
            timed = self._once(prompts if repetition == -WARMUP or due else ())
            if timed or repetition == -WARMUP:
                for model in self.models:
                    model.model.prefill(self.context)
            timed += self._once(forwards)
            for forward, seconds in timed if repetition >= 0 else ():
                samples.setdefault(forward, []).append(seconds)
            self.tick()
        return [
            forward.timing(len(self.context), 1, samples[forward])
            for forward in (*prompts, *forwards)
            if forward in samples
        ]

    def _once(self, due: Sequence[Forward]) -> list[tuple[Forward, float]]:
        shuffled = self.order.sample(due, len(due))
        return [(forward, _time_one(forward, self.context, self.clock)) for forward in shuffled]


def time_lookups(
    drafter: Drafter, name: str, max_k: int, context: Sequence[int], clock: LoopClock = "wall"
) -> StepTiming:
    """Time a drafter that has no model: one proposal of max_k tokens after `context`.

    It stands where a model's draft step does, but costs its time once a round.
    """
    reading, seconds = Clock(kind=clock), list[float]()
    uniforms = torch.empty(max_k)
    drafter.begin(context)
    with undisturbed():
        for repetition in range(-WARMUP, REPETITIONS):
            start = reading.now()
            drafter.propose(max_k, uniforms)
            if repetition >= 0:
                seconds.append(reading.now() - start)
    return StepTiming("draft", name, "step", 1, len(context), 1, tuple(seconds), name)


def _time_one(forward: Forward, context: Sequence[int], clock: Clock) -> float:
    model = forward.timed.model
    tokens = [context[index % len(context)] for index in range(forward.tokens)]
    if forward.kind == "prefill":
        start = clock.now()
        model.prefill(tokens)
        return clock.now() - start
    model.rewind(0)
    fed = torch.tensor(tokens, device=model.device)
    return _time_in_a_row(forward, model.forward, fed, clock)


def _time_in_a_row(
    forward: Forward, run: Callable[[Tensor], Tensor], tokens: Tensor, clock: Clock
) -> float:
    """Seconds of one of `times` forwards, run as one launch where the model records graphs."""
    model, times = forward.timed.model, forward.times

    def work(ids: Tensor) -> tuple[Tensor]:
        for _ in range(times - 1):
            run(ids)
        return (run(ids),)

    start = clock.now()
    if times == 1:
        run(tokens)
    else:
        recorded(model, ("in a row", *tokens.shape, times), work, tokens)
    seconds = clock.now() - start
    model.rewind(forward.tokens * times)
    return seconds / times


@torch.inference_mode()
def time_curves(
    models: Sequence[TimedModel],
    max_k: int,
    cells: Sequence[CurveCell],
    *,
    refused: Callable[[int, int], str | None] = lambda _context, _batch: None,
    budget_s: float | None = None,
    recording_budget_s: float | None = None,
    doubtful: Callable[[Sequence[StepTiming]], bool] = lambda _: False,
    tick: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda _label: None,
) -> tuple[list[StepTiming], list[SkippedCell]]:
    """Time every forward of every (context_tokens, batch); verifies as in `time_forwards`.

    Args:
        models: target and draft, which fill caches by themselves (CachedModel).
        cells: cheapest first.
        refused: why a cell must not be tried, or None.
        budget_s: seconds after which no further cell is begun, recording and compiling not
            counted; None sets no limit.
        recording_budget_s: the same for recording and compiling alone.
        doubtful: whether the timings of a cell cannot be right; then it is timed again, while the
            budgets last.
        tick, say: called after each visit of a cell, and with what is being done.

    Returns:
        The timings with raw samples, and the cells that were left out: refused, out of memory, or
        beyond the budget. What a cell had given before it failed is dropped.
    """
    samples: dict[CurveCell, dict[Forward, list[float]]] = {cell: {} for cell in cells}
    skipped: dict[CurveCell, str] = {}
    spent = _Spent(models)
    for visit in range(CURVE_VISITS):
        for cell in [*cells[visit:], *cells[:visit]]:
            late = spent.beyond(budget_s, recording_budget_s)
            if late and not samples[cell] and cell not in skipped:
                skipped[cell] = f"{late}; name it in contexts= and batches= to time it"
            elif reason := refused(*cell):
                skipped[cell] = reason
            if cell not in skipped and not late:
                reason = _visit(models, max_k, cell, visit, samples[cell], say)
                if reason:
                    skipped[cell] = reason
            tick()
    for cell in [cell for cell in cells if cell not in skipped] * MOST_REPEATS:
        late = spent.beyond(budget_s, recording_budget_s)
        if not late and doubtful(_timings_of(cell, samples[cell])):
            again: dict[Forward, list[float]] = {}
            reasons = {_visit(models, max_k, cell, n, again, say) for n in range(CURVE_VISITS)}
            if reasons == {None}:
                samples[cell] = again
    _release(models)
    timings = [
        timing
        for cell, by_forward in samples.items()
        if cell not in skipped
        for timing in _timings_of(cell, by_forward)
    ]
    return timings, [SkippedCell(*cell, reason) for cell, reason in skipped.items()]


def _timings_of(cell: CurveCell, samples: dict[Forward, list[float]]) -> list[StepTiming]:
    return [forward.timing(*cell, seconds) for forward, seconds in samples.items()]


class _Spent:
    """Time since this was made, split into recording and compiling, and everything else."""

    def __init__(self, models: Sequence[TimedModel]) -> None:
        self._models = {id(timed.model): _cached(timed) for timed in models}
        self._recorded_before = self._recorded_s()
        self._begin = perf_counter()

    def beyond(self, measuring_s: float | None, recording_s: float | None) -> str | None:
        """The budget that is used up, in words; None where neither is."""
        recorded = self._recorded_s() - self._recorded_before
        measured = perf_counter() - self._begin - recorded
        if measuring_s is not None and measured > measuring_s:
            return f"no time left of the {measuring_s:g} s for timing"
        if recording_s is not None and recorded > recording_s:
            return f"no time left of the {recording_s:g} s for recording and compiling"
        return None

    def _recorded_s(self) -> float:
        return sum(model.recording_s for model in self._models.values())


def _visit(
    models: Sequence[TimedModel],
    max_k: int,
    cell: CurveCell,
    visit: int,
    samples: dict[Forward, list[float]],
    say: Callable[[str], None],
) -> str | None:
    """Fill, warm up, and time a cell's forwards in turn; the reason if memory ran out."""
    context, batch = cell
    try:
        for timed in models:
            _cached(timed).fill(batch, context)
        # A draft never verifies; how little its time depends on positions shows what bounds a step
        forwards = _forwards(models, max_k, verifies_of_draft=[max_k + 1])
        inputs = {forward: _any_tokens(forward, batch) for forward in forwards}
        clock = Clock(*(timed.model for timed in models))

        def seconds_of(forward: Forward) -> float:
            run = _cached(forward.timed).forward_batch
            return _time_in_a_row(forward, run, inputs[forward], clock)

        once = SECONDS_PER_VISIT
        if any(recorder_of(timed.model) is not None for timed in models):
            say(f"compiling for batch {batch} after {context} tokens, the first time takes minutes")
        for _ in range(CURVE_WARMUP):
            once = sum(seconds_of(forward) for forward in forwards)
            say(TIMING_CURVES)
        rounds = int(min(MOST_ROUNDS, max(LEAST_ROUNDS, SECONDS_PER_VISIT / once)))
        order = random.Random(f"{cell} {visit}")
        with undisturbed():
            for _ in range(rounds):
                for forward in order.sample(forwards, len(forwards)):
                    samples.setdefault(forward, []).append(seconds_of(forward))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        _release(models)
        return "out of memory"
    return None


def _any_tokens(forward: Forward, batch: int) -> Tensor:
    """Token ids, which ones does not matter, [batch, n] on the model's device."""
    model = _cached(forward.timed)
    ids = torch.arange(batch * forward.tokens, device=model.device) % model.vocab_size
    return ids.view(batch, forward.tokens)


def _cached(timed: TimedModel) -> CachedModel:
    assert isinstance(timed.model, CachedModel)  # only those fill a cache of several sequences
    return timed.model


def _release(models: Sequence[TimedModel]) -> None:
    """Let go of large caches; the next prefill makes its own."""
    for timed in models:
        _cached(timed).prefill([])
    torch.cuda.empty_cache()

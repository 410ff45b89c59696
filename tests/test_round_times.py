"""R(0) and R(K) timed in visits of the running loop, and steps that are timed until they can be."""

import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from stubs import REQUEST, TableModel

from harness.analysis.round_costs import PRECISE, can_pay, timed_precisely, visits_of
from harness.analysis.unstable import unstable_steps
from harness.decoding.lookups import NgramDrafter
from harness.decoding.sampling import SamplingParameters
from harness.measurement import clock
from harness.measurement.clock import Clock, undisturbed
from harness.measurement.generations import Request, run_trial
from harness.measurement.round_times import (
    LEAST_ROUNDS,
    LEAST_SLICE,
    LEAST_VISITS,
    FullLookup,
    RoundVisits,
    TimedLoop,
    made_prompt,
    timed_ks,
    visits_for,
)
from harness.measurement.step_times import TimedModel, time_forwards
from harness.records import NotMeasured, RoundTiming

PROMPTS = {"easy": [(3, 1, 4, 1, 5), (2, 7, 1, 8)], "hard": [(1, 6, 1, 8, 0, 3, 3)]}
KS, TEMPERATURES = (0, 2, 4), (0.0, 1.0)
KINDS = [(k, temperature) for k in KS for temperature in TEMPERATURES]
# Of a visit: plain decoding twice
TIMED = [*KINDS, *((0, temperature) for temperature in TEMPERATURES)]


def request(prompt_set: str, k: int, temperature: float) -> Request:
    return replace(
        REQUEST,
        prompt_set=prompt_set,
        tokens=PROMPTS[prompt_set][0],
        k=k,
        sampling=SamplingParameters(temperature),
        budget=20,
        eos=frozenset({9}),
        draft="draft" if k else None,
    )


def loop(target: Any = None, draft: Any = None, positions: int = 200) -> TimedLoop:
    requests = {
        name: [request(name, k, temperature) for k, temperature in KINDS] for name in PROMPTS
    }
    target, draft = target or TableModel(), draft or TableModel(strangeness=0.3)
    return TimedLoop(target, draft, "draft", requests, PROMPTS, positions)


class Stored:
    """What a run folder would keep."""

    def __init__(self, *lines: RoundTiming) -> None:
        self.lines, self.notes = list(lines), list[NotMeasured]()
        self.note_not_measured = self.notes.append
        self.manifest = SimpleNamespace(not_measured=self.notes)
        self.read = self.lines.copy
        self.rounds = self

    def append(self, *lines: RoundTiming) -> None:
        self.lines += lines

    def visits(
        self,
        timed: TimedLoop,
        number: int = 6,
        enough: Callable[[Sequence[RoundTiming]], bool] = lambda _: False,
    ) -> RoundVisits:
        folder: Any = self
        return RoundVisits(timed, folder, visits=number, enough=enough, counted=self.counted)

    @contextmanager
    def counted(self, doing: str, number: int) -> Iterator[Callable[[], None]]:
        """What is announced is counted."""
        ticks: list[None] = []
        yield lambda: ticks.append(None)
        assert doing in ("warming up rounds of draft", "timing rounds of draft")
        assert len(ticks) == number

    def kinds(self, visit: int) -> list[tuple[int, float]]:
        return [(line.k, line.temperature) for line in self.lines if line.visit == visit]


def test_a_timing_of_rounds_that_take_long_takes_fewer_of_them() -> None:
    """By what the visits before took, so that each lasts a third of a second or has two rounds."""
    for seconds, least in ((0.005, LEAST_ROUNDS), (0.05, 7), (1.0, LEAST_SLICE)):
        stored = Stored(RoundTiming(0, "target", "draft", 4, 0.0, 8, 1, 16, 40, 16 * seconds))
        stored.visits(loop()).up_to(0.1)
        rounds = [each.rounds for each in stored.lines[1:] if each.k == 4]
        assert min(rounds) >= least
        assert max(rounds) < least + 2


def test_a_visit_times_plain_decoding_and_every_k_over_16_rounds_in_varying_order() -> None:
    stored = Stored()
    stored.visits(loop()).up_to(1.0)
    orders = [stored.kinds(visit) for visit in range(6)]
    assert all(sorted(order) == sorted(TIMED) for order in orders)
    assert len(stored.lines) == 6 * len(TIMED)
    assert len({tuple(order) for order in orders}) > 3
    assert min(line.rounds for line in stored.lines) >= LEAST_ROUNDS
    for line in stored.lines:
        assert line.rounds <= line.new_tokens <= line.rounds * (line.k + 1)
        assert line.seconds > 0
        assert (line.model, line.draft, line.batch) == ("target", "draft", 1)
        if line.k == 0:
            assert line.new_tokens == line.rounds == 20
    again = Stored()
    again.visits(loop()).up_to(1.0)
    assert [stored.kinds(0), stored.kinds(5)] == [again.kinds(0), again.kinds(5)]


def test_no_timed_text_is_a_text_of_the_run() -> None:
    cells = {tokens for entries in PROMPTS.values() for tokens in entries}
    timed = loop()
    seen: list[Request] = [
        timed.generation(entry, visit, number, 16)
        for visit in range(30)
        for entry in timed.requests_of(visit)
        for number in range(2)
    ]
    assert not cells & {entry.tokens for entry in seen}
    assert {entry.prompt_set for entry in seen} == set(PROMPTS)
    assert {entry.tokens[1:] for entry in seen} == cells, "a whole prompt behind a token"
    of_a_visit = {entry.tokens for entry in seen if entry.prompt == "rounds/4"}
    assert len(of_a_visit) <= 2, "all that a visit times has the same prompts"
    prompts = [(5, 6), (5,)]
    for before in (1, 40):
        made = made_prompt(prompts, before, random.Random(0))
        assert made not in prompts
        assert set(made) <= {5, 6}
        assert before < len(made) <= before + 3


def test_a_context_that_is_too_short_for_16_rounds_is_timed_several_times_within_it() -> None:
    longest = 0

    class Watching(TableModel):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            nonlocal longest
            logits = super().forward(tokens)
            longest = max(longest, len(self.cache))
            return logits

    stored, positions = Stored(), 7 + 20 + 4 + 1
    stored.visits(loop(Watching(), TableModel(), positions)).up_to(1.0)
    assert longest <= positions
    assert all(line.rounds >= LEAST_ROUNDS for line in stored.lines)


def test_visits_are_spread_and_an_interrupted_one_is_made_again_as_a_whole() -> None:
    stored = Stored()
    visits = stored.visits(loop())
    counts: list[int] = []
    for done in range(1, 13):
        visits.up_to(done / 13)
        counts.append(len({line.visit for line in stored.lines}))
    assert counts == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    stored_lines = list(stored.lines)
    torn = Stored(*stored_lines[: 3 * len(TIMED) + 2])  # killed in the fourth visit
    visits = torn.visits(loop())
    assert visits.missing == 3
    visits.up_to(1.0)
    assert [line.visit for line in torn.lines][-3 * len(TIMED) :: len(TIMED)] == [4, 5, 6]
    assert torn.visits(loop()).missing == 0
    other = replace(stored_lines[0], draft="another")
    assert Stored(other).visits(loop()).missing == 6


def test_a_draft_that_cannot_pay_is_visited_half_as_often() -> None:
    def hopeless(lines: Sequence[RoundTiming]) -> bool:
        return not can_pay(
            [replace(line, seconds=line.seconds * (1 + 50 * line.k)) for line in lines], "draft"
        )

    for enough, made in ((hopeless, LEAST_VISITS), (lambda _: False, 2 * LEAST_VISITS)):
        stored = Stored()
        visits = stored.visits(loop(), 2 * LEAST_VISITS, enough)
        visits.up_to(0.5)
        visits.up_to(1.0)
        assert len({line.visit for line in stored.lines}) == made
        assert stored.visits(loop(), 2 * LEAST_VISITS, enough).missing == 0, "a resumed run agrees"


def test_rounds_of_all_temperatures_that_sample_are_averaged() -> None:
    """Disturbed visits count like others: the mean over visits leaves both ends out."""
    lines = [
        RoundTiming(visit, "t", "d", k, at, 10, 1, 1, 1, seconds)
        for visit in range(12)
        for at, round_s in ((0.0, 9.0), (0.7, 2.0), (1.0, 3.0 if visit >= 3 else 30.0))
        for k, seconds in ((0, 1.0), (4, round_s))
    ]
    for temperature, ratio in ((0.0, 9.0), (0.7, 2.5), (1.0, 2.5), (0.5, 2.5)):
        visits = visits_of(lines, "d", temperature)
        assert visits is not None
        assert visits.mean_ratios == pytest.approx([ratio])
        assert len(visits.plain_s) == 12


def test_more_visits_are_needed_until_every_ratio_is_known_precisely() -> None:
    rng = np.random.default_rng(0)

    def lines(visits: int, scatter: float) -> list[RoundTiming]:
        return [
            RoundTiming(visit, "t", "d", k, at, 10, 1, 1, 1, math.exp(scatter * rng.normal()))
            for visit in range(visits)
            for k in (0, 4)
            for at in (0.0, 1.0)
        ]

    assert timed_precisely(lines(6, 0.005), "d")
    assert not timed_precisely(lines(6, 0.1), "d")
    assert timed_precisely(lines(300, 0.1), "d")
    assert not timed_precisely(lines(1, 0.005), "d"), "one visit has no error"
    # On average over K: one that is a little less precise asks for no more
    mixed = [line for line in lines(20, 0.005) if line.k == 0]
    mixed += [replace(line, k=k) for k in (1, 2, 8) for line in lines(20, 0.005) if line.k == 4]
    mixed += [line for line in lines(20, 0.08) if line.k == 4]
    visits = [visits_of(mixed, "d", at) for at in (0.0, 1.0)]
    assert max(each.errors.max() for each in visits if each is not None) > PRECISE
    assert timed_precisely(mixed, "d")
    # The error is that of the interquartile mean
    means, errors = [], []
    for _ in range(400):
        visits = visits_of(lines(12, 0.05), "d", 0.0)
        assert visits is not None
        means.append(math.log(visits.mean_ratios[0]))
        errors.append(visits.errors[0])
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.1)


@pytest.mark.parametrize(
    ("round_s", "pays"),
    [
        ({2: 2.0, 4: 9.0}, True),  # 3 tokens in the time of 2
        ({2: 3.1, 4: 5.2}, True),  # just below 1: it may be the machine
        ({2: 3.9, 4: 6.4}, False),
        ({2: 3.3, 4: 5.5}, False),  # 0.91, by more than four standard errors
        ({2: 9.0, 4: 5.2}, True),
    ],
)
def test_a_draft_can_pay_where_its_best_round_is_shorter_than_its_tokens(
    round_s: dict[int, float], pays: bool
) -> None:
    lines = [
        RoundTiming(visit, "target", "draft", k, 0.0, 10, 1, 1, 1, seconds)
        for visit in range(3)
        for k, seconds in {0: 1.0, **round_s}.items()
    ]
    assert can_pay(lines, "draft") is pays


def test_what_cannot_be_timed_is_noted_once_and_the_rest_is_timed() -> None:
    class Failing(TableModel):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            if len(tokens) == 5:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            return super().forward(tokens)

    stored = Stored()
    stored.visits(loop(Failing())).up_to(1.0)
    refused = {NotMeasured("rounds", draft="draft", k=4, temperature=t) for t in (0.0, 1.0)}
    assert {*stored.notes} == refused
    assert all(note.error.startswith("out of memory") for note in stored.notes)
    assert {line.k for line in stored.lines} == {0, 2}
    assert stored.visits(loop(Failing())).missing == 0, "a resumed run does not try again"


def test_a_lookup_is_timed_at_exactly_n_tokens() -> None:
    drafter = FullLookup(NgramDrafter({9}))
    for text, proposed in (
        ([1, 2, 3, 1, 2], [3, 1]),
        ([1, 2, 3, 1, 2], [3, 1, 2, 2, 2]),
        ([4], [4, 4, 4]),
    ):
        drafter.begin(text)
        tokens = drafter.propose(len(proposed), torch.empty(len(proposed))).tokens
        assert tokens.tolist() == proposed


@pytest.mark.parametrize(
    ("ks", "most", "timed"),
    [
        ([1, 2, 4, 8], None, [1, 2, 4, 8]),
        ([1, 2, 3, 4, 5, 6, 8, 10], None, [1, 4, 6, 10]),
        ([4], None, [1, 4]),
        ([1], None, [1]),
        ([0, 16], None, [1, 16]),
        # A line to a larger K, whose rounds draft as many as a block, would make them too cheap
        ([1, 8], 3, [1, 3, 8]),
        ([4], 1, [1, 4]),
        ([1, 2, 3, 4, 5, 6, 8, 10], 5, [1, 2, 4, 5, 10]),
        ([1, 2, 4], 4, [1, 2, 4]),
        ([1, 2, 4], 9, [1, 2, 4]),
    ],
)
def test_of_many_drafts_each_is_timed_at_one_the_largest_the_most_and_at_most_two_between(
    ks: list[int], most: int | None, timed: list[int]
) -> None:
    assert timed_ks(ks, most) == timed


def test_a_short_run_makes_fewer_visits() -> None:
    assert [visits_for(texts) for texts in (1, 8, 40, 160)] == [6, 12, 24, 72]
    assert visits_for(40, among_many=True) == 12


# ---- what must not disturb a measurement ---------------------------------------------------------


def test_no_garbage_is_collected_while_anything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    readings: list[tuple[bool, bool]] = []
    now = Clock.now

    def reading(self: Clock) -> float:
        # Counting what is frozen looks at every object of the process: at some readings only
        frozen = len(readings) % 50 > 0 or gc.get_freeze_count() > 0
        readings.append((gc.isenabled(), frozen))
        return now(self)

    monkeypatch.setattr(Clock, "now", reading)
    monkeypatch.setattr(clock, "_froze_itself", lambda: False)
    gc.unfreeze()  # what conftest froze
    target, draft = TableModel(), TableModel(strangeness=0.3)
    run_trial(request("easy", 2, 0.0), target, draft)
    time_forwards([TimedModel("target", "big", target)], 2, context=[1, 2], repetitions=2)
    Stored().visits(loop(), 1).up_to(1.0)
    assert len(readings) > 50
    assert set(readings) == {(False, True)}
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_the_clock_of_the_processor_counts_what_ran_and_not_what_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, slept = Clock(kind="cpu"), Clock()
    begin, began = reading.now(), slept.now()
    time.sleep(0.1)
    assert reading.now() - begin < 0.05 < slept.now() - began
    monkeypatch.setattr(clock, "perf_counter", lambda: pytest.fail("elapsed time was read"))
    target, draft = TableModel(), TableModel(strangeness=0.3)
    trial = run_trial(replace(request("easy", 2, 0.0), clock="cpu"), target, draft)
    assert trial.decode_s is not None
    assert trial.decode_s > 0
    time_forwards(
        [TimedModel("target", "big", target)], 2, context=[1, 2], repetitions=2, clock="cpu"
    )


def test_blocks_within_blocks_collect_what_was_made_since(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[str] = []
    monkeypatch.setattr(clock, "_froze_itself", lambda: False)
    monkeypatch.setattr(clock.gc, "freeze", lambda: frozen.append("frozen"))
    monkeypatch.setattr(clock.gc, "unfreeze", lambda: frozen.append("unfrozen"))
    with undisturbed():
        cycle: list[Any] = []
        cycle.append(cycle)
        del cycle
        with undisturbed():
            assert gc.collect() == 0, "the inner block collected the cycle"
        assert not gc.isenabled()
    assert frozen == ["frozen", "unfrozen"]


@pytest.mark.parametrize(("frozen", "itself"), [(375, False), (400_000, True)])
def test_what_a_process_has_frozen_stays_so(
    frozen: int, itself: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.12 begins with 375 objects frozen."""
    calls: list[str] = []
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(clock.gc, name, partial(calls.append, name))
    monkeypatch.setattr(clock.gc, "get_freeze_count", lambda: frozen)
    monkeypatch.setattr(clock, "_froze_itself", clock._froze_itself.__wrapped__)
    with undisturbed():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert calls == ([] if itself else ["freeze", "unfreeze"])


# ---- steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slow_s", "attempts"), [(0.01, 1), (1.0, 3)])
def test_steps_that_cannot_be_right_are_timed_again_twice_at_most(
    slow_s: float, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that is slow by a second while the target steps."""
    steps, seconds, expected, ticks = 0, 0.0, list[int](), list[None]()

    class Stepping(TableModel):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            nonlocal steps, seconds
            steps += len(tokens) == 2
            seconds += slow_s if len(tokens) == 1 else 0.01 * len(tokens)
            return super().forward(tokens)

    monkeypatch.setattr(clock, "perf_counter", lambda: seconds)
    timings = time_forwards(
        [TimedModel("target", "big", Stepping())],
        2,
        context=[1, 2],
        prefills=[2],
        repetitions=10,
        doubtful=lambda timings: bool(unstable_steps(timings)),
        expect=expected.append,
        tick=lambda: ticks.append(None),
    )
    assert steps == sum(expected) == len(ticks) == attempts * (10 + 3)
    assert {(t.kind, t.tokens, len(t.samples_s)) for t in timings} == {
        ("prefill", 2, 3),
        ("step", 1, 10),
        *(("verify", n, 10) for n in (1, 2, 3)),
    }


def test_what_precedes_a_timed_forward_varies() -> None:
    before: dict[int, set[int]] = {}
    last = 0

    class Watching(TableModel):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            nonlocal last
            before.setdefault(len(tokens), set()).add(last)
            last = len(tokens)
            return super().forward(tokens)

    time_forwards([TimedModel("target", "big", Watching())], 4, context=[1, 2], repetitions=30)
    assert all(before[n] >= {1, 2, 3, 4, 5} - {n} for n in range(2, 6))

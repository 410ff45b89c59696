"""The simulated server against theory and the closed loop, and its policies against upstream's."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.simulation.policies import (
    SGLANG_TIERS,
    AcceptedAverage,
    Budgets,
    ByLoad,
    Fixed,
    Oracle,
    SurvivalBudget,
    Threshold,
    Tier,
    Tiers,
    allocated,
)
from harness.simulation.requests import Confidences, Request, Text, as_recorded, at_random
from harness.simulation.server import Costs, Iteration, Policy, Reads, Served, Slot, simulate
from harness.theory.adaptive import drafted_by_accepted, flag_oracle, until_unlikely
from harness.theory.batching import BatchTimes, closed_loop
from harness.theory.replay import by_start, replay
from harness.theory.speedup import RoundTimes

K = 3


def request_of(
    flags: Sequence[bool], *, shortens: bool = False, prompt_tokens: int = 10
) -> Request:
    """A text whose token at each position is accepted where its flag is set."""
    size = len(flags)
    most = np.arange(size - 1, -1, -1) if shortens else np.full(size, 100)
    chances = by_start(np.array([flags], dtype=np.float64), K)[0] if size else np.zeros((0, K))
    text = Text("easy", "1", prompt_tokens, chances, most)
    assert text.certain is not None
    return text.certain


def plain(size: int) -> Request:
    """A text of so many tokens of which none would be accepted."""
    return request_of([False] * size)


def flat(slots: int, seconds: float = 1.0, k: int = K) -> Costs:
    """Every iteration costs the same."""
    return Costs([[seconds] * (k + 1)] * (slots + 1))


def table(times: BatchTimes, slots: int) -> Costs:
    return Costs([[times.at(n, b) for n in range(K + 1)] for b in range(slots + 1)])


TEXTS = st.lists(st.lists(st.booleans(), max_size=12), min_size=1, max_size=12)
ARRIVALS = st.lists(st.floats(0, 3), min_size=12, max_size=12)


def with_confidences(request: Request, draw: Callable[[], float]) -> Request:
    rows = [[draw() for _ in range(K)] for _ in range(request.tokens)]
    return Request(request.prompt_tokens, request.runs, request.most, whole_rounds(rows))


def whole_rounds(rows: Sequence[Sequence[float]]) -> Confidences:
    return Confidences(np.array(rows, dtype=np.float64).reshape(len(rows), K))


# ---- against theory ------------------------------------------------------------------------------


def waits(services: Sequence[int], load: float, number: int) -> float:
    """The mean wait for a single slot, in seconds of one iteration."""
    random = np.random.default_rng(11)
    sizes = random.choice(services, number)
    of_size = {int(size): plain(int(size)) for size in services}
    arrivals = at_random(number, random) * np.mean(services) / load
    served = simulate([of_size[size] for size in sizes.tolist()], arrivals, flat(1), Fixed(0))
    return float((served.entered_s - served.arrived_s).mean())


def test_one_slot_with_texts_of_one_length_waits_as_an_m_d_1_queue() -> None:
    load = 0.5
    assert waits([4], load, 150_000) == pytest.approx(4 * load / (2 * (1 - load)), rel=0.01)


def test_one_slot_with_texts_of_several_lengths_waits_as_an_m_g_1_queue() -> None:
    services, load = [1, 4, 10], 0.5
    # Pollaczek and Khinchine
    second = float(np.mean(np.square(services)) / np.mean(services))
    expected = load * second / (2 * (1 - load))
    assert waits(services, load, 150_000) == pytest.approx(expected, rel=0.01)


@given(TEXTS, st.integers(1, 4), st.integers(0, K), st.none() | st.integers(0, 3))
def test_a_closed_loop_is_the_special_case_in_which_all_have_arrived(
    flags: list[list[bool]], in_flight: int, k: int, spare: int | None
) -> None:
    times = BatchTimes(
        {
            1: RoundTimes(1.0, ((1, 1.3), (3, 1.9))),
            4: RoundTimes(1.6, ((1, 2.4), (3, 4.4))),
        }
    )
    requests = [request_of(each) for each in flags]
    slots = None if spare is None else in_flight + spare  # that share a pass only as neighbours
    costs = replace(table(times, slots or in_flight), by_runs=slots is not None)
    served = simulate(requests, np.zeros(len(flags)), costs, Fixed(k), in_flight)
    proposals = np.zeros((len(flags), k + 1))
    proposals[:, k] = served.rounds
    expected = times.seconds(closed_loop(proposals, in_flight, slots))
    assert served.ended_s.max() == pytest.approx(expected)


@pytest.mark.parametrize("k", range(K + 1))
def test_rounds_are_those_of_replay(k: int) -> None:
    random = np.random.default_rng(3)
    flags = random.random((20, 30)) < 0.6
    served = simulate([request_of(each) for each in flags], np.zeros(20), flat(4), Fixed(k))
    if k == 0:
        assert served.rounds.tolist() == [30] * 20
        return
    chances = by_start(flags.astype(np.float64), K)
    assert served.rounds.tolist() == replay(chances, [30] * 20, [k])[k].rounds.tolist()


def test_drawn_flags_have_the_rounds_that_replay_expects() -> None:
    random = np.random.default_rng(4)
    chances = random.random((1, 20))
    text = Text("easy", "1", 5, by_start(chances, K)[0], np.full(20, 100))
    assert text.certain is None
    drawn = [text.drawn(row) for row in random.random((4000, 20))]
    served = simulate(drawn, np.zeros(4000), flat(4), Fixed(K))
    expected = float(replay(by_start(chances, K), [20], [K])[K].rounds[0])
    assert served.rounds.mean() == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("drawn", [False, True])
def test_a_thresholds_simulated_rounds_and_drafts_are_those_expected_by_replay(
    threshold: float, drawn: bool
) -> None:
    size, number, random = 40, 3000 if drawn else 1, np.random.default_rng(6)
    chances = random.random((1, size)) if drawn else (random.random((1, size)) < 0.7).astype(float)
    made, off_text = random.random(size), random.random((size + 1, K))
    padded = np.pad(made, (0, K - 1), constant_values=np.nan)
    along = np.lib.stride_tricks.sliding_window_view(padded, K)
    by_offset, sure = by_start(chances, K), Confidences(along, off_text)
    text = Text("easy", "1", 5, by_offset[0], np.full(size, 100), sure)
    proposed = until_unlikely(along[None], threshold)
    drafted = drafted_by_accepted(proposed, until_unlikely(off_text[None], threshold), K)
    expected = replay(by_offset, [size], [K], proposed=proposed, drafted=drafted)[K]
    sent = [text.drawn(row) for row in random.random((number, size))]
    journal: list[Iteration] = []
    policy = Threshold(K, threshold)
    served = simulate(sent, np.zeros(number), flat(4), policy, journal=journal)
    means = (served.rounds.mean(), sum(sum(each.drafts) for each in journal) / number)
    error = 0.01 if drawn else 1e-12
    assert means == pytest.approx((expected.rounds[0], expected.drafted[0]), rel=error)


def test_one_request_of_the_simulated_oracle_takes_no_less_than_the_bound_by_theory() -> None:
    random = np.random.default_rng(9)
    for _ in range(30):
        flags = random.random(30) < 0.7
        row = np.cumsum(random.random(K + 1)) + 1.0
        for seconds in (row, np.ones(K + 1)):
            costs = Costs([seconds.tolist()] * 2)
            served = simulate([request_of(flags.tolist())], [0.0], costs, Oracle(K, costs))
            (least,) = flag_oracle(by_start(flags[None].astype(float), K), [30], seconds)
            assert served.ended_s[0] >= least * (1 - 1e-12)
        # Where draft tokens are free both draft all that will be accepted
        assert served.ended_s[0] == pytest.approx(least)


# ---- what every policy keeps ---------------------------------------------------------------------


def checked(served: Served, requests: Sequence[Request], slots: int) -> None:
    """Nobody is lost, or overtaken, and no more are active than there are slots."""
    assert served.tokens.tolist() == [request.tokens for request in requests]
    assert (served.entered_s >= served.arrived_s).all()
    assert (served.first_s >= served.entered_s).all()
    assert (served.ended_s >= served.first_s).all()
    assert (np.diff(served.entered_s) >= 0).all()
    assert ((served.rounds > 0) == (served.tokens > 0)).all()
    assert (served.rounds <= served.tokens).all()
    for now in served.entered_s[served.tokens > 0]:
        inside = (served.entered_s <= now) & (served.ended_s > now)
        assert inside.sum() <= slots


class Watched(Policy):
    """A policy whose rounds are added up: what they emit."""

    reads: ClassVar[frozenset[Reads]] = frozenset({"accepted"})

    def __init__(self, policy: Policy) -> None:
        self.policy, self.emitted = policy, 0

    def choose(self, active: Sequence[Slot]) -> Sequence[int]:
        return self.policy.choose(active)

    def seen(self, slot: Slot, drafted: int, accepted: int) -> None:
        assert 0 <= accepted <= drafted
        self.emitted += min(accepted + 1, slot.request.tokens - slot.position)
        self.policy.seen(slot, drafted, accepted)


@given(TEXTS, ARRIVALS, st.integers(1, 4), st.booleans(), st.randoms(use_true_random=False))
def test_no_policy_loses_a_request_or_a_token_or_lets_one_overtake(
    flags: list[list[bool]], gaps: list[float], slots: int, shortens: bool, chance: object
) -> None:
    draw = chance.random  # type: ignore[attr-defined]
    requests = [with_confidences(request_of(f, shortens=shortens), draw) for f in flags]
    arrivals = np.cumsum(gaps[: len(requests)])
    rows = [[1.0 + 0.1 * b + 0.05 * n * b for n in range(K + 1)] for b in range(slots + 1)]
    costs = Costs(rows, 0.5, 0.01)
    makers: list[Callable[[], Policy]] = [
        lambda: Fixed(0),
        lambda: Fixed(K),
        lambda: ByLoad((0, K, 1)),
        lambda: Threshold(K, 0.5),
        lambda: Tiers(K, (Tier(1, (1, 3)), Tier(3, (0, 1)))),
        lambda: SurvivalBudget(K, costs),
        lambda: Oracle(K, costs),
    ]
    for make in makers:
        watched = Watched(make())
        served = simulate(requests, arrivals, costs, watched)
        checked(served, requests, slots)
        assert watched.emitted == sum(request.tokens for request in requests)
        again = simulate(requests, arrivals, costs, make())
        np.testing.assert_allclose(again.ended_s, served.ended_s)


def test_a_start_stalls_who_is_active_and_a_prompt_costs_by_its_length() -> None:
    requests = [plain(10), request_of([False] * 2, prompt_tokens=200)]
    costs = Costs([[1.0]] * 3, start_s=0.5, prompt_token_s=0.01)
    served = simulate(requests, [0.0, 3.0], costs, Fixed(0))
    # It comes while the third token is made; 0.5 + 2 s later it has its first token
    assert served.entered_s.tolist() == pytest.approx([0.0, 3.6])
    assert served.first_s.tolist() == pytest.approx([0.6, 6.1])
    assert served.ended_s.tolist() == pytest.approx([0.6 + 10 + 2.5, 8.1])
    assert served.first_token_s[:, 0].tolist() == pytest.approx([0.6, 3.1])
    assert served.per_token_s.tolist() == pytest.approx([1.25, 1.0])


def test_the_scatter_of_prefills_is_in_every_wait_once_and_in_no_clock() -> None:
    requests, more_s = [plain(4), plain(3), plain(5), plain(2)], [-0.1, 0.0, 0.3]
    costs = Costs([[1.0]] * 3, start_s=0.5)
    exact = simulate(requests, np.zeros(4), costs, Fixed(0))
    served = simulate(requests, np.zeros(4), replace(costs, prefill_scatter_s=more_s), Fixed(0))
    assert served.ended_s.tolist() == exact.ended_s.tolist()
    over_s = served.first_token_s - exact.first_token_s
    assert over_s.shape == (4, 3)
    for of_request in over_s:
        assert sorted(of_request.tolist()) == pytest.approx(more_s)
    # No draw gives every request the same part of it
    assert (np.ptp(over_s, axis=0) > 0.05).all()


def test_a_request_waits_until_its_prompt_and_text_have_room_in_the_cache() -> None:
    requests = [request_of([False] * 4, prompt_tokens=tokens) for tokens in (6, 6, 1, 30)]
    costs = Costs([[1.0]] * 5, cache_tokens=22)
    served = simulate(requests, np.zeros(4), costs, Fixed(0))
    # 10 + 10 tokens; 5 more only when one has ended, though a slot is free. The last needs more
    # than there is, and so is alone
    assert served.entered_s.tolist() == pytest.approx([0.0, 0.0, 4.0, 8.0])
    assert simulate(requests, np.zeros(4), flat(4), Fixed(0)).entered_s.tolist() == [0.0] * 4


def test_neighbouring_slots_share_a_pass_and_others_do_not() -> None:
    costs = Costs([[0.0], [1.0], [1.2], [1.3]], by_runs=True)
    # 0, 1 and 2 are active; then 1 leaves, and 0 and 2 are two passes
    served = simulate([plain(3), plain(1), plain(3)], np.zeros(3), costs, Fixed(0))
    assert served.ended_s.tolist() == pytest.approx([1.3 + 2 * 2.0, 1.3, 1.3 + 2 * 2.0])
    # Two in flight of three slots: the next goes to the slot that was free for longest
    sent = [plain(2), plain(1), plain(2)]
    served = simulate(sent, np.zeros(3), costs, Fixed(0), in_flight=2)
    assert served.ended_s.tolist() == pytest.approx([1.2 + 2.0, 1.2, 1.2 + 2.0 + 1.0])


def test_a_request_whose_tokens_all_come_from_the_prefill_ends_with_it() -> None:
    served = simulate([plain(0), plain(1)], [0.0, 0.0], Costs([[1.0]] * 2, 0.25), Fixed(0))
    assert served.ended_s.tolist() == [0.25, 1.5]
    assert np.isnan(served.per_token_s[0])


def test_arrivals_are_in_mean_gaps_and_a_record_keeps_its_gaps() -> None:
    random = np.random.default_rng(0)
    arrivals = at_random(30_000, random)
    assert arrivals[-1] / len(arrivals) == pytest.approx(1.0, rel=0.02)
    made = as_recorded([10.0, 11.0, 14.0], 6, random)
    # Gaps of 1 and 3, and a mean one of 2 between the rounds
    assert set(np.diff(made).round(6)) == {0.5, 1.0, 1.5}
    assert made[3] - made[0] == pytest.approx(3.0)


def test_a_policy_that_reads_the_load_alone_is_asked_for_a_fraction_of_the_rounds() -> None:
    random = np.random.default_rng(2)
    texts = [request_of(row) for row in random.random((50, 120)) < 0.7]
    requests = [texts[at] for at in random.integers(0, 50, 1000)]
    asked = 0

    class Counted(Fixed):
        def choose(self, active: Sequence[Slot]) -> Sequence[int]:
            nonlocal asked
            asked += 1
            return super().choose(active)

    served = simulate(requests, at_random(1000, random) * 20.0, flat(4), Counted(K))
    # Once for each that enters and each that ends, at most; that is what makes it fast
    assert asked <= 2000 < served.rounds.sum() / 15


def test_a_growing_context_lets_no_arrival_wait_for_a_free_slot() -> None:
    random = np.random.default_rng(4)
    sizes = zip(random.integers(5, 120, 60), random.integers(10, 900, 60), strict=True)
    requests = [request_of([False] * size, prompt_tokens=prompt) for size, prompt in sizes]
    arrivals = np.cumsum(random.exponential(90.0, 60))
    costs = replace(flat(4), start_s=0.5, context_tokens=100.0, context_token_s=1e-3)
    served = simulate(requests, arrivals, costs, Fixed(0))
    every_iteration = simulate(requests, arrivals, costs, Watched(Fixed(0)))
    assert (every_iteration.entered_s - arrivals > 0.0).any()
    np.testing.assert_allclose(served.entered_s, every_iteration.entered_s)
    np.testing.assert_allclose(served.ended_s, every_iteration.ended_s)


# ---- policies against upstream's -----------------------------------------------------------------


def fed(average: AcceptedAverage, accepted: Sequence[Sequence[int]]) -> list[int]:
    """The K after each batch of accepted lengths."""
    made: list[int] = []
    for batch in accepted:
        average.update(batch)
        made.append(average.k)
    return made


def test_sglangs_average_moves_as_computed_by_hand() -> None:
    one, eight = SGLANG_TIERS[:2]
    # From 3 the average begins at 2. All three accepted: 3 - 0.8^15 = 2.96 after 15 batches, the
    # first five after the warm-up of ten; that is above 2.5, and not above 4.5
    assert fed(AcceptedAverage(one, 3), [[3]] * 15) == [3] * 14 + [5]
    # None accepted: 2 x 0.8^15 = 0.07 <= 1 - 0.5 - 0.25, so down to 1
    assert fed(AcceptedAverage(one, 3), [[0, 0]] * 15)[-1] == 1
    # Means of a batch: 1.5 of (0, 3); between the thresholds 0.25 and 2.5 of K = 3
    assert fed(AcceptedAverage(one, 3), [[0, 3]] * 30) == [3] * 30
    # The tier of 8 has no 5: its middle K, 1, whose average begins at 0. Nothing accepted turns
    # drafting off; five batches later it is tried again
    assert fed(AcceptedAverage(eight, 5), [[0] * 8] * 25) == [1] * 14 + [0] * 5 + [1] * 5 + [0]
    # A tier that begins at 0 has no history: -1, which the first trial sets to that of its K
    idle = AcceptedAverage(Tier(1, (0, 3)), 0)
    assert idle.average == -1.0
    assert fed(idle, [[0]] * 15)[-1] == 3
    assert idle.average == 2.0


def test_a_batch_has_the_tier_of_the_largest_key_that_it_reaches() -> None:
    tiers = Tiers(3)
    slots = [Slot(n, n, plain(4)) for n in range(64)]
    found = {batch: tiers.choose(slots[:batch])[0] for batch in (1, 7, 8, 31, 32, 63, 64)}
    # 3 where the tier has it; else the middle one
    assert found == {1: 3, 7: 3, 8: 3, 31: 3, 32: 1, 63: 1, 64: 0}


def document(survivals: Sequence[Sequence[float]], rows: Sequence[Sequence[float]]) -> list[int]:
    """vLLM's document, by trying every budget: the best slots of all until it is spent."""
    batch = len(survivals)
    slots = [(chance, -at, -row) for row, e in enumerate(survivals) for at, chance in enumerate(e)]
    slots.sort(reverse=True)
    best, admitted = 0.0, [0] * batch
    for budget in range(len(slots) + 1):
        tokens = batch + sum(chance for chance, *_ in slots[:budget])
        seconds = np.interp(budget / batch, range(len(rows[batch])), rows[batch])
        if tokens / seconds > best * (1 + 1e-12):
            best = float(tokens / seconds)
            admitted = [sum(-r == row for *_, r in slots[:budget]) for row in range(batch)]
    return admitted


@given(
    st.lists(st.lists(st.floats(0.05, 1.0), max_size=K), min_size=1, max_size=5),
    st.floats(0.0, 0.6),
)
def test_vllms_allocation_is_that_of_its_document(
    confidences: list[list[float]], each: float
) -> None:
    rows = [[1.0 + 0.2 * b + each * n * b for n in range(K + 1)] for b in range(6)]
    survivals = [np.cumprod(row).tolist() for row in confidences]
    chances = sorted((chance for row in survivals for chance in row), reverse=True)
    budget = Budgets(Costs(rows)).best(len(survivals), chances)
    made = allocated(survivals, budget)
    assert made == document(survivals, rows)
    assert sum(made) == budget


def test_vllms_budget_rests_on_the_confidences_of_the_round_before() -> None:
    sure, unsure = [1.0] * K, [0.0] * K
    request = Request(1, np.zeros(3, np.intp), np.full(3, 100), whole_rounds([unsure, sure, sure]))
    slot, policy = Slot(0, 0, request), SurvivalBudget(K, flat(1))
    # Of a request that just came nothing is known, which counts as sure
    drafted = []
    for position in range(3):
        slot.position = position
        drafted += policy.choose([slot])
    assert drafted == [K, 0, K]


def test_the_oracle_drafts_what_will_be_accepted_and_pays() -> None:
    accepted, rejected = request_of([True] * 3), request_of([False] * 3)
    slots = [Slot(0, 0, accepted), Slot(1, 1, rejected)]
    assert Oracle(K, flat(2)).choose(slots) == [3, 0]
    # A draft token that costs more than a plain token is not worth being right
    expensive = Costs([[1.0 + 3.0 * n for n in range(K + 1)]] * 3)
    assert Oracle(K, expensive).choose(slots) == [0, 0]


@given(st.lists(st.integers(0, K), min_size=1, max_size=5), st.floats(0.0, 1.5))
def test_the_oracles_budget_is_that_of_chances_of_1(accepted: list[int], each: float) -> None:
    rows = [[1.0 + 0.2 * b + each * n * b**0.5 for n in range(K + 1)] for b in range(6)]
    slots = [Slot(n, n, request_of([True] * k + [False])) for n, k in enumerate(accepted)]
    budget = Budgets(Costs(rows)).best(len(slots), [1.0] * sum(accepted))
    made = Oracle(K, Costs(rows)).choose(slots)
    assert sum(made) == budget
    assert made == allocated([[1.0] * k for k in accepted], budget)


def test_a_threshold_drafts_up_to_the_first_unlikely_token() -> None:
    rows = whole_rounds([[0.9, 0.3, 0.9], [0.9] * 3])
    request = Request(1, np.zeros(2, np.intp), np.full(2, 100), rows)
    slot, policy = Slot(0, 0, request), Threshold(K, 0.5)
    assert policy.choose([slot]) == [2]
    slot.position = 1
    assert policy.choose([slot]) == [3]

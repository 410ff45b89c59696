"""The simulated server against theory and closed loops."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.simulation import (
    Costs,
    Iteration,
    Request,
    Served,
    Text,
    as_recorded,
    at_random,
    simulate,
)
from harness.theory.replay import by_start, replay

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


TEXTS = st.lists(st.lists(st.booleans(), max_size=12), min_size=1, max_size=12)
ARRIVALS = st.lists(st.floats(0, 3), min_size=12, max_size=12)


# ---- against theory ------------------------------------------------------------------------------


def waits(services: Sequence[int], load: float, number: int) -> float:
    """The mean wait for a single slot, in seconds of one iteration."""
    random = np.random.default_rng(11)
    sizes = random.choice(services, number)
    of_size = {int(size): plain(int(size)) for size in services}
    arrivals = at_random(number, random) * np.mean(services) / load
    served = simulate([of_size[size] for size in sizes.tolist()], arrivals, flat(1), [0])
    return float((served.entered_s - served.arrived_s).mean())


@pytest.mark.parametrize("services", [[4], [1, 4, 10]])
def test_one_slot_waits_as_an_m_g_1_queue_or_with_texts_of_one_length_an_m_d_1(
    services: list[int],
) -> None:
    load = 0.5
    # Pollaczek and Khinchine
    second = float(np.mean(np.square(services)) / np.mean(services))
    expected = load * second / (2 * (1 - load))
    assert waits(services, load, 150_000) == pytest.approx(expected, rel=0.01)


def closed_loop(sizes: Sequence[int], in_flight: int) -> list[float]:
    """[active] iterations of plain texts."""
    journal: list[Iteration] = []
    requests = [plain(size) for size in sizes]
    simulate(requests, np.zeros(len(sizes)), flat(in_flight), [0], in_flight, journal)
    iterations = [0.0] * (in_flight + 1)
    for each in journal:
        iterations[len(each.active)] += each.number if each.active else 0
    return iterations


def test_a_request_that_ends_is_followed_by_the_next() -> None:
    # 3 and 1 rounds begin; the third request, of 2, begins where the second ends
    assert closed_loop([3, 1, 2], 2) == [0, 0, 3]
    assert closed_loop([3, 1, 2], 1) == [0, 6]
    # All at once: one iteration of three, one of two, one of one
    assert closed_loop([3, 1, 2], 4) == [0, 1, 1, 1, 0]


@given(st.lists(st.integers(0, 27), min_size=1, max_size=9), st.integers(1, 5))
def test_iterations_of_a_closed_loop_hold_every_round_once(
    sizes: list[int], in_flight: int
) -> None:
    iterations = np.array(closed_loop(sizes, in_flight))
    assert np.arange(in_flight + 1) @ iterations == sum(sizes)
    assert max(*sizes, sum(sizes) / in_flight) <= iterations.sum() <= sum(sizes)


@pytest.mark.parametrize("k", range(K + 1))
def test_rounds_are_those_of_replay(k: int) -> None:
    random = np.random.default_rng(3)
    flags = random.random((20, 30)) < 0.6
    served = simulate([request_of(each) for each in flags], np.zeros(20), flat(4), [k])
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
    served = simulate(drawn, np.zeros(4000), flat(4), [K])
    expected = float(replay(by_start(chances, K), [20], [K])[K].rounds[0])
    assert served.rounds.mean() == pytest.approx(expected, rel=0.01)


# ---- what holds at every K -----------------------------------------------------------------------


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


def every_iteration(requests: Sequence[Request]) -> list[Request]:
    """The same without a round that drafts K, so that no two iterations are one step."""
    return [replace(each, most=np.zeros_like(each.most)) for each in requests]


@given(TEXTS, ARRIVALS, st.integers(1, 4), st.booleans())
def test_no_request_is_lost_or_overtaken_at_any_k_or_k_by_load(
    flags: list[list[bool]], gaps: list[float], slots: int, shortens: bool
) -> None:
    requests = [request_of(each, shortens=shortens) for each in flags]
    arrivals = np.cumsum(gaps[: len(requests)])
    rows = [[1.0 + 0.1 * b + 0.05 * n * b for n in range(K + 1)] for b in range(slots + 1)]
    costs = Costs(rows, 0.5, 0.01)
    for ks in ([0], [K], [0, K, 1]):
        served = simulate(requests, arrivals, costs, ks)
        checked(served, requests, slots)
        again = simulate(requests, arrivals, costs, ks)
        np.testing.assert_array_equal(again.ended_s, served.ended_s)


def test_k_by_load_drafts_by_how_many_are_active() -> None:
    sure, few = request_of([True] * 8), request_of([True] * 2)
    # Two are active for one round of one draft token, then one of three
    served = simulate([sure, few], np.zeros(2), flat(2), [0, K, 1])
    assert served.ended_s.tolist() == [3.0, 1.0]
    assert simulate([sure], np.zeros(1), flat(2), [0, K, 1]).rounds.tolist() == [2]


def test_a_start_stalls_who_is_active_and_a_prompt_costs_by_its_length() -> None:
    requests = [plain(10), request_of([False] * 2, prompt_tokens=200)]
    costs = Costs([[1.0]] * 3, start_s=0.5, prompt_token_s=0.01)
    served = simulate(requests, [0.0, 3.0], costs, [0])
    # It comes while the third token is made; 0.5 + 2 s later it has its first token
    assert served.entered_s.tolist() == pytest.approx([0.0, 3.6])
    assert served.first_s.tolist() == pytest.approx([0.6, 6.1])
    assert served.ended_s.tolist() == pytest.approx([0.6 + 10 + 2.5, 8.1])
    assert served.first_token_s[:, 0].tolist() == pytest.approx([0.6, 3.1])
    assert served.per_token_s.tolist() == pytest.approx([1.25, 1.0])


def test_the_scatter_of_prefills_is_in_every_wait_once_and_in_no_clock() -> None:
    requests, more_s = [plain(4), plain(3), plain(5), plain(2)], [-0.1, 0.0, 0.3]
    costs = Costs([[1.0]] * 3, start_s=0.5)
    exact = simulate(requests, np.zeros(4), costs, [0])
    served = simulate(requests, np.zeros(4), replace(costs, prefill_scatter_s=more_s), [0])
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
    served = simulate(requests, np.zeros(4), costs, [0])
    # 10 + 10 tokens; 5 more only when one has ended, though a slot is free. The last needs more
    # than there is, and so is alone
    assert served.entered_s.tolist() == pytest.approx([0.0, 0.0, 4.0, 8.0])
    assert simulate(requests, np.zeros(4), flat(4), [0]).entered_s.tolist() == [0.0] * 4


def test_a_request_whose_tokens_all_come_from_the_prefill_ends_with_it() -> None:
    served = simulate([plain(0), plain(1)], [0.0, 0.0], Costs([[1.0]] * 2, 0.25), [0])
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


def test_a_growing_context_lets_no_arrival_wait_for_a_free_slot() -> None:
    random = np.random.default_rng(4)
    sizes = zip(random.integers(5, 120, 60), random.integers(10, 900, 60), strict=True)
    requests = [request_of([False] * size, prompt_tokens=prompt) for size, prompt in sizes]
    arrivals = np.cumsum(random.exponential(90.0, 60))
    costs = replace(flat(4), start_s=0.5, context_tokens=100.0, context_token_s=1e-3)
    served = simulate(requests, arrivals, costs, [0])
    one_by_one = simulate(every_iteration(requests), arrivals, costs, [K])
    assert (one_by_one.entered_s - arrivals > 0.0).any()
    np.testing.assert_allclose(served.entered_s, one_by_one.entered_s)
    np.testing.assert_allclose(served.ended_s, one_by_one.ended_s)

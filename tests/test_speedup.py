"""The formulas: limits, monotonicity, roots, and what bad input says (tables: test_golden)."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.records import UserError
from harness.theory import acceptance as ac
from harness.theory import speedup as sp

alphas = st.floats(0.0, 1.0)
ks = st.integers(1, 64)
costs = st.floats(0.0, 3.0)


def by_position(alpha: float, k: int) -> list[float]:
    return [alpha**j for j in range(1, k + 1)]


@given(alphas, ks)
def test_tokens_per_round_are_one_plus_the_chance_of_reaching_each_position(alpha, k):
    tokens = ac.expected_tokens_per_round(alpha, k)
    assert tokens == pytest.approx(1.0 + math.fsum(by_position(alpha, k)), rel=1e-12)
    assert 1.0 <= tokens <= (k + 1) * (1 + 1e-12)


def test_tokens_per_round_keep_their_digits_next_to_alpha_one():
    gap = 1e-12
    assert ac.expected_tokens_per_round(1.0 - gap, 4) == pytest.approx(5 - 10 * gap, abs=1e-14)


def rounds_at(k: int, cost: float) -> sp.RoundTimes:
    """Of a round that costs so many plain tokens."""
    return sp.RoundTimes(0.01, ((k, 0.01 * cost),))


@given(ks, st.floats(0.05, 80.0))
def test_break_even_alpha_is_where_the_speedup_is_one(k, cost):
    rounds = rounds_at(k, cost)
    alpha = rounds.break_even_alpha(k)
    if alpha is None:
        assert rounds.speedup(k + 1.0, k) < 1.0
    else:
        speedup = rounds.speedup(ac.expected_tokens_per_round(alpha, k), k)
        assert speedup == pytest.approx(1.0, abs=1e-9) if alpha else speedup >= 1.0 - 1e-12


@pytest.mark.parametrize(
    ("k", "cost", "root"), [(4, 7.0, None), (4, 5.0, 1.0), (4, 1.0, 0.0), (1, 1.25, 0.25)]
)
def test_break_even_alpha_at_its_edges(k, cost, root):
    rounds = sp.RoundTimes(1.0, ((k, cost),))
    assert rounds.break_even_alpha(k) == (None if root is None else pytest.approx(root))


@given(alphas, ks)
def test_the_forms_of_acceptance_convert_both_ways(alpha, k):
    rate = min(1.0, ac.acceptance_rate_from_alpha(alpha, k))
    back = ac.alpha_from_acceptance_rate(rate, k)
    assert ac.acceptance_rate_from_alpha(back, k) == pytest.approx(rate, abs=1e-9)
    assert ac.alpha_from_tokens_per_round(1.0 + k * rate, k) == back
    assert rate <= alpha + 1e-12
    positions, tokens = by_position(alpha, k), ac.expected_tokens_per_round(alpha, k)
    assert ac.alpha_from_positions(positions) == pytest.approx(alpha, abs=1e-9)
    assert ac.mean_acceptance_length_from_positions(positions) == pytest.approx(tokens)
    assert ac.acceptance_rate_from_positions(positions) == pytest.approx(rate, abs=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 1.0])
def test_where_all_positions_are_alike_the_rates_at_a_smaller_k_are_the_lists_first(alpha):
    for last in range(1, 9):
        for k in range(1, last + 1):
            of_k = ac.positions_at_k(by_position(alpha, last), k)
            assert of_k == pytest.approx(by_position(alpha, k), abs=1e-12)


def test_rates_at_a_smaller_k_are_the_lists_first_where_acceptance_falls_within_a_round():
    assert ac.positions_at_k((0.8, 0.4, 0.1), 2) == (0.8, 0.4)
    for k in (1, 2, 3):
        of_k = ac.positions_at_k((0.8, 0.8, 0.8, 0.4), k)
        assert ac.positions_at_k(of_k, k) == pytest.approx(of_k), "a list of rates, none rising"


def test_step_times_give_c_v_and_the_seconds_of_a_round():
    times = sp.StepTimes(draft_s=0.002, target_s=0.010, verify_s=(0.010, 0.011, 0.013))
    assert times.c == pytest.approx(0.2)
    assert [times.v(k) for k in (1, 2)] == pytest.approx([1.1, 1.3])
    assert times.round_s(2) == pytest.approx(0.017)
    assert [sp.StepTimes(0.002, 0.010).v(k) for k in (1, 16)] == [1.0, 1.0]


def test_a_verify_curve_that_is_too_short_is_an_error_of_the_user():
    times = sp.StepTimes(0.002, 0.010, (0.010, 0.011))
    assert (times.covers(1), times.covers(2)) == (True, False)
    with pytest.raises(UserError, match=r"verify_ms: 2 entries, but k=2 verifies 3 positions"):
        times.v(2)


STEPS = sp.StepTimes(draft_s=0.002, target_s=0.010, verify_s=(0.010, 0.011, 0.013, 0.016))


def test_rounds_by_the_formula_cost_k_draft_steps_and_a_verify():
    """LKM theorem 3.8, with v(K) in place of 1."""
    rounds = sp.RoundTimes.from_steps(STEPS, 8)
    assert (rounds.plain_s, rounds.largest, rounds.covers(4)) == (0.010, 3, False)
    assert [rounds.relative(k) for k in (1, 2, 3)] == pytest.approx([1.3, 1.7, 2.2])
    assert rounds.speedup(2.0, 2) == pytest.approx(2.0 / (2 * STEPS.c + STEPS.v(2)))
    assert rounds.break_even_alpha(4) is None


def test_a_look_up_costs_its_time_once_a_round_also_where_it_finds_nothing():
    rounds = sp.RoundTimes.from_steps(STEPS, 3, lookup=True)
    assert [rounds.at(n) for n in range(4)] == pytest.approx([0.012, 0.013, 0.015, 0.018])


@pytest.mark.parametrize(
    ("timed", "seconds"),
    [
        ({1: 1.5, 4: 3.0, 8: 4.0}, [1.0, 1.5, 2.0, 2.5, 3.0, 3.25, 3.5, 3.75, 4.0]),
        ({2: 2.5, 4: 3.0}, [1.0, 2.25, 2.5, 2.75, 3.0]),  # below the first: the nearest two
        ({4: 1.5, 8: 4.0}, [1.0, 1.125, 1.25, 1.375, 1.5]),  # but no cheaper than a plain token
        ({4: 3.0}, [1.0, 1.5, 2.0, 2.5, 3.0]),  # one alone: from the plain token
    ],
)
def test_rounds_that_were_not_timed_lie_on_a_line(timed, seconds):
    rounds = sp.RoundTimes(1.0, tuple(timed.items()))
    assert [rounds.at(n) for n in range(len(seconds))] == pytest.approx(seconds)
    with pytest.raises(UserError, match=r"^latency: rounds were timed up to k=.*, not at k=9"):
        rounds.at(9)


BAD_K = [0, -1, 1.5, math.nan, math.inf, True, "many", None]
BAD_SHARE = [-0.1, 1.1, math.nan, math.inf, "much", None]
BAD_TIME = [0.0, -1.0, math.nan, math.inf]
REFUSED = [
    *((ac.alpha_from_acceptance_rate, (0.5, k), r"k=.*1 or more") for k in BAD_K),
    *((ac.expected_tokens_per_round, (x, 4), r"alpha=.*between 0 and 1") for x in BAD_SHARE),
    *((ac.alpha_from_positions, ([x],), r"acceptance_by_position=") for x in BAD_SHARE),
    *((sp.StepTimes, (x, 1.0), r"draft_ms=") for x in BAD_TIME),
    *((sp.StepTimes, (1.0, x), r"target_ms=") for x in BAD_TIME),
    *((sp.StepTimes, (1.0, 1.0, (1.0, x)), r"verify_ms=") for x in BAD_TIME),
    (ac.acceptance_rate_from_positions, ([],), "acceptance_by_position=.*one rate per"),
    (ac.positions_at_k, ([0.8, 0.4], 3), "k=3: acceptance_by_position has 2 positions"),
    (ac.acceptance_rate_from_positions, ([0.5, 0.6],), "acceptance_by_position.*none may exceed"),
    (ac.alpha_from_tokens_per_round, (0.9, 4), "tokens_per_round"),
    (ac.accepted_over_emitted, (0.5,), "tokens_per_round"),
]


@pytest.mark.parametrize(("call", "arguments", "says"), REFUSED)
def test_impossible_input_is_refused_by_name_in_one_line(call, arguments, says):
    with pytest.raises(UserError, match=f"^{says}") as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)

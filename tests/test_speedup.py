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
verifies = st.floats(0.05, 5.0)


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


@given(alphas, alphas, ks, costs, verifies)
def test_speedup_is_tokens_over_cost_grows_with_alpha_and_stays_below_the_ideal(
    one, other, k, c, v
):
    low, high = sorted((one, other))
    assert sp.speedup(low, k, c, v) <= sp.speedup(high, k, c, v) * (1 + 1e-12)
    tokens = ac.expected_tokens_per_round(low, k)
    assert sp.speedup_from_tokens_per_round(tokens, k, c, v) == sp.speedup(low, k, c, v)
    assert sp.speedup(high, k, c, v) <= sp.ideal_speedup(k, c, v) * (1 + 1e-12)
    assert sp.speedup(0.0, k, 0.0) == 1.0


@given(ks, st.floats(0.001, 3.0), verifies)
def test_break_even_alpha_is_where_the_speedup_is_one(k, c, v):
    alpha = sp.break_even_alpha(k, c, v)
    if k * c + v > k + 1:
        assert alpha is None
        assert sp.ideal_speedup(k, c, v) < 1.0
    elif k * c + v <= 1.0:
        assert alpha == 0.0
        assert sp.speedup(0.0, k, c, v) >= 1.0
    else:
        assert alpha is not None
        assert sp.speedup(alpha, k, c, v) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize(
    ("k", "c", "v", "root"),
    [(4, 1.5, 1.0, None), (4, 1.0, 1.0, 1.0), (4, 0.1, 0.6, 0.0), (1, 0.25, 1.0, 0.25)],
)
def test_break_even_alpha_at_its_edges(k, c, v, root):
    assert sp.break_even_alpha(k, c, v) == (None if root is None else pytest.approx(root))


@given(alphas, ks, costs, verifies)
def test_the_linear_rule_is_exact_for_an_acceptance_rate_and_overstates_for_an_alpha(
    alpha, k, c, v
):
    exact = sp.speedup(alpha, k, c, v)
    assert sp.linear_speedup(alpha, k, c, v) >= exact * (1 - 1e-12)
    rate = min(1.0, ac.acceptance_rate_from_alpha(alpha, k))
    assert sp.linear_speedup(rate, k, c, v) == pytest.approx(exact, rel=1e-9)


@given(alphas, costs)
def test_best_k_is_the_largest_speedup_of_a_plain_search(alpha, c):
    grid = [1, 2, 4, 8, 16]
    v = {k: 1.0 + 0.02 * k for k in grid}
    values = {0: 1.0} | {k: sp.speedup(alpha, k, c, v[k]) for k in grid}
    chosen, value = sp.best_k(alpha, grid, c, v)
    assert value == max(values.values()) == values[chosen]


def test_best_k_is_zero_where_every_k_loses_and_takes_no_k_from_an_empty_list():
    assert sp.best_k(0.4, [0, 1, 2, 4], 0.74) == (0, 1.0)
    assert sp.best_k(1.0, [], 0.1) == (0, 1.0)
    assert sp.best_k(0.9, [8, 2], 0.05)[0] == 8


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


def test_rounds_by_the_formula_give_its_speedups_and_break_even_alphas():
    rounds = sp.RoundTimes.from_steps(STEPS, 8)
    assert (rounds.plain_s, rounds.largest, rounds.covers(4)) == (0.010, 3, False)
    for k in (1, 2, 3):
        alpha = rounds.break_even_alpha(k)
        assert alpha == pytest.approx(sp.break_even_alpha(k, STEPS.c, STEPS.v(k)))
        tokens = ac.expected_tokens_per_round(0.7, k)
        assert rounds.speedup(tokens, k) == pytest.approx(sp.speedup(0.7, k, STEPS.c, STEPS.v(k)))
    v = {k: STEPS.v(k) for k in (1, 2, 3)}
    assert rounds.best_k(0.7, [1, 2, 3]) == pytest.approx(sp.best_k(0.7, [1, 2, 3], STEPS.c, v))
    assert rounds.best_k(0.0, [1, 2, 3]) == (0, 1.0)
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


@pytest.mark.parametrize(("seconds", "alpha"), [(0.9, 0.0), (3.1, None), (1.75, 0.5)])
def test_a_measured_round_breaks_even_where_its_tokens_pay_for_it(seconds, alpha):
    assert sp.RoundTimes(1.0, ((2, seconds),)).break_even_alpha(2) == pytest.approx(alpha)


BAD_K = [0, -1, 1.5, math.nan, math.inf, True, "many", None]
BAD_SHARE = [-0.1, 1.1, math.nan, math.inf, "much", None]
BAD_TIME = [0.0, -1.0, math.nan, math.inf]
REFUSED = [
    *((sp.speedup, (0.5, k, 0.1), r"k=.*1 or more") for k in BAD_K),
    *((sp.break_even_alpha, (k, 0.1), r"k=.*1 or more") for k in BAD_K),
    *((sp.linear_speedup, (0.5, k, 0.1), r"k=.*1 or more") for k in BAD_K),
    *((sp.speedup_from_tokens_per_round, (1.0, k, 0.1), r"k=.*1 or more") for k in BAD_K),
    *((ac.alpha_from_acceptance_rate, (0.5, k), r"k=.*1 or more") for k in BAD_K),
    *((sp.speedup, (x, 4, 0.1), r"alpha=.*between 0 and 1") for x in BAD_SHARE),
    *((sp.linear_speedup, (x, 4, 0.1), r"acceptance_rate=.*between 0") for x in BAD_SHARE),
    *((ac.alpha_from_positions, ([x],), r"acceptance_by_position=") for x in BAD_SHARE),
    *((sp.StepTimes, (x, 1.0), r"draft_ms=") for x in BAD_TIME),
    *((sp.StepTimes, (1.0, x), r"target_ms=") for x in BAD_TIME),
    *((sp.StepTimes, (1.0, 1.0, (1.0, x)), r"verify_ms=") for x in BAD_TIME),
    *((sp.speedup, (0.5, 4, c), r"c=.*must be finite") for c in (-0.1, math.nan)),
    *((sp.speedup, (0.5, 4, 0.1, v), r"v=.*must be finite") for v in (0.0, math.inf)),
    (ac.acceptance_rate_from_positions, ([],), "acceptance_by_position=.*one rate per"),
    (ac.acceptance_rate_from_positions, ([0.5, 0.6],), "acceptance_by_position.*none may exceed"),
    (sp.speedup_from_tokens_per_round, (5.1, 4, 0.1), "tokens_per_round"),
    (ac.alpha_from_tokens_per_round, (0.9, 4), "tokens_per_round"),
    (ac.accepted_over_emitted, (0.5,), "tokens_per_round"),
    (sp.best_k, (0.5, [4], 0.1, {2: 1.0}), "verify_ms: no verify time for k=4; give one for 5"),
]


@pytest.mark.parametrize(("call", "arguments", "says"), REFUSED)
def test_impossible_input_is_refused_by_name_in_one_line(call, arguments, says):
    with pytest.raises(UserError, match=f"^{says}") as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)

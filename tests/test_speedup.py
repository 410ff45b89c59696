"""The formulas: limits, monotonicity, roots, and what bad input says (tables: test_golden)."""

import itertools
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
    expected = 1.0 + math.fsum(by_position(alpha, k))
    assert ac.expected_tokens_per_round(alpha, k) == pytest.approx(expected, rel=1e-12)


@given(alphas, ks)
def test_tokens_per_round_lie_between_one_and_k_plus_one(alpha, k):
    assert 1.0 <= ac.expected_tokens_per_round(alpha, k) <= (k + 1) * (1 + 1e-12)


def test_tokens_per_round_keep_their_digits_next_to_alpha_one():
    gap = 1e-12
    assert ac.expected_tokens_per_round(1.0 - gap, 4) == pytest.approx(5 - 10 * gap, abs=1e-14)


@given(alphas, alphas, ks, costs, verifies)
def test_speedup_grows_with_alpha(one, other, k, c, v):
    low, high = sorted((one, other))
    assert sp.speedup(low, k, c, v) <= sp.speedup(high, k, c, v) * (1 + 1e-12)


@given(alphas, ks, costs, verifies)
def test_speedup_is_tokens_per_round_over_cost_and_below_the_ideal(alpha, k, c, v):
    tokens = ac.expected_tokens_per_round(alpha, k)
    assert sp.speedup_from_tokens_per_round(tokens, k, c, v) == sp.speedup(alpha, k, c, v)
    assert sp.speedup(alpha, k, c, v) <= sp.ideal_speedup(k, c, v) * (1 + 1e-12)


@given(alphas, ks)
def test_a_useless_draft_that_costs_nothing_changes_nothing(alpha, k):
    assert sp.speedup(0.0, k, 0.0) == 1.0
    assert sp.speedup(alpha, k, 0.0) >= 1.0


@given(ks, st.floats(0.001, 3.0), verifies)
def test_break_even_alpha_is_where_the_speedup_is_one(k, c, v):
    alpha = sp.break_even_alpha(k, c, v)
    cost = k * c + v
    if cost > k + 1:
        assert alpha is None
        assert sp.ideal_speedup(k, c, v) < 1.0
    elif cost <= 1.0:
        assert alpha == 0.0
        assert sp.speedup(0.0, k, c, v) >= 1.0
    else:
        assert alpha is not None
        assert sp.speedup(alpha, k, c, v) == pytest.approx(1.0, abs=1e-9)


@given(st.floats(0.01, 0.9), st.integers(1, 20))
def test_break_even_alpha_grows_with_k_when_the_draft_costs_something(c, k):
    here, further = sp.break_even_alpha(k, c), sp.break_even_alpha(k + 1, c)
    assert here is not None
    assert further is not None
    assert here <= further + 1e-12


def test_break_even_alpha_at_its_edges():
    assert sp.break_even_alpha(4, 1.5) is None
    assert sp.break_even_alpha(4, 1.0) == 1.0
    assert sp.break_even_alpha(4, 0.1, v=0.6) == 0.0
    assert sp.break_even_alpha(1, 0.25) == pytest.approx(0.25)


@given(alphas, ks, costs)
def test_the_linear_rule_overstates_when_fed_an_alpha(alpha, k, c):
    assert sp.linear_speedup(alpha, k, c) >= sp.speedup(alpha, k, c) * (1 - 1e-12)


@given(alphas, ks, costs, verifies)
def test_the_linear_rule_is_exact_when_fed_the_acceptance_rate(alpha, k, c, v):
    rate = min(1.0, ac.acceptance_rate_from_alpha(alpha, k))
    assert sp.linear_speedup(rate, k, c, v) == pytest.approx(sp.speedup(alpha, k, c, v), rel=1e-9)


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
def test_alpha_and_acceptance_rate_convert_both_ways(alpha, k):
    rate = min(1.0, ac.acceptance_rate_from_alpha(alpha, k))
    back = ac.alpha_from_acceptance_rate(rate, k)
    assert ac.acceptance_rate_from_alpha(back, k) == pytest.approx(rate, abs=1e-9)
    assert ac.alpha_from_tokens_per_round(1.0 + k * rate, k) == back
    assert rate <= alpha + 1e-12


@given(alphas, ks)
def test_positions_of_an_iid_draft_give_back_its_rates(alpha, k):
    positions = by_position(alpha, k)
    tokens = ac.expected_tokens_per_round(alpha, k)
    assert ac.alpha_from_positions(positions) == pytest.approx(alpha, abs=1e-9)
    assert ac.mean_acceptance_length_from_positions(positions) == pytest.approx(tokens)
    rate = ac.acceptance_rate_from_positions(positions)
    assert rate == pytest.approx(ac.acceptance_rate_from_alpha(alpha, k), abs=1e-12)


def test_step_times_give_the_ratios_of_the_words():
    times = sp.StepTimes(draft_s=0.002, target_s=0.010, verify_s=(0.010, 0.011, 0.013))
    assert times.c == pytest.approx(0.2)
    assert [times.v(k) for k in (1, 2)] == pytest.approx([1.1, 1.3])
    assert times.round_s(2) == pytest.approx(0.017)
    assert times.break_even_alpha(2) == sp.break_even_alpha(2, times.c, times.v(2))


def test_step_times_without_a_verify_curve_take_v_as_one():
    times = sp.StepTimes(0.002, 0.010)
    assert [times.v(k) for k in (1, 16)] == [1.0, 1.0]
    assert times.covers(99)


def test_a_verify_curve_that_is_too_short_is_an_error_of_the_user():
    times = sp.StepTimes(0.002, 0.010, (0.010, 0.011))
    assert times.covers(1)
    assert not times.covers(2)
    assert times.break_even_alpha(2) is None
    with pytest.raises(UserError, match=r"verify_ms: 2 entries, but k=2 verifies 3 positions"):
        times.v(2)


BAD_K = [0, -1, 1.5, math.nan, math.inf, True, "many", None]
BAD_SHARE = [-0.1, 1.1, math.nan, math.inf, "much", None]
BAD_TIME = [0.0, -1.0, math.nan, math.inf]


@pytest.mark.parametrize("k", BAD_K)
def test_a_k_that_is_no_count_is_refused_by_name(k):
    for call in (
        lambda: ac.expected_tokens_per_round(0.5, k),
        lambda: sp.break_even_alpha(k, 0.1),
        lambda: sp.linear_speedup(0.5, k, 0.1),
        lambda: sp.speedup_from_tokens_per_round(1.0, k, 0.1),
        lambda: ac.alpha_from_acceptance_rate(0.5, k),
    ):
        with pytest.raises(UserError, match=r"^k=.*1 or more"):
            call()


@pytest.mark.parametrize("value", BAD_SHARE)
def test_a_share_outside_zero_to_one_is_refused_by_name(value):
    with pytest.raises(UserError, match=r"^alpha=.*between 0 and 1"):
        sp.speedup(value, 4, 0.1)
    with pytest.raises(UserError, match=r"^acceptance_rate=.*between 0 and 1"):
        sp.linear_speedup(value, 4, 0.1)
    with pytest.raises(UserError, match=r"^acceptance_by_position="):
        ac.alpha_from_positions([value])


@pytest.mark.parametrize("value", BAD_TIME)
def test_a_time_that_is_not_above_zero_is_refused_by_its_key(value):
    with pytest.raises(UserError, match=r"^draft_ms="):
        sp.StepTimes(value, 1.0)
    with pytest.raises(UserError, match=r"^target_ms="):
        sp.StepTimes(1.0, value)
    with pytest.raises(UserError, match=r"^verify_ms="):
        sp.StepTimes(1.0, 1.0, (1.0, value))


@pytest.mark.parametrize(("c", "v"), [(-0.1, 1.0), (math.nan, 1.0), (0.1, 0.0), (0.1, math.inf)])
def test_a_cost_that_cannot_be_is_refused(c, v):
    with pytest.raises(UserError, match="must be finite"):
        sp.speedup(0.5, 4, c, v)


@pytest.mark.parametrize(
    ("positions", "says"), [([], "one rate per"), ([0.5, 0.6], "none may exceed")]
)
def test_positions_that_are_not_unconditional_rates_are_refused(positions, says):
    with pytest.raises(UserError, match=says):
        ac.acceptance_rate_from_positions(positions)


def test_other_impossible_inputs_are_refused():
    with pytest.raises(UserError, match="tokens_per_round"):
        sp.speedup_from_tokens_per_round(5.1, 4, 0.1)
    with pytest.raises(UserError, match="tokens_per_round"):
        ac.alpha_from_tokens_per_round(0.9, 4)
    with pytest.raises(UserError, match="tokens_per_round"):
        ac.accepted_over_emitted(0.5)
    with pytest.raises(UserError, match="no verify time for k=4; give one for 5 positions"):
        sp.best_k(0.5, [4], 0.1, {2: 1.0})


def test_every_error_is_one_line():
    calls = itertools.product([0, 4], [2.0, 0.5], [-1.0, 0.1])
    for k, alpha, c in calls:
        if (k, alpha, c) == (4, 0.5, 0.1):
            continue
        with pytest.raises(UserError) as caught:
            sp.speedup(alpha, k, c)
        assert "\n" not in str(caught.value)

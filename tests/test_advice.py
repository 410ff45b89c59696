"""Reasons for a verdict, held against the founding experiment and against each factor alone."""

import math

import pytest
from workloads import population

from harness.analysis.advice import (
    Case,
    Floors,
    advice,
    alpha_needed,
    at_the_floor,
    c_allowed,
    factors,
    v_allowed,
    with_cheap_verify,
)
from harness.analysis.advise import engines
from harness.analysis.rules_of_thumb import rules_of_thumb, suggested_k
from harness.records import RULES, Trial, Verdict
from harness.theory.speedup import StepTimes, speedup, speedup_from_tokens_per_round

# Qwen3-4B with 0.6B on one A10G, eager: easy prompts; floors of REFERENCE's memory table
TOKENS = {k: 1 + k * rate for k, rate in {1: 0.429, 2: 0.347, 4: 0.342, 8: 0.207}.items()}
POST = Case(
    k=1,
    alpha=0.429,
    tokens_per_round=TOKENS,
    draft_s=0.02209,
    target_s=0.02992,
    v=dict.fromkeys(TOKENS, 1.0),
    floors=Floors(draft_s=0.00199, target_s=0.0134),
)


def test_the_founding_post_is_told_what_it_missed() -> None:
    found = advice("does_not_pay", POST)
    assert found[0] == "what stands in the way: launch-bound engine, draft too slow, acceptance"
    assert "needs alpha >= 0.74 at K=1; measured 0.43" in found
    (engine,) = [line for line in found if "launch-bound (" in line]
    assert engine == (
        "the step ratio c is 0.74 because steps are launch-bound (memory floors are 9% of the "
        "draft's step and 45% of the target's); at the memory floor it would be 0.15 and K=4 "
        "would give 1.49x"
    )


def test_each_counterfactual_is_where_the_speedup_turns_one() -> None:
    needed = alpha_needed(POST)
    assert needed is not None
    assert speedup(needed, 1, POST.c) == pytest.approx(1)
    case = Case(2, 0.5, {2: 1.7}, 0.2, 1.0, {2: 1.6})
    assert case.speedup < 1
    assert speedup_from_tokens_per_round(1.7, 2, c_allowed(case), 1.6) == pytest.approx(1)
    assert speedup_from_tokens_per_round(1.7, 2, 0.2, v_allowed(case)) == pytest.approx(1)
    assert with_cheap_verify(case) == pytest.approx(1.7 / 1.4)
    assert math.isclose(at_the_floor(POST)[1], TOKENS[4] / (4 * 1.99 / 13.4 + 1))  # type: ignore[index]


def test_a_dear_verify_is_named_when_it_alone_turns_the_verdict() -> None:
    case = Case(2, 0.5, {2: 1.7}, 0.1, 1.0, {2: 1.6})
    assert factors(case) == ("verify too dear", "acceptance")
    text = " ".join(advice("does_not_pay", case))
    assert "the verify of 3 positions costs 1.60 steps; at one step it would be 1.42x" in text


def test_a_draft_that_is_as_slow_as_the_target_has_no_alpha() -> None:
    case = Case(1, 0.4, {1: 1.4}, 1.2, 1.0, {1: 1.1})
    found = advice("does_not_pay", case)
    assert found[0] == "what stands in the way: draft too slow"
    assert "no acceptance is enough at K=1: even alpha = 1 gives 0.87x" in found


def test_an_undecided_gain_lacks_certainty_not_acceptance() -> None:
    case = Case(3, 0.8, {3: 2.9}, 0.1, 1.0, {3: 1.1})
    assert advice("undecided", case) == advice("speculate", case)


def test_a_loss_that_step_times_do_not_explain_is_not_called_a_gain() -> None:
    case = Case(3, 0.8, {3: 2.9}, 0.1, 1.0, {3: 1.1})
    assert case.speedup > 1
    (line,) = advice("does_not_pay", case)
    assert line.startswith(f"step times and tokens per round alone would give {case.speedup:.2f}x")
    assert "besides its forwards" in line


def test_a_gain_that_step_times_do_not_explain_claims_no_headroom() -> None:
    case = Case(3, 0.3, {3: 1.3}, 0.1, 1.0, {3: 1.1})
    assert case.speedup < 1
    (line,) = advice("speculate", case)
    assert f"alone give {case.speedup:.2f}x at K=3, less than the verdict" in line


def test_uneven_text_may_lose_above_the_even_break_even_and_gain_below_it() -> None:
    losing = Case(4, 0.62, {4: 1.9}, 0.2, 1.0, {4: 1.2})
    needed = alpha_needed(losing)
    assert losing.speedup < 1
    assert needed is not None
    assert needed < losing.alpha
    text = " ".join(advice("does_not_pay", losing))
    assert "needs alpha" not in text
    assert f"alpha is 0.62 at K=4, where {needed:.2f} breaks even" in text
    gaining = Case(4, 0.45, {4: 2.1}, 0.2, 1.0, {4: 1.2})
    assert gaining.speedup > 1
    (line,) = advice("speculate", gaining)
    assert line.startswith("no margin at K=4")


def test_nothing_is_said_of_an_engine_whose_floor_is_unknown_or_reached() -> None:
    unknown = Case(1, 0.4, {1: 1.4}, 0.5, 1.0, {1: 1.0})
    near = Case(1, 0.4, {1: 1.4}, 0.5, 1.0, {1: 1.0}, Floors(0.4, 0.8))
    for case in (unknown, near):
        assert not case.launch_bound
        assert not any("launch-bound" in line for line in advice("does_not_pay", case))


def test_a_gain_says_how_far_alpha_may_fall() -> None:
    case = Case(3, 0.8, {3: 2.9}, 0.1, 1.0, {3: 1.1})
    (line,) = advice("speculate", case)
    needed = alpha_needed(case)
    assert needed is not None
    assert line == f"speculation gains while alpha stays above {needed:.2f} at K=3; measured 0.80"
    assert factors(case) == ()


@pytest.mark.parametrize(
    ("rate", "k"), [(0.2, 2), (0.399, 2), (0.4, 4), (0.74, 4), (0.75, 8), (0.84, 8), (0.85, 16)]
)
def test_the_rule_of_thumb_for_k_has_its_documented_bounds(rate: float, k: int) -> None:
    assert suggested_k(rate) == k


def test_rules_of_thumb_are_met_or_not_beside_the_measurement() -> None:
    thumbs = rules_of_thumb(
        step_ratio=1.35,
        parameter_share=0.15,
        same_vocabulary=True,
        k=4,
        decided_k=0,
        acceptance_rate=0.342,
        tokens_per_round=2.368,
        breakeven_alpha=0.88,
        alpha=0.6,
        speedup=0.6,
    )
    assert [thumb.met for thumb in thumbs] == [False, True, True, False, True]
    assert thumbs[3].value == "34% at K=4, so K=2"
    assert thumbs[4].value == "58%"
    assert "do not speculate" in thumbs[3].instead


def test_an_undecided_verdict_meets_no_rule_on_k() -> None:
    thumbs = rules_of_thumb(
        step_ratio=None,
        parameter_share=None,
        same_vocabulary=None,
        k=2,
        decided_k=None,
        acceptance_rate=0.56,
        tokens_per_round=None,
        breakeven_alpha=None,
        alpha=None,
        speedup=None,
    )
    (rule,) = [thumb for thumb in thumbs if thumb.rule.startswith("K by")]
    assert (rule.met, rule.instead) == (None, "the verdict is undecided")


def test_a_loss_by_one_rule_is_replayed_under_the_others_without_rates_of_the_baseline() -> None:
    texts = population(3, 6, drafts={"good": 1.4})["good"]
    lost = Verdict("does_not_pay", None, 0, 1.0, "all", 0.9, 0.8, 1.0, "")
    baseline = Trial("cell", "easy", "0", 0, 0, 1.0, None, "ok", new_tokens=5, rounds=5)
    found = engines(lost, texts, StepTimes(0.1, 1.0), (1, 2), [baseline])
    assert {cell["rule"] for cell in found["engines"]} == set(RULES)
    assert all(cell["draft"] == "good" and cell["k"] > 0 for cell in found["engines"])
    assert "acceptance_rates" not in found
    two = [*texts, *population(3, 6, drafts={"poor": -0.2})["poor"]]
    assert "engines" not in engines(lost, two, StepTimes(0.1, 1.0), (1, 2))

"""What explains a verdict, for the founding experiment and for each factor alone."""

from dataclasses import replace

import pytest
from runs import FROZEN

from harness.analysis import analyse
from harness.analysis.explanation import Case, CellOfK, explain
from harness.analysis.explanation import case_of as case_of_verdict
from harness.analysis.round_costs import typed_latency
from harness.records import Decision, ResultRow
from harness.storage import load
from harness.summary import Answer, Explanation
from harness.theory.speedup import RoundTimes, StepTimes


def case_of(k, alpha, tokens, c, v=1.0, floors=None):
    times = StepTimes(c, 1.0, tuple([1.0] * k + [v]))
    rounds = RoundTimes.from_steps(times, k)
    return Case("small", k, {k: CellOfK(tokens, alpha)}, rounds, times, floors)


def explained(case, decision: Decision = "does_not_pay") -> Explanation:
    return explain(case, decision, 0.0)


# Qwen3-4B with 0.6B on one A10G, eager: easy prompts; floors of REFERENCE's memory table
STEPS = StepTimes(0.02209, 0.02992)
RATES = {1: 0.429, 2: 0.347, 4: 0.342, 8: 0.207}
POST = Case(
    "small",
    1,
    {k: CellOfK(1 + k * rate, 0.429) for k, rate in RATES.items()},
    RoundTimes.from_steps(STEPS, 8),
    STEPS,
    (0.00199, 0.0134),
)


def test_the_founding_post_is_launch_bound_and_would_win_at_its_memory_floor() -> None:
    explanation = explained(POST)
    assert explanation.factors == ("launch_bound_engine", "slow_draft", "acceptance")
    assert explanation.breakeven_alpha == pytest.approx(0.738, abs=1e-3)
    assert (explanation.launch_bound, explanation.floor_k) == (True, 4)
    assert explanation.floor_speedup == pytest.approx((1 + 4 * 0.342) / (4 * 1.99 / 13.4 + 1))
    assert explanation.draft_floor_share == pytest.approx(0.09, abs=1e-3)


def test_each_counterfactual_is_where_the_speedup_turns_one() -> None:
    explanation = explained(case_of(2, 0.5, 1.7, 0.2, 1.6))
    assert explanation.speedup < 1
    assert 2 * explanation.c_allowed + 1.6 == pytest.approx(1.7)
    assert explanation.speedup_at_v1 == pytest.approx(1.7 / 1.4)


def test_drafting_verify_and_loop_add_up_to_the_round_that_was_timed() -> None:
    """Forwards alone would gain; the loop, 0.5 target steps a round, takes it."""
    steps = StepTimes(0.2, 1.0, (1.0, 1.1, 1.2))
    rounds = RoundTimes(1.05, ((2, 2.1),))
    explanation = explained(Case("small", 2, {2: CellOfK(1.75, 0.6)}, rounds, steps))
    assert 2 * explanation.c + explanation.v + explanation.loop == pytest.approx(2.1)
    assert (explanation.loop, explanation.plain) == (pytest.approx(0.5), 1.05)
    assert explanation.speedup == pytest.approx(1.75 * 1.05 / 2.1)
    assert explanation.speedup_without_loop == pytest.approx(1.75 / 1.6)
    assert explanation.factors == ("slow_loop", "acceptance")
    cost = 2 * explanation.c_allowed + explanation.v + explanation.loop
    assert 1.75 * explanation.plain / cost == pytest.approx(1)


WEIGHTED = Answer("undecided", "small", 2, 0.0, "all", 1.1, None, None, "too_few_prompts")


@pytest.mark.parametrize(
    ("weights", "tokens", "alpha"),
    [
        (None, 2 / (50 / 100 + 400 / 1000), (60 / 100 + 300 / 1000) / (90 / 100 + 600 / 1000)),
        ({"easy": 1, "hard": 0}, 2.0, 60 / 90),
        ({"easy": 0, "hard": 2}, 2.5, 300 / 600),
    ],
)
def test_prompt_sets_count_by_their_weights_not_by_their_tokens(weights, tokens, alpha) -> None:
    row = ResultRow(
        draft="small", prompt_set="easy", temperature=0.0, k=2, source="measured",
        new_tokens=100, rounds=50, drafted=100, accepted=60, rejected=30,
    )  # fmt: skip
    hard = replace(
        row, prompt_set="hard", new_tokens=1000, rounds=400, drafted=800, accepted=300, rejected=300
    )
    latency = typed_latency(StepTimes(0.1, 1.0), 2)
    case = case_of_verdict(WEIGHTED, "small", [row, hard], latency, weights=weights)
    assert case is not None
    assert case.cells[2].tokens_per_round == pytest.approx(tokens)
    assert case.cells[2].alpha == pytest.approx(alpha)


@pytest.mark.parametrize(
    ("case", "factors"),
    [
        (case_of(2, 0.5, 1.7, 0.1, 1.6), ("expensive_verify", "acceptance")),
        (case_of(1, 0.4, 1.4, 1.2, 1.1), ("slow_draft",)),  # even alpha = 1 loses
        (case_of(3, 0.8, 2.9, 0.1, 1.1), ()),  # a gain lacks nothing
        (case_of(1, 0.4, 1.4, 0.5, 1.0, (0.4, 0.8)), ("slow_draft", "acceptance")),  # at its floor
    ],
)
def test_what_alone_would_turn_a_loss_is_named_first(case, factors) -> None:
    explanation = explained(case)
    assert explanation.factors == factors
    assert not explanation.launch_bound


def test_the_k_of_a_verdict_is_explained_though_another_looks_better() -> None:
    """Of other K few prompts are measured, so that one of them may look faster."""
    row = ResultRow(
        draft="small", prompt_set="easy", temperature=0.0, k=2, source="measured",
        new_tokens=100, rounds=50, drafted=100, accepted=50, rejected=40,
    )  # fmt: skip
    other = replace(row, k=1, rounds=52)
    named = {"draft": "small", "k": 2}
    verdict = Answer("does_not_pay", None, 0, 0.0, "all", 0.9, 0.8, 0.95, "held_out_loss", named)
    latency = typed_latency(StepTimes(0.8, 1.0), 2)
    case = case_of_verdict(verdict, "small", [row, other], latency)
    assert case is not None
    assert latency.rounds.speedup(100 / 52, 1) > latency.rounds.speedup(2.0, 2)
    assert case.k == 2


def test_floors_by_a_bandwidth_that_other_work_disturbed_explain_nothing() -> None:
    """A draft is the smaller model, so it is not read far slower than the target."""
    run = load(FROZEN / "sweep")
    bandwidth = run.manifest.bandwidth
    assert bandwidth is not None
    assert bandwidth.target_gb_s is not None
    for draft_gb_s, explained_by_floors in ((bandwidth.draft_gb_s, True), (0.3, False)):
        draft_gb_s = draft_gb_s if explained_by_floors else 0.3 * bandwidth.target_gb_s
        manifest = run.manifest.updated(bandwidth=replace(bandwidth, draft_gb_s=draft_gb_s))
        explanation = analyse(replace(run, manifest=manifest)).explanation
        assert explanation is not None
        assert (explanation.floor_c is not None) == explained_by_floors

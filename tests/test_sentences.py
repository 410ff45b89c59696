"""Every code of a Summary has its sentence, with the numbers it quotes."""

from dataclasses import replace
from typing import Any, get_args

import pytest

from harness.reporting.sentences import caveats, explanation, verdict
from harness.summary import (
    Answer,
    Caveat,
    CaveatCode,
    Explanation,
    MeasuredPart,
    RunFacts,
    Summary,
    VerdictReason,
)

RUN = RunFacts("sweep", "results/x", "complete", None, "big", "small")
SERVE = Answer(
    "speculate", "small", 3, 1.0, "all", 1.42, 1.36, 1.48, "held_out_gain",
    engine="own", rule="ratio", source="measured",
)  # fmt: skip
BEST: dict[str, Any] = {"draft": "small", "k": 3}
FIRST: dict[str, Any] = {"prompt_set": "easy", "prompt": "p1", "k": 4, "position": 7}
ALPHA: dict[str, Any] = {"alpha": 0.4, "breakeven_alpha": 0.5}


def refusal(reason: VerdictReason, decision: Any = "undecided", **values: Any) -> Answer:
    return replace(
        SERVE, decision=decision, reason=reason, reason_values=values, speedup=0.9,
        speedup_lo=0.8, speedup_hi=1.1,
    )  # fmt: skip


REASONS: dict[str, Answer] = {
    "held_out_loss": refusal("held_out_loss", "does_not_pay", **BEST, **ALPHA),
    "a loss that alpha does not explain": refusal("held_out_loss", "does_not_pay", draft=None,
        k=3, alpha=0.6, breakeven_alpha=0.5),
    "interval_spans_one": refusal("interval_spans_one", **BEST, prompts=16, prompts_needed=40),
    "no number of prompts known": refusal("interval_spans_one", **BEST, prompts=16,
        prompts_needed=None),
    "timing_noise": refusal("timing_noise", **BEST, timing_share=0.7, measured=True),
    "near_one": refusal("near_one", **BEST, near=0.05),
    "a K that was measured on a part of the prompts": replace(
            refusal("interval_spans_one", **BEST, prompts=16, prompts_needed=40),
            chance=0.71, gain=0.031, pairs=MeasuredPart(16, 8, 0.85, 0.95, 0.1),
        ),
    "too_few_prompts": refusal("too_few_prompts", **BEST, prompts=2, needed=4),
    "no_complete_prompt": refusal("no_complete_prompt", prompt_set=None),
    "greedy_texts_differ": refusal("greedy_texts_differ", texts=8, differing=2, **FIRST),
    "greedy_texts_unjudged": refusal("greedy_texts_unjudged", texts=8, differing=2, **FIRST),
    "server_not_lossless": refusal("server_not_lossless", k=2, text_z=-85.12, plain_z=None),
    "impossible_speedup": refusal("impossible_speedup", k=2, speedup=3.2, prompt_set="easy"),
    "nothing_accepted": refusal("nothing_accepted", "does_not_pay", **BEST),
}  # fmt: skip


def sweep_of(*answers: Answer) -> Summary:
    return Summary(RUN, answers=answers)


@pytest.mark.parametrize("name", REASONS)
def test_a_refusal_is_one_sentence_that_begins_with_what_to_do(name: str) -> None:
    (said,) = verdict.verdicts(sweep_of(REASONS[name]))
    start = {"does_not_pay": "do not speculate", "undecided": "undecided"}[REASONS[name].decision]
    assert f", temperature 1: {start}; " in said
    assert said.endswith(".")
    assert "None" not in said


def test_given_times_are_not_called_the_harnesss() -> None:
    given = replace(SERVE, engine=None, source="replayed", temperature=0.0)
    (sentence,) = verdict.verdicts(sweep_of(given))
    assert sentence.startswith("At the given times, one request at a time, temperature 0: serve")
    assert "measured" not in sentence


def test_every_reason_of_a_verdict_has_a_sentence() -> None:
    assert (
        set(get_args(VerdictReason))
        == {*verdict.VERDICT_REASONS}
        <= {*REASONS, "held_out_gain", "given_numbers", "not_timed"}
    )


CAVEATS: dict[str, dict[str, Any]] = {
    "few_prompts": {"prompts": 2, "needed": 4, "in_cell": True},
    "generation_settings": {"settings": "top_k=20", "overrides": "decode.top_k=20"},
    "fewer_drafts": {"draft": "heads", "tokens": 4, "k": 8},
    "engine_fallback": {"role": "draft", "name": "s", "reason": "no C compiler", "compiled": False},
    "other_dtype": {"role": "target", "stored": "bfloat16", "dtype": "float32"},
    "greedy_texts_differ": {"texts": 6, "equal": 3, "tie": 2, "different": 1, "not_judged": 0,
        "noise": 0.118,
         **FIRST},
    "server_concurrency": {"file": "b.json", "max_concurrency": None},
    "texts_from": {"engine": "vllm", "version": "0.32.0", "url": "host:8000"},
    "server_gap": {"k": 2, "measured": 1.2, "predicted": 1.5},
    "busy_card": {"processes": 2},
    "throttled_card": {"reason": "power_cap", "throttled": 3, "samples": 9, "sm_mhz": 1100.0,
         "max_sm_mhz": 1410.0, "temperature_c": None, "power_limit_w": 300.0,
         "default_power_limit_w": 350.0, "device": None},
    "spread_over_cards": {"role": "target", "cards": 2, "offloaded": False},
    "routing_ties": {"tie": 1, "unjudged": 2},
    "busy_servers": {"load": 1.26, "processors": 2, "processor_time": True},
    "busy_cpu_clock": {"load": 1.26, "processors": 2, "processor_time": False},
    "busy_machine": {"load": 1.26, "processors": 2},
    "plain_tokens_unlike": {"temperature": 0.0, "times": "6.3 ms (big), 1.6 ms (small)",
        "drafts": 2,
         "step_s": 0.0018},
    "unstable_timings": {"timings": 2, "kind": "verify", "role": "target", "tokens": 3,
        "context_tokens": 38,
         "batch": 1, "draft": None},
    "outlier_generations": {"cells": 1, "prompt_set": "easy", "temperature": 0.0, "k": 2,
        "speedup": 0.35,
         "trimmed_speedup": 1.31, "generations": 1},
    "rounds_not_timed": {
            "draft": "small", "temperature": 0.0, "k": 1, "tokens_per_round": 1.02, "step": 0.3,
            "speedup": 0.887,
        },
    "rounds_at_other_temperature": {"temperature": 0.7, "timed_at": 1.0},
    "not_by_replay": {"temperature": 0.7, "k": 4, "measured": 2.5, "replayed": 3.0,
        "differs": True},
    "k_not_timed": {"ks": "4, 8"},
    "server_not_lossless": {"temperature": 1.0, "k": 2, "text_z": -85.12, "plain_z": -60.0,
        "nats": -6.4,
         "expected_nats": -1.5},
    "server_rounds_unlike_replay": {"temperature": 0.0, "k": 4, "equal": 30, "texts": 32,
        "rounds": 515.0,
         "expected_rounds": 500.0, "rounds_z": None, "rule": "ratio", "other_rule": None},
    "draft_served_in_other_dtype": {"engine": "vllm", "served": "bfloat16", "scored": "float32"},
    "launch_bound": {"role": "target", "context_tokens": 64, "step_s": 0.00102, "floor_s": 0.000192,
         "mbu": 0.19, "positions": 5, "positions_ratio": 1.28, "overhead_share": 0.665, "c": 0.18},
}  # fmt: skip


@pytest.mark.parametrize("code", CAVEATS)
def test_a_caveat_is_a_sentence_of_its_values(code: Any) -> None:
    (sentence,) = caveats.caveats(Summary(RUN, caveats=(Caveat(code, CAVEATS[code]),)))
    assert sentence[0].isupper() or sentence[0].isdigit()
    assert sentence.endswith((".", ")"))


def test_every_caveat_has_a_sentence() -> None:
    assert set(get_args(CaveatCode)) == {*caveats.CAVEATS, "launch_bound"}


def test_both_launch_bound_steps_are_one_caveat() -> None:
    values = CAVEATS["launch_bound"]
    both = [Caveat("launch_bound", {**values, "role": role}) for role in ("target", "draft")]
    (sentence,) = caveats.caveats(Summary(RUN, caveats=tuple(both)))
    assert sentence.count("c = 0.18") == 1
    assert "target step" in sentence
    assert "draft step" in sentence


EXPLAINED: dict[str, Any] = {
    "draft": "small", "k": 4, "temperature": 0.0, "decision": "does_not_pay", "speedup": 0.8,
    "alpha": 0.5, "breakeven_alpha": 0.6, "ceiling": 1.9, "c": 0.3, "c_allowed": 0.2, "v": 1.5,
    "plain": 1.02, "loop": 0.1, "speedup_without_loop": 0.95, "speedup_at_v1": 1.05,
    "factors": ("expensive_verify", "slow_draft"),
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"breakeven_alpha": None, "ceiling": 0.9, "factors": (), "speedup_at_v1": 0.9},
        {"alpha": 0.7},
        {"c_allowed": -0.1},
        {"speedup": 1.2, "alpha": 0.7, "decision": "speculate"},
        {"speedup": 1.2, "decision": "undecided"},
        {"factors": ("slow_loop",), "speedup_without_loop": 1.04},
        {"launch_bound": True, "floor_c": 0.1, "floor_k": 2, "floor_speedup": 1.6,
         "draft_floor_share": 0.05, "target_floor_share": 0.18},
    ],
)  # fmt: skip
def test_an_explanation_names_what_would_change_the_verdict(changes: dict[str, Any]) -> None:
    """Another text for each; what a run has of it is in the golden reports."""
    usual, said = (
        explanation.explanation(Summary(RUN, explanation=Explanation(**{**EXPLAINED, **each})))
        for each in ({}, changes)
    )
    assert said
    assert (said == usual) == (not changes)
    assert "None" not in " ".join(said)


@pytest.mark.parametrize(
    ("results", "worst"),
    [
        (["PASS", "TIE", "FAIL"], "FAIL"),
        (["PASS", "OPEN", "TIE"], "OPEN"),
        (["PASS", "TIE"], "TIE"),
        (["PASS"], "PASS"),
        (["UNTESTED"], "UNTESTED"),
        (["PASS", "UNTESTED"], "PASS"),
    ],
)
def test_a_snapshot_is_as_good_as_its_worst_check(results: Any, worst: str) -> None:
    unchanged, sampled = (verdict.snapshot(results, "here", each) for each in (False, True))
    assert unchanged.startswith(f"{worst}: ")
    # A distribution that was tested is not called unchanged
    assert (unchanged != sampled) == (results == ["PASS"])

"""Every code of a Summary has its sentence, with the numbers it quotes."""

from dataclasses import replace
from typing import Any, get_args

import pytest

from harness.analysis.caveats import MOST, RECORDS
from harness.reporting.sentences import run, verdict
from harness.summary import (
    Answer,
    CandidateSpeedup,
    Caveat,
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
    "the prompts to replay and to measure": refusal("interval_spans_one", **BEST, prompts=128,
        prompts_needed=300, pairs_needed=150),
    "timing_noise": refusal("timing_noise", **BEST, timing_share=0.7, measured=True),
    "timing noise of pairs": refusal("timing_noise", **BEST, timing_share=0.7, measured=True,
        prompts=128, prompts_needed=300, pairs_needed=150),
    "near_one": refusal("near_one", **BEST, near=0.05),
    "a K that was measured on a part of the prompts": replace(
            refusal("interval_spans_one", **BEST, prompts=16, prompts_needed=40),
            chance=0.71, gain=0.031, pairs=MeasuredPart(16, 8, 0.85, 0.95),
        ),
    "too_few_prompts": refusal("too_few_prompts", **BEST, prompts=2, needed=4),
    "no_complete_prompt": refusal("no_complete_prompt", prompt_set=None),
    "greedy_texts_differ": refusal("greedy_texts_differ", texts=8, differing=2, **FIRST),
    "greedy_texts_unjudged": refusal("greedy_texts_unjudged", texts=8, differing=2, **FIRST),
    "server_not_lossless": refusal("server_not_lossless", k=2, text_z=-85.12, plain_z=None),
    "drafts_not_compared": refusal("drafts_not_compared", **BEST, slow="big", slow_s=0.00785,
        fast="small", fast_s=0.00451),
    "impossible_speedup": refusal("impossible_speedup", k=2, speedup=3.2, prompt_set="easy"),
    "nothing_accepted": refusal("nothing_accepted", "does_not_pay", **BEST),
}  # fmt: skip


def sweep_of(*answers: Answer) -> Summary:
    return Summary(RUN, answers=answers)


@pytest.mark.parametrize("name", REASONS)
def test_a_refusal_begins_with_what_to_do(name: str) -> None:
    answered = REASONS[name]
    said, _ = verdict.of_answers(sweep_of(answered))
    starts = {
        "does_not_pay": ("Do not speculate: ",),
        "undecided": ("Undecided: ", "Probably: ", "Probably not: "),
    }
    assert said.startswith(starts[answered.decision])
    assert said.endswith(".")
    assert "None" not in said


def test_an_answer_is_said_as_a_practitioner_says_it() -> None:
    tied = (
        CandidateSpeedup("small", 2, 1.40, True, "replayed", p_min=0.75),
        CandidateSpeedup("small", 2, 1.40, True, "replayed"),
        CandidateSpeedup("small", 3, 1.40, True, "replayed", p_min=0.5),
        CandidateSpeedup("small", 3, 1.44, False, "measured", p_min=0.75),
        CandidateSpeedup("A.gguf", 1, 1.39, True, "replayed"),
        CandidateSpeedup("B.gguf", 1, 1.10, False, "replayed"),
    )
    served = replace(SERVE, candidates=tied, reason_values={"level": 0.95}, p_min=0.75)
    assert verdict.answer_sentence(served) == (
        "Use small with K=3 and p_min=0.75: 1.42 times as fast (95 %: 1.36 to 1.48)."
        " K=2, p_min=0.5 and A.gguf are as good within error."
    )
    assert verdict.answer_sentence(replace(REASONS["timing_noise"], chance=0.05, gain=-0.15)) == (
        "Probably not: small with K=3 is 95 % likely slower, by about 10 %. Most of the doubt is"
        " timing noise; repeat on a quiet machine."
    )
    even = verdict.answer_sentence(replace(REASONS["near_one"], chance=0.5, gain=0.0))
    assert even.startswith("Undecided: small with K=3 is as likely slower as faster. ")


def test_the_next_measurement_names_every_k_within_reach() -> None:
    by_k = [(1, 1.10, False), (2, 1.44, False), (4, 1.40, True), (8, 1.20, False), (16, 1.0, False)]
    candidates = tuple(CandidateSpeedup("small", *each, "replayed") for each in by_k)
    assert replace(SERVE, k=2, candidates=candidates).within_reach == (2, 4, 8)


def test_a_saving_is_that_of_a_request_of_the_workload() -> None:
    answer = replace(SERVE, speedup=2.0, plain_s=0.03, request_tokens=100.0)
    assert answer.saved_s_per_request == pytest.approx(1.5)
    assert replace(answer, request_tokens=None).saved_s_per_request is None


def test_every_reason_of_a_verdict_has_a_sentence() -> None:
    assert (
        set(get_args(VerdictReason))
        == {*verdict.VERDICT_REASONS}
        <= {*REASONS, "held_out_gain", "given_numbers", "not_timed"}
    )


# What a caveat of each kind quotes
CAVEATS: dict[str, dict[str, Any]] = {
    "few_prompts": {"prompts": 2, "needed": 4, "in_cell": True},
    "server_defaults": {"settings": "top_k=20", "overrides": "decode.top_k=20"},
    "k_left_out": {"ks": "6, 8", "why": "draft_limit", "draft": "heads", "tokens": 4},
    "engine_fallback": {"role": "draft", "name": "s", "reason": "no C compiler",
        "compiled": False},
    "other_card": {"card": "l4", "device": "NVIDIA H200"},
    "greedy_texts_differ": {"texts": 6, "equal": 3, "tie": 2, "different": 1, "not_judged": 0,
        "noise": 0.118, **FIRST},
    "benchmark_requests": {"file": "b.json", "max_concurrency": None, "failed": 2},
    "texts_from": {"engine": "vllm", "version": "0.32.0", "url": "host:8000"},
    "throttled_card": {"reason": "power_cap", "throttled": 3, "samples": 9, "device": None},
    "spread_over_cards": {"role": "target", "cards": 2, "offloaded": False},
    "routing_ties": {"tie": 1, "unjudged": 2},
    "busy_machine": {"load": 1.26, "processors": 2, "clock": "engine"},
    "plain_tokens_unlike": {"temperature": 0.0, "times": "1.6 to 6.3 ms with big and small",
        "drafts": 2, "step_s": None},
    "priced_from_steps": {"draft": "small", "temperature": 0.0, "k": 1, "tokens_per_round": 1.02,
        "step": 0.3, "speedup": 0.887},
    "counters_mixed": {"ks": "1, 3", "mean": 1.5, "share": None, "k": 3},
    "plan_not_measured": {"rate": 9.0, "largest_rate": 4.0, "slots": None, "slots_timed": 4,
        "context": 900, "context_timed": 300, "mean_prompts": True},
    "server_not_lossless": {"temperature": 1.0, "k": 2, "texts": 8, "repeats": False,
        "text_z": -85.12, "plain_z": -60.0, "nats": -6.4, "expected_nats": -1.5},
    "server_rounds_unlike_replay": {"temperature": 0.0, "k": 4, "equal": 30, "texts": 32,
        "rounds": 515.0, "expected_rounds": 500.0, "rounds_z": None, "rule": "ratio",
        "other_rule": None},
    "draft_served_in_other_dtype": {"engine": "vllm", "served": "bfloat16", "scored": "float32"},
    "launch_bound": {"roles": "target and draft", "c": 0.18},
    "speedups_not_compared": {"run": "two", "why": "not_lossless", "temperature": 1.0, "k": 2},
    "other_prompts": {"prompts": 15, "reference_run": "one", "reference_total": 16, "run": "two",
        "total": 16, "other_lengths": 1},
}  # fmt: skip


@pytest.mark.parametrize("code", CAVEATS)
def test_a_caveat_is_a_sentence_of_its_values(code: Any) -> None:
    (sentence,) = run.caveats(Summary(RUN, caveats=(Caveat(code, CAVEATS[code]),)))
    assert sentence[0].isupper() or sentence[0].isdigit()
    assert sentence.endswith((".", ")"))
    assert "None" not in sentence


def test_a_new_caveat_replaces_another_one() -> None:
    assert len(RECORDS) <= MOST


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

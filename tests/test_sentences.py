"""Every code of a Summary has its sentence, with the numbers it quotes."""

from dataclasses import fields, replace
from typing import Any, get_args

import pytest

from harness.analysis.caveats import MOST, RECORDS
from harness.reporting.sentences import caveats, explanation, run, verdict
from harness.summary import (
    Answer,
    Caveat,
    Explanation,
    MeasuredPart,
    ModelFacts,
    RoundTokens,
    RuleOfThumb,
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


REASONS: dict[str, tuple[Answer, str]] = {
    "held_out_loss": (
        refusal("held_out_loss", "does_not_pay", **BEST, **ALPHA),
        "small with K=3 loses least, 0.90x [0.80, 1.10] on held-out prompts; alpha 0.40 is below"
        " the 0.50 it needs",
    ),
    "a loss that alpha does not explain": (
        refusal("held_out_loss", "does_not_pay", draft=None, k=3, alpha=0.6, breakeven_alpha=0.5),
        "K=3 loses least, 0.90x [0.80, 1.10] on held-out prompts; alpha 0.60 is above the 0.50 that"
        " evenly hard text needs: uneven text, cut rounds or slower rounds than predicted cost the"
        " rest",
    ),
    "interval_spans_one": (
        refusal("interval_spans_one", **BEST, prompts=16, prompts_needed=40),
        "small with K=3 gives 0.90x [0.80, 1.10] on held-out prompts; 16 prompts do not decide it,"
        " about 40 would",
    ),
    "no number of prompts known": (
        refusal("interval_spans_one", **BEST, prompts=16, prompts_needed=None),
        "small with K=3 gives 0.90x [0.80, 1.10] on held-out prompts; 16 prompts do not decide it,"
        " nor say how many would",
    ),
    "timing_noise": (
        refusal("timing_noise", **BEST, timing_share=0.7, measured=True),
        "small with K=3 gives 0.90x [0.80, 1.10] on held-out prompts; timing noise makes 70% of"
        " the variance: a quieter machine or more repetitions= would help",
    ),
    "near_one": (
        refusal("near_one", **BEST, near=0.05),
        "small with K=3 gives 0.90x [0.80, 1.10] on held-out prompts; within 5% of 1 either way, so"
        " more prompts would not change what to do",
    ),
    "a K that was measured on a part of the prompts": (
        replace(
            refusal("interval_spans_one", **BEST, prompts=16, prompts_needed=40),
            chance=0.71, gain=0.031, pairs=MeasuredPart(16, 8, 0.85, 0.95, 0.1),
        ),
        "small with K=3 gives 0.90x [0.80, 1.10] on prompts like these (on these alone"
        " [0.85, 0.95]); it pays with a chance of 71%, +3.1% on average; 16 prompts do not decide"
        " it, about 40 would",
    ),
    "too_few_prompts": (
        refusal("too_few_prompts", **BEST, prompts=2, needed=4),
        "2 prompts, and below 4 there is no interval; small with K=3 gives 0.90x so far, not held"
        " out",
    ),
    "no_complete_prompt": (
        refusal("no_complete_prompt", prompt_set=None), "no prompt was measured at every K",
    ),
    "greedy_texts_differ": (
        refusal("greedy_texts_differ", texts=8, differing=2, **FIRST),
        "2 of 8 greedy texts are not plain decoding's (first: easy/p1 K=4 from position 7 on), so"
        " the target's cache or a forward is wrong, and no speedup of this pair is valid",
    ),
    "greedy_texts_unjudged": (
        refusal("greedy_texts_unjudged", texts=8, differing=2, **FIRST),
        "2 of 8 greedy texts differ from plain decoding's (first: easy/p1 K=4 from position 7 on),"
        " and the run stopped before it was known whether these are ties; resume= judges them",
    ),
    "server_not_lossless": (
        refusal("server_not_lossless", k=2, text_z=-85.12, plain_z=None),
        "the server's texts at K=2 are not those of lossless sampling (texts z = -85.1), so its"
        " speed does not count",
    ),
    "impossible_speedup": (
        refusal("impossible_speedup", k=2, speedup=3.2, prompt_set="easy"),
        "3.20x at K=2 on easy prompts is more than its rounds emit, so timings here cannot be"
        " right; measure again on a quiet machine",
    ),
    "nothing_accepted": (
        refusal("nothing_accepted", "does_not_pay", **BEST),
        "no drafted token was ever accepted, and a round costs a plain token at least",
    ),
}  # fmt: skip


HERE = "On the harness's loop on this machine, one request at a time, temperature 1"


def sweep_of(*answers: Answer, **facts: Any) -> Summary:
    return Summary(replace(RUN, **facts), answers=answers)


def untimed(engine: str, **changes: Any) -> Answer:
    """What carries over of `SERVE` to an engine that was not timed."""
    emitted = (RoundTokens(3, 2.9, 2.7, 3.1, 2.1),)
    return replace(
        SERVE, decision="not_measured", speedup=None, speedup_lo=None, speedup_hi=None,
        reason="not_timed", reason_values=BEST, engine=engine, timed=False, source="replayed",
        rounds=emitted, **changes,
    )  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_a_refusal_says_what_to_do_first_and_then_why(name: str) -> None:
    entry, reason = REASONS[name]
    start = {"does_not_pay": "do not speculate", "undecided": "undecided"}[entry.decision]
    assert verdict.of_answers(sweep_of(entry)) == (f"{HERE}: {start}; {reason}.",)


def test_a_headline_says_where_it_was_measured_and_what_carries_over() -> None:
    gain = f"{HERE}: serve small at K=3, 1.42x [1.36, 1.48]"
    assert verdict.of_answers(sweep_of(SERVE)) == (f"{gain}, measured on held-out prompts.",)
    replayed = replace(SERVE, rule="exact_match", source="replayed")
    assert verdict.of_answers(sweep_of(replayed)) == (
        f"{gain}, predicted on held-out prompts by replay where draft and target sample and must"
        " agree.",
    )
    emits = (
        "K=3 emits 2.90 [2.70, 3.10] tokens a round, so it pays while a round costs less than 2.70"
        " plain tokens there (the harness: 2.10)."
    )
    between = RoundTokens(3, 2.9, 2.7, 3.1, 2.1, interpolated=True)
    assert verdict.cost_that_pays(between).endswith(
        "plain tokens there (the harness: 2.10, interpolated)"
    )
    others = sweep_of(SERVE, untimed("vllm"), untimed("sglang"))
    assert verdict.of_answers(others) == (
        f"{gain}, measured on held-out prompts. On vLLM, SGLang: not measured; {emits}",
    )
    loss = replace(REASONS["held_out_loss"][0], temperature=0.0)
    _, other = verdict.of_answers(sweep_of(SERVE, loss))
    assert other.startswith("Temperature 0, the harness's loop: no draft; small with K=3 loses")
    asked = replace(others, run=replace(RUN, serve_on="vllm"))
    assert verdict.of_answers(asked) == (
        f"On vLLM with its defaults, temperature 1: not measured; small with {emits} On the"
        " harness's loop on this machine, one request at a time: serve small at K=3, 1.42x [1.36,"
        " 1.48], measured on held-out prompts.",
    )


def test_given_times_are_not_called_the_harnesss() -> None:
    given = replace(SERVE, engine=None, source="replayed", temperature=0.0)
    (sentence,) = verdict.of_answers(sweep_of(given))
    assert sentence.startswith("At the given times, one request at a time, temperature 0: serve")
    assert "measured" not in sentence


def test_numbers_that_were_given_are_judged_without_an_interval() -> None:
    entry = replace(
        refusal("given_numbers", k=3, measured=False, near=0.05, **ALPHA),
        temperature=None, speedup_lo=None, speedup_hi=None,
    )  # fmt: skip
    assert verdict.verdict(entry) == (
        "Undecided: K=3 gives 0.90x by arithmetic; K=3 needs alpha >= 0.50 and has 0.40; within 5%"
        " of 1, which numbers without an interval cannot distinguish from it (from the numbers"
        " given, no interval)."
    )


def test_every_reason_of_a_verdict_has_a_sentence() -> None:
    assert (
        set(get_args(VerdictReason))
        == {*verdict.VERDICT_REASONS}
        <= {*REASONS, "held_out_gain", "given_numbers", "not_timed"}
    )


CAVEATS: dict[str, tuple[dict[str, Any], str]] = {
    "few_prompts": (
        {"prompts": 2, "needed": 4, "in_cell": True},
        "2 prompts in a cell: below 4 there is no interval of its own; a verdict pools the prompt",
    ),
    "server_defaults": (
        {"settings": "top_k=20", "overrides": "decode.top_k=20"},
        "A server applies top_k=20 unless a request says otherwise, and this run did not; to"
        " measure with them: decode.top_k=20",
    ),
    "k_left_out": (
        {"ks": "6, 8", "why": "draft_limit", "draft": "heads", "tokens": 4},
        "K = 6, 8 is shown at 4 tokens, the most that heads drafts a round",
    ),
    "engine_fallback": (
        {"role": "draft", "name": "s", "reason": "no C compiler", "compiled": False},
        "Draft s: no C compiler; its steps launch more kernels than compiled ones",
    ),
    "other_card": (
        {"card": "l4", "device": "NVIDIA H200"},
        "Gpu=l4 is not the device whose steps were timed (NVIDIA H200), so no cost is given",
    ),
    "greedy_texts_differ": (
        {"texts": 6, "equal": 3, "tie": 2, "different": 1, "not_judged": 0, "noise": 0.118,
         **FIRST},
        "3 of 6 greedy texts equal plain decoding's, 2 ties (within the engine's noise of 0.12"
        " nats), 1 real difference; the first difference is in easy/p1 K=4 at position 7",
    ),
    "benchmark_requests": (
        {"file": "b.json", "max_concurrency": None, "failed": 2},
        "requests ran at the same time (max_concurrency: no limit), so its times are of batches;"
        " acceptance does not depend on that; 2 requests failed",
    ),
    "texts_from": (
        {"engine": "vllm", "version": "0.32.0", "url": "host:8000"},
        "The target is on a server: vllm 0.32.0 at host:8000 completed the prompts",
    ),
    "throttled_card": (
        {"reason": "power_cap", "throttled": 3, "samples": 9, "sm_mhz": 1100.0,
         "max_sm_mhz": 1410.0, "temperature_c": None, "power_limit_w": 300.0,
         "default_power_limit_w": 350.0, "device": None},
        "slowed by its power limit in 3 of 9 readings while it was measured (its SM clock was 1100"
        " MHz of 1410, power limit 300 W, 350 W by default)",
    ),
    "spread_over_cards": (
        {"role": "target", "cards": 2, "offloaded": False}, "layers are spread over 2 cards",
    ),
    "routing_ties": (
        {"tie": 1, "unjudged": 2},
        "1 text differs by that alone, and in 2 texts it may change as much as a wrong cache",
    ),
    "busy_machine": (
        {"load": 1.26, "processors": 2, "clock": "engine", "processor_time": True},
        "kept 1.3 of 2 processors busy: time it on a quiet machine, or with clock=cpu",
    ),
    "plain_tokens_unlike": (
        {"temperature": 0.0, "times": "6.3 ms (big), 1.6 ms (small)", "drafts": 2,
         "step_s": 0.0018},
        "took 6.3 ms (big), 1.6 ms (small) and its bare step 1.80 ms, the same work",
    ),
    "outlier_generations": (
        {"cells": 1, "prompt_set": "easy", "temperature": 0.0, "k": 2, "speedup": 0.35,
         "trimmed_speedup": 1.31, "generations": 1},
        "(easy, temperature 0, K=2: 0.35x, 1.31x without them)",
    ),
    "priced_from_steps": (
        {
            "draft": "small", "temperature": 0.0, "k": 1, "tokens_per_round": 1.02, "step": 0.3,
            "speedup": 0.887,
        },
        "No rounds of small were timed: with half as long steps it has 0.89x at most",
    ),
    "counters_mixed": (
        {"ks": "1, 3", "mean": 1.5, "share": None, "k": 3},
        "The server changed its K (1, 3), so the numbers are of a mixture; rounds drafted 1.50",
    ),
    "plan_not_measured": (
        {"rate": 9.0, "largest_rate": 4.0, "slots": None, "slots_timed": 4, "context": 900,
         "context_timed": 300, "mean_prompts": True},
        "Planned and not measured: waits at more than 4 requests/s are simulated alone",
    ),
    "server_not_lossless": (
        {"temperature": 1.0, "k": 2, "texts": 8, "repeats": False, "text_z": -85.12,
         "plain_z": -60.0, "nats": -6.4, "expected_nats": -1.5},
        "The server is NOT LOSSLESS at temperature 1, K=2 (texts z = -85.1, against plain"
        " decoding's z = -60.0): what it returns is not what the target would; -6.40 nats per"
        " token, -1.50 is right",
    ),
    "server_rounds_unlike_replay": (
        {"temperature": 0.0, "k": 4, "equal": 30, "texts": 32, "rounds": 515.0,
         "expected_rounds": 500.0, "rounds_z": None, "rule": "ratio", "other_rule": None},
        "At temperature 0, K=4, its rounds are not those of replay (515 where replay expects 500,"
        " 30 of 32 texts exactly): the draft that is served is not quite the one that scored the"
        " texts (fewer bits, another revision), or its acceptance rule is another. Texts are not"
        " affected; predictions at this temperature err by about 3.0 %",
    ),
    "draft_served_in_other_dtype": (
        {"engine": "vllm", "served": "bfloat16", "scored": "float32"},
        "On vLLM a draft is served in its target's dtype, bfloat16, and here it scored texts in"
        " float32: draft.dtype=bfloat16 scores what is served",
    ),
    "launch_bound": (
        {"roles": "target and draft", "c": 0.18},
        "Steps of target and draft are launch-bound: overhead, not reading weights, takes most of"
        " them, so c = 0.18 says more about this engine",
    ),
    "speedups_not_compared": (
        {"run": "two", "why": "not_lossless", "temperature": 1.0, "k": 2},
        "NO SPEEDUPS COMPARED there: two is NOT LOSSLESS at temperature 1, K=2",
    ),
    "other_prompts": (
        {"prompts": 15, "reference_run": "one", "reference_total": 16, "run": "two", "total": 16,
         "other_lengths": 1},
        "Compared are only the 15 prompts that both have, of 16 in one and 16 in two (1 of the same"
        " name have different lengths",
    ),
}  # fmt: skip


@pytest.mark.parametrize("code", CAVEATS)
def test_a_caveat_quotes_its_values(code: Any) -> None:
    values, text = CAVEATS[code]
    (sentence,) = caveats.caveats(Summary(RUN, caveats=(Caveat(code, values),)))
    assert text in sentence
    assert sentence[0].isupper() or sentence[0].isdigit()
    assert sentence.endswith((".", ")"))


def test_a_new_caveat_replaces_another_one() -> None:
    assert len(RECORDS) <= MOST


def explained(**changes: Any) -> str:
    values: dict[str, Any] = {
        "draft": "small", "k": 4, "temperature": 0.0, "decision": "does_not_pay", "speedup": 0.8,
        "alpha": 0.5, "breakeven_alpha": 0.6, "ceiling": 1.9, "c": 0.3, "c_allowed": 0.2, "v": 1.5,
        "plain": 1.02, "loop": 0.1, "speedup_without_loop": 0.95,
        "speedup_at_v1": 1.05, "factors": ("expensive_verify", "slow_draft"),
    }  # fmt: skip
    assert values.keys() <= {field.name for field in fields(Explanation)}
    made = Summary(RUN, explanation=Explanation(**{**values, **changes}))
    return " ".join(explanation.explanation(made))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "What prevents a gain: expensive verify, slow draft. Needs alpha >= 0.60 at K=4;"
         " here it is 0.50. Or a draft step of at most 0.20 of a target step; it is 0.30. The"
         " verify of 5 positions costs 1.50 steps; at one step it would be 1.05x."),
        ({"breakeven_alpha": None, "ceiling": 0.9, "factors": (), "speedup_at_v1": 0.9},
         "No acceptance is enough at K=4: even alpha = 1 gives 0.90x. Or a draft"),
        ({"alpha": 0.7}, "Alpha is 0.70 at K=4, where 0.60 breaks even on text that is"),
        ({"c_allowed": -0.1}, "the verify alone costs what it gains"),
        ({"speedup": 1.2, "alpha": 0.7, "decision": "speculate"},
         "Speculation gains while alpha stays above 0.60 at K=4; here it is 0.70."),
        ({"speedup": 1.2, "decision": "undecided"}, "No margin at K=4: an alpha of 0.60 breaks"),
        ({"speedup": 0.98, "decision": "speculate"},
         "Round times and tokens per round give 0.98x at K=4, less than the verdict"),
        ({"speedup": 1.2}, "would give 1.20x at K=4, more than was measured"),
        ({"factors": ("slow_loop",), "speedup_without_loop": 1.04},
         "A round takes 0.10 target steps besides its forwards"),
        ({"launch_bound": True, "floor_c": 0.1, "floor_k": 2, "floor_speedup": 1.6,
          "draft_floor_share": 0.05, "target_floor_share": 0.18},
         "5% of the draft's step and 18% of the target's): with both steps at the memory floor"),
    ],
)  # fmt: skip
def test_an_explanation_names_what_would_change_the_verdict(
    changes: dict[str, Any], text: str
) -> None:
    assert text in explained(**changes)


@pytest.mark.parametrize(
    ("code", "value", "values", "words"),
    [
        ("step_ratio", 5.7, {"least": 5.0, "ideal": 10.0, "k": 4, "breakeven_alpha": None},
         ("draft at least 5x as fast, ideally 10x", "5.7x", "break-even alpha at K=4 is none")),
        ("suggested_k", 0.51, {"k": 4, "suggested_k": 4, "verdict_k": 0},
         ("K by acceptance_rate: 2 low, 4 default, 8 above 75 %, 16 above 85 %",
          "51% at K=4, so K=4", "the verdict is do not speculate")),
        ("accepted_over_emitted", 0.66,
         {"least": 0.4, "alpha": 0.77, "breakeven_alpha": 0.51, "speedup": 1.51},
         ("at least 40 % accepted / emitted", "66%",
          "alpha 0.77 against a break-even of 0.51; speedup 1.51x")),
    ],
)  # fmt: skip
def test_a_rule_of_thumb_is_shown_next_to_the_arithmetic(
    code: Any, value: float, values: dict[str, Any], words: tuple[str, str, str]
) -> None:
    assert explanation.rule_of_thumb(RuleOfThumb(code, None, value, values)) == words


@pytest.mark.parametrize(
    ("results", "start"),
    [
        (["PASS", "TIE", "FAIL"], "FAIL: speculation changed the output (on vLLM, K=4,"),
        (["PASS", "TIE"], "TIE: "),
        (["PASS", "OPEN", "TIE"], "OPEN: "),
        (
            ["PASS"],
            "PASS: speculation left the output unchanged (on vLLM, K=4, temperature 0; 1 check: 1"
            " PASS, 0 TIE, 0",
        ),
        (["UNTESTED"], "UNTESTED: the target is nearly certain of every token"),
    ],
)
def test_a_snapshot_is_as_good_as_its_worst_check(results: Any, start: str) -> None:
    assert verdict.snapshot(results, "on vLLM, K=4, temperature 0", False).startswith(start)


@pytest.mark.parametrize(
    ("results", "start"),
    [
        (["PASS"], "PASS: no difference from the target's output was found (on"),
        (["PASS", "UNTESTED"], "PASS: the tests that were possible found no difference from the"),
        (["PASS", "FAIL"], "FAIL: speculation changed the output (on"),
    ],
)
def test_a_tested_distribution_is_not_called_unchanged(results: Any, start: str) -> None:
    assert verdict.snapshot(results, "on vLLM, K=4, temperature 1", True).startswith(start)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, None),
        ({"partial_cells": 1}, "PARTIAL RUN: some cells did not complete. Cells: 1 partial of 9."),
        ({"status": "failed", "failed_cells": 2}, "FAILED RUN: what follows is what was stored."),
        ({"status": "unknown"}, "UNKNOWN STATUS"),
        (
            {"status": "failed", "ranked": 7, "not_scored": ("mine", "theirs")},
            "PARTIAL RANKING: 7 of 9 drafts are ranked. Not ranked: mine, theirs.",
        ),
        (
            {"status": "failed", "not_scored": ("mine",)},
            "FAILED RUN: what follows is what was stored. Not ranked: mine.",
        ),
    ],
)
def test_the_status_says_why_a_run_is_not_complete(
    changes: dict[str, Any], text: str | None
) -> None:
    sentence = run.status(replace(RUN, measured_cells=9, **changes))
    assert sentence is None if text is None else str(sentence).startswith(text)


def test_the_engine_is_named_model_by_model_where_they_differ() -> None:
    target = ModelFacts("target", "big", engine="cuda_graphs")
    draft = ModelFacts("draft", "small", engine="cuda_graphs", engine_reason="no C compiler")
    both = run.engine(replace(RUN, models=(target, draft)))
    assert both == ("engine: CUDA graphs (target); CUDA graphs, uncompiled (draft: no C compiler)")
    assert run.engine(replace(RUN, models=(target,))) == "engine: CUDA graphs"
    assert run.engine(RUN) is None


def test_synthetic_acceptance_is_said_with_every_verdict() -> None:
    made = sweep_of(SERVE, synthetic=True)
    assert verdict.of_answers(made)[0].endswith(" It holds at the synthetic acceptance only.")
    assert str(run.banner(made.run)).startswith("Acceptance is synthetic (decode.acceptance)")

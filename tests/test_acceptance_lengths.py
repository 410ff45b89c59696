"""One run's acceptance under the names and formulas of other projects."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from harness.analysis.acceptance_lengths import acceptance_lengths
from harness.records import Trial


def request(prompt: str, answer: int, lengths: tuple[int, ...], drafted: int) -> Trial:
    """A request whose answer had so many tokens, the first of them from the prefill."""
    return Trial(
        cell=prompt,
        prompt_set="easy",
        prompt=prompt,
        repetition=0,
        k=len(lengths) - 1,
        temperature=0.0,
        rule="greedy_draft",
        status="ok",
        new_tokens=answer - 1,
        rounds=sum(lengths),
        drafted=drafted,
        accepted=sum(kept * rounds for kept, rounds in enumerate(lengths)),
        accepted_lengths=lengths,
    )


# Of the last round of the first, one accepted token lies beyond the answer's end
REQUESTS = (request("a", 9, (1, 1, 2), 8), request("b", 4, (3, 0, 0), 6))
EXPECTED = {
    ("this report", "tokens_per_round"): (11 / 7,),
    ("vLLM, llama.cpp", "mean acceptance length"): (12 / 7,),
    ("AIPerf", "token-weighted acceptance length"): (12 / 7,),
    ("AIPerf", "acceptance length"): ((9 / 4 + 1) / 2,),
    ("SGLang", "spec_accept_length"): (13 / 7,),
    ("SpecForge, benchmark", "accept length"): ((9 / 4 + 4 / 3) / 2,),
    ("SpecForge, training", "simulated_acc_len"): (5 / 7,),
    # With the prefill's token, an entry of length 1
    ("Model-Optimizer", "Average_AL, once acceptance rate"): ((9 / 5 + 4 / 4) / 2,),
    ("vLLM, AIPerf, llama.cpp", "draft acceptance rate"): (5 / 14,),
    ("this report", "expected tokens per round at K = 1, 2, ..."): (10 / 7, 12 / 7),
    ("vLLM", "acceptance rate by position"): (3 / 7, 2 / 7),
    ("Model-Optimizer", "Joint_Acceptance_Rate"): (1.0, 3 / 9, 2 / 9),
    ("Model-Optimizer", "Conditional_Acceptance_Rate"): (1.0, 3 / 9, 2 / 3),
}


def named(requests: Sequence[Trial]) -> dict[tuple[str, str], tuple[float, ...]]:
    return {
        (entry.convention, entry.alias): entry.values for entry in acceptance_lengths(requests, 1)
    }


def test_every_convention_has_its_own_number() -> None:
    assert {key: pytest.approx(values) for key, values in EXPECTED.items()} == named(REQUESTS)


def test_a_servers_own_count_of_accepted_tokens_is_what_it_prints() -> None:
    # Two more were accepted beyond the end of the second answer
    first, second = REQUESTS
    counted = named([first, replace(second, counted_accepted=2)])
    lengths = {
        ("vLLM, llama.cpp", "mean acceptance length"): (14 / 7,),
        ("AIPerf", "token-weighted acceptance length"): (14 / 7,),
        ("AIPerf", "acceptance length"): ((9 / 4 + 5 / 3) / 2,),
        ("vLLM, AIPerf, llama.cpp", "draft acceptance rate"): (7 / 14,),
    }
    assert {
        key: pytest.approx(values) for key, values in {**EXPECTED, **lengths}.items()
    } == counted


def test_what_an_engine_does_not_count_is_left_out() -> None:
    counted = [replace(trial, drafted=None, accepted_lengths=None) for trial in REQUESTS]
    assert list(named(counted)) == list(EXPECTED)[:8]
    plain = [replace(trial, k=0, rounds=None, accepted=None) for trial in REQUESTS]
    assert named([*plain, *(replace(trial, accepted=None) for trial in REQUESTS)]) == {}


def test_a_published_length_is_found_again() -> None:
    # vllm#26191: 16,990 tokens in 4,816 drafts with 12,208 accepted, printed as 3.53
    published = replace(
        REQUESTS[0], new_tokens=16_990, rounds=4_816, accepted=12_208, accepted_lengths=None
    )
    lengths = named([published])
    assert lengths["vLLM, llama.cpp", "mean acceptance length"] == (pytest.approx(3.535, abs=5e-4),)
    assert lengths["this report", "tokens_per_round"] == (pytest.approx(3.528, abs=5e-4),)

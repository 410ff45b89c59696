"""The benchmark of real models and its timing by hand, on stand-ins for what takes minutes."""

import ast
import json
import sys
from types import SimpleNamespace

import pytest
from runs import FROZEN
from test_benchmarks import BENCHMARKS, script

PROMPTS = BENCHMARKS / "prompts" / "real_pair.jsonl"


def test_the_timing_by_hand_imports_nothing_but_the_standard_library() -> None:
    tree = ast.parse((BENCHMARKS / "hand_timing.py").read_text())
    modules = {
        name
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [str(node.module)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert {name.split(".")[0] for name in modules} <= sys.stdlib_module_names


def test_the_prompts_are_of_three_kinds_and_have_ids_of_their_own() -> None:
    prompts = script("hand_timing").read_prompts(PROMPTS)
    sets = [prompt.prompt_set for prompt in prompts]
    assert {name: sets.count(name) for name in sets} == {"code": 8, "edit": 4, "chat": 8}
    assert len({prompt.name for prompt in prompts}) == len(prompts)


def test_the_requests_timed_by_hand_are_those_of_a_run() -> None:
    requests = script("hand_timing").run_requests(FROZEN / "server")
    lines = (FROZEN / "server" / "trials.jsonl").read_text().splitlines()
    trials = [json.loads(line) for line in lines]
    greedy = [trial for trial in trials if trial["temperature"] == 0 and trial["status"] == "ok"]
    assert set(requests) == {(trial["prompt_set"], trial["prompt"]) for trial in greedy}
    for trial in greedy:
        request = requests[trial["prompt_set"], trial["prompt"]]
        assert trial["k"] in request.ks
        assert request.prompt_tokens == trial["prompt_tokens"]
        assert request.budget >= len(trial["tokens"])


def test_speedups_by_hand_are_ratios_of_sums_over_the_tokens_after_the_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hand = script("hand_timing")
    shared = {"prompt_set": "code", "visit": 0, "ids": [1], "stop": "limit", "drafted": 0}
    answers = [
        SimpleNamespace(prompt=prompt, k=k, tokens=tokens, ms=ms, accepted=accepted, **shared)
        for prompt, k, tokens, ms, accepted in (
            ("a", 0, 11, 100.0, 0),
            ("a", 4, 11, 50.0, 6),
            ("b", 0, 31, 300.0, 0),
            ("b", 4, 31, 350.0, 14),
        )
    ]
    hand.show(answers, [4], by_model=True, run=None)
    assert "| code | 4 | 2 | 2 | 2.00 | 10.0 | 1.000x | - |" in capsys.readouterr().out

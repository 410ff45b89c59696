"""Serving lines: valid in their own syntax, and honest about the rule they accept by."""

import ast
import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin

from harness.decoding import ngram
from harness.models.load import EMBEDDED
from harness.reporting.serving import LOOKUP_TOKENS, TOYS, snippets_of

TARGET, DRAFT = "Qwen/Qwen3-4B", "my models/it's a draft"
ENGINES = [
    {"rule": "ratio", "k": 4, "speedup": 1.6},
    {"rule": "greedy_draft", "k": 3, "speedup": 1.4},
    {"rule": "exact_match", "k": 1, "speedup": 0.9},
]


def run(**changes: Any) -> Any:
    verdict = {
        "decision": "speculate",
        "draft": "small",
        "k": 4,
        "temperature": 1.0,
        "prompt_set": "all",
        "speedup": 1.5,
    }
    summary: dict[str, Any] = {
        "verdict": {**verdict, **changes.pop("verdict", {})},
        "engines": changes.pop("engines", ENGINES),
        "acceptance_rates": [0.9, 0.7, 0.65, 0.5],
    }
    config = {"model": {"name": "big", "id": TARGET}, "draft": {"name": "small", "id": DRAFT}}
    return SimpleNamespace(
        folder=Path("x_sweep_y"),
        manifest={"door": "sweep", **changes.pop("manifest", {})},
        config={**config, **changes},
        summary=summary,
    )


def lines(stored: Any) -> dict[str, Any]:
    return {snippet.title.split()[0].strip(","): snippet for snippet in snippets_of(stored)[::-1]}


def options(code: str) -> dict[str, str]:
    words = shlex.split(code)
    return dict(
        zip(
            [w for w in words if w.startswith("-")],
            [words[i + 1] for i, w in enumerate(words) if w.startswith("-")],
            strict=True,
        )
    )


def test_vllm_samples_its_draft_where_that_is_faster() -> None:
    first, *_ = snippets_of(run())
    assert first.title == "vLLM 0.33"
    assert shlex.split(first.code)[:3] == ["vllm", "serve", TARGET]
    assert json.loads(options(first.code)["--speculative-config"]) == {
        "method": "draft_model",
        "model": DRAFT,
        "num_speculative_tokens": 4,
        "draft_sample_method": "probabilistic",
    }
    assert first.notes[0].startswith("1.50x on held-out prompts, under its rule of acceptance")
    assert "drafts greedily: 1.40x at K=3" in first.notes[1]
    greedy = run(engines=[ENGINES[1], {**ENGINES[0], "speedup": 1.2}])
    assert "1.40x by replay under its rule, greedy_draft" in snippets_of(greedy)[0].notes[0]
    config = json.loads(options(snippets_of(greedy)[0].code)["--speculative-config"])
    assert "draft_sample_method" not in config
    assert config["num_speculative_tokens"] == 3


def test_vllm_is_validated_without_weights_by_our_acceptance() -> None:
    (snippet,) = [s for s in snippets_of(run()) if "--load-format" in s.code]
    found = options(snippet.code)
    assert found["--load-format"] == "dummy"
    config = json.loads(found["--speculative-config"])
    assert config["rejection_sample_method"] == "synthetic"
    assert config["synthetic_acceptance_rates"] == [0.9, 0.7, 0.65, 0.5]
    assert len(config["synthetic_acceptance_rates"]) == config["num_speculative_tokens"]


def test_sglang_drafts_its_own_best_k() -> None:
    found = options(lines(run())["SGLang"].code)
    assert found["--speculative-algorithm"] == "STANDALONE"
    assert found["--speculative-draft-model-path"] == DRAFT
    assert found["--speculative-eagle-topk"] == "1"
    assert int(found["--speculative-num-draft-tokens"]) == int(found["--speculative-num-steps"]) + 1
    assert found["--speculative-num-steps"] == "3"


def test_llama_cpp_uses_the_new_names() -> None:
    found = options(lines(run())["llama.cpp"].code)
    assert (found["--spec-type"], found["--spec-draft-n-max"]) == ("draft-simple", "3")
    assert "--draft-max" not in found
    notes = " ".join(lines(run())["llama.cpp"].notes)
    assert "--spec-draft-sampling probabilistic" in notes
    assert "1.60x at K=4 by replay" in notes


def test_mlx_says_that_it_does_not_pay_there() -> None:
    snippet = lines(run())["mlx-lm"]
    assert options(snippet.code) == {
        "--model": TARGET,
        "--draft-model": DRAFT,
        "--num-draft-tokens": "1",
        "--temp": "1",
    }
    assert "at this run's step times: it does not pay by this rule" in snippet.notes[0]


def test_mlx_lm_parses_its_line() -> None:
    generate = pytest.importorskip("mlx_lm.generate", reason="mlx-lm is not installed")
    words = shlex.split(lines(run())["mlx-lm"].code)[1:]
    parsed = generate.setup_arg_parser().parse_args(words)
    assert (parsed.num_draft_tokens, parsed.temp, parsed.draft_model) == (1, 1.0, DRAFT)


@pytest.mark.parametrize(
    ("temperature", "decode", "sampling"),
    [
        (0.0, {}, {"do_sample": False}),
        (1.0, {}, {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}),
        (0.7, {"top_k": 40, "top_p": 0.9}, {"do_sample": True, "temperature": 1.0, "top_k": 0}),
    ],
)
def test_the_transformers_snippet_runs_on_the_embedded_pair(
    temperature: float, decode: dict[str, Any], sampling: dict[str, Any]
) -> None:
    pair = {
        "model": {"name": "big", "id": str(EMBEDDED / "tiny")},
        "draft": {"name": "small", "id": str(EMBEDDED / "tiny_good")},
    }
    stored = run(**pair, decode=decode, verdict={"temperature": temperature})
    code = lines(stored)["transformers"].code
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "max_new_tokens": 6, "pad_token_id": 0}
    scope: dict[str, Any] = {"inputs": {**inputs, "attention_mask": torch.ones(1, 3).long()}}
    called: dict[str, Any] = {}
    generate: Any = vars(GenerationMixin)["generate"]

    def spy(*positional: Any, **named: Any) -> Any:
        called.update(named if not called else {})  # the draft generates within
        return generate(*positional, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GenerationMixin, "generate", spy)
        exec(compile(ast.parse(code), "snippet", "exec"), scope)
    assert scope["output"].shape[1] > 3
    settings = scope["draft"].generation_config
    assert {name for name in vars(settings) if name[0] != "_"} <= set(vars(GenerationConfig()))
    assert settings.num_assistant_tokens == 4
    assert sampling.items() <= called.items()
    warped = [type(warper).__name__ for warper in called.get("logits_processor", ())]
    assert warped == (["TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"]
                      if temperature == 0.7 else [])  # fmt: skip


def test_a_run_that_stopped_drafting_early_is_served_so_where_the_engine_can() -> None:
    found = lines(run(decode={"stop": "threshold", "stop_threshold": 0.3}, engines=[]))
    assert "assistant_confidence_threshold = 0.3" in found["transformers"].code
    assert "1.50x on held-out" in found["transformers"].notes[0]
    for engine in ("vLLM", "SGLang", "llama.cpp", "mlx-lm"):
        assert "the run stopped drafting early" in found[engine].notes[0]


def test_the_sampling_of_the_run_is_on_the_line_or_asked_of_requests() -> None:
    found = lines(run(decode={"top_k": 40, "top_p": 0.9}, verdict={"temperature": 0.7}))
    given = options(found["mlx-lm"].code)
    assert (given["--temp"], given["--top-k"], given["--top-p"]) == ("0.7", "40", "0.9")
    for engine in ("vLLM", "SGLang", "llama.cpp"):
        (asked,) = [note for note in found[engine].notes if "requests" in note]
        assert "temperature 0.7, top_k 40 and top_p 0.9" in asked
    plain = lines(run(verdict={"temperature": 0.0}))
    assert options(plain["mlx-lm"].code)["--temp"] == "0"
    assert any("requests with temperature 0" in note for note in plain["vLLM"].notes)


def test_acceptance_that_was_set_is_no_engines_speedup() -> None:
    imposed = run(decode={"acceptance": 0.8})
    for engine in ("vLLM", "SGLang", "llama.cpp", "mlx-lm", "transformers"):
        assert "1.50x at the acceptance that was set" in lines(imposed)[engine].notes[0]
    (validation,) = [s for s in snippets_of(imposed) if "--load-format" in s.code]
    assert "that was set for this run" in validation.notes[0]


def test_a_loss_names_the_rule_of_acceptance_that_may_pay() -> None:
    (snippet,) = snippets_of(run(verdict={"decision": "does_not_pay", "draft": None, "k": 0}))
    (hint,) = snippet.notes[1:]
    assert hint.startswith("Under the rule greedy_draft (vLLM (default), SGLang")
    assert "1.40x at K=3, picked on these prompts; decode.rule=greedy_draft judges it." in hint
    (greedy,) = snippets_of(
        run(verdict={"decision": "does_not_pay", "draft": None, "k": 0, "temperature": 0.0})
    )
    assert len(greedy.notes) == 1


def test_rates_that_do_not_reach_the_k_give_no_validation_line() -> None:
    longer = run(verdict={"k": 6})
    assert not any("--load-format" in snippet.code for snippet in snippets_of(longer))


def test_names_are_quoted_in_python_too() -> None:
    ast.parse(lines(run(draft={"name": "small", "id": "a'b\\c"}))["transformers"].code)


def test_what_was_not_replayed_is_said_not_to_be_known() -> None:
    found = lines(run(engines=[]))
    for engine in ("SGLang", "llama.cpp", "mlx-lm"):
        assert "speedup is not known" in found[engine].notes[0]
    assert "1.50x on held-out" in found["transformers"].notes[0]


def test_greedily_every_engine_has_the_verdicts_k_and_speedup() -> None:
    found = lines(run(verdict={"temperature": 0.0, "k": 2}))
    for engine in ("SGLang", "llama.cpp", "mlx-lm", "transformers"):
        assert "all rules are one at temperature 0" in found[engine].notes[0]
    assert options(found["SGLang"].code)["--speculative-num-steps"] == "2"


def test_mistral_rs_is_said_to_have_removed_drafts() -> None:
    assert "removed draft models after v0.8.0" in lines(run())["mistral.rs"].notes[0]


@pytest.mark.parametrize("decision", ["does_not_pay", "undecided"])
def test_no_draft_is_served_where_the_verdict_does_not_say_so(decision: str) -> None:
    (snippet,) = snippets_of(run(verdict={"decision": decision, "draft": None, "k": 0}))
    assert snippet.code == f"vllm serve {TARGET}"


def test_toys_and_dummies_are_called_so() -> None:
    toy = run(model={"name": "tiny", "id": "embedded:tiny"})
    dummy = run(manifest={"models": {"target": {"name": "big", "weights": "dummy"}}})
    for stored in (toy, dummy):
        assert TOYS in snippets_of(stored)[0].notes
    assert TOYS not in snippets_of(run())[0].notes


def test_an_auditioned_look_up_needs_no_second_model() -> None:
    (snippet,) = snippets_of(run(verdict={"draft": "ngram", "k": 3}))
    config = json.loads(options(snippet.code)["--speculative-config"])
    assert config["method"] == "ngram"
    assert config["num_speculative_tokens"] == 3
    assert config["prompt_lookup_max"] == LOOKUP_TOKENS == ngram.LONGEST_NGRAM


def test_a_run_that_decides_nothing_has_no_line() -> None:
    assert snippets_of(run(manifest={"door": "profile"})) == ()
    stored = run()
    stored.summary = None
    assert snippets_of(stored) == ()


def test_an_audition_names_the_drafts_own_id() -> None:
    stored = run(draft=None, drafts=["other", "small@ORG/draft"])
    assert "ORG/draft" in snippets_of(stored)[0].code
    described = run(draft=None, drafts=["small"], manifest={"models": {"small": {"id": "hub/x"}}})
    assert "hub/x" in snippets_of(described)[0].code

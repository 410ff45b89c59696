"""Serving lines: valid in their own syntax, and honest about the rule they accept by."""

import ast
import json
import shlex
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin

from harness.models.load import EMBEDDED
from harness.records import LONGEST_NGRAM
from harness.reporting import serving
from harness.reporting.serving import Snippet, snippets_of
from harness.summary import (
    AcceptanceByPosition,
    Leaderboard,
    LeaderboardRow,
    ModelFacts,
    RunFacts,
    SamplingFacts,
    Summary,
    Verdict,
)

TARGET, DRAFT = "Qwen/Qwen3-4B", "my models/it's a draft"
REPLAYED: dict[Any, tuple[int, float]] = {
    "ratio": (4, 1.6),
    "greedy_draft": (3, 1.4),
    "exact_match": (1, 0.9),
}
NO_GAIN = {"decision": "does_not_pay", "draft": None, "k": 0}


def decided(
    replayed: dict[Any, tuple[int, float]] = REPLAYED,
    *,
    verdict: dict[str, Any] | None = None,
    sampling: dict[str, Any] | None = None,
    target: str = TARGET,
    draft: str = DRAFT,
    **changes: Any,
) -> Summary:
    """A sweep that serves the draft "small" at K=4, temperature 1, rule ratio, unless changed."""
    values: dict[str, Any] = {"decision": "speculate", "draft": "small", "k": 4, "temperature": 1.0}
    values |= verdict or {}
    temperature = values["temperature"]
    models = (ModelFacts("target", "big", target), ModelFacts("draft", "small", draft))
    facts: dict[str, Any] = {
        "command": "sweep", "folder": "x", "status": "complete", "created_utc": None,
        "model": "big", "draft": "small", "models": models,
        "sampling": SamplingFacts(**sampling or {}), **changes,
    }  # fmt: skip
    plain = LeaderboardRow(2, None, 0, 1.0)
    return Summary(
        RunFacts(**facts),
        verdict=Verdict(
            **values, speculate=True, prompt_set="all", speedup=1.5, speedup_lo=None,
            speedup_hi=None, reason="held_out_gain",
        ),
        leaderboards=tuple(
            Leaderboard(
                rule, temperature, (f"engine of {rule}",),
                (LeaderboardRow(1, "small", k, speedup), plain),
            )
            for rule, (k, speedup) in replayed.items()
        ),
        acceptance_by_position=(
            AcceptanceByPosition("small", "all", temperature, 4, "measured", (0.9, 0.7, 0.75, 0.5)),
        ),
    )  # fmt: skip


def lines(summary: Summary) -> dict[str, Snippet]:
    return {snippet.title.split()[0].strip(","): snippet for snippet in snippets_of(summary)[::-1]}


def options(code: str) -> dict[str, str]:
    words = shlex.split(code)
    return {word: words[place + 1] for place, word in enumerate(words) if word.startswith("-")}


def speculative_config(snippet: Snippet) -> dict[str, Any]:
    return json.loads(options(snippet.code)["--speculative-config"])


def test_vllm_samples_its_draft_where_that_is_faster() -> None:
    first, *_ = snippets_of(decided())
    assert shlex.split(first.code)[:3] == ["vllm", "serve", TARGET]
    assert speculative_config(first) == {
        "method": "draft_model",
        "model": DRAFT,
        "num_speculative_tokens": 4,
        "draft_sample_method": "probabilistic",
    }
    assert first.notes[0].startswith("1.50x on held-out prompts, under its acceptance rule (ratio)")
    assert "drafts greedily: 1.40x at K=3" in " ".join(first.notes)
    greedy = snippets_of(decided({**REPLAYED, "ratio": (4, 1.2)}))[0]
    assert "1.40x by replay under its rule, greedy_draft" in greedy.notes[0]
    assert speculative_config(greedy)["num_speculative_tokens"] == 3
    assert "draft_sample_method" not in speculative_config(greedy)


def test_vllm_is_checked_without_weights_by_our_acceptance() -> None:
    (snippet,) = [entry for entry in snippets_of(decided()) if "--load-format" in entry.code]
    config = speculative_config(snippet)
    assert config["rejection_sample_method"] == "synthetic"
    assert config["synthetic_acceptance_rates"] == [0.9, 0.7, 0.7, 0.5]
    longer = decided(verdict={"k": 6})
    assert not any("--load-format" in entry.code for entry in snippets_of(longer))


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ("SGLang", {"--speculative-algorithm": "STANDALONE", "--speculative-num-steps": "3",
                    "--speculative-draft-model-path": DRAFT, "--speculative-eagle-topk": "1",
                    "--speculative-num-draft-tokens": "4"}),
        ("llama.cpp", {"--spec-type": "draft-simple", "--spec-draft-n-max": "3"}),
        ("mlx-lm", {"--model": TARGET, "--draft-model": DRAFT, "--num-draft-tokens": "1",
                    "--temp": "1"}),
    ],
)  # fmt: skip
def test_an_engine_drafts_the_k_that_is_best_under_its_rule(
    engine: str, expected: dict[str, str]
) -> None:
    assert expected.items() <= options(lines(decided())[engine].code).items()


def test_a_line_says_what_is_known_of_its_speedup() -> None:
    found = lines(decided())
    assert "at this run's step times: it does not pay by this rule" in found["mlx-lm"].notes[0]
    assert "1.60x at K=4 by replay" in found["llama.cpp"].notes[-1]
    unknown = lines(decided({}))
    for engine in ("SGLang", "llama.cpp", "mlx-lm"):
        assert "speedup is not known" in unknown[engine].notes[0]
    assert "1.50x on held-out" in unknown["transformers"].notes[0]
    synthetic = lines(decided(synthetic=True))
    for engine in ("vLLM", "SGLang", "llama.cpp", "mlx-lm", "transformers"):
        assert "1.50x at the synthetic acceptance" in synthetic[engine].notes[0]
    greedy = lines(decided(verdict={"temperature": 0.0, "k": 2}))
    for engine in ("SGLang", "llama.cpp", "mlx-lm", "transformers"):
        assert greedy[engine].notes[0].endswith("At temperature 0 all acceptance rules coincide.")
    assert options(greedy["SGLang"].code)["--speculative-num-steps"] == "2"


def test_mlx_lm_parses_its_line() -> None:
    generate = pytest.importorskip("mlx_lm.generate", reason="mlx-lm is not installed")
    words = shlex.split(lines(decided())["mlx-lm"].code)[1:]
    parsed = generate.setup_arg_parser().parse_args(words)
    assert (parsed.num_draft_tokens, parsed.temp, parsed.draft_model) == (1, 1.0, DRAFT)


@pytest.mark.parametrize(
    ("temperature", "sampling", "expected"),
    [
        (0.0, {}, {"do_sample": False}),
        (1.0, {}, {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}),
        (0.7, {"top_k": 40, "top_p": 0.9}, {"do_sample": True, "temperature": 1.0, "top_k": 0}),
    ],
)
def test_the_transformers_snippet_runs_on_the_embedded_pair(
    temperature: float, sampling: dict[str, Any], expected: dict[str, Any]
) -> None:
    made = decided(
        target=str(EMBEDDED / "tiny"),
        draft=str(EMBEDDED / "tiny_good"),
        sampling=sampling,
        verdict={"temperature": temperature},
    )
    code = lines(made)["transformers"].code
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
    assert expected.items() <= called.items()
    processors = [type(processor).__name__ for processor in called.get("logits_processor", ())]
    assert processors == (["TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"]
                          if temperature == 0.7 else [])  # fmt: skip


def test_names_are_quoted_in_python_too() -> None:
    ast.parse(lines(decided(draft="a'b\\c"))["transformers"].code)


def test_a_run_that_stopped_drafting_early_is_served_so_where_the_engine_can() -> None:
    found = lines(decided({}, sampling={"stop_threshold": 0.3}))
    assert "assistant_confidence_threshold = 0.3" in found["transformers"].code
    assert "1.50x on held-out" in found["transformers"].notes[0]
    for engine in ("vLLM", "SGLang", "llama.cpp", "mlx-lm"):
        assert "the run stopped drafting early" in found[engine].notes[0]


def test_the_sampling_of_the_run_is_on_the_line_or_asked_of_requests() -> None:
    sampling = {"top_k": 40, "top_p": 0.9}
    found = lines(decided(sampling=sampling, verdict={"temperature": 0.7}))
    given = options(found["mlx-lm"].code)
    assert (given["--temp"], given["--top-k"], given["--top-p"]) == ("0.7", "40", "0.9")
    for engine in ("vLLM", "SGLang", "llama.cpp"):
        (asked,) = [note for note in found[engine].notes if "requests" in note]
        assert "temperature 0.7, top_k 40 and top_p 0.9" in asked


@pytest.mark.parametrize("decision", ["does_not_pay", "undecided"])
def test_no_draft_is_served_where_the_verdict_does_not_say_so(decision: str) -> None:
    (snippet,) = snippets_of(decided(verdict={**NO_GAIN, "decision": decision}))
    assert snippet.code == f"vllm serve {TARGET}"
    assert snippet.notes == (
        serving.NO_DRAFT,
        "Under the rule greedy_draft (engine of greedy_draft) replay gives 1.40x at K=3, picked on"
        " these prompts; decode.rule=greedy_draft judges it.",
    )
    (greedy,) = snippets_of(decided(verdict={**NO_GAIN, "temperature": 0.0}))
    assert greedy.notes == (serving.NO_DRAFT,)


def test_toys_and_dummies_are_called_so() -> None:
    toy = decided(target="embedded:tiny")
    dummy = decided(models=(ModelFacts("target", "big", TARGET, weights="dummy"),))
    for summary in (toy, dummy):
        assert serving.TOYS in snippets_of(summary)[0].notes
    assert serving.TOYS not in snippets_of(decided())[0].notes


def test_an_n_gram_needs_no_second_model() -> None:
    (snippet,) = snippets_of(decided(verdict={"draft": "ngram", "k": 3}))
    assert speculative_config(snippet) == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": LONGEST_NGRAM,
        "prompt_lookup_min": 1,
    }


def test_a_run_that_decides_nothing_has_no_line() -> None:
    assert snippets_of(decided(command="profile")) == ()
    assert snippets_of(replace(decided(), verdict=None)) == ()

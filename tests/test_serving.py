"""Serving lines: valid in their own syntax, and honest about the rule they accept by."""

import ast
import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin

from harness.models.load import EMBEDDED
from harness.records import LONGEST_NGRAM, RULES
from harness.reporting import serving
from harness.reporting.content import content_of
from harness.reporting.serving import Snippet, snippets_of
from harness.serving.drafts import kind_of, looks_up
from harness.serving.engines import drafts_alike, spec_of, with_lines
from harness.summary import (
    AcceptanceByPosition,
    Answer,
    Leaderboard,
    LeaderboardRow,
    ModelFacts,
    RunFacts,
    SamplingFacts,
    Summary,
)

TARGET, DRAFT = "Qwen/Qwen3-4B", "my models/it's a draft"
# By rule: K and speedup, measured under the run's own rule
ANSWERS: dict[Any, tuple[int, float]] = {
    "ratio": (4, 1.6),
    "greedy_draft": (3, 1.4),
    "exact_match": (1, 0.9),
}


def decided(
    answers: Mapping[Any, tuple[int, float]] = ANSWERS,
    *,
    temperature: float = 1.0,
    sampling: dict[str, Any] | None = None,
    target: str = TARGET,
    draft: str = DRAFT,
    name: str = "small",
    loss: Any = "does_not_pay",
    **changes: Any,
) -> Summary:
    """A sweep of rule ratio with these answers; a speedup below 1 is the decision `loss`."""
    models = (ModelFacts("target", "big", target), ModelFacts("draft", "small", draft))
    facts: dict[str, Any] = {
        "command": "sweep", "folder": "x", "status": "complete", "created_utc": None,
        "model": "big", "draft": "small", "models": models,
        "sampling": SamplingFacts(**sampling or {}), **changes,
    }  # fmt: skip
    kind = kind_of(name, facts["models"])
    made = tuple(
        Answer(
            temperature,
            "own",
            rule,
            "all",
            name if speedup > 1 else None,
            k if speedup > 1 else 0,
            speedup,
            None,
            None,
            "measured" if rule == "ratio" else "replayed",
            "speculate" if speedup > 1 else loss,
            "held_out_gain",
            servers=tuple(
                server
                for server, spec in with_lines().items()
                if spec.rule == rule
                and drafts_alike(server, kind, temperature)
                and (server == "transformers" or "stop_threshold" not in (sampling or {}))
            ),
        )
        for rule, (k, speedup) in answers.items()
    )
    return Summary(
        RunFacts(**facts),
        answers=tuple(answer for answer in made if answer.servers) or made,
        acceptance_by_position=(
            AcceptanceByPosition("small", "all", temperature, 4, "measured", (0.9, 0.7, 0.75, 0.5)),
        ),
    )  # fmt: skip


GREEDY = dict.fromkeys(ANSWERS, (2, 1.5))


def lines(summary: Summary) -> dict[str, Snippet]:
    return {snippet.title.split()[0].strip(","): snippet for snippet in snippets_of(summary)[::-1]}


def options(code: str) -> dict[str, str]:
    words = shlex.split(code)
    return {word: words[place + 1] for place, word in enumerate(words) if word.startswith("-")}


def speculative_config(snippet: Snippet) -> dict[str, Any]:
    return json.loads(options(snippet.code)["--speculative-config"])


def test_the_first_line_is_that_of_the_marked_cell() -> None:
    first, *_ = snippets_of(decided())
    assert first.title == "For vLLM with its defaults at temperature 1 (vLLM 0.33)"
    assert shlex.split(first.code)[:3] == ["vllm", "serve", TARGET]
    assert speculative_config(first) == {
        "method": "draft_model",
        "model": DRAFT,
        "num_speculative_tokens": 3,
    }
    assert first.notes[0] == "1.40x, predicted on held-out prompts, at this run's round times."
    sampled, *_ = snippets_of(decided(serve_on="vllm_probabilistic"))
    assert speculative_config(sampled)["num_speculative_tokens"] == 4
    assert speculative_config(sampled)["draft_sample_method"] == "probabilistic"
    assert sampled.notes[0].startswith("1.60x, measured on held-out prompts")
    assert "drafts greedily: 1.40x at K=3" in sampled.notes[-1]
    only = snippets_of(decided({**ANSWERS, "greedy_draft": (3, 0.8)}))[0]
    assert "probabilistic at temperature 1" in only.title


@pytest.mark.parametrize("server", with_lines())
def test_every_server_that_can_be_asked_for_has_its_line_first(server: str) -> None:
    first, *others = snippets_of(decided(GREEDY, temperature=0.0, serve_on=server))
    assert first.title.startswith(f"For {spec_of(server).in_headlines} at temperature 0")
    assert str(2) in first.code
    assert first.title not in {other.title for other in others}


def test_vllm_is_checked_without_weights_by_our_acceptance() -> None:
    (snippet,) = [entry for entry in snippets_of(decided()) if "--load-format" in entry.code]
    config = speculative_config(snippet)
    assert config["rejection_sample_method"] == "synthetic"
    assert config["synthetic_acceptance_rates"] == [0.9, 0.7, 0.7, 0.5]
    longer = decided({**ANSWERS, "ratio": (6, 1.6)})
    assert not any("--load-format" in entry.code for entry in snippets_of(longer))


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ("SGLang", {"--speculative-algorithm": "STANDALONE", "--speculative-num-steps": "3",
                    "--speculative-draft-model-path": DRAFT, "--speculative-eagle-topk": "1",
                    "--speculative-num-draft-tokens": "4"}),
        ("llama.cpp", {"--spec-type": "draft-simple", "--spec-draft-n-max": "3"}),
        ("mlx-lm", {"--model": TARGET, "--draft-model": DRAFT, "--num-draft-tokens": "2",
                    "--temp": "1"}),
    ],
)  # fmt: skip
def test_an_engine_drafts_the_k_that_is_best_under_its_rule(
    engine: str, expected: dict[str, str]
) -> None:
    snippets = lines(decided({**ANSWERS, "exact_match": (2, 1.1)}))
    assert expected.items() <= options(snippets[engine].code).items()


def test_a_line_says_what_is_known_of_its_speedup() -> None:
    snippets = lines(decided())
    assert snippets["mlx-lm"].code == ""
    assert snippets["mlx-lm"].notes == ("Without a draft: none is known to pay on it.",)
    assert "1.60x at K=4" in snippets["llama.cpp"].notes[-1]
    unknown = lines(decided({"ratio": (4, 1.5)}))
    for engine in ("SGLang", "llama.cpp", "mlx-lm"):
        assert "speedup is not known" in unknown[engine].notes[0]
    assert "1.50x, measured on held-out" in unknown["transformers"].notes[0]
    synthetic = lines(decided(GREEDY, synthetic=True))
    for engine in ("For", "SGLang", "llama.cpp", "mlx-lm", "transformers"):
        assert "1.50x at the synthetic acceptance" in synthetic[engine].notes[0]
    greedy = lines(decided(GREEDY, temperature=0.0))
    assert options(greedy["SGLang"].code)["--speculative-num-steps"] == "2"


def test_mlx_lm_parses_its_line() -> None:
    generate = pytest.importorskip("mlx_lm.generate", reason="mlx-lm is not installed")
    words = shlex.split(lines(decided(GREEDY))["mlx-lm"].code)[1:]
    parsed = generate.setup_arg_parser().parse_args(words)
    assert (parsed.num_draft_tokens, parsed.temp, parsed.draft_model) == (2, 1.0, DRAFT)


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
        temperature=temperature,
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
    snippets = lines(decided({"ratio": (4, 1.5)}, sampling={"stop_threshold": 0.3}))
    assert "assistant_confidence_threshold = 0.3" in snippets["For"].code
    assert "1.50x, measured on held-out" in snippets["For"].notes[0]
    for engine in ("vLLM", "SGLang", "llama.cpp", "mlx-lm"):
        assert "speedup is not known" in snippets[engine].notes[0]


def test_the_sampling_of_the_run_is_on_the_line_or_asked_of_requests() -> None:
    sampling = {"top_k": 40, "top_p": 0.9}
    snippets = lines(decided(GREEDY, sampling=sampling, temperature=0.7))
    given = options(snippets["mlx-lm"].code)
    assert (given["--temp"], given["--top-k"], given["--top-p"]) == ("0.7", "40", "0.9")
    for engine in ("For", "SGLang", "llama.cpp"):
        (asked,) = [note for note in snippets[engine].notes if "requests" in note]
        assert "temperature 0.7, top_k 40 and top_p 0.9" in asked


@pytest.mark.parametrize("loss", ["does_not_pay", "undecided"])
def test_the_target_alone_is_served_where_no_draft_pays(loss: str) -> None:
    (snippet,) = snippets_of(decided(dict.fromkeys(ANSWERS, (1, 0.9)), loss=loss))
    assert snippet.code == f"vllm serve {TARGET}"
    assert snippet.notes == ()
    first, *others = snippets_of(decided({**ANSWERS, "greedy_draft": (1, 0.9)}, serve_on="sglang"))
    title = "For SGLang at temperature 1 (SGLang 0.5.23), without a draft"
    assert (first.title, options(first.code)) == (
        title,
        {"-m": "sglang.launch_server", "--model-path": TARGET},
    )
    assert [line.title.split()[0] for line in others] == ["vLLM", "transformers"]
    assert all("4" in line.code for line in others)


@pytest.mark.parametrize(
    ("server", "code"),
    [
        ("vllm", f"vllm serve {TARGET}"),
        ("sglang", f"python -m sglang.launch_server --model-path {TARGET}"),
        ("llamacpp", "llama-server -m TARGET.gguf"),
        ("mlx", f"mlx_lm.generate --model {TARGET} --temp 0"),
    ],
)
def test_every_server_has_a_line_for_the_target_alone(server: str, code: str) -> None:
    lost = decided(dict.fromkeys(ANSWERS, (1, 0.9)), temperature=0.0, serve_on=server)
    snippet = snippets_of(lost)[0]
    assert snippet.code == code
    assert ("TARGET.gguf" in code) == any(TARGET in note for note in snippet.notes)


def test_toys_and_dummies_are_called_so() -> None:
    toy = decided(target="embedded:tiny")
    dummy = decided(models=(ModelFacts("target", "big", TARGET, weights="dummy"),))
    for summary in (toy, dummy):
        assert serving.TOYS in snippets_of(summary)[0].notes
    assert serving.TOYS not in snippets_of(decided())[0].notes


def test_a_draft_that_nothing_is_known_of_has_no_line() -> None:
    models = (ModelFacts("target", "big", TARGET), ModelFacts("draft", "small"))
    snippets = snippets_of(decided(GREEDY, temperature=0.0, models=models))
    assert {snippet.code for snippet in snippets} == {""}
    assert "kind of draft small is not known" in snippets[0].notes[0]


def of_kind(
    kind: str,
    temperature: float = 1.0,
    target: str = TARGET,
    sampling: dict[str, Any] | None = None,
) -> dict[str, Snippet]:
    own = kind == "mtp"  # the target's layers
    facts = ModelFacts("draft", kind, target if own else DRAFT, kind=kind, layers=4)
    drafts = () if looks_up(kind) else (facts,)
    models = (ModelFacts("target", "big", target), *drafts)
    answers = dict.fromkeys(ANSWERS, (3, 1.5))
    made = decided(answers, name=kind, models=models, temperature=temperature, sampling=sampling)
    return {snippet.title.split(" (")[-1]: snippet for snippet in snippets_of(made)}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("kind", ["ngram", "early_exit"])
def test_the_transformers_snippets_of_other_kinds_run(kind: str, temperature: float) -> None:
    sampling = {"top_k": 40} if temperature else {}
    snippets = of_kind(kind, temperature, str(EMBEDDED / "tiny"), sampling)
    (code,) = [snippet.code for snippet in snippets.values() if snippet.language == "python"]
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "max_new_tokens": 12, "pad_token_id": 0}
    scope: dict[str, Any] = {"inputs": {**inputs, "attention_mask": torch.ones(1, 3).long()}}
    exec(compile(ast.parse(code), "snippet", "exec"), scope)
    assert scope["output"].shape[1] > 3
    if not temperature:
        plain = scope["model"].generate(
            **scope["inputs"],
            do_sample=False,
            assistant_early_exit=None,
            prompt_lookup_num_tokens=None,
        )
        assert scope["output"].tolist() == plain.tolist()


def test_heads_sample_where_vllm_is_asked_to_and_look_ups_have_one_line_there() -> None:
    for kind, lines_of_vllm in (("eagle3", 2), ("mtp", 2), ("ngram", 1)):
        codes = [s.code for s in of_kind(kind).values() if s.code.startswith("vllm")]
        assert len(codes) == lines_of_vllm
        assert [code for code in codes if '"draft_sample_method":"probabilistic"' in code] == codes[
            1:
        ]


@pytest.mark.parametrize(
    ("kind", "method", "elsewhere"),
    [
        ("eagle3", {"model": DRAFT}, {"EAGLE3", "draft-eagle3"}),
        ("mtp", {}, {"EAGLE", "draft-mtp"}),
        ("medusa", {"model": DRAFT}, set()),
        ("dflash", {"model": DRAFT}, {"DFLASH", "num-draft-tokens 4", "draft-dflash"}),
        ("ngram", {"prompt_lookup_max": LONGEST_NGRAM, "prompt_lookup_min": 1},
         {"NGRAM", "ngram-simple", "prompt_lookup_num_tokens=3"}),
        ("suffix", {}, set()),
    ],
)  # fmt: skip
def test_every_kind_of_draft_has_its_lines(
    kind: str, method: dict[str, Any], elsewhere: set[str]
) -> None:
    snippets = of_kind(kind).values()
    first = next(snippet for snippet in snippets if snippet.code.startswith("vllm"))
    others = [snippet for snippet in snippets if snippet is not first]
    config = {"method": kind, "num_speculative_tokens": 3, **method}
    assert speculative_config(first) == config
    assert serving.REMOVED not in others
    code = " ".join(snippet.code for snippet in others)
    assert {word for word in elsewhere if word in code} == elsewhere
    lines_of_mlx = [snippet for snippet in others if snippet.title.startswith("mlx-lm")]
    assert [snippet.code for snippet in lines_of_mlx] == [""]
    assert "Not available here" in lines_of_mlx[0].notes[0]
    for snippet in others:
        if snippet.language == "python" and snippet.code:
            ast.parse(snippet.code)


def test_an_early_exit_and_a_copy_are_named_where_no_engine_has_them() -> None:
    snippets = of_kind("early_exit", temperature=0.0)
    (code,) = [snippet.code for snippet in snippets.values() if snippet.code]
    assert "assistant_early_exit=4" in code
    copied = decided(
        GREEDY, models=(ModelFacts("target", "big", TARGET), ModelFacts("draft", "small", TARGET))
    )
    notes = {snippet.title.split()[0]: snippet.notes for snippet in snippets_of(copied)}
    for engine in ("vLLM", "SGLang"):
        assert "engines make no copy" in notes[engine][0]


def test_an_engine_without_the_best_kind_is_given_its_own_answer() -> None:
    kinds: Any = ("early_exit", "eagle3")
    facts = [ModelFacts(kind, kind, f"org/{kind}", kind=kind, layers=2) for kind in kinds]
    models = (ModelFacts("target", "big", TARGET), *facts)
    first, second = (
        decided(dict.fromkeys(ANSWERS, answer), name=kind, models=models, temperature=0.0)
        for kind, answer in (("early_exit", (3, 1.9)), ("eagle3", (2, 1.6)))
    )
    rows = (
        LeaderboardRow(rank=1, draft="early_exit", k=3, speedup=1.9),
        LeaderboardRow(rank=2, draft="eagle3", k=2, speedup=1.6),
    )
    boards = tuple(Leaderboard(rule, 0.0, (), rows) for rule in RULES)
    answers = [replace(one, source="replayed") for one in (*first.answers, *second.answers)]
    answers = [one for one in answers if one.draft == "eagle3" or "transformers" in one.servers]
    made = replace(first, answers=tuple(answers), leaderboards=boards)
    content = content_of(made)
    assert content.verdicts[0].startswith("Serve eagle3 at K=2: 1.60x")
    assert content.grid is not None
    engines, serve = (content.grid.column(name) for name in ("engines", "serve"))
    assert [(on.text, what.text) for on, what in zip(engines, serve, strict=True)] == [
        ("vLLM, SGLang, llama.cpp", "eagle3, K=2"),
        ("transformers", "early_exit, K=3"),
    ]
    missed = "Faster here, but not available on vLLM: early_exit at K=3 (1.90x)."
    assert missed in content.grid.notes
    snippets = lines(made)
    assert speculative_config(snippets["For"])["method"] == "eagle3"
    assert "assistant_early_exit" in snippets["transformers"].code
    assert snippets["mlx-lm"].code == ""


def test_another_look_up_than_this_runs_has_no_known_speedup() -> None:
    known = {title: snippet.notes[0] for title, snippet in of_kind("ngram").items()}
    for title, note in known.items():
        same_look_up = title.startswith(("vLLM", "transformers"))
        assert note.startswith("1.50x") == same_look_up, title


def test_a_run_that_decides_nothing_has_no_line() -> None:
    assert snippets_of(decided(command="profile")) == ()
    assert snippets_of(replace(decided(), answers=())) == ()

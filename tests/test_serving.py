"""Serving lines: valid in their own syntax, and honest about the rule they accept by."""

import ast
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from transformers import GenerationConfig, GenerationMixin

from harness.cli import compose
from harness.engine_facts.draft_kinds import kind_of, looks_up
from harness.engine_facts.engines import drafts_alike, spec_of, with_lines
from harness.engine_facts.tensorrt_llm import FILE
from harness.models.load import EMBEDDED
from harness.records import LONGEST_NGRAM, RULES
from harness.reporting import serving_commands
from harness.reporting.content import content_of
from harness.reporting.serving_commands import Snippet, snippets_of
from harness.summary import (
    Answer,
    Leaderboard,
    LeaderboardRow,
    ModelFacts,
    RoundTokens,
    RunFacts,
    SamplingFacts,
    Summary,
)

TARGET, DRAFT = "Qwen/Qwen3-4B", "my models/it's a draft"
# By rule, the tokens that a round emits
EMITS: dict[Any, float] = {"ratio": 3.0, "greedy_draft": 3.5, "exact_match": 2.5, "block": 3.2}


def decided(
    own: tuple[int, float] = (4, 1.6),
    emits: Mapping[Any, float] = EMITS,
    *,
    temperature: float = 1.0,
    sampling: dict[str, Any] | None = None,
    target: str = TARGET,
    draft: str = DRAFT,
    name: str = "small",
    loss: Any = "does_not_pay",
    p_min: float | None = None,
    **changes: Any,
) -> Summary:
    """A sweep of rule ratio with this K and speedup; a speedup below 1 is the decision `loss`."""
    models = (ModelFacts("target", "big", target), ModelFacts("draft", "small", draft))
    facts: dict[str, Any] = {
        "command": "sweep", "folder": "x", "status": "complete", "created_utc": None,
        "model": "big", "draft": "small", "models": models,
        "sampling": SamplingFacts(**sampling or {}), **changes,
    }  # fmt: skip
    kind = kind_of(name, facts["models"])
    k, speedup = own
    pays = speedup > 1
    of_own = Answer(
        "speculate" if pays else loss,
        name if pays else None,
        k if pays else 0,
        temperature,
        "all",
        speedup,
        None,
        None,
        "held_out_gain",
        {"draft": name, "k": k},
        engine="own",
        rule="ratio",
        source="measured",
        p_min=p_min,
    )
    others = (
        replace(
            of_own,
            decision="not_measured",
            draft=name,
            k=k,
            speedup=None,
            reason="not_timed",
            engine=server,
            timed=False,
            rule=spec.rule,
            source="replayed",
            rounds=(RoundTokens(k, emits[spec.rule], None, None, 2.1),),
            p_min=p_min if spec.stops_early else None,
        )
        for server, spec in with_lines().items()
        if spec.rule in emits
        and not facts.get("synthetic")
        and drafts_alike(server, kind, temperature)
    )
    return Summary(RunFacts(**facts), answers=(of_own, *others))


GREEDY = (2, 1.5)


def lines(summary: Summary) -> dict[str, Snippet]:
    return {snippet.title.split()[0].strip(","): snippet for snippet in snippets_of(summary)[::-1]}


def options(code: str) -> dict[str, str]:
    words = shlex.split(code)
    return {word: words[place + 1] for place, word in enumerate(words) if word.startswith("-")}


def speculative_config(snippet: Snippet) -> dict[str, Any]:
    return json.loads(options(snippet.code)["--speculative-config"])


def executed(code: str) -> dict[str, Any]:
    """The names that a snippet in Python leaves; its output is a text."""
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "max_new_tokens": 12, "pad_token_id": 0}
    scope: dict[str, Any] = {"inputs": {**inputs, "attention_mask": torch.ones(1, 3).long()}}
    exec(compile(ast.parse(code), "snippet", "exec"), scope)
    assert scope["output"].shape[1] > 3
    return scope


def test_the_first_line_is_vllms_after_the_command_that_measures_it() -> None:
    first, *_ = snippets_of(decided())
    assert first.title == "vLLM 0.33, K=4: not measured"
    assert shlex.split(first.measure) == [
        *("python", "-m", "harness.server", "engine=vllm", "model=hf", f"model.id={TARGET}"),
        *("draft=hf", f'draft.id="{DRAFT}"', "k=4", "temperature=1"),
    ]
    assert shlex.split(first.code)[:3] == ["vllm", "serve", TARGET]
    assert speculative_config(first) == {
        "method": "draft_model",
        "model": DRAFT,
        "num_speculative_tokens": 4,
    }
    assert first.notes[0] == (
        "It pays if drafting and checking 4 tokens takes less time than 3.50 ordinary tokens"
        " (here 2.10)."
    )
    sampled, *_ = snippets_of(decided(serve_on="vllm_probabilistic"))
    assert speculative_config(sampled)["draft_sample_method"] == "probabilistic"
    assert "less time than 3.00 ordinary tokens" in sampled.notes[0]
    assert "engine=vllm " in sampled.measure
    assert sampled.measure.endswith("decode.rule=ratio")


@pytest.mark.parametrize("server", with_lines())
def test_every_server_that_can_be_asked_for_has_its_line_first(server: str) -> None:
    first, *others = snippets_of(decided(GREEDY, temperature=0.0, serve_on=server))
    assert first.title.startswith(f"{spec_of(server).title} ")
    assert first.title.endswith("K=2: not measured")
    assert first.marked
    assert not any(other.marked for other in others)
    assert str(2) in first.code
    assert first.title not in {other.title for other in others}


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ("SGLang", {"--speculative-algorithm": "STANDALONE", "--speculative-num-steps": "4",
                    "--speculative-draft-model-path": DRAFT, "--speculative-eagle-topk": "1",
                    "--speculative-num-draft-tokens": "5"}),
        ("llama.cpp", {"--spec-type": "draft-simple", "--spec-draft-n-max": "4"}),
        ("mlx-lm", {"--model": TARGET, "--draft-model": DRAFT, "--num-draft-tokens": "4",
                    "--temp": "1"}),
    ],
)  # fmt: skip
def test_an_engine_drafts_the_k_that_pays_on_our_own_loop(
    engine: str, expected: dict[str, str]
) -> None:
    snippets = lines(decided())
    assert expected.items() <= options(snippets[engine].code).items()


def test_no_line_has_a_speedup_and_each_says_that_its_engine_was_not_measured() -> None:
    for made in (
        decided(),
        decided(GREEDY, temperature=0.0),
        decided(emits={"ratio": 3.0}),
        decided(GREEDY, synthetic=True),
        decided(p_min=0.3),
    ):
        for snippet in snippets_of(made):
            told = " ".join((snippet.title, *snippet.notes))
            assert not re.search(r"\d\.\d\dx", told)
            assert "measured" not in told.lower().replace("not measured", "")
            if "K=" in snippet.title:
                assert ": not measured" in snippet.title
                assert snippet.notes[0].startswith(("Not measured: ", "It pays if "))
    unknown = lines(decided(emits={"ratio": 3.0}))
    for engine in ("SGLang", "llama.cpp", "mlx-lm"):
        assert "did not replay its acceptance rule" in unknown[engine].notes[0]
    synthetic = lines(decided(GREEDY, synthetic=True))
    for engine in ("vLLM", "SGLang", "llama.cpp", "mlx-lm", "transformers"):
        assert "acceptance was set here" in synthetic[engine].notes[0]


@pytest.mark.parametrize(
    ("server", "starts"),
    [
        ("vllm", "engine=vllm model=hf"),
        ("sglang", "engine=sglang model=hf"),
        ("llamacpp", "engine=llamacpp model=hf"),
        ("mlx", "engine=mlx 'url=[PLAIN,SPECULATIVE]' model=hf"),
        ("transformers", None),
    ],
)
def test_the_command_that_measures_an_engine_is_one_that_the_server_command_takes(
    server: str, starts: str | None
) -> None:
    first, *_ = snippets_of(decided((3, 1.6), draft="org/draft", serve_on=server))
    if starts is None:
        assert first.measure == ""
        return
    assert first.measure.startswith(f"python -m harness.server {starts}")
    assert first.then == serving_commands.IF_IT_PAYS
    words = [word for word in shlex.split(first.measure)[3:] if not word.startswith("url=")]
    composed = compose("server", words)
    assert (composed.k, composed.temperature) == ([3], [1.0])
    assert (composed.model.id, composed.draft.id) == (TARGET, "org/draft")


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
    called: dict[str, Any] = {}
    generate: Any = vars(GenerationMixin)["generate"]

    def spy(*positional: Any, **named: Any) -> Any:
        called.update(named if not called else {})  # the draft generates within
        return generate(*positional, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GenerationMixin, "generate", spy)
        scope = executed(code)
    settings = scope["draft"].generation_config
    assert {name for name in vars(settings) if name[0] != "_"} <= set(vars(GenerationConfig()))
    assert settings.num_assistant_tokens == 4
    assert expected.items() <= called.items()
    processors = [type(processor).__name__ for processor in called.get("logits_processor", ())]
    assert processors == (["TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"]
                          if temperature == 0.7 else [])  # fmt: skip


def test_names_are_quoted_in_python_too() -> None:
    ast.parse(lines(decided(draft="a'b\\c"))["transformers"].code)


def test_a_threshold_is_served_where_the_engine_ends_drafts_as_the_harness_does() -> None:
    snippets = lines(decided(p_min=0.3))
    assert "K=4, p_min=0.3: not measured" in snippets["transformers"].title
    assert "assistant_confidence_threshold = 0.3" in snippets["transformers"].code
    assert "less time than 3.00 ordinary tokens" in snippets["transformers"].notes[0]
    for engine in ("vLLM", "SGLang", "llama.cpp", "mlx-lm"):
        assert "p_min" not in snippets[engine].title
        assert "p-min" not in snippets[engine].code


def test_the_sampling_of_the_run_is_on_the_line_or_asked_of_requests() -> None:
    sampling = {"top_k": 40, "top_p": 0.9}
    snippets = lines(decided(GREEDY, sampling=sampling, temperature=0.7))
    given = options(snippets["mlx-lm"].code)
    assert (given["--temp"], given["--top-k"], given["--top-p"]) == ("0.7", "40", "0.9")
    for engine in ("vLLM", "SGLang", "llama.cpp"):
        (asked,) = [note for note in snippets[engine].notes if "requests" in note]
        assert "temperature 0.7, top_k 40 and top_p 0.9" in asked


@pytest.mark.parametrize("loss", ["does_not_pay", "undecided"])
def test_the_target_alone_is_served_until_an_engine_was_measured(loss: str) -> None:
    snippets = snippets_of(decided((1, 0.9), loss=loss))
    engines = [spec for spec in with_lines().values() if spec.variant_of is None]
    for snippet, spec in zip(snippets, engines, strict=True):
        assert snippet.title.startswith(spec.title)
        measured = spec.client is not None
        assert (" k=1 " in snippet.measure) == measured
        # The title is that of the command which measures; the line below it has no draft
        end, then = (
            ("K=1: not measured", "Until then, without a draft:")
            if measured
            else (", without a draft", "")
        )
        assert snippet.title.endswith(end)
        assert snippet.then == then
    assert snippets[0].code == f"vllm serve {TARGET}"
    first, *_ = snippets_of(decided((1, 0.9), serve_on="sglang"))
    assert options(first.code) == {"-m": "sglang.launch_server", "--model-path": TARGET}


def test_toys_and_dummies_are_called_so() -> None:
    toy = decided(target="embedded:tiny")
    dummy = decided(models=(ModelFacts("target", "big", TARGET, weights="dummy"),))
    for summary in (toy, dummy):
        assert serving_commands.TOYS in snippets_of(summary)[0].notes
    assert serving_commands.TOYS not in snippets_of(decided())[0].notes


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
    made = decided((3, 1.5), name=kind, models=models, temperature=temperature, sampling=sampling)
    return {snippet.title: snippet for snippet in snippets_of(made)}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("kind", ["ngram", "early_exit"])
def test_the_transformers_snippets_of_other_kinds_run(kind: str, temperature: float) -> None:
    sampling = {"top_k": 40} if temperature else {}
    snippets = of_kind(kind, temperature, str(EMBEDDED / "tiny"), sampling)
    (code,) = [snippet.code for snippet in snippets.values() if snippet.language == "python"]
    scope = executed(code)
    if not temperature:
        plain = scope["model"].generate(
            **scope["inputs"],
            do_sample=False,
            assistant_early_exit=None,
            prompt_lookup_num_tokens=None,
        )
        assert scope["output"].tolist() == plain.tolist()


def test_heads_sample_where_vllm_is_asked_to_and_look_ups_have_one_line_there() -> None:
    for kind, lines_of_vllm in (("eagle3", 3), ("mtp", 3), ("ngram", 1)):
        codes = [s.code for s in of_kind(kind).values() if s.code.startswith("vllm")]
        assert len(codes) == lines_of_vllm
        assert [code for code in codes if '"draft_sample_method":"probabilistic"' in code] == codes[
            1:
        ]
        blocks = [code for code in codes if '"rejection_sample_method":"block"' in code]
        assert blocks == codes[2:]


def test_rules_have_lines_where_a_flag_makes_an_engine_accept_by_them() -> None:
    codes = {snippet.title: snippet.code for snippet in of_kind("eagle3").values()}
    flags = ("--speculative-use-rejection-sampling", "--speculative-use-block-verification")
    for flag in flags:
        (code,) = (code for title, code in codes.items() if flag in title)
        assert [each for each in flags if each in code] == [flag]
    of_model = snippets_of(decided())
    assert not any("block" in f"{snippet.title} {snippet.name}" for snippet in of_model)
    assert any("on a CPU and XPU argmaxes" in " ".join(snippet.notes) for snippet in of_model)


@pytest.mark.parametrize(
    ("kind", "method", "elsewhere"),
    [
        ("eagle", {"model": DRAFT}, {"EAGLE"}),
        ("eagle3", {"model": DRAFT}, {"EAGLE3", "draft-eagle3"}),
        ("peagle", {"method": "eagle3", "model": DRAFT, "parallel_drafting": True}, set()),
        ("pard", {"method": "draft_model", "model": DRAFT, "parallel_drafting": True},
         {"decoding_type: PARD"}),
        ("mtp", {}, {"EAGLE", "draft-mtp"}),
        ("medusa", {"model": DRAFT}, set()),
        ("dflash", {"model": DRAFT}, {"DFLASH", "num-draft-tokens 4", "draft-dflash"}),
        ("dspark", {"model": DRAFT},
         {"DSPARK", "dspark-block-size 3", "num-draft-tokens 4", "draft-dspark"}),
        ("ngram", {"prompt_lookup_max": LONGEST_NGRAM, "prompt_lookup_min": 1},
         {"NGRAM", "ngram-simple", "prompt_lookup_num_tokens=3"}),
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
    assert ("enable_adaptive_verification" in " ".join(first.notes)) == (kind == "dspark")
    code = " ".join(snippet.code for snippet in others)
    assert {word for word in elsewhere if word in code} == elsewhere
    lines_of_mlx = [snippet for snippet in others if snippet.title.startswith("mlx-lm")]
    assert [snippet.code for snippet in lines_of_mlx] == [""]
    assert "Not available here" in lines_of_mlx[0].notes[0]
    for snippet in others:
        if snippet.language == "python" and snippet.code:
            ast.parse(snippet.code)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("model", {"decoding_type": "Draft_Target", "speculative_model": DRAFT}),
        ("eagle3", {"decoding_type": "Eagle3", "speculative_model": DRAFT}),
        ("mtp", {"decoding_type": "MTP"}),
        ("dflash", {"decoding_type": "DFlash", "speculative_model": DRAFT}),
        ("pard", {"decoding_type": "PARD", "speculative_model": DRAFT}),
        ("ngram", {"decoding_type": "NGram", "max_matching_ngram_size": LONGEST_NGRAM}),
    ],
)
def test_tensorrt_llm_is_started_with_a_file_of_its_settings(
    kind: str, config: dict[str, Any]
) -> None:
    snippets = of_kind(kind)
    (code,) = [each.code for title, each in snippets.items() if title.startswith("TensorRT-LLM")]
    _, written, command = re.split(r"<<'END'\n|END\n", code)
    said = yaml.safe_load(written)
    settings = said.pop("speculative_config")
    assert settings == {"max_draft_len": 3, **config}
    assert said == ({"disable_overlap_scheduler": True} if kind in ("model", "ngram") else {})
    assert command == f"trtllm-serve {TARGET} --config {FILE}"


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


def test_an_engine_without_the_best_kind_has_the_line_of_another_draft() -> None:
    kinds: Any = ("early_exit", "eagle3")
    facts = [ModelFacts(kind, kind, f"org/{kind}", kind=kind, layers=2) for kind in kinds]
    models = (ModelFacts("target", "big", TARGET), *facts)
    first, second = (
        decided((k, 1.9), name=kind, models=models, temperature=0.0)
        for kind, k in (("early_exit", 3), ("eagle3", 2))
    )
    rows = (
        LeaderboardRow(rank=1, draft="early_exit", k=3, speedup=1.9),
        LeaderboardRow(rank=2, draft="eagle3", k=2, speedup=1.6),
    )
    boards = tuple(Leaderboard(rule, 0.0, (), rows) for rule in RULES)
    others = [answer for answer in second.answers if answer.engine not in ("own", "transformers")]
    made = replace(first, answers=(*first.answers, *others), leaderboards=boards)
    content = content_of(made)
    assert "Use early_exit with K=3: 1.90 times as fast" in content.verdicts[0]
    assert content.grid is not None
    engines, serve = (content.grid.column(name) for name in ("engines", "serve"))

    def alike(rule: str, kind: str) -> str:
        specs = [spec for spec in with_lines().values() if spec.rule == rule]
        return ", ".join(spec.in_rows for spec in specs if kind in spec.alike)

    assert [(on.text, what.text) for on, what in zip(engines, serve, strict=True)] == [
        ("the harness's loop", "early_exit, K=3"),
        (alike("ratio", "early_exit"), "K=3 if round < 3.00 tokens"),
        (alike("greedy_draft", "eagle3"), "eagle3, K=2 if round < 3.50 tokens"),
        (alike("ratio", "eagle3"), "eagle3, K=2 if round < 3.00 tokens"),
        (alike("block", "eagle3"), "eagle3, K=2 if round < 3.20 tokens"),
    ]
    snippets = lines(made)
    assert speculative_config(snippets["vLLM"])["method"] == "eagle3"
    assert "no early exit" in snippets["vLLM"].notes[0]
    assert "assistant_early_exit" in snippets["transformers"].code
    assert snippets["mlx-lm"].code == ""
    asked = content_of(replace(made, run=replace(made.run, serve_on="vllm")))
    assert asked.grid is not None
    missed = "Faster here, but not available on vLLM: early_exit at K=3."
    assert missed in asked.grid.notes


def test_another_look_up_than_this_runs_emits_no_known_tokens() -> None:
    alike = tuple(spec.title for spec in with_lines().values() if "ngram" in spec.alike)
    assert alike
    for title, snippet in of_kind("ngram").items():
        assert ("ordinary tokens" in snippet.notes[0]) == title.startswith(alike), title


def test_a_run_that_decides_nothing_has_no_line() -> None:
    assert content_of(decided(command="profile")).snippets == ()
    assert snippets_of(replace(decided(), answers=())) == ()

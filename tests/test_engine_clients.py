"""vLLM's, SGLang's and OpenAI-compatible servers, by servers that answer as those do.

The answers are those of vLLM 0.32 as it was run, and of the documentation of the others. vLLM
itself runs in test_servers_vllm.py.
"""

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from runs import needs_llamacpp, sample
from server_answers import (
    AFTER,
    BEFORE,
    LLAMACPP,
    LLAMACPP_TIMES,
    PLAIN_META,
    SPECULATIVE,
    TIMES,
    TOKENS,
    USAGE,
    completion,
    in_turn,
    llamacpp_answers,
    page,
    sglang_answers,
    vllm_answers,
)
from stand_in_server import StandIn

from harness.analysis.setup import Setup
from harness.cli import compose
from harness.commands import server as server_command
from harness.commands.run_lifecycle import create, load_prompts
from harness.commands.server_requests import Workload, open_workload
from harness.commands.server_start import note_engine, started
from harness.commands.server_visits import measure
from harness.commands.tasks import Role
from harness.config import ModelConf
from harness.decoding.sampling import SamplingParameters
from harness.engine_facts.engines import ENGINES
from harness.engine_facts.llamacpp import SPEC_TYPES, drafting_flags
from harness.engines.adapters import ToServe, adapter_of
from harness.engines.http_client import HttpClient, WantedModel
from harness.engines.http_server import (
    AttachedEngine,
    CardMemory,
    HttpServer,
    StartedEngine,
    served_model,
)
from harness.engines.llamacpp import LlamaCpp, LlamaCppServer
from harness.engines.openai import OpenAiServer
from harness.engines.protocol import (
    Asked,
    Completion,
    Engine,
    EngineFacts,
    RefusedError,
    RequestFailedError,
    ServerDiedError,
)
from harness.engines.sglang import Sglang, SglangServer
from harness.engines.vllm import Vllm, VllmServer, rounds_of
from harness.models.load import load_vocabulary
from harness.records import Round, Rule, ServerCommand, UserError
from harness.storage import RunFolder
from harness.storage import load as load_run

GREEDY = SamplingParameters(0.0)
# Of every limit on time: a request has a second
QUICK = 1 / 120


Start = Callable[[Mapping[str, Any]], StandIn]


def attached(
    server: Callable[..., HttpServer], url: str, k: int = 2, *, key: str | None = None, **how: Any
) -> AttachedEngine:
    """A server that runs, at its K."""
    return AttachedEngine({k: url}, partial(server, **how), key, timeout_factor=QUICK)


def ask(engine: Engine, k: int = 2, sampling: SamplingParameters = GREEDY) -> Completion:
    return engine.open(k).generate(Asked([1, 2, 3], sampling, seed=7, budget=6))


# ---- vLLM ----------------------------------------------------------------------------------------


def test_vllms_counts_and_times_are_read_from_its_answer(stand_in: Start) -> None:
    server = stand_in(vllm_answers())
    engine = attached(VllmServer, server.url)
    done = ask(engine)
    assert (done.rounds, done.drafted, done.accepted) == (3, 6, 2)
    assert (done.prefill_s, done.decode_s) == (0.002, 0.03)
    assert (done.tokens, done.returned, done.stop_reason) == (tuple(TOKENS), 6, "budget")
    assert done.cpu_s is None
    assert engine.open(2).facts.rule == "greedy_draft"
    assert attached(VllmServer, server.url, rule="ratio").open(2).facts.rule == ("ratio")


def test_a_server_whose_answers_have_counts_is_not_asked_for_its_sums_again(
    stand_in: Start,
) -> None:
    asked: list[Any] = []
    server = stand_in(vllm_answers(**{"/metrics": lambda body: asked.append(body) or page(BEFORE)}))
    running = attached(VllmServer, server.url).open(2)
    for _ in range(3):
        assert running.generate(Asked([1], GREEDY, 1, 6)).rounds == 3
    assert len(asked) == 1
    unlisted = stand_in(vllm_answers(**{"/metrics": 404}))
    assert ask(attached(VllmServer, unlisted.url)).rounds == 3


@pytest.mark.parametrize(
    ("metrics", "pages", "k", "counts", "times"),
    [
        (None, (BEFORE, AFTER), 2, (3, 6, 2), (0.002, 0.03)),
        (None, (BEFORE, AFTER), 0, (None, None, None), (0.002, 0.03)),
        # The page is a little late
        (None, (BEFORE, BEFORE, BEFORE, AFTER), 2, (3, 6, 2), (0.002, 0.03)),
        # Others were served meanwhile: nothing is known, nothing is guessed
        (
            None,
            (BEFORE, {**AFTER, "vllm:generation_tokens_total": 107.0}),
            2,
            (None, None, None),
            (None, None),
        ),
        (TIMES, (BEFORE, AFTER), 2, (3, 6, 2), (0.002, 0.03)),
        ({"speculative_decoding": SPECULATIVE}, (BEFORE, AFTER), 2, (3, 6, 2), (0.002, 0.03)),
    ],
)
def test_what_an_answer_lacks_is_read_from_the_servers_sums(
    stand_in: Start,
    metrics: Any,
    pages: tuple[Mapping[str, float], ...],
    k: int,
    counts: tuple[int | None, ...],
    times: tuple[float | None, ...],
) -> None:
    if k == 0:
        names = [name for name in BEFORE if "spec_decode" in name]
        pages = tuple({n: v for n, v in each.items() if n not in names} for each in pages)
    answers = {"/v1/completions": completion(metrics), "/metrics": in_turn(*pages)}
    done = ask(attached(VllmServer, stand_in(vllm_answers(**answers)).url, k), k)
    assert (done.rounds, done.drafted, done.accepted) == counts
    assert (done.prefill_s, done.decode_s) == (
        pytest.approx(times) if times[0] is not None else times
    )


STEPS = {**SPECULATIVE, "per_step_accepted": [1, 0, 2], "per_step_drafted": [2, 2, 2]}


@pytest.mark.parametrize(
    ("counts", "rounds"),
    [
        # The last one had three tokens to emit, and the budget two left
        (STEPS, [((6, 7), 1, 2, "rejected"), ((8,), 0, 2, "rejected"), ((9, 10), 2, 2, "cut")]),
        (
            {**STEPS, "per_step_accepted": [2, 1], "per_step_drafted": [2, 2]},
            [((6, 7, 8), 2, 2, "bonus"), ((9, 10), 1, 2, "rejected")],
        ),
        (SPECULATIVE, None),
        # Fewer tokens than returned, and more rounds than those can be of
        ({**STEPS, "per_step_accepted": [0, 0, 0]}, None),
        ({**STEPS, "per_step_accepted": [2, 2, 2]}, None),
    ],
)
def test_the_rounds_of_a_text_follow_from_what_each_step_accepted(
    counts: dict[str, Any], rounds: list[tuple[Any, ...]] | None
) -> None:
    expected = None if rounds is None else tuple(Round(*each) for each in rounds)
    assert rounds_of(TOKENS, counts) == expected


@pytest.mark.parametrize(
    ("steps", "reported", "rounds", "each"),
    [
        # Two rounds drafted; two more were plain steps
        (5.0, {**SPECULATIVE, "num_spec_steps": 2, "num_draft_tokens": 3}, 4, None),
        # Nothing was found in the whole text
        (6.0, {**SPECULATIVE, "num_spec_steps": 0, "num_draft_tokens": 0}, 5, None),
        (4.0, STEPS, 3, 3),
        # No such counter
        (None, STEPS, None, None),
    ],
)
def test_the_rounds_of_a_look_up_are_the_servers_steps_less_the_prefills(
    stand_in: Start, steps: float | None, reported: Any, rounds: int | None, each: int | None
) -> None:
    name = "vllm:iteration_tokens_total_count"
    before, after = BEFORE, AFTER
    if steps is not None:
        before, after = {**BEFORE, name: 30.0}, {**AFTER, name: 30.0 + steps}
    answers = {
        "/v1/completions": completion({**TIMES, "speculative_decoding": reported}),
        "/metrics": in_turn(before, after),
    }
    done = ask(attached(VllmServer, stand_in(vllm_answers(**answers)).url, kind="ngram"))
    assert (done.rounds, done.drafted) == (rounds, reported["num_draft_tokens"])
    assert (None if done.steps is None else len(done.steps)) == each


def test_a_servers_draft_takes_of_a_requests_sampling_the_temperature_alone() -> None:
    asked = SamplingParameters(0.7, 5, 0.9, 0.1, 1.2)
    for name, sampling in (
        ("own", asked),
        ("vllm", SamplingParameters(0.7)),
        ("sglang", SamplingParameters(0.7)),
        ("llamacpp", SamplingParameters(0.7, 10)),
    ):
        assert EngineFacts(ENGINES[name], "1", None).draft_sampling(asked) == sampling


VLLM_REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"/v1/completions": {"id": 1}}, 2, "its answer has no 'choices'; is it vLLM's server"),
    ({"/v1/completions": completion(choice={"text": "abc"})}, 2, "its answer has no 'token_ids'"),
    ({}, 0, "it drafts, and was given as the server that decodes plainly"),
    ({}, 4, "it drafts 2 tokens per round, not k=4"),
    (
        {
            "/v1/completions": completion(),
            "/metrics": in_turn(
                {"vllm:generation_tokens_total": 0.0}, {"vllm:generation_tokens_total": 6.0}
            ),
        },
        2,
        "it drafted nothing; k=2 needs --speculative-config",
    ),
    (
        {"/metrics": 404, "/v1/completions": completion()},
        2,
        "no counters in its answers or at /metrics; start it with",
    ),
    ({"/metrics": "", "/v1/completions": completion(TIMES)}, 2, "no counters in its answers"),
    ({"/v1/completions": 400}, 2, "status 400: request exceeds the context size"),
    ({"/v1/models": {"data": []}}, 2, "it serves no model"),
    ({"/version": 404}, 2, "status 404"),
    ({"/version": {}}, 2, "not vLLM's server"),
]
SGLANG_REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"/generate": {"text": "abc"}}, 2, "its answer has no 'output_ids'"),
    ({}, 0, "it drafts, and was given as the server that decodes plainly"),
    ({}, 4, "it drafts 2 tokens per round, not k=4"),
    (
        {
            "/generate": {"output_ids": TOKENS, "meta_info": PLAIN_META},
            "/server_info": {"version": "0.5.23", "speculative_num_steps": None},
        },
        4,
        "it drafted nothing; k=4 needs --speculative-algorithm",
    ),
    (
        {"/generate": {"output_ids": TOKENS, "meta_info": PLAIN_META}},
        2,
        "no counters in its answers, though it drafts; release 0.5.11 or later has them",
    ),
    ({"/server_info": {"status": "ready"}}, 2, "not SGLang's server"),
]
LLAMACPP_REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"/completion": {**LLAMACPP, "timings": None}}, 2, "its answer has no 'timings'"),
    ({"/completion": {**LLAMACPP, "tokens": None}}, 2, "its answer has no 'tokens'"),
    ({"/completion": {**LLAMACPP, "tokens": []}}, 2, "an answer without tokens"),
    ({"/completion": {**LLAMACPP, "timings": LLAMACPP_TIMES}}, 2, "it drafted nothing; k=2 needs"),
    ({}, 0, "it drafts, and was given as the server that decodes plainly"),
    (
        {"/completion": {**LLAMACPP, "truncated": True}},
        2,
        "its context is too small for prompt and 6 tokens",
    ),
    ({"/completion": 400}, 2, "the server refuses, status 400: request exceeds the context size"),
    ({"/props": {"model": "other"}}, 2, r"not llama\.cpp's server"),
]


@pytest.mark.parametrize(
    ("client", "answers", "k", "message"),
    [
        *((VllmServer, vllm_answers(**answers), *rest) for answers, *rest in VLLM_REFUSED),
        *((SglangServer, sglang_answers(**answers), *rest) for answers, *rest in SGLANG_REFUSED),
        *((LlamaCppServer, llamacpp_answers(**each), *rest) for each, *rest in LLAMACPP_REFUSED),
    ],
)
def test_a_server_that_does_not_fit_is_refused_in_one_line(
    stand_in: Start, client: Any, answers: dict[str, Any], k: int, message: str
) -> None:
    server = stand_in(answers)
    with pytest.raises(UserError, match=message) as error:
        ask(attached(client, server.url, k), k)
    assert "\n" not in str(error.value)
    assert server.url in str(error.value)


def test_a_request_sets_every_sampling_parameter_of_the_server(stand_in: Start) -> None:
    server = stand_in(vllm_answers())
    ask(attached(VllmServer, server.url))
    ask(attached(VllmServer, server.url), sampling=SamplingParameters(0.7, 5, 0.9, 0.1, 1.2))
    plain, sampled = server.asked
    assert plain["prompt"] == [1, 2, 3]
    assert (plain["model"], plain["max_tokens"], plain["seed"]) == ("m", 6, 7)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    assert [plain[name] for name in names] == [0.0, 0, 1.0, 0.0, 1.0]
    assert [sampled[name] for name in names] == [0.7, 5, 0.9, 0.1, 1.2]


# ---- SGLang --------------------------------------------------------------------------------------


def test_sglangs_counts_are_read_and_its_decoding_is_not_guessed(stand_in: Start) -> None:
    server = stand_in(sglang_answers())
    done = ask(attached(SglangServer, server.url), sampling=SamplingParameters(0.7, min_p=0.1))
    assert (done.rounds, done.drafted, done.accepted) == (3, 6, 2)
    assert (done.tokens, done.stop_reason) == (tuple(TOKENS), "eos")
    assert (done.prefill_s, done.decode_s) == (None, None)
    (asked,) = server.asked
    assert asked["input_ids"] == [1, 2, 3]
    settings = asked["sampling_params"]
    assert (settings["temperature"], settings["top_k"], settings["min_p"]) == (0.7, -1, 0.1)


def test_llamacpps_counts_and_times_are_read_from_its_answer(stand_in: Start) -> None:
    done = ask(attached(LlamaCppServer, stand_in(llamacpp_answers()).url))
    assert (done.rounds, done.drafted, done.accepted) == (1, 8, 4)
    assert (done.prefill_s, done.decode_s, done.cpu_s) == (0.002, 0.03, None)
    plain_answer = {**LLAMACPP, "timings": LLAMACPP_TIMES}
    server = stand_in(llamacpp_answers(**{"/completion": plain_answer}))
    plain = ask(attached(LlamaCppServer, server.url, 0), 0)
    assert (plain.rounds, plain.drafted, plain.accepted) == (None, None, None)


# ---- texts and times only ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_vocabulary(ModelConf(name="tiny", id="embedded:tiny")).tokenizer


@pytest.mark.parametrize(
    ("name", "rule"), [("openai", None), ("mlx", "exact_match"), ("tensorrt_llm", "greedy_draft")]
)
def test_an_endpoint_that_completes_texts_is_timed_and_counts_nothing(
    stand_in: Start, tokenizer: Any, name: str, rule: str | None
) -> None:
    text = "the river ran"
    answer = completion(choice={"text": text, "finish_reason": "stop"})
    server = stand_in({"/v1/models": {"data": [{"id": "m"}]}, "/v1/completions": answer})
    engine = attached(OpenAiServer, server.url, tokenizer=tokenizer, spec=ENGINES[name])
    prompt = tokenizer("Once upon a time")["input_ids"]
    done = engine.open(2).generate(Asked(prompt, GREEDY, 7, 6))
    assert (done.rounds, done.drafted, done.accepted) == (None, None, None)
    assert (done.prefill_s, done.decode_s, done.cpu_s) == (None, None, None)
    assert done.request_s > 0
    # By its own count it has an end of text besides
    assert (tokenizer.decode(done.tokens), done.returned, done.stop_reason) == (text, 6, "eos")
    facts = engine.open(2).facts
    assert (facts.rule, facts.spec.counting) == (rule, None)
    (asked,) = server.asked
    assert asked["prompt"] == "Once upon a time"
    assert asked.get("num_draft_tokens") == (2 if name == "mlx" else None)
    assert asked.get("model") == (None if name == "mlx" else "m")  # another would be loaded


@pytest.mark.parametrize(
    ("name", "sampling", "refused"),
    [
        ("openai", SamplingParameters(1.0, top_k=5), "decode.top_k: engine=openai"),
        ("openai", SamplingParameters(1.0, min_p=0.1), "decode.min_p: engine=openai"),
        ("mlx", SamplingParameters(1.0, 5, min_p=0.1), None),
        (
            "mlx",
            SamplingParameters(1.0, repetition_penalty=1.1),
            "decode.repetition_penalty: engine=mlx",
        ),
    ],
)
def test_a_setting_that_an_endpoint_lacks_is_refused(
    stand_in: Start, tokenizer: Any, name: str, sampling: SamplingParameters, refused: str | None
) -> None:
    server = stand_in({"/v1/models": {"data": [{"id": "m"}]}, "/v1/completions": completion()})
    engine = attached(OpenAiServer, server.url, tokenizer=tokenizer, spec=ENGINES[name])
    if refused is None:
        ask(engine, sampling=sampling)
        assert (server.asked[0]["top_k"], server.asked[0]["min_p"]) == (5, 0.1)
    else:
        with pytest.raises(UserError, match=refused):
            ask(engine, sampling=sampling)


# ---- all of them ---------------------------------------------------------------------------------


def test_another_model_behind_an_address_is_refused(stand_in: Start, tokenizer: Any) -> None:
    text = "the river ran"
    ids = tokenizer(text)["input_ids"]
    usage = {**USAGE, "prompt_tokens": len(ids)}
    for fits in (True, False):
        said = text if fits else "der Fluss"
        counted = usage if fits else {**USAGE, "prompt_tokens": len(ids) + 1}
        answers = {
            "/detokenize": {"prompt": said, "text": said, "content": said},
            "/v1/completions": {**completion(), "usage": counted},
        }
        url = stand_in({**sglang_answers(), **vllm_answers(), **llamacpp_answers(**answers)}).url
        for engine in (
            attached(VllmServer, url),
            attached(SglangServer, url),
            attached(LlamaCppServer, url),
            attached(OpenAiServer, url, tokenizer=tokenizer),
        ):
            server = engine.open(2)
            if fits:
                server.check_vocabulary(ids, text)
            else:
                with pytest.raises(UserError, match="another model than model=, by its tokens"):
                    server.check_vocabulary(ids, text)


def test_an_address_may_end_as_openais_clients_write_it(stand_in: Start) -> None:
    server = stand_in(vllm_answers())
    assert ask(attached(VllmServer, f"{server.url}/v1/")).rounds == 3


def test_an_api_key_is_sent_and_never_shown(stand_in: Start, tokenizer: Any) -> None:
    how: dict[Callable[..., HttpServer], dict[str, Any]] = {
        VllmServer: {},
        SglangServer: {},
        OpenAiServer: {"tokenizer": tokenizer},
    }
    for client, more in how.items():
        server = stand_in({**vllm_answers(), **sglang_answers()})
        running = attached(client, server.url, key="the-key", **more)
        ask(running)
        assert server.keys == {"Bearer the-key"}
        assert "the-key" not in repr(running)


PROGRAM = """#!{python}
import json, os, sys, time
sys.path.insert(0, {tests!r})
from stand_in_server import StandIn
arguments = sys.argv[1:]
with open({started!r}, "w") as file:
    json.dump([arguments, dict(os.environ)], file)
StandIn(json.loads({answers!r}), int(arguments[arguments.index("--port") + 1]))
time.sleep(60)
"""


def program_of(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a server that answers as this engine does on PATH; it writes its command line here."""
    started, program = folder / "started.json", folder / name
    program.write_text(
        PROGRAM.format(
            python=sys.executable,
            tests=str(Path(__file__).parent),
            started=str(started),
            answers=json.dumps(vllm_answers() if name == "vllm" else sglang_answers()),
        )
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return started


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_server_on_path_is_started_with_its_flags_and_ended(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = (
        Vllm("target", "draft", tmp_path, 100, threads=1, more_flags=("--enforce-eager",))
        if name == "vllm"
        else Sglang("target", "draft", tmp_path, 100, more_flags=("--enforce-eager",))
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=f"engine={name}: no {name} on PATH"):
        engine.open(2)
    started = program_of(name, tmp_path, monkeypatch)
    with engine.open(2) as server:
        done = server.generate(Asked([1, 2, 3], GREEDY, 7, 6))
        arguments, environment = json.loads(started.read_text())
        process = psutil.Process(server.process_id)
    assert (done.rounds, done.drafted) == (3, 6)
    if sys.platform == "linux":
        assert done.cpu_s is not None
    assert not process.is_running()
    assert arguments[: len(engine.flags(2))] == engine.flags(2)
    assert {"serve", "target", "--enforce-eager", "--host", "127.0.0.1"} <= set(arguments)
    assert engine.environment().items() <= environment.items()
    assert os.environ["PATH"] == str(tmp_path)


def test_a_server_that_is_not_ready_in_time_is_ended_with_its_log_in_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\necho 'Loading weights: 3 of 9 files'\nsleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(Vllm, "ready_s", 0.5)
    engine = Vllm("t", "d", tmp_path, 100)
    with pytest.raises(UserError) as error:
        engine.open(2)
    for part in ("vLLM at k=2: ", "waited 0 s", "3 of 9 files", str(engine.log(2))):
        assert part in str(error.value)


def typed(folder: Path, *words: str, k: int = 2, scored_in: str | None = None) -> ServerCommand:
    """The command of a server, from the words of the command line."""
    config = compose("server", [*words])
    start = adapter_of(config).start
    assert start is not None
    made = start(ToServe(config, folder, 100, 1, None, scored_in=scored_in)).command(k)
    assert made is not None
    return made


@pytest.mark.parametrize(("engine", "k", "refused"), [("vllm", 3, 3), ("vllm", 4, None),
                                                      ("sglang", 3, None)])  # fmt: skip
def test_a_k_that_is_no_multiple_of_the_mtp_layers_is_refused_for_vllm(
    engine: str, k: int, refused: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"num_nextn_predict_layers": 2}')
    words = [f"engine={engine}", "model=hf", f"model.id={tmp_path}", "draft=mtp", f"k=[1,2,{k}]"]
    asked = compose("server", [*words, "dry_run=true"])
    with nullcontext() if refused is None else pytest.raises(UserError, match=f"k={refused}: "):
        server_command.check_mtp(asked, adapter_of(asked))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("other", [True, False])
def test_mtp_layers_of_another_checkpoint_are_given_to_the_server(
    tmp_path: Path, engine: str, other: bool
) -> None:
    layers = ["draft.id=ORG/OTHER"] if other else []
    command = typed(tmp_path, f"engine={engine}", "model=qwen3_4b", "draft=mtp", *layers).line
    assert ("ORG/OTHER" in command) == other
    assert command.count("Qwen/Qwen3-4B") == 1


@pytest.mark.parametrize("draft", ["qwen3_0_6b", "mtp"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_revisions_are_given_to_the_server(tmp_path: Path, engine: str, draft: str) -> None:
    words = ["model=qwen3_4b", f"draft={draft}", "model.revision=one", "draft.revision=other"]
    command = shlex.split(typed(tmp_path, f"engine={engine}", *words).line)
    assert command[command.index("--revision") + 1] == "one"
    own_layers = draft == "mtp"  # which are in the target's revision
    if engine == "vllm":
        speculative = json.loads(command[command.index("--speculative-config") + 1])
        assert speculative["revision"] == ("one" if own_layers else "other")
    else:
        assert ("other" in command) != own_layers


# Of every engine: flags of the pair, which production keeps
PRODUCTION: dict[type[StartedEngine], set[str]] = {
    Vllm: {"--dtype", "--speculative-config"},
    Sglang: {"--dtype", "--speculative-algorithm", "--speculative-num-steps"},
    LlamaCpp: {"--spec-draft-model", "--spec-draft-n-max"},
}


@pytest.mark.parametrize("made", PRODUCTION)
def test_the_line_for_production_has_the_users_settings_and_none_of_the_measurements(
    made: type[StartedEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, kept = made.spec.name, PRODUCTION[made]
    left_out = {*made.measuring, *made.spec.in_production}
    monkeypatch.setattr("harness.engines.llamacpp.program", lambda: [sys.executable, "-m", "wheel"])
    prefix = made.variables[0]
    for variable, value in (
        ("BACKEND", "FLASH ATTN"),
        ("API_KEY", "hidden"),
        ("HF_TOKEN", "hidden"),
        ("STATS_SERVER", "https://me:hidden@host"),
        ("PORT", "8123"),
    ):
        monkeypatch.setenv(f"{prefix}{variable}", value)
    files = [tmp_path / role for role in ("target", "draft")]
    for file in files:
        file.write_bytes(b"GGUF")
    flag = sorted(left_out)[0]  # the user's own stays, even if the measurement has it too
    card = CardMemory(60 * GB, 80 * GB, 1 * GB)
    more: Any = {"threads": 2, "memory": card, "more_flags": (flag, "777", "--mine")}
    command = made(*files, tmp_path, 100, **more).command(3)
    words, measured = shlex.split(command.production), shlex.split(command.line)
    assert words[0] == measured[0] == f"{prefix}BACKEND=FLASH ATTN"
    assert kept <= set(words)
    assert left_out & set(words) == {flag}
    assert words[-3:] == [flag, "777", "--mine"]
    assert kept | left_out <= set(measured)
    assert measured.count(flag) == 2
    for line in (command.line, command.production):
        assert not any(word in line for word in ("hidden", "8123", "8765"))
    assert not any("THREADS" in word for word in words)
    binary = words[1 : 1 + words[1:].index(next(w for w in words if w.startswith("--")))]
    assert binary[0] == {"llamacpp": "llama-server"}.get(name, name)
    assert (command.k, command.context_tokens) == (3, 100 + 3 + 8)
    assert command.weights_bytes == (8 if name == "llamacpp" else None)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("asked", "scored_in", "served"),
    [
        ("auto", "float32", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", None, "bfloat16"),
        ("auto", None, "auto"),
    ],
)
def test_a_server_is_told_the_dtype_that_is_replayed(
    tmp_path: Path, engine: str, asked: str, scored_in: str | None, served: str
) -> None:
    words = [f"engine={engine}", f"model.dtype={asked}"]
    for k in (0, 2):
        command = typed(tmp_path, *words, k=k, scored_in=scored_in)
        for line in (command.line, command.production):
            flags = shlex.split(line or "")
            assert flags[flags.index("--dtype") + 1] == served


GB = 10**9
# The flag for a server's share of a card
SHARES = {"vllm": "--gpu-memory-utilization", "sglang": "--mem-fraction-static"}


@pytest.mark.parametrize(("slots", "tokens"), [(1, 2048), (8, 4096), (64, 8192)])
def test_sglang_prefills_as_many_tokens_at_once_as_there_is_memory_left_for(
    slots: int, tokens: int, tmp_path: Path
) -> None:
    """Its default on a large card is 8192, whatever is asked of it."""
    engine = Sglang("t", "d", tmp_path, 400, slots=slots)
    flags = engine.flags(4)
    assert flags[flags.index("--chunked-prefill-size") + 1] == str(tokens)
    # What SGLang's own rule gives a token of a prefill
    least = Sglang("t", "d", tmp_path, 1, slots=slots).spare_bytes(4)
    assert engine.spare_bytes(4) - least == (tokens - 2048) * 1.5 * 2**20


@pytest.mark.parametrize(("engine", "flag"), SHARES.items())
def test_a_users_own_share_of_the_card_goes_before(tmp_path: Path, engine: str, flag: str) -> None:
    kind = {"vllm": Vllm, "sglang": Sglang}[engine]
    full = CardMemory(1 * GB, 24 * GB, 8 * GB)
    for given in ((flag, "0.5"), (f"{flag}=0.5",), (f"--{flag[2:].replace('-', '_')}", "0.5")):
        flags = kind("t", "d", tmp_path, 100, memory=full, more_flags=given).flags(2)
        assert [word for word in flags if word.replace("_", "-").startswith(flag)] == [given[0]]
    with pytest.raises(UserError) as refused:
        kind("t", "d", tmp_path, 100, memory=full).flags(2)
    (line,) = str(refused.value).splitlines()
    for part in ("engine=" + engine, "needed", "1 GB of 24 GB", "score=false", "larger card"):
        assert part in line


@dataclass(frozen=True)
class OnCard:
    """A run without weights, and the file to which its engine's program writes its command line."""

    folder: RunFolder
    work: Workload
    file: Path

    def started(self, *roles: Role, **how: Any) -> Any:
        return started(self.folder, self.work, roles, **how)


@pytest.fixture
def on_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., OnCard]:
    """A run of an engine on a card whose memory is what a function says, or without a card."""

    def opened(engine: str, memory: Callable[[int], tuple[int, int]] | None, *more: str) -> OnCard:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: memory is not None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
        words = [f"engine={engine}", "score=false", "k=[2]", "new_tokens=8", "prompts.limit=1"]
        config = compose("server", [*words, *more, f"results_root={tmp_path}"])
        work, folder = open_workload(config, load_prompts(config)), create(config, "server")
        file = program_of(engine, tmp_path, monkeypatch)
        return OnCard(folder, work, file)

    return opened


@pytest.mark.parametrize("card", [True, False])
@pytest.mark.parametrize("engine", sample(["vllm", "sglang"], "sglang"))
def test_the_share_of_the_card_is_read_when_the_server_starts(
    engine: str, card: bool, on_card: Callable[..., OnCard], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def free_and_total(_: int) -> tuple[int, int]:
        done.append("read")
        return 14 * GB, 24 * GB

    run = on_card(engine, free_and_total if card else None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("freed"))
    with run.started(Role(0), Role(2), slots=1):
        arguments, _ = json.loads(run.file.read_text())
    flag = SHARES[engine]
    noted = load_run(run.folder.path).manifest.server_memory
    if not card:
        assert flag not in arguments
        assert (done, noted) == ([], ())
        return
    assert done == ["freed", "read"] * 2
    share = arguments[arguments.index(flag) + 1]
    assert 5e6 < noted[0].weights < noted[1].weights < 7e6
    assert [(each.k, each.servers) for each in noted] == [(0, 2), (2, 1)]
    assert noted[1].flags == {flag: share}
    # The first leaves half of what is free to the second, which has a draft
    spare, whole = {"vllm": ((0.7, 0.7), 24), "sglang": ((3.76, 5.9), 14)}[engine]
    for entry, free, needed in zip(noted, (7, 14), spare, strict=True):
        assert float(entry.flags[flag]) == pytest.approx((free - needed) / whole, abs=0.01)


@pytest.mark.parametrize("engine", sample(["vllm", "sglang"], "sglang"))
def test_the_commands_of_a_run_have_the_share_that_each_server_was_started_with(
    engine: str, on_card: Callable[..., OnCard]
) -> None:
    """The servers of a load start after the manifest's entry is written."""
    free, flag = iter(range(20, 10, -1)), SHARES[engine]
    run = on_card(engine, lambda _: (next(free) * GB, 24 * GB), "concurrency=[1,4]")
    shares: dict[tuple[int, int], str] = {}
    for slots in (1, 4):
        for k in (0, 2):
            with run.started(Role(k), slots=slots) as servers:
                arguments, _ = json.loads(run.file.read_text())
                shares[k, slots] = arguments[arguments.index(flag) + 1]
                if slots == 1:
                    note_engine(run.folder, run.work, servers[Role(k)])
    assert len({*shares.values()}) == 4
    noted = Setup(load_run(run.folder.path)).engine
    assert noted is not None
    for command in noted.commands:
        measured = shlex.split(command.line)
        assert measured[measured.index(flag) + 1] == shares.pop((command.k, command.slots))
        assert flag not in shlex.split(command.production or "")
    assert not shares


@pytest.mark.parametrize(
    ("flags", "read"),
    [
        ([], 1),
        (["--tensor-parallel-size", "2"], 2),
        (["--tp=2", "--enforce-eager"], 2),
        (["-tp", "2", "--data_parallel_size=2"], 4),
        (["--pipeline-parallel-size", "16"], 8),  # of the eight that there are
        (["--tensor-parallel-size", "1"], 1),
    ],
)
def test_the_fullest_of_the_cards_that_a_server_uses_decides(
    flags: list[str], read: int, on_card: Callable[..., OnCard], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def free_and_total(card: int) -> tuple[int, int]:
        asked.append(card)
        return (20 - card) * GB, 24 * GB

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    run = on_card("vllm", free_and_total, f"flags={flags}")
    with run.started(Role(0), slots=1):
        pass
    assert asked == [*range(read)]
    (noted,) = load_run(run.folder.path).manifest.server_memory
    assert noted.free == (21 - read) * GB
    assert (noted.weights > 0) == (read == 1)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_card_too_full_for_a_pair_is_one_line_before_any_server_is_started(
    engine: str, on_card: Callable[..., OnCard]
) -> None:
    """The plain server would fit, and be measured for nothing."""
    spare = {"vllm": 0.7 * GB, "sglang": 3.6 * 2**30}[engine]
    # The target takes 5.3 MB, with the draft 6.1
    free = int(spare) + 56 * 10**5
    run = on_card(engine, lambda _: (free, 24 * GB))
    with pytest.raises(
        UserError, match=rf"engine={engine} at k=2: .* needed.* GB of 24 GB"
    ) as line:
        measure(run.folder, run.work)
    assert "\n" not in str(line.value)
    # Others may fill it once a run has begun: then it costs the servers that have no room any more
    left: list[Role] = []
    with run.started(
        Role(0), Role(2), slots=2, left_out=lambda role, _: not left.append(role)
    ) as servers:
        assert not servers
    assert left == [Role(0), Role(2)]
    assert not run.file.exists()


def test_synthetic_acceptance_is_asked_for_where_the_engine_has_it(tmp_path: Path) -> None:
    flags = Vllm("t", "d", tmp_path, 100, rule="ratio").flags(2, [0.5, 0.0])
    speculative = json.loads(flags[flags.index("--speculative-config") + 1])
    assert speculative["draft_sample_method"] == "probabilistic"
    assert speculative["rejection_sample_method"] == "synthetic"
    assert speculative["synthetic_acceptance_rates"] == [0.5, 0.0]
    assert "--speculative-config" not in Vllm("t", None, tmp_path, 100).flags(0)
    typed = Vllm("t", "d", tmp_path, 100, threads=2).command(2).line
    assert "OMP_NUM_THREADS=2 VLLM_CPU_OMP_THREADS_BIND=nobind vllm serve t" in typed
    assert Sglang("t", "d", tmp_path, 100).command(0).line.startswith("sglang serve")
    # A round's mean length, the target's own token included: 1 rejects every draft
    sglang = Sglang("t", "d", tmp_path, 100)
    for rates, length in (([0.5, 0.0], "1.5"), ([0.0, 0.0], "1")):
        assert sglang.environment(rates) == {
            "SGLANG_SIMULATE_ACC_LEN": length,
            "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
            "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
        }
        assert sglang.flags(2, rates) == sglang.flags(2)
    assert sglang.environment() == {}
    assert sglang.spec.synthetic == "on CUDA"


def test_block_verification_is_asked_for_where_the_engine_has_it(tmp_path: Path) -> None:
    vllm = Vllm("t", "d", tmp_path, 100, kind="eagle3", rule="block")
    flags = vllm.flags(3)
    config = json.loads(flags[flags.index("--speculative-config") + 1])
    assert config["draft_sample_method"] == "probabilistic"
    assert config["rejection_sample_method"] == "block"
    # On its V1 runner vLLM would start and accept argmaxes
    assert vllm.environment()["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert "VLLM_USE_V2_MODEL_RUNNER" not in replace(vllm, rule="ratio").environment()
    rules: dict[Rule, str | None] = {
        "greedy_draft": None,
        "ratio": "--speculative-use-rejection-sampling",
        "block": "--speculative-use-block-verification",
    }
    for rule, flag in rules.items():
        started = Sglang("t", "d", tmp_path, 100, kind="eagle3", rule=rule).flags(3)
        assert {*filter(None, rules.values())} & {*started} == {*filter(None, [flag])}
        assert Sglang("t", "d", tmp_path, 100, kind="eagle3", rule=rule).flags(0)[0] == "serve"


@pytest.mark.parametrize(
    ("engine", "rule"), [("vllm", "block"), ("sglang", "block"), ("sglang", "ratio")]
)
def test_a_rule_that_a_draft_cannot_be_accepted_by_is_refused(engine: str, rule: str) -> None:
    """Neither engine has block verification for a draft model; vLLM would ignore it."""
    words = [f"engine={engine}", "model=qwen3_4b", f"decode.rule={rule}"]
    known = "the drafts of .* an EAGLE-3 head or .*MTP layers.* by it, and draft=DRAFT is a draft"
    with pytest.raises(UserError, match=known):
        adapter_of(compose("server", [*words, "draft=hf", "draft.id=ORG/DRAFT"]))
    assert adapter_of(compose("server", [*words, "draft=mtp"])).spec.name == engine


# ---- servers that fail ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """An answer written by hand: its head, and its bytes with a pause after each."""

    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    pause_s: float = 0.0
    length: int | None = None
    raw: bytes | None = None

    def write(self, handler: BaseHTTPRequestHandler) -> None:
        pieces = [bytes([byte]) for byte in self.body] if self.pause_s else [self.body]
        if self.raw is not None:
            pieces = [bytes([byte]) for byte in self.raw] if self.pause_s else [self.raw]
        else:
            handler.send_response(self.status)
            length = len(self.body) if self.length is None else self.length
            for name, value in (("Content-Length", str(length)), *self.headers):
                handler.send_header(name, value)
            handler.end_headers()
        for piece in pieces:
            handler.wfile.write(piece)
            handler.wfile.flush()
            time.sleep(self.pause_s)


def in_order(*answers: Any) -> Callable[[Any], Any]:
    """Each of these once, the last at every later request."""
    left = list(answers)
    return lambda _: left.pop(0) if len(left) > 1 else left[0]


GOOD = completion({**TIMES, "speculative_decoding": SPECULATIVE})
PASSING = {
    "unavailable": 503,
    "a rate limit": Written(429, (("Retry-After", "0"),)),
    "a bad gateway": 502,
    "a cut connection": None,
    "half an answer": Written(body=b'{"choices": [', length=400),
    "no JSON": "<html>a proxy's page</html>",
    "no HTTP": Written(raw=b"\x00\x01 garbage \r\n\r\n"),
    "bytes that are no text": Written(body=b"\xff\xfe\xfd"),
}


@pytest.mark.parametrize("fault", PASSING)
def test_a_request_that_fails_in_passing_is_sent_again_and_timed_by_its_last_answer(
    stand_in: Start, fault: str
) -> None:
    answer = in_order(PASSING[fault], PASSING[fault], GOOD)
    server = stand_in(vllm_answers(**{"/v1/completions": answer}))
    done = ask(attached(VllmServer, server.url))
    assert (done.tokens, done.rounds, done.asked) == (tuple(TOKENS), 3, 3)
    assert [body["seed"] for body in server.asked] == [7, 7, 7]


def test_counters_and_times_around_a_repeated_request_are_those_of_its_last_answer(
    stand_in: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def slow(_: Any) -> Any:
        nonlocal now
        now += 0.3
        return 503

    monkeypatch.setattr("harness.engines.http_server.perf_counter", lambda: now)
    answers = [slow, lambda _: completion(None)]
    asked = {
        "/v1/completions": lambda body: answers.pop(0)(body),
        # What the first attempt had the server count is no part of this request
        "/metrics": in_turn(dict.fromkeys(BEFORE, 0.0), BEFORE, AFTER),
    }
    done = ask(attached(VllmServer, stand_in(vllm_answers(**asked)).url))
    assert (done.asked, done.rounds, done.drafted, done.accepted) == (2, 3, 6, 2)
    assert done.request_s == 0.0


def test_the_events_of_a_stream_are_read_as_they_come_and_its_error_is_the_servers(
    stand_in: Start,
) -> None:
    whole = b'data: {"tokens": [1]}\n\n: a comment\n\ndata: {"tokens": [2], "stop": true}\n\n'
    bad = {
        whole[:22] + b'data: {"error": {"message": "out of memory"}}\n\n': "out of memory",
        b"data: {\n\n": "its answer is garbled",
        b"data: 3\n\n": "its answer is garbled .no object",
        b'{"tokens": [1]}': "its answer is garbled",
    }
    answers = [Written(body=body) for body in (whole + b"data: [DONE]\n\n", *bad)]
    server = stand_in({"/completion": in_order(*answers)})
    client, arrived = HttpClient(server.url), list[Any]()
    events = client.streamed("/completion", {}, 9.0, arrived.append)
    assert events == arrived == [{"tokens": [1]}, {"tokens": [2], "stop": True}]
    for message in bad.values():
        with pytest.raises(RequestFailedError, match=message):
            client.streamed("/completion", {}, 9.0, arrived.append)


@pytest.mark.parametrize(
    ("fault", "error", "message", "sent"),
    [
        (503, RequestFailedError, r"status 503: .* \(asked 6 times\)", 6),
        (
            Written(429, (("Retry-After", "3600"),)),
            RequestFailedError,
            r"status 429: .* \(it asks for 3600 s, which is too long\)",
            1,
        ),
        (
            Written(429, (("Retry-After", "1"),)),
            RequestFailedError,
            r"status 429: .* \(asked 2 times, with pauses of 1 s at most in all\)",
            2,
        ),
        ("no JSON", RequestFailedError, r"its answer is garbled \('no JSON'\) \(asked 6", 6),
        ({"choices": [{"token_ids": 3}]}, RequestFailedError, "cannot be read .TypeError", 1),
        ({"choices": []}, RequestFailedError, r"request failed: choices is '\[\]' \(asked 6", 6),
        ({"error": "overloaded"}, RequestFailedError, "request failed: 'overloaded' .asked 6", 6),
        (None, ServerDiedError, r"vLLM at k=2: .*not reachable \(.*\(asked 6 times\)", 6),
        (401, ServerDiedError, "status 401: request exceeds.*; .*api_key_env=NAME names the", 1),
        (403, ServerDiedError, "status 403: request exceeds.*; .*api_key_env=NAME names the", 1),
        (500, RefusedError, "status 500: request exceeds", 1),
        (Written(body=b"x", length=9, pause_s=9), ServerDiedError, "no whole answer within 1 s", 1),
        (Written(body=b" " * 999, pause_s=0.05), ServerDiedError, "no whole answer within 1 s", 1),
        (
            # Its head may end the wait, or the limit of all
            Written(raw=b"HTTP/1.1 200 OK\r\nX-Slow: " + b"x" * 999, pause_s=0.05),
            ServerDiedError,
            "no (whole )?answer within 1 s",
            1,
        ),
        (lambda _: time.sleep(3), ServerDiedError, "no answer within 1 s", 1),
    ],
)
def test_what_does_not_pass_ends_in_one_line_that_says_whose_fault_it_is(
    stand_in: Start,
    monkeypatch: pytest.MonkeyPatch,
    fault: Any,
    error: type[UserError],
    message: str,
    sent: int,
) -> None:
    monkeypatch.setattr("harness.engines.http_client.LEAST_S", 120.0)
    answer = fault if callable(fault) else in_order(fault)
    server = stand_in(vllm_answers(**{"/v1/completions": answer}))
    running = attached(VllmServer, server.url).open(2)
    with pytest.raises(error, match=message) as raised:
        running.generate(Asked([1, 2, 3], GREEDY, 7, 6))
    assert type(raised.value) is error
    assert server.url in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(server.asked) == sent


@pytest.mark.parametrize(
    ("engine", "path", "answer"),
    [
        (VllmServer, "/version", {"version": "0.32.0"}),
        (VllmServer, "/v1/models", {"data": [{"id": "m"}]}),
        (SglangServer, "/server_info", {"version": "0.5.23"}),
        (LlamaCppServer, "/props", {"build_info": "b11549-c0ffee"}),
    ],
)
@pytest.mark.parametrize("fault", ["unavailable", "a cut connection"])
def test_what_a_server_says_of_itself_is_asked_again_where_that_fails_in_passing(
    stand_in: Start, engine: Callable[..., HttpServer], path: str, answer: Any, fault: str
) -> None:
    answers = {**vllm_answers(), path: in_order(PASSING[fault], PASSING[fault], answer)}
    assert attached(engine, stand_in(answers).url).open(2).facts.version


def test_a_name_that_a_server_may_still_say_is_not_passed_over(stand_in: Start) -> None:
    server = stand_in(vllm_answers())
    running = attached(VllmServer, server.url).open(2)
    server.answers["/v1/models"] = 503
    with pytest.raises(RequestFailedError, match=r"status 503: .*asked 6 times"):
        _ = running.model_name
    server.answers["/v1/models"] = 404
    assert running.model_name is None
    server.close()
    with pytest.raises(ServerDiedError, match="not reachable") as error:
        attached(VllmServer, server.url).open(2)
    assert "asked" not in str(error.value), "an address is mistyped more often than late"


def test_the_counters_around_a_request_have_its_deadline(
    stand_in: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.engines.http_client.LEAST_S", 120.0)
    server = stand_in(vllm_answers(**{"/metrics": lambda _: time.sleep(3)}))
    with pytest.raises(ServerDiedError, match="no answer within 1 s"):
        ask(attached(VllmServer, server.url))


@pytest.mark.parametrize(
    ("answered_s", "connect_s"),
    [(0.6, 0.2), pytest.param(25.0, 20.0, marks=pytest.mark.exhaustive)],
    ids=["scaled", "25 s"],
)
def test_an_answer_may_take_longer_than_a_connection(
    stand_in: Start, monkeypatch: pytest.MonkeyPatch, answered_s: float, connect_s: float
) -> None:
    monkeypatch.setattr("harness.engines.http_client.CONNECT_S", connect_s)
    server = stand_in(vllm_answers(**{"/v1/completions": lambda _: time.sleep(answered_s) or GOOD}))
    engine = AttachedEngine({2: server.url}, VllmServer)
    done = ask(engine)
    assert (done.tokens, done.asked) == (tuple(TOKENS), 1)
    assert done.request_s > answered_s


def test_the_deadline_of_a_request_follows_from_its_tokens() -> None:
    client = HttpClient("http://h:1")
    assert client.deadline_s(10, 48) == 600
    assert client.deadline_s(2000, 1000) == 1200
    assert HttpClient("http://h:1", timeout_factor=3).deadline_s(10, 48) == 1800


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("path", ["/version", "/v1/completions"])
def test_a_redirect_is_refused_and_the_key_goes_nowhere(
    stand_in: Start, status: int, path: str
) -> None:
    other = stand_in(vllm_answers())
    to = Written(status, (("Location", f"{other.url}/version?key=the-key"),))
    server = stand_in(vllm_answers(**{path: to}))
    host = other.url.removeprefix("http://")
    with pytest.raises(ServerDiedError, match=f"it redirects to {host}, which is not fol") as error:
        ask(attached(VllmServer, server.url, key="the-key"))
    assert not other.keys
    assert "the-key" not in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "answer",
    [
        Written(400, body=b'{"error": {"message": "no such key: the-key"}}'),
        Written(401, body=b"Bearer the-key is not allowed"),
        Written(503, body=b'{"error": {"message": "busy with the-\\u006bey"}}'),
        "the-key is no JSON",
        Written(raw=b"the-key is no HTTP \r\n\r\n"),
        {"choices": "the-key"},
    ],
)
def test_a_key_that_a_server_echoes_is_not_shown(stand_in: Start, answer: Any) -> None:
    server = stand_in(vllm_answers(**{"/v1/completions": answer}))
    with pytest.raises(UserError) as error:
        ask(attached(VllmServer, server.url, key="the-key"))
    assert "the-key" not in str(error.value)
    refused = isinstance(answer, Written) and answer.status == 401
    assert ("the key of api_key_env= is not one" in str(error.value)) == refused


def test_a_key_that_a_server_echoes_is_not_stored(stand_in: Start) -> None:
    names = {"/version": {"version": "1 the-key"}, "/v1/models": {"data": [{"id": "the-key"}]}}
    engine = attached(VllmServer, stand_in(vllm_answers(**names)).url, key="the-key")
    assert engine.open(2).facts.version == "1 ***"
    assert engine.open(2).model_name == "***"


def entry(name: str, **more: Any) -> dict[str, Any]:
    return {"id": name, **more}


LISTED: list[Any] = [
    # What a server lists, the target's names, what is asked
    ([entry("m")], ("org/target",), "m"),
    ([entry("another"), entry("target")], ("/models/target/",), "target"),
    ([entry("another"), entry("org/Target")], ("org/target",), "org/Target"),
    ([entry("a", root="/x/target"), entry("b", root="/x/other")], ("target",), "a"),
    ([entry("lora", parent="base"), entry("base")], ("target",), "base"),
    ([entry("target", parent="base"), entry("base", root="org/target")], ("target",), "base"),
    ([entry("a.gguf"), entry("T.gguf")], ("id", "/files/t.gguf"), "T.gguf"),
]


@pytest.mark.parametrize(("listed", "names", "asked"), LISTED)
def test_of_several_models_the_target_is_asked(
    listed: list[Any], names: tuple[str, ...], asked: str, stand_in: Start
) -> None:
    assert WantedModel(None, names).among(listed, "url=x") == asked
    assert WantedModel(listed[0]["id"], names).among(listed, "url=x") == listed[0]["id"]
    server = stand_in(vllm_answers(**{"/v1/models": {"data": listed}}))
    engine = attached(VllmServer, server.url)
    assert replace(engine, wanted=WantedModel(None, names)).open(2).model_name == asked


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (WantedModel(None, ("target",)), r"url=x: it lists 2 models \(a, b\).*: served_name=a$"),
        (WantedModel(None, ()), "served_name=a"),
        (WantedModel("c", ("a",)), r"^served_name=c: url=x lists 2 models \(a, b\); give one"),
    ],
)
def test_several_models_of_which_none_is_the_target_are_listed(
    wanted: WantedModel, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        wanted.among([{"id": "a"}, {"id": "b"}], "url=x")


def test_a_proxy_of_the_environment_is_used_for_other_hosts_and_not_for_this_one(
    stand_in: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = stand_in({"http://far.invalid:8000/v1/models": {"data": [{"id": "far"}]}})
    near = stand_in({"/v1/models": {"data": [{"id": "near"}]}})
    monkeypatch.setenv("http_proxy", proxy.url.replace("http://", "http://me:pass@"))
    monkeypatch.setenv("no_proxy", "direct.invalid")
    assert served_model(HttpClient("http://far.invalid:8000", "the-key")) == "far"
    assert proxy.keys == {"Bearer the-key"}
    assert served_model(HttpClient(near.url)) == "near"
    with pytest.raises(ServerDiedError, match="not reachable"):
        served_model(HttpClient("http://direct.invalid:8000"))


def test_requests_side_by_side_fail_and_are_repeated_on_their_own(stand_in: Start) -> None:
    seen: dict[int, int] = {}

    def every_other_time(body: dict[str, Any]) -> Any:
        seen[body["seed"]] = seen.get(body["seed"], 0) + 1
        return 503 if seen[body["seed"]] <= body["seed"] % 3 else GOOD

    url = stand_in(vllm_answers(**{"/v1/completions": every_other_time})).url
    running = attached(VllmServer, url).open(2)
    with ThreadPoolExecutor(8) as pool:
        done = pool.map(lambda seed: running.generate(Asked([1], GREEDY, seed, 6)), range(12))
        assert [each.asked for each in done] == [1 + seed % 3 for seed in range(12)]


def test_a_model_of_another_vocabulary_is_named_where_its_server_throws(stand_in: Start) -> None:
    thrown = b'{"error": {"message": "vector::_M_range_check: __n (which is 999)"}}'
    server = stand_in(vllm_answers(**{"/detokenize": Written(500, body=thrown)}))
    message = "another vocabulary than that of model=, by its tokens: it cannot read the ids of 'ab"
    with pytest.raises(UserError, match=message) as error:
        attached(VllmServer, server.url).open(2).check_vocabulary([998, 999], "ab c")
    assert "_M_range_check" not in str(error.value)


# ---- llama.cpp's kinds of draft ------------------------------------------------------------------


def with_llama_server(folder: Path, spec_types: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a binary on PATH that lists these kinds of draft in its help."""
    binary = folder / "llama-server"
    binary.write_text(f"#!/bin/sh\necho '--spec-type {spec_types}   kinds of draft'\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def gguf_files(folder: Path) -> tuple[Path, Path]:
    files = folder / "target.gguf", folder / "draft.gguf"
    for file in files:
        file.write_bytes(b"GGUF")
    return files


@pytest.mark.parametrize(
    ("kind", "keys", "line"),
    [
        ("mtp", [], "draft=mtp: give model.gguf, a conversion that has the MTP layers"),
        ("dflash", ["model.gguf={target}"], "draft.gguf: not given; llama.cpp's convert_hf"),
        ("dflash", ["score=true", "k=[1,4]"], "give one K, and draft.block=K+1"),
        ("dflash", ["score=true", "k=[4]", "draft.block=4"], "give one K, and draft.block=K+1"),
        ("dspark", ["score=true", "k=[4]", "draft.block=3"], "and draft.block=K or K+1"),
        (
            "mtp",
            ["model.gguf={target}"],
            "is a build without --spec-type draft-mtp; it has draft-simple, ngram-simple: take",
        ),
        (
            "dflash",
            ["model.gguf={target}", "draft.gguf={draft}"],
            "is a build without --spec-type draft-dflash; it has draft-simple, ngram-simple",
        ),
    ],
)
def test_a_kind_that_a_build_of_llamacpp_lacks_or_no_file_of_it_is_refused_in_one_line(
    kind: str, keys: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_llama_server(tmp_path, "[none|draft-simple|ngram-simple]", monkeypatch)
    target, draft = gguf_files(tmp_path)
    words = [each.format(target=target, draft=draft) for each in keys]
    words += [f"draft={kind}", f"draft.id={tmp_path}", "model=hf", f"model.id={tmp_path}"]
    config = compose("server", ["engine=llamacpp", "score=false", *words])
    with pytest.raises(UserError) as error:
        adapter_of(config).check(config)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "given", "file"), [("mtp", False, False), ("mtp", True, True), ("dflash", True, True)]
)
def test_llamacpp_drafts_by_the_files_that_are_given(
    kind: str, given: bool, file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_llama_server(tmp_path, "none,draft-simple,draft-mtp,draft-dflash", monkeypatch)
    target, draft = gguf_files(tmp_path)
    words = [f"draft={kind}", f"draft.id={tmp_path}", "model=hf", f"model.id={tmp_path}"]
    words += [f"model.gguf={target}", *([f"draft.gguf={draft}"] if given else [])]
    config = compose("server", ["engine=llamacpp", "score=false", "k=[2]", *words])
    adapter = adapter_of(config)
    adapter.check(config)
    assert adapter.start is not None
    engine = adapter.start(ToServe(config, tmp_path, 100, 1, 1))
    assert isinstance(engine, LlamaCpp)
    flags = engine.flags(2)
    assert flags[flags.index("--spec-type") + 1] == f"draft-{kind}"
    assert flags[flags.index("--spec-draft-n-max") + 1] == "2"
    assert (str(draft) in flags) == file
    assert "--spec-type" not in engine.flags(0)


@needs_llamacpp
def test_the_wheel_of_llamacpp_has_every_kind_that_is_measured(tmp_path: Path) -> None:
    target, draft = gguf_files(tmp_path)
    files = [f"model.gguf={target}", f"draft.gguf={draft}", "model=hf", f"model.id={tmp_path}"]
    for kind in ("eagle3", "mtp", "dflash", "dspark"):
        words = ["engine=llamacpp", "score=false", *files, f"draft={kind}", f"draft.id={tmp_path}"]
        config = compose("server", words)
        adapter_of(config).check(config)


@needs_llamacpp
@pytest.mark.parametrize(
    ("kind", "field", "sizes"),
    [
        ("ngram_simple", "ngram_simple", {"size_n": 2, "size_m": 16}),
        ("ngram_simple_1", "ngram_simple", {"size_n": 1, "size_m": 16}),
        ("ngram_simple_12", "ngram_simple", {"size_n": 12, "size_m": 16}),
        ("ngram_mod", "ngram_mod", {"n_match": 24, "n_min": 0, "n_max": 16}),
    ],
)
def test_the_wheel_of_llamacpp_takes_the_sizes_of_each_of_its_look_ups(
    kind: str, field: str, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness.engines import xllamacpp_server

    flags = [str(word) for flag in drafting_flags(kind, 16).items() for word in flag]
    monkeypatch.setattr(sys, "argv", ["server", "--model", "target.gguf", *flags])
    speculative = xllamacpp_server.parameters().speculative
    (spec_type,) = speculative.types
    assert spec_type.name.endswith(SPEC_TYPES[kind].replace("-", "_").upper())
    lookup = getattr(speculative, field)
    assert {name: getattr(lookup, name) for name in sizes} == sizes

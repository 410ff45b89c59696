"""Auditions whose target is on a server: completions and log-probabilities from there.

The servers answer as vLLM's, SGLang's and llama.cpp's do, from the embedded models; llama.cpp's
itself is asked at the end.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import needs_llamacpp, ran, sample
from served_pair import Served, embedded, opened
from server_answers import META, SPECULATIVE
from stand_in_server import StandIn

from harness.analysis import analyse
from harness.config import DraftConf
from harness.decoding.sampling import SamplingParameters
from harness.engine_facts.engines import spec_of
from harness.engines.llamacpp import LlamaCppServer
from harness.engines.protocol import Asked
from harness.measurement.draft_scores import score_texts
from harness.measurement.remote_scores import TextServer
from harness.measurement.target_texts import GeneratedText
from harness.models.load import LoadedModel
from harness.models.probe import uncached_logits
from harness.records import TextTrace, UserError
from harness.reporting.serving_commands import snippets_of
from harness.storage import StoredRun, load

pytestmark = pytest.mark.usefixtures("few_samples")
BUDGET = 10
LATENCIES = ["latency.target_ms=10", "latency.draft_ms=2"]
SMALL = [f"new_tokens={BUDGET}", "prompts.limit=2", "k=[1,4]", "temperature=[0,1]", "threads=1"]
NUMBERS = ("target_logprob", "draft_logprob", "draft_is_argmax")
TIMINGS = {"prompt_ms": 2.0, "predicted_ms": 30.0, "predicted_n": BUDGET}


class Models:
    """The embedded models as servers have them."""

    def __init__(self, folder: Path) -> None:
        self.pair = Served(folder, prompts=2)
        self.plain = self.pair.own().open(0)

    def complete(
        self, prompt: Sequence[int], temperature: float, seed: int, budget: int
    ) -> tuple[list[int], list[float]]:
        """A completion of the target, with log-probabilities at temperature 1."""
        done = self.plain.generate(Asked(prompt, SamplingParameters(temperature), seed, budget))
        return list(done.tokens), scores(self.pair.loaded, prompt, done.tokens)[0]

    def text(self, tokens: Sequence[int]) -> str:
        return self.pair.loaded.tokenizer.decode(list(tokens), skip_special_tokens=True)


def scores(
    model: LoadedModel, prompt: Sequence[int], tokens: Sequence[int]
) -> tuple[list[float], list[int]]:
    """Log-probabilities of tokens after a prompt, and their ranks."""
    logits = uncached_logits(model.network, [*prompt, *tokens[:-1]], model.vocab_size)
    logprobs = logits[len(prompt) - 1 :].log_softmax(-1)
    drawn = logprobs.gather(-1, torch.tensor(tokens)[:, None])
    return drawn.squeeze(-1).tolist(), (logprobs >= drawn).sum(-1).tolist()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def vllm(models: Models) -> dict[str, Any]:
    def complete(body: dict[str, Any]) -> dict[str, Any]:
        asked = (body["temperature"], body["seed"], body["max_tokens"])
        tokens, logprobs = models.complete(body["prompt"], *asked)
        choice: dict[str, Any] = {"text": models.text(tokens), "token_ids": tokens}
        if "logprobs" in body:
            choice["logprobs"] = {"token_logprobs": logprobs}
        return {"choices": [choice]}

    return {
        "/version": {"version": "0.32.0"},
        "/v1/models": {"data": [{"id": "m"}]},
        "/v1/completions": complete,
    }


def sglang(models: Models) -> dict[str, Any]:
    def complete(body: dict[str, Any]) -> dict[str, Any]:
        settings = body["sampling_params"]
        asked = (settings["temperature"], settings["sampling_seed"], settings["max_new_tokens"])
        tokens, logprobs = models.complete(body["input_ids"], *asked)
        meta: dict[str, Any] = {"completion_tokens": len(tokens)}
        if body["return_logprob"]:
            pairs = zip(logprobs, tokens, strict=True)
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        return {"text": models.text(tokens), "output_ids": tokens, "meta_info": meta}

    answers = {"/server_info": {"version": "0.5.23"}, "/generate": complete}
    return {**answers, "/v1/models": {"data": [{"id": "m"}]}}


def llamacpp(models: Models) -> dict[str, Any]:
    def complete(body: dict[str, Any]) -> dict[str, Any]:
        asked = (body["temperature"], body["seed"], body["n_predict"])
        tokens, logprobs = models.complete(body["prompt"], *asked)
        answer: dict[str, Any] = {"content": models.text(tokens), "tokens": tokens}
        answer["timings"] = TIMINGS
        if body["n_probs"]:
            pairs = zip(tokens, logprobs, strict=True)
            told = [{"id": token, "logprob": logprob} for token, logprob in pairs]
            answer["completion_probabilities"] = told
        return answer

    return {"/props": {"build_info": "b11549"}, "/completion": complete}


Start = Callable[[Mapping[str, Any]], StandIn]


def run(root: Path, *overrides: str) -> StoredRun:
    return ran("audition", root, *SMALL, *overrides)


def of_draft(run: StoredRun, draft: str) -> dict[Any, TextTrace]:
    return {trace.key: trace for trace in run.traces if trace.draft == draft}


@pytest.mark.parametrize("kind", sample([vllm, sglang, llamacpp], vllm))
def test_texts_of_a_server_are_scored_as_those_of_a_target_that_is_loaded(
    kind: Callable[[Models], dict[str, Any]],
    models: Models,
    stand_in: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("harness.commands.audition.open_target", lambda *_: pytest.fail("loaded"))
    target = stand_in(kind(models))
    drafts = "drafts=[tiny_good,tiny_small,ngram]"
    done = run(tmp_path, f"texts_from={target.url}", *LATENCIES, drafts)
    asked = {(text.prompt_set, text.prompt): text for text in models.pair.requests}
    texts = [
        GeneratedText(
            replace(
                asked[trial.prompt_set, trial.prompt],
                sampling=SamplingParameters(trial.temperature),
            ),
            trial.tokens or (),
            trial.stop_reason or "eos",
        )
        for trial in done.trials
    ]
    assert len(texts) == 2 * 2 * 2
    for name in ("tiny_good", "tiny_small"):
        traces = of_draft(done, name)
        loaded = opened(models.pair.loaded, embedded(name, DraftConf))
        for expected in score_texts(texts, *loaded, draft_name=name):
            trace = traces[expected.key]
            assert trace.tokens.tolist() == expected.tokens.tolist()
            for number in NUMBERS:
                np.testing.assert_allclose(
                    getattr(trace, number), getattr(expected, number), atol=1e-4
                )
    server = done.manifest.texts_from
    assert server is not None
    assert server.engine == kind.__name__
    assert f"http://{server.url}" == target.url
    summary = analyse(done)
    caveat = next(caveat for caveat in summary.caveats if caveat.code == "texts_from")
    assert caveat.values == asdict(server)
    # The first line is for the server that has the target
    assert snippets_of(summary)[0].title.startswith(spec_of(server.engine).title)
    assert {row.draft for row in summary.results if row.k} == {"tiny_good", "tiny_small", "ngram"}
    # The prompts of one temperature have seeds of their own
    seeds = {str(body.get("seed") or body.get("sampling_params")) for body in target.asked}
    assert len(seeds) == len(target.asked)


def test_a_server_that_dies_is_asked_by_a_resumed_run_for_what_is_missing(
    models: Models, stand_in: Start, tmp_path: Path
) -> None:
    answers, left = vllm(models), [3]
    complete = answers["/v1/completions"]

    def dying(body: dict[str, Any]) -> Any:
        left[0] -= 1
        return complete(body) if left[0] >= 0 else None

    server = stand_in({**answers, "/v1/completions": dying})
    quick = "timeout_factor=0.002"
    asked = [f"texts_from={server.url}", *LATENCIES, "drafts=[ngram]", quick]
    with pytest.raises(UserError, match="not reachable") as died:
        run(tmp_path, *asked)
    (folder,) = tmp_path.iterdir()
    assert f"resume={folder} continues the run" in str(died.value)
    stored = load(folder)
    assert stored.manifest.status == "failed"
    assert len(stored.trials) == 3
    server.answers["/version"] = {"version": "0.33.0"}
    with pytest.raises(UserError, match="the server's version changed since"):
        run(tmp_path, f"resume={folder}")
    server.answers["/version"] = answers["/version"]
    left[0] = 5
    done = run(tmp_path, f"resume={folder}")
    assert done.trials[:3] == stored.trials
    assert len(done.trials) == 8
    # With every text here the server is not needed any more
    assert left[0] == 0
    server.close()
    server.answers.clear()
    assert run(tmp_path, f"resume={folder}").trials == done.trials


def test_a_server_that_cannot_be_reached_is_named_by_the_key_that_gives_it() -> None:
    with pytest.raises(UserError, match=r"^texts_from=http://127\.0\.0\.1:9: not reachable"):
        TextServer("http://127.0.0.1:9")


def test_a_key_is_sent_to_the_server_and_stored_nowhere(
    models: Models, stand_in: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "the-secret")
    target = stand_in(vllm(models))
    asked = [f"texts_from={target.url}", "api_key_env=MY_KEY", *LATENCIES, "temperature=[0]"]
    done = run(tmp_path, *asked, "drafts=[ngram]")
    assert target.keys == {"Bearer the-secret"}
    for file in done.folder.rglob("*"):
        assert file.is_dir() or b"the-secret" not in file.read_bytes(), file
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(UserError, match="api_key_env=MY_KEY: no such variable is set"):
        run(tmp_path, *asked)


def test_a_sampling_parameter_is_no_matter_at_temperature_0(
    models: Models, stand_in: Start, tmp_path: Path
) -> None:
    server = stand_in(vllm(models))
    asked = [f"texts_from={server.url}", *LATENCIES, "temperature=[0]", "decode.top_k=5"]
    assert run(tmp_path, *asked, "drafts=[ngram]").manifest.status == "complete"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"/v1/models": 404, "/version": 404}, "neither llama.cpp's server nor SGLang's nor one with"),
    ({"/v1/completions": {"choices": [{"text": "a"}]}}, "its answer has no token ids"),
    (
        {"/v1/completions": {"choices": [{"text": "a", "token_ids": []}]}},
        "its answer has no token ids",
    ),
    ({"/v1/completions": 400}, "status 400: request exceeds the context size"),
    (
        {"/v1/completions": {"choices": [{"text": "der Fluss", "token_ids": [300, 301]}]}},
        "another model than model=, by its tokens",
    ),
]


@pytest.mark.parametrize(("answers", "says"), BAD)
def test_a_server_whose_texts_cannot_be_used_is_refused_in_one_line(
    answers: dict[str, Any], says: str, models: Models, stand_in: Start, tmp_path: Path
) -> None:
    server = stand_in({**vllm(models), **answers})
    asked = [f"texts_from={server.url}", *LATENCIES, "temperature=[0]", "drafts=[ngram]"]
    with pytest.raises(UserError, match=says) as refused:
        run(tmp_path, *asked)
    assert "\n" not in str(refused.value)


def test_log_probabilities_that_a_server_keeps_to_itself_are_not_guessed(
    models: Models, stand_in: Start, tmp_path: Path
) -> None:
    answers = llamacpp(models)
    complete = answers["/completion"]
    # As llama.cpp does where it drafts
    answers["/completion"] = lambda body: {**complete(body), "completion_probabilities": []}
    server = stand_in(answers)
    with pytest.raises(UserError, match=r"0 log-probabilities of .* one that decodes plainly"):
        run(tmp_path, f"texts_from={server.url}", *LATENCIES, "temperature=[1]", "drafts=[ngram]")


DRAFTING: dict[Any, dict[str, Any]] = {
    llamacpp: {"timings": {**TIMINGS, "draft_n": 7, "draft_n_accepted": 7}},
    sglang: {"meta_info": META},
    vllm: {"metrics": {"speculative_decoding": SPECULATIVE}},
}


@pytest.mark.parametrize("kind", DRAFTING)
def test_texts_of_a_server_that_drafts_are_refused(
    kind: Callable[[Models], dict[str, Any]], models: Models, stand_in: Start, tmp_path: Path
) -> None:
    answers = kind(models)
    (path,) = [path for path, answer in answers.items() if callable(answer)]
    complete = answers[path]
    words = [*LATENCIES, "temperature=[0]", "drafts=[ngram]"]
    server = stand_in({**answers, path: lambda body: {**complete(body), **DRAFTING[kind]}})
    with pytest.raises(UserError, match=f"texts_from={server.url}: it drafts, and so") as refused:
        run(tmp_path, f"texts_from={server.url}", *words)
    assert "resume=" in str(refused.value)
    if kind is vllm:  # without them in its answers
        page = "vllm:spec_decode_num_draft_tokens_total 0.0\n"
        server = stand_in({**answers, "/metrics": page})
        with pytest.raises(UserError, match="it drafts, and so"):
            run(tmp_path, f"texts_from={server.url}", *words)


@pytest.mark.exhaustive
@needs_llamacpp
def test_llamacpp_returns_the_log_probabilities_of_what_it_draws(
    models: Models, tmp_path: Path
) -> None:
    pair = Served(tmp_path, prompts=5)
    with pair.llamacpp().open(0) as server:
        assert isinstance(server, LlamaCppServer)
        remote = TextServer(server.url)
        ends = set()
        for temperature in (0.0, 1.0):
            for request in pair.requests:
                asked = replace(request, sampling=SamplingParameters(temperature))
                text = remote.complete(asked, models.text)
                ends.add(text.stop_reason)
                if temperature:
                    expected, _ = scores(pair.loaded, asked.tokens, text.tokens)
                    assert text.logprobs is not None
                    np.testing.assert_allclose(text.logprobs, expected, atol=2e-3)
                else:
                    plain, _ = models.complete(asked.tokens, 0.0, 0, asked.budget)
                    assert (list(text.tokens), text.logprobs) == (plain, None)
    assert "eos" in ends

"""The threshold of llama.cpp (--spec-draft-p-min): its servers draft as replay says."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from runs import EXACT, EXACT_FLAGS, needs_llamacpp, ran
from served_pair import Answered, Served, answered
from stubs import REQUEST

from harness.analysis import analyse
from harness.analysis.replayed import ScoredTexts, replayed_adaptively
from harness.cli import compose
from harness.engine_facts.llamacpp import COUNTING, SPEC
from harness.engines.llamacpp import LlamaCpp
from harness.engines.protocol import Asked, Completion, Server
from harness.measurement.remote_scores import asked_scores
from harness.measurement.server_request import decoded
from harness.measurement.target_texts import GeneratedText
from harness.models.embedded import EMBEDDED, gguf_of
from harness.records import UserError
from harness.theory.replay import Replayed

LARGEST_K = 16


@dataclass(frozen=True, eq=False)
class Pair:
    """The embedded pair, its plain texts, and what the draft's own server says of them."""

    engine: LlamaCpp
    texts: Sequence[Answered]
    scored: ScoredTexts

    def replayed(self, k: int, p_min: float) -> Replayed:
        budgets = {t.request.key: t.request.budget for t in self.texts}
        limited = replace(
            self.scored,
            drops_unlikely=SPEC.drops_unlikely,
            limits=lambda trace: COUNTING.proposed(k, budgets[trace.key]),
        )
        return replayed_adaptively(limited, k, p_min)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("servers")
    (folder / "draft").mkdir()
    served = Served(folder, "tiny_small", prompts=4)
    engine = served.llamacpp()
    context = engine.context_tokens + LARGEST_K
    file = gguf_of(EMBEDDED / "tiny_small")
    alone = LlamaCpp(file, None, folder / "draft", context, 1, more_flags=EXACT)
    with engine.open(0) as server:
        texts = [answered(request, server) for request in served.requests]
        facts = server.facts
    emitted = [decoded(text, facts) for text in texts]
    with alone.open(0) as draft:
        alone_traces, _ = asked_scores(emitted, draft, draft_name="tiny_small")
        traces, known = asked_scores(
            emitted,
            draft,
            draft_name="tiny_small",
            num_draft_tokens=LARGEST_K,
            least=0.0,
            among=SPEC.draft_top_k or 0,
        )
    for one, other in zip(alone_traces, traces, strict=True):
        assert one.draft_is_argmax.tolist() == other.draft_is_argmax.tolist()
    confidences = {each.key: each for each in known}
    return Pair(engine, texts, ScoredTexts(traces, confidences, "greedy_draft"))


@needs_llamacpp
@pytest.mark.parametrize("k", [4, 16])
@pytest.mark.parametrize("p_min", [0.0, 0.5, 0.9])
def test_rounds_and_drafted_tokens_of_llamacpp_at_a_threshold_are_those_replayed(
    pair: Pair, k: int, p_min: float
) -> None:
    expected = pair.replayed(k, p_min)
    with replace(pair.engine, p_min=p_min).open(k) as server:
        done = [answered(text.request, server) for text in pair.texts]
    assert [text.tokens for text in done] == [text.tokens for text in pair.texts]
    counted = [text.completion for text in done]
    whole = np.array([text.stop_reason == "budget" for text in done])
    assert whole.sum() >= 4
    rounds = np.array([each.rounds or 0 for each in counted])
    assert rounds[whole].tolist() == expected.rounds.round(9)[whole].tolist()
    drafted = np.array([each.drafted or 0 for each in counted])
    assert drafted[whole].tolist() == expected.drafted.round(9)[whole].tolist()
    if p_min:  # neither the rule of the harness's loop, nor always K
        sent = replayed_adaptively(replace(pair.scored, limits=None), k, p_min)
        assert sent.rounds[whole].tolist() != rounds[whole].tolist()
        assert pair.replayed(k, 0.0).rounds[whole].tolist() != rounds[whole].tolist()


@needs_llamacpp
def test_a_server_run_at_a_threshold_is_replayed_priced_and_advised_with_it(tmp_path: Path) -> None:
    words = ["engine=llamacpp", "draft=tiny_small", "k=[4,16]", "p_min=[0.9]", "temperature=[0]"]
    few = ["prompts.limit=4", "new_tokens=32", "repetitions=2", "until=all", "threads=1"]
    run = ran("server", f"results_root={tmp_path}", *words, *few, EXACT_FLAGS)
    summary = analyse(run)
    measured = {(r.prompt_set, r.k): r for r in summary.results if r.source == "measured"}
    replayed = {(r.prompt_set, r.k): r for r in summary.results if r.source == "replayed"}
    compared = [key for key in measured if key[1] and key in replayed]
    assert len(compared) == 4
    known = [key for key in compared if measured[key].rounds is not None]
    assert known
    for key in known:
        assert measured[key].rounds == pytest.approx(replayed[key].rounds)
        assert measured[key].drafted == pytest.approx(replayed[key].drafted)
    commands = run.manifest.engine and run.manifest.engine.commands
    assert commands
    assert all(("--spec-draft-p-min 0.9" in each.line) == (each.k > 0) for each in commands)
    assert summary.run.sampling.p_min == 0.9


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["p_min=[0.5,0.9]"], "give one value a run"),
        (["p_min=[1.0]"], "p_min"),
        (["p_min=[0.5]", "engine=vllm"], "engine=vllm has no such threshold"),
        (["p_min=[0.5]", "temperature=[1]"], "temperature 0 alone"),
        (["p_min=[0.5]", "draft=ngram_simple", "k=[4]"], "is no draft model"),
        (["p_min=[0.5]", "score=false"], "score=false"),
        (["p_min=[0.5]", "concurrency=[1,4]"], "not under load"),
        (["p_min=[0.5]", "url=[http://127.0.0.1:9]"], "not with url="),
    ],
)
def test_a_threshold_that_cannot_be_measured_is_refused_in_one_line(
    words: list[str], line: str
) -> None:
    with pytest.raises(UserError, match=line):
        compose("server", ["engine=llamacpp", "temperature=[0]", "until=all", *words])


@needs_llamacpp
def test_rounds_after_an_end_of_text_are_not_known_at_a_threshold(pair: Pair) -> None:
    ended = [text for text in pair.texts if text.stop_reason == "eos"]
    with replace(pair.engine, p_min=0.9).open(4) as server:
        done = [answered(text.request, server).completion for text in ended]
    assert {each.rounds for each in done} <= {None}


def test_a_draft_whose_server_lists_no_log_probabilities_is_refused_in_one_line() -> None:
    def generate(_: Asked) -> Completion:
        return Completion(tokens=(1,))

    server: Any = SimpleNamespace(generate=generate)
    with pytest.raises(UserError, match="p_min: the draft's server lists no log-probabilities"):
        asked_scores(
            [GeneratedText(REQUEST, (1, 2), "budget")],
            cast("Server", server),
            draft_name="draft",
            num_draft_tokens=2,
            least=0.5,
            among=10,
        )

"""A pair that ships with the harness and requests for it, as every engine serves them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runs import EXACT
from stubs import CPU, REQUEST

from harness import prompts as prompt_sets
from harness.analysis.replayed import as_served
from harness.config import DraftConf, ModelConf, PromptsConf
from harness.decoding.drafters import ModelDrafter
from harness.decoding.sampling import SamplingParameters
from harness.engines.llamacpp import LlamaCpp
from harness.engines.own import OwnLoop
from harness.engines.protocol import Completion, Engine, EngineFacts, Server
from harness.engines.vllm import Vllm
from harness.measurement.clock import Clock
from harness.measurement.draft_scores import score_texts
from harness.measurement.generations import Request
from harness.measurement.server_request import decoded
from harness.measurement.target_texts import GeneratedText
from harness.models.cached import CachedModel
from harness.models.embedded import EMBEDDED, gguf_of
from harness.models.load import LoadedModel, load
from harness.models.probe import cached_model
from harness.models.tokenizer import encode
from harness.theory.replay import Replayed, replay_texts

KS = (1, 2, 4, 8)
BUDGET = 48
DRAFT = "tiny_good"


def embedded(name: str, conf: type[ModelConf] = ModelConf) -> LoadedModel:
    return load(conf(name=name, id=f"embedded:{name}"), CPU)


def opened(target: LoadedModel, draft: LoadedModel) -> tuple[CachedModel, CachedModel]:
    """Both with caches, the draft's logits no wider than the target's."""
    width = min(target.vocab_size, draft.vocab_size)
    return (
        cached_model(target.network, target.vocab_size, target.shown),
        cached_model(draft.network, width, draft.shown),
    )


def shipped_requests(loaded: LoadedModel, limit: int, **changes: Any) -> list[Request]:
    """Greedy texts after so many prompts of each shipped set."""
    conf = PromptsConf(sets=["easy", "hard"], limit=limit)
    one = replace(REQUEST, model=loaded.name, eos=loaded.eos, **changes)
    return [
        replace(
            one,
            prompt_set=prompt.prompt_set,
            prompt=prompt.id,
            category=prompt.category,
            tokens=encode(loaded.tokenizer, prompt, conf),
        )
        for prompt in prompt_sets.load(conf)
    ]


class Served:
    """A pair that ships with the harness, for every engine."""

    def __init__(self, folder: Path, draft: str = DRAFT, prompts: int = 5) -> None:
        self.loaded, self.draft = embedded("tiny"), embedded(draft, DraftConf)
        self.target_model, self.draft_model = opened(self.loaded, self.draft)
        self.folder = folder
        shipped = shipped_requests(self.loaded, prompts, budget=BUDGET)
        self.requests = [replace(each, seed=n) for n, each in enumerate(shipped, 1)]

    def own(self) -> OwnLoop:
        now = Clock(self.target_model, self.draft_model).now

        def drafter(sampling: SamplingParameters, _: int) -> ModelDrafter:
            return ModelDrafter(self.draft_model, sampling, "greedy_draft")

        return OwnLoop(self.target_model, drafter, self.loaded.eos, "greedy_draft", now)

    def llamacpp(self) -> LlamaCpp:
        target, draft = (gguf_of(EMBEDDED / loaded.name) for loaded in (self.loaded, self.draft))
        context = max(len(request.tokens) for request in self.requests) + BUDGET
        return LlamaCpp(target, draft, self.folder, context, 1, more_flags=EXACT)

    def vllm(self) -> Vllm:
        context = max(len(request.tokens) for request in self.requests) + BUDGET
        target, draft = (str(EMBEDDED / loaded.name) for loaded in (self.loaded, self.draft))
        return Vllm(
            *(target, draft, self.folder, context, 1),
            more_flags=("--enforce-eager",),
            dtype="float32",
        )

    def replayed(self, texts: Sequence[GeneratedText], facts: EngineFacts, k: int) -> Replayed:
        """What an engine should have counted for what it returned."""
        traces = score_texts(
            [decoded(text, facts) for text in texts],
            self.target_model,
            self.draft_model,
            draft_name=self.draft.name,
            draft_sampling=facts.draft_sampling,
        )
        assert facts.spec.counting is not None
        assert facts.rule is not None
        limits = [facts.spec.counting.proposed(k, text.request.budget) for text in texts]
        lengths = [len(trace.tokens) for trace in traces]
        return replay_texts(*as_served(traces, lengths, limits, facts.rule, k))


@dataclass(frozen=True, eq=False)
class Answered(GeneratedText):
    """A returned text with all that its server said."""

    completion: Completion = field(kw_only=True)


def answered(request: Request, server: Server) -> Answered:
    done = server.generate(request.asked)
    return Answered(request, done.tokens, done.stop_reason, completion=done)


def completed(
    engine: Engine, k: int, requests: Sequence[Request], sampling: SamplingParameters
) -> tuple[list[Answered], EngineFacts]:
    requests = [replace(request, sampling=sampling, k=k) for request in requests]
    with engine.open(k) as server:
        return [answered(request, server) for request in requests], server.facts

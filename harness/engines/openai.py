"""Any endpoint with OpenAI's `/v1/completions`, such as mlx-lm's server: texts and times only.

Such an endpoint returns a text and its number of tokens, and the request is timed. So speedups are
measured and greedy texts compared, and nothing is replayed. The prompt is sent as the text of its
ids, and the returned text is encoded here; the server's tokens may differ in both cases.
`EngineSpec.completions` has the parameters that a server accepts in a request.
"""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

from harness.decoding.sampling import SamplingParameters
from harness.engine_facts.engines import OPENAI
from harness.engine_facts.spec import EngineSpec
from harness.engines.adapters import Adapter
from harness.engines.http_server import MODELS, HttpServer, Running, field_of, served_model
from harness.engines.protocol import Asked, Completion, EngineFacts, stop_reason
from harness.records import UserError

SERVER = "an OpenAI-compatible server"


class OpenAiServer(HttpServer):
    """One running server that completes texts."""

    def __init__(self, running: Running, k: int, tokenizer: Any, spec: EngineSpec = OPENAI) -> None:
        super().__init__(f"{spec.name} at k={k}", k, running)
        self._spec, self._tokenizer = spec, tokenizer
        self.facts = EngineFacts(spec, "unknown", spec.rule)
        if spec.completions.one_model:
            running.client.stated(MODELS)  # raises where the server does not answer
        else:
            self.named = {"model": served_model(running.client)}

    @cached_property
    def _prefix(self) -> tuple[int, ...]:
        """The special tokens before every text; the server's tokenizer adds them, too."""
        return tuple(self._tokenizer("")["input_ids"])

    def complete(self, asked: Asked, deadline_s: float) -> Completion:
        settings = request_settings(self._spec, asked.sampling, asked.seed, asked.budget)
        body = {"prompt": self._prompt_text(asked.prompt), **self.named, **settings}
        if self.k and self._spec.completions.k is not None:
            body[self._spec.completions.k] = self.k
        answer = self.ask("/v1/completions", body, deadline_s)
        choice = field_of(answer.body, "choices", self.where, SERVER)[0]
        usage = field_of(answer.body, "usage", self.where, SERVER)
        returned = self._tokenizer(field_of(choice, "text", self.where, SERVER))["input_ids"]
        return Completion(
            tokens=tuple(returned[len(self._prefix) :]),
            stop_reason=stop_reason(choice.get("finish_reason")),
            request_s=answer.request_s,
            counted=int(field_of(usage, "completion_tokens", self.where, SERVER)),
        )

    def check_vocabulary(self, tokens: Sequence[int], text: str) -> None:
        """Refuse a server whose model encodes a text to another number of tokens.

        `tokens` are those of the target's tokenizer, without special tokens.
        """
        settings = request_settings(self._spec, SamplingParameters(0.0), 0, 1)
        body = {"prompt": text, **self.named, **settings}
        answer, _ = self._client.repeated(lambda: self._client.post("/v1/completions", body))
        usage = field_of(answer, "usage", self.where, SERVER)
        expected, counted = len(self._prefix) + len(tokens), usage.get("prompt_tokens")
        if counted != expected:
            raise UserError(
                f"{self.where}: another model than model=, by its tokens: {text[:30]!r} has"
                f" {counted} tokens there and {expected} here"
            )

    def _prompt_text(self, prompt: Sequence[int]) -> str:
        before = len(self._prefix)
        starts_alike = tuple(prompt[:before]) == self._prefix
        ids = list(prompt[before:] if starts_alike else prompt)
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def request_settings(
    spec: EngineSpec, sampling: SamplingParameters, seed: int, budget: int
) -> dict[str, Any]:
    """The budget and sampling parameters of a request; raises where the server lacks one."""
    more = {
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
    }
    wanted = {field: value for field, value in more.items() if value is not None}
    refused = sorted(wanted.keys() - set(spec.completions.samplers))
    if refused:
        raise UserError(
            f"decode.{refused[0]}: engine={spec.name} has no such setting; leave it out"
        )
    return {
        "max_tokens": budget,
        "temperature": sampling.temperature,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "seed": seed,
        **wanted,
    }


def adapter(spec: EngineSpec) -> Adapter:
    return Adapter(spec, lambda _, tokenizer: partial(OpenAiServer, tokenizer=tokenizer, spec=spec))

"""Any endpoint with OpenAI's `/v1/completions`: texts and times, no counters. mlx-lm's server too.

What such an endpoint tells is a text, how many tokens it has, and how long the request took. So
speedups are measured and greedy texts compared, and nothing is replayed. The prompt is sent as the
text of its ids, and the returned text is encoded here; both may be other tokens than the server
has. `DIALECTS` says how servers differ in what a request may hold.

mlx-lm (mlx_lm/server.py, 0.32): `num_draft_tokens` is asked per request, so that one server started
with `--draft-model` can be given for every K, and one without for K = 0. It accepts a token where
two independent draws are equal: the rule `exact_match`. A model that a request names is loaded in
place of its own, so none is named. Run (0.32.2, on a CPU): it keeps the prefills of prompts, and
with a draft its text to a prompt that it has seen is another one; with `--prompt-cache-size 0` all
greedy texts equal plain decoding's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from harness.decoding.sampling import SamplingParameters
from harness.engines.http_server import MODELS, HttpServer, Running, field_of, only_model
from harness.engines.protocol import STOP_REASONS, Asked, Completion, EngineFacts
from harness.records import Rule, UserError

SERVER = "an OpenAI-compatible server"
Name = Literal["openai", "mlx"]


@dataclass(frozen=True)
class Dialect:
    """How a server's requests differ from OpenAI's.

    Attributes:
        rule: by which it accepts drafted tokens, where that is known.
        samplers: sampling parameters that a request may have beside temperature and top_p.
        k: the field that asks for a K, where a request may.
        one_model: whether it completes with the model that it was started with unless it is told
            another, and lists others besides.
    """

    rule: Rule | None = None
    samplers: tuple[str, ...] = ()
    k: str | None = None
    one_model: bool = False


DIALECTS: Mapping[Name, Dialect] = {
    "openai": Dialect(),
    "mlx": Dialect("exact_match", ("top_k", "min_p"), "num_draft_tokens", one_model=True),
}


class OpenAiServer(HttpServer):
    """One running server that completes texts."""

    def __init__(self, running: Running, k: int, tokenizer: Any, name: Name = "openai") -> None:
        """Take over a server that is said to draft `k` tokens per round.

        Args:
            running: the server.
            k: tokens.
            tokenizer: the target's, of transformers; None where no request is sent.
            name: which dialect.
        """
        super().__init__(f"{name} at k={k}", k, running)
        self._name: Name = name
        self._dialect, self._tokenizer = DIALECTS[name], tokenizer
        self.facts = EngineFacts(name, "unknown", self._dialect.rule, None, returns_ids=False)
        if self._dialect.one_model:
            running.client.stated(MODELS)  # whether it answers
        self._named = {} if self._dialect.one_model else {"model": only_model(running.client)}

    @cached_property
    def _prefix(self) -> tuple[int, ...]:
        """What the tokenizer puts before every text, and so will the server's."""
        return tuple(self._tokenizer("")["input_ids"])

    def complete(self, asked: Asked, deadline_s: float) -> Completion:
        """Ask once for a completion; see `HttpServer`."""
        settings = request_settings(self._name, asked.sampling, asked.seed, asked.budget)
        body = {"prompt": self._text(asked.prompt), **self._named, **settings}
        if self.k and self._dialect.k is not None:
            body[self._dialect.k] = self.k
        answer = self.ask("/v1/completions", body, deadline_s)
        choice = field_of(answer.body, "choices", self.where, SERVER)[0]
        usage = field_of(answer.body, "usage", self.where, SERVER)
        returned = self._tokenizer(field_of(choice, "text", self.where, SERVER))["input_ids"]
        return Completion(
            tokens=tuple(returned[len(self._prefix) :]),
            stop_reason=STOP_REASONS.get(str(choice.get("finish_reason")), "budget"),
            request_s=answer.request_s,
            counted=int(field_of(usage, "completion_tokens", self.where, SERVER)),
        )

    def check_vocabulary(self, tokens: Sequence[int], text: str) -> None:
        """Refuse a server whose model reads a text as another number of tokens.

        Args:
            tokens: ids without special ones.
            text: what they stand for in the target's tokenizer.
        """
        settings = request_settings(self._name, SamplingParameters(0.0), 0, 1)
        body = {"prompt": text, **self._named, **settings}
        answer, _ = self._client.repeated(lambda: self._client.post("/v1/completions", body))
        usage = field_of(answer, "usage", self.where, SERVER)
        expected, said = len(self._prefix) + len(tokens), usage.get("prompt_tokens")
        if said != expected:
            raise UserError(
                f"{self.where}: another model than model=, by its tokens: {text[:30]!r} has"
                f" {said} tokens there and {expected} here"
            )

    def _text(self, prompt: Sequence[int]) -> str:
        before = len(self._prefix)
        starts_alike = tuple(prompt[:before]) == self._prefix
        ids = list(prompt[before:] if starts_alike else prompt)
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def request_settings(
    name: Name, sampling: SamplingParameters, seed: int, budget: int
) -> dict[str, Any]:
    """How a request samples: as our loop does, where the server can."""
    more = {
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
    }
    wanted = {field: value for field, value in more.items() if value is not None}
    refused = sorted(wanted.keys() - set(DIALECTS[name].samplers))
    if refused:
        raise UserError(f"decode.{refused[0]}: engine={name} has no such setting; leave it out")
    return {
        "max_tokens": budget,
        "temperature": sampling.temperature,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "seed": seed,
        **wanted,
    }

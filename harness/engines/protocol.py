"""The protocol of engines: servers, requests and completions.

On most engines K is fixed when a server starts. So a `Server` has one K, and several servers run
side by side to compare K. Prompts and texts are token ids, because a text that is encoded again may
have other tokens.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple, Self

from harness.decoding.sampling import SamplingParameters
from harness.engine_facts.spec import EngineSpec
from harness.engines.turns import Turn
from harness.records import Round, Rule, ServerCommand, StopReason, UserError

# Log-probabilities of the likeliest tokens by their ids, position by position
Likeliest = tuple[Mapping[int, float], ...]
# The reasons why a text ends, by the names of every engine
STOP_REASONS: Mapping[str, StopReason] = {
    "stop": "eos",
    "eos": "eos",
    "word": "stop_string",
    "length": "budget",
    "limit": "budget",
}


class ServerDiedError(UserError):
    """A server that gets no more requests: it ended, hangs, or refuses all requests.

    Earlier measurements stay valid. A `repeatable` one may answer within moments, as after a
    restart.
    """

    def __init__(self, message: str, *, repeatable: bool = False) -> None:
        super().__init__(message)
        self.repeatable = repeatable


class RequestFailedError(UserError):
    """A request without a usable answer, on a server that may answer the next one.

    The same request may be answered within moments where it is `repeatable`; `retry_after_s` are
    the seconds to wait, where the server asks for them (`Retry-After`).
    """

    def __init__(
        self, message: str, *, repeatable: bool = True, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.repeatable, self.retry_after_s = repeatable, retry_after_s


class TokensLostError(RequestFailedError):
    """A stream that left out some of its tokens: the request is to be answered whole."""


class RefusedError(UserError):
    """A request that a server refuses with an HTTP status, because of the request itself."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class EngineFacts:
    """The properties of a running engine."""

    spec: EngineSpec
    version: str  # as the engine reports it; "unknown" where it does not
    rule: Rule | None  # None where it cannot be known
    # Whether any round may draft fewer than K tokens, or none, as with a look-up
    drafts_fewer: bool = False
    slots: int | None = None  # requests that it decodes side by side; None if not reported

    def draft_sampling(self, target: SamplingParameters) -> SamplingParameters:
        spec = self.spec
        draft = SamplingParameters(target.temperature) if spec.draft_by_temperature else target
        return draft if spec.draft_top_k is None else replace(draft, top_k=spec.draft_top_k)

    @property
    def first_position(self) -> int:
        """The tokens of a returned text that come from the prefill.

        One where no rounds are counted, since the time of a request for one token is subtracted.
        """
        counting = self.spec.counting
        return 1 if counting is None else counting.first_position


class Asked(NamedTuple):
    """A request."""

    prompt: Sequence[int]  # token ids, at least one
    sampling: SamplingParameters  # the engine's defaults are switched off
    seed: int  # of this request alone; equal seeds for several prompts correlate their texts
    budget: int  # tokens to return at most
    # The likeliest tokens with log-probabilities at each position, besides the returned one; 0 in
    # timed requests, which they slow down
    logprobs: int = 0
    cached: bool = False  # whether the server may use its prompt cache
    decode_cpu: bool = False  # whether the processor time of decoding is measured separately
    turn: Turn | None = None  # of a server that takes turns with others (`Server.turn`)


def stop_reason(name: object) -> StopReason:
    return STOP_REASONS.get(str(name), "budget")


def failure_of(answer: Any) -> str | None:
    """Why a request failed, by its answer or a part of that; None where it does not say so."""
    if not isinstance(answer, Mapping):
        return "no answer" if answer is None else _short(answer)
    choices, status = answer.get("choices"), answer.get("status_code")
    if answer.get("error"):
        return _short(answer["error"])
    if answer.get("object") == "error" or set(answer) == {"detail"}:
        return _short(answer.get("message", answer.get("detail")))
    if isinstance(status, int) and status >= HTTPStatus.BAD_REQUEST:
        return f"status {status}"
    listed = isinstance(choices, list) and bool(choices) and isinstance(choices[0], Mapping)
    return None if choices is None or listed else f"choices is {_short(choices)}"


def _short(error: Any) -> str:
    """An error of a server in a few words of one line."""
    if isinstance(error, Mapping):
        error = error.get("message") or error
    text = error if isinstance(error, str) else json.dumps(error)
    return ascii(" ".join(text.split())[:80])


def token_ids(ids: Sequence[int] | None) -> tuple[int, ...]:
    return tuple(int(token) for token in ids or ())


def seconds(ms: float | None) -> float | None:
    return None if ms is None else float(ms) / 1e3


@dataclass(frozen=True)
class Completion:
    """The result of one request, from the answer of a server or of the harness's loop."""

    # The returned ids; an end-of-text token is the last one. Where an engine returns only a text,
    # its ids by the target's tokenizer.
    tokens: tuple[int, ...] = ()
    stop_reason: StopReason = "budget"  # so too where an answer does not tell
    # From sending the request to the whole answer, on the client's clock; nan for a stored answer
    request_s: float = math.nan
    # Draft-verify cycles, including plain steps of a speculating server; None on a plain server,
    # and where the engine does not report them
    rounds: int | None = None
    # drafted, accepted: tokens over all rounds; None where `rounds` would be
    drafted: int | None = None
    accepted: int | None = None
    accepted_lengths: tuple[int, ...] | None = None  # rounds that accepted exactly 0, 1, ... tokens
    # prefill_s, decode_s: by the engine's own clock; the token that comes from the prefill is in
    # the first. None where the engine does not report them.
    prefill_s: float | None = None
    decode_s: float | None = None
    # Processor time of the server's process during the request, of all threads; None for a server
    # elsewhere, or with other requests. On a machine that is shared with other work it varies less
    # than elapsed time.
    cpu_s: float | None = None
    # The part of cpu_s for decoding, where it was requested and can be read (`engines.process`)
    decode_cpu_s: float | None = None
    steps: tuple[Round, ...] | None = None  # each of the rounds, where the engine reports them
    # Tokens by the engine's own count, where it returns only a text, or in a stored answer
    counted: int | None = None
    likeliest: Likeliest = ()  # empty where not requested, or not reported
    asked: int = 1  # how often the request was sent; all other values are of the last time
    k: int | None = None  # the server's K, as its answer tells; 0 for plain decoding
    text: str | None = None
    logprobs: tuple[float, ...] = ()  # of the tokens; empty where not requested
    truncated: bool = False  # whether the server's context was too small for the request
    # engine, model, prompt, temperature: of a stored answer; model and prompt by their names
    engine: str = ""
    model: str | None = None
    prompt: str | None = None
    temperature: float | None = None

    @property
    def returned(self) -> int:
        """The number of returned tokens, including the prefill's."""
        return len(self.tokens) if self.counted is None else self.counted


class Server(ABC):
    """A running engine at one K."""

    k: int  # tokens that it drafts per round; 0 is plain decoding
    facts: EngineFacts

    def turn(self, servers: int) -> Turn | None:  # noqa: ARG002
        """A share of the time next to others, `servers` in all; None where it cannot be paused."""
        return None

    @abstractmethod
    def generate(self, asked: Asked) -> Completion:
        """Complete a prompt.

        Raises:
            ServerDiedError: the server ended, hangs or cannot be reached any more.
            RequestFailedError: this request has no answer, though it was repeated.
            UserError: the engine cannot do this, or its answer lacks what it should have.
        """

    @property
    def where(self) -> str:
        """The name of the server in errors."""
        return f"k={self.k}"

    @property
    def model_name(self) -> str | None:
        """The model that it serves, a name or a path; None where it does not report one."""
        return None

    @abstractmethod
    def cpu_s(self) -> float | None:
        """The processor time so far of the server's process, all threads; None elsewhere.

        The difference of two calls is that of all requests in between.
        """

    @abstractmethod
    def check_vocabulary(self, tokens: Sequence[int], text: str) -> None:
        """Refuse a server whose model decodes token ids to another text, where it can be tested."""

    def close(self) -> None:  # noqa: B027
        """End the server if it was started here; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Engine(ABC):
    """A pair on an engine, which opens servers for plain decoding and for any K."""

    @abstractmethod
    def open(self, k: int, synthetic: Sequence[float] | None = None) -> Server:
        """Start a server that drafts k tokens per round, or attach to a running one.

        With `synthetic` acceptance, unconditional per drafted position and never increasing, the
        text is not the target's.

        Raises:
            UserError: the server does not start or answer, or has no synthetic acceptance.
        """

    def command(self, k: int) -> ServerCommand | None:  # noqa: ARG002
        """The command that starts the server at K; None where none is started.

        It names the program without its path, has the user's environment variables for the engine,
        and leaves out host and port.
        """
        return None

    def log(self, k: int, synthetic: Sequence[float] | None = None) -> Path | None:  # noqa: ARG002
        """The log of the server that `open` starts; None where none is started."""
        return None

"""What every engine can be asked, and what it answers.

An engine's K is fixed when it starts, on most of them; so a `Server` is one K, and comparing K
means several servers side by side. Prompts and texts are token ids, because text that is encoded
again may have other tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from harness.decoding.sampling import SamplingParameters
from harness.engines.turns import Turn
from harness.records import Round, Rule, ServerCommand, StopReason, UserError
from harness.serving.spec import EngineSpec

# Log-probabilities of the likeliest tokens by their ids, position by position
Likeliest = tuple[Mapping[int, float], ...]
# Why a text ends, in the words of every engine
STOP_REASONS: Mapping[str, StopReason] = {
    "stop": "eos",
    "eos": "eos",
    "word": "stop_string",
    "length": "budget",
    "limit": "budget",
}


class ServerDiedError(UserError):
    """A server that is asked no more: it ended, hangs, or turns everyone away.

    What was measured so far stands.

    Attributes:
        repeatable: whether it may answer within moments, as one that is restarted does.
    """

    def __init__(self, message: str, *, repeatable: bool = False) -> None:
        super().__init__(message)
        self.repeatable = repeatable


class RequestFailedError(UserError):
    """A request without a usable answer, of a server that may well answer the next one.

    Attributes:
        repeatable: whether the same request may be answered within moments.
        retry_after_s: how long the server asks to be left alone; None where it says nothing.
    """

    def __init__(
        self, message: str, *, repeatable: bool = True, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.repeatable, self.retry_after_s = repeatable, retry_after_s


class TokensLostError(RequestFailedError):
    """A stream that left out some of its tokens: the request is to be answered whole."""


class RefusedError(UserError):
    """A request that a server answers with an error that is the request's.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class EngineFacts:
    """An engine as it runs.

    Attributes:
        version: as the engine reports it; "unknown" where it does not.
        rule: by which it accepts drafted tokens; None where it cannot be known.
        drafts_fewer: whether any round may draft fewer than K tokens, or none: a look-up's.
        slots: requests that it decodes side by side; None where it does not tell.
    """

    spec: EngineSpec
    version: str
    rule: Rule | None
    drafts_fewer: bool = False
    slots: int | None = None

    def draft_sampling(self, target: SamplingParameters) -> SamplingParameters:
        """How a draft is sampled for a request that samples the target so."""
        spec = self.spec
        draft = SamplingParameters(target.temperature) if spec.draft_by_temperature else target
        return draft if spec.draft_top_k is None else replace(draft, top_k=spec.draft_top_k)

    @property
    def first_position(self) -> int:
        """Tokens of a returned text that come from the prefill.

        One where no rounds are counted: what times their tokens is a request less another for one.
        """
        counting = self.spec.counting
        return 1 if counting is None else counting.first_position


class Asked(NamedTuple):
    """A request.

    Attributes:
        prompt: token ids, at least one.
        sampling: sampling parameters, the engine's defaults switched off.
        seed: of this request alone; equal seeds for several prompts correlate their texts.
        budget: tokens to return at most.
        logprobs: of how many likeliest tokens these are wanted at each position, with those of the
            returned ids; none where a request is timed, which they slow down.
        cached: whether the server may use what its cache holds of the prompt.
        decode_cpu: whether the processor time of decoding is wanted apart from the prefill's.
        turn: of a server that takes turns with others (`Server.turn`).
    """

    prompt: Sequence[int]
    sampling: SamplingParameters
    seed: int
    budget: int
    logprobs: int = 0
    cached: bool = False
    decode_cpu: bool = False
    turn: Turn | None = None


@dataclass(frozen=True)
class ServedRecord:
    """What an engine's answer tells of one request; None where it does not.

    Attributes:
        returned: tokens of the answer.
        k: that the server drafted with; 0 where it decodes plainly.
        rounds, drafted, accepted: as the engine counts them.
        accepted_lengths: rounds that accepted exactly 0, 1, ... tokens.
        steps: each of the rounds.
        prefill_s, decode_s: until the first token, and from there to the last.
        tokens, text: of the answer; `logprobs` are its tokens', empty where none were asked for.
        likeliest: as of a `Completion`.
        truncated: whether the server's context was too small for it.
        model, prompt: their names.
    """

    engine: str
    returned: int = 0
    k: int | None = None
    rounds: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    accepted_lengths: tuple[int, ...] | None = None
    steps: tuple[Round, ...] | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    stop_reason: StopReason | None = None
    tokens: tuple[int, ...] | None = None
    text: str | None = None
    logprobs: tuple[float, ...] = ()
    likeliest: Likeliest = ()
    truncated: bool = False
    model: str | None = None
    prompt: str | None = None
    temperature: float | None = None


def token_ids(ids: Sequence[int] | None) -> tuple[int, ...] | None:
    """The ids of an answer; None where it has none."""
    return None if ids is None else tuple(int(token) for token in ids)


def seconds(ms: float | None) -> float | None:
    """A time that an answer has in milliseconds."""
    return None if ms is None else float(ms) / 1e3


@dataclass(frozen=True)
class Completion:
    """One request's result.

    Attributes:
        tokens: the returned ids, in order; an end-of-text token is the last of them. Where an
            engine returns a text alone, what the target's tokenizer makes of it.
        stop_reason: why the text ends.
        request_s: from sending the request to the whole answer, on the client's clock.
        rounds: rounds of drafting and verifying, the plain steps of a speculating server among
            them; None on a plain server, and where the engine does not tell.
        drafted, accepted: tokens, over all rounds; None likewise.
        prefill_s, decode_s: by the engine's own clock, the token that comes from the prefill in
            the first; None where the engine does not tell.
        cpu_s: processor time that the server's process spent meanwhile, of all threads; None for
            a server elsewhere, or with other requests. On a machine shared with others it is
            steadier than any wall clock.
        decode_cpu_s: the part of it that decoding took, where it was asked for and can be read
            (`engines.cpu_clock`).
        counted: tokens by the engine's own count, where it returns a text alone.
        steps: each of the rounds, where the engine tells.
        likeliest: at each position the log-probabilities of the likeliest tokens, by id; empty
            where none were asked for, or the engine does not tell.
        asked: how often it was asked; all else is of the last time.
    """

    tokens: tuple[int, ...]
    stop_reason: StopReason
    request_s: float
    rounds: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    cpu_s: float | None = None
    decode_cpu_s: float | None = None
    steps: tuple[Round, ...] | None = None
    counted: int | None = None
    likeliest: Likeliest = ()
    asked: int = 1

    @property
    def returned(self) -> int:
        """How many tokens came back, the prefill's included."""
        return len(self.tokens) if self.counted is None else self.counted


class Server(ABC):
    """An engine that runs, at one K.

    Attributes:
        k: tokens that it drafts per round; 0 decodes plainly.
    """

    k: int
    facts: EngineFacts

    def turn(self, servers: int) -> Turn | None:  # noqa: ARG002
        """A share of the time next to other servers; None where this one cannot be paused.

        Args:
            servers: that share it, this one included.
        """
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
        """What errors name it by."""
        return f"k={self.k}"

    @property
    def model_name(self) -> str | None:
        """What it says that it serves, a name or a path; None where it does not say."""
        return None

    @abstractmethod
    def cpu_s(self) -> float | None:
        """Processor time so far of the server's process, all threads; None elsewhere.

        Between two calls it is that of whatever was decoded meanwhile, side by side or not.
        """

    @abstractmethod
    def check_vocabulary(self, tokens: Sequence[int], text: str) -> None:
        """Refuse a server whose model reads token ids as another text, where it can be asked.

        Raises:
            UserError: it serves another model.
        """

    def close(self) -> None:  # noqa: B027
        """End what was started here; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Engine(Protocol):
    """A pair on an engine that can be opened, plainly and at any K."""

    def open(self, k: int, synthetic: Sequence[float] | None = None) -> Server:
        """Start a server, or attach to one that runs.

        Args:
            k: tokens to draft per round; 0 decodes plainly.
            synthetic: synthetic acceptance, unconditional per drafted position, never increasing;
                the text is then not the target's.

        Raises:
            UserError: it does not start or answer, or the engine has no synthetic acceptance.
        """
        ...


class StartableEngine(Engine, Protocol):
    """An engine whose servers are started here, or that decodes in this process."""

    def command(self, k: int, /) -> ServerCommand | None:
        """What a user types to start its server at K; None where none is started.

        Without where it listens, and the program by its name; with the user's own variables.
        """
        ...

    def log(self, k: int, synthetic: Sequence[float] | None = None, /) -> Path | None:
        """The log of the server that `open` starts; None where none is started."""
        ...

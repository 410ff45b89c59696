"""A server behind HTTP, whatever its engine: started here or running somewhere, asked, ended."""

import math
import os
import shlex
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

from harness.engines.client import HttpClient
from harness.engines.counters import CounterNames
from harness.engines.cpu_clock import CpuReadings
from harness.engines.process import LOOPBACK, ServerProcess, free_port, on_path
from harness.engines.protocol import (
    Asked,
    Completion,
    RefusedError,
    RequestFailedError,
    ServedRecord,
    Server,
    ServerDiedError,
)
from harness.engines.turns import Turn
from harness.records import Rule, ServerCommand, UserError, Varying
from harness.serving.drafts import DraftKind
from harness.serving.spec import EngineSpec

# Positions in addition to prompt, budget and one draft, so that the context never shortens a draft
SPARE_POSITIONS = 8
# Words of a variable's name that say what nobody else should read, or what holds here alone
SECRETS = frozenset(("AUTH", "CREDENTIALS", "KEY", "PASSWORD", "SECRET", "TOKEN"))
PLACES = frozenset(("DIR", "HOST", "IP", "PATH", "PORT", "ROOT"))
# Requests in flight beyond which some may wait for their turn, as they do at a rate
SIDE_BY_SIDE = 8
# The statuses of a server that has no such path
NO_SUCH_PATH = (404, 405, 501)
# Where an OpenAI-compatible server lists its models
MODELS = "/v1/models"


@dataclass(frozen=True)
class Running:
    """A server that answers.

    Attributes:
        alone: whether it decodes one request at a time, so that what changes on it meanwhile (its
            counters, its processor time) is that request's.
    """

    client: HttpClient
    process: ServerProcess | None = None
    alone: bool = False


@dataclass(frozen=True)
class Answer:
    """What a server answered, and what it took: see `protocol.Completion`."""

    body: Any
    request_s: float
    cpu_s: float | None
    readings: CpuReadings | None = None
    turn: Turn | None = None


@dataclass(frozen=True)
class Interface:
    """How a kind of server is recognised, asked for a text as token ids, and read.

    Attributes:
        probe: a path, and the field of its answer that shows the kind.
        version: a path, and the field with the engine's version.
        path: of completions.
        ids: the field of an answer that has the token ids.
        parse: an answer; raises LookupError, TypeError, ValueError or AttributeError.
        names_model: whether a request names the model.
        drafts: whether it drafts, where its answers do not say so.
    """

    engine: str
    probe: tuple[str, str]
    version: tuple[str, str]
    path: str
    ids: str
    body: Callable[[Asked], dict[str, Any]]
    parse: Callable[[Mapping[str, Any]], ServedRecord]
    counters: CounterNames  # of all requests
    names_model: bool = False
    drafts: Callable[[HttpClient], bool] = lambda _: False

    def version_of(self, client: HttpClient) -> str:
        """The engine's version; "unknown" where the server does not say."""
        path, field = self.version
        return str(client.stated_or_empty(path).get(field, "unknown"))


@dataclass(frozen=True)
class CardMemory:
    """A card's memory just before a server starts on it, in bytes.

    Attributes:
        free, total: as its driver says, next to all that other processes hold.
        weights: that the server will load; 0 where their size is not known.
        servers: that are still to start on it, this one among them.
    """

    free: int
    total: int
    weights: int = 0
    servers: int = 1


@dataclass(frozen=True)
class StartedEngine(ABC):
    """A pair whose servers are started on this machine, each at one K.

    Attributes:
        target, draft: hub ids, folders or GGUF files; no draft where only plain decoding is
            measured, where the target's own weights draft, or where tokens are looked up.
        context_tokens: of the longest request, prompt and budget.
        threads: of each server, on a CPU; None leaves them to the engine.
        revision, draft_revision: of hub ids; None takes their newest.
        rule: by which it accepts; of `ratio` the draft samples.
        memory: of the card that it starts on; None where there is none.
        timeout_factor: of the limits on the time of requests.
        varying: how the K of a server that drafts changes while it serves; it is started at the
            largest then.
        schedule: K by the number of requests, as (lowest, highest, K).
    """

    # What is known of the engine; and seconds until a server has loaded its models, and compiled
    # them where it does
    spec: ClassVar[EngineSpec]
    ready_s: ClassVar[float] = 1200.0
    # What a user's own server is started by, where it is not called as `engine=` has it; the flags
    # that a measurement needs and a server in production does not; and how the names of the
    # variables begin that change how it serves
    binary: ClassVar[str | None] = None
    measuring: ClassVar[frozenset[str]]
    variables: ClassVar[tuple[str, ...]]

    target: str | Path
    draft: str | Path | None
    logs: Path
    context_tokens: int
    threads: int | None = None
    revision: str | None = None
    draft_revision: str | None = None
    kind: DraftKind = "model"
    rule: Rule = "greedy_draft"
    slots: int = 1
    memory: CardMemory | None = None
    more_flags: tuple[str, ...] = ()
    timeout_factor: float = 1.0
    varying: Varying = ""
    schedule: tuple[tuple[int, int, int], ...] = ()

    def open(self, k: int, synthetic: Sequence[float] | None = None) -> "HttpServer":
        """Start a server that drafts k tokens per round, and wait until it answers."""
        flags, program = self.flags(k, synthetic), self.program()
        port = free_port()
        command = [*program, *flags, "--host", LOOPBACK, "--port", str(port)]
        process = ServerProcess(command, self.log(k, synthetic), self.environment(synthetic))
        client = HttpClient(
            f"http://{LOOPBACK}:{port}",
            alive=lambda: process.alive,
            timeout_factor=self.timeout_factor,
        )
        server, log = f"{self.spec.title} at k={k}", self.log(k, synthetic)
        what = f"{server} to have loaded its models (log: {log})"
        try:
            late = client.wait_until_ready("/health", self.ready_s, what)
            if late or not process.alive:
                why = f": {late}" if process.alive else " ended"
                raise UserError(f"{server}{why}; {process.last_words()}")
            return self.server(Running(client, process, self.slots == 1), k)
        except BaseException:  # another server than was wanted does not go on
            process.stop()
            raise

    def command(self, k: int) -> ServerCommand:
        """What starts a server at K; see `protocol.StartableEngine`."""
        variables, flags = self._own_variables(), self.flags(k)
        served = [*_without(replace(self, more_flags=()).flags(k), self.measuring)]
        return ServerCommand(
            k=k,
            slots=self.slots,
            line=_line({**variables, **self.environment()}, self.started_as(), flags),
            production=_line(
                variables, (self.binary or self.spec.name,), [*served, *self.more_flags]
            ),
            context_tokens=self.positions(k),
            weights_bytes=self.weights_bytes(k),
        )

    def started_as(self) -> Sequence[str]:
        """The program as a user types it."""
        return (self.spec.name,)

    def positions(self, k: int) -> int:
        """What the context of a request has room for at K."""
        return self.context_tokens + k + SPARE_POSITIONS

    def weights_bytes(self, k: int) -> int | None:  # noqa: ARG002
        """Of the files that a server at K reads; None where they are the checkpoints."""
        return None

    def _own_variables(self) -> dict[str, str]:
        """The user's variables that change how it serves; no secret, and no place."""
        return {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(self.variables)
            and not (SECRETS | PLACES) & set(name.split("_"))
            and "://" not in value
        }

    def log(self, k: int, synthetic: Sequence[float] | None = None) -> Path:
        """Where a server's log goes; servers with synthetic acceptance have one of their own."""
        kind = "_synthetic" if synthetic is not None else f"_{self.varying}" if self.varying else ""
        return self.logs / f"{self.spec.name}_k{k}{kind}.log"

    def program(self) -> list[str]:
        """What starts a server, before its flags."""
        return [on_path(self.spec.name)]

    def environment(self, synthetic: Sequence[float] | None = None) -> Mapping[str, str]:  # noqa: ARG002
        """Variables of a server in addition to this process's own."""
        return {}

    def memory_flags(self, k: int) -> dict[str, str]:
        """The flag for this server's share of the card; none without a card, or with the user's.

        Raises:
            UserError: the card has too little free for the weights.
        """
        flag, memory = self.spec.memory_flag, self.memory
        if flag is None or memory is None or self._given(flag):
            return {}
        room = memory.free / memory.servers - self.spare_bytes(k)
        if room <= memory.weights:
            shared = f", shared by {memory.servers} servers" if memory.servers > 1 else ""
            fewer = "lower servers=, " if memory.servers > 1 else ""
            needed = (memory.weights + self.spare_bytes(k)) * memory.servers
            raise UserError(
                f"engine={self.spec.name} at k={k}: {needed / 1e9:,.3g} GB of the card's memory"
                f" needed{shared}, and {memory.free / 1e9:,.3g} GB of {memory.total / 1e9:,.3g}"
                f" GB are free next to the models that score its texts and to other processes;"
                f" {fewer}use a larger card, or score=false, which loads no models here and"
                " predicts nothing"
            )
        share = self.memory_share(room, memory)
        return {flag: f"{math.floor(1e3 * share) / 1e3:.3f}"}

    def spare_bytes(self, k: int) -> float:
        """What a server takes of a card besides its weights and its cache."""
        raise NotImplementedError

    def memory_share(self, room: float, memory: CardMemory) -> float:
        """What `memory_flag` is to be, so that weights and cache take `room` bytes."""
        raise NotImplementedError

    def _given(self, flag: str) -> bool:
        names = (given.split("=", 1)[0].replace("_", "-") for given in self.more_flags)
        return flag in names

    @abstractmethod
    def flags(self, k: int, synthetic: Sequence[float] | None = None) -> list[str]:
        """A server's command line, without where it listens."""

    @abstractmethod
    def server(self, running: Running, k: int) -> "HttpServer":
        """Take over a server that answers."""


@dataclass(frozen=True)
class AttachedEngine:
    """Servers that the user runs: one that decodes plainly, and one per K.

    Attributes:
        urls: by K; 0 is the plain one.
        key: the servers' API key, or None.
        timeout_factor: of the limits on the time of requests.
    """

    urls: Mapping[int, str]
    server: "Callable[[Running, int], HttpServer]"
    key: str | None = field(default=None, repr=False)
    timeout_factor: float = 1.0

    def open(self, k: int, synthetic: Sequence[float] | None = None) -> "HttpServer":
        """Attach to the server of this K."""
        if k not in self.urls:
            raise UserError(f"url: no server for k={k}; there are {sorted(self.urls)}")
        if synthetic is not None:
            raise UserError(f"url={self.urls[k]}: acceptance is fixed when a server starts")
        client = HttpClient(self.urls[k], self.key, timeout_factor=self.timeout_factor)
        return self.server(Running(client), k)


class HttpServer(Server):
    """One running server, without what differs between engines.

    Attributes:
        decoded_field: of the answer of /detokenize, the one with the text.
        streams: whether `complete` knows an answer's first token as it arrives.
        url: where it listens.
        named: what names the model in a request; nothing where a server has one model.
    """

    decoded_field: ClassVar[str]
    streams: ClassVar[bool] = False

    def __init__(self, title: str, k: int, running: Running) -> None:
        self.k, self.url, self._title = k, running.client.url, title
        self._client, self._process, self._alone = running.client, running.process, running.alone
        self._in_flight, self._lock = 0, threading.Lock()
        self.named: Mapping[str, Any] = {}

    def generate(self, asked: Asked) -> Completion:
        """Complete a prompt, asked again where a failure may pass; see `protocol.Server`."""
        with self._lock:
            self._in_flight += 1
            queued = max(1.0, self._in_flight / SIDE_BY_SIDE)
        if asked.turn is not None:
            queued = asked.turn.servers
        deadline_s = queued * self._client.deadline_s(len(asked.prompt), asked.budget)
        try:
            with self._named_in_errors():
                done, times = self._client.repeated(lambda: self._complete(asked, deadline_s))
        finally:
            with self._lock:
                self._in_flight -= 1
        return replace(done, asked=times)

    def _complete(self, asked: Asked, deadline_s: float) -> Completion:
        try:
            return self.complete(asked, deadline_s)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            kind = type(error).__name__
            raise RequestFailedError(
                f"{self.where}: its answer cannot be read ({kind}: {error})", repeatable=False
            ) from error

    @abstractmethod
    def complete(self, asked: Asked, deadline_s: float) -> Completion:
        """Ask once for a completion, within so many seconds."""

    def turn(self, servers: int) -> Turn | None:
        """See `protocol.Server`: of a server that was started here, works alone and streams."""
        process = self._process
        if not self.streams or process is None or not self._alone or not process.pausable:
            return None
        return Turn(process.pid, servers)

    def ask(
        self,
        path: str,
        body: Mapping[str, Any],
        deadline_s: float,
        *,
        decode_cpu: bool = False,
        turn: Turn | None = None,
    ) -> Answer:
        """The answer to a request, timed; `decode_cpu` and `turn` as in `Asked`."""
        readings = CpuReadings(self.cpu_s) if decode_cpu and self._alone else None
        cpu, begin = self._request_cpu_s(), perf_counter()
        with nullcontext() if readings is None else readings:
            if turn is None:
                answer = self._client.post(path, body, deadline_s)
            else:
                answer = self.streamed(path, body, deadline_s, turn)
        request_s, after = perf_counter() - begin, self._request_cpu_s()
        cpu_s = None if cpu is None or after is None else after - cpu
        return Answer(answer, request_s, cpu_s, readings, turn)

    def streamed(self, path: str, body: Mapping[str, Any], deadline_s: float, turn: Turn) -> Any:
        """The answer to a request as a stream, made whole; `turn` is told of its tokens."""
        raise NotImplementedError

    def check_vocabulary(self, tokens: Sequence[int], text: str) -> None:
        """Refuse a server whose model reads token ids as another text; see `protocol.Server`."""
        body = {"tokens": list(tokens), **self.named}
        try:
            answer, _ = self._client.repeated(lambda: self._client.post("/detokenize", body))
        except RefusedError as error:
            if error.status in NO_SUCH_PATH:
                raise
            # llama.cpp answers to an id that its model lacks with an error of its C++ library
            raise UserError(
                f"{self.where}: another vocabulary than that of model=, by its tokens: it cannot"
                f" read the ids of {text[:30]!r} (status {error.status}); give the server of"
                " model=, or the model= that it serves"
            ) from error
        decoded = answer.get(self.decoded_field) if isinstance(answer, dict) else None
        if decoded is None or decoded.strip() != text.strip():
            raise UserError(
                f"{self.where}: another model than model=, by its tokens: ids that stand for"
                f" {text[:30]!r} are {str(decoded)[:30]!r} there"
            )

    def check_drafts(self, drafted: int | None, tokens: int, needs: str) -> None:
        """Refuse a server that does not draft as its K says.

        Args:
            tokens: that it returned; the first comes from the prefill, and the last of two may be
                left to a plain step.
            needs: what it has to be started with to draft.
        """
        if self.k == 0 and drafted:
            raise UserError(
                f"{self.where}: it drafts, and was given as the server that decodes plainly"
            )
        if self.k and drafted == 0 and tokens > 2 and not self.facts.drafts_fewer:
            raise UserError(f"{self.where}: it drafted nothing; k={self.k} needs {needs}")

    def completion(self, answer: Answer, record: ServedRecord) -> Completion:
        """A request's result; counts are passed over where it decodes plainly."""
        request_s, prefill_s, decode_s = answer.request_s, record.prefill_s, record.decode_s
        if answer.turn is not None and prefill_s is not None and decode_s is not None:
            prefill_s -= answer.turn.prefill_paused_s
            decode_s = answer.turn.running_s(decode_s)
            request_s -= answer.turn.paused_s
        return Completion(
            tokens=record.tokens or (),
            stop_reason=record.stop_reason or "budget",
            request_s=request_s,
            rounds=record.rounds if self.k else None,
            drafted=record.drafted if self.k else None,
            accepted=record.accepted if self.k else None,
            prefill_s=prefill_s,
            decode_s=decode_s,
            cpu_s=answer.cpu_s,
            decode_cpu_s=answer.readings
            and answer.readings.decode_s(record.prefill_s, record.decode_s),
            steps=record.steps if self.k else None,
            likeliest=record.likeliest,
        )

    @property
    def model_name(self) -> str | None:
        """See `protocol.Server`."""
        try:
            return only_model(self._client)
        except (ServerDiedError, RequestFailedError) as error:
            if error.repeatable:  # it might have said
                raise
        except UserError:
            pass
        return None

    def without_counters(self, where: str, needs: str) -> UserError:
        """What to do about a server that drafts and does not tell its rounds."""
        return UserError(
            f"{self.where}: no counters {where}; {needs}, or use engine=openai, which only times"
        )

    @property
    def where(self) -> str:
        """The address as errors name it."""
        return self._client.where

    @property
    def process_id(self) -> int | None:
        """Of the server, where it was started here."""
        return None if self._process is None else self._process.pid

    def cpu_s(self) -> float | None:
        """Processor time of the server so far; None where it was not started here."""
        return None if self._process is None else self._process.cpu_s()

    def close(self) -> None:
        """End the server, if it was started here."""
        if self._process is not None:
            self._process.stop()

    @contextmanager
    def _named_in_errors(self) -> Iterator[None]:
        """Say which server fails, and why one that was started here answers no more."""
        try:
            yield
        except (ServerDiedError, RequestFailedError) as error:
            died = self._process is not None and isinstance(error, ServerDiedError)
            words = f"; {self._process.last_words()}" if died and self._process else ""
            error.args = (f"{self._title}: {error}{words}",)
            raise

    def _request_cpu_s(self) -> float | None:
        return self.cpu_s() if self._alone else None


def _line(variables: Mapping[str, str], program: Sequence[str], flags: Sequence[str]) -> str:
    assigned = (f"{name}={shlex.quote(value)}" for name, value in variables.items())
    return " ".join([*assigned, shlex.join([*program, *flags])])


def _without(flags: Sequence[str], names: Collection[str]) -> Iterator[str]:
    left_out = False
    for word in flags:
        if word.startswith("--"):
            left_out = word in names
        if not left_out:
            yield word


def field_of(answer: Any, field: str, where: str, expected: str) -> Any:
    """A field that an answer must have."""
    if not isinstance(answer, dict) or answer.get(field) is None:
        raise RequestFailedError(
            f"{where}: its answer has no {field!r}; is it {expected}?", repeatable=False
        )
    return answer[field]


def only_model(client: HttpClient) -> str:
    """The name of the model that an OpenAI-compatible server has."""
    where = client.where
    listed = field_of(client.stated(MODELS), "data", where, "an OpenAI-compatible server")
    if not listed:
        raise UserError(f"{where}: it serves no model")
    return str(listed[0]["id"])

"""The common part of all HTTP servers: start or attach, send requests, read counters, stop."""

import math
import os
import shlex
import threading
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

from harness.engine_facts.draft_kinds import DraftKind
from harness.engine_facts.spec import EngineSpec
from harness.engines.counters import CounterNames
from harness.engines.http_client import HttpClient, WantedModel
from harness.engines.process import LOOPBACK, CpuReadings, ServerProcess, free_port, on_path
from harness.engines.protocol import (
    Asked,
    Completion,
    Engine,
    RefusedError,
    RequestFailedError,
    Server,
    ServerDiedError,
    failure_of,
)
from harness.engines.turns import Turn
from harness.records import Rule, ServerCommand, UserError, Varying

# Positions in addition to prompt, budget and one draft, so that the context never shortens a draft
SPARE_POSITIONS = 8
# Words in the names of environment variables that hold secrets, or values of this machine only
SECRETS = frozenset(("AUTH", "CREDENTIALS", "KEY", "PASSWORD", "SECRET", "TOKEN"))
PLACES = frozenset(("DIR", "HOST", "IP", "PATH", "PORT", "ROOT"))
# With more requests in flight some may wait in the server's queue
SIDE_BY_SIDE = 8
# The statuses of a path that a server does not have
NO_SUCH_PATH = (404, 405, 501)
# The path at which an OpenAI-compatible server lists its models
MODELS = "/v1/models"


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    client: HttpClient
    process: ServerProcess | None = None
    # Whether it decodes one request at a time, so that changes of its counters and of its processor
    # time belong to that request
    alone: bool = False


@dataclass(frozen=True)
class TimedAnswer:
    """The answer of a server with its times; see `protocol.Completion`."""

    body: Any
    request_s: float
    cpu_s: float | None
    readings: CpuReadings | None = None
    turn: Turn | None = None


@dataclass(frozen=True)
class Interface:
    """The interface of a kind of server: how it is recognised, its requests and its answers."""

    engine: str
    probe: tuple[str, str]  # a path, and the field of its answer by which the kind is recognised
    version: tuple[str, str]  # a path, and the field with the engine's version
    path: str  # of completions
    body: Callable[[Asked], dict[str, Any]]  # makes that of a request for token ids
    # Reads an answer; raises LookupError, TypeError, ValueError or AttributeError
    parse: Callable[[Mapping[str, Any]], Completion]
    counters: CounterNames
    names_model: bool = False  # whether a request names the model
    # Whether the server has a draft, where its answers do not show it
    drafts: Callable[[HttpClient], bool] = lambda _: False

    def version_of(self, client: HttpClient) -> str:
        path, field = self.version
        return str(client.stated_or_empty(path).get(field, "unknown"))


@dataclass(frozen=True)
class CardMemory:
    """A card's memory just before a server starts on it, in bytes."""

    free: int  # as the driver reports it; other processes' memory is not free
    total: int
    weights: int = 0  # of the models that the server will load; 0 where their size is not known
    servers: int = 1  # that are still to start on the card, with this one


@dataclass(frozen=True)
class StartedEngine(Engine):
    """A pair whose servers are started on this machine, each at one K."""

    spec: ClassVar[EngineSpec]
    # Seconds within which a server must have loaded its models, and compiled them if it does
    ready_s: ClassVar[float] = 1200.0
    # The program of a user's own server, where it is not the name of the engine
    binary: ClassVar[str | None] = None
    # The flags that a measurement needs and a server in production does not, besides those of
    # `EngineSpec.in_production`
    measuring: ClassVar[frozenset[str]]
    # The prefixes of environment variables that change how the engine serves
    variables: ClassVar[tuple[str, ...]]

    # target, draft: hub ids, folders or GGUF files; no draft where only plain decoding is measured,
    # where the target's own weights draft, or where tokens are looked up
    target: str | Path
    draft: str | Path | None
    logs: Path
    context_tokens: int  # of the longest request, prompt and budget
    threads: int | None = None  # of each server, on a CPU; None leaves them to the engine
    # revision, draft_revision: of hub ids; None takes the newest
    revision: str | None = None
    draft_revision: str | None = None
    kind: DraftKind = "model"
    rule: Rule = "greedy_draft"  # with `ratio` the draft samples
    slots: int = 1
    memory: CardMemory | None = None  # of the card that the server starts on, if any
    more_flags: tuple[str, ...] = ()
    timeout_factor: float = 1.0  # multiplies the time limits of requests
    # The probability below which a draft's token ends its draft, if the engine has that; 0: none
    p_min: float = 0.0
    varying: Varying = ""  # how K changes while a server serves, which starts at the largest
    schedule: tuple[tuple[int, int, int], ...] = ()  # (lowest, highest number of requests, K)
    # Of both models' weights and caches, for an engine that is told; with `auto` vLLM and SGLang
    # serve a float32 checkpoint in 16 bits
    dtype: str = "auto"

    def open(self, k: int, synthetic: Sequence[float] | None = None) -> "HttpServer":
        flags, program, log = self.flags(k, synthetic), self.program(), self.log(k, synthetic)
        port = free_port()
        command = [*program, *flags, "--host", LOOPBACK, "--port", str(port)]
        process = ServerProcess(command, log, self.environment(synthetic))
        address, factor = f"http://{LOOPBACK}:{port}", self.timeout_factor
        client = HttpClient(address, alive=lambda: process.alive, timeout_factor=factor)
        server = f"{self.spec.title} at k={k}"
        what = f"{server} to have loaded its models (log: {log})"
        try:
            late = client.wait_until_ready("/health", self.ready_s, what)
            if late or not process.alive:
                why = f": {late}" if process.alive else " ended"
                raise UserError(f"{server}{why}; {process.last_words()}")
            return self.server(Running(client, process, self.slots == 1), k)
        except BaseException:  # raised again; the server must not go on running
            process.stop()
            raise

    def command(self, k: int) -> ServerCommand:
        # The user's environment variables for the engine, without secrets, paths and addresses
        variables = {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(self.variables)
            and not (SECRETS | PLACES) & set(name.split("_"))
            and "://" not in value
        }
        left_out = self.measuring.union(self.spec.in_production)
        served = [*_without(replace(self, more_flags=()).flags(k), left_out), *self.more_flags]
        return ServerCommand(
            k=k,
            slots=self.slots,
            line=_line({**variables, **self.environment()}, self.started_as(), self.flags(k)),
            production=_line(variables, (self.binary or self.spec.name,), served),
            context_tokens=self.positions(k),
            weights_bytes=self.weights_bytes(k),
        )

    def started_as(self) -> Sequence[str]:
        """The program of the command, as a user types it."""
        return (self.spec.name,)

    def positions(self, k: int) -> int:
        return self.context_tokens + k + SPARE_POSITIONS

    def weights_bytes(self, k: int) -> int | None:  # noqa: ARG002
        """The bytes of the files that a server at K reads; None where they are the checkpoints."""
        return None

    def log(self, k: int, synthetic: Sequence[float] | None = None) -> Path:
        """The file of a server's log; servers with synthetic acceptance have a separate one."""
        kind = "_synthetic" if synthetic is not None else f"_{self.varying}" if self.varying else ""
        return self.logs / f"{self.spec.name}_k{k}{kind}.log"

    def program(self) -> list[str]:
        """The program of a server with its first arguments, before the flags."""
        return [on_path(self.spec.name)]

    def environment(self, synthetic: Sequence[float] | None = None) -> Mapping[str, str]:  # noqa: ARG002
        """The environment variables of a server in addition to those of this process."""
        return {}

    def common_flags(self, k: int) -> list[str]:
        """The flags of vLLM and SGLang for dtype, context, slots, revision and memory."""
        context, slots, _ = self.spec.in_production
        flags = {"--dtype": self.dtype, context: self.positions(k), slots: self.slots}
        flags |= {} if self.revision is None else {"--revision": self.revision}
        return [str(part) for flag in (flags | self.memory_flags(k)).items() for part in flag]

    def memory_flags(self, k: int) -> dict[str, str]:
        """The flag for this server's share of the card; none without a card or if the user set it.

        Raises:
            UserError: the card has too little free memory for the weights.
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
        """The bytes that a server takes of a card besides its weights and its KV cache."""
        raise NotImplementedError

    def memory_share(self, room: float, memory: CardMemory) -> float:
        """The value of `memory_flag` at which weights and KV cache take `room` bytes."""
        raise NotImplementedError

    def _given(self, flag: str) -> bool:
        names = (given.split("=", 1)[0].replace("_", "-") for given in self.more_flags)
        return flag in names

    @abstractmethod
    def flags(self, k: int, synthetic: Sequence[float] | None = None) -> list[str]:
        """The flags of a server without host and port."""

    @abstractmethod
    def server(self, running: Running, k: int) -> "HttpServer":
        """The client of a server that answers."""


@dataclass(frozen=True)
class AttachedEngine(Engine):
    """Servers that the user runs: one for plain decoding, and one for each K."""

    urls: Mapping[int, str]  # by K; 0 is plain decoding
    server: "Callable[[Running, int], HttpServer]"  # makes the client of a server at a K
    key: str | None = field(default=None, repr=False)  # the servers' API key
    timeout_factor: float = 1.0  # multiplies the time limits of requests
    wanted: WantedModel | None = None

    def open(self, k: int, synthetic: Sequence[float] | None = None) -> "HttpServer":
        assert synthetic is None  # the acceptance of a running server is fixed
        how: dict[str, Any] = {"timeout_factor": self.timeout_factor, "wanted": self.wanted}
        return self.server(Running(HttpClient(self.urls[k], self.key, **how)), k)


class HttpServer(Server):
    """The client of one running server: the part that all engines share."""

    decoded_field: ClassVar[str]  # of an answer of /detokenize: the field that has the text
    streams: ClassVar[bool] = False  # whether it streams answers to `complete`, for turns

    def __init__(self, title: str, k: int, running: Running) -> None:
        self.k, self.url, self._title = k, running.client.url, title
        self._client, self._process, self._alone = running.client, running.process, running.alone
        self._in_flight, self._lock = 0, threading.Lock()
        # The field of a request that names the model; empty where a server has one model
        self.named: Mapping[str, Any] = {}

    def generate(self, asked: Asked) -> Completion:
        """Complete a prompt; errors have the server's name, and its log if it was started here."""
        with self._lock:
            self._in_flight += 1
            queued = max(1.0, self._in_flight / SIDE_BY_SIDE)
        if asked.turn is not None:
            queued = asked.turn.servers
        deadline_s = queued * self._client.deadline_s(len(asked.prompt), asked.budget)
        try:
            done, times = self._client.repeated(lambda: self._complete(asked, deadline_s))
        except (ServerDiedError, RequestFailedError) as error:
            died = self._process is not None and isinstance(error, ServerDiedError)
            words = f"; {self._process.last_words()}" if died and self._process else ""
            error.args = (f"{self._title}: {error}{words}",)
            raise
        finally:
            with self._lock:
                self._in_flight -= 1
        return replace(done, asked=times)

    def _complete(self, asked: Asked, deadline_s: float) -> Completion:
        try:
            return self.complete(asked, deadline_s)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            line = f"{self.where}: its answer cannot be read ({type(error).__name__}: {error})"
            raise RequestFailedError(line, repeatable=False) from error

    @abstractmethod
    def complete(self, asked: Asked, deadline_s: float) -> Completion:
        """Send one request for a completion, with a deadline in seconds."""

    def turn(self, servers: int) -> Turn | None:
        process = self._process
        if not self.streams or process is None or not self._alone or not process.pausable:
            return None
        return Turn(process.pid, servers)

    def ask(
        self, path: str, body: Mapping[str, Any], deadline_s: float, asked: Asked | None = None
    ) -> TimedAnswer:
        """The answer to a request, timed; in turns and with readings, where `asked` says so."""
        turn = None if asked is None else asked.turn
        read = asked is not None and asked.decode_cpu and self._alone
        readings = CpuReadings(self.cpu_s) if read else None
        before, begin = self.cpu_s() if self._alone else None, perf_counter()
        with nullcontext() if readings is None else readings:
            if turn is None:
                answer = self._client.post(path, body, deadline_s)
            else:
                answer = self.streamed(path, body, deadline_s, turn)
        request_s = perf_counter() - begin
        failure = failure_of(answer) if isinstance(answer, Mapping) else None
        if failure is not None:
            raise RequestFailedError(f"{self.where}: the request failed: {failure}")
        after = None if before is None else self.cpu_s()
        cpu_s = None if before is None or after is None else after - before
        return TimedAnswer(answer, request_s, cpu_s, readings, turn)

    def streamed(self, path: str, body: Mapping[str, Any], deadline_s: float, turn: Turn) -> Any:
        """The whole answer to a streamed request; `turn` is notified of its tokens."""
        raise NotImplementedError

    def check_vocabulary(self, tokens: Sequence[int], text: str) -> None:
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
        """Refuse a server that drafts at K = 0, or that `needs` a flag to draft at another K."""
        if self.k == 0 and drafted:
            raise UserError(
                f"{self.where}: it drafts, and was given as the server that decodes plainly"
            )
        # Of two tokens none need be drafted: the prefill's, and a plain step's
        if self.k and drafted == 0 and tokens > 2 and not self.facts.drafts_fewer:
            raise UserError(f"{self.where}: it drafted nothing; k={self.k} needs {needs}")

    def completion(self, answer: TimedAnswer, record: Completion) -> Completion:
        """The record of an answer with its times, without counts of rounds for plain decoding."""
        request_s, prefill_s, decode_s = answer.request_s, record.prefill_s, record.decode_s
        if answer.turn is not None and prefill_s is not None and decode_s is not None:
            prefill_s -= answer.turn.prefill_paused_s
            decode_s = answer.turn.running_s(decode_s)
            request_s -= answer.turn.paused_s
        readings = answer.readings
        of_rounds = () if self.k else ("rounds", "drafted", "accepted", "accepted_lengths", "steps")
        return replace(
            record,
            request_s=request_s,
            prefill_s=prefill_s,
            decode_s=decode_s,
            cpu_s=answer.cpu_s,
            decode_cpu_s=readings and readings.decode_s(record.prefill_s, record.decode_s),
            counted=None,  # its ids are counted
            **dict.fromkeys(of_rounds),
        )

    @property
    def model_name(self) -> str | None:
        try:
            return served_model(self._client)
        except (ServerDiedError, RequestFailedError) as error:
            if error.repeatable:  # a temporary failure does not show that there is no name
                raise
        except UserError:
            pass
        return None

    def without_counters(self, where: str, needs: str) -> UserError:
        return UserError(
            f"{self.where}: no counters {where}; {needs}, or use engine=openai, which only times"
        )

    @property
    def where(self) -> str:
        return self._client.where

    @property
    def process_id(self) -> int | None:
        return None if self._process is None else self._process.pid

    def cpu_s(self) -> float | None:
        return None if self._process is None else self._process.cpu_s()

    def close(self) -> None:
        if self._process is not None:
            self._process.stop()


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
    """A field of an answer; raises RequestFailedError where it is missing."""
    if not isinstance(answer, dict) or answer.get(field) is None:
        raise RequestFailedError(
            f"{where}: its answer has no {field!r}; is it {expected}?", repeatable=False
        )
    return answer[field]


def served_model(client: HttpClient) -> str:
    """The name of the model to ask of an OpenAI-compatible server; see `WantedModel`."""
    where = client.where
    listed = field_of(client.stated(MODELS), "data", where, "an OpenAI-compatible server")
    if not listed:
        raise UserError(f"{where}: it serves no model")
    return client.wanted.among(listed, where)

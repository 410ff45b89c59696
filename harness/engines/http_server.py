"""A server behind HTTP, whatever its engine: started here or running somewhere, asked, ended."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Self

from harness.engines.client import HttpClient
from harness.engines.process import LOOPBACK, ServerProcess, check_port_free, free_port
from harness.engines.protocol import EngineFacts, ServerDiedError
from harness.records import UserError


@dataclass(frozen=True)
class Running:
    """A server that answers.

    Attributes:
        client: talks to it.
        process: the server, where it was started here.
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


def on_path(binary: str) -> str:
    """The program that starts an engine's server, which is called as the engine is."""
    program = shutil.which(binary)
    if program is None:
        raise UserError(
            f"engine={binary}: no {binary} on PATH; install it, or give url= of a server that runs"
        )
    return program


def log_file(folder: Path, engine: str, k: int, synthetic: Sequence[float] | None) -> Path:
    """Where a server's log goes; servers with synthetic acceptance stand beside the others."""
    return folder / f"{engine}_k{k}{'' if synthetic is None else '_synthetic'}.log"


def start(
    title: str,
    command: Sequence[str],
    log: Path,
    *,
    port: int | None,
    slots: int,
    ready_s: float,
    environment: Mapping[str, str] | None = None,
) -> Running:
    """Start a server that listens on this machine only, and wait until it answers.

    Args:
        title: the engine and its K, for errors.
        command: without where to listen.
        log: takes what it prints.
        port: None takes a free one.
        slots: requests that it decodes side by side.
        ready_s: until it has loaded its models.
        environment: variables beside this process's own.
    """
    port = free_port() if port is None else port
    check_port_free(port)
    listening = ("--host", LOOPBACK, "--port", str(port))
    process = ServerProcess([*command, *listening], log, environment)
    client = HttpClient(f"http://{LOOPBACK}:{port}")

    def stopped() -> str:
        return "" if process.alive else f"{title} ended; {process.last_words()}"

    running = Running(client, process, slots == 1)
    with ended_on_error(running):
        client.wait_until_ready("/health", ready_s, stopped)
        if not process.alive:
            raise UserError(stopped())
    return running


@contextmanager
def ended_on_error(running: Running) -> Iterator[None]:
    """End a server that turns out to be another than was wanted."""
    try:
        yield
    except BaseException:
        if running.process is not None:
            running.process.stop()
        raise


def attach(
    urls: Mapping[int, str], key: str | None, k: int, synthetic: Sequence[float] | None
) -> Running:
    """The server of this K among those that the user runs.

    Args:
        urls: by K; 0 is the plain one.
        key: the servers' API key.
        k: which one.
        synthetic: refused, see `protocol.Engine`.
    """
    if k not in urls:
        raise UserError(f"url: no server for k={k}; there are {sorted(urls)}")
    if synthetic is not None:
        raise UserError(f"url={urls[k]}: acceptance is fixed when a server starts")
    return Running(HttpClient(urls[k], key))


class HttpServer:
    """One running server, without what differs between engines."""

    facts: EngineFacts

    def __init__(self, title: str, k: int, running: Running) -> None:
        """Take over a server that drafts `k` tokens per round; `title` names it in errors."""
        self.k, self._title = k, title
        self._client, self._process, self._alone = running.client, running.process, running.alone

    def ask(self, path: str, body: Mapping[str, Any]) -> Answer:
        """The answer to a request, timed."""
        cpu, begin = self._request_cpu_s(), perf_counter()
        with self._log_named():
            answer = self._client.post(path, body)
        request_s, after = perf_counter() - begin, self._request_cpu_s()
        return Answer(answer, request_s, None if cpu is None or after is None else after - cpu)

    def get(self, path: str) -> Any:
        """What it has at `path`."""
        with self._log_named():
            return self._client.get(path)

    def check_decoded(self, path: str, field: str, tokens: Sequence[int], text: str) -> None:
        """Refuse a server whose model reads token ids as another text.

        Args:
            path: what turns ids into text.
            field: of its answer that has the text.
            tokens: ids without special ones.
            text: what they stand for in the target's tokenizer.
        """
        body = {"tokens": list(tokens), **self.named()}
        answer = self._client.post(path, body)
        said = answer.get(field) if isinstance(answer, dict) else None
        if said is None or said.strip() != text.strip():
            raise UserError(
                f"{self.where}: another model than model=, by its tokens: ids that stand for"
                f" {text[:30]!r} are {str(said)[:30]!r} there"
            )

    def named(self) -> Mapping[str, Any]:
        """What names the model in a request; nothing where a server has one model."""
        return {}

    def check_drafts(self, drafted: int | None, tokens: int, needs: str) -> None:
        """Refuse a server that does not draft as its K says.

        Args:
            drafted: tokens; None where it does not tell.
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

    def without_counters(self, where: str, needs: str) -> UserError:
        """What to do about a server that drafts and does not tell its rounds.

        Args:
            where: it was looked for.
            needs: what has them.
        """
        return UserError(
            f"{self.where}: no counters {where}; {needs}, or use engine=openai, which only times"
        )

    @property
    def url(self) -> str:
        """Where it listens."""
        return self._client.url

    @property
    def where(self) -> str:
        """The address as errors name it."""
        return f"url={self._client.url}"

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _log_named(self) -> Iterator[None]:
        """Say why a server that was started here answers no more."""
        try:
            yield
        except ServerDiedError as error:
            words = "" if self._process is None else f"; {self._process.last_words()}"
            raise ServerDiedError(f"{self._title}: {error}{words}") from error

    def _request_cpu_s(self) -> float | None:
        return self.cpu_s() if self._alone else None


def field_of(answer: Any, field: str, where: str, expected: str) -> Any:
    """A field that an answer must have.

    Args:
        answer: JSON decoded.
        field: its name.
        where: the address, for the error.
        expected: what has this field.
    """
    if not isinstance(answer, dict) or answer.get(field) is None:
        raise UserError(f"{where}: its answer has no {field!r}; is it {expected}?")
    return answer[field]


def only_model(client: HttpClient) -> str:
    """The name of the model that an OpenAI-compatible server has."""
    where = f"url={client.url}"
    listed = field_of(client.get("/v1/models"), "data", where, "an OpenAI-compatible server")
    if not listed:
        raise UserError(f"{where}: it serves no model")
    return str(listed[0]["id"])

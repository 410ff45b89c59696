"""JSON requests to a server over HTTP; every failure is an error of one line.

Every request here may be sent twice without harm, so a request is repeated after a temporary
failure: a connection that is refused or cut, a garbled answer, or a status of 429, 502, 503 or 504.
`HttpClient.repeated` repeats the whole function of a caller, so that the seconds and counters are
those of the attempt that was answered. A server's `Retry-After` is respected within a limit.

An answer has a deadline that follows from its tokens (`HttpClient.deadline_s`), even if bytes still
arrive; once it has begun, two minutes without a byte end it too. A server that misses the deadline
is taken to hang and gets no further request. Requests for a server's properties are repeated in the
same way, except where nothing listens at the address: it is more likely mistyped.

Redirects are refused, since their target would receive the API key.
"""

import json
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException, RemoteDisconnected
from random import random
from threading import Timer
from typing import Any, TypeVar, cast
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    InvalidHeader,
    NewConnectionError,
    ReadTimeoutError,
    URLSchemeUnknown,
)
from urllib3.util import Retry, Timeout, make_headers

from harness.engines.protocol import RefusedError, RequestFailedError, ServerDiedError
from harness.engines.waiting import waiting_for
from harness.records import UserError

T = TypeVar("T")

# The deadline of a request: at least ten minutes, the timeout of OpenAI's clients, and a second per
# token on a slow machine. A server whose process has ended is noticed at once.
LEAST_S, TOKEN_S, PROMPT_TOKEN_S = 600.0, 1.0, 0.1
# The longest pause in an answer that has begun
IDLE_S = 120.0
# Timeouts of a health check, and of a connection
CHECK_S, CONNECT_S = 5.0, 20.0
POLL_S = 0.05
# The number of repetitions of a request, the first at once and then after 0.5 s, 1 s, 2 s, ... with
# jitter; the pauses that a server asks for may add up to two minutes
RETRIES, BACKOFF_S, PAUSES_S = 5, 0.25, 120.0
BUSY = (429, 502, 503, 504)
REDIRECTS = (301, 302, 303, 307, 308)
# The begin of each line of a stream (server-sent events), and OpenAI's last line
EVENT, LAST_EVENT = b"data: ", b"data: [DONE]"
# The limit of an answer; answers have some kilobytes, a page of counters may have a megabyte
MOST_BYTES = 64 * 2**20
ON_THIS_MACHINE = ("127.0.0.1", "localhost", "::1")
# Models of a long list that an error names
LISTED = 8
# Keys are replaced in answers; a shorter key could occur in them by chance
MASKED, SHORTEST_MASKED = "***", 6


class NobodyListensError(ServerDiedError):
    """An address at which nothing listens, or to which no connection can be made."""


@dataclass(frozen=True)
class WantedModel:
    """The model that is asked of a server which may list several: a router, a proxy, adapters."""

    served_name: str | None = None  # its name there, where the user gives it
    names: tuple[str, ...] = ()  # of the target: hub id, folder, file

    def among(self, listed: Sequence[Mapping[str, Any]], where: str) -> str:
        """The id of its entry in the list of /v1/models.

        Raises:
            UserError: several entries, and none or more than one that has one of its names.
        """
        ids, given = [str(entry.get("id")) for entry in listed], self.served_name
        more = ", ..." if len(ids) > LISTED else ""
        known = f"{len(ids)} models ({', '.join(ids[:LISTED])}{more})"
        if given is not None:
            if given not in ids:
                raise UserError(f"served_name={given}: {where} lists {known}; give one of these")
            return given
        if len(ids) == 1:
            return ids[0]
        wanted = {_plain_name(name) for name in self.names}
        named = [
            str(entry.get("id"))
            for entry in listed
            if wanted & {_plain_name(str(entry.get(field) or "")) for field in ("id", "root")}
        ]
        # An adapter names the model that it changes
        whole = [each for each, entry in zip(ids, listed, strict=True) if not entry.get("parent")]
        found = [each for each in named if each in whole] or named
        if not found and len(whole) == 1:
            found = whole
        if len(found) != 1:
            raise UserError(f"{where}: it lists {known}; give the one to ask: served_name={ids[0]}")
        return found[0]


def _plain_name(name: str) -> str:
    """The last part of a hub id or a path, without the ending of a file and in lower case."""
    return name.replace("\\", "/").rstrip("/").rpartition("/")[2].lower().removesuffix(".gguf")


class HttpClient:
    """Requests to one server."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        named: str = "url",
        *,
        alive: Callable[[], bool] = lambda: True,
        timeout_factor: float = 1.0,
        wanted: WantedModel | None = None,
    ) -> None:
        """Connect to `url`; the API `key` is sent with every request and stored nowhere else.

        Errors name the address as the value of the configuration key `named`.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{named}={url}: not an address; write it as http://HOST:PORT")
        self.wanted = wanted or WantedModel()
        # Addresses for OpenAI's clients end in the version of the interface
        self.url = url.rstrip("/").removesuffix("/v1")
        self.where = f"{named}={self.url}"
        self._key, self._alive, self._factor = key, alive, timeout_factor
        # The server may close a kept connection at the moment of the next request
        self._headers = {"Connection": "close"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._pools = self._pools_to(parts.scheme, parts.netloc, parts.hostname)
        # urllib3 logs the head of an answer that it cannot parse, which may contain the key
        logging.getLogger(urllib3.__name__).setLevel(logging.CRITICAL)

    def get(self, path: str, timeout_s: float | None = None) -> Any:
        """The answer to a GET request: decoded JSON, anything else as text.

        Raises:
            ServerDiedError, RequestFailedError, RefusedError: there is no usable answer.
        """
        check_s = CHECK_S * max(1.0, self._factor)
        text = self._answer("GET", path, None, check_s if timeout_s is None else timeout_s)
        try:
            return self._masked(json.loads(text))
        except (ValueError, RecursionError):
            return self._masked(text)

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = LEAST_S) -> Any:
        """The answer to a POST request with a JSON body, as decoded JSON; raises as `get` does."""
        text = self._answer("POST", path, json.dumps(body).encode(), timeout_s)
        try:
            return self._masked(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise self._garbled(repr(self._shown(text)[:40])) from error

    def streamed(
        self,
        path: str,
        body: Mapping[str, Any],
        timeout_s: float,
        arrived: Callable[[Mapping[str, Any]], None],
    ) -> list[Mapping[str, Any]]:
        """The events of a streamed answer to a JSON body, as decoded JSON.

        `arrived` is called with each event as it arrives. Raises as `get` does.
        """
        events, rest = list[Mapping[str, Any]](), b""

        def read(piece: bytes) -> None:
            nonlocal rest
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(EVENT) and line != LAST_EVENT:
                    event = self._masked(json.loads(line.removeprefix(EVENT)))
                    if not isinstance(event, dict):
                        raise ValueError("no object")
                    if error := event.get("error"):
                        message = error.get("message") if isinstance(error, dict) else error
                        raise RequestFailedError(f"{self.where}: {self._shown(str(message))[:200]}")
                    events.append(cast("Mapping[str, Any]", event))
                    arrived(events[-1])

        try:
            text = self._answer("POST", path, json.dumps(body).encode(), timeout_s, read)
        except (ValueError, RecursionError) as error:
            raise self._garbled(error) from error
        if not events:
            raise self._garbled(repr(self._shown(text)[:40]))
        return events

    def _garbled(self, why: object) -> RequestFailedError:
        return RequestFailedError(f"{self.where}: its answer is garbled ({why})")

    def deadline_s(self, prompt_tokens: int, budget: int) -> float:
        """The seconds within which the answer to a request must be complete."""
        return self._factor * max(LEAST_S, TOKEN_S * budget + PROMPT_TOKEN_S * prompt_tokens)

    def repeated(self, ask: Callable[[], T], *, listening: bool = False) -> tuple[T, int]:
        """Call `ask`, and again after temporary failures; its result, and the number of calls.

        With `listening` it is not repeated where nothing listens at the address.
        """
        most_s, asked = PAUSES_S * self._factor, 1
        left_s = most_s
        while True:
            try:
                return ask(), asked
            except (ServerDiedError, RequestFailedError) as error:
                mistyped = listening and isinstance(error, NobodyListensError)
                if mistyped or not error.repeatable or not self._alive():
                    raise
                backoff_s = BACKOFF_S * self._factor * (2 ** (asked - 1) + random())
                wanted_s = error.retry_after_s if isinstance(error, RequestFailedError) else None
                pause_s = max(backoff_s if asked > 1 else 0.0, wanted_s or 0.0)
                if asked > RETRIES or pause_s > left_s:
                    why = f"asked {asked} times"
                    if asked <= RETRIES:
                        why += f", with pauses of {most_s:.0f} s at most in all"
                        if pause_s > most_s:
                            why = f"it asks for {pause_s:.0f} s, which is too long"
                    error.args = (f"{error} ({why})",)
                    raise
                left_s -= pause_s
                asked += 1
                with waiting_for(f"{self.url} to be asked again ({error})", pause_s):
                    time.sleep(pause_s)

    def stated(self, path: str) -> Any:
        """The server's properties at `path`, by a repeated `get`."""
        return self.repeated(lambda: self.get(path), listening=True)[0]

    def stated_or_empty(self, path: str) -> Mapping[str, Any]:
        """The server's properties at `path`; empty where it has no JSON object there."""
        try:
            answer = self.stated(path)
        except RefusedError:
            return {}
        return answer if isinstance(answer, dict) else {}

    def about(self, path: str, field: str, server: str) -> Mapping[str, Any]:
        """The server's properties at `path`; refuses a server without `field`, as not `server`."""
        try:
            answer = self.stated(path)
        except RefusedError as error:
            reason = str(error).removeprefix(f"{self.where}: ")
            raise UserError(f"{self.where}: not {server} ({path}: {reason})") from error
        if not isinstance(answer, dict) or field not in answer:
            raise UserError(f"{self.where}: not {server} ({path} has no {field})")
        return answer

    def wait_until_ready(self, path: str, within_s: float, what: str) -> str:
        """Wait until `path` answers with success; the last error if it does not, else ""."""
        give_up = time.monotonic() + within_s
        with waiting_for(f"{self.url}: {what}", within_s):
            while True:
                try:
                    self.get(path)
                except UserError as error:
                    if not self._alive():
                        return str(error)
                    if time.monotonic() > give_up:
                        return f"{error} (waited {within_s:.0f} s)"
                    time.sleep(POLL_S)
                else:
                    return ""

    # ---- one request -----------------------------------------------------------------------------

    def _answer(
        self,
        method: str,
        path: str,
        body: bytes | None,
        timeout_s: float,
        arrived: Callable[[bytes], None] | None = None,
    ) -> str:
        """The text of an answer; `arrived` gets the pieces of a successful one as they arrive."""
        headers = dict(self._headers)
        if body is not None:
            headers["Content-Type"] = "application/json"
        begin = time.monotonic()
        with waiting_for(f"{self.url}{path}", timeout_s):
            try:
                response = self._pools.request(
                    method,
                    self.url + path,
                    body=body,
                    headers=headers,
                    retries=False,
                    redirect=False,
                    preload_content=False,
                    timeout=Timeout(connect=min(CONNECT_S, timeout_s), read=timeout_s),
                )
            except HTTPError as error:
                raise self._without_answer(error, begin, timeout_s) from error
            response = cast("_Response", response)
            try:
                if arrived is None or response.status != 200:
                    data = response.read(MOST_BYTES)
                else:
                    response.connected.settimeout(timeout_s)  # the server may be paused for long
                    data = b""
                    while piece := response.read1(MOST_BYTES - len(data)):
                        data += piece
                        arrived(piece)
            except HTTPError as error:
                raise self._broken_off(error, begin, timeout_s) from error
            finally:
                response.cut_off.cancel()
                response.close()
        if time.monotonic() - begin >= timeout_s:  # a cut answer may look like a short one
            raise self._too_late(timeout_s)
        if len(data) == MOST_BYTES:
            raise self._garbled("over 64 MiB")
        text = data.decode(errors="replace")
        if response.status != 200:
            raise self._refused(response, text)
        return text

    def _without_answer(self, error: HTTPError, begin: float, timeout_s: float) -> UserError:
        """The error of a request whose answer did not begin."""
        late = isinstance(error, ReadTimeoutError) or time.monotonic() - begin >= timeout_s
        if late and not isinstance(error, ConnectTimeoutError):
            return ServerDiedError(f"{self.where}: no answer within {timeout_s:.0f} s")
        cause = _cause(error)
        reason = self._shown(str(cause))
        if isinstance(cause, HTTPException) and not isinstance(cause, RemoteDisconnected):
            return RequestFailedError(f"{self.where}: its answer is no HTTP ({reason[:80]})")
        unconnected = isinstance(error, NewConnectionError | ConnectTimeoutError)
        return (NobodyListensError if unconnected else ServerDiedError)(
            f"{self.where}: not reachable ({reason}); is the server running, and at this address?",
            repeatable=True,
        )

    def _broken_off(self, error: HTTPError, begin: float, timeout_s: float) -> UserError:
        """The error of an answer that began and did not end."""
        if time.monotonic() - begin >= timeout_s:
            return self._too_late(timeout_s)
        if isinstance(error, ReadTimeoutError):
            idle_s = IDLE_S * self._factor
            return ServerDiedError(f"{self.where}: no byte of its answer for {idle_s:.0f} s")
        reason = self._shown(str(_cause(error)))
        return RequestFailedError(f"{self.where}: its answer broke off ({reason[:80]})")

    def _too_late(self, timeout_s: float) -> ServerDiedError:
        return ServerDiedError(f"{self.where}: no whole answer within {timeout_s:.0f} s")

    def _refused(self, response: urllib3.BaseHTTPResponse, text: str) -> UserError:
        """The error of an answer whose status is no success, with the server's message if any."""
        status, reason = response.status, response.reason or "no reason given"
        if status in REDIRECTS:
            target = urlsplit(response.headers.get("Location") or "").netloc or "another path"
            return ServerDiedError(
                f"{self.where}: it redirects to {self._shown(target)}, which is not followed, for"
                " the API key must not go elsewhere; give the address that answers itself"
            )
        try:
            message = json.loads(text)["error"]["message"]
        except (ValueError, RecursionError, KeyError, TypeError):
            is_page = text.lstrip().startswith("<")
            message = reason if is_page or not text else text
        shown = self._shown(str(message))[:200]
        line = f"{self.where}: the server refuses, status {status}: {shown}"
        if status in (401, 403):
            hint = "where it needs a key, api_key_env=NAME names the variable that holds it"
            if self._key:
                hint = "the key of api_key_env= is not one of its keys"
            return ServerDiedError(f"{line}; {hint}")
        if status in BUSY:
            return RequestFailedError(line, retry_after_s=_retry_after_s(response))
        return RefusedError(line, status)

    # ---- protection of the API key ---------------------------------------------------------------

    def _shown(self, text: str) -> str:
        return " ".join((text.replace(self._key, MASKED) if self._key else text).split())

    def _masked(self, value: Any) -> Any:
        if self._key is None or len(self._key) < SHORTEST_MASKED:
            return value
        if isinstance(value, str):
            return value.replace(self._key, MASKED)
        if isinstance(value, list):
            return [self._masked(each) for each in value]
        if isinstance(value, dict):
            return {name: self._masked(each) for name, each in value.items()}
        return value

    def _pools_to(self, scheme: str, netloc: str, host: str) -> urllib3.PoolManager:
        """The connection pools, through the environment's proxy if it has one for this address."""
        pools, proxy = urllib3.PoolManager(), getproxies().get(scheme)
        # A proxy of the environment cannot reach this machine's own loopback
        if proxy is not None and host not in ON_THIS_MACHINE and not proxy_bypass(netloc):
            parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
            login = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
            headers = make_headers(proxy_basic_auth=login) if parts.username else None
            address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
            try:
                pools = urllib3.ProxyManager(address, proxy_headers=headers)
            except URLSchemeUnknown as error:
                name = f"{scheme}_proxy"
                raise UserError(f"{name}: not an HTTP proxy; unset it, or set no_proxy") from error
        pools.pool_classes_by_scheme = _limited(IDLE_S * self._factor)
        return pools


class _Response(urllib3.HTTPResponse):
    """An answer, its socket, and the timer that ends it at its deadline."""

    cut_off: Timer
    connected: socket.socket


def _limited(idle_s: float) -> dict[str, type[HTTPConnectionPool]]:
    """Connection pools in which the read timeout is the deadline of a whole answer.

    The timeout of a socket alone would begin anew with each byte.
    """

    class Limited(HTTPConnection):
        def getresponse(self) -> _Response:
            sock, timeout_s = self.sock, self.timeout
            assert isinstance(timeout_s, float | int)
            cut_off = Timer(timeout_s, _shut, (sock,))
            cut_off.daemon = True
            cut_off.start()
            try:
                response = cast("_Response", super().getresponse())
                sock.settimeout(min(idle_s, timeout_s))
            except BaseException:  # raised again; the answer is over
                cut_off.cancel()
                raise
            response.cut_off, response.connected = cut_off, sock
            return response

    class Encrypted(Limited, HTTPSConnection):
        pass

    class Pool(HTTPConnectionPool):
        ConnectionCls = cast("Any", Limited)

    class EncryptedPool(HTTPSConnectionPool):
        ConnectionCls = cast("Any", Encrypted)

    return {"http": Pool, "https": EncryptedPool}


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _cause(error: HTTPError) -> BaseException:
    inner = [each for each in error.args if isinstance(each, BaseException)]
    return inner[-1] if inner else error.__cause__ or error


def _retry_after_s(response: urllib3.BaseHTTPResponse) -> float | None:
    try:
        return Retry().get_retry_after(response)
    except InvalidHeader:
        return None

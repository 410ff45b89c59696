"""JSON over HTTP to a server, with each way that fails in one line."""

import json
import time
from collections.abc import Callable, Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from harness.engines.protocol import ServerDiedError
from harness.records import UserError

# A generation on a slow machine takes minutes; a health check does not
REQUEST_S, CHECK_S = 1800.0, 5.0
POLL_S = 0.05
ON_THIS_MACHINE = ("127.0.0.1", "localhost", "::1")


class HttpClient:
    """Requests to one server."""

    def __init__(self, url: str, key: str | None = None, named: str = "url") -> None:
        """Talk to `url`.

        Args:
            url: http or https, without a path.
            key: the server's API key, sent with every request and kept nowhere else.
            named: the key of the command line that gives the address, for errors.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{named}={url}: not an address; write it as http://HOST:PORT")
        # Clients of OpenAI's interface are given the address with its version
        self.url = url.rstrip("/").removesuffix("/v1")
        self.where = f"{named}={self.url}"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        local = parts.hostname in ON_THIS_MACHINE
        # A proxy of the environment cannot reach this machine's own loopback
        self._opener = build_opener(ProxyHandler({})) if local else build_opener()

    def get(self, path: str, timeout_s: float = CHECK_S) -> Any:
        """What the server has at `path`: JSON decoded, anything else as text."""
        return self._answer(Request(self.url + path, headers=self._headers), timeout_s)

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = REQUEST_S) -> Any:
        """The server's answer to a JSON body."""
        headers = {"Content-Type": "application/json", **self._headers}
        data = json.dumps(body).encode()
        return self._answer(Request(self.url + path, data, headers), timeout_s)

    def about(self, path: str, field: str, server: str) -> Mapping[str, Any]:
        """What the server says of itself at `path`; refuse one that is not `server`.

        Args:
            path: where only this kind of server has an object with `field`.
            field: of the object.
            server: the kind, for the error.
        """
        try:
            answer = self.get(path)
        except ServerDiedError:
            raise
        except UserError as error:
            reason = str(error).removeprefix(f"{self.where}: ")
            raise UserError(f"{self.where}: not {server} ({path}: {reason})") from error
        if not isinstance(answer, dict) or field not in answer:
            raise UserError(f"{self.where}: not {server} ({path} has no {field})")
        return answer

    def wait_until_ready(self, path: str, within_s: float, alive: Callable[[], bool]) -> str:
        """Wait until `path` answers with success.

        Args:
            path: what answers once the model is loaded.
            within_s: how long to wait.
            alive: whether waiting longer is of use.

        Returns:
            Why it does not answer; empty where it does.
        """
        give_up = time.monotonic() + within_s
        while True:
            try:
                self.get(path)
            except UserError as error:
                if not alive():
                    return str(error)
                if time.monotonic() > give_up:
                    return f"{error} (waited {within_s:.0f} s)"
                time.sleep(POLL_S)
            else:
                return ""

    def _answer(self, request: Request, timeout_s: float) -> Any:
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                body = response.read().decode()
        except HTTPError as error:
            raise UserError(f"{self.where}: {_reason(error)}") from error
        except TimeoutError as error:
            raise ServerDiedError(f"{self.where}: no answer within {timeout_s:.0f} s") from error
        except (URLError, HTTPException, OSError) as error:
            reason = getattr(error, "reason", error)
            raise ServerDiedError(
                f"{self.where}: not reachable ({reason}); is the server running, and at this "
                "address?"
            ) from error
        try:
            return json.loads(body)
        except json.JSONDecodeError:
            return body


def _reason(error: HTTPError) -> str:
    """A refusal in the server's words, where it has some."""
    body = error.read().decode(errors="replace")
    try:
        message = json.loads(body)["error"]["message"]
    except (json.JSONDecodeError, KeyError, TypeError):
        is_page = body.lstrip().startswith("<")
        message = error.reason if is_page or not body else body
    return f"the server refuses, status {error.code}: {' '.join(str(message).split())[:200]}"

"""A server that answers what a test wants."""

import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Raw(Protocol):
    """An answer that is written by hand, byte by byte if need be."""

    def write(self, handler: BaseHTTPRequestHandler) -> None: ...


class StandIn(ThreadingHTTPServer):
    """Answers by path, and keeps what it was asked.

    An answer is JSON, or text where it is a string. One that is a number is a status, None closes
    the connection, one that can `write` does so, and a function is called with the request's body.
    """

    request_queue_size = 64

    def __init__(self, answers: Mapping[str, Any], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.answers: dict[str, Any] = dict(answers)
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._server().asked.append(body)
        self._answer(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def _server(self) -> StandIn:
        assert isinstance(self.server, StandIn)
        return self.server

    def _answer(self, body: dict[str, Any]) -> None:
        self._server().keys.add(self.headers.get("Authorization"))
        answer = self._server().answers.get(self.path, 404)
        if callable(answer):
            answer = answer(body)
        if answer is None:
            self.close_connection = True
            return
        if isinstance(answer, Raw):
            self.close_connection = True
            with suppress(OSError):  # the client may be gone
                answer.write(self)
            return
        status = answer if isinstance(answer, int) else 200
        if status != 200:
            answer = {"error": {"message": "request exceeds the\ncontext size"}}
        data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

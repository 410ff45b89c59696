"""Headless Chromium driven over its debugging pipe, with nothing but the standard library.

Every test that needs it is skipped where no Chromium is installed, and fails there with CI=true.
"""

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BINARY = next((found for name in NAMES if (found := shutil.which(name))), None)
needs_chromium = pytest.mark.skipif(
    BINARY is None and not os.environ.get("CI"), reason="no Chromium is installed"
)
PATIENCE_S = 60.0
# Chromium reads commands from descriptor 3 and writes answers to 4
_EXEC = "import os, sys; r, w, *words = sys.argv[1:]; os.dup2(int(r), 3); os.dup2(int(w), 4); "
_EXEC += "os.execv(words[0], words)"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--remote-debugging-pipe",
)


@dataclass
class Page:
    """An open page and what it did: requests, console messages, errors and refusals."""

    browser: "Browser"
    session: str
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    loaded: bool = False

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """A key pressed and released, as by a person at the keyboard."""
        text = {"Enter": "\r", "Space": " "}.get(key)
        named = {"key": " " if key == "Space" else key, "code": key}
        code = {"Enter": 13, "Space": 32, "Tab": 9}[key]
        shared = {**named, "windowsVirtualKeyCode": code}
        self._call("Input.dispatchKeyEvent", type="keyDown", **shared, **_given(text=text))
        self._call("Input.dispatchKeyEvent", type="keyUp", **shared)

    def pdf(self) -> str:
        """The page as it is printed, base64."""
        return self._call("Page.printToPDF")["data"]

    def emulate(self, **media: str) -> None:
        """Another medium or scheme: media="print", scheme="dark"."""
        features = [{"name": "prefers-color-scheme", "value": media.get("scheme", "light")}]
        self._call("Emulation.setEmulatedMedia", media=media.get("media", ""), features=features)

    def record(self, method: str, event: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])
        elif method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Log.entryAdded":
            self.complaints.append(event["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(event["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str(event["args"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)


class Browser:
    """One Chromium; `page` opens a file in it."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._buffer = b""
        self._last = 0
        self._pages: dict[str, Page] = {}

    def page(
        self, file: Path, *, width: int = 1200, height: int = 800, scheme: str = "light"
    ) -> Page:
        """A file opened in a window of this width, in the light or the dark scheme."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", session)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", session, **size)
        page.emulate(scheme=scheme)
        self.call("Page.navigate", session, url=file.as_uri())
        until = time.monotonic() + PATIENCE_S
        while not page.loaded:
            self._take(until)
        page.evaluate("0")  # what was logged on the way has arrived before the answer
        return page

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """One command and its answer."""
        self._last += 1
        number = self._last
        command = {"id": number, "method": method, "params": parameters}
        command |= _given(sessionId=session)
        os.write(self._write, json.dumps(command).encode() + b"\0")
        until = time.monotonic() + PATIENCE_S
        while True:
            message = self._take(until)
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return message["result"]

    def _take(self, until: float) -> dict[str, Any]:
        """The next message; an event is recorded by its page too."""
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            assert ready, "Chromium did not answer in time"
            more = os.read(self._read, 1 << 16)
            assert more, "Chromium ended"
            self._buffer += more
        whole, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(whole)
        if "method" in message and (page := self._pages.get(message.get("sessionId", ""))):
            page.record(message["method"], message["params"])
        return message


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own; ended with the block."""
    assert BINARY is not None, "install Chromium (apt-get install chromium)"
    read, child_write = _high(os.pipe())
    child_read, write = _high(os.pipe())
    words = [sys.executable, "-ISc", _EXEC, str(child_read), str(child_write)]
    words += [BINARY, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(words, pass_fds=(child_read, child_write), **quiet)
    os.close(child_read)
    os.close(child_write)
    try:
        browser = Browser(read, write)
        yield browser
        browser.call("Browser.close")
    finally:
        os.close(read)
        os.close(write)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _high(pair: tuple[int, int]) -> tuple[int, int]:
    """The same pipe away from the numbers that the child takes."""
    moved = tuple(fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 20) for number in pair)
    for number in pair:
        os.close(number)
    return moved[0], moved[1]


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}

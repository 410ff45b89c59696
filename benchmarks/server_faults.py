"""Faults of servers: what a run loses by them, and what it says.

    python benchmarks/server_faults.py                  # 68 faults, about 10 minutes on two cores
    python benchmarks/server_faults.py --only 503 hang  # those whose name holds one of these words

Every fault is put into a run of the command `server` on llama.cpp with the embedded pair, of two
visits at two temperatures. Most sit in a proxy between the run and servers that stand for a user's
own; `killed` ends the process of a server that the run has started. After the fault the servers are
sound again, and a run that is not complete is resumed.

For each: the exit status, the trials stored at the end of the first attempt and of how many,
whether there was a report then, the seconds of that attempt, and what is wrong. Wrong is: a trial
that was stored and is not there any more; a run that is not complete after `resume=`, or has no
report; an error without `resume=`; a measured cell called complete that lacks a visit; the key
in what was printed or stored, or sent to another address; a pause longer than `--silence` seconds
without a line; a server that hangs or trickles and no line that says that its address is waited
for; a load that is not stored after `resume=`.
"""

import argparse
import io
import itertools
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import psutil
import urllib3

from harness.cli import compose
from harness.commands import progress, server
from harness.engines.http_client import LEAST_S
from harness.engines.llamacpp import LlamaCpp
from harness.measurement.load import REQUESTS_PER_SLOT
from harness.models.embedded import EMBEDDED, gguf_of
from harness.records import UserError
from harness.storage import StoredRun, load

KEY = "sk-a-secret-of-the-benchmark"
K, VISITS, PROMPTS = 2, 2, 2
GRID = (f"k=[{K}]", "temperature=[0,1]", f"repetitions={VISITS}", "new_tokens=16")
SETTINGS = (*GRID, "prompts.sets=[easy]", f"prompts.limit={PROMPTS}", "threads=1")
EXACT = (
    "flags=[--cache-type-k,f32,--cache-type-v,f32,--spec-draft-type-k,f32,--spec-draft-type-v,f32,"
    "--flash-attn,off]",
    "servers=3",
)
# A request has 6 s, and all pauses between its repetitions together 1.2 s
QUICK = 0.01
HANGS_S = 1.2 * LEAST_S * QUICK
TRIALS = 2 * 2 * VISITS * PROMPTS
# Per visit, temperature, K and concurrency: two halves of the prompts, with two budgets
LOADS = VISITS * 2 * 2 * 2 * 2 * 2
LOAD = "concurrency=[1,2]"
OF_A_LOAD = ("visit", "temperature", "k", "concurrency", "group")
# Faults that are waited for
SLOW = ("hang", "trickle")
# A visit to the proxy asks each server once per prompt and temperature, and as often for a part of
# the budget; before the visits it is tried, and warmed up at each temperature
BEFORE, OF_A_VISIT = 1 + 2, 2 * PROMPTS * 2
# Before a server's first load: two groups of prompts, one at a time and two side by side
WARM_UP = 2 * REQUESTS_PER_SLOT * (1 + 2)


# ---- the proxy -----------------------------------------------------------------------------------


@dataclass
class Fault:
    """What happens to completions.

    Attributes:
        name: in the table, with what it happens to.
        act: writes an answer in place of the server's; False passes the request on after all.
        first, times: the number of the completion that it begins with, and how many it meets.
    """

    name: str
    act: "Callable[[Handler], bool]"
    first: int = 0
    times: float = 1
    words: tuple[str, ...] = ()


class Proxy(ThreadingHTTPServer):
    """Stands before a server, and has a fault."""

    daemon_threads = True

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.target, self.fault = target, None
        self.met, self.lock, self.keys = 0, threading.Lock(), Counter[str | None]()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    fault: Fault | None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is what some faults are about."""

    def now(self) -> Fault | None:
        """The fault, where this completion meets it."""
        with self.lock:
            number, self.met = self.met, self.met + 1
        fault = self.fault
        if fault is None or not fault.first <= number < fault.first + fault.times:
            return None
        return fault


class Handler(BaseHTTPRequestHandler):
    """One request."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, body: bytes) -> None:
        proxy: Any = self.server
        proxy.keys[self.headers.get("Authorization")] += 1
        self.close_connection = True
        fault = proxy.now() if self.path == "/completion" else None
        with suppress(OSError):
            if fault is not None and fault.act(self):
                return
            answer = urllib3.request(
                self.command, proxy.target + self.path, body=body or None, retries=False
            )
            self.whole(answer.status, answer.data)

    def whole(self, status: int, data: bytes, *headers: tuple[str, str]) -> bool:
        self.send_response(status)
        for name, value in (("Content-Length", str(len(data))), *headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
        return True

    def bytes(self, data: bytes, pause_s: float = 0.0) -> bool:
        for byte in data if pause_s else (data,):
            self.wfile.write(bytes([byte]) if isinstance(byte, int) else byte)
            self.wfile.flush()
            time.sleep(pause_s)
        return True


def echo(handler: Handler, status: int, *headers: tuple[str, str]) -> bool:
    """An error that repeats the request's key."""
    said = f'{{"error": {{"message": "no, {handler.headers.get("Authorization")}"}}}}'
    return handler.whole(status, said.encode(), *headers)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 4000\r\n\r\n"


def acts(elsewhere: str) -> dict[str, Callable[[Handler], bool]]:
    """What can happen to one answer, by name."""
    return {
        "503": lambda h: echo(h, 503),
        "502 as a page": lambda h: h.whole(502, b"<html>bad gateway</html>"),
        "500": lambda h: echo(h, 500),
        "429": lambda h: echo(h, 429),
        "429, Retry-After 0": lambda h: echo(h, 429, ("Retry-After", "0")),
        "429, Retry-After 1 h": lambda h: echo(h, 429, ("Retry-After", "3600")),
        "garbled JSON": lambda h: h.whole(200, b'{"tokens": [1, 2'),
        "JSON of something else": lambda h: h.whole(200, b'{"tokens": {"a": 1}, "timings": 3}'),
        "no HTTP": lambda h: h.bytes(b"\x00\x01\x02 garbage\r\n\r\n"),
        "closed before the answer": lambda _: True,
        "closed in the middle": lambda h: h.bytes(HEAD + b'{"tokens": [1, 2'),
        "401": lambda h: echo(h, 401),
        "redirect": lambda h: h.whole(307, b"", ("Location", f"{elsewhere}/completion?{KEY}")),
        "hang": lambda _: bool(time.sleep(HANGS_S)) or True,
        "hang in the middle": lambda h: h.bytes(HEAD) and not time.sleep(HANGS_S),
        "trickle": lambda h: h.bytes(HEAD + b" " * 400, 0.05),
    }


# ---- a run ---------------------------------------------------------------------------------------


@dataclass
class Attempt:
    """How a run went."""

    status: int
    said: str
    folder: Path | None
    seconds: float


@dataclass
class Result:
    """Of one fault."""

    name: str
    first: Attempt
    trials: int
    reported: bool
    wrong: list[str] = field(default_factory=list)


class Timed(io.StringIO):
    """Standard error, with when it was opened, each line was written, and the run ended."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[tuple[float, str]] = [(time.monotonic(), "")]

    def write(self, text: str) -> int:
        if text.strip():
            self.at.append((time.monotonic(), text))
        return super().write(text)


def attempt(root: Path, words: Sequence[str]) -> tuple[Attempt, Timed]:
    """Run the command as a door does: status 2 and the error's line for what a user must fix."""
    out, err = io.StringIO(), Timed()
    handler = logging.StreamHandler(err)
    logging.getLogger("harness").addHandler(handler)
    begin, before = time.monotonic(), {*root.iterdir()}
    folder: Path | None = None
    try:
        with redirect_stdout(out), redirect_stderr(err):
            outcome = server.run(compose("server", [f"results_root={root}", *words]))
        status, folder = outcome.status, outcome.folder
        if outcome.error is not None:
            err.write(f"error: {outcome.reason}\n")
    except UserError as error:
        status = 2
        err.write(f"error: {error}\n")
    except Exception as error:  # what a door reports as unexpected
        status = 1
        err.write(f"error: unexpected {type(error).__name__}: {error}\n")
    finally:
        logging.getLogger("harness").removeHandler(handler)
    made = {*root.iterdir()} - before
    seconds = time.monotonic() - begin
    err.at.append((begin + seconds, ""))
    return Attempt(
        status, out.getvalue() + err.getvalue(), folder or next(iter(made), None), seconds
    ), err


def examined(
    name: str,
    root: Path,
    words: Sequence[str],
    heal: Callable[[], None],
    silence_s: float,
    awaited: str | None = None,
) -> Result:
    """Run with the fault, heal, resume, and see what is wrong.

    `awaited`: the address that some line must name, where the run waits for it.
    """
    first, lines = attempt(root, words)
    wrong: list[str] = []
    stored: StoredRun | None = None
    if first.folder is not None and (first.folder / "trials.jsonl").exists():
        stored = load(first.folder)
        wrong += lacking_visits(stored)
    trials = stored.trials if stored else ()
    reported = first.folder is not None and (first.folder / "report.md").exists()
    if "unexpected" in first.said:
        wrong.append("not one line: " + first.said.split("unexpected ")[1][:60])
    unbroken = "".join(first.said.split())  # the report's first lines are wrapped
    if first.status and first.folder is not None and f"resume={first.folder}" not in unbroken:
        wrong.append("resume= is not named")
    wrong += silences(lines, silence_s)
    if awaited and not any(f"waiting for {awaited}" in line for _, line in lines.at):
        wrong.append(f"no line says that {awaited} is waited for")
    heal()
    last = first
    if first.status and first.folder is not None:
        last, _ = attempt(root, [f"resume={first.folder}", f"timeout_factor={QUICK}"])
    elif first.status:
        last, _ = attempt(root, words)
    if last.status or last.folder is None:
        wrong.append(f"status {last.status} after resume=: {last.said[-120:]!r}")
    else:
        done = load(last.folder)
        ok = {trial.cell for trial in done.trials if trial.status == "ok"}
        wrong += lacking_visits(done)
        if len(ok) != TRIALS:
            wrong.append(f"{len(ok)} of {TRIALS} trials")
        loads = {
            (*(getattr(load, name) for name in OF_A_LOAD), sum(load.budgets)) for load in done.loads
        }
        if len(loads) != (LOADS if LOAD in words else 0):
            wrong.append(f"{len(loads)} of {LOADS} loads")
        if stored is not None and done.trials[: len(trials)] != trials:
            wrong.append("stored trials are lost")
        if stored is not None and done.loads[: len(stored.loads)] != stored.loads:
            wrong.append("stored loads are lost")
        if not (last.folder / "report.md").exists():
            wrong.append("no report")
    printed = first.said + last.said
    files = [each.read_bytes() for each in root.rglob("*") if each.is_file()]
    if KEY in printed or any(KEY.encode() in each for each in files):
        wrong.append("the key is printed or stored")
    measured = {trial.cell for trial in trials if trial.status == "ok"}
    return Result(name, first, len(measured), reported, wrong)


def lacking_visits(run: StoredRun) -> list[str]:
    """Measured cells that are called complete and lack a visit."""
    made: Counter[object] = Counter(
        (trial.prompt_set, trial.k, trial.temperature)
        for trial in {t.cell: t for t in run.trials}.values()
        if trial.status == "ok"
    )
    if run.results.empty:
        return []
    rows = run.results[(run.results.source == "measured") & (run.results.status == "complete")]
    rows = rows[rows.concurrency == 1]
    return [
        f"K={row.k} T={row.temperature:g} is called complete with"
        f" {made[row.prompt_set, row.k, row.temperature]} of {VISITS * PROMPTS} trials"
        for row in rows.itertuples()
        if made[row.prompt_set, row.k, row.temperature] < VISITS * PROMPTS
    ]


def silences(lines: Timed, silence_s: float) -> list[str]:
    """Waits longer than that between two lines, before the first, or after the last."""
    moments = [at for at, _ in lines.at]
    longest = max(b - a for a, b in itertools.pairwise(moments))
    return [f"silent for {longest:.1f} s"] if longest > silence_s else []


# ---- the faults ----------------------------------------------------------------------------------


def proxied(elsewhere: str) -> Iterator[tuple[int, Fault]]:
    """Faults of answers, by the K of the server that has them."""
    passing = ("401", "redirect", "hang", "trickle")
    named = acts(elsewhere)
    middle = BEFORE + OF_A_VISIT + 3
    for name, act in named.items():
        for k in (0, K):
            who = "plain" if k == 0 else f"K={k}"
            yield k, Fault(f"{name}, once, {who}", act, middle, 1)
            if name in ("503", "429", "garbled JSON", "closed in the middle", "500"):
                yield k, Fault(f"{name}, always, {who}", act, middle, float("inf"))
    # The first request that is measured, the last one, and those under load
    for where, first, words in (
        ("first", BEFORE, ()),
        ("last", BEFORE + VISITS * OF_A_VISIT - 1, ()),
        ("under load", BEFORE + VISITS * OF_A_VISIT + WARM_UP + 5, (LOAD,)),
    ):
        for k in (0, K):
            who = "plain" if k == 0 else f"K={k}"
            for name in ("503", *passing) if where == "under load" else ("401",):
                yield k, Fault(f"{name}, {where}, {who}", named[name], first, 1, words)
    for k in (0, K):
        who = "plain" if k == 0 else f"K={k}"
        first = BEFORE + VISITS * OF_A_VISIT + WARM_UP + 5
        fault = Fault(f"503, always under load, {who}", named["503"], first, float("inf"), (LOAD,))
        yield k, fault


def kills() -> Iterator[tuple[str, int, int, tuple[str, ...]]]:
    """Name, K, after how many trials (or after a visit under load), and more words."""
    of_a_visit = TRIALS // VISITS
    for k in (0, K):
        who = "plain" if k == 0 else f"K={k}"
        yield f"killed in visit 1, {who}", k, 2, ()
        yield f"killed in visit 2, {who}", k, of_a_visit + 2, ()
        # The plain server has the rounds of the last visit left; the order of the last two is drawn
        yield f"killed near the last request, {who}", k, TRIALS - (1 if k == 0 else 3), ()
        yield f"killed under load, {who}", k, TRIALS, (LOAD,)


def killer(root: Path, k: int, trials: int, *, load: bool, stop: threading.Event) -> None:
    """Kill the server of a K once so many trials are stored, or the one with room for a load."""
    found: psutil.Process | None = None
    while not stop.wait(0.002):
        if found is None or not runs(found):  # servers are ended and started within a run
            found = victim(k, load=load)
        # Under load once a visit of it is stored
        files, least = (
            [*root.glob(f"*/{'loads' if load else 'trials'}.jsonl")],
            1 if load else trials,
        )
        if found is None or not files or files[0].read_bytes().count(b"\n") < least:
            continue
        with suppress(psutil.Error):
            found.kill()
        return


def runs(process: psutil.Process) -> bool:
    """True where it runs and is no zombie."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def victim(k: int, *, load: bool) -> psutil.Process | None:
    """The server of a K that does not reject every draft, where the run has started it."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            line = process.cmdline()
            if "harness.engines.xllamacpp_server" not in line or "--spec-synth-rates" in line:
                continue
            drafts, slots = "--spec-draft-n-max" in line, line[line.index("--parallel") + 1]
            supervisor = "harness.engines.supervisor" in line
            if not supervisor and drafts == (k > 0) and (slots != "1") == load:
                return process
    return None


def results(only: Sequence[str], silence_s: float) -> Iterator[Result]:
    """The result of each fault whose name holds one of the words."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        target, draft = (gguf_of(EMBEDDED / name) for name in ("tiny", "tiny_good"))
        # A request's limit is some seconds here, and so is what is said while it is waited for
        for name, value in (("EVERY_S", 0.5), ("SOON_S", 0.1), ("LATE_S", 0.3)):
            stack.enter_context(patch.object(progress, name, value))
        stack.enter_context(patch.dict("os.environ", {"FAULTS_KEY": KEY}))

        def wanted(name: str) -> bool:
            return not only or any(word in name for word in only)

        elsewhere = Proxy("http://127.0.0.1:9")
        faults = [(k, fault) for k, fault in proxied(elsewhere.url) if wanted(fault.name)]
        if faults:
            flags = ("--cache-type-k", "f32", "--cache-type-v", "f32")
            engine = LlamaCpp(target, draft, folder, 256, 1, slots=8, more_flags=flags)
            served: dict[int, Any] = {k: stack.enter_context(engine.open(k)) for k in (0, K)}
            for number, (k, fault) in enumerate(faults):
                proxies = {each: Proxy(served[each].url) for each in (0, K)}
                yield _of_fault(folder / f"fault{number}", k, fault, proxies, elsewhere, silence_s)
        models = ("model=tiny", "draft=tiny_good", "score=false")
        for number, (name, k, trials, more) in enumerate(kills()):
            if wanted(name):
                root, words = folder / f"killed{number}", (*SETTINGS, *EXACT, *models, *more)
                yield _of_kill(name, root, (k, trials), words, silence_s, load=bool(more))


def _of_fault(
    root: Path, k: int, fault: Fault, proxies: dict[int, Proxy], elsewhere: Proxy, silence_s: float
) -> Result:
    """The result of a fault of the server at K = k, which the proxies stand in front of."""
    root.mkdir()
    proxies[k].fault = fault
    urls = f"url=[{proxies[0].url},{proxies[K].url}]"
    words = (*SETTINGS, *fault.words, urls, "score=false", "api_key_env=FAULTS_KEY")

    def heal() -> None:
        proxies[k].fault = None

    words = (*words, f"timeout_factor={QUICK}")
    awaited = proxies[k].url if fault.name.startswith(SLOW) else None
    result = examined(fault.name, root, words, heal, silence_s, awaited)
    if proxies[k].met <= fault.first:
        result.wrong.append("the fault was not met")
    if elsewhere.keys:
        result.wrong.append("the key was sent elsewhere")
    for proxy in proxies.values():
        proxy.shutdown()
        proxy.server_close()
    return result


def _of_kill(
    name: str,
    root: Path,
    when: tuple[int, int],
    words: Sequence[str],
    silence_s: float,
    *,
    load: bool,
) -> Result:
    """The result of killing the server of a K after so many trials, as `when` says."""
    root.mkdir()
    stop = threading.Event()
    kill = threading.Thread(target=killer, args=(root, *when), kwargs={"load": load, "stop": stop})
    kill.start()

    def ended() -> None:
        stop.set()
        kill.join()

    result = examined(name, root, (*words, f"timeout_factor={QUICK}"), ended, silence_s)
    if result.first.status == 0:
        result.wrong.append("the fault was not met")
    return result


def main() -> int:
    """Print the table; status 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=(), help="words of the faults' names")
    parser.add_argument("--silence", type=float, default=2.5, help="longest time without a line, s")
    given = parser.parse_args()
    rows: list[Result] = []
    wrong: list[str] = []
    print("| fault | status | trials | report | s | wrong |\n|---|---|---|---|---|---|")
    for result in results(given.only, given.silence):
        rows.append(result)
        shown = "; ".join(result.wrong) or "nothing"
        wrong += [f"{result.name}: {each}" for each in result.wrong]
        reported = "yes" if result.reported else "no"
        print(
            f"| {result.name} | {result.first.status} | {result.trials} of {TRIALS} | {reported} |"
            f" {result.first.seconds:.1f} | {shown} |",
            flush=True,
        )
    print(f"{len(rows)} faults, {len(wrong)} wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

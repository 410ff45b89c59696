"""Speculation on llama.cpp, timed by hand: a second opinion on a server run.

    python benchmarks/hand_timing.py TARGET.gguf --draft DRAFT.gguf --run RUN
    python benchmarks/hand_timing.py TARGET.gguf --draft DRAFT.gguf --prompts FILE --k 1,4
    python benchmarks/hand_timing.py TARGET.gguf --ngram 12 --prompts FILE --k 8,16 --budget 160

Nothing of the harness is imported: the standard library, and the wheel xllamacpp or, with --server,
a llama-server binary. A plain server and one for each K answer the same greedy requests. Each
prompt goes to every server before the next one does; the first of them is another for each prompt.

With --run these are the requests of a server run at temperature 0: the prompts of its file that its
trials.jsonl has (--prompts names the file, else config.yaml does), each with the K and the budget
it was asked with, and the threads of its servers. A run stores no prompt tokens: they are made by
the server, from the file's own chat template, and their number must be that of the run.

A speedup is plain decoding's time per token over a K's: each is the sum of `predicted_ms` over the
sum of tokens after the first, which the prefill gives. With --clock cpu it is the processor time of
the server's threads from its first token on, for a machine that other work keeps busy; give it
--threads 1, since threads that wait for each other take processor time as well.

Tokens per round are those tokens over rounds. A text that fills its budget has one round for each
token after the first that is not an accepted draft; of one that ends before, `draft_n` / K is
counted where the draft is a model.
"""

import argparse
import csv
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STARTS_IN_S, ANSWERS_IN_S, WARM_UP_TOKENS = 300.0, 3600.0, 8
ALL = "all"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", help="GGUF file")
    parser.add_argument("--draft", help="GGUF file of the draft model")
    parser.add_argument("--ngram", type=int, help="ngram-simple of so many tokens; K is its size-m")
    parser.add_argument("--run", type=Path, help="folder of a server run, whose requests are timed")
    parser.add_argument("--prompts", type=Path, help="lines of JSON with id, category and prompt")
    parser.add_argument("--category", help="only these prompts")
    parser.add_argument("--limit", type=int, help="prompts of each category")
    parser.add_argument("--k", help="such as 1,2,4,8; with --run those of the run")
    parser.add_argument("--budget", type=int, default=64, help="tokens of an answer, without --run")
    parser.add_argument("--threads", type=int, help="of each server; with --run those of the run")
    parser.add_argument("--clock", choices=("engine", "cpu"), default="engine")
    parser.add_argument("--visits", type=int, default=1, help="times that each request is sent")
    parser.add_argument("--server", help="a llama-server binary, instead of the wheel")
    parser.add_argument("--out", type=Path, help="write every answer there, as lines of JSON")
    asked = parser.parse_args()
    if (asked.draft is None) == (asked.ngram is None):
        parser.error("give --draft or --ngram")
    wanted = run_requests(asked.run) if asked.run else {}
    file = asked.prompts or prompt_file(asked.run)
    prompts = [p for p in read_prompts(file) if asked.category in (None, p.prompt_set)]
    if asked.run:
        prompts = [p for p in prompts if (p.prompt_set, p.name) in wanted]
    if asked.limit:
        seen: dict[str, int] = defaultdict(int)
        for prompt in prompts:
            seen[prompt.prompt_set] += 1
            prompt.place = seen[prompt.prompt_set]
        prompts = [p for p in prompts if p.place <= asked.limit]
    if not prompts:
        parser.error("no prompts: name the file of the run's prompts with --prompts")
    ks = sorted({k for request in wanted.values() for k in request.ks} - {0})
    ks = [int(k) for k in asked.k.split(",")] if asked.k else ks
    threads = asked.threads or (run_threads(asked.run) if asked.run else None)
    # Characters are at least as many as tokens
    context = max(len(prompt.text) for prompt in prompts) + 512
    context += max([asked.budget, *(request.budget for request in wanted.values())]) + max(ks)
    servers: dict[int, Server] = {}
    try:
        for k in [0, *ks]:
            servers[k] = Server(asked, k, threads, context)
            servers[k].complete([1, 2, 3], WARM_UP_TOKENS)
        answers = timed(servers, prompts, wanted, asked)
    finally:
        for server in servers.values():
            server.close()
    if asked.out:
        asked.out.write_text("".join(json.dumps(vars(each)) + "\n" for each in answers))
    show(answers, ks, by_model=asked.draft is not None, run=asked.run)


def timed(
    servers: dict[int, "Server"],
    prompts: list[SimpleNamespace],
    wanted: dict[Any, SimpleNamespace],
    asked: Any,
) -> list[SimpleNamespace]:
    """Every answer; a line of progress for each prompt."""
    answers: list[SimpleNamespace] = []
    turn = 0
    for visit in range(asked.visits):
        for prompt in prompts:
            tokens = servers[0].tokens_of(prompt.text)
            request = wanted.get((prompt.prompt_set, prompt.name))
            budget = request.budget if request else asked.budget
            if request and request.prompt_tokens != len(tokens):
                sys.exit(
                    f"{prompt.name}: {len(tokens)} tokens by the server's template, and"
                    f" {request.prompt_tokens} in the run"
                )
            ks = [k for k in servers if not request or asked.k or k in request.ks or k == 0]
            turn += 1
            for k in (*ks[turn % len(ks) :], *ks[: turn % len(ks)]):
                done = servers[k].complete(tokens, budget)
                done.prompt_set, done.prompt, done.k = prompt.prompt_set, prompt.name, k
                done.visit, done.prompt_tokens, done.budget = visit, len(tokens), budget
                answers.append(done)
            of_prompt = answers[-len(ks) :]
            times = ", ".join(f"K={a.k} {a.ms / a.tokens:.1f}" for a in of_prompt)
            sys.stderr.write(f"{prompt.name}: {len(tokens)} tokens, ms per token {times}\n")
    return answers


def show(
    answers: list[SimpleNamespace], ks: list[int], *, by_model: bool, run: Path | None
) -> None:
    """Print a row for each prompt set and K, next to the run's own speedup."""
    plain = {(a.prompt, a.visit): a for a in answers if a.k == 0}
    of_run = run_speedups(run) if run else {}
    print("| prompts | K | texts | equal to plain | tokens per round | plain ms | speedup | run |")
    print("|---|---|---|---|---|---|---|---|")
    for prompt_set in [*dict.fromkeys(a.prompt_set for a in answers), ALL]:
        for k in ks:
            drafted = [a for a in answers if a.k == k and prompt_set in (a.prompt_set, ALL)]
            if not drafted:
                continue
            pairs = [(plain[a.prompt, a.visit], a) for a in drafted]
            equal = sum(a.ids == b.ids for a, b in pairs)
            tokens = sum(after_first(a) for a in drafted)
            rounds = sum(rounds_of(a, by_model) for a in drafted)
            plain_ms = per_token(a for a, _ in pairs)
            speedup = plain_ms / per_token(b for _, b in pairs)
            stored = of_run.get((prompt_set, k))
            note = "-" if stored is None else f"{stored:.3f}x, {stored / speedup - 1:+.1%}"
            print(
                f"| {prompt_set} | {k} | {len(pairs)} | {equal} | {tokens / rounds:.2f}"
                f" | {plain_ms:.1f} | {speedup:.3f}x | {note} |"
            )


def per_token(answers: Iterable[SimpleNamespace]) -> float:
    """Milliseconds: the ratio of the sums."""
    pairs = [(answer.ms, after_first(answer)) for answer in answers]
    return sum(ms for ms, _ in pairs) / sum(tokens for _, tokens in pairs)


def after_first(answer: SimpleNamespace) -> int:
    return answer.tokens - 1


def rounds_of(answer: SimpleNamespace, by_model: bool) -> int:
    if answer.stop == "limit" or not by_model:
        return after_first(answer) - answer.accepted
    return -(-answer.drafted // answer.k)


# ---- a run's requests ----------------------------------------------------------------------------


def read_prompts(file: Path) -> list[SimpleNamespace]:
    entries = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    return [
        SimpleNamespace(
            name=str(entry["id"]), prompt_set=entry.get("category", file.stem), text=entry["prompt"]
        )
        for entry in entries
    ]


def prompt_file(run: Path | None) -> Path:
    """The one that config.yaml names below `files:`."""
    text = (run / "config.yaml").read_text() if run else ""
    found = re.search(r"^  files:\n  - (.+)$", text, re.MULTILINE)
    if found is None:
        sys.exit("no file of prompts: give --prompts FILE")
    return Path(found[1].strip("'\""))


def run_requests(run: Path) -> dict[Any, SimpleNamespace]:
    """By prompt set and id: its length, its budget and every K that it was sent to, greedily."""
    named = re.search(r"^new_tokens: (\d+)$", (run / "config.yaml").read_text(), re.MULTILINE)
    new_tokens = int(named[1]) if named else 0
    requests: dict[Any, SimpleNamespace] = {}
    for line in (run / "trials.jsonl").read_text().splitlines():
        trial = json.loads(line)
        if trial["status"] != "ok" or trial["temperature"]:
            continue
        filled, length = trial["stop_reason"] == "budget", len(trial["tokens"])
        budget = length if filled else max(length, new_tokens)
        request = requests.setdefault(
            (trial["prompt_set"], trial["prompt"]),
            SimpleNamespace(prompt_tokens=trial["prompt_tokens"], budget=budget, ks=set()),
        )
        request.ks.add(trial["k"])
    return requests


def run_threads(run: Path) -> int | None:
    return json.loads((run / "manifest.json").read_text()).get("server_threads")


def run_speedups(run: Path) -> dict[tuple[str, int], float]:
    """What the run measured at temperature 0, by prompt set and K."""
    with (run / "results.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["source"] == "measured"]
    rows = [row for row in rows if float(row["temperature"]) == 0 and row["speedup"]]
    cells = {(row["prompt_set"], int(row["k"])): float(row["speedup"]) for row in rows}
    served = json.loads((run / "summary.json").read_text()).get("served") or {}
    by_k = [cell for cell in served.get("by_k", ()) if cell["temperature"] == 0]
    return cells | {(ALL, cell["k"]): cell["speedup"] for cell in by_k if cell["speedup"]}


# ---- servers -------------------------------------------------------------------------------------


class Server:
    """One llama.cpp server with its K, in a process of its own."""

    def __init__(self, asked: Any, k: int, threads: int | None, context: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        flags = {"--model": asked.target, "--port": port, "--ctx-size": context, "--parallel": 1}
        if threads:
            flags["--threads"] = threads
        if k and asked.draft:
            flags |= {"--spec-type": "draft-simple", "--spec-draft-model": asked.draft}
            flags |= {"--spec-draft-n-max": k}
            if threads:
                flags["--spec-draft-threads"] = threads
        elif k:
            flags |= {"--spec-type": "ngram-simple", "--spec-ngram-simple-size-n": asked.ngram}
            flags |= {"--spec-ngram-simple-size-m": k, "--spec-draft-n-max": k}
        words = [str(word) for flag in flags.items() for word in flag]
        program = [asked.server] if asked.server else [sys.executable, __file__, "--serve"]
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the server)
        self.process = subprocess.Popen([*program, *words], stdout=self.log, stderr=self.log)
        self.url, self.k, self.clock = f"http://127.0.0.1:{port}", k, asked.clock
        until = time.monotonic() + STARTS_IN_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > until:
                self.log.seek(0)
                sys.exit(f"K={k}: no server\n{self.log.read().decode(errors='replace')[-2000:]}")
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def open(self, path: str, body: dict[str, Any]) -> Any:
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        return urllib.request.urlopen(request, timeout=ANSWERS_IN_S)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        with self.open(path, body) as answer:
            return json.load(answer)

    def tokens_of(self, text: str) -> list[int]:
        """Of a message of the user, as the file's chat template has it."""
        messages = [{"role": "user", "content": text}]
        prompt = self.post("/apply-template", {"messages": messages})["prompt"]
        body = {"content": prompt, "add_special": False, "parse_special": True}
        return self.post("/tokenize", body)["tokens"]

    def complete(self, prompt: list[int], budget: int) -> SimpleNamespace:
        greedy = {"temperature": 0.0, "samplers": ["temperature"], "seed": 1}
        body = {"prompt": prompt, "n_predict": budget, "cache_prompt": False, "return_tokens": True}
        ids: list[int] = []
        text, at_first, answer = "", 0.0, dict[str, Any]()
        with self.open("/completion", body | greedy | {"stream": True}) as lines:
            for line in lines:
                if not line.startswith(b"data: "):
                    continue
                answer = json.loads(line.removeprefix(b"data: "))
                if not ids:  # the first token, so that the prefill is over
                    at_first = self.processor_ms()
                ids += answer.get("tokens") or ()
                text += answer.get("content") or ""
        processor_ms, timings = self.processor_ms() - at_first, answer["timings"]
        return SimpleNamespace(
            ids=ids,
            text=text,
            tokens=timings["predicted_n"],
            ms=timings["predicted_ms"] if self.clock == "engine" else processor_ms,
            engine_ms=timings["predicted_ms"],
            processor_ms=processor_ms,
            prompt_ms=timings["prompt_ms"],
            drafted=timings.get("draft_n", 0),
            accepted=timings.get("draft_n_accepted", 0),
            stop=answer["stop_type"],
        )

    def processor_ms(self) -> float:
        """Of all its threads, since it started; 0 where the system does not tell."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e6

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


def serve(words: list[str]) -> None:
    """llama-server out of the wheel, for the flags above."""
    wheel: Any = import_module("xllamacpp")
    value = dict(zip(words[::2], words[1::2], strict=True))
    params: Any = wheel.CommonParams()
    params.model.path, params.port = value["--model"], int(value["--port"])
    params.n_ctx, params.n_parallel = int(value["--ctx-size"]), 1
    speculative = params.speculative
    if "--threads" in value:
        for of in (params, speculative.draft):
            of.cpuparams.n_threads = of.cpuparams_batch.n_threads = int(value["--threads"])
    if "--spec-type" in value:
        kind = value["--spec-type"].replace("-", "_").upper()
        types = wheel.common_speculative_type
        speculative.types = [getattr(types, f"COMMON_SPECULATIVE_TYPE_{kind}")]
        speculative.draft.n_max = int(value["--spec-draft-n-max"])
        if "--spec-draft-model" in value:
            speculative.draft.mparams.path = value["--spec-draft-model"]
        else:
            speculative.ngram_simple.size_n = int(value["--spec-ngram-simple-size-n"])
            speculative.ngram_simple.size_m = int(value["--spec-ngram-simple-size-m"])
    server = wheel.Server(params)
    while server.listening_address:
        time.sleep(3600)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2:])
    else:
        main()

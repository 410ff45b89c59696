"""Real models, as a user measures them: time to an answer, memory, predictions, rounds and texts.

    python benchmarks/real_pair.py TARGET.gguf DRAFT.gguf --target-checkpoint DIR
        --draft-checkpoint DIR                      # by the defaults of harness.server
    python benchmarks/real_pair.py ... --every-k    # until=all: predictions in every cell
    python benchmarks/real_pair.py --small SMOLLM2.gguf --target-checkpoint DIR

Each run is the command as it is typed, in a process of its own. --small takes ngram_simple on
llama.cpp; and on the harness's loop an audition of ngram, early_exit and a copy in bfloat16, and a
sweep of ngram at every K. Without checkpoints there is no replay (score=false); the tokenizer is
then read from the GGUF file. Arguments with = go to every command. Without --prompts these are 20
in benchmarks/prompts.

Time is from the command to the line that begins with "first answer", and to the process's end.
Memory is resident, of that process without its servers, every 0.2 s: the most of all, and the most
while servers decode, which is where they take processor time. --out writes the tables into the
section of real models in docs/validation.md, each below its own heading.
"""

import argparse
import importlib.metadata
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil
from servers import PAGE, REAL, section, with_section
from transformers import AutoConfig, AutoTokenizer

from harness import formatting as fmt
from harness.analysis import analyse
from harness.measurement.environment import cpu_name
from harness.records import GREEDY, where
from harness.storage import StoredRun, load

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ROOT / "benchmarks" / "prompts" / "real_pair.jsonl"
FIRST = re.compile(r"^(\d+:\d\d:\d\d )?first answer")
INTERVAL_S, BUSY = 0.2, 0.1
EXIT_LAYERS = 8
SHORT = "new_tokens=64"


@dataclass
class Watched:
    """What a command was seen to do from outside; bytes are resident."""

    words: list[str]
    status: int = 0
    first_s: float | None = None
    final_s: float = 0.0
    most_bytes: int = 0
    serving_bytes: int = 0
    lines: list[str] = field(default_factory=list[str])


def watched(command: str, keys: Sequence[str]) -> Watched:
    """Run a command and wait for it; what it writes to standard error is passed on."""
    seen = Watched(["python", "-m", f"harness.{command}", *keys])
    begun = monotonic()
    process = subprocess.Popen(
        [sys.executable, *seen.words[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def read() -> None:
        for line in process.stdout or ():
            sys.stderr.write(line)
            seen.lines.append(line.rstrip())
            if seen.first_s is None and FIRST.match(line):
                seen.first_s = monotonic() - begun

    reader = threading.Thread(target=read)
    reader.start()
    harness, served_s = psutil.Process(process.pid), 0.0
    while process.poll() is None:
        sleep(INTERVAL_S)
        try:
            resident, before = harness.memory_info().rss, served_s
            served_s = sum(_processor_s(child) for child in harness.children(recursive=True))
        except psutil.NoSuchProcess:
            break
        seen.most_bytes = max(seen.most_bytes, resident)
        if served_s - before > BUSY * INTERVAL_S:
            seen.serving_bytes = max(seen.serving_bytes, resident)
    seen.status = process.wait()
    seen.final_s = monotonic() - begun
    reader.join()
    return seen


def _processor_s(process: psutil.Process) -> float:
    try:
        return sum(process.cpu_times()[:2])
    except psutil.Error:  # it has ended
        return 0.0


def measured(command: str, keys: Sequence[str], results: Path) -> tuple[Watched, StoredRun | None]:
    """A command, and the run that it stored."""
    before = set(results.iterdir())
    seen = watched(command, [*keys, f"results_root={results}"])
    seen.words.pop()  # where it was stored does not matter to a reader
    folders = set(results.iterdir()) - before
    return seen, load(folders.pop()) if folders else None


def typed(words: Sequence[str]) -> str:
    """A command as a reader types it, without the folders of this machine."""
    inside = [word.replace(f"{ROOT}/", "") for word in words]
    return shlex.join(re.sub(r"(?<=[=@\[,])/[^,\]]*/", "", word) for word in inside)


# ---- tables --------------------------------------------------------------------------------------


def described(seen: Watched, run: StoredRun | None) -> Iterator[str]:
    """Times, memory, the answer; then a row for each cell that was measured."""
    yield from (f"`{typed(seen.words)}`", "")
    serving = f"{seen.serving_bytes / 1e9:.2f} GB" if seen.serving_bytes else fmt.EMPTY
    answer = next((line for line in seen.lines if line.startswith("error:")), "no answer")
    if run is not None:
        answers = [each for each in analyse(run).answers if each.prompt_set == "all" and each.timed]
        each = where(answers, temperature=GREEDY)[:1] or answers[:1]
        answer = "; ".join(f"{one.decision}, {fmt.gain(one)}" for one in each) or answer
    yield from (
        "| first answer | final answer | status | memory | while servers decode | answer |",
    )
    yield "|---|---|---|---|---|---|"
    yield (
        f"| {_clock(seen.first_s)} | {_clock(seen.final_s)} | {seen.status}"
        f" | {seen.most_bytes / 1e9:.2f} GB | {serving} | {answer} |"
    )
    if run is None:
        return
    yield from ("", *_cells(run), "", *_texts(run))


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return fmt.EMPTY
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


def _cells(run: StoredRun) -> Iterator[str]:
    """Predicted against measured, at temperature 0."""
    rows = run.results[(run.results.temperature == GREEDY) & (run.results.k > 0)]
    rows = rows[(rows.status != "failed") & rows.speedup.notna()].set_index(["prompt_set", "k"])
    by_source: dict[str, Any] = {
        source: rows[rows.source == source].speedup.to_dict() for source in ("measured", "replayed")
    }
    lengths = rows[rows.source == "measured"].tokens_per_round.to_dict()
    yield "| prompts | K | tokens per round | measured | predicted | error |"
    yield "|---|---|---|---|---|---|"
    errors: list[float] = []
    for cell, speedup in sorted(by_source["measured"].items()):
        predicted = by_source["replayed"].get(cell)
        error = None if predicted is None else predicted / speedup - 1.0
        errors += [] if error is None else [abs(error)]
        yield (
            f"| {cell[0]} | {cell[1]} | {fmt.decimal(lengths[cell])} | {speedup:.3f}x"
            f" | {fmt.EMPTY if predicted is None else f'{predicted:.3f}x'}"
            f" | {fmt.signed_percent(error)} |"
        )
    if errors:
        yield ""
        middle, largest = statistics.median(errors), max(errors)
        yield f"Error: median {middle:.1%}, largest {largest:.1%} over {len(errors)} cells.  "


def _texts(run: StoredRun) -> Iterator[str]:
    """Greedy texts against plain decoding's, and rounds against replay's, of a server run."""
    summary = analyse(run)
    served = summary.served
    for gate in () if served is None else where(served.gates, temperature=GREEDY):
        if gate.k:
            checks = where(summary.text_checks, k=gate.k)
            results = Counter(check.result for check in checks)
            counts = ", ".join(f"{count} {result}" for result, count in sorted(results.items()))
            yield (
                f"K = {gate.k}: {gate.texts} texts, {counts or 'none compared'}; rounds equal to"
                f" replay's in {gate.equal_rounds or 0} of {gate.replayed_texts or 0}.  "
            )


def machine(threads: int) -> str:
    """What all of it ran on."""
    versions = [
        f"{name} {importlib.metadata.version(name)}"
        for name in ("xllamacpp", "torch", "transformers")
    ]
    memory = psutil.virtual_memory().total / 1e9
    return (
        f"Machine: {cpu_name()}, {psutil.cpu_count()} processors, {memory:.0f} GB;"
        f" threads={threads}; {', '.join(versions)}."
    )


def placed(page: str, title: str, text: str, machine: str) -> str:
    """The page with this text below its heading in the section of real models."""
    entries = dict(entry.split("\n", 1) for entry in f"\n{section(page, REAL)}".split("\n### ")[1:])
    entries[title] = f"\n{machine}\n\n{text}\n"
    written = (f"### {name}\n\n{entry.strip()}" for name, entry in entries.items())
    first = "Written by `python benchmarks/real_pair.py`, whose first lines say what is measured."
    return with_section(page, REAL, "\n\n".join([first, *written]))


# ---- commands ------------------------------------------------------------------------------------


def checkpoint(gguf: str, folder: Path | None, made: Path) -> Path:
    """A model's folder; where none is given one with its configuration and tokenizer alone."""
    if folder is not None:
        return folder.resolve()
    file = Path(gguf)
    made = made / file.stem
    for kind in (AutoConfig, AutoTokenizer):
        kind.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(made)
    return made


def model_keys(role: str, gguf: str, folder: Path) -> list[str]:
    file = Path(gguf).resolve()
    return [f"{role}=hf", f"{role}.id={folder}", f"{role}.name={file.stem}", f"{role}.gguf={file}"]


def commands(asked: argparse.Namespace, made: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Title, command and keys."""
    prompts = [f"prompts.files=[{asked.prompts.resolve()}]", f"threads={asked.threads}"]
    target = checkpoint(asked.target, asked.target_checkpoint, made)
    served = ["engine=llamacpp", *prompts, *model_keys("model", asked.target, target)]
    served += [] if asked.target_checkpoint else ["score=false"]
    grid = [f"k=[{asked.k}]", "temperature=[0]", "until=all"]
    if not asked.small:
        draft = checkpoint(asked.draft, asked.draft_checkpoint, made)
        pair = [*served, *model_keys("draft", asked.draft, draft)]
        title = f"{Path(asked.target).stem} with {Path(asked.draft).stem} on llama.cpp"
        yield (
            f"{title}, {'every K' if asked.every_k else 'by defaults'}",
            "server",
            ([*pair, *grid] if asked.every_k else pair),
        )
        return
    name = Path(asked.target).stem
    own = [f"model={target}", f"model.name={name}", *prompts, "temperature=[0]", SHORT]
    exits = f"early_exit@layers:{EXIT_LAYERS}"
    lookup = [*served, "draft=ngram_simple", "k=[2,4,8]", "temperature=[0]", SHORT]
    yield f"{name} with ngram_simple on llama.cpp", "server", lookup
    drafts = f"drafts=[ngram,{exits},bf16]"
    yield f"{name}, audition on the harness's loop", "audition", [*own, drafts]
    words = [*own, "draft=ngram", "k=[1,2,4]", "until=all"]
    yield f"{name} with ngram on the harness's loop", "sweep", words


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", help="TARGET.gguf DRAFT.gguf, and keys of commands")
    parser.add_argument("--small", help="GGUF file of a small target, without a draft model")
    parser.add_argument("--target-checkpoint", type=Path)
    parser.add_argument("--draft-checkpoint", type=Path)
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--k", default="1,2,4,8", help="with --every-k")
    parser.add_argument("--every-k", action="store_true", help="predictions in every cell")
    parser.add_argument("--results", type=Path, help="keep the run folders there")
    parser.add_argument("--only", help="commands whose title has this")
    parser.add_argument("--out", type=Path, nargs="?", const=PAGE, help="docs/validation.md")
    asked = parser.parse_intermixed_args()
    keys = [word for word in asked.files if "=" in word]
    files = [word for word in asked.files if "=" not in word]
    if len(files) != (0 if asked.small else 2):
        parser.error("give TARGET.gguf and DRAFT.gguf, or --small SMOLLM2.gguf")
    asked.target, asked.draft = (asked.small, None) if asked.small else files
    on = machine(asked.threads)
    print(on)
    with tempfile.TemporaryDirectory() as made:
        results = (asked.results or Path(made) / "results").resolve()
        results.mkdir(parents=True, exist_ok=True)
        for title, command, words in commands(asked, Path(made)):
            if asked.only and asked.only not in title:
                continue
            text = "\n".join(described(*measured(command, [*words, *keys], results)))
            print(f"\n### {title}\n\n{text}", flush=True)
            if asked.out:
                asked.out.write_text(placed(asked.out.read_text(), title, text, on))


if __name__ == "__main__":
    main()

"""Servers against replay and prediction: rounds, speedups, sampled texts, load.

    python benchmarks/servers.py                # the embedded pairs on llama.cpp, half an hour
    python benchmarks/servers.py RUN RUN ...    # stored server runs instead, of any engine

--untimed RUN ... adds runs whose speedups are left out. --add RUN ... measures nothing: it adds the
rounds and sampled texts of these runs to the page that is there.

Every number comes from a run of `python -m harness.server`, as anyone's own server would be
measured. Writes docs/validation.md, or the file that --out names.

Rounds: at temperature 0 those of every text, and its drafted tokens, against replay of the returned
text, with the text itself against plain decoding's. Speedups: of each prompt set at each K, against
the prediction that has not seen it. Sampled texts: rounds against replay by the server's rule, and
the log-probability of the texts under the target, both in standard errors.

The clock is the processor time of each server's process, for this machine may be shared.
"""

import argparse
import math
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness import formatting as fmt
from harness.analysis import analyse
from harness.cli import compose
from harness.commands import server
from harness.engine_facts.engines import spec_of
from harness.records import GREEDY, MachineLoad, ResultRow
from harness.storage import load
from harness.summary import ServedGate, ServedSummary, Summary

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "validation.md"
# Of it, what benchmarks/simulation.py writes
WAITS = {
    engine: f"Waits under load on {spec_of(engine).title}, simulated and measured"
    for engine in ("llamacpp", "vllm")
}
PUBLISHED = ("Published results", "Published crossovers under load")  # computed once
REAL = "Real models"  # written by benchmarks/real_pair.py
# llama.cpp's flags for caches in float32 and plain attention, as the loaded models
EXACT = (
    "flags=[--cache-type-k,f32,--cache-type-v,f32,--spec-draft-type-k,f32,--spec-draft-type-v,f32,"
    "--flash-attn,off]"
)
COMMON = (
    "engine=llamacpp",
    "clock=cpu",
    "threads=1",
    EXACT,
    "k=[1,2,4,8]",
    "new_tokens=96",
    "until=all",
)
ONCE = ("temperature=[0]", "repetitions=1")
SAMPLED = ("temperature=[1]", "repetitions=3")
# Speedups of two pairs; rounds of four, the target as its own draft among them; sampled texts of
# two, with both of llama.cpp's ways to draft
RUNS = (
    ("draft=tiny_good", "temperature=[0]"),
    ("draft=tiny_small", "temperature=[0]"),
    ("draft=tiny_unrelated", *ONCE),
    ("draft=hf", "draft.id=embedded:tiny", "draft.name=itself", *ONCE),
    ("draft=tiny_good", *SAMPLED),
    ("draft=tiny_small", *SAMPLED),
    ("draft=tiny_good", "decode.rule=ratio", *SAMPLED),
    ("draft=tiny_small", "decode.rule=ratio", *SAMPLED),
)


@dataclass(frozen=True)
class Run:
    """One server run.

    Attributes:
        timed: whether its speedups count: it was visited more than once, on a clock to trust.
        busy: what else ran on the machine; None where that is not known.
    """

    summary: Summary
    served: ServedSummary
    timed: bool
    busy: MachineLoad | None

    @property
    def pair(self) -> str:
        """Target and draft."""
        return f"{self.summary.run.model} + {self.summary.run.draft}"

    @property
    def engine(self) -> str:
        """The engine, and the rule where it is not the default of engines."""
        name = spec_of(self.served.engine).title
        return f"{name}, draft sampled" if self.served.rule == "ratio" else name

    @property
    def command(self) -> str:
        """As it can be typed again, wherever its folder was."""
        command = self.summary.run.made_with.command or ""
        if "harness.server" not in command.split():  # it was run from another program
            by_test = "test_servers_vllm" in command
            return "make test-servers" if by_test else "python benchmarks/servers.py"
        return " ".join(word for word in command.split() if not word.startswith("results_root="))


def main() -> None:
    """Measure, or read what was measured, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", help="folders of server runs")
    parser.add_argument("--untimed", nargs="+", default=[], help="more, without their speedups")
    parser.add_argument(
        "--add", nargs="+", default=[], help="only these, to the page that is there"
    )
    parser.add_argument("--visits", type=int, default=20, help="of the runs whose speedups count")
    parser.add_argument("--limit", type=int, help="prompts of each set")
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.add_argument("--results", default="results", help="where runs go")
    asked = parser.parse_args()
    if asked.add:
        more = [_read(Path(run), False) for run in asked.add]
        asked.out.write_text(added(asked.out.read_text(), more))
        return
    folders = [Path(run) for run in asked.runs]
    limit = [] if asked.limit is None else [f"prompts.limit={asked.limit}"]
    shared = [*COMMON, f"repetitions={asked.visits}", f"results_root={asked.results}", *limit]
    if not folders:
        folders = [_measured([*shared, *overrides]) for overrides in RUNS]
    untimed = [Path(run) for run in asked.untimed]
    page = written([_read(folder, folder not in untimed) for folder in (*folders, *untimed)])
    if asked.out.is_file():  # what another benchmark wrote there
        for title in (*PUBLISHED, *WAITS.values(), REAL):
            page = with_section(page, title, section(asked.out.read_text(), title))
    asked.out.write_text(page)
    print(page)


def section(page: str, title: str) -> str:
    """What stands below a title of a page; "" where it has no such."""
    _, _, rest = page.partition(f"## {title}\n")
    return rest.split("\n## ")[0].strip("\n")


def with_section(page: str, title: str, text: str) -> str:
    """A page whose section of that title has this text, before its commands where it had none."""
    before, heading, rest = page.partition(f"## {title}\n")
    if not heading:
        before, _, after = page.partition("## Commands\n")
        after = f"## Commands\n{after}"
    else:
        after = "## " + rest.split("\n## ", 1)[1]
    return f"{before}## {title}\n\n{text}\n\n{after}" if text else page


def _measured(overrides: Sequence[str]) -> Path:
    # The later of two values of one key counts
    values = dict(override.split("=", 1) for override in overrides)
    config = compose("server", [f"{key}={value}" for key, value in values.items()])
    outcome = server.run(config)
    assert outcome.folder is not None
    return outcome.folder


def _read(folder: Path, timed: bool) -> Run:
    run = load(folder)
    summary = analyse(run)
    if summary.served is None:
        sys.exit(f"error: {folder}: not a run of python -m harness.server")
    visited = any(times.visits > 1 for times in summary.round_times)
    return Run(summary, summary.served, timed and visited, run.manifest.other_load)


def written(runs: Sequence[Run]) -> str:
    """The page."""
    lines = [
        "# Servers: what was predicted, and what was measured",
        "",
        "Written by `python benchmarks/servers.py`, whose first lines say how each table is made."
        f" Machine: {_machine(runs)}{_busy(runs)}. Times are processor seconds of the server's"
        " process where a table says cpu.",
        "",
        "Predicted is: by what rounds cost on the same engine, in requests of the other prompt set."
        " A sweep or an audition predicts for the harness's loop, whose rounds cost otherwise."
        " SGLang, TensorRT-LLM, mlx-lm and transformers were not run here. vLLM 0.32's build for"
        " CPUs samples wrongly while it drafts above temperature 0 (vllm#55005): such a server"
        " fails the tests of its sampled texts below, and its rounds are not replay's.",
        "",
        *_rounds(runs),
        *_speedups(runs),
        *_sampled(runs),
        *_loads(runs),
        "## Commands",
        "",
        *(f"    {command}" for command in dict.fromkeys(run.command for run in runs) if command),
        "",
    ]
    return "\n".join(lines)


def added(page: str, runs: Sequence[Run]) -> str:
    """A page with more rows of rounds and of sampled texts, and the commands that made them."""
    for title, _, _, _, *rows in filter(None, ([*_rounds(runs)], [*_sampled(runs)])):
        before, heading, after = page.partition(f"{title}\n")
        if not heading:
            sys.exit(f"error: the page has no section {title!r}; write it with all runs")
        table, _, rest = after.partition("|\n\n")
        page = "\n".join([f"{before}{heading}{table}|", *rows, rest])
    commands = [f"    {run.command}" for run in runs]
    return "\n".join([page.rstrip(), *dict.fromkeys(c for c in commands if c not in page), ""])


def _machine(runs: Sequence[Run]) -> str:
    device = runs[0].summary.run.made_with.device
    return f"{device or platform.processor() or platform.machine()}"


def _busy(runs: Sequence[Run]) -> str:
    """How busy other work kept the machine at most."""
    loads = [(run.busy.load, run.busy.processors) for run in runs if run.busy is not None]
    if not loads:
        return ""
    load, processors = max(loads)
    return f", of which other work kept up to {load:.1f} of {processors} processors busy meanwhile"


Columns = Sequence[tuple[str, Callable[..., str]]]


def _table(title: str, columns: Columns, rows: Sequence[tuple[object, ...]]) -> Iterator[str]:
    """A section with a table; nothing without rows."""
    if not rows:
        return
    yield from (f"## {title}", "")
    yield f"| {' | '.join(name for name, _ in columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(text(*row) for _, text in columns)} |"
    yield ""


def _whole(value: float | None, of: int) -> str:
    return fmt.EMPTY if value is None else f"{value:.0f} of {of}"


def _rounds(runs: Sequence[Run]) -> Iterator[str]:
    rows = [
        (run, gate)
        for run in runs
        for gate in run.served.gates
        if gate.temperature == GREEDY and gate.k
    ]
    columns: Columns = (
        ("engine", lambda run, _: f"{run.engine} {run.served.version}"),
        ("pair", lambda run, _: run.pair),
        ("K", lambda _, gate: str(gate.k)),
        ("texts equal to plain", lambda _, gate: _whole(gate.equal_texts, gate.texts)),
        ("rounds equal to replay", lambda _, gate: _whole(gate.equal_rounds, gate.texts)),
        ("drafted equal to replay", lambda _, gate: _whole(gate.equal_drafted, gate.texts)),
        ("rounds", lambda _, gate: fmt.count(gate.rounds)),
    )
    yield from _table("Rounds at temperature 0", columns, rows)


def _speedups(runs: Sequence[Run]) -> Iterator[str]:
    rows = [
        (run, cell)
        for run in runs
        for cell in run.summary.predicted_cells
        if cell[0].temperature == GREEDY and run.timed
    ]

    def error(cell: tuple[ResultRow, ResultRow]) -> float:
        measured, predicted = cell
        return (predicted.speedup or 0.0) / (measured.speedup or math.nan) - 1.0

    columns: Columns = (
        ("engine, clock", lambda run, _: f"{run.engine}, {run.served.clock}"),
        ("pair", lambda run, _: run.pair),
        ("prompts", lambda _, cell: cell[0].prompt_set),
        ("K", lambda _, cell: str(cell[0].k)),
        ("tokens per round", lambda _, cell: fmt.decimal(cell[0].tokens_per_round)),
        ("measured", lambda _, cell: f"{cell[0].speedup:.3f}x"),
        ("predicted", lambda _, cell: f"{cell[1].speedup:.3f}x"),
        ("error", lambda _, cell: fmt.signed_percent(error(cell))),
    )
    yield from _table("Speedups at temperature 0", columns, rows)
    for engine in dict.fromkeys(run.engine for run, _ in rows):
        errors = [abs(error(cell)) for run, cell in rows if run.engine == engine]
        yield (
            f"{engine}: median error {100 * np.median(errors):.1f} %, largest"
            f" {100 * max(errors):.1f} % over {len(errors)} cells.  "
        )
    if rows:
        yield ""


def _sampled(runs: Sequence[Run]) -> Iterator[str]:
    rows = [(run, gate) for run in runs for gate in run.served.gates if gate.temperature > GREEDY]
    columns: Columns = (
        ("engine", lambda run, _: f"{run.engine} {run.served.version}"),
        ("rule", lambda run, _: str(run.served.rule)),
        ("pair", lambda run, _: run.pair),
        ("T", lambda _, gate: fmt.temperature(gate.temperature)),
        ("K", lambda _, gate: str(gate.k)),
        ("texts", lambda _, gate: str(gate.texts)),
        ("rounds", lambda _, gate: fmt.count(gate.rounds)),
        ("replayed", lambda _, gate: fmt.count(gate.expected_rounds)),
        ("z of rounds", lambda _, gate: _rounds_z(gate)),
        ("nats per token", lambda _, gate: _nats(gate)),
        ("z of texts", lambda _, gate: fmt.signed(gate.text_z, 1)),
    )
    yield from _table("Sampled texts", columns, rows)


def _rounds_z(gate: ServedGate) -> str:
    """Where a text has one way to be decoded there is no z: how many took exactly its rounds."""
    if gate.equal_rounds is not None:
        return f"{gate.equal_rounds} of {gate.replayed_texts} equal"
    return fmt.signed(gate.rounds_z, 1)


def _nats(gate: ServedGate) -> str:
    if gate.nats_per_token is None:
        return fmt.EMPTY
    return f"{gate.nats_per_token:.3f} ({gate.expected_nats_per_token:.3f} expected)"


def _loads(runs: Sequence[Run]) -> Iterator[str]:
    rows = [
        (run, cell)
        for run in runs
        for cell in run.served.load
        if cell.k and cell.throughput_ratio is not None
    ]
    columns: Columns = (
        ("engine, clock", lambda run, _: f"{run.engine}, {run.served.clock}"),
        ("pair", lambda run, _: run.pair),
        ("requests", lambda _, cell: str(cell.concurrency)),
        ("K", lambda _, cell: str(cell.k)),
        ("measured", lambda _, cell: fmt.speedup(cell.throughput_ratio)),
        ("spread", lambda _, cell: fmt.percent(cell.spread)),
    )
    yield from _table("Throughput under load, against plain decoding", columns, rows)
    entries = [
        (run, entry)
        for run in runs
        for schedule in run.served.schedules
        for entry in schedule.entries
    ]
    columns = (
        ("pair", lambda run, _: run.pair),
        ("requests", lambda _, e: f"{e.low} and more" if e.high is None else f"{e.low}-{e.high}"),
        ("K", lambda _, e: str(e.k)),
        ("tie with", lambda _, e: ", ".join(map(str, e.tied)) or fmt.EMPTY),
    )
    yield from _table("K by load", columns, entries)


if __name__ == "__main__":
    main()

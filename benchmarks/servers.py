"""Servers against replay and prediction: rounds, speedups, sampled texts, load.

    python benchmarks/servers.py                # the embedded pairs on llama.cpp, half an hour
    python benchmarks/servers.py RUN RUN ...    # stored server runs instead, of any engine

    python benchmarks/servers.py --audition     # by the costs of a server run, a quarter of an hour
    python benchmarks/servers.py --audition RUN RUN ...     # stored: one that prices, then others

    python benchmarks/servers.py --decided [--wide] [--runs 5]   # one K against all

--untimed RUN ... adds runs whose speedups are left out. --add RUN ... measures nothing: it adds the
rounds and sampled texts of these runs to the page that is there.

Every number comes from a run of `python -m harness.server`, as anyone's own server would be
measured. Writes docs/validation.md, or the file that --out names.

Rounds: at temperature 0 those of every text, and its drafted tokens, against replay of the returned
text, with the text itself against plain decoding's. Speedups: of each prompt set at each K, against
the prediction that has not seen it. Sampled texts: rounds against replay by the server's rule, and
the log-probability of the texts under the target, both in standard errors.

The clock is the processor time of each server's process, for this machine may be shared.

--audition measures one pair twice and another pair once. The first run is the `latency_from` of an
audition of both drafts, whose predicted speedups it prints next to what the other two measured: of
the draft that the first run has, in requests that it has not seen, and of the other draft. No page.

--decided measures one pair with `until=decided` and with `until=all`, in turn and with another seed
each time, and prints of both the K, the interval of its speedup, how many speculating servers were
started, how long it took, and what each K that was measured gained. A third line analyses the
requests of `until=all` as those of one K: its interval differs by what the analysis does, and not
by what other requests happened to take. Then in how many pairs of runs the K is the same, and the
interval no wider, with the mean ratio of widths. 8 prompts of each set and 8 visits unless --limit
and --visits say otherwise. No page. Of the shipped pair K = 1 and K = 2 tie on llama.cpp, where
most of a request is the client's time; --wide takes a target whose K differ, in 3 visits, since its
requests take several times as long.
"""

import argparse
import json
import math
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from harness import formatting as fmt
from harness.analysis import analyse
from harness.cli import compose, draft_conf
from harness.commands import audition, server
from harness.commands.tasks import PROMPTS_OF_EVERY_K
from harness.config import ModelConf
from harness.engine_facts.engines import spec_of
from harness.models import embedded
from harness.models.load import load as load_model
from harness.records import GREEDY, MachineLoad, ResultRow, Trial, grouped, where
from harness.storage import StoredRun, load
from harness.storage.manifest import ChosenK, ServedKs
from harness.summary import Answer, ServedGate, ServedSummary, Summary
from tools.gguf_file import write_gguf

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
# What prices an audition, then what its two drafts are held against: temperature 0, at every K
PRICED = ("temperature=[0]",)
AUDITIONED = ("tiny_good", "tiny_good", "tiny_small")
# The target's feed-forward width with --wide; the shipped one's is 256
WIDE = 2560
# With equal weights K = 1 of hard prompts and K = 2 of easy ones nearly tie on it
WIDE_WEIGHTS = "prompts.weights={easy: 3, hard: 1}"
# One K against all: of the shipped pair at temperature 0
DECIDED = ("draft=tiny_good", "temperature=[0]")
DECIDED_PROMPTS, DECIDED_VISITS, WIDE_VISITS = 8, 8, 3
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
    parser.add_argument("--audition", action="store_true", help="price an audition by a run")
    parser.add_argument("--decided", action="store_true", help="compare one K with all")
    parser.add_argument(
        "--wide", action="store_true", help="with --decided: the shipped target, made slower"
    )
    parser.add_argument("--runs", type=int, default=5, dest="pairs", help="of --decided, each")
    parser.add_argument("--visits", type=int, help="of the runs whose speedups count")
    parser.add_argument("--limit", type=int, help="prompts of each set")
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.add_argument("--results", default="results", help="where runs go")
    asked = parser.parse_args()
    if asked.add:
        more = [_read(Path(run), False) for run in asked.add]
        asked.out.write_text(added(asked.out.read_text(), more))
        return
    folders = [Path(run) for run in asked.runs]
    of_pair = WIDE_VISITS if asked.wide else DECIDED_VISITS
    usual = of_pair if asked.decided else 20
    visits = usual if asked.visits is None else asked.visits
    limit = [] if asked.limit is None else [f"prompts.limit={asked.limit}"]
    shared = [*COMMON, f"repetitions={visits}", f"results_root={asked.results}", *limit]
    if asked.decided:
        limit = limit or [f"prompts.limit={DECIDED_PROMPTS}"]
        limit += widened(Path(asked.results) / "tiny_wide") if asked.wide else []
        pairs = []
        for seed in range(asked.pairs):
            of_seed = [*shared, *DECIDED, *limit, f"seed={seed}"]
            pairs.append(_compared([*of_seed, "until=decided"], of_seed))
            print("\n".join(f"seed {seed}, {each.line}" for each in pairs[-1]), flush=True)
        print(_agreement(pairs))
        return
    if asked.audition:
        if not folders:
            pairs = [[*PRICED, f"draft={draft}"] for draft in AUDITIONED]
            # Of other seeds, so that no two runs send their requests in one order
            folders = [
                _measured([*shared, *pair, f"seed={seed}"]) for seed, pair in enumerate(pairs)
            ]
        print("\n".join(_audited(folders[0], folders[1:], asked.results)))
        return
    if not folders:
        folders = [_measured([*shared, *overrides]) for overrides in RUNS]
    untimed = [Path(run) for run in asked.untimed]
    page = written([_read(folder, folder not in untimed) for folder in (*folders, *untimed)])
    if asked.out.is_file():  # what another benchmark wrote there
        for title in (*PUBLISHED, *WAITS.values(), REAL):
            page = with_section(page, title, section(asked.out.read_text(), title))
    asked.out.write_text(page)
    print(page)


def widened(folder: Path, width: int = WIDE, engine: str = "llamacpp") -> list[str]:
    """The shipped target with the same texts and slower tokens, and the keys that take it.

    Zeros widen its feed-forward layers: with WIDE a token takes about 2.5 ms of processor time, so
    that a request's time is llama.cpp's and hardly the client's, while a drafted token costs enough
    of it for K to differ.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shipped = Path(embedded.__file__).parent / "tiny"
    for file in shipped.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, folder)
    settings = json.loads((shipped / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "intermediate_size": width}))
    weights = load_file(shipped / "model.safetensors")
    more = width - settings["intermediate_size"]
    for name, weight in weights.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            weights[name] = torch.nn.functional.pad(weight, (0, 0, 0, more))
        elif name.endswith("down_proj.weight"):
            weights[name] = torch.nn.functional.pad(weight, (0, more))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    words = ["model=hf", f"model.id={folder.resolve()}", "model.name=tiny_wide", WIDE_WEIGHTS]
    if engine == "llamacpp":
        loaded = load_model(ModelConf(name="tiny_wide", id=str(folder)), torch.device("cpu"))
        words.append(f"model.gguf={write_gguf(loaded, folder / 'tiny_wide.gguf')}")
    return words


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


@dataclass(frozen=True)
class Decided:
    """The answer of a run on the whole workload.

    Attributes:
        what: it rests on.
        effort: what the run took, and each K that was measured; nothing where requests of another
            run are analysed.
    """

    what: str
    answer: Answer
    servers: int = 0
    effort: str = ""

    @property
    def width(self) -> float:
        """Of the interval, upper / lower bound."""
        assert self.answer.speedup_hi is not None
        assert self.answer.speedup_lo is not None
        return self.answer.speedup_hi / self.answer.speedup_lo

    @property
    def line(self) -> str:
        """In words."""
        return (
            f"{self.what}: K={self.answer.named[1]}, {fmt.gain(self.answer)},"
            f" {self.answer.decision}, upper / lower bound {self.width:.4f}{self.effort}"
        )


def _compared(of_one: Sequence[str], of_all: Sequence[str]) -> tuple[Decided, Decided, Decided]:
    """One K and all, measured; and of the requests of all those that one K has."""
    one, _ = _decided(of_one)
    every, run = _decided(of_all)
    k = every.answer.named[1]
    return one, every, Decided("its requests at one K", _answer(_as_one_k(run, k)))


def _decided(overrides: Sequence[str]) -> tuple[Decided, StoredRun]:
    """Measure a run and read its answer."""
    begun = monotonic()
    run = load(_measured(overrides))
    seconds, summary = monotonic() - begun, analyse(run)
    assert summary.served is not None
    assert summary.served.servers is not None
    servers = summary.served.servers.number
    by_k = (f"K={each.k} {fmt.speedup(each.speedup)}" for each in summary.served.by_k)
    effort = f", {servers} speculating servers, {seconds:.0f} s; {', '.join(by_k)}"
    return Decided(f"until={run.config['until']}", _answer(run), servers, effort), run


def _answer(run: StoredRun) -> Answer:
    """On the whole workload, of the server."""
    summary = analyse(run)
    assert summary.served is not None
    return where(summary.answers, engine=summary.served.engine, prompt_set="all")[0]


def _as_one_k(run: StoredRun, k: int) -> StoredRun:
    """A run of every K as if `until=decided` had chosen this one.

    The search for it prices rounds on a few prompts of each set: those that were sent first, for
    they are sent in random order.
    """
    asked = dict.fromkeys((trial.prompt_set, trial.prompt) for trial in run.trials)
    by_set = grouped(asked, lambda name: name[0]).values()
    few = {name for names in by_set for name in names[:PROMPTS_OF_EVERY_K]}
    started = (min(run.config["k"]), max(run.config["k"]), k)

    def probes(trials: Sequence[Trial]) -> tuple[Trial, ...]:
        asked_few = (trial for trial in trials if (trial.prompt_set, trial.prompt) in few)
        return tuple(trial for trial in asked_few if trial.k in (0, *started))

    return replace(
        run,
        manifest=replace(run.manifest, served_ks=ServedKs(started, (ChosenK(GREEDY, k),))),
        trials=tuple(trial for trial in run.trials if trial.k in (0, k)),
        probes=probes(run.trials),
        starts=probes(run.starts),
    )


def _agreement(runs: Sequence[tuple[Decided, Decided, Decided]]) -> str:
    """In how many pairs one K says what all do, of its own requests and of the same ones."""
    same = sum(one.answer.named == every.answer.named for one, every, _ in runs)
    most = max(one.servers for one, _, _ in runs)
    widths = np.array([[each.width for each in compared] for compared in runs])
    ratios = widths[:, [0, 2]] / widths[:, [1]]
    # What is the same but for rounding is no wider
    narrow = (ratios < 1.0 + 1e-9).sum(axis=0)
    mean = np.exp(np.log(ratios).mean(axis=0))
    return (
        f"same K in {same} of {len(runs)}, interval no wider in {narrow[0]} of {len(runs)}"
        f" ({mean[0]:.3f} times as wide in the mean), of the same requests in {narrow[1]} of"
        f" {len(runs)} ({mean[1]:.3f} times), at most {most} speculating servers"
    )


def _audited(prices: Path, measured: Sequence[Path], results: str) -> Iterator[str]:
    """What an audition at a server run's costs predicts, next to what server runs measured."""
    price, runs = _read(prices, True), [_read(folder, True) for folder in measured]
    config = load(measured[0]).config
    drafts = list(dict.fromkeys(str(run.summary.run.draft) for run in runs))
    kept = ("new_tokens", "k", "temperature")
    words = [
        f"latency_from={prices}",
        f"drafts=[{','.join(drafts)}]",
        f"prompts.limit={config['prompts']['limit']}",
        f"results_root={results}",
        *(f"{name}={config[name]}".replace(" ", "") for name in kept),
    ]
    composed = compose("audition", words)
    outcome = audition.run(composed, [draft_conf(draft) for draft in drafts])
    assert outcome.folder is not None
    predicted = {
        (row.draft, row.prompt_set, row.temperature, row.k): row
        for row in analyse(load(outcome.folder)).results
    }
    yield f"prices: {price.pair}, {prices.name}; predictions: {outcome.folder.name}"
    for run in runs:
        errors: list[float] = []
        for cell, _ in run.summary.predicted_cells:
            row = predicted[run.summary.run.draft, cell.prompt_set, cell.temperature, cell.k]
            assert row.speedup is not None
            assert cell.speedup is not None
            errors.append(row.speedup / cell.speedup - 1.0)
            yield (
                f"{run.pair}, {cell.prompt_set}, T={cell.temperature:g}, K={cell.k}: measured"
                f" {cell.speedup:.3f}x, predicted {row.speedup:.3f}x"
                f" [{fmt.decimal(row.speedup_lo)}, {fmt.decimal(row.speedup_hi)}],"
                f" {fmt.signed_percent(errors[-1])}"
            )
        of = "the draft that was measured" if run.pair == price.pair else "another draft"
        sizes = np.abs(errors)
        yield (
            f"{run.pair}, {of}: median error {fmt.percent(np.median(sizes))}, largest"
            f" {fmt.percent(sizes.max())} over {len(errors)} cells"
        )


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

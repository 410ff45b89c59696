"""The simulated server: how fast it is, and what it says next to a server that was measured.

    python benchmarks/simulation.py                          # rounds a second
    python benchmarks/simulation.py --server FOLDER [--engine vllm] [--repeats 3]

Speed: of one core, with texts at temperature 0 of which 70 % of the tokens would be accepted,
arriving at random at a rate that keeps most of the slots busy.

--server measures the embedded pair on an engine (llama.cpp; --engine vllm, whose program has to be
on the PATH) with 4 slots and a target that is made slow enough for the client not to matter: closed
loops of 1, 2 and 4 requests, and requests that arrive at random at 30, 60 and 90 % of the least
capacity of K = 0, 2 and 4. Each repeat is a run of `python -m harness.server` with the same
requests and arrivals, some minutes; those that FOLDER has are kept, so the repeats can be measured
one after the other. Then every load is simulated at costs that were fitted on the other prompts
(`harness.analysis.plan_simulation.load_checks`), and errors of percentiles stand next to what one
repeat says of another. The last lines are the K of the least simulated p95 at each rate against the
measured best.
"""

import argparse
import json
import resource
import shutil
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path
from time import process_time

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from servers import WAITS, with_section

from harness.analysis.plan_simulation import load_checks
from harness.analysis.planned_server import Server
from harness.cli import compose
from harness.commands import server
from harness.config import ModelConf
from harness.models import embedded
from harness.models.load import load as load_model
from harness.records import GREEDY, grouped
from harness.simulation import Costs, Stream, Text, at_random, simulate
from harness.storage import load
from harness.summary import Percentiles, PlanCheck
from harness.theory.replay import by_start
from tools.gguf_file import write_gguf

K, REQUESTS, REPEATS, MANY = 3, 6000, 3, 100_000


# Of the measured server: its target's feed-forward width, K, and shares of the least capacity
WIDTH, KS, SHARES = 5120, (0, 2, 4), (0.3, 0.6, 0.9)
# With equal weights K = 1 of hard prompts and K = 2 of easy ones nearly tie
WEIGHTS = "prompts.weights={easy: 3, hard: 1}"
MEASURED = (
    *("threads=1", "temperature=[0]", "until=all", "clock=engine"),
    *("draft=tiny_good", "k=[2,4]", "new_tokens=48", "repetitions=1"),
    *("prompts.limit=16", "concurrency=[1,2,4]"),
)
ENGINES = {
    "llamacpp": (
        "engine=llamacpp",
        "flags=[--cache-type-k,f32,--cache-type-v,f32,--spec-draft-type-k,f32,"
        "--spec-draft-type-v,f32,--flash-attn,off]",
    ),
    "vllm": (
        *("engine=vllm", "servers=3"),
        "flags=[--enforce-eager,--distributed-executor-backend,uni]",
    ),
}
# Prompts of each set with which capacities are found
FEW = 6


def main() -> None:
    """Print speeds, or errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", type=Path, help="a folder for runs of a measured server")
    parser.add_argument("--engine", choices=[*ENGINES], default="llamacpp")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a page whose section gets what is printed")
    asked = parser.parse_args()
    if asked.server is None:
        speeds()
        return
    runs = [
        Server.of(load(run), GREEDY) for run in measured(asked.server, asked.engine, asked.repeats)
    ]
    repeats = [[*load_checks(run, run.ks)] for run in runs]
    devices = {run.served.setup.environment.device_name or "-" for run in runs}
    lines = [
        f"Made by `python benchmarks/simulation.py --server FOLDER --engine {asked.engine} --out"
        f" docs/validation.md`, whose docstring describes the loads. {len(runs)} repeats on"
        f" {' and '.join(sorted(devices))}; other processes kept"
        f" {', '.join(f'{busy(run):.2f}' for run in runs)} processors busy.",
        "",
        *compared(repeats),
    ]
    print("\n".join(lines))
    if asked.out is not None:
        title = WAITS[asked.engine]
        asked.out.write_text(with_section(asked.out.read_text(), title, "\n".join(lines)))


def widened(folder: Path, engine: str) -> list[str]:
    """The shipped target with the same texts and slower tokens, and the keys that take it.

    Zeros widen its feed-forward layers: a token takes some ms of processor time, so that a
    request's time is the server's and hardly the client's, while a drafted token costs enough of it
    for K to differ.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shipped = Path(embedded.__file__).parent / "tiny"
    for file in shipped.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, folder)
    settings = json.loads((shipped / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "intermediate_size": WIDTH}))
    weights = load_file(shipped / "model.safetensors")
    more = WIDTH - settings["intermediate_size"]
    for name, weight in weights.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            weights[name] = torch.nn.functional.pad(weight, (0, 0, 0, more))
        elif name.endswith("down_proj.weight"):
            weights[name] = torch.nn.functional.pad(weight, (0, more))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    words = ["model=hf", f"model.id={folder.resolve()}", "model.name=tiny_wide", WEIGHTS]
    if engine == "llamacpp":
        loaded = load_model(ModelConf(name="tiny_wide", id=str(folder)), torch.device("cpu"))
        words.append(f"model.gguf={write_gguf(loaded, folder / 'tiny_wide.gguf')}")
    return words


def measured(folder: Path, engine: str, repeats: int) -> list[Path]:
    """The runs, of which those that are there already are not measured again."""
    target = [*MEASURED, *ENGINES[engine], *widened(folder / "tiny_wide", engine)]
    (small,) = _runs(folder / "capacity", [*target, f"prompts.limit={FEW}"], 1)
    rates = [f"{share * capacity(small):.3g}" for share in SHARES]
    return _runs(folder / "repeats", [*target, f"rate=[{','.join(rates)}]"], repeats)


def _runs(folder: Path, words: Sequence[str], number: int) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    runs = sorted(path for path in folder.iterdir() if (path / "summary.json").is_file())
    while len(runs) < number:
        keys = dict(word.split("=", 1) for word in (*words, f"results_root={folder}"))
        made = server.run(compose("server", [f"{key}={value}" for key, value in keys.items()]))
        assert made.folder is not None
        runs.append(made.folder)
    return runs[:number]


def capacity(run: Path) -> float:
    """Requests a second that the slowest K serves while all slots are taken, simulated."""
    served = Server.of(load(run), GREEDY)
    texts = served.texts(max(KS), served.served.setup.new_tokens or 0)
    requests = [made for text in texts if (made := text.certain) is not None] * 20
    plain, speculative = served.costs.priced(served.slots, max(KS))
    ends = [
        simulate(requests, np.zeros(len(requests)), speculative if k else plain, [k]).ended_s
        for k in KS
    ]
    return len(requests) / max(float(each.max()) for each in ends)


def busy(run: Server) -> float:
    """Processors that others kept busy while loads were timed, the mean over their time."""
    loads = run.served.setup.run.loads
    return float(
        np.average([each.others or 0.0 for each in loads], weights=[each.seconds for each in loads])
    )


# ---- errors --------------------------------------------------------------------------------------

Value = Callable[[PlanCheck], float | None]


def _at(percentiles: Percentiles | None, percent: int) -> float | None:
    return percentiles and (percentiles.p50 if percent == 50 else percentiles.p95)


# What is compared: its name, measured, and simulated
COMPARED: tuple[tuple[str, Value, Value], ...] = (
    ("throughput", lambda c: c.tokens_per_second, lambda c: c.simulated_tokens_per_second),
    ("TPOT p50", lambda c: _at(c.per_token, 50), lambda c: _at(c.simulated_per_token, 50)),
    ("TPOT p95", lambda c: _at(c.per_token, 95), lambda c: _at(c.simulated_per_token, 95)),
    ("TTFT p50", lambda c: _at(c.first_token, 50), lambda c: _at(c.simulated_first_token, 50)),
    ("TTFT p95", lambda c: _at(c.first_token, 95), lambda c: _at(c.simulated_first_token, 95)),
)


def compared(repeats: Sequence[Sequence[PlanCheck]]) -> list[str]:
    """A table of all cells, the errors over them, and the K that would be chosen."""
    names = [name for name, *_ in COMPARED]
    lines = [
        "Each cell: measured (waits in ms), error of the simulation, (difference of two repeats).",
        "",
        f"| load | K | requests | {' | '.join(names)} |",
        f"|{'---|' * (3 + len(names))}",
    ]
    every = [check for checks in repeats for check in checks]
    rates = sorted({check.rate for check in every if check.rate is not None})
    off: dict[tuple[str, str], list[tuple[float, float]]] = {}
    loads = grouped(every, lambda c: (c.rate is not None, c.concurrency or 0, c.rate or 0.0, c.k))
    for _, cells in sorted(loads.items()):
        first, shown = cells[0], []
        load_name = f"{first.concurrency} in flight"
        kind = "closed loops"
        if first.rate is not None:
            share = SHARES[rates.index(first.rate)]
            load_name = f"{first.rate:.3g}/s, {share:.0%} of capacity"
            kind = "up to 60 %" if share < SHARES[-1] else "90 %"
        for name, of_measured, of_simulated in COMPARED:
            known = [value for cell in cells if (value := of_measured(cell)) is not None]
            made = [value for cell in cells if (value := of_simulated(cell)) is not None]
            if not known or not made:
                shown.append("-")
                continue
            error = float(np.mean(made) / np.mean(known) - 1.0)
            pairs = [abs(one / other - 1.0) for one, other in permutations(known, 2)]
            noise = float(np.median(pairs)) if pairs else float("nan")
            off.setdefault((kind, name), []).append((abs(error), noise))
            scale = 1.0 if name == "throughput" else 1e3
            shown.append(f"{scale * np.mean(known):.3g} {error:+.1%} ({noise:.1%})")
        requests = sum(cell.requests for cell in cells)
        lines.append(f"| {load_name} | {first.k} | {requests} | {' | '.join(shown)} |")
    lines += ["", "| medians over cells | cells | error | largest | repeats |", f"|{'---|' * 5}"]
    for (kind, name), values in sorted(off.items()):
        errors, noises = np.array(values).T
        lines.append(
            f"| {kind}: {name} | {len(errors)} | {np.median(errors):.1%} | {errors.max():.1%} |"
            f" {np.median(noises):.1%} |"
        )
    lines.append("")
    lines += [_chosen([check for check in every if check.rate == rate]) for rate in rates]
    return lines


def _chosen(cells: Sequence[PlanCheck]) -> str:
    """The K of the least simulated p95 of time per output token, against the measured best."""
    _, of_measured, of_simulated = COMPARED[2]
    missing = {*KS} - {check.k for check in cells if of_measured(check) is not None}
    if missing:
        return f"At {cells[0].rate:.3g} requests/s no load of K={min(missing)} was undisturbed.  "

    def mean(k: int, of: Value) -> float:
        return float(np.mean([value for c in cells if c.k == k and (value := of(c)) is not None]))

    best, chosen = (min(KS, key=lambda k, of=of: mean(k, of)) for of in (of_measured, of_simulated))
    loss = mean(chosen, of_measured) / mean(best, of_measured) - 1.0
    return (
        f"At {cells[0].rate:.3g} requests/s K={chosen} is chosen for its p95 TPOT, K={best} was"
        f" measured best: {loss:.1%} above it.  "
    )


# ---- speed ---------------------------------------------------------------------------------------


def speeds() -> None:
    """Print the rounds a second, by processor time."""
    slowest = np.inf
    for length, slots in ((20, 4), (120, 4), (120, 16)):
        random = np.random.default_rng(2)
        flags = random.random((50, length)) < 0.7
        most = np.arange(length - 1, -1, -1)
        texts = [
            Text("", "", 20, by_start(row[None].astype(np.float64), K)[0], most) for row in flags
        ]
        made = [text.certain for text in texts]
        requests = [each for each in made if each is not None]
        sent = [requests[at] for at in random.integers(0, len(requests), REQUESTS)]
        rows = [[1.0 + 0.02 * b * n for n in range(K + 1)] for b in range(slots + 1)]
        costs = Costs(rows)
        arrivals = at_random(REQUESTS, random) * length / slots
        for name, ks in (("plain", [0]), (f"K={K}", [K]), ("K by load", [0, K, 1])):
            seconds: list[float] = []
            rounds = 0
            for _ in range(REPEATS):
                begin = process_time()
                rounds = simulate(sent, arrivals, costs, ks).rounds.sum()
                seconds.append(process_time() - begin)
            speed = f"{rounds / min(seconds) / 1e6:.2f} million rounds a second"
            print(f"{length:4d} tokens, {slots:2d} slots, {name:9s} {speed}")
            slowest = min(slowest, rounds / min(seconds))
    print(f"slowest: {slowest:,.0f} rounds a second of processor time")
    streamed()


def streamed() -> None:
    """Print what many requests take whose flags are drawn as they enter."""
    length, slots, random = 256, 16, np.random.default_rng(2)
    chances = np.clip(random.normal(0.7, 0.2, (50, length)), 0.0, 1.0)
    most = np.arange(length - 1, -1, -1)
    texts = [Text("", "", 20, by_start(row[None], K)[0], most) for row in chances]
    rows = random.integers(0, len(texts), MANY).tolist()
    sent = Stream(texts, rows, lambda place: np.random.default_rng((2, place)).random(length))
    rows_s = [[1.0 + 0.02 * b * n for n in range(K + 1)] for b in range(slots + 1)]
    begin = process_time()
    arrivals = at_random(MANY, random) * length / slots
    rounds = simulate(sent, arrivals, Costs(rows_s), [K]).rounds.sum()
    speed = rounds / (process_time() - begin) / 1e6
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{MANY:,} requests of {length} tokens, drawn as they enter: {speed:.2f} million rounds a"
        f" second, {memory:.2f} GiB of memory at most, with what the benchmarks import"
    )


if __name__ == "__main__":
    main()

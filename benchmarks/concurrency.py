"""The embedded pairs on llama.cpp under load: predicted against measured throughput.

    python benchmarks/concurrency.py

Temperature 0, K = 1, 2, 4, 8 and plain decoding, one server each with as many slots as the largest
load, all of them up at once; closed loops of 1, 2, 4 and 8 requests, in turn on every server. The
throughput ratio to plain decoding of each prompt set is measured, and predicted from replayed
rounds and from what iterations cost in the other prompt set (`harness.analysis.batch_schedule`).
Then the K for each load: the predicted best, and what it lacks to the measured best.

The clock is the processor time of each server's process, for this machine may be shared.
"""

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from harness import prompts as prompt_sets
from harness.analysis.batch_schedule import (
    ReplayedRequests,
    Throughput,
    closed_loads,
    over_groups,
    schedule,
    throughputs,
    without_visits,
)
from harness.config import ModelConf, PromptsConf
from harness.decoding.sampling import SamplingParameters
from harness.engines.gguf_file import write_gguf
from harness.engines.llamacpp import LlamaCpp
from harness.measurement.draft_scores import score_texts
from harness.measurement.generations import Request
from harness.measurement.load import Load, groups_of, load_visit
from harness.measurement.server_request import ReturnedText
from harness.models.load import LoadedModel, load, open_pair
from harness.models.tokenizer import encode
from harness.records import LoadTiming, TextTrace
from harness.reporting import formatting as fmt
from harness.serving.llamacpp import COUNTING
from harness.summary import Schedule

DRAFTS = ("tiny_good", "tiny_small", "tiny_unrelated")
SETS = ("easy", "hard")
KS = (1, 2, 4, 8)
USERS = (1, 2, 4, 8)
SEED = 20261122


def main() -> None:
    """Print one table per draft, its schedule, and the errors over all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafts", nargs="+", default=list(DRAFTS))
    parser.add_argument("--limit", type=int, default=12, help="prompts of each set")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--users", type=int, nargs="+", default=list(USERS))
    parser.add_argument("--visits", type=int, default=12)
    asked = parser.parse_args()
    target, console = _load("tiny"), Console(width=120)
    requests = _requests(target, asked.limit, asked.new_tokens)
    rows: list[Throughput] = []
    losses: list[float] = []
    for name in asked.drafts:
        with tempfile.TemporaryDirectory() as folder:
            timings, traces = measured(
                target, _load(name), requests, asked.users, asked.visits, Path(folder)
            )
        done, chosen = judged(timings, traces)
        console.print(_table(name, done))
        console.print(_schedule(chosen))
        rows += [row for row in done if row.k]
        losses += [entry.loss for entry in chosen.entries if entry.loss is not None]
    errors = [abs(row.predicted / row.measured - 1) for row in rows if row.predicted is not None]
    console.print(
        f"throughput ratio: median error {100 * np.median(errors):.1f} %,"
        f" largest {100 * max(errors):.1f} % over {len(errors)} cells"
    )
    console.print(
        f"schedule: largest loss against the measured best, in visits that did not choose,"
        f" {fmt.percent(max(losses, default=None))} over {len(losses)} entries"
    )


def _load(name: str) -> LoadedModel:
    return load(ModelConf(name=name, id=f"embedded:{name}"), torch.device("cpu"))


def _requests(target: LoadedModel, limit: int | None, budget: int) -> list[Request]:
    conf = PromptsConf(sets=list(SETS), limit=limit)
    return [
        Request(
            cell="",
            prompt_set=prompt.prompt_set,
            prompt=prompt.id,
            category=prompt.category,
            tokens=encode(target.tokenizer, prompt, conf),
            sampling=SamplingParameters(0.0),
            budget=budget,
            repetition=0,
            seed=SEED + index,
            eos=target.eos,
            model=target.name,
        )
        for index, prompt in enumerate(prompt_sets.load(conf))
    ]


def measured(
    target: LoadedModel,
    draft: LoadedModel,
    requests: Sequence[Request],
    users: Sequence[int],
    visits: int,
    folder: Path,
) -> tuple[list[LoadTiming], list[TextTrace]]:
    """Every load on every server in each visit, and the plain texts as the draft scores them."""
    engine = LlamaCpp(
        write_gguf(target, folder / "target.gguf"),
        write_gguf(draft, folder / "draft.gguf"),
        folder,
        max(len(request.tokens) + request.budget for request in requests),
        threads=1,
        slots=max(users),
        more_flags=(
            *("--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off"),
            *("--spec-draft-type-k", "f32", "--spec-draft-type-v", "f32"),
        ),
    )
    random = np.random.default_rng(SEED)
    asked = [replace(request, draft=draft.name) for request in requests]
    groups = groups_of(asked, max(users))
    loads = [Load(concurrency=count) for count in users]
    timings: list[LoadTiming] = []
    with ExitStack() as stack:
        servers = {k: stack.enter_context(engine.open(k)) for k in (0, *KS)}
        plain = servers[0]
        texts = [ReturnedText(each, plain.generate(each.asked)) for each in asked]
        for number in track(range(-1, visits), f"{draft.name}: visits"):
            done = list(load_visit(servers, groups, loads, number, random, "cpu"))
            if number >= 0:  # the first one warms up
                timings += done
    pair = open_pair(target, draft)
    decoded = [text.decoded(plain.facts) for text in texts]
    kept = [text for text in decoded if text.tokens]
    return timings, score_texts(kept, *pair, draft_name=draft.name)


def judged(
    timings: Sequence[LoadTiming], traces: Sequence[TextTrace]
) -> tuple[list[Throughput], Schedule]:
    """Throughput by prompt set, and the K for each load."""
    replays = ReplayedRequests(traces, "greedy_draft", COUNTING)
    rows = throughputs(closed_loads(timings, replays))
    return rows, schedule(0.0, over_groups(rows), without_visits(timings, replays))


def _table(draft: str, rows: Sequence[Throughput]) -> Table:
    table = Table(title=f"tiny + {draft} on llama.cpp, T = 0: throughput / plain decoding's")
    for column in ("requests", "set", "K", "measured", "spread", "predicted", "error"):
        table.add_column(column, justify="right")
    for row in rows:
        if row.k and row.predicted is not None:
            table.add_row(
                str(row.concurrency),
                row.group,
                str(row.k),
                f"{row.measured:.3f}x",
                f"{100 * (row.spread or 0.0):.1f} %",
                f"{row.predicted:.3f}x",
                f"{100 * (row.predicted / row.measured - 1):+.1f} %",
            )
    return table


def _schedule(chosen: Schedule) -> Table:
    table = Table(title="K by load")
    for column in ("requests", "K", "tied with", "predicted", "measured", "loss"):
        table.add_column(column, justify="right")
    for entry in chosen.entries:
        table.add_row(
            f"{entry.low} to {entry.high}" if entry.high else f"{entry.low} and above",
            str(entry.k),
            ", ".join(map(str, entry.tied)),
            f"{entry.predicted_ratio:.3f}x" if entry.predicted_ratio else "",
            f"{entry.measured_ratio:.3f}x",
            fmt.percent(entry.loss),
        )
    return table


if __name__ == "__main__":
    main()

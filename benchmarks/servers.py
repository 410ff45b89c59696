"""The embedded pairs on llama.cpp: rounds against replay, predicted against measured speedup.

    python benchmarks/servers.py

Temperature 0, K = 1, 2, 4, 8, one server per K and one that decodes plainly, all of them up at
once, requests in turn. Rounds and drafted tokens are compared with replay of the returned texts,
text by text.

The speedup of each prompt set is measured, and predicted by tokens per round x R(0) / R(K), with
the rounds of that set from replay and what a round costs from one of these, none of which has seen
the set:

other set: the requests of the other prompt set.
two K: the same, of K = 1 and 8 alone; K = 2 and 4 by the line between them.
zero rates: servers that are told to reject every draft (--spec-synth-rates 0,...), one token per
round, on some of the other set's prompts.

The clock is the processor time of each server's process, for this machine may be shared.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from harness import prompts as prompt_sets
from harness.config import ModelConf, PromptsConf
from harness.decoding.sampling import SamplingParameters
from harness.engines.gguf_file import write_gguf
from harness.engines.llamacpp import LlamaCpp
from harness.engines.protocol import EngineFacts
from harness.measurement.generations import Request
from harness.measurement.returned_texts import replay_returned, score_returned
from harness.measurement.served import (
    ServedRequest,
    ServedTexts,
    ServerCosts,
    fit_costs,
    served_texts,
    visit,
)
from harness.models.load import LoadedModel, load, open_pair
from harness.models.tokenizer import encode
from harness.theory.replay import Replayed, by_start, replay

DRAFTS = ("tiny_good", "tiny_small", "tiny_unrelated")
SETS = ("easy", "hard")
KS = (1, 2, 4, 8)
SEED = 20261122
# Tokens of a request on a server that rejects everything: each is a round
ZERO_RATE_TOKENS = 48
ZERO_RATE_PROMPTS = 3
WAYS = ("other set", "two K", "zero rates")


@dataclass(frozen=True)
class Row:
    """One K on one prompt set."""

    draft: str
    prompt_set: str
    k: int
    texts: int
    equal_rounds: int
    equal_drafted: int
    tokens_per_round: float
    measured: float
    predicted: Mapping[str, float]

    def error(self, way: str) -> float:
        return self.predicted[way] / self.measured - 1


def main() -> None:
    """Print one table per draft and the errors over all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafts", nargs="+", default=list(DRAFTS))
    parser.add_argument("--limit", type=int, help="prompts of each set")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--visits", type=int, default=20)
    asked = parser.parse_args()
    target, console = _load("tiny", "model"), Console(width=120)
    requests = _requests(target, asked.limit, asked.new_tokens)
    rows: list[Row] = []
    for name in asked.drafts:
        with tempfile.TemporaryDirectory() as folder:
            done = list(_rows(target, _load(name, "draft"), requests, asked.visits, Path(folder)))
        console.print(_table(name, done))
        rows += done
    for way in WAYS:
        errors = [abs(row.error(way)) for row in rows if not (way == "two K" and row.k in (1, 8))]
        console.print(
            f"{way}: median error {100 * np.median(errors):.1f} %,"
            f" largest {100 * max(errors):.1f} % over {len(errors)} cells"
        )
    texts = sum(row.texts for row in rows)
    console.print(
        f"rounds equal to replay in {sum(row.equal_rounds for row in rows)} of {texts} texts,"
        f" drafted tokens in {sum(row.equal_drafted for row in rows)}"
    )


def _load(name: str, key: str) -> LoadedModel:
    return load(ModelConf(name=name, id=f"embedded:{name}"), key, torch.device("cpu"))


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


def _rows(
    target: LoadedModel,
    draft: LoadedModel,
    requests: Sequence[Request],
    visits: int,
    folder: Path,
) -> Iterator[Row]:
    """Measure one pair; its rows by prompt set and K."""
    context = max(len(request.tokens) + request.budget for request in requests)
    engine = LlamaCpp(
        write_gguf(target, folder / "target.gguf"),
        write_gguf(draft, folder / "draft.gguf"),
        folder,
        context,
        threads=1,
        kv_type="f32",
        flash_attention="off",
    )
    zero_rate = {
        name: [
            replace(request, budget=ZERO_RATE_TOKENS)
            for request in requests
            if request.prompt_set == name
        ][:ZERO_RATE_PROMPTS]
        for name in SETS
    }
    served: list[ServedRequest] = []
    rejected: list[ServedRequest] = []
    random = np.random.default_rng(SEED)
    with ExitStack() as stack:
        servers = {k: stack.enter_context(engine.open(k)) for k in (0, *KS)}
        rejecting = {k: stack.enter_context(engine.open(k, [0.0] * k)) for k in KS}
        rejecting[0] = servers[0]
        for number in track(range(-1, visits), f"{draft.name}: visits"):
            first = list(visit(servers, requests, number, random, "cpu"))
            second = [
                each
                for name in SETS
                for each in visit(rejecting, zero_rate[name], number, random, "cpu")
            ]
            if number >= 0:  # the first one warms up
                served += first
                rejected += second
    facts = servers[0].facts
    target_model, draft_model = open_pair(target, draft)

    def replayed(texts: ServedTexts, k: int) -> Replayed:
        traces = score_returned(texts.texts, facts, target_model, draft_model, draft.name)
        return replay_returned(texts.texts, traces, facts, k)

    def costs(by_k: Mapping[int, ServedTexts], ks: Sequence[int]) -> ServerCosts:
        return fit_costs(by_k[0], {k: (by_k[k], replayed(by_k[k], k)) for k in ks}, facts)

    measured = {name: served_texts(_of(served, name), facts, "cpu") for name in SETS}
    for name, other in (SETS, SETS[::-1]):
        # With synthetic acceptance the texts are not the target's: every round emits one token
        rejects = served_texts(_of(rejected, other), facts, "cpu")
        none_accepted = {
            k: (texts, all_rejected(texts, facts, k)) for k, texts in rejects.items() if k
        }
        ways = {
            "other set": costs(measured[other], KS),
            "two K": costs(measured[other], (KS[0], KS[-1])),
            "zero rates": fit_costs(rejects[0], none_accepted, facts),
        }
        full = {
            k: texts.only(lambda request: request.budget == requests[0].budget)
            for k, texts in measured[name].items()
        }
        for k in KS:
            expected, done = replayed(full[k], k), [text.completion for text in full[k].texts]
            yield Row(
                draft=draft.name,
                prompt_set=name,
                k=k,
                texts=len(done),
                equal_rounds=sum(np.equal([each.rounds for each in done], expected.rounds)),
                equal_drafted=sum(np.equal([each.drafted for each in done], expected.drafted)),
                tokens_per_round=expected.tokens_per_round,
                measured=full[0].decode_s.sum() / full[k].decode_s.sum(),
                predicted={way: cost.speedup(expected) for way, cost in ways.items()},
            )


def all_rejected(texts: ServedTexts, facts: EngineFacts, k: int) -> Replayed:
    """The counts of texts whose every draft was rejected."""
    assert facts.counting is not None
    sizes = texts.tokens(facts).astype(int)
    proposed = np.zeros((len(sizes), sizes.max()), dtype=np.intp)
    for row, (text, size) in enumerate(zip(texts.texts, sizes, strict=True)):
        proposed[row, :size] = facts.counting.proposed(k, text.request.budget)[:size]
    return replay(by_start(np.zeros(proposed.shape), k), sizes, [k], proposed=proposed)[k]


def _of(served: Sequence[ServedRequest], prompt_set: str) -> list[ServedRequest]:
    return [each for each in served if each.request.prompt_set == prompt_set]


def _table(draft: str, rows: Sequence[Row]) -> Table:
    table = Table(title=f"tiny + {draft} on llama.cpp, T = 0")
    for column in ("set", "K", "rounds", "drafted", "tokens/round", "measured", *WAYS):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.prompt_set,
            str(row.k),
            f"{row.equal_rounds} of {row.texts}",
            f"{row.equal_drafted} of {row.texts}",
            f"{row.tokens_per_round:.2f}",
            f"{row.measured:.3f}x",
            *(f"{row.predicted[way]:.3f}x {100 * row.error(way):+.1f} %" for way in WAYS),
        )
    return table


if __name__ == "__main__":
    main()

"""A published crossover of speculation under load, against the simulated server.

    python benchmarks/published_load.py [--out docs/validation.md]

Prints a table in markdown, from a file of `benchmarks/published/`. The source publishes neither
texts nor what iterations cost, so costs are fitted to some of the published rows, and the other
rows are predicted by `harness.simulation`. What is to be seen is the order of the choices.

ladder.csv: Qwen3-32B without a draft and with an EAGLE-3 head at K = 3, by requests per second.
Requests are those of its report (llm-d, guides/spec-decoding/benchmark-results): prompts of 2,048
tokens and texts of 256 on average, arriving at a constant rate for 120 seconds. A server of each
kind has two costs, what an iteration takes and what a prompt's token takes in it, fitted to its
TPOT p50 at 1 and 2 requests/s; and what each more request in an iteration takes, fitted to its
tokens per second at 16. The slots are those that the cache of two cards has room for. A published
TPOT says what a round costs per token of it; so the acceptance is a unit, and not fitted.
"""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from published_by_k import compared, markdown, rows_of
from scipy.optimize import least_squares
from servers import CROSSOVERS, with_section

from harness.simulation.requests import Request, Text
from harness.simulation.server import Costs, simulate

# ---- ladder.csv: what the report says of the requests, and what the cards have room for
HEAD_K, STAGE_S, PROMPT_TOKENS, TEXT_TOKENS = 3, 120.0, (2048, 1024, 10, 4096), (256, 128, 10, 512)
LAYERS, KEY_VALUE_BYTES, WEIGHT_BYTES, CACHE_BYTES = 64, 8 * 128 * 2 * 2, 65.5e9, 0.9 * 2 * 141e9
# Chance of a draft token, at which K = 3 gives 2 tokens a round: the unit of a round's cost
UNIT_CHANCE = 0.5437
# Rows that costs are fitted to: the rate, and whether by tokens per second; else by TPOT
FITTED = ((1, False), (2, False), (16, True))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a page whose section gets what is printed")
    out = parser.parse_args().out
    command = "`python benchmarks/published_load.py --out docs/validation.md`"
    text = "\n".join([f"{command} says what is fitted to which rows.", "", *ladder()])
    print(text)
    if out is not None:
        out.write_text(with_section(out.read_text(), CROSSOVERS, text))


@dataclass(frozen=True)
class Waits:
    """Of a stage of the ladder: TPOT p50 in ms, and tokens per second."""

    tpot_ms: float
    tokens_per_second: float


@dataclass(frozen=True)
class Ladder:
    """A server of the ladder, with or without a head: what it takes, in seconds.

    Attributes:
        k: num_draft_tokens.
        iteration_s: of one request.
        request_s: of each request in an iteration.
        prompt_token_s: of each token of a prompt that enters one.
    """

    k: int
    iteration_s: float
    request_s: float
    prompt_token_s: float

    @classmethod
    def fitted(cls, k: int, published: Mapping[int, Waits]) -> "Ladder":
        """By relative errors of the rows of `FITTED`."""

        def off(logs: np.ndarray) -> list[float]:
            server = cls(k, *np.exp(logs).tolist())
            errors: list[float] = []
            for rate, by_throughput in FITTED:
                made, known = server.at(rate), published[rate]
                pairs = (made.tpot_ms, known.tpot_ms)
                if by_throughput:
                    pairs = (made.tokens_per_second, known.tokens_per_second)
                errors.append(float(np.log(pairs[0] / pairs[1])))
            return errors

        guess = np.log([1e-3 * published[1].tpot_ms * (1.0 + (k > 0)), 1e-4, 6e-5])
        return cls(k, *np.exp(least_squares(off, guess, diff_step=[1e-3], ftol=1e-3).x).tolist())

    def at(self, rate: float) -> Waits:
        """What a stage at this rate would show."""
        slots = int(
            (CACHE_BYTES - WEIGHT_BYTES)
            / ((LAYERS + (self.k > 0)) * KEY_VALUE_BYTES)
            / (PROMPT_TOKENS[0] + TEXT_TOKENS[0])
        )
        rows = [[self.iteration_s + b * self.request_s] * (self.k + 1) for b in range(slots + 1)]
        costs = Costs(rows, prompt_token_s=self.prompt_token_s, mixed_start_s=[0.0] * slots)
        sent = stage(rate, self.k)
        served = simulate(sent, np.arange(len(sent)) / rate, costs, [self.k])
        tokens = float((served.tokens + 1).sum() / served.ended_s.max())
        return Waits(1e3 * float(np.nanmedian(served.per_token_s)), tokens)


@cache
def stage(rate: float, k: int) -> list[Request]:
    """The requests of a stage."""
    number, random = round(STAGE_S * rate), np.random.default_rng(1)
    prompts, texts = (
        np.clip(np.rint(random.normal(mean, deviation, number)), low, high).astype(int)
        for mean, deviation, low, high in (PROMPT_TOKENS, TEXT_TOKENS)
    )
    made: list[Request] = []
    for prompt, text in zip(prompts.tolist(), texts.tolist(), strict=True):
        rounds = text - 1  # the first token comes with the prompt
        chances = np.full((rounds, HEAD_K), UNIT_CHANCE)
        written = Text("", "", prompt, chances, np.full(rounds, k))
        made.append(written.drawn(random.random(rounds)))
    return made


def ladder() -> Iterator[str]:
    """The table of `ladder.csv`."""
    published: dict[int, dict[int, Waits]] = {}
    for row in rows_of("ladder"):
        waits = Waits(float(row["tpot_p50_ms"]), float(row["tokens_per_second"]))
        published.setdefault(int(row["K"]), {})[int(row["requests_per_second"])] = waits
    servers = {k: Ladder.fitted(k, rows) for k, rows in published.items()}
    yield "Qwen3-32B on two H200, without a draft and with an EAGLE-3 head (llm-d issue 2074):"
    yield ""
    rows: list[list[str]] = []
    for rate in published[0]:
        for k, server in servers.items():
            made, known = server.at(rate), published[k][rate]
            row = [str(rate), f"K={k}" if k else "no draft"]
            for name in ("tpot_ms", "tokens_per_second"):
                simulated, of_source = getattr(made, name), getattr(known, name)
                row += [f"{of_source:g}", *compared(simulated, of_source)]
                fitted = (rate, name == "tokens_per_second") in FITTED
                row.append("fitted" if fitted else "predicted")
            rows.append(row)
    names = ("TPOT p50, ms", "tokens per second")
    columns = [each for name in names for each in (name, "simulated", "error", "row is")]
    yield from markdown(["requests/s", "served", *columns], rows)
    for server in servers.values():
        yield (
            f"{'K=' + str(server.k) if server.k else 'No draft'}: {1e3 * server.iteration_s:.3g} ms"
            f" an iteration{' of 2 tokens a round' if server.k else ''},"
            f" {1e6 * server.request_s:.3g} us more for each request in it, and"
            f" {1e6 * server.prompt_token_s:.3g} us for each token of a prompt.  "
        )
    crossing = crossover(servers[0], servers[HEAD_K])
    yield (
        f"Simulated, the head has the shorter TPOT up to {crossing:.2g} requests/s, and plain"
        " decoding beyond; published, the crossover is between 4 and 8."
    )
    yield ""


def crossover(plain: Ladder, head: Ladder) -> float:
    """The rate beyond which plain decoding has the shorter TPOT, by halving between 4 and 8."""
    low, high = 4.0, 8.0
    while high - low > 0.1:
        middle = (low + high) / 2.0
        ahead = head.at(middle).tpot_ms < plain.at(middle).tpot_ms
        low, high = (middle, high) if ahead else (low, middle)
    return low


if __name__ == "__main__":
    main()

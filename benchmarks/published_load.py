"""Published crossovers of speculation under load, against the simulated server and its policies.

    python benchmarks/published_load.py [--out docs/validation.md]

Prints two tables in markdown, from files of `benchmarks/published/`. Neither source publishes
texts or what iterations cost, so costs are fitted to some of the published rows, and the
other rows are predicted by `harness.simulation`. What is to be seen is the order of the choices.

ladder.csv: Qwen3-32B without a draft and with an EAGLE-3 head at K = 3, by requests per second.
Requests are those of its report (llm-d, guides/spec-decoding/benchmark-results): prompts of 2,048
tokens and texts of 256 on average, arriving at a constant rate for 120 seconds. A server of each
kind has two costs, what an iteration takes and what a prompt's token takes in it, fitted to its
TPOT p50 at 1 and 2 requests/s; and what each more request in an iteration takes, fitted to its
tokens per second at 16. The slots are those that the cache of two cards has room for. A published
TPOT says what a round costs per token of it; so the acceptance is a unit, and not fitted.

adaptive.csv: DeepSeek-V4 with a DSpark head on vLLM, a closed loop of 880 requests of 512 tokens.
Without a draft and at K = 7 what iterations cost is fitted to the throughput at each
concurrency; a round of fewer drafted tokens costs as one of its tokens in all, with the head's
forward; and what adaptive verification takes besides is fitted to its throughput at concurrency 4.
Its other throughputs are predicted, by the policy `SurvivalBudget`. Confidences are the chances of
the positions of a round, those of `chains_by_k.csv`, and the same for each round, so what the head
knows of single rounds is not in the prediction.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from published_by_k import compared, markdown, percent, rows_of
from scipy.optimize import least_squares
from servers import CROSSOVERS, with_section

from harness.simulation.policies import Fixed, SurvivalBudget
from harness.simulation.requests import Confidences, Request, Text
from harness.simulation.server import Costs, Iteration, Policy, Served, simulate

# ---- ladder.csv: what the report says of the requests, and what the cards have room for
HEAD_K, STAGE_S, PROMPT_TOKENS, TEXT_TOKENS = 3, 120.0, (2048, 1024, 10, 4096), (256, 128, 10, 512)
LAYERS, KEY_VALUE_BYTES, WEIGHT_BYTES, CACHE_BYTES = 64, 8 * 128 * 2 * 2, 65.5e9, 0.9 * 2 * 141e9
# Chance of a draft token, at which K = 3 gives 2 tokens a round: the unit of a round's cost
UNIT_CHANCE = 0.5437
# Rows that costs are fitted to: the rate, and whether by tokens per second; else by TPOT
FITTED = ((1, False), (2, False), (16, True))
# ---- adaptive.csv
BLOCK_K, REQUESTS, TOKENS = 7, 880, 512
POSITION_CHANCES = ("DeepSeek-V4-Pro", "DSpark", "on")
NONE, FIXED, ADAPTIVE = "none", "fixed K=7", "adaptive verification"


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a page whose section gets what is printed")
    out = parser.parse_args().out
    command = "`python benchmarks/published_load.py --out docs/validation.md`"
    text = "\n".join([f"{command} says what is fitted to which rows.", "", *ladder(), *adaptive()])
    print(text)
    if out is not None:
        out.write_text(with_section(out.read_text(), CROSSOVERS, text))


# ---- by requests per second ----------------------------------------------------------------------


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
        served = simulate(sent, np.arange(len(sent)) / rate, costs, Fixed(self.k))
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


# ---- by concurrency ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Block:
    """A server with a head that drafts a block, in a closed loop.

    Attributes:
        requests: of a loop.
        plain_s, fixed_s: of an iteration of K = 0 and 7 by concurrency.
        request_s: what each request more takes in an iteration of as many verified tokens.
    """

    requests: Sequence[Request]
    plain_s: Mapping[int, float]
    fixed_s: Mapping[int, float]
    request_s: float

    @classmethod
    def fitted(
        cls, requests: Sequence[Request], published: Mapping[str, Mapping[int, float]]
    ) -> "Block":
        """To the throughputs without a draft and at K = 7, all of them."""
        plain_s, fixed_s = (
            fitted_iterations(requests, k, published[name]) for k, name in ((0, NONE), (7, FIXED))
        )
        # At as many verified tokens: those of b requests without a draft, and of b / 8 with one.
        # They differ by the head's forward and by 7 / 8 b requests
        batches = [b for b in plain_s if b >= (BLOCK_K + 1) * min(fixed_s)]
        tokens = [(BLOCK_K + 1) * b for b in fixed_s]
        more_s = [plain_s[b] - np.interp(b, tokens, [*fixed_s.values()]) for b in batches]
        slope, _ = np.polyfit([b * BLOCK_K / (BLOCK_K + 1) for b in batches], more_s, 1)
        return cls(requests, plain_s, fixed_s, float(slope))

    def costs(self, concurrency: int) -> Costs:
        """Of rounds in which the head drafts 7 tokens and 0 to 7 of them are verified."""
        tokens = np.array([(BLOCK_K + 1) * b for b in self.fixed_s], dtype=np.float64)
        seconds = np.array([*self.fixed_s.values()])
        # Below the least number of tokens the first two give the line
        slope = (seconds[1] - seconds[0]) / (tokens[1] - tokens[0])
        tokens = np.concatenate([[0.0], tokens])
        seconds = np.concatenate([[seconds[0] - slope * tokens[1]], seconds])
        rows: list[list[float]] = []
        for b in range(concurrency + 1):
            verified = b * np.arange(1, BLOCK_K + 2)
            more_s = self.request_s * (b - verified / (BLOCK_K + 1))
            rows.append((np.interp(verified, tokens, seconds) + more_s).tolist())
        return Costs(rows)

    def adaptive(self, concurrency: int) -> tuple[float, int]:
        """Seconds and iterations of a closed loop with adaptive verification."""
        costs = self.costs(concurrency)
        journal: list[Iteration] = []
        policy = SurvivalBudget(BLOCK_K, costs)
        served = closed(self.requests, costs, policy, concurrency, journal)
        return float(served.ended_s.max()), sum(each.number for each in journal)


def closed(
    requests: Sequence[Request],
    costs: Costs,
    policy: Policy,
    concurrency: int,
    journal: list[Iteration],
) -> Served:
    """A closed loop of all requests."""
    arrivals = np.zeros(len(requests))
    return simulate(requests, arrivals, costs, policy, concurrency, journal)


def fitted_iterations(
    requests: Sequence[Request], k: int, published: Mapping[int, float]
) -> dict[int, float]:
    """What an iteration takes by concurrency, with those between two on the line through them.

    Which requests are side by side does not depend on it in a closed loop, so the seconds of each
    loop are linear in the last of them.
    """
    made: dict[int, float] = {}
    for concurrency, tokens_per_second in sorted(published.items()):
        journal: list[Iteration] = []
        flat = Costs([[1.0] * (BLOCK_K + 1)] * (concurrency + 1))
        closed(requests, flat, Fixed(k), concurrency, journal)
        seconds = sum(request.tokens for request in requests) / tokens_per_second
        active = [len(each.active) for each in journal]
        number = np.array([each.number if each.active else 0 for each in journal])
        batches = [*made, concurrency]
        *of_known, of_last = (
            float(number @ np.interp(active, batches, unit)) for unit in np.eye(len(batches))
        )
        made[concurrency] = (seconds - np.dot(of_known, [*made.values()])) / of_last
    return made


def block_requests(number: int) -> list[Request]:
    """Requests whose drafts are accepted as often as published lengths by K say."""
    target, draft, thinking = POSITION_CHANCES
    lengths = [
        float(row["acceptance_length"])
        for row in rows_of("chains_by_k")
        if (row["target"], row["draft"], row["thinking"]) == (target, draft, thinking)
    ][:BLOCK_K]
    reached = np.diff([1.0, *lengths])
    chances = np.tile(reached / np.concatenate([[1.0], reached[:-1]]), (TOKENS, 1))
    random, most = np.random.default_rng(2), np.full(TOKENS, BLOCK_K)
    text = Text("", "", 0, chances, most, Confidences(chances))
    return [text.drawn(row) for row in random.random((number, TOKENS))]


def adaptive(number: int = REQUESTS, concurrencies: Sequence[int] = ()) -> Iterator[str]:
    """The table of `adaptive.csv`, at some of its concurrencies."""
    published: dict[str, dict[int, float]] = {}
    for row in rows_of("adaptive"):
        by_load = published.setdefault(row["policy"], {})
        by_load[int(row["concurrency"])] = float(row["tokens_per_second"])
    server = Block.fitted(block_requests(number), published)
    tokens = number * TOKENS
    known, fixed = published[ADAPTIVE], published[FIXED]
    first = min(known)
    seconds, iterations = server.adaptive(first)
    host_s = (tokens / known[first] - seconds) / iterations
    yield "DeepSeek-V4 with a DSpark head on vLLM, adaptive verification (pull request 52362):"
    yield ""
    rows: list[list[str]] = []
    for concurrency in concurrencies or known:
        seconds, iterations = server.adaptive(concurrency)
        made = tokens / (seconds + host_s * iterations)
        source, of_fixed = known[concurrency], fixed[concurrency]
        rows.append(
            [
                *(str(concurrency), f"{published[NONE][concurrency]:g}", f"{of_fixed:g}"),
                *(f"{source:g}", f"{made:.0f}", percent(made / source - 1)),
                *(percent(source / of_fixed - 1), percent(made / of_fixed - 1)),
                "fitted" if concurrency == first else "predicted",
            ]
        )
    yield from markdown(
        [
            *("concurrency", "no draft", "K=7", "adaptive", "simulated", "error"),
            *("adaptive / K=7", "simulated", "row is"),
        ],
        rows,
    )
    yield (
        "Tokens per second. Fitted: an iteration by concurrency without a draft and at K=7 (14"
        f" rows), {1e6 * server.request_s:.2g} us of each request at as many verified tokens (the"
        f" difference of the two), and {1e3 * host_s:.2g} ms of an iteration that adaptive"
        f" verification takes besides (its row at concurrency {first})."
    )
    yield ""


if __name__ == "__main__":
    main()

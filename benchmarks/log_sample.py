"""Do 200 sampled requests stand for a log of 100,000, as their interval says?

    python benchmarks/log_sample.py

A log is made: six categories of different shares, lengths and repetitiveness. An n-gram look-up is
replayed on the completions of all of its requests (K = 4). Then a sample is drawn with each of 100
seeds, and its tokens per round, with the interval that a report gives, are compared with the log's.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
from rich.console import Console

from harness.decoding.lookups import NgramDrafter, lookups
from harness.prompts.log import RequestLog, drawn
from harness.stats.jackknife import exponential, workload_ratio
from harness.theory.replay import replay_texts

K = 4
# Share of the log, tokens of a completion on average, chance that a token continues a repetition
CATEGORIES = {
    "code": (0.30, 60, 0.8),
    "chat": (0.30, 40, 0.3),
    "summary": (0.15, 30, 0.6),
    "maths": (0.12, 50, 0.5),
    "tables": (0.08, 70, 0.9),
    "poems": (0.05, 35, 0.1),
}
VOCABULARY = 200


def completion(random: np.random.Generator, mean: int, repeats: float) -> list[int]:
    """Tokens of which some continue an earlier place; how many differs from text to text."""
    size = max(4, int(random.poisson(mean)))
    chance = np.clip(random.normal(repeats, 0.15), 0.0, 0.98)
    fresh = random.integers(VOCABULARY, size=size).tolist()
    again, places = random.random(size) < chance, random.random(size)
    tokens = fresh[:2]
    place = 0
    for at in range(2, size):
        if again[at]:
            place = place + 1 if again[at - 1] else int(places[at] * at)
            tokens.append(tokens[place % at])
        else:
            tokens.append(fresh[at])
    return tokens


def make_log(path: Path, requests: int) -> tuple[np.ndarray, np.ndarray]:
    """Write the log; each request's tokens and replayed rounds."""
    random = np.random.default_rng(0)
    names = list(CATEGORIES)
    chosen = random.choice(len(names), requests, p=[share for share, *_ in CATEGORIES.values()])
    tokens, rounds = np.zeros((2, requests))
    with path.open("w", encoding="utf-8") as file:
        for row, place in enumerate(chosen.tolist()):
            _, mean, repeats = CATEGORIES[names[place]]
            text = completion(random, mean, repeats)
            found = lookups(NgramDrafter(eos=()), [VOCABULARY + 1], text, K)
            counts = replay_texts([found.matches.astype(np.float64)], [found.proposed], K)
            tokens[row], rounds[row] = len(text), counts.rounds[0]
            messages = [{"role": "user", "content": f"request {row} " + "x" * int(mean * 5)}]
            line = {"category": names[place], "body": {"messages": messages}, "timestamp": row}
            file.write(json.dumps(line) + "\n")
    return tokens, rounds


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--sample", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=100)
    arguments = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requests.jsonl"
        tokens, rounds = make_log(path, arguments.requests)
        log = RequestLog(path)
    names = log.strata(arguments.sample)
    requests = Counter(names)
    truth = tokens.sum() / rounds.sum()
    held, widths, errors = 0, [], []
    for seed in range(arguments.seeds):
        rows = np.array(drawn(names, arguments.sample, seed))
        sets = [names[row] for row in rows]
        emitted = {name: tokens[rows][[each == name for each in sets]].mean() for name in requests}
        # A stratum's share of the tokens, as `Setup.weights` has it
        shares = {name: requests[name] * emitted[name] for name in requests}
        estimate = workload_ratio(rounds[rows], tokens[rows], sets, shares)
        interval = exponential((-estimate.log()).interval())
        assert interval is not None
        held += interval.lo <= truth <= interval.hi
        widths.append((interval.hi - interval.lo) / truth)
        errors.append(abs(1.0 / estimate.value / truth - 1.0))
    console.print(
        f"{arguments.requests:,} requests, {len(requests)} strata: {truth:.3f} tokens a round\n"
        f"{arguments.sample} sampled, {arguments.seeds} seeds: inside the 95 % interval"
        f" {held} times; error {np.median(errors):.1%} (median), {max(errors):.1%} (largest);"
        f" interval {np.median(widths):.1%} wide"
    )
    return int(held < 0.93 * arguments.seeds)


if __name__ == "__main__":
    sys.exit(main())

"""How often does a default sweep find a gain, and how often one that is not there?

    python benchmarks/verdict_power.py --reports 200

Whole reports are simulated (tests/simulated_sweeps.py): two temperatures of two prompt sets, one
draft at eight K. They are decided as a sweep decides them, by replay and measured pairs in looks.
The K all tie with plain decoding, or the best of them gains 10 or 20 %. Counts are appended to a
file, chunk by chunk, and the same command goes on where it stopped. Exits 1 where a requirement is
missed.
"""

import argparse
import itertools
import sys
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table
from scipy.stats import binom

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from interval_coverage import Kind, simulate, stored
from simulated_sweeps import TRUTHS, WORLDS, Design, simulated

from harness.stats.verdict_interval import LOOKS

CHUNK = 20
# What must be found on the whole workload, at the default design
FOUND = {"1.10x": 0.85, "1.20x": 0.99}
# Of the worlds where prompts differ as much as the embedded ones do
FOUND_IN = ("plain", "heavy tails", "drift alike", "R biased 3 %")
# Reports that say speculate where all K tie with plain decoding: more than luck makes of so many
FALSE, FALSE_IF_SPECULATION_DRIFTS, LUCK = 0.03, 0.05, 0.05
# Intervals may hold the truth this much less often than they say
COVERAGE = 0.007

Case = tuple[str, str]


def missed(case: Case, counts: Counter[str]) -> list[str]:
    """The requirements that a case does not meet."""
    world, truth = case
    problems = []
    if truth == "near ties":
        most = FALSE_IF_SPECULATION_DRIFTS if "speculation" in world else FALSE
        wrong, number = counts["reports with speculate"], counts["reports"]
        if binom.sf(wrong - 1, number, most) < LUCK:
            problems.append("says speculate")
    found = counts["workload speculate"] / counts["workload verdicts"]
    if world in FOUND_IN and found < FOUND.get(truth, 0.0):
        problems.append("found")
    for kind in ("workload", "set"):
        covered, level = (counts[f"{kind} {what}"] for what in ("covered", "level"))
        if covered < level - COVERAGE * counts[f"{kind} intervals"]:
            problems.append(f"coverage, {kind}")
    return problems


def row(case: Case, counts: Counter[str]) -> list[str]:
    """Of the table."""
    world, truth = case
    found = counts["workload speculate"] / counts["workload verdicts"]
    of_sets = counts["set speculate"] / counts["set verdicts"]
    wrong = "speculate" if truth == "near ties" else "does_not_pay"
    at_once = counts["workload without looks"] / counts["workload verdicts"]
    cells = [world, truth, f"{counts['reports']}", f"{found:.0%}", f"{at_once:.0%}"]
    cells += [f"{of_sets:.0%}", f"{counts[f'reports with {wrong}'] / counts['reports']:.1%}"]
    for kind in ("workload", "set"):
        intervals = counts[f"{kind} intervals"]
        covered, level = (counts[f"{kind} {what}"] / intervals for what in ("covered", "level"))
        cells.append(f"{covered:.1%} of {level:.1%}")
    for kind in ("workload", "set"):
        cells.append(f"{counts[f'{kind} log error'] / counts[f'{kind} intervals']:+.1%}")
    cells.append(f"{counts['looks'] / counts['reports'] / LOOKS:.0%}")
    return [*cells, ", ".join(missed(case, counts))]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reports", type=int, default=200, help="of each case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=128, help="replayed, at a temperature")
    parser.add_argument("--pairs", type=int, default=64, help="measured, at a temperature")
    parser.add_argument("--worlds", nargs="+", choices=list(WORLDS), default=list(WORLDS))
    parser.add_argument("--truths", nargs="+", choices=list(TRUTHS), default=list(TRUTHS))
    parser.add_argument("--file", type=Path, default=Path("verdict_power.jsonl"))
    args = parser.parse_args()
    cases = list(itertools.product(args.worlds, args.truths))
    design = Design(args.prompts, args.pairs)

    def counts_of(kind: Kind, chunk: int) -> Counter[str]:
        world, truth, size = kind
        seeds = [args.seed, chunk, size, list(WORLDS).index(world), list(TRUTHS).index(truth)]
        return simulated(world, truth, design, CHUNK, seeds)

    kinds = [(*case, design.prompts) for case in cases]
    simulate(args.file, kinds, -(-args.reports // CHUNK), counts_of)
    columns = ("world", "truth", "reports", "found", "no looks", "sets", "wrong", "workload holds")
    columns += ("set holds", "error", "set error", "pairs", "missed")
    page = Table(title=f"{args.prompts} prompts, {args.pairs} pairs, seed {args.seed}")
    for column in columns:
        page.add_column(column, justify="left" if column in columns[:2] else "right")
    problems, chunks = 0, stored(args.file)
    for world, truth in cases:
        counts = Counter[str]()
        for part in chunks[world, truth, design.prompts]:
            counts.update(part)  # a sum of Counters drops what is below 0
        page.add_row(*row((world, truth), counts), end_section=truth == args.truths[-1])
        problems += len(missed((world, truth), counts))
    Console(width=180).print(page)
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main())

"""How often is a gain found, and how often one that is not there, at the cost of a sweep?

    python benchmarks/verdict_power.py --reports 200

Whole reports are simulated (tests/simulated_sweeps.py): two temperatures of two prompt sets, one
draft at eight K. They are decided as a sweep decides them, by replay and measured pairs in looks.
The K all tie with plain decoding, or the best of them gains 10 or 20 %. Exits 1 where a requirement
is missed.

A text that is only replayed counts as one decoding, unless --text says what it costs: a sweep
generates such texts in batches.
"""

import argparse
import itertools
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table
from scipy.stats import binom

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from simulated_sweeps import TRUTHS, WORLDS, Design, simulated

from harness.stats.two_phase import LOOKS

# Prompts of the grids whose cost it is
COSTS = (16, 24)
CHUNK = 20
# What must be found on the whole workload, by prompts of the grid, and where
FOUND = {
    ("plain", "1.10x"): {16: 0.65, 24: 0.80},
    ("heavy tails", "1.10x"): {16: 0.60, 24: 0.60},
    ("plain", "1.20x"): {16: 0.98, 24: 0.98},
    ("heavy tails", "1.20x"): {16: 0.98, 24: 0.98},
}
# Reports that say speculate where all K tie with plain decoding: more than luck makes of so many
FALSE, FALSE_IF_SPECULATION_DRIFTS, LUCK = 0.03, 0.05, 0.05
# Intervals may hold the truth this much less often than they say
COVERAGE = 0.02

Case = tuple[int, str, str]


def chunk(case: Case, number: int, seed: int, text: float) -> Counter[str]:
    """Some reports of a case."""
    prompts, world, truth = case
    worlds, truths = list(WORLDS).index(world), list(TRUTHS).index(truth)
    seeds = [seed, number, prompts, worlds, truths]
    return simulated(world, truth, prompts, CHUNK, seeds, text)


def missed(case: Case, counts: Counter[str]) -> list[str]:
    """The requirements that a case does not meet."""
    prompts, world, truth = case
    problems = []
    if truth == "near ties":
        most = FALSE_IF_SPECULATION_DRIFTS if "speculation" in world else FALSE
        wrong, number = counts["reports with speculate"], counts["reports"]
        if binom.sf(wrong - 1, number, most) < LUCK:
            problems.append("says speculate")
    found = counts["workload speculate"] / counts["workload verdicts"]
    if found < FOUND.get((world, truth), {}).get(prompts, 0.0):
        problems.append("found")
    for kind in ("workload", "set"):
        covered, level = (counts[f"{kind} {what}"] for what in ("covered", "level"))
        if covered < level - COVERAGE * counts[f"{kind} intervals"]:
            problems.append(f"coverage, {kind}")
    return problems


def row(case: Case, counts: Counter[str], text: float) -> list[str]:
    """Of the table."""
    prompts, world, truth = case
    design = Design.at_the_cost_of(prompts, text)
    size = f"{design.prompts} + 2 x {design.measured}"
    found = counts["workload speculate"] / counts["workload verdicts"]
    of_sets = counts["set speculate"] / counts["set verdicts"]
    wrong = "speculate" if truth == "near ties" else "does_not_pay"
    cells = [world, truth, size, f"{found:.0%}"]
    at_once = counts["workload without looks"] / counts["workload verdicts"]
    cells += [f"{at_once:.0%}", f"{of_sets:.0%}"]
    cells.append(f"{counts[f'reports with {wrong}'] / counts['reports']:.1%}")
    for kind in ("workload", "set"):
        intervals = counts[f"{kind} intervals"]
        covered, level = (counts[f"{kind} {what}"] / intervals for what in ("covered", "level"))
        cells.append(f"{covered:.1%} of {level:.1%}")
    cells.append(f"{counts['workload log error'] / counts['workload intervals']:+.1%}")
    cells.append(f"{counts['looks'] / counts['reports'] / LOOKS:.0%}")
    return [*cells, ", ".join(missed(case, counts))]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reports", type=int, default=200, help="of each case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worlds", nargs="+", choices=list(WORLDS), default=list(WORLDS))
    parser.add_argument("--truths", nargs="+", choices=list(TRUTHS), default=list(TRUTHS))
    parser.add_argument(
        "--text", type=float, default=1.0, help="what one costs that is only replayed, in decodings"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args()
    cases = [
        (prompts, world, truth)
        for world, truth, prompts in itertools.product(args.worlds, args.truths, COSTS)
    ]
    columns = ("world", "truth", "decodings", "found", "no looks", "sets", "wrong")
    columns += ("workload holds", "set holds", "error", "pairs", "missed")
    page = Table(title=f"{args.reports} reports of each, seed {args.seed}")
    for column in columns:
        page.add_column(column, justify="left" if column in columns[:2] else "right")
    problems = 0
    chunks = range(-(-args.reports // CHUNK))
    with ProcessPoolExecutor(args.jobs) as pool:
        todo = {
            case: [pool.submit(chunk, case, number, args.seed, args.text) for number in chunks]
            for case in cases
        }
        for case, parts in todo.items():
            counts = Counter[str]()
            for part in parts:
                counts.update(part.result())
            page.add_row(*row(case, counts, args.text), end_section=case[0] == COSTS[-1])
            problems += len(missed(case, counts))
    Console(width=180).print(page)
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main())

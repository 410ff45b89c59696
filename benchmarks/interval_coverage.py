"""Do intervals hold the truth, and do reports keep quiet where nothing is to be gained?

    python benchmarks/interval_coverage.py --reports 2000

Whole reports are simulated (tests/simulated_reports.py): two temperatures of two prompt sets, four
drafts at eight K. Every K is measured, under heavy tails, 1 % outliers, drift, uneven lengths and
prompts that differ three times as much; or one K is; or all are predicted, by replay and round
times or by what requests of a server cost. Where nothing is to be gained no verdict of a report may
say `speculate`; where the best K gains 10 %, how often is that found? Counts are appended to a
file, chunk by chunk, and the same command goes on where it stopped. Exits 1 where a requirement is
missed.
"""

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from scipy.stats import beta

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from simulated_reports import GAIN, NULL, WORLDS, reports

SIZES = (8, 16, 24)
TRUTHS = {"null": NULL, "gain": GAIN}
CHUNK = 100
# What must be reached: reports that wrongly say speculate, and the upper 95 % bound of that
SPECULATE, SPECULATE_BOUND = 0.05, 0.06
# Cells of 16 and 24 prompts, at 95 %
CELLS = (0.92, 0.98)
# Verdicts, below their level
VERDICTS = 0.02


Kind = tuple[str, str, int]  # world, truth and size
Counts = Callable[[Kind, int], Counter[str]]


def stored(path: Path) -> dict[Kind, list[Counter[str]]]:
    """Chunks that were finished, by world, truth and size; a line cut short is left out."""
    chunks: dict[Kind, list[Counter[str]]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        key = entry["world"], entry["truth"], entry["size"]
        chunks.setdefault(key, []).append(Counter(entry["counts"]))
    return chunks


def simulate(path: Path, kinds: Sequence[Kind], chunks: int, counts: Counts) -> None:
    """Append what is missing, the kinds of reports in turn, so that all grow alike."""
    for chunk in range(chunks):
        done = stored(path)
        for kind in kinds:
            if len(done.get(kind, ())) > chunk:
                continue
            begun = time.process_time()
            world, truth, size = kind
            entry = {"world": world, "truth": truth, "size": size, "counts": counts(kind, chunk)}
            seconds = time.process_time() - begun
            with path.open("a") as file:
                file.write(json.dumps({**entry, "seconds": seconds}) + "\n")


def counts_of(kind: Kind, chunk: int) -> Counter[str]:
    """The counts of a chunk of reports."""
    world, truth, size = kind
    seed = [chunk, list(WORLDS).index(world), list(TRUTHS).index(truth), size]
    return reports(world, TRUTHS[truth], size, CHUNK, seed)


def table(path: Path) -> int:
    """Print a line per kind of report; how many requirements were missed."""
    missed = 0
    for (world, truth, size), chunks in stored(path).items():
        counts = sum(chunks, Counter[str]())
        wrong = "speculate" if truth == "null" else "does_not_pay"
        number, times = counts["reports"], counts[f"reports with {wrong}"]
        bound = float(beta.ppf(0.95, times + 1, number - times))
        texts = [f"{world:<16} {truth} {size:>2} prompts {number:>5} reports:"]
        texts.append(f"wrong {wrong} {times / number:.1%} (at most {bound:.1%})")
        problems = []
        if truth == "null" and (times / number > SPECULATE or bound > SPECULATE_BOUND):
            problems.append("speculates")
        texts.append(f"cells above the truth {counts['cells optimistic'] / counts['cells']:.1%}")
        for kind in ("cells", "alphas"):
            share = counts[f"{kind} covered"] / counts["cells"]
            texts.append(f"{kind} {share:.1%}")
            if size >= 16 and not CELLS[0] <= share <= CELLS[1]:
                problems.append(kind)
        for kind in ("workload", "set"):
            if counts[f"{kind} intervals"]:
                share, level = (
                    counts[f"{kind} {what}"] / counts[f"{kind} intervals"]
                    for what in ("covered", "level")
                )
                texts.append(f"{kind} verdicts {share:.1%} of {level:.1%}")
                if share < level - VERDICTS:
                    problems.append(f"{kind} verdicts")
            if truth == "gain":
                found = counts[f"{kind} speculate"] / counts[f"{kind} verdicts"]
                texts.append(f"found {found:.0%}")
        print("  ".join(texts), *(f"MISSED: {problem}" for problem in problems), flush=True)
        missed += len(problems)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reports", type=int, default=2000)
    parser.add_argument("--file", type=Path, default=Path("interval_coverage.jsonl"))
    args = parser.parse_args()
    kinds = [*itertools.product(WORLDS, TRUTHS, SIZES)]
    simulate(args.file, kinds, -(-args.reports // CHUNK), counts_of)
    return int(table(args.file) > 0)


if __name__ == "__main__":
    sys.exit(main())

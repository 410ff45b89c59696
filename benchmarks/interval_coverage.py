"""Do the intervals hold the truth, and does the verdict keep quiet when nothing is to be gained?

    python benchmarks/interval_coverage.py

Workloads are drawn from a population of prompts that was replayed once, so the truth is known:
prompts differ in acceptance, texts have easy and hard stretches and uneven lengths, four drafts
share what makes a prompt hard, and every step time is the median of 30 noisy samples
(tests/workloads.py). Prints one table; exits 1 where a requirement is missed.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from workloads import coverage, decisions, null_steps, population_replays

SIZES = (8, 24, 48)
COVERS = 0.92
SPECULATES = 0.05


def line(name: str, size: int, value: str, need: str = "") -> None:
    print(f"{name:<58} {size:>3} prompts  {value:>7}  {need}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", type=int, default=2000)
    parser.add_argument("--nulls", type=int, default=1000)
    args = parser.parse_args()
    begun, missed = time.perf_counter(), 0
    replays = population_replays(0, 3000)
    found = coverage(replays, SIZES, args.workloads, draws=1500)
    for size, (speedup, alpha) in found.items():
        need = f"needs {COVERS:.0%}" if size == 24 else ""
        line(
            f"{args.workloads} workloads: speedup in its 95 % interval",
            size,
            f"{speedup:.1%}",
            need,
        )
        line(f"{args.workloads} workloads: alpha in its 95 % interval", size, f"{alpha:.1%}", need)
        missed += size == 24 and min(speedup, alpha) < COVERS
    nulls = decisions(replays, null_steps(replays), 24, args.nulls)["speculate"] / args.nulls
    missed += nulls > SPECULATES
    line(f"{args.nulls} nulls: says speculate", 24, f"{nulls:.1%}", f"needs <= {SPECULATES:.0%}")
    for size in (8, 48):
        some = max(1, args.nulls // 5)
        share = decisions(replays, null_steps(replays), size, some)["speculate"] / some
        line(f"{some} nulls: says speculate", size, f"{share:.1%}")
    some = max(1, args.nulls // 5)
    exact = decisions(replays, null_steps(replays), 48, some, sampled=False)["speculate"] / some
    line(f"{some} nulls: the same, step times taken as exact", 48, f"{exact:.1%}")
    print(f"{time.perf_counter() - begun:.0f} s")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())

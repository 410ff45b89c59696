"""Does a decision depend on how the prompts happened to be dealt into folds?

    python benchmarks/decision_stability.py --make RUNS
    python benchmarks/decision_stability.py RUNS/*

Every decision of a stored run (temperature, acceptance rule, prompt set) is taken again with 40
seeds of the deals. `--make` measures the twenty runs named below with the embedded models first:
sweeps and auditions of various drafts, temperatures, sets, weights, K and budgets, all short and
some very noisy. Exits 1 where more than one run has a decision that depends on the seed.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from harness.analysis.answers import answered
from harness.analysis.setup import Setup, shares_of_sets
from harness.analysis.sweep_and_audition import pair_run, questions
from harness.cli import compose, work
from harness.storage import StoredRun, load

SEEDS = 40
MOST_RUNS = 1
# Short, so that decisions are close
SHORT = ("threads=1", "new_tokens=24")
# Only verdicts on cells of every K rest on deals of folds
EVERY_K = ("sweep", "until=all")
RUNS = {
    "sweep": (*EVERY_K, "prompts.limit=8"),
    "sweep, T = 1": (*EVERY_K, "prompts.limit=8", "seed=1", "temperature=[1.0]"),
    "sweep of a small draft": (*EVERY_K, "draft=tiny_small", "k=[1,2,4]", "prompts.limit=6"),
    "audition of a look-up": ("audition", "drafts=[ngram]", "prompts.limit=6"),
    "sweep of an unrelated draft": (*EVERY_K, "draft=tiny_unrelated", "k=[1,2]", "prompts.limit=4"),
    "sweep of one set": (*EVERY_K, "prompts.sets=[easy]", "prompts.limit=12", "k=[1,4]", "seed=2"),
    "sweep, mostly easy": (*EVERY_K, "prompts.weights={easy:3,hard:1}", "k=[2,4,8]", "seed=3"),
    "sweep, mostly hard": (*EVERY_K, "prompts.weights={easy:1,hard:9}", "draft=tiny_small"),
    "sweep, only hard": (*EVERY_K, "prompts.weights={easy:0,hard:1}", "temperature=[0.7]"),
    "sweep of 12 tokens": (*EVERY_K, "new_tokens=12", "seed=5", "temperature=[0.7,1.3]"),
    "sweep of 8 tokens": (*EVERY_K, "new_tokens=8", "prompts.limit=16", "temperature=[1.0]"),
    "sweep of 8 prompts": (*EVERY_K, "prompts.limit=4", "draft=tiny_small", "seed=6"),
    "sweep of 8 K": (*EVERY_K, "k=[1,2,3,4,5,6,7,8]", "draft=tiny_small", "prompts.limit=4"),
    "sweep, repeated": (*EVERY_K, "repetitions=3", "prompts.limit=4", "k=[8]", "draft=tiny_small"),
    "audition": ("audition", "prompts.limit=8"),
    "audition of poor drafts": ("audition", "drafts=[tiny_small,tiny_unrelated,ngram]"),
    "audition, hot": ("audition", "temperature=[0.7,1.3]", "seed=7", "drafts=[tiny_small,ngram]"),
    "audition, mostly hard": ("audition", "prompts.weights={easy:1,hard:9}", "seed=8"),
    "audition of 8 tokens": ("audition", "new_tokens=8", "prompts.limit=8", "seed=9"),
    "audition of one set": ("audition", "prompts.sets=[hard]", "k=[1,2,3,4]", "seed=10"),
}


def make(folder: Path) -> None:
    """Measure every run that is not in the folder yet, under its name."""
    for name, (door, *keys) in RUNS.items():
        root = folder / "".join(letter if letter.isalnum() else "_" for letter in name)
        if any(root.glob("*/summary.json")):
            continue
        print(f"python -m harness.{door} {' '.join([*SHORT, *keys])}", flush=True)
        work(door, compose(door, [*SHORT, *keys, f"results_root={root}"]))


def decisions(run: StoredRun, seeds: int) -> dict[str, Counter[str]]:
    """How often each decision of the run came out as what, over the seeds."""
    setup = Setup(run)
    asked, shares = questions(pair_run(setup)), shares_of_sets(setup)
    counts: dict[str, Counter[str]] = {}
    for seed in range(seeds):
        for entry in answered(asked, lambda _: None, weights=shares, seed=seed):
            for answer in (entry.workload, *entry.sets):
                name = f"T={answer.temperature:g} {answer.rule} {answer.prompt_set}"
                counts.setdefault(name, Counter())[answer.decision] += 1
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", type=Path, help="run folders, or folders of them")
    parser.add_argument("--make", type=Path, metavar="FOLDER")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    args = parser.parse_args()
    if args.make is not None:
        make(args.make)
    given = [*args.runs, *([args.make] if args.make else [])]
    folders = [path.parent for each in given for path in sorted(each.rglob("manifest.json"))]
    differing = 0
    for folder in folders:
        counts = decisions(load(folder), args.seeds)
        changing = {name: count for name, count in counts.items() if len(count) > 1}
        differing += bool(changing)
        each = Counter(count.most_common(1)[0][0] for count in counts.values())
        summary = ", ".join(f"{number} {decision}" for decision, number in sorted(each.items()))
        print(f"{folder.parent.name:<28} {len(counts):>2} decisions: {summary}", flush=True)
        for name, count in changing.items():
            print(f"    depends on the seed: {name}: {dict(count)}", flush=True)
    print(f"{differing} of {len(folders)} runs have a decision that depends on the seed")
    return int(differing > MOST_RUNS)


if __name__ == "__main__":
    sys.exit(main())

"""Is a better draft worth what replay with raised chances says? By checkpoints of one head.

    python -m tools.train_embedded.eagle3 --folder OUT --checkpoints 6
    python -m harness.audition until=all drafts=[s54@OUT/step_54@kind:eagle3,...]
    python benchmarks/better_draft.py results/FOLDER

From each checkpoint the speedup is predicted that the next one's alpha would have, every gap closed
by the same part, and set next to the next one's own speedup by replay, both at the last one's
times.
"""

import argparse
from dataclasses import replace
from itertools import pairwise

import numpy as np
from rich.console import Console

from harness.analysis.head_training import checkpoint_groups
from harness.analysis.scored import Scored
from harness.analysis.setup import Setup
from harness.analysis.sweep_and_audition import Audition
from harness.analysis.verdict import Candidate
from harness.storage import load

console = Console(highlight=False)


def main() -> None:
    """Print a line for each pair of checkpoints and K, then the errors by K."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="an audition of three or more checkpoints")
    analysis = Audition(Setup(load(parser.parse_args().run)))
    errors: dict[int, list[float]] = {}
    for steps in checkpoint_groups(analysis.setup, analysis.drafts).values():
        names = [name for _, name in sorted(steps.items())]
        for ranking in analysis.own_rankings:
            at, weights = ranking.replays.temperature, analysis.setup.weights
            latency = analysis.latencies[at][names[-1]]
            for k in ranking.replays.ks:
                scored = [
                    replace(Scored.of(analysis, ranking, Candidate(name, k)), latency=latency)
                    for name in names
                ]
                for one, other in pairwise(scored):
                    alphas = [s.replays().weighted(s.name, weights).alpha for s in (one, other)]
                    predicted = one.speedups(one.raised_to(alphas[1]))[k]
                    actual = other.speedups()[k]
                    errors.setdefault(k, []).append(abs(predicted / actual - 1.0))
                    console.print(
                        f"T={at:g} K={k} {one.name.draft} -> {other.name.draft}: alpha"
                        f" {alphas[0]:.3f} + {alphas[1] - alphas[0]:.3f}, predicted"
                        f" {predicted:.3f}x, its own {actual:.3f}x ({predicted / actual - 1:+.1%})"
                    )
    for k, values in errors.items():
        console.print(f"K={k}: median error {np.median(values):.1%}, largest {max(values):.1%}")


if __name__ == "__main__":
    main()

"""Does the default sweep decide more than a grid of 16 prompts, and how long does each take?

    python benchmarks/default_sweep.py                  # ten seeds, about a quarter of an hour
    python benchmarks/default_sweep.py model=qwen3_4b draft=qwen3_0_6b --seeds 3

Two sweeps of every seed, in turn: a grid, which measures every K on eight prompts of each set
(`until=all prompts.limit=8`, the default sweep before 0018), and the default. Of each: how many of
its verdicts on the whole workload and on prompt sets are decided, or too near 1 to matter; how wide
the workload's intervals are; and what it took. At the end in how many verdicts the two decide the
opposite. Nothing else may run meanwhile.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from time import monotonic, process_time

from rich.console import Console
from rich.table import Table

from harness.analysis import analyse
from harness.analysis.verdict import closed
from harness.cli import compose
from harness.commands import sweep
from harness.records import where
from harness.serving.engines import OWN
from harness.storage import load
from harness.summary import Answer

WAYS = {"grid of 16 prompts": ("until=all", "prompts.limit=8"), "default": ()}


@dataclass(frozen=True)
class Swept:
    """The verdicts of one sweep, and what it took: seconds by the clock and of the processor."""

    answers: Sequence[Answer]
    clock_s: float
    processor_s: float

    def of(self, *, workload: bool) -> list[Answer]:
        """The verdicts on the whole workload, or those on its sets."""
        return [each for each in self.answers if (each.prompt_set == "all") == workload]

    @property
    def widths(self) -> list[float]:
        """Upper / lower bound of every workload's interval."""
        return [
            each.speedup_hi / each.speedup_lo
            for each in self.of(workload=True)
            if each.speedup_hi is not None and each.speedup_lo
        ]


def swept(keys: Sequence[str]) -> Swept:
    """Run one sweep; imports are not in its time."""
    begun, processor = monotonic(), process_time()
    with redirect_stdout(StringIO()):
        outcome = sweep.run(compose("sweep", keys))
    assert outcome.folder is not None
    seconds = monotonic() - begun, process_time() - processor
    return Swept(where(analyse(load(outcome.folder)).answers, engine=OWN.name), *seconds)


def opposite(one: Swept, other: Swept) -> int:
    """How many questions one of them answers with `speculate` and the other with a loss."""
    decisions = [
        {(a.temperature, a.prompt_set): a.decision for a in each.answers} for each in (one, other)
    ]
    both = decisions[0].keys() & decisions[1].keys()
    pairs = [{decisions[0][key], decisions[1][key]} for key in both]
    return pairs.count({"speculate", "does_not_pay"})


def row(name: str, sweeps: Sequence[Swept]) -> list[str]:
    """Of the table."""
    cells = [name]
    for workload in (True, False):
        answers = [each for one in sweeps for each in one.of(workload=workload)]
        cells.append(f"{sum(map(closed, answers))} of {len(answers)}")
    widths = [width for one in sweeps for width in one.widths]
    cells.append(f"{statistics.median(widths):.3f}" if widths else "")
    for seconds in ([one.clock_s for one in sweeps], [one.processor_s for one in sweeps]):
        cells.append(f"{statistics.median(seconds):.0f} s ({max(seconds):.0f})")
    return cells


def main() -> None:
    """Measure every seed in both ways, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--results", type=Path, help="where runs go; a temporary folder otherwise")
    parser.add_argument("keys", nargs="*", help="keys of harness.sweep, of both ways")
    asked = parser.parse_args()
    sweeps: dict[str, list[Swept]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as temporary:
        shared = [f"results_root={asked.results or temporary}", *asked.keys]
        for seed in range(asked.seeds):
            for name, keys in WAYS.items():
                sweeps[name].append(swept([*shared, f"seed={seed}", *keys]))
    table = Table(title=f"{asked.seeds} seeds")
    for column in ("sweep", "workloads decided", "sets decided", "upper / lower bound"):
        table.add_column(column)
    for column in ("median of clock seconds (most)", "of processor seconds"):
        table.add_column(column)
    for name, of_way in sweeps.items():
        table.add_row(*row(name, of_way))
    console = Console(width=120)
    console.print(table)
    against = sum(map(opposite, *sweeps.values()))
    console.print(f"Opposite decisions: {against}.", highlight=False)


if __name__ == "__main__":
    main()

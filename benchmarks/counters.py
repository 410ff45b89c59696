"""How far a running server's counters are from what a smaller K would count, by replay.

    python benchmarks/counters.py

Of each draft of the shipped audition, over both shipped prompt sets: rounds of a larger K (2, 3, 4,
5 and 8) are replayed, and from their acceptance by position the tokens per round of every smaller K
are estimated, as `report metrics=` does. Next to replay at that K itself this prints the largest
error of the estimate, and of the counts taken as they are.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from harness.analysis.replayed import replayed
from harness.records import Rule, TextTrace, grouped
from harness.storage import load
from harness.theory.acceptance import positions_at_k

RUN = Path(__file__).resolve().parents[1] / "results" / "examples" / "embedded_audition"
LONGER = (2, 3, 4, 5, 8)


def errors(traces: list[TextTrace], rule: Rule) -> Iterator[tuple[float, float]]:
    """Of each pair of a larger and a smaller K: the estimate's error, and that of the counts."""
    shares: dict[int, tuple[float, ...]] = {}
    for k, counts in replayed(traces, rule, range(1, max(LONGER) + 1)).items():
        at_least = counts.accepted_lengths.sum(axis=0)[::-1].cumsum()[::-1]
        shares[k] = tuple(float(rounds) for rounds in at_least[1:] / at_least[0])
    for longer in LONGER:
        for k in range(1, longer):
            exact = 1.0 + sum(shares[k])
            estimated = 1.0 + sum(positions_at_k(shares[longer], k))
            yield estimated / exact - 1.0, (1.0 + sum(shares[longer][:k])) / exact - 1.0


def main() -> None:
    """Print a row for each draft, temperature and acceptance rule."""
    table = Table("draft", "T", "rule", "estimate: median", "largest", "as counted: largest")
    by_cell = grouped(load(RUN).traces, lambda trace: (trace.draft, trace.temperature))
    for (draft, temperature), traces in sorted(by_cell.items()):
        rules: tuple[Rule, ...] = ("greedy_draft", "ratio") if temperature else ("greedy_draft",)
        for rule in rules:
            found = np.array(list(errors(traces, rule)))
            median = float(np.median(np.abs(found[:, 0])))
            worst = (column[np.abs(column).argmax()] for column in found.T)
            cells = (f"{100 * median:.2f} %", *(f"{100 * error:+.1f} %" for error in worst))
            table.add_row(draft, f"{temperature:g}", rule, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()

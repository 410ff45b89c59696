"""The sentences of a comparison: the speedups on each engine, and each run with its ratio."""

from harness import formatting as fmt
from harness.records import grouped
from harness.serving.engines import spec_of
from harness.summary import ComparedRun, Comparison, EngineRow

OUTCOMES = {
    "pass": "PASS, the ratio is not below fail_below={threshold:g}",
    "fail": "FAIL, the {bound} is below fail_below={threshold:g}",
    "unclear": (
        "PASS, but unclear, since the interval of the ratio includes fail_below={threshold:g}"
        " (more prompts narrow it)"
    ),
}


def verdicts(comparison: Comparison) -> tuple[str, ...]:
    """A sentence for each compared run; the outcome of `fail_below` comes first in it.

    Where the runs are of several engines, a sentence with the speedup on each comes before them.
    """
    engines = gains_of_engines(comparison)
    first = () if engines is None else (engines,)
    return (*first, *(_run_verdict(run) for run in comparison.runs))


def gains_of_engines(comparison: Comparison) -> str | None:
    """The measured speedup on each engine at one K; None for a single engine.

    "K=4 at temperature 0, measured: 1.30x on vLLM 0.32.0, 0.68x on llama.cpp b11549". The K is the
    one that most engines have; of several such K, the one with the largest speedup.
    """
    alone = [row for row in comparison.engines if row.concurrency == 1 and row.lossless]
    cells = grouped(alone, lambda row: (row.temperature, row.k))

    def weight(rows: list[EngineRow]) -> tuple[int, float]:
        return len({engine(row) for row in rows}), max(row.speedup or 0.0 for row in rows)

    (temperature, k), rows = max(cells.items(), key=lambda kv: weight(kv[1]), default=((0, 0), []))
    if len({engine(row) for row in rows}) < 2:
        return None
    drafts = len({row.draft for row in rows}) > 1
    gains = [
        f"{fmt.gain(row)}"
        f"{f' with {row.draft}' if drafts else ''} on {engine(row)}"
        f"{'' if row.lossless else ', which is NOT LOSSLESS there'}"
        for row in rows
    ]
    return f"K={k} at temperature {fmt.temperature(temperature)}, measured: {', '.join(gains)}."


def engine(row: EngineRow) -> str:
    """The name of an engine with its version."""
    return " ".join(filter(None, (spec_of(row.engine).title, row.version)))


def _run_verdict(run: ComparedRun) -> str:
    row = run.row
    if row is None or row.speedup_ratio is None:
        return f"{run.name}: no speedup to compare."
    outcome = ""
    no_interval = row.speedup_ratio_lo is None
    if run.outcome is not None:
        bound = "ratio" if no_interval else "whole interval"
        outcome = OUTCOMES[run.outcome].format(bound=bound, threshold=run.threshold) + ": "
    workload = "whole workload" if row.prompt_set in (None, "all") else f"{row.prompt_set} prompts"
    cells = f"; {run.differing} of {run.cells} cells differ significantly" if run.cells else ""
    ratio = fmt.gain(row, "speedup_ratio")
    return (
        f"{outcome}{run.name} gains {fmt.speedup(row.speedup)} and {row.reference}"
        f" {fmt.speedup(row.reference_speedup)} ({workload}, temperature"
        f" {fmt.temperature(row.temperature)}, K={row.k}; measured): ratio"
        f" {ratio}{' (no interval)' if no_interval else ''}{cells}."
    )

"""The sentences of a comparison: each run with its ratio."""

from harness import formatting as fmt
from harness.summary import ComparedRun, Comparison

OUTCOMES = {
    "pass": "PASS, the ratio is not below fail_below={threshold:g}",
    "fail": "FAIL, the {bound} is below fail_below={threshold:g}",
    "unclear": (
        "PASS, but unclear, since the interval of the ratio includes fail_below={threshold:g}"
        " (more prompts narrow it)"
    ),
}


def verdicts(comparison: Comparison) -> tuple[str, ...]:
    """A sentence for each compared run; the outcome of `fail_below` comes first in it."""
    return tuple(map(_run_verdict, comparison.runs))


def _run_verdict(run: ComparedRun) -> str:
    row = run.row
    if row is None or row.speedup_ratio is None:
        return f"{run.name}: no speedup to compare."
    outcome = ""
    no_interval = row.speedup_ratio_lo is None
    if run.outcome is not None:
        bound = "ratio" if no_interval else "whole interval"
        outcome = OUTCOMES[run.outcome].format(bound=bound, threshold=run.threshold) + ": "
    workload = fmt.number_of(row.prompts or 0, "prompt", "prompts")
    if row.prompt_set not in (None, "all"):  # a run's own answer is of all that it has
        workload = f"{workload} of {row.prompt_set}"
    cells = ""
    if run.cells:
        differing = f"{run.differing} of {run.cells} cells differ"
        cells = f"; {differing if run.differing else 'no cell differs'} significantly"
    interval = ""
    if not no_interval:
        interval = f" ({fmt.decimal(row.speedup_ratio_lo)} to {fmt.decimal(row.speedup_ratio_hi)})"
    return (
        f"{f'{outcome}the' if outcome else 'The'} speedup of {run.name} is"
        f" {fmt.decimal(row.speedup_ratio)} times that of {row.reference}"
        f"{interval or ' (no interval)'}, measured on {workload} that both have at"
        f" temperature {fmt.temperature(row.temperature)}, K={row.k}{cells}."
    )

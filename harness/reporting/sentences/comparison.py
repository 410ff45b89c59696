"""What a comparison of runs says: each run in one sentence, and what to know before trusting it."""

from harness.records import grouped
from harness.reporting import formatting as fmt
from harness.serving.engines import spec_of
from harness.summary import ComparedRun, Comparison, ComparisonCaveat, EngineRow

OUTCOMES = {
    "pass": "PASS, the ratio is not below fail_below={threshold:g}",
    "fail": "FAIL, the {bound} is below fail_below={threshold:g}",
    "unclear": (
        "PASS, but unclear, since the interval of the ratio includes fail_below={threshold:g}"
        " (more prompts narrow it)"
    ),
}
KINDS = {
    "synthetic": "synthetic",
    "dummy": "measured on dummy weights",
    "measured": "measured on real weights",
    "greedy_texts_differ": "greedy texts are not plain decoding's",
    "greedy_texts_unjudged": (
        "greedy texts are not plain decoding's (rerun with resume= to check for a tie)"
    ),
}
CAVEATS = {
    "failed_run": "FAILED RUN: {run}; what it stored is compared",
    "unfinished_run": "UNFINISHED RUN: {run}; what it stored is compared",
    "different_devices": (
        "DIFFERENT DEVICES: {reference_run} ran on {reference_device}, {run} on {device}; their"
        " times per token say how the devices differ, not how the code does. Speedups are each"
        " against their own baseline"
    ),
    "machine_changed": (
        "THE MACHINE CHANGED: a plain token at temperature {temperature:g} took {reference_ms:.3g}"
        " ms in {reference_run} and {ms:.3g} ms in {run}, which chance does not explain; speedups"
        " are each against their own baseline, but a slower machine may change them as well"
    ),
    "distrusted": "NO SPEEDUPS COMPARED: {run}'s {reason}; only times are compared",
    "other_acceptance": (
        "NO SPEEDUPS COMPARED: the acceptance of {reference_run} is {reference_kind}, that of {run}"
        " {kind}; only times are compared"
    ),
    "other_lengths": (
        "{prompts} of the same name but of different lengths (an edited file, or another chat"
        " template): left out"
    ),
    "some_prompts": (
        "compared are only the {prompts} that both have, of {reference_total} in {reference_run}"
        " and {total} in {run}"
    ),
    "timed_on_part": (
        "speedups and times here are of the prompts that both runs timed at that K, {least} to"
        " {most} of the {prompts} that both have; a run's own report has other ones, since its"
        " verdict counts the rounds of all its prompts, by replay, and its rows are of all that it"
        " timed"
    ),
    "other_hash": "the prompts' hashes differ: paired by name and length, their words may differ",
    "other_weights": (
        "here prompt sets weigh as in {reference_run} ({reference_weights}); the report of {run}"
        " itself has {weights}, so its numbers for the whole workload differ from these"
    ),
    "not_lossless": (
        "{run} is NOT LOSSLESS at temperature {temperature:g}, K={k}: its speedup there is of other"
        " texts, and is not compared"
    ),
}


def verdicts(comparison: Comparison) -> tuple[str, ...]:
    """Each compared run in one sentence, the threshold's outcome first where there is one.

    Before them what each engine gained at one K, where they are several.
    """
    engines = gains_of_engines(comparison)
    first = () if engines is None else (engines,)
    return (*first, *(_verdict(run) for run in comparison.runs))


def caveat(entry: ComparisonCaveat) -> str:
    """One of them, without a full stop."""
    values = {key: KINDS.get(str(value), value) for key, value in entry.values.items()}
    for key in ("weights", "reference_weights"):
        values[key] = values.get(key) or "equal weights"
    if "prompts" in values:
        values["prompts"] = fmt.number_of(values["prompts"], "prompt", "prompts")
    return CAVEATS[entry.code].format(**values)


def gains_of_engines(comparison: Comparison) -> str | None:
    """As "K=4 at temperature 0, measured: 1.30x on vLLM 0.32.0, 0.68x on llama.cpp b11549".

    At the K that most engines have; of several that at which one of them gained most. None where
    they are not several engines.
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
    """An engine with its version."""
    return " ".join(filter(None, (spec_of(row.engine).title, row.version)))


def _verdict(run: ComparedRun) -> str:
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

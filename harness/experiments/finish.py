"""From what a run stored to its results and summary; no model, so `report` can do it again.

Everything here reads a run folder and writes into it. A run that was killed is finished as far as
it got.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.records import Failure, ResultRow, StepTiming, Summary, Trial, Verdict
from harness.storage import RunFolder, StoredRun
from harness.theory.cells import measured_rows, theory_rows
from harness.theory.evidence import evidence_from_trials
from harness.theory.intervals import MIN_PROMPTS
from harness.theory.speedup import StepTimes
from harness.theory.steps import step_times
from harness.theory.verdict import decide, least_regret

# A step spread this wide says that something else was using the machine.
NOISY_SPREAD = 1.5

EMBEDDED_CAVEAT = (
    "the embedded models are toys that show how the harness works; "
    "nothing here says anything about a model you would serve"
)

Number = float | int | str | None


def finish_sweep(folder: RunFolder, stored: StoredRun) -> Summary:
    """Derive a sweep's results.csv and summary.json from its trials and timings, and write them."""
    timings, trials, config = folder.timings(), stored.trials, stored.config
    times = step_times(timings) if timings else None
    model, draft = config["model"]["name"], config["draft"]["name"]
    measured = measured_rows(trials, model=model, draft=draft, times=times, seed=config["seed"])
    folder.write_results([*measured, *(theory_rows(measured, times) if times else [])])
    verdicts = [
        _verdicts(trials, config, times, value)
        for value in config["temperature"]
        if any(trial.temperature == value for trial in trials)
    ]
    summary = Summary(
        verdict=verdicts[0][0] if verdicts else None,
        per_temperature=tuple(whole for whole, _ in verdicts),
        per_prompt_set=tuple(verdict for _, sets in verdicts for verdict in sets),
        failures=tuple(failures(trials)),
        caveats=tuple(caveats(stored, measured, timings)),
        headline={**headline(timings), **_best_cell(measured), **_least_regret(stored, times)},
    )
    folder.write_summary(summary)
    return summary


def _verdicts(
    trials: Sequence[Trial],
    config: Mapping[str, Any],
    times: StepTimes | None,
    temperature: float,
) -> tuple[Verdict, list[Verdict]]:
    """The whole workload's verdict at one temperature, then each prompt set's."""
    evidence = evidence_from_trials(
        trials, draft=config["draft"]["name"], temperature=temperature, times=times
    )
    seed = config["seed"]
    whole = decide(evidence, weights=config["prompts"]["weights"], seed=seed)
    sets = sorted(set(evidence.prompt_sets))
    return whole, [decide(evidence, prompt_set=name, seed=seed) for name in sets]


def _best_cell(measured: Sequence[ResultRow]) -> dict[str, Number]:
    """The largest plain speedup of any cell: what a reader will look for, and must distrust."""
    rows = [row for row in measured if row.k and row.speedup is not None]
    if not rows:
        return {}
    best = max(rows, key=lambda row: row.speedup or 0.0)
    return {
        "best_cell_speedup": best.speedup,
        "best_cell_k": best.k,
        "best_cell_prompt_set": best.prompt_set,
        "best_cell_temperature": best.temperature,
    }


def _least_regret(stored: StoredRun, times: StepTimes | None) -> dict[str, Number]:
    """The K that gives away least if traffic shifts between the prompt sets, first temperature."""
    config = stored.config
    evidence = evidence_from_trials(
        stored.trials,
        draft=config["draft"]["name"],
        temperature=config["temperature"][0],
        times=times,
    )
    by_set = evidence.by_set()
    return {"least_regret_k": least_regret(by_set)[1]} if len(by_set) > 1 else {}


def headline(timings: Sequence[StepTiming]) -> dict[str, Number]:
    """The numbers shown beside a verdict: step times and their ratio."""
    if not timings:
        return {}
    times = step_times(timings)
    return {
        "draft_step_ms": times.draft_s * 1e3,
        "target_step_ms": times.target_s * 1e3,
        "c": times.c,
        "step_ratio": times.target_s / times.draft_s,
        "context_tokens": next(t.context_tokens for t in timings if t.kind == "step"),
    }


def failures(trials: Sequence[Trial]) -> list[Failure]:
    """The generations that did not complete, one line each; a later success replaces them."""
    latest = {trial.cell: trial for trial in trials}
    return [
        Failure(
            f"{trial.prompt_set}/{trial.prompt} k={trial.k} temperature={trial.temperature:g}",
            trial.error or "failed",
        )
        for trial in latest.values()
        if trial.status == "failed"
    ]


def caveats(
    stored: StoredRun, measured: Sequence[ResultRow], timings: Sequence[StepTiming]
) -> list[str]:
    """What a reader must know before acting on the numbers, most important first."""
    config, notes = stored.config, []
    if config["model"]["id"].startswith("embedded:"):
        notes.append(EMBEDDED_CAVEAT)
    counts = [row.prompts for row in measured if row.prompts is not None]
    if counts and min(counts) < MIN_PROMPTS:
        notes.append(f"{min(counts)} prompts in a cell: below {MIN_PROMPTS} there is no interval")
    prompts = config["prompts"]
    if prompts["enable_thinking"]:
        notes.append("thinking mode is on: acceptance is that of reasoning text")
    target = stored.manifest.get("models", {}).get("target", {})
    if target.get("chat_template") and prompts["chat_template"] == "never":
        notes.append("the model's chat template was not used: served traffic will differ")
    scatter = _scatter(timings)
    return [*notes, scatter] if scatter else notes


def _scatter(timings: Sequence[StepTiming]) -> str | None:
    """A caveat where step times scatter so much that their medians are doubtful."""
    wide = [
        timing.role
        for timing in timings
        if timing.kind == "step"
        and np.percentile(timing.samples_s, 90) > NOISY_SPREAD * np.median(timing.samples_s)
    ]
    if not wide:
        return None
    return (
        f"{' and '.join(sorted(set(wide)))} step times scatter widely (p90 above "
        f"{NOISY_SPREAD:g} x the median): the machine was busy; trust the ratios measured on "
        "whole generations more than the prediction"
    )

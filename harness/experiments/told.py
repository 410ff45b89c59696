"""What every door's summary tells beside its verdict: headline numbers, failures, caveats."""

from collections.abc import Sequence

import numpy as np

from harness.experiments.priced import other_card
from harness.records import DUMMY_CAVEAT, IMPOSED_CAVEAT, Failure, ResultRow, StepTiming, Trial
from harness.reporting.reading import dummies_of, synthetic
from harness.storage import StoredRun
from harness.theory.intervals import MIN_PROMPTS
from harness.theory.steps import step_times

# A step spread this wide says that something else was using the machine.
NOISY_SPREAD = 1.5

EMBEDDED_CAVEAT = (
    "the embedded models are toys that show how the harness works; "
    "nothing here says anything about a model you would serve"
)

Number = float | int | str | None


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
    config = stored.config
    notes = [DUMMY_CAVEAT] if dummies_of(stored) else []
    if synthetic(stored):
        notes.append(IMPOSED_CAVEAT)
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
    notes += _fallbacks(stored)
    upgraded = other_card(stored)
    notes += [upgraded] if upgraded else []
    scatter = _scatter(timings)
    return [*notes, scatter] if scatter else notes


def _fallbacks(stored: StoredRun) -> list[str]:
    """The models that did not run on the engine that was asked for, on a card."""
    if (
        stored.config.get("backend") == "eager"
        or (stored.manifest.get("environment") or {}).get("device") != "cuda"
    ):
        return []
    models = stored.manifest.get("models", {})
    return [
        f"{role}: {model['engine_reason']}; its steps ran eagerly, likely launch-bound"
        for role, model in models.items()
        if model.get("engine") != "cuda_graphs" and model.get("engine_reason")
    ]


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

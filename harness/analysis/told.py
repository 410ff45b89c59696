"""What every door's summary tells beside its verdict: headline numbers, failures, caveats."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness import summary
from harness.analysis.latency import step_times
from harness.analysis.priced import other_card
from harness.commands.run import NOT_MEASURED
from harness.records import (
    DUMMY_CAVEAT,
    IMPOSED_CAVEAT,
    Failure,
    ResultRow,
    StepTiming,
    Trial,
    Verdict,
)
from harness.reporting.reading import dummies_of, synthetic
from harness.stats.bootstrap import MIN_PROMPTS
from harness.storage import StoredRun

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


def not_measured(manifest: Mapping[str, Any]) -> list[Failure]:
    """Measurements other than generations that failed because logits were not finite."""
    notes: Mapping[str, str] = manifest.get(NOT_MEASURED) or {}
    return [Failure(what, error) for what, error in notes.items()]


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
    unused = (stored.manifest.get("environment") or {}).get("unused_card")
    if unused and config["device"]["name"] == "auto":
        notes.append(f"device=auto took the CPU: {unused}")
    prompts = config["prompts"]
    thinking = prompts["enable_thinking"]
    if True in (thinking if isinstance(thinking, list) else [thinking]):
        notes.append("thinking mode is on: acceptance is that of reasoning text")
    target = stored.manifest.get("models", {}).get("target", {})
    if target.get("chat_template") and prompts["chat_template"] == "never":
        notes.append("the model's chat template was not used: served traffic will differ")
    notes += [note] if (note := generation_caveat(stored)) else []
    notes += fallbacks(stored)
    upgraded = other_card(stored)
    notes += [upgraded] if upgraded else []
    scatter = _scatter(timings)
    return [*notes, scatter] if scatter else notes


# Settings that mean nothing at temperature 0, where the likeliest token is taken
_SAMPLED_ONLY = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"}
)
_OFFERED = ("top_k", "top_p", "min_p", "repetition_penalty", "stop_strings")
_NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def generation_caveat(stored: StoredRun) -> str | None:
    """What the target's generation_config sets, and a server applies, but this run did not."""
    target = stored.manifest.get("models", {}).get("target", {})
    decode = stored.config.get("decode") or {}
    temperatures = [float(value) for value in stored.config.get("temperature") or [0.0]]

    def differs(key: str, value: object) -> bool:
        if key == "do_sample" or (key in _SAMPLED_ONLY and not any(temperatures)):
            return False
        if key == "temperature":
            return value not in temperatures
        return value != (decode.get(key) or _NEUTRAL.get(key))

    settings = (target.get("generation_config") or {}).items()
    unused = {key: value for key, value in settings if differs(key, value)}
    if not unused:
        return None
    values = ", ".join(f"{key}={value}" for key, value in unused.items())
    offered = " ".join(f"decode.{key}={unused[key]}" for key in _OFFERED if key in unused)
    advice = f"; to measure with them: {offered}" if offered else ""
    return (
        f"the target's generation_config sets {values}: a server applies this unless a request "
        f"says otherwise, and this run did not{advice}"
    )


def fallbacks(stored: StoredRun) -> list[str]:
    """The models that did not run on the requested engine, or only on part of it."""
    models = stored.manifest.get("models") or {}
    notes = [
        f"{role}: {model['engine_reason']}; its steps launch more kernels than compiled ones, "
        "which takes longer"
        for role, model in models.items()
        if model.get("compiled") is False and model.get("engine_reason")
    ]
    if (
        stored.config.get("backend") == "eager"
        or (stored.manifest.get("environment") or {}).get("device") != "cuda"
    ):
        return notes
    return notes + [
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


def in_words(verdict: summary.Verdict) -> Verdict:
    """The verdict with a sentence in place of its code."""
    values = verdict.reason_values
    draft = f"{values['draft']} with " if values.get("draft") else ""
    label = f"{draft}K={values.get('k')}"
    gain = f"{verdict.speedup or 0:.2f}x"
    measured = f"{gain} [{verdict.speedup_lo or 0:.2f}, {verdict.speedup_hi or 0:.2f}]"
    reason = f"the best is {label} at {measured} on held-out prompts"
    if verdict.reason == "held_out_gain":
        reason = f"{label} gives {measured} on held-out prompts"
    elif verdict.reason == "held_out_loss":
        alpha, needed = values["alpha"], values["breakeven_alpha"]
        if isinstance(alpha, float) and isinstance(needed, float):
            reason += (
                f"; alpha {alpha:.2f} is below the {needed:.2f} it needs"
                if alpha < needed
                else f"; alpha {alpha:.2f} is not below the {needed:.2f} that the steps need, so"
                " the loss is time outside the steps or stretches of low acceptance"
            )
        elif isinstance(alpha, float):
            reason += f"; alpha is {alpha:.2f}"
    elif verdict.reason == "interval_spans_one":
        needed = values["prompts_needed"]
        reason += f" of {values['prompts']}; " + (
            f"needs about {needed:,} prompts"
            if needed
            else f"more than {values['most_prompts']:,} prompts would be needed to tell it from 1"
        )
    elif verdict.reason == "too_few_prompts":
        reason = (
            f"{values['prompts']} prompts, and below {values['needed']} there is no interval;"
            f" the best so far is {label} at {gain}, not held out"
        )
    elif verdict.reason == "too_few_in_set":
        reason = (
            f"prompt set {values['prompt_set']!r} needs at least {values['needed']} prompts that"
            f" differ; the best so far is {label} at {gain}, not held out"
        )
    elif verdict.reason == "no_complete_prompt":
        name = values["prompt_set"]
        what = f"prompt set {name!r} has no prompt" if name else "no prompt is"
        reason = f"{what} complete in every cell"
    return Verdict(
        verdict.decision,
        verdict.draft,
        verdict.k,
        verdict.temperature,
        verdict.prompt_set,
        verdict.speedup,
        verdict.speedup_lo,
        verdict.speedup_hi,
        reason,
    )

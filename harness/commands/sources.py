"""Traces, texts and step times from elsewhere: another run, or typed in. No model and no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness import prompts as prompt_sets
from harness.analysis.latency import Latency, latency_of
from harness.commands.greedy import distrusted
from harness.config import AuditionConfig, DecodeConf
from harness.records import NGRAM, StepTiming, TextTrace, Trial, UserError
from harness.storage import RunFolder, StoredRun, load, load_traces, timings_from
from harness.theory.speedup import StepTimes

# What of decode.* decides the texts, and the values that leave them as they are
SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty", "stop_strings")
NEUTRAL = {"top_p": 1.0, "repetition_penalty": 1.0}
# A look-up in a text of some thousand tokens; typed latencies have no entry for it.
LOOKUP_S = 1e-5


def by_draft(traces: Sequence[TextTrace]) -> dict[str, list[TextTrace]]:
    """Traces grouped by draft, in the order they were stored."""
    groups: dict[str, list[TextTrace]] = {}
    for trace in traces:
        groups.setdefault(trace.draft, []).append(trace)
    return groups


def stored_traces(
    config: AuditionConfig, drafts: Sequence[str], *, partly: bool = False
) -> tuple[dict[str, list[TextTrace]], StoredRun]:
    """The traces of `traces_from`, checked to be of this model and these prompts.

    Args:
        config: names the run, the model and the prompts.
        drafts: whose traces.
        partly: those that it has no traces of are left out rather than refused.

    Raises:
        UserError: not a run with traces, of another model, prompts, top_k or top_p, or without
            one of the drafts.
    """
    key = f"traces_from={config.traces_from}"
    run = load(str(config.traces_from))
    if reason := distrusted(run):
        raise UserError(f"{key}: {reason}; audition a pair whose texts are right")
    groups = by_draft(load_traces(run.folder))
    if not groups:
        raise UserError(f"{key}: no traces.parquet there; name an audition's folder")
    theirs = run.config.get("model", {})
    if theirs.get("id") != config.model.id or theirs.get("revision") != config.model.revision:
        raise UserError(
            f"{key}: the text of model={theirs.get('name')} ({theirs.get('id')}), not of "
            f"model={config.model.name} ({config.model.id})"
        )
    own = prompt_sets.prompt_set_hash(prompt_sets.load(config.prompts))
    if run.manifest.get("prompts_sha256") != own:
        raise UserError(f"{key}: other prompts than prompts.* names here; give the same ones")
    for name in ("chat_template", "enable_thinking", "answer_tokens"):
        before = (run.config.get("prompts") or {}).get(name)
        if before != getattr(config.prompts, name):
            raise UserError(f"{key}: made with prompts.{name}={before}; give the same")
    absent = [name for name in drafts if name not in groups]
    if absent and not partly:
        raise UserError(f"{key}: no traces of draft {absent[0]!r}; it has {', '.join(groups)}")
    check_drawn_alike(key, run, config.decode)
    return {name: groups[name] for name in drafts if name in groups}, run


def check_drawn_alike(key: str, run: StoredRun, decode: DecodeConf) -> None:
    """Refuse a run whose texts were drawn with other sampling parameters than these.

    Raises:
        UserError: naming the first that differs.
    """
    drawn = run.config.get("decode") or {}
    for name in SAMPLING:
        stored, asked = (
            None if value == NEUTRAL.get(name) else value or None
            for value in (drawn.get(name), getattr(decode, name))
        )
        if stored != asked:
            raise UserError(f"{key}: drawn with decode.{name}={stored}; give the same")


@dataclass(frozen=True)
class Texts:
    """Another run's texts, with the scores that its drafts gave them.

    Attributes:
        run: where they are from.
        trials: the target's texts.
        answers: its answers to earlier turns, which the texts continue.
        traces: of the drafts that are asked for.
    """

    run: StoredRun
    trials: tuple[Trial, ...]
    answers: tuple[Trial, ...]
    traces: tuple[TextTrace, ...]

    def copy_to(self, folder: RunFolder) -> None:
        """Put them into a run that times its own steps; what is there already stays."""
        stored = {trial.key for trial in folder.trials()}
        if not stored:
            folder.write_traces(self.traces)
            folder.update_manifest({"traces_from": str(self.run.folder)})
        answered = {trial.key for trial in folder.answers()}
        for answer in self.answers:
            if answer.key not in answered:
                folder.append_answer(answer)
        for trial in self.trials:
            if trial.key not in stored:
                folder.append_trial(trial)


def stored_texts(config: AuditionConfig, drafts: Sequence[str]) -> Texts:
    """The texts of `traces_from`, which are exactly those that this audition would ask for.

    Raises:
        UserError: as `stored_traces`; another seed, budget, number of repetitions or temperature;
            or step times from elsewhere as well.
    """
    key = f"traces_from={config.traces_from}"
    if config.traces_from is None:
        raise UserError("latency.measure: with traces_from=RUN only; without it steps are timed")
    if config.latency.target_ms is not None or config.latency_from is not None:
        raise UserError("latency.measure: not with latency_from or latency.target_ms; give one")
    traces, run = stored_traces(config, drafts, partly=True)
    for name in ("seed", "new_tokens", "repetitions", "temperature"):
        theirs, own = run.config.get(name), getattr(config, name)
        if theirs != own:
            raise UserError(f"{key}: made with {name}={theirs}; give the same, not {own}")
    trials = tuple(t for t in run.trials if t.k == 0 and t.status == "ok" and t.tokens)
    answers = tuple(RunFolder(run.folder, run.manifest).answers())
    return Texts(run, trials, answers, tuple(trace for group in traces.values() for trace in group))


def latencies(
    config: AuditionConfig, drafts: Sequence[str], measured: Sequence[StepTiming]
) -> dict[str, Latency]:
    """Step times of every draft: typed in, of another run, or measured here.

    Raises:
        UserError: both kinds given, none there, or a draft without step times.
    """
    if config.latency.target_ms is not None and config.latency_from is not None:
        raise UserError("latency_from and latency.target_ms: give one of the two")
    if config.latency.target_ms is not None:
        return {name: Latency(_typed(config, name)) for name in drafts}
    if config.latency.draft_ms is not None or config.latency.verify_ms is not None:
        raise UserError("latency.target_ms: give it beside latency.draft_ms and latency.verify_ms")
    timings, key = list(measured), "latency"
    if config.latency_from is not None:
        key = f"latency_from={config.latency_from}"
        timings = timings_from(load(config.latency_from).latency_samples)
        if not timings:
            raise UserError(
                f"{key}: no latency_samples.csv there; name a profile, sweep or audition"
            )
    return {name: _of_draft(name, timings, key) for name in drafts}


def _of_draft(name: str, timings: Sequence[StepTiming], key: str) -> Latency:
    """A draft's own samples with those of the target that were taken beside it."""
    own = [t for t in timings if t.role == "draft" and t.model == name]
    if not own:
        known = sorted({t.model for t in timings if t.role == "draft"})
        raise UserError(f"{key}: no step times of draft {name!r}; there are {', '.join(known)}")
    beside = own[0].beside
    target = [t for t in timings if t.role == "target" and t.beside == beside]
    return latency_of([*target, *own])


def _typed(config: AuditionConfig, name: str) -> StepTimes:
    typed = config.latency
    own: Any = typed.draft_ms
    if isinstance(own, Mapping):
        own = own.get(name)
    if name == NGRAM and not isinstance(typed.draft_ms, Mapping):
        own = LOOKUP_S * 1e3
    if own is None or isinstance(own, bool) or not isinstance(own, int | float):
        raise UserError(
            f"latency.draft_ms: no time for draft {name!r}; give a number for all, or "
            f"latency.draft_ms={{{name}:1.5}}"
        )
    verify = tuple(value / 1e3 for value in typed.verify_ms or ())
    assert typed.target_ms is not None
    return StepTimes(float(own) / 1e3, typed.target_ms / 1e3, verify)

"""Many drafts, one target: score and time what is missing, rank, store, render, show.

Traces and step times may come from another run (`traces_from`, `latency_from`): they are copied
into this run's folder, so that it says everything by itself. No torch here: with both from
elsewhere no model is loaded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness import prompts as prompt_sets
from harness.analysis.latency import latency_rows
from harness.analysis.lossless import distrust, text_checks
from harness.analysis.setup import Setup
from harness.analysis.sweep_and_audition import LOOKUP_S
from harness.commands.dry_run import print_audition_plan
from harness.commands.run_lifecycle import Outcome, concluded, note_or_check, resumed, running
from harness.config import AuditionConfig, DecodeConf, ModelConf, like_target
from harness.measurement.environment import describe_host
from harness.records import (
    NGRAM,
    Prompt,
    StepTiming,
    TextTrace,
    Trial,
    UserError,
)
from harness.storage import RunFolder, StoredRun, load
from harness.theory.speedup import StepTimes

# What texts are generated with; a run on another's traces has it from there, and notes it so
BUDGET = ("new_tokens", "repetitions")
MADE_WITH = "texts_made_with"
# What of decode.* decides the texts, and the values that leave them as they are
SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty", "stop_strings")
NEUTRAL = {"top_p": 1.0, "repetition_penalty": 1.0}


def run(config: AuditionConfig, drafts: Sequence[ModelConf]) -> Outcome:
    """Audition `drafts` for the target and store, render and show what came out.

    Returns:
        The run folder; status 1 where a draft broke down.

    Raises:
        UserError: a value, the target, a prompt or a run that cannot be used, a draft named twice,
            or no draft left to rank.
    """
    drafts = [like_target(config.model, conf) for conf in drafts]
    _check_drafts(drafts)
    prompts = prompt_sets.load(config.prompts)
    if config.dry_run:
        print_audition_plan(config, drafts, prompts)
        return Outcome(None)
    folder = resumed(config, "audition")
    if config.traces_from is None or config.latency.measure:
        folder = _measured(config, drafts, prompts, folder)
    else:
        folder = _from_elsewhere(config, [conf.name for conf in drafts], folder)
    return concluded(folder)


def _measured(
    config: AuditionConfig,
    drafts: Sequence[ModelConf],
    prompts: Sequence[Prompt],
    folder: RunFolder | None,
) -> RunFolder:
    """Generate, score and time what the folder lacks; torch is imported only here."""
    from harness.commands.completions import with_turns
    from harness.commands.drafts import AUDITION, score_drafts
    from harness.commands.pair import open_target

    names = [conf.name for conf in drafts]
    texts = _stored_texts(config, names) if config.latency.measure else None
    timings = _stored_timings(config, names)
    target = open_target(config, prompts)
    folder = folder or _create(config)
    note_or_check(folder, target.describe(), config.seed)
    with running(folder):
        if texts is not None:
            texts.copy_to(folder)
        if timings and not folder.timings():
            folder.write_latency(latency_rows(timings), timings)
        target = with_turns(folder, target, config)
        if not score_drafts(folder, target, drafts, config):
            noted = folder.manifest[AUDITION]
            reasons = [f"{entry['draft']}: {entry['reason']}" for entry in noted["not_eligible"]]
            reasons += [f"draft {entry['draft']}: {entry['error']}" for entry in noted["failures"]]
            raise UserError("drafts: none could be auditioned; " + "; ".join(reasons))
    return folder


def _from_elsewhere(
    config: AuditionConfig, drafts: Sequence[str], folder: RunFolder | None
) -> RunFolder:
    """Another run's traces, with its step times or those that are named here."""
    traces, source = _stored_traces(config, drafts)
    timings = _stored_timings(config, drafts, source)
    folder = folder or _create(config)
    folder.write_traces(traces)
    if timings:
        folder.write_latency(latency_rows(timings), timings)
    kept = {key: source.manifest.get(key) for key in ("models", "prompts", "prompts_sha256")}
    folder.update_manifest(
        {
            **kept,
            "environment": describe_host(),
            "traces_from": str(source.folder),
            MADE_WITH: {key: source.config.get(key) for key in BUDGET},
        }
    )
    return folder


def _stored_traces(
    config: AuditionConfig, drafts: Sequence[str], *, partly: bool = False
) -> tuple[list[TextTrace], StoredRun]:
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
    check_trusted(key, run)
    groups: dict[str, list[TextTrace]] = {}
    for trace in run.traces:
        groups.setdefault(trace.draft, []).append(trace)
    if not groups:
        raise UserError(f"{key}: no traces.parquet there; name an audition's folder")
    model = run.config.get("model", {})
    if model.get("id") != config.model.id or model.get("revision") != config.model.revision:
        raise UserError(
            f"{key}: the text of model={model.get('name')} ({model.get('id')}), not of "
            f"model={config.model.name} ({config.model.id})"
        )
    asked = prompt_sets.prompt_set_hash(prompt_sets.load(config.prompts))
    if run.manifest.get("prompts_sha256") != asked:
        raise UserError(f"{key}: other prompts than prompts.* names here; give the same ones")
    for name in ("chat_template", "enable_thinking", "answer_tokens"):
        before = (run.config.get("prompts") or {}).get(name)
        if before != getattr(config.prompts, name):
            raise UserError(f"{key}: made with prompts.{name}={before}; give the same")
    absent = [name for name in drafts if name not in groups]
    if absent and not partly:
        raise UserError(f"{key}: no traces of draft {absent[0]!r}; it has {', '.join(groups)}")
    check_drawn_alike(key, run, config.decode)
    return [trace for name in drafts for trace in groups.get(name, ())], run


def check_trusted(key: str, run: StoredRun) -> None:
    """Refuse a sweep whose speculation changed greedy texts, or may have.

    Raises:
        UserError: with how many texts.
    """
    setup = Setup(run)
    if setup.command != "sweep" or setup.replay_only or setup.synthetic:
        return
    doubt = distrust(text_checks(run))
    if doubt is not None:
        code, values = doubt
        how = "are not" if code == "greedy_texts_differ" else "may not be"
        raise UserError(
            f"{key}: {values['differing']} of {values['texts']} greedy texts {how} plain "
            "decoding's, so nothing of that pair is used; take another run"
        )


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
class _Texts:
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
    traces: Sequence[TextTrace]

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


def _stored_texts(config: AuditionConfig, drafts: Sequence[str]) -> _Texts:
    """The texts of `traces_from`, which are exactly those that this audition would ask for.

    Raises:
        UserError: as `_stored_traces`; another seed, budget, number of repetitions or temperature;
            or step times from elsewhere as well.
    """
    key = f"traces_from={config.traces_from}"
    if config.traces_from is None:
        raise UserError("latency.measure: with traces_from=RUN only; without it steps are timed")
    if config.latency.target_ms is not None or config.latency_from is not None:
        raise UserError("latency.measure: not with latency_from or latency.target_ms; give one")
    traces, run = _stored_traces(config, drafts, partly=True)
    for name in ("seed", "new_tokens", "repetitions", "temperature"):
        made, asked = run.config.get(name), getattr(config, name)
        if made != asked:
            raise UserError(f"{key}: made with {name}={made}; give the same, not {asked}")
    trials = tuple(t for t in run.trials if t.k == 0 and t.status == "ok" and t.tokens)
    answers = tuple(RunFolder(run.folder, run.manifest).answers())
    return _Texts(run, trials, answers, traces)


def _stored_timings(
    config: AuditionConfig, drafts: Sequence[str], source: StoredRun | None = None
) -> list[StepTiming]:
    """Step times of the drafts from another run; none where they are typed in or to be measured.

    Args:
        config: names the run (`latency_from`), or holds typed times, which are checked.
        drafts: whose step times, with those of the target that were timed with them.
        source: taken where `latency_from` names no run.

    Raises:
        UserError: both kinds given, none there, or a draft without step times.
    """
    if config.latency.target_ms is not None:
        if config.latency_from is not None:
            raise UserError("latency_from and latency.target_ms: give one of the two")
        for name in drafts:
            typed_times(config, name)
        return []
    if config.latency.draft_ms is not None or config.latency.verify_ms is not None:
        raise UserError("latency.target_ms: give it with latency.draft_ms and latency.verify_ms")
    key = "latency"
    if config.latency_from is not None:
        key, source = f"latency_from={config.latency_from}", load(config.latency_from)
        if not source.timings:
            raise UserError(
                f"{key}: no latency_samples.csv there; name a profile, sweep or audition"
            )
    if source is None:
        return []
    timed = {t.model: t.beside for t in source.timings if t.role == "draft"}
    absent = next((name for name in drafts if name not in timed), None)
    if absent is not None:
        known = ", ".join(sorted(timed))
        raise UserError(f"{key}: no step times of draft {absent!r}; there are {known}")
    together = {timed[name] for name in drafts}
    return [
        t
        for t in source.timings
        if (t.model in drafts if t.role == "draft" else t.beside in together)
    ]


def typed_times(config: AuditionConfig, name: str) -> StepTimes:
    """The typed step times of one draft with the target.

    Raises:
        UserError: none for this draft.
    """
    typed = config.latency
    draft_ms: Any = typed.draft_ms
    if isinstance(draft_ms, Mapping):
        draft_ms = draft_ms.get(name)
    elif name == NGRAM:
        draft_ms = LOOKUP_S * 1e3
    if draft_ms is None or isinstance(draft_ms, bool) or not isinstance(draft_ms, int | float):
        raise UserError(
            f"latency.draft_ms: no time for draft {name!r}; give a number for all, or "
            f"latency.draft_ms={{{name}:1.5}}"
        )
    verify = tuple(value / 1e3 for value in typed.verify_ms or ())
    assert typed.target_ms is not None
    return StepTimes(float(draft_ms) / 1e3, typed.target_ms / 1e3, verify)


def _check_drafts(drafts: Sequence[ModelConf]) -> None:
    names = [conf.name for conf in drafts]
    if not names:
        raise UserError("drafts=[]: name at least one, for example drafts=[tiny_good,ngram]")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"drafts: {twice!r} is listed twice; name each once")


def _create(config: AuditionConfig) -> RunFolder:
    return RunFolder.create(config.results_root, "audition", [config.model.name], asdict(config))

"""Data that a run takes from another one: texts with their scores, times, an engine's costs.

All of it is checked to be of the same model, prompts and sampling parameters, to be whole, and to
come from a run whose speculation left the greedy texts alone. No torch here.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness import prompts as prompt_sets
from harness.analysis.engine_costs import check_target, priced_by
from harness.analysis.lossless import distrust, text_checks
from harness.analysis.round_costs import LOOKUP_S
from harness.analysis.server_predictions import costs_of
from harness.analysis.setup import Setup
from harness.command_words import as_typed, command
from harness.config import AuditionConfig, DecodeConf, ModelConf, SweepConfig, is_folder
from harness.records import (
    GREEDY,
    Prompt,
    RoundTiming,
    ServingEngine,
    StepTiming,
    TextKey,
    TextTrace,
    Trial,
    UserError,
    grouped,
)
from harness.storage import RunFolder, StoredRun, load
from harness.storage.manifest import SERVER, EngineCosts, ModelEntry
from harness.theory.acceptance_rules import ACCEPTANCE_RULES
from harness.theory.roofline import is_card
from harness.theory.speedup import StepTimes

# What of decode.* decides the texts, and the values that leave them as they are
SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty", "stop_strings")
NEUTRAL = {"top_p": 1.0, "repetition_penalty": 1.0}


def check_source(key: str, run: StoredRun, decode: DecodeConf) -> None:
    """Refuse a run with other sampling parameters, or a sweep whose greedy texts are in doubt."""
    setup = Setup(run)
    if setup.command == "sweep" and not setup.replay_only and not setup.synthetic:
        doubt = distrust(text_checks(run.trials, run.checks))
        if doubt is not None:
            code, values = doubt
            how = "are not" if code == "greedy_texts_differ" else "may not be"
            raise UserError(
                f"{key}: {values['differing']} of {values['texts']} greedy texts {how} plain "
                "decoding's, so nothing of that pair is used; take another run"
            )
    _check_same(key, "decode.", run.config.get("decode"), decode, SAMPLING)


def _check_same(
    key: str, prefix: str, made: Mapping[str, Any] | None, asked: object, names: Sequence[str]
) -> None:
    """Refuse texts that were made with other values of some keys."""
    for name in names:
        both = stored, given = (made or {}).get(name), getattr(asked, name)
        one, other = (None if value == NEUTRAL.get(name) else value or None for value in both)
        if one != other:
            raise UserError(f"{key}: made with {prefix}{name}={stored}; give the same, not {given}")


# ---- texts and their scores ----------------------------------------------------------------------


def stored_traces(
    config: AuditionConfig, drafts: Sequence[str], *, partly: bool = False
) -> tuple[list[TextTrace], StoredRun]:
    """The drafts' traces in `traces_from`, checked; with `partly` a draft may have none there.

    Raises:
        UserError: a run without traces, or of another model, other prompts or sampling parameters.
    """
    key = as_typed("traces_from", config.traces_from)
    run = load(str(config.traces_from))
    check_source(key, run, config.decode)
    by_draft = grouped(run.traces, lambda trace: trace.draft)
    if not by_draft:
        raise UserError(f"{key}: no traces.parquet there; {_how_to_get(run)}")
    prompts = prompt_sets.load(config.prompts)
    _check_texts_of(key, run, config, prompts)
    if not partly:
        _check_scored(key, run, drafts, by_draft)
    wanted = {text for text in _text_keys(run, prompts) if text.temperature in config.temperature}
    traces: list[TextTrace] = []
    for name in (name for name in drafts if name in by_draft):
        if name in run.manifest.audition.dropped:
            raise UserError(
                f"{key}: draft {name!r} was dropped there and scored a part of the texts; leave it"
                " out, or audition it with until=all"
            )
        scored = [trace for trace in by_draft[name] if trace.key in wanted]
        if len(scored) < len(wanted):
            raise UserError(
                f"{key}: scores of {len(scored)} of {len(wanted)} texts by draft {name!r}; "
                f"{_how_to_get(run)}"
            )
        traces += scored
    return traces, run


def _check_texts_of(
    key: str, run: StoredRun, config: AuditionConfig, prompts: Sequence[Prompt]
) -> None:
    """Refuse texts of another model, other prompts, or none at one of the temperatures."""
    model = run.config.get("model", {})
    if model.get("id") != config.model.id or model.get("revision") != config.model.revision:
        raise UserError(
            f"{key}: the text of model={model.get('name')} ({model.get('id')}), not of "
            f"model={config.model.name} ({config.model.id})"
        )
    if run.manifest.prompts_sha256 != prompt_sets.prompt_set_hash(prompts):
        raise UserError(
            f"{key}: other prompts than these; leave prompts.* out, they come from that run "
            "(its prompt files must be as they were)"
        )
    made_with = run.config.get("prompts")
    _check_same(key, "prompts.", made_with, config.prompts, ("chat_template", "enable_thinking"))
    drawn = run.config.get("temperature") or ()
    other = next((value for value in config.temperature if value not in drawn), None)
    if other is not None:
        known = ", ".join(f"{value:g}" for value in drawn)
        raise UserError(f"{key}: no texts at temperature={other:g}; it has {known or 'none'}")


def _check_scored(
    key: str, run: StoredRun, drafts: Sequence[str], by_draft: Mapping[str, Sequence[TextTrace]]
) -> None:
    absent = next((name for name in drafts if name not in by_draft), None)
    if absent is None:
        return
    notes = run.manifest.audition
    unusable = {each.draft: each.reason for each in notes.not_eligible}
    unusable |= {each.draft: each.error for each in notes.failures if each.draft}
    if absent in unusable:
        rest = ",".join(name for name in drafts if name not in unusable)
        raise UserError(
            f"{key}: draft {absent!r} could not be used there ({unusable[absent]}); leave it out,"
            f" drafts=[{rest}]"
        )
    known = ", ".join(by_draft)
    raise UserError(f"{key}: no traces of draft {absent!r}; it has {known}; {_how_to_get(run)}")


def _text_keys(run: StoredRun, prompts: Sequence[Prompt]) -> Iterator[TextKey]:
    for temperature in map(float, run.config.get("temperature") or ()):
        for repetition in range(run.config["repetitions"] if temperature else 1):
            for prompt in prompts:
                for turn in prompt.answered:
                    name = prompt.up_to(turn, ()).id
                    yield TextKey(prompt.prompt_set, name, repetition, temperature)


def _how_to_get(run: StoredRun) -> str:
    if run.manifest.status == "complete":
        return "name the folder of an audition, or of a sweep, that has it"
    stopped = run.manifest.interrupted_by
    why = f", interrupted by {stopped}" if stopped else ""
    again = command(run.door, as_typed("resume", run.folder))
    return f"that run is unfinished{why}: {again} completes it"


@dataclass(frozen=True)
class StoredTexts:
    """Another run's texts, with the scores that its drafts gave them."""

    run: StoredRun
    trials: tuple[Trial, ...]
    answers: tuple[Trial, ...]  # to earlier turns, which the texts continue
    traces: Sequence[TextTrace]

    def copy_to(self, folder: RunFolder) -> None:
        """Put them into a run that times its own steps; what is stored there stays."""
        stored = {trial.key for trial in folder.trials.read()}
        if not stored:
            folder.write_traces(self.traces)
            folder.note(traces_from=str(self.run.folder))
        answered = {trial.key for trial in folder.answers.read()}
        for answer in self.answers:
            if answer.key not in answered:
                folder.answers.append(answer)
        for trial in self.trials:
            if trial.key not in stored:
                folder.trials.append(trial)


def stored_texts(config: AuditionConfig, drafts: Sequence[str]) -> StoredTexts:
    """The texts of `traces_from`, which are exactly those that this audition would ask for.

    Raises:
        UserError: as `stored_traces`; another seed, budget, number of repetitions or temperature.
    """
    key = as_typed("traces_from", config.traces_from)
    traces, run = stored_traces(config, drafts, partly=True)
    _check_same(key, "", run.config, config, ("seed", "new_tokens", "repetitions", "temperature"))
    wanted = set(_text_keys(run, prompt_sets.load(config.prompts)))
    texts = (t for t in run.trials if t.k == 0 and t.status == "ok" and t.tokens)
    trials = tuple(t for t in texts if t.key in wanted)  # and not those of measured pairs
    lacking = wanted - {trial.key for trial in trials}
    if lacking:
        raise UserError(
            f"{key}: {len(wanted) - len(lacking)} of {len(wanted)} texts; {_how_to_get(run)}"
        )
    answers = tuple(RunFolder(run.folder, run.manifest).answers.read())
    return StoredTexts(run, trials, answers, traces)


# ---- step and round times ------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredTimes:
    """Another run's times of some drafts and of the target next to them; else empty."""

    steps: Sequence[StepTiming] = ()
    rounds: Sequence[RoundTiming] = ()  # of the running loop
    untimed: tuple[str, ...] = ()  # drafts that lose whatever their rounds cost
    engine: EngineCosts | None = None  # decoding's on a server, in place of all of it

    def copy_to(self, folder: RunFolder) -> None:
        """Put them into a run; what is stored there stays."""
        if self.engine is not None and folder.manifest.engine_costs is None:
            folder.note(engine_costs=self.engine)
        if self.steps and not folder.timings():
            folder.write_timings(self.steps)
        notes = folder.manifest.audition
        if untimed := tuple(name for name in self.untimed if name not in notes.untimed):
            folder.note(audition=replace(notes, untimed=(*notes.untimed, *untimed)))
        stored = {*folder.rounds.read()}
        for timing in self.rounds:
            if timing not in stored:
                folder.rounds.append(timing)


def stored_times(
    config: AuditionConfig,
    drafts: Sequence[str],
    lookups: Container[str],
    source: StoredRun | None = None,
) -> StoredTimes:
    """Times of the drafts and the target from `latency_from`, or from `source`.

    None where they are typed in, which is checked, or where they are to be measured. `lookups` are
    the drafts that look their tokens up, which need no typed time.

    Raises:
        UserError: both kinds given, none there, or a draft without times.
    """
    typed = config.latency
    if typed.target_ms is not None:
        if config.latency_from is not None:
            raise UserError("latency_from and latency.target_ms: give one of the two")
        for name in drafts:
            _check_typed(config, name, typed.target_ms, lookup=name in lookups)
        return StoredTimes()
    if typed.draft_ms is not None or typed.verify_ms is not None:
        raise UserError("latency.target_ms: give it with latency.draft_ms and latency.verify_ms")
    key = "latency"
    if config.latency_from is not None:
        key, source = as_typed("latency_from", config.latency_from), load(config.latency_from)
        if source.door == SERVER:
            return StoredTimes(engine=engine_costs(config, source))
        if not source.timings:
            raise UserError(
                f"{key}: no latency_samples.csv there; name a profile, sweep, audition or server"
                " run"
            )
        if source.manifest.status == "running":  # rounds are timed to a run's end
            raise UserError(f"{key}: it may lack times; {_how_to_get(source)}")
    if source is None:
        return StoredTimes()
    timed = {t.model: t.beside for t in source.timings if t.role == "draft"}
    absent = next((name for name in drafts if name not in timed), None)
    if absent is not None:
        known = ", ".join(sorted(timed))
        raise UserError(f"{key}: no step times of draft {absent!r}; there are {known}")
    in_rounds = {timing.draft for timing in source.rounds}
    absent = next((name for name in drafts if in_rounds and name not in in_rounds), None)
    if absent is not None and source.manifest.status == "running":
        raise UserError(f"{key}: no round times of draft {absent!r}; {_how_to_get(source)}")
    interleaved = {timed[name] for name in drafts}
    return StoredTimes(
        [
            t
            for t in source.timings
            if (t.model in drafts if t.role == "draft" else t.beside in interleaved)
        ],
        [timing for timing in source.rounds if timing.draft in drafts],
        tuple(name for name in source.manifest.audition.untimed if name in drafts),
    )


def engine_costs(config: AuditionConfig | SweepConfig, source: StoredRun) -> EngineCosts:
    """Decoding costs on the engine of a server run, checked against the configuration.

    Raises:
        UserError: these K or temperatures are not known there, drafts are sampled there in
            another way than here, or it was measured on another card than `gpu`.
    """
    key = as_typed("latency_from", source.folder)
    if config.thresholds:
        raise UserError(f"p_min={config.p_min}: not with {key}, whose rounds draft K")
    if source.manifest.status == "running":
        raise UserError(f"{key}: it may lack requests; {_how_to_get(source)}")
    costs = costs_of(source, config.temperature, config.speculative_ks)
    _check_drafts_alike(key, costs.engine, config)
    card = config.gpu
    if card is not None and costs.device is not None:
        memory = source.manifest.environment.device_memory_bytes
        if not is_card(card.name, card.memory_gb, costs.device, memory):
            raise UserError(
                f"{key}: measured on {costs.device}, not on gpu={card.name}; name a run on that"
                " card, or leave gpu out"
            )
    # By what is typed, before the target is loaded. Folders are compared when their weights are
    # read: two may hold the same ones.
    conf, stored = config.model, isinstance(config, AuditionConfig) and config.traces_from
    if not stored and not any(name and is_folder(name) for name in (conf.id, costs.target.id)):
        dtype = None if conf.dtype == "auto" else conf.dtype
        check_target(costs, ModelEntry(name=conf.name, id=conf.id, dtype=dtype))
    return costs


def _check_drafts_alike(
    key: str, engine: ServingEngine, config: AuditionConfig | SweepConfig
) -> None:
    """Refuse sampling parameters that make the engine's drafts others than those scored here."""
    set_here = {
        name
        for name in ("top_k", "top_p", "min_p", "repetition_penalty")
        if getattr(config.decode, name) not in (None, NEUTRAL.get(name))
    }
    if engine.draft_by_temperature and "repetition_penalty" in set_here:
        raise UserError(f"{key}: its drafts take no decode.repetition_penalty; leave it out")
    chosen = engine.rule is None or ACCEPTANCE_RULES[engine.rule].draft_chooses
    if chosen or max(config.temperature) <= GREEDY:
        return
    if engine.draft_top_k is not None:
        raise UserError(
            f"{key}: above temperature 0 its drafts are among the {engine.draft_top_k} likeliest"
            " tokens, which is not replayed here; give temperature=[0], or a run of its default"
            " decode.rule"
        )
    if engine.draft_by_temperature and set_here:
        raise UserError(
            f"{key}: its drafts take no decode.{min(set_here)}, which is not replayed here; leave"
            " it out, or give temperature=[0]"
        )


def costs_of_sweep(config: SweepConfig) -> EngineCosts | None:
    """As `engine_costs`, of the run that a sweep names; None where its own loop is timed."""
    if config.latency_from is None:
        return None
    source = load(config.latency_from)
    if source.door != SERVER:
        raise UserError(
            f"{as_typed('latency_from', config.latency_from)}: made by {source.door}, and a sweep"
            " times its own rounds; name a run of python -m harness.server, or leave it out"
        )
    return engine_costs(config, source)


def check_target_of(costs: EngineCosts | None, conf: ModelConf, entry: ModelEntry) -> None:
    """Refuse an engine's costs, if any, with another target, or in another precision.

    The target's `entry` is what it says of itself, as far as that is known here.
    """
    if costs is not None:
        check_target(costs, ModelEntry.of({**entry.entries, "name": conf.name, "id": conf.id}))


def check_draft_of(
    costs: EngineCosts | None,
    name: str,
    kind: str,
    entry: ModelEntry | None,
    temperatures: Sequence[float],
) -> None:
    """Refuse a draft whose rounds do not follow from the costs; see `check_target_of`."""
    for temperature in temperatures if costs is not None else ():
        assert costs is not None
        priced_by(costs, name, kind, entry or ModelEntry(), temperature)


def _check_typed(config: AuditionConfig, draft: str, target_ms: float, *, lookup: bool) -> None:
    """Refuse typed step times that are none, or that lack this draft."""
    draft_ms: Any = config.latency.draft_ms
    if isinstance(draft_ms, Mapping):
        draft_ms = draft_ms.get(draft)
    elif lookup:
        draft_ms = LOOKUP_S * 1e3
    if draft_ms is None or isinstance(draft_ms, bool) or not isinstance(draft_ms, int | float):
        raise UserError(
            f"latency.draft_ms: no time for draft {draft!r}; give a number for all, or "
            f"latency.draft_ms={{{draft}:1.5}}"
        )
    verify = tuple(value / 1e3 for value in config.latency.verify_ms or ())
    StepTimes(float(draft_ms) / 1e3, target_ms / 1e3, verify).v(min(filter(None, config.k)))

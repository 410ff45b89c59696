"""Many drafts, one target: score and time what is missing, rank, store, render, show.

Traces and step times may come from another run (`harness.commands.other_runs`): they are copied
into this run's folder, so that it says everything by itself; with both from elsewhere no model is
loaded. The completions may come from a server of the target (`harness.commands.remote_texts`).
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from harness.analysis import analyse
from harness.analysis.cards import rank_cards
from harness.analysis.setup import Setup
from harness.commands.checks import Problems, Vocabularies, check_run, without_too_long
from harness.commands.draft_scoring import score_drafts
from harness.commands.dry_run import print_audition, print_served_audition
from harness.commands.other_runs import (
    StoredTexts,
    StoredTimes,
    check_draft_of,
    check_target_of,
    stored_texts,
    stored_times,
    stored_traces,
)
from harness.commands.pair import open_target
from harness.commands.progress import progress, say
from harness.commands.remote_texts import audition_texts, check_texts_from
from harness.commands.requests import with_turns
from harness.commands.run_lifecycle import (
    Outcome,
    begin,
    concluded,
    create,
    load_prompts,
    measuring,
    resumed,
    running,
)
from harness.commands.run_time import said_beforehand
from harness.commands.served_audition import measure_on_servers, pair_config
from harness.commands.server_plan import audition_time, listed, memory_line
from harness.commands.server_requests import check_turns
from harness.commands.tasks import planned_turns
from harness.config import AuditionConfig, ModelConf, check_replayed, like_target
from harness.engines.adapters import adapter_of
from harness.measurement.environment import describe_host
from harness.records import Failure, Prompt, TextTrace, UserError, where
from harness.storage import RunFolder, StoredRun, load
from harness.storage.contents import read_config
from harness.storage.manifest import AUDITION, TextsMadeWith, read_manifest
from harness.storage.resume import drafts_of

# Entries of a manifest that say of what its texts and scores are
OF_TEXTS = ("models", "prompts", "prompts_available", "prompts_log", "prompts_sha256")
OF_BEST_CARD = ("environment", *OF_TEXTS, "seed", "engine_costs")


def run(config: AuditionConfig, drafts: Sequence[ModelConf]) -> Outcome:
    """Audition `drafts` for the target, or rank the cards of earlier auditions.

    Status 1 where a draft broke down.

    Raises:
        UserError: a value, the target, a prompt or a run that cannot be used, a draft named twice,
            or no draft left to rank.
    """
    if config.combine:
        return combine(config)
    drafts = [like_target(config.model, conf) for conf in drafts]
    names = [conf.name for conf in drafts]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"drafts: {twice[0]!r} is listed twice; name each once")
    for conf in () if config.on_servers else drafts:
        check_replayed(conf)
    if not names:
        raise UserError("drafts=[]: name at least one, for example drafts=[tiny_good,ngram]")
    _check_files(config, drafts)
    prompts = load_prompts(config)
    if config.on_servers:
        return _on_servers(config, drafts, prompts)
    lookups = [conf.name for conf in drafts if conf.spec.looks_up]
    stored_elsewhere = config.traces_from is not None and not config.latency.measure
    problems, times = Problems(), None
    if not stored_elsewhere:  # else they are of that run's drafts, and checked with them
        times = problems.of(stored_times, config, names, lookups)
    if config.texts_from is not None:
        problems.of(check_texts_from, config, prompts)
    fit = check_run(config, prompts, drafts, problems)
    texts = stored_texts(config, names) if config.latency.measure else None
    elsewhere = _stored_elsewhere(config, names) if stored_elsewhere else None
    if config.dry_run:
        print_audition(config, fit, prompts)
        return Outcome(None)
    folder = _resumed(config)
    if elsewhere is not None:
        folder = _from_elsewhere(config, elsewhere, folder)
    elif config.texts_from is not None:
        folder = audition_texts(config, drafts, prompts, times or StoredTimes(), folder)
    else:
        folder = _measure_here(config, drafts, prompts, texts, times or StoredTimes(), folder)
    return concluded(folder, verbose=config.verbose)


def _check_files(config: AuditionConfig, drafts: Sequence[ModelConf]) -> None:
    """Refuse a GGUF file next to a checkpoint."""
    target = config.model
    for conf in drafts:
        looks_up = conf.spec.looks_up
        if target.is_file and not (conf.is_file and conf.kind == "model") and not looks_up:
            raise UserError(
                f"{conf.shown}: {target.where} is a GGUF file alone, and takes drafts that are"
                " files, too, and llama.cpp's look-ups; give name@FILE.gguf or ngram_simple"
            )
        if conf.is_file and not target.is_file:
            raise UserError(
                f"{conf.where}: a GGUF file, and model={target.name} is a checkpoint; give the"
                " target's as model=FILE.gguf, or the draft's checkpoint"
            )


def _on_servers(
    config: AuditionConfig, drafts: Sequence[ModelConf], prompts: Sequence[Prompt]
) -> Outcome:
    """Audition GGUF files on servers of the engine; nothing is loaded here."""
    read, problems = Vocabularies(config), Problems()
    pairs = {conf.name: pair_config(config, conf) for conf in drafts}
    first = next(iter(pairs.values()))
    check_turns(first, prompts)
    for of_pair in pairs.values():
        adapter = problems.of(adapter_of, of_pair)
        if adapter is not None:
            problems.of(adapter.check, of_pair)
    if problems.lines:
        raise UserError(*dict.fromkeys(problems.lines))
    memory = memory_line(config, drafts)
    if not config.dry_run and config.resume is None:
        time = audition_time(config, pairs, planned_turns(prompts, config))
        when = "" if time is None else f"{time.sentence()}; "
        grid = f"K = {listed(config.speculative_ks)}, p_min = {listed(config.p_min or ())}"
        say(f"plan: {len(prompts)} prompts at temperature 0, {grid}: {when}{memory}")
    prompts = without_too_long(first, prompts, read)
    fit = check_run(config, prompts, drafts, problems, read)
    if config.dry_run:
        print_served_audition(config, {conf.name: pairs[conf.name] for conf in fit}, fit, prompts)
        return Outcome(None)
    unfit = [conf.name for conf in drafts if conf not in fit]
    folder = measure_on_servers(config, fit, unfit, prompts, read, _resumed(config))
    return concluded(folder, verbose=config.verbose)


def _resumed(config: AuditionConfig) -> RunFolder | None:
    """The folder to resume; `drafts` may leave out some of its run that could not be used."""
    if config.resume is None:
        return resumed(config, AUDITION)
    stored, asked = read_config(Path(config.resume)), config.drafts or []
    notes = read_manifest(Path(config.resume)).audition
    entries = drafts_of(stored.get("drafts") or [], asked, notes)
    if entries is None:
        return resumed(config, AUDITION)
    folder = resumed(replace(config, drafts=entries), AUDITION)
    assert folder is not None
    folder.write_config({**stored, "drafts": asked})
    return folder


def _measure_here(
    config: AuditionConfig,
    drafts: Sequence[ModelConf],
    prompts: Sequence[Prompt],
    texts: StoredTexts | None,
    times: StoredTimes,
    folder: RunFolder | None,
) -> RunFolder:
    """Generate, score and time what the folder lacks."""
    target = open_target(config, prompts, drafts)
    described = target.describe()
    check_target_of(times.engine, config.model, described.models["target"])
    folder = begin(config, AUDITION, folder, described)
    said = said_beforehand(config, drafts, prompts)
    with measuring(folder, target.target_model.device):
        if texts is not None:
            texts.copy_to(folder)
        times.copy_to(folder)
        target = with_turns(folder, target, config)
        score_drafts(folder, target, drafts, config, said)
    return folder


class _Elsewhere(NamedTuple):
    """Another run's traces, with its step times or those that are named in the configuration."""

    source: StoredRun
    traces: list[TextTrace]
    times: StoredTimes


def _stored_elsewhere(config: AuditionConfig, drafts: Sequence[str]) -> _Elsewhere:
    traces, source = stored_traces(config, drafts)
    lookups = {trace.draft for trace in traces if trace.chosen}
    times = stored_times(config, drafts, lookups, source)
    setup = Setup(source)
    check_target_of(times.engine, config.model, setup.target)
    for name in drafts:
        kind = name if name in lookups else setup.kind_of(name)
        entry = setup.described_draft(name)
        check_draft_of(times.engine, name, kind, entry, config.temperature)
    return _Elsewhere(source, traces, times)


def _from_elsewhere(
    config: AuditionConfig, stored: _Elsewhere, folder: RunFolder | None
) -> RunFolder:
    source, folder = stored.source, folder or create(config, AUDITION)
    folder.write_traces(stored.traces)
    stored.times.copy_to(folder)
    folder.note(
        **{key: getattr(source.manifest, key) for key in OF_TEXTS},
        environment=describe_host(),
        traces_from=str(source.folder),
        texts_made_with=TextsMadeWith(source.config["new_tokens"], source.config["repetitions"]),
    )
    return folder


# ---- the same audition on several cards ----------------------------------------------------------


def combine(config: AuditionConfig, failures: Sequence[Failure] = ()) -> Outcome:
    """Rank the cards of the finished auditions that `config.combine` names; no model is loaded.

    The result is an audition run of the best card, with the ranking of all cards in its manifest;
    its status is 1 where a run, or a draft in one, failed.

    Args:
        config: only `combine` and `results_root` matter; all else is the runs' own.
        failures: of machines that brought nothing back.

    Raises:
        UserError: a folder that is no finished audition, or runs that are not of one audition.
    """
    if not config.combine:
        raise UserError("combine=[]: name at least one audition's folder")
    with progress("reading the auditions"):
        runs = [load(folder) for folder in config.combine]
        summaries = [analyse(run) for run in runs]
    ranked = rank_cards(runs, summaries)
    best = runs[ranked.best]
    others = [
        Failure(f"{run.folder.name}: {failure.where}", failure.error)
        for run, summary in zip(runs, summaries, strict=True)
        for failure in summary.failures
    ]
    audition = replace(best.manifest.audition, failures=(*others, *failures))
    settings = {
        "combine": list(config.combine),
        "results_root": config.results_root,
        "resume": None,
    }
    names = [best.config["model"]["name"], "cards"]
    folder = RunFolder.create(config.results_root, AUDITION, names, {**best.config, **settings})
    with running(folder):
        folder.note(
            **{key: getattr(best.manifest, key) for key in OF_BEST_CARD},
            combined=[run.folder.name for run in runs],
            cards=ranked.cards,
            audition=audition,
        )
        for timing in best.rounds:
            folder.rounds.append(timing)
        for trial in where(best.trials, status="ok"):  # the failures are in the manifest
            folder.trials.append(trial)
        if best.confidences:
            folder.add_confidences(best.confidences)
        folder.write_traces(best.traces)
        folder.write_timings(best.timings)
    return concluded(folder, verbose=config.verbose)

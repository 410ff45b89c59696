"""Many drafts, one target: measure what is missing, rank, store, render, show."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from harness import prompts as prompt_sets
from harness.analysis.judge import Bench, judge
from harness.analysis.latency import Latency
from harness.analysis.setup import is_card
from harness.analysis.told import EMBEDDED_CAVEAT, fallbacks, generation_caveat
from harness.commands.outcome import Outcome
from harness.commands.plan import print_audition_plan
from harness.commands.running import concluded, resumed_run, running
from harness.commands.sources import by_draft, latencies, stored_texts, stored_traces
from harness.config import AuditionConfig, ModelConf, like_target
from harness.measurement.environment import describe_host
from harness.records import DUMMY_CAVEAT, Failure, Summary, TextTrace, UserError
from harness.reporting.reading import dummies_of
from harness.stats.bootstrap import MIN_PROMPTS
from harness.storage import RunFolder, StoredRun, load, load_traces, timings_from

# What texts are generated with; a run on another's traces has it from there, and notes it so
BUDGET = ("new_tokens", "repetitions")
MADE_WITH = "texts_made_with"


@dataclass(frozen=True)
class Taken:
    """What is ranked: traces and step times by draft, and what went wrong on the way.

    Attributes:
        traces, latency: by draft, in the order they were named.
        failures: drafts that broke down.
        extra: what the measuring half adds to summary.json.
    """

    traces: Mapping[str, Sequence[TextTrace]]
    latency: Mapping[str, Latency]
    failures: Sequence[Failure] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


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
    if config.dry_run:
        print_audition_plan(config, drafts, prompt_sets.load(config.prompts))
        return Outcome(None)
    folder = None if config.resume is None else resumed_run(config, "audition")
    if config.traces_from is None or config.latency.measure:
        folder, taken = _measured(config, drafts, folder)
    else:
        folder, taken = _stored(config, drafts, folder)
    return concluded(folder, lambda: _finish(folder, config, taken))


def _measured(
    config: AuditionConfig, drafts: Sequence[ModelConf], resumed: RunFolder | None
) -> tuple[RunFolder, Taken]:
    """Generate, score and time what the folder lacks; torch is imported only here."""
    from harness.commands import cast, execute
    from harness.commands.stage import describe, open_stage
    from harness.commands.texts import with_turns

    names = [conf.name for conf in drafts]
    texts = stored_texts(config, names) if config.latency.measure else None
    stage = open_stage(config)
    described = describe(stage)
    if resumed is not None and "prompts_sha256" in resumed.manifest:
        execute.check_unchanged(resumed, described)
    folder = resumed or _create(config)
    with running(folder):
        if texts is not None:
            texts.copy_to(folder)
        known = folder.manifest.get("models") or {}
        described["models"] = {**known, **described["models"]}
        folder.update_manifest({**described, "seed": config.seed})
        prompts = with_turns(
            folder,
            stage.conversations,
            stage.loaded,
            stage.model,
            config,
            (stage.loaded,),
            config.batch,
        )
        stage = replace(stage, prompts=prompts)
        players = cast.audition_drafts(folder, stage, drafts, config)
        # The target again: how its texts are batched is known only now
        models = {**folder.manifest["models"], **describe(stage)["models"]}
        folder.update_manifest({"models": {**models, **players.described}})
        names = [conf.name for conf in drafts if conf.name in players.finished]
        traces = by_draft(load_traces(folder.path))
        if not names:
            reasons = [*players.not_eligible, *players.failures]
            raise UserError(
                "drafts: none could be auditioned; "
                + "; ".join(f"{entry.where}: {entry.error}" for entry in reasons)
            )
        return folder, Taken(
            traces={name: traces[name] for name in names},
            latency=latencies(config, names, folder.timings()),
            failures=players.failures,
            extra=players.extra(),
        )


def _stored(
    config: AuditionConfig, drafts: Sequence[ModelConf], resumed: RunFolder | None
) -> tuple[RunFolder, Taken]:
    """Another run's traces, with its step times or those that are named here."""
    names = [conf.name for conf in drafts]
    traces, source = stored_traces(config, names)
    latency = latencies(config, names, timings_from(source.latency_samples))
    folder = resumed or _create(config)
    made_with = {key: source.config.get(key) for key in BUDGET}
    kept = {key: source.manifest.get(key) for key in ("models", "prompts", "prompts_sha256")}
    folder.update_manifest(
        {**kept, "environment": describe_host(), "traces_from": str(source.folder)}
    )
    folder.update_manifest({MADE_WITH: made_with})
    return folder, Taken(traces, latency)


def _finish(folder: RunFolder, config: AuditionConfig, taken: Taken) -> Summary:
    bench = bench_of(folder, config, taken)
    rows, summary, extra = judge(bench, taken.failures, caveats_of(folder, config, taken))
    folder.write_results(rows)
    folder.write_summary(summary, {**extra, **taken.extra})
    return summary


def bench_of(folder: RunFolder, config: AuditionConfig, taken: Taken) -> Bench:
    """What is ranked, with what the manifest and the configuration say of models and card."""
    manifest, gpu = folder.manifest, config.gpu
    environment = manifest.get("environment", {})
    memory = environment.get("device_memory_bytes") or environment.get("memory_bytes")
    lengths = [t.prompt_tokens + len(t.tokens) for t in next(iter(taken.traces.values()))]
    return Bench(
        model=config.model.name,
        traces=taken.traces,
        latency=taken.latency,
        ks=[k for k in config.k if k > 0],
        temperatures=config.temperature,
        rule=config.decode.rule,  # type: ignore[arg-type]  # validated
        weights=config.prompts.weights,
        seed=config.seed,
        described=manifest.get("models") or {},
        context_tokens=max(lengths),
        memory_bytes=gpu.memory_gb * 1e9 if gpu else memory,
        gpu=gpu.name if gpu else environment.get("device_name"),
        price_per_hour=gpu.price_per_hour_usd if gpu and _of_card(folder, config) else None,
    )


def _of_card(folder: RunFolder, config: AuditionConfig) -> bool:
    """Whether the step times can be those of the card that `gpu` names: only then is its price one.

    Times that were typed in, or are another run's, are taken at the user's word.
    """
    if config.gpu is None or config.latency.target_ms is not None or config.latency_from:
        return config.gpu is not None
    here = folder.manifest.get("environment", {})
    name, memory = here.get("device_name"), here.get("device_memory_bytes")
    return is_card(config.gpu.name, config.gpu.memory_gb, name, memory)


def caveats_of(folder: RunFolder, config: AuditionConfig, taken: Taken) -> list[str]:
    """What a reader must know before acting on the ranking."""
    stored = load(folder.path)
    notes = [DUMMY_CAVEAT] if dummies_of(stored) else []
    if config.model.id.startswith("embedded:"):
        notes.append(EMBEDDED_CAVEAT)
    if config.latency.target_ms is not None:
        notes.append("step times were typed in: the speedups are as good as those numbers")
    elif config.gpu is not None and not _of_card(folder, config):
        device = folder.manifest.get("environment", {}).get("device_name") or "another"
        notes.append(
            f"gpu={config.gpu.name} is not the device whose steps were timed ({device}), so no "
            "cost is given: type its step times in (latency.target_ms=...) or name a run on it "
            "(latency_from=)"
        )
    if config.latency_from is not None:
        notes.append(f"step times are those of {config.latency_from}, not of this run's machine")
    prompts = len({(t.prompt_set, t.conversation) for t in next(iter(taken.traces.values()))})
    if prompts < MIN_PROMPTS:
        notes.append(f"{prompts} prompts: below {MIN_PROMPTS} there is no interval")
    if True in config.prompts.thinking_modes:
        notes.append("thinking mode is on: acceptance is that of reasoning text")
    if note := generation_caveat(stored):
        notes.append(note)
    notes += _other_budget(stored)
    timed = config.latency.target_ms is None and config.latency_from is None
    return [*notes, *fallbacks(stored)] if timed else notes


def _other_budget(stored: StoredRun) -> list[str]:
    """What the command asks for, but the texts of another run were not generated with."""
    made_with = stored.manifest.get(MADE_WITH) or {}
    apart = [key for key in made_with if made_with[key] != stored.config.get(key)]
    if not apart:
        return []
    ignored = " and ".join(f"{key}={stored.config.get(key)}" for key in apart)
    theirs = " ".join(f"{key}={made_with[key]}" for key in apart)
    return [f"{ignored} had no effect: the texts of traces_from were generated with {theirs}"]


def _check_drafts(drafts: Sequence[ModelConf]) -> None:
    names = [conf.name for conf in drafts]
    if not names:
        raise UserError("drafts=[]: name at least one, for example drafts=[tiny_good,ngram]")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"drafts: {twice!r} is listed twice; name each once")


def _create(config: AuditionConfig) -> RunFolder:
    return RunFolder.create(config.results_root, "audition", [config.model.name], asdict(config))

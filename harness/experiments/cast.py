"""The measuring half of an audition: the target's texts once, then each draft in its turn.

Everything is stored as it is made: a text is a line of trials.jsonl, a draft's scores and step
times are written when it is done. A resumed audition goes on with the first draft that lacks them.
"""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from harness import prompts as prompt_sets
from harness.config import AuditionConfig, ModelConf
from harness.decoding.candidates import NgramDrafter
from harness.experiments.pair import (
    EncodedPrompt,
    check_context,
    describe_prompts,
    longest,
    typical_context,
)
from harness.experiments.progress import progress
from harness.experiments.sources import by_draft, latencies
from harness.experiments.texts import Key, request_key, text_requests, write_texts
from harness.measurement import environment
from harness.measurement.latency import Player, time_forwards, time_lookups
from harness.measurement.scoring import ngram_trace, score_texts
from harness.measurement.traces import GeneratedText
from harness.models.cached import CachedModel
from harness.models.load import LoadedModel, load, resolve_device
from harness.models.pairing import tokenizer_difference
from harness.models.probe import cached_model
from harness.models.text import encode
from harness.records import Failure, StepTiming, TextTrace, UserError
from harness.storage import RunFolder, load_traces
from harness.theory.audition import replay_drafts
from harness.theory.evidence import Evidence
from harness.theory.predicted import evidence_of
from harness.theory.sequential import Race, batches, look, start_race

NGRAM = "ngram"
LATENCY_REPETITIONS = 40
# Draft temperatures tried beside the target's own, as multiples of it.
FACTORS = (0.6, 0.8, 1.25)


@dataclass(frozen=True)
class Stage:
    """The target with its prompts, before any draft has come on.

    Attributes:
        loaded: the target.
        model: with a cache, at its own width of logits.
        prompts: encoded.
        threads: CPU threads in force.
    """

    loaded: LoadedModel
    model: CachedModel
    prompts: tuple[EncodedPrompt, ...]
    threads: int


@dataclass
class Cast:
    """Who took part: what the finishing half needs besides what is stored.

    Attributes:
        finished: drafts that were scored and timed, now or before a resume.
        not_eligible: drafts that may not play with this target, and why.
        failures: drafts that broke down.
        described: the manifest's entry of each draft that was loaded.
        seconds: what generating and scoring took.
        race: where a sequential audition ended.
    """

    finished: list[str] = field(default_factory=list)
    not_eligible: list[Failure] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    described: dict[str, dict[str, object]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    race: Race | None = None

    @property
    def ranked(self) -> list[str]:
        """The drafts to rank: all of them, or those that the race did not stop.

        Where it stopped every one, the ones that it took longest over.
        """
        if self.race is None:
            return self.finished
        left = [name for name in self.race.running if name is not None]
        if left:
            return left
        most = max(self.race.scored.values())
        return [name for name, count in self.race.scored.items() if count == most]

    def count(self, what: str, seconds: float) -> None:
        """Add to what generating or scoring took."""
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds

    def extra(self, prompts: int) -> dict[str, Any]:
        """What goes into summary.json beside the ranking."""
        return {
            "not_eligible": [
                {"draft": entry.where, "reason": entry.error} for entry in self.not_eligible
            ],
            "costs": dict(self.seconds),
            "sequential": _said(self.race, prompts) if self.race else None,
        }


def _said(race: Race, prompts: int) -> dict[str, Any]:
    """What the race saved, and whom it stopped."""
    savings = race.savings(prompts)
    return {
        "scorings_done": savings.done,
        "scorings_all": savings.full,
        "dropped": [
            {
                "draft": entry.draft,
                "after_prompts": entry.prompts,
                "reason": (
                    f"{entry.leader or 'plain decoding'}"
                    f"{f' at K={entry.leader_k}' if entry.leader else ''} is "
                    f"{entry.behind:.2f}x as fast, at least {entry.behind_at_least:.2f}x"
                ),
            }
            for entry in race.stopped
        ],
    }


def open_stage(config: AuditionConfig) -> Stage:
    """Load the target and encode the prompts.

    Raises:
        UserError: the target cannot be loaded or rewound, or a prompt does not fit its context.
    """
    prompts = prompt_sets.load(config.prompts)
    target = load(config.model, "model", resolve_device(config.device.name))
    model = cached_model(target.network, target.vocab_size, f"model={target.name}")
    encoded = tuple(
        EncodedPrompt(prompt, encode(target.tokenizer, prompt, config.prompts))
        for prompt in prompts
    )
    check_context(encoded, config.new_tokens, (target,))
    threads = environment.settle_threads(config.threads, (model,), longest(encoded))
    return Stage(target, model, encoded, threads)


def audition_drafts(
    folder: RunFolder, stage: Stage, drafts: Sequence[ModelConf], config: AuditionConfig
) -> Cast:
    """Generate the texts, then score and time every draft; one that fails stops no other."""
    cast = Cast()
    texts = _write(folder, stage, stage.prompts, config, cast)
    for conf in drafts:
        _take(folder, stage, texts, conf, config, cast)
    return cast


def race_drafts(
    folder: RunFolder, stage: Stage, drafts: Sequence[ModelConf], config: AuditionConfig
) -> Cast:
    """The same in batches of prompts, without the drafts that are dominated already.

    Every draft still in the race is loaded again for every batch: what this saves is scoring and
    the target's text, so it pays where prompts are many and texts are long.
    """
    cast = Cast()
    groups = batches([entry.prompt.prompt_set for entry in stage.prompts], seed=config.seed)
    race: Race | None = None
    for group in groups:
        texts = _write(folder, stage, [stage.prompts[index] for index in group], config, cast)
        for conf in drafts:
            if race is None or conf.name in race.to_score:
                _take(folder, stage, texts, conf, config, cast)
        if not cast.finished:
            return cast
        race = race or start_race(cast.finished, len(groups))
        race = look(race, _evidence(folder, race.to_score, config), config.prompts.weights)
        if not race.to_score:
            break
    cast.race = race
    return cast


def _evidence(folder: RunFolder, names: Sequence[str], config: AuditionConfig) -> Evidence:
    """What the race is judged by: the first temperature, the verdict's rule, all prompts so far."""
    groups = by_draft(load_traces(folder.path))
    traces = {name: groups[name] for name in names}
    latency = latencies(config, names, folder.timings())
    rule = config.decode.rule
    ks = [k for k in config.k if k > 0]
    replays = replay_drafts(traces, rule, ks, config.temperature[0])  # type: ignore[arg-type]
    return evidence_of(replays, latency)


def _write(
    folder: RunFolder,
    stage: Stage,
    prompts: Sequence[EncodedPrompt],
    config: AuditionConfig,
    cast: Cast,
) -> list[GeneratedText]:
    begin = time.perf_counter()
    requests = text_requests(prompts, config, stage.loaded.eos)
    texts = write_texts(folder, requests, stage.model, stage.loaded.name, config.batch)
    cast.count("generation_s", time.perf_counter() - begin)
    return texts


def _take(
    folder: RunFolder,
    stage: Stage,
    texts: Sequence[GeneratedText],
    conf: ModelConf,
    config: AuditionConfig,
    cast: Cast,
) -> None:
    """One draft's turn: what it gave is stored before the next one is loaded."""
    traces, timings = load_traces(folder.path), folder.timings()
    done = {_trace_key(trace) for trace in traces if trace.draft == conf.name}
    waiting = [text for text in texts if request_key(text.request) not in done]
    if waiting:
        timed = any(t.role == "draft" and t.model == conf.name for t in timings)
        try:
            scored, own = _one_draft(stage, waiting, conf, config, cast, timed)
        except NotEligible as reason:
            cast.not_eligible.append(Failure(conf.name, str(reason)))
            return
        except UserError as error:
            cast.failures.append(Failure(f"draft {conf.name}", str(error)))
            return
        folder.write_timings([*timings, *own])
        folder.write_traces([*traces, *scored])
    if conf.name not in cast.finished:
        cast.finished.append(conf.name)


def _trace_key(trace: TextTrace) -> Key:
    return (trace.prompt_set, trace.prompt, trace.repetition, trace.temperature)


def describe(stage: Stage) -> dict[str, Any]:
    """The manifest's entries about the target, the prompts and the machine."""
    return {
        "environment": environment.describe(stage.model.device),
        "models": {"target": {**stage.loaded.describe(), "rewinding": stage.model.rewinding}},
        **describe_prompts(stage.prompts),
    }


class NotEligible(Exception):
    """A draft that may not play with this target; the text says why."""


def _one_draft(
    stage: Stage,
    texts: Sequence[GeneratedText],
    conf: ModelConf,
    config: AuditionConfig,
    cast: Cast,
    timed: bool,
) -> tuple[list[TextTrace], list[StepTiming]]:
    """Traces of one draft, and its step times unless `timed`; it is freed before this returns."""
    begin = time.perf_counter()
    if conf.id == NGRAM:
        scored = [
            ngram_trace(text, num_draft_tokens=max(config.k), draft_name=conf.name)
            for text in texts
        ]
        cast.count("scoring_s", time.perf_counter() - begin)
        return scored, [] if timed else _time_ngram(stage, conf.name, config)
    draft = load(conf, f"draft {conf.name}", stage.model.device)
    try:
        cast.described[conf.name] = draft.describe()
        difference = tokenizer_difference(stage.loaded, draft)
        if difference:
            raise NotEligible(f"another tokenizer than the target's: {difference}")
        check_context(stage.prompts, config.new_tokens, (draft,))
        model = cached_model(draft.network, draft.vocab_size, f"draft={conf.name}")
        begin = time.perf_counter()
        scored = _score(stage, texts, model, conf.name, config)
        cast.count("scoring_s", time.perf_counter() - begin)
        return scored, [] if timed else _time(stage, conf.name, model, config)
    finally:
        del draft
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _score(
    stage: Stage,
    texts: Sequence[GeneratedText],
    model: CachedModel,
    name: str,
    config: AuditionConfig,
) -> list[TextTrace]:
    traces: list[TextTrace] = []
    with progress(f"{name} scores", len(texts)) as tick:
        for temperature in config.temperature:
            traces += score_texts(
                [text for text in texts if text.request.warping.temperature == temperature],
                stage.model,
                model,
                draft_name=name,
                target_name=f"model={stage.loaded.name}",
                draft_temperatures=draft_temperatures(config, temperature),
                batch=config.batch,
                tick=tick,
            )
    return traces


def draft_temperatures(config: AuditionConfig, temperature: float) -> list[float] | None:
    """The draft temperatures tried for one target temperature, its own first; None for greedy."""
    if temperature == 0:
        return None
    others = config.draft_temperature or [factor * temperature for factor in FACTORS]
    return [temperature, *(value for value in others if value != temperature)]


def _time(stage: Stage, name: str, model: CachedModel, config: AuditionConfig) -> list[StepTiming]:
    """Steps of the draft and of the target, interleaved."""
    players = (
        Player("target", stage.loaded.name, stage.model),
        Player("draft", name, model),
    )
    with progress(f"timing {name}", LATENCY_REPETITIONS) as tick:
        return time_forwards(
            players,
            max(config.k),
            context=typical_context(stage.prompts, config.new_tokens),
            repetitions=LATENCY_REPETITIONS,
            beside=name,
            tick=tick,
        )


def _time_ngram(stage: Stage, name: str, config: AuditionConfig) -> list[StepTiming]:
    """One look-up of the n-gram drafter stands where other drafts have a step."""
    context = typical_context(stage.prompts, config.new_tokens)
    target = time_forwards(
        (Player("target", stage.loaded.name, stage.model),),
        max(config.k),
        context=context,
        repetitions=LATENCY_REPETITIONS,
        beside=name,
    )
    drafter = NgramDrafter(stage.loaded.eos)
    return [*target, time_lookups(drafter, name, max(config.k), context, LATENCY_REPETITIONS)]

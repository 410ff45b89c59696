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
from harness.decoding.sampling import Warping
from harness.experiments.pair import (
    EncodedPrompt,
    check_context,
    describe_prompts,
    longest,
    typical_context,
)
from harness.experiments.progress import progress
from harness.measurement import environment
from harness.measurement.latency import Player, time_forwards, time_lookups
from harness.measurement.scoring import ngram_trace, score_texts
from harness.measurement.traces import GeneratedText, TextRequest, generate_texts
from harness.models.cached import CachedModel
from harness.models.load import LoadedModel, load, resolve_device
from harness.models.pairing import tokenizer_difference
from harness.models.probe import cached_model
from harness.models.text import encode
from harness.records import Failure, StepTiming, TextTrace, Trial, UserError
from harness.storage import RunFolder, load_traces

NGRAM = "ngram"
LATENCY_REPETITIONS = 20
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
    """

    finished: list[str] = field(default_factory=list)
    not_eligible: list[Failure] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    described: dict[str, dict[str, object]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add_scoring(self, seconds: float) -> None:
        """Count what scoring one draft took."""
        self.seconds["scoring_s"] = self.seconds.get("scoring_s", 0.0) + seconds

    def extra(self) -> dict[str, Any]:
        """What goes into summary.json beside the ranking."""
        return {
            "not_eligible": [
                {"draft": entry.where, "reason": entry.error} for entry in self.not_eligible
            ],
            "costs": dict(self.seconds),
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


def write_texts(folder: RunFolder, stage: Stage, config: AuditionConfig) -> list[GeneratedText]:
    """The target's texts, generated where the folder lacks them, in the order of the plan."""
    requests = _text_requests(stage, config)
    stored = {_text_key(trial): trial for trial in folder.trials()}
    waiting = [entry for entry in requests if _request_key(entry) not in stored]
    fresh: dict[tuple[str, str, int, float], GeneratedText] = {}
    with progress("the target writes", len(waiting)) as tick:
        texts = generate_texts(
            stage.model, waiting, name=f"model={stage.loaded.name}", batch=config.batch, tick=tick
        )
    for text in texts:
        fresh[_request_key(text.request)] = text
        folder.append_trial(_trial(text, stage.loaded.name))
    return [
        fresh.get(_request_key(entry)) or _from_trial(entry, stored[_request_key(entry)])
        for entry in requests
    ]


def audition_drafts(
    folder: RunFolder, stage: Stage, drafts: Sequence[ModelConf], config: AuditionConfig
) -> Cast:
    """Generate the texts, then score and time every draft; one that fails stops no other."""
    cast = Cast()
    begin = time.perf_counter()
    texts = write_texts(folder, stage, config)
    cast.seconds["generation_s"] = time.perf_counter() - begin
    for conf in drafts:
        _take(folder, stage, texts, conf, config, cast)
    return cast


def _take(
    folder: RunFolder,
    stage: Stage,
    texts: Sequence[GeneratedText],
    conf: ModelConf,
    config: AuditionConfig,
    cast: Cast,
) -> None:
    """One draft's turn: what it gave is stored before the next one is loaded."""
    traces = load_traces(folder.path)
    if any(trace.draft == conf.name for trace in traces):
        cast.finished.append(conf.name)
        return
    try:
        scored, timed = _one_draft(stage, texts, conf, config, cast)
    except NotEligible as reason:
        cast.not_eligible.append(Failure(conf.name, str(reason)))
        return
    except UserError as error:
        cast.failures.append(Failure(f"draft {conf.name}", str(error)))
        return
    folder.write_timings([*folder.timings(), *timed])
    folder.write_traces([*traces, *scored])
    cast.finished.append(conf.name)


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
) -> tuple[list[TextTrace], list[StepTiming]]:
    """Traces and step times of one draft; it is freed before this returns."""
    begin = time.perf_counter()
    if conf.id == NGRAM:
        scored = [
            ngram_trace(text, num_draft_tokens=max(config.k), draft_name=conf.name)
            for text in texts
        ]
        cast.add_scoring(time.perf_counter() - begin)
        return scored, _time_ngram(stage, conf.name, config)
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
        cast.add_scoring(time.perf_counter() - begin)
        return scored, _time(stage, conf.name, model, config)
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


def _text_requests(stage: Stage, config: AuditionConfig) -> list[TextRequest]:
    return [
        TextRequest(
            prompt_set=entry.prompt.prompt_set,
            prompt=entry.prompt.id,
            category=entry.prompt.category,
            tokens=entry.tokens,
            repetition=repetition,
            warping=Warping(float(temperature), config.decode.top_k, config.decode.top_p),
            budget=config.new_tokens,
            seed=config.seed,
            eos=stage.loaded.eos,
        )
        for temperature in config.temperature
        # Greedy texts are all alike: once is enough
        for repetition in range(config.repetitions if temperature else 1)
        for entry in stage.prompts
    ]


def _request_key(request: TextRequest) -> tuple[str, str, int, float]:
    return (request.prompt_set, request.prompt, request.repetition, request.warping.temperature)


def _text_key(trial: Trial) -> tuple[str, str, int, float]:
    return (trial.prompt_set, trial.prompt, trial.repetition, trial.temperature)


def _trial(text: GeneratedText, model: str) -> Trial:
    """A text as a line of trials.jsonl; made in a batch, so without times of its own."""
    request = text.request
    return Trial(
        cell="/".join(str(part) for part in _request_key(request)),
        prompt_set=request.prompt_set,
        prompt=request.prompt,
        repetition=request.repetition,
        k=0,
        temperature=request.warping.temperature,
        rule=None,
        status="ok",
        model=model,
        category=request.category,
        prompt_tokens=len(request.tokens),
        new_tokens=len(text.tokens),
        stop_reason=text.stop_reason,
        tokens=text.tokens,
    )


def _from_trial(request: TextRequest, trial: Trial) -> GeneratedText:
    return GeneratedText(
        request=request,
        tokens=trial.tokens or (),
        stop_reason=trial.stop_reason or "budget",
        batch_s=0.0,
        batch_texts=0,
    )

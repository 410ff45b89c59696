"""One draft's turn on the target's stage: load, check, score, time, free."""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from harness import prompts as prompt_sets
from harness.commands.pair import (
    EncodedPrompt,
    check_context,
    check_memory,
    describe_prompts,
    encode_first,
    encode_whole,
    longest,
    longest_generation,
    typical_context,
)
from harness.commands.progress import opening, progress
from harness.config import AuditionConfig, ModelConf
from harness.decoding.ngram import NgramDrafter
from harness.measurement import environment
from harness.measurement.draft_scores import ngram_trace, score_texts
from harness.measurement.step_times import (
    REPETITIONS,
    TimedModel,
    time_forwards,
    time_lookups,
)
from harness.measurement.target_texts import GeneratedText
from harness.models.cached import CachedModel
from harness.models.device import resolve_device
from harness.models.load import LoadedModel, load
from harness.models.probe import cached_model, check_length
from harness.models.tokenizer import tokenizer_difference
from harness.records import NGRAM, Prompt, StepTiming, TextTrace


class NotEligible(Exception):
    """A draft that may not play with this target; the text says why."""


@dataclass(frozen=True)
class Turn:
    """What one draft's turn gave.

    Attributes:
        traces, timings: of this draft; no timings where it had been timed before.
        scoring_s: what scoring took.
        described: the manifest's entry; None for a drafter without a model.
    """

    traces: list[TextTrace]
    timings: list[StepTiming]
    scoring_s: float
    described: dict[str, Any] | None = None


@dataclass(frozen=True)
class Stage:
    """The target with its prompts, before any draft has come on.

    Attributes:
        loaded: the target.
        model: with a cache, at its own width of logits.
        conversations: what is generated from.
        prompts: their turns, encoded, as in a `Pair`.
        threads: CPU threads in force.
    """

    loaded: LoadedModel
    model: CachedModel
    conversations: tuple[Prompt, ...]
    prompts: tuple[EncodedPrompt, ...]
    threads: int


def open_stage(config: AuditionConfig) -> Stage:
    """Load the target and encode the prompts.

    Raises:
        UserError: the target cannot be loaded or rewound, or a prompt does not fit its context.
    """
    prompts = prompt_sets.load(config.prompts)
    device = resolve_device(config.device.name)
    check_memory({"model": config.model}, prompts, config, device)
    target = load(config.model, "model", device)
    with opening(config.backend, device.type, f"model {target.name}"):
        name = f"model={target.name}"
        model = cached_model(target.network, target.vocab_size, name, config.backend)
    conversations = encode_whole(target.tokenizer, prompts, config)
    check_context(conversations, config.new_tokens, max(config.k), (target,))
    longest_text = longest_generation(conversations, config.new_tokens, max(config.k))
    model.reserve(longest_text)
    check_length(model, longest_text, f"model={target.name}")
    first = encode_first(target.tokenizer, prompts, config)
    threads = environment.settle_threads(config.threads, (model,), longest(first))
    return Stage(target, model, prompts, first, threads)


def describe(stage: Stage) -> dict[str, Any]:
    """The manifest's entries about the target, the prompts and the machine."""
    return {
        "environment": environment.describe(stage.model.device),
        "models": {"target": {**stage.loaded.describe(), **stage.model.describe()}},
        **describe_prompts(stage.conversations),
    }


def take_turn(
    stage: Stage,
    texts: Sequence[GeneratedText],
    conf: ModelConf,
    config: AuditionConfig,
    *,
    timed: bool,
) -> Turn:
    """One draft: its traces, and its step times unless `timed`; it is freed before this returns.

    Raises:
        NotEligible: another tokenizer than the target's.
        UserError: it cannot be loaded or rewound, runs out of memory, or its logits are broken.
    """
    if conf.id == NGRAM:
        begin = time.perf_counter()
        reach = max(config.k)
        traces = [ngram_trace(text, num_draft_tokens=reach, draft_name=conf.name) for text in texts]
        seconds = time.perf_counter() - begin
        return Turn(traces, [] if timed else _time_ngram(stage, conf.name, config), seconds)
    draft = load(conf, f"draft {conf.name}", stage.model.device)
    try:
        return _play(stage, texts, draft, config, timed)
    finally:
        del draft
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _play(
    stage: Stage,
    texts: Sequence[GeneratedText],
    draft: LoadedModel,
    config: AuditionConfig,
    timed: bool,
) -> Turn:
    difference = tokenizer_difference(stage.loaded.tokenizer, draft.tokenizer)
    if difference:
        raise NotEligible(f"another tokenizer than the target's: {difference}")
    check_context(stage.prompts, config.new_tokens, max(config.k), (draft,))
    with opening(config.backend, stage.model.device.type, f"draft {draft.name}"):
        name = f"draft={draft.name}"
        model = cached_model(draft.network, draft.vocab_size, name, config.backend)
    longest_text = longest_generation(stage.prompts, config.new_tokens, max(config.k))
    model.reserve(longest_text)
    check_length(model, longest_text, f"draft={draft.name}")
    begin = time.perf_counter()
    traces = _score(stage, texts, model, draft.name, config)
    seconds = time.perf_counter() - begin
    timings = [] if timed else _time(stage, draft.name, model, config)
    return Turn(traces, timings, seconds, {**draft.describe(), **model.describe()})


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
                [text for text in texts if text.request.sampling.temperature == temperature],
                stage.model,
                model,
                draft_name=name,
                target_name=f"model={stage.loaded.name}",
                batch=config.batch,
                tick=tick,
            )
    return traces


def _time(stage: Stage, name: str, model: CachedModel, config: AuditionConfig) -> list[StepTiming]:
    """Steps of the draft and of the target, interleaved."""
    players = (
        TimedModel("target", stage.loaded.name, stage.model),
        TimedModel("draft", name, model),
    )
    with progress(f"timing {name}", REPETITIONS) as tick:
        return time_forwards(
            players,
            max(config.k),
            context=typical_context(stage.prompts, config.new_tokens),
            beside=name,
            tick=tick,
        )


def _time_ngram(stage: Stage, name: str, config: AuditionConfig) -> list[StepTiming]:
    """One look-up of the n-gram drafter stands where other drafts have a step."""
    context = typical_context(stage.prompts, config.new_tokens)
    target = time_forwards(
        (TimedModel("target", stage.loaded.name, stage.model),),
        max(config.k),
        context=context,
        beside=name,
    )
    drafter = NgramDrafter(stage.loaded.eos)
    return [*target, time_lookups(drafter, name, max(config.k), context)]

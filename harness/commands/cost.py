"""The modelled cost of a run, card by card: what `dry_run=true` prints under the plan."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness.models
from harness import prompts as prompt_sets
from harness.config import CONF_DIR, AuditionConfig, GpuConf, ModelConf, PairConfig, ProfileConfig
from harness.models.architecture import shape_of
from harness.models.tokenizer import BYTES_PER_TOKEN
from harness.records import NGRAM, Prompt, UserError
from harness.reporting.cost import Costs
from harness.theory.architecture import architecture_of
from harness.theory.cost import (
    Estimate,
    Forwards,
    ModelSize,
    estimate,
    pair_forwards,
    text_forwards,
    timing_forwards,
)
from harness.theory.roofline import Card

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
REPLAY_BATCH = 32


def pair_costs(
    config: PairConfig, prompts: Sequence[Prompt], temperatures: Sequence[float]
) -> Costs:
    """What a profile, or a sweep, would take and cost."""
    ks = [0, *(k for k in config.k if k > 0)]
    generations = turns(prompts) * len(temperatures) * config.repetitions
    if isinstance(config, ProfileConfig):
        tokens = generations * config.new_tokens
        work = [Forwards("target", tokens), Forwards("draft", tokens)]
        work += timing_forwards(max(ks), "draft")
    elif getattr(config, "mode", "measure") == "replay":
        work = text_forwards(generations, config.new_tokens, REPLAY_BATCH)
        work += timing_forwards(max(ks), "draft")
    else:
        work = pair_forwards(ks, generations, config.new_tokens)
    work = [*work, *_answer_forwards(config, prompts, REPLAY_BATCH)]
    models = {"target": config.model, "draft": config.draft}
    return _costs(work, models, getattr(config, "gpu", None), prompts, config)


def audition_costs(
    config: AuditionConfig, drafts: Sequence[ModelConf], prompts: Sequence[Prompt], texts: int
) -> Costs:
    """What an audition would take and cost; scoring is one prefill a text, and left out."""
    work = text_forwards(texts, config.new_tokens, config.batch)
    work += _answer_forwards(config, prompts, config.batch)
    for conf in drafts:
        work += timing_forwards(max(config.k), conf.name)
    models = {"target": config.model, **{c.name: c for c in drafts if c.id != NGRAM}}
    return _costs(work, models, config.gpu, prompts, config)


def turns(prompts: Sequence[Prompt]) -> int:
    """How many turns the conversations have together; each is a generation."""
    return sum(len(prompt.turns) for prompt in prompts)


def answers(prompts: Sequence[Prompt]) -> int:
    """How many answers to earlier turns the target has to give beforehand."""
    return sum(len(prompt_sets.missing_answers(prompt)) for prompt in prompts)


def _answer_forwards(
    config: PairConfig | AuditionConfig, prompts: Sequence[Prompt], batch: int
) -> list[Forwards]:
    budget = prompt_sets.answer_tokens(config)
    waiting = answers(prompts)
    return list(text_forwards(waiting, budget, batch)) if waiting else []


def _context(prompts: Sequence[Prompt], config: PairConfig | AuditionConfig) -> int:
    """Tokens in the cache of a typical step: the mean over all turns, half of the text written."""
    budget = prompt_sets.answer_tokens(config)
    total = 0
    for prompt in prompts:
        missing = prompt_sets.missing_answers(prompt)
        given = [text or "" for text in prompt.answers]
        for turn in range(1, len(prompt.turns) + 1):
            text = prompt_sets.given_text(prompt.up_to(turn, given))
            before = sum(number < turn for number in missing)
            total += len(text.encode()) // BYTES_PER_TOKEN + before * budget
    return total // turns(prompts) + config.new_tokens // 2


def _costs(
    work: Sequence[Forwards],
    models: Mapping[str, ModelConf],
    gpu: GpuConf | None,
    prompts: Sequence[Prompt],
    config: PairConfig | AuditionConfig,
) -> Costs:
    sizes = {name: sizes_of(conf) for name, conf in models.items()}
    unknown = [models[name].name for name, size in sizes.items() if size is None]
    if unknown:
        return Costs((), tuple(unknown))
    known = {name: size for name, size in sizes.items() if size is not None}
    context = _context(prompts, config)
    cards = [gpu] if gpu is not None else all_cards()
    found: list[Estimate] = [estimate(work, known, card_of(card), context) for card in cards]
    return Costs(tuple(sorted(found, key=lambda entry: entry.high_usd)), ())


def all_cards() -> list[GpuConf]:
    """Every card of conf/gpu."""
    from omegaconf import OmegaConf

    files = sorted((CONF_DIR / "gpu").glob("*.yaml"))
    merged = (OmegaConf.merge(OmegaConf.structured(GpuConf), OmegaConf.load(f)) for f in files)
    return [card for entry in merged if isinstance(card := OmegaConf.to_object(entry), GpuConf)]


def card_of(card: GpuConf) -> Card:
    """A card's configuration as the theory takes it."""
    return Card(
        card.name,
        card.bandwidth_gb_s,
        card.bf16_tflops,
        card.memory_gb,
        card.price_per_hour_usd,
    )


def sizes_of(conf: ModelConf) -> ModelSize | None:
    """A model's sizes, from its configuration or the config.json beside its weights; else None."""
    if isinstance(conf.architecture, dict):
        return ModelSize(architecture_of(conf.architecture), BYTES.get(conf.dtype, 2.0))
    stored = _stored_config(conf)
    if stored is None:
        return None
    text = SimpleNamespace(**stored)
    text.get_text_config = lambda: text
    try:
        shape = shape_of(text)
    except (UserError, TypeError, KeyError, AttributeError):
        return None
    dtype = stored.get("dtype") or stored.get("torch_dtype") if conf.dtype == "auto" else conf.dtype
    return None if shape is None else ModelSize(shape, BYTES.get(str(dtype), 2.0))


def _stored_config(conf: ModelConf) -> dict[str, Any] | None:
    kind, _, name = conf.id.partition(":")
    embedded = Path(str(harness.models.__file__)).parent / "embedded"
    folder = embedded / name if kind == "embedded" else Path(conf.id)
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None

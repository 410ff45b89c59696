"""Why a head accepts less than its trainer logged: it is scored again without one cause at a time.

On a few of the run's greedy texts it is scored as the run had it, then with one thing changed:

    layers      it reads other layers of the target, all one or two higher or lower
    embedding   it takes the target's embedding in place of its own
    norm        the residual of its layer is taken before its norm in place of after, or the reverse
    rotary      the frequencies of its positions have the precision of bfloat16, or of float32 where
                they have that already
    template    the prompts have their chat template where the run left it out, or the reverse

A change of the head is judged on the same tokens: by prompt, how much it raises the probability
that the head gives them. That tells a shift by one layer, which costs a point of accuracy, as other
texts than the trainer's may; a head that is as it was trained is worse after every change. Another
template makes other texts, so it must close CLOSES of the gap to what was logged, and is tried only
where that gap is larger than other texts explain.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from harness import prompts as prompt_sets
from harness.analysis.head_training import LACKS, AccuracyGap, Cause
from harness.analysis.losses import KnownTexts
from harness.commands.drafted import evenly_spaced
from harness.commands.losses import conf_of, readable_turns
from harness.config import DraftConf, ModelConf, PromptsConf
from harness.decoding.sampling import SamplingParameters
from harness.measurement.generations import Request
from harness.measurement.head_scores import score_with_head
from harness.measurement.target_texts import GeneratedText, generate_texts
from harness.models.cached import CachedModel
from harness.models.device import resolve_device
from harness.models.load import LoadedModel, load
from harness.models.tokenizer import encode
from harness.records import GREEDY, Prompt, Trial, UserError
from harness.serving.drafts import DRAFTS
from harness.stats.jackknife import Estimate, enough_prompts, holm, workload_ratio
from harness.storage import StoredRun
from harness.storage.manifest import ModelEntry

TEXTS, TOKENS = 32, 64
SHIFTS = (-1, 1, -2, 2)
CLOSES = 0.5
# Chance that any change of a head that is as it was trained is named
ERROR = 0.01


@dataclass(frozen=True)
class Tried:
    """A head with one thing changed.

    Attributes:
        accuracy: of its first draft token, over the texts.
        gain: in the probability of a token, over the head as it is; over prompts.
    """

    cause: Cause
    accuracy: float
    gain: Estimate


def with_cause(stored: StoredRun, known: KnownTexts, gap: AccuracyGap) -> AccuracyGap:
    """The gap with what the head reads differently, where a change of that makes it better.

    Loads the target and the head; where that cannot be done, the gap says why.
    """
    described = (entry for entry in stored.manifest.models.values() if entry.name == gap.draft)
    entry = next(described, ModelEntry())
    if entry.id is None:
        return replace(gap, unchecked=f"the run does not say where {gap.draft} is")
    conf = DraftConf(name=gap.draft, kind=entry.kind or "eagle3", id=entry.id)
    try:
        of_target = conf_of(ModelConf, stored.config.get("model") or {})
        target = load(of_target, resolve_device("auto"))
        head = DRAFTS[conf.kind].load(conf, target)
    except UserError as error:
        return replace(gap, unchecked=str(error))
    model = CachedModel(target.network, target.vocab_size)
    texts = _texts(stored, known, target)
    if not enough_prompts([text.request.prompt_set for text in texts]):
        return replace(gap, unchecked="the run has too few greedy texts whose prompts are known")
    now, tried = changed_heads(head.network, target, model, texts)
    found: dict[Cause, float] = {}
    for each in named(tried):
        found[each.cause] = max(each.accuracy, found.get(each.cause, 0.0))
    lacks = gap.rows[0].logged - now
    if lacks > LACKS and (others := _other_template(stored, target, model)) is not None:
        accuracy = _accuracy(_scored(head.network, model, others))
        if accuracy - now >= CLOSES * lacks:
            found["template"] = accuracy
    if not found:
        return gap
    cause = max(found, key=lambda each: found[each])
    return replace(gap, cause=cause, now=now, fixed=found[cause])


def changed_heads(
    network: Any, target: LoadedModel, model: CachedModel, texts: Sequence[GeneratedText]
) -> tuple[float, list[Tried]]:
    """The accuracy of a head's first draft token, and the head with each thing changed."""
    before = _scored(network, model, texts)
    tried: list[Tried] = []
    for cause, change in _changes(network, target, model):
        undo = change()
        try:
            after = _scored(network, model, texts)
        finally:
            undo()
        gains = [b.probabilities - a.probabilities for a, b in zip(before, after, strict=True)]
        gain = workload_ratio(
            np.array([each.sum() for each in gains]),
            np.array([float(len(each)) for each in gains]),
            tuple(text.request.prompt_set for text in texts),
        )
        tried.append(Tried(cause, _accuracy(after), gain))
    return _accuracy(before), tried


def named(tried: Sequence[Tried]) -> list[Tried]:
    """Those changes that make the head better beyond noise."""
    p_values = holm([each.gain.p_value for each in tried])
    return [
        each
        for each, p_value in zip(tried, p_values, strict=True)
        if each.gain.value > 0.0 and p_value is not None and p_value < ERROR
    ]


@dataclass(frozen=True, eq=False)
class _Drafted:
    """Of a text's tokens, what the head gives them as the first draft of a round."""

    probabilities: Any
    right: Any


def _scored(network: Any, model: CachedModel, texts: Sequence[GeneratedText]) -> list[_Drafted]:
    """The texts as a head sees them, by probabilities although they are greedy."""
    model.keep_states(network.layers)
    drawn = SamplingParameters(1.0)
    traces = score_with_head(
        [replace(text, request=replace(text.request, sampling=drawn)) for text in texts],
        model,
        network.with_cache(model.vocab_size),
        num_draft_tokens=1,
        draft_name="head",
    )
    return [
        _Drafted(np.nan_to_num(np.exp(trace.draft_logprob[:, 0])), trace.draft_is_argmax[:, 0])
        for trace in traces
    ]


def _accuracy(scored: Sequence[_Drafted]) -> float:
    return float(np.concatenate([each.right for each in scored]).mean())


def _texts(stored: StoredRun, known: KnownTexts, target: LoadedModel) -> list[GeneratedText]:
    plain = [
        trial
        for trial in stored.trials
        if trial.k == 0 and trial.temperature == GREEDY and trial.status == "ok" and trial.tokens
    ]
    named = ((trial, known.prompts.get((trial.prompt_set, trial.prompt))) for trial in plain)
    return [
        GeneratedText(
            _request(trial, ids, target, trial.prompt),
            (trial.tokens or ())[:TOKENS],
            trial.stop_reason or "budget",
        )
        for trial, ids in evenly_spaced([(trial, ids) for trial, ids in named if ids], TEXTS)
    ]


def _request(of: Trial | Prompt, ids: Sequence[int], target: LoadedModel, name: str) -> Request:
    return Request(
        cell="",
        prompt_set=of.prompt_set,
        prompt=name,
        category=of.category,
        tokens=tuple(ids),
        sampling=SamplingParameters(GREEDY),
        budget=TOKENS,
        repetition=0,
        seed=0,
        eos=target.eos,
        model=target.name,
    )


def _changes(
    network: Any, target: LoadedModel, model: CachedModel
) -> Iterator[tuple[Cause, Callable[[], Callable[[], None]]]]:
    """Each cause with what makes its change, which returns what takes it back."""

    def attribute(name: str, value: Any) -> Callable[[], Callable[[], None]]:
        def change() -> Callable[[], None]:
            before = getattr(network, name)
            setattr(network, name, value)
            return lambda: setattr(network, name, before)

        return change

    layers = tuple(network.layers)
    for shift in SHIFTS:
        moved = tuple(layer + shift for layer in layers)
        if min(moved) >= 0 and max(moved) < model.layers:
            yield "layers", attribute("layers", moved)
    if getattr(network, "own_embedding", False):
        shared: Any = target.network.get_input_embeddings()
        yield "embedding", attribute("embed_tokens", shared)
    if hasattr(network, "norm_before_residual"):
        yield "norm", attribute("norm_before_residual", not network.norm_before_residual)
    if hasattr(network, "rotary"):
        other = type(network.rotary)(network.config).to(network.rotary.inv_freq.device)
        if torch.equal(other.inv_freq, network.rotary.inv_freq):
            other.inv_freq = other.inv_freq.bfloat16().to(other.inv_freq.dtype)
        yield "rotary", attribute("rotary", other)


def _other_template(
    stored: StoredRun, target: LoadedModel, model: CachedModel
) -> list[GeneratedText] | None:
    """The target's completions of prompts in the other form; None where there is one form only."""
    if not getattr(target.tokenizer, "chat_template", None):
        return None
    conf = conf_of(PromptsConf, stored.config.get("prompts") or {})
    other = "auto" if conf.chat_template == "never" else "never"
    conf = replace(conf, chat_template=other, system=None)
    turns = [turn for prompt in prompt_sets.load(conf) for turn in readable_turns(prompt)]
    requests = [
        _request(turn, encode(target.tokenizer, turn, conf), target, turn.id)
        for turn in evenly_spaced(turns, TEXTS)
    ]
    model.keep_states(())
    return generate_texts(model, requests, name=target.shown)

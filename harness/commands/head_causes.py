"""Why a head accepts less than its trainer logged: it is scored again without one cause at a time.

A head whose first draft token falls short reads something else than in training. On a few of the
run's greedy texts it is scored as the run had it, then with one thing changed:

    layers      it reads other layers of the target, all one or two higher or lower
    template    the prompts have their chat template where the run left it out, or the reverse
    embedding   it takes the target's embedding in place of its own
    norm        the residual of its layer is taken before its norm in place of after, or the reverse
    rotary      the frequencies of its positions are computed anew in float32

The cause is the change that brings the accuracy of the first token closest to what was logged, if
it closes CLOSES of the gap.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from harness import prompts as prompt_sets
from harness.analysis.head_training import AccuracyGap, Cause
from harness.analysis.losses import KnownTexts
from harness.commands.losses import conf_of, readable_turns
from harness.config import ModelConf, PromptsConf
from harness.decoding.sampling import SamplingParameters
from harness.measurement.generations import Request
from harness.measurement.head_scores import score_with_head
from harness.measurement.target_texts import GeneratedText, generate_texts
from harness.models.cached import CachedModel
from harness.models.device import resolve_device
from harness.models.load import LoadedModel, load
from harness.models.tokenizer import encode
from harness.records import GREEDY, Trial
from harness.serving.drafts import DRAFTS
from harness.storage import StoredRun

TEXTS, TOKENS = 16, 48
SHIFTS = (-1, 1, -2, 2)
CLOSES = 0.5


def with_cause(stored: StoredRun, known: KnownTexts, gap: AccuracyGap) -> AccuracyGap:
    """The gap with what the head reads differently, where one change explains most of it.

    Loads the target and the head.
    """
    device = resolve_device("auto")
    target = load(conf_of(ModelConf, stored.config.get("model") or {}), "model", device)
    entry = next(e for e in stored.manifest.models.values() if e.name == gap.draft)
    conf = ModelConf(name=gap.draft, kind=entry.kind or "eagle3", id=str(entry.id))
    head = DRAFTS[conf.kind].load(conf, target)
    model = CachedModel(target.network, target.vocab_size)
    texts = _texts(stored, known, target)
    drafting = head.network.with_cache(model.vocab_size)

    def accuracy(some: Sequence[GeneratedText]) -> float:
        model.keep_states(head.network.layers)
        traces = score_with_head(some, model, drafting, num_draft_tokens=1, draft_name=gap.draft)
        return float(np.concatenate([trace.draft_is_argmax[:, 0] for trace in traces]).mean())

    logged = gap.rows[0].logged
    if not texts:
        return gap
    found: list[tuple[float, Cause]] = [(accuracy(texts), "inputs")]
    needed = found[0][0] + CLOSES * (logged - found[0][0])
    for cause, change in _changes(head.network, target, model):
        with_change = change()
        try:
            found.append((accuracy(texts), cause))
        finally:
            with_change()
    if (others := _other_template(stored, target, model)) is not None:
        found.append((accuracy(others), "template"))
    best, cause = max(found, key=lambda each: each[0])
    return gap if best < needed else replace(gap, cause=cause, fixed=best)


def _texts(stored: StoredRun, known: KnownTexts, target: LoadedModel) -> list[GeneratedText]:
    """Greedy completions that the run stored, with their prompts."""
    plain = [
        trial
        for trial in stored.trials
        if trial.k == 0 and trial.temperature == GREEDY and trial.status == "ok" and trial.tokens
    ]
    named = ((trial, known.prompts.get((trial.prompt_set, trial.prompt))) for trial in plain)
    return [
        GeneratedText(
            _request(trial, ids, target),
            (trial.tokens or ())[:TOKENS],
            trial.stop_reason or "budget",
        )
        for trial, ids in _spread([(trial, ids) for trial, ids in named if ids])
    ]


def _spread(items: list[Any]) -> list[Any]:
    """TEXTS of them, from all over the list."""
    return items[:: max(1, len(items) // TEXTS)][:TEXTS]


def _request(trial: Trial, ids: Sequence[int], target: LoadedModel) -> Request:
    return Request(
        cell="",
        prompt_set=trial.prompt_set,
        prompt=trial.prompt,
        category=trial.category,
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
        anew = type(network.rotary)(network.config).to(network.rotary.inv_freq.device)
        if not torch.equal(anew.inv_freq, network.rotary.inv_freq):
            yield "rotary", attribute("rotary", anew)


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
        Request(
            cell="",
            prompt_set=turn.prompt_set,
            prompt=turn.id,
            category=turn.category,
            tokens=encode(target.tokenizer, turn, conf),
            sampling=SamplingParameters(GREEDY),
            budget=TOKENS,
            repetition=0,
            seed=0,
            eos=target.eos,
            model=target.name,
        )
        for turn in _spread(turns)
    ]
    model.keep_states(())
    return generate_texts(model, requests, name=f"model={target.name}")

"""The requests of a run's tasks, run where the folder lacks them.

A generation is known by a hash of all that determines it, so that a resumed run does only what is
missing.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

from harness.commands.pair import Pair, SideBySide
from harness.commands.progress import progress, say
from harness.commands.tasks import Config, EncodedPrompt, Task
from harness.config import DecodeConf, ModelConf, PairConfig, rates_for
from harness.decoding.sampling import SamplingParameters
from harness.measurement.clock import undisturbed
from harness.measurement.generations import Models, Request, run_side_by_side, run_trial
from harness.models.load import LoadedModel, Vocabulary
from harness.models.tokenizer import stop_rule
from harness.records import TextKey, Trial
from harness.storage import RunFolder
from harness.theory.acceptance import conditional

WARMUP_TOKENS = 8

# The models of each request, or of several that are run side by side
ModelsOf = Callable[[Request], Models] | SideBySide


def requests_of(pair: Pair, config: PairConfig, tasks: Sequence[Task]) -> list[Request]:
    """The requests of some tasks, in their order."""
    return [
        request(
            *(pair, config, task.entry, task.k, task.temperature, task.repetition), p_min=task.p_min
        )
        for task in tasks
    ]


def completion(
    target: Vocabulary, config: Config, entry: EncodedPrompt, temperature: float, repetition: int
) -> Request:
    """A text by one model alone, known by its key."""
    sampling = sampling_of(config.decode, temperature)
    key = TextKey(entry.prompt.prompt_set, entry.prompt.id, repetition, sampling.temperature)
    return Request(
        cell=str(key),
        prompt_set=key.prompt_set,
        prompt=key.prompt,
        category=entry.prompt.category,
        tokens=entry.tokens,
        sampling=sampling,
        budget=config.new_tokens,
        repetition=repetition,
        seed=config.seed,
        eos=target.eos,
        model=target.name,
        stop=stop_rule(target.tokenizer, config.decode.stop_strings),
        turn=entry.turn,
        clock=config.loop_clock,
    )


def request(
    pair: Pair,
    config: PairConfig,
    entry: EncodedPrompt,
    k: int,
    temperature: float,
    repetition: int,
    *,
    p_min: float = 0.0,
    decoder: LoadedModel | None = None,
) -> Request:
    """One timed generation.

    Args:
        p_min: the probability below which a token ends a draft; 0: none.
        decoder: the model that decodes where that is not the target.
    """
    model = decoder or pair.target
    plain = completion(model, config, entry, temperature, repetition)
    asked = drafted(plain, config, k, pair.draft_name, p_min)
    identity = {
        "model": _identity(config.model if model is pair.target else config.draft),
        "draft": _identity(config.draft) if k else None,
        "prompt": [plain.prompt_set, plain.prompt, list(plain.tokens)],
        "k": k,
        "sampling": asdict(plain.sampling),
        "rule": config.decode.rule if k else None,
        "acceptance": _synthetic_rates(config, k),
        "stop_below": asked.stop_below,
        "stop_strings": config.decode.stop_strings,
        "new_tokens": config.new_tokens,
        "repetition": repetition,
        "seed": config.seed,
        "backend": config.backend,
        "clock": plain.clock,
    }
    return replace(asked, cell=hash_of(identity))


def drafted(plain: Request, config: Config, k: int, draft: str, p_min: float) -> Request:
    """A text of the target with `draft`; without one where k is 0."""
    rates = _synthetic_rates(config, k)
    return replace(
        plain,
        k=k,
        draft=draft if k else None,
        rule=config.decode.rule,
        synthetic=conditional(rates) if rates else None,
        stop_below=p_min if k and p_min else None,
    )


def _synthetic_rates(config: Config, k: int) -> Sequence[float] | None:
    acceptance = config.decode.acceptance
    return rates_for(acceptance, k) if k and acceptance is not None else None


def hash_of(identity: Any) -> str:
    """A generation's key, from all that determines it."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def sampling_of(decode: DecodeConf, temperature: float) -> SamplingParameters:
    """The sampling parameters of a run at one temperature."""
    penalty = decode.repetition_penalty
    return SamplingParameters(
        float(temperature),
        decode.top_k,
        decode.top_p,
        decode.min_p,
        None if penalty == 1.0 else penalty,
    )


def _identity(conf: ModelConf) -> dict[str, object]:
    keys = ("id", "revision", "dtype", "weights", "quantization", "attention", "layers", "block")
    return {key: getattr(conf, key) for key in keys}


# ---- running -------------------------------------------------------------------------------------


def side_by_side(folder: RunFolder, pair: Pair, ks: Collection[int]) -> bool:
    """True where plain decoding and every K take turns; a run goes on as it was begun.

    They do on processors with memory for the caches of all, by what is free when the run begins.
    One that has timings and no note of it was begun one generation after the other.

    Args:
        ks: that are measured.
    """
    noted = folder.manifest.side_by_side
    if noted is None:
        begun = bool(folder.trials.read() or folder.rounds.read())
        number = len({0, *ks})
        noted = not begun and pair.fits(number)
        if not noted and not begun and pair.on_processors:
            say(f"no memory for {number} caches side by side: generations follow each other")
        folder.note(side_by_side=noted)
    return noted


def models_of(folder: RunFolder, pair: Pair, config: PairConfig) -> ModelsOf:
    """The models of a run's generations."""
    if side_by_side(folder, pair, config.speculative_ks):
        return SideBySide(pair)
    return lambda _: (pair.target_model, pair.drafting)


def run_requests(
    folder: RunFolder,
    requests: Sequence[Request],
    models: ModelsOf,
    label: str,
    between: Callable[[float], None] = lambda _: None,
    *,
    warmed: set[Hashable] | None = None,
) -> list[Trial]:
    """Run what the folder lacks, a durable line of each; return every stored trial of `requests`.

    Successive requests of one text are run side by side where the models are made for that.
    `between` is called before each with the share that is done, and after the last: visits that
    time rounds are spread so. Kinds that are `warmed` need no warming up; others are added.
    """
    finished = {trial.cell for trial in folder.trials.read() if trial.status == "ok"}
    waiting = [entry for entry in requests if entry.cell not in finished]
    _warm_up(waiting, models, set() if warmed is None else warmed)
    done = 0
    with progress(label, len(waiting)) as tick, undisturbed():
        for group in _together(waiting, models):
            for _ in group:
                done += 1
                between(done / (len(waiting) + 1))
            folder.trials.append(*run_side_by_side(group, _of_group(group, models)))
            for _ in group:
                tick()
        between(1.0)
    wanted = {entry.cell for entry in requests}
    return [trial for trial in folder.trials.read() if trial.cell in wanted]


def _together(requests: Sequence[Request], models: ModelsOf) -> Iterator[list[Request]]:
    """The requests that are run at once: successive ones of a text, or single ones."""
    for _, group in groupby(requests, lambda entry: (entry.key, entry.turn)):
        entries = list(group)
        if isinstance(models, SideBySide):
            yield entries
        else:
            yield from ([entry] for entry in entries)


def _of_group(group: Sequence[Request], models: ModelsOf) -> list[Models]:
    if isinstance(models, SideBySide):
        return models.models(len(group))
    return [models(entry) for entry in group]


def _warm_up(
    requests: Sequence[Request],
    models: ModelsOf,
    warmed: set[Hashable],
) -> None:
    """A few unmeasured tokens of each kind: first calls allocate, compile, record, fill caches."""
    kinds = {(r.model, r.k, r.sampling, r.rule, r.synthetic): r for r in requests}
    kinds = {kind: entry for kind, entry in kinds.items() if kind not in warmed}
    warmed |= kinds.keys()
    with progress("warming up (compiling and recording new work)", len(kinds)) as tick:
        for entry in kinds.values():
            short = replace(entry, budget=min(entry.budget, WARMUP_TOKENS))
            run_trial(short, *_of_group([entry], models)[0])
            tick()

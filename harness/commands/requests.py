"""Plan the generations of a run, and know each by a hash of all that determines it."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from harness.commands.imposed import Cell, Rates
from harness.commands.pair import EncodedPrompt, Pair
from harness.config import DecodeConf, PairConfig
from harness.decoding.sampling import SamplingParameters
from harness.measurement.generations import Request
from harness.models.load import LoadedModel
from harness.models.tokenizer import stop_rule
from harness.theory.acceptance import conditional

NOTHING: Mapping[Cell, Rates] = {}


def plan(
    pair: Pair,
    config: PairConfig,
    ks: Sequence[int],
    temperatures: Sequence[float],
    imposed: Mapping[Cell, Rates] = NOTHING,
) -> list[Request]:
    """Every generation of a grid, in the order it is run; `imposed` is synthetic acceptance.

    Baseline and every K follow each other within one prompt, and which goes first rotates from
    prompt to prompt, so that a machine that drifts hits all of them alike.
    """
    grid = [0, *(k for k in ks if k > 0)]
    requests: list[Request] = []
    for repetition in range(config.repetitions):
        for index, entry in enumerate(pair.prompts):
            for number, temperature in enumerate(temperatures):
                # Of each temperature, so that every K leads equally often in each of its cells
                start = (index + number + repetition) % len(grid)
                requests += [
                    request(pair, config, entry, k, temperature, repetition, imposed=imposed)
                    for k in grid[start:] + grid[:start]
                ]
    return requests


def request(
    pair: Pair,
    config: PairConfig,
    entry: EncodedPrompt,
    k: int,
    temperature: float,
    repetition: int,
    *,
    decoder: LoadedModel | None = None,
    imposed: Mapping[Cell, Rates] = NOTHING,
) -> Request:
    """One generation; `decoder` is the model that decodes where that is not the target."""
    model = decoder or pair.target
    sampling = sampling_of(config.decode, temperature)
    draft = pair.draft.name if k else None
    conf = config.model if model is pair.target else config.draft
    rates = imposed.get((entry.prompt.prompt_set, float(temperature), k))
    stop = config.decode.stop_threshold if k and config.decode.stop == "threshold" else None
    # Added where they are set, so that a generation without them keeps the key it always had. The
    # entries `warping` and `imposed` are part of the key too, so they keep these names
    extra: dict[str, object] = {"imposed": rates} if rates else {}
    extra |= {"stop_below": stop} if stop is not None else {}
    strings = config.decode.stop_strings
    extra |= {"stop_strings": strings} if strings else {}
    identity = {
        "model": _model_identity(asdict(conf)),
        "draft": _model_identity(asdict(config.draft)) if k else None,
        "prompt": [entry.prompt.prompt_set, entry.prompt.id, list(entry.tokens)],
        "k": k,
        "warping": _identity(sampling),
        "rule": config.decode.rule if k else None,
        "new_tokens": config.new_tokens,
        "repetition": repetition,
        "seed": config.seed,
        "backend": config.backend,
        **extra,
    }
    return Request(
        cell=hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16],
        prompt_set=entry.prompt.prompt_set,
        prompt=entry.prompt.id,
        category=entry.prompt.category,
        tokens=entry.tokens,
        k=k,
        sampling=sampling,
        rule=config.decode.rule,  # type: ignore[arg-type]  # validated
        budget=config.new_tokens,
        repetition=repetition,
        seed=config.seed,
        eos=model.eos,
        model=model.name,
        draft=draft,
        turn=entry.turn,
        synthetic=conditional(rates) if rates else None,
        stop_below=stop,
        stop=stop_rule(pair.target.tokenizer, strings),
    )


def sampling_of(decode: DecodeConf, temperature: float) -> SamplingParameters:
    """How a run draws its tokens at one temperature."""
    penalty = decode.repetition_penalty
    return SamplingParameters(
        float(temperature),
        decode.top_k,
        decode.top_p,
        decode.min_p,
        None if penalty == 1.0 else penalty,
    )


def _identity(sampling: SamplingParameters) -> dict[str, object]:
    """What a generation's key holds of it; newer settings only where they are in force."""
    first = ("temperature", "top_k", "top_p")
    return {
        key: value for key, value in asdict(sampling).items() if key in first or value is not None
    }


def missing(requests: Sequence[Request], done: Iterator[str]) -> list[Request]:
    """Those whose cell has no complete trial yet."""
    stored = set(done)
    return [entry for entry in requests if entry.cell not in stored]


def _model_identity(conf: dict[str, object]) -> dict[str, object]:
    keys = ("id", "revision", "dtype", "weights", "quantization", "attention")
    return {key: conf[key] for key in keys}

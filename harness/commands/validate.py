"""What a configuration's types cannot say, checked before anything is loaded.

Hydra has refused misspelt keys and words where numbers belong; here the values themselves are
looked at. Every refusal is one line that names the key, what it holds and what would be accepted.
"""

import math
import os
import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, TypeVar

from harness.analysis.rates import rates_for
from harness.commands.weights import check_alike, check_dummy
from harness.config import (
    AuditionConfig,
    DecodeConf,
    DoorConfig,
    ModelConf,
    PairConfig,
    ProfileConfig,
    PromptsConf,
    SnapshotConfig,
    SweepConfig,
)
from harness.prompts import thinking_modes
from harness.records import RULES, UserError

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
STOPS = ("none", "threshold")
BACKENDS = ("auto", "eager", "cuda_graphs")
ATTENTIONS = ("auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")

# A chi-square over fewer draws says little; each draw is a Python call and takes memory
LEAST_DRAWS, MOST_DRAWS = 5000, 1_000_000
# Logits divided by less overflow float32; above, every token is as likely as any other
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 100.0
# Far beyond what any engine drafts, and small enough for tables of positions
MOST_DRAFTED = 1024
MOST_TOKENS = 10_000_000
MOST_REPETITIONS = 10_000

Config = TypeVar("Config", bound=DoorConfig)


def validated(config: Config) -> Config:
    """The same configuration, its values checked, an empty model name filled from the id.

    Raises:
        UserError: the first value that cannot be used.
    """
    _seed(config.seed)
    if isinstance(config, PairConfig):
        _pair(config)
    elif isinstance(config, AuditionConfig):
        _audition(config)
    else:
        _grid(config)
    return config


def _pair(config: PairConfig) -> None:
    for role, model in (("model", config.model), ("draft", config.draft)):
        check_model(role, model)
    if config.model.name == config.draft.name and config.model.id != config.draft.id:
        raise UserError(
            f"draft.name={config.draft.name}: the same as model.name, of another model; "
            "give one of them another name (draft.name=...)"
        )
    check_alike(config.model, config.draft)
    _prompts(config.prompts)
    _device("device.name", config.device.name)
    _decode(config.decode)
    _loop_only(config)
    _grid(config)
    _sizes(config)
    _snapshot(config)
    _profile(config)
    _threads(config.threads)
    _one_of("mode", getattr(config, "mode", "measure"), ("measure", "replay"))
    _one_of("backend", config.backend, BACKENDS)
    _one_of("show", getattr(config, "show", "none"), ("none", "tokens"))


def _sizes(config: PairConfig | AuditionConfig) -> None:
    for key, most in (("new_tokens", MOST_TOKENS), ("repetitions", MOST_REPETITIONS)):
        _at_least_one(key, getattr(config, key))
        _at_most(key, getattr(config, key), most, "a run would not end")


def _snapshot(config: PairConfig) -> None:
    if not isinstance(config, SnapshotConfig):
        return
    if config.draws < LEAST_DRAWS:
        raise UserError(
            f"draws={config.draws}: too few for a chi-square; give {LEAST_DRAWS} or more"
        )
    _at_most("draws", config.draws, MOST_DRAWS, "each draw takes memory and time")
    if config.show == "tokens" and 0 not in config.temperature:
        raise UserError("show=tokens: texts are made at temperature 0 only; add it to temperature")


def _profile(config: PairConfig) -> None:
    if not isinstance(config, ProfileConfig):
        return
    if config.decode.repetition_penalty not in (None, 1.0):
        raise UserError(
            "decode.repetition_penalty: a profile times the parts of a round without one; leave it "
            "out, and give it to a sweep"
        )
    for key in ("contexts", "batches"):
        values = getattr(config, key)
        if values == "auto":
            continue
        if not isinstance(values, list) or not values:
            raise UserError(f"{key}={values}: give auto or a list, for example {key}=[1,4,16]")
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"{key}: {value} is too small; use whole numbers >= 1")
        _no_duplicates(key, values)
    for value in config.alpha:
        if not 0 <= value <= 1:
            raise UserError(f"alpha: {value} is not in [0, 1]")
    _no_duplicates("alpha", config.alpha)
    for key in ("context_tokens", "batch"):
        _at_least_one(f"plan.{key}", getattr(config.plan, key))


def _audition(config: AuditionConfig) -> None:
    check_model("model", config.model)
    _prompts(config.prompts)
    _device("device.name", config.device.name)
    _decode(config.decode)
    _loop_only(config)
    _grid(config)
    _sizes(config)
    _at_least_one("batch", config.batch)
    _threads(config.threads)
    _one_of("backend", config.backend, BACKENDS)
    for key in ("target_ms", "draft_ms"):
        _milliseconds(f"latency.{key}", getattr(config.latency, key))
    for value in config.latency.verify_ms or ():
        _milliseconds("latency.verify_ms", value)


def _milliseconds(key: str, value: Any) -> None:
    """Refuse a time that is not a positive number; a mapping is looked into."""
    for entry in value.values() if isinstance(value, dict) else [value]:
        number = isinstance(entry, int | float) and not isinstance(entry, bool)
        if entry is not None and not (number and math.isfinite(entry) and entry > 0):
            raise UserError(f"{key}: {entry} is not a time; give milliseconds above 0")


def _grid(config: DoorConfig) -> None:
    """The lists of cells; not every door has both."""
    k, temperature = getattr(config, "k", None), getattr(config, "temperature", None)
    if k is not None:
        check_k(k)
    if temperature is not None:
        check_temperature(temperature)


def check_k(values: Sequence[int]) -> None:
    """Refuse an empty, negative or repeated K; 0, plain decoding, is allowed: it always runs.

    Raises:
        UserError: naming k.
    """
    if not values:
        raise UserError("k=[]: give at least one number of draft tokens, for example k=[1,2,4]")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UserError(f"k: {value} is not a number of draft tokens; use whole numbers >= 0")
        _at_most("k", value, MOST_DRAFTED, "no engine drafts so many tokens a round")
    if not any(values):
        raise UserError("k=[0]: 0 is plain decoding, which always runs; add a K >= 1")
    _no_duplicates("k", values)


def check_temperature(values: Sequence[float]) -> None:
    """Refuse an empty list, and a temperature that is negative, NaN, infinite or repeated.

    Raises:
        UserError: naming temperature.
    """
    if not values:
        raise UserError("temperature=[]: give at least one, for example temperature=[0.0,1.0]")
    for value in values:
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"temperature: {value} is not one; use finite numbers >= 0 (0: greedy)")
        if value and not LEAST_TEMPERATURE <= value <= MOST_TEMPERATURE:
            raise UserError(
                f"temperature: {value:g} is out of range; use 0 (greedy) or "
                f"{LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}"
            )
    _no_duplicates("temperature", values)


def check_model(role: str, model: ModelConf) -> None:
    """Refuse values of a model's group that cannot be, and name a model that has no name by its id.

    Raises:
        UserError: naming the key, which begins with `role`.
    """
    if not model.id:
        raise UserError(f"{role}.id: empty; give a hub id or a local folder")
    model.name = model.name or PurePath(model.id.replace(":", "/")).name
    _one_of(f"{role}.dtype", model.dtype, DTYPES)
    _one_of(f"{role}.attention", model.attention, ATTENTIONS)
    _one_of(f"{role}.weights", model.weights, ("pretrained", "dummy"))
    if model.weights == "dummy":
        check_dummy(role, model)
    if model.device is not None:
        _device(f"{role}.device", model.device)
    if model.device is not None and model.device_map is not None:
        raise UserError(f"{role}.device and {role}.device_map: give one of the two")


def _prompts(prompts: PromptsConf) -> None:
    if not prompts.sets and not prompts.files and not prompts.hub:
        raise UserError("prompts.sets=[] and prompts.files=[]: give at least one set or file")
    for name in ("hub_subset", "hub_split", "hub_column"):
        if getattr(prompts, name) is not None and not prompts.hub:
            raise UserError(f"prompts.{name}: only with prompts.hub=ORG/NAME")
    _no_duplicates("prompts.sets", prompts.sets)
    _no_duplicates("prompts.files", prompts.files)
    if prompts.limit is not None:
        _at_least_one("prompts.limit", prompts.limit)
    for name in ("max_turns", "answer_tokens"):
        if getattr(prompts, name) is not None:
            _at_least_one(f"prompts.{name}", getattr(prompts, name))
    if prompts.system is not None and not prompts.system.strip():
        raise UserError("prompts.system: an empty text; give the system message, or null for none")
    thinking_modes(prompts.enable_thinking)
    _one_of("prompts.chat_template", prompts.chat_template, ("auto", "always", "never"))
    _weights(prompts.weights)


def _weights(weights: Any) -> None:
    if weights is None:
        return
    if not isinstance(weights, dict):
        raise UserError(f"prompts.weights={weights}: give {{set: share}}, for example {{easy:0.7}}")
    for name, share in weights.items():
        number = isinstance(share, int | float) and not isinstance(share, bool)
        if not (number and math.isfinite(share) and share >= 0):
            raise UserError(f"prompts.weights.{name}: {share} is not a share; use numbers >= 0")
    if not sum(weights.values()):
        raise UserError("prompts.weights: all are 0; give at least one set a share")


def _decode(decode: DecodeConf) -> None:
    if decode.top_k is not None:
        _at_least_one("decode.top_k", decode.top_k)
    if decode.top_p is not None and not 0 < decode.top_p <= 1:
        raise UserError(f"decode.top_p: {decode.top_p} is not in (0, 1]; null keeps every token")
    if decode.min_p is not None and not 0 < decode.min_p <= 1:
        raise UserError(f"decode.min_p: {decode.min_p} is not in (0, 1]; null keeps every token")
    penalty = decode.repetition_penalty
    if penalty is not None and not 0.01 <= penalty <= 100:
        raise UserError(
            f"decode.repetition_penalty: {penalty} is not in [0.01, 100]; null or 1 leaves it out"
        )
    if "" in (decode.stop_strings or []):
        raise UserError("decode.stop_strings: an empty string would end every text at once")
    literal = next((text for text in decode.stop_strings or [] if "\\n" in text), None)
    if literal is not None:
        raise UserError(
            f"decode.stop_strings: {literal} holds a backslash and an n, not a line break; in a "
            "shell write $'decode.stop_strings=[\"\\n\\n\"]'"
        )
    _no_duplicates("decode.stop_strings", decode.stop_strings or [])
    _one_of("decode.rule", decode.rule, RULES)
    _one_of("decode.stop", decode.stop, STOPS)
    if not 0 <= decode.stop_threshold <= 1:
        raise UserError(f"decode.stop_threshold: {decode.stop_threshold} is not in [0, 1]")


def _loop_only(config: SweepConfig | PairConfig | AuditionConfig) -> None:
    """What changes how the loop runs makes sense only where the loop is measured."""
    decode = config.decode
    asked = [key for key in ("acceptance", "acceptance_from") if getattr(decode, key) is not None]
    if decode.stop != "none":
        asked.append("stop")
    if not asked:
        return
    parts_only = isinstance(config, ProfileConfig) and asked == ["acceptance"]
    if not (parts_only or (isinstance(config, SweepConfig) and config.mode == "measure")):
        raise UserError(f"decode.{asked[0]}: only a sweep with mode=measure runs such a loop")
    if len(asked) > 1:
        raise UserError(f"decode.{asked[0]} and decode.{asked[1]}: give one of the two")
    if decode.stop != "none" and config.backend == "cuda_graphs":
        raise UserError(
            f"decode.stop={decode.stop}: reads every draft step back, which a recorded graph "
            "cannot; use backend=eager"
        )
    for k in config.k if decode.acceptance is not None else ():
        if k > 0:
            rates_for(decode.acceptance, k)


def _device(key: str, value: str) -> None:
    if not DEVICES.fullmatch(value):
        raise UserError(f"{key}: {value!r} is not a device; use auto, cpu, mps, cuda or cuda:0")


def _threads(value: Any) -> None:
    if value == "auto":
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"threads: {value!r} is not a number of threads; use auto or 1, 2, ...")
    cores = os.cpu_count() or 1
    _at_most("threads", value, cores, f"this machine has {cores} logical cores")


def _seed(value: int) -> None:
    if not 0 <= value < 2**63:
        raise UserError(f"seed: {value} is out of range; use 0 to 2^63 - 1")


def _at_least_one(key: str, value: int) -> None:
    if value < 1:
        raise UserError(f"{key}: {value} is too small; use a whole number >= 1")


def _at_most(key: str, value: int, most: int, reason: str) -> None:
    if value > most:
        raise UserError(f"{key}: {value} is too large; use at most {most} ({reason})")


def _one_of(key: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise UserError(f"{key}: {value!r} is unknown; use one of {', '.join(known)}")


def _no_duplicates(key: str, values: Sequence[object]) -> None:
    repeated = [value for index, value in enumerate(values) if value in values[:index]]
    if repeated:
        raise UserError(f"{key}: {repeated[0]} is given twice; list each once")

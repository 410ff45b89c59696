"""What a user may configure: one schema per command, registered with Hydra, and what is refused.

Values come from the YAML files under conf/ and from the command line; Hydra merges them into the
dataclasses below, so a misspelt key or a word where a number belongs fails while composing. What a
type cannot say stands next to its field (`key(1, least=1)`), and what several fields must agree on
in the schema's `check`. `checked` applies both, once per run, before any model is loaded; every
refusal is one line that names the key, what it holds and what would be accepted.

The dataclasses are mutable because Hydra merges into them; nothing here acts (no file is read, no
environment variable is set). The keys are the command line's contract: renaming one breaks users.
"""

import math
import os
import re
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any, TypeVar, get_origin

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from harness.records import NGRAM, RULES, SERVERS, UserError
from harness.theory.architecture import architecture_of

# The shipped YAML: inside the installed package, or next to it in a checkout
_PACKAGE = Path(__file__).resolve().parent
CONF_DIR = next(p for p in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if p.is_dir())
DEVICE: dict[str, Any] = {
    "pattern": re.compile(r"auto|cpu|mps|cuda(:\d+)?"),
    "takes": "auto, cpu, mps, cuda or cuda:0",
}
DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTIONS = ("auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
CORES = os.cpu_count() or 1

Config = TypeVar("Config")


def key(default: Any, **limits: Any) -> Any:
    """A field with what its type cannot say.

    Args:
        default: of the field; a list is copied.
        limits: of a number, or of each in a list: `least`, `most` (inclusive), `above` (exclusive),
            `zero` (0 is accepted as well), `whole` (where the type is Any), `why` they are so. Of
            a text: `choices`, or a `pattern` and what it `takes`. Of the value itself: `auto` is
            accepted, `distinct` entries, `form` (list or dict, where the type is Any), `example`
            of one (it must not be empty).
    """
    if isinstance(default, list):
        return field(default_factory=lambda: copy(default), metadata=limits)
    return field(default=default, metadata=limits)


def _grid(*default: int) -> Any:
    """The numbers of draft tokens."""
    why = "no engine drafts more tokens a round"
    return key([*default], least=0, most=1024, why=why, example="[1,2,4]", distinct=True)


def _temperatures(*default: float) -> Any:
    """The temperatures; logits divided by less overflow float32, by more all are alike."""
    return key([*default], least=0.01, most=100, zero="greedy", example="[0.0,1.0]", distinct=True)


def _tokens(default: int) -> Any:
    return key(default, least=1, most=10_000_000, why="a run would not end")


def _sizes() -> Any:
    return key("auto", auto=True, form=list, example="[1,4,16]", whole=True, least=1, distinct=True)


@dataclass
class ModelConf:
    """Which model, and how to load it (groups model= and draft=).

    Attributes:
        name: short name, used in tables, file names and results.csv; empty: the id's last part.
        id: hub id or local folder; `embedded:tiny` is a model that ships with the package.
        revision: commit, tag or branch of the hub repository.
        dtype: auto (what the checkpoint says; for dummy weights bfloat16, on a CPU float32),
            float32, bfloat16 or float16.
        weights: pretrained, or dummy (random values in `architecture`'s shape, for timing only).
        device: where this model goes, when not where `device=` says.
        device_map: passed to transformers as it is (needs the `accelerate` extra).
        attention: auto (sdpa, or eager for a model without it), or transformers'
            attn_implementation: sdpa, eager, flash_attention_2, ...
        trust_remote_code: whether code from the model's repository may run.
        allow_pickle: whether weights may be read from pytorch_model.bin; else safetensors only.
        quantization: none, or int8 / int4 (needs the `quantization` extra).
        architecture: the figures that decide step time (layers, hidden, ...), for memory floors and
            for dummy weights; `harness.theory.architecture` reads it. (Any, as prompts.weights.)
    """

    name: str = MISSING
    id: str = MISSING
    revision: str | None = None
    dtype: str = key("auto", choices=DTYPES)
    weights: str = key("pretrained", choices=("pretrained", "dummy"))
    device: str | None = key(None, **DEVICE)
    device_map: str | None = None
    attention: str = key("auto", choices=ATTENTIONS)
    trust_remote_code: bool = False
    allow_pickle: bool = False
    quantization: str | None = None
    architecture: Any = None

    def check(self, role: str) -> None:
        """Refuse an empty id and random weights without an architecture; fill in the name."""
        if not self.id:
            raise UserError(f"{role}.id: empty; give a hub id or a local folder")
        self.name = self.name or PurePath(self.id.replace(":", "/")).name
        if self.device is not None and self.device_map is not None:
            raise UserError(f"{role}.device and {role}.device_map: give one of the two")
        if self.weights != "dummy":
            return
        if not isinstance(self.architecture, dict):
            raise UserError(
                f"{role}.weights=dummy: {role}={self.name} has no architecture in its config; "
                f"choose one that has ({role}=qwen3_4b) or give "
                f"{role}.architecture={{family: qwen3, ...}}"
            )
        architecture_of(self.architecture, f"{role}.architecture")
        for name in ("quantization", "device_map"):
            if getattr(self, name) is not None:
                raise UserError(f"{role}.{name}: not with {role}.weights=dummy; leave it out")


@dataclass
class PromptsConf:
    """Which prompts are generated from.

    Attributes:
        sets: names of shipped prompt sets.
        files: the user's own files: jsonl, json, csv, txt or parquet (docs/prompts.md).
        hub: a data set of the Hugging Face hub, org/name, or a local folder of one (needs the
            `datasets` extra).
        hub_subset, hub_split: which of its configurations and splits; a split may be a slice, such
            as `test[:200]`.
        hub_column: its column that holds the prompt; null finds a format's own.
        skip_unusable: skip entries that are not prompts (such as an empty conversation) instead of
            refusing the file; a file whose entries are mostly unusable is still refused.
        limit: at most this many prompts of each set, spread evenly over it; null takes all.
        weights: share of each prompt set in the workload of the verdict, {set: share}; null weighs
            them equally. (Any: into a typed dict Hydra's command line lets no new key.)
        chat_template: auto (when the tokenizer has one), always or never.
        enable_thinking: passed to chat templates that know it (Qwen3's); [false,true] makes two
            prompt sets of each, the second named with `+thinking`.
        system: a system message for every conversation that has none of its own.
        max_turns: at most this many turns of each conversation; null takes all.
        answer_tokens: budget of the target's answers to earlier turns; null takes new_tokens.
    """

    sets: list[str] = key(["easy", "hard"], distinct=True)
    files: list[str] = key([], distinct=True)
    hub: str | None = None
    hub_subset: str | None = None
    hub_split: str | None = None
    hub_column: str | None = None
    skip_unusable: bool | None = None
    limit: int | None = key(None, least=1)
    weights: Any = key(None, least=0, form=dict, example="{easy:0.7,hard:0.3}")
    chat_template: str = key("auto", choices=("auto", "always", "never"))
    enable_thinking: Any = False
    system: str | None = None
    max_turns: int | None = key(None, least=1)
    answer_tokens: int | None = key(None, least=1)

    @property
    def thinking_modes(self) -> tuple[bool, ...]:
        """The thinking modes that enable_thinking asks for, one or two.

        Raises:
            UserError: not a bool, nor a list of different ones.
        """
        value = self.enable_thinking
        modes = value if isinstance(value, list | tuple) else [value]
        known = all(isinstance(mode, bool) for mode in modes)
        if not modes or not known or len(set(modes)) < len(modes):
            raise UserError(f"prompts.enable_thinking={value}: use true, false or [false,true]")
        return tuple(modes)

    def check(self, prompts: str) -> None:
        """Refuse a workload without prompts, or without a weight."""
        if not self.sets and not self.files and not self.hub:
            raise UserError(f"{prompts}.sets=[] and {prompts}.files=[]: give at least one")
        for name in ("hub_subset", "hub_split", "hub_column"):
            if getattr(self, name) is not None and not self.hub:
                raise UserError(f"{prompts}.{name}: only with {prompts}.hub=ORG/NAME")
        if self.system is not None and not self.system.strip():
            raise UserError(f"{prompts}.system: empty; give the message, or null for none")
        if self.weights is not None and not sum(self.weights.values()):
            raise UserError(f"{prompts}.weights: all are 0; give at least one set a share")
        _ = self.thinking_modes


@dataclass
class DeviceConf:
    """Where both models go: auto (cuda, else mps, else cpu), cuda, cuda:N, mps or cpu."""

    name: str = key("auto", **DEVICE)


@dataclass
class DecodeConf:
    """How tokens are drawn and drafts accepted.

    Attributes:
        top_k: keep the top_k likeliest tokens, in draft and target alike; null keeps all.
        top_p: keep the smallest set of tokens with this much probability; null keeps all.
        min_p: keep the tokens with at least this share of the likeliest one's probability; null
            keeps all.
        repetition_penalty: for tokens that the prompt or the text already holds, divide positive
            logits by this and multiply negative ones; null leaves them.
        stop_strings: texts that end a generation, with the token that completes one of them; null:
            none.
        rule: ratio, exact_match or greedy_draft.
        stop: when to stop drafting early: none, or threshold (adaptive drafting).
        stop_threshold: with stop=threshold, a round drafts no more after a token that the draft
            gave less probability than this.
        acceptance: synthetic acceptance, for timing: a scalar alpha (rate j is alpha^j), a list of
            unconditional rates per position, or {k: either}.
        acceptance_from: a run whose measured acceptance, each cell's own, is used as the synthetic
            one.
    """

    top_k: int | None = key(None, least=1)
    top_p: float | None = key(None, above=0, most=1)
    min_p: float | None = key(None, above=0, most=1)
    repetition_penalty: float | None = key(None, least=0.01, most=100)
    stop_strings: list[str] | None = key(None, distinct=True)
    rule: str = key("ratio", choices=RULES)
    stop: str = key("none", choices=("none", "threshold"))
    stop_threshold: float = key(0.4, least=0, most=1)
    acceptance: Any = None
    acceptance_from: str | None = None

    @property
    def loop_only(self) -> list[str]:
        """The keys that are set and change how the loop itself runs."""
        synthetic = ("acceptance", "acceptance_from")
        names = [name for name in synthetic if getattr(self, name) is not None]
        return [*names, "stop"] if self.stop != "none" else names

    def check(self, decode: str) -> None:
        """Refuse stop strings that cannot be meant, and two things that exclude each other."""
        for text in self.stop_strings or ():
            if not text:
                raise UserError(f"{decode}.stop_strings: an empty string would end every text")
            if "\\n" in text:
                raise UserError(
                    f"{decode}.stop_strings: {text} holds a backslash and an n, not a line break; "
                    f"in a shell write $'{decode}.stop_strings=[\"\\n\\n\"]'"
                )
        if len(self.loop_only) > 1:
            one, other, *_ = self.loop_only
            raise UserError(f"{decode}.{one} and {decode}.{other}: give one of the two")


@dataclass
class GpuConf:
    """A card: what it can do, and what an hour of it costs (group gpu=).

    Bandwidth and memory in 10^9 bytes, the rate of dense bf16 matrix products, the on-demand price
    of one card, and where and when these were looked up.
    """

    name: str = MISSING
    bandwidth_gb_s: float = MISSING
    bf16_tflops: float = MISSING
    memory_gb: float = MISSING
    price_per_hour_usd: float = MISSING
    source: str = MISSING
    date: str = MISSING


@dataclass
class CommandConfig:
    """What every command takes.

    Attributes:
        results_root: where runs go.
        seed: of every random number.
        verbose: print every table; without it a command prints at most 30 lines.
        debug: errors show a traceback.
    """

    results_root: str = "results"
    seed: int = key(0, least=0, most=2**63 - 1)
    verbose: bool = False
    debug: bool = False


@dataclass
class ModelsConfig(CommandConfig):
    """What every command takes that runs models.

    Attributes:
        k: numbers of draft tokens per round; plain decoding (k = 0) always runs too.
        new_tokens: budget of a generation.
        repetitions: measured repeats of each generation, with other random numbers.
        threads: CPU threads, or auto (measured).
        backend: how steps run: auto (CUDA graphs on CUDA where the model allows, else eager),
            eager, or cuda_graphs.
        resume: a run folder to continue.
        dry_run: print what would be run, and stop.
    """

    model: ModelConf = field(default_factory=ModelConf)
    prompts: PromptsConf = field(default_factory=PromptsConf)
    device: DeviceConf = field(default_factory=DeviceConf)
    decode: DecodeConf = field(default_factory=DecodeConf)
    k: list[int] = _grid(1, 2, 4, 8)
    new_tokens: int = _tokens(48)
    repetitions: int = key(1, least=1, most=10_000, why="a run would not end")
    threads: Any = key("auto", auto=True, whole=True, least=1, most=CORES, why="logical cores here")
    backend: str = key("auto", choices=("auto", "eager", "cuda_graphs"))
    resume: str | None = None
    dry_run: bool = False

    @property
    def loop_keys(self) -> tuple[str, ...]:
        """The keys of `DecodeConf.loop_only` that this command accepts."""
        return ()

    def check(self, _: str) -> None:
        """Refuse what changes how the loop runs, where the loop is not measured."""
        for name in self.decode.loop_only:
            if name not in self.loop_keys:
                raise UserError(f"decode.{name}: only a sweep with mode=measure runs such a loop")
        for k in self.k if self.decode.acceptance is not None else ():
            if k > 0:
                rates_for(self.decode.acceptance, k)


@dataclass
class PairConfig(ModelsConfig):
    """What every command takes that runs a target with one draft."""

    draft: ModelConf = field(default_factory=ModelConf)

    def check(self, _: str) -> None:
        """Refuse two models of one name, and random weights next to real ones."""
        super().check(_)
        if self.model.name == self.draft.name and self.model.id != self.draft.id:
            raise UserError(
                f"draft.name={self.draft.name}: the same as model.name, of another model; "
                "give one of them another name (draft.name=...)"
            )
        if self.model.weights != self.draft.weights:
            raise UserError(
                f"model.weights={self.model.weights} and draft.weights={self.draft.weights}: their "
                "tokenizers cannot be compared; set both to dummy or both to pretrained"
            )


@dataclass
class PlanConf:
    """What a server would hold, for planning on cards that are not at hand.

    Attributes:
        context_tokens: positions in each sequence's cache, prompt and answer.
        batch: sequences side by side.
    """

    context_tokens: int = key(1024, least=1)
    batch: int = key(1, least=1)


@dataclass
class ProfileConfig(PairConfig):
    """Keys of `python -m harness.profile`; verifies are timed up to the largest k plus 1.

    Attributes:
        contexts: tokens in the cache before a timed step, a list; auto takes a few that fit.
        batches: sequences side by side in a timed step, a list; auto takes a few that fit.
        alpha: acceptances that speedups by batch and by card are predicted for.
        plan: what the modelled cards are to hold.
        gpu: the card this is, or is planned for: highlighted, and its data sheet's bandwidth where
            none could be measured on it.
    """

    new_tokens: int = _tokens(128)
    contexts: Any = _sizes()
    batches: Any = _sizes()
    alpha: list[float] = key([0.6, 0.8], least=0, most=1, distinct=True)
    plan: PlanConf = field(default_factory=PlanConf)
    gpu: GpuConf | None = None

    @property
    def loop_keys(self) -> tuple[str, ...]:
        """The parts of a round may be timed with synthetic acceptance."""
        return ("acceptance",)

    def check(self, _: str) -> None:
        """The parts of a round are timed without a penalty."""
        super().check(_)
        if self.decode.repetition_penalty not in (None, 1.0):
            raise UserError(
                "decode.repetition_penalty: a profile times the parts of a round without one; "
                "leave it out, and give it to a sweep"
            )


@dataclass
class SweepConfig(PairConfig):
    """Keys of `python -m harness.sweep`.

    Attributes:
        mode: measure (run every cell) or replay.
        engine: whose serving line is shown first: vllm, sglang, llamacpp, mlx, ...
        gpu: the card that is rented, for its price.
    """

    gpu: GpuConf | None = None
    temperature: list[float] = _temperatures(0.0, 1.0)
    engine: str | None = key(None, choices=tuple(SERVERS))
    mode: str = key("measure", choices=("measure", "replay"))

    @property
    def loop_keys(self) -> tuple[str, ...]:
        """All, unless the loop is replayed."""
        return ("acceptance", "acceptance_from", "stop") if self.mode == "measure" else ()

    def check(self, _: str) -> None:
        """A recorded graph drafts a fixed number of tokens."""
        super().check(_)
        if self.decode.stop != "none" and self.backend == "cuda_graphs":
            raise UserError(
                f"decode.stop={self.decode.stop}: reads every draft step back, which a recorded "
                "graph cannot; use backend=eager"
            )


@dataclass
class LatencyConf:
    """Step times from elsewhere (another engine's TPOT, say), in milliseconds.

    Attributes:
        target_ms: one target step.
        draft_ms: one draft step: a number for every draft, or {name: ms}.
        verify_ms: entry i (from 1) is the target's time over i positions; null assumes one step.
        measure: with traces_from, time the steps here all the same, and score here the drafts that
            it has no scores of: the same texts on another card.
    """

    measure: bool = False
    target_ms: float | None = key(None, above=0)
    draft_ms: Any = key(None, above=0)
    verify_ms: list[float] | None = key(None, above=0)


@dataclass
class AuditionConfig(ModelsConfig):
    """Keys of `python -m harness.audition`: many drafts, one target.

    Attributes:
        drafts: names of the draft group, `ngram`, or name@folder-or-hub-id for any other model;
            each may carry keys of its group, such as name@folder@dtype:float32@attention:eager.
        k, temperature: the grid; every cell is replayed.
        batch: completions of the target generated together.
        engine: whose serving line is shown first: vllm, sglang, llamacpp, mlx, ...
        traces_from: a run whose stored completions and scores are used instead of models.
        latency_from: a run whose step times are used.
        latency: step times typed in.
        combine: stored auditions of one target, one per card, whose cards are ranked; nothing
            else is run.
    """

    drafts: list[str] = field(default_factory=lambda: ["tiny_good"])
    gpu: GpuConf | None = None
    k: list[int] = _grid(1, 2, 3, 4, 5, 6, 8, 10)
    temperature: list[float] = _temperatures(0.0, 1.0)
    batch: int = key(32, least=1)
    engine: str | None = key(None, choices=tuple(SERVERS))
    traces_from: str | None = None
    latency_from: str | None = None
    latency: LatencyConf = field(default_factory=LatencyConf)
    combine: list[str] = field(default_factory=list)


@dataclass
class SnapshotConfig(PairConfig):
    """Keys of `python -m harness.snapshot`.

    Attributes:
        temperature: 0 compares texts token by token; above 0, draws are tested by chi-square.
        draws: samples from the one forced prefix of that test.
        show: none, or tokens (print the text with drafted tokens and corrections marked).
    """

    k: list[int] = _grid(4)
    temperature: list[float] = _temperatures(0.0)
    new_tokens: int = _tokens(64)
    draws: int = key(5000, least=5000, most=1_000_000, why="fewer test little, more take hours")
    show: str = key("none", choices=("none", "tokens"))

    def check(self, _: str) -> None:
        """Texts are shown at temperature 0 only."""
        super().check(_)
        if self.show == "tokens" and 0 not in self.temperature:
            raise UserError(
                "show=tokens: texts are made at temperature 0 only; add it to temperature"
            )


@dataclass
class BreakevenConfig(CommandConfig):
    """Keys of `python -m harness.breakeven`: arithmetic from latencies, no model.

    Attributes:
        draft_ms, target_ms: one step of each model, in milliseconds.
        verify_ms: entry i (from 1) is the target's time over i positions, so K needs K + 1
            entries; null assumes a verify costs one step (v = 1).
        alpha: alphas to tabulate.
        linear: show the linear rule of thumb too, which promises more than an alpha keeps.
        k: numbers of draft tokens per round.
        acceptance_rate: a measured accepted / drafted: a number for a single k, or {k: rate}.
        acceptance_by_position: measured share of rounds that kept at least j tokens, j = 1, 2, ...
        acceptance_from: acceptance from a result of `vllm bench serve --save-result`, a JSON file.
        baseline_from: target_ms from such a file of the same server without speculation.
        latency_from: a run whose step times are used.
        log: draft_ms, target_ms, verify + overhead and acceptance from a server's own log, a csv of
            k, tokens_per_round (or acceptance_rate), ms_per_token.
    """

    draft_ms: float | None = None
    target_ms: float | None = None
    verify_ms: list[float] | None = None
    alpha: list[float] = key([0.2, 0.4, 0.6, 0.8, 0.9, 1.0])
    linear: bool = False
    k: list[int] = _grid(1, 2, 3, 4, 5, 6, 8, 10)
    acceptance_rate: Any = None
    acceptance_by_position: list[float] | None = key(None, example="[0.7,0.5]")
    acceptance_from: str | None = None
    baseline_from: str | None = None
    latency_from: str | None = None
    log: str | None = None


@dataclass
class ReportConfig(CommandConfig):
    """Keys of `python -m harness.report`.

    Attributes:
        run: the run folder to render again.
        runs: run folders to compare, the first the reference.
        index: a results folder: one page over all its runs.
        engine: whose serving line is shown first: vllm, sglang, llamacpp, mlx, ...
        fail_below: exit 1 when the verdict's speedup is below this; with runs, when a run's speedup
            is below this share of the reference's, beyond noise.
    """

    run: str | None = None
    runs: list[str] = field(default_factory=list)
    index: str | None = None
    engine: str | None = key(None, choices=tuple(SERVERS))
    fail_below: float | None = None


def rates_for(acceptance: Any, k: int, key: str = "decode.acceptance") -> tuple[float, ...]:
    """Synthetic acceptance: unconditional rates of positions 1..k, as vLLM takes them.

    Rate j is the share of rounds that keep at least j draft tokens, so rates never increase.

    Args:
        acceptance: a scalar alpha (rate j is alpha^j), a list of at least k rates, or {k: either}.
        k: number of draft tokens.
        key: what errors name.

    Raises:
        UserError: a rate outside [0, 1], an increasing list, one that is too short, or no entry for
            k.
    """
    if isinstance(acceptance, dict):
        by_k = {int(name): rate for name, rate in acceptance.items() if str(name).isdigit()}
        if k not in by_k:
            raise UserError(f"{key}: no entry for K={k}; it has {sorted(by_k)}")
        return rates_for(by_k[k], k, f"{key}.{k}")
    rates: list[Any] = list(acceptance) if isinstance(acceptance, list | tuple) else [acceptance]
    for rate in rates:
        if not (_is_number(rate) and 0 <= rate <= 1):
            raise UserError(f"{key}: {rate!r} is not a rate; use numbers from 0 to 1")
    if not isinstance(acceptance, list | tuple):
        return tuple(float(acceptance) ** position for position in range(1, k + 1))
    for before, after in pairwise(rates):
        if after > before:
            raise UserError(
                f"{key}: {after:g} follows {before:g}; give unconditional rates, which never "
                "increase (the share of rounds that keep at least j tokens)"
            )
    if len(rates) < k:
        raise UserError(f"{key}: {len(rates)} rates, but K={k} needs {k}; add rates or lower k")
    return tuple(map(float, rates[:k]))


def checked(config: Config, name: str = "") -> Config:
    """The same configuration, its values checked and an empty model name filled in from the id.

    Args:
        config: a schema's dataclass.
        name: its key, where it is a part of a command's configuration.

    Raises:
        UserError: the first value that cannot be used.
    """
    assert is_dataclass(config)
    for entry in fields(config):
        dotted, value = f"{name}.{entry.name}".lstrip("."), getattr(config, entry.name)
        if is_dataclass(value):
            checked(value, dotted)
        elif value is not None and entry.metadata:
            _check(dotted, value, entry.type, entry.metadata)
    if (check := getattr(config, "check", None)) is not None:
        check(name)
    return config


def _check(name: str, value: Any, kind: Any, limits: Mapping[str, Any]) -> None:
    """Hold one field's value against its limits."""
    if value == "auto" and limits.get("auto"):
        return
    form = get_origin(kind) or limits.get("form")
    if form in (list, dict) and not isinstance(value, form):
        auto = "auto or " if limits.get("auto") else ""
        raise UserError(
            f"{name}={value}: give {auto}a {form.__name__}, for example {name}={limits['example']}"
        )
    if value in ([], {}) and "example" in limits:
        hint = f"give at least one, for example {name}={limits['example']}"
        raise UserError(f"{name}={value}: {hint}")
    if name == "k" and not any(value):
        raise UserError("k=[0]: 0 is plain decoding, which always runs; add a K >= 1")
    if limits.get("distinct"):
        for index, entry in enumerate(value):
            if entry in value[:index]:
                raise UserError(f"{name}: {entry} is given twice; list each once")
    entries = [(name, value)]
    if isinstance(value, dict):
        entries = [(f"{name}.{entry}", item) for entry, item in value.items()]
    elif form is list:
        entries = [(name, item) for item in value]
    for where, entry in entries:
        if "choices" in limits and entry not in limits["choices"]:
            known = ", ".join(limits["choices"])
            raise UserError(f"{where}: {entry!r} is unknown; use one of {known}")
        if "pattern" in limits and not limits["pattern"].fullmatch(entry):
            raise UserError(f"{where}: {entry!r} is unknown; use {limits['takes']}")
        whole = "int" in str(kind) or "whole" in limits
        if {"least", "above"} & limits.keys() and not _fits(entry, whole, limits):
            raise UserError(f"{where}: {entry!r} is not {_wanted(whole, limits)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _fits(value: Any, whole: bool, limits: Mapping[str, Any]) -> bool:
    if not _is_number(value) or (whole and not isinstance(value, int)):
        return False
    least, most = limits.get("least", -math.inf), limits.get("most", math.inf)
    above = limits.get("above", -math.inf)
    return (least <= value <= most and value > above) or (value == 0 and "zero" in limits)


def _wanted(whole: bool, limits: Mapping[str, Any]) -> str:
    """The numbers that are accepted, in words."""
    auto = "auto or " if "auto" in limits else ""
    zero = f"0 ({limits['zero']}) or " if "zero" in limits else ""
    low = f"of at least {limits['least']}" if "least" in limits else f"above {limits['above']}"
    high = f" and at most {limits['most']}" if "most" in limits else ""
    why = f" ({limits['why']})" if "why" in limits else ""
    return f"{auto}{zero}a {'whole ' if whole else ''}number {low}{high}{why}"


# Keys that an entry of `drafts` may set besides its name and id
DRAFT_KEYS = (
    "dtype",
    "attention",
    "revision",
    "device",
    "device_map",
    "quantization",
    "trust_remote_code",
    "allow_pickle",
)
_SETTING = re.compile(r"([a-z_]+)[:=](.+)")


@dataclass(frozen=True)
class DraftEntry:
    """An entry of `drafts`, taken apart.

    Attributes:
        name: of the draft group, or the user's own.
        id: hub id or folder; None where the name is one of the group.
        settings: keys of the draft group by name, as they were typed, known or not.
    """

    name: str
    id: str | None
    settings: dict[str, str]


def split_draft(entry: str) -> DraftEntry:
    """Take `name[@folder-or-hub-id][@key:value]...` apart; a folder's name may hold an @ itself."""
    name, *parts = entry.split("@")
    settings: dict[str, str] = {}
    while parts:
        match = _SETTING.fullmatch(parts[-1])
        # `embedded:tiny` looks like a key and its value, and is an id
        if match is None or (len(parts) == 1 and match[1] not in DRAFT_KEYS):
            break
        settings[match[1]] = match[2]
        parts.pop()
    return DraftEntry(name, "@".join(parts) if parts else None, dict(reversed(settings.items())))


def like_target(target: ModelConf, draft: ModelConf) -> ModelConf:
    """An auditioned draft with the target's kind of weights: `drafts` has no keys for its entries.

    Raises:
        UserError: random weights are wanted, and the draft's config has no architecture.
    """
    if target.weights != "dummy" or draft.id == NGRAM:
        return draft
    if not isinstance(draft.architecture, dict):
        raise UserError(
            f"drafts: {draft.name} has no architecture in its config, so it cannot have random "
            "weights like the target; name drafts that have one, for example drafts=[qwen3_0_6b]"
        )
    architecture_of(draft.architecture, f"drafts: {draft.name}: architecture")
    return replace(draft, weights="dummy")


SCHEMAS: dict[str, type[CommandConfig]] = {
    "profile": ProfileConfig,
    "breakeven": BreakevenConfig,
    "sweep": SweepConfig,
    "audition": AuditionConfig,
    "snapshot": SnapshotConfig,
    "report": ReportConfig,
}


def register(command: str) -> None:
    """Register a command's schema with Hydra as `<command>_schema`, which its yaml file builds on.

    Only that one: Hydra copies all it knows for every group that --help lists.
    """
    ConfigStore.instance().store(name=f"{command}_schema", node=SCHEMAS[command])

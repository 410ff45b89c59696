"""The configuration of each command: a schema, registered with Hydra, and the checks of its values.

Values come from the YAML files under conf/ and from the command line; Hydra merges them into the
dataclasses below, so a misspelt key or a word where a number belongs fails while composing. What a
key means, which `--help` prints, and what its type cannot say stand next to its field
(`key(1, "repeats", least=1)`), and what several fields must agree on in the schema's `check`, which
also fills in what follows from other keys. `checked` applies both, once per run, before any model
is loaded; every refusal is one line that names the key, what it holds and what would be accepted.

The dataclasses are mutable because Hydra merges into them; nothing here acts (no file is read, no
environment variable is set). The keys are the command line's contract: renaming one breaks users.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from functools import cache
from itertools import pairwise
from operator import attrgetter
from pathlib import Path, PurePath
from typing import Any, TypeVar, get_args, get_origin
from urllib.parse import urlsplit

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from harness.engine_facts.draft_kinds import DRAFTS, DraftSpec
from harness.engine_facts.engines import ENGINES, OWN, measurable, with_lines
from harness.records import MOST_K, RULES, LoopClock, UserError, Varying
from harness.theory.architecture import architecture_of

# The shipped YAML: inside the installed package, or next to it in a checkout
_PACKAGE = Path(__file__).resolve().parent
CONF_DIR = next(p for p in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if p.is_dir())
NEW_TOKENS = "tokens per generation; null: 48 (embedded, dummy) or 256 (others)"
DEVICE: dict[str, Any] = {
    "pattern": re.compile(r"auto|cpu|mps|cuda(:\d+)?"),
    "takes": "auto, cpu, mps, cuda or cuda:0",
}
DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTIONS = ("auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
CORES = os.cpu_count() or 1
# What prompts.sets and drafts are where they are not given
SHIPPED_SETS = ("easy", "hard")
EMBEDDED_DRAFTS = ("tiny_good", "tiny_small", "tiny_eagle3", "tiny_unrelated", "ngram")
# The entry of `drafts` that stands for every shipped draft that can serve the target
AUTO_DRAFTS = "auto"
# The entry of `drafts` that stands for draft.id=...
OWN_DRAFT = "hf"
# Of so many K a search for the fastest spares no server or one, so that all are measured
FEW_K = 3
# In `k` of a server run, a server that decides on K itself
ADAPTIVE = "adaptive"

Config = TypeVar("Config")


# ---- how a key is declared -----------------------------------------------------------------------


def key(default: Any, meaning: str, **limits: Any) -> Any:
    """A field, what it means in one line, and what its type cannot say.

    Args:
        default: of the field; a list is copied.
        meaning: what `--help` says of it.
        limits: of a number, or of each in a list: `least`, `most` (inclusive), `above` (exclusive),
            `zero` (0 is accepted as well), `whole` (where the type is Any), `words` that stand for
            one, `why` they are so. Of a text: `choices`, or what lists them, or a `pattern` and
            what it `takes`, and others that are `refused` for a reason. Of the value itself: `auto`
            is accepted, `distinct` entries, a `path`, whose ~ is the home folder, `form` (list or
            dict, where the type is Any), `example` of one (it must not be empty).
    """
    about = {"meaning": meaning, **limits}
    if isinstance(default, list):
        return field(default_factory=lambda: copy(default), metadata=about)
    return field(default=default, metadata=about)


# What an audition on servers tries where nothing is given
SERVED_KS, SERVED_THRESHOLDS = (1, 2, 4, 8, 16), (0.0, 0.5, 0.75, 0.9)
K_LIMITS: Mapping[str, Any] = {
    "least": 0,
    "most": MOST_K,
    "why": "no engine drafts more tokens a round",
    "distinct": True,
}
P_MIN = "a draft ends at a token below this probability"
P_MIN_LIMITS: Mapping[str, Any] = {
    "least": 0,
    "most": 0.999,
    "distinct": True,
    "example": "[0,0.5,0.75,0.9]",
}


def _grid(*default: int, meaning: str = "draft tokens per round; 0, plain, always runs") -> Any:
    return key([*default], meaning, example="[1,2,4]", **K_LIMITS)


def _temperatures(*default: float, meaning: str = "temperatures; 0 is greedy") -> Any:
    """The temperatures; logits divided by less overflow float32, by more all are alike."""
    limits: dict[str, Any] = {"least": 0.01, "most": 100, "zero": "greedy", "distinct": True}
    return key([*default], meaning, example="[0.0,1.0]", **limits)


def _tokens(default: int | None, meaning: str) -> Any:
    """A budget; Any, because null is filled in by `check`."""
    return key(default, meaning, whole=True, least=1, most=10_000_000, why="a run would not end")


def _repetitions(default: int, meaning: str) -> Any:
    return key(default, meaning, least=1, most=10_000, why="a run would not end")


def _until(meaning: str) -> Any:
    return key(None, meaning, choices=("decided", "all"))


def _number(default: Any, meaning: str, **limits: Any) -> Any:
    return key(default, meaning, auto=True, whole=True, least=1, **limits)


def _sizes(meaning: str) -> Any:
    return _number("auto", meaning, form=list, example="[1,4,16]", distinct=True)


# Keys of several commands
BUDGET_S = key(None, "with until=decided: seconds that measuring may take; null: any", above=0)
ENGINE = key(
    None, "vllm, sglang, llamacpp, mlx, ...: whose serving line comes first", choices=with_lines
)
API_KEY_ENV = key(None, "the environment variable that holds the servers' API key")
SERVED_NAME = key(None, "the target's name on a server that lists several models")
LOOP_CLOCK = key(
    "wall",
    "wall: elapsed; cpu: this process's processor time, if others run",
    choices=("wall", "cpu"),
)
TIMEOUT_FACTOR = key(
    1.0, "of every limit on the time of a request, for a very slow server", above=0
)


# ---- a model and its draft -----------------------------------------------------------------------


@dataclass(frozen=True)
class ModelKeys:
    """Names of a model and its keys in errors, as they can be typed.

    Attributes:
        group: of keys, model or draft.
        entry: the name of a draft that is an entry of `drafts`, which takes its keys.
    """

    group: str
    entry: str | None = None

    def named(self, name: str) -> str:
        return f"{self.group}={name}" if self.entry is None else f"drafts=[{self.entry}]"

    def of(self, key: str, value: object = None) -> str:
        if self.entry is None:
            return f"{self.group}.{key}" if value is None else f"{self.group}.{key}={value}"
        if key == "id" and str(value).startswith("embedded:"):
            return f"drafts=[{self.entry}]"
        value = "..." if value is None else value
        return f"drafts=[{self.entry}@{value if key == 'id' else f'{key}:{value}'}]"


def is_folder(model_id: str) -> bool:
    """True where a model's id is a folder, here or on another machine, and no hub id."""
    return model_id.startswith((".", "/", "~")) or Path(model_id).exists()


@dataclass
class ModelConf:
    """A model, and how to load it (groups model= and draft=)."""

    name: str = key("", "short name in tables and files; empty: the last part of the id")
    kind: str = key("model", "a head, a look-up, early_exit, ... (docs/keys.md)", choices=DRAFTS)
    id: str = key(
        MISSING, "hub id, local folder, or embedded:NAME of one that ships here", path=True
    )
    revision: str | None = key(None, "commit, tag or branch of the hub repository")
    dtype: str = key(
        "auto",
        "float32, bfloat16, float16; auto: as stored, unless slow here",
        choices=DTYPES,
    )
    weights: str = key(
        "pretrained",
        "pretrained, or dummy: random, in architecture's shape, for timing",
        choices=("pretrained", "dummy"),
    )
    device: str | None = key(None, "where this model goes, if not where device= says", **DEVICE)
    device_map: str | None = key(None, "passed to transformers (needs the accelerate extra)")
    attention: str = key(
        "auto",
        "transformers' attn_implementation: sdpa, eager, ...; auto: sdpa",
        choices=ATTENTIONS,
    )
    trust_remote_code: bool = key(False, "whether code from the model's repository may run")
    allow_pickle: bool = key(False, "whether weights may be read from pytorch_model.bin")
    quantization: str | None = key(
        None, "int8 or int4 (needs the quantization extra)", choices=("int8", "int4")
    )
    tokenizer_family: str | None = key(None, "shared by models of one tokenizer; for drafts=auto")
    layers: int | None = key(
        None, "of an early exit: how many of the target's layers; null: a quarter", least=1
    )
    block: int | None = key(None, "positions of a block or a P-EAGLE head; null: trained", least=2)
    head_of: str | None = key(None, "of a head: the id of the target that it was made for")
    gguf: str | None = key(
        None, "its GGUF file, for llama.cpp; null: that of an embedded model", path=True
    )
    # Any, as prompts.weights; `harness.theory.architecture` reads it
    architecture: Any = key(None, "its sizes: family, layers, ...; for floors and dummy weights")

    @property
    def spec(self) -> DraftSpec:
        return DRAFTS[self.kind]

    @property
    def keys(self) -> ModelKeys:
        if isinstance(self, DraftsEntry):
            return ModelKeys("draft", self.name)
        return ModelKeys("draft" if isinstance(self, DraftConf) else "model")

    @property
    def shown(self) -> str:
        """The model as errors name it."""
        return self.keys.named(self.name)

    @property
    def is_file(self) -> bool:
        """True where it is a GGUF file alone, without a checkpoint."""
        return self.id.endswith(".gguf")

    @property
    def served_names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.id, self.name, self.gguf) if name)

    @property
    def where(self) -> str:
        """Its id as errors name it."""
        if self.is_file and not isinstance(self, DraftsEntry):
            return f"{self.keys.group}={self.id}"
        return self.keys.of("id", self.id)

    def check(self) -> None:
        """Refuse an empty id and random weights without an architecture; fill in the name."""
        keys = self.keys
        if not self.id:
            raise UserError(f"{keys.of('id')}: empty; give a hub id or a local folder")
        name = PurePath(self.id.replace(":", "/")).name
        self.name = self.name or name.removesuffix(".gguf")
        if self.is_file:
            self.gguf = self.id
        if self.device is not None and self.device_map is not None:
            raise UserError(f"{keys.of('device')} and {keys.of('device_map')}: give one of the two")
        if self.weights != "dummy":
            return
        if not isinstance(self.architecture, dict):
            raise UserError(
                f"{keys.of('weights', 'dummy')}: {self.shown} has no architecture in its config; "
                f"choose one that has ({keys.group}=qwen3_4b) or give "
                f"{keys.of('architecture', '{family: qwen3, ...}')}"
            )
        architecture_of(self.architecture, keys.of("architecture"))
        for name in ("quantization", "device_map"):
            if getattr(self, name) is not None:
                raise UserError(
                    f"{keys.of(name)}: not with {keys.of('weights', 'dummy')}; leave it out"
                )


@dataclass
class DraftConf(ModelConf):
    """A draft, as the group draft= says."""


@dataclass
class DraftsEntry(DraftConf):
    """A draft, as an entry of `drafts` says."""


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
    "block",
    "layers",
    "kind",
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
    if entry.endswith(".gguf") and (not parts or "/" in name):  # a path, which may hold an @
        name, parts = PurePath(entry).stem, [entry]
    while parts:
        match = _SETTING.fullmatch(parts[-1])
        # `embedded:tiny` looks like a key and its value, and is an id
        if match is None or (len(parts) == 1 and match[1] not in DRAFT_KEYS):
            break
        settings[match[1]] = match[2]
        parts.pop()
    return DraftEntry(name, "@".join(parts) if parts else None, dict(reversed(settings.items())))


Draft = TypeVar("Draft", bound=ModelConf)


def of_target(target: ModelConf, draft: Draft) -> Draft:
    """A draft that is made of the target, with what it has from there; any other as it is.

    Raises:
        UserError: a copy of something else, or one that does not differ from the target.
    """
    weights = draft.spec.weights
    if weights == "target_layers":
        return replace(draft, weights=target.weights)
    if weights == "target_checkpoint" and draft.id == draft.kind:
        return replace(draft, id=target.id, revision=target.revision)
    if weights != "copy":
        return draft
    if draft.id not in ("copy", target.id):
        raise UserError(
            f"{draft.where}: {draft.shown} is a copy of the target; for another"
            " checkpoint leave its kind out"
        )
    dtype = target.dtype if draft.dtype == "auto" else draft.dtype
    other = {"name": draft.name, "dtype": dtype, "quantization": draft.quantization}
    copied = replace(draft, **{**vars(target), **other})
    if (copied.dtype, copied.quantization) == (target.dtype, target.quantization):
        raise UserError(
            f"{draft.shown}: a copy of the target must differ; give dtype or quantization"
        )
    return copied


def like_target(target: ModelConf, draft: Draft) -> Draft:
    """An auditioned draft with the target's kind of weights: `drafts` has no keys for its entries.

    Raises:
        UserError: random weights are wanted, and the draft's config has no architecture.
    """
    draft = of_target(target, draft)
    if target.weights != "dummy" or draft.spec.weights in ("none", "target_layers"):
        return draft
    if not isinstance(draft.architecture, dict):
        raise UserError(
            f"drafts: {draft.name} has no architecture in its config, so it cannot have random "
            "weights like the target; name drafts that have one, for example drafts=[qwen3_0_6b]"
        )
    architecture_of(draft.architecture, f"drafts: {draft.name}: architecture")
    return replace(draft, weights="dummy")


def check_ks(ks: Sequence[int], draft: ModelConf) -> None:
    """Raise a UserError for a K at which a draft proposes nothing."""
    least = draft.spec.least_k
    if any(0 < k < least for k in ks):
        enough = ",".join(str(k) for k in ks if k >= least) or least
        raise UserError(f"k: {draft.spec.phrase} drafts {least} tokens or more; give k=[{enough}]")


def check_replayed(draft: ModelConf) -> None:
    """Raise a UserError for a draft whose rounds replay does not know."""
    if not draft.spec.replayed:
        raise UserError(
            f"{draft.shown}: what {draft.spec.phrase.removeprefix('a ')} drafts depends on"
            " requests before, so it is measured, and not replayed: python -m harness.server"
            f" engine=llamacpp draft={draft.name} score=false model.gguf=FILE"
        )


# ---- other groups of keys ------------------------------------------------------------------------


@dataclass
class PromptsConf:
    """The prompts that texts are generated from."""

    sets: list[str] | None = key(
        None, "shipped sets; null: easy and hard, or none with files or hub", distinct=True
    )
    files: list[str] = key(
        [], "your own files instead: jsonl, json, csv, txt, ...", distinct=True, path=True
    )
    hub: str | None = key(None, "a hub data set instead, ORG/NAME or a folder", path=True)
    hub_subset: str | None = key(None, "its configuration")
    hub_split: str | None = key(None, "its split, or a slice of one, as test[:200]")
    hub_column: str | None = key(None, "its column that holds the prompt; null finds one")
    skip_unusable: bool | None = key(None, "whether entries that are no prompts are skipped")
    log: str | None = key(
        None, "a log of served requests, of which a sample stands for all", path=True
    )
    sample: int | None = key(None, "requests of prompts.log; null: 200", least=20, most=100_000)
    # Any, because auto is filled in by the command's `check`
    limit: Any = _number(None, "prompts of a set at most; auto: own files whole; null: all")
    limit_files: bool | None = key(None, "whether limit holds for own files; null: if not auto")
    # Any: into a typed dict Hydra's command line lets no new key
    weights: Any = key(
        None,
        "share of each prompt set in the workload; null: equal shares",
        least=0,
        form=dict,
        example="{easy:0.7,hard:0.3}",
    )
    chat_template: str = key(
        "auto",
        "auto (where the tokenizer has one), always, never",
        choices=("auto", "always", "never"),
    )
    enable_thinking: Any = key(False, "thinking mode of chat templates; [false,true]: both")
    system: str | None = key(None, "system message of conversations without one of their own")
    max_turns: int | None = key(None, "turns of each conversation at most; null: all", least=1)

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

    def check(self) -> None:
        """Refuse a workload without prompts, or without a weight; fill in the shipped sets."""
        for name in ("sets", "files", "hub", "weights", "max_turns") if self.log else ():
            if getattr(self, name):
                raise UserError(
                    f"prompts.{name}: not with prompts.log, whose requests are the workload"
                )
        if self.sets is None:
            self.sets = [] if self.files or self.hub or self.log else [*SHIPPED_SETS]
        if not self.sets and not self.files and not self.hub and not self.log:
            raise UserError("prompts.sets=[] and prompts.files=[]: give at least one")
        needs = dict.fromkeys(("hub_subset", "hub_split", "hub_column"), "hub=ORG/NAME")
        for name, source in {**needs, "sample": "log=FILE"}.items():
            if getattr(self, name) is not None and not getattr(self, source.partition("=")[0]):
                raise UserError(f"prompts.{name}: only with prompts.{source}")
        if self.system is not None and not self.system.strip():
            raise UserError("prompts.system: empty; give the message, or null for none")
        if self.weights is not None and not sum(self.weights.values()):
            raise UserError("prompts.weights: all are 0; give at least one set a share")
        _ = self.thinking_modes


@dataclass
class DeviceConf:
    """The device of both models."""

    name: str = key("auto", "cuda, cuda:N, mps or cpu; auto: cuda, else mps, else cpu", **DEVICE)


@dataclass
class DecodeConf:
    """Sampling, of draft and target alike, and the acceptance of drafts."""

    top_k: int | None = key(None, "keep the top_k likeliest tokens; null: all", least=1)
    top_p: float | None = key(
        None, "keep the fewest tokens with this much probability; null: all", above=0, most=1
    )
    min_p: float | None = key(
        None, "keep tokens with this share of the likeliest one's probability", above=0, most=1
    )
    repetition_penalty: float | None = key(
        None, "for tokens that are in the prompt or the text already", least=0.01, most=100
    )
    stop_strings: list[str] | None = key(None, "texts that end a generation", distinct=True)
    rule: str | None = key(
        None,
        "ratio, exact_match, greedy_draft, block; null: the usual one",
        choices=RULES,
        refused={"fly": "vLLM's fly accepts tokens that the target rejects: its text is another's"},
    )
    acceptance: Any = key(None, "synthetic: alpha, a list of rates by position, or {k: either}")

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty not in (None, 1.0)

    def check(self) -> None:
        for text in self.stop_strings or ():
            if not text:
                raise UserError("decode.stop_strings: an empty string would end every text")
            if "\\n" in text:
                raise UserError(
                    f"decode.stop_strings: {text} holds a backslash and an n, not a line break; "
                    f"in a shell write $'decode.stop_strings=[\"\\n\\n\"]'"
                )


@dataclass
class GpuConf:
    """A card: what it can do, and what an hour of it costs (group gpu=)."""

    name: str = key(MISSING, "as in conf/gpu")
    bandwidth_gb_s: float = key(MISSING, "of its memory, 10^9 bytes per second")
    bf16_tflops: float = key(MISSING, "dense bf16 matrix products")
    memory_gb: float = key(MISSING, "10^9 bytes")
    price_per_hour_usd: float = key(MISSING, "on demand, for one card", least=0)
    source: str = key(MISSING, "where these were looked up")
    date: str = key(MISSING, "when")


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


@dataclass
class LatencyConf:
    """Step times from elsewhere (another engine's TPOT, say), in milliseconds."""

    measure: bool = key(False, "with traces_from: time the steps here, and score new drafts")
    target_ms: float | None = key(None, "one step of the target", above=0)
    draft_ms: Any = key(None, "one step of each draft, or {name: ms}", above=0)
    verify_ms: list[float] | None = key(
        None, "entry i: the target over i positions; null: as one step", above=0, example="[12,13]"
    )


# ---- commands ------------------------------------------------------------------------------------


@dataclass
class CommandConfig:
    """Keys of every command."""

    results_root: str = key("results", "folder of the run folders", path=True)
    seed: int = key(0, "of all random numbers", least=0, most=2**63 - 1)
    # Any: true, false or tables
    verbose: Any = key(
        False,
        "tables: print the answer's tables too; true: the whole report",
        choices=(False, "tables", True),
    )
    json: bool = key(False, "print the answer and the rows as one JSON document")
    debug: bool = key(False, "show the traceback of an error")

    def doing(self, command: str) -> str:
        models = (getattr(self, role, None) for role in ("model", "draft"))
        pair = " with ".join(conf.name for conf in models if conf is not None)
        return f"{command} of {pair}" if pair else command


@dataclass
class ModelsConfig(CommandConfig):
    """Keys of every command that runs models."""

    model: ModelConf = field(default_factory=ModelConf)
    prompts: PromptsConf = field(default_factory=PromptsConf)
    device: DeviceConf = field(default_factory=DeviceConf)
    decode: DecodeConf = field(default_factory=DecodeConf)
    k: list[int] = _grid(1, 2, 4, 8)
    new_tokens: Any = _tokens(None, NEW_TOKENS)
    repetitions: int = _repetitions(1, "measured repeats of each generation")
    threads: Any = _number(
        "auto", "CPU threads; auto: measured", most=CORES, why="logical cores here"
    )
    backend: str = key(
        "auto",
        "eager or cuda_graphs; auto: graphs on CUDA where the model allows",
        choices=("auto", "eager", "cuda_graphs"),
    )
    resume: str | None = key(None, "a run folder to continue; its keys are used", path=True)
    dry_run: bool = key(False, "print what would be run, and stop")

    @property
    def speculative_ks(self) -> list[int]:
        """The K above 0, which is plain decoding and always runs."""
        return [k for k in self.k if k > 0]

    @property
    def thresholds(self) -> list[float]:
        """The `p_min` above 0 of drafts here; those of a server run are its servers'."""
        p_mins = self.p_min if isinstance(self, SweepConfig | AuditionConfig) else None
        return [p_min for p_min in p_mins or () if p_min]

    @property
    def prompts_of_a_set(self) -> int:
        """The value of prompts.limit=auto, of sets not from files: the fewest with an interval."""
        return 8

    @property
    def on_servers(self) -> bool:
        """True of an audition of GGUF files, whose drafts run on servers that it starts."""
        return isinstance(self, AuditionConfig) and self.model.is_file

    @property
    def loop_clock(self) -> LoopClock:
        """The clock of the harness's own loop; a server's is another one."""
        if isinstance(self, SweepConfig | AuditionConfig) and self.clock == "cpu":
            return "cpu"
        return "wall"

    def check(self) -> None:
        """Refuse what changes how the loop runs, where it is not measured.

        Fills in the rule, new_tokens, prompts.limit and whether it holds for files.
        """
        if self.prompts.limit_files is None:
            self.prompts.limit_files = self.prompts.limit != "auto"
        if self.prompts.limit == "auto":
            self.prompts.limit = self.prompts_of_a_set
        served = isinstance(self, ServerConfig) or self.on_servers
        engine = ENGINES[str(getattr(self, "engine", None))] if served else OWN
        if self.decode.rule is None:
            self.decode.rule = engine.rule
        if self.new_tokens is None:
            self.new_tokens = usual_new_tokens(self.model.id, self.model.weights)
        started = served and getattr(self, "url", None) is None
        for role in ("model", "draft") if not (started and engine.reads_gguf) else ():
            conf = getattr(self, role, None)
            if conf is not None and conf.gguf is not None:
                where = conf.where if conf.is_file else f"{role}.gguf"
                instead = "give a checkpoint" if conf.is_file else "leave it out"
                raise UserError(
                    f"{where}: read by llama.cpp alone, where harness.server engine=llamacpp"
                    f" or harness.audition starts it; {instead}"
                )
        timed = isinstance(self, ProfileConfig | SweepConfig)
        timed = timed and getattr(self, "mode", "measure") == "measure"
        if self.decode.acceptance is not None and not timed:
            raise UserError("decode.acceptance: only a sweep with mode=measure runs such a loop")
        for k in self.speculative_ks if self.decode.acceptance is not None else ():
            rates_for(self.decode.acceptance, k)


@dataclass
class PairConfig(ModelsConfig):
    """Keys of every command that runs a target with one draft."""

    draft: DraftConf = field(default_factory=DraftConf)

    def check(self) -> None:
        super().check()
        self.draft = of_target(self.model, self.draft)
        if self.model.name == self.draft.name and self.model.id != self.draft.id:
            raise UserError(
                f"draft.name={self.draft.name}: the same as model.name, of another model; "
                "give one of them another name (draft.name=...)"
            )
        check_ks(self.k, self.draft)
        self._check_files()
        if not self.draft.spec.looks_up and self.model.weights != self.draft.weights:
            raise UserError(
                f"model.weights={self.model.weights} and draft.weights={self.draft.weights}: their "
                "tokenizers cannot be compared; set both to dummy or both to pretrained"
            )

    def _check_files(self) -> None:
        """Refuse a file next to a checkpoint, and what takes the weights of a checkpoint."""
        model, draft, rule = self.model, self.draft, self.decode.rule
        if draft.spec.weights == "own" and not draft.spec.reads_states:
            checkpoint, file = (draft, model) if model.is_file else (model, draft)
            if model.is_file != draft.is_file:
                raise UserError(
                    f"{checkpoint.where}: {file.where} is a GGUF file alone; give that of"
                    f" {checkpoint.name} as {checkpoint.keys.group}=FILE.gguf, or the checkpoint of"
                    f" {file.name} with {file.keys.group}.gguf=FILE"
                )
        if not model.is_file or not getattr(self, "score", True):
            return
        if draft.spec.reads_states:
            raise UserError(
                f"{draft.shown}: is scored by the target's states, which {model.where} does not"
                " give; give the checkpoint with model.gguf=FILE, or score=false"
            )
        sampled = any(getattr(self, "temperature", ()))
        if sampled and rule != "greedy_draft" and not draft.spec.looks_up:
            raise UserError(
                f"decode.rule={rule}: above temperature 0 it is replayed from the weights of a"
                f" checkpoint, and {model.where} is a file; give temperature=0, score=false, or the"
                " checkpoint with model.gguf=FILE"
            )


@dataclass
class ProfileConfig(PairConfig):
    """Keys of `python -m harness.profile`."""

    k: list[int] = _grid(1, 2, 4, 8, meaning="draft tokens per round")
    new_tokens: Any = _tokens(128, NEW_TOKENS)
    contexts: Any = _sizes("tokens before a timed step; auto: a few that fit")
    batches: Any = _sizes("sequences side by side in a timed step; auto: a few that fit")
    gpu: GpuConf | None = None


@dataclass
class SweepConfig(PairConfig):
    """Keys of `python -m harness.sweep`."""

    gpu: GpuConf | None = None
    temperature: list[float] = _temperatures(0.0, 1.0)
    p_min: list[float] = key([0.0], f"next to K: {P_MIN}", **P_MIN_LIMITS)
    engine: str | None = ENGINE
    mode: str = key(
        "measure",
        "measure: run generations; replay: from the target's texts alone",
        choices=("measure", "replay"),
    )
    until: str | None = _until("decided: one K, until verdicts are; all: every K on every prompt")
    budget_s: float | None = BUDGET_S
    clock: str = LOOP_CLOCK
    latency_from: str | None = key(
        None, "with mode=replay: a server run whose engine is predicted", path=True
    )

    @property
    def prompts_of_a_set(self) -> int:
        """Replay makes prompts cheap, and of those that are measured it takes what it needs."""
        return 64 if self.until == "decided" else super().prompts_of_a_set

    @property
    def not_in_looks(self) -> str | None:
        """The reason why replay cannot choose the K, so that every cell is measured; else None."""
        if self.mode == "replay":
            return "mode=replay, which runs no cell"
        if self.decode.acceptance is not None:
            return "decode.acceptance, with which no text is the target's to be replayed"
        if self.thresholds and self.decode.penalises:
            return f"p_min={self.p_min} and a penalty, which are not replayed together"
        return None

    def check(self) -> None:
        self.until = _checked_until(self)
        super().check()
        if self.latency_from is not None and self.mode == "measure":
            raise UserError(
                "latency_from: a sweep that measures times its own rounds; give mode=replay"
            )
        _check_thresholds(self)
        if self.thresholds and self.draft.spec.looks_up:
            raise UserError(
                f"p_min={self.p_min}: draft={self.draft.name} gives its tokens no probability that"
                " a threshold could be compared with; leave it out"
            )
        if self.until == "all" and self.mode == "measure" and len(self.p_min) > 1:
            why = f", as with {self.not_in_looks}" if self.not_in_looks else ""
            raise UserError(
                f"p_min={self.p_min}: until=all{why} measures every K at one threshold; give one"
            )
        if self.thresholds and self.decode.acceptance is not None:
            raise UserError("decode.acceptance and p_min: give one of the two")
        if self.thresholds and self.mode == "replay" and self.decode.penalises:
            raise UserError(
                f"p_min={self.p_min}: not replayed with decode.repetition_penalty; leave one out"
            )


def _check_thresholds(config: "SweepConfig | AuditionConfig") -> None:
    if not config.thresholds:
        return
    from harness.theory.acceptance_rules import ACCEPTANCE_RULES  # imports numpy

    rules, asked = ACCEPTANCE_RULES.items(), f"p_min={config.p_min}"
    if any(name == config.decode.rule and rule.rejected == "unknown" for name, rule in rules):
        raise UserError(
            f"{asked}: what is drafted after a rejected token is not replayed by"
            f" decode.rule={config.decode.rule}; give one of the two"
        )
    if config.backend == "cuda_graphs":
        raise UserError(
            f"{asked}: reads every draft step back, which a recorded graph cannot; use"
            " backend=eager"
        )


def usual_new_tokens(model_id: str, weights: str) -> int:
    """The value of new_tokens where none is given: fewer for a model that stands in for others."""
    return 48 if model_id.startswith("embedded:") or weights == "dummy" else 256


def _checked_until(config: "SweepConfig | AuditionConfig | ServerConfig") -> str:
    """The value of `until`, also where it was left out, checked against the other keys."""
    reason = config.not_in_looks
    until = config.until or ("all" if reason else "decided")
    if until == "decided" and reason:
        raise UserError(f"until=decided: not with {reason}; leave until out")
    # A server's budget is of all that it asks, whatever that is
    if until == "all" and config.budget_s is not None and not isinstance(config, ServerConfig):
        why = f", as it is with {reason}" if reason else ""
        raise UserError(f"budget_s: not with until=all{why}; leave it out")
    return until


def check_address(key: str, url: str) -> None:
    """Refuse what is no server's address, or holds more, of which some may be secret."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"{key}: {url!r} is not an address; write http://HOST:PORT")
    if parts.username or parts.query:  # of which one may be a key, so it is not repeated
        raise UserError(
            f"{key}: the address at {parts.hostname} holds more than host, port and path; name the"
            " variable that holds a key: api_key_env=NAME"
        )


@dataclass
class ServerConfig(PairConfig):
    """Keys of `python -m harness.server`: a pair on the engine that will serve it."""

    gpu: GpuConf | None = None
    temperature: list[float] = _temperatures(0.0, 1.0)
    k: list[Any] = key(
        [1, 2, 4, 8],
        "draft tokens per round; 0 always runs; adaptive: by the engine",
        example="[1,2,4]",
        words=(ADAPTIVE,),
        whole=True,
        **K_LIMITS,
    )
    p_min: list[float] = key(
        [0.0], f"{P_MIN}; one value; 0: none", **{**P_MIN_LIMITS, "example": "[0.75]"}
    )
    adaptive: bool = key(False, "whether a server that decides on K itself is measured, too")
    schedule: Any = key(
        None,
        "K by requests side by side, [low,high,K] each; a candidate",
        form=list,
        example="[[1,4,5],[5,16,2]]",
    )
    engine: str = key("llamacpp", ", ".join(measurable()), choices=measurable)
    url: list[str] | None = key(None, "servers that run, the plain one first, then one per K")
    api_key_env: str | None = API_KEY_ENV
    served_name: str | None = SERVED_NAME
    concurrency: list[int] = key(
        [1],
        "requests decoded side by side, a closed loop for each number",
        least=1,
        most=1024,
        why="no server here decodes more",
        distinct=True,
        example="[1,2,4,8]",
    )
    rate: list[float] | None = key(
        None,
        "requests/s at random; slots: the largest concurrency, or 8",
        above=0,
        distinct=True,
        example="[2,5]",
    )
    until: str | None = _until("decided: the best K, of four or more; all: every K, as under load")
    budget_s: float | None = key(1800.0, "seconds that all of it may take; null: any", above=0)
    repetitions: int = _repetitions(5, "visits: each asks every server for every prompt")
    clock: str = key(
        "engine",
        "engine: its own clock; cpu: its processor time, for a busy machine",
        choices=("engine", "cpu"),
    )
    score: bool = key(True, "whether both models are loaded, for replay; else a tokenizer")
    servers: Any = _number("auto", "servers that run at a time; auto: all that fit the memory")
    flags: list[str] = key([], "further flags of the servers that are started")
    timeout_factor: float = TIMEOUT_FACTOR

    @property
    def not_in_looks(self) -> str | None:
        """The reason why replay cannot choose the K, so that every K is measured; else None."""
        engine = ENGINES[self.engine]
        if self.url is not None:
            return "url, whose servers run"
        if not self.score:
            return "score=false, which leaves nothing to be replayed"
        if max(self.concurrency) > 1 or self.rate:
            return "concurrency or rate, by which every K is put under load"
        if engine.counting is None or engine.rule is None:
            return f"engine={self.engine}, whose rounds are not known"
        if len(self.speculative_ks) <= FEW_K:
            return f"{FEW_K} K or fewer, of which all are measured"
        return None

    @property
    def not_with_url(self) -> tuple[str, ...]:
        if self.url is None:
            return ()
        default = ServerConfig()
        settings = ("threads", "servers", "flags")
        return tuple(name for name in settings if getattr(self, name) != getattr(default, name))

    @property
    def varying(self) -> tuple[Varying, ...]:
        """The kinds of servers with a changing K that are measured besides those of one K."""
        by_load: tuple[Varying, ...] = () if self.schedule is None else ("schedule",)
        return (*by_load, "adaptive") if self.adaptive else by_load

    @property
    def threshold(self) -> float:
        """The probability below which a draft's token ends its draft; 0: none."""
        return float(self.p_min[0])

    def check(self) -> None:
        if ADAPTIVE in self.k:
            self.adaptive, self.k = True, [k for k in self.k if k != ADAPTIVE]
        if not any(self.k):
            raise UserError(f"k=[{ADAPTIVE}]: give K to compare with, as k=[4,{ADAPTIVE}]")
        _check_varying(self)
        super().check()
        _check_threshold(self)
        self.until = _checked_until(self)
        for url in self.url or ():
            check_address("url", url)
        if self.decode.stop_strings:
            raise UserError("decode.stop_strings: not with servers, which are asked for token ids")
        if self.url is not None and self.clock == "cpu":
            raise UserError(
                "clock=cpu: not with url=, since the processor time of a server that runs elsewhere"
                " is not known; leave clock out, or let the run start the servers"
            )
        if self.clock == "cpu" and self.threads not in ("auto", 1, "1"):
            raise UserError(
                f"clock=cpu: not with threads={self.threads}, since threads that wait for each"
                " other take processor time meanwhile; give threads=1, or leave clock out"
            )
        if self.url is not None and self.engine == OWN.name:
            raise UserError("url: engine=own decodes in this process; leave it out")
        if self.engine == OWN.name and not self.score:
            raise UserError("score=false: engine=own decodes with the weights; leave it out")
        if self.engine == OWN.name and (max(self.concurrency) > 1 or self.rate):
            raise UserError("concurrency: engine=own decodes one request at a time; leave it out")


def _check_varying(config: ServerConfig) -> None:
    """Refuse a schedule that is none, or no load to measure it under."""
    before = 0
    for entry in config.schedule or ():
        whole = isinstance(entry, list) and all(type(number) is int for number in entry)
        if not whole or len(entry) != 3 or not before < entry[0] <= entry[1] or entry[2] < 0:
            raise UserError(
                f"schedule: {entry} is not [lowest, highest, K] with more requests than the"
                " entry before it; give for example schedule=[[1,4,5],[5,16,2]]"
            )
        before = entry[1]
    if config.schedule and (config.schedule[0][0] != 1 or not any(k for *_, k in config.schedule)):
        raise UserError(
            f"schedule={config.schedule}: give K from 1 request on, and a K of 1 or more in it"
        )
    for name in config.varying:
        asked = "schedule" if name == "schedule" else f"k={ADAPTIVE}"
        if config.url is not None:
            raise UserError(f"{asked}: not with url=, whose servers have one K each")
        if max(config.concurrency) == 1 and config.rate is None:
            raise UserError(
                f"{asked}: its K is measured under load; give the loads, as concurrency=[1,4,16]"
            )


def _check_threshold(config: ServerConfig) -> None:
    if len(config.p_min) != 1:
        raise UserError(
            f"p_min={config.p_min}: give one value a run, as p_min=[0.75]; of GGUF files"
            " harness.audition compares several"
        )
    if not config.threshold:
        return
    asked, draft = f"p_min={config.p_min}", config.draft
    if not ENGINES[config.engine].drops_unlikely:
        raise UserError(f"{asked}: engine={config.engine} has no such threshold; llamacpp has it")
    if config.url is not None:
        raise UserError(f"{asked}: not with url=, whose servers have their own; leave it out")
    if draft.kind != "model":
        raise UserError(f"{asked}: draft={draft.name} is no draft model; leave p_min out")
    if any(config.temperature):
        raise UserError(f"{asked}: replayed at temperature 0 alone; give temperature=[0]")
    if not config.score:
        raise UserError(f"{asked}: not with score=false, which asks the draft for nothing")
    if config.varying or max(config.concurrency) > 1 or config.rate:
        raise UserError(f"{asked}: not under load; leave concurrency, rate and schedule out")


@dataclass
class AuditionConfig(ModelsConfig):
    """Keys of `python -m harness.audition`: many drafts, one target."""

    draft: DraftConf | None = None
    drafts: list[str] | None = key(
        None, "auto, names of conf/draft, hf, name@folder-or-hub-id", path=True
    )
    gpu: GpuConf | None = None
    k: list[int] = _grid(1, 2, 3, 4, 5, 6, 8, 10)
    temperature: list[float] = _temperatures(0.0, 1.0)
    batch: int = key(32, "completions of the target generated together", least=1)
    until: str | None = _until("decided: losing drafts are dropped; all: every cell is measured")
    budget_s: float | None = BUDGET_S
    engine: str | None = ENGINE
    p_min: list[float] | None = key(None, f"next to K: {P_MIN}", **P_MIN_LIMITS)
    flags: list[str] = key([], "of files: further flags of the servers")
    traces_from: str | None = key(
        None, "a run whose texts, scores and other keys are used", path=True
    )
    texts_from: str | None = key(None, "a target's server, http://HOST:PORT, for its completions")
    api_key_env: str | None = API_KEY_ENV
    served_name: str | None = SERVED_NAME
    timeout_factor: float = TIMEOUT_FACTOR
    clock: str = LOOP_CLOCK
    latency_from: str | None = key(
        None, "a run whose times are used; a server run: its engine's", path=True
    )
    latency: LatencyConf = field(default_factory=LatencyConf)
    combine: list[str] = key(
        [], "auditions of one target by card, to be ranked", distinct=True, path=True
    )

    def doing(self, command: str) -> str:
        if self.combine:
            return f"ranking the cards of {len(self.combine)} auditions"
        names = ", ".join(split_draft(entry).name for entry in self.drafts or [])
        return f"{command} of {names} for {self.model.name}"

    def check(self) -> None:
        if self.on_servers:
            _check_served(self)
        elif self.flags:
            raise UserError(
                "flags: of servers, which an audition starts for model=FILE.gguf; leave it out"
            )
        self.p_min = [0.0] if self.p_min is None else self.p_min
        self.until = _checked_until(self)
        super().check()
        _check_thresholds(self)
        _check_sources(self)
        if self.drafts is None:
            self.drafts = [self.draft.name] if self.draft else [*EMBEDDED_DRAFTS]
        elif self.draft and not {OWN_DRAFT, self.draft.name} & {*self.drafts}:
            raise UserError(
                f"draft={self.draft.name} and drafts: give one of the two, or name it in drafts"
            )

    @property
    def prompts_of_a_set(self) -> int:
        """Replay makes prompts cheap."""
        return 16

    @property
    def not_in_looks(self) -> str | None:
        """The reason why no draft is dropped: scores or times are from elsewhere; else None."""
        if self.texts_from is not None:
            return "texts_from, with which nothing is timed here"
        if self.traces_from is not None and not self.latency.measure:
            return "traces_from, where every score is known"
        return None


def _check_served(config: AuditionConfig) -> None:
    """Refuse what is not of an audition on servers; fill in its grid."""
    config.engine = config.engine or "llamacpp"
    if not ENGINES[config.engine].reads_gguf:
        raise UserError(
            f"engine={config.engine}: {config.model.where} is a GGUF file, which llamacpp serves;"
            " leave engine out, or give a checkpoint"
        )
    if AUTO_DRAFTS in (config.drafts or ()):
        raise UserError(
            f"drafts=[{AUTO_DRAFTS}]: of checkpoints; name GGUF files next to"
            f" {config.model.where}, as drafts=[A.gguf,ngram_simple]"
        )
    default = AuditionConfig()
    if config.temperature == default.temperature:
        config.temperature = [0.0]
    if any(config.temperature):
        raise UserError(
            f"temperature={config.temperature}: drafts on servers are compared at 0; give"
            " temperature=[0], and measure one at others with harness.server"
        )
    if config.k == default.k:
        config.k = [*SERVED_KS]
    if config.p_min is None:
        config.p_min = [*SERVED_THRESHOLDS]
    if config.new_tokens is None:  # each draft scores every token by itself
        config.new_tokens = 64
    latency = ("latency.measure", "latency.target_ms", "latency.draft_ms")
    for name in ("texts_from", "traces_from", "latency_from", *latency):
        if attrgetter(name)(config):
            raise UserError(f"{name}: not with {config.model.where}, whose servers are timed")


def _check_sources(config: AuditionConfig) -> None:
    """Refuse what does not go with texts, scores and times from elsewhere."""
    timed = config.latency.target_ms is not None or config.latency_from is not None
    for draft in map(split_draft, config.drafts or ()):
        if draft.id is not None and draft.id.startswith(("http://", "https://")):
            raise UserError(
                f"drafts: {draft.name}: a server's address; drafts are scored here, give"
                " name@folder-or-hub-id (texts_from= takes the target's texts from a server)"
            )
    if config.texts_from is not None:
        check_address("texts_from", config.texts_from)
        if config.decode.stop_strings:
            raise UserError("texts_from: not with decode.stop_strings, which a server may cut")
    if config.texts_from and config.traces_from:
        raise UserError("texts_from and traces_from: give one of the two")
    if config.texts_from and not timed:
        raise UserError(
            "texts_from: nothing is timed here; give latency.target_ms= and latency.draft_ms=,"
            " or latency_from=RUN"
        )
    if config.latency.measure and config.traces_from is None:
        raise UserError("latency.measure: with traces_from=RUN only; else steps are timed")
    if config.latency.measure and timed:
        raise UserError("latency.measure: not with latency_from or latency.target_ms; give one")
    penalty = "decode.repetition_penalty" if config.decode.penalises else None
    source = "texts_from" if config.texts_from else "traces_from" if config.traces_from else penalty
    if config.thresholds and source and not config.on_servers:
        raise UserError(f"p_min={config.p_min}: not with {source}; leave one out")


@dataclass
class SnapshotConfig(PairConfig):
    """Keys of `python -m harness.snapshot`."""

    k: list[int] = _grid(4)
    temperature: list[float] = _temperatures(0.0, meaning="0: texts; above: draws, by chi-square")
    new_tokens: Any = _tokens(64, NEW_TOKENS)
    draws: int = key(
        5000,
        "samples from the one forced prefix above temperature 0",
        least=5000,
        most=1_000_000,
        why="fewer test little, more take hours",
    )

    def check(self) -> None:
        """A dtype that is left open is float32.

        Rounding in 16 bits flips near ties between a verify and a step, and in 32 bits bugs are
        told from ties. A copy in another dtype, which is a draft of its own, keeps that.
        """
        if self.model.dtype == "auto":
            self.model = replace(self.model, dtype="float32")
        if self.draft.dtype == "auto":
            self.draft = replace(self.draft, dtype="float32")
        super().check()


@dataclass
class BreakevenConfig(CommandConfig):
    """Keys of `python -m harness.breakeven`: arithmetic from latencies, no model."""

    draft_ms: float | None = key(None, "one step of the draft, milliseconds")
    target_ms: float | None = key(None, "one step of the target, milliseconds")
    verify_ms: list[float] | None = key(None, "entry i: target over i positions; null: one step")
    alpha: list[float] = key([0.2, 0.4, 0.6, 0.8, 0.9, 1.0], "alphas to tabulate")
    k: list[int] = _grid(1, 2, 3, 4, 5, 6, 8, 10, meaning="draft tokens per round")
    acceptance_rate: Any = key(
        None, "measured accepted / drafted: for one k, or {k: rate}", example="{4:0.34,8:0.21}"
    )
    acceptance_by_position: list[float] | None = key(
        None, "measured share of rounds that kept at least j tokens", example="[0.7,0.5]"
    )
    acceptance_from: str | None = key(
        None, "acceptance from a file of `vllm bench serve --save-result`", path=True
    )
    baseline_from: str | None = key(
        None, "target_ms from such a file without speculation", path=True
    )
    latency_from: str | None = key(None, "a run whose step and round times are used", path=True)


@dataclass
class PlanConfig(CommandConfig):
    """Keys of `python -m harness.plan`: a latency goal at a rate of requests."""

    run: str = key(MISSING, "a server run with concurrency=[...], timed by clock=engine", path=True)
    rate: float = key(MISSING, "requests per second, of all cards together", above=0, most=1e9)
    tpot_ms: float | None = key(None, "the goal: time per output token at most", above=0)
    ttft_ms: float | None = key(None, "the goal: time to first token at most", above=0)
    percentile: float = key(95, "of the requests that meet the goal", least=1, most=99.9)
    temperature: list[float] | None = key(
        None, "of the run, one, whose requests; null: its first", least=0, example="[0]"
    )
    slots: int | None = key(None, "requests side by side on a card; null: most timed", least=1)
    cache_tokens: list[int] | None = key(
        None,
        "tokens that a card holds, plain and drafting; null: all slots'",
        least=1,
        example="[700000,650000]",
    )
    arrivals: str | None = key(
        None, "a log, or time stamps, seconds, one a line; null: at random", path=True
    )
    seeds: int = key(8, "simulated sequences of requests and arrivals", least=2, most=1000)
    requests: int = key(400, "of each sequence", least=100, most=100_000)
    gpu: GpuConf | None = None
    dry_run: bool = key(False, "say what is known and what is missing, and stop")

    def check(self) -> None:
        if self.tpot_ms is None and self.ttft_ms is None:
            raise UserError("tpot_ms: no goal is given; give tpot_ms=... or ttft_ms=..., or both")
        if self.temperature is not None and len(self.temperature) > 1:
            raise UserError(f"temperature={self.temperature}: a plan is for one; give one of them")
        if self.cache_tokens is not None and len(self.cache_tokens) > 2:
            raise UserError(
                f"cache_tokens={self.cache_tokens}: give one number, or that of a plain server and"
                " that of one with a draft"
            )


@dataclass
class ReportConfig(CommandConfig):
    """Keys of `python -m harness.report`."""

    run: str | None = key(None, "the run folder to render again", path=True)
    runs: list[str] = key([], "run folders to compare, the first is the reference", path=True)
    index: str | None = key(None, "a results folder: one page over all its runs", path=True)
    records: list[str] = key(
        [], "requests that an engine's server recorded", distinct=True, path=True
    )
    metrics: str | None = key(None, "a running server, http://HOST:PORT: what its counters say")
    api_key_env: str | None = API_KEY_ENV
    served_name: str | None = SERVED_NAME
    latency_from: str | None = key(
        None, "with metrics: a run whose round times price every K", path=True
    )
    k: list[int] | None = key(None, "with records: K of each file; null: as they say", least=0)
    temperature: list[float] | None = key(
        None,
        "with records: of all requests; with metrics: of latency_from=; one",
        least=0,
        example="[0]",
    )
    engine: str | None = ENGINE
    png: bool = key(False, "with run: write plots/*.png next to the svg files")
    fail_below: float | None = key(None, "exit status 1 below this speedup, or ratio (runs=)")

    def check(self) -> None:
        if self.metrics is not None:
            check_address("metrics", self.metrics)


SCHEMAS: dict[str, type[CommandConfig]] = {
    "profile": ProfileConfig,
    "breakeven": BreakevenConfig,
    "sweep": SweepConfig,
    "audition": AuditionConfig,
    "server": ServerConfig,
    "snapshot": SnapshotConfig,
    "plan": PlanConfig,
    "report": ReportConfig,
}


@cache
def register(command: str) -> None:
    """Register a command's schema with Hydra as `<command>_schema`, which its yaml file builds on.

    Only that one: Hydra copies all it knows for every group that --help lists.
    """
    ConfigStore.instance().store(name=f"{command}_schema", node=SCHEMAS[command])


# ---- how values are checked ----------------------------------------------------------------------


def checked(config: Config, name: str = "") -> Config:
    """The same configuration, its values checked and an empty model name filled in from the id.

    Raises:
        UserError: the first value that cannot be used.
    """
    assert is_dataclass(config)
    for entry in fields(config):
        dotted, value = f"{name}.{entry.name}".lstrip("."), getattr(config, entry.name)
        if isinstance(config, ModelConf):
            dotted = config.keys.of(entry.name)
        if is_dataclass(value):
            checked(value, dotted)
        elif value is not None and entry.metadata:
            _check(dotted, value, entry.type, entry.metadata)
    if (check := getattr(config, "check", None)) is not None:
        check()
    return config


def _check(name: str, value: Any, kind: Any, limits: Mapping[str, Any]) -> None:
    if value == "auto" and limits.get("auto"):
        return
    kinds = (get_origin(one) for one in (kind, *get_args(kind)))
    form = next((one for one in kinds if one in (list, dict)), limits.get("form"))
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
        if isinstance(entry, list | dict) and "list[str]" in str(kind):
            raise UserError(f"{where}: {entry} is not a text; give a list of texts, [a,b]")
        choices: Any = limits.get("choices")
        known: Any = choices() if callable(choices) else choices
        if known is not None and entry not in known:
            why = limits.get("refused", {}).get(entry, "is unknown")
            why = why if why == "is unknown" else f"is refused ({why})"
            names = (str(name).lower() if isinstance(name, bool) else name for name in known)
            raise UserError(f"{where}: {entry!r} {why}; use one of {', '.join(names)}")
        if "pattern" in limits and not limits["pattern"].fullmatch(entry):
            raise UserError(f"{where}: {entry!r} is unknown; use {limits['takes']}")
        whole = "int" in str(kind) or "whole" in limits
        if entry in limits.get("words", ()):
            continue
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
    auto = "auto or " if "auto" in limits else ""
    zero = f"0 ({limits['zero']}) or " if "zero" in limits else ""
    low = f"of at least {limits['least']}" if "least" in limits else f"above {limits['above']}"
    high = f" and at most {limits['most']}" if "most" in limits else ""
    why = f" ({limits['why']})" if "why" in limits else ""
    return f"{auto}{zero}a {'whole ' if whole else ''}number {low}{high}{why}"


def keys_of(schema: type[Any], prefix: str = "") -> Iterator[tuple[str, Field[Any]]]:
    """Every key of a schema by its dotted name, those of its groups included."""
    for entry in fields(schema):
        group = group_of(entry)
        if group is None:
            yield f"{prefix}{entry.name}", entry
        else:
            yield from keys_of(group, f"{prefix}{entry.name}.")


def group_of(entry: Field[Any]) -> type[Any] | None:
    """The schema of a field that is a group of keys; None for a key."""
    kinds = (entry.type, *get_args(entry.type))
    return next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)


def is_list(entry: Field[Any]) -> bool:
    kinds = (entry.type, *get_args(entry.type))
    return entry.metadata.get("form") is list or any(get_origin(kind) is list for kind in kinds)

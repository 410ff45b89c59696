"""The shape of what a user may configure: one schema per door, registered with Hydra.

Values come from the YAML files under conf/ and from the command line; Hydra merges them into the
dataclasses below, so a misspelt key or a word where a number belongs fails while composing, before
any model is loaded. What a type cannot say (K >= 0, a known rule) is checked by
`harness.commands.validate`.

The dataclasses are mutable because Hydra merges into them; nothing here acts (no file is read, no
environment variable is set). The keys are the command line's contract: renaming one breaks users.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


def find_conf_dir() -> Path:
    """The folder with the shipped YAML: inside the installed package, or beside it in a checkout.

    Raises:
        FileNotFoundError: neither exists, so the installation is broken.
    """
    here = Path(__file__).resolve().parent
    found = next((p for p in (here / "conf", here.parent / "conf") if p.is_dir()), None)
    if found is None:
        raise FileNotFoundError(f"no conf/ folder in {here} or beside it; install it again")
    return found


CONF_DIR = find_conf_dir()


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
    dtype: str = "auto"
    weights: str = "pretrained"
    device: str | None = None
    device_map: str | None = None
    attention: str = "auto"
    trust_remote_code: bool = False
    allow_pickle: bool = False
    quantization: str | None = None
    architecture: Any = None


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

    sets: list[str] = field(default_factory=lambda: ["easy", "hard"])
    files: list[str] = field(default_factory=list)
    hub: str | None = None
    hub_subset: str | None = None
    hub_split: str | None = None
    hub_column: str | None = None
    skip_unusable: bool | None = None
    limit: int | None = None
    weights: Any = None
    chat_template: str = "auto"
    enable_thinking: Any = False
    system: str | None = None
    max_turns: int | None = None
    answer_tokens: int | None = None


@dataclass
class DeviceConf:
    """Where both models go: auto (cuda, else mps, else cpu), cuda, cuda:N, mps or cpu."""

    name: str = "auto"


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

    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_strings: list[str] | None = None
    rule: str = "ratio"
    stop: str = "none"
    stop_threshold: float = 0.4
    acceptance: Any = None
    acceptance_from: str | None = None


@dataclass
class GpuConf:
    """A card: what it can do, and what an hour of it costs (group gpu=).

    Attributes:
        name: short name.
        bandwidth_gb_s: memory bandwidth, GB/s.
        bf16_tflops: dense bf16 matrix rate, TFLOP/s.
        memory_gb: memory, GB.
        price_per_hour_usd: on-demand price of one card, US dollars.
        source: where the figures come from.
        date: when they were looked up.
    """

    name: str = MISSING
    bandwidth_gb_s: float = MISSING
    bf16_tflops: float = MISSING
    memory_gb: float = MISSING
    price_per_hour_usd: float = MISSING
    source: str = MISSING
    date: str = MISSING


@dataclass
class DoorConfig:
    """What every door takes: where runs go, the seed, and whether errors show their traceback."""

    results_root: str = "results"
    seed: int = 0
    debug: bool = False


@dataclass
class PairConfig(DoorConfig):
    """What every door takes that runs a target with a draft.

    Attributes:
        k: numbers of draft tokens per round; plain decoding (k = 0) always runs beside them.
        new_tokens: budget of a generation.
        repetitions: measured repeats of each generation, with other random numbers.
        threads: CPU threads, or auto (measured).
        backend: how steps run: auto (CUDA graphs on CUDA where the model allows, else eager),
            eager, or cuda_graphs.
        resume: a run folder to continue.
        dry_run: print what would be run, and stop.
    """

    model: ModelConf = field(default_factory=ModelConf)
    draft: ModelConf = field(default_factory=ModelConf)
    prompts: PromptsConf = field(default_factory=PromptsConf)
    device: DeviceConf = field(default_factory=DeviceConf)
    decode: DecodeConf = field(default_factory=DecodeConf)
    k: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    new_tokens: int = 48
    repetitions: int = 1
    threads: Any = "auto"
    backend: str = "auto"
    resume: str | None = None
    dry_run: bool = False


@dataclass
class PlanConf:
    """What a server would hold, for planning on cards that are not at hand.

    Attributes:
        context_tokens: positions in each sequence's cache, prompt and answer.
        batch: sequences side by side.
    """

    context_tokens: int = 1024
    batch: int = 1


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

    new_tokens: int = 128
    contexts: Any = "auto"
    batches: Any = "auto"
    alpha: list[float] = field(default_factory=lambda: [0.6, 0.8])
    plan: PlanConf = field(default_factory=PlanConf)
    gpu: GpuConf | None = None


@dataclass
class SweepConfig(PairConfig):
    """Keys of `python -m harness.sweep`.

    Attributes:
        mode: measure (run every cell) or replay.
        gpu: the card that is rented, for its price.
    """

    gpu: GpuConf | None = None
    temperature: list[float] = field(default_factory=lambda: [0.0, 1.0])
    mode: str = "measure"


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
    target_ms: float | None = None
    draft_ms: Any = None
    verify_ms: list[float] | None = None


@dataclass
class AuditionConfig(DoorConfig):
    """Keys of `python -m harness.audition`: many drafts, one target.

    Attributes:
        drafts: names of the draft group, `ngram`, or name@folder-or-hub-id for any other model;
            each may carry keys of its group, such as name@folder@dtype:float32@attention:eager.
        k, temperature: the grid; every cell is replayed.
        batch: texts of the target generated side by side.
        traces_from: a run whose stored texts and scores are used instead of models.
        latency_from: a run whose step times are used.
        latency: step times typed in.
        combine: stored auditions of one target, of several cards or of parts of the drafts, that
            are put together into one ranking; nothing else is run.
        resume: a run folder to continue.
    """

    model: ModelConf = field(default_factory=ModelConf)
    drafts: list[str] = field(default_factory=lambda: ["tiny_good"])
    prompts: PromptsConf = field(default_factory=PromptsConf)
    device: DeviceConf = field(default_factory=DeviceConf)
    decode: DecodeConf = field(default_factory=DecodeConf)
    gpu: GpuConf | None = None
    k: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 5, 6, 8, 10])
    temperature: list[float] = field(default_factory=lambda: [0.0, 1.0])
    new_tokens: int = 48
    repetitions: int = 1
    threads: Any = "auto"
    backend: str = "auto"
    batch: int = 32
    traces_from: str | None = None
    latency_from: str | None = None
    latency: LatencyConf = field(default_factory=LatencyConf)
    combine: list[str] = field(default_factory=list)
    resume: str | None = None
    dry_run: bool = False


@dataclass
class SnapshotConfig(PairConfig):
    """Keys of `python -m harness.snapshot`.

    Attributes:
        temperature: 0 compares texts token by token; above 0, draws are tested by chi-square.
        draws: samples from the one forced prefix of that test.
        show: none, or tokens (print the text with drafted tokens and corrections marked).
    """

    k: list[int] = field(default_factory=lambda: [4])
    temperature: list[float] = field(default_factory=lambda: [0.0])
    new_tokens: int = 64
    draws: int = 5000
    show: str = "none"


@dataclass
class BreakevenConfig(DoorConfig):
    """Keys of `python -m harness.breakeven`: arithmetic from latencies, no model.

    Attributes:
        draft_ms, target_ms: one step of each model, in milliseconds.
        verify_ms: entry i (from 1) is the target's time over i positions, so K needs K + 1
            entries; null assumes a verify costs one step (v = 1).
        alpha: alphas to tabulate.
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
    alpha: list[float] = field(default_factory=lambda: [0.2, 0.4, 0.6, 0.8, 0.9, 1.0])
    k: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 5, 6, 8, 10])
    acceptance_rate: Any = None
    acceptance_by_position: list[float] | None = None
    acceptance_from: str | None = None
    baseline_from: str | None = None
    latency_from: str | None = None
    log: str | None = None


@dataclass
class ReportConfig(DoorConfig):
    """Keys of `python -m harness.report`.

    Attributes:
        run: the run folder to render again.
        runs: run folders to compare, the first the reference.
        index: a results folder: one page over all its runs.
        fail_below: exit 1 when the verdict's speedup is below this; with runs, when a run's speedup
            is below this share of the reference's, beyond noise.
    """

    run: str | None = None
    runs: list[str] = field(default_factory=list)
    index: str | None = None
    fail_below: float | None = None


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


SCHEMAS: dict[str, type[DoorConfig]] = {
    "profile": ProfileConfig,
    "breakeven": BreakevenConfig,
    "sweep": SweepConfig,
    "audition": AuditionConfig,
    "snapshot": SnapshotConfig,
    "report": ReportConfig,
}


def register(door: str) -> None:
    """Make a door's schema known to Hydra as `<door>_schema`, which conf/<door>.yaml builds on.

    Only that one: Hydra copies all it knows for every group that --help lists.
    """
    ConfigStore.instance().store(name=f"{door}_schema", node=SCHEMAS[door])

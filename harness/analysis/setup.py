"""A run's configuration and manifest, read once into typed records.

What a run lacks (it ended early, or its requests were recorded elsewhere) gets its default here and
nowhere else.
"""

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from pathlib import PurePath
from typing import Any, cast

import numpy as np
import yaml

from harness.command_words import of_hydra
from harness.config import (
    AUTO_DRAFTS,
    CONF_DIR,
    OWN_DRAFT,
    SCHEMAS,
    SHIPPED_SETS,
    keys_of,
    split_draft,
    usual_new_tokens,
)
from harness.engine_facts.draft_kinds import DraftKind
from harness.engine_facts.engines import with_lines
from harness.records import ResultRow, Rule, ServingEngine, grouped, where
from harness.storage import StoredRun
from harness.storage.contents import flattened
from harness.storage.manifest import SERVER, EngineCosts, Environment, ModelEntry
from harness.summary import DraftMemory, MadeWith, ModelFacts, RunFacts, SamplingFacts, Status
from harness.theory.architecture import (
    COUNTED,
    Architecture,
    ModelBytes,
    architecture_from,
    memory_view,
)
from harness.theory.roofline import Card, is_card

Entry = Mapping[str, Any]
# What a report names the versions of, by its manifest's `environment`
VERSIONS = (
    ("python", "python"),
    ("torch", "packages.torch"),
    ("transformers", "packages.transformers"),
    ("driver", "driver"),
    ("CUDA", "cuda"),
)
# Per weight and cached number, where a manifest does not say it
SERVED_BYTES = 2
# Per cached number by llama.cpp's type; of q8_0 a block of 32 has a scale of two bytes
KV_BYTES: Mapping[str, float] = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32}


@dataclass(frozen=True)
class Setup:
    """A stored run with typed access to its configuration and manifest."""

    run: StoredRun

    @property
    def command(self) -> str:
        return self.run.door

    def conf(self, key: str) -> Entry:
        """A group of the configuration; empty where there is none."""
        value = self.run.config.get(key)
        return cast("Entry", value) if isinstance(value, Mapping) else {}

    @property
    def environment(self) -> Environment:
        return self.run.manifest.environment

    @property
    def described(self) -> Mapping[str, ModelEntry]:
        """The models by role: `target` and `draft`, or each draft's name."""
        return self.run.manifest.models

    @property
    def target(self) -> ModelEntry:
        """The target's entry of the manifest; empty where no model was opened."""
        return self.described.get("target", ModelEntry())

    @property
    def model(self) -> str:
        return str(self.conf("model").get("name") or "")

    @property
    def draft(self) -> str:
        """The draft's name; empty for several or none."""
        several = self.command == "audition"  # whose draft= is one of its drafts
        return "" if several else str(self.conf("draft").get("name") or "")

    @property
    def ks(self) -> tuple[int, ...]:
        """The K above 0, as listed."""
        return tuple(int(k) for k in self.run.config.get("k") or () if k)

    @property
    def temperatures(self) -> tuple[float, ...]:
        return tuple(float(value) for value in self.run.config.get("temperature") or ())

    @property
    def new_tokens(self) -> int | None:
        """The most that a text may have: what its run asked for, where texts are another run's."""
        made_with = self.run.manifest.texts_made_with
        asked = made_with.new_tokens if made_with else self.run.config.get("new_tokens")
        return None if asked is None else int(asked)

    def kind_of(self, draft: str) -> DraftKind:
        """The kind of a draft that does not look its tokens up."""
        conf = self.conf("draft") if draft == self.draft else {}
        return self.described_draft(draft).kind or conf.get("kind") or "model"

    @property
    def seed(self) -> int:
        return int(self.run.config.get("seed") or 0)

    @cached_property
    def engine(self) -> ServingEngine | None:
        """The engine whose servers a run measured; None where it measured none."""
        manifest = self.run.manifest
        return manifest.engine and manifest.engine.started_with(manifest.server_memory)

    @property
    def priced_by(self) -> EngineCosts | None:
        """The costs of another engine, where a run's predictions are for that engine."""
        return self.run.manifest.engine_costs

    @property
    def rule(self) -> Rule:
        """The acceptance rule that the verdict is under."""
        engine = self.priced_by.engine if self.priced_by else self.engine
        served = engine.rule if engine else None
        return cast("Rule", served or self.conf("decode").get("rule") or "ratio")

    @cached_property
    def weights(self) -> Mapping[str, float] | None:
        """The weights of the prompt sets, as shares of the workload's tokens; None for equal ones.

        A log's strata are known by their shares of the requests: each counts by that times the
        tokens that a request of it generates.
        """
        if self.run.manifest.prompts_log is None:
            return self.conf("prompts").get("weights")
        texts = [trial for trial in self.run.trials if trial.k == 0 and trial.status == "ok"]
        mean = {
            name: float(np.mean([trial.new_tokens or 0 for trial in some]))
            for name, some in grouped(texts, lambda trial: trial.prompt_set).items()
        }
        of_all = float(np.mean([*mean.values()])) if mean else 1.0
        requests = self.run.manifest.prompts_available
        tokens = {name: count * mean.get(name, of_all) for name, count in requests.items()}
        total = sum(tokens.values())
        return {name: value / total for name, value in tokens.items()} if total else None

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The probabilities below which a token ends a draft, as listed; 0.0 is none."""
        decode = self.conf("decode")
        if self.command == "sweep" and decode.get("stop", "none") != "none":
            return (float(decode["stop_threshold"]),)  # of a run before there was p_min
        return tuple(map(float, self.run.config.get("p_min") or (0.0,)))

    @property
    def synthetic(self) -> bool:
        """True where acceptance was set, not found."""
        return self.conf("decode").get("acceptance") is not None

    @property
    def replay_only(self) -> bool:
        """True where the run timed no speculative generation."""
        return self.command == "audition" or self.run.config.get("mode") == "replay"

    @property
    def typed_latency(self) -> bool:
        """True where an audition's step times were typed in."""
        return self.conf("latency").get("target_ms") is not None

    @property
    def latency_from(self) -> str | None:
        """The run whose times a sweep or an audition used."""
        stored = self.run.config.get("latency_from")
        return None if stored is None or self.command == SERVER else str(stored)

    def described_draft(self, name: str) -> ModelEntry:
        """A draft's entry of the manifest; empty for one without a model."""
        drafts = (entry for role, entry in self.described.items() if role != "target")
        return next((entry for entry in drafts if entry.name == name), ModelEntry())

    def command_line(self, *changes: str) -> str | None:
        """The line to type again, with `changes`; None if unknown, or changed where it resumes."""
        words = [*self.environment.command]
        if words and words[0] == self.command:
            words = ["python", "-m", f"harness.{words[0]}", *words[1:]]
        resumed = any(word.startswith("resume=") for word in words)
        if not words or (changes and (resumed or f"harness.{self.command}" not in words)):
            return None
        changed = tuple(f"{change.partition('=')[0]}=" for change in changes)
        words = [*(word for word in words if not word.startswith(changed)), *changes]
        return shlex.join(_with_short_ids(words))


def _with_short_ids(words: Sequence[str]) -> list[str]:
    """The words with model=hf model.id=ORG/NAME as they are typed, model=ORG/NAME."""
    values = dict(word.split("=", 1) for word in words if "=" in word)
    short = {
        group
        for group in ("model", "draft")
        if values.get(group) == OWN_DRAFT and "/" in values.get(f"{group}.id", "")
    }
    kept = (word for word in words if word not in {f"{group}={OWN_DRAFT}" for group in short})
    return [
        word.replace(".id=", "=", 1) if word.partition(".id=")[0] in short else word
        for word in kept
    ]


def asked_drafts(setup: Setup) -> list[str]:
    """The drafts of an audition, those of which nothing is stored included."""
    entries: Sequence[str] = setup.run.config.get("drafts") or ()
    return [split_draft(entry).name for entry in entries if entry != AUTO_DRAFTS]


def p_min_of(setup: Setup) -> float:
    """The probability below which a draft's token ended its draft on a server; 0: none."""
    return setup.thresholds[0] if setup.command == SERVER else 0.0


def measured_p_min(setup: Setup, temperature: float) -> float | None:
    """The threshold at which a sweep measured every K; None where it did not, or not yet."""
    looks = setup.run.manifest.looks
    if len(setup.thresholds) == 1:
        return setup.thresholds[0]
    return None if looks is None else looks.p_min_at(temperature)


# Keys, and groups of keys, that are passed on to another command on the same texts and machine
WORKLOAD = (
    *("model", "prompts", "decode", "new_tokens", "seed"),
    *("device", "backend", "threads", "results_root"),
)
# Keys that bring others, which the command line does not show
BRINGING_OTHERS = frozenset({"resume", "traces_from", "experiment"})


def workload_words(setup: Setup) -> tuple[str, ...]:
    """Unquoted words on texts and machine; stored non-default keys where a run brought others."""
    typed = {word: word.partition("=")[0].lstrip("+") for word in setup.environment.command}
    if BRINGING_OTHERS.isdisjoint(typed.values()):
        return tuple(
            word for word, key in typed.items() if "=" in word and key.split(".")[0] in WORKLOAD
        )
    return tuple(_stored_words(setup))


def _stored_words(setup: Setup) -> Iterator[str]:
    """Words for the keys of the stored configuration that are not as they are by default."""
    target, prompts = setup.conf("model"), setup.conf("prompts")
    name = str(target.get("name"))
    shipped = (CONF_DIR / "model" / f"{name}.yaml").is_file()
    chosen = {"model": name if shipped else OWN_DRAFT, "prompts": "default", "device": "auto"}
    defaults = {
        f"{group}.{key}": value
        for group, entry in {**chosen, "decode": "default"}.items()
        for key, value in yaml.safe_load((CONF_DIR / group / f"{entry}.yaml").read_text()).items()
    }
    if not shipped:
        defaults["model.name"] = PurePath(str(target.get("id")).replace(":", "/")).name
    # What `check` fills in
    defaults["new_tokens"] = usual_new_tokens(str(target.get("id")), str(target.get("weights")))
    if prompts.get("limit_files") is False:
        defaults["prompts.limit"] = prompts.get("limit")
    if not prompts.get("files") or prompts.get("limit_files"):
        defaults["prompts.limit_files"] = prompts.get("limit_files")
    if prompts.get("sets") in ([], [*SHIPPED_SETS]):
        defaults["prompts.sets"] = prompts["sets"]
    for key, entry in keys_of(SCHEMAS[setup.run.door]):
        group, _, inside = key.rpartition(".")
        stored = setup.conf(group) if group else setup.run.config
        if key.split(".")[0] not in WORKLOAD or inside not in stored:
            continue
        usual = [] if entry.default is MISSING else entry.default
        if stored[inside] != defaults.get(key, usual):
            yield f"{key}={of_hydra(stored[inside])}"


def request_weights(setup: Setup) -> Mapping[str, float] | None:
    """Weights of prompt sets as shares of requests: a log's counts, elsewhere the given weights."""
    if setup.run.manifest.prompts_log is None:
        return setup.weights
    requests = setup.run.manifest.prompts_available
    return {name: count / sum(requests.values()) for name, count in requests.items()}


def shares_of_sets(setup: Setup) -> Mapping[str, float] | None:
    """The weights of all sets of the run: one that brought nothing leaves "all" undecided."""
    return setup.weights or dict.fromkeys(setup.run.manifest.prompts, 1.0) or None


def timed_apart(setup: Setup) -> frozenset[str]:
    """Drafts whose target ran otherwise, as eagerly for a head: its times have another name."""
    named = {timing.draft: timing.model for timing in setup.run.rounds}
    apart = (draft for draft, model in named.items() if model != setup.model)
    return frozenset(apart if setup.model in named.values() else ())


def model_facts(setup: Setup) -> tuple[ModelFacts, ...]:
    confs = {"target": setup.conf("model")}
    if setup.draft:
        confs["draft"] = setup.conf("draft")
    described = setup.described
    if not described and confs["target"]:  # stopped before a model was opened
        described = {
            role: ModelEntry(conf.get("name"), weights=conf.get("weights"))
            for role, conf in confs.items()
            if conf
        }
    return tuple(
        ModelFacts(
            role=role,
            name=entry.name or role,
            id=conf.get("id") or entry.id,
            weights=entry.weights,
            engine=entry.engine,
            engine_reason=entry.engine_reason,
            compiled=entry.compiled,
            kind=entry.kind or conf.get("kind") or "model",
            layers=entry.layers,
        )
        for role, entry in described.items()
        for conf in [confs.get(role, {})]
    )


def run_facts(setup: Setup, results: Sequence[ResultRow]) -> RunFacts:
    """The facts of the run, with what became of the rows that stand for generations."""
    ran = where(results, source="replayed" if setup.replay_only else "measured")
    stored = setup.run.manifest.status
    known, decode = ("complete", "running", "failed"), setup.conf("decode")
    return RunFacts(
        command=setup.command,
        folder=str(setup.run.folder),
        status=cast("Status", stored) if stored in known else "unknown",
        created_utc=setup.run.manifest.created_utc,
        model=setup.model or None,
        draft=setup.draft or None,
        models=model_facts(setup),
        sampling=SamplingFacts(
            rule=setup.rule,
            top_k=decode.get("top_k"),
            top_p=decode.get("top_p"),
            min_p=decode.get("min_p"),
            repetition_penalty=decode.get("repetition_penalty"),
            p_min=p_min_of(setup) or None,
        ),
        serve_on=_serve_on(setup),
        ks=setup.ks,
        temperatures=setup.temperatures,
        seed=setup.run.config.get("seed"),
        prompts=sum(setup.run.manifest.prompts.values()) or None,
        synthetic=setup.synthetic,
        weights=dict(setup.weights or {}),
        own_prompts=bool(setup.conf("prompts").get("files") or setup.run.config.get("records")),
        replay_only=setup.replay_only,
        measured_cells=len(ran),
        failed_cells=sum(row.status == "failed" for row in ran),
        partial_cells=sum(row.status == "partial" for row in ran),
        made_with=_made_with(setup),
    )


def _made_with(setup: Setup) -> MadeWith:
    known = flattened(setup.environment.entries)
    versions = {label: known[name] for label, name in VERSIONS if known.get(name)}
    commit = known.get("git.commit")
    return MadeWith(
        command=setup.command_line(),
        workload=workload_words(setup),
        device=setup.environment.device_name,
        versions={label: str(version) for label, version in versions.items()},
        commit=None if commit is None else str(commit),
        uncommitted=known.get("git.dirty") is True,
    )


def _serve_on(setup: Setup) -> str | None:
    """The asked server, or whose rounds price the drafts; a server run has its own line."""
    if setup.engine is not None and setup.command != "audition":
        return None
    priced = setup.priced_by.engine.name if setup.priced_by else None
    return setup.run.config.get("engine") or (priced if priced in with_lines() else None)


# ---- the device, and what models take of its memory ----------------------------------------------


def card_of(setup: Setup) -> Card | None:
    gpu = setup.conf("gpu")
    return Card(**{field.name: gpu[field.name] for field in fields(Card)}) if gpu else None


def ran_on(setup: Setup, card: Card) -> bool:
    """True where step times can be the card's; typed ones and another run's are trusted."""
    if setup.typed_latency or setup.latency_from is not None:
        return True
    machine = setup.environment
    return is_card(card.name, card.memory_gb, machine.device_name, machine.device_memory_bytes)


def price_per_hour(setup: Setup) -> float | None:
    """US dollars per hour; None where the device is not known to be the named card."""
    card = card_of(setup)
    return card.price_per_hour_usd if card and ran_on(setup, card) else None


def architecture(entry: ModelEntry) -> Architecture | None:
    """A model's sizes; None where the manifest does not say them all."""
    sizes = {field.name: getattr(entry, field.name) for field in fields(Architecture)}
    return architecture_from(sizes, counted=entry.architecture in COUNTED.values())


def model_bytes(setup: Setup, name: str | None = None) -> ModelBytes | None:
    """Weights and cache of a draft, or the target; None where the manifest does not say them."""
    entry = setup.target if name is None else setup.described_draft(name)
    sizes, width = architecture(entry), entry.bytes_per_parameter or SERVED_BYTES
    kv, weights = entry.kv_bytes_per_token, entry.weights_bytes
    if kv is None and sizes is not None:
        kv = sizes.kv_bytes_read(1, width)
    if weights is None and sizes is not None:
        weights = sizes.parameters * width
    return None if kv is None or weights is None else ModelBytes(weights, kv)


def kv_bytes_per_token(setup: Setup, name: str | None, kv_type: str | None) -> float | None:
    """Bytes of a token in the cache of a draft, or the target, of this type.

    None is the type that the model was loaded in. None where the manifest does not say it, or a
    value of the type has no known size.
    """
    kept = model_bytes(setup, name)
    if kept is None or (kv_type and kv_type not in KV_BYTES):
        return None
    entry = setup.target if name is None else setup.described_draft(name)
    loaded = entry.bytes_per_parameter or SERVED_BYTES
    return kept.kv_per_token * (KV_BYTES[kv_type] / loaded if kv_type else 1.0)


def draft_memory(
    setup: Setup, names: Sequence[str], context_tokens: int, *, lookups: Collection[str] = ()
) -> Iterator[DraftMemory]:
    """The device's memory with each draft, as far as the sizes are known."""
    target, card, machine = model_bytes(setup), card_of(setup), setup.environment
    available = machine.device_memory_bytes or machine.memory_bytes
    if card is not None:
        available = card.memory_gb * 1e9
    for name in names:
        kept = ModelBytes() if name in lookups else model_bytes(setup, name)
        weights = setup.described_draft(name).weights_bytes
        if kept is not None and target is not None and available is not None:
            yield memory_view(name, kept, target, available, context_tokens=context_tokens)
        elif weights is not None:
            yield DraftMemory(name, weights)

"""What a run's configuration and manifest say of it, read once into typed records.

A folder of an older version may lack keys that came later; what is missing gets its default here
and nowhere else.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, cast

import numpy as np

from harness.records import ResultRow, Rule, ServingEngine, grouped, where
from harness.serving.drafts import DraftKind
from harness.serving.engines import with_lines
from harness.storage import StoredRun
from harness.storage.contents import flattened
from harness.storage.manifest import SERVER, EngineCosts, Environment, ModelEntry
from harness.summary import MadeWith, ModelFacts, RunFacts, SamplingFacts, Status
from harness.theory.architecture import COUNTED, NUMBERS, Architecture
from harness.theory.memory import ModelBytes
from harness.theory.roofline import Card, is_card

Entry = Mapping[str, Any]
# Per weight and cached number, where a manifest does not say it
SERVED_BYTES = 2
# What a report names the versions of, by its manifest's `environment`
VERSIONS = (
    ("python", "python"),
    ("torch", "packages.torch"),
    ("transformers", "packages.transformers"),
    ("driver", "driver"),
    ("CUDA", "cuda"),
)
# Per cached number by llama.cpp's type; of q8_0 a block of 32 has a scale of two bytes
KV_BYTES: Mapping[str, float] = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32}


@dataclass(frozen=True)
class Setup:
    """A stored run with typed access to its configuration and manifest."""

    run: StoredRun

    @property
    def command(self) -> str:
        """Which command made the run."""
        return self.run.door

    def conf(self, key: str) -> Entry:
        """A group of the configuration; empty where there is none."""
        value = self.run.config.get(key)
        return cast("Entry", value) if isinstance(value, Mapping) else {}

    @property
    def environment(self) -> Environment:
        """The machine and the software."""
        return self.run.manifest.environment

    @property
    def described(self) -> Mapping[str, ModelEntry]:
        """The models by role: `target` and `draft`, or each draft's name."""
        return self.run.manifest.models

    @property
    def target(self) -> ModelEntry:
        """What the target says of itself; empty where no model was opened."""
        return self.described.get("target", ModelEntry())

    @property
    def model(self) -> str:
        """The target's name."""
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
        """As listed."""
        return tuple(float(value) for value in self.run.config.get("temperature") or ())

    @property
    def new_tokens(self) -> int | None:
        """The most that a text may have: what its run asked for, where texts are another run's."""
        made_with = self.run.manifest.texts_made_with
        asked = made_with.new_tokens if made_with else self.run.config.get("new_tokens")
        return None if asked is None else int(asked)

    def kind_of(self, draft: str) -> DraftKind:
        """Of a draft that does not look its tokens up."""
        conf = self.conf("draft") if draft == self.draft else {}
        return self.described_draft(draft).kind or conf.get("kind") or "model"

    @property
    def seed(self) -> int:
        """Of the deals of the folds, and of draws."""
        return int(self.run.config.get("seed") or 0)

    @cached_property
    def engine(self) -> ServingEngine | None:
        """The server that a server run measured; None of every other command."""
        manifest = self.run.manifest
        return manifest.engine and manifest.engine.started_with(manifest.server_memory)

    @property
    def priced_by(self) -> EngineCosts | None:
        """What prices the drafts of a run whose predictions are for another engine."""
        return self.run.manifest.engine_costs

    @property
    def rule(self) -> Rule:
        """The acceptance rule that the verdict is under."""
        engine = self.priced_by.engine if self.priced_by else self.engine
        served = engine.rule if engine else None
        return cast("Rule", served or self.conf("decode").get("rule") or "ratio")

    @cached_property
    def weights(self) -> Mapping[str, float] | None:
        """Of the prompt sets in the workload, as shares of its tokens; None for equal ones.

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
    def request_weights(self) -> Mapping[str, float] | None:
        """Of the prompt sets, as shares of its requests, where these and not tokens are counted.

        Of a log they are known; elsewhere the weights that were given stand for them.
        """
        if self.run.manifest.prompts_log is None:
            return self.weights
        requests = self.run.manifest.prompts_available
        return {name: count / sum(requests.values()) for name, count in requests.items()}

    @property
    def shares(self) -> Mapping[str, float] | None:
        """The weights of all sets of the run: one that brought nothing leaves "all" undecided."""
        return self.weights or dict.fromkeys(self.run.manifest.prompts, 1.0) or None

    @property
    def adaptive(self) -> bool:
        """Whether drafting stopped early, so that a round has no fixed length.

        An audition runs no such loop: it replays it, next to rounds of a fixed length.
        """
        return self.command != "audition" and self.conf("decode").get("stop", "none") != "none"

    @property
    def stop_threshold(self) -> float | None:
        """The probability below which a token ended the drafting; None where nothing did."""
        return float(self.conf("decode").get("stop_threshold") or 0.0) if self.adaptive else None

    @property
    def synthetic(self) -> bool:
        """Whether acceptance was set, not found."""
        return self.conf("decode").get("acceptance") is not None

    @property
    def dummy(self) -> bool:
        """Whether a model has random weights."""
        return any(entry.weights == "dummy" for entry in self.described.values())

    @property
    def replay_only(self) -> bool:
        """Whether the run timed no speculative generation."""
        return self.command == "audition" or self.run.config.get("mode") == "replay"

    @property
    def embedded(self) -> bool:
        """Whether the target is one of the models that ship with the package."""
        return str(self.conf("model").get("id") or "").startswith("embedded:")

    @property
    def typed_latency(self) -> bool:
        """Whether an audition's step times were typed in."""
        return self.conf("latency").get("target_ms") is not None

    @property
    def latency_from(self) -> str | None:
        """The run whose times a sweep or an audition used."""
        stored = self.run.config.get("latency_from")
        return None if stored is None or self.command == SERVER else str(stored)

    @property
    def gpu(self) -> Card | None:
        """The card that `gpu` names."""
        gpu = self.conf("gpu")
        return Card(**{field.name: gpu[field.name] for field in fields(Card)}) if gpu else None

    @property
    def ran_on_gpu(self) -> bool:
        """Whether the step times can be those of the card that `gpu` names.

        Times that were typed in, or are another run's, are taken at the user's word.
        """
        if self.gpu is None:
            return False
        if self.typed_latency or self.latency_from is not None:
            return True
        gpu, machine = self.gpu, self.environment
        return is_card(gpu.name, gpu.memory_gb, machine.device_name, machine.device_memory_bytes)

    @property
    def price_per_hour(self) -> float | None:
        """Of the device, US dollars; None where it is not known to be the named card."""
        return self.gpu.price_per_hour_usd if self.gpu and self.ran_on_gpu else None

    @property
    def memory_bytes(self) -> float | None:
        """Of the named card, else of the device that ran; None if unknown."""
        if self.gpu is not None:
            return self.gpu.memory_gb * 1e9
        return self.environment.device_memory_bytes or self.environment.memory_bytes

    def described_draft(self, name: str) -> ModelEntry:
        """What a draft says of itself; empty for one without a model."""
        drafts = (entry for role, entry in self.described.items() if role != "target")
        return next((entry for entry in drafts if entry.name == name), ModelEntry())

    def model_bytes(self, name: str | None = None) -> ModelBytes | None:
        """What a draft, or the target, keeps in memory; None where the manifest does not say it."""
        entry = self.target if name is None else self.described_draft(name)
        sizes, width = architecture(entry), entry.bytes_per_parameter or SERVED_BYTES
        kv, weights = entry.kv_bytes_per_token, entry.weights_bytes
        if kv is None and sizes is not None:
            kv = sizes.kv_bytes_read(1, width)
        if weights is None and sizes is not None:
            weights = sizes.parameters * width
        return None if kv is None or weights is None else ModelBytes(weights, kv)

    def kv_bytes_per_token(self, name: str | None, kv_type: str | None) -> float | None:
        """What a token takes in the cache of a draft, or the target, of this type.

        None is the type that the model was loaded in. None where the manifest does not say it, or
        a value of the type has no known size.
        """
        kept = self.model_bytes(name)
        if kept is None or (kv_type and kv_type not in KV_BYTES):
            return None
        entry = self.target if name is None else self.described_draft(name)
        loaded = entry.bytes_per_parameter or SERVED_BYTES
        return kept.kv_per_token * (KV_BYTES[kv_type] / loaded if kv_type else 1.0)

    def facts(self, results: Sequence[ResultRow]) -> RunFacts:
        """Which run this is, with what became of the rows that stand for generations."""
        ran = where(results, source="replayed" if self.replay_only else "measured")
        stored = self.run.manifest.status
        known, decode = ("complete", "running", "failed"), self.conf("decode")
        return RunFacts(
            command=self.command,
            folder=str(self.run.folder),
            status=cast("Status", stored) if stored in known else "unknown",
            created_utc=self.run.manifest.created_utc,
            model=self.model or None,
            draft=self.draft or None,
            models=self.model_facts,
            sampling=SamplingFacts(
                rule=self.rule,
                top_k=decode.get("top_k"),
                top_p=decode.get("top_p"),
                min_p=decode.get("min_p"),
                repetition_penalty=decode.get("repetition_penalty"),
                stop_threshold=self.stop_threshold,
            ),
            serve_on=self._serve_on,
            ks=self.ks,
            temperatures=self.temperatures,
            seed=self.run.config.get("seed"),
            prompts=sum(self.run.manifest.prompts.values()) or None,
            synthetic=self.synthetic,
            weights=dict(self.weights or {}),
            own_prompts=bool(self.conf("prompts").get("files") or self.run.config.get("records")),
            replay_only=self.replay_only,
            measured_cells=len(ran),
            failed_cells=sum(row.status == "failed" for row in ran),
            partial_cells=sum(row.status == "partial" for row in ran),
            made_with=self._made_with,
        )

    @property
    def _made_with(self) -> MadeWith:
        """What its manifest says."""
        machine = self.environment
        known = flattened(machine.entries)
        versions = {label: known[name] for label, name in VERSIONS if known.get(name)}
        commit = known.get("git.commit")
        return MadeWith(
            command=self.command_line(),
            device=machine.device_name,
            versions={label: str(version) for label, version in versions.items()},
            commit=None if commit is None else str(commit),
            uncommitted=known.get("git.dirty") is True,
        )

    @property
    def _serve_on(self) -> str | None:
        """The server whose line is asked for, or whose rounds price the drafts.

        Of a server run the line is that server's own.
        """
        if self.engine is not None:
            return None
        priced = self.priced_by.engine.name if self.priced_by else None
        return self.run.config.get("engine") or (priced if priced in with_lines() else None)

    def command_line(self, *changes: str) -> str | None:
        """The command line as it can be typed again, with other values of some keys.

        None where it is not known, or with `changes` where it names a run to continue, whose keys
        stay.
        """
        words = [*self.environment.command]
        if words and words[0] == self.command:
            words = ["python", "-m", f"harness.{words[0]}", *words[1:]]
        resumed = any(word.startswith("resume=") for word in words)
        if not words or (changes and (resumed or f"harness.{self.command}" not in words)):
            return None
        changed = tuple(f"{change.partition('=')[0]}=" for change in changes)
        words = [*(word for word in words if not word.startswith(changed)), *changes]
        return shlex.join(words)

    @cached_property
    def timed_apart(self) -> frozenset[str]:
        """The drafts of an audition for which the target did not run as it did for the others.

        A head's target runs eagerly, and its times have another name than the target's.
        """
        named = {timing.draft: timing.model for timing in self.run.rounds}
        apart = (draft for draft, model in named.items() if model != self.model)
        return frozenset(apart if self.model in named.values() else ())

    @property
    def model_facts(self) -> tuple[ModelFacts, ...]:
        """The target and each draft that is a model."""
        confs = {"target": self.conf("model")}
        if self.draft:
            confs["draft"] = self.conf("draft")
        described = self.described
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


def architecture(entry: ModelEntry) -> Architecture | None:
    """A model's sizes; None where the manifest does not say them all."""
    sizes = {field.name: getattr(entry, field.name) for field in fields(Architecture)}
    counted = entry.architecture in COUNTED.values()
    if counted and entry.head_dim is None and entry.hidden and entry.heads:
        sizes["head_dim"] = entry.hidden // entry.heads
    wanted = (*NUMBERS, "tied")
    if sizes["experts"]:
        # Mixtral's and gpt-oss's configs call the width of an expert that of the feed-forward
        sizes["moe_ffn"] = sizes["moe_ffn"] or sizes["ffn"]
        wanted += ("experts_per_token",)
    if any(sizes[name] is None for name in wanted):
        return None
    return Architecture(**{name: size for name, size in sizes.items() if size is not None})

"""What a run's configuration and manifest say of it, read once into typed records.

A folder of an older version may lack keys that came later; what is missing gets its default here
and nowhere else.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from harness.analysis.fleet import is_card
from harness.records import Failure, ResultRow, Rule
from harness.storage import StoredRun
from harness.summary import ModelFacts, RunFacts, SamplingFacts, Status, Value

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Card:
    """The card that `gpu` names."""

    name: str
    memory_gb: float
    price_per_hour_usd: float


@dataclass(frozen=True)
class Setup:
    """A stored run with typed access to its configuration and manifest."""

    run: StoredRun

    @property
    def command(self) -> str:
        """Which command made the run; from the folder's name where the manifest does not say."""
        parts = self.run.folder.name.split("_")
        return self.run.door or (parts[1] if len(parts) > 1 else "run")

    def conf(self, key: str) -> Entry:
        """A group of the configuration; empty where there is none."""
        value = self.run.config.get(key)
        return cast("Entry", value) if isinstance(value, Mapping) else {}

    @property
    def environment(self) -> Entry:
        """The manifest's environment."""
        return self.run.manifest.get("environment") or {}

    @property
    def described(self) -> Mapping[str, Entry]:
        """The manifest's entries of the models: `target` and `draft`, or each draft's name."""
        return self.run.manifest.get("models") or {}

    @property
    def model(self) -> str:
        """The target's name."""
        return str(self.conf("model").get("name") or "")

    @property
    def draft(self) -> str:
        """The draft's name; empty for several or none."""
        return str(self.conf("draft").get("name") or "")

    @property
    def ks(self) -> tuple[int, ...]:
        """The K above 0, as listed."""
        return tuple(int(k) for k in self.run.config.get("k") or () if k)

    @property
    def temperatures(self) -> tuple[float, ...]:
        """As listed."""
        return tuple(float(value) for value in self.run.config.get("temperature") or ())

    @property
    def alphas(self) -> tuple[float, ...]:
        """The alphas to tabulate."""
        return tuple(float(value) for value in self.run.config.get("alpha") or ())

    @property
    def seed(self) -> int:
        """Of every resampling."""
        return int(self.run.config.get("seed") or 0)

    @property
    def rule(self) -> Rule:
        """The acceptance rule that the verdict is under."""
        return cast("Rule", self.conf("decode").get("rule") or "ratio")

    @property
    def weights(self) -> Mapping[str, float] | None:
        """Of the prompt sets in the workload; None for equal ones."""
        return self.conf("prompts").get("weights")

    @property
    def adaptive(self) -> bool:
        """Whether drafting stopped early, so that a round has no fixed length."""
        return self.conf("decode").get("stop", "none") != "none"

    @property
    def synthetic(self) -> bool:
        """Whether acceptance was set, not found."""
        decode = self.conf("decode")
        return any(decode.get(key) is not None for key in ("acceptance", "acceptance_from"))

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
        """The run whose step times an audition used."""
        stored = self.run.config.get("latency_from")
        return None if stored is None or self.command != "audition" else str(stored)

    @property
    def gpu(self) -> Card | None:
        """The card that `gpu` names."""
        gpu = self.conf("gpu")
        if not gpu:
            return None
        price, memory = float(gpu["price_per_hour_usd"]), float(gpu["memory_gb"])
        return Card(str(gpu["name"]), memory, price)

    @property
    def ran_on_gpu(self) -> bool:
        """Whether the step times can be those of the card that `gpu` names.

        Times that were typed in, or are another run's, are taken at the user's word.
        """
        if self.gpu is None:
            return False
        if self.typed_latency or self.latency_from is not None:
            return True
        name, memory = (self.environment.get(f"device_{key}") for key in ("name", "memory_bytes"))
        return is_card(self.gpu.name, self.gpu.memory_gb, name, memory)

    @property
    def price_per_hour(self) -> float | None:
        """Of the device, US dollars; None where it is not known to be the named card."""
        return self.gpu.price_per_hour_usd if self.gpu and self.ran_on_gpu else None

    def failures(self) -> tuple[Failure, ...]:
        """Generations that did not complete, and measurements that met broken logits."""
        latest = {trial.cell: trial for trial in self.run.trials}
        broken: Mapping[str, str] = self.run.manifest.get("not_measured") or {}
        return (
            *(
                Failure(
                    f"{t.prompt_set}/{t.prompt} k={t.k} temperature={t.temperature:g}",
                    t.error or "failed",
                )
                for t in latest.values()
                if t.status == "failed"
            ),
            *(Failure(what, error) for what, error in broken.items()),
        )

    def facts(self, results: Sequence[ResultRow]) -> RunFacts:
        """Which run this is, with what became of the rows that stand for generations."""
        ran = [row for row in results if row.source == "measured"]
        if self.replay_only:
            ran = [row for row in results if row.source == "replayed" or row.k == 0]
        stored = self.run.manifest.get("status")
        known = ("complete", "running", "failed")
        counts: Mapping[str, int] = self.run.manifest.get("prompts") or {}
        decode = self.conf("decode")
        return RunFacts(
            command=self.command,
            folder=str(self.run.folder),
            status=cast("Status", stored) if stored in known else "unknown",
            created_utc=self.run.manifest.get("created_utc"),
            model=self.model or None,
            draft=self.draft or None,
            models=tuple(self._models()),
            sampling=SamplingFacts(
                rule=self.rule,
                top_k=decode.get("top_k"),
                top_p=decode.get("top_p"),
                min_p=decode.get("min_p"),
                repetition_penalty=decode.get("repetition_penalty"),
                stop_threshold=decode.get("stop_threshold") if self.adaptive else None,
            ),
            ks=self.ks,
            temperatures=self.temperatures,
            seed=self.run.config.get("seed"),
            prompts=sum(counts.values()) or None,
            synthetic=self.synthetic,
            replay_only=self.replay_only,
            measured_cells=len(ran),
            failed_cells=sum(row.status == "failed" for row in ran),
            partial_cells=sum(row.status == "partial" for row in ran),
            environment={**dict(_flat(self.run.manifest)), **self._command_line()},
        )

    def _command_line(self) -> dict[str, Value]:
        """The command line as it can be typed again."""
        words = [str(word) for word in self.environment.get("command") or ()]
        if words and words[0] == self.command:
            words = ["python", "-m", f"harness.{words[0]}", *words[1:]]
        quoted = (f"'{word}'" if " " in word and "'" not in word else word for word in words)
        return {"environment.command": " ".join(quoted)} if words else {}

    def _models(self) -> Iterator[ModelFacts]:
        confs = {"target": self.conf("model"), "draft": self.conf("draft")}
        described = self.described
        if not described and confs["target"]:  # stopped before a model was opened
            described = {role: conf for role, conf in confs.items() if conf}
        for role, entry in described.items():
            conf = confs.get(role, {})
            yield ModelFacts(
                role=role,
                name=str(entry.get("name") or role),
                id=conf.get("id") or entry.get("id"),
                weights=entry.get("weights"),
                parameters=entry.get("parameters"),
                weights_bytes=entry.get("weights_bytes"),
                engine=entry.get("engine"),
                engine_reason=entry.get("engine_reason"),
                compiled=entry.get("compiled"),
            )


def _flat(entries: Entry, prefix: str = "") -> Iterator[tuple[str, Value]]:
    """Dotted names and values; a list of records is shown elsewhere."""
    for key, value in entries.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(cast("Entry", value), f"{name}.")
        elif isinstance(value, list):
            items = cast("list[Any]", value)
            if not any(isinstance(item, dict | list) for item in items):
                yield name, ", ".join(map(str, items))
        else:
            yield name, value

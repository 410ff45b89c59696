"""manifest.json: what a run is, what it measured on, and what became of it, as one typed record.

People edit the file by hand and other versions write it too. So a record is a typed view of the
entries of the file, and keeps them: what this version does not know survives a rewrite, and a
report shows all that is there.
"""

import json
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

from harness.records import (
    SCHEMA_VERSION,
    CardReadings,
    Cell,
    Failure,
    MachineLoad,
    NotMeasured,
    SampledLog,
    ServerMemory,
    ServingEngine,
    SkippedCell,
    UserError,
)
from harness.storage import files
from harness.storage.contents import plain
from harness.summary import CardRow, Dropped, MemoryBandwidth, PlanCheck, ServedCosts, adapter

Entries = Mapping[str, Any]
# The door of a run that measured a server
SERVER = "server"
AUDITION = "audition"


class _View:
    """A record of some entries of the file, which keeps all of them as `entries`."""

    entries: Entries

    @classmethod
    def of(cls, entries: Entries) -> Self:
        return adapter(cls).validate_python(_view(entries))


@dataclass(frozen=True)
class Environment(_View):
    """The command line, the software and the machine (`harness.measurement.environment`).

    `memory_bytes` is the host's, `unused_card` why a card that is there was not used, `entries` all
    that is known.
    """

    command: tuple[str, ...] = ()
    cpu: str | None = None
    memory_bytes: int | None = None
    device: str | None = None
    device_name: str | None = None
    device_memory_bytes: int | None = None
    unused_card: str | None = None
    entries: Entries = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class ModelEntry(_View):
    """A loaded model as it describes itself (`describe` of `harness.models`); `entries`: all of it.

    Sizes are None where its configuration has none; `id` and `kind` are of auditioned drafts,
    `devices` there where they are several, `stored_dtype` the checkpoint's where dtype=auto took
    another one, and `engine_reason` is why not a faster engine.
    """

    name: str | None = None
    id: str | None = None
    kind: str | None = None
    architecture: str | None = None
    weights: str | None = None
    dtype: str | None = None
    stored_dtype: str | None = None
    parameters: int | None = None
    weights_bytes: int | None = None
    bytes_per_parameter: float | None = None
    kv_bytes_per_token: float | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    tied: bool | None = None
    experts: int | None = None
    experts_per_token: int | None = None
    moe_ffn: int | None = None
    devices: tuple[str, ...] = ()
    chat_template: bool | None = None
    thinking_mode: bool | None = None
    commit: str | None = None
    weights_sample_sha256: str | None = None
    generation_config: Entries = field(default_factory=dict[str, Any])
    drafts_at_most: int | None = None
    engine: str | None = None
    engine_reason: str | None = None
    compiled: bool | None = None
    entries: Entries = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class IneligibleDraft:
    """A draft that cannot be used with the target."""

    draft: str
    reason: str


@dataclass(frozen=True)
class AuditionCosts:
    """Seconds of the texts, their scores and all measuring, over all processes that made them."""

    generation_s: float | None = None
    scoring_s: float | None = None
    measured_s: float | None = None


@dataclass(frozen=True)
class AuditionNotes:
    """The state of an audition's drafts.

    `failures` are of those that broke down, `dropped`, by name, those that lost, `untimed` names of
    those whose rounds were not timed, for they lose whatever these cost.
    """

    not_eligible: tuple[IneligibleDraft, ...] = ()
    failures: tuple[Failure, ...] = ()
    dropped: Mapping[str, Dropped] = field(default_factory=dict[str, Dropped])
    costs: AuditionCosts = AuditionCosts()
    untimed: tuple[str, ...] = ()


@dataclass(frozen=True)
class CloudRental:
    """The machine that was rented for the run."""

    asked_gpu: str
    upgraded: bool
    seconds: float
    price_per_hour_usd: float | None
    price_date: str | None
    usd: float | None


@dataclass(frozen=True)
class TextsFrom:
    """The server that the target's completions are from."""

    engine: str
    version: str | None
    url: str


@dataclass(frozen=True)
class TextsMadeWith:
    """Settings of the run that texts were taken from."""

    new_tokens: int | None = None
    repetitions: int | None = None


@dataclass(frozen=True)
class SyntheticAcceptance:
    """Acceptance that was set for a prompt set, temperature and K: rates by position."""

    prompt_set: str
    temperature: float
    k: int
    rates: tuple[float, ...]


Ended = Literal["decided", "prompts", "budget"]


@dataclass(frozen=True)
class ChosenK:
    """The K that is measured at a temperature, next to plain decoding, on every prompt of a look.

    Other K are measured on a few prompts. None: nothing could choose, and all K are measured.
    """

    temperature: float
    k: int | None
    # Of a sweep, after how many looks the temperature is measured no more; None before
    looks: int | None = None
    draft: str | None = None  # of an audition on servers
    p_min: float = 0.0  # the threshold of every K that is measured; 0: none

    @property
    def shown(self) -> str:
        """The K, and the threshold where there is one, as progress shows it."""
        return f"{self.k or 'all'}{f' at p_min={self.p_min:g}' if self.p_min else ''}"


class _ByTemperature:
    """The K that were chosen, and the looks that are made at each temperature."""

    chosen: tuple[ChosenK, ...]
    made: int

    def k_at(self, temperature: float) -> int | None:
        return next((each.k for each in self.chosen if each.temperature == temperature), None)

    def p_min_at(self, temperature: float) -> float:
        """The threshold that was chosen at a temperature; 0: none."""
        return next((each.p_min for each in self.chosen if each.temperature == temperature), 0.0)

    def made_at(self, temperature: float) -> int:
        made = (each.looks for each in self.chosen if each.temperature == temperature)
        return next(made, None) or self.made

    def closed(self, temperatures: Set[float], look: int) -> tuple[ChosenK, ...]:
        """The chosen K, those at these temperatures measured no more after a look."""
        return tuple(
            replace(each, looks=each.looks or look) if each.temperature in temperatures else each
            for each in self.chosen
        )


@dataclass(frozen=True)
class Looks(_ByTemperature):
    """The looks of a sweep with until=decided, as far as they are made."""

    # Of every temperature; chosen once, by the texts that were replayed
    chosen: tuple[ChosenK, ...]
    made: int = 0  # how many looks are measured and looked at
    # How many there are at most; the share of the prompts that are measured by now is made / most
    most: int = 4
    # What measuring took up to the last look, by the clock, over all processes
    measured_s: float = 0.0
    # Why no further look is made; None while one is. `decided`: every question is, or further pairs
    # are unlikely to decide it; `prompts`: all are measured; `budget`: the next look would have
    # gone beyond budget_s.
    ended: Ended | None = None


# Why a server run with until=decided measures every K: a server that prices rounds failed, or its
# requests do not tell what rounds cost
WhyAll = Literal["server_failed", "no_costs"]


@dataclass(frozen=True)
class ServedKs(_ByTemperature):
    """The K that a server run with until=decided measures."""

    # Those whose servers priced rounds on a few prompts, in the order of their start
    started: tuple[int, ...]
    # Of every temperature, the one that is measured next to plain decoding on all prompts; chosen
    # once. Empty where every K is.
    chosen: tuple[ChosenK, ...] = ()
    why_all: WhyAll | None = None  # why every K is
    made: int = 0  # how many looks are made, each after a further part of the requests; 0 at first
    ended: Ended | None = None  # why no further look is made; None while one is


@dataclass(frozen=True)
class AskedLess:
    """The requests of a server run whose configuration would take longer than budget_s."""

    prompts: int
    new_tokens: int
    repetitions: int
    temperature: tuple[float, ...]
    k: tuple[int, ...]
    of_each_set: int  # prompts of each set by which the K to measure is chosen
    everything: bool = False  # whether that alone is less than it was configured to be

    def applied(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A configuration with what is asked for instead."""
        asked = {"new_tokens": self.new_tokens, "repetitions": self.repetitions}
        return {**config, **asked, "temperature": [*self.temperature], "k": [*self.k]}


@dataclass(frozen=True)
class CostsAt:
    """Decoding costs on a server at one temperature, as a run of it settled them."""

    costs: ServedCosts  # by all of its requests
    # The same without each part of their prompts, which shows how well it is known
    without: tuple[ServedCosts, ...]
    # error, error_degrees: the variance of a prediction's logarithm beyond that, as that run's own
    # cells show it, and its degrees of freedom; 0.0 where none was measured
    error: float = 0.0
    error_degrees: float = 1.0


@dataclass(frozen=True)
class EngineCosts:
    """Decoding costs on the engine of another run, whose rounds price this run's drafts."""

    run: str  # the folder of the server run
    engine: ServingEngine  # that it measured
    device: str | None  # its card or processor; None where its servers ran elsewhere
    visits: int  # in which its requests were timed
    # target, draft: of its pair
    target: ModelEntry
    draft: ModelEntry
    # The draft's weights / the target's in the files that were served, over the same as both were
    # loaded; 1.0 where these are the checkpoints
    bytes_factor: float
    at: tuple[CostsAt, ...]  # by temperature


@dataclass(frozen=True)
class PlannedServer:
    """The server that a plan simulates, as its run measured it."""

    run: str  # the folder of the server run
    engine: str
    draft: str
    temperature: float
    slots: int  # requests that a card decodes side by side
    slots_timed: int  # up to which costs are known
    # context, context_timed: tokens of the longest text with its prompt, in the plan and in the
    # loads that costs are fitted to
    context: int
    context_timed: int
    prompts: int = 0
    tokens: float = 0.0  # that a request returns, the mean
    lossy: tuple[int, ...] = ()  # K that change what is generated
    prompts_priced: bool = True  # whether it is known what a prompt's length costs
    disturbed: float | None = None  # processors that other work kept busy, where they were many
    largest_rate: float | None = None  # of its loads; None where it has none at a rate
    other_slots: tuple[int, ...] = ()  # of its loads at a rate that are not used
    price_per_hour_usd: float | None = None  # of a card
    other_device: str | None = None  # that it was measured on, where not the card of the plan
    checks: tuple[PlanCheck, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """The entries of manifest.json; None where a run has none."""

    schema_version: int
    door: str = ""  # the command that made it
    # running, complete or failed; a run that was interrupted stays running
    status: str | None = None
    created_utc: str | None = None
    interrupted_by: str | None = None
    environment: Environment = Environment()
    # By role, target and draft; in an audition a draft's role is its name
    models: Mapping[str, ModelEntry] = field(default_factory=dict[str, ModelEntry])
    # Conversations of each prompt set
    prompts: Mapping[str, int] = field(default_factory=dict[str, int])
    # Likewise, with those that prompts.limit left out; of a log's strata all of their requests
    prompts_available: Mapping[str, int] = field(default_factory=dict[str, int])
    prompts_log: SampledLog | None = None  # where prompts are a sample of a log
    prompts_sha256: str | None = None
    seed: int | None = None
    audition: AuditionNotes = AuditionNotes()
    # traces_from, texts_from, texts_made_with: where texts and scores are from
    traces_from: str | None = None
    texts_from: TextsFrom | None = None
    texts_made_with: TextsMadeWith | None = None
    synthetic_acceptance: tuple[SyntheticAcceptance, ...] = ()
    # Whether generations take turns (`harness.commands.requests.side_by_side`)
    side_by_side: bool | None = None
    # Of a sweep that measures until its verdicts are decided; None of any other
    looks: Looks | None = None
    # Which K a server run with until=decided measures; None of any other
    served_ks: ServedKs | None = None
    # What a server run asks for so that it ends within its budget; None where that is everything
    asked_less: AskedLess | None = None
    bandwidth: MemoryBandwidth | None = None
    # skipped_cells, timed_forwards: of a profile's curves; both are there once they were timed
    skipped_cells: tuple[SkippedCell, ...] | None = None
    timed_forwards: int | None = None
    # engine, server_threads, server_memory: of servers: which, and what each was started with
    engine: ServingEngine | None = None
    # What prices this run's drafts, where it is another engine's
    engine_costs: EngineCosts | None = None
    # Of a plan
    planned: PlannedServer | None = None
    server_threads: int | None = None
    server_memory: tuple[ServerMemory, ...] = ()
    # Of a breakeven run: keys of the configuration that files gave
    inputs: Entries = field(default_factory=dict[str, Any])
    # Imported files, with how many requests each holds
    records: Mapping[str, int] = field(default_factory=dict[str, int])
    # combined, cards: of a run that ranks others by card
    combined: tuple[str, ...] = ()
    cards: tuple[CardRow, ...] = ()
    cloud: CloudRental | None = None
    not_measured: tuple[NotMeasured, ...] = ()
    # One for each card and each time that the run was begun or resumed
    card_readings: tuple[CardReadings, ...] = ()
    # other_load, other_gpu_processes: what others did on the machine meanwhile
    other_load: MachineLoad | None = None
    other_gpu_processes: int | None = None
    # The whole file, of which all else is a view
    entries: Entries = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, entries: Entries) -> "Manifest":
        """From the entries of the file.

        Raises:
            ValueError: an entry of another type than this version writes.
        """
        views = _view(entries)
        if "environment" in views:
            views["environment"] = _view(views["environment"])
        if isinstance(models := views.get("models"), Mapping):
            views["models"] = {role: _view(entry) for role, entry in models.items()}
        if isinstance(costs := views.get("engine_costs"), Mapping):
            models = {role: _view(costs.get(role, {})) for role in ("target", "draft")}
            views["engine_costs"] = {**costs, **models}
        return adapter(cls).validate_python(views)

    def updated(self, **changes: Any) -> "Manifest":
        """With other entries, as records or as what the file holds; None removes one.

        Raises:
            TypeError: there is no such entry.
            ValueError: it is of another type.
        """
        unknown = changes.keys() - {each.name for each in fields(self)}
        if unknown:
            raise TypeError(f"a manifest has no {', '.join(sorted(unknown))}")
        entries = {**self.entries, **plain(changes)}
        removed = {name for name, value in changes.items() if value is None}
        return Manifest.of({key: value for key, value in entries.items() if key not in removed})

    @property
    def synthetic_rates(self) -> dict[Cell, tuple[float, ...]]:
        """The acceptance that was set; empty where it was measured."""
        return {
            Cell(each.prompt_set, each.temperature, each.k): each.rates
            for each in self.synthetic_acceptance
        }


def read_manifest(folder: Path) -> Manifest:
    """manifest.json, of a schema that this version reads."""
    file = folder / "manifest.json"
    content = files.read(file, files.TEXT_BYTES)
    if content is None:
        raise UserError(f"{folder}: not a run folder (it has no manifest.json)")
    try:
        entries = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(entries, dict):
        raise UserError(f"{file}: expected a JSON object")
    files.check_values(entries, file)
    version = entries.get("schema_version")
    if not isinstance(version, int):
        raise UserError(f"{file}: no schema_version; this is not a run's manifest")
    if version != SCHEMA_VERSION:
        age = "an earlier" if version < SCHEMA_VERSION else "a newer"
        raise UserError(
            f"{folder}: made by {age} version (schema {version}; this one reads {SCHEMA_VERSION});"
            " read it with the version that made it, or make it again"
        )
    from pydantic import ValidationError  # see `harness.summary.adapter`

    try:
        return Manifest.of(entries)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"{file}: {place}: {first['msg']}; not a run's manifest") from error


def _view(entries: Any) -> Any:
    """The fields of an entry that are not null, with the entry itself."""
    if not isinstance(entries, Mapping):
        return entries  # which pydantic refuses
    known = {name: value for name, value in entries.items() if value is not None}
    return {**known, "entries": entries}

"""The runs that a fleet is put together from: checked to be parts of one audition, card by card."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from omegaconf import OmegaConf

from harness.analysis.latency import Latency
from harness.analysis.views import Bench
from harness.commands.audition import Taken, bench_of
from harness.commands.sources import by_draft, latencies
from harness.config import AuditionConfig
from harness.records import TextKey, TextTrace, UserError
from harness.storage import RunFolder, StoredRun, load, load_traces, timings_from

# What must be alike for two auditions to be parts of one.
ALIKE = ("k", "temperature", "new_tokens", "repetitions", "seed", "decode", "backend")
ALIKE_MODEL = ("id", "revision", "dtype", "weights", "quantization")


@dataclass(frozen=True)
class Card:
    """One card's runs as one.

    Attributes:
        name, device: its short name, and what it calls itself.
        runs: what was stored of it, the first the most important.
        config: of the first, as the door's dataclass.
        folder: the first, with the models of all in its manifest.
        taken: traces and step times by draft, of all runs.
        bench: the same, ready to be ranked.
    """

    name: str
    device: str
    runs: tuple[StoredRun, ...]
    config: AuditionConfig
    folder: RunFolder
    taken: Taken
    bench: Bench

    @property
    def target_step_s(self) -> float:
        """Plain decoding's time per token; of the first draft's target steps, as in a ranking."""
        return next(iter(self.bench.latency.values())).times.target_s


def open_cards(folders: Sequence[str]) -> list[Card]:
    """The cards of stored auditions, in the order they are first named.

    Raises:
        UserError: a folder that is no finished audition, or runs that are not parts of one.
    """
    runs = [_finished(folder) for folder in folders]
    for other in runs[1:]:
        _check_alike(runs[0], other)
    return _cards(runs)


def _finished(folder: str) -> StoredRun:
    stored = load(folder)
    if stored.door != "audition":
        raise UserError(f"combine: {folder} was made by {stored.door}, not by audition")
    if not (stored.summary or {}).get("leaderboards"):
        raise UserError(f"combine: {folder} ranked no draft; resume={folder} goes on with it")
    if "cards" in (stored.summary or {}):
        raise UserError(f"combine: {folder} is combined already; name the runs it was made of")
    return stored


def _check_alike(first: StoredRun, other: StoredRun) -> None:
    """Refuse runs whose numbers cannot stand side by side."""
    ours, theirs = first.config, other.config
    differing = [key for key in ALIKE if ours.get(key) != theirs.get(key)]
    differing += [
        f"model.{key}" for key in ALIKE_MODEL if ours["model"].get(key) != theirs["model"].get(key)
    ]
    if ours["prompts"].get("weights") != theirs["prompts"].get("weights"):
        differing.append("prompts.weights")
    if first.manifest.get("prompts_sha256") != other.manifest.get("prompts_sha256"):
        differing.append("prompts")
    if differing:
        raise UserError(
            f"combine: {other.folder} and {first.folder} differ in {', '.join(differing)}; "
            "only parts of one audition can be combined"
        )


def _cards(runs: Sequence[StoredRun]) -> list[Card]:
    groups: dict[tuple[str, str], list[StoredRun]] = {}
    for stored in runs:
        device = str(stored.manifest.get("environment", {}).get("device_name") or "typed latencies")
        asked = str((stored.config.get("gpu") or {}).get("name"))
        groups.setdefault((asked, device), []).append(stored)
    cards = [_card(device, group) for (_, device), group in groups.items()]
    names = [card.name for card in cards]
    # One device that was asked for under two names would be two rows of one name
    return [
        replace(card, name=f"{card.name} (asked for {asked})")
        if names.count(card.name) > 1
        else card
        for card, (asked, _) in zip(cards, groups, strict=True)
    ]


def _card(device: str, runs: Sequence[StoredRun]) -> Card:
    first = runs[0]
    taken = _taken(runs)
    models = {
        name: entry for stored in runs for name, entry in (stored.manifest["models"] or {}).items()
    }
    folder = RunFolder(first.folder, {**first.manifest, "models": models})
    config = _config(first)
    bench = bench_of(folder, config, taken)
    named = config.gpu.name if config.gpu and bench.price_per_hour is not None else device
    return Card(named, device, tuple(runs), config, folder, taken, bench)


def _taken(runs: Sequence[StoredRun]) -> Taken:
    """The traces and step times of one card's runs, each draft from the first that ranked it."""
    traces: dict[str, Sequence[TextTrace]] = {}
    latency: dict[str, Latency] = {}
    for stored in runs:
        names = [name for name in _ranked_drafts(stored) if name not in traces]
        found = by_draft(load_traces(stored.folder))
        timings = timings_from(stored.latency_samples)
        latency |= latencies(_config(stored), names, timings)
        traces |= {name: found[name] for name in names}
    texts = {name: _texts(group) for name, group in traces.items()}
    first = next(iter(texts))
    other = next((name for name in texts if texts[name] != texts[first]), None)
    if other is not None:
        raise UserError(
            f"combine: {first} and {other} were scored on different texts; "
            "audition the later one with traces_from=RUN latency.measure=true"
        )
    return Taken(traces, latency)


def _ranked_drafts(stored: StoredRun) -> list[str]:
    """The drafts of a run's leaderboards, in the order they were asked for."""
    boards = (stored.summary or {})["leaderboards"]
    ranked = {row["draft"] for board in boards for row in board["rows"]}
    return [name for name in by_draft(load_traces(stored.folder)) if name in ranked]


def _texts(traces: Sequence[TextTrace]) -> dict[TextKey, tuple[int, ...]]:
    return {trace.key: tuple(trace.tokens.tolist()) for trace in traces}


def _config(stored: StoredRun) -> AuditionConfig:
    """A stored configuration as the door's dataclass."""
    known = {field.name for field in fields(AuditionConfig)}
    given = {key: value for key, value in stored.config.items() if key in known}
    merged = OmegaConf.merge(OmegaConf.structured(AuditionConfig), given)
    config = OmegaConf.to_object(merged)
    assert isinstance(config, AuditionConfig)
    return config

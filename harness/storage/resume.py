"""Checks of a resume: a stored run goes on with what it began with.

- `check_command`: the command and its configuration, before any model is loaded. Keys that say
  where a run is put, how much is done and how it is shown may differ.
- `drafts_of`: an audition may be resumed without drafts that could not be used.
- `check_loaded`: the prompts, the device, the models' weights and what runs them, once loaded.
- `check_engine`: the engine that a server run measures, or that completes an audition's prompts,
  once it answers.

Elsewhere is what every reading or writing of a run needs: that its files are whole
(`harness.storage.files`, `contents`) and that no other process writes it (`files.Lock`). Which of
its generations are missing is known by `Trial.cell`, a hash of all that determines one
(`harness.commands.requests`); of which keys the run's are taken, see `harness.commands.keys`.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from harness.command_words import as_typed
from harness.config import split_draft
from harness.records import ServingEngine, UserError
from harness.storage.contents import flattened
from harness.storage.manifest import (
    SERVER,
    AuditionNotes,
    Environment,
    Manifest,
    ModelEntry,
    TextsFrom,
)

FREE_KEYS = frozenset(
    {
        *("resume", "results_root", "debug", "dry_run", "verbose", "json", "engine", "hydra"),
        *("timeout_factor", "budget_s"),
    }
)
# Of models, what no number depends on
DESCRIBING_KEYS = frozenset({"tokenizer_family", "head_of"})
# What of a model's entry in the manifest must stay as it was
WEIGHTS = ("name", "dtype", "commit", "parameters", "weights_sample_sha256")
RUN_BY = ("engine", "compiled")
# Of a server's commands: they follow from the configuration, which is the same, but for the paths
# of files
COMMANDS = ("commands", "varying")


def free_keys(door: str) -> frozenset[str]:
    """The keys that may differ when a run of the command is resumed."""
    # Of this command the engine is not how a run is shown, but what it measures
    return FREE_KEYS - {"engine"} if door == SERVER else FREE_KEYS


def differences(
    stored: Mapping[str, Any], given: Mapping[str, Any], free: Container[str]
) -> list[str]:
    """Dotted keys at which two configurations differ, with both values, the free keys aside."""
    left, right = flattened(stored), flattened(given)
    return [
        f"{key}={right.get(key)} (the run: {left.get(key)})"
        for key in sorted(left.keys() | right.keys())
        if key.split(".")[0] not in free
        and key.split(".")[-1] not in DESCRIBING_KEYS
        and left.get(key) != right.get(key)
    ]


def check_command(
    folder: str | Path,
    stored: Manifest,
    stored_config: Mapping[str, Any],
    door: str,
    config: Mapping[str, Any],
) -> None:
    """Refuse another command than the run's, or another configuration: every differing key."""
    if stored.door != door:
        raise UserError(f"{as_typed('resume', folder)}: made by {stored.door}, not by {door}")
    differing = differences(stored_config, config, free_keys(door))
    if differing:
        raise UserError(
            f"{as_typed('resume', folder)}: its configuration differs in {', '.join(differing)}; "
            "leave out what the run has already, or start a new run without resume="
        )


def drafts_of(
    stored: Sequence[str], asked: Sequence[str], notes: AuditionNotes
) -> Sequence[str] | None:
    """The run's own `drafts`, where those asked for leave out some of it that it could not use.

    None where nothing is left out, or a draft that could be used is, or others were added.
    """
    unusable = {each.draft for each in (*notes.not_eligible, *notes.failures)}
    left_out = {split_draft(entry).name for entry in stored if entry not in asked}
    kept = [entry for entry in stored if entry in asked]
    return stored if left_out and left_out <= unusable and kept == [*asked] else None


def check_loaded(
    folder: Path,
    stored: Manifest,
    prompts_sha256: str,
    environment: Environment,
    models: Mapping[str, ModelEntry],
) -> None:
    """Refuse prompts, a device or models that are not those the run began with.

    Of the run's models, those that are not among `models` are passed over, and of each what it has
    not noted, as of a model that is on a server.
    """
    before = {role: stored.models[role] for role in models}
    changed = [
        what
        for what, one, other in (
            ("prompts", stored.prompts_sha256, prompts_sha256),
            ("device", stored.environment.device_name, environment.device_name),
            ("models", _noted(WEIGHTS, before, before), _noted(WEIGHTS, models, before)),
            ("engines", _noted(RUN_BY, before, before), _noted(RUN_BY, models, before)),
        )
        if one != other
    ]
    if changed:
        raise UserError(
            f"{as_typed('resume', folder)}: {' and '.join(changed)} changed since; "
            "one run cannot mix the two, start a new one without resume="
        )


def check_engine(
    folder: Path, stored: ServingEngine | TextsFrom, now: ServingEngine | TextsFrom
) -> None:
    """Refuse another engine, version or setting of it than the run began with."""
    compared = [each.name for each in fields(now) if each.name not in COMMANDS]
    changed = [name for name in compared if getattr(stored, name) != getattr(now, name)]
    if changed:
        raise UserError(
            f"{as_typed('resume', folder)}: the server's {' and '.join(changed)} changed since;"
            " one run"
            " cannot mix the two, start a new one without resume="
        )


def _noted(
    names: Sequence[str], models: Mapping[str, ModelEntry], stored: Mapping[str, ModelEntry]
) -> list[tuple[Any, ...]]:
    """These fields of each model, as far as the run that is resumed noted them."""
    return [
        tuple(getattr(models[role], name) for name in names if name in entry.entries)
        for role, entry in stored.items()
    ]

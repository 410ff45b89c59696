"""What differs between runs: settings, and facts of the environment."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.storage import FREE_KEYS, StoredRun

# Shown first, in this order: the ends of dotted names in manifest.json and config.yaml.
FIRST = (
    "device",
    "device_name",
    "driver",
    "cuda",
    "threads",
    "backend",
    "engine",
    "model.id",
    "draft.id",
    "revision",
    "commit",
    "dtype",
    "weights",
    "rule",
    "prompts_sha256",
    "new_tokens",
    "seed",
    "dirty",
)
# What differs between any two runs, or is told by another entry.
PASSED_OVER = ("created_utc", "environment.command", "status", "memory_bytes")
SHOWN_HASH = 12


@dataclass(frozen=True)
class Difference:
    """A setting in which the runs differ: its dotted name, and its value in each run."""

    name: str
    values: tuple[Any, ...]


def differences(runs: Sequence[StoredRun]) -> list[Difference]:
    """Every setting and every fact of the environment in which the runs differ."""
    entries = [dict(_entries(run)) for run in runs]
    names = dict.fromkeys(name for entry in entries for name in entry)
    every = (Difference(name, tuple(entry.get(name) for entry in entries)) for name in names)
    found = [entry for entry in every if any(v != entry.values[0] for v in entry.values)]
    return sorted(found, key=lambda entry: _place(entry.name))


def _entries(run: StoredRun) -> Iterator[tuple[str, Any]]:
    for name, value in (*_flat(run.config), *_flat(run.manifest)):
        if name.split(".")[0] in FREE_KEYS or name.endswith(PASSED_OVER):
            continue
        if name == "prompts_sha256":
            yield name, str(value)[:SHOWN_HASH]
        else:
            yield name.removeprefix("environment."), value


def _flat(entries: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in entries.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _place(name: str) -> tuple[int, str]:
    ends = (index for index, end in enumerate(FIRST) if f".{name}".endswith(f".{end}"))
    return next(ends, len(FIRST)), name

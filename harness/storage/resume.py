"""What a resume checks: that the command and its configuration are those of the stored run.

Keys that say where a run is put, how much is done and how it is shown may differ.
"""

from collections.abc import Container, Mapping
from typing import Any

from harness.storage.contents import flattened
from harness.storage.manifest import SERVER

FREE_KEYS = frozenset(
    {
        *("resume", "results_root", "debug", "dry_run", "verbose", "engine", "linear", "hydra"),
        *("timeout_factor", "budget_s"),
    }
)
# Keys that came later, with the value of runs without them
LATER_KEYS = {"kind": "model", "until": "all", "clock": "wall", "limit_files": True}
# Of models, what no number depends on
DESCRIBING_KEYS = frozenset({"tokenizer_family", "head_of"})


def free_keys(door: str) -> frozenset[str]:
    """The keys that may differ when a run of the command is resumed."""
    # Of this command the engine is not how a run is shown, but what it measures
    return FREE_KEYS - {"engine"} if door == SERVER else FREE_KEYS


def differences(
    stored: Mapping[str, Any], given: Mapping[str, Any], free: Container[str]
) -> list[str]:
    """Dotted keys at which two configurations differ, with both values, the free keys aside.

    A key that the stored run's version did not have yet differs where it is in use.
    """
    left, right = flattened(stored), flattened(given)
    return [
        f"{key}={right.get(key)} (the run: {left.get(key)})"
        for key in sorted(left.keys() | right.keys())
        if key.split(".")[0] not in free
        and key.split(".")[-1] not in DESCRIBING_KEYS
        and not (key not in left and right[key] == LATER_KEYS.get(key.split(".")[-1]))
        and (left[key] != right.get(key) if key in left else bool(right[key]))
    ]

"""The stored frames as records again, so that tables and plots read fields and not columns.

An empty field of a CSV comes back as NaN; here it is None, as it was when it was written. A frame
that is missing (a run that stopped early) gives no rows.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pandas as pd
from pydantic import TypeAdapter

from harness.records import LatencyRow, ResultRow
from harness.summary import Comparison, RoundFit

if TYPE_CHECKING:
    from harness.storage import StoredRun

_WHOLE = frozenset({"k", "prompts", "new_tokens", "peak_memory_bytes"})
_WHOLE_LATENCY = frozenset({"tokens", "context_tokens", "batch", "samples"})


def results_of(run: "StoredRun") -> tuple[ResultRow, ...]:
    """Every row of results.csv, in stored order."""
    names = tuple(field.name for field in fields(ResultRow))
    rows = run.results.to_dict("records")
    return tuple(ResultRow(**_row(row, names, _WHOLE)) for row in rows)


def ran(rows: Iterable[ResultRow]) -> tuple[ResultRow, ...]:
    """The rows that stand for generations, each cell once.

    Those that were measured; where nothing was, those that were replayed, and the baseline (k = 0)
    that their step times predict.
    """
    every = tuple(rows)
    measured = tuple(row for row in every if row.source == "measured")
    if measured or not any(row.source == "replayed" for row in every):
        return measured
    return tuple(row for row in every if row.source == "replayed" or row.k == 0)


def replays_only(rows: Iterable[ResultRow]) -> bool:
    """Whether what `ran` gives was replayed and not measured."""
    return any(row.source == "replayed" for row in ran(rows))


def drafts_of(run: "StoredRun") -> tuple[str, ...]:
    """Every draft, in the order of the first leaderboard: their place is their colour in plots."""
    boards = summary_of(run).get("leaderboards") or ()
    ranked = [row.get("draft") for board in boards for row in board.get("rows") or ()]
    names = [*ranked, *(row.draft for row in results_of(run))]
    return tuple(dict.fromkeys(str(name) for name in names if name is not None))


def latency_of(run: "StoredRun") -> tuple[LatencyRow, ...]:
    """Every row of latency.csv, in stored order."""
    names = tuple(field.name for field in fields(LatencyRow))
    rows = run.latency.to_dict("records")
    return tuple(LatencyRow(**_row(row, names, _WHOLE_LATENCY)) for row in rows)


def summary_of(run: "StoredRun") -> dict[str, Any]:
    """summary.json, or an empty mapping where it was not written."""
    return run.summary or {}


def comparison_of(run: "StoredRun") -> Comparison | None:
    """The comparison that a report of several runs stored."""
    stored = summary_of(run).get("comparison")
    return TypeAdapter(Comparison).validate_python(stored) if isinstance(stored, dict) else None


def round_fit_of(run: "StoredRun") -> RoundFit | None:
    """What a server's log came to."""
    stored = summary_of(run).get("round_fit")
    return TypeAdapter(RoundFit).validate_python(stored) if isinstance(stored, dict) else None


def headline_of(run: "StoredRun") -> dict[str, Any]:
    """The summary's named numbers."""
    return summary_of(run).get("headline") or {}


def dummies_of(run: "StoredRun") -> tuple[str, ...]:
    """Names of the run's models whose weights were random."""
    entries = (run.manifest.get("models") or {}).values()
    named = (str(entry.get("name")) for entry in entries if entry.get("weights") == "dummy")
    return tuple(dict.fromkeys(named))


def synthetic(run: "StoredRun") -> bool:
    """Whether the run's acceptance was set, not found."""
    decode = run.config.get("decode") or {}
    return any(decode.get(key) is not None for key in ("acceptance", "acceptance_from"))


def door_of(run: "StoredRun") -> str:
    """Which door made the run; from the folder's name where the manifest does not say."""
    stored = run.manifest.get("door")
    parts = run.folder.name.split("_")
    return str(stored) if stored else (parts[1] if len(parts) > 1 else "run")


def _row(
    row: Mapping[Hashable, Any], names: tuple[str, ...], whole: frozenset[str]
) -> dict[str, Any]:
    values = {name: _value(row.get(name)) for name in names}
    return {
        name: int(value) if name in whole and value is not None else value
        for name, value in values.items()
    }


def _value(value: Any) -> Any:
    return None if pd.isna(value) else value

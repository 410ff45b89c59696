"""traces.parquet: the target's texts as each draft sees them, one row per text position.

For a drafter whose proposals depend on where a round starts there is one row per (start, offset),
`position` being their sum, which may lie beyond the text; a token that was not proposed has no
`draft_logprob` there. For every other draft `start` is empty.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import parquet

from harness.records import TextTrace, UserError

_NAME = pa.dictionary(pa.int32(), pa.string())
# Of a trace
TEXT_COLUMNS = {
    "draft": _NAME,
    "draft_temperature": pa.float64(),
    "prompt_set": _NAME,
    "prompt": _NAME,
    "category": _NAME,
    "repetition": pa.int64(),
    "temperature": pa.float64(),
    "top_k": pa.int64(),
    "top_p": pa.float64(),
    "prompt_tokens": pa.int64(),
    "stop_reason": _NAME,
    "turn": pa.int64(),
    "k": pa.int64(),
}
# Of a position; the names are those of TextTrace
NUMBER_COLUMNS = {
    "target_logprob": pa.float64(),
    "draft_logprob": pa.float64(),
    "draft_is_argmax": pa.bool_(),
    "last_ratio": pa.float64(),
    "last_exact_match": pa.float64(),
    "last_greedy_draft": pa.float64(),
    "target_entropy": pa.float64(),
    "draft_entropy": pa.float64(),
}
POSITIONS = {"start": pa.int64(), "position": pa.int64(), "token": pa.int64()}
# In the file's order
_FIRST = ("draft", "draft_temperature", "start", "prompt", "position", "token", *NUMBER_COLUMNS)
_TYPES = {**TEXT_COLUMNS, **POSITIONS, **NUMBER_COLUMNS}
SCHEMA = pa.schema({name: _TYPES[name] for name in dict.fromkeys((*_FIRST, *TEXT_COLUMNS))})
# Columns that came later (conversations, servers), with what they are in rows without them
EARLIER: dict[str, Any] = {"turn": 1, "k": 0}
MAX_ROWS = 50_000_000


def content(traces: Sequence[TextTrace], before: bytes | None = None) -> bytes:
    """The traces as the bytes of a parquet file, after the rows of the file `before`."""
    rows = _table(traces)
    if before is not None:
        parts = [parquet.read_table(io.BytesIO(before)), rows]
        rows = pa.concat_tables(parts, promote_options="permissive").unify_dictionaries()
    buffer = io.BytesIO()
    parquet.write_table(rows, buffer, compression="zstd")
    return buffer.getvalue()


def read(content: bytes, file: Path) -> list[TextTrace]:
    """Read the traces back, in the order they were written; an error names the file."""
    try:
        rows = parquet.ParquetFile(io.BytesIO(content)).metadata.num_rows
        if rows > MAX_ROWS:  # a few bytes can say that a value is repeated
            raise ValueError(f"{rows:,} rows; no run writes more than {MAX_ROWS:,}")
        types = {pa.int64(): pd.Int64Dtype()}
        stored = parquet.read_table(io.BytesIO(content)).to_pandas(types_mapper=types.get)
    except (OSError, ValueError, MemoryError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{file}: cannot be read as traces ({reason})") from error
    for name, value in EARLIER.items():
        stored[name] = stored[name].fillna(value) if name in stored.columns else value
    missing = [name for name in SCHEMA.names if name not in stored.columns]
    if missing:
        raise UserError(f"{file}: not the traces of a run; it has no column {missing[0]}")
    groups = stored.groupby(list(TEXT_COLUMNS), sort=False, dropna=False, observed=True)
    try:
        return [_trace(rows) for _, rows in groups]
    except (ValueError, TypeError, IndexError) as error:
        raise UserError(f"{file}: not the traces of a run ({error})") from error


def _table(traces: Sequence[TextTrace]) -> pa.Table:
    parts = [_rows(trace) for trace in traces]
    trace_of_row = np.repeat(np.arange(len(parts)), [len(part["position"]) for part in parts])
    columns: dict[str, Any] = {}
    for name, kind in (POSITIONS | NUMBER_COLUMNS).items():
        values = np.concatenate([part[name] for part in parts]) if parts else []
        columns[name] = pa.array(values, kind, from_pandas=True)  # NaN becomes null
    for name, kind in TEXT_COLUMNS.items():
        values = [getattr(trace, name) for trace in traces]
        columns[name] = pa.array(values, kind).take(pa.array(trace_of_row))
    return pa.table(columns, SCHEMA)


def _rows(trace: TextTrace) -> dict[str, NDArray[Any]]:
    """The per-row columns of one trace; what is absent is NaN."""
    positions = np.arange(len(trace.tokens))
    numbers: dict[str, NDArray[Any]] = {name: getattr(trace, name) for name in NUMBER_COLUMNS}
    if trace.matches is None or trace.proposed is None:
        starts = np.full(len(positions), np.nan)
        return {"start": starts, "position": positions, "token": trace.tokens, **numbers}
    matches, offsets = trace.matches, np.arange(trace.matches.shape[1])
    at = positions[:, None] + offsets
    with np.errstate(divide="ignore"):
        logprob = np.where(offsets < trace.proposed[:, None], np.log(matches), np.nan)
    rows: dict[str, NDArray[Any]] = {
        "start": np.repeat(positions, len(offsets)),
        "position": at,
        "token": _at(trace.tokens.astype(np.float64), at),
        "target_logprob": _at(trace.target_logprob, at),
        "target_entropy": _at(trace.target_entropy, at),
        "draft_entropy": np.broadcast_to(trace.draft_entropy[:, None], at.shape),
        "draft_logprob": logprob,
        "draft_is_argmax": matches,
    }
    for name in ("last_ratio", "last_exact_match", "last_greedy_draft"):
        rows[name] = np.where(offsets == 0, numbers[name][:, None], matches)
    return {name: values.reshape(-1) for name, values in rows.items()}


def _at(values: NDArray[np.float64], at: NDArray[np.int64]) -> NDArray[np.float64]:
    """The values at text positions, NaN beyond the text."""
    return np.append(values, np.nan)[np.minimum(at, len(values))]


def _trace(rows: pd.DataFrame) -> TextTrace:
    """Rebuild one trace from its rows."""
    head: dict[str, Any] = {}
    for name in TEXT_COLUMNS:
        (value,) = rows[name].iloc[:1].tolist()
        head[name] = None if pd.isna(value) else value
    numbers: dict[str, Any] = {name: rows[name].to_numpy() for name in NUMBER_COLUMNS}
    if rows["start"].isna().all():
        return TextTrace(**head, tokens=rows["token"].to_numpy(np.int64), **numbers)
    shape = (int(rows["start"].max()) + 1, -1)
    square = {name: values.reshape(shape) for name, values in numbers.items()}
    first: dict[str, Any] = {name: values[:, 0].copy() for name, values in square.items()}
    first["draft_logprob"] = np.where(first["draft_is_argmax"], 0.0, -np.inf)
    return TextTrace(
        **head,
        tokens=rows["token"].to_numpy(np.float64, na_value=np.nan).reshape(shape)[:, 0].astype(int),
        **first,
        matches=square["draft_is_argmax"],
        proposed=(~np.isnan(square["draft_logprob"])).sum(axis=1),
    )

"""traces.parquet: the target's texts as each draft sees them, one row per text position.

For a drafter whose proposals depend on where a round starts there is one row per (start, offset),
offset by offset from each start; `position` is their sum, which may lie beyond the text. For every
other draft `start` and `offset` are empty. `proposed` is empty where as many tokens are proposed as
are asked for. The rows of a text stand together.

A file is written and read in parts of PART_ROWS rows, so that what is in memory is its traces and
one part of the table, which takes some ten times as much a row.

confidences.parquet has how sure drafts are of what they draft off those texts, one row per text
position (one more than the text has) and offset from it; see `DraftConfidence`.
"""

import io
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import parquet

from harness.records import DraftConfidence, TextTrace, UserError

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
    "chosen": pa.bool_(),
}
# Of a position, and of a start and offset; the names are those of TextTrace
NUMBER_COLUMNS = {
    "target_logprob": pa.float64(),
    "draft_logprob": pa.float64(),
    "draft_is_argmax": pa.bool_(),
}
PLACES = {name: pa.int64() for name in ("start", "offset", "position", "token", "proposed")}
# In the file's order
_FIRST = (
    *("draft", "draft_temperature", "start", "offset", "prompt", "position", "token"),
    *NUMBER_COLUMNS,
)
_TYPES = {**TEXT_COLUMNS, **PLACES, **NUMBER_COLUMNS}
_NAMES = (*_FIRST, *TEXT_COLUMNS, *PLACES)
SCHEMA = pa.schema({name: _TYPES[name] for name in dict.fromkeys(_NAMES)})
MAX_ROWS = 50_000_000
PART_ROWS = 200_000


def content_of_traces(traces: Sequence[TextTrace], before: bytes | None = None) -> bytes:
    """The traces as the bytes of a parquet file, after the rows of the file `before`."""
    buffer = io.BytesIO()
    with parquet.ParquetWriter(buffer, SCHEMA, compression="zstd") as file:
        if before is not None:
            stored = parquet.ParquetFile(io.BytesIO(before))
            for batch in stored.iter_batches(PART_ROWS, columns=SCHEMA.names):
                file.write_table(_of_schema(batch))
        for part in _parts(traces):
            file.write_table(_table(part))
    return buffer.getvalue()


def _of_schema(batch: pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches([batch]).select(SCHEMA.names).cast(SCHEMA)


def _parts(traces: Sequence[TextTrace]) -> Iterator[Sequence[TextTrace]]:
    """Traces of some PART_ROWS rows together."""
    rows = np.cumsum([0, *(len(trace.tokens) * (trace.depth or 1) for trace in traces)])
    bounds = np.searchsorted(rows, np.arange(0, rows[-1], PART_ROWS)).tolist()
    return (traces[first:end] for first, end in pairwise(sorted({*bounds, len(traces)})))


def read_traces(content: bytes, file: Path) -> list[TextTrace]:
    """Read the traces back, in the order they were written; an error names the file."""
    traces: list[TextTrace] = []
    frames = _frames(content, file)
    while (frame := next(frames, None)) is not None:
        try:
            traces += _traces(frame)
        except (ValueError, TypeError, IndexError) as error:
            raise UserError(f"{file}: not the traces of a run ({error})") from error
    return traces


def _frames(content: bytes, file: Path) -> Iterator[pd.DataFrame]:
    """The rows of a file, some whole texts at a time."""
    try:
        source = parquet.ParquetFile(io.BytesIO(content))
        rows = source.metadata.num_rows
        if rows > MAX_ROWS:  # a few bytes can say that a value is repeated
            raise ValueError(f"{rows:,} rows; no run writes more than {MAX_ROWS:,}")
        missing = [name for name in SCHEMA.names if name not in source.schema_arrow.names]
        if missing:
            raise UserError(f"{file}: not the traces of a run; it has no column {missing[0]}")
        types = {pa.int64(): pd.Int64Dtype()}
        held: pd.DataFrame | None = None
        for batch in source.iter_batches(PART_ROWS, columns=SCHEMA.names):
            frame = _of_schema(batch).to_pandas(types_mapper=types.get)
            frame = frame if held is None else pd.concat([held, frame], ignore_index=True)
            last = _last_text(frame)
            held = frame.iloc[last:]
            if last:
                yield frame.iloc[:last]
        if held is not None:
            yield held
    except (OSError, ValueError, MemoryError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{file}: cannot be read as traces ({reason})") from error


def _last_text(stored: pd.DataFrame) -> int:
    """The first row of the last text, which may go on in the next part."""
    texts = stored.groupby([*TEXT_COLUMNS], sort=False, dropna=False, observed=True).ngroup()
    others = np.flatnonzero(texts != texts.iloc[-1])
    return int(others[-1]) + 1 if len(others) else 0


def _table(traces: Sequence[TextTrace]) -> pa.Table:
    parts = [_rows(trace) for trace in traces]
    trace_of_row = np.repeat(np.arange(len(parts)), [len(part["position"]) for part in parts])
    columns: dict[str, Any] = {}
    for name, kind in (PLACES | NUMBER_COLUMNS).items():
        values = np.concatenate([part[name] for part in parts]) if parts else []
        columns[name] = pa.array(values, kind, from_pandas=True)  # NaN becomes null
    for name, kind in TEXT_COLUMNS.items():
        values = [getattr(trace, name) for trace in traces]
        columns[name] = pa.array(values, kind).take(pa.array(trace_of_row))
    return pa.table(columns, SCHEMA)


def _rows(trace: TextTrace) -> dict[str, NDArray[Any]]:
    """The per-row columns of one trace; what is absent is NaN."""
    positions, scores = np.arange(len(trace.tokens)), {n: getattr(trace, n) for n in NUMBER_COLUMNS}
    if trace.depth is None:
        absent = np.full(len(positions), np.nan)
        places = {"start": absent, "offset": absent, "proposed": absent, "position": positions}
        return {**places, "token": trace.tokens, **scores}
    offsets = np.arange(trace.depth)
    at = positions[:, None] + offsets
    proposed = np.full(len(positions), np.nan) if trace.proposed is None else trace.proposed
    rows: dict[str, NDArray[Any]] = {
        "start": np.broadcast_to(positions[:, None], at.shape),
        "offset": np.broadcast_to(offsets, at.shape),
        "proposed": np.broadcast_to(proposed[:, None], at.shape),
        "position": at,
        "token": _at(trace.tokens.astype(np.float64), at),
    }
    rows |= scores | {"target_logprob": _at(trace.target_logprob, at)}
    return {name: values.reshape(-1) for name, values in rows.items()}


def _at(values: NDArray[np.float64], at: NDArray[np.int64]) -> NDArray[np.float64]:
    """The values at text positions, NaN beyond the text."""
    return np.append(values, np.nan)[np.minimum(at, len(values))]


def _traces(stored: pd.DataFrame) -> list[TextTrace]:
    if stored.empty:
        return []
    texts = stored.groupby([*TEXT_COLUMNS], sort=False, dropna=False, observed=True).ngroup()
    order = np.argsort(texts, kind="stable")
    rows_of = np.split(order, np.flatnonzero(np.diff(texts.to_numpy()[order])) + 1)
    firsts = stored[[*TEXT_COLUMNS]].iloc[[rows[0] for rows in rows_of]].astype(object)
    heads: Any = firsts.where(firsts.notna(), None).to_dict("records")
    numbers = {name: stored[name].to_numpy() for name in NUMBER_COLUMNS}
    places = {name: stored[name].to_numpy(np.float64, na_value=np.nan) for name in PLACES}
    return [
        _trace(
            head,
            {name: values[rows] for name, values in numbers.items()},
            {name: values[rows] for name, values in places.items()},
        )
        for head, rows in zip(heads, rows_of, strict=True)
    ]


def _trace(
    head: dict[str, Any], numbers: dict[str, Any], places: dict[str, NDArray[np.float64]]
) -> TextTrace:
    """One trace: what its text is, and by column its scores and where they belong."""
    tokens, start, proposed = (places[name] for name in ("token", "start", "proposed"))
    if np.isnan(start).all():
        return TextTrace(**head, tokens=_integers(tokens), **numbers)
    shape = (int(np.nanmax(start)) + 1, int(np.nanmax(places["offset"])) + 1)
    numbers = {name: values.reshape(shape) for name, values in numbers.items()}
    numbers["target_logprob"] = numbers["target_logprob"][:, 0].copy()
    if not np.isnan(proposed).all():
        numbers["proposed"] = _integers(proposed).reshape(shape)[:, 0].copy()
    return TextTrace(**head, tokens=_integers(tokens.reshape(shape)[:, 0]), **numbers)


def _integers(values: NDArray[np.float64]) -> NDArray[np.int64]:
    if np.isnan(values).any():
        raise ValueError("a row lacks its token, or how many were proposed")
    return values.astype(np.int64)


# ---- confidences ---------------------------------------------------------------------------------


TEXT_KEY = {
    "draft": _NAME,
    "prompt_set": _NAME,
    "prompt": _NAME,
    "repetition": pa.int64(),
    "temperature": pa.float64(),
}
CONFIDENCES = pa.schema(
    {**TEXT_KEY, "position": pa.int64(), "offset": pa.int64(), "confidence": pa.float64()}
)


def content_of_confidences(confidences: Sequence[DraftConfidence]) -> bytes:
    """The confidences as the bytes of a parquet file."""
    tables: list[pa.Table] = []
    for entry in confidences:
        position, offset = np.indices(entry.values.shape).reshape(2, -1)
        head: dict[str, Any] = {name: [getattr(entry, name)] * len(offset) for name in TEXT_KEY}
        columns = {**head, "position": position, "offset": offset}
        columns["confidence"] = pa.array(entry.values.reshape(-1), from_pandas=True)
        tables.append(pa.table(columns, CONFIDENCES))
    buffer = io.BytesIO()
    rows = pa.concat_tables(tables) if tables else CONFIDENCES.empty_table()
    parquet.write_table(rows.unify_dictionaries(), buffer, compression="zstd")
    return buffer.getvalue()


def read_confidences(stored: bytes, file: Path) -> list[DraftConfidence]:
    """Read them back, in the order they were written; an error names the file."""
    try:
        rows: pd.DataFrame = parquet.read_table(io.BytesIO(stored), schema=CONFIDENCES).to_pandas()
        made: list[DraftConfidence] = []
        for key, group in rows.groupby([*TEXT_KEY], sort=False, observed=True):
            shape = (int(group["position"].max()) + 1, int(group["offset"].max()) + 1)
            head: dict[str, Any] = dict(zip(TEXT_KEY, key, strict=True))  # type: ignore[arg-type]
            values = group["confidence"].to_numpy(np.float64).reshape(shape)
            made.append(DraftConfidence(**head, values=values))
    except (OSError, ValueError, TypeError, MemoryError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{file}: cannot be read as confidences ({reason})") from error
    return made

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
from numpy.typing import NDArray

from harness.records import TextTrace, UserError

TEXT_COLUMNS = (
    "draft",
    "draft_temperature",
    "prompt_set",
    "prompt",
    "category",
    "repetition",
    "temperature",
    "top_k",
    "top_p",
    "prompt_tokens",
    "stop_reason",
    "turn",
)
NUMBER_COLUMNS = (
    "target_logprob",
    "draft_logprob",
    "draft_is_argmax",
    "last_ratio",
    "last_exact_match",
    "last_greedy_draft",
    "target_entropy",
    "draft_entropy",
)
COLUMNS = (
    *("draft", "draft_temperature", "start", "prompt", "position", "token"),
    *NUMBER_COLUMNS,
    *(name for name in TEXT_COLUMNS if name not in ("draft", "draft_temperature", "prompt")),
)
NAMES = ("draft", "prompt_set", "prompt", "category", "stop_reason")
Numbers = dict[str, NDArray[Any]]
MAX_ROWS = 50_000_000


def content(traces: Sequence[TextTrace]) -> bytes:
    """The traces as the bytes of a parquet file."""
    buffer = io.BytesIO()
    table(traces).to_parquet(buffer, index=False, compression="zstd")
    return buffer.getvalue()


def read(content: bytes, file: Path) -> list[TextTrace]:
    """Read the traces back, in the order they were written.

    Args:
        content: of the file.
        file: where it is from, for the error.

    Raises:
        UserError: not such a file.
    """
    from pyarrow import parquet  # takes a while, and most runs are read without their traces

    try:
        rows = parquet.ParquetFile(io.BytesIO(content)).metadata.num_rows
        if rows > MAX_ROWS:  # a few bytes can say that a value is repeated
            raise ValueError(f"{rows:,} rows; no run writes more than {MAX_ROWS:,}")
        stored = pd.read_parquet(io.BytesIO(content))
    except (OSError, ValueError, MemoryError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{file}: cannot be read as traces ({reason})") from error
    if "turn" not in stored.columns:  # written before there were conversations
        stored["turn"] = 1
    missing = [name for name in COLUMNS if name not in stored.columns]
    if missing:
        raise UserError(f"{file}: not the traces of a run; it has no column {missing[0]}")
    groups = stored.groupby(list(TEXT_COLUMNS), sort=False, dropna=False, observed=True)
    try:
        return [_trace(rows) for _, rows in groups]
    except (ValueError, TypeError, IndexError) as error:
        raise UserError(f"{file}: not the traces of a run ({error})") from error


def table(traces: Sequence[TextTrace]) -> pd.DataFrame:
    """The rows of traces.parquet."""
    parts = [_rows(trace) for trace in traces]
    columns: dict[str, Any] = {}
    for name in ("start", "position", "token", *NUMBER_COLUMNS):
        columns[name] = np.concatenate([part[name] for part in parts]) if parts else []
    sizes = [len(part["position"]) for part in parts]
    for name in TEXT_COLUMNS:
        values = pd.Series([getattr(trace, name) for trace in traces], dtype=_dtype(name))
        columns[name] = values.repeat(sizes).array
    frame = pd.DataFrame(columns, columns=list(COLUMNS))
    return frame.astype(
        {"start": "Int64", "position": "int64", "token": "Int64", "draft_is_argmax": "bool"}
    )


def _dtype(name: str) -> str:
    if name in NAMES:
        return "category"
    return "Int64" if name in ("repetition", "top_k", "prompt_tokens", "turn") else "float64"


def _rows(trace: TextTrace) -> Numbers:
    """The per-row columns of one trace; what is absent is NaN."""
    positions = np.arange(len(trace.tokens))
    numbers: Numbers = {name: getattr(trace, name) for name in NUMBER_COLUMNS}
    if trace.matches is None or trace.proposed is None:
        starts = np.full(len(positions), np.nan)
        return {"start": starts, "position": positions, "token": trace.tokens, **numbers}
    matches, offsets = trace.matches, np.arange(trace.matches.shape[1])
    at = positions[:, None] + offsets
    with np.errstate(divide="ignore"):
        logprob = np.where(offsets < trace.proposed[:, None], np.log(matches), np.nan)
    rows: Numbers = {
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

"""confidences.parquet: how sure drafts are of what they draft off the target's texts.

One row per text position (one more than the text has) and offset from it; see `DraftConfidence`.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import parquet

from harness.records import DraftConfidence, UserError

_NAME = pa.dictionary(pa.int32(), pa.string())
HEAD = {
    "draft": _NAME,
    "prompt_set": _NAME,
    "prompt": _NAME,
    "repetition": pa.int64(),
    "temperature": pa.float64(),
}
SCHEMA = pa.schema(
    {**HEAD, "position": pa.int64(), "offset": pa.int64(), "confidence": pa.float64()}
)


def content(confidences: Sequence[DraftConfidence]) -> bytes:
    """The confidences as the bytes of a parquet file."""
    tables: list[pa.Table] = []
    for entry in confidences:
        position, offset = np.indices(entry.values.shape).reshape(2, -1)
        head: dict[str, Any] = {name: [getattr(entry, name)] * len(offset) for name in HEAD}
        columns = {**head, "position": position, "offset": offset}
        columns["confidence"] = pa.array(entry.values.reshape(-1), from_pandas=True)
        tables.append(pa.table(columns, SCHEMA))
    buffer = io.BytesIO()
    rows = pa.concat_tables(tables) if tables else SCHEMA.empty_table()
    parquet.write_table(rows.unify_dictionaries(), buffer, compression="zstd")
    return buffer.getvalue()


def read(stored: bytes, file: Path) -> list[DraftConfidence]:
    """Read them back, in the order they were written; an error names the file."""
    try:
        rows: pd.DataFrame = parquet.read_table(io.BytesIO(stored), schema=SCHEMA).to_pandas()
        made: list[DraftConfidence] = []
        for key, group in rows.groupby([*HEAD], sort=False, observed=True):
            shape = (int(group["position"].max()) + 1, int(group["offset"].max()) + 1)
            head: dict[str, Any] = dict(zip(HEAD, key, strict=True))  # type: ignore[arg-type]
            values = group["confidence"].to_numpy(np.float64).reshape(shape)
            made.append(DraftConfidence(**head, values=values))
    except (OSError, ValueError, TypeError, MemoryError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{file}: cannot be read as confidences ({reason})") from error
    return made

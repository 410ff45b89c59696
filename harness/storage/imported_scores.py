"""Scores made elsewhere, such as by a training framework: a table that becomes traces.

One row per (draft, text, start, offset), or where a draft's scores do not depend on the start per
(draft, text, position); the columns are those of traces.parquet, and most may be left out. The
format is documented in docs/scores.md.
"""

import json
from collections.abc import Collection, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from harness.records import TextTrace, UserError, grouped
from harness.storage.traces import NUMBER_COLUMNS, TARGET_COLUMNS, TEXT_COLUMNS

# Names, which stay as they are written: 007 is no number
NAMES = ("draft", "prompt_set", "prompt", "category")


def _read_lines(file: Path) -> pd.DataFrame:
    lines = file.read_text(encoding="utf-8-sig").split("\n")
    return pd.DataFrame([json.loads(line) for line in lines if line.strip()])


READ = {
    ".parquet": pd.read_parquet,
    ".jsonl": _read_lines,
    ".csv": lambda file: pd.read_csv(file, dtype=dict.fromkeys(NAMES, str)),
}
REQUIRED = ("draft", "prompt", "position", "token", "draft_is_argmax")
# Needed above temperature 0
LOGPROBS = ("target_logprob", "draft_logprob")
ROUNDING = 1e-6  # of a log-probability
# Values that are used: the least, the most, whether only whole ones, and what to write instead
_WHOLE = (0.0, np.inf, True, "give whole numbers from 0")
_LOGPROB = (-np.inf, ROUNDING, False, "give log-probabilities, of at most 0")
_TEMPERATURE = (0.0, np.finfo(np.float64).max, False, "give 0 or a number above it")
LIMITS: dict[str, tuple[float, float, bool, str]] = {
    **dict.fromkeys(("token", "position", "start", "offset", "proposed"), _WHOLE),
    **dict.fromkeys(LOGPROBS, _LOGPROB),
    **dict.fromkeys(("temperature", "draft_temperature"), _TEMPERATURE),
    "draft_is_argmax": (0.0, 1.0, True, "give true or false, or 1 or 0"),
}
# What a text is where the table does not say
DEFAULTS: dict[str, Any] = {
    "prompt_set": "imported",
    "category": None,
    "repetition": 0,
    "temperature": 0.0,
    "top_k": None,
    "top_p": None,
    "prompt_tokens": 0,
    "stop_reason": "budget",
    "turn": 1,
    "k": 0,
    "chosen": False,
}


def read_scores(file: Path) -> list[TextTrace]:
    """The traces of a table, one per draft and text, in the order of its rows.

    Raises:
        UserError: no such table, a column that is missing, or rows that contradict each other.
    """
    frame = _read(file)
    names = ["draft", *TEXT_COLUMNS]
    texts = [name for name in dict.fromkeys(names) if name not in ("prompt_tokens", "stop_reason")]
    groups = frame.groupby(texts, sort=False, dropna=False, observed=True)
    return [_trace(rows, file) for _, rows in groups]


def _read(file: Path) -> pd.DataFrame:
    if file.suffix not in READ or not file.is_file():
        what = "no such file" if not file.exists() else "not a table"
        raise UserError(f"{file}: {what}; give one of {', '.join(READ)}")
    try:
        frame = pd.DataFrame(READ[file.suffix](file))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{file}: cannot be read as a table ({reason})") from error
    for name in dict.fromkeys((*LIMITS, *NUMBER_COLUMNS)):
        if name in frame.columns:
            frame[name] = _numbers(frame[name], file)
    for name, first, other, sign in (
        ("position", "start", "offset", 1),
        ("offset", "position", "start", -1),
        ("start", "position", "offset", -1),
    ):
        if name not in frame.columns and {first, other} <= {*frame.columns}:
            frame[name] = frame[first] + sign * frame[other]
    missing = [name for name in REQUIRED if name not in frame.columns]
    if missing or frame.empty:
        what = f"has no column {missing[0]}" if missing else "has no rows"
        raise UserError(f"{file}: {what}; docs/scores.md says what a table of scores needs")
    for name in ("draft", "prompt", "position", "temperature"):
        if name in frame.columns and frame[name].isna().any():
            what = "name" if name in NAMES else "number"
            _refuse(file, name, frame[name].isna(), f"is empty; give a {what}")
    for name in NAMES:
        if name in frame.columns:
            frame[name] = frame[name].astype(object).map(str, na_action="ignore")
    for name, value in DEFAULTS.items():
        if name not in frame.columns:
            frame[name] = value
        elif value is not None:
            frame[name] = frame[name].where(frame[name].notna(), value)
    if "draft_temperature" not in frame.columns:
        frame["draft_temperature"] = frame["temperature"]
    given = [*frame.columns]
    for name in ("start", "offset", "proposed", *NUMBER_COLUMNS):
        values = frame[name] if name in frame.columns else np.nan
        frame[name] = pd.Series(values, index=frame.index).astype(np.float64)
    return _with_logprobs(frame, given, file)


def _with_logprobs(frame: pd.DataFrame, given: Collection[str], file: Path) -> pd.DataFrame:
    """The table with log-probabilities in every row: of greedy texts and look-ups from the argmax.

    Raises:
        UserError: a column or a cell that is needed is missing from those `given`.
    """
    sampled = (frame["temperature"] > 0) & ~frame["chosen"].astype(np.bool_)
    for name in LOGPROBS:
        if sampled.any() and name not in given:
            raise UserError(f"{file}: has texts above temperature 0 and no column {name}; add it")
        empty = sampled & frame[name].isna()
        # Of scores by start, what no K reaches may be empty
        if empty[frame["start"].isna()].any() or (sampled.any() and empty[sampled].all()):
            _refuse(file, name, empty, "is empty, and texts above temperature 0 need it")
    reached = frame["token"].notna() & ~(frame["offset"] >= frame["proposed"])
    empty = reached & frame["draft_is_argmax"].isna()
    if empty.any():
        _refuse(file, "draft_is_argmax", empty, "is empty; give true or false")
    with np.errstate(divide="ignore"):
        matched = np.log(frame["draft_is_argmax"])
    frame["target_logprob"] = frame["target_logprob"].where(sampled, 0.0)
    frame["draft_logprob"] = frame["draft_logprob"].where(sampled, matched)
    return frame


def _numbers(column: pd.Series, file: Path) -> pd.Series:
    """A column as numbers; an empty cell is NaN.

    Raises:
        UserError: a cell that holds something else, or a number outside of the column's limits.
    """
    name = str(column.name)
    numbers = pd.Series(pd.to_numeric(column, errors="coerce"), index=column.index)
    numbers = numbers.astype(np.float64)
    text = numbers.isna() & column.notna()
    least, most, whole, say = LIMITS.get(name, (-np.inf, np.inf, False, ""))
    outside = (numbers < least) | (numbers > most) | (whole & (numbers % 1 != 0) & numbers.notna())
    for wrong, what in ((text, "is no number"), (outside, f"cannot be; {say}")):
        if wrong.any():
            _refuse(file, name, wrong, f"has {_value(column[wrong].iloc[0])!r}, which {what}")
    return numbers.clip(upper=0.0) if name in LOGPROBS else numbers


def _refuse(file: Path, name: str, wrong: pd.Series, says: str) -> NoReturn:
    """Say it of a column in the first of its rows that is wrong; rows count from 1."""
    row = int(np.flatnonzero(wrong)[0]) + 1
    raise UserError(f"{file}: row {row}: column {name} {says}")


def _trace(rows: pd.DataFrame, file: Path) -> TextTrace:
    where = f"{file}: draft {rows['draft'].iloc[0]!r}, prompt {rows['prompt'].iloc[0]}"
    by_start = rows["start"].notna()
    if by_start.nunique() > 1:
        raise UserError(f"{where}: some rows have a start and some have none")
    sums = rows["position"] == rows["start"] + rows["offset"]
    if by_start.all() and not (sums & (rows["start"] >= 0) & (rows["offset"] >= 0)).all():
        raise UserError(f"{where}: position must be start + offset, both from 0")
    first = rows[rows["offset"] == 0] if by_start.all() else rows
    position = first["position"].to_numpy(np.int64)
    count = int(position.max(initial=-1)) + 1
    if sorted(position) != [*range(count)]:
        raise UserError(
            f"{where}: needs one row per position, from 0 (by start: of offset 0); a column"
            " repetition tells several texts of a prompt apart"
        )
    if first["token"].isna().any():
        raise UserError(f"{where}: column token has rows without a number")
    tokens = np.zeros(count, dtype=np.int64)
    tokens[position] = first["token"]
    inside = rows[rows["position"] < count]
    at = inside["position"].to_numpy(np.int64)
    if (tokens[at] != inside["token"]).any():
        raise UserError(f"{where}: two tokens at one position; all drafts score one text")
    places: tuple[NDArray[np.int64], ...] = (at,)
    shape: tuple[int, ...] = (count,)
    if by_start.all():
        shape = (count, int(rows["offset"].max()) + 1)
        places = tuple(inside[name].to_numpy(np.int64) for name in ("start", "offset"))
    numbers: dict[str, Any] = {}
    for name in NUMBER_COLUMNS:
        by_text = name in TARGET_COLUMNS
        numbers[name] = np.full(count if by_text else shape, np.nan)
        numbers[name][at if by_text else places] = inside[name]
    head = {name: _value(rows[name].iloc[0]) for name in TEXT_COLUMNS}
    proposed = None
    if rows["proposed"].notna().any():
        proposed = np.zeros(count, dtype=np.int64)
        proposed[position] = first["proposed"]
    return TextTrace(
        **head,
        tokens=tokens,
        **{**numbers, "draft_is_argmax": numbers["draft_is_argmax"] == 1.0},
        proposed=proposed,
    )


def _value(value: Any) -> Any:
    if pd.isna(value):
        return None
    return value.item() if isinstance(value, np.generic) else value


def read_tables(files: Sequence[str]) -> list[TextTrace]:
    """The traces of several tables, one after the other.

    Raises:
        UserError: as `read_scores`; or a draft lacks a text that another one scored.
    """
    traces = [(file, trace) for file in files for trace in read_scores(Path(file))]
    by_draft = grouped(traces, lambda each: each[1].draft)
    texts = {draft: {trace.key: None for _, trace in each} for draft, each in by_draft.items()}
    for (draft, scored), (other, others) in permutations(texts.items(), 2):
        for key in others:
            if key not in scored:
                raise UserError(
                    f"{by_draft[draft][0][0]}: draft {draft!r} has no rows of prompt {key.prompt}"
                    f" (set {key.prompt_set}, temperature {key.temperature:g}, repetition"
                    f" {key.repetition}), which draft {other!r} scored; all must score the same"
                    " texts"
                )
    return [trace for _, trace in traces]

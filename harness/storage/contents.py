"""Contents of the files of a run folder, read and checked: JSON, YAML, lines of trials, tables.

Every error names the file, and the line where there is one. pandas is imported where it is needed:
every command's --help imports this module.
"""

import csv
import io
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import yaml

from harness.command_words import as_typed
from harness.records import (
    SCHEMA_VERSION,
    LatencyRow,
    LoadTiming,
    ResultRow,
    RoundTiming,
    Scrape,
    SimulatedChoice,
    StepTiming,
    Trial,
    UserError,
)
from harness.storage import files
from harness.summary import DistributionTest, Summary, TextCheck, TextLikelihood, from_json

if TYPE_CHECKING:
    import pandas as pd

Check = TextCheck | DistributionTest | TextLikelihood
# What is stored as it is made, a line each
Line = TypeVar("Line", bound=Trial | RoundTiming | LoadTiming | Scrape | SimulatedChoice)
_KIND_OF_CHECK = {
    TextCheck: "text",
    DistributionTest: "distribution",
    TextLikelihood: "likelihood",
}
MAX_CONFIG_BYTES = 4 * 2**20
MAX_LINES_NAMED = 20
STEP_KEY = ("role", "model", "kind", "tokens", "context_tokens", "batch")


@dataclass(frozen=True)
class Table:
    """A csv file of the run: its columns, those that hold numbers, those no row may leave empty.

    A run may lack columns that came later, but none of those required.
    """

    columns: tuple[str, ...]
    numbers: tuple[str, ...]
    required: tuple[str, ...]


def _of_record(record: type[Any], *required: str) -> Table:
    kinds = {field.name: str(field.type) for field in fields(record)}
    numbers = (name for name, kind in kinds.items() if "int" in kind or "float" in kind)
    return Table(tuple(kinds), tuple(numbers), required)


_SAMPLE_NUMBERS = ("tokens", "context_tokens", "batch", "sample", "ms")
TABLES = {
    "results.csv": _of_record(ResultRow, "source", "status", "k"),
    "latency.csv": _of_record(LatencyRow, "role", "kind", "tokens", "median_ms"),
    "latency_samples.csv": Table(
        (*STEP_KEY, "beside", "sample", "ms"),
        _SAMPLE_NUMBERS,
        ("role", "model", "kind", *_SAMPLE_NUMBERS),
    ),
}


def plain(value: Any) -> Any:
    """Containers of JSON's own types: NaN and infinity become null, paths become text.

    A record becomes its fields, or the `entries` of the file that it is a view of.
    """
    if is_dataclass(value) and not isinstance(value, type):
        known = {each.name: getattr(value, each.name) for each in fields(value)}
        value = known.get("entries", known)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    item = getattr(value, "item", None)  # of numpy's and torch's numbers
    if item is not None:
        return plain(item())
    return str(value) if isinstance(value, Path) else value


def read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.yaml"
    content = files.read_verified(folder, file.name, MAX_CONFIG_BYTES)
    if content is None:
        raise UserError(f"{folder}: not a whole run folder (it has no config.yaml)")
    try:
        config = yaml.safe_load(content.decode()) or {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: cannot be read as YAML") from error
    if not isinstance(config, dict):
        raise UserError(f"{file}: expected keys and values")
    files.check_values(config, file)
    if any("${" in str(value) for value in flattened(config).values()):
        # OmegaConf would look up environment variables for it, and the report would show them
        raise UserError(
            f"{file}: holds an interpolation, ${{...}}; a stored configuration has none"
        )
    return config


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by their dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


@dataclass(frozen=True)
class Lines(Generic[Line]):
    """A file of records that are stored as they are made, each a line with a checksum."""

    file: Path
    kind: type[Line]

    def append(self, *entries: Line) -> None:
        """Store records durably: on the disk when this returns, and all of them or none."""
        lines = (files.seal(json.dumps(plain(each), allow_nan=False)) for each in entries)
        with files.writing(self.file.parent):
            files.append(self.file, b"".join(lines))

    def read(self) -> list[Line]:
        """The records of the whole lines; a torn last one (the process was killed) is passed over.

        Raises:
            UserError: damaged lines; all are named, with how to go on.
        """
        *lines, torn = (files.read(self.file) or b"").split(b"\n")
        # Whole but for its line break; or with another byte in its place, which no kill leaves
        if files.sealed(torn) is not None:
            lines.append(torn)
        known = {field.name for field in fields(self.kind)}
        reasons: dict[int, str] = {}
        records: list[Line] = []
        for number, line in enumerate(lines, start=1):
            intact = files.sealed(line)
            if not intact:
                reasons[number] = "it has no checksum" if intact is None else "its checksum differs"
                continue
            try:
                entry = {key: value for key, value in json.loads(line).items() if key in known}
                lists = {
                    name: tuple(each) for name, each in entry.items() if isinstance(each, list)
                }
                records.append(self.kind(**{**entry, **lists}))
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                reasons[number] = f"not a {self.kind.__name__}: {error}"
        if reasons:
            raise _damaged_lines(self.file, reasons)
        return records


def _damaged_lines(file: Path, reasons: Mapping[int, str]) -> UserError:
    """Names the lines, and the command that deletes these and no others."""
    first, *others = reasons
    shown = ", ".join(map(str, others[:MAX_LINES_NAMED]))
    more = f", and so are {len(others)} more: {shown}" if others else ""
    ellipsis = ", ..." if len(others) > MAX_LINES_NAMED else ""
    delete = ";".join(f"{number}d" for number in list(reasons)[: MAX_LINES_NAMED + 1])
    return UserError(
        f"{file}, line {first}: damaged ({reasons[first]}){more}{ellipsis}; put back a copy of the "
        f"file, or delete what is damaged (sed -i.bak '{delete}' {shlex.quote(str(file))}) and"
        f" {as_typed('resume', file.parent)}, which measures only that again"
    )


def check_lines(checks: Sequence[Check]) -> str:
    """The checks as lines of JSON, the kind of each first."""
    lines = ({"kind": _KIND_OF_CHECK[type(check)], **plain(check)} for check in checks)
    return "".join(f"{json.dumps(line, allow_nan=False)}\n" for line in lines)


def read_checks(folder: Path, name: str) -> tuple[Check, ...]:
    """The checks of a run's texts and distributions."""
    content = files.read_verified(folder, name) or b""
    types = {kind: record for record, kind in _KIND_OF_CHECK.items()}
    try:
        entries = [json.loads(line) for line in content.splitlines()]
        return tuple(types[entry.pop("kind")](**entry) for entry in entries)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise files.damaged(folder / name, f"not the checks of a run: {error}") from error


def summary_from(content: bytes) -> Summary | None:
    """summary.json; None where another version wrote it, since analysis derives it all again."""
    try:
        summary = from_json(content)
    except ValueError:
        return None
    return summary if summary.schema_version == SCHEMA_VERSION else None


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A csv file; None is an empty field, and further keys of a row are left out."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def read_table(folder: Path, name: str) -> "pd.DataFrame":
    """A table with every number checked; empty, with the right columns, where there is none."""
    import pandas as pd

    file, kind = folder / name, TABLES[name]
    content = files.read_verified(folder, name)
    if content is None:
        return pd.DataFrame(columns=list(kind.columns))
    texts: Any = {column: str for column in kind.columns if column not in kind.numbers}
    try:
        table = pd.read_csv(io.BytesIO(content), keep_default_na=False, na_values=[""], dtype=texts)
    except (ValueError, MemoryError) as error:  # the parser's and the decoder's are ValueErrors
        raise files.damaged(file, " ".join(str(error).split())) from error
    missing = [column for column in kind.required if column not in table.columns]
    if missing:
        raise files.damaged(file, f"it has no column {missing[0]}")
    for column in kind.required:
        _refuse_first(file, table[column], table[column].isna())
    for column in (column for column in kind.numbers if column in table.columns):
        values = pd.to_numeric(table[column], errors="coerce")
        _refuse_first(file, table[column], values.isna() & table[column].notna())
        table[column] = values
    if "ms" in kind.columns:
        _refuse_first(file, table["ms"], ~table["ms"].between(0, float("inf"), inclusive="left"))
        if not content.endswith(b"\n"):
            raise files.damaged(file, "it ends in the middle of a line")
    return table


def _refuse_first(file: Path, column: "pd.Series[Any]", bad: "pd.Series[bool]") -> None:
    """Raise for the first bad value of a column; the header is line 1."""
    if bad.any():
        at = int(bad.to_numpy().argmax())
        value = column.iloc[at]
        shown = "nothing" if value != value else repr(str(value))  # NaN is no value
        raise files.damaged(file, f"line {at + 2} holds {shown} as {column.name}")


def samples_of(timings: Iterable[StepTiming]) -> Iterable[dict[str, Any]]:
    """Rows of latency_samples.csv."""
    for timing in timings:
        head = {name: getattr(timing, name) for name in (*STEP_KEY, "beside")}
        for index, seconds in enumerate(timing.samples_s):
            yield {**head, "sample": index, "ms": seconds * 1e3}


def timings_from(samples: "pd.DataFrame") -> list[StepTiming]:
    """Step timings from the rows of latency_samples.csv, in their stored order."""
    names = [*STEP_KEY, "beside"]
    groups = samples.astype({"beside": object}).fillna({"beside": ""}).groupby(names, sort=False)
    timings: list[StepTiming] = []
    for key, group in groups:
        *head, beside = cast("tuple[Any, ...]", key)
        values: dict[str, Any] = dict(zip(STEP_KEY, head, strict=True))
        seconds = tuple((group["ms"] / 1e3).tolist())
        timings.append(StepTiming(**values, samples_s=seconds, beside=beside or None))
    return timings

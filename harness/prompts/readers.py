"""Readers of entries: files of several formats, and data sets of the hub.

Files are read line by line and up to a fixed size, so that memory stays bounded for a large or
damaged file. A reader yields (number, entry).
"""

import csv
import gzip
import itertools
import logging
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from harness import PACKAGE
from harness.config import PromptsConf
from harness.prompts.entries import (
    EXPECTED,
    IDS,
    LISTS,
    PROMPTS,
    READ,
    TEXTS,
    Entry,
    Source,
    decoded,
    decoded_values,
    prompt_of,
    some,
)
from harness.records import Prompt, UserError

# Limits of one source: characters, characters of one line, prompts
MAX_CHARACTERS = 2**30
MAX_LINE = 2**24
MAX_PROMPTS = 200_000
# A whole number as tables with empty cells are written
WHOLE = re.compile(r"-?\d{1,15}\.0")
_log = logging.getLogger(__name__)


def read_file(
    path: Path,
    prompt_set: str | None = None,
    label: str | None = None,
    *,
    skip_unusable: bool = False,
) -> tuple[Prompt, ...]:
    """Every prompt of one file, in its order; empty lines are skipped.

    The suffix names the format; suffixes that are not in `_READERS` are read as jsonl. All formats
    but parquet may be compressed with gzip (.gz). The arguments are those of `Source`; `label` is
    the file's stem by default.

    Raises:
        UserError: names the file, the line and the expected content.
    """
    reader, unit = _READERS.get(
        Path(path.name.lower().removesuffix(".gz")).suffix, (_jsonl, "line")
    )
    source = Source(str(path), label or stem_of(path), unit, prompt_set, skip_unusable)
    with reading(path, "prompts.files"):
        return _collect(reader(path), source)


@contextmanager
def reading(path: Path, key: str) -> Iterator[None]:
    """Turn errors of reading a file into a UserError that names the configuration key."""
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{key}: cannot read {path} (it is not a file)")
        yield
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error, MemoryError) as error:
        raise UserError(f"{key}: cannot read {path} ({_reason(error)})") from error


def read_hub(config: PromptsConf) -> tuple[Prompt, ...]:
    """The prompts of a data set of the hub, through the `datasets` library."""
    assert config.hub
    source = Source(
        f"prompts.hub={config.hub}",
        hub_label(config.hub),
        "row",
        skip_unusable=bool(config.skip_unusable),
    )
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            f"{source.name}: needs the datasets extra: pip install '{PACKAGE}[datasets]'"
        ) from error
    try:
        rows = datasets.load_dataset(config.hub, config.hub_subset, split=config.hub_split)
    except Exception as error:  # of the library, the hub's client or the network
        raise UserError(f"{source.name}: cannot be loaded ({_reason(error)})") from error
    if isinstance(rows, dict):
        if len(rows) != 1:
            raise UserError(f"{source.name}: give prompts.hub_split, one of {some(list(rows))}")
        rows = next(iter(rows.values()))
    names = list(rows.column_names)
    wanted = [config.hub_column] if config.hub_column else [*PROMPTS]
    if not set(wanted) & set(names):
        hint = "no such column" if config.hub_column else "no column of a known format"
        raise UserError(f"{source.name}: {hint}; give prompts.hub_column, one of {some(names)}")
    if len(rows) > MAX_PROMPTS:
        raise UserError(
            f"{source.name}: {len(rows):,} rows; take a part, prompts.hub_split=test[:1000]"
        )
    kept = [name for name in names if name in READ or name == config.hub_column]
    try:
        return _collect(_rows(rows.select_columns(kept), config.hub_column), source)
    except (OSError, ValueError, MemoryError) as error:
        raise UserError(f"{source.name}: cannot be read ({_reason(error)})") from error


def _collect(entries: Iterable[tuple[int, Any]], source: Source) -> tuple[Prompt, ...]:
    """The prompts of a source; unusable entries are skipped where the source allows it."""
    prompts: list[Prompt] = []
    unusable: list[str] = []
    for number, entry in entries:
        if len(prompts) == MAX_PROMPTS:
            raise UserError(f"{source.name}: more than {MAX_PROMPTS:,} prompts; take a part of it")
        try:
            prompts.append(prompt_of(entry, number, source))
        except UserError as error:
            if not source.skip_unusable:
                raise
            unusable.append(str(error) if not unusable else "")
    if len(unusable) > len(prompts):
        raise UserError(
            f"{source.name}: {len(unusable):,} of {len(unusable) + len(prompts):,} entries are "
            f"unusable, so they are not skipped; the first: {unusable[0]}"
        )
    if not prompts:
        raise UserError(f"{source.name}: no prompts in it; {EXPECTED}, one a {source.unit}")
    if unusable:
        total = len(unusable) + len(prompts)
        first = unusable[0]
        _log.warning("%s: %d of %d entries skipped; %s", source.name, len(unusable), total, first)
    return tuple(prompts)


def _opened(path: Path, newline: str) -> IO[str]:
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline=newline)
    return path.open(encoding="utf-8-sig", newline=newline)


def file_lines(path: Path, newline: str = "\n", *, bounded: bool = True) -> Iterator[str]:
    """The lines of a text file; raises UserError beyond the limits, those of size if `bounded`.

    Only a newline ends a line: a JSON text may contain U+2028, at which Python would split.
    """
    total = 0
    with _opened(path, newline) as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), ""), start=1):
            total += len(line)
            if len(line) > MAX_LINE:
                raise UserError(f"{path}, line {number}: longer than {MAX_LINE:,} characters")
            if bounded and total > MAX_CHARACTERS:
                raise UserError(f"{path}: more than {MAX_CHARACTERS:,} characters; split it")
            yield line


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    """The objects of a file, one a line; a list, or an object of several lines, as in a .json."""
    numbered = ((at, line) for at, line in enumerate(file_lines(path), start=1) if line.strip())
    for first in itertools.islice(numbered, 1):
        if first[1].lstrip().startswith("[") or first[1].strip() == "{":
            yield from _json(path)
            return
        for number, line in itertools.chain([first], numbered):
            entry = decoded(line, f"{path}, line {number}")
            if not isinstance(entry, dict):
                raise UserError(f"{path}, line {number}: not a JSON object; {EXPECTED}")
            yield number, entry


def _json(path: Path) -> Iterator[tuple[int, Any]]:
    """The entries of a list, of the only list in an object, or one after another, as in a .jsonl.

    A text is a prompt.
    """
    with _opened(path, "\n") as file:
        text = file.read(MAX_CHARACTERS + 1)
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"{path}: more than {MAX_CHARACTERS:,} characters; split it")
    values = list(decoded_values(text, str(path)))
    content = values[0] if len(values) == 1 else values
    if isinstance(content, dict) and not any(name in content for name in PROMPTS):
        lists = [value for value in content.values() if isinstance(value, list)]
        if len(lists) != 1:
            raise UserError(f"{path}: an object with {len(lists)} lists in it, not one; {EXPECTED}")
        content = lists[0]
    entries = content if isinstance(content, list) else [content]
    for number, entry in enumerate(entries, start=1):
        yield number, {"prompt": entry} if isinstance(entry, str) else entry


def _txt(path: Path) -> Iterator[tuple[int, Any]]:
    # Some systems end lines with \r alone
    lines = (line for ended in file_lines(path) for line in ended.rstrip("\r\n").split("\r"))
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield number, {"prompt": line}


def _csv(path: Path, delimiter: str = ",") -> Iterator[tuple[int, Any]]:
    """The rows under a header; a list in a cell is JSON."""
    previous = csv.field_size_limit(MAX_LINE)
    try:
        rows = csv.reader(file_lines(path, newline=""), delimiter=delimiter, strict=True)
        header = [name.strip() for name in next(rows, [])]
        if header and not {*LISTS, *TEXTS} & set(header):
            raise UserError(f"{path}: its header has {some(header)}; {EXPECTED}")
        repeated = next((name for name in READ if header.count(name) > 1), None)
        if repeated is not None:
            raise UserError(f"{path}: its header has the column {repeated!r} twice; name it once")
        for row in rows:
            if not row:
                continue
            where = f"{path}, line {rows.line_num}"
            if len(row) != len(header):
                raise UserError(f"{where}: {len(row)} cells under {len(header)} columns")
            yield rows.line_num, _cells(dict(zip(header, row, strict=True)), where)
    finally:
        csv.field_size_limit(previous)


def _cells(row: Mapping[str, str], where: str) -> Entry:
    """A csv row as an entry without empty cells, except the prompt's where all are empty."""
    entry: dict[str, Any] = {name: cell for name, cell in row.items() if cell}
    for name in LISTS:
        if name in entry:
            entry[name] = decoded(entry[name], f"{where}, column {name}")
    for name in (*IDS, "category"):
        if WHOLE.fullmatch(entry.get(name, "")):
            entry[name] = entry[name].removesuffix(".0")
    named = next(name for name in (*LISTS, *TEXTS) if name in row)
    return entry if any(name in entry for name in (*LISTS, *TEXTS)) else {**entry, named: ""}


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if not {*PROMPTS} & set(names):
                raise UserError(f"{path}: its columns are {some(names)}; {EXPECTED}")
            _bounded(file.metadata, path)
            number = 0
            for batch in file.iter_batches(1024, columns=[name for name in names if name in READ]):
                for entry in batch.to_pylist():
                    number += 1
                    yield number, entry
    except (pa.ArrowException, ValueError, KeyError, OverflowError, OSError) as error:
        known = isinstance(error, OSError) and error.strerror
        reason = _reason(error) if known else "it is damaged, or not a parquet file"
        raise UserError(f"prompts.files: cannot read {path} ({reason})") from error


def _bounded(metadata: Any, path: Path) -> None:
    """Refuse a parquet file beyond the limits, before it is decompressed."""
    sizes = [metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups)]
    if metadata.num_rows > MAX_PROMPTS or sum(sizes) > MAX_CHARACTERS:
        raise UserError(
            f"{path}: {metadata.num_rows:,} rows and {sum(sizes):,} bytes; at most "
            f"{MAX_PROMPTS:,} and {MAX_CHARACTERS:,} are read, take a part of it"
        )


_READERS: dict[str, tuple[Callable[[Path], Iterator[tuple[int, Any]]], str]] = {
    ".json": (_json, "entry"),
    ".csv": (_csv, "line"),
    ".tsv": (lambda path: _csv(path, "\t"), "line"),
    ".txt": (_txt, "line"),
    ".parquet": (_parquet, "row"),
}


def stem_of(path: Path) -> str:
    """The file's name without the suffix of its format."""
    return Path(path.stem).stem if path.name.lower().endswith(".gz") else path.stem


def hub_label(hub: str) -> str:
    return hub.rstrip("/").rpartition("/")[2] or "hub"


def _rows(rows: Iterable[Entry], column: str | None) -> Iterator[tuple[int, Any]]:
    for number, row in enumerate(rows, start=1):
        if column is None:
            yield number, row
            continue
        rest = {name: row[name] for name in (*IDS, "category") if name in row and name != column}
        yield number, {**rest, "turns" if isinstance(row[column], list) else "prompt": row[column]}


def _reason(error: BaseException) -> str:
    """The text of a reading error in one line, without the exception's name."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    if isinstance(error, MemoryError):
        return "out of memory"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = re.sub(r"\(?\b\w+(Error|Exception)\b\)?:?", "", " ".join(str(error).split()))
    text = " ".join(text.split())
    return (text if len(text) <= 200 else f"{text[:197]}...") or "it is damaged"

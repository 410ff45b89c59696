"""The run folder: append, resume, load.

One run is one folder (`results/<UTC yyyymmdd-hhmmss>_<door>_<model>[_<draft>]/`) whose files are a
contract that notebooks and other tools read. A generation is one line of trials.jsonl, written
whole and fsynced before the next begins, so a killed process loses at most the generation in
flight; every other file is replaced as a whole. All carry checksums, which are verified here
whenever a run is read (`harness.storage.files` says how). A file that is damaged is an error that
names it; nothing that was measured is dropped, or measured again, unless you ask for it.
"""

import csv
import io
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml

from harness.records import (
    SCHEMA_VERSION,
    LatencyRow,
    PartTiming,
    ResultRow,
    StepTiming,
    Summary,
    TextTrace,
    Trial,
    UserError,
    Verdict,
)
from harness.storage import files
from harness.storage.lock import Lock, take
from harness.summary import DistributionTest, TextCheck

if TYPE_CHECKING:  # every door's --help imports this module, and must not wait for pandas
    import pandas as pd


def _numeric(record: type[Any]) -> tuple[str, ...]:
    """The fields of a record that hold numbers, None aside."""
    kinds = {field.name: str(field.type) for field in fields(record)}
    return tuple(name for name, kind in kinds.items() if "int" in kind or "float" in kind)


RESULT_COLUMNS = tuple(field.name for field in fields(ResultRow))
LATENCY_COLUMNS = tuple(field.name for field in fields(LatencyRow))
STEP_KEY = ("role", "model", "kind", "tokens", "context_tokens", "batch")
SAMPLE_COLUMNS = (*STEP_KEY, "beside", "sample", "ms")
PART_COLUMNS = ("k", "part", "sample", "tokens", "ms")


@dataclass(frozen=True)
class Columns:
    """The columns of a table: which hold numbers, and which no row may leave empty.

    A run of an earlier version may lack columns that came later, but none of those required.
    """

    numbers: tuple[str, ...]
    required: tuple[str, ...]


SAMPLE_NUMBERS = ("tokens", "context_tokens", "batch", "sample", "ms")
TABLES = {
    "results.csv": Columns(_numeric(ResultRow), ("source", "status", "k")),
    "latency.csv": Columns(_numeric(LatencyRow), ("role", "kind", "tokens", "median_ms")),
    "latency_samples.csv": Columns(SAMPLE_NUMBERS, ("role", "model", "kind", *SAMPLE_NUMBERS)),
    "parts.csv": Columns(("k", "sample", "tokens", "ms"), ("k", "part", "sample", "ms")),
}
SAMPLED = ("latency_samples.csv", "parts.csv")
MAX_CONFIG_BYTES = 4 * 2**20
MAX_LINES_NAMED = 20
TRACES = "traces.parquet"
CHECKS = "checks.jsonl"
# What a reader of a run needs of it.
CONTENTS = (
    *("manifest.json", "config.yaml", "trials.jsonl", "summary.json", TRACES, CHECKS),
    *TABLES,
)
ENDED = ("complete", "failed")
# Where a run is put, how much of it is done and how loudly it fails do not make it another run.
FREE_KEYS = frozenset({"resume", "results_root", "debug", "dry_run", "hydra"})


@dataclass(frozen=True)
class StoredRun:
    """Everything a run folder holds, read back.

    Attributes:
        folder: where it lies.
        config: the resolved configuration.
        manifest: environment, status, schema_version.
        results, latency, latency_samples: the tables; empty with the right columns where missing.
        trials: every whole line of trials.jsonl, in the order they were run.
        summary: summary.json, or None while there is none.
        parts: parts.csv, where the parts of a round were timed.
        checks: checks.jsonl: greedy texts and distributions as the models judged them.
        unverified: the files that had no checksum to hold them against: those of an earlier
            version, or of a run whose checksums.json was deleted.
        lost_trials: how many fewer generations a complete run holds than it had when it ended.
    """

    folder: Path
    config: dict[str, Any]
    manifest: dict[str, Any]
    results: "pd.DataFrame"
    latency: "pd.DataFrame"
    latency_samples: "pd.DataFrame"
    trials: tuple[Trial, ...]
    summary: dict[str, Any] | None
    parts: tuple[PartTiming, ...] = ()
    checks: tuple[TextCheck | DistributionTest, ...] = ()
    unverified: tuple[str, ...] = ()
    lost_trials: int = 0

    @property
    def door(self) -> str:
        """The door that made the run: profile, sweep, breakeven, snapshot or audition."""
        return str(self.manifest.get("door", ""))

    @cached_property
    def traces(self) -> list[TextTrace]:
        """The run's traces, in the order they were written; empty where it made none.

        Raises:
            UserError: the file is not one of traces, or not as it was written.
        """
        return load_traces(self.folder)

    @cached_property
    def timings(self) -> list[StepTiming]:
        """The step timings behind latency.csv."""
        return timings_from(self.latency_samples)


class RunFolder:
    """A run being written.

    Create one with `RunFolder.create`, go on with one by `RunFolder.resume`, or derive results
    of a stored one anew with `RunFolder.reopen`: these hold the run's lock while they exist.
    """

    def __init__(self, path: Path, manifest: dict[str, Any], lock: Lock | None = None) -> None:
        """Wrap an existing folder; use `create`, `resume` or `reopen` to write more than notes."""
        self.path = path
        self.manifest = manifest
        self._trials = path / "trials.jsonl"
        self._answers = path / "answers.jsonl"
        self._files = files.Files(path)
        self._lock = lock
        self._traces: list[TextTrace] | None = None
        if lock is not None and lock.unlocked is not None:
            manifest["written_without_lock"] = lock.unlocked

    @classmethod
    def create(
        cls, root: str | Path, door: str, names: Sequence[str], config: Mapping[str, Any]
    ) -> "RunFolder":
        """Make a new folder for `door` and write its configuration.

        Args:
            root: the results folder; made if absent.
            door: profile, sweep, ...
            names: what the folder is named after besides the time: the model, and the draft if any.
            config: the resolved configuration, plain containers only.

        Raises:
            UserError: the folder cannot be made.
        """
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        stem = "_".join([stamp, door, *(_safe(name) for name in names if name)])
        path = _new_folder(Path(root), stem)
        manifest = {"schema_version": SCHEMA_VERSION, "door": door, "status": "running"}
        run = cls(path, manifest, take(path))
        run._write("config.yaml", yaml.safe_dump(dict(config), sort_keys=False))
        run.update_manifest({"created_utc": datetime.now(UTC).isoformat(timespec="seconds")})
        return run

    @classmethod
    def resume(cls, folder: str | Path, door: str, config: Mapping[str, Any]) -> "RunFolder":
        """Go on with a stored run of the same door and configuration.

        Raises:
            UserError: not a run folder, another door's, a newer schema's, one whose configuration
                differs (every differing key is named), one with a damaged generation, or one that
                another process is writing.
        """
        path = Path(folder)
        _read_manifest(path)
        lock = take(path)
        manifest = _read_manifest(path)  # as its last writer left it
        if manifest.get("door") != door:
            raise UserError(f"resume={folder}: made by {manifest.get('door')}, not by {door}")
        differing = _differences(_read_config(path), dict(config))
        if differing:
            raise UserError(
                f"resume={folder}: its configuration differs in {', '.join(differing)}; "
                "run with the same settings, or start a new run without resume="
            )
        run = cls(path, manifest, lock)
        run.answers()
        run.trials()  # a damaged line is an error before anything is cut off or appended
        with files.writing(path):
            for file in (run._trials, run._answers):
                files.repair_last_line(file)
        return run

    @classmethod
    def reopen(cls, stored: StoredRun) -> "RunFolder":
        """A stored run, to derive its results and summary anew.

        Raises:
            lock.Busy: another process is writing it.
            UserError: it cannot be written.
        """
        return cls(stored.folder, stored.manifest, take(stored.folder))

    def append_trial(self, trial: Trial) -> None:
        """Store one generation durably: one line, fsynced before this returns.

        Raises:
            UserError: it cannot be written; the file is as it was before.
        """
        self._append(self._trials, trial)

    def _append(self, path: Path, trial: Trial) -> None:
        line = files.seal(json.dumps(_plain(asdict(trial)), allow_nan=False))
        with files.writing(self.path):
            files.append(path, line)

    def append_answer(self, answer: Trial) -> None:
        """Store the target's answer to an earlier turn, likewise durably, in answers.jsonl."""
        self._append(self._answers, answer)

    def answers(self) -> list[Trial]:
        """Every whole stored answer to an earlier turn, in order."""
        return list(_read_trials(self.path, self._answers.name))

    def trials(self) -> list[Trial]:
        """Every whole stored generation, in order; a torn last line is left out."""
        return list(_read_trials(self.path))

    def write_latency(self, rows: Sequence[LatencyRow], timings: Sequence[StepTiming]) -> None:
        """Write latency.csv and the raw samples behind it."""
        self._write("latency.csv", _csv(LATENCY_COLUMNS, (asdict(row) for row in rows)))
        samples = (
            {**asdict(timing), "sample": index, "ms": seconds * 1e3}
            for timing in timings
            for index, seconds in enumerate(timing.samples_s)
        )
        self._write("latency_samples.csv", _csv(SAMPLE_COLUMNS, samples))

    def write_parts(self, timings: Sequence[PartTiming]) -> None:
        """Write parts.csv, one line per part, or whole round, and sample."""
        samples = (
            {
                "k": timing.k,
                "part": timing.part,
                "sample": index,
                "tokens": timing.tokens[index] if timing.tokens else None,
                "ms": seconds * 1e3,
            }
            for timing in timings
            for index, seconds in enumerate(timing.samples_s)
        )
        self._write("parts.csv", _csv(PART_COLUMNS, samples))

    def write_checks(self, checks: Sequence[TextCheck | DistributionTest]) -> None:
        """Write checks.jsonl, one line per check, its kind first."""
        lines = ({"kind": _KIND_OF_CHECK[type(check)], **asdict(check)} for check in checks)
        text = "".join(f"{json.dumps(_plain(line), allow_nan=False)}\n" for line in lines)
        self._write(CHECKS, text)

    def timings(self) -> list[StepTiming]:
        """The step timings already stored, raw samples and all; empty where there are none."""
        return timings_from(_table(self.path, "latency_samples.csv", SAMPLE_COLUMNS))

    def write_results(self, rows: Sequence[ResultRow]) -> None:
        """Write results.csv, one row per cell."""
        self.write_table("results.csv", ResultRow, rows)

    def write_table(self, name: str, record: type[Any], rows: Sequence[Any]) -> None:
        """Write a csv file of a record's fields, one line per row."""
        columns = tuple(field.name for field in fields(record))
        self._write(name, _csv(columns, (asdict(row) for row in rows)))

    def write_summary(self, summary: Summary, extra: Mapping[str, Any] | None = None) -> None:
        """Write summary.json: the contract's keys first, then `extra`."""
        content = {
            "schema_version": SCHEMA_VERSION,
            "verdict": _verdict(summary.verdict) if summary.verdict else None,
            "per_prompt_set": [_verdict(verdict) for verdict in summary.per_prompt_set],
            "per_temperature": [_verdict(verdict) for verdict in summary.per_temperature],
            "failures": [asdict(failure) for failure in summary.failures],
            "caveats": list(summary.caveats),
            "headline": dict(summary.headline),
            **(extra or {}),
        }
        self._write("summary.json", json.dumps(_plain(content), indent=2) + "\n")

    def traces(self) -> list[TextTrace]:
        """Every stored trace, in order; read from the file once."""
        if self._traces is None:
            self._traces = load_traces(self.path)
        return list(self._traces)

    def write_traces(self, traces: Sequence[TextTrace]) -> None:
        """Write traces.parquet anew: all drafts, all texts."""
        self._write_traces(traces, None)
        self._traces = list(traces)

    def add_traces(self, traces: Sequence[TextTrace]) -> None:
        """Put further traces behind the stored ones, whose rows are copied as they are."""
        before = self.traces()
        self._write_traces(traces, files.read_verified(self.path, TRACES))
        self._traces = [*before, *traces]

    def _write_traces(self, traces: Sequence[TextTrace], before: bytes | None) -> None:
        from harness.storage.traces import content  # imports numpy and pandas

        self._files.write(TRACES, content(traces, before))

    def update_manifest(self, entries: Mapping[str, Any]) -> None:
        """Merge `entries` into manifest.json; with a status that ends the run, count its trials."""
        if entries.get("status") in ENDED and self._trials.exists():
            self._files.end(len(self.trials()))
        self.manifest.update(entries)
        self._write("manifest.json", json.dumps(_plain(self.manifest), indent=2) + "\n")

    def _write(self, name: str, text: str) -> None:
        if name == "manifest.json":  # notes are made in it by hand, so it has no checksum
            with files.writing(self.path):
                files.write(self.path / name, text.encode())
        else:
            self._files.write(name, text.encode())


def load(folder: str | Path) -> StoredRun:
    """Read a run folder back, complete or not.

    Raises:
        UserError: not a run folder, one of a newer schema than this version reads, or one with a
            file that is not as it was written.
    """
    path = Path(folder)
    manifest = _read_manifest(path)
    trials = tuple(_read_trials(path))
    known = files.record(path)
    complete = manifest.get("status") == "complete"
    return StoredRun(
        folder=path,
        config=_read_config(path),
        manifest=manifest,
        results=_table(path, "results.csv", RESULT_COLUMNS),
        latency=_table(path, "latency.csv", LATENCY_COLUMNS),
        latency_samples=_table(path, "latency_samples.csv", SAMPLE_COLUMNS),
        trials=trials,
        summary=_read_json(path, "summary.json"),
        parts=_parts(_table(path, "parts.csv", PART_COLUMNS)),
        checks=_read_checks(path),
        unverified=tuple(
            name
            for name in CONTENTS[1:]
            if name not in known.files and name != "trials.jsonl" and (path / name).exists()
        ),
        lost_trials=max(0, (known.trials or 0) - len(trials)) if complete else 0,
    )


def refuse_lost_trials(run: StoredRun) -> None:
    """Refuse to report on a complete run that has lost generations; it can still be resumed.

    Raises:
        UserError: it has.
    """
    if run.lost_trials:
        raise UserError(
            f"{run.folder / 'trials.jsonl'}: {run.lost_trials} of the generations that were stored "
            f"are missing; put back a copy of it, resume={run.folder} measures them again, or "
            f"delete {run.folder / files.CHECKSUMS} to read the folder unverified"
        )


def load_traces(folder: str | Path) -> list[TextTrace]:
    """Read a run's traces back, in the order they were written; empty where it made none.

    Raises:
        UserError: the file is not one of traces, or not as it was written.
    """
    from harness.storage.traces import read  # imports numpy and pandas

    content = files.read_verified(Path(folder), TRACES)
    return [] if content is None else read(content, Path(folder) / TRACES)


def copied(stored: StoredRun, into: Path) -> StoredRun:
    """A copy of a run as it is now, in a separate folder; another process may be writing the run.

    Raises:
        UserError: it cannot be read or copied.
    """
    with files.writing(into):
        for name in CONTENTS:
            content = files.read(stored.folder / name)
            if content is not None:
                files.write(into / name, content)
        shutil.copymode(stored.folder, into)
    return load(into)


def timings_from(samples: "pd.DataFrame") -> list[StepTiming]:
    """Rebuild step timings from latency_samples.csv's rows, in their stored order."""
    keys = [*STEP_KEY, "beside"]
    whole = samples.astype({"beside": object}).fillna({"beside": ""})
    timings: list[StepTiming] = []
    for key, group in whole.groupby(keys, sort=False):
        values: dict[str, Any] = dict(zip(keys, cast("tuple[Any, ...]", key), strict=True))
        values["beside"] = values["beside"] or None
        seconds = tuple(float(ms) / 1e3 for ms in group["ms"])
        timings.append(StepTiming(**values, samples_s=seconds))
    return timings


def _parts(samples: "pd.DataFrame") -> tuple[PartTiming, ...]:
    """Rebuild part timings from parts.csv's rows, in their stored order."""
    timings: list[PartTiming] = []
    for key, group in samples.groupby(["k", "part"], sort=False):
        k, part = cast("tuple[int, str]", key)
        seconds = tuple(float(ms) / 1e3 for ms in group["ms"])
        tokens = tuple(int(count) for count in group["tokens"].dropna())
        timings.append(PartTiming(int(k), str(part), seconds, tokens))
    return tuple(timings)


_KIND_OF_CHECK = {TextCheck: "text", DistributionTest: "distribution"}


def _read_checks(path: Path) -> tuple[TextCheck | DistributionTest, ...]:
    content = files.read_verified(path, CHECKS) or b""
    types = {kind: record for record, kind in _KIND_OF_CHECK.items()}
    try:
        entries = [json.loads(line) for line in content.splitlines()]
        return tuple(types[entry.pop("kind")](**entry) for entry in entries)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise files.damaged(path / CHECKS, f"not the checks of a run: {error}") from error


def _new_folder(root: Path, stem: str) -> Path:
    """Make `root/stem`, with -2, -3, ... behind it where that second already has one."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):
            path = root / (stem if number == 1 else f"{stem}-{number}")
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return path
    except OSError as error:
        raise UserError(f"results_root={root}: cannot write there ({error.strerror})") from error
    raise UserError(f"results_root={root}: too many runs named {stem}")


def _safe(name: str) -> str:
    """A name that is one path component everywhere."""
    return "".join(char if char.isalnum() or char in "-." else "_" for char in name).strip("._")


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / "manifest.json"
    manifest = _read_json(path, file.name)
    if manifest is None:
        raise UserError(f"{path}: not a run folder (it has no manifest.json)")
    version = manifest.get("schema_version")
    if not isinstance(version, int):
        raise UserError(f"{file}: no schema_version; this is not a run's manifest")
    if version > SCHEMA_VERSION:
        raise UserError(
            f"{path}: written by a newer version (schema {version}; this one reads up to "
            f"{SCHEMA_VERSION}); upgrade the harness to read it"
        )
    for name in ("environment", "models", "cloud"):
        entry = manifest.get(name)
        if entry is not None and not isinstance(entry, dict):
            raise UserError(f"{file}: {name} is not an object; this is not a run's manifest")
    if not all(isinstance(entry, dict) for entry in (manifest.get("models") or {}).values()):
        raise UserError(f"{file}: an entry of models is not an object")
    return manifest


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.yaml"
    content = files.read_verified(path, file.name, MAX_CONFIG_BYTES)
    if content is None:
        raise UserError(f"{path}: not a whole run folder (it has no config.yaml)")
    try:
        config = yaml.safe_load(content.decode()) or {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: cannot be read as YAML") from error
    if not isinstance(config, dict):
        raise UserError(f"{file}: expected keys and values")
    files.check_values(config, file)
    if any("${" in str(value) for value in _flatten(config).values()):
        # OmegaConf would look up environment variables for it, and the report would show them
        raise UserError(
            f"{file}: holds an interpolation, ${{...}}; a stored configuration has none"
        )
    return config


def _read_json(path: Path, name: str) -> dict[str, Any] | None:
    file = path / name
    content = files.read_verified(path, name, files.TEXT_BYTES)
    if content is None:
        return None
    try:
        entries = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(entries, dict):
        raise UserError(f"{file}: expected a JSON object")
    files.check_values(entries, file)
    return entries


def _read_trials(path: Path, name: str = "trials.jsonl") -> Iterable[Trial]:
    """Yield the whole lines; a torn last one (the process was killed) is passed over.

    Raises:
        UserError: damaged lines; all are named, with how to go on.
    """
    file = path / name
    *lines, torn = (files.read(file) or b"").split(b"\n")
    # Whole but for its line break; or with another byte in its place, which no kill leaves
    if files.sealed(torn) is not None:
        lines.append(torn)
    verified, reasons = False, dict[int, str]()
    trials: list[Trial] = []
    for number, line in enumerate(lines, start=1):
        intact = files.sealed(line)
        verified = verified or intact is not None
        if intact or not verified:  # lines of an earlier version come first and have no checksum
            try:
                trials.append(_trial(line))
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                reasons[number] = f"not a trial: {error}"
        else:
            reasons[number] = "it has no checksum" if intact is None else "its checksum differs"
    if reasons:
        raise _damaged_lines(file, reasons)
    return trials


def _trial(line: bytes) -> Trial:
    known = {field.name for field in fields(Trial)}
    entry = json.loads(line)
    return Trial(**{key: _tuple(value) for key, value in entry.items() if key in known})


def _damaged_lines(file: Path, reasons: Mapping[int, str]) -> UserError:
    """Names the lines, and the command that deletes these and no others."""
    first, *others = reasons
    shown = ", ".join(map(str, others[:MAX_LINES_NAMED]))
    more = f", and so are {len(others)} more: {shown}" if others else ""
    ellipsis = ", ..." if len(others) > MAX_LINES_NAMED else ""
    delete = ";".join(f"{number}d" for number in list(reasons)[: MAX_LINES_NAMED + 1])
    return UserError(
        f"{file}, line {first}: damaged ({reasons[first]}){more}{ellipsis}; put back a copy of the "
        f"file, or delete what is damaged (sed -i.bak '{delete}' {file}) and resume={file.parent}, "
        "which measures only that again"
    )


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _table(path: Path, name: str, columns: Sequence[str]) -> "pd.DataFrame":
    """A table with every number checked; empty, with the right columns, where there is none.

    Raises:
        UserError: not such a table, or not as it was written.
    """
    import pandas as pd

    file = path / name
    content = files.read_verified(path, name)
    if content is None:
        return pd.DataFrame(columns=list(columns))
    kinds = TABLES[name]
    texts: Any = {column: str for column in columns if column not in kinds.numbers}
    try:
        table = pd.read_csv(io.BytesIO(content), keep_default_na=False, na_values=[""], dtype=texts)
    except (ValueError, MemoryError) as error:  # the parser's and the decoder's are ValueErrors
        raise files.damaged(file, " ".join(str(error).split())) from error
    missing = [column for column in kinds.required if column not in table.columns]
    if missing:
        raise files.damaged(file, f"it has no column {missing[0]}")
    for column in kinds.required:
        _refuse_first(file, table[column], table[column].isna())
    for column in (column for column in kinds.numbers if column in table.columns):
        values = pd.to_numeric(table[column], errors="coerce")
        _refuse_first(file, table[column], values.isna() & table[column].notna())
        table[column] = values
    if name in SAMPLED:
        _refuse_first(file, table["ms"], ~table["ms"].between(0, float("inf"), inclusive="left"))
        if not content.endswith(b"\n"):
            raise files.damaged(file, "it ends in the middle of a line")
    return table


def _refuse_first(file: Path, column: "pd.Series[Any]", bad: "pd.Series[bool]") -> None:
    """Raise for the first bad value of a column; the header is line 1."""
    import pandas as pd

    at = next((index for index, wrong in enumerate(bad) if wrong), None)
    if at is not None:
        value = column.iloc[at]
        shown = "nothing" if pd.isna(value) else repr(str(value))
        raise files.damaged(file, f"line {at + 2} holds {shown} as {column.name}")


def _csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: "" if value is None else value for key, value in row.items()})
    return buffer.getvalue()


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {"speculate": verdict.speculate, **asdict(verdict)}


def _plain(value: Any) -> Any:
    """Containers of JSON's own types: NaN and infinity become null, paths become text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if hasattr(value, "item"):
        return _plain(value.item())
    return str(value) if isinstance(value, Path) else value


def _differences(stored: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Dotted keys at which two configurations differ, the free keys aside.

    A key that the stored run's version did not have yet differs where it is in use.
    """
    left, right = _flatten(stored), _flatten(given)
    keys = sorted(left.keys() | right.keys())
    return [
        key
        for key in keys
        if key.split(".")[0] not in FREE_KEYS
        and (left[key] != right.get(key) if key in left else bool(right[key]))
    ]


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(_flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat

"""The run folder: append, resume, load.

One run is one folder (`results/<UTC yyyymmdd-hhmmss>_<door>_<model>[_<draft>]/`) whose files are a
contract that notebooks and other tools read. Two rules keep it trustworthy: a generation is one
line of trials.jsonl, written whole and fsynced before the next begins, so a killed process loses at
most the generation in flight; every other file is written beside its place and renamed into it, so
a reader never sees half of one.
"""

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pandas as pd
import yaml

from harness import trace_file
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
from harness.theory.compare_rows import ComparisonRow
from harness.theory.steps import latency_rows

RESULT_COLUMNS = tuple(field.name for field in fields(ResultRow))
LATENCY_COLUMNS = tuple(field.name for field in fields(LatencyRow))
COMPARISON_COLUMNS = tuple(field.name for field in fields(ComparisonRow))
STEP_KEY = ("role", "model", "kind", "tokens", "context_tokens", "batch")
SAMPLE_COLUMNS = (*STEP_KEY, "beside", "sample", "ms")
PART_COLUMNS = ("k", "part", "sample", "tokens", "ms")

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
    """

    folder: Path
    config: dict[str, Any]
    manifest: dict[str, Any]
    results: pd.DataFrame
    latency: pd.DataFrame
    latency_samples: pd.DataFrame
    trials: tuple[Trial, ...]
    summary: dict[str, Any] | None
    parts: tuple[PartTiming, ...] = ()

    @property
    def door(self) -> str:
        """The door that made the run: profile, sweep, breakeven, snapshot or audition."""
        return str(self.manifest.get("door", ""))


class RunFolder:
    """A run being written.

    Create one with `RunFolder.create` or go on with one by `RunFolder.resume`.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        """Wrap an existing folder; use `create` or `resume` instead."""
        self.path = path
        self.manifest = manifest
        self._trials = path / "trials.jsonl"

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
        run = cls(path, manifest)
        _write(path / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False))
        run.update_manifest({"created_utc": datetime.now(UTC).isoformat(timespec="seconds")})
        return run

    @classmethod
    def resume(cls, folder: str | Path, door: str, config: Mapping[str, Any]) -> "RunFolder":
        """Go on with a stored run of the same door and configuration.

        Raises:
            UserError: not a run folder, another door's, a newer schema's, or one whose
                configuration differs (every differing key is named).
        """
        path = Path(folder)
        manifest = _read_manifest(path)
        if manifest.get("door") != door:
            raise UserError(f"resume={folder}: made by {manifest.get('door')}, not by {door}")
        differing = _differences(_read_config(path), dict(config))
        if differing:
            raise UserError(
                f"resume={folder}: its configuration differs in {', '.join(differing)}; "
                "run with the same settings, or start a new run without resume="
            )
        run = cls(path, manifest)
        run._drop_torn_line()
        return run

    def append_trial(self, trial: Trial) -> None:
        """Store one generation durably: one line, flushed and fsynced before this returns."""
        line = json.dumps(_plain(asdict(trial)), allow_nan=False) + "\n"
        with self._trials.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def trials(self) -> list[Trial]:
        """Every whole stored generation, in order; a torn last line is left out."""
        return list(_read_trials(self._trials))

    def write_latency(self, rows: Sequence[LatencyRow], timings: Sequence[StepTiming]) -> None:
        """Write latency.csv and the raw samples behind it."""
        _write(self.path / "latency.csv", _csv(LATENCY_COLUMNS, (asdict(row) for row in rows)))
        samples = (
            {**asdict(timing), "sample": index, "ms": seconds * 1e3}
            for timing in timings
            for index, seconds in enumerate(timing.samples_s)
        )
        _write(self.path / "latency_samples.csv", _csv(SAMPLE_COLUMNS, samples))

    def write_timings(self, timings: Sequence[StepTiming]) -> None:
        """Write latency.csv and its samples from raw timings alone."""
        self.write_latency(latency_rows(timings), timings)

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
        _write(self.path / "parts.csv", _csv(PART_COLUMNS, samples))

    def timings(self) -> list[StepTiming]:
        """The step timings already stored, raw samples and all; empty where there are none."""
        return timings_from(_table(self.path / "latency_samples.csv", SAMPLE_COLUMNS))

    def write_results(self, rows: Sequence[ResultRow]) -> None:
        """Write results.csv, one row per cell."""
        _write(self.path / "results.csv", _csv(RESULT_COLUMNS, (asdict(row) for row in rows)))

    def write_comparison(self, rows: Sequence[ComparisonRow]) -> None:
        """Write comparison.csv, one row per cell and compared run."""
        cells = [asdict(row) for row in rows]
        _write(self.path / "comparison.csv", _csv(COMPARISON_COLUMNS, cells))

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
        _write(self.path / "summary.json", json.dumps(_plain(content), indent=2) + "\n")

    def write_traces(self, traces: Sequence[TextTrace]) -> None:
        """Write traces.parquet: all drafts, all texts."""
        trace_file.write(traces, self.path / "traces.parquet")

    def update_manifest(self, entries: Mapping[str, Any]) -> None:
        """Merge `entries` into manifest.json."""
        self.manifest.update(entries)
        _write(self.path / "manifest.json", json.dumps(_plain(self.manifest), indent=2) + "\n")

    def _drop_torn_line(self) -> None:
        """Cut a half-written last line, so that the next append does not join it."""
        if not self._trials.exists():
            return
        content = self._trials.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            with self._trials.open("r+b") as file:
                file.truncate(whole)
                os.fsync(file.fileno())


def load(folder: str | Path) -> StoredRun:
    """Read a run folder back, complete or not.

    Raises:
        UserError: not a run folder, or one of a newer schema than this version reads.
    """
    path = Path(folder)
    manifest = _read_manifest(path)
    summary_file = path / "summary.json"
    return StoredRun(
        folder=path,
        config=_read_config(path),
        manifest=manifest,
        results=_table(path / "results.csv", RESULT_COLUMNS),
        latency=_table(path / "latency.csv", LATENCY_COLUMNS),
        latency_samples=_table(path / "latency_samples.csv", SAMPLE_COLUMNS),
        trials=tuple(_read_trials(path / "trials.jsonl")),
        summary=_read_json(summary_file) if summary_file.exists() else None,
        parts=_parts(_table(path / "parts.csv", PART_COLUMNS)),
    )


def load_traces(folder: str | Path) -> list[TextTrace]:
    """Read a run's traces back, in the order they were written; empty where it made none.

    Raises:
        UserError: the file is not one of traces.
    """
    file = Path(folder) / "traces.parquet"
    return trace_file.read(file) if file.exists() else []


def timings_from(samples: pd.DataFrame) -> list[StepTiming]:
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


def _parts(samples: pd.DataFrame) -> tuple[PartTiming, ...]:
    """Rebuild part timings from parts.csv's rows, in their stored order."""
    timings: list[PartTiming] = []
    for key, group in samples.groupby(["k", "part"], sort=False):
        k, part = cast("tuple[int, str]", key)
        seconds = tuple(float(ms) / 1e3 for ms in group["ms"])
        tokens = tuple(int(count) for count in group["tokens"].dropna())
        timings.append(PartTiming(int(k), str(part), seconds, tokens))
    return tuple(timings)


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
    if not file.is_file():
        raise UserError(f"{path}: not a run folder (it has no manifest.json)")
    manifest = _read_json(file)
    version = manifest.get("schema_version")
    if not isinstance(version, int):
        raise UserError(f"{file}: no schema_version; this is not a run's manifest")
    if version > SCHEMA_VERSION:
        raise UserError(
            f"{path}: written by a newer version (schema {version}; this one reads up to "
            f"{SCHEMA_VERSION}); upgrade the harness to read it"
        )
    return manifest


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.yaml"
    if not file.is_file():
        raise UserError(f"{path}: not a whole run folder (it has no config.yaml)")
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise UserError(f"{file}: cannot be read as YAML") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: expected a JSON object")
    return content


def _read_trials(file: Path) -> Iterable[Trial]:
    """Yield the whole lines; a torn last one (the process was killed) is passed over."""
    if not file.exists():
        return
    known = {field.name for field in fields(Trial)}
    lines = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            entry = json.loads(line)
            trial = Trial(**{key: _tuple(value) for key, value in entry.items() if key in known})
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{file}, line {number}: not a trial ({error})") from error
        yield trial


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _table(file: Path, columns: Sequence[str]) -> pd.DataFrame:
    if not file.exists():
        return pd.DataFrame(columns=list(columns))
    return pd.read_csv(file, keep_default_na=False, na_values=[""])


def _csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: "" if value is None else value for key, value in row.items()})
    return buffer.getvalue()


def _write(file: Path, text: str) -> None:
    """Write beside, fsync, rename: a reader sees the old file or the new one, never a part."""
    beside = file.with_name(f".{file.name}.new")
    with beside.open("w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    beside.replace(file)


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
    """Dotted keys at which two configurations differ, the free keys aside."""
    left, right = _flatten(stored), _flatten(given)
    keys = sorted(left.keys() | right.keys())
    return [
        key
        for key in keys
        if key.split(".")[0] not in FREE_KEYS and left.get(key) != right.get(key)
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

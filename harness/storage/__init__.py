"""The run folder: append, resume, load.

One run is one folder (`results/<UTC yyyymmdd-hhmmss>_<command>_<model>[_<draft>]/`) whose files are
a contract that notebooks and other tools read. Files of lines (trials.jsonl and its like) grow by
whole, fsynced lines, a generation or a timing each, so a killed process loses at most the one in
flight; checks.jsonl and every other file is replaced as a whole. All but manifest.json, which
people edit, carry checksums, which are verified whenever a run is read (`harness.storage.files`
says how). A file that is damaged is an error that names it;
nothing that was measured is dropped, or measured again, unless you ask for it.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import yaml

from harness.command_words import as_typed
from harness.records import (
    SCHEMA_VERSION,
    DraftConfidence,
    LoadTiming,
    NotMeasured,
    RoundTiming,
    Scrape,
    SimulatedChoice,
    StepTiming,
    TextTrace,
    Trial,
    UserError,
)
from harness.storage import files
from harness.storage.contents import (
    TABLES,
    Check,
    Lines,
    check_lines,
    csv_text,
    plain,
    read_checks,
    read_config,
    read_table,
    samples_of,
    summary_from,
    timings_from,
)
from harness.storage.manifest import Manifest, read_manifest
from harness.storage.resume import check_command
from harness.summary import Summary, to_json

if TYPE_CHECKING:  # every command's --help imports this module, and must not wait for pandas
    import pandas as pd

TRACES, CHECKS, CONFIDENCES = "traces.parquet", "checks.jsonl", "confidences.parquet"
SAMPLES = "latency_samples.csv"
# What a run measured, of the files with a checksum; the others are derived from it
MEASURED = (TRACES, CONFIDENCES, CHECKS, SAMPLES)
ENDED = ("complete", "failed")
ANSWERS = "answers"


@dataclass(frozen=True)
class StoredRun:
    """Everything a run folder holds, read back."""

    folder: Path
    config: dict[str, Any]
    manifest: Manifest  # what it was measured on, and what became of it
    # results, latency, latency_samples: the tables; empty with the right columns where missing
    results: "pd.DataFrame"
    latency: "pd.DataFrame"
    latency_samples: "pd.DataFrame"
    trials: tuple[Trial, ...]  # every whole line of trials.jsonl, in the order they were run
    # summary.json; None while there is none, or where another version wrote it
    summary: Summary | None
    # rounds.jsonl: what plain tokens and rounds took; empty before they were timed
    rounds: tuple[RoundTiming, ...] = ()
    # starts.jsonl: requests to servers for a part of their budget, so that the start of a request
    # can be told from its rounds; empty where `rounds` tell them
    starts: tuple[Trial, ...] = ()
    # probes.jsonl: requests to servers on a few prompts, which price the rounds of K that are not
    # measured on all; empty where all K are
    probes: tuple[Trial, ...] = ()
    # loads.jsonl: what a server took under load; empty where none was put on it
    loads: tuple[LoadTiming, ...] = ()
    # scrapes.jsonl: what a running server had counted; of a run that asked it nothing
    scrapes: tuple[Scrape, ...] = ()
    # simulated.jsonl: what users wait for with each choice of a plan; empty of other runs
    simulated: tuple[SimulatedChoice, ...] = ()
    # checks.jsonl: greedy texts and distributions as the models judged them
    checks: tuple[Check, ...] = ()

    @property
    def door(self) -> str:
        """The command that made the run: profile, sweep, breakeven, snapshot, audition, server."""
        return self.manifest.door

    @cached_property
    def traces(self) -> list[TextTrace]:
        """The run's traces, in the order they were written; empty where it made none."""
        return load_traces(self.folder)

    @cached_property
    def confidences(self) -> list[DraftConfidence]:
        """Confidences of drafts off the texts; empty where no threshold is replayed."""
        return load_confidences(self.folder)

    @cached_property
    def timings(self) -> list[StepTiming]:
        """The step timings behind latency.csv."""
        return timings_from(self.latency_samples)


class RunFolder:
    """A run being written; every method that writes raises UserError where it cannot.

    Create one with `RunFolder.create`, continue one by `RunFolder.resume`, or derive results
    of a stored one anew with `RunFolder.reopen`: these hold the run's lock while they exist.

    Its files of lines, `lines` by name, are those of a `StoredRun`, and `answers`: the target's, to
    earlier turns. Of each visit `loads` has all lines or none.
    """

    def __init__(self, path: Path, manifest: Manifest, lock: files.Lock | None = None) -> None:
        """Wrap an existing folder; use `create`, `resume` or `reopen` to write more than notes."""
        self.path = path
        self.manifest = manifest
        self._files = files.Files(path)
        self._lock = lock
        self._traces: list[TextTrace] | None = None
        self.trials = Lines(path / "trials.jsonl", Trial)
        self.answers = Lines(path / f"{ANSWERS}.jsonl", Trial)
        self.starts = Lines(path / "starts.jsonl", Trial)
        self.probes = Lines(path / "probes.jsonl", Trial)
        self.rounds = Lines(path / "rounds.jsonl", RoundTiming)
        self.loads = Lines(path / "loads.jsonl", LoadTiming)
        self.scrapes = Lines(path / "scrapes.jsonl", Scrape)
        self.simulated = Lines(path / "simulated.jsonl", SimulatedChoice)
        self.lines: Mapping[str, Lines[Any]] = {
            each.file.stem: each for each in vars(self).values() if isinstance(each, Lines)
        }

    @classmethod
    def create(
        cls, root: str | Path, door: str, names: Sequence[str], config: Mapping[str, Any]
    ) -> "RunFolder":
        """Make a new folder in the results folder, named after the time, `door` and `names`.

        The configuration is resolved, in plain containers.
        """
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        stem = "_".join([stamp, door, *(_safe(name) for name in names if name)])
        path = _new_folder(Path(root), stem)
        begun = {"schema_version": SCHEMA_VERSION, "door": door, "status": "running"}
        run = cls(path, Manifest.of(begun), files.take(path))
        run.write_config(config)
        run.note(created_utc=datetime.now(UTC).isoformat(timespec="seconds"))
        return run

    @classmethod
    def resume(cls, folder: str | Path, door: str, config: Mapping[str, Any]) -> "RunFolder":
        """Continue a stored run of the same command and configuration.

        Raises:
            UserError: not a run folder, another command's, another schema's, one whose
                configuration differs (every differing key is named), one with a damaged
                generation, or one that another process is writing.
        """
        path = Path(folder)
        read_manifest(path)
        lock = files.take(path)
        manifest = read_manifest(path)  # as its last writer left it
        check_command(folder, manifest, read_config(path), door, config)
        run = cls(path, manifest, lock)
        for lines in run.lines.values():
            lines.read()  # damage is an error before anything is cut off or added
        with files.writing(path):
            for lines in run.lines.values():
                files.repair_last_line(lines.file)
        return run

    @classmethod
    def reopen(cls, stored: StoredRun) -> "RunFolder":
        """A stored run, to derive its results and summary anew.

        Raises:
            files.Busy: another process is writing it.
        """
        return cls(stored.folder, stored.manifest, files.take(stored.folder))

    def write_config(self, config: Mapping[str, Any]) -> None:
        self._write("config.yaml", yaml.safe_dump(dict(config), sort_keys=False))

    def write_timings(self, timings: Sequence[StepTiming]) -> None:
        self._write(SAMPLES, csv_text(TABLES[SAMPLES].columns, samples_of(timings)))

    def timings(self) -> list[StepTiming]:
        """The step timings already stored, raw samples and all; empty where there are none."""
        return timings_from(read_table(self.path, SAMPLES))

    def checks(self) -> tuple[Check, ...]:
        return read_checks(self.path, CHECKS)

    def write_checks(self, checks: Sequence[Check]) -> None:
        """Write checks.jsonl, one line per check, its kind first."""
        self._write(CHECKS, check_lines(checks))

    def write_table(self, name: str, record: type[Any], rows: Sequence[Any]) -> None:
        """Write a csv file with a column for each field of its record."""
        columns = [field.name for field in fields(record)]
        self._write(name, csv_text(columns, map(asdict, rows)))

    def write_summary(self, summary: Summary) -> None:
        self._write("summary.json", to_json(summary))

    def traces(self) -> list[TextTrace]:
        """Every stored trace, in order; read from the file once."""
        if self._traces is None:
            self._traces = load_traces(self.path)
        return list(self._traces)

    def write_traces(self, traces: Sequence[TextTrace]) -> None:
        """Write traces.parquet anew: all drafts, all texts."""
        self._put(traces, (), None)

    def add_traces(self, traces: Sequence[TextTrace]) -> None:
        """Put further traces behind the stored ones, whose rows are copied as they are."""
        self._put(traces, self.traces(), files.read_verified(self.path, TRACES))

    def add_confidences(self, confidences: Sequence[DraftConfidence]) -> None:
        """Store confidences; they replace those of the same draft and text.

        An interrupted run may have stored them and not the traces that say that they are there.
        """
        from harness.storage.traces import content_of_confidences  # imports numpy and pandas

        new = {(entry.draft, entry.key) for entry in confidences}
        kept = [
            entry for entry in load_confidences(self.path) if (entry.draft, entry.key) not in new
        ]
        self._files.write(CONFIDENCES, content_of_confidences([*kept, *confidences]))

    def _put(
        self, traces: Sequence[TextTrace], stored: Sequence[TextTrace], content: bytes | None
    ) -> None:
        from harness.storage.traces import content_of_traces  # imports numpy and pandas

        self._files.write(TRACES, content_of_traces(traces, content))
        self._traces = [*stored, *traces]

    def note(self, **changes: Any) -> None:
        """Change entries of manifest.json; with a status that ends the run, count its trials.

        Raises:
            TypeError: there is no such entry (`storage.manifest.Manifest`).
        """
        if changes.get("status") in ENDED and self.trials.file.exists():
            self._files.end(len(self.trials.read()))
        self.manifest = self.manifest.updated(**changes)
        with files.writing(self.path):  # notes are made in it by hand, so it has no checksum
            text = json.dumps(plain(self.manifest.entries), indent=2) + "\n"
            files.write(self.path / "manifest.json", text.encode())

    def note_not_measured(
        self, *failed: NotMeasured, retried: Collection[NotMeasured] = ()
    ) -> None:
        """Note what failed, in place of earlier notes on it and on what was tried again."""
        kept = [each for each in self.manifest.not_measured if each not in (*failed, *retried)]
        if failed or len(kept) < len(self.manifest.not_measured):
            self.note(not_measured=(*kept, *failed))

    def _write(self, name: str, text: str) -> None:
        self._files.write(name, text.encode())


def load(folder: str | Path) -> StoredRun:
    """Read a run folder back, complete or not.

    Raises:
        UserError: not a run folder, one of another schema, or one with a file that is not as it
            was written.
    """
    path = Path(folder)
    manifest = read_manifest(path)
    stored = RunFolder(path, manifest).lines.items()
    lines: dict[str, Any] = {name: tuple(each.read()) for name, each in stored if name != ANSWERS}
    summary = summary_from(files.read_verified(path, "summary.json", files.TEXT_BYTES) or b"")
    config, less = read_config(path), manifest.asked_less
    return StoredRun(
        folder=path,
        config=config if less is None else less.applied(config),
        manifest=manifest,
        results=read_table(path, "results.csv"),
        latency=read_table(path, "latency.csv"),
        latency_samples=read_table(path, SAMPLES),
        summary=summary,
        checks=read_checks(path, CHECKS),
        **lines,
    )


def refuse_lost(run: StoredRun) -> None:
    """Refuse to report on a complete run that has lost measurements; it can still be resumed."""
    if run.manifest.status != "complete":
        return
    folder, known = run.folder, files.record(run.folder)
    missing = [each for each in MEASURED if each in known.files and not (folder / each).exists()]
    fewer = (known.trials or 0) - len(run.trials)
    if missing:
        lost = f"{folder / missing[0]}: the file is missing"
    elif fewer > 0:
        lost = f"{folder / 'trials.jsonl'}: {fewer} of the generations that were stored are missing"
    else:
        return
    raise UserError(
        f"{lost}; put back a copy of it, {as_typed('resume', folder)} measures again what it held,"
        f" or delete {folder / files.CHECKSUMS} to read the folder unverified"
    )


def load_traces(folder: str | Path) -> list[TextTrace]:
    """`StoredRun.traces` of a folder."""
    from harness.storage.traces import read_traces  # imports numpy and pandas

    content = files.read_verified(Path(folder), TRACES)
    return [] if content is None else read_traces(content, Path(folder) / TRACES)


def load_confidences(folder: str | Path) -> list[DraftConfidence]:
    """`StoredRun.confidences` of a folder."""
    from harness.storage.traces import read_confidences  # imports numpy and pandas

    content = files.read_verified(Path(folder), CONFIDENCES)
    return [] if content is None else read_confidences(content, Path(folder) / CONFIDENCES)


def check_writable(root: str | Path) -> None:
    """Refuse a results folder in which no run can be stored, before anything is measured.

    A folder is made and removed in what is there of its path: permissions alone do not tell.
    """
    path = Path(root).absolute()
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if not there.is_dir():
        raise UserError(f"results_root={root}: {there} is a file; give a folder")
    try:
        Path(mkdtemp(prefix=".writable-", dir=there)).rmdir()
    except OSError as error:
        reason = f"{there}: {error.strerror}"
        raise UserError(f"results_root={root}: cannot write there ({reason})") from error


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

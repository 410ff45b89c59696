"""The run folder: what is written comes back, damage is named, a full disk loses nothing."""

import errno
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pyarrow import parquet
from runs import EXAMPLES, FROZEN, sample, without_plots

from harness import cli, reporting
from harness.analysis import analyse
from harness.analysis.round_costs import latency_rows
from harness.cli import compose
from harness.cloud import remote
from harness.cloud.jobs import Job
from harness.commands import breakeven, report
from harness.commands.report import _line
from harness.commands.run_lifecycle import Interrupted, Outcome, running
from harness.config import BreakevenConfig, GpuConf, ReportConfig
from harness.records import (
    SCHEMA_VERSION,
    DraftConfidence,
    LatencyRow,
    LoadTiming,
    MachineLoad,
    NotMeasured,
    ResultRow,
    RoundTiming,
    StepTiming,
    UserError,
)
from harness.reporting.pages import PAGES
from harness.storage import TABLES, RunFolder, files, load, load_confidences, load_traces
from harness.storage import traces as stored_traces
from harness.summary import DistributionTest, RunFacts, Summary, TextCheck

SWEEP = load(FROZEN / "sweep")
CONFIG, TRIAL = SWEEP.config, SWEEP.trials[1]
TIMING = RoundTiming(0, "tiny", "tiny_good", 2, 0.0, 40, 1, 16, 29, 0.0123)
SUMMARY = Summary(RunFacts("sweep", "run", "running", None, "tiny", "tiny_good"))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A sweep as it is stored, with some results, to continue."""
    path = shutil.copytree(FROZEN / "sweep", tmp_path / "run")
    run = RunFolder.resume(path, "sweep", CONFIG)
    where = {"prompt_set": "easy", "temperature": 0.0, "k": 0, "ms_per_token": 2.5}
    row = ResultRow(model="tiny", draft="tiny_good", source="measured", **where)  # type: ignore[arg-type]
    run.write_table("results.csv", ResultRow, [row])
    run.write_summary(SUMMARY)
    return run


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a command's work from its command line, in an empty folder; its exit status."""
    monkeypatch.setattr(sys, "argv", ["door", "draft_ms=1", "target_ms=10"])
    monkeypatch.chdir(tmp_path)

    def run(work: Callable[[BreakevenConfig], Outcome]) -> int:
        monkeypatch.setattr(cli, "work", lambda _, config: work(config))
        with pytest.raises(SystemExit) as end:
            cli.run_app("breakeven")
        return int(end.value.code or 0)

    return run


def refusal(act: Callable[[], Any]) -> str:
    """The one line that refuses it."""
    with pytest.raises(UserError) as refused:
        act()
    assert "\n" not in str(refused.value)
    return str(refused.value)


# ---- what is written comes back -----------------------------------------------------------------


def test_folders_are_named_by_time_command_and_models_and_never_shared(tmp_path: Path) -> None:
    made = [RunFolder.create(tmp_path, "sweep", ["a/b", "c"], {"n": n}).path for n in range(20)]
    assert len(set(made)) == 20
    assert [load(path).config["n"] for path in made] == list(range(20))
    stamp, _, rest = made[0].name.partition("_")
    assert (len(stamp), rest) == (len("20260101-120000"), "sweep_a_b_c")
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        assert "results_root=" in refusal(lambda root=root: RunFolder.create(root, "sweep", [], {}))


def test_tables_have_the_contracts_columns_and_empty_means_empty(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "profile", ["7"], {})
    timings = [StepTiming("draft", "007", "step", 1, 16, 1, (0.001,), "12")]
    folder.write_timings(timings)
    folder.write_table("latency.csv", LatencyRow, latency_rows(timings))
    rows = [ResultRow(model="tiny", prompt_set="easy", temperature=0.0, k=0, source="measured")]
    folder.write_table("results.csv", ResultRow, rows)
    stored = load(folder.path)
    assert folder.timings() == stored.timings == timings, "names like numbers stay names"
    assert tuple(stored.results.columns) == TABLES["results.csv"].columns
    assert tuple(stored.latency.columns) == tuple(field.name for field in fields(LatencyRow))
    header, line = (folder.path / "results.csv").read_text().splitlines()
    assert header.startswith("model,draft,prompt_set,temperature,k,source,status,error,prompts,")
    assert header.endswith("breakeven_alpha,peak_memory_bytes,engine,concurrency")
    empty = "," * (len(TABLES["results.csv"].columns) - 8)
    assert line == f"tiny,,easy,0.0,0,measured,complete{empty}own,1"


def test_trials_checks_and_traces_come_back_as_they_were(folder: RunFolder) -> None:
    before, traces = folder.trials.read(), load_traces(folder.path)
    failed = replace(TRIAL, cell="x", status="failed", error="out of memory", tokens=None)
    folder.trials.append(failed)
    folder.answers.append(TRIAL)
    checks = (
        TextCheck("easy", "one", 0, 2, "TIE", first_difference=3, target_margin=1e-7),
        DistributionTest(1.0, 2, 1, 5000, 12, 9.5, 0.57, "PASS"),
    )
    folder.write_checks(checks)
    folder.write_traces(traces[:5])
    folder.add_traces(traces[5:])
    stored = load(folder.path)
    assert stored.trials == (*before, failed)
    assert folder.answers.read() == [TRIAL]
    assert stored.checks == checks
    assert [trace.key for trace in stored.traces] == [trace.key for trace in traces]
    for back, trace in zip(stored.traces, traces, strict=True):
        assert (back.draft_logprob == trace.draft_logprob).all()
    for line in (folder.path / "trials.jsonl").read_bytes().splitlines():
        body, _, checksum = line.rpartition(b', "checksum": ')
        assert f"{zlib.crc32(body):08x}" == json.loads(checksum[:-1]), "as other tools verify it"


def test_traces_with_a_column_of_an_earlier_version_are_read_and_added_to(
    folder: RunFolder,
) -> None:
    file, (one, *others) = folder.path / "traces.parquet", load_traces(folder.path)
    older, buffer = (
        parquet.read_table(io.BytesIO(stored_traces.content_of_traces([one]))),
        io.BytesIO(),
    )
    parquet.write_table(older.add_column(2, "draft_token", [[7] * len(older)]), buffer)
    back = stored_traces.read_traces(
        stored_traces.content_of_traces(others, buffer.getvalue()), file
    )
    assert [trace.key for trace in back] == [trace.key for trace in (one, *others)]
    assert (back[0].draft_logprob == one.draft_logprob).all()


def test_only_the_same_run_of_this_version_is_resumed_or_read(
    folder: RunFolder, tmp_path: Path
) -> None:
    other = {**CONFIG, "k": [7], "model": {**CONFIG["model"], "name": "x"}, "results_root": "y"}
    for act, said in (
        (lambda: RunFolder.resume(folder.path, "sweep", other), "differs in k=[7] (the run: "),
        (lambda: RunFolder.resume(folder.path, "profile", CONFIG), "by sweep, not by profile"),
        (lambda: load(tmp_path), "not a run folder"),
        (lambda: load(tmp_path / "absent"), "not a run folder"),
    ):
        assert said in refusal(act)
    folder.note(schema_version=SCHEMA_VERSION + 1)
    assert "newer version" in refusal(lambda: load(folder.path))
    folder.note(schema_version=SCHEMA_VERSION - 1)
    said = refusal(lambda: load(folder.path))
    assert f"made by an earlier version (schema {SCHEMA_VERSION - 1};" in said
    assert "make it again" in said
    assert refusal(lambda: RunFolder.resume(folder.path, "sweep", CONFIG)) == said


# ---- damage -------------------------------------------------------------------------------------


def flipped(content: bytes, rng: random.Random) -> bytes:
    """The content with one bit changed."""
    at = rng.randrange(len(content) * 8)
    changed = bytearray(content)
    changed[at // 8] ^= 1 << at % 8
    return bytes(changed)


def read_as_other_values(file: Path, flips: int, read: Callable[[], Any]) -> tuple[int, int]:
    """Of so many flipped bits: how many were read as other values, and how many were refused."""
    content, expected, rng = file.read_bytes(), read(), random.Random(5)
    other, refused = 0, 0
    for _ in range(flips):
        file.write_bytes(flipped(content, rng))
        try:
            other += read() != expected
        except UserError as error:
            refused += str(file) in str(error) and "\n" not in str(error)
    file.write_bytes(content)
    return other, refused


def test_a_flipped_bit_in_trials_or_traces_is_never_read_as_other_values(
    folder: RunFolder,
) -> None:
    other, refused = read_as_other_values(folder.trials.file, 25, folder.trials.read)
    assert other == 0
    assert refused >= 23  # the name of the first line's checksum is no value
    file = folder.path / "traces.parquet"
    assert read_as_other_values(file, 200, lambda: len(load_traces(folder.path))) == (0, 200)


@pytest.mark.parametrize("name", [*TABLES, "config.yaml", "summary.json", "checksums.json"])
def test_a_flipped_bit_in_any_other_file_is_named(folder: RunFolder, name: str) -> None:
    def read() -> str:
        stored = load(folder.path)
        tables = [table.to_csv() for table in (stored.results, stored.latency_samples)]
        return repr([stored.config, stored.summary, *tables, stored.latency.to_csv()])

    other, refused = read_as_other_values(folder.path / name, 6, read)
    assert other == 0
    assert refused >= 5  # white space of checksums.json itself is no content


def test_a_file_that_was_edited_on_purpose_can_be_read_after_all(folder: RunFolder) -> None:
    results = folder.path / "results.csv"
    results.write_text(results.read_text().replace("tiny_good", "renamed"))
    (folder.path / "notebook.ipynb").write_text("{}")
    with pytest.raises(UserError, match=r"results\.csv: .*delete (\S+checksums\.json)") as refused:
        load(folder.path)
    (folder.path / "checksums.json").unlink()
    assert "checksums.json" in str(refused.value)
    stored = load(folder.path)
    assert "renamed" in set(stored.results.draft)
    again = RunFolder.resume(folder.path, "sweep", CONFIG)
    again.write_table("latency.csv", LatencyRow, latency_rows(again.timings()))
    checksums = json.loads((folder.path / "checksums.json").read_text())
    assert {*checksums["files"]} == {"latency.csv"}


def test_what_the_manifest_does_not_know_survives_and_what_it_knows_is_typed(
    folder: RunFolder,
) -> None:
    file = folder.path / "manifest.json"
    noted = [{"what": "draft_scores", "error": "an error"}]
    known = {"other_load": {"load": 1, "processors": 2, "by": "me"}, "not_measured": noted}
    entries = {**json.loads(file.read_text()), "remark": "warm room", "seed": None, **known}
    file.write_text(json.dumps(entries))
    again = RunFolder.resume(folder.path, "sweep", CONFIG)
    assert again.manifest.other_load == MachineLoad(1.0, 2)
    assert again.manifest.seed is None
    (before,) = again.manifest.not_measured
    assert (before.what, before.error) == ("draft_scores", "an error")
    rounds = NotMeasured("rounds", "out of memory", draft="d", k=4, temperature=0.0)
    again.note_not_measured(rounds)
    again.note_not_measured(replace(rounds, error="once more"))
    assert [each.error for each in load(folder.path).manifest.not_measured] == [
        "an error",
        "once more",
    ]
    again.note_not_measured(retried=[rounds])
    again.note(status="complete", interrupted_by=None)
    stored = json.loads(file.read_text())
    assert stored["remark"] == "warm room"
    assert stored["other_load"] == known["other_load"]
    assert load(folder.path).manifest == again.manifest
    with pytest.raises(TypeError, match="a manifest has no statuss"):
        again.note(statuss="complete")
    with pytest.raises(ValueError, match="server_threads"):
        again.note(server_threads="many")


def test_damaged_trials_are_all_named_and_only_they_are_measured_again(folder: RunFolder) -> None:
    file = folder.path / "trials.jsonl"
    before = folder.trials.read()
    lines = file.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b'"k": ', b'"k": 1', 1)
    lines[7] = lines[7][:40] + b"\n"
    file.write_bytes(b"".join(lines))
    with pytest.raises(UserError, match=r"line 3: damaged .*1 more: 8;.*sed") as refused:
        RunFolder.resume(folder.path, "sweep", CONFIG)
    assert file.read_bytes() == b"".join(lines)
    command = str(refused.value).partition("(sed")[2].partition(")")[0]
    subprocess.run(f"sed{command}", shell=True, check=True)
    kept = RunFolder.resume(folder.path, "sweep", CONFIG).trials.read()
    assert kept == [trial for index, trial in enumerate(before) if index not in (2, 7)]
    assert (folder.path / "trials.jsonl.bak").read_bytes() == b"".join(lines)


def test_round_times_come_back_and_a_killed_writers_half_line_is_cut_off(folder: RunFolder) -> None:
    file = folder.path / "rounds.jsonl"
    file.unlink()
    assert load(folder.path).rounds == (), "it was stopped before it timed any"
    timings = [replace(TIMING, visit=visit, k=k) for visit in range(2) for k in (0, 2)]
    for timing in timings:
        folder.rounds.append(timing)
    content = file.read_bytes()
    file.write_bytes(content[:-9])
    assert load(folder.path).rounds == tuple(timings[:-1])
    again = RunFolder.resume(folder.path, "sweep", CONFIG)
    again.rounds.append(timings[-1])
    assert file.read_bytes() == content
    assert load(folder.path).rounds == tuple(again.rounds.read()) == tuple(timings)
    file.write_bytes(content.replace(b'"rounds": 16', b'"rounds": 17', 1))
    assert "rounds.jsonl, line 1: damaged" in refusal(folder.rounds.read)


def test_a_lost_file_of_a_complete_run_is_not_passed_over_nor_a_lost_folder_called_intact(
    folder: RunFolder,
) -> None:
    folder.write_checks(())
    folder.note(status="complete")
    (folder.path / "checks.jsonl").unlink()
    with pytest.raises(UserError, match=r"checks.jsonl: the file is missing; put back a copy"):
        report.run(ReportConfig(run=str(folder.path)))
    shutil.rmtree(folder.path)
    with pytest.raises(UserError, match="was deleted while it was written; start the run anew"):
        folder.note(status="complete")


def test_a_lost_line_break_or_a_lost_line_is_not_passed_over(folder: RunFolder) -> None:
    file, trials = folder.path / "trials.jsonl", folder.trials.read()
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert folder.trials.read() == trials, "whole but for its line break"
    assert RunFolder.resume(folder.path, "sweep", CONFIG).trials.read() == trials
    assert file.read_bytes() == content
    file.write_bytes(content[:-1] + b"J")
    assert f"line {len(trials)}: damaged" in refusal(folder.trials.read)
    file.write_bytes(content + b"{}\n")
    assert f"line {len(trials) + 1}: damaged (it has no checksum)" in refusal(folder.trials.read)
    file.write_bytes(content)
    folder.note(status="complete")
    file.write_bytes(b"".join(content.splitlines(keepends=True)[:-1]))
    runs = [str(folder.path), str(FROZEN / "sweep")]
    for settings in (ReportConfig(run=runs[0]), ReportConfig(runs=runs)):
        with pytest.raises(UserError, match="1 of the generations that were stored are missing"):
            report.run(settings)
    assert len(RunFolder.resume(folder.path, "sweep", CONFIG).trials.read()) == len(trials) - 1


def test_a_kill_between_two_writes_is_not_taken_for_damage(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before and after every rename, twice over; then written once more, undisturbed."""
    replace_file, done = os.replace, 0

    def killed_at(count: int, after: bool) -> Callable[..., None]:
        def rename(*args: Any) -> None:
            nonlocal done
            done += 1
            if done == count and not after:
                raise SystemExit
            replace_file(*args)
            if done == count:
                raise SystemExit

        return rename

    timings = folder.timings()
    for number, (count, after) in enumerate([(n, when) for n in range(1, 9) for when in (0, 1)]):
        again = RunFolder.resume(folder.path, "sweep", CONFIG)
        new = [replace(entry, samples_s=(float(number + 1),)) for entry in timings]
        with monkeypatch.context() as patch:
            done = 0
            patch.setattr(os, "replace", killed_at(count, bool(after)))
            try:
                again.write_table("latency.csv", LatencyRow, latency_rows(new))
                again.write_timings(new)
                again.write_summary(SUMMARY)
            except SystemExit:
                pass
        stored = load(folder.path)
        samples = {timing.samples_s for timing in stored.timings}
        assert len(samples) == 1 or samples == {timing.samples_s for timing in timings}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text.replace("ms", "seconds", 1), "it has no column ms"),
        (lambda _: "a,b\n1,2\n", "it has no column role"),
        (lambda _: "", "No columns"),
        (lambda text: text.replace("\n", "\n" + text.splitlines()[1][:12] + "\n", 1), "line 2"),
        (lambda text: text[:-4], "middle of a line"),
        (lambda text: text[:-30], "holds nothing as"),
        (lambda text: with_last_number(text, "12.x"), "holds '12.x' as ms"),
        (lambda text: with_last_number(text, "inf"), "holds 'inf' as ms"),
        (lambda text: with_last_number(text, "-1"), "holds '-1.0' as ms"),
        (lambda text: text + "target,tiny,step,1,64,1,,0,1.0,9,9,9\n", "Expected 9 fields"),
        (lambda text: text.replace("tiny", "t\xff\xfe", 1).encode("latin-1"), "codec"),
    ],
)  # fmt: skip
def test_damaged_latency_samples_are_one_line(
    folder: RunFolder, change: Callable[[str], str | bytes], says: str
) -> None:
    file = folder.path / "latency_samples.csv"
    changed = change(file.read_text())
    file.write_bytes(changed if isinstance(changed, bytes) else changed.encode())
    (folder.path / "checksums.json").unlink()
    for read in (folder.timings, lambda: load(folder.path)):
        said = refusal(read)
        assert says in said
        assert str(file) in said


def with_last_number(text: str, number: str) -> str:
    head, _, _ = text.rstrip("\n").rpartition(",")
    return f"{head},{number}\n"


# ---- a full or read-only disk -------------------------------------------------------------------

Break = Callable[[int, str], None]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Break:
    """Makes every later write of a file fail, half of it written, or its fsync, or its opening."""
    write, opened = os.write, os.open

    def fail(number: int, call: str) -> None:
        error = OSError(number, os.strerror(number))

        def half(handle: int, content: Any) -> int:
            if handle < 3:
                return write(handle, content)
            write(handle, bytes(content)[: len(content) // 2])
            raise error

        def no_open(path: Any, flags: int, *rest: Any, **named: Any) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR):
                raise OSError(number, os.strerror(number), str(path))
            return opened(path, flags, *rest, **named)

        def no_sync(_: int) -> None:
            raise error

        replacement = {"write": half, "fsync": no_sync, "open": no_open}[call]
        monkeypatch.setattr(os, call, replacement)

    return fail


@pytest.mark.parametrize(
    ("number", "call"),
    [
        (errno.ENOSPC, "write"),
        (errno.EROFS, "open"),
        (errno.EDQUOT, "fsync"),
    ],
)
def test_a_full_disk_is_one_line_and_loses_nothing(
    folder: RunFolder, broken: Break, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    stored, traces = load(folder.path), load_traces(folder.path)
    before = {path.name: path.read_bytes() for path in folder.path.iterdir() if path.is_file()}
    extra, summary = replace(stored.trials[0], cell="extra"), analyse(stored)
    broken(number, call)
    for write in (
        lambda: folder.trials.append(extra),
        lambda: folder.write_table("results.csv", ResultRow, []),
        lambda: folder.write_traces(traces[:1]),
        lambda: folder.write_timings(folder.timings()[:1]),
        lambda: folder.note(status="complete"),
        lambda: reporting.render(summary, stored.folder),
    ):
        said = refusal(write)
        assert str(folder.path) in said
        assert os.strerror(number) in said
    monkeypatch.undo()
    after = {path.name: path.read_bytes() for path in folder.path.iterdir() if path.is_file()}
    # The digests that are valid may have grown by those of files that could not be written
    assert {name for name in before if before[name] != after[name]} <= {"checksums.json"}
    assert set(before) == set(after), "nothing half-written is left"
    again = RunFolder.resume(folder.path, "sweep", CONFIG)
    again.trials.append(extra)
    assert load(folder.path).trials == (*stored.trials, extra)


def test_what_a_full_disk_left_of_a_line_does_not_join_the_next(
    folder: RunFolder, broken: Break, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = folder.trials.read()
    truncate = os.ftruncate
    broken(errno.ENOSPC, "write")
    monkeypatch.setattr(os, "ftruncate", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "")))
    with pytest.raises(UserError, match="No space left"):
        folder.trials.append(replace(trials[0], cell="torn"))
    monkeypatch.undo()
    assert os.ftruncate is truncate
    folder.trials.append(replace(trials[0], cell="next"))
    assert [trial.cell for trial in folder.trials.read()[-2:]] == [trials[-1].cell, "next"]


@pytest.mark.parametrize("during", ["a generation", "anything else"])
def test_a_command_on_a_full_disk_ends_with_status_2(
    during: str, tmp_path: Path, door: Callable[..., int], broken: Break, capsys: Any
) -> None:
    run = RunFolder.create(tmp_path / "results", "sweep", ["tiny"], {})

    def work(_: BreakevenConfig) -> Outcome:
        if during == "anything else":
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/elsewhere")
        with running(run):
            broken(errno.ENOSPC, "write")
            run.trials.append(TRIAL)
        raise AssertionError

    assert door(work) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert (
        "/elsewhere: Disk quota exceeded" if during == "anything else" else str(run.path)
    ) in line


# ---- one writer ---------------------------------------------------------------------------------

HOLDER = """
import sys, time
from harness.storage import RunFolder
run = RunFolder.resume(sys.argv[1], "sweep", {"k": [2]})
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process that is writing a run."""
    path = RunFolder.create(tmp_path, "sweep", ["tiny"], {"k": [2]}).path
    command = [sys.executable, "-c", HOLDER, str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process, path
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_process_is_refused_with_the_first_ones_id_until_it_ends(
    holder: tuple[subprocess.Popen[str], Path],
) -> None:
    process, path = holder
    with pytest.raises(UserError, match=rf"resume=.*: process {process.pid} on .* is writing"):
        RunFolder.resume(path, "sweep", {"k": [2]})
    # A report on it reads, and leaves the writing to it
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with without_plots():
        report.run(ReportConfig(run=str(path)))
    after = {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}
    assert {*after} - {*before} == {"report.html", "report.md"}
    assert {name: after[name] for name in before} == before
    process.kill()
    process.wait()
    assert (path / "run.lock").exists()
    with without_plots():
        report.run(ReportConfig(run=str(path)))
    assert (path / "results.csv").is_file()
    run = RunFolder.resume(path, "sweep", {"k": [2]})
    assert path in files.held()
    del run
    assert path not in files.held()
    assert not (path / "run.lock").exists()


def test_a_file_system_without_locks_is_written_without_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", unsupported)
    run = RunFolder.create(tmp_path, "sweep", ["tiny"], {})
    run.trials.append(TRIAL)
    assert len(load(run.path).trials) == 1
    assert "written without a lock (No locks available)" in caplog.text


# ---- signals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_a_command_with_one_line_and_the_manifest_says_so(
    name: str, tmp_path: Path, door: Callable[..., int], capsys: Any
) -> None:
    number = signal.Signals[name]
    run = RunFolder.create(tmp_path / "results", "sweep", ["tiny"], CONFIG)

    def work(_: BreakevenConfig) -> Outcome:
        with running(run):
            os.kill(os.getpid(), number)
        raise AssertionError

    # A background job of a shell starts with SIGINT ignored, and what is ignored stays ignored
    original = signal.signal(number, signal.default_int_handler)
    before = signal.getsignal(number)
    try:
        status = door(work)
        restored = signal.getsignal(number)
    finally:
        signal.signal(number, original)
    assert status == 128 + number
    assert capsys.readouterr().err == (
        f"error: interrupted by {name}; finished generations are stored, and this continues the"
        f" run: python -m harness.breakeven resume={run.path}\n"
    )
    assert restored is before
    manifest = load(run.path).manifest
    assert (manifest.status, manifest.interrupted_by) == ("running", name)
    with running(run):
        assert load(run.path).manifest.interrupted_by is None


def test_a_background_run_ignores_what_its_shell_told_it_to_and_ends_with_sigterm(
    door: Callable[..., int], capsys: Any
) -> None:
    """A shell starts a background job with SIGINT ignored, and nohup with SIGHUP."""
    ignored = (signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    outlived: list[int] = []

    def work(_: BreakevenConfig) -> Outcome:
        for number in (*ignored, signal.SIGTERM):
            os.kill(os.getpid(), number)
            outlived.append(number)
        raise AssertionError

    try:
        assert door(work) == 128 + signal.SIGTERM
        assert [signal.getsignal(number) for number in ignored] == [signal.SIG_IGN] * 2
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert outlived == [*ignored]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: interrupted by SIGTERM; ")


def test_a_generation_interrupted_while_it_is_stored_is_stored_whole_or_not_at_all(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials, write = folder.trials.read(), os.write

    def interrupted(handle: int, content: Any) -> int:
        write(handle, bytes(content)[:50])
        raise Interrupted(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", interrupted)
        with pytest.raises(Interrupted):
            folder.trials.append(replace(trials[0], cell="next"))
    assert folder.trials.read() == trials
    assert (folder.path / "trials.jsonl").read_bytes().endswith(b"}\n")


# ---- a folder from elsewhere --------------------------------------------------------------------

SECRET = "only-this-machine-knows"
Change = Callable[[Path, Path], Any]
LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join(['*' + old] * 10)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


def linked(name: str) -> Change:
    def change(run: Path, outside: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(outside / "private.txt")

    return change


def rewritten(name: str, text: str) -> Change:
    return lambda run, outside: (run / name).write_text(text.replace("OUTSIDE", str(outside)))


def plots_lead_out(run: Path, outside: Path) -> None:
    shutil.rmtree(run / "plots", ignore_errors=True)
    (run / "plots").symlink_to(outside)


def reports_lead_out(run: Path, outside: Path) -> None:
    """The reports, what they are written into before they are renamed, and names with paths."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"] |= {"name": f"../../{outside}/made", "id": "/etc/passwd"}
    config["traces_from"] = str(outside)
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    for name in ("report.md", "report.html"):
        (run / name).unlink(missing_ok=True)
        for file in (name, f".{name}.new", f".{name}.{os.getpid()}.new"):
            (run / file).symlink_to(outside / "private.txt")


def fifo(run: Path, _: Path) -> None:
    (run / "trials.jsonl").unlink()
    os.mkfifo(run / "trials.jsonl")


FILES = ("manifest.json", "config.yaml", "results.csv", "summary.json", "trials.jsonl")
HOSTILE: dict[str, tuple[Change, str | None]] = {
    **{f"{name} is a link": (linked(name), f"{name}: a symbolic link")
       for name in (*FILES, "latency_samples.csv", "checksums.json")},
    "plots is a link": (plots_lead_out, "plots: a symbolic link"),
    "trials.jsonl is a pipe": (fifo, "not a regular file"),
    # Takes no room, and a terabyte when read
    **{f"a terabyte of {name}": (lambda run, _, n=name: os.truncate(run / n, 2**40), "bytes, and")
       for name in ("trials.jsonl", "config.yaml")},
    **{what: (rewritten("config.yaml", text), said) for what, text, said in (
        ("a YAML tag", "a: !!python/object/apply:os.system ['touch OUTSIDE/made']", "as YAML"),
        ("aliases of aliases", LAUGHS, "too many values"),
        ("an alias of itself", "a: &a [*a]", "nested too deeply"),
        ("a variable", "model: {name: '${oc.env:HARNESS_TEST_TOKEN}'}", "holds an interpolation"),
        ("a list for a configuration", "[1, 2]", "expected keys and values"),
    )},
    **{what: (rewritten(name, text), said) for what, name, text, said in (
        ("nested manifest", "manifest.json", "[" * 100_000, "cannot be read as JSON"),
        ("deep manifest", "manifest.json", '{"a": ' + "[" * 90 + "]" * 90 + "}", "nested too deep"),
        ("5,000 digits in it", "manifest.json", '{"a": ' + "9" * 5000 + "}", "be read as JSON"),
        ("a list for a manifest", "manifest.json", "[1, 2]", "expected a JSON object"),
        ("models of another shape", "manifest.json", '{"schema_version": 2, "models": [1]}',
         "models: Input should be a valid dictionary; not a run's manifest"),
        ("deep summary", "summary.json", '{"a": ' + "[" * 9000 + "]" * 9000 + "}", None),
        ("5,000 digits", "summary.json", '{"run": ' + "9" * 5000 + "}", None),
    )},
    "names and reports that lead out": (reports_lead_out, None),
}  # fmt: skip


# Of the cases that are reported after all, which takes long, one
LONG = ("deep summary", "5,000 digits")


@pytest.mark.parametrize("case", sample(HOSTILE, *({*HOSTILE} - {*LONG})))
def test_a_run_from_elsewhere_reads_and_writes_nothing_outside_itself(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, refused = HOSTILE[case]
    # One plot is as good as all here
    monkeypatch.setitem(PAGES, "profile", replace(PAGES["profile"], plots=("verify_curves.svg",)))
    monkeypatch.setenv("HARNESS_TEST_TOKEN", SECRET)
    outside, run = tmp_path / "outside", tmp_path / "results" / "run"
    outside.mkdir()
    (outside / "private.txt").write_text(SECRET)
    (outside / "verify_curves.svg").write_text(SECRET)
    shutil.copytree(EXAMPLES / "embedded_profile", run)  # analysed fast
    (run / "checksums.json").unlink(missing_ok=True)
    change(run, outside)
    before = {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}
    try:
        report.run(ReportConfig(run=str(run)))
        said = None
    except UserError as error:
        said = str(error)
    assert (said is None) == (refused is None), said
    assert refused is None or refused in str(said)
    assert SECRET not in str(said)
    assert "\n" not in str(said)
    assert _line(run).error == "" or refused is not None
    assert {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()} == before
    for file in run.rglob("*"):
        if file.is_file() and not file.is_symlink() and file.stat().st_size < 2**30:
            assert SECRET.encode() not in file.read_bytes(), file


def packed(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for info, content in members:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "archive",
    [
        packed((member("../escaped"), b"x")),
        packed((member("/tmp/escaped_from_an_archive"), b"x")),
        packed((member("run/out", tarfile.SYMTYPE, "/etc"), b""), (member("run/out/x"), b"x")),
        packed((member("run/out", tarfile.LNKTYPE, "../../private"), b"")),
        packed((member("run/pipe", tarfile.FIFOTYPE), b"")),
        packed((member("one/a"), b"x"), (member("two/a"), b"x")),
        packed((member("run/a"), b"x"))[:-6],
        b"not an archive",
        packed(),
    ],
    ids=range(9),  # not the bytes, which hold the time of day
)
def test_an_archive_that_is_no_run_is_one_line_and_writes_nothing(
    archive: bytes, tmp_path: Path
) -> None:
    (tmp_path / "private").write_text(SECRET)
    job = Job("launch", "sweep-l4", "sweep", "L4", GpuConf("l4", 24.0, 300.0), ())
    results = tmp_path / "results"
    with pytest.raises(UserError, match="sweep-l4: what came back cannot be unpacked") as refused:
        remote.Delivery(job, 0, "there/run", archive).unpack(results)
    assert "\n" not in str(refused.value)
    assert list(results.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["private", "results"]
    assert not Path("/tmp/escaped_from_an_archive").exists()


def test_no_environment_variable_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {
        "HF_TOKEN": "hf_abcdefghijklmnopqrstuv",
        "OPENAI_API_KEY": "sk-proj-0123456789abcdef",
        "MODAL_TOKEN_SECRET": "as-93hf83hf93hf",
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIK7MDENG",
        "SOME_SETTING": "a-setting-of-this-machine",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    typed = [secrets["MODAL_TOKEN_SECRET"], "hf_zyxwvutsrqponmlkjih", "https://me:pass@host/x"]
    command = ["breakeven.py", "k=[1]", *(f"key{n}={word}" for n, word in enumerate(typed))]
    monkeypatch.setattr(sys, "argv", command)
    settings = ["draft_ms=1", "target_ms=10", "k=[1]", f"results_root={tmp_path}"]
    run = breakeven.run(compose("breakeven", settings)).folder
    assert run is not None
    written = [path for path in run.rglob("*") if path.is_file()]
    assert len(written) >= 8
    stored = b"".join(path.read_bytes() for path in written)
    for value in (*secrets.values(), *typed, "me:pass"):
        assert value.encode() not in stored
    said = load(run).manifest.environment.command
    assert said[3:] == ("k=[1]", "key0=$MODAL_TOKEN_SECRET", "key1=***", "key2=https://***@host/x")


def test_confidences_that_are_stored_again_replace_the_first(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "audition", ["tiny"], CONFIG)
    one = DraftConfidence("small", "easy", "a", 0, 0.0, np.full((3, 2), 0.5))
    other = replace(one, prompt="b")
    run.add_confidences([one, other])
    run.add_confidences([replace(one, values=np.full((3, 2), 0.25))])
    confidences = load_confidences(run.path)
    stored = {entry.prompt: entry.values for entry in confidences}
    assert len(confidences) == 2
    assert (stored["a"] == 0.25).all()
    assert (stored["b"] == 0.5).all()


def test_half_a_visit_under_load_is_not_stored(folder: RunFolder, broken: Break) -> None:
    loads = [
        LoadTiming(0, "m", "d", k, 0.0, "easy", 1, None, ("easy/a",), (8,), (8,), (8,), (0.1,), 0.1)
        for k in (0, 1, 2, 4)
    ]
    folder.loads.append(*loads)
    broken(errno.ENOSPC, "write")
    with pytest.raises(UserError, match="No space left"):
        folder.loads.append(*[replace(load, visit=1) for load in loads])
    assert folder.loads.read() == loads

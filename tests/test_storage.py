"""The run folder: what is written comes back, and a killed process corrupts nothing."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from harness.records import (
    SCHEMA_VERSION,
    LatencyRow,
    ResultRow,
    StepTiming,
    Summary,
    Trial,
    UserError,
    Verdict,
)
from harness.storage import RESULT_COLUMNS, RunFolder, load
from harness.summary import DistributionTest, TextCheck

CONFIG = {"k": [1, 2], "seed": 0, "model": {"name": "tiny"}, "results_root": "results"}
TRIAL = Trial(
    cell="abc",
    prompt_set="easy",
    prompt="one",
    repetition=0,
    k=2,
    temperature=1.0,
    rule="ratio",
    status="ok",
    new_tokens=3,
    accepted_lengths=(1, 0, 1),
    tokens=(5, 6, 7),
    decode_s=0.25,
)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "results", "sweep", ["tiny", "tiny_good"], CONFIG)


def test_a_folder_is_named_by_time_door_and_models(folder: RunFolder) -> None:
    stamp, _, rest = folder.path.name.partition("_")
    assert rest == "sweep_tiny_tiny_good"
    assert len(stamp) == len("20260101-120000")


def test_two_runs_of_one_second_get_two_folders(tmp_path: Path) -> None:
    names = {RunFolder.create(tmp_path, "sweep", ["a"], CONFIG).path for _ in range(3)}
    assert len(names) == 3


def test_checks_come_back_as_they_were(folder: RunFolder) -> None:
    checks = (
        TextCheck("easy", "one", 0, 2, "TIE", first_difference=3, target_margin=1e-7),
        DistributionTest(1.0, 2, 1, 5000, 12, 9.5, 0.57, "PASS"),
    )
    folder.write_checks(checks)
    assert load(folder.path).checks == checks


def test_trials_come_back_as_they_were(folder: RunFolder) -> None:
    folder.append_trial(TRIAL)
    folder.append_trial(replace(TRIAL, status="failed", error="out of memory", tokens=None))
    assert folder.trials() == [
        TRIAL,
        replace(TRIAL, status="failed", error="out of memory", tokens=None),
    ]


def test_the_tables_have_the_contracts_columns_and_empty_means_empty(folder: RunFolder) -> None:
    row = ResultRow("tiny", "tiny_good", "easy", 0.0, 0, "measured", "complete", ms_per_token=2.5)
    folder.write_results([row])
    folder.write_latency(
        [LatencyRow("target", "tiny", "step", 1, 64, 1, 2.0, 1.5, 3.0, 2)],
        [StepTiming("target", "tiny", "step", 1, 64, 1, (0.0015, 0.0025))],
    )
    stored = load(folder.path)
    assert tuple(stored.results.columns) == RESULT_COLUMNS
    assert tuple(stored.latency.columns) == tuple(field.name for field in fields(LatencyRow))
    assert stored.results["ms_per_token"].tolist() == [2.5]
    assert stored.results["alpha"].isna().all()
    header, line = (folder.path / "results.csv").read_text().splitlines()
    assert header.startswith("model,draft,prompt_set,temperature,k,source,status,error,prompts,")
    assert header.endswith("request_speedup,breakeven_alpha,peak_memory_bytes")
    assert "nan" not in line.lower()
    assert "None" not in line
    assert folder.timings() == [StepTiming("target", "tiny", "step", 1, 64, 1, (0.0015, 0.0025))]


def test_the_summary_has_the_contracts_keys(folder: RunFolder) -> None:
    verdict = Verdict("speculate", "tiny_good", 3, 1.0, "all", 1.4, 1.3, 1.5, "because")
    folder.write_summary(Summary(verdict, per_prompt_set=(verdict,)))
    summary = json.loads((folder.path / "summary.json").read_text())
    assert summary["schema_version"] == SCHEMA_VERSION
    assert summary["verdict"] == {
        "speculate": True,
        "decision": "speculate",
        "draft": "tiny_good",
        "k": 3,
        "temperature": 1.0,
        "prompt_set": "all",
        "speedup": 1.4,
        "speedup_lo": 1.3,
        "speedup_hi": 1.5,
        "reason": "because",
    }
    assert summary["per_prompt_set"] == [summary["verdict"]]
    assert summary["failures"] == []


def test_a_torn_last_line_is_left_out_and_cut_off_on_resume(folder: RunFolder) -> None:
    folder.append_trial(TRIAL)
    with (folder.path / "trials.jsonl").open("a") as file:
        file.write('{"cell": "half')
    assert load(folder.path).trials == (TRIAL,)
    again = RunFolder.resume(folder.path, "sweep", CONFIG)
    again.append_trial(replace(TRIAL, cell="def"))
    assert [trial.cell for trial in again.trials()] == ["abc", "def"]


def test_a_broken_line_in_the_middle_is_named(folder: RunFolder) -> None:
    (folder.path / "trials.jsonl").write_text("{}\nnot json\n{}\n")
    with pytest.raises(UserError, match=r"line [12]"):
        load(folder.path)


def test_resume_names_every_key_that_differs(folder: RunFolder) -> None:
    other = {**CONFIG, "k": [1, 4], "model": {"name": "other"}, "results_root": "elsewhere"}
    with pytest.raises(UserError, match=r"differs in k, model\.name;"):
        RunFolder.resume(folder.path, "sweep", other)


def test_resume_refuses_another_doors_run(folder: RunFolder) -> None:
    with pytest.raises(UserError, match="made by sweep, not by profile"):
        RunFolder.resume(folder.path, "profile", CONFIG)


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match="not a run folder"):
            load(path)


def test_a_newer_schema_is_refused(folder: RunFolder) -> None:
    folder.update_manifest({"schema_version": SCHEMA_VERSION + 1})
    with pytest.raises(UserError, match="newer version"):
        load(folder.path)


def test_a_manifest_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("[1, 2]")
    with pytest.raises(UserError, match="expected a JSON object"):
        load(tmp_path)


def test_an_unwritable_root_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UserError, match="results_root="):
        RunFolder.create(file / "below", "sweep", ["a"], CONFIG)

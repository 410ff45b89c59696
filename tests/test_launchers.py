"""Many jobs side by side: statuses come back from other processes, folders are not shared."""

import pickle
import sys
from pathlib import Path

import pytest
from conftest import Door

from harness import cli
from harness.commands.run import Outcome
from harness.config import SweepConfig
from harness.records import UserError
from harness.storage import RunFolder, load


def test_a_launchers_jobs_run_in_other_processes_and_the_worst_status_comes_back(
    door: Door, tmp_path: Path
) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    ended = door(
        "breakeven",
        *("-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"),
        *("draft_ms=1,0,2", "target_ms=10", "k=[1]"),
    )
    assert ended.returncode == 2
    assert ended.stderr == "error: draft_ms=0: must be a time above 0\n"
    folders = sorted(path.parent for path in tmp_path.glob("results/*/manifest.json"))
    told = [line for line in ended.stdout.splitlines() if line.startswith("run: ")]
    assert sorted(told) == [f"run: {folder.relative_to(tmp_path)}" for folder in folders]
    runs = [load(folder) for folder in folders]
    assert sorted(run.config["draft_ms"] for run in runs) == [1, 2]
    assert {run.manifest["status"] for run in runs} == {"complete"}


def test_a_jobs_number_can_name_its_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["door", "-m", "device.name=cuda:${hydra:job.num}", "draft=tiny_good,tiny_small"]
    monkeypatch.setattr(sys, "argv", words)
    seen: list[tuple[str, str]] = []

    def work(config: SweepConfig) -> Outcome:
        seen.append((config.draft.name, config.device.name))
        return Outcome(None)

    with pytest.raises(SystemExit):
        cli.run_door("sweep", work)
    assert seen == [("tiny_good", "cuda:0"), ("tiny_small", "cuda:1")]


def test_a_status_notes_itself_where_it_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_statuses", [])
    content = pickle.dumps(cli.JobStatus(2))
    assert cli._statuses == []
    assert pickle.loads(content) == cli.JobStatus(2)
    assert cli._statuses == [2]


def test_runs_that_begin_in_one_second_do_not_share_a_folder(tmp_path: Path) -> None:
    paths = {RunFolder.create(tmp_path, "sweep", ["a", "b"], {"n": n}).path for n in range(20)}
    assert len(paths) == 20
    assert {load(path).config["n"] for path in paths} == set(range(20))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write there"):
        RunFolder.create(tmp_path / "file", "sweep", ["a"], {})


def test_a_door_keeps_no_status_of_the_door_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["door", "draft_ms=1", "target_ms=10"])
    for status in (1, 0):
        with pytest.raises(SystemExit) as end:
            cli.run_door("breakeven", lambda _, status=status: Outcome(None, status))
        assert end.value.code == status

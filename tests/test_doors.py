"""The doors: help without torch, exit statuses, error lines, and the break-even arithmetic."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import Door

from harness import reporting
from harness.cli import compose, run_door
from harness.commands import breakeven
from harness.commands.run import Outcome
from harness.config import SCHEMAS, BreakevenConfig, checked
from harness.records import UserError
from harness.storage import RESULT_COLUMNS, load

POST = {"draft_ms": 22.09, "target_ms": 29.92}

# Runs a door in this process's stead and prints what it left in sys.modules.
WITHOUT_TORCH = """
import runpy, sys
try:
    sys.argv[0] = "door"
    runpy.run_module("harness." + sys.argv.pop(1), run_name="__main__", alter_sys=False)
except SystemExit as end:
    assert end.code in (0, None), end.code
heavy = {"torch", "transformers", "pandas", "scipy", "matplotlib"} & set(sys.modules)
print("loaded:", *sorted(heavy))
"""

RunDoor = Callable[..., int]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunDoor:
    """Runs the breakeven door with other work in it, in this process, and returns its status."""
    monkeypatch.chdir(tmp_path)

    def run_it(work: Callable[[Any], Outcome], *overrides: str) -> int:
        words = ["door", *overrides, "draft_ms=1", "target_ms=10"]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as end:
            run_door("breakeven", work)
        assert isinstance(end.value.code, int)
        return end.value.code

    return run_it


def done(status: int = 0) -> Callable[[Any], Outcome]:
    return lambda _: Outcome(Path("results/a_run"), status)


def fail_with(error: BaseException) -> Callable[[Any], Outcome]:
    def work(_: Any) -> Outcome:
        raise error

    return work


def python(code: str, *arguments: str, cwd: Path) -> str:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout


@pytest.mark.parametrize("name", SCHEMAS)
def test_help_loads_neither_torch_nor_anything_else_heavy(name: str, tmp_path: Path) -> None:
    out = python(WITHOUT_TORCH, name, "--help", cwd=tmp_path)
    assert out.splitlines()[-1].strip() == "loaded:"
    assert f"python -m harness.{name}" in out


def test_breakeven_runs_without_torch(tmp_path: Path) -> None:
    out = python(WITHOUT_TORCH, "breakeven", "draft_ms=1", "target_ms=10", "k=[1]", cwd=tmp_path)
    loaded = out.splitlines()[-1].split()
    assert "pandas" in loaded, "the door did its work"
    assert not {"torch", "transformers"} & set(loaded)


def test_the_last_line_is_the_run_and_the_status_is_the_works(
    run: RunDoor, capsys: pytest.CaptureFixture[str]
) -> None:
    for status in (0, 1):
        assert run(done(status)) == status
        out, err = capsys.readouterr()
        assert out.splitlines()[-1] == "run: results/a_run"
        assert err == ""


def test_no_run_line_where_nothing_was_stored(
    run: RunDoor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(lambda _: Outcome(None)) == 0
    assert "run:" not in capsys.readouterr().out


def test_work_is_given_the_doors_own_dataclass(run: RunDoor) -> None:
    seen: list[Any] = []
    run(lambda config: seen.append(config) or Outcome(None), "k=[3]")
    assert type(seen[0]) is BreakevenConfig
    assert seen[0].k == [3]


def test_what_the_user_can_mend_is_one_line_and_status_2(
    run: RunDoor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(fail_with(UserError("k: -1\nis no number"))) == 2
    out, err = capsys.readouterr()
    assert err == "error: k: -1 is no number\n"
    assert out == ""


def test_anything_else_is_one_line_and_status_1_with_the_traceback_on_demand(
    run: RunDoor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(fail_with(ValueError("broken"))) == 1
    err = capsys.readouterr().err
    assert err == "error: ValueError: broken (run again with debug=true for the traceback)\n"
    assert run(fail_with(ValueError("broken")), "debug=true") == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_run_that_cannot_be_rendered_stays_and_says_how_to_render_it(
    run: RunDoor, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Any) -> None:
        raise FileNotFoundError("no definitions")

    monkeypatch.setattr(reporting, "render", broken)
    assert run(breakeven.run) == 1
    out, err = capsys.readouterr()
    folder = out.splitlines()[-1].removeprefix("run: ")
    assert (Path(folder) / "results.csv").is_file()
    (line,) = err.splitlines()
    assert line.startswith("error: FileNotFoundError: no definitions; what was measured is stored")
    assert line.endswith(f"python -m harness.report run={folder}")
    assert run(breakeven.run, "debug=true") == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_missing_value_is_told_with_what_to_type(
    run: RunDoor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(done(), "seed=???") == 2
    assert capsys.readouterr().err.startswith("error: seed: no value")


def test_interrupting_is_one_line_and_status_130(
    run: RunDoor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(fail_with(KeyboardInterrupt())) == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: interrupted")


def test_a_multirun_runs_every_job_and_exits_with_the_worst_status(
    run: RunDoor, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def work(config: BreakevenConfig) -> Outcome:
        if config.seed == 1:
            raise UserError("the second one is bad")
        return Outcome(Path(f"results/{config.seed}"), config.seed // 2)

    assert run(work, "-m", "seed=0,1,2") == 2
    out, err = capsys.readouterr()
    assert out.splitlines() == ["run: results/0", "run: results/2"]
    assert err == "error: the second one is bad\n"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [tmp_path / "results" / ".multirun" / "multirun.yaml"]


def test_a_misspelt_key_keeps_hydras_text_and_status_1(door: Door) -> None:
    ended = door("sweep", "temprature=[1]")
    assert ended.returncode == 1
    assert "temprature" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_unknown_group_value_lists_the_ones_there_are(door: Door) -> None:
    ended = door("sweep", "draft=tiny_best")
    assert ended.returncode == 1
    assert "tiny_good" in ended.stderr


@pytest.mark.parametrize("name", ["profile", "sweep", "snapshot"])
def test_a_bad_k_ends_a_door_before_anything_is_stored(
    name: str, door: Door, tmp_path: Path
) -> None:
    ended = door(name, "k=[-1]")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "error: k: -1 is not a whole number of at least 0 and at most 1024 (no engine drafts more "
        "tokens a round)\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_breakeven_stores_and_prints_a_run(door: Door, tmp_path: Path) -> None:
    ended = door("breakeven", "draft_ms=22.09", "target_ms=29.92", "k=[1,4]", "alpha=[0.6,1]")
    assert (ended.returncode, ended.stderr) == (0, "")
    label, folder = ended.stdout.splitlines()[-1].split(" ", 1)
    assert label == "run:"
    results = pd.read_csv(tmp_path / folder / "results.csv")
    assert tuple(results.columns) == RESULT_COLUMNS
    assert [(k, a) for k, a in zip(results["k"], results["alpha"], strict=True)] == [
        (1, 0.6),
        (1, 1.0),
        (4, 0.6),
        (4, 1.0),
    ]
    assert results["source"].unique().tolist() == ["theory"]
    assert results["breakeven_alpha"].round(3).unique().tolist() == [0.738, 0.882]
    assert (tmp_path / folder / "report.md").is_file()
    assert load(tmp_path / folder).manifest["status"] == "complete"


def test_breakeven_stores_best_k_and_the_ideal_whatever_alphas_are_asked_for(
    tmp_path: Path,
) -> None:
    config = configured(tmp_path, k=[1, 2, 4], alpha=[0.2, 0.9])
    folder = breakeven.run(config).folder
    assert folder is not None
    summary = json.loads((folder / "summary.json").read_text())
    assert [(entry["alpha"], entry["k"]) for entry in summary["best_k"]] == [(0.2, 0), (0.9, 2)]
    ideal = {entry["k"]: round(entry["ideal_speedup"], 3) for entry in summary["by_k"]}
    assert ideal == {1: 1.151, 2: 1.211, 4: 1.265}
    latency = pd.read_csv(folder / "latency.csv")
    assert latency["median_ms"].tolist() == [22.09, 29.92]
    assert latency["samples"].tolist() == [0, 0]


def configured(root: Path, **changes: Any) -> BreakevenConfig:
    return BreakevenConfig(**{**POST, "results_root": str(root), **changes})


def rows_of(**changes: Any) -> list[Any]:
    config = configured(Path("unused"), **changes)
    times = breakeven.step_times(config)
    return [*breakeven.measured_rows(config, times, sorted(config.k))]


def test_a_measured_rate_gets_the_linear_rules_speedup_which_is_exact_for_it() -> None:
    (row,) = rows_of(k=[4], acceptance_rate=0.341)
    assert row.speedup == pytest.approx((1 + 4 * 0.341) / (4 * 22.09 / 29.92 + 1))
    assert row.acceptance_rate == 0.341
    assert row.alpha > 0.341
    expected = sum(row.alpha**j for j in range(1, 5)) / 4
    assert expected == pytest.approx(0.341)


def test_rates_by_k_and_as_hydra_reads_them() -> None:
    config = compose(
        "breakeven", ["draft_ms=1", "target_ms=10", "acceptance_rate={1:0.5,4:0.3}", "k=[1,2,4]"]
    )
    rows = [*breakeven.measured_rows(config, breakeven.step_times(config), config.k)]
    assert [(row.k, row.acceptance_rate) for row in rows] == [(1, 0.5), (4, 0.3)]


def test_a_list_by_position_answers_every_k_up_to_its_length() -> None:
    positions = [0.605, 0.341, 0.186, 0.099, 0.052, 0.027, 0.014]
    rows = rows_of(k=[1, 7, 8], acceptance_by_position=positions)
    assert [row.k for row in rows] == [1, 7]
    assert rows[0].tokens_per_round == pytest.approx(1.605)
    assert rows[1].mean_acceptance_length == pytest.approx(2.324)
    assert rows[1].acceptance_rate == pytest.approx(0.189, abs=5e-4)


def test_verify_times_are_counted_from_one_position() -> None:
    config = configured(Path("unused"), k=[2], alpha=[1.0], verify_ms=[30.0, 33.0, 36.0])
    (row,) = breakeven.iid_rows(config, breakeven.step_times(config), [2])
    assert row.ms_per_token == pytest.approx((2 * 22.09 + 36.0) / 3)
    assert row.speedup == pytest.approx(29.92 * 3 / (2 * 22.09 + 36.0))


def test_no_break_even_is_an_empty_field_and_never_1() -> None:
    config = configured(Path("unused"), draft_ms=40.0, k=[1], alpha=[1.0])
    (row,) = breakeven.iid_rows(config, breakeven.step_times(config), [1])
    assert row.breakeven_alpha is None
    assert row.speedup is not None
    assert row.speedup < 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"draft_ms": 0.0}, "draft_ms=0"),
        ({"draft_ms": -1.0}, "draft_ms=-1"),
        ({"target_ms": math.nan}, "target_ms=nan"),
        ({"target_ms": math.inf}, "target_ms=inf"),
        ({"verify_ms": [30.0], "k": [1]}, "verify_ms: 1 entries, but k=1"),
        ({"verify_ms": [30.0, 0.0], "k": [1]}, "verify_ms=0"),
        ({"verify_ms": []}, "verify_ms=[]"),
        ({"alpha": [1.01]}, "alpha=1.01"),
        ({"alpha": [-0.1]}, "alpha=-0.1"),
        ({"alpha": [math.nan]}, "alpha=nan"),
        ({"alpha": []}, "alpha=[]"),
        ({"alpha": [0.5, 0.5]}, "alpha: a value is given twice"),
        ({"k": [-1]}, "k: -1"),
        ({"k": []}, "k=[]"),
        ({"acceptance_rate": 0.3, "k": [1, 2]}, "a rate belongs to the K it was measured at"),
        ({"acceptance_rate": {3: 0.3}, "k": [1, 2]}, "3 is not among k=[1, 2]"),
        ({"acceptance_rate": 1.3, "k": [2]}, "acceptance_rate=1.3"),
        ({"acceptance_rate": "high", "k": [2]}, "acceptance_rate=high"),
        ({"acceptance_by_position": [0.3, 0.4]}, "acceptance_by_position: 0.4 follows 0.3"),
        ({"acceptance_by_position": []}, "acceptance_by_position=[]"),
        ({"acceptance_by_position": [1.2]}, "acceptance_by_position=1.2"),
    ],
)
def test_break_even_refuses_what_cannot_be_and_stores_nothing(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        breakeven.run(checked(configured(tmp_path, **changes)))
    assert says in str(refused.value)
    assert list(tmp_path.iterdir()) == []

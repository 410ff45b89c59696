"""The page over all runs of a folder, and reports of runs that were stopped half way."""

import json
import os
import re
import shutil
from dataclasses import asdict, replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from runs import FROZEN, analysed

from harness.analysis import analyse
from harness.cli import compose
from harness.commands import report
from harness.config import ReportConfig
from harness.records import SCHEMA_VERSION, UserError
from harness.reporting.index import line_of
from harness.storage import RunFolder, load
from tests import browser

pytestmark = pytest.mark.usefixtures("no_plots")
HOSTILE = """<img src=x onerror="alert('1')">"""


def copied(name: str, folder: Path, **manifest: Any) -> Path:
    """A stored run in another folder, with entries of its manifest changed."""
    shutil.copytree(FROZEN / name, folder)
    entries = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    text = json.dumps({**entries, **manifest})
    (folder / "manifest.json").write_text(text, encoding="utf-8")
    (folder / "checksums.json").unlink()  # of the files as they were
    return folder


def indexed(root: Path) -> str:
    assert report.run(ReportConfig(index=str(root))).status == 0
    return (root / "index.html").read_text(encoding="utf-8")


def rows(page: str) -> list[dict[str, str]]:
    """Every run's row, of every table: the text of each cell by its column, and the heading."""
    found = list[dict[str, str]]()
    for heading, head, body in re.findall(
        r"<h3[^>]*>(.*?)</h3>.*?<thead>(.*?)</thead>.*?<tbody>(.*?)</tbody>", page, re.DOTALL
    ):
        names = re.findall(r'<span class="h">(.*?)</span>', head)
        for row in re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL):
            cells = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL)
            texts = [re.sub(r"<[^>]+>", "", cell).strip() for cell in cells]
            found.append({"heading": heading, **dict(zip(names, texts, strict=True))})
    return found


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Complete runs of every kind, a failed and a stopped one, one of the future, a damaged one."""
    root = tmp_path_factory.mktemp("results")
    newer = SCHEMA_VERSION + 1
    runs: tuple[tuple[str, dict[str, Any]], ...] = (
        ("sweep", {}),
        ("audition", {"status": "failed"}),
        ("breakeven", {}),
        ("snapshot", {"status": "running"}),
        ("profile", {"schema_version": newer}),
        ("sweep_replay", {}),
        ("profile", {}),
        ("sweep_replay", {}),
        ("sweep", {}),
    )
    for day, (name, changes) in enumerate(runs, start=1):
        created = f"2026-03-0{day}T10:00:00+00:00"
        copied(name, root / f"2026030{day}-100000_{name}", created_utc=created, **changes)
    (root / "20260306-100000_sweep_replay/traces.parquet").write_bytes(b"\xff\xfe\x00")
    synthetic = root / "20260309-100000_sweep/config.yaml"
    text = synthetic.read_text(encoding="utf-8")
    assert "  acceptance: null\n" in text
    synthetic.write_text(text.replace("  acceptance: null\n", "  acceptance: 0.6\n"))
    (root / "not_a_run").mkdir()
    indexed(root)
    return root


@pytest.fixture(scope="module")
def page(many: Path) -> str:
    return (many / "index.html").read_text(encoding="utf-8")


def test_the_index_has_a_table_for_each_kind_of_evidence_newest_first(page: str) -> None:
    kinds = [(row["heading"].split()[0].rstrip(":"), row["run"][7]) for row in rows(page)]
    assert kinds == [
        ("Measured", "1"), ("Predicted", "8"), ("Predicted", "2"), ("From", "3"),
        ("Synthetic", "9"), ("Checks", "4"), ("Profiles", "7"), ("Not", "6"), ("Not", "5"),
    ]  # fmt: skip


def test_the_gates_of_snapshots_and_comparisons_are_shown(tmp_path: Path) -> None:
    run = copied("sweep", tmp_path / "a"), copied("sweep", tmp_path / "b")
    copied("snapshot", tmp_path / "c")
    for threshold in (0.9, 1.5):
        settings = ReportConfig(
            runs=[str(folder) for folder in run], fail_below=threshold, results_root=str(tmp_path)
        )
        assert report.run(settings).status == int(threshold > 1)
    page = indexed(tmp_path)
    checks = {row["verdict"].split(":")[0]: row["check"] for row in rows(page)}
    assert checks["fail_below=0.9"] == "PASS"
    assert checks["fail_below=1.5"] == "FAIL"
    assert [text for key, text in checks.items() if key.startswith("speculation left")] == ["PASS"]
    assert len(re.findall(r' bad">\s*FAIL', page)) == 1


def test_a_row_says_what_the_run_decided_and_on_what(page: str) -> None:
    decided = {row["run"].partition("_")[2]: row for row in rows(page)[::-1]}
    sweep = decided["sweep"]
    assert re.fullmatch(r"tiny_good, K=\d on the harness's loop", unescape(sweep["verdict"]))
    assert re.fullmatch(r"\d\.\d\dx \[\d\.\d\d, \d\.\d\d\]", sweep["speedup<br>[lo, hi]"])
    shown = [sweep[name] for name in ("T", "status", "date", "model", "draft")]
    assert shown == ["0", "complete", "2026-03-01", "tiny", "tiny_good"]
    made_on = load(FROZEN / "sweep").manifest.environment
    commit = made_on.entries["git"]["commit"][:7]
    assert (sweep["device"], sweep["commit"]) == (made_on.device_name, commit)
    assert decided["audition"]["status"] == "failed"
    assert decided["breakeven"]["verdict"] == "Do not speculate"
    # The speedup next to it is that of a K
    assert line_of("", analysed("server")).verdict == "no draft (K=2) on llama.cpp"


def test_runs_that_did_not_end_well_are_marked(page: str) -> None:
    assert sorted(row["status"] for row in rows(page)) == [
        *(["complete"] * 5), "failed", "unfinished", "unreadable", "unreadable",
    ]  # fmt: skip
    assert page.count(' bad">') == 4
    assert f"made by a newer version (schema {SCHEMA_VERSION + 1};" in page
    assert "sweep_replay/traces.parquet" in page


def test_every_row_leads_to_a_report_that_exists(many: Path, page: str) -> None:
    links = re.findall(r'<th scope="row"[^>]*>.*?<a href="([^"]+)"', page)
    assert len(links) == 9
    assert all((many / link).exists() for link in links)
    assert sum(link.endswith("/report.html") for link in links) == 7


def test_names_in_the_index_stay_text(tmp_path: Path) -> None:
    folder = copied("sweep", tmp_path / """a "quoted" <b>folder #1?""")
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("name: tiny\n", f"name: {json.dumps(HOSTILE)}\n"))
    page = indexed(tmp_path)
    assert "<img" not in page
    assert "&lt;img" in page
    assert "<b>folder" not in page
    assert "a%20%22quoted%22%20%3Cb%3Efolder%20%231%3F/report.html" in page


def test_a_run_that_ended_is_shown_by_its_summary_and_another_is_analysed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [copied(name, tmp_path / name) for name in ("sweep", "breakeven", "snapshot")]
    done: list[str] = []
    monkeypatch.setattr(report, "analyse", lambda run: done.append(run.folder.name) or analyse(run))

    def analysed_again() -> set[str]:
        done.clear()
        assert indexed(tmp_path) == page
        return {*done}

    page = indexed(tmp_path)
    assert {*done} == {"sweep", "breakeven", "snapshot"}
    assert analysed_again() == set()
    (folders[1] / "report.html").unlink()
    assert analysed_again() == {"breakeven"}
    assert (folders[1] / "report.html").is_file()
    (folders[0] / "summary.json").unlink()
    assert analysed_again() == {"sweep"}
    assert (folders[0] / "summary.json").is_file()
    shutil.rmtree(folders[2])
    assert "snapshot" not in indexed(tmp_path)


def test_a_run_that_is_damaged_after_it_was_indexed_is_not_shown_as_it_was(tmp_path: Path) -> None:
    trials = copied("sweep", tmp_path / "sweep") / "trials.jsonl"
    assert "trials.jsonl" not in indexed(tmp_path)
    content = bytearray(trials.read_bytes())
    content[len(content) // 2] ^= 1
    times = trials.stat()
    trials.write_bytes(content)
    os.utime(trials, ns=(times.st_atime_ns, times.st_mtime_ns))
    (row,) = rows(indexed(tmp_path))
    assert row["status"] == "unreadable"


@browser.needs_chromium
def test_the_index_opens_quietly(many: Path, tmp_path: Path) -> None:
    with browser.chromium(tmp_path) as running:
        page = running.page(many / "index.html")
        assert page.complaints == []
        assert page.requests == [(many / "index.html").as_uri()]


@browser.needs_chromium
@pytest.mark.parametrize("width", [360, 1280])
def test_no_index_is_cut_off_and_that_of_a_phone_has_verdicts_first(
    width: int, many: Path, tmp_path: Path
) -> None:
    with browser.chromium(tmp_path) as running:
        page = running.page(many / "index.html", width=width)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        cut = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth)"
        assert page.evaluate(f"{cut}.length") == 0
        rows = "[...document.querySelectorAll('table.runs')].flatMap(t => [...t.tBodies[0].rows])"
        top = "row.cells[%d].getBoundingClientRect().top"
        above = page.evaluate(f"{rows}.map(row => {top % 1} < {top % 0})")
        assert above == [width == 360] * 9


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"index": "nowhere"}, "index=nowhere: no such folder"),
        ({"index": "."}, "index=.: no run folder in it"),
        ({"index": ".", "run": "a"}, "run and index: give one of them"),
        ({"index": ".", "fail_below": 0.9}, "fail_below: needs run= or runs="),
        ({"run": "a", "runs": ["b", "c"]}, "run and runs: give one of them"),
        ({"run": "a", "fail_below": -1.0}, "fail_below=-1.0"),
        ({"run": "a", "fail_below": float("nan")}, "fail_below=nan"),
        ({}, "run: name the run folder"),
        ({"run": "empty"}, "empty: not a run folder (it has no manifest.json)"),
        ({"run": "missing"}, "missing"),
        ({"run": "newer"}, "newer version"),
    ],
)
def test_what_cannot_be_reported_is_refused_in_one_line(
    settings: dict[str, Any], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if settings == {"run": "newer"}:
        copied("sweep", tmp_path / "newer", schema_version=SCHEMA_VERSION + 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=re.escape(error)) as refused:
        report.run(ReportConfig(**settings))
    assert "\n" not in str(refused.value)


# ---- runs that were stopped ---------------------------------------------------------------------


def reported(folder: Path) -> str:
    report.run(ReportConfig(run=str(folder)))
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "UNFINISHED RUN" in text
    assert json.loads((folder / "manifest.json").read_text())["status"] == "running"
    return text


@pytest.mark.parametrize("command", ["sweep", "profile", "snapshot", "audition", "server"])
def test_a_run_killed_before_it_stored_anything_has_a_report(command: str, tmp_path: Path) -> None:
    config = asdict(compose(command))
    folder = RunFolder.create(tmp_path, command, ["tiny", "tiny_good"], config)
    folder.note(status="running")
    assert "<h1>" in reported(folder.path)


def test_a_killed_profile_shows_the_steps_it_had_timed(tmp_path: Path) -> None:
    folder = copied("profile", tmp_path / "run", status="running")
    (folder / "trials.jsonl").unlink()
    page = reported(folder)
    assert "What each K could gain" in page


def test_a_killed_snapshot_says_which_texts_are_the_same_and_which_are_open(
    tmp_path: Path,
) -> None:
    folder = copied("snapshot", tmp_path / "run", status="running")
    trials = load(folder).trials
    other = next(trial for trial in trials if trial.k == 4)
    assert other.tokens is not None
    changed = replace(other, tokens=(other.tokens[0], -1, *other.tokens[2:]))
    (folder / "trials.jsonl").unlink()
    (folder / "checks.jsonl").unlink()
    for trial in trials:
        RunFolder(folder, load(folder).manifest).trials.append(changed if trial is other else trial)
    same = sum(trial.k > 0 for trial in trials) - 1
    assert f"{same} PASS, 0 TIE, 0 FAIL, 1 OPEN" in reported(folder)
    (opened,) = [check for check in analyse(load(folder)).text_checks if check.result == "OPEN"]
    assert (opened.prompt, opened.first_difference) == (other.prompt, 1)


def test_a_killed_audition_ranks_the_drafts_that_were_scored_and_timed(tmp_path: Path) -> None:
    folder = copied("audition", tmp_path / "run", status="running")
    for name in ("latency_samples.csv", "latency.csv", "rounds.jsonl"):
        lines = (folder / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(line for line in lines if "tiny_small" not in line))
    page = reported(folder)
    board = analyse(load(folder)).leaderboards[0]
    drafts = {trace.draft for trace in load(folder).traces}
    assert "tiny_small" in drafts
    assert {row.draft for row in board.rows} == {*drafts, None} - {"tiny_small"}
    assert "Try tiny_good" in page

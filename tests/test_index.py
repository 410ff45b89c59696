"""The page over all runs of a folder, and reports of runs that were stopped half way."""

import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from harness.cli import compose
from harness.commands import report
from harness.config import ReportConfig
from harness.records import SCHEMA_VERSION, UserError
from harness.storage import RunFolder, StoredRun, load
from tests import browser
from tests import reporting_fixtures as made

ROOT = Path(__file__).resolve().parents[1]
AUDITION = ROOT / "results/examples/embedded_audition"


def manifest(folder: Path, **changes: Any) -> None:
    file = folder / "manifest.json"
    entries = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**entries, **changes}), encoding="utf-8")


def indexed(root: Path) -> str:
    assert report.run(ReportConfig(index=str(root))).status == 0
    return (root / "index.html").read_text(encoding="utf-8")


def rows(page: str) -> list[list[str]]:
    """The text of every cell of the page's one table."""
    (body,) = re.findall(r"<tbody>(.*?)</tbody>", page, re.DOTALL)
    found = re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)
    cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL) for row in found]
    return [[re.sub(r"<[^>]+>", "", cell).strip() for cell in row] for row in cells]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete sweep, a failed and a stopped one, one of the future, and a damaged one."""
    root = tmp_path_factory.mktemp("results")
    days = iter(range(1, 9))

    def dated(run: StoredRun, **changes: Any) -> Path:
        manifest(run.folder, created_utc=f"2026-03-0{next(days)}T10:00:00+00:00", **changes)
        return run.folder

    dated(made.sweep_run(root))
    dated(made.partial_sweep_run(root))
    dated(made.sweep_run(root, summary=made.sweep_summary(verdict=made.verdict(1.0))))
    dated(made.snapshot_run(root), status="running")
    dated(made.profile_run(root), schema_version=SCHEMA_VERSION + 1)
    damaged = dated(made.breakeven_run(root))
    (damaged / "results.csv").write_bytes(b"\xff\xfe\x00")
    (root / "not_a_run").mkdir()
    indexed(root)
    return root


@pytest.fixture(scope="module")
def page(many: Path) -> str:
    return (many / "index.html").read_text(encoding="utf-8")


def test_the_index_has_a_row_for_every_run_newest_first(page: str) -> None:
    table = rows(page)
    assert len(table) == 6
    days = [row[1][:10] for row in table]
    known = [day for day in days if day != "-"]
    assert known == sorted(known, reverse=True)
    assert len(known) == 4
    assert "not_a_run" not in page


def test_a_row_says_what_the_run_decided_and_on_what(page: str) -> None:
    (row,) = [row for row in rows(page) if row[1] == "2026-03-01 10:00"]
    assert row[2:] == [
        "Serve tiny_good at K=2", "0", "1.35x [1.27, 1.42]", "complete", "sweep", "tiny",
        "tiny_good", "AMD EPYC 7R13", "0123abc",
    ]  # fmt: skip
    (negative,) = [row for row in rows(page) if row[1] == "2026-03-03 10:00"]
    assert negative[2] == "Do not speculate"


def test_runs_that_did_not_end_well_are_marked(page: str) -> None:
    states = [row[5] for row in rows(page)]
    assert sorted(states) == [
        "complete", "complete", "failed", "unfinished", "unreadable", "unreadable"
    ]  # fmt: skip
    assert f"written by a newer version (schema {SCHEMA_VERSION + 1};" in page
    assert "breakeven" in page
    assert "damaged (" in page


def test_every_row_leads_to_a_report_that_exists(many: Path, page: str) -> None:
    links = re.findall(r'<th scope="row"[^>]*>.*?<a href="([^"]+)"', page)
    assert len(links) == 6
    assert all((many / link).exists() for link in links)
    assert sum(link.endswith("/report.html") for link in links) >= 4


def test_the_trend_shows_complete_runs_only(many: Path, page: str) -> None:
    (drawing,) = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert "tiny, tiny_good, AMD EPYC 7R13" in drawing
    alone = many / "alone"
    shutil.copytree(made_failed(many), alone / "run")
    assert "<svg" not in indexed(alone)
    shutil.rmtree(alone)


def made_failed(many: Path) -> Path:
    return next(
        path
        for path in many.iterdir()
        if (path / "manifest.json").is_file() and load_status(path) == "failed"
    )


def load_status(path: Path) -> str:
    return str(json.loads((path / "manifest.json").read_text(encoding="utf-8"))["status"])


def test_names_in_the_index_stay_text(tmp_path: Path) -> None:
    name = """<img src=x onerror="alert('1')">"""
    run = made.sweep_run(
        tmp_path,
        config={**made.PAIR, "model": {"name": name}},
        summary=made.sweep_summary(verdict=made.verdict(0.0, draft=name)),
    )
    run.folder.rename(tmp_path / """a "quoted" <b>folder #1?""")
    page = indexed(tmp_path)
    assert "<img" not in page
    assert "<b>folder" not in page
    assert "a%20%22quoted%22%20%3Cb%3Efolder%20%231%3F/report.html" in page


@browser.needs_chromium
def test_the_index_opens_quietly_sorts_and_leads_on(many: Path, tmp_path: Path) -> None:
    with browser.chromium(tmp_path) as running:
        page = running.page(many / "index.html", width=360)
        assert page.complaints == []
        assert page.requests == [(many / "index.html").as_uri()]
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        table = 'document.querySelector("table.sortable")'
        name = page.evaluate(f"{table}.tBodies[0].rows[1].cells[0].offsetWidth")
        assert name <= 180  # it stays in sight while the rest is scrolled, and must leave it room
        page.evaluate(f"{table}.tHead.rows[0].cells[1].querySelector('button').click()")
        dates = page.evaluate(f"[...{table}.tBodies[0].rows].map(r => r.cells[1].textContent)")
        assert dates == sorted(dates)
        assert len(dates) == 6


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"index": "nowhere"}, "index=nowhere: no such folder"),
        ({"index": "."}, "index=.: no run folder in it"),
        ({"index": ".", "run": "a"}, "run and index: give one of them"),
        ({"index": ".", "fail_below": 0.9}, "fail_below: needs run= or runs="),
        ({"run": "empty"}, "empty: not a run folder (it has no manifest.json)"),
        ({"run": "missing"}, "missing"),
    ],
)
def test_what_cannot_be_reported_is_refused_in_one_line(
    settings: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=re.escape(said)) as refused:
        report.run(ReportConfig(**settings))
    assert "\n" not in str(refused.value)


def test_a_newer_run_is_refused_with_what_to_do(tmp_path: Path) -> None:
    run = made.sweep_run(tmp_path)
    manifest(run.folder, schema_version=SCHEMA_VERSION + 1)
    with pytest.raises(UserError, match=r"newer version .* upgrade the harness"):
        report.run(ReportConfig(run=str(run.folder)))


# ---- runs that were stopped ---------------------------------------------------------------------


def stopped(root: Path, door: str, *overrides: str) -> RunFolder:
    """A run folder as a door leaves it when it is killed before it stored anything."""
    config = asdict(compose(door, overrides))
    folder = RunFolder.create(root, door, ["tiny", "tiny_good"], config)
    folder.update_manifest({**made.ENVIRONMENT, "status": "running"})
    return folder


def reported(folder: Path) -> str:
    report.run(ReportConfig(run=str(folder)))
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "UNFINISHED RUN" in text
    assert load_status(folder) == "running"
    return text


@pytest.mark.parametrize("door", ["sweep", "profile", "snapshot", "audition"])
def test_a_run_killed_before_it_stored_anything_has_a_report(door: str, tmp_path: Path) -> None:
    folder = stopped(tmp_path, door)
    assert "<h1>" in reported(folder.path)


def test_a_killed_profile_shows_the_steps_it_had_timed(tmp_path: Path) -> None:
    folder = stopped(tmp_path, "profile", "k=[4]")
    complete = made.sweep_run(tmp_path / "other")
    for name in ("latency.csv", "latency_samples.csv"):
        shutil.copy(complete.folder / name, folder.path / name)
    page = reported(folder.path)
    assert "What each K could gain" in page
    assert "4.20" in page
    ideal = load(folder.path).results.query("source == 'theory'")
    assert set(ideal.k) >= {1, 4}


def test_a_killed_snapshot_says_which_texts_are_the_same_and_which_are_open(
    tmp_path: Path,
) -> None:
    folder = stopped(tmp_path, "snapshot", "k=[4]")
    texts = {("same", 0): (1, 2, 3), ("same", 4): (1, 2, 3), ("other", 0): (1, 2, 3),
             ("other", 4): (1, 9, 3), ("alone", 0): (5, 6)}  # fmt: skip
    for (prompt, k), tokens in texts.items():
        entry = made.trial(prompt, "easy", 0.0, k, (1,) * (k + 1))
        folder.append_trial(replace(entry, tokens=tokens))
    page = reported(folder.path)
    assert "OPEN" in page
    summary = load(folder.path).summary or {}
    found = {entry["prompt"]: entry for entry in summary["prompts"]}
    assert {name: entry["result"] for name, entry in found.items()} == {
        "same": "PASS",
        "other": "OPEN",
    }
    assert found["other"]["first_difference"] == 1
    # it went on, was stopped again, and is derived anew
    folder.append_trial(replace(made.trial("alone", "easy", 0.0, 4, (1,) * 5), tokens=(5, 6)))
    assert "2 PASS" in reported(folder.path)


def test_a_snapshot_that_ended_keeps_its_own_judgement(tmp_path: Path) -> None:
    run = made.snapshot_run(tmp_path)
    manifest(run.folder, status="failed")
    report.run(ReportConfig(run=str(run.folder)))
    assert [entry["result"] for entry in (load(run.folder).summary or {})["prompts"]] == [
        "PASS", "TIE", "FAIL"
    ]  # fmt: skip


def test_a_killed_audition_ranks_the_drafts_that_were_scored_and_timed(tmp_path: Path) -> None:
    folder = tmp_path / "20260301-100000_audition_tiny"
    folder.mkdir()
    kept = ("config.yaml", "manifest.json", "latency.csv", "latency_samples.csv",
            "traces.parquet", "trials.jsonl")  # fmt: skip
    for name in kept:
        shutil.copy(AUDITION / name, folder / name)
    manifest(folder, status="running")
    file = folder / "latency_samples.csv"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    file.write_text("".join(line for line in lines if "tiny_small" not in line), encoding="utf-8")
    page = reported(folder)
    board = (load(folder).summary or {})["leaderboards"][0]
    names = {row["draft"] for row in board["rows"]}
    assert "tiny_good" in names
    assert "tiny_small" not in names
    assert "Serve tiny_good" in page

"""What the documents name exists, and what they say to type works."""

import re
import shlex
from pathlib import Path

import pytest

from harness import audition
from tools import drafts_table, keys_page

ROOT = Path(__file__).resolve().parents[1]
TEST = re.compile(r"`(test_\w+)?::(test_\w+)`")


def test_every_row_of_reliability_md_names_tests_that_exist() -> None:
    lines = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ")][1:]
    assert len(rows) > 50
    missing: list[str] = []
    for row in rows:
        module, names = "", TEST.findall(row)
        if not names:
            missing.append(f"no test in: {row[:80]}")
        for file, name in names:
            module = file or module
            source = ROOT / "tests" / f"{module}.py"
            if not source.is_file() or f"def {name}(" not in source.read_text(encoding="utf-8"):
                missing.append(f"{module}::{name}")
    assert not missing


def test_the_readmes_audition_of_a_stored_run_works_as_it_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"`python -m harness.audition (traces_from=results/[^`]*)`", readme)
    monkeypatch.chdir(ROOT)
    words = [*shlex.split(line), f"results_root={tmp_path}"]
    monkeypatch.setattr("sys.argv", ["harness/audition.py", *words])
    with pytest.raises(SystemExit) as end:
        audition.main()
    assert end.value.code == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"run: {tmp_path}")


def test_the_readmes_table_of_drafts_is_that_of_the_serving_lines() -> None:
    assert drafts_table.table() in (ROOT / "README.md").read_text(encoding="utf-8")


def test_keys_md_names_the_keys_that_help_prints() -> None:
    page = keys_page.PAGE.read_text(encoding="utf-8")
    assert keys_page.table() in page, "python tools/keys_page.py writes it anew"

"""What the documents name exists, and what they say to type works."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from runs import outcome_of

import modal_app
from harness.cli import as_hydra_takes, compose
from harness.config import SCHEMAS
from harness.models.load import EMBEDDED
from tools import drafts_table, keys_page

ROOT = Path(__file__).resolve().parents[1]
TEST = re.compile(r"`(test_\w+)?::(test_\w+)`")


def modal_lines() -> list[str]:
    """Every `modal ...` that the documents say to type, `::entrypoint ...` filled up."""
    lines: set[str] = set()
    documents = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "modal_app.py")]
    for file in (*documents, *(ROOT / "docs").glob("*.md")):
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".py":
            text = text.split('"""')[1]
        inline = re.findall(r"`(?:\.venv/bin/)?(modal [^`]+|::\w+ [^`]+)`", text)
        lines |= {*inline, *re.findall(r"^ *(modal [a-z]+ .+)$", text, re.MULTILINE)}
    full = (f"modal run modal_app.py{line}" if line.startswith("::") else line for line in lines)
    return sorted({" ".join(line.split()) for line in full})


class Planned(Exception):
    """The jobs of a launch are planned, and Modal would be asked for them."""


def test_every_modal_line_of_the_documents_gets_as_far_as_the_missing_account(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def started(jobs: Sequence[object]) -> None:
        assert jobs
        raise Planned

    monkeypatch.setattr(modal_app, "_started", started)
    called = set[str]()
    for line in modal_lines():
        words = [word for word in shlex.split(line)[1:] if word != "--detach"]
        if words[0] == "run" and len(words) > 1:
            name, options = words[1].removeprefix("modal_app.py::"), words[2:]
            names = (option.removeprefix("--") for option in options[::2])
            with pytest.raises(Planned):
                getattr(modal_app, name).info.raw_f(**dict(zip(names, options[1::2], strict=True)))
            called.add(name)
    assert {"smoke", "profile", "sweep", "snapshot", "audition", "server"} <= called


def test_every_row_of_reliability_md_names_tests_that_exist() -> None:
    faults, _, _ = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8").partition("\n## ")
    lines = faults.splitlines()
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


def commands_of(text: str) -> list[tuple[str, list[str]]]:
    """Every `python -m harness.COMMAND ...` that a document says to type, with its words."""
    lines = re.findall(r"python -m harness\.(\w+) +([^`\n]*=[^`\n]*)", text)
    return [(command, shlex.split(words, comments=True)) for command, words in lines]


@pytest.mark.parametrize("page", ["README.md", "docs/commands.md"])
def test_every_command_of_a_document_has_keys_that_exist_and_values_that_they_take(
    page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # where stored runs are named from
    asked = commands_of((ROOT / page).read_text(encoding="utf-8"))
    assert {command for command, _ in asked} == {*SCHEMAS}
    for command, words in asked:
        compose(command, words)


FIRST_SCREEN = 40  # lines


def test_the_first_screen_has_commands_for_an_own_target_draft_and_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    asked = commands_of("\n".join(lines[:FIRST_SCREEN]))
    assert [command for command, _ in asked] == ["sweep", "audition", "server"]
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "What is 2 + 2?"}\n' * 8, encoding="utf-8")
    own = {
        "ORG/TARGET": str(EMBEDDED / "tiny"),
        "ORG/DRAFT": str(EMBEDDED / "tiny_good"),
        "FOLDER": str(EMBEDDED / "tiny_small"),
        "mine.jsonl": str(prompts),
        "http://HOST": "http://127.0.0.1",
    }
    for command, words in asked:
        assert {"model=ORG/TARGET", "prompts.files=[mine.jsonl]"} < set(words)
        typed = " ".join(words)
        for placeholder, value in own.items():
            typed = typed.replace(placeholder, value)
        full = as_hydra_takes(command, [*shlex.split(typed), "dry_run=true"])
        assert outcome_of(command, *full).status == 0
    plans = capsys.readouterr().out
    assert all(name in plans for name in ("small", "mine", "ngram"))
    front = "\n".join(lines[:FIRST_SCREEN])
    assert "GPU figures are not measured yet" in front
    assert "one request at a time" in front


def test_the_readmes_table_of_drafts_is_that_of_the_serving_lines() -> None:
    assert drafts_table.table() in (ROOT / "README.md").read_text(encoding="utf-8")


def test_keys_md_names_the_keys_that_help_prints() -> None:
    page = keys_page.PAGE.read_text(encoding="utf-8")
    assert keys_page.table() in page, "python tools/keys_page.py writes it anew"

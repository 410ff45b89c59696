"""Whole reports of stored runs against tests/golden, and how every report is laid out.

`pytest tests/test_reports.py --renew-golden` (or `make golden`) writes the golden reports anew;
read the difference before committing it.
"""

import io
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console
from runs import EXAMPLES, FROZEN, analysed, ran

from harness import reporting
from harness.analysis import analyse
from harness.records import Failure, MachineLoad
from harness.reporting import markdown
from harness.reporting.console import MOST_LINES
from harness.reporting.content import content_of
from harness.reporting.pages import tables_of
from harness.reporting.tables.specification import Column, table
from harness.storage import load
from harness.summary import MadeWith, ModelFacts, Summary

HERE = Path(__file__).parent
# The report of every command, `report` itself (a comparison) last
RUNS = ("sweep", "audition", "profile", "breakeven", "snapshot", "server", "comparison")
any_run = pytest.mark.parametrize("name", RUNS)


@pytest.fixture(scope="module")
def summary_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Summary]:
    @cache
    def summary(name: str) -> Summary:
        if name != "comparison":
            return analysed(name)
        runs = f"runs=[{FROZEN / 'sweep'},{FROZEN / 'sweep_small'}]"
        made = ran("report", tmp_path_factory.mktemp("results"), runs).summary
        assert made is not None
        return replace(
            made,
            run=replace(
                made.run, folder="results/compared", created_utc=None, made_with=MadeWith()
            ),
        )

    return summary


@pytest.fixture(scope="module")
def rendered(
    tmp_path_factory: pytest.TempPathFactory, summary_of: Callable[[str], Summary]
) -> Callable[[str], Path]:
    @cache
    def folder(name: str) -> Path:
        made = tmp_path_factory.mktemp(name)
        reporting.render(summary_of(name), made)
        return made

    return folder


def printed(made: Summary, width: int = 100, *, verbose: bool = True) -> str:
    out = io.StringIO()
    reporting.show(made, Console(file=out, width=width), verbose=verbose)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def compared_with_golden(file: str, text: str, renew: bool) -> None:
    golden = HERE / "golden" / file
    text = re.sub(r" results_root=\S+", "", text.replace(str(HERE.parent), "."))
    if renew:
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


@any_run
def test_a_report_reads_as_the_golden_one(
    name: str, rendered: Callable[[str], Path], pytestconfig: pytest.Config
) -> None:
    text = (rendered(name) / "report.md").read_text(encoding="utf-8")
    compared_with_golden(f"{name}.md", text, bool(pytestconfig.getoption("renew_golden")))


@any_run
def test_the_console_prints_the_golden_text(
    name: str, summary_of: Callable[[str], Summary], pytestconfig: pytest.Config
) -> None:
    compared_with_golden(
        f"{name}.txt",
        printed(summary_of(name), 80, verbose=False),
        bool(pytestconfig.getoption("renew_golden")),
    )


def test_the_readme_shows_what_the_console_prints_first(pytestconfig: pytest.Config) -> None:
    """Of the example that `make sweep` makes: the answer and its grid."""
    page = HERE.parent / "README.md"
    text = page.read_text(encoding="utf-8")
    head, fence, rest = text.partition("```text\n")
    shown, end, tail = rest.partition("```\n")
    made = analysed("embedded_sweep")
    answer = "\n\n".join(printed(made, 80, verbose=False).split("\n\n")[:2]) + "\n"
    if pytestconfig.getoption("renew_golden"):
        page.write_text(f"{head}{fence}{answer}{end}{tail}", encoding="utf-8")
        shown = answer
    assert shown == answer


# Words and tables of a page for a run of usual size
LIMITS = {"server": (3000, 14)}


@pytest.mark.parametrize(
    "name", [*RUNS, *(folder.name for folder in sorted(EXAMPLES.iterdir()) if folder.is_dir())]
)
def test_a_page_keeps_to_its_limits(name: str, summary_of: Callable[[str], Summary]) -> None:
    """Of words as a code host counts them, the bars of tables included."""
    made = summary_of(name)
    content, (words, tables) = content_of(made), LIMITS.get(made.run.command, (2500, 12))
    assert len(markdown.report(content, (), HERE).split()) <= words
    assert len(content.tables) + (content.grid is not None) <= tables


@any_run
def test_every_picture_of_a_report_is_a_file_next_to_it(
    name: str, rendered: Callable[[str], Path]
) -> None:
    folder = rendered(name)
    linked = re.findall(r"!\[[^]]+\]\(([^)]+)\)", (folder / "report.md").read_text("utf-8"))
    assert sorted(linked) == sorted(
        file.relative_to(folder).as_posix() for file in (folder / "plots").glob("*.svg")
    )
    assert linked or name in ("breakeven", "snapshot")


def test_rendering_again_gives_the_same_bytes_and_leaves_other_files_alone(
    tmp_path: Path, rendered: Callable[[str], Path]
) -> None:
    again = tmp_path / "run"
    shutil.copytree(rendered("sweep"), again)
    (again / "plots" / "mine.svg").write_text("mine")
    (again / "plots" / "leaderboard.svg").write_text("of an earlier rendering")
    reporting.render(analysed("sweep"), again)
    before = {path.name: path.read_bytes() for path in rendered("sweep").rglob("*.*")}
    after = {path.name: path.read_bytes() for path in again.rglob("*.*")}
    assert after.pop("mine.svg") == b"mine"
    assert after == before


@any_run
@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("verbose", [False, True])
def test_no_line_is_wider_than_the_console(
    name: str, width: int, verbose: bool, summary_of: Callable[[str], Summary]
) -> None:
    content = content_of(summary_of(name))
    codes = (f"{entry.measure}\n{entry.code}\n{entry.measured}" for entry in content.snippets)
    step = content.next_step
    codes = [*codes, step.command] if step and step.command else [*codes]
    pasted = {line.rstrip() for code in codes for line in code.splitlines()}
    text = printed(summary_of(name), width, verbose=verbose)
    lines = [
        line for line in text.splitlines() if line not in pasted and content.folder not in line
    ]
    assert max(map(len, lines)) <= width


@any_run
def test_a_narrow_console_still_shows_every_column_complete(
    name: str, summary_of: Callable[[str], Summary]
) -> None:
    words = " ".join(printed(summary_of(name), 80).split())
    for entry in tables_of(summary_of(name)):
        for index, column in enumerate(entry.columns):
            texts = {" ".join(row.cells[index].text.split()) for row in entry.rows}
            assert column.flexible or all(text in words for text in texts)


@any_run
def test_the_console_has_the_answer_and_the_path_in_few_lines(
    name: str, summary_of: Callable[[str], Summary]
) -> None:
    made = summary_of(name)
    content, lines = content_of(made), printed(made, 80, verbose=False).splitlines()
    assert sum(max(1, -(-len(line) // 80)) for line in lines) <= MOST_LINES
    assert content.verdicts[0] in " ".join(" ".join(lines).split())
    assert lines[-1] == f"report: {content.page}"


# Numbers and words that are read; commands are copied, and the bars are a picture
MOST_WORDS, MOST_NUMBERS = 120, 25


def understood_in_one_reading(made: Summary, width: int) -> None:
    content = content_of(made)
    copied = {line for each in content.snippets for line in each.code.splitlines()}
    lines = [
        line
        for line in printed(made, width, verbose=False).splitlines()
        if not line.startswith(("python -m ", "report: ")) and line not in copied
    ]
    text = re.sub(r"python -m \S+ run=\S+ verbose=tables", "", "\n".join(lines))
    assert len(re.findall(r"\S*\w\S*", text)) <= MOST_WORDS
    assert len(re.findall(r"\d[\d.,]*", text)) <= MOST_NUMBERS


@pytest.mark.parametrize(
    "name",
    [
        *RUNS,
        "sweep_decided",
        *(folder.name for folder in sorted(EXAMPLES.iterdir()) if folder.is_dir()),
    ],
)
@pytest.mark.parametrize("width", [80, 100])
def test_the_first_screen_is_understood_in_one_reading(
    name: str, width: int, summary_of: Callable[[str], Summary]
) -> None:
    understood_in_one_reading(summary_of(name), width)


@pytest.mark.parametrize(
    ("name", "plain", "rounds"),
    [
        ("sweep", 2.0, 2.0),
        ("sweep_decided", 2.0, 2.0),
        ("sweep_replay", 2.0, 2.0),
        ("audition", 1.7, 5.0),
    ],
)
@pytest.mark.parametrize("width", [80, 100])
def test_so_is_that_of_a_run_on_a_busy_and_unsteady_machine(
    name: str, plain: float, rounds: float, width: int
) -> None:
    """Times of an audition's last draft, or of a sweep's only one, are so many times as long."""
    run = load(FROZEN / name)
    slow = run.rounds[-1].draft
    timed = [
        replace(each, seconds=(rounds if each.k else plain) * each.seconds)
        if each.draft == slow
        else each
        for each in run.rounds
    ]
    manifest = run.manifest.updated(other_load=MachineLoad(1.2, 2))
    made = analyse(replace(run, rounds=tuple(timed), manifest=manifest))
    codes = {each.code for each in made.caveats}
    assert {"busy_machine", "plain_tokens_unlike"} <= codes
    understood_in_one_reading(made, width)


def test_text_in_a_pipe_is_not_wrapped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    made = analysed("sweep")
    reporting.show(made)
    lines = capsys.readouterr().out.splitlines()
    assert {*content_of(made).verdicts[:2]} <= {*lines}


def test_png_files_are_written_where_they_are_asked_for(tmp_path: Path) -> None:
    reporting.render(analysed("sweep"), tmp_path, png=True)
    assert (tmp_path / "plots/speedup_vs_k.png").read_bytes().startswith(b"\x89PNG")


def test_what_markdown_would_act_on_is_escaped() -> None:
    columns: tuple[Column[str], ...] = (Column("error", lambda text: text),)
    assert r"a\|b \<c> \*d\*" in markdown.table(table("t", columns, ["a|b <c> *d*"]))
    assert markdown.fenced("```", "sh") == "````sh\n```\n````"


def test_an_unfinished_run_is_marked_above_everything() -> None:
    made = analysed("sweep")
    failures = tuple(
        Failure(f"easy/p{index} k=8", f"out of memory ({index})") for index in range(20)
    )
    run = replace(made.run, status="running", folder="results/x", failed_cells=1)
    text = printed(replace(made, run=run, failures=failures))
    status = text.index("UNFINISHED RUN: still running, or interrupted (resume=results/x continues")
    assert status < text.index("Use tiny_good")
    assert "Did not complete: easy/p0 k=8: out of memory" in text
    assert "and 12 more, all listed in summary.json" in text
    brief = printed(replace(made, run=run, failures=failures), verbose=False)
    assert brief.index("Did not complete: easy/p0 k=8") < brief.index("plain decoding")
    assert "report run=results/x verbose=tables" in brief
    logged = (Failure("K=4 at temperature 0", "the server ended:" + " a line of its log." * 40),)
    brief = printed(replace(made, run=run, failures=logged), verbose=False)
    assert "Did not complete: K=4 at temperature 0: the server ended" in brief
    assert 0 < brief.count("log.") < 10
    assert logged[0].error in " ".join(printed(replace(made, run=run, failures=logged)).split())


def test_a_run_with_random_weights_recommends_nothing() -> None:
    made = analysed("sweep")
    dummy = ModelFacts(role="draft", name="big_draft", weights="dummy")
    content = content_of(replace(made, run=replace(made.run, models=(dummy,))))
    assert content.answer == "none"
    assert "The weights of big_draft are random" in str(content.banner)
    assert content.verdicts[0].startswith("Not a recommendation (dummy weights): ")

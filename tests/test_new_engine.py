"""An engine is added by one module and one line, as CONTRIBUTING says, and nothing else."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import toy_engine
from runs import FROZEN, ran, without_plots
from served_pair import Served
from stand_in_server import StandIn

from harness.analysis import analyse
from harness.commands import report
from harness.config import ReportConfig
from harness.engine_facts.engines import ENGINES
from harness.records import UserError
from harness.reporting.serving_commands import snippets_of
from harness.storage import StoredRun, load

K = 2


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENGINES, "toy", toy_engine.SPEC)
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


def served(root: Path, limit: int) -> StoredRun:
    """A run of servers of the toy engine, one that decodes plainly and one that drafts."""
    pair = Served(root)
    servers = [
        StandIn(toy_engine.answers(pair.own().open(k), pair.loaded.tokenizer.decode))
        for k in (0, K)
    ]
    words = [
        *("engine=toy", f"url=[{','.join(server.url for server in servers)}]", f"k=[{K}]"),
        *("temperature=[0.0]", "repetitions=2", "new_tokens=24"),
    ]
    with without_plots():  # the report of one is drawn below
        made = ran("server", root, *words, f"prompts.limit={limit}")
    for server in servers:
        server.close()
    return made


@pytest.fixture(scope="module")
def run(root: Path) -> StoredRun:
    return served(root, 5)


def test_a_run_of_its_server_is_counted_replayed_and_decided(run: StoredRun) -> None:
    entry = run.manifest.engine
    assert entry is not None
    assert (entry.name, entry.version, entry.rule) == ("toy", "1.0", "greedy_draft")
    rows = run.results[(run.results.k == K) & (run.results.prompt_set == "easy")]
    rounds = dict(zip(rows.source, rows.rounds.astype(float), strict=True))
    assert rounds["measured"] == rounds["replayed"] > 0
    (snippet, *_) = snippets_of(analyse(run))
    assert snippet.title == f"For Toy at temperature 0 (Toy 1.0), K={K}: measured"
    assert snippet.code.endswith(f"--k {K}")
    assert "It is a toy." in snippet.notes


def test_its_report_names_it(run: StoredRun) -> None:
    assert report.run(ReportConfig(run=str(run.folder))).status == 0
    text = (run.folder / "report.md").read_text(encoding="utf-8")
    where = "with toy models on your server (Toy), one request at a time, temperature 0"
    assert "Use tiny_good with K=2" in text
    assert f"Timed {where}" in text
    assert f"--k {K}" in text


@pytest.mark.usefixtures("run")
def test_the_index_lists_its_runs(root: Path) -> None:
    assert report.run(ReportConfig(index=str(root))).status == 0
    assert "Toy" in (root / "index.html").read_text(encoding="utf-8")


def test_every_other_report_has_its_row_and_line_by_its_rule() -> None:
    summary = analyse(load(FROZEN / "sweep"))
    (answer, *_) = [answer for answer in summary.answers if answer.engine == "toy"]
    assert (answer.decision, answer.rule) == ("not_measured", "greedy_draft")
    (line,) = [line for line in snippets_of(summary) if line.title.startswith("Toy 1.0")]
    assert line.code.startswith("toy serve")


def test_what_it_cannot_do_is_refused_in_one_line(root: Path) -> None:
    url = "url=[http://127.0.0.1:9,http://127.0.0.1:9]"
    for words, says in (
        (("decode.rule=ratio", url), "decode.rule=ratio: engine=toy accepts by greedy_draft"),
        (("draft=ngram", url), "engine=toy does not draft with an n-gram look-up here"),
        ((), r"engine=toy: its servers are not started here; give url=\[...\]"),
    ):
        with pytest.raises(UserError, match=says):
            ran("server", root, "engine=toy", f"k=[{K}]", *words)

"""A kind of draft is added by one module and one line: two toys go through every command."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import toy_drafts
from runs import assert_replay_is_exact, assert_texts_are_unchanged, outcome_of, ran
from test_index import indexed, rows
from test_serving import of_kind

from harness.analysis import analyse
from harness.engine_facts.draft_kinds import DRAFTS
from harness.records import UserError
from harness.storage import StoredRun

TOYS = ("recent", "guess")
WORDS = ["new_tokens=12", "threads=1", "prompts.limit=2", "temperature=[0]"]

pytestmark = pytest.mark.usefixtures("few_samples", "registered")


@pytest.fixture(scope="module")
def registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # The line that adds each
        patch.setitem(DRAFTS, "recent", toy_drafts.LOOKUP)
        patch.setitem(DRAFTS, "guess", toy_drafts.HEAD)
        yield


def of_toy(kind: str) -> list[str]:
    return ["draft=hf", f"draft.kind={kind}", f"draft.id={kind}"]


def report_of(run: StoredRun) -> str:
    return (run.folder / "report.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def sweeps(registered: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, StoredRun]:
    del registered
    root = tmp_path_factory.mktemp("results")
    words = (*WORDS, "k=[1,4]", "until=all")
    return {kind: ran("sweep", root, *words, *of_toy(kind)) for kind in TOYS}


@pytest.mark.parametrize("kind", TOYS)
def test_a_new_kind_is_swept_and_its_rounds_are_those_replayed(
    kind: str, sweeps: dict[str, StoredRun]
) -> None:
    run = sweeps[kind]
    assert_replay_is_exact(run, accepted=kind == "recent")
    assert {(row.draft, row.k) for row in analyse(run).results if row.k} == {(kind, 1), (kind, 4)}
    assert f"with {kind}" in report_of(run)
    drafted = {
        trial.k: (trial.drafted or 0) / (trial.rounds or 1) for trial in run.trials if trial.k
    }
    assert drafted[4] <= (toy_drafts.GUESSES if kind == "guess" else 4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", TOYS)
def test_a_new_kind_leaves_greedy_texts_and_distributions_unchanged(
    kind: str, tmp_path: Path
) -> None:
    assert_texts_are_unchanged(
        ran("snapshot", tmp_path, *WORDS, "temperature=[0,1]", "k=[2]", "prompts.limit=1",
            *of_toy(kind))
    )  # fmt: skip


@pytest.mark.exhaustive
def test_a_new_kind_is_auditioned_next_to_the_others(tmp_path: Path) -> None:
    entries = ",".join(f"{kind}@{kind}" for kind in TOYS)
    run = ran("audition", tmp_path, *WORDS, "k=[1,4]", f"drafts=[tiny_good,{entries}]")
    summary = analyse(run)
    assert {row.draft for row in summary.leaderboards[0].rows} >= {"tiny_good", *TOYS}
    assert {model.kind for model in summary.run.models} == {"model", "guess"}
    assert "guess" in report_of(run)
    with pytest.raises(UserError, match=r"use one of model, eagle3, .*, recent, guess$"):
        outcome_of("audition", "drafts=[a@b@kind:nonsense]")


def test_runs_of_new_kinds_are_listed_and_compared(
    sweeps: dict[str, StoredRun], tmp_path: Path
) -> None:
    folders = [str(run.folder) for run in sweeps.values()]
    listed = rows(indexed(sweeps["recent"].folder.parent))
    assert {row["draft"] for row in listed} == {*TOYS}
    compared = ran("report", tmp_path, f"runs=[{','.join(folders)}]")
    assert all(kind in report_of(compared) for kind in TOYS)


@pytest.mark.parametrize("kind", TOYS)
def test_no_engine_is_said_to_have_a_new_kind(kind: str) -> None:
    lines = [snippet for snippet in of_kind(kind).values() if not snippet.code]
    notes = {snippet.notes[0] for snippet in lines}
    assert notes == {f"Not available here: no {DRAFTS[kind].noun}."}


def test_the_loader_of_every_kind_is_there() -> None:
    for spec in DRAFTS.values():
        assert not spec.loader or callable(spec.load)
        assert not spec.shape or callable(spec.read_shape)
        assert (spec.looks_up and spec.replayed) <= bool(spec.loader)

"""A sweep holds its greedy texts against plain decoding, and trusts no pair that changes them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import random_model, save
from transformers import Phi3Config, PreTrainedModel

from harness import audition, report
from harness.analysis import analyse
from harness.cli import compose
from harness.commands import snapshot, sweep
from harness.commands.run import Outcome
from harness.models.lean.model import LeanModel
from harness.records import CopyBandwidth, UserError
from harness.reporting.content import content_of
from harness.storage import StoredRun, load

ORIGINAL = 32


@pytest.fixture(scope="module", autouse=True)
def few_samples() -> Any:
    """Step times are not what these tests are about."""
    patch = pytest.MonkeyPatch()
    patch.setattr("harness.measurement.step_times.REPETITIONS", 3)
    patch.setattr(
        "harness.commands.step_times.copy_bandwidth", lambda *_: CopyBandwidth(10.0, 1, 1)
    )
    yield
    patch.undo()


def phi3(seed: int) -> PreTrainedModel:
    """Rotary angles that change for every position once the text is longer than `ORIGINAL`."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rotary: Any = {"type": "longrope", "rope_theta": 10000.0, **factors}
    config = Phi3Config(
        vocab_size=1024,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=rotary,
        initializer_range=0.3,
        pad_token_id=0,
    )
    return random_model(config, seed)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("phi3")
    return save(phi3(0), root / "target"), save(phi3(1), root / "draft")


def asked(root: Path, folders: tuple[Path, Path], *more: str) -> list[str]:
    target, draft = folders
    return [
        f"results_root={root}",
        "model=hf",
        f"model.id={target}",
        "draft=hf",
        f"draft.id={draft}",
        "k=[4]",
        "temperature=[0]",
        "new_tokens=40",
        "prompts.limit=2",
        "threads=1",
        *more,
    ]


def stored(outcome: Outcome) -> StoredRun:
    assert outcome.folder is not None
    return load(outcome.folder)


def summary(run: StoredRun) -> dict[str, Any]:
    assert run.summary is not None
    return run.summary


@pytest.fixture(scope="module")
def crossing(tmp_path_factory: pytest.TempPathFactory, folders: tuple[Path, Path]) -> Outcome:
    root = tmp_path_factory.mktemp("results")
    return sweep.run(compose("sweep", asked(root, folders, "temperature=[0,1]")))


def test_a_sweep_whose_texts_are_not_plain_decodings_exits_with_1_and_has_no_verdict(
    crossing: Outcome,
) -> None:
    run = stored(crossing)
    assert crossing.status == 1
    assert run.manifest["status"] == "failed"
    texts = summary(run)["greedy_texts"]
    assert texts["FAIL"] >= 1
    assert texts["PASS"] + texts["TIE"] + texts["FAIL"] == 4
    verdicts = [summary(run)["verdict"], *summary(run)["per_temperature"]]
    verdicts += summary(run)["per_prompt_set"]
    for verdict in verdicts:
        assert (verdict["decision"], verdict["speedup"], verdict["k"]) == ("undecided", None, 0)
        assert f"{texts['FAIL']} of 4 greedy texts are not plain decoding's" in verdict["reason"]
    assert "best_cell_speedup" not in summary(run)["headline"]


def test_each_such_generation_counts_as_failed_and_is_named(crossing: Outcome) -> None:
    run = stored(crossing)
    failures = summary(run)["failures"]
    assert len(failures) == summary(run)["greedy_texts"]["FAIL"]
    for failure in failures:
        assert "k=4 temperature=0" in failure["where"]
        assert "text differs from plain decoding's from position" in failure["error"]
    greedy = run.results[(run.results.temperature == 0) & (run.results.k == 4)]
    assert not (greedy[greedy.source == "measured"].status == "complete").all()


def test_the_report_says_so_first_and_again_when_it_is_rendered_without_models(
    crossing: Outcome, tmp_path: Path
) -> None:
    assert crossing.folder is not None
    copy = tmp_path / crossing.folder.name
    shutil.copytree(crossing.folder, copy)
    before = content_of(analyse(stored(crossing)))
    assert "greedy texts are not plain decoding's" in before.verdicts[0]
    assert before.caveats[0].startswith("Greedy texts against plain decoding: ")
    assert any("greedy texts" in label for label, _ in before.measured)
    report.work(compose("report", [f"run={copy}"]))
    again = content_of(analyse(load(copy)))
    assert (again.verdicts, again.failures) == (before.verdicts, before.failures)


def test_a_run_that_stopped_before_anyone_could_judge_is_not_trusted_either(
    crossing: Outcome, tmp_path: Path
) -> None:
    assert crossing.folder is not None
    copy = tmp_path / crossing.folder.name
    shutil.copytree(crossing.folder, copy)
    for name in ("summary.json", "checks.jsonl", "checksums.json"):
        (copy / name).unlink(missing_ok=True)
    verdict = analyse(load(copy)).verdict
    assert verdict is not None
    assert (verdict.decision, verdict.reason) == ("undecided", "greedy_texts_unjudged")


@pytest.mark.exhaustive
def test_the_snapshot_of_that_pair_agrees(folders: tuple[Path, Path], tmp_path: Path) -> None:
    outcome = snapshot.run(compose("snapshot", asked(tmp_path, folders)))
    assert outcome.status == 1
    assert summary(stored(outcome))["headline"]["FAIL"] >= 1


def test_texts_that_are_equal_are_counted_and_leave_the_verdict_alone(tmp_path: Path) -> None:
    grid = [f"results_root={tmp_path}", "k=[4]", "temperature=[0]", "new_tokens=8", "threads=1"]
    outcome = sweep.run(compose("sweep", [*grid, "prompts.limit=4"]))
    run = stored(outcome)
    assert outcome.status == 0
    texts = summary(run)["greedy_texts"]
    assert texts == {"PASS": 8, "TIE": 0, "FAIL": 0, "OPEN": 0, "differences": []}
    assert summary(run)["verdict"]["speedup"] is not None
    measured = dict(content_of(analyse(run)).measured)
    assert measured["greedy texts against plain decoding"].startswith("8 equal")


def test_a_tie_is_told_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verify that rounds by more than two tokens differ, as 16 bits do."""
    forward = LeanModel.forward

    def rounding(self: LeanModel, tokens: torch.Tensor) -> torch.Tensor:
        logits = forward(self, tokens).clone()
        top = logits.topk(2).indices
        rows = torch.arange(len(logits))
        logits[rows, top[:, 1]] = logits[rows, top[:, 0]] - 1e-5
        if len(tokens) > 1:
            logits[rows, top[:, 1]] += 2e-5
        return logits

    grid = [f"results_root={tmp_path}", "k=[4]", "temperature=[0]", "new_tokens=8", "threads=1"]
    config = compose("sweep", [*grid, "prompts.limit=4", "draft=tiny_unrelated"])
    monkeypatch.setattr("harness.models.probe.forward_error", lambda _: 0.0)
    monkeypatch.setattr("harness.models.probe.rewind_error", lambda _: 0.0)
    monkeypatch.setattr(LeanModel, "forward", rounding)
    outcome = sweep.run(config)
    texts = summary(stored(outcome))["greedy_texts"]
    assert outcome.status == 0
    assert texts["TIE"] > 0
    assert texts["FAIL"] == 0
    assert summary(stored(outcome))["verdict"]["speedup"] is not None


def test_nothing_of_such_a_run_is_used_elsewhere(
    crossing: Outcome, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    assert crossing.folder is not None
    copy = tmp_path / "copy"
    shutil.copytree(crossing.folder, copy)
    compared = [f"runs=[{crossing.folder},{copy}]", f"results_root={tmp_path}"]
    says = "greedy texts are not plain decoding's"
    with pytest.raises(UserError, match=says):
        report.work(compose("report", [*compared, "fail_below=0.5"]))
    outcome = report.work(compose("report", compared))
    assert outcome.folder is not None
    shown = analyse(load(outcome.folder))
    assert shown.comparison is not None
    assert says in " ".join(content_of(shown).caveats)
    assert all(row.speedup_ratio is None for row in shown.comparison.rows)

    target, draft = folders
    ranked = [
        f"traces_from={copy}",
        f"results_root={tmp_path}",
        "model=hf",
        f"model.id={target}",
        f"drafts=[draft@{draft}]",
        "prompts.limit=2",
        "k=[4]",
        "latency.target_ms=10",
        "latency.draft_ms=1",
    ]
    with pytest.raises(UserError, match=says):
        audition.work(compose("audition", ranked))
    imposed = asked(tmp_path, folders, f"decode.acceptance_from={copy}")
    with pytest.raises(UserError, match=says):
        sweep.run(compose("sweep", imposed))


@pytest.mark.parametrize(
    "more", [("mode=replay",), ("temperature=[1]",)], ids=["replay", "sampled only"]
)
def test_where_no_greedy_texts_are_compared_the_lengths_of_the_run_are_tried_first(
    more: tuple[str, ...], tmp_path: Path, folders: tuple[Path, Path]
) -> None:
    with pytest.raises(UserError, match=r"^model=.*: in a text of .* its cached logits differ"):
        sweep.run(compose("sweep", asked(tmp_path, folders, *more)))


def test_an_audition_tries_them_too(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    target, _ = folders
    words = [f"results_root={tmp_path}", "model=hf", f"model.id={target}", "threads=1"]
    small = ["new_tokens=40", "k=[4]", "prompts.limit=1", "temperature=[0]", "drafts=[ngram]"]
    config = compose("audition", [*words, *small])
    with pytest.raises(UserError, match=r"^model=.*: in a text of .* its cached logits differ"):
        audition.work(config)

"""A sweep compares its greedy texts with plain decoding's; a pair that changes them has no verdict.

The pair is one whose cache gives other logits than its forward in a text beyond 32 tokens.
"""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import random_model, save
from runs import outcome_of, ran, stored
from transformers import Phi3Config, PreTrainedModel

from harness.analysis import analyse
from harness.models.lean.model import LeanModel
from harness.records import UserError
from harness.reporting.content import content_of
from harness.storage import StoredRun
from harness.summary import Summary

pytestmark = pytest.mark.usefixtures("few_samples")
SMALL = ["k=[4]", "temperature=[0]", "new_tokens=8", "threads=1", "prompts.limit=4"]


def phi3(seed: int) -> PreTrainedModel:
    """Rotary angles that change for every position once the text is longer than 32 tokens."""
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
        original_max_position_embeddings=32,
        rope_parameters=rotary,
        initializer_range=0.3,
        pad_token_id=0,
    )
    return random_model(config, seed)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("phi3")
    target, draft = (save(phi3(seed), root / str(seed)) for seed in (0, 1))
    return ["model=hf", f"model.id={target}", "draft=hf", f"draft.id={draft}"]


def asked(root: Path, models: list[str], *more: str) -> list[str]:
    return [f"results_root={root}", *models, *SMALL, "new_tokens=40", "prompts.limit=2", *more]


def results(summary: Summary) -> Counter[str]:
    return Counter(check.result for check in summary.text_checks)


@pytest.fixture(scope="module")
def crossing(tmp_path_factory: pytest.TempPathFactory, models: list[str]) -> StoredRun:
    root = tmp_path_factory.mktemp("results")
    return ran("sweep", *asked(root, models, "until=all"), status=1)


def test_such_a_pair_has_no_verdict_and_each_such_generation_has_failed(
    crossing: StoredRun,
) -> None:
    assert crossing.manifest.status == "failed"
    summary = analyse(crossing)
    counts = results(summary)
    assert counts["FAIL"] >= 1
    assert counts.total() == 4
    for verdict in (summary.headline, *summary.per_temperature, *summary.per_prompt_set):
        assert verdict is not None
        assert (verdict.decision, verdict.speedup, verdict.k) == ("undecided", None, 0)
        assert verdict.reason == "greedy_texts_differ"
        assert verdict.reason_values["differing"] == counts["FAIL"]
    assert len(summary.failures) == counts["FAIL"]
    for failure in summary.failures:
        assert "k=4 temperature=0" in failure.where
        assert "text differs from plain decoding's from position" in failure.error
    content = content_of(summary)
    assert "greedy texts are not plain decoding's" in content.verdicts[0]
    assert " of 4 greedy texts equal plain decoding's, 0 ties, " in content.caveats[0]


def test_a_run_that_stopped_before_anyone_could_judge_is_not_trusted_either(
    crossing: StoredRun, tmp_path: Path
) -> None:
    copy = tmp_path / crossing.folder.name
    shutil.copytree(crossing.folder, copy)
    for name in ("summary.json", "checks.jsonl"):
        (copy / name).unlink()
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "status": "running"}))
    summary = ran("report", f"run={copy}").summary
    assert summary is not None
    assert summary.headline is not None
    assert (summary.headline.decision, summary.headline.reason) == (
        "undecided",
        "greedy_texts_unjudged",
    )


@pytest.mark.exhaustive
def test_the_snapshot_of_that_pair_agrees(models: list[str], tmp_path: Path) -> None:
    run = ran("snapshot", *asked(tmp_path, models), status=1)
    assert results(analyse(run))["FAIL"] >= 1


@pytest.mark.parametrize("tie", [False, True], ids=["equal", "a tie"])
def test_equal_texts_and_ties_leave_the_verdict_alone(
    tie: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tie: a verify that rounds by more than two tokens differ, as 16 bits do."""
    forward = LeanModel.forward

    def rounding(self: LeanModel, tokens: torch.Tensor) -> torch.Tensor:
        logits = forward(self, tokens).clone()
        top = logits.topk(2).indices
        rows = torch.arange(len(logits))
        logits[rows, top[:, 1]] = logits[rows, top[:, 0]] - 1e-5
        if len(tokens) > 1:
            logits[rows, top[:, 1]] += 2e-5
        return logits

    if tie:
        monkeypatch.setattr("harness.models.probe.forward_error", lambda *_: 0.0)
        monkeypatch.setattr("harness.models.probe.rewind_error", lambda *_: 0.0)
        monkeypatch.setattr(LeanModel, "forward", rounding)
    summary = analyse(ran("sweep", tmp_path, *SMALL, "draft=tiny_unrelated", "until=all"))
    counts = results(summary)
    assert (counts["TIE"] > 0) == tie
    assert counts["PASS"] + counts["TIE"] == 8
    assert summary.headline is not None
    assert summary.headline.speedup is not None


def test_nothing_of_such_a_run_is_used_elsewhere(
    crossing: StoredRun, models: list[str], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(crossing.folder, copy)
    compared = [f"runs=[{crossing.folder},{copy}]", f"results_root={tmp_path}"]
    with pytest.raises(UserError, match="no speedup of copy can be compared"):
        outcome_of("report", *compared, "fail_below=0.5")
    comparison = analyse(stored(outcome_of("report", *compared))).comparison
    assert comparison is not None
    assert "speedups_not_compared" in {caveat.code for caveat in comparison.caveats}
    assert {row.speedup_ratio for row in comparison.rows} == {None}

    draft = models[3].removeprefix("draft.id=")
    latency = ["latency.target_ms=10", "latency.draft_ms=1"]
    grid = ["prompts.limit=2", "k=[4]", *latency]
    ranked = [*models[:2], f"traces_from={copy}", f"drafts=[draft@{draft}]", *grid]
    with pytest.raises(UserError, match="greedy texts are not plain decoding's"):
        outcome_of("audition", tmp_path, *ranked)


@pytest.mark.parametrize("more", ["mode=replay", "temperature=[1]", "audition"])
def test_where_no_greedy_texts_are_compared_the_lengths_of_the_run_are_tried_first(
    more: str, tmp_path: Path, models: list[str]
) -> None:
    command, words = "sweep", asked(tmp_path, models, more)
    if more == "audition":
        command, words = more, asked(tmp_path, models[:2], "drafts=[ngram]")
    with pytest.raises(UserError, match=r"^model=.*: in a text of .* its cached logits differ"):
        outcome_of(command, *words)

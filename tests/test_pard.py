"""PARD drafts: rows of many starts against the model itself, the loop and replay, what is read."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checks_of_heads import (
    STORED,
    VOCABULARY,
    HeadContract,
    assert_read_as_stored_otherwise,
    random_target,
)
from random_models import qwen3
from runs import assert_replay_is_exact, ran
from served_pair import embedded

from harness.config import DraftConf
from harness.models.heads.pard import PardHead, PardNetwork, load_pard, runs_from_every_start
from harness.models.load import EMBEDDED, LoadedModel
from harness.records import UserError

MASK = 14


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return random_target()


@pytest.fixture(scope="module", params=[None, 5])
def head(request: pytest.FixtureRequest, target: LoadedModel) -> PardHead:
    """The target's own weights: a first draft at temperature 0 is always accepted."""
    network = qwen3(1, layers=7, vocab=VOCABULARY)
    width = target.network.config.hidden_size
    return PardNetwork(network, MASK, request.param, width).with_cache(VOCABULARY)


def test_rows_from_every_start_are_those_of_the_text_and_its_masks(head: PardHead) -> None:
    network = head.network
    tokens = torch.tensor([[5, 9, 3, 2, 7, 5, 9, 1, 4]])
    states = torch.zeros(1, tokens.shape[1] - 1, network.width)
    for first in (0, 3):
        passes = network.passes(tokens, states, 6, first)
        assert len(passes) == min(network.drafts or 6, 8 - first)
        for offset, rows in enumerate(passes):
            assert rows.shape[1] == states.shape[1] - first - offset
            for at in range(rows.shape[1]):
                fed = [*tokens[0, : first + at + 2].tolist(), *[MASK] * offset]
                causal: Any = network.network
                expected = causal(input_ids=torch.tensor([fed])).logits[0, -1]
                torch.testing.assert_close(
                    network.logits(rows[0, at], VOCABULARY, offset), expected, atol=1e-4, rtol=1e-4
                )


class TestPard(HeadContract):
    ks, rules, depth = (1, 7), ("ratio", "exact_match"), 7


# ---- a checkpoint --------------------------------------------------------------------------------


def checkpoint(folder: Path, **entries: object) -> Path:
    """The embedded draft with a mask token in its config.json."""
    shutil.copytree(EMBEDDED / "tiny_good", folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pard_token": 7, **entries}))
    return folder


@pytest.mark.usefixtures("few_samples")
def test_a_checkpoint_is_swept_and_its_rounds_are_those_replayed(tmp_path: Path) -> None:
    words = ["draft=pard", f"draft.id={checkpoint(tmp_path / 'pard')}", "k=[1,4]", "until=all"]
    run = ran(
        "sweep", tmp_path / "runs", *words, "new_tokens=12", "threads=1", "prompts.limit=2",
        "temperature=[0]",
    )  # fmt: skip
    assert_replay_is_exact(run)
    facts = run.manifest.models["draft"]
    assert facts.architecture == "PARD"
    at_4 = [trial for trial in run.trials if trial.k == 4]
    assert all(trial.drafted == 4 * (trial.rounds or 0) for trial in at_4)


def test_a_draft_in_shards_or_in_a_file_of_another_name_is_read(tmp_path: Path) -> None:
    """As transformers reads them, so shards need an index."""
    folder = checkpoint(tmp_path / "pard")
    assert_read_as_stored_otherwise(folder, "pard", embedded("tiny"), tmp_path, STORED[:3])


def test_a_pard_2_draft_is_said_to_be_run_without_the_targets_states(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "pard", spd_type="pard2", pard2_target_layers=[3])
    conf = DraftConf(name="pard", kind="pard", id=str(folder))
    head = load_pard(conf, embedded("tiny"))
    assert head.describe()["architecture"] == "PARD-2, target-independent"


def test_drafts_of_sliding_windows_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    network = PardNetwork(qwen3(1, layers=2, vocab=VOCABULARY), MASK, None, 8)
    config: Any = network.network.config
    assert runs_from_every_start(network)
    monkeypatch.setattr(config, "layer_types", ["full_attention", "sliding_attention"])
    assert not runs_from_every_start(network)
    monkeypatch.setattr(config, "layer_types", None)
    monkeypatch.setattr(config, "sliding_window", 4)
    assert not runs_from_every_start(network)


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"pard_token": None}, "not a PARD draft in a layout that is known: .* no pard_token"),
        ({"pard_token": 10**6}, "its pard_token is 1000000, and it has"),
    ],
)
def test_a_draft_that_is_not_understood_is_refused(
    tmp_path: Path, entries: dict[str, Any], says: str
) -> None:
    folder = checkpoint(tmp_path / "pard", **entries)
    conf = DraftConf(name="pard", kind="pard", id=str(folder))
    with pytest.raises(UserError, match=says):
        load_pard(conf, embedded("tiny"))


def test_a_draft_of_other_tokens_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "pard")
    conf = DraftConf(name="pard", kind="pard", id=str(folder))
    target = embedded("tiny")
    target.tokenizer.add_tokens(["another"])
    with pytest.raises(UserError, match="another tokenizer than model=tiny"):
        load_pard(conf, target)

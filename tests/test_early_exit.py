"""The target's own first layers as the draft, and copies of the target in another dtype."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from runs import assert_replay_is_exact, ran

from harness.analysis import analyse
from harness.cli import draft_conf
from harness.config import DraftConf, ModelConf, like_target
from harness.models.load import LoadedModel, early_exit, load
from harness.models.probe import cached_model
from harness.records import UserError
from harness.storage import StoredRun


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    conf = ModelConf(name="tiny", id="embedded:tiny", dtype="float32")
    return load(conf, torch.device("cpu"))


def test_an_early_exit_is_the_networks_first_layers_and_shares_their_weights(
    tiny: LoadedModel,
) -> None:
    ids, network = torch.tensor([[5, 6, 7, 8]]), cast("Any", tiny.network)
    with torch.inference_mode():
        states = network(input_ids=ids, output_hidden_states=True).hidden_states[2]
        expected = network.get_output_embeddings()(network.base_model.norm(states))
    exit_at_2 = early_exit(DraftConf(name="exit"), tiny)
    model = cached_model(exit_at_2.network, tiny.vocab_size, "draft=exit")
    with torch.inference_mode():
        torch.testing.assert_close(exit_at_2.network(input_ids=ids).logits, expected)
        model.prefill([5, 6])
        torch.testing.assert_close(model.forward(torch.tensor([7, 8])), expected[0, 2:])
        assert tiny.network(input_ids=ids).logits.shape == expected.shape
    target_weights = {weight.data_ptr() for weight in tiny.network.parameters()}
    assert {weight.data_ptr() for weight in exit_at_2.network.parameters()} < target_weights
    assert exit_at_2.describe()["weights_bytes"] == 0
    assert (len(network.base_model.layers), network.config.num_hidden_layers) == (8, 8)
    with pytest.raises(UserError, match="layers=8, and model=tiny has 8; give fewer"):
        early_exit(DraftConf(name="exit", layers=8), tiny)


GRID = ["temperature=[0]", "new_tokens=12", "threads=1", "prompts.limit=2"]
TIMES = ["latency.target_ms=10", "latency.draft_ms=2"]


@pytest.mark.usefixtures("few_samples")
def test_replayed_rounds_of_an_early_exit_are_the_loops(tmp_path: Path) -> None:
    words = [f"results_root={tmp_path}", "draft=early_exit", "draft.layers=4", "k=[1,3]"]
    assert_replay_is_exact(ran("sweep", *words, *GRID, "prompts.limit=3", "until=all"))


def alphas(run: StoredRun) -> dict[str | None, float]:
    """Of every draft on the first leaderboard; plain decoding, which has none, as 0."""
    return {row.draft: row.alpha or 0.0 for row in analyse(run).leaderboards[0].rows}


@pytest.mark.exhaustive
def test_an_audition_ranks_an_early_exit_and_a_copy(tmp_path: Path) -> None:
    drafts = "drafts=[early_exit@layers:4,half@early_exit,bf16,ngram]"
    run = ran("audition", tmp_path, drafts, "k=[1,2]", *GRID, *TIMES)
    assert set(alphas(run)) == {"early_exit", "half", "bf16", "ngram", None}
    assert alphas(run)["bf16"] > 0.9


@pytest.mark.parametrize(("quantization", "least"), [("int8", 0.95), ("int4", 0.5)])
def test_a_quantized_copy_is_auditioned_where_torchao_is_installed(
    quantization: str, least: float, tmp_path: Path
) -> None:
    pytest.importorskip("torchao")
    run = ran("audition", tmp_path, f"drafts=[{quantization}]", "k=[2]", *GRID, *TIMES)
    target, copied = run.manifest.models["target"], run.manifest.models[quantization]
    # The embedding stays, a byte a weight and the scales are left of the rest
    assert (copied.weights_bytes or 0) < 0.45 * (target.weights_bytes or 0)
    assert copied.weights_sample_sha256 != target.weights_sample_sha256
    assert alphas(run)[quantization] > least


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("int4", {"kind": "copy", "quantization": "int4"}),
        ("four@int4", {"kind": "copy", "quantization": "int4"}),
        ("four@int8@quantization:int4", {"kind": "copy", "quantization": "int4"}),
        ("four@copy@quantization:int4", {"kind": "copy", "quantization": "int4"}),
        ("half@early_exit@layers:2", {"kind": "early_exit", "layers": 2}),
        ("small@qwen3_0_6b@dtype:float32", {"id": "Qwen/Qwen3-0.6B", "dtype": "float32"}),
    ],
)
def test_an_entry_of_drafts_may_be_one_of_the_group_under_another_name(
    entry: str, expected: dict[str, object]
) -> None:
    conf = draft_conf(entry)
    assert conf.name == entry.partition("@")[0]
    assert {name: getattr(conf, name) for name in expected} == expected


def test_a_copy_that_is_the_target_is_refused() -> None:
    target = ModelConf(name="t", id="org/t", dtype="bfloat16")
    with pytest.raises(UserError, match="a copy of the target must differ"):
        like_target(target, draft_conf("bf16"))
    assert like_target(target, draft_conf("int8")).quantization == "int8"
    with pytest.raises(
        UserError, match=r"drafts=\[int8@org/other\]: drafts=\[int8\] is a copy of the target"
    ):
        like_target(target, replace(draft_conf("int8"), id="org/other"))

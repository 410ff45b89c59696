"""MTP layers: read in both layouts, lossless in the loop, and scored as the loop runs them."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks_of_heads import (
    asked,
    assert_replay_counts_the_loops_rounds,
    gap_in_standard_errors,
    gaps,
)
from random_models import SMALL, TOKENIZER_FILES, random_model
from runs import assert_replay_is_exact, ran
from safetensors.torch import load_file, save_file
from stubs import CPU, GREEDY
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from harness.cli import compose, draft_conf
from harness.commands.eligible_drafts import pairings
from harness.config import DraftConf, ModelConf
from harness.decoding.drafters import HeadDrafter
from harness.models.cached import CachedModel
from harness.models.heads.base import Head
from harness.models.heads.mtp import MODEL_TYPES, load_mtp
from harness.models.load import EMBEDDED, LoadedModel, load
from harness.models.probe import cached_model
from harness.records import UserError

LAYERS = 2
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "partial_rotary_factor": 0.5,
}
ROUTED: dict[str, Any] = {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
LATENT: dict[str, Any] = {
    **ROUTED,
    "num_key_value_heads": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "partial_rotary_factor": 1.0,
}
RECURRENT: dict[str, Any] = {
    **EXPERTS,
    "num_experts": 4,
    "shared_expert_intermediate_size": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
}
# By model type: the config class, its sizes, and whether the layout is mtp.*
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any], bool]] = {
    "deepseek_v3": (DeepseekV3Config, {**LATENT, "first_k_dense_replace": 1}, False),
    "glm4_moe": (Glm4MoeConfig, {**ROUTED, "first_k_dense_replace": 1}, False),
    "glm4_moe_lite": (Glm4MoeLiteConfig, LATENT, False),
    "qwen3_next": (Qwen3NextConfig, RECURRENT, True),
    "qwen3_5_text": (Qwen3_5TextConfig, RECURRENT, True),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, RECURRENT, True),
}
# One per layout and per way to rewind
BOTH = ("glm4_moe", "qwen3_5_text")


@dataclass(frozen=True)
class Checkpoint:
    """A random target on disk with its MTP layer.

    Attributes:
        deeper: the network whose last layer became the MTP layer.
        beside: the layer's other weights, by GLM's names.
    """

    folder: Path
    deeper: Any
    beside: dict[str, Tensor]


def saved(model_type: str, folder: Path, vocab: int = 16) -> Checkpoint:
    """Save a target of two layers as its makers publish it, with a third layer as its MTP layer."""
    kind, sizes, own_prefix = FAMILIES[model_type]
    sizes = {**SMALL, "vocab_size": vocab, "num_hidden_layers": LAYERS + 1, **sizes}
    sizes |= {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 15}
    deeper = random_model(kind(**sizes), 3)
    hidden = deeper.config.hidden_size
    beside = {"eh_proj.weight": torch.randn(hidden, 2 * hidden) * 0.2}
    for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight"):
        beside[name] = 1 + torch.randn(hidden) * 0.25
    deeper.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    last = f"model.layers.{LAYERS}."
    if own_prefix:
        tensors = {name.replace(last, "mtp.layers.0."): each for name, each in tensors.items()}
        names = {
            "eh_proj.weight": "mtp.fc.weight",
            "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
            "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
            "shared_head.norm.weight": "mtp.norm.weight",
        }
        tensors |= {names[name]: each for name, each in beside.items()}
    else:
        tensors |= {last + name: each for name, each in beside.items()}
        tensors[last + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[last + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, lambda config: as_published(config, own_prefix=own_prefix))
    for name in TOKENIZER_FILES:
        shutil.copy(EMBEDDED / "tiny" / name, folder / name)
    return Checkpoint(folder, deeper, beside)


def as_published(config: dict[str, Any], *, own_prefix: bool) -> None:
    config["num_hidden_layers"] = LAYERS
    for name in ("layer_types", "mlp_layer_types"):
        if config.get(name):
            config[name] = config[name][:LAYERS]
    config["mtp_num_hidden_layers" if own_prefix else "num_nextn_predict_layers"] = 1


def edit_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def opened(folder: Path) -> tuple[LoadedModel, CachedModel, Head]:
    """The target, the same with a cache, which keeps its final states, and its MTP layer."""
    conf = ModelConf(name="target", id=str(folder))
    target = load(conf, CPU)
    head = load_mtp(DraftConf(name="mtp", kind="mtp", id=str(folder)), target)
    model = cached_model(target.network, target.vocab_size, "model=target", "eager")
    model.keep_states(head.network.layers)
    return target, model, head.network.with_cache(target.vocab_size)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    return {name: saved(name, tmp_path_factory.mktemp(name)) for name in BOTH}


@pytest.fixture(scope="module", params=BOTH)
def pair(
    request: pytest.FixtureRequest, checkpoints: dict[str, Checkpoint]
) -> tuple[CachedModel, Head]:
    _, model, head = opened(checkpoints[request.param].folder)
    return model, head


# The arithmetic


def uncached(checkpoint: Checkpoint, states: Tensor, text: list[int], start: int, k: int) -> Tensor:
    """Logits [k, vocab] of a round's drafts, from the definition: every row anew for each draft.

    Args:
        checkpoint: with the layer's weights as they were before they were saved.
        states: [n, hidden] the target's final hidden states.
        text: token ids; row `start` has the round's last known token.
        start: the row.
        k: how many drafts.
    """
    backbone, beside = checkpoint.deeper.model, checkpoint.beside

    def norm(name: str, x: Tensor) -> Tensor:
        module = type(backbone.norm)(x.shape[-1], eps=checkpoint.deeper.config.rms_norm_eps)
        module.weight.data = beside[name]
        return module(x)

    hidden = list(states[: start + 1])
    logits: list[Tensor] = []
    for draft in range(k):
        embedded = backbone.embed_tokens(torch.tensor(text[1 : start + 2 + draft]))
        both = [norm("enorm.weight", embedded), norm("hnorm.weight", torch.stack(hidden))]
        row = (torch.cat(both, dim=-1) @ beside["eh_proj.weight"].T).unsqueeze(0)
        count = row.shape[1]
        mask = torch.full((1, 1, count, count), torch.finfo(torch.float32).min).triu(1)
        places = torch.arange(count).unsqueeze(0)
        row = backbone.layers[-1](
            row,
            attention_mask=mask,
            position_ids=places,
            position_embeddings=backbone.rotary_emb(row, places),
        )
        output = norm("shared_head.norm.weight", row[0, -1])
        hidden.append(output)
        logits.append(checkpoint.deeper.lm_head(output))
    return torch.stack(logits)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_round_drafts_what_the_layers_definition_gives(model_type: str, tmp_path: Path) -> None:
    """The loop's own steps, with a cache, and the passes, for every model type that is read."""
    checkpoint = saved(model_type, tmp_path)
    target, model, head = opened(tmp_path)
    text = [place * 7 % 13 for place in range(12)]
    with torch.inference_mode():
        states = target.network.base_model(torch.tensor([text])).last_hidden_state[0]
        passes = head.network.passes(torch.tensor([text]), states[:-1].unsqueeze(0), 4, 2)
        for start, k in ((2, 4), (5, 3), (6, 4), (9, 1)):
            expected = uncached(checkpoint, states, text, start, k)
            by_passes = torch.stack([rows[0, start - 2] for rows in passes[:k]])
            by_passes = head.network.logits(by_passes, target.vocab_size, 0)
            before = text[: start + 2]
            model.prefill(before[:-1])
            drafter = HeadDrafter(head, model, GREEDY)
            drafter.begin(before)
            by_steps = drafter.logits_along(torch.tensor(text[start + 2 : start + 2 + k]))
            for each in (by_passes, by_steps):
                torch.testing.assert_close(each, expected, atol=1e-4, rtol=1e-4)


def test_the_first_draft_is_that_of_transformers(checkpoints: dict[str, Checkpoint]) -> None:
    """Where transformers reads the layer too."""
    from transformers.modeling_layers import MtpModel

    target, _, head = opened(checkpoints["glm4_moe"].folder)
    text = torch.tensor([[place * 7 % 13 for place in range(12)]])
    # It takes the published models' number of layers for granted
    target.network._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS}\."]
    theirs: Any = MtpModel.from_pretrained(target.network)
    with torch.inference_mode():
        states = target.network.base_model(text).last_hidden_state[:, :-1]
        _, logits, _ = theirs(text[:, 1:], states, None, torch.arange(1, 12).unsqueeze(0), None)
        rows = head.network.passes(text, states, 1)[0]
        ours = head.network.logits(rows[:, -1:], target.vocab_size, 0)
    torch.testing.assert_close(ours, logits, atol=1e-4, rtol=1e-4)


# The loop and replay


def test_the_greedy_text_is_the_targets_and_replay_counts_its_rounds(
    pair: tuple[CachedModel, Head],
) -> None:
    assert_replay_counts_the_loops_rounds(*pair, (1, 4))


def test_scores_do_not_depend_on_how_many_chains_run_at_once(
    pair: tuple[CachedModel, Head], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, head = pair
    text = torch.tensor([[place * 5 % 16 for place in range(24)]])
    states = torch.randn(1, 23, head.network.width)
    with torch.inference_mode():
        at_once = head.network.passes(text, states, 4, 3)
        monkeypatch.setattr("harness.models.heads.mtp.STARTS", 7)
        in_parts = head.network.passes(text, states, 4, 3)
    assert [rows.shape[1] for rows in at_once] == [20, 19, 18, 17]
    for one, other in zip(at_once, in_parts, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("generations", [20, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_rounds_at_temperature_1_are_those_that_replay_expects(
    pair: tuple[CachedModel, Head], generations: int
) -> None:
    assert abs(gap_in_standard_errors(*pair, generations)) < 3


def test_greedy_rounds_that_end_after_an_unlikely_token_are_those_replayed(
    pair: tuple[CachedModel, Head],
) -> None:
    requests = [replace(request, k=4) for request in asked(GREEDY, 16)]
    assert np.abs(gaps(requests, *pair, 0.3)).max() < 1e-9


# What is refused


def without(folder: Path, *parts: str) -> None:
    """Take the tensors whose names hold one of these out of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if not any(p in name for p in parts)}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def repeated(folder: Path) -> None:
    """A second MTP layer."""
    tensors = load_file(folder / "model.safetensors")
    second = {
        name.replace("layers.2.", "layers.3."): each.clone()
        for name, each in tensors.items()
        if "layers.2." in name
    }
    save_file(tensors | second, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: without(f, "layers.2."), r"draft=mtp: no MTP layer in .*; read is one, in tens"),
        (repeated, "draft=mtp: 2 MTP layers in .*; read is one"),
        (lambda f: without(f, "eh_proj"), r"lacks fc\.weight; give a checkpoint of model=target"),
        (lambda f: without(f, "layers.2.self_attn.k_proj"), r"lacks .*k_proj\.weight; give"),
    ],
)
def test_a_checkpoint_without_an_mtp_layer_that_is_known_is_refused(
    change: Callable[[Path], None], says: str, checkpoints: dict[str, Checkpoint], tmp_path: Path
) -> None:
    shutil.copytree(checkpoints["glm4_moe"].folder, tmp_path, dirs_exist_ok=True)
    change(tmp_path)
    with pytest.raises(UserError, match=says):
        opened(tmp_path)


def test_a_target_of_another_type_is_refused_with_the_types_that_are_read() -> None:
    target = load(ModelConf(name="tiny", id="embedded:tiny"), CPU)
    conf = DraftConf(name="mtp", kind="mtp", id="embedded:tiny")
    with pytest.raises(UserError, match=r"of which no MTP layer is known; .* read of .*qwen3_next"):
        load_mtp(conf, target)


def test_the_layer_of_another_target_is_refused(
    checkpoints: dict[str, Checkpoint], tmp_path: Path
) -> None:
    saved("glm4_moe", tmp_path, vocab=32)
    target, _, _ = opened(checkpoints["glm4_moe"].folder)
    with pytest.raises(UserError, match=r"for another target: embed_tokens.weight is \[32, 32\]"):
        load_mtp(DraftConf(name="mtp", kind="mtp", id=str(tmp_path)), target)


def test_a_checkpoint_of_several_files_is_read(
    checkpoints: dict[str, Checkpoint], tmp_path: Path
) -> None:
    """Of which only those that hold a tensor of the MTP layer are opened."""
    folder = checkpoints["qwen3_5_text"].folder
    target, _, head = opened(folder)
    tensors = load_file(folder / "model.safetensors")
    files = {name: f"{'fc' if '.fc.' in name else name[:3]}.safetensors" for name in tensors}
    for file in {*files.values()} - {"mod.safetensors"}:
        part = {name: each for name, each in tensors.items() if files[name] == file}
        save_file(part, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    again = load_mtp(DraftConf(name="mtp", kind="mtp", id=str(tmp_path)), target)
    for one, other in zip(again.network.weights, head.network.weights, strict=True):
        assert torch.equal(one, other)


def test_a_checkpoint_in_a_file_of_another_name_is_read(
    checkpoints: dict[str, Checkpoint], tmp_path: Path
) -> None:
    folder = checkpoints["qwen3_5_text"].folder
    target, _, head = opened(folder)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").rename(tmp_path / "all.safetensors")
    again = load_mtp(DraftConf(name="mtp", kind="mtp", id=str(tmp_path)), target)
    for one, other in zip(again.network.weights, head.network.weights, strict=True):
        assert torch.equal(one, other)


# Commands


@pytest.fixture(scope="module", params=BOTH)
def words(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of a command with a target that has the embedded models' vocabulary."""
    folder = tmp_path_factory.mktemp("served")
    saved(request.param, folder, vocab=1024)
    small = ["prompts.limit=1", "new_tokens=8", "k=[2]", "threads=1", "temperature=[0.0]"]
    return ["model=hf", f"model.id={folder}", *small]


@pytest.mark.parametrize("words", BOTH[:1], indirect=True)
def test_mtp_stands_for_the_targets_own_layers_or_names_a_checkpoint(words: list[str]) -> None:
    config = compose("sweep", [*words, "draft=mtp"])
    assert (config.draft.kind, config.draft.id) == ("mtp", config.model.id)
    conf = draft_conf("mtp@some/folder")
    assert (conf.kind, conf.id) == ("mtp", "some/folder")


@pytest.mark.parametrize("words", BOTH[:1], indirect=True)
def test_auto_names_mtp_where_the_targets_config_says_that_it_has_it(words: list[str]) -> None:
    config = compose("audition", [*words, "model.tokenizer_family=tiny"])
    (entry,) = [entry for entry in pairings(config.model) if entry.conf.kind == "mtp"]
    assert (entry.result, entry.why) == ("eligible", "the target's own")
    plain = compose("audition", ["model=tiny"])
    (entry,) = [entry for entry in pairings(plain.model) if entry.conf.kind == "mtp"]
    assert (entry.result, "no config.json" in entry.why) == ("not eligible", True)


@pytest.mark.parametrize("words", BOTH[1:], indirect=True)
@pytest.mark.usefixtures("few_samples")
def test_a_sweep_measures_mtp_layers_and_replays_them_exactly(
    words: list[str], tmp_path: Path
) -> None:
    run = ran("sweep", *words, "draft=mtp", tmp_path, "until=all")
    assert run.manifest.models["draft"].entries["layers_read"] == [LAYERS]
    assert_replay_is_exact(run, accepted=False)

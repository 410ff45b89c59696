"""P-EAGLE heads: both layouts, the rows against a plain computation, the loop and replay."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checks_of_heads import (
    VOCABULARY,
    FolderContract,
    random_target,
)
from runs import sample
from safetensors.torch import load_file
from test_block_drafters import fitted, randomised, read, samples_of, written
from torch import nn
from transformers import LlamaConfig, LlamaModel

from harness.models.heads.peagle import PeagleHead, PeagleNetwork
from harness.models.load import LoadedModel
from harness.records import UserError

DRAFTS, MASK = 5, 14
LAYER: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
}
LAYOUTS = ("speculators", "specforge")


def peagle_folder(target: LoadedModel, folder: Path, layout: str) -> Path:
    """A random head whose output matrix is fitted to the target's texts."""
    network = PeagleNetwork(
        LlamaConfig(**LAYER),
        mask_token=MASK,
        drafts=DRAFTS,
        target_hidden=32,
        layers=(1, 3, 5),
        draft_vocabulary=VOCABULARY,
        vocabulary=VOCABULARY,
        norm_before_residual=layout == "specforge",
    )
    randomised(network)
    embedding: Any = target.network.get_input_embeddings()
    network.embed_tokens = embedding
    pairs = [
        (network.norm(rows[0]), tokens[0, 2 + offset :])
        for tokens, states in samples_of(target, network)
        for offset, rows in enumerate(network.passes(tokens, states, DRAFTS))
    ]
    tensors = {
        name: tensor.contiguous()
        for name, tensor in network.state_dict().items()
        if name not in ("d2t", "t2d", "embed_tokens.weight")
    }
    tensors["lm_head.weight"] = fitted(pairs, VOCABULARY).contiguous()
    tensors["embed_tokens.weight"] = embedding.weight.detach().clone()
    first = "layers.0." if layout == "speculators" else "midlayer."
    tensors = {
        name.replace("midlayer.", first)
        .replace("more.0.", "layers.1.")
        .replace("more.1.", "layers.2."): tensor
        for name, tensor in tensors.items()
    }
    if layout == "specforge":
        tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, -1)
        config = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": MASK}
        config |= {"norm_before_residual": True}
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}
        return written(folder, config, tensors)
    config = {
        "speculators_model_type": "peagle",
        "architectures": ["PEagleSpeculator"],
        "transformer_layer_config": LAYER,
        "draft_vocab_size": VOCABULARY,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
        "mask_token_id": MASK,
        "norm_before_residual": False,
        "speculators_config": {
            "algorithm": "peagle",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": DRAFTS}],
        },
    }
    return written(folder, config, tensors)


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return random_target()


@pytest.fixture(scope="module")
def folders(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("heads")
    return {layout: peagle_folder(target, root / layout, layout) for layout in LAYOUTS}


@pytest.fixture(scope="module", params=sample(LAYOUTS, "speculators"))
def head(
    request: pytest.FixtureRequest, target: LoadedModel, folders: dict[str, Path]
) -> PeagleHead:
    network = read(folders[request.param], target, "peagle")
    assert isinstance(network, PeagleNetwork)
    assert network.layers == (1, 3, 5)
    assert network.drafts == (DRAFTS if request.param == "speculators" else 8)
    return network.with_cache(VOCABULARY)


class TestPeagle(FolderContract):
    ks, depth = (1, 3, 9), 9
    kinds = dict.fromkeys(LAYOUTS, "peagle")
    refusals = (
        ("specforge", {"ptd_token_id": None}, "not a P-EAGLE head in a layout that is known"),
        ("speculators", {"mask_token_id": None}, "its config.json has no mask_token_id"),
        ("speculators", {"speculators_model_type": "eagle3"}, "speculators_model_type eagle3"),
        ("speculators", {"norm_before_fc": True}, "a P-EAGLE head with norm_before_fc, which is"),
        (
            "speculators",
            {"use_aux_hidden_state": False},
            "a P-EAGLE head with use_aux_hidden_state: false, which is not read here",
        ),
        ("speculators", {"mask_token_id": 99}, "a vocabulary of 100, and model=target has 16"),
    )


def test_rows_are_those_of_llamas_layers_over_a_text_with_masks(
    target: LoadedModel, head: PeagleHead
) -> None:
    """From a start: the text's rows and the masks', causal; the later layers by transformers."""
    network = head.network
    assert isinstance(network, PeagleNetwork)
    after: Any = LlamaModel(
        LlamaConfig(**{**LAYER, "num_hidden_layers": 2, "vocab_size": 1})
    ).eval()
    after.norm = nn.Identity()
    for layer, of_head in zip(after.layers, network.more, strict=True):
        layer.load_state_dict(of_head.state_dict())
    tokens, states = samples_of(target, network)[-1]
    embed: Any = network.embed_tokens
    with torch.inference_mode():
        passes = network.passes(tokens, states, 4)
        for start in (0, 6, 20):
            ids = torch.cat([tokens[:, 1 : start + 2], torch.full((1, 3), MASK)], dim=1)
            of_masks = network.mask_hidden.expand(1, 3, -1)
            features = network.fc(torch.cat([states[:, : start + 1], of_masks], dim=1))
            first = network.midlayer
            normed = first.hidden_norm(features)
            row = torch.cat([first.input_layernorm(embed(ids)), normed], dim=-1)
            residual = normed if network.norm_before_residual else features
            angles = network.angles(torch.arange(start + 4).unsqueeze(0))
            made = network.attended_by(row, residual, angles)
            attended = nn.functional.scaled_dot_product_attention(
                made.query, made.key, made.value, is_causal=True, enable_gqa=True
            )
            hidden = network.finish(attended, residual)
            expected = after(inputs_embeds=hidden).last_hidden_state
            for offset, rows in enumerate(passes):
                torch.testing.assert_close(
                    rows[:, start], expected[:, start + offset], atol=1e-4, rtol=1e-3
                )


def test_a_head_without_its_mask_state_is_refused(
    target: LoadedModel, folders: dict[str, Path], tmp_path: Path
) -> None:
    tensors = load_file(folders["speculators"] / "model.safetensors")
    del tensors["mask_hidden"]
    config = json.loads((folders["speculators"] / "config.json").read_text())
    with pytest.raises(UserError, match="it lacks mask_hidden; read here are"):
        read(written(tmp_path, config, tensors), target, "peagle")

"""DSpark drafters: both layouts, every Markov head, the loop, replay and upstream's arithmetic."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from checks_of_heads import (
    VOCABULARY,
    FolderContract,
    assert_llamacpp_drafts_as_replayed,
    keeping,
    random_target,
)
from runs import needs_llamacpp, sample
from safetensors.torch import load_file
from stubs import CPU, GREEDY
from test_block_drafters import (
    dflash_folder,
    fitted,
    randomised,
    read,
    samples_of,
    texts_of,
    written,
)
from torch import Tensor
from transformers import Qwen3Config

from harness.config import DraftConf, ModelConf
from harness.decoding.drafters import HeadDrafter
from harness.models.heads.dflash import DFlashNetwork
from harness.models.heads.dspark import DSparkHead, DSparkNetwork, MarkovHead
from harness.models.load import LoadedModel, load
from harness.records import UserError
from tools.gguf_file import write_block_gguf

RANK, BLOCK = 6, 4
LAYER: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "rope_theta": 10000,
}
# A layout, its Markov head, and whether the block's first position drafts
MADE = {
    "deepspec": ("vanilla", True),
    "specforge": ("gated", True),
    "speculators": ("rnn", True),
    "speculators_masks": ("vanilla", False),
    "no_markov": (None, True),
}


def dspark_folder(target: LoadedModel, folder: Path, layout: str) -> Path:
    """A random drafter whose output matrix is fitted to the target's texts."""
    markov, anchored = MADE[layout]
    embedding: Any = target.network.get_input_embeddings()
    network = DSparkNetwork(
        Qwen3Config(**LAYER),
        target_hidden=32,
        layers=(1, 5),
        block=BLOCK,
        mask_token=VOCABULARY - 1,
        embed=embedding.__call__,
        output=torch.nn.Identity(),
        first=0 if anchored else 1,
    )
    kept = torch.arange(VOCABULARY)[:: 1 if "speculators" not in layout else 2]
    if markov:
        network.markov_head = MarkovHead(markov, RANK, 32, VOCABULARY, len(kept))
    randomised(network)
    pairs = [
        (network.norm(rows[0]), tokens[0, 2 + offset :])
        for tokens, states in samples_of(target, network)
        for offset, rows in enumerate(DFlashNetwork.passes(network, tokens, states, network.drafts))
    ]
    tensors = {
        name.replace("body.", "layers."): tensor.contiguous()
        for name, tensor in network.state_dict().items()
    }
    tensors["lm_head.weight"] = fitted(pairs, VOCABULARY)[kept].contiguous()
    tensors["embed_tokens.weight"] = embedding.weight.detach().clone()
    tensors["confidence_head.proj.weight"] = torch.ones(1, 32 + RANK)
    tensors["confidence_head.proj.bias"] = torch.ones(1)
    heads = {"markov_rank": RANK if markov else 0, "markov_head_type": markov}
    heads |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    if "speculators" not in layout:
        block = {"mask_token_id": network.mask_token, "target_layer_ids": [0, 4]}
        name = "DSparkDraftModel" if layout == "specforge" else "Qwen3DSparkModel"
        config = {**LAYER, "architectures": [name], "block_size": BLOCK}
        if layout == "specforge":
            config["dflash_config"] = {**block, **heads, "projector_type": "dspark"}
        else:
            config |= {**block, **heads, "num_anchors": 512}
        return written(folder, config, tensors)
    tensors["d2t"] = kept - torch.arange(len(kept))
    tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, kept, True)
    config = {
        "speculators_model_type": "dspark",
        "architectures": ["DSparkSpeculator"],
        "transformer_layer_config": LAYER,
        "draft_vocab_size": len(kept),
        "block_size": BLOCK,
        "aux_hidden_state_layer_ids": [1, 5],
        "mask_token_id": network.mask_token,
        "sample_from_anchor": anchored,
        **heads,
    }
    return written(folder, config, tensors)


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return random_target()


@pytest.fixture(scope="module")
def folders(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafters")
    return {layout: dspark_folder(target, root / layout, layout) for layout in MADE}


@pytest.fixture(scope="module", params=sample(MADE, "specforge", "speculators_masks"))
def head(
    request: pytest.FixtureRequest, target: LoadedModel, folders: dict[str, Path]
) -> DSparkHead:
    network = read(folders[request.param], target, "dspark")
    assert isinstance(network, DSparkNetwork)
    assert network.layers == (1, 5)
    assert network.drafts == (BLOCK if MADE[request.param][1] else BLOCK - 1)
    return network.with_cache(VOCABULARY)


class TestDSpark(FolderContract):
    ks, least, depth, many = (1, 3, 6), 0.1, 6, 2000
    kinds = dict.fromkeys(("deepspec", "specforge", "speculators"), "dspark")
    refusals = (
        ("deepspec", {"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel.*; read here"),
        ("deepspec", {"model_type": "deepseek_v4"}, "not a DSpark drafter in a layout"),
        ("speculators", {"speculators_model_type": "dflash"}, "type dflash; read here are"),
        ("deepspec", {"markov_head_type": "lstm"}, "a Markov head of the type lstm"),
        ("deepspec", {"block_size": None}, "has no block_size, which a DSpark drafter needs"),
        ("specforge", {"dspark_config": {"shift": 1}}, "a DSpark drafter with shift, which is not"),
        ("deepspec", {"vocab_size": 99}, "a vocabulary of 99, and model=target has 16"),
        ("deepspec", {"markov_rank": 5}, "markov_w1.weight is .* its config.json makes it"),
        ("deepspec", {"markov_head_type": "gated"}, "it lacks markov_head.gate_proj"),
    )


def test_a_draft_depends_on_the_drafts_before_it(target: LoadedModel, head: DSparkHead) -> None:
    model, text = keeping(target, head), [3, 4, 9, 1, 7]
    rows: list[Tensor] = []
    for drafted in (2, 6):
        drafter = HeadDrafter(head, model, GREEDY)
        model.prefill(text[:-1])
        drafter.begin(text)
        rows.append(drafter.logits_along(torch.tensor([drafted, drafted, drafted])))
    assert torch.equal(rows[0][0], rows[1][0])
    assert isinstance(head.network, DSparkNetwork)
    assert torch.equal(rows[0][1], rows[1][1]) == (head.network.markov_head is None)


def bias_of_deepspec(
    kind: str, weights: dict[str, Tensor], tokens: list[int], hidden: Tensor
) -> Tensor:
    """The biases of a block as `markov_head.py` of DeepSpec gives them, one step at a time."""
    state, biases = torch.zeros(RANK), []
    sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid
    for token, row in zip(tokens, hidden, strict=True):
        latent = weights["markov_w1.weight"][token]
        if kind == "gated":
            seen = torch.cat([row, latent])
            gate = sigmoid(weights["gate_proj.weight"] @ seen + weights["gate_proj.bias"])
            latent = gate * latent
        elif kind == "rnn":
            seen = torch.cat([state, latent, row])
            joint = weights["joint_proj.weight"] @ seen + weights["joint_proj.bias"]
            gate = sigmoid(joint[:RANK])
            state = gate * state + (1 - gate) * torch.tanh(joint[RANK : 2 * RANK])
            latent = torch.tanh(joint[2 * RANK :])
        biases.append(weights["markov_w2.weight"] @ latent)
    return torch.stack(biases)


@pytest.mark.parametrize("layout", ["deepspec", "specforge", "speculators"])
def test_logits_are_dflashs_with_the_bias_of_the_token_before(
    target: LoadedModel, folders: dict[str, Path], layout: str
) -> None:
    network = read(folders[layout], target, "dspark")
    assert isinstance(network, DSparkNetwork)
    assert network.markov_head is not None
    text, states = samples_of(target, network)[-1]
    of_file = load_file(folders[layout] / "model.safetensors")
    weights = {
        name.removeprefix("markov_head."): tensor
        for name, tensor in of_file.items()
        if name.startswith("markov_head.")
    }
    with torch.inference_mode():
        plain = DFlashNetwork.passes(network, text, states, BLOCK)
        passes = network.passes(text, states, BLOCK)
        for start in (0, 5, 20):
            hidden = torch.stack([network.norm(rows[0, start]) for rows in plain])
            before = text[0, start + 1 :][:BLOCK].tolist()
            bias = bias_of_deepspec(MADE[layout][0] or "", weights, before, hidden)
            expected = hidden @ of_file["lm_head.weight"].T + bias
            for offset, rows in enumerate(passes):
                logits = network.logits(rows[0, start], VOCABULARY, offset)
                drafted = logits[logits > -torch.inf]
                torch.testing.assert_close(drafted, expected[offset], atol=1e-4, rtol=1e-4)


# ---- llama.cpp -----------------------------------------------------------------------------------


def of_bigrams(target: LoadedModel, folder: Path, drafts: int, first: int) -> Path:
    """A drafter whose Markov head knows which token most often follows which."""
    dflash_folder(target, folder, "z-lab", drafts + first, first)
    follows = torch.zeros(target.vocab_size, target.vocab_size)
    for ids in texts_of(target):
        for token, after in pairwise(ids):
            follows[token, after] += 1.0
    shares = follows / follows.sum(dim=1, keepdim=True).clamp(min=1.0)
    left, scales, right = torch.linalg.svd(30.0 * shares)
    half, rank = scales.sqrt(), 64
    markov = {"w1": left * half, "w2": right.T * half}
    tensors = load_file(folder / "model.safetensors")
    for name, matrix in markov.items():
        tensors[f"markov_head.markov_{name}.weight"] = matrix[:, :rank].contiguous()
    config = json.loads((folder / "config.json").read_text())
    config |= {**config.pop("dflash_config"), "architectures": ["Qwen3DSparkModel"]}
    config |= {"markov_rank": rank, "markov_head_type": "vanilla", "sample_from_anchor": not first}
    return written(folder, config, tensors)


@needs_llamacpp
@pytest.mark.exhaustive
@pytest.mark.parametrize("first", [0, 1], ids=["anchored", "masks"])
def test_llamacpp_drafts_with_a_converted_dspark_drafter_as_replayed(
    first: int, tmp_path: Path
) -> None:
    tiny = load(ModelConf(name="tiny", id="embedded:tiny"), CPU)
    folder = of_bigrams(tiny, tmp_path / "drafter", drafts=4, first=first)
    words = ("draft=dspark", f"draft.id={folder}", f"draft.block={4 + first}")
    assert assert_llamacpp_drafts_as_replayed(tiny, tmp_path, *words) > 8


def test_a_markov_head_that_llamacpp_does_not_compute_is_refused(
    target: LoadedModel, folders: dict[str, Path], tmp_path: Path
) -> None:
    conf = DraftConf(name="mine", kind="dspark", id=str(folders["specforge"]))
    head = conf.spec.load(conf, target)
    with pytest.raises(UserError, match=r"draft=mine: its Markov head is gated, and llama\.cpp"):
        write_block_gguf(head, target, tmp_path / "draft.gguf")

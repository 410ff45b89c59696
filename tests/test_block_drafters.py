"""Medusa heads and DFlash drafters: read in each layout, lossless, scored as the loop runs them."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks_of_heads import (
    SAMPLED,
    VOCABULARY,
    FolderContract,
    asked,
    assert_llamacpp_drafts_as_replayed,
    assert_replay_counts_the_loops_rounds,
    enumerate_all,
    gaps,
    keeping,
    number_of,
    random_target,
)
from runs import assert_replay_is_exact, needs_llamacpp, ran, sample
from safetensors.torch import load_file, save_file
from served_pair import shipped_requests
from stubs import CPU, GREEDY
from test_verification import VOCAB, random_distribution
from torch import Tensor
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel, Qwen3Config

from harness.analysis import analyse
from harness.cli import draft_conf
from harness.config import DraftConf, ModelConf
from harness.decoding.drafters import HeadDrafter
from harness.decoding.sampling import SamplingParameters
from harness.measurement.lossless import distribution_tests
from harness.measurement.target_texts import generate_texts
from harness.models.cached import CachedModel, output_weight
from harness.models.heads.base import BlockHead, Head, HeadNetwork
from harness.models.heads.dflash import DFlashNetwork
from harness.models.heads.medusa import MedusaNetwork
from harness.models.lean.model import LeanModel
from harness.models.load import LoadedModel, load
from harness.records import Rule, UserError

# Logits per unit of a least-squares fit to the tokens: some certainty at temperature 1
SCALE = 6.0
KINDS = {
    "fasterdecoding": "medusa",
    "vllm": "medusa",
    "z-lab": "dflash",
    "speculators": "dflash",
}


# ---- drafters that accept, as checkpoint folders -------------------------------------------------


def medusa_folder(target: LoadedModel, folder: Path, layout: str, heads: int) -> Path:
    """Heads of random residual blocks, with output matrices fitted to the target's texts.

    In vLLM's layout one matrix serves all heads, which draft three quarters of the tokens.
    """
    hidden = target.network.config.hidden_size
    network = MedusaNetwork(
        heads=heads,
        depth=2,
        hidden=hidden,
        target_layers=target.network.config.num_hidden_layers,
        draft_vocabulary=target.vocab_size,
        bias=layout == "fasterdecoding",
    )
    randomised(network)
    pairs = [
        [(rows[0], tokens[0, 2 + offset :]) for offset, rows in enumerate(outputs)]
        for tokens, states in samples_of(target, network)
        for outputs in [network.passes(tokens, states, heads)]
    ]
    tensors = {name: tensor.contiguous() for name, tensor in network.state_dict().items()}
    if layout == "vllm":
        one = fitted([pair for text in pairs for pair in text], target.vocab_size)
        kept = torch.randperm(target.vocab_size)[: target.vocab_size * 3 // 4].sort().values
        tensors = {name: each for name, each in tensors.items() if name.startswith("blocks.")}
        tensors |= {"lm_heads.0.weight": one, "token_map": kept}
        config = {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": heads}
        config |= {"hidden_size": hidden, "vocab_size": target.vocab_size, "num_hidden_layers": 2}
        config |= {"original_lm_head": True, "truncated_vocab_size": len(kept)}
        return written(folder, config, tensors)
    for offset in range(heads):
        of_head = [text[offset] for text in pairs]
        tensors[f"lm_heads.{offset}.weight"] = fitted(of_head, target.vocab_size)
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[0] == "blocks":
            named[f"{parts[1]}.{parts[3]}.linear.{parts[4]}"] = tensor
        else:
            named[f"{parts[1]}.2.weight"] = tensor
    # As published: another number of heads than there are
    config = {"medusa_num_heads": 2, "medusa_num_layers": 2, "base_model_name_or_path": "target"}
    return written(folder, config, named, "medusa_lm_head.safetensors")


def dflash_folder(
    target: LoadedModel, folder: Path, layout: str, block: int, first: int = 1
) -> Path:
    """A random drafter, with a last matrix fitted to the target's texts."""
    of_target: Any = target.network.config
    config = Qwen3Config(
        hidden_size=of_target.hidden_size,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=target.vocab_size,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    embedding: Any = target.network.get_input_embeddings()
    output: Any = target.network.get_output_embeddings()
    network = DFlashNetwork(
        config,
        target_hidden=of_target.hidden_size,
        layers=(1, of_target.num_hidden_layers - 2),
        block=block,
        mask_token=target.vocab_size - 1,
        embed=embedding.__call__,
        output=output.__call__,
        first=first,
    )
    randomised(network)
    if layout == "z-lab":
        fit_last_layer(target, network)
    tensors = {
        name.replace("body.", "layers."): tensor.contiguous()
        for name, tensor in network.state_dict().items()
    }
    layer = {
        name: getattr(config, name)
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    }
    layer |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    layer |= {"model_type": "qwen3", "rope_theta": 10000, "max_position_embeddings": 256}
    if layout == "z-lab":
        ids = [number - 1 for number in network.layers]
        special = {"mask_token_id": network.mask_token, "target_layer_ids": ids}
        config_file = {"architectures": ["DFlashDraftModel"], **layer, "block_size": block}
        return written(folder, {**config_file, "dflash_config": special}, tensors)
    pairs = [
        (network.norm(rows[0]), tokens[0, 2 + offset :])
        for tokens, states in samples_of(target, network)
        for offset, rows in enumerate(network.passes(tokens, states, network.drafts))
    ]
    kept = torch.randperm(target.vocab_size)[: target.vocab_size * 3 // 4].sort().values
    tensors["lm_head.weight"] = fitted(pairs, target.vocab_size)[kept].contiguous()
    tensors["embed_tokens.weight"] = embedding.weight.detach().clone()
    tensors["d2t"] = kept - torch.arange(len(kept))
    tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, kept, True)
    config_file = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "transformer_layer_config": layer,
        "draft_vocab_size": len(kept),
        "block_size": block,
        "aux_hidden_state_layer_ids": list(network.layers),
        "mask_token_id": network.mask_token,
    }
    return written(folder, config_file, tensors)


def randomised(network: torch.nn.Module) -> None:
    torch.manual_seed(4)
    for weight in network.parameters():
        torch.nn.init.normal_(weight, 1.0 if weight.ndim == 1 else 0.0, 0.25)
    network.requires_grad_(False)


@cache
def texts_of(target: LoadedModel) -> list[list[int]]:
    """What the target writes after some prompts, greedy and drawn, prompts included."""
    requests = [
        replace(one, repetition=repetition, budget=50, eos=frozenset[int]())
        for sampling, repetitions in ((GREEDY, 1), (SAMPLED, 6))
        for repetition in range(1, 1 + repetitions)
        for one in asked(sampling)
    ]
    if target.tokenizer is not None:
        requests = shipped_requests(target, 12)
        requests = [replace(each, budget=50, eos=frozenset[int]()) for each in requests]
    model = LeanModel(target.network, target.vocab_size)
    texts = generate_texts(model, requests, name="model=target")
    return [[*text.request.tokens, *text.tokens] for text in texts]


def samples_of(target: LoadedModel, network: HeadNetwork) -> list[tuple[Tensor, Tensor]]:
    """The target's texts [1, n + 1], with the states [1, n, width] that a drafter reads."""
    model = LeanModel(target.network, target.vocab_size)
    model.keep_states(network.layers)
    samples: list[tuple[Tensor, Tensor]] = []
    for ids in texts_of(target):
        model.prefill(ids[:-1])
        assert model.states is not None
        samples.append((torch.tensor([ids]), model.states.unsqueeze(0)))
    return samples


def fitted(pairs: Sequence[tuple[Tensor, Tensor]], vocabulary: int) -> Tensor:
    """The matrix [vocabulary, hidden] that gives rows about SCALE at the token that comes."""
    # What a text's last rows predict comes after its end
    rows = torch.cat([row[: len(after)] for row, after in pairs])
    tokens = torch.cat([after for _, after in pairs])
    return solved(rows, SCALE * torch.nn.functional.one_hot(tokens, vocabulary))


def solved(rows: Tensor, wanted: Tensor) -> Tensor:
    """The matrix [m, n] that brings rows [., n] closest to what is wanted [., m]."""
    wide = rows.double()
    square = wide.T @ wide + 1e-3 * torch.eye(wide.shape[1], dtype=torch.float64)
    return torch.linalg.solve(square, wide.T @ wanted.double()).T.float()


def fit_last_layer(target: LoadedModel, network: DFlashNetwork) -> None:
    """Let a drafter's outputs be those that the target's output matrix maps onto what comes."""
    output: Any = target.network.get_output_embeddings()
    last: Any = network.body[-1]
    ideal = torch.linalg.pinv(output.weight).T  # of each token, [vocabulary, hidden]
    inside: list[Tensor] = []
    last.mlp.down_proj.weight.zero_()
    network.norm.weight.fill_(1.0)
    hook = last.mlp.down_proj.register_forward_hook(lambda _, given, __: inside.append(given[0]))
    rows: list[Tensor] = []
    missing: list[Tensor] = []
    for tokens, states in samples_of(target, network):
        for offset, outputs in enumerate(network.passes(tokens, states, network.drafts)):
            after = tokens[0, 2 + offset :]
            rows.append(inside[-1][: len(after), network.first + offset])
            missing.append(SCALE * ideal[after] - outputs[0, : len(after)])
    hook.remove()
    last.mlp.down_proj.weight.copy_(solved(torch.cat(rows), torch.cat(missing)))


def written(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    name: str = "model.safetensors",
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / name)
    return folder


def read(folder: Path, target: LoadedModel, kind: str, **more: Any) -> HeadNetwork:
    conf = DraftConf(name="head", kind=kind, id=str(folder), **more)
    return conf.spec.load(conf, target).network


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return random_target()


@pytest.fixture(scope="module")
def folders(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafters")
    return {
        "fasterdecoding": medusa_folder(target, root / "a", "fasterdecoding", 5),
        "vllm": medusa_folder(target, root / "b", "vllm", 3),
        "z-lab": dflash_folder(target, root / "c", "z-lab", 4),
        "speculators": dflash_folder(target, root / "d", "speculators", 6),
    }


@pytest.fixture(scope="module", params=sample(KINDS, "fasterdecoding", "z-lab"))
def head(request: pytest.FixtureRequest, target: LoadedModel, folders: dict[str, Path]) -> Head:
    network = read(folders[request.param], target, KINDS[request.param])
    return network.with_cache(VOCABULARY)


# ---- the loop and replay -------------------------------------------------------------------------


class TestBlockDrafter(FolderContract):
    """Replayed at every K, also where the drafter drafts fewer tokens at most."""

    ks, least, depth, many = (1, 3, 8), 0.2, 8, 2000
    kinds = KINDS
    refusals = (
        ("fasterdecoding", {"medusa_num_heads": None}, r"architectures \[\]; read here are Faster"),
        ("vllm", {"logit_scale": 0.5}, r"architectures \['MedusaModel'\]; read here are Faster"),
        ("vllm", {"architectures": 3}, r"draft.id=.*: cannot be loaded \(.*; save or download"),
        ("z-lab", {"intermediate_size": -1}, r"cannot be loaded \(.*-1.*\); save or download"),
        ("z-lab", {"architectures": ["LlamaForCausalLMEagle3"]}, "architectures.*z-lab's"),
        ("z-lab", {"block_size": 1}, "blocks of 1 positions draft no token"),
        ("z-lab", {"dflash_config": {"mask_token_id": -1, "target_layer_ids": [0, 4]}},
         "for another target: the tokens"),
        ("z-lab", {"block_size": None}, "its config.json has no block_size"),
        ("z-lab", {"use_sliding_window": True, "sliding_window": 8, "layer_types": None,
                   "max_window_layers": 0}, "with layer_types: sliding_attention, which is not"),
        ("z-lab", {"dflash_config": {"mask_token_id": 15, "target_layer_ids": [0, 4],
                   "use_swa": True}}, "a DFlash drafter with use_swa, which is not read here"),
        ("z-lab", {"dflash_config": {"mask_token_id": 15, "target_layer_ids": [0, 4],
                   "use_aux_hidden_state": False}}, "DFlash drafter with use_aux_hidden_state: f"),
        ("z-lab", {"intermediate_size": 64}, "mlp.gate_proj.weight is .* makes it"),
        ("speculators", {"sample_from_anchor": True}, "with sample_from_anchor, which"),
        ("speculators", {"speculators_model_type": "dspark"}, "model_type dspark; read"),
    )  # fmt: skip


@pytest.mark.exhaustive
def test_replay_counts_the_rounds_on_transformers_forward(target: LoadedModel, head: Head) -> None:
    assert_replay_counts_the_loops_rounds(keeping(target, head, CachedModel), head, (3,))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=str)
def test_rounds_that_end_after_an_unlikely_token_are_those_replayed(
    target: LoadedModel, head: Head, sampling: SamplingParameters
) -> None:
    model = keeping(target, head)
    requests = [replace(request, k=8) for request in asked(sampling, 12)]
    repeated = [replace(each, repetition=n) for n in range(4) for each in requests]
    off = gaps(requests if sampling.greedy else repeated, model, head, 0.3)
    if sampling.greedy:
        assert np.abs(off).max() < 1e-9
    assert (np.abs(off.sum(axis=1)) <= 3 * np.sqrt(np.square(off).sum(axis=1))).all()


def test_adaptive_drafting_is_replayed_exactly_where_fewer_tokens_are_drafted_than_k(
    target: LoadedModel, head: Head
) -> None:
    requests = [replace(request, k=8) for request in asked(GREEDY)]
    assert np.abs(gaps(requests, keeping(target, head), head, 0.5)).max() < 1e-9


# Its weights do nothing
TOY = MedusaNetwork(heads=3, depth=1, hidden=1, target_layers=1, draft_vocabulary=VOCAB)


class ToyBlock(BlockHead):
    """Drafts a block from the number of the text that it was last given, and the last token."""

    def __init__(self) -> None:
        super().__init__(TOY, VOCAB, 3)

    def condition(self, states: Tensor, drafts: int | None = None) -> None:
        del drafts
        self.number = int(states[-1].item())

    def _read(self, features: Tensor) -> None:
        raise NotImplementedError

    def _draft(self, offset: int, token: Tensor) -> Tensor:
        if offset == 0:
            self.last = int(token)
        return random_distribution(19)((self.number, self.last, offset)).log().unsqueeze(0)


def drafted_in_a_block(before: tuple[int, ...], drafted: tuple[int, ...]) -> Tensor:
    return random_distribution(19)((number_of(before[:-1]), before[-1], len(drafted)))


@pytest.mark.parametrize(
    ("rule", "k"),
    [
        ("ratio", 2),
        ("block", 2),
        pytest.param("exact_match", 2, marks=pytest.mark.exhaustive),
        pytest.param("greedy_draft", 3, marks=pytest.mark.exhaustive),
    ],
)
def test_a_block_drafter_is_lossless_and_replayed_exactly(rule: Rule, k: int) -> None:
    """By enumeration, to 1e-12."""
    enumerate_all(ToyBlock, drafted_in_a_block, rule, k)


# ---- what others compute -------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", sample([(8,), (3, 4, 1)], (8,)))
def test_draws_are_the_targets_where_fewer_tokens_are_drafted_than_k(
    target: LoadedModel, head: Head, prompt: tuple[int, ...]
) -> None:
    """After a prompt of one token nothing is drafted, and never more than the block has."""
    model = keeping(target, head)
    assert head.drafts is not None
    k = head.drafts + 1
    tests = distribution_tests(
        model,
        HeadDrafter(head, model, SAMPLED),
        [prompt],
        num_draft_tokens=k,
        sampling=SAMPLED,
        rule="ratio",
        draws=200,
        seed=1,
    )
    assert [test.offset for test in tests] == [*range(1, k + 2)]
    assert min(test.p_value for test in tests) > 1e-4


def test_a_dflash_drafter_computes_what_transformers_own_does(
    target: LoadedModel, folders: dict[str, Path]
) -> None:
    """The layers, masks and positions, from every start, of the same weights."""
    network = read(folders["z-lab"], target, "dflash")
    assert isinstance(network, DFlashNetwork)
    config: Any = network.config
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings")
    other = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            **{name: getattr(config, name) for name in names},
            rope_parameters=config.rope_parameters,
            layer_types=["full_attention"] * config.num_hidden_layers,
            block_size=network.block,
            mask_token_id=network.mask_token,
            target_layer_ids=[layer - 1 for layer in network.layers],
        )
    ).eval()
    renamed = {"body.": "layers.", "fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    other.load_state_dict(
        {
            next(
                (
                    new + name.removeprefix(old)
                    for old, new in renamed.items()
                    if name.startswith(old)
                ),
                name,
            ): tensor
            for name, tensor in network.state_dict().items()
        }
    )
    embed: Any = target.network.get_input_embeddings()
    tokens, states = samples_of(target, network)[-1]
    with torch.inference_mode():
        ours = network.passes(tokens, states, network.drafts)
        for row in (0, 5, 30):
            ids = torch.full((1, network.block), network.mask_token)
            ids[0, 0] = tokens[0, row + 1]
            theirs = other(
                noise_embeds=embed(ids),
                context_hidden_states=states[:, : row + 1],
                position_ids=torch.arange(row + 1 + network.block).unsqueeze(0),
            ).last_hidden_state[0, 1:]
            expected = torch.stack([network.norm(rows[0, row]) for rows in ours])
            torch.testing.assert_close(theirs, expected, atol=2e-5, rtol=2e-4)


# ---- reading -------------------------------------------------------------------------------------


def test_a_pickled_file_of_medusa_heads_is_read_where_that_is_allowed(
    target: LoadedModel, folders: dict[str, Path], tmp_path: Path
) -> None:
    """As they were first published, with more heads than the config says."""
    written_as = folders["fasterdecoding"] / "medusa_lm_head.safetensors"
    torch.save(load_file(written_as), tmp_path / "medusa_lm_head.pt")
    shutil.copy(folders["fasterdecoding"] / "config.json", tmp_path)
    with pytest.raises(UserError, match=r"not read from pickles .*allow_pickle=true"):
        read(tmp_path, target, "medusa")
    assert read(tmp_path, target, "medusa", allow_pickle=True).with_cache(VOCABULARY).drafts == 5


def test_medusa_heads_of_some_tokens_are_read_with_or_without_the_rows_of_the_others(
    target: LoadedModel, folders: dict[str, Path], tmp_path: Path
) -> None:
    tensors = load_file(folders["vllm"] / "model.safetensors")
    matrix, kept = tensors.pop("lm_heads.0.weight"), tensors["token_map"]
    config = json.loads((folders["vllm"] / "config.json").read_text())
    written(tmp_path, config, {**tensors, "lm_head.weight": matrix[kept].contiguous()})
    expected = torch.full((VOCABULARY,), -torch.inf).index_copy_(0, kept, matrix.sum(1)[kept])
    for folder in (folders["vllm"], tmp_path):
        network = read(folder, target, "medusa")
        assert isinstance(network, MedusaNetwork)
        for offset in range(network.drafts):
            logits = network.logits(torch.ones(32), VOCABULARY, offset)
            torch.testing.assert_close(logits, expected)


def test_medusa_heads_without_a_matrix_of_their_own_have_the_targets(
    target: LoadedModel, folders: dict[str, Path], tmp_path: Path
) -> None:
    tensors = load_file(folders["vllm"] / "model.safetensors")
    blocks = {name: each for name, each in tensors.items() if name.startswith("blocks.")}
    config = json.loads((folders["vllm"] / "config.json").read_text())
    network = read(written(tmp_path, config, blocks), target, "medusa")
    rows = torch.randn(3, 32)
    expected = rows @ output_weight(target.network).T
    torch.testing.assert_close(network.logits(rows, VOCABULARY, 1), expected)
    own = sum(weight.numel() for weight in network.weights)
    assert own == sum(tensor.numel() for tensor in blocks.values())
    del config["original_lm_head"]
    with pytest.raises(UserError, match="in a layout that is known"):
        read(written(tmp_path, config, blocks), target, "medusa")


def test_a_drafter_of_all_tokens_without_an_output_matrix_has_the_targets_or_its_own_embedding(
    target: LoadedModel, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = json.loads((folders["speculators"] / "config.json").read_text())
    tensors = load_file(folders["speculators"] / "model.safetensors")
    del tensors["lm_head.weight"]
    with pytest.raises(UserError, match=r"lacks lm_head.weight, and drafts 12 of 16 tokens"):
        read(written(tmp_path, config, tensors), target, "dflash")
    tensors["embed_tokens.weight"] = torch.randn(VOCABULARY, 32)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    for tied in (False, True):
        layer = {**config["transformer_layer_config"], "tie_word_embeddings": tied}
        made = {**config, "transformer_layer_config": layer, "draft_vocab_size": VOCABULARY}
        network = read(written(tmp_path, made, tensors), target, "dflash")
        assert isinstance(network, DFlashNetwork)
        rows = torch.randn(3, 32)
        matrix = tensors["embed_tokens.weight"] if tied else output_weight(target.network)
        expected = network.norm(rows) @ matrix.T
        torch.testing.assert_close(network.logits(rows, VOCABULARY, 0), expected)


def test_a_setting_that_is_the_default_refuses_no_drafter(
    target: LoadedModel, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = json.loads((folders["z-lab"] / "config.json").read_text())
    config["dflash_config"]["use_aux_hidden_state"] = True
    tensors = load_file(folders["z-lab"] / "model.safetensors")
    read(written(tmp_path, config, tensors), target, "dflash")


def test_a_block_can_be_shorter_than_the_drafters(
    target: LoadedModel, folders: dict[str, Path]
) -> None:
    """As engines fill it, K + 1 positions."""
    network = read(folders["z-lab"], target, "dflash", block=3)
    assert network.with_cache(VOCABULARY).drafts == 2
    with pytest.raises(UserError, match=r"draft\.block=5: head was trained with blocks of 4"):
        read(folders["z-lab"], target, "dflash", block=5)


@pytest.mark.parametrize(
    ("layout", "change", "says"),
    [
        ("fasterdecoding", {"hidden_size": 48, "head_dim": 24}, "take hidden states of 32, and"),
        ("fasterdecoding", {"vocab": 32}, "a vocabulary of 16, and model=target has 32"),
        ("vllm", {"vocab": 8}, r"a vocabulary of 1\d, and model=target has 8"),
        ("z-lab", {"layers": 3}, r"reads layers \[1, 5\], and model=target has 3"),
        ("z-lab", {"hidden_size": 48, "head_dim": 24}, "takes 32 numbers of each of 2 layers"),
        ("z-lab", {"vocab": 12}, "a vocabulary of 16, and model=target has 12"),
        ("z-lab", {"vocab": 32}, "a vocabulary of 16, and model=target has 32"),
        ("speculators", {"vocab": 32}, "a vocabulary of 16, and model=target has 32"),
    ],
)
def test_a_drafter_for_another_target_is_refused(
    layout: str, change: dict[str, Any], says: str, folders: dict[str, Path]
) -> None:
    with pytest.raises(UserError, match=says):
        read(folders[layout], random_target(**change), KINDS[layout])


def test_an_incomplete_drafter_is_refused(
    target: LoadedModel, folders: dict[str, Path], tmp_path: Path
) -> None:
    for layout, name in (
        ("vllm", "blocks.1.layers.0.weight"),
        ("z-lab", "layers.1.mlp.up_proj.weight"),
    ):
        tensors = load_file(folders[layout] / "model.safetensors")
        del tensors[name]
        config = json.loads((folders[layout] / "config.json").read_text())
        with pytest.raises(
            UserError, match=r"in a layout that is known: it lacks .*; read here are"
        ):
            read(written(tmp_path / layout, config, tensors), target, KINDS[layout])


# ---- commands, for the embedded target -----------------------------------------------------------

WORDS = ["prompts.limit=2", "new_tokens=12", "k=[4]", "threads=1"]


@pytest.fixture(scope="module")
def for_tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three Medusa heads, and a DFlash drafter of a block of 6."""
    root = tmp_path_factory.mktemp("tiny")
    tiny = load(ModelConf(name="tiny", id="embedded:tiny"), CPU)
    return {
        "medusa": medusa_folder(tiny, root / "medusa", "fasterdecoding", 3),
        "dflash": dflash_folder(tiny, root / "dflash", "speculators", 6),
    }


@pytest.mark.usefixtures("few_samples")
def test_a_sweep_measures_medusa_heads_and_replays_them_exactly(
    for_tiny: dict[str, Path], tmp_path: Path
) -> None:
    """Also at a K above the number of heads, which the report says."""
    words = ["draft=medusa", f"draft.id={for_tiny['medusa']}", f"results_root={tmp_path}"]
    run = ran("sweep", *WORDS, *words, "until=all")
    assert_replay_is_exact(run)
    fewer = [entry.values for entry in analyse(run).caveats if entry.code == "k_left_out"]
    assert fewer == [{"ks": "4", "why": "draft_limit", "draft": "medusa", "tokens": 3}]
    assert {timing.k for timing in run.rounds} == {0, 3, 4}


def test_an_entry_of_drafts_may_be_any_block_drafter() -> None:
    conf = draft_conf("dflash@some/folder@block:8")
    assert (conf.name, conf.kind, conf.id, conf.block) == ("dflash", "dflash", "some/folder", 8)


@pytest.mark.exhaustive
@needs_llamacpp
def test_llamacpp_drafts_with_a_converted_dflash_drafter_as_replayed(tmp_path: Path) -> None:
    """At the K of its whole block."""
    tiny = load(ModelConf(name="tiny", id="embedded:tiny"), CPU)
    folder = dflash_folder(tiny, tmp_path / "drafter", "z-lab", 5)
    words = ("draft=dflash", f"draft.id={folder}", "draft.block=5")
    assert assert_llamacpp_drafts_as_replayed(tiny, tmp_path, *words) > 0

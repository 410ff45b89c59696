"""EAGLE heads: SafeAILab's layout and its variants, the network, the loop and replay."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checks_of_heads import (
    LAYERS,
    VOCABULARY,
    HeadContract,
    assert_read_as_stored_otherwise,
    random_target,
)
from runs import assert_replay_is_exact, ran, sample
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import DynamicCache, Qwen2Config, Qwen2Model

from harness.analysis import analyse
from harness.config import DraftConf, ModelKeys
from harness.engine_facts.draft_kinds import DRAFTS
from harness.models.cached import cache_argument
from harness.models.heads.decoder_layer import LayerHead
from harness.models.heads.eagle import EagleNetwork, load_eagle
from harness.models.heads.files import head_memory_need
from harness.models.load import EMBEDDED, LoadedModel
from harness.models.memory import MemoryNeed
from harness.records import UserError

# As eagle/train/llama_2_chat_7B_config.json of SafeAILab/EAGLE says them
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
# What was published: a copy of the embedding in a pickle, `fc` with a bias; SGLang's conversion; a
# head for Qwen2, whose projections have a bias
LAYOUTS: dict[str, dict[str, Any]] = {
    "safeailab": {"fc_bias": True, "embedding": True, "pickled": True},
    "sglang": {"architectures": ["LlamaForCausalLMEagle"]},
    "qwen2": {"attention_bias": True, "embedding": True, "seed": 1},
}


def save_head(
    folder: Path,
    *,
    hidden: int = 32,
    vocabulary: int = VOCABULARY,
    fc_bias: bool = False,
    attention_bias: bool = False,
    embedding: bool = False,
    pickled: bool = False,
    seed: int = 6,
    **config: Any,
) -> Path:
    """A random head as it is published."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": hidden, "intermediate_size": 48, "vocab_size": vocabulary}
    head_dim = hidden // 4
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj.weight": (hidden, hidden),
        "layers.0.self_attn.k_proj.weight": (2 * head_dim, hidden),
        "layers.0.self_attn.v_proj.weight": (2 * head_dim, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, hidden),
        "layers.0.mlp.gate_proj.weight": (48, hidden),
        "layers.0.mlp.up_proj.weight": (48, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, 48),
        "layers.0.post_attention_layernorm.weight": (hidden,),
    }
    if fc_bias:
        shapes["fc.bias"] = (hidden,)
    if attention_bias:
        shapes |= {
            name.replace("weight", "bias"): shapes[name][:1]
            for name in [*shapes]
            if name.startswith("layers.0.self_attn") and "o_proj" not in name
        }
    if embedding:
        shapes["embed_tokens.weight"] = (vocabulary, hidden)
    tensors = {
        name: torch.randn(shape) * 0.3 + (1.0 if "layernorm" in name else 0.0)
        for name, shape in shapes.items()
    }
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **sizes, **config}))
    return folder


def read(folder: Path, target: LoadedModel, *, allow_pickle: bool = True) -> EagleNetwork:
    conf = DraftConf(name="head", kind="eagle", id=str(folder), allow_pickle=allow_pickle)
    network = load_eagle(conf, target).network
    assert isinstance(network, EagleNetwork)
    return network


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return random_target()


@pytest.fixture(scope="module", params=sample(LAYOUTS, "safeailab", "qwen2"))
def head(
    request: pytest.FixtureRequest, target: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> LayerHead:
    folder = save_head(tmp_path_factory.mktemp("head"), **LAYOUTS[request.param])
    return LayerHead(read(folder, target), VOCABULARY)


def layer_of_transformers(network: EagleNetwork) -> Any:
    """A model of transformers with the head's layer, and no norm before it and after it.

    Qwen2's is Llama's with biases of the projections, which are 0 where the head has none.
    """
    layer: Any = Qwen2Model(
        Qwen2Config(**{**CONFIG, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 1})
    ).eval()
    of_head = network.midlayer.state_dict()
    biases = {
        name: torch.zeros(len(of_head[name.replace("bias", "weight")]))
        for name in layer.layers[0].state_dict()
        if name.endswith("bias")
    }
    layer.layers[0].load_state_dict({**biases, **of_head}, strict=False)
    layer.layers[0].input_layernorm, layer.norm = nn.Identity(), nn.Identity()
    return layer


def test_drafts_are_those_of_transformers_layer_row_by_row(
    target: LoadedModel, head: LayerHead
) -> None:
    network, text = head.network, torch.tensor([[3, 7, 1, 9, 4, 4, 12]])
    assert network.layers == (LAYERS,)
    assert isinstance(network, EagleNetwork)
    layer = layer_of_transformers(network)
    embed: Any = network.embed_tokens
    with torch.inference_mode():
        # The target's last hidden state, after its last norm
        states = target.network.base_model(text).last_hidden_state[:, :-1]
        passes = network.passes(text, states, 3)
        for start in range(states.shape[1] - 2):
            cache, features = DynamicCache(), states[:, : start + 1]
            tokens = text[:, 1 : start + 2]
            for depth in range(3):
                row = network.fc(torch.cat([embed(tokens), features], dim=-1))
                features = layer(
                    inputs_embeds=row, **{cache_argument(layer) or "": cache}
                ).last_hidden_state
                torch.testing.assert_close(
                    passes[depth][:, start], features[:, -1], atol=1e-4, rtol=1e-4
                )
                features, tokens = features[:, -1:], text[:, start + depth + 2 :][:, :1]
        logits = network.logits(passes[0], VOCABULARY, 0)
        output: Any = target.network.get_output_embeddings()
        torch.testing.assert_close(logits, output(passes[0]))


class TestEagle(HeadContract):
    ks, budget = (1, 4), 30


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ({"architectures": ["EagleMiniCPMForCausalLM"]}, "architectures .*MiniCPM.*; read here"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "Eagle3'\\]; read here are"),
        ({"speculators_model_type": "eagle"}, "speculators_model_type eagle; read here are"),
        ({"num_hidden_layers": 2}, "its config.json has 2 layers; read here are"),
        ({"hidden": 64}, "a hidden size of 64, and model=target one of 32"),
        ({"vocabulary": 24}, "a vocabulary of 24, and model=target has 16"),
        ({"vocabulary": 24, "vocab_size": 16, "embedding": True}, "a vocabulary of 24"),
        ({"intermediate_size": 64}, "midlayer.mlp.gate_proj.weight is .* its config.json makes it"),
    ],
)
def test_a_head_that_is_not_understood_or_for_another_target_is_refused(
    target: LoadedModel, made: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says):
        read(save_head(tmp_path, **made), target)


def test_a_head_in_shards_or_in_a_file_of_another_name_is_read(
    target: LoadedModel, tmp_path: Path
) -> None:
    (tmp_path / "head").mkdir()
    folder = save_head(tmp_path / "head", embedding=True)
    assert_read_as_stored_otherwise(folder, "eagle", target, tmp_path)


def test_a_pickle_is_read_where_it_may_be(target: LoadedModel, tmp_path: Path) -> None:
    save_head(tmp_path, pickled=True)
    with pytest.raises(UserError, match=r"allow_pickle=true"):
        read(tmp_path, target, allow_pickle=False)
    read(tmp_path, target)


def test_a_head_with_norms_before_fc_or_of_three_states_is_refused(
    target: LoadedModel, tmp_path: Path
) -> None:
    save_head(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "embedding_layernorm.weight": torch.ones(32)}, file)
    with pytest.raises(UserError, match=r"it has embedding_layernorm\.weight; read here are"):
        read(tmp_path, target)
    save_file({**tensors, "fc.weight": torch.zeros(32, 96)}, file)
    with pytest.raises(UserError, match=r"as an EAGLE-3 head's; give draft\.kind=eagle3"):
        read(tmp_path, target)


def test_memory_is_known_before_the_weights_are_read(target: LoadedModel, tmp_path: Path) -> None:
    folder = save_head(tmp_path)
    conf = DraftConf(name="head", kind="eagle", id=str(folder))
    loaded = MemoryNeed(
        ModelKeys("model"), "target", target.network.device, torch.float32, 0.0, 0.0
    )
    need, network = head_memory_need(conf, loaded), read(folder, target)
    assert need is not None
    own = sum(weight.numel() for weight in network.weights) * 4
    assert own <= need.weight_bytes <= 1.5 * own
    assert need.kv_bytes_per_token == network.kv_bytes_per_token


@pytest.mark.usefixtures("few_samples")
def test_a_sweep_takes_a_head_for_the_embedded_target(tmp_path: Path) -> None:
    config = json.loads((EMBEDDED / "tiny" / "config.json").read_text())
    folder = tmp_path / "head"
    folder.mkdir()
    save_head(folder, hidden=config["hidden_size"], vocabulary=config["vocab_size"])
    words = ["prompts.limit=1", "new_tokens=8", "k=[2]", "threads=1", "temperature=[0]"]
    run = ran(
        "sweep",
        *words,
        tmp_path,
        "until=all",
        "draft=hf",
        "draft.kind=eagle",
        f"draft.id={folder}",
        "draft.name=mine",
    )
    assert_replay_is_exact(run, accepted=False)
    assert {model.kind for model in analyse(run).run.models} >= {"eagle"}
    assert DRAFTS["eagle"].reads_states

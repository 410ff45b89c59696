"""How many launches a layer takes in the code that inductor generates for a card.

No card is needed: code is generated for a stand-in card (generated_code). It takes a minute:

    pip install -e ".[test,gpu-tests]" && pytest -m compiled tests/test_generated_kernels.py

That each kernel can be launched, what it computes and how fast it is shows on a card
(benchmarks/gpu.py --smoke).
"""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.torch_version import TorchVersion
from transformers import PreTrainedConfig, Qwen3Config, Qwen3MoeConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from harness.models.lean.layers import compiled_pieces
from harness.models.lean.static import StaticModel
from tests.generated_code import code_for_a_card, launches

pytestmark = [pytest.mark.compiled, pytest.mark.filterwarnings("default")]

WIDE: dict[str, Any] = {
    "vocab_size": 1024,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "head_dim": 128,
}
QWEN3_4B = Qwen3Config(**WIDE, hidden_size=2560, intermediate_size=9728, num_key_value_heads=8)
QWEN3_30B_A3B = Qwen3MoeConfig(
    **WIDE,
    hidden_size=2048,
    num_key_value_heads=4,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
)


def generated_for(config: PreTrainedConfig, count: int) -> list[str]:
    """What an H100 would run for so many tokens in bfloat16: a layer, and what follows the last."""
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model = StaticModel(network, 1000)
    model.reserve(1100)
    with code_for_a_card() as (on_card, graphs), torch.inference_mode():
        for name in ("weights", "_caches", "_cos", "_sin", "_places", "_base"):
            setattr(model, name, on_card(getattr(model, name)))
        experts = model.weights.layers[0].experts
        if experts is not None:
            experts = replace(experts, grouped=True)  # as from Hopper on
            layer = replace(model.weights.layers[0], experts=experts)
            model.weights = replace(model.weights, layers=(layer,))
        with mock.patch("torch.cuda.is_available", return_value=True):
            model._pieces = compiled_pieces.__wrapped__()
        model._offset = 0
        logits = model._logits(model._hidden(on_card(torch.zeros(1, count, dtype=torch.long))))
        assert logits.shape == (count, model.vocab_size)
    return graphs


@pytest.mark.parametrize(
    ("config", "count", "most"),
    [(QWEN3_4B, 1, 12), (QWEN3_4B, 9, 15), (QWEN3_30B_A3B, 1, 17), (QWEN3_30B_A3B, 9, 24)],
)
def test_a_layer_takes_few_launches(config: PreTrainedConfig, count: int, most: int) -> None:
    pytest.importorskip("triton", reason="needs the Triton wheel (extra gpu-tests)")
    if torch.__version__ < TorchVersion("2.13"):
        pytest.skip(f"torch {torch.__version__} compiles for no fake tensors of another's mode")
    layer, finish = map(launches, generated_for(config, count))
    assert 0 < len(layer) <= most, layer
    assert 0 < len(finish) <= 2, finish
    # Scores leave their product in float32, and one row of a mixture reads its experts in place
    assert any("bmm_dtype" in name for name in layer)
    assert any("_grouped_mm" in name for name in layer) == (config is QWEN3_30B_A3B and count > 1)

"""Write an EAGLE-3 head as SGLang's SpecForge and as vllm-project/speculators publish theirs."""

import json
import re
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file

from harness.models.heads.eagle3 import Eagle3Network

Layout = Literal["specforge", "speculators"]
# Of the layer's config, what both layouts need
LAYER_KEYS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "rms_norm_eps", "hidden_act", "max_position_embeddings", "vocab_size"),
)


def save_head(network: Eagle3Network, folder: Path, layout: Layout, target: str) -> None:
    """Write config.json and model.safetensors; the embedding is the target's, and not written.

    Args:
        network: the head.
        folder: where; made if it is not there.
        layout: whose names and config.
        target: hub id or name of the model that it was trained for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.contiguous()
        for name, tensor in network.state_dict().items()
        if not name.startswith("embed_tokens")
    }
    layer: dict[str, Any] = {key: getattr(network.config, key) for key in LAYER_KEYS}
    layer["head_dim"] = network.head_dim
    rope: Any = network.config.rope_parameters
    layer |= {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rope_theta": rope["rope_theta"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(network.lm_head.weight.dtype).removeprefix("torch."),
    }
    shared = {
        "draft_vocab_size": len(network.d2t),
        "eagle_aux_hidden_state_layer_ids": list(network.layers),
        "norm_before_residual": network.norm_before_residual,
    }
    if layout == "specforge":
        config = {"architectures": ["LlamaForCausalLMEagle3"], **layer, **shared}
    else:
        tensors = {re.sub(r"^midlayer\.", "layers.0.", name): t for name, t in tensors.items()}
        config = {  # without a model_type: vLLM knows the layout by that
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.5.0",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {"proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1}
                ],
                "verifier": {"name_or_path": target, "architectures": ["Qwen3ForCausalLM"]},
            },
            "target_hidden_size": network.fc.in_features // len(network.layers),
            "transformer_layer_config": {"architectures": ["LlamaForCausalLM"], **layer},
            **shared,
        }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

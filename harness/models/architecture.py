"""The sizes of a transformers config that decide step time and memory, by our names."""

from typing import Any

from harness.theory.architecture import Architecture

NAMES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "tied": "tie_word_embeddings",
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "moe_ffn": "moe_intermediate_size",
}
# Architectures whose parameters the theory counts right
COUNTED = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"})


def model_sizes(config: Any) -> dict[str, Any]:
    """The sizes under the manifest's names; None where the config has none, or one per layer."""
    text = config.get_text_config()
    return {name: _size(text, entry) for name, entry in NAMES.items()}


def _size(config: Any, name: str) -> Any:
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # transformers refuses to read what differs between layers (Gemma 4)
        return None
    return value if isinstance(value, int | float) else None


def shape_of(config: Any) -> Architecture | None:
    """The sizes of a family whose parameters the theory counts; None of any other."""
    if getattr(config, "model_type", None) not in COUNTED:
        return None
    sizes = {name: value for name, value in model_sizes(config).items() if value is not None}
    sizes.setdefault("head_dim", sizes["hidden"] // sizes["heads"])
    return Architecture(vocab=config.vocab_size, **sizes)


def context_tokens(config: Any) -> int | None:
    """How many positions the model was made for, or None if the config does not say."""
    return _size(config.get_text_config(), "max_position_embeddings")

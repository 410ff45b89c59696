"""Tiny random models and hub caches made from config classes; nothing is downloaded."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from harness.models.load import EMBEDDED

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def qwen3(seed: int = 0, *, layers: int = 2, vocab: int = 1024, **more: Any) -> PreTrainedModel:
    """A random Qwen3 in eval mode, float32, that the embedded tokenizer fits."""
    settings: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    return random_model(Qwen3Config(**{**settings, **more}), seed)


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Any architecture with seeded random weights, in eval mode."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def save(model: PreTrainedModel, folder: Path) -> Path:
    """Save a model with the embedded tokenizer, as a local model folder."""
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(EMBEDDED / "tiny" / name, folder / name)
    return folder


def fill_hub_cache(home: Path, repository: str, model: PreTrainedModel) -> None:
    """Lay a model out as `hf download` would, so that it loads with HF_HUB_OFFLINE=1."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    root = home / "hub" / f"models--{repository.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    save(model, root / "snapshots" / commit)

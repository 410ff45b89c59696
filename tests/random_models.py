"""Tiny random models and hub caches made from config classes; nothing is downloaded."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3NextConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from harness.models.load import EMBEDDED

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


def qwen3(seed: int = 0, *, layers: int = 2, vocab: int = 1024, **more: Any) -> PreTrainedModel:
    """A random Qwen3 in eval mode, float32; by default the embedded tokenizer fits it."""
    sizes = {"num_hidden_layers": layers, "vocab_size": vocab, "tie_word_embeddings": True}
    return small(Qwen3Config, seed, **{**sizes, **more})


def small(kind: type[PreTrainedConfig], seed: int = 0, **more: Any) -> PreTrainedModel:
    """A small random network of a config class, as SMALL and `more` say."""
    return random_model(kind(**{**SMALL, **more}), seed)


def hybrid() -> PreTrainedModel:
    """Gated delta rule layers with a recurrent state, and one attention layer."""
    linear = {
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 1,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return small(
        Qwen3NextConfig,
        num_hidden_layers=4,
        shared_expert_intermediate_size=16,
        initializer_range=0.3,
        **linear,
        **experts,
    )


def sliding() -> PreTrainedModel:
    """Attention over the last 8 positions only."""
    return small(MistralConfig, sliding_window=8, initializer_range=0.3)


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Any architecture with seeded random weights, in eval mode."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def save(model: PreTrainedModel, folder: Path) -> Path:
    """Save a model with the embedded tokenizer, as a local model folder."""
    model.save_pretrained(folder)
    copy_tokenizer(folder)
    return folder


def copy_tokenizer(folder: Path) -> None:
    """Put the embedded tokenizer into a model's folder."""
    for name in TOKENIZER_FILES:
        shutil.copy(EMBEDDED / "tiny" / name, folder / name)


def swap_tokens(folder: Path) -> None:
    """Make a folder's tokenizer another one: two ordinary tokens exchange their ids."""
    file = folder / "tokenizer.json"
    stored = json.loads(file.read_text())
    ids = stored["model"]["vocab"]
    ids["!"], ids["?"] = ids["?"], ids["!"]
    file.write_text(json.dumps(stored))


def change_special_tokens(folder: Path, *added: str) -> None:
    """Make a folder's tokenizer that of an instruct model: <|pad|> is <|end|>, which ends a text.

    `added` follow after the vocabulary's end, and are not special.
    """
    file, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    stored = json.loads(file.read_text().replace("<|pad|>", "<|end|>"))
    last = stored["added_tokens"][-1]
    stored["added_tokens"] += [
        {**last, "id": len(stored["model"]["vocab"]) + place, "content": text, "special": False}
        for place, text in enumerate(added)
    ]
    file.write_text(json.dumps(stored))
    ends = {"eos_token": "<|end|>", "pad_token": "<|end|>"}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **ends}))


def fill_hub_cache(home: Path, repository: str, model: PreTrainedModel) -> None:
    """Lay a model out as `hf download` would, so that it loads with HF_HUB_OFFLINE=1."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    root = home / "hub" / f"models--{repository.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    save(model, root / "snapshots" / commit)

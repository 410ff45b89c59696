"""What each member of the family is: its shape, its diet and how long it trains.

The target is deep and thin on purpose. On a CPU a step of a model this small costs about the same
per layer whatever the width, so eight layers against one make the drafts several times cheaper.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import Qwen3Config

import harness
from tools.train_embedded.vocabulary import CONTEXT_TOKENS, VOCABULARY_SIZE

FAMILY_DIR = Path(harness.__file__).parent / "models" / "embedded"
PROMPT_SETS_DIR = Path(harness.__file__).parent / "prompt_sets"
TOKENIZER_SEED = 0


@dataclass(frozen=True)
class Recipe:
    """How to make one model.

    Attributes:
        name: Folder name.
        layers: Number of decoder layers.
        width: Hidden size.
        inner: Width of the MLP.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Size of one head.
        mixture: Share of documents per kind of text.
        steps: Optimiser steps, of about `training.TOKENS_PER_STEP` tokens.
        learning_rate: Peak learning rate.
        seed: Decides initial weights and text.
    """

    name: str
    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    mixture: Mapping[str, float]
    steps: int
    learning_rate: float
    seed: int

    @property
    def folder(self) -> Path:
        """Where the committed model lies."""
        return FAMILY_DIR / self.name

    def config(self, end_id: int, pad_id: int) -> Qwen3Config:
        """The transformers configuration of this model."""
        return Qwen3Config(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=CONTEXT_TOKENS,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=end_id,
            pad_token_id=pad_id,
            dtype="float32",
        )


TARGET = Recipe(
    "tiny",
    layers=8,
    width=128,
    inner=256,
    heads=4,
    kv_heads=2,
    head_dim=32,
    mixture={"easy": 0.4, "hard": 0.6},
    steps=3800,
    learning_rate=3e-3,
    seed=1,
)

# Steps and the share of hard text are a draft's knobs: with 3,000 steps and 8 % hard text it learns
# the stories too, and its alpha on hard text is 0.79.
GOOD = Recipe(
    "tiny_good",
    layers=1,
    width=96,
    inner=256,
    heads=3,
    kv_heads=1,
    head_dim=32,
    mixture={"easy": 0.948, "hard": 0.052},
    steps=650,
    learning_rate=5e-3,
    seed=2,
)
SMALL = Recipe(
    "tiny_small",
    layers=1,
    width=32,
    inner=64,
    heads=1,
    kv_heads=1,
    head_dim=32,
    mixture={"easy": 0.95, "hard": 0.05},
    steps=1500,
    learning_rate=5e-3,
    seed=3,
)
UNRELATED = Recipe(
    "tiny_unrelated",
    layers=1,
    width=96,
    inner=256,
    heads=3,
    kv_heads=1,
    head_dim=32,
    mixture={"unrelated": 1.0},
    steps=400,
    learning_rate=5e-3,
    seed=4,
)
DRAFTS = (GOOD, SMALL, UNRELATED)
RECIPES = (TARGET, *DRAFTS)

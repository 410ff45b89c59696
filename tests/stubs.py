"""Stand-ins for models: lookup tables that satisfy the loop's protocol without transformers."""

import hashlib
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

CPU = torch.device("cpu")


class TableModel:
    """A model whose logits are a fixed function of the whole prefix.

    Any slip of a cache (a token too many, too few, or another one) changes every later logit, so a
    loop that gets the right text with this model keeps its caches right.

    `strangeness` blends the family's shared logits with this member's own: 0 is the target itself.
    """

    def __init__(self, vocab: int = 11, strangeness: float = 0.0, member: str = "draft") -> None:
        self.vocab = vocab
        self.strangeness = strangeness
        self.member = member
        self.cache: list[int] = []
        self.forwards = 0
        self.prefills = 0

    @property
    def vocab_size(self) -> int:
        return self.vocab

    @property
    def device(self) -> torch.device:
        return CPU

    def prefill(self, tokens: Sequence[int]) -> None:
        self.cache = list(tokens)
        self.prefills += 1

    def forward(self, tokens: Tensor) -> Tensor:
        self.forwards += 1
        rows = []
        for token in tokens.tolist():
            self.cache.append(token)
            rows.append(self.logits(tuple(self.cache)))
        return torch.stack(rows)

    def rewind(self, count: int) -> None:
        assert 0 <= count <= len(self.cache)
        if count:
            del self.cache[-count:]

    def logits(self, prefix: tuple[int, ...]) -> Tensor:
        shared = _draw("family", prefix, self.vocab)
        own = _draw(self.member, prefix, self.vocab)
        return torch.from_numpy((1 - self.strangeness) * shared + self.strangeness * own)


@cache
def _draw(name: str, prefix: tuple[int, ...], vocab: int) -> np.ndarray:
    key = hashlib.sha256(f"{name}{prefix}".encode()).digest()[:8]
    return np.random.default_rng(int.from_bytes(key, "little")).normal(size=vocab) * 2.0

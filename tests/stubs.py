"""Stand-ins for models that satisfy the loop's protocol, and runs of the loop on them."""

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.decoding.drafters import ModelDrafter
from harness.decoding.loops import autoregressive_rounds, speculative_rounds
from harness.decoding.protocols import CausalModel, Drafter, Generation, uniforms_needed
from harness.decoding.sampling import SamplingParameters, Uniforms
from harness.measurement.generations import Request, round_counts
from harness.records import Round
from harness.theory.replay import Replayed

CPU = torch.device("cpu")
GREEDY = SamplingParameters(0.0)
# A greedy text of plain decoding after no prompt, to be changed
REQUEST = Request(
    cell="cell",
    prompt_set="set",
    prompt="one",
    category=None,
    tokens=(),
    sampling=GREEDY,
    budget=30,
    repetition=0,
    seed=1,
    eos=frozenset(),
    model="target",
)


def generation_of(
    prompt: Sequence[int],
    budget: int = 40,
    k: int = 0,
    *,
    seed: int = 7,
    repetition: int = 0,
    sampling: SamplingParameters = GREEDY,
    device: torch.device = CPU,
    **more: Any,
) -> Generation:
    needed = uniforms_needed(budget, k, more.get("rule", "ratio"))
    uniforms = Uniforms.keyed(seed, "set/prompt", repetition, needed, device)
    return Generation(prompt, budget, sampling, uniforms, k, **more)


def decoded(
    target: CausalModel, drafter: CausalModel | Drafter | None, generation: Generation
) -> list[Round]:
    """The loop's rounds: plain without a drafter; a model drafts as ModelDrafter."""
    target.prefill(generation.prompt[:-1])
    if drafter is None:
        return list(autoregressive_rounds(target, generation))
    if not hasattr(drafter, "propose"):
        drafter = ModelDrafter(drafter, generation.sampling, generation.rule)  # type: ignore[arg-type]
    drafter.begin(generation.prompt)  # type: ignore[union-attr]
    return list(speculative_rounds(target, drafter, generation))  # type: ignore[arg-type]


def text_of(rounds: Sequence[Round]) -> list[int]:
    return [token for entry in rounds for token in entry.tokens]


def assert_counts(expected: Replayed, row: int, rounds: Sequence[Round]) -> None:
    """What replay expects of a text, one row, is what the loop did."""
    for name, count in round_counts(rounds, expected.k).items():
        assert getattr(expected, name)[row] == pytest.approx(count, abs=1e-9), name


class TableModel:
    """A model whose logits are a fixed function of the whole prefix.

    Any slip of a cache (a token too many, too few, or another one) changes every later logit, so a
    loop that gets the right text with this model keeps its caches right.

    `strangeness` blends the family's shared logits with this member's own: 0 is the target itself.
    """

    device = CPU

    def __init__(self, vocab: int = 11, strangeness: float = 0.0, member: str = "draft") -> None:
        self.vocab_size = vocab
        self.strangeness = strangeness
        self.member = member
        self.cache: list[int] = []
        self.forwards = 0
        self.prefills = 0

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
        shared = _draw("family", prefix, self.vocab_size)
        own = _draw(self.member, prefix, self.vocab_size)
        return torch.from_numpy((1 - self.strangeness) * shared + self.strangeness * own)


class FunctionModel(TableModel):
    """A model whose probabilities are a given function of the text after the first token."""

    def __init__(self, probabilities: Any, vocab: int = 3) -> None:
        super().__init__(vocab)
        self.probabilities = probabilities

    def logits(self, prefix: tuple[int, ...]) -> Tensor:
        return self.probabilities(prefix[1:]).log()


class ScriptedModel(TableModel):
    """A model that generates `text` after the prompt, whatever it is asked."""

    def __init__(self, prompt: Sequence[int], text: Sequence[int]) -> None:
        super().__init__()
        self.script = [*prompt, *text, 0]

    def logits(self, prefix: tuple[int, ...]) -> Tensor:
        place = min(len(prefix), len(self.script) - 1)
        chosen = torch.tensor(self.script[place])
        return torch.nn.functional.one_hot(chosen, self.vocab_size).double()


@cache
def _draw(name: str, prefix: tuple[int, ...], vocab: int) -> np.ndarray:
    key = hashlib.sha256(f"{name}{prefix}".encode()).digest()[:8]
    return np.random.default_rng(int.from_bytes(key, "little")).normal(size=vocab) * 2.0

"""From logits to tokens: sampling parameters, keyed randomness, inverse-CDF draws.

Sampling parameters are applied by transformers' own LogitsProcessors, once to the target and once
to the draft (its assisted generation applies them to the draft twice; see docs/decisions/).
Randomness is always an argument: a table of uniforms for each generation, keyed by (seed, prompt,
repetition, purpose) and indexed by text position, so that the same seed and K give the same text
whatever ran before.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

PURPOSES = ("draft", "accept", "resample")

# In place of a token in a round's outcome, where its logits are not finite
BROKEN = -1


@dataclass(frozen=True)
class SamplingParameters:
    """The sampling parameters, by which logits become probabilities.

    Attributes:
        temperature: 0 is greedy: no distribution, only the argmax.
        top_k: keep this many most likely tokens, or None for all.
        top_p: keep the smallest set of tokens whose mass reaches this, or None for all.
        min_p: keep the tokens with at least this share of the likeliest one's mass, or None.
        repetition_penalty: see `penalised`; None leaves the logits as they are.
    """

    temperature: float
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def host_tokens(tokens: Tensor) -> list[int]:
    """Read a vector of integers from the device; a round or a step does this once."""
    if tokens.is_cuda:
        pinned = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        pinned.copy_(tokens, non_blocking=True)
        torch.cuda.current_stream(tokens.device).synchronize()
        tokens = pinned
    return tokens.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


@lru_cache(maxsize=64)
def sampler_for(sampling: SamplingParameters) -> Callable[[Tensor], Tensor]:
    """The function logits [n, vocab] -> probabilities [n, vocab], in float32.

    Temperature first, then top-k, top-p and min-p, the order of transformers' generate
    (generation/utils.py, `_get_logits_processor`). A repetition penalty comes before all of them
    and is not applied here, since it depends on the text: see `penalised`.

    Raises:
        ValueError: temperature 0 has no distribution to sample from.
    """
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    if sampling.greedy:
        raise ValueError("temperature 0 is greedy: there is no distribution to sample from")
    processors: list[Callable[[Any, Any], Tensor]] = []
    if sampling.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k is not None:
        processors.append(TopKLogitsWarper(int(sampling.top_k)))
    if sampling.top_p is not None and sampling.top_p < 1.0:
        processors.append(TopPLogitsWarper(float(sampling.top_p)))
    if sampling.min_p is not None:
        processors.append(MinPLogitsWarper(float(sampling.min_p)))
    no_ids = torch.empty((1, 0), dtype=torch.long)

    def probabilities(logits: Tensor) -> Tensor:
        scores = logits.float()
        for processor in processors:
            scores = processor(no_ids, scores)
        return torch.softmax(scores, dim=-1)

    return probabilities


def penalised(logits: Tensor, seen: Tensor | None, penalty: float | None) -> Tensor:
    """Logits with the tokens of the text so far made less likely (below 1: more likely).

    Source: Keskar et al. 2019 (CTRL), as transformers' RepetitionPenaltyLogitsProcessor and vLLM
    have it: a positive logit is divided by the penalty, a negative one multiplied.

    Args:
        seen: [n, vocab] (or [1, vocab]) the tokens of the prompt and the text before each row;
            None where there is no penalty.
        penalty: above 0; None leaves the logits.
    """
    if seen is None or penalty is None:
        return logits
    changed = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen[..., : logits.shape[-1]], changed, logits)


def seen_tokens(tokens: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    seen[torch.tensor(tokens, dtype=torch.long, device=device)] = True
    return seen


def seen_along(seen: Tensor, tokens: Tensor) -> Tensor:
    """The tokens seen before each of `tokens` [n], and after the last: [n + 1, vocab] bool."""
    rows = seen.repeat(len(tokens) + 1, 1)
    added = torch.zeros_like(rows[1:], dtype=torch.int32)
    added.scatter_(1, tokens.unsqueeze(1), 1)
    rows[1:] |= added.cumsum(0) > 0
    return rows


def penalised_along(
    logits: Tensor, prompt: Sequence[int], tokens: Tensor, penalty: float | None
) -> Tensor:
    """Logits [n + 1, vocab] after a prompt and each of `tokens` [n], `penalised` for these."""
    if penalty is None:
        return logits
    before = seen_tokens(prompt, logits.shape[-1], logits.device)
    return penalised(logits, seen_along(before, tokens.to(logits.device)), penalty)


def inverse_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row: the first index at which the running sum reaches the uniform.

    Args:
        probs: [..., vocab] non-negative, of any positive total (rows need not be normalised).
        uniforms: [...] in (0, 1].

    Returns:
        [...] token ids. A token of zero mass is never drawn: the sum does not move there, and the
        comparison is with the row's own total, so rounding cannot run past the support. A row of
        NaN gives an id of the vocabulary too, so that it can be fed: see `unless_broken`.
    """
    # MPS has no float64; elsewhere it keeps the sum of 150,000 small numbers exact enough.
    wide = torch.float32 if probs.device.type == "mps" else torch.float64
    running = probs.cumsum(-1, dtype=wide)
    threshold = running[..., -1:] * uniforms.unsqueeze(-1)
    return torch.searchsorted(running, threshold).squeeze(-1).clamp_max_(probs.shape[-1] - 1)


def unless_broken(tokens: Tensor, checks: Tensor) -> Tensor:
    """The tokens, with BROKEN in place of each whose check is not finite.

    One number is enough for a row. The largest logit is NaN where any logit is, and infinite where
    one is +inf or all are -inf (some may be -inf: tokens that a model suppresses). Any single
    probability of a distribution is enough, since softmax makes all of them NaN.

    Args:
        tokens: [...] token ids.
        checks: [...] the largest logit of each row, or one probability of its distribution.
    """
    return torch.where(checks.abs() < torch.inf, tokens, BROKEN)


def most_likely(logits: Tensor) -> Tensor:
    """The argmax of each row [n, vocab], or BROKEN where a row is not finite."""
    peaks, tokens = logits.max(-1)
    return unless_broken(tokens, peaks)


@dataclass(frozen=True)
class Uniforms:
    """The uniforms of one generation, each [positions], in (0, 1]."""

    draft: Tensor  # of the draft's draw for a text position
    accept: Tensor  # of keeping that token
    resample: Tensor  # of the target's own token there: a correction, a bonus or a plain step

    @classmethod
    def keyed(
        cls, seed: int, prompt: str, repetition: int, positions: int, device: torch.device
    ) -> "Uniforms":
        """From counter-based streams (Philox): a longer table begins with a shorter one."""
        return cls(
            *(
                _stream(f"{seed}/{prompt}/{repetition}/{purpose}", positions, device)
                for purpose in PURPOSES
            )
        )


def _stream(key: str, positions: int, device: torch.device) -> Tensor:
    words = np.frombuffer(hashlib.sha256(key.encode()).digest()[:16], dtype=np.uint64)
    # random() is in [0, 1); turned round it is in (0, 1], where a zero ratio never accepts.
    uniforms = 1.0 - np.random.Generator(np.random.Philox(key=words)).random(positions)
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.as_tensor(uniforms, dtype=dtype, device=device)

"""Drafting without a model: transformers' prompt lookup behind the drafter protocol.

The last two tokens of the text (or else the last one) are looked for earlier in the prompt and the
text; what followed their first occurrence is proposed (PLD, Saxena 2023). It costs next to nothing,
so it is the baseline that every draft model must beat. It may propose fewer than K tokens, or none:
such a round verifies what there is, and ends in a bonus if all of it stands.

Two facts of transformers' generator: without `max_length` it proposes nothing, and it wants its
end-of-text ids as a tensor. It never proposes an end-of-text.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.decoding.protocols import Proposal
from harness.records import LONGEST_NGRAM

# Far beyond any context; the loop itself keeps the budget.
NO_LIMIT = 1 << 40


class NgramDrafter:
    """Proposes what followed the text's last n-gram the first time it occurred."""

    def __init__(self, eos: Collection[int], ngram: int = LONGEST_NGRAM) -> None:
        """Look for n-grams of at most `ngram` tokens; `eos` are the ids that end a text."""
        self._eos = torch.tensor(sorted(eos), dtype=torch.long)
        self._ngram = ngram
        self._text = torch.empty(0, dtype=torch.long)

    def begin(self, prompt: Sequence[int]) -> None:
        """Start with the prompt as the text; there is nothing to prefill."""
        self._text = torch.tensor(prompt, dtype=torch.long)

    def propose(self, count: int, uniforms: Tensor) -> Proposal:
        """Propose up to `count` tokens, perhaps none, on the uniforms' device; all chosen."""
        from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

        lookup: Any = PromptLookupCandidateGenerator(
            eos_token_id=self._eos,
            num_output_tokens=count,
            max_matching_ngram_size=self._ngram,
            max_length=NO_LIMIT,
        )
        longer: Tensor = lookup.get_candidates(self._text.unsqueeze(0))[0][0]
        return Proposal(longer[len(self._text) :].to(uniforms.device), None)

    def advance(self, proposal: Proposal, accepted: int, next_token: Tensor) -> None:
        """Append what was emitted to the text that is searched."""
        emitted = torch.cat([proposal.tokens[:accepted], next_token]).to(self._text.device)
        self._text = torch.cat([self._text, emitted])


class Lookups(NamedTuple):
    """What the n-gram drafter would propose from every start of a text.

    Attributes:
        matches: [n, K] whether the token proposed at this offset is the text's.
        proposed: [n] how many tokens are proposed, at most K.
    """

    matches: NDArray[np.bool_]
    proposed: NDArray[np.int64]


def lookups(
    prompt: Sequence[int],
    text: Sequence[int],
    *,
    num_draft_tokens: int,
    eos: Collection[int],
    ngram: int = LONGEST_NGRAM,
) -> Lookups:
    """What `NgramDrafter` proposes from prompt + text[:s], for every s, compared with the text.

    The same proposals (a test compares them), but from an index of first occurrences that grows
    with the text: transformers' generator searches the whole text again from every start. A smaller
    K proposes a beginning of the same tokens, so one call serves every K.

    Args:
        prompt: at least one token.
        text: n tokens.
        num_draft_tokens: K, the largest.
        eos: ids that are never proposed, nor anything after them.
        ngram: tokens of the longest n-gram looked for.
    """
    tokens = [*prompt, *text]
    first: dict[tuple[int, ...], int] = {}
    matches = np.zeros((len(text), num_draft_tokens), dtype=np.bool_)
    proposed = np.zeros(len(text), dtype=np.int64)
    for length in range(1, len(tokens)):
        start = length - len(prompt)
        if start >= 0:
            begin = _continuation(tokens, length, first, ngram)
            draft = _until(tokens[begin : min(begin + num_draft_tokens, length)], eos)
            proposed[start] = len(draft)
            for offset, (drafted, emitted) in enumerate(zip(draft, text[start:], strict=False)):
                matches[start, offset] = drafted == emitted
        # Only now: an n-gram at the very end is followed by nothing, and is no occurrence yet.
        for size in range(1, min(ngram, length) + 1):
            first.setdefault(tuple(tokens[length - size : length]), length)
    return Lookups(matches, proposed)


def _continuation(
    tokens: Sequence[int], length: int, first: dict[tuple[int, ...], int], ngram: int
) -> int:
    """Where the first occurrence of the longest last n-gram goes on; `length` if there is none."""
    for size in range(min(ngram, length - 1), 0, -1):
        place = first.get(tuple(tokens[length - size : length]))
        if place is not None:
            return place
    return length


def _until(tokens: Sequence[int], eos: Collection[int]) -> Sequence[int]:
    end = next((index for index, token in enumerate(tokens) if token in eos), len(tokens))
    return tokens[:end]

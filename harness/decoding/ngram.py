"""Drafting without a model: prompt lookup, as transformers' generate does it.

The last two tokens of the text (or else the last one) are looked for earlier in the prompt and the
text; what followed their first occurrence is proposed (PLD, Saxena 2023). It costs next to nothing,
so it is the baseline that every draft model must beat. It may propose fewer than K tokens, or none:
such a round verifies what there is, and ends in a bonus if all of it stands. It never proposes an
end of text.

The proposals are those of transformers' PromptLookupCandidateGenerator (a test compares them), but
from an index of first occurrences that grows with the text, where that searches the whole text
again in every round.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.decoding.protocols import Proposal
from harness.decoding.sampling import host_tokens
from harness.records import LONGEST_NGRAM


class NgramDrafter:
    """Proposes what followed the text's last n-gram the first time it occurred."""

    def __init__(self, eos: Collection[int], ngram: int = LONGEST_NGRAM) -> None:
        """Look for n-grams of at most `ngram` tokens; `eos` are the ids that end a text."""
        self._eos, self._ngram = frozenset(eos), ngram
        self._text: list[int] = []
        # Where each n-gram's first occurrence goes on
        self._after: dict[tuple[int, ...], int] = {}

    def begin(self, prompt: Sequence[int]) -> None:
        """Start with the prompt as the text; there is nothing to prefill."""
        self._text, self._after = [], {}
        self.append(prompt)

    def propose(self, count: int, uniforms: Tensor) -> Proposal:
        """Propose up to `count` tokens, perhaps none, on the uniforms' device; all chosen."""
        tokens = torch.tensor(self.draft(count), dtype=torch.long, device=uniforms.device)
        return Proposal(tokens, None)

    def advance(self, proposal: Proposal, accepted: int, next_token: Tensor) -> None:
        """Append what was emitted to the text that is searched."""
        self.append(host_tokens(torch.cat([proposal.tokens[:accepted], next_token])))

    def append(self, tokens: Sequence[int]) -> None:
        """Let the text go on."""
        text = self._text
        for token in tokens:
            # Only now: an n-gram at the very end is followed by nothing, and is no occurrence yet
            for size in range(1, min(self._ngram, len(text)) + 1):
                self._after.setdefault(tuple(text[-size:]), len(text))
            text.append(token)

    def draft(self, count: int) -> list[int]:
        """What is proposed after the text, at most `count` tokens."""
        text = self._text
        sizes = range(min(self._ngram, len(text) - 1), 0, -1)
        places = (self._after.get(tuple(text[-size:])) for size in sizes)
        place = next((place for place in places if place is not None), len(text))
        draft = text[place : place + count]
        end = next((n for n, token in enumerate(draft) if token in self._eos), len(draft))
        return draft[:end]


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

    A smaller K proposes a beginning of the same tokens, so one call serves every K.

    Args:
        prompt: at least one token.
        text: n tokens.
        num_draft_tokens: K, the largest.
        eos: ids that are never proposed, nor anything after them.
        ngram: tokens of the longest n-gram looked for.
    """
    drafter = NgramDrafter(eos, ngram)
    drafter.begin(prompt)
    matches = np.zeros((len(text), num_draft_tokens), dtype=np.bool_)
    proposed = np.zeros(len(text), dtype=np.int64)
    for start, token in enumerate(text):
        draft = drafter.draft(num_draft_tokens)
        proposed[start] = len(draft)
        for offset, (drafted, emitted) in enumerate(zip(draft, text[start:], strict=False)):
            matches[start, offset] = drafted == emitted
        drafter.append([token])
    return Lookups(matches, proposed)

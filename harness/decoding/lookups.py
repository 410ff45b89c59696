"""Drafting without a model: the proposed tokens are looked up in the prompt and the text.

It costs next to nothing, so it is the baseline that every draft model must beat. A look-up may
propose fewer than K tokens, or none: such a round verifies the proposed ones, and ends in a bonus
if all of them are accepted.

There are two kinds. Only the second proposes an end of text, or tokens behind one:
- `NgramDrafter`: prompt lookup, as transformers' generate does it (PLD, Saxena 2023). The last two
  tokens of the text (or else the last one) are searched earlier in the prompt and the text; the
  tokens after their first occurrence are proposed. The proposals are those of transformers'
  PromptLookupCandidateGenerator (a test compares them), which searches the whole text again in
  every round. Here an index of first occurrences grows with the text.
- `SimpleNgramDrafter`: llama.cpp's --spec-type ngram-simple, which takes the last match.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.decoding.protocols import Proposal
from harness.decoding.sampling import host_tokens
from harness.records import LONGEST_NGRAM


class LookupDrafter(ABC):
    """A `Drafter` that looks its tokens up in the prompt and the text so far, and samples none."""

    def __init__(self, eos: Collection[int]) -> None:
        self.eos, self.text = frozenset(eos), list[int]()

    def begin(self, prompt: Sequence[int]) -> None:
        self.text = []
        self.append(prompt)

    def append(self, tokens: Sequence[int]) -> None:
        self.text += tokens

    @abstractmethod
    def draft(self, count: int) -> list[int]:
        """At most `count` tokens after the text; of a smaller `count` the beginning of these."""

    def scored(self, count: int) -> list[int]:
        """The proposal for replay, without limits that depend on `count` and the text's length."""
        return self.draft(count)

    def propose(self, count: int, uniforms: Tensor) -> Proposal:
        tokens = torch.tensor(self.draft(count), dtype=torch.long, device=uniforms.device)
        return Proposal(tokens, None)

    def advance(self, proposal: Proposal, accepted: int, next_token: Tensor) -> None:
        self.append(host_tokens(torch.cat([proposal.tokens[:accepted], next_token])))


class NgramDrafter(LookupDrafter):
    """Proposes the tokens after the first occurrence of the text's last n-gram."""

    def __init__(self, eos: Collection[int], ngram: int = LONGEST_NGRAM) -> None:
        super().__init__(eos)
        self._ngram = ngram
        # By n-gram, the index of the token after its occurrence
        self._after: dict[tuple[int, ...], int] = {}

    def begin(self, prompt: Sequence[int]) -> None:
        self._after = {}
        super().begin(prompt)

    def append(self, tokens: Sequence[int]) -> None:
        text = self.text
        for token in tokens:
            # The n-gram at the end of the text becomes an occurrence when a token follows it
            for size in range(1, min(self._ngram, len(text)) + 1):
                self._after.setdefault(tuple(text[-size:]), len(text))
            text.append(token)

    def draft(self, count: int) -> list[int]:
        text = self.text
        sizes = range(min(self._ngram, len(text) - 1), 0, -1)
        places = (self._after.get(tuple(text[-size:])) for size in sizes)
        place = next((place for place in places if place is not None), len(text))
        draft = text[place : place + count]
        return draft[: next((n for n, token in enumerate(draft) if token in self.eos), count)]


class SimpleNgramDrafter(NgramDrafter):
    """Proposes the tokens after the last occurrence of the text's last n-gram, as llama.cpp does.

    Source: llama.cpp, common/ngram-map.cpp, `common_ngram_simple_draft` with K as its size_m. Its
    history does not have the token that was sampled last. It ignores a match at the very beginning,
    a match with fewer than n tokens behind it, and every match in a text of no more than K + n + 1
    tokens; with K < n there is no proposal. Proposals are scored for all K at once without the
    limit on the text's length (`scored`); replay applies that limit for each K.
    """

    def append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.text.append(token)
            # The history lacks the last token, and a match needs a token of the history behind it
            end = len(self.text) - 2
            if end > self._ngram:
                self._after[tuple(self.text[end - self._ngram : end])] = end

    def draft(self, count: int) -> list[int]:
        too_short = len(self.text) - 1 <= self._ngram + count + 1
        return [] if too_short else self.scored(count)

    def scored(self, count: int) -> list[int]:
        """Without the limit on the text's length."""
        history, size = len(self.text) - 1, self._ngram
        place = self._after.get(tuple(self.text[-size:]))
        if place is None or history - place < size:
            return []
        return self.text[place : min(history, place + count)]


# Look-ups of one token, which can draft one, and of as many as llama.cpp's default
one_token_ngram = partial(SimpleNgramDrafter, ngram=1)
default_ngram = partial(SimpleNgramDrafter, ngram=12)


class Lookups(NamedTuple):
    """The proposals of a look-up from every start of a text."""

    matches: NDArray[np.bool_]  # [n, K] whether the token proposed at this offset is the text's
    proposed: NDArray[np.int64]  # [n] tokens proposed, at most K


def lookups(
    drafter: LookupDrafter, prompt: Sequence[int], text: Sequence[int], num_draft_tokens: int
) -> Lookups:
    """The proposals of a look-up from prompt + text[:s], for every s, compared with the text.

    A smaller K proposes a beginning of the same tokens, so one call, of the largest, serves all.
    """
    drafter.begin(prompt)
    matches = np.zeros((len(text), num_draft_tokens), dtype=np.bool_)
    proposed = np.zeros(len(text), dtype=np.int64)
    for start, token in enumerate(text):
        draft = drafter.scored(num_draft_tokens)
        proposed[start] = len(draft)
        for offset, (drafted, emitted) in enumerate(zip(draft, text[start:], strict=False)):
            matches[start, offset] = drafted == emitted
        drafter.append([token])
    return Lookups(matches, proposed)

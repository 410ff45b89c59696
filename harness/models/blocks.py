"""A drafter that drafts a whole block from where a round starts, as the loop runs it.

What it drafts at an offset depends on the start, and not on the tokens that it drafts before. So
`forward` gives the block's rows one after the other, whatever token it is fed after the first. K
steps in a row, which is how a draft's steps are timed, cost what drafting costs a round of K.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from harness.models.heads import Head, HeadNetwork


class BlockHead(Head):
    """What Medusa heads and DFlash drafters have in common in the loop."""

    def __init__(self, network: HeadNetwork, vocab_size: int, drafts: int) -> None:
        super().__init__(network, vocab_size)
        self.drafts = self._size = drafts
        # Rows of the round's block that `forward` has given
        self._given = 0

    def describe(self) -> dict[str, Any]:
        """How it runs, for the manifest."""
        return {**super().describe(), "drafts_at_most": self.drafts}

    @torch.inference_mode()
    def condition(self, states: Tensor) -> None:
        """Append the target's states [n, width] of the text's next tokens to the context."""
        self._read(self.network.features(states))

    @torch.inference_mode()
    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [1, vocab] of the round's next draft.

        The first time of a round `tokens` [n] end with the last of the text. After the block's last
        row it begins anew, which only timing asks for.
        """
        offset = self._given % self._size
        self._given = offset + 1
        return self._draft(offset, tokens[-1:])

    def extend(self, tokens: Tensor) -> None:
        """Nothing: of the text before the last token it reads the target's states alone."""
        del tokens

    def rewind(self, count: int) -> None:
        """End the round, of which nothing is kept, however many tokens it drafted."""
        del count
        self._given = 0

    def _clear(self) -> None:
        self.rewind(0)

    @abstractmethod
    def _read(self, features: Tensor) -> None:
        """Append features [n, hidden] to the context."""

    @abstractmethod
    def _draft(self, offset: int, token: Tensor) -> Tensor:
        """Logits [1, vocab] at an offset; `token` [1] is the text's last where that is 0."""


def in_target_ids(logits: Tensor, ids: Tensor | None, vocabulary: int) -> Tensor:
    """Logits [..., vocabulary] in the target's ids; -inf of tokens that cannot be drafted.

    Args:
        logits: [..., draft vocabulary].
        ids: [draft vocabulary] the target's id of each; None where all of them are drafted.
        vocabulary: the target's.
    """
    if ids is None:
        return logits[..., :vocabulary]
    full = logits.new_full((*logits.shape[:-1], vocabulary), float("-inf"))
    return full.index_copy_(-1, ids, logits)

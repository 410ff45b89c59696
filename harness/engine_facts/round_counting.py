"""The counting of rounds and drafted tokens by an engine, which replay follows.

At temperature 0 engines should return the same text, and at one K take the same rounds in the
middle of it. They differ at its begin and end:

- Most take the first token from the logits of the prefill, so that rounds begin at the second
  (position 1). Those of the harness's loop begin at position 0.
- Near the budget llama.cpp drafts at most as many tokens as can still be emitted before the
  round's own; with one left it takes a plain step. vLLM always drafts K, and cuts the text.

From the sources. For llama.cpp and vLLM the counts were compared with replay of returned texts,
token for token; SGLang's were not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # every command's --help imports this module, and must not wait for numpy
    import numpy as np
    from numpy.typing import NDArray

    from harness.records import ServingEngine

# A shorter budget is the whole budget / SHORTER, and at least SHORTEST tokens
SHORTER, SHORTEST = 4, 4


@dataclass(frozen=True)
class Counting:
    """The position at which an engine's rounds begin, and the length of its last drafts.

    Attributes:
        first_position: position in a returned text, from 0, at which the first round begins; the
            tokens before it come from the prefill and belong to no round.
        shortens_last_draft: whether a draft is shortened to the tokens left in the budget.
    """

    first_position: int
    shortens_last_draft: bool

    def decoded(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens of a returned text that rounds emitted."""
        return tokens[self.first_position :]

    def proposed(self, k: int, budget: int) -> "NDArray[np.intp]":
        """The tokens drafted by a round from each start: `proposed` of `harness.theory.replay`.

        Args:
            k: tokens of a full draft.
            budget: tokens that a request may return at most, including the prefill's.

        Returns:
            Shape (budget - first_position,); 0 is a plain step.
        """
        import numpy as np

        left = np.arange(budget - self.first_position, 0, -1)
        return np.minimum(k, left - 1) if self.shortens_last_draft else np.full(len(left), k)


def counting_of(engine: "ServingEngine | None") -> Counting | None:
    """The counting of a measured engine; None without an engine, or where it counts no rounds."""
    if engine is None or engine.first_position is None or engine.shortens_last_draft is None:
        return None
    return Counting(engine.first_position, engine.shortens_last_draft)


def shorter_budget(budget: int) -> int:
    """A part of a request's budget; timing both separates the request's start from its rounds."""
    return max(SHORTEST, budget // SHORTER)

"""What the loop needs of a model and of a drafter. `harness.models` satisfies it without importing.

A model is a function with a memory: `forward` appends tokens to its cache and returns the logits
after each of them, `rewind` forgets the last n. Everything the loop does is said in these two.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Recorded = tuple[Tensor | None, ...]


class CausalModel(Protocol):
    """A causal language model with a cache of one sequence."""

    @property
    def vocab_size(self) -> int:
        """Width of its logits."""
        ...

    @property
    def device(self) -> torch.device:
        """Where its logits live."""
        ...

    def prefill(self, tokens: Sequence[int]) -> None:
        """Forget everything and fill the cache with `tokens` (which may be empty)."""
        ...

    def forward(self, tokens: Tensor) -> Tensor:
        """Append `tokens` [n] to the cache; return the logits after each, [n, vocab]."""
        ...

    def rewind(self, count: int) -> None:
        """Forget the last `count` cached tokens. Called once a round, with 0 as well."""
        ...


class Recorder(Protocol):
    """A model that can record what is done with its logits, and replay it as one launch."""

    def knows(self, key: Hashable) -> bool:
        """Whether work under this key has been recorded."""
        ...

    def recorded(
        self, key: Hashable, work: Callable[..., Recorded], *inputs: Tensor | None
    ) -> Recorded:
        """Do `work(*inputs)`, which may call `forward`, and return what it returns.

        Under one key the inputs' shapes and whatever else `work` knows must be the same.
        """
        ...


def recorded(
    model: CausalModel, key: Hashable, work: Callable[..., Recorded], *inputs: Tensor | None
) -> Recorded:
    """Do `work(*inputs)`, as one recorded launch where `model` is a Recorder.

    `work` must be a function of its inputs and of `model` alone: it asks the host nothing, and its
    shapes depend on nothing but the inputs' shapes.
    """
    recorder = recorder_of(model)
    return work(*inputs) if recorder is None else recorder.recorded(key, work, *inputs)


def recorder_of(model: CausalModel) -> Recorder | None:
    """The model as a Recorder, or None where it is not one.

    Not by isinstance: a runtime protocol is looked through anew at every call, 10 us of a round.
    """
    return getattr(model, "recorder", None)


# (text so far, tokens that follow it) -> how many of these still belong to the text, if it ends
# within them; None where it does not end.
StopRule = Callable[[Sequence[int], Sequence[int]], int | None]


class Proposal(NamedTuple):
    """What a drafter proposes for one round.

    Attributes:
        tokens: [n] token ids on the target's device, n <= K.
        probs: [n, vocab] the law each token was drawn from, or None where a token was not drawn
            but chosen (an argmax, a looked-up n-gram): a law with all its mass on that token.
        checks: [n] numbers that are finite exactly where the logits behind the token were, for
            `sampling.unless_broken`; None where no model proposes.
    """

    tokens: Tensor
    probs: Tensor | None
    checks: Tensor | None = None


class Drafter(Protocol):
    """Whoever proposes the tokens that the target verifies."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a generation: prefill with prompt[:-1]; the last token is pending."""
        ...

    def propose(self, count: int, uniforms: Tensor) -> Proposal:
        """Propose up to `count` tokens; `uniforms` [count] in (0, 1] decide the draws."""
        ...

    def advance(self, proposal: Proposal, accepted: int, next_token: Tensor) -> None:
        """Learn how the round ended: the first `accepted` stand, then `next_token` [1] follows."""
        ...

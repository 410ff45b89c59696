"""The drafter of heads, which draft from the hidden states of the target.

An EAGLE or EAGLE-3 head, or a model's own MTP layers, reads the target's hidden states of a token,
and the token after it. Row t of a text x takes token x[t + 1] with the target's states at t, and
predicts x[t + 2]. Within a round the target's states are not known yet: there each row takes the
head's own output of the row before (Li et al. 2025, EAGLE-3). Medusa heads, DFlash and DSpark
drafters read the same states, and draft all tokens of a round from those of its start. The verify
then computes the target's states of every accepted token, and the head runs these rows again from
them. So a round leaves nothing of its drafts in the head, and replay is exact.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from harness.decoding.model_drafter import ModelDrafter
from harness.decoding.protocols import CausalModel, Proposal, seen_by
from harness.decoding.sampling import SamplingParameters
from harness.records import Rule


@runtime_checkable
class StateModel(CausalModel, Protocol):
    """A target that stores the hidden states that a head reads."""

    @property
    def states(self) -> Tensor | None:
        """The states of the tokens of the last prefill or forward, [n, width]."""
        ...


@runtime_checkable
class HeadModel(CausalModel, Protocol):
    """A head, whose forward takes the target's states, or its own last output."""

    @property
    def drafts(self) -> int | None:
        """The most tokens that it drafts in a round; None: any number."""
        ...

    def start(self, first: Sequence[int]) -> None:
        """Forget everything before a text; `first` is its first token, which has no row."""
        ...

    def condition(self, states: Tensor, drafts: int | None = None) -> None:
        """Set the target's states [n, width] for the next forward, one row per token.

        `drafts` is the number of tokens to draft, at the begin of a round.
        """
        ...

    def extend(self, tokens: Tensor) -> None:
        """Append tokens as `forward` does, without computing logits."""
        ...


class HeadDrafter(ModelDrafter):
    """The drafter of every head: EAGLE and its variants, MTP, Medusa, DFlash or DSpark.

    The first forward of a round takes the target's states; each further one takes the head's own
    output, or the next row of a block. Between rounds the head's cache has the rows that were run
    with the target's states. The rows of the last round's tokens are `pending`, and are run
    together as the next round's first forward. A prompt of one token has no states yet: its first
    round proposes nothing.
    """

    def __init__(
        self,
        head: HeadModel,
        target: StateModel,
        sampling: SamplingParameters,
        rule: Rule = "ratio",
        threshold: float = 0.0,
    ) -> None:
        super().__init__(head, sampling, rule, threshold)
        self._head, self._target = head, target
        # [n, width] the target's states of the pending rows
        self._states: Tensor | None = None

    def begin(self, prompt: Sequence[int]) -> None:
        """Run the prompt's rows but the last; the target has been prefilled with prompt[:-1]."""
        self._head.start(prompt[:1])
        self._seen = seen_by(self._head, prompt, self._sampling)
        self._states = None
        if len(prompt) == 1:
            return
        states = self._target.states
        assert states is not None
        tokens = torch.tensor(prompt[1:], device=self._head.device)
        if len(tokens) > 1:
            self._head.condition(states[:-1])
            self._head.extend(tokens[:-1])
        self._states, self._pending = states[-1:], tokens[-1:]

    def propose(self, count: int, uniforms: Tensor) -> Proposal:
        """Propose `count` tokens on the uniforms' device, or as many as the head drafts at most.

        After a prompt of one token there is nothing to draft from.
        """
        if self._states is None:
            return Proposal(torch.empty(0, dtype=torch.long, device=uniforms.device), None)
        most = self._head.drafts
        if most is not None and most < count:
            count, uniforms = most, uniforms[:most]
        self._head.condition(self._states, count)
        return super().propose(count, uniforms)

    def logits_along(self, tokens: Tensor) -> Tensor:
        """The logits [n, vocab] of a round's drafts, given that these are `tokens` [count].

        n is the number that `propose(count)` drafts. It is called in place of `propose`.
        """
        if self._states is None:
            return torch.empty(0, self._head.vocab_size, device=self._head.device)
        tokens = tokens[: self._head.drafts]
        self._head.condition(self._states, len(tokens))
        rows = [self._head.forward(self._pending)[-1:]]
        rows += [self._head.forward(token) for token in tokens[:-1].unsqueeze(1)]
        return torch.cat(rows)

    def advance(self, proposal: Proposal, accepted: int, next_token: Tensor) -> None:
        emitted = torch.cat([proposal.tokens[:accepted], next_token]).to(self._head.device)
        self._note(emitted)
        self._head.rewind(max(0, proposal.tokens.shape[0] - 1))
        states = self._target.states
        assert states is not None
        self._states, self._pending = states[: accepted + 1], emitted

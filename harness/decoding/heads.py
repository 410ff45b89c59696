"""The drafter that is a head: it drafts from the hidden states of the target.

An EAGLE or EAGLE-3 head, or a model's own MTP layers, reads what the target computed for a token,
and the token after it. Row t of a text x takes token x[t + 1] with the target's states at t, and
predicts x[t + 2]. Within a round the target's states are not known yet: there each row takes the
head's own output of the row before (Li et al. 2025, EAGLE-3). Medusa heads, DFlash and DSpark
drafters read the same states, and draft all tokens of a round from those of its start. The verify
then computes the target's states for every token that stands, and those rows are run again from
these. So nothing of a round's drafts is left in the head, rounds start afresh, and replay is exact.
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
    """A target that keeps the hidden states that a head reads."""

    @property
    def states(self) -> Tensor | None:
        """The states of the tokens of the last prefill or forward, [n, width]."""
        ...


@runtime_checkable
class HeadModel(CausalModel, Protocol):
    """A head, whose forward takes the target's states, or its own last output."""

    @property
    def drafts(self) -> int | None:
        """Tokens that it drafts a round at most; None: any number."""
        ...

    def start(self, first: Sequence[int]) -> None:
        """Forget everything before a text; `first` is its first token, which has no row."""
        ...

    def condition(self, states: Tensor, drafts: int | None = None) -> None:
        """Let the next forward take the target's states [n, width], one row per token.

        `drafts` is the number that the round asks for, where one begins.
        """
        ...

    def extend(self, tokens: Tensor) -> None:
        """As `forward`, where the logits are not needed."""
        ...


class HeadDrafter(ModelDrafter):
    """Proposes what any head drafts: of EAGLE and its kind, MTP, Medusa, DFlash or DSpark.

    Its first forward of a round takes the target's states; each further one the head's own output,
    or the next row of a block. Between rounds the head's cache holds the rows whose target states
    are known and that were run; those of the last round's tokens are `pending`, and go in together
    as the next round's first forward. A prompt of one token has no states yet: its first round
    proposes nothing.
    """

    def __init__(
        self,
        head: HeadModel,
        target: StateModel,
        sampling: SamplingParameters,
        rule: Rule = "ratio",
        threshold: float = 0.0,
    ) -> None:
        """Draft with `head` for `target`, whose forwards keep their states."""
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
        """Logits [n, vocab] that a round's first drafts are drawn from, were they `tokens` [count].

        n is the number that `propose(count)` drafts. Nothing was proposed before.
        """
        if self._states is None:
            return torch.empty(0, self._head.vocab_size, device=self._head.device)
        tokens = tokens[: self._head.drafts]
        self._head.condition(self._states, len(tokens))
        rows = [self._head.forward(self._pending)[-1:]]
        rows += [self._head.forward(token) for token in tokens[:-1].unsqueeze(1)]
        return torch.cat(rows)

    def advance(self, proposal: Proposal, accepted: int, next_token: Tensor) -> None:
        """Forget the round's own rows; take the target's states of what stands."""
        emitted = torch.cat([proposal.tokens[:accepted], next_token]).to(self._head.device)
        self._note(emitted)
        self._head.rewind(max(0, proposal.tokens.shape[0] - 1))
        states = self._target.states
        assert states is not None
        self._states, self._pending = states[: accepted + 1], emitted

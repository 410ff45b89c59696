"""The drafters with a model: a draft model, and heads on the target's hidden states.

`lookups.py` has those without a model.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from harness.decoding.protocols import CausalModel, Proposal, recorded, recorder_of, seen_by
from harness.decoding.sampling import SamplingParameters, inverse_cdf, penalised, sampler_for
from harness.records import Rule
from harness.theory.acceptance_rules import ACCEPTANCE_RULES


class ModelDrafter:
    """A smaller causal model that proposes token by token.

    Its cache holds every token it has been fed. Between rounds it lags the text by one token (the
    correction), or by two after a full acceptance (the last draft token was never fed, then the
    bonus); these are `pending` and go in together as the next round's first forward.

    With a threshold above 0 it drafts adaptively: up to K tokens, and no more after one with a
    lower probability, the rule of transformers' `assistant_confidence_threshold`
    (generation/stopping_criteria.py, `ConfidenceCriteria`). It costs one host read per draft step,
    where a draft of fixed length needs none. Whether a later position is drafted depends only on
    the tokens drafted before it, including the unlikely one, which is still proposed. So every
    proposed token is accepted or corrected by the same rule as always, and the emitted text has the
    target's distribution. (Dropping the unlikely token would keep only tokens that the draft was
    sure of, and bias the distribution.)
    """

    def __init__(
        self,
        model: CausalModel,
        sampling: SamplingParameters,
        rule: Rule = "ratio",
        threshold: float = 0.0,
    ) -> None:
        self._model, self._sampling, self._threshold = model, sampling, threshold
        chooses = sampling.greedy or ACCEPTANCE_RULES[rule].draft_chooses
        self._probabilities = None if chooses else sampler_for(sampling)
        self._pending = torch.empty(0, dtype=torch.long, device=model.device)
        self._penalty = sampling.repetition_penalty
        # The tokens that a repetition penalty applies to; None without a penalty
        self._seen: Tensor | None = None

    def prepare(self, count: int) -> None:
        """Let a recording model record `count` drafts, after a rejection and after a bonus.

        Otherwise the first round after a full acceptance would be recorded while it is timed.
        """
        recorder, device = recorder_of(self._model), self._model.device
        for length in (1, 2):
            if recorder is None or recorder.knows(self._key(length, count)):
                continue
            self._model.prefill([])
            self._seen = seen_by(self._model, [], self._sampling)
            self._pending = torch.zeros(length, dtype=torch.long, device=device)
            self.propose(count, torch.full((count,), 0.5, dtype=torch.float64, device=device))

    def begin(self, prompt: Sequence[int]) -> None:
        self._model.prefill(prompt[:-1])
        self._seen = seen_by(self._model, prompt, self._sampling)
        self._pending = torch.tensor(prompt[-1:], device=self._model.device)

    def propose(self, count: int, uniforms: Tensor) -> Proposal:
        """Propose `count` tokens on the uniforms' device, or fewer where there is a threshold."""
        feed, draws = self._pending, uniforms.to(self._model.device)
        key, inputs = self._key(len(feed), count), (feed, draws, self._seen)
        if self._threshold:
            tokens, probs, checks = self._steps(*inputs)
        else:
            tokens, probs, checks = recorded(self._model, key, self._steps, *inputs)
        assert tokens is not None
        assert checks is not None
        device = uniforms.device
        return Proposal(
            tokens.to(device), None if probs is None else probs.to(device), checks.to(device)
        )

    def _key(self, pending: int, count: int) -> tuple[object, ...]:
        return ("propose", self._probabilities, self._penalty, pending, count)

    def _steps(
        self, feed: Tensor, draws: Tensor, seen: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """A forward per draw: tokens [n], probabilities [n, vocab] if drawn, checks [n].

        Where logits are not finite the token is still a valid id, which can be fed.
        """
        tokens: list[Tensor] = []
        rows: list[Tensor] = []
        peaks: list[Tensor] = []
        for draw in draws.unsqueeze(1).unbind():
            logits = self._model.forward(feed)
            if len(feed) > 1:
                logits = logits[-1:]
            logits = penalised(logits, seen, self._penalty)
            if self._probabilities is None:
                peak, feed = logits.max(-1)
                peaks.append(peak)
            else:
                row = self._probabilities(logits)
                feed = inverse_cdf(row, draw)
                rows.append(row)
            if seen is not None:
                seen = seen.index_fill(0, feed, True)
            tokens.append(feed)
            if self._threshold and len(tokens) < len(draws):
                row = rows[-1] if rows else torch.softmax(logits.float(), dim=-1)
                if float(row[0, feed].item()) < self._threshold:
                    break
        if not rows:
            return torch.cat(tokens), None, torch.cat(peaks)
        probs = torch.cat(rows)
        return torch.cat(tokens), probs, probs[:, 0]

    def advance(self, proposal: Proposal, accepted: int, next_token: Tensor) -> None:
        count = proposal.tokens.shape[0]
        device = self._model.device
        self._note(torch.cat([proposal.tokens[:accepted], next_token]))
        if accepted == count:
            self._model.rewind(0)
            self._pending = torch.cat([proposal.tokens[-1:], next_token]).to(device)
        else:
            self._model.rewind(count - 1 - accepted)
            self._pending = next_token.to(device)

    def _note(self, emitted: Tensor) -> None:
        if self._seen is not None:
            self._seen.index_fill_(0, emitted.to(self._model.device), True)


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
        """Set the target's states [n, width] for the next forward, and a round's drafts."""
        ...

    def extend(self, tokens: Tensor) -> None:
        """As `forward`, without logits."""
        ...


class HeadDrafter(ModelDrafter):
    """The drafter of every head, which drafts from the hidden states of its target.

    Row t of a text x takes token x[t + 1] with the target's states at t, and predicts x[t + 2].
    Within a round the target's states are not known yet: there each row takes the head's own output
    of the row before (Li et al. 2025, EAGLE-3), or is the next of a block that is drafted from the
    round's start. The verify then computes the target's states of every accepted token, and the
    head runs these rows again, together as the next round's first forward (`pending`). So a round
    leaves nothing of its drafts in the head, and replay is exact. A prompt of one token has no
    states yet: its first round proposes nothing.
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
        """Propose `count` tokens or as many as a head drafts; none after a prompt of one token."""
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

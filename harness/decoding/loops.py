"""The two loops, plain and speculative decoding.

Plain: one target step per token, the baseline. Speculative: K draft steps, one target forward over
K + 1 positions, accept, rewind. One value is read back to the host per round: the accepted length
with the tokens.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from harness.decoding.protocols import CausalModel, Drafter, Generation, Proposal, recorded, seen_by
from harness.decoding.sampling import (
    host_tokens,
    inverse_cdf,
    most_likely,
    penalised,
    sampler_for,
    seen_along,
    unless_broken,
)
from harness.decoding.verification import (
    VERIFY,
    Decision,
    rates_on,
    verify_greedy,
    verify_synthetic,
)
from harness.records import BrokenLogitsError, Round


def autoregressive_rounds(target: CausalModel, generation: Generation) -> Iterator[Round]:
    """Yield one step per token until an end of text or the budget, from a cache of prompt[:-1]."""
    sampling, resample = generation.sampling, generation.uniforms.resample
    probabilities = None if sampling.greedy else sampler_for(sampling)
    penalty = sampling.repetition_penalty
    seen = seen_by(target, generation.prompt, sampling)

    def step(last: Tensor, uniform: Tensor, seen: Tensor | None) -> tuple[Tensor]:
        logits = penalised(target.forward(last), seen, penalty)
        if probabilities is None:
            return (most_likely(logits),)
        probs = probabilities(logits)
        return (unless_broken(inverse_cdf(probs, uniform), probs[:, 0]),)

    last = torch.tensor(generation.prompt[-1:], device=target.device)
    text: list[int] = []
    while True:
        uniform = resample[len(text) : len(text) + 1]
        (last,) = recorded(target, ("step", probabilities, penalty), step, last, uniform, seen)
        assert last is not None
        if seen is not None:
            seen.index_fill_(0, last, True)
        # The only host read of the step
        (token,) = host_tokens(last)
        if token < 0:
            raise BrokenLogitsError("target", len(text))
        target.rewind(0)
        yield Round((token,), 0, 0, "step")
        if generation.ends(text, (token,)):
            return
        text.append(token)


def speculative_rounds(
    target: CausalModel, drafter: Drafter, generation: Generation
) -> Iterator[Round]:
    """Yield one round per draft-verify cycle until an end of text or the budget.

    The emitted text has the target's distribution exactly, under every rule (at temperature 0 it is
    the target's greedy text), unless acceptance is synthetic. The target's cache must hold
    prompt[:-1], and the drafter must have begun with the prompt.

    Raises:
        BrokenLogitsError: logits of the target or the draft are not finite.
    """
    k, uniforms = generation.num_draft_tokens, generation.uniforms
    verifier = Verifier(target, generation)
    last = torch.tensor(generation.prompt[-1:], device=target.device)
    text: list[int] = []
    while True:
        position = len(text)
        first = generation.first_uniform(position)
        proposal = drafter.propose(k, uniforms.draft[first : first + k])
        outcome = verifier.verified(last, proposal, position)
        # The only host read of the round
        accepted, *tokens = host_tokens(outcome)
        check_logits(tokens, accepted, position)
        done = emitted_round(generation, text, tokens, accepted)
        if generation.ends(text, done.tokens):
            yield done
            return
        text += done.tokens
        next_token = outcome[-1:]
        verifier.note(proposal.tokens[:accepted], next_token)
        target.rewind(len(tokens) - 1 - accepted)
        drafter.advance(proposal, accepted, next_token)
        last = next_token
        yield done


def check_logits(tokens: Sequence[int], accepted: int, position: int) -> None:
    """Refuse a round with logits that are not finite, naming the target or the draft.

    `tokens` are the draft's, then the target's own, as read back; `position` is the round's first
    in the text.
    """
    if min(tokens) >= 0:
        return
    offset = next(index for index, token in enumerate(tokens) if token < 0)
    if offset < len(tokens) - 1:
        raise BrokenLogitsError("draft", position + offset)
    raise BrokenLogitsError("target", position + accepted)


def emitted_round(
    generation: Generation, text: Sequence[int], tokens: Sequence[int], accepted: int
) -> Round:
    """The tokens that a verified round emits after `text`, given ends of text and the budget.

    `tokens` are the draft's, then the target's own. The round is `cut` where fewer than
    accepted + 1 of them could be emitted.
    """
    drafted = len(tokens) - 1
    allowed = (*tokens[:accepted], tokens[-1])
    kept = generation.kept(text, allowed)
    if kept < len(allowed):
        return Round(allowed[:kept], kept, drafted, "cut")
    return Round(allowed, accepted, drafted, "bonus" if accepted == drafted else "rejected")


class Verifier:
    """The acceptance rule of one generation, with its distributions and uniforms."""

    def __init__(self, target: CausalModel, generation: Generation) -> None:
        sampling, uniforms = generation.sampling, generation.uniforms
        self._target = target
        # [vocab] the tokens of prompt and text, where there is a repetition penalty
        self._seen = seen_by(target, generation.prompt, sampling)
        self._penalty = sampling.repetition_penalty
        self._probabilities = None if sampling.greedy else sampler_for(sampling)
        self._rule, self._uniforms = generation.rule, uniforms
        self._first_uniform = generation.first_uniform
        self._verify = VERIFY[generation.rule]
        self._synthetic = self._rates = None
        if generation.synthetic is not None:
            self._synthetic = tuple(generation.synthetic)
            self._rates = rates_on(self._synthetic, uniforms.accept.dtype, uniforms.accept.device)

    def note(self, accepted: Tensor, next_token: Tensor) -> None:
        """Mark the emitted tokens as seen, for a repetition penalty."""
        if self._seen is not None:
            self._seen.index_fill_(0, torch.cat([accepted, next_token]), True)

    def verified(self, last: Tensor, proposal: Proposal, position: int) -> Tensor:
        """Forward the proposal through the target and decide, all on the device.

        Returns:
            [n + 2] the accepted length, the n proposed tokens, and the target's own token; BROKEN
            in place of each token whose logits were not finite, for `check_logits`.
        """

        def work(
            last: Tensor,
            tokens: Tensor,
            probs: Tensor | None,
            checks: Tensor | None,
            accept: Tensor,
            resample: Tensor,
            seen: Tensor | None,
        ) -> tuple[Tensor]:
            logits = self._target.forward(torch.cat([last, tokens]))
            if seen is not None:  # the penalty is for all tokens before each, also drafted ones
                logits = penalised(logits, seen_along(seen, tokens), self._penalty)
            decision = self.decide(logits, Proposal(tokens, probs, checks), accept, resample)
            if checks is not None:
                tokens = unless_broken(tokens, checks)
            accepted, own = (one.unsqueeze(0) for one in decision)
            return (torch.cat([accepted, tokens, own]),)

        count = proposal.tokens.shape[0]
        # The same for verifiers with the same work
        key = ("verify", self._probabilities, self._penalty, self._rule, self._synthetic, count)
        inputs = (last, *proposal, *self.uniforms(position, count), self._seen)
        (outcome,) = recorded(self._target, key, work, *inputs)
        assert outcome is not None
        return outcome

    def uniforms(self, position: int, count: int) -> tuple[Tensor, Tensor]:
        """The uniforms of a round of `count` drafts: accept [count] and resample [count + 1]."""
        first = self._first_uniform(position)
        accept = self._uniforms.accept[first : first + count]
        return accept, self._uniforms.resample[first : first + count + 1]

    def decide(
        self, logits: Tensor, proposal: Proposal, accept: Tensor, resample: Tensor
    ) -> Decision:
        tokens = proposal.tokens
        rates = None if self._rates is None else self._rates[: len(tokens)]
        if self._probabilities is None:
            if rates is not None:
                return verify_synthetic(logits, accept, rates, None)
            return verify_greedy(logits, tokens)
        probs = self._probabilities(logits)
        if rates is not None:
            return verify_synthetic(probs, accept, rates, resample)
        return self._verify(probs, tokens, proposal.probs, accept, resample)

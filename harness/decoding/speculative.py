"""Speculative decoding: K draft steps, one target forward over K + 1 positions, accept, rewind.

The state between rounds: the target's cache holds all but the last emitted token, the drafter
keeps its own. One value is read back to the host per round: the accepted length with the tokens.
"""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from harness.decoding.protocols import CausalModel, Drafter, Proposal, StopRule, recorded
from harness.decoding.sampling import (
    SamplingParameters,
    Uniforms,
    host_tokens,
    penalised,
    sampler_for,
    seen_along,
    unless_broken,
)
from harness.decoding.verification import (
    Decision,
    rates_on,
    verify_exact_match,
    verify_greedy,
    verify_sampled,
    verify_synthetic,
)
from harness.records import BrokenLogitsError, Round, Rule


def speculative_rounds(
    target: CausalModel,
    drafter: Drafter,
    last_token: int,
    *,
    num_draft_tokens: int,
    budget: int,
    eos: Collection[int],
    sampling: SamplingParameters,
    uniforms: Uniforms,
    rule: Rule = "ratio",
    synthetic: Sequence[float] | None = None,
    seen: Tensor | None = None,
    stop: StopRule | None = None,
) -> Iterator[Round]:
    """Yield one round per draft-verify cycle until end-of-text or the budget.

    The emitted text has the target's law exactly, for every rule; at temperature 0 it is the
    target's greedy text.

    Args:
        target: its cache holds prompt[:-1].
        drafter: begun with the prompt.
        last_token: prompt[-1].
        num_draft_tokens: K >= 1, proposed every round, the last included.
        budget: tokens to emit at most.
        eos: the ids that end the text; the one that does is emitted, nothing after it.
        sampling: temperature, top-k, top-p, min-p and repetition penalty, alike for the target and
            the draft.
        uniforms: at least budget + K + 1 positions.
        rule: which draft tokens stand; see verification.py.
        synthetic: acceptance that is set instead of found: the chance of each drafted position,
            given that those before it were accepted. The text is then not the target's.
        seen: [vocab] which tokens the prompt holds; needed for a repetition penalty, and changed.
        stop: ends a text for other reasons than its last token's id.

    Raises:
        BrokenLogitsError: logits of the target or the draft are not finite.
    """
    verifier = Verifier(sampling, rule, uniforms, synthetic, seen)
    last = torch.tensor([last_token], device=target.device)
    position = 0
    text: list[int] = []
    while True:
        proposal = drafter.propose(
            num_draft_tokens, uniforms.draft[position : position + num_draft_tokens]
        )
        outcome = verified(target, last, proposal, verifier, position)
        # The round's one host read
        accepted, *tokens = host_tokens(outcome)
        check_logits(tokens, accepted, position)
        next_token = outcome[-1:]
        drafted = len(tokens) - 1
        done = emitted_round(tokens, accepted, drafted, budget - position, eos, text, stop)
        position += len(done.tokens)
        ended = done.tokens[-1] in eos or (stop is not None and stop(text, done.tokens) is not None)
        if ended or position >= budget:
            yield done
            return
        if stop is not None:
            text += done.tokens
        verifier.note(proposal.tokens[:accepted], next_token)
        target.rewind(drafted - accepted)
        drafter.advance(proposal, accepted, next_token)
        last = next_token
        yield done


def verified(
    target: CausalModel, last: Tensor, proposal: Proposal, verifier: "Verifier", position: int
) -> Tensor:
    """Forward the proposal through the target and decide, all on the device.

    Returns:
        [n + 2] the accepted length, the n proposed tokens, and the target's own token; BROKEN in
        place of each token whose logits were not finite, for `check_logits`.
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
        logits = verifier.penalised(target.forward(torch.cat([last, tokens])), tokens, seen)
        proposal = Proposal(tokens, probs, checks)
        return (outcome_of(proposal, verifier.decide(logits, proposal, accept, resample)),)

    count = proposal.tokens.shape[0]
    (outcome,) = recorded(
        target,
        ("verify", verifier.key, count),
        work,
        last,
        *proposal,
        *verifier.uniforms(position, count),
        verifier.seen,
    )
    assert outcome is not None
    return outcome


def outcome_of(proposal: Proposal, decision: Decision) -> Tensor:
    """What a round reads back to the host, [n + 2]; see `verified`."""
    tokens = proposal.tokens
    if proposal.checks is not None:
        tokens = unless_broken(tokens, proposal.checks)
    return torch.cat([decision.accepted.unsqueeze(0), tokens, decision.next_token.unsqueeze(0)])


def check_logits(tokens: Sequence[int], accepted: int, position: int) -> None:
    """Refuse a round that met logits that are not finite.

    Args:
        tokens: the draft's tokens, then the target's own, as read back.
        accepted: how many draft tokens were accepted.
        position: of the round's first token in the text.

    Raises:
        BrokenLogitsError: naming the target or the draft.
    """
    if min(tokens) >= 0:
        return
    offset = next(index for index, token in enumerate(tokens) if token < 0)
    if offset < len(tokens) - 1:
        raise BrokenLogitsError("draft", position + offset)
    raise BrokenLogitsError("target", position + accepted)


def emitted_round(
    tokens: Sequence[int],
    accepted: int,
    drafted: int,
    budget: int,
    eos: Collection[int],
    text: Sequence[int] = (),
    stop: StopRule | None = None,
) -> Round:
    """What a verified round emits once end-of-text and the budget have had their say.

    Args:
        tokens: the draft's tokens, then the target's own.
        accepted: how many draft tokens stand.
        drafted: how many were proposed.
        budget: tokens that may still be emitted, at least 1.
        eos: the ids that end the text.
        text: what was emitted before; read by `stop` alone.
        stop: ends a text for other reasons than its last token's id.

    Returns:
        The round; `cut` where fewer than accepted + 1 tokens could be emitted.
    """
    whole = [*tokens[:accepted], tokens[-1]]
    end = next((index + 1 for index, token in enumerate(whole) if token in eos), len(whole))
    emitted = tuple(whole[: min(end, budget)])
    if stop is not None:
        emitted = emitted[: stop(text, emitted)]
    if len(emitted) < len(whole):
        return Round(emitted, len(emitted), drafted, "cut")
    return Round(emitted, accepted, drafted, "bonus" if accepted == drafted else "rejected")


class Verifier:
    """One generation's acceptance rule with its laws and its uniforms bound."""

    def __init__(
        self,
        sampling: SamplingParameters,
        rule: Rule,
        uniforms: Uniforms,
        synthetic: Sequence[float] | None = None,
        seen: Tensor | None = None,
    ) -> None:
        """Bind `rule`, for laws warped by `sampling`, to the uniforms of `uniforms`.

        Args:
            sampling: what makes laws of logits.
            rule: which draft tokens stand.
            uniforms: the generation's uniforms.
            synthetic: chances per drafted position that take the rule's place.
            seen: [vocab] tokens of the prompt, for a repetition penalty; `note` adds the text's.
        """
        self.seen, self._penalty = seen, sampling.repetition_penalty
        self._synthetic = None if synthetic is None else tuple(synthetic)
        self._rates = None
        if self._synthetic is not None:
            self._rates = rates_on(self._synthetic, uniforms.accept.dtype, uniforms.accept.device)
        self._probabilities = None if sampling.greedy else sampler_for(sampling)
        self._rule: Rule = rule
        self._uniforms = uniforms

    @property
    def key(self) -> tuple[object, ...]:
        """What two verifiers with the same work have in common."""
        return (self._probabilities, self._penalty, self._rule, self._synthetic)

    def note(self, accepted: Tensor, next_token: Tensor) -> None:
        """Mark the emitted tokens as seen, for a repetition penalty."""
        if self.seen is not None:
            self.seen.index_fill_(0, torch.cat([accepted, next_token]), True)

    def penalised(self, logits: Tensor, tokens: Tensor, seen: Tensor | None) -> Tensor:
        """Logits [n + 1, vocab] with the penalty for what precedes each, drafts included."""
        if seen is None:
            return logits
        return penalised(logits, seen_along(seen, tokens), self._penalty)

    def __call__(self, logits: Tensor, proposal: Proposal, position: int) -> Decision:
        """Decide the round that began at text position `position`."""
        return self.decide(logits, proposal, *self.uniforms(position, len(proposal.tokens)))

    def uniforms(self, position: int, count: int) -> tuple[Tensor, Tensor]:
        """The uniforms of a round of `count` drafts: accept [count] and resample [count + 1]."""
        accept = self._uniforms.accept[position : position + count]
        return accept, self._uniforms.resample[position : position + count + 1]

    def decide(
        self, logits: Tensor, proposal: Proposal, accept: Tensor, resample: Tensor
    ) -> Decision:
        """Decide a round with these uniforms.

        Args:
            logits: [n + 1, vocab] of the target.
            proposal: n tokens.
            accept: [n].
            resample: [n + 1].
        """
        tokens = proposal.tokens
        rates = None if self._rates is None else self._rates[: len(tokens)]
        if self._probabilities is None:
            if rates is not None:
                return verify_synthetic(logits, accept, rates, None)
            return verify_greedy(logits, tokens)
        probs = self._probabilities(logits)
        if rates is not None:
            return verify_synthetic(probs, accept, rates, resample)
        if self._rule == "exact_match":
            return verify_exact_match(probs, tokens, resample)
        return verify_sampled(probs, tokens, proposal.probs, accept, resample)

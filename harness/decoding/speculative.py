"""Speculative decoding: K draft steps, one target forward over K + 1 positions, accept, rewind.

The state between rounds: the target's cache holds all but the last emitted token, the drafter
keeps its own. One value is read back to the host per round: the accepted length with the tokens.
"""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from harness.decoding.protocols import CausalModel, Drafter, Proposal
from harness.decoding.sampling import Noise, Warping, sampler_for
from harness.decoding.verification import (
    Decision,
    verify_exact_match,
    verify_greedy,
    verify_sampled,
)
from harness.records import Round, Rule


def speculative_rounds(
    target: CausalModel,
    drafter: Drafter,
    last_token: int,
    *,
    num_draft_tokens: int,
    budget: int,
    eos: Collection[int],
    warping: Warping,
    noise: Noise,
    rule: Rule = "ratio",
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
        warping: temperature, top-k, top-p, alike for the target and the draft.
        noise: at least budget + K + 1 positions.
        rule: which draft tokens stand; see verification.py.
    """
    verifier = Verifier(warping, rule, noise)
    last = torch.tensor([last_token], device=target.device)
    position = 0
    while True:
        proposal = drafter.propose(
            num_draft_tokens, noise.draft[position : position + num_draft_tokens]
        )
        logits = target.forward(torch.cat([last, proposal.tokens]))
        decision = verifier(logits, proposal, position)
        next_token = decision.next_token.unsqueeze(0)
        # The round's one host read
        accepted, *tokens = host_tokens(
            torch.cat([decision.accepted.unsqueeze(0), proposal.tokens, next_token])
        )
        drafted = len(tokens) - 1
        done = emitted_round(tokens, accepted, drafted, budget - position, eos)
        position += len(done.tokens)
        if position >= budget or done.tokens[-1] in eos:
            yield done
            return
        target.rewind(drafted - accepted)
        drafter.advance(proposal, accepted, next_token)
        last = next_token
        yield done


def host_tokens(tokens: Tensor) -> list[int]:
    """Read a vector of integers back from the device."""
    return tokens.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def emitted_round(
    tokens: Sequence[int], accepted: int, drafted: int, budget: int, eos: Collection[int]
) -> Round:
    """What a verified round emits once end-of-text and the budget have had their say.

    Args:
        tokens: the draft's tokens, then the target's own.
        accepted: how many draft tokens stand.
        drafted: how many were proposed.
        budget: tokens that may still be emitted, at least 1.
        eos: the ids that end the text.

    Returns:
        The round; `cut` where fewer than accepted + 1 tokens could be emitted.
    """
    whole = [*tokens[:accepted], tokens[-1]]
    end = next((index + 1 for index, token in enumerate(whole) if token in eos), len(whole))
    emitted = tuple(whole[: min(end, budget)])
    if len(emitted) < len(whole):
        return Round(emitted, len(emitted), drafted, "cut")
    return Round(emitted, accepted, drafted, "bonus" if accepted == drafted else "rejected")


class Verifier:
    """One generation's acceptance rule with its laws and its noise bound."""

    def __init__(self, warping: Warping, rule: Rule, noise: Noise) -> None:
        self._probabilities = None if warping.greedy else sampler_for(warping)
        self._rule = rule
        self._noise = noise

    def __call__(self, logits: Tensor, proposal: Proposal, position: int) -> Decision:
        tokens = proposal.tokens
        if self._probabilities is None:
            return verify_greedy(logits, tokens)
        probs = self._probabilities(logits)
        resample = self._noise.resample[position : position + len(tokens) + 1]
        if self._rule == "exact_match":
            return verify_exact_match(probs, tokens, resample)
        accept = self._noise.accept[position : position + len(tokens)]
        return verify_sampled(probs, tokens, proposal.probs, accept, resample)

"""Target and draft law side by side, reduced to the numbers per token that replay needs."""

import torch
from torch import Tensor

from harness.decoding.sampling import SamplingParameters, sampler_for

# What `compare` finds per token, in its order.
NUMBERS = (
    "target_logprob",
    "draft_logprob",
    "draft_is_argmax",
    "last_ratio",
    "last_exact_match",
    "last_greedy_draft",
    "target_entropy",
    "draft_entropy",
)


class Law:
    """A model's laws for some tokens: probabilities with what is asked of them.

    Attributes:
        probs: [n, vocab] warped; None where the law is a point, on `best`.
        best: [n] the most likely token, before sampling.
        sound: [n] whether the logits are finite.
    """

    def __init__(self, logits: Tensor, sampling: SamplingParameters) -> None:
        peak, self.best = logits.max(-1)
        self.sound = peak.isfinite()
        self.probs = None if sampling.greedy else sampler_for(sampling)(logits)

    def of(self, tokens: Tensor) -> Tensor:
        """Probability of one token per row."""
        if self.probs is None:
            return (self.best == tokens).float()
        return self.probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """Nats, per row."""
        if self.probs is None:
            return torch.zeros(len(self.best), device=self.best.device)
        return torch.special.entr(self.probs).sum(-1)


def compare(
    tokens: Tensor,
    target: Law | None,
    draft_logits: Tensor,
    sampling: SamplingParameters,
) -> Tensor:
    """Compare both laws at some tokens.

    Args:
        tokens: [n] the target's tokens.
        target: its laws; None where it is greedy, so that its law is a point on the token.
        draft_logits: [n, vocab].
        sampling: of both.

    Returns:
        The rows of NUMBERS (probabilities, not yet logarithms) and the two that say whether logits
        are finite, [NUMBERS + 2, n], float64 on the host.
    """
    draft = Law(draft_logits, sampling)
    match = (draft.best == tokens).float()
    if target is None:
        one, zero = torch.ones_like(match), torch.zeros_like(match)
        rows = [one, match, match, match, match, match, zero, zero, one]
    else:
        at_best = target.of(draft.best)
        ratio, exact = _overlaps(target, draft, at_best)
        rows = [target.of(tokens), draft.of(tokens), match, ratio, exact, at_best]
        rows += [target.entropy(), draft.entropy(), target.sound]
    return torch.stack([row.float() for row in [*rows, draft.sound]]).cpu().double()


def _overlaps(target: Law, draft: Law, at_best: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of min(target, draft) and of target x draft over the vocabulary."""
    if target.probs is None or draft.probs is None:
        return at_best, at_best
    shared = torch.minimum(target.probs, draft.probs).sum(-1).clamp_max(1.0)
    return shared, (target.probs * draft.probs).sum(-1).clamp_max(1.0)

"""Accept or correct: the rule that makes speculative decoding lossless.

Output tokens of a round = accepted draft tokens + one token of the target's own, which is a
correction after a rejection and a bonus after K acceptances (Leviathan et al. 2023, algorithm 1;
Chen et al. 2023, algorithm 2). Every function is vectorised over the round's positions, stays on
the device and takes its uniforms as an argument, so a test can integrate over them exactly.

Where the target's logits are not finite no draft token is accepted, and its own token is BROKEN.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from harness.decoding.sampling import inverse_cdf, most_likely, unless_broken


class Decision(NamedTuple):
    """How one round ends, still on the device.

    Attributes:
        accepted: [] how many draft tokens stand.
        next_token: [] the target's own token after them, or BROKEN.
    """

    accepted: Tensor
    next_token: Tensor


def verify_greedy(target_logits: Tensor, draft_tokens: Tensor) -> Decision:
    """Accept while the draft's token is the target's argmax.

    Args:
        target_logits: [n + 1, vocab] after the last emitted token and after each draft token.
        draft_tokens: [n].
    """
    choices = most_likely(target_logits)
    accepted = _leading(choices[:-1] == draft_tokens)
    return Decision(accepted, _at(choices, accepted))


def verify_sampled(
    target_probs: Tensor,
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    accept_uniforms: Tensor,
    resample_uniforms: Tensor,
) -> Decision:
    """Accept with probability min(1, target / draft); correct from the positive part left over.

    Args:
        target_probs: [n + 1, vocab], after the sampling parameters.
        draft_tokens: [n].
        draft_probs: [n, vocab] the distributions the tokens were drawn from, likewise, of no more
            tokens than the target's; None where each token was chosen with certainty.
        accept_uniforms: [n] in (0, 1].
        resample_uniforms: [n + 1] in (0, 1]; entry i decides the target's own token at position i.
    """
    count = draft_tokens.shape[0]
    if count == 0:
        zero = torch.zeros((), dtype=torch.long, device=target_probs.device)
        own = inverse_cdf(target_probs[0], resample_uniforms[0])
        return Decision(zero, unless_broken(own, target_probs[0, 0]))
    columns = draft_tokens.unsqueeze(-1)
    target_mass = target_probs[:-1].gather(-1, columns).squeeze(-1)
    if draft_probs is None:
        keep = accept_uniforms <= target_mass
    else:
        keep = accept_uniforms * draft_probs.gather(-1, columns).squeeze(-1) <= target_mass
    # The second condition is what "the target gives it zero" means, whatever underflows on the left
    accepted = _leading(keep & (target_mass > 0))
    place = accepted.unsqueeze(0)
    row = target_probs.index_select(0, place)
    rejected_at = place.clamp(max=count - 1)
    was_rejected = (place < count).to(row.dtype)
    if draft_probs is None:
        taken = torch.zeros_like(row).scatter_(1, columns.index_select(0, rejected_at), 1.0)
    else:
        taken = draft_probs.index_select(0, rejected_at)
        if taken.shape[-1] < row.shape[-1]:  # a draft whose embedding is padded to fewer rows
            taken = functional.pad(taken, (0, row.shape[-1] - taken.shape[-1]))
    residual = (row - taken * was_rejected).clamp_min(0)
    # Draft and target equal up to rounding can leave nothing; the target's own distribution is then
    # the limit, and no rejection happens there in exact arithmetic.
    residual = torch.where(residual.sum() > 0, residual, row)
    own = inverse_cdf(residual, resample_uniforms.index_select(0, place))
    return Decision(accepted, unless_broken(own, row[:, 0]).squeeze(0))


def verify_exact_match(
    target_probs: Tensor, draft_tokens: Tensor, resample_uniforms: Tensor
) -> Decision:
    """Let the target draw its own token everywhere; accept while the two draws are equal.

    The rule of mlx-lm (mlx_lm/generate.py, `speculative_generate_step`). Lossless as well, since
    every emitted token is the target's draw, but it accepts less often than the ratio.

    Args:
        target_probs: [n + 1, vocab], after the sampling parameters.
        draft_tokens: [n], drawn with other uniforms than these.
        resample_uniforms: [n + 1] in (0, 1].
    """
    choices = unless_broken(inverse_cdf(target_probs, resample_uniforms), target_probs[:, 0])
    accepted = _leading(choices[:-1] == draft_tokens)
    return Decision(accepted, _at(choices, accepted))


def verify_synthetic(
    target: Tensor,
    accept_uniforms: Tensor,
    conditional_rates: Tensor,
    resample_uniforms: Tensor | None,
) -> Decision:
    """Accept with given probabilities, whatever the models compute: synthetic acceptance.

    The target's own token follows, so the loop does all that it does otherwise, but the text has
    not the target's distribution. What vLLM calls `rejection_sample_method: synthetic`.

    Args:
        target: [n + 1, vocab] its logits, or where tokens are drawn its probabilities.
        accept_uniforms: [n] in (0, 1].
        conditional_rates: [n] chance of each position, given that those before it were accepted.
        resample_uniforms: [n + 1] in (0, 1] decide the target's own token; None takes the argmax.
    """
    keep = accept_uniforms <= conditional_rates
    if resample_uniforms is None:
        choices = most_likely(target)
        accepted = _leading(keep & (choices[:-1] >= 0))
        return Decision(accepted, _at(choices, accepted))
    accepted = _leading(keep & target[:-1, 0].isnan().logical_not())
    probs = _at(target, accepted)
    own = inverse_cdf(probs, _at(resample_uniforms, accepted))
    return Decision(accepted, unless_broken(own, probs[0]))


@cache
def rates_on(rates: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The rates as a tensor [n], the same one for the same rates, and never freed.

    A recorded graph reads the memory that it was recorded with, also after the generation that used
    these rates first.
    """
    return torch.tensor(rates, dtype=dtype, device=device)


def _at(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index] for an index on the device; plain indexing would read it back to the host."""
    return rows.index_select(0, index.reshape(1)).squeeze(0)


def _leading(flags: Tensor) -> Tensor:
    """How many flags are true before the first that is not."""
    return flags.cumprod(0).sum()

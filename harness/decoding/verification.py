"""The acceptance rules on the device: accept or correct, so that decoding stays lossless.

Output tokens of a round = accepted draft tokens + one token of the target's own, which is a
correction after a rejection and a bonus after K acceptances (Leviathan et al. 2023, algorithm 1;
Chen et al. 2023, algorithm 2). Every function is vectorised over the round's positions, stays on
the device and takes its uniforms as an argument, so a test can integrate over them exactly.

Block verification (Sun et al. 2024, arXiv 2403.10444) judges the drafted tokens together, and
accepts no fewer of them in expectation.

Where the target's logits are not finite no draft token is accepted, and its own token is BROKEN.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from harness.decoding.sampling import inverse_cdf, most_likely, unless_broken
from harness.records import Rule


class Decision(NamedTuple):
    """The end of a round: the number [] of accepted tokens, the target's own [] or BROKEN."""

    accepted: Tensor
    next_token: Tensor


def verify_greedy(target_logits: Tensor, draft_tokens: Tensor) -> Decision:
    """Accept draft tokens [n] while they are the argmax of target logits [n + 1, vocab]."""
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
    """Accept with probability min(1, target / draft); correct from the positive residual.

    Args:
        target_probs: [n + 1, vocab], after the sampling parameters.
        draft_tokens: [n].
        draft_probs: [n, vocab] the distributions the tokens were sampled from, after the sampling
            parameters; the vocabulary may be smaller than the target's. None where tokens were not
            sampled.
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
    # The second condition rejects tokens of zero target mass even if the left side underflows to 0
    accepted = _leading(keep & (target_mass > 0))
    place = accepted.unsqueeze(0)
    row = target_probs.index_select(0, place)
    rejected_at = place.clamp(max=count - 1)
    was_rejected = (place < count).to(row.dtype)
    if draft_probs is None:
        taken = torch.zeros_like(row).scatter_(1, columns.index_select(0, rejected_at), 1.0)
    else:
        taken = _widened(draft_probs.index_select(0, rejected_at), row)
    residual = (row - taken * was_rejected).clamp_min(0)
    # Where draft and target are equal up to rounding, the residual may be 0. No rejection happens
    # there in exact arithmetic; the target's own distribution is the limit.
    residual = torch.where(residual.sum() > 0, residual, row)
    own = inverse_cdf(residual, resample_uniforms.index_select(0, place))
    return Decision(accepted, unless_broken(own, row[:, 0]).squeeze(0))


def verify_block(
    target_probs: Tensor,
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    accept_uniforms: Tensor,
    resample_uniforms: Tensor,
) -> Decision:
    """Judge the drafted tokens together: block verification (Sun et al. 2024, algorithm 2).

    With p_0 = 1 and p_i = min(1, p_i-1 target(x_i) / draft(x_i)), the residual after x_1 .. x_i is
    max(0, p_i target - draft), S_i is its sum, h_i = S_i / (S_i + 1 - p_i) before the last token
    and h_n = p_n. The accepted length is the largest i whose uniform is at most h_i, so a later
    token can save an earlier one. The target's own token is drawn from the residual there, or after
    all n from its distribution.

    Args:
        target_probs, draft_tokens, draft_probs, accept_uniforms, resample_uniforms: as in
            `verify_sampled`. Tokens that were not sampled are judged one by one, which accepts as
            many. Where one of the target's distributions is not finite, the tokens before it are
            accepted and the target's own is BROKEN.
    """
    if draft_probs is None or not len(draft_tokens):
        return verify_sampled(
            target_probs, draft_tokens, draft_probs, accept_uniforms, resample_uniforms
        )
    columns, dtype = draft_tokens.unsqueeze(-1), accept_uniforms.dtype
    target_mass = target_probs[:-1].gather(-1, columns).squeeze(-1).to(dtype)
    draft_mass = draft_probs.gather(-1, columns).squeeze(-1).to(dtype)
    # log p is the sum of logarithms less its highest value so far, which is at least 0
    ratios = target_mass.log() - draft_mass.clamp_min(torch.finfo(dtype).tiny).log()
    summed = ratios.cumsum(0)
    stands = (summed - summed.cummax(0).values.clamp_min(0)).exp()
    before = torch.cat([torch.ones_like(stands[:1]), stands[:-1]])
    rows = target_probs[:-1]
    residuals = before.unsqueeze(-1).to(rows.dtype) * rows - _widened(draft_probs, rows)
    residuals = residuals.clamp_min(0)
    left = residuals[1:].sum(-1).to(dtype)
    # 0 / 0 where target and draft are equal: all later tokens are accepted there
    limits = torch.where(left > 0, left / (left + 1 - stands[:-1]), (stands[:-1] >= 1).to(dtype))
    limits = torch.cat([limits, stands[-1:]])
    lengths = torch.arange(1, len(draft_tokens) + 1, device=limits.device)
    accepted = (lengths * (accept_uniforms <= limits)).amax()
    finite = _leading(target_probs[:, 0].isfinite())
    accepted = torch.where(finite < len(target_probs), finite, accepted)
    row = _at(target_probs, accepted)
    residual = _at(torch.cat([residuals, target_probs[-1:]]), accepted)
    residual = torch.where(residual.sum() > 0, residual, row)
    own = inverse_cdf(residual, _at(resample_uniforms, accepted))
    return Decision(accepted, unless_broken(own, row[0]))


def verify_exact_match(
    target_probs: Tensor,
    draft_tokens: Tensor,
    _draft_probs: Tensor | None,
    _accept_uniforms: Tensor,
    resample_uniforms: Tensor,
) -> Decision:
    """Sample the target's own token at every position; accept while it equals the draft's.

    The rule of mlx-lm (mlx_lm/generate.py, `speculative_generate_step`). Lossless as well, since
    every emitted token is the target's draw, but it accepts less often than the ratio.

    Args:
        target_probs: [n + 1, vocab], after the sampling parameters.
        draft_tokens: [n], sampled with other uniforms than these.
        resample_uniforms: [n + 1] in (0, 1]. The other arguments, for other rules, are not read.
    """
    choices = unless_broken(inverse_cdf(target_probs, resample_uniforms), target_probs[:, 0])
    accepted = _leading(choices[:-1] == draft_tokens)
    return Decision(accepted, _at(choices, accepted))


# The verification of each rule above temperature 0; arguments as in `verify_sampled`. Other facts
# of a rule are in its `harness.theory.acceptance_rules.AcceptanceRule`.
VERIFY: Mapping[Rule, Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor], Decision]] = {
    "ratio": verify_sampled,
    "exact_match": verify_exact_match,
    "greedy_draft": verify_sampled,  # without probabilities, since its tokens are not sampled
    "block": verify_block,
}


def verify_synthetic(
    target: Tensor,
    accept_uniforms: Tensor,
    conditional_rates: Tensor,
    resample_uniforms: Tensor | None,
) -> Decision:
    """Accept with given probabilities, whatever the models compute: synthetic acceptance.

    The target's own token follows, so the loop does its usual work, but the text does not have the
    target's distribution. vLLM calls it `rejection_sample_method: synthetic`.

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
    """The rates as a tensor [n], the same tensor for the same rates, and never freed.

    A recorded graph reads the memory that it was recorded with, also in later generations.
    """
    return torch.tensor(rates, dtype=dtype, device=device)


def _at(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index] for an index on the device; plain indexing would be a host read."""
    return rows.index_select(0, index.reshape(1)).squeeze(0)


def _widened(draft_probs: Tensor, like: Tensor) -> Tensor:
    """The draft's rows as wide as the target's: its embedding may be padded to fewer rows."""
    missing = like.shape[-1] - draft_probs.shape[-1]
    return functional.pad(draft_probs, (0, missing)) if missing else draft_probs


def _leading(flags: Tensor) -> Tensor:
    """The number of true flags before the first false one."""
    return flags.cumprod(0).sum()

"""Does speculation leave the output unchanged? Texts at T = 0, distributions at T > 0.

Greedy texts must agree token by token. In 16 bits a verify of K + 1 positions rounds differently
from K + 1 steps, and a near tie may fall the other way: that is a TIE when both tokens are within
twice the rounding error of the best one, and a FAIL otherwise. The error is measured at that very
position, from several ways to compute the same logits; more than rounding can do is a FAIL.
In a mixture of experts rounding also decides between experts whose scores nearly tie. What that
does to the logits is measured too (`harness.models.routing`): within it is a TIE; where it may do
as much as a wrong cache does, the texts cannot be judged: UNJUDGED.

Sampled texts cannot be compared, but distributions can. One text is forced; for each offset of a
round the draft tokens before it are made to stand, so the token there must follow the target's
distribution given that text, whether it was drafted, corrected or a bonus: a chi-square against the
exact probabilities.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import chdtrc
from torch import Tensor
from transformers import PreTrainedModel

from harness.decoding.drafters import HeadDrafter
from harness.decoding.lookups import LookupDrafter
from harness.decoding.loops import autoregressive_rounds
from harness.decoding.protocols import CausalModel, Generation
from harness.decoding.sampling import (
    SamplingParameters,
    Uniforms,
    inverse_cdf,
    penalised,
    penalised_along,
    sampler_for,
    seen_tokens,
)
from harness.decoding.verification import VERIFY
from harness.models.routing import tie_spread
from harness.records import BrokenLogitsError, Rule, first_difference
from harness.summary import DistributionTest, TextCheck
from harness.theory.acceptance_rules import ACCEPTANCE_RULES

LEAST_EXPECTED = 5.0
ROUNDING_FACTOR = 2.0
# Rounding changes logits by at most MOST_SHARE of their spread in 32 bits, and MOST_ULPS times
# eps in 16 (24 random layers in bfloat16 gave 3.3); more means that a cache or a forward is wrong.
MOST_SHARE, MOST_ULPS = 1e-3, 8
COARSE_EPS = 1e-4
# Units in the last place of the best logit by which texts may differ although the compared forwards
# agree (in 24 random bfloat16 layers, 3 between the best two where the forwards agreed)
LEAST_ULPS = 2
# Near ties of routers that change logits by more than this share of their spread leave a text
# unjudged: states that were not rewound change them by more than half of it
MOST_BY_ROUTING = 0.25
# A uniform so small that any token of positive probability stands.
ALWAYS = 1e-300


def compare_texts(
    target: CausalModel,
    prompt: Sequence[int],
    plain: Sequence[int],
    speculative: Sequence[int],
    check: TextCheck,
    dtype: torch.dtype | None = None,
    repetition_penalty: float | None = None,
    network: PreTrainedModel | None = None,
    noise: float | None = None,
) -> TextCheck:
    """Compare two greedy texts of one prompt and, where they differ, ask whether it is a tie.

    `check` names the texts and gets the result, its K is for the width of the verify; `dtype` is
    what the target computes in, None for that of its logits; `network` is transformers' model,
    whose routers are asked; `noise` is how far below the best a token of the plain text is anyway,
    where an engine decoded it that computes in another way.
    """
    position = first_difference(plain, speculative)
    if position is None:
        return replace(check, result="PASS")
    emitted = [text[position] for text in (plain, speculative) if position < len(text)]
    prefix = [*prompt, *plain[:position]]
    seen = None
    if repetition_penalty is not None:
        seen = seen_tokens(prefix, target.vocab_size, target.device)
    ways = (
        penalised(logits.unsqueeze(0), seen, repetition_penalty)[0]
        for logits in _forward_ways(target, prompt, plain, position, check.k)
    )
    computed = [next(ways), next(ways)]
    first, second = _margin(computed[0]), _margin(computed[1])
    check = replace(check, first_difference=position, target_margin=first, verify_margin=second)
    dtype = dtype or computed[0].dtype
    tie, rounding = _is_tie(computed, ways, emitted, dtype)
    if not tie and noise is not None and len(emitted) > 1:
        tie = _gap(computed, emitted) <= ROUNDING_FACTOR * noise
    check = replace(check, result="TIE" if tie else "FAIL", rounding=rounding, noise=noise)
    if tie or len(emitted) < 2 or network is None:
        return check
    routing = tie_spread(network, prefix, target.vocab_size)
    if not routing:
        return replace(check, result="UNJUDGED") if routing is None else check
    tie, rounding = _is_tie(computed, ways, emitted, dtype, routing)
    beyond = routing > MOST_BY_ROUTING * _spread(torch.stack([row.float() for row in computed]))
    result = "UNJUDGED" if beyond else "TIE" if tie else "FAIL"
    return replace(check, result=result, rounding=rounding, routing=routing)


def _is_tie(
    computed: list[Tensor],
    more: Iterator[Tensor],
    emitted: Sequence[int],
    dtype: torch.dtype,
    routing: float = 0.0,
) -> tuple[bool, float]:
    """True where rounding decides between two tokens, and the largest difference between two ways.

    Args:
        computed: logits [vocab] in two ways or more; of `more` are added where these do not tell.
        routing: how much near ties of routers change them, besides.
    """
    eps = torch.finfo(dtype).eps
    share = MOST_ULPS * eps if eps > COARSE_EPS else MOST_SHARE
    while True:
        logits = torch.stack([row.float() for row in computed])
        finite = logits[:, logits.isfinite().all(0)]  # suppressed tokens are -inf every way
        largest = float((finite.amax(0) - finite.amin(0)).max())
        top = float(finite.amax(-1).abs().max())
        # To allow for even where the ways agree, since texts are computed in other ways too
        least = LEAST_ULPS * eps * 2.0 ** math.floor(math.log2(max(top, 1e-30)))
        # A difference above this is not rounding
        most = max(share * _spread(logits), least, ROUNDING_FACTOR * routing)
        # No rounding shortens a text, which ends by a token like any other
        if len(emitted) < 2 or not largest <= most:
            return False, largest
        if _gap(computed, emitted) <= ROUNDING_FACTOR * max(largest, least, routing):
            return True, largest
        another = next(more, None)
        if another is None:
            return False, largest
        computed.append(another)


def _gap(computed: Sequence[Tensor], emitted: Sequence[int]) -> float:
    """The margin of the less likely of two tokens below the best logit, in one of the ways."""
    rows = (row.float() for row in computed)
    return min(float(row.max() - row[list(emitted)].min()) for row in rows)


def _forward_ways(
    target: CausalModel,
    prompt: Sequence[int],
    plain: Sequence[int],
    position: int,
    num_draft_tokens: int,
) -> Iterator[Tensor]:
    """Logits [vocab] that decide the plain text's token at `position`, computed in four ways.

    A one-token step and a verify that ends there, both after a prefill; a verify that begins there;
    and the steps of plain decoding, which take as long as the text.
    """

    def after(prefill: Sequence[int], fed: Sequence[int], row: int) -> Tensor:
        target.prefill(prefill)
        return target.forward(torch.tensor(fed, device=target.device))[row]

    prefix = [*prompt, *plain[:position]]
    yield after(prefix[:-1], prefix[-1:], -1)
    width = min(num_draft_tokens + 1, len(prefix))
    yield after(prefix[:-width], prefix[-width:], -1)
    follow = [*plain[position:], *prompt][:num_draft_tokens]
    yield after(prefix[:-1], [*prefix[-1:], *follow], 0)
    logits = after(prompt[:-1], prompt[-1:], -1)
    for token in plain[:position]:
        target.rewind(0)
        logits = target.forward(torch.tensor([token], device=target.device))[-1]
    yield logits


def _spread(logits: Tensor) -> float:
    """The range of the logits [ways, vocab] that are finite in every way."""
    finite = logits[:, logits.isfinite().all(0)]
    return float(finite.max() - finite.min())


def _margin(logits: Tensor) -> float:
    best, second = logits.float().topk(2).values.tolist()
    return best - second


class _ForcedRounds(NamedTuple):
    """Rounds in which the draft tokens before an offset are made to stand."""

    forced: Tensor  # [K] the text's tokens
    target: Tensor  # [K + 1, vocab] distributions along them
    draft: Tensor  # [K, vocab]; a row of zeros where nothing is proposed
    chosen: bool  # whether the draft proposes its most likely token, and does not draw
    forcing: Tensor  # [K] uniforms by which the target draws the forced tokens
    rule: Rule

    def drawn_at(self, offset: int, draws: int, seed: int) -> Iterator[int]:
        """Tokens at an offset of rounds in which the forced tokens stand, without end."""
        for attempt in itertools.count():
            name = f"snapshot/{offset}/{attempt}" if attempt else f"snapshot/{offset}"
            # The second half decides whether the forced tokens stand, where that is drawn
            uniforms = Uniforms.keyed(seed, name, 0, 2 * draws, self.forced.device)
            made = (self._draw_at(offset, index, uniforms) for index in range(draws))
            yield from (token for token in made if token is not None)

    def _draw_at(self, offset: int, index: int, uniforms: Uniforms) -> int | None:
        """One token at `offset`, from a round whose earlier draft tokens are forced to stand.

        Block verification judges tokens together: what follows is the target's given that at least
        so many stand, however that came about. So whether they do is drawn; None where they do not.
        """
        before = offset - 1
        tokens = self.forced[:before]
        if offset <= len(self.forced) and self.draft[before].any():
            row = self.draft[before]
            if self.chosen:
                proposed = row.argmax().unsqueeze(0)
            else:
                proposed = inverse_cdf(row, uniforms.draft[index]).unsqueeze(0)
            tokens = torch.cat([tokens, proposed])
        target = self.target[: len(tokens) + 1]
        resample = uniforms.resample[index].expand(len(tokens) + 1).clone()
        resample[:before] = self.forcing[:before]
        accept = torch.full_like(resample[:-1], ALWAYS)
        accept[before:] = uniforms.accept[index]
        draft = None if self.chosen else self.draft[: len(tokens)]
        if ACCEPTANCE_RULES[self.rule].judges_together and before and draft is not None:
            accept[before - 1] = uniforms.accept[len(uniforms.accept) // 2 + index]
        decision = VERIFY[self.rule](target, tokens, draft, accept, resample)
        accepted = int(decision.accepted)
        if accepted < before:
            return None
        return int(tokens[before]) if accepted > before else int(decision.next_token)


def distribution_tests(
    target: CausalModel,
    draft: CausalModel | LookupDrafter | HeadDrafter,
    prompts: Iterable[Sequence[int]],
    *,
    num_draft_tokens: int,
    sampling: SamplingParameters,
    rule: Rule,
    draws: int,
    seed: int,
) -> list[DistributionTest]:
    """Draw the token at every offset 1..K + 1 after one forced text, and test its distribution.

    The production verification decides each of the `draws` per offset; only its uniforms for the
    forced tokens are chosen, so that they stand. Of the prompts the one is taken after which the
    target is least certain at its most certain offset: where the next token is nearly certain,
    draws cannot tell one distribution from another.

    Returns:
        A test per offset, not yet judged: its result is PASS.

    Raises:
        BrokenLogitsError: logits of the target or the draft are not finite.
    """

    def forced_after(prompt: Sequence[int]) -> tuple[Sequence[int], Tensor, Tensor]:
        # The target's own text, so that every token of it can stand
        uniforms = Uniforms.keyed(seed, "snapshot/forced", 0, num_draft_tokens, target.device)
        target.prefill(prompt[:-1])
        generation = Generation(prompt, num_draft_tokens, sampling, uniforms)
        rounds = autoregressive_rounds(target, generation)
        forced = torch.tensor([entry.tokens[0] for entry in rounds], device=target.device)
        return prompt, forced, _probs_along(target, prompt, forced, sampling, "target")

    prompt, forced, target_probs = max(
        map(forced_after, prompts), key=lambda each: float((1.0 - each[2].max(-1).values).min())
    )
    if isinstance(draft, LookupDrafter):
        draft_probs = _looked_up_along(draft, prompt, forced, target_probs)
    elif isinstance(draft, HeadDrafter):
        target.prefill(prompt[:-1])
        draft_probs = _head_drafted_along(draft, prompt, forced, sampling, target_probs)
    else:
        draft_probs = _probs_along(draft, prompt, forced, sampling, "draft")[:-1]
    rounds = _ForcedRounds(
        forced,
        target_probs,
        draft_probs.to(target.device),
        ACCEPTANCE_RULES[rule].draft_chooses or isinstance(draft, LookupDrafter),
        _cell_midpoints(target_probs[:-1], forced),
        rule,
    )
    tests: list[DistributionTest] = []
    for offset in range(1, num_draft_tokens + 2):
        drawn = [*itertools.islice(rounds.drawn_at(offset, draws, seed), draws)]
        test = chi_square(drawn, target_probs[offset - 1])
        cell = (sampling.temperature, num_draft_tokens, offset, draws)
        tests.append(DistributionTest(*cell, *test, result="PASS"))
    return tests


def _head_drafted_along(
    head: HeadDrafter,
    prompt: Sequence[int],
    forced: Tensor,
    sampling: SamplingParameters,
    target_probs: Tensor,
) -> Tensor:
    """A head's distributions [K, vocab]; the target must have read the prompt."""
    head.begin(prompt)
    logits = head.logits_along(forced)
    drafted = _sampled(logits, prompt, forced[: max(0, len(logits) - 1)], sampling, "draft")
    probs = torch.zeros_like(target_probs[:-1])
    probs[: len(drafted)] = drafted
    return probs


def _looked_up_along(
    drafter: LookupDrafter, prompt: Sequence[int], forced: Tensor, like: Tensor
) -> Tensor:
    """One where a look-up's next token is, after the prompt and each forced token but the last.

    [len(forced), vocab], of the width and kind of `like`.
    """
    rows = torch.zeros_like(like[:-1])
    drafter.begin(prompt)
    for row, token in zip(rows, forced.tolist(), strict=True):
        row[drafter.draft(1)] = 1.0
        drafter.append([token])
    return rows


def _probs_along(
    model: CausalModel,
    prompt: Sequence[int],
    forced: Tensor,
    sampling: SamplingParameters,
    who: str,
) -> Tensor:
    """Sampling probabilities after the prompt and each forced token, [len(forced) + 1, vocab].

    The model's cache then holds the prompt and the forced tokens.
    """
    model.prefill(prompt[:-1])
    last = torch.tensor(prompt[-1:], device=model.device)
    logits = model.forward(torch.cat([last, forced.to(model.device)]))
    return _sampled(logits, prompt, forced, sampling, who)


def _sampled(
    logits: Tensor, prompt: Sequence[int], before: Tensor, sampling: SamplingParameters, who: str
) -> Tensor:
    """Probabilities of logits [n, vocab] after the prompt and each of the n - 1 tokens before.

    Raises:
        BrokenLogitsError: a row's largest is not finite.
    """
    broken = (~logits.amax(-1).isfinite()).nonzero()
    if len(broken):
        raise BrokenLogitsError(who, int(broken[0]))
    penalty = sampling.repetition_penalty
    return sampler_for(sampling)(penalised_along(logits, prompt, before, penalty))


def _cell_midpoints(probs: Tensor, tokens: Tensor) -> Tensor:
    """For each row, a uniform at which the inverse CDF gives the row's token."""
    probs = probs.float() if probs.device.type == "mps" else probs.double()  # MPS has no float64
    running = probs.cumsum(-1)
    upper = running.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    mass = probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return (upper - mass / 2) / running[:, -1]


def chi_square(drawn: Sequence[int], distribution: Tensor) -> tuple[int, float, float]:
    """Test drawn tokens against `distribution` [vocab]; rare tokens are pooled into one cell.

    A single cell, where the distribution is nearly certain, cannot be tested and has p = 1; a drawn
    token that it gives zero has p = 0 whatever its cell.

    Returns:
        The number of cells, the statistic, and its p-value.
    """
    probs = distribution.double().cpu().numpy()
    counts = np.bincount(np.asarray(drawn), minlength=len(probs)).astype(np.float64)
    expected = probs / probs.sum() * len(drawn)
    if counts[expected == 0].sum() > 0:
        return 1, float("inf"), 0.0
    common = expected >= LEAST_EXPECTED
    cells = np.array([counts[common], expected[common]])
    rest = np.array([counts[~common].sum(), expected[~common].sum()])
    if rest[1] >= LEAST_EXPECTED or not common.any():
        cells = np.column_stack([cells, rest])
    else:
        # Too rare for a cell of their own: together with the rarest of the others
        cells[:, cells[1].argmin()] += rest
    bins = cells.shape[1]
    if bins == 1:
        return 1, 0.0, 1.0
    statistic = float(((cells[0] - cells[1]) ** 2 / cells[1]).sum())
    return bins, statistic, float(chdtrc(bins - 1, statistic))

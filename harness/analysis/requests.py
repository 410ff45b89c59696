"""The whole request, prefills included: what a user waits for.

Speculation adds the draft's prefill and saves decoding, so it gains less on a request than on its
decoding, and may lose where the prompt is long and the answer short. Prefill is taken as linear in
the prompt's tokens, from the timed prefill, which understates a long prompt's attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.analysis.evidence import Candidate
from harness.analysis.replays import Replays
from harness.analysis.step_latency import Latency, round_costs
from harness.records import UserError
from harness.stats.intervals import Array

PERCENTILE = 95


@dataclass(frozen=True)
class RequestCell:
    """The request's speedup at one prompt length and output length."""

    draft: str
    k: int
    prompt_tokens: int
    output_tokens: int
    plain_s: float
    speculative_s: float
    request_speedup: float


@dataclass(frozen=True)
class RequestView:
    """Predicted requests of one candidate.

    Attributes:
        draft, k, temperature: of the candidate.
        cells: prompt length x output length.
        plain_p95_s, speculative_p95_s: request latency's 95th percentile over the prompts seen.
        slowed_share: share of the prompts whose request gets slower.
        decode_slowed_share: likewise of the decoding alone.
        prompts: how many there are.
    """

    draft: str
    k: int
    temperature: float
    cells: tuple[RequestCell, ...]
    plain_p95_s: float
    speculative_p95_s: float
    slowed_share: float
    decode_slowed_share: float
    prompts: int


def prefill_seconds(
    replays: Replays, latency: Latency, *, draft: bool, lookup: bool
) -> Array | None:
    """Prefill seconds of each prompt, its repetitions added up, [n]; None where unknown.

    Args:
        replays: whose prompt lengths.
        latency: prefill seconds per token.
        draft: whether to add the draft's to the target's.
        lookup: whether the draft is a look-up, which has no prefill.
    """
    if latency.target_prefill_s is None:
        return None
    rate = latency.target_prefill_s
    if draft and not lookup:
        if latency.draft_prefill_s is None:
            return None
        rate += latency.draft_prefill_s
    return replays.prompt_tokens * rate


def request_view(
    replays: Replays,
    name: Candidate,
    latency: Latency,
    *,
    prompt_lengths: Sequence[int] = (128, 512, 2048, 8192),
    output_lengths: Sequence[int] = (16, 64, 256, 1024),
) -> RequestView:
    """Predict whole requests with one candidate.

    Args:
        replays: where it was replayed.
        name: (draft, K).
        latency: its step and prefill times.
        prompt_lengths: rows of the table, tokens.
        output_lengths: columns, tokens; acceptance is taken as on the texts seen.

    Raises:
        UserError: a candidate that was not replayed, lengths below 1, or unknown prefill times.
    """
    if name not in replays.candidates:
        raise UserError(f"draft={name[0]} k={name[1]}: not replayed; audition it first")
    if min([*prompt_lengths, *output_lengths], default=1) < 1:
        raise UserError("request lengths: each must be 1 token or more")
    (draft, k), counts = name, replays.candidates[name]
    lookup = draft in replays.lookups
    plain = prefill_seconds(replays, latency, draft=False, lookup=lookup)
    both = prefill_seconds(replays, latency, draft=True, lookup=lookup)
    if plain is None or both is None:
        raise UserError(f"latency: no prefill time for draft {draft!r} or its target; time them")
    decode = counts.proposals @ round_costs(latency.times, k, lookup=lookup)
    slow = counts.new_tokens * latency.times.target_s
    before, after = (plain + slow) / replays.texts, (both + decode) / replays.texts
    tokens = replays.prompt_tokens.sum()
    rates = [float(part.sum() / tokens) for part in (plain, both)]
    per_token = float(decode.sum() / counts.new_tokens.sum())
    return RequestView(
        draft=draft,
        k=k,
        temperature=replays.temperature,
        cells=tuple(
            _cell(name, length, output, rates, (latency.times.target_s, per_token))
            for length in prompt_lengths
            for output in output_lengths
        ),
        plain_p95_s=float(np.percentile(before, PERCENTILE)),
        speculative_p95_s=float(np.percentile(after, PERCENTILE)),
        slowed_share=float((after > before).mean()),
        decode_slowed_share=float((decode > slow).mean()),
        prompts=len(replays.prompts),
    )


def _cell(
    name: Candidate,
    prompt_tokens: int,
    output_tokens: int,
    prefill_s: Sequence[float],
    per_token_s: Sequence[float],
) -> RequestCell:
    """One entry; the rates are plain decoding's, then the candidate's."""
    plain, speculative = (
        prompt_tokens * prefill + output_tokens * decode
        for prefill, decode in zip(prefill_s, per_token_s, strict=True)
    )
    return RequestCell(*name, prompt_tokens, output_tokens, plain, speculative, plain / speculative)

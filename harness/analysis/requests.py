"""The whole request, prefills included: what a user waits for.

Speculation adds the draft's prefill and saves decoding, so it gains less on a request than on its
decoding, and may lose where the prompt is long and the answer short. Prefill is taken as linear in
the prompt's tokens, from the timed prefill, which understates a long prompt's attention.
"""

from dataclasses import dataclass

import numpy as np

from harness.analysis.evidence import Candidate
from harness.analysis.latency import Latency, round_costs
from harness.analysis.replays import Replays
from harness.records import UserError
from harness.stats.intervals import Array

PERCENTILE = 95


@dataclass(frozen=True)
class RequestView:
    """Predicted requests of one candidate on the prompts that it was replayed on.

    Attributes:
        draft, k, temperature: of the candidate.
        request_speedup: seconds of all requests, plain / speculative.
        p95_baseline_s, p95_speculative_s: request latency's 95th percentile over the prompts.
        share_slower: share of the prompts whose request gets slower.
    """

    draft: str
    k: int
    temperature: float
    request_speedup: float
    p95_baseline_s: float
    p95_speculative_s: float
    share_slower: float


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


def request_view(replays: Replays, name: Candidate, latency: Latency) -> RequestView:
    """Predict whole requests with one candidate.

    Raises:
        UserError: a candidate that was not replayed, or unknown prefill times.
    """
    if name not in replays.candidates:
        raise UserError(f"draft={name[0]} k={name[1]}: not replayed; audition it first")
    (draft, k), counts = name, replays.candidates[name]
    lookup = draft in replays.lookups
    plain = prefill_seconds(replays, latency, draft=False, lookup=lookup)
    both = prefill_seconds(replays, latency, draft=True, lookup=lookup)
    if plain is None or both is None:
        raise UserError(f"latency: no prefill time for draft {draft!r} or its target; time them")
    decode = counts.proposals @ round_costs(latency.times, k, lookup=lookup)
    before = plain + counts.new_tokens * latency.times.target_s
    after = both + decode
    return RequestView(
        draft=draft,
        k=k,
        temperature=replays.temperature,
        request_speedup=float(before.sum() / after.sum()),
        p95_baseline_s=float(np.percentile(before / replays.texts, PERCENTILE)),
        p95_speculative_s=float(np.percentile(after / replays.texts, PERCENTILE)),
        share_slower=float((after > before).mean()),
    )

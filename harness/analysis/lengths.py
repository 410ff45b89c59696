"""Alpha by position in the answer and by length of the context: how acceptance changes with length.

A draft token at position p of an answer was judged with the prompt and p tokens before it. Buckets
double in size, so that a long context has as many as a short one.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from harness.analysis.replayed import in_chunks, padded_traces
from harness.records import Rule, TextTrace
from harness.stats.jackknife import share_interval, token_weights
from harness.summary import LengthAlpha
from harness.theory.replay import Array, at_positions, endings

# Upper end of the first bucket
FIRST = 16
AXES: tuple[Literal["answer", "context"], ...] = ("answer", "context")


def length_alpha(
    by_draft: Mapping[str, Sequence[TextTrace]],
    rule: Rule,
    k: int,
    weights: Mapping[str, float] | None = None,
) -> Iterator[LengthAlpha]:
    """Alpha of every draft in every bucket that it was judged in, at one K.

    Args:
        by_draft: the traces of each draft, of one temperature.
        rule: the acceptance rule.
        k: at most what was scored.
        weights: of the prompt sets; None counts every token alike.
    """
    for draft, traces in by_draft.items():
        judged, accepted = _judged(traces, rule, k)
        if weights is not None:
            tokens = np.array([len(trace.tokens) for trace in traces], dtype=np.float64)
            sets = [trace.prompt_set for trace in traces]
            factors = token_weights(sets, tokens, weights)[:, None] * tokens.sum()
            judged, accepted = judged * factors, accepted * factors
        prompts = sorted({(trace.prompt_set, trace.conversation) for trace in traces})
        row_of = {name: row for row, name in enumerate(prompts)}
        rows = np.array([row_of[trace.prompt_set, trace.conversation] for trace in traces])
        positions = np.arange(judged.shape[1])
        before = np.array([trace.prompt_tokens for trace in traces])
        for axis in AXES:
            place = np.broadcast_to(positions, judged.shape)
            place = place if axis == "answer" else place + before[:, None]
            bucket = length_bucket(place)
            for number in range(int(bucket.max()) + 1):
                inside = bucket == number
                sums = np.zeros((2, len(prompts)))
                for column, counts in enumerate((accepted, judged)):
                    np.add.at(sums[column], rows, np.where(inside, counts, 0.0).sum(axis=1))
                there = sums[1] > 0.0
                total = float(sums[1].sum())
                if not total:
                    continue
                bounds = share_interval(sums[0][there], sums[1][there])
                yield LengthAlpha(
                    temperature=traces[0].temperature,
                    draft=draft,
                    k=k,
                    axis=axis,
                    low=FIRST << (number - 1) if number else 0,
                    high=FIRST << number,
                    prompts=int(there.sum()),
                    alpha=float(sums[0].sum()) / total,
                    alpha_lo=bounds.lo if bounds else None,
                    alpha_hi=bounds.hi if bounds else None,
                )


def length_bucket(place: Array) -> Array:
    """0 below FIRST, then one for each doubling."""
    return np.where(place < FIRST, 0, np.floor(np.log2(np.maximum(place, FIRST) / FIRST)) + 1)


def _judged(traces: Sequence[TextTrace], rule: Rule, k: int) -> tuple[Array, Array]:
    """Draft tokens judged and accepted, (texts, positions), padded with 0."""
    both = np.zeros((2, len(traces), max(len(trace.tokens) for trace in traces)))
    first = 0
    for part in in_chunks(traces, k):
        texts = padded_traces(part, rule, k)
        ends = endings(texts.chances, texts.lengths, k, proposed=texts.proposed)
        counts = at_positions(ends.judged), at_positions(ends.judged - ends.rejected)
        both[:, first : first + len(part), : texts.chances.shape[1]] = counts
        first += len(part)
    return both[0], both[1]

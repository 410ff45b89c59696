"""Alpha by position in the answer and by length of the context: how acceptance changes with length.

A draft token at position p of an answer was judged with the prompt and p tokens before it. Buckets
double in size, so that a long context has as many as a short one.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from harness.analysis.replayed import CHUNK_ENTRIES, accept_chances
from harness.records import Rule, TextTrace
from harness.stats.jackknife import share_interval
from harness.summary import LengthAlpha
from harness.theory.replay import Array, judged_by_position

# Upper end of the first bucket
FIRST = 16
AXES: tuple[Literal["answer", "context"], ...] = ("answer", "context")


def length_alpha(
    by_draft: Mapping[str, Sequence[TextTrace]], rule: Rule, k: int
) -> Iterator[LengthAlpha]:
    """Alpha of every draft in every bucket that it was judged in, at one K.

    Args:
        by_draft: the traces of each draft, of one temperature.
        rule: the acceptance rule.
        k: at most what was scored.
    """
    for draft, traces in by_draft.items():
        judged, accepted = _judged(traces, rule, k)
        prompts = sorted({(trace.prompt_set, trace.conversation) for trace in traces})
        row_of = {name: row for row, name in enumerate(prompts)}
        rows = np.array([row_of[trace.prompt_set, trace.conversation] for trace in traces])
        positions = np.arange(judged.shape[1])
        before = np.array([trace.prompt_tokens for trace in traces])
        for axis in AXES:
            place = np.broadcast_to(positions, judged.shape)
            place = place if axis == "answer" else place + before[:, None]
            bucket = _bucket(place)
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


def _bucket(place: Array) -> Array:
    """0 below FIRST, then one for each doubling."""
    return np.where(place < FIRST, 0, np.floor(np.log2(np.maximum(place, FIRST) / FIRST)) + 1)


def _judged(traces: Sequence[TextTrace], rule: Rule, k: int) -> tuple[Array, Array]:
    """Draft tokens judged and accepted, (texts, positions), padded with 0."""
    lengths = [len(trace.tokens) for trace in traces]
    longest = max(lengths)
    size = max(1, CHUNK_ENTRIES // (longest * (k + 1)))
    both = np.zeros((2, len(traces), longest))
    for first in range(0, len(traces), size):
        part = traces[first : first + size]
        chances = np.zeros((len(part), longest, k))
        proposed = np.full((len(part), longest), k, dtype=np.intp)
        for row, trace in enumerate(part):
            chances[row, : len(trace.tokens)] = accept_chances(trace, rule, k)
            if trace.proposed is not None:
                proposed[row, : len(trace.tokens)] = trace.proposed
        counts = judged_by_position(chances, lengths[first : first + size], k, proposed=proposed)
        both[:, first : first + size] = counts
    return both[0], both[1]

"""Adaptive drafting by replay: every threshold and K from the scores and confidences of a draft.

Rounds are priced by R(n) of rounds that were timed with a fixed number of draft tokens. In those of
a sweep that drafts adaptively every draft step is read back, as a threshold needs it; in an
audition's that is not in it. Threshold and K are chosen on the prompts that they are shown on: no
interval, and no verdict rests on them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.analysis.latency import Latency
from harness.analysis.replayed import in_chunks, padded_traces
from harness.records import DraftConfidence, Rule, TextKey, TextTrace
from harness.stats.jackknife import Array, token_weights
from harness.summary import AdaptiveDrafting, AdaptiveRow
from harness.theory.adaptive import (
    Counts,
    best_k_per_round,
    drafted_by_accepted,
    flag_oracle,
    until_unlikely,
)
from harness.theory.replay import PaddedTexts, Replayed, replay, stacked

# In steps of 0.1: what a user would try
THRESHOLDS = tuple(round(0.1 * step, 1) for step in range(1, 10))


@dataclass(frozen=True, eq=False)
class ScoredTexts:
    """One draft's texts at one temperature, with its confidences, under one rule."""

    traces: Sequence[TextTrace]
    confidences: Mapping[TextKey, DraftConfidence]
    rule: Rule

    def parts(self, depth: int) -> "Iterator[ScoredTexts]":
        """The texts in pieces that fit the memory."""
        for part in in_chunks(self.traces, depth):
            yield ScoredTexts(part, self.confidences, self.rule)

    def padded(self, k: int) -> PaddedTexts:
        """Side by side, with what a round from each start drafts at most."""
        return padded_traces(self.traces, self.rule, k)

    def drafting(self, most: Counts, k: int, threshold: float) -> tuple[Counts, Counts]:
        """Tokens drafted from each start: where all are the text's, and by how many stand.

        Shapes (texts, starts) and (texts, starts, K + 1), as `replay` takes them; `most` are
        drafted at most, (texts, starts).
        """
        along = np.full((*most.shape, k), np.nan)
        away = np.full((most.shape[0], most.shape[1] + 1, k), np.nan)
        for row, trace in enumerate(self.traces):
            values, count = self.confidences[trace.key].values[:, :k], len(trace.tokens)
            away[row, : len(values)] = values
            along[row, :count] = self._along(trace, values, k)
        proposed = np.minimum(until_unlikely(along, threshold), most)
        off_text = until_unlikely(away, threshold)
        if self.traces[0].depth is None:
            return proposed, drafted_by_accepted(proposed, off_text, k)
        drawn = np.minimum(off_text[:, :-1], most)
        return proposed, np.repeat(drawn[:, :, None], k + 1, axis=2)

    def _along(self, trace: TextTrace, values: Array, k: int) -> Array:
        """[n, K] the draft's probability of each token where it is the text's."""
        drawn = trace.temperature > 0.0 and self.rule != "greedy_draft"
        if trace.depth is not None:
            return np.exp(trace.draft_logprob[:, :k]) if drawn else values
        along = np.exp(trace.draft_logprob) if drawn else values[:-1, 0]
        padded = np.pad(along, (0, k - 1), constant_values=np.nan)
        return np.lib.stride_tricks.sliding_window_view(padded, k)


def replayed_adaptively(texts: ScoredTexts, k: int, threshold: float) -> Replayed:
    """Expected counts of each text where a round drafts no more after an unlikely token."""
    parts: list[Replayed] = []
    for part in texts.parts(k):
        padded = part.padded(k)
        proposed, drafted = part.drafting(padded.proposed, k, threshold)
        counts = replay(padded.chances, padded.lengths, [k], proposed=proposed, drafted=drafted)
        parts.append(counts[k])
    return stacked(parts)


def adaptive_drafting(
    texts: ScoredTexts,
    ks: Sequence[int],
    latency: Latency,
    weights: Mapping[str, float] | None = None,
) -> AdaptiveDrafting:
    """The best threshold next to the best fixed K and the two oracles.

    The texts are of one draft and temperature, each K was timed, and sets count alike without
    weights.
    """
    depth, tokens = max(ks), np.array([len(trace.tokens) for trace in texts.traces], dtype=float)
    factors = token_weights([trace.prompt_set for trace in texts.traces], tokens, weights)

    def row(counts: Replayed, threshold: float) -> AdaptiveRow:
        counts = counts.scaled(factors)
        cost = float((counts.proposals @ latency.relative(counts.k)).sum())
        return AdaptiveRow(
            k=counts.k,
            threshold=threshold,
            tokens_per_round=counts.tokens_per_round,
            drafted_per_round=float(counts.drafted.sum() / counts.rounds.sum()),
            speedup=1.0 / cost,
        )

    fixed = [row(replayed_adaptively(texts, k, 0.0), 0.0) for k in ks]
    grid = [row(replayed_adaptively(texts, k, value), value) for k in ks for value in THRESHOLDS]
    best = max(grid, key=lambda entry: entry.speedup)
    cost = latency.relative(depth)
    least: list[list[Array]] = []
    for part in texts.parts(depth):
        padded = part.padded(depth)
        oracles = (best_k_per_round, flag_oracle)
        least.append([oracle(padded.chances, padded.lengths, cost) for oracle in oracles])
    per_round, flags = (np.concatenate(least, axis=1) @ factors).tolist()
    first = texts.traces[0]
    return AdaptiveDrafting(
        draft=first.draft,
        temperature=first.temperature,
        rule=texts.rule,
        fixed=max(fixed, key=lambda entry: entry.speedup),
        best=best,
        thresholds=tuple(entry for entry in grid if entry.k == best.k),
        best_k_per_round=1.0 / per_round,
        flag_oracle=1.0 / flags,
    )

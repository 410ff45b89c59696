"""Adaptive drafting by replay: every threshold and K from the scores and confidences of a draft.

Rounds are priced by R(n) of rounds that were timed with a fixed number of draft tokens; reading
every draft step back, which adaptive drafting needs, is not in it. Threshold and K are chosen on
the prompts that they are shown on: no interval, and no verdict rests on them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.analysis.latency import Latency
from harness.analysis.replayed import CHUNK_ENTRIES, accept_chances
from harness.records import DraftConfidence, Rule, TextKey, TextTrace
from harness.stats.jackknife import Array, set_weights
from harness.summary import AdaptiveDrafting, AdaptiveRow
from harness.theory.adaptive import along_text, best_k_per_round, flag_oracle, off_text
from harness.theory.replay import Replayed, replay, stacked

# In steps of 0.1: what a user would try
THRESHOLDS = tuple(round(0.1 * step, 1) for step in range(1, 10))


@dataclass(frozen=True, eq=False)
class ScoredTexts:
    """One draft's texts at one temperature, with its confidences, under one rule."""

    traces: Sequence[TextTrace]
    confidences: Mapping[TextKey, DraftConfidence]
    rule: Rule

    @property
    def lengths(self) -> list[int]:
        """Tokens of each text."""
        return [len(trace.tokens) for trace in self.traces]

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max(self.lengths)

    def parts(self, depth: int) -> list["ScoredTexts"]:
        """The texts in pieces that fit the memory."""
        size = max(1, CHUNK_ENTRIES // (self.longest * (depth + 1)))
        return [
            ScoredTexts(self.traces[first : first + size], self.confidences, self.rule)
            for first in range(0, len(self.traces), size)
        ]

    def chances(self, depth: int) -> Array:
        """(texts, starts, depth) accept probabilities, padded with 0."""
        padded = np.zeros((len(self.traces), self.longest, depth))
        for row, trace in enumerate(self.traces):
            padded[row, : len(trace.tokens)] = accept_chances(trace, self.rule, depth)
        return padded

    def along(self) -> Array:
        """(texts, positions) the draft's probability of each token where it is the text's."""
        padded = np.ones((len(self.traces), self.longest))
        for row, trace in enumerate(self.traces):
            drawn = trace.temperature > 0.0 and self.rule != "greedy_draft"
            chosen = self.confidences[trace.key].values[:-1, 0]
            padded[row, : len(trace.tokens)] = np.exp(trace.draft_logprob) if drawn else chosen
        return padded

    def away(self, depth: int) -> Array:
        """(texts, starts + 1, depth) its probabilities where it leaves the text, NaN-padded."""
        padded = np.full((len(self.traces), self.longest + 1, depth), np.nan)
        for row, trace in enumerate(self.traces):
            values = self.confidences[trace.key].values[:, :depth]
            padded[row, : len(values)] = values
        return padded


def replayed_adaptively(texts: ScoredTexts, k: int, threshold: float) -> Replayed:
    """Expected counts of each text where a round drafts no more after an unlikely token."""
    parts = [
        replay(
            part.chances(k),
            part.lengths,
            [k],
            proposed=along_text(part.along(), part.lengths, threshold, k),
            off_text=off_text(part.away(k), threshold),
        )[k]
        for part in texts.parts(k)
    ]
    return stacked(parts)


def adaptive_drafting(
    texts: ScoredTexts,
    ks: Sequence[int],
    latency: Latency,
    weights: Mapping[str, float] | None = None,
) -> AdaptiveDrafting:
    """The best threshold beside the best fixed K, and what no choice of K could beat.

    Args:
        texts: of one draft and temperature.
        ks: the K, each timed.
        latency: what rounds cost.
        weights: of the prompt sets; equal if None.
    """
    depth, sets = max(ks), np.array([trace.prompt_set for trace in texts.traces], dtype=object)
    tokens = np.array(texts.lengths, dtype=np.float64)
    shares = set_weights(tuple(sets), weights)
    of_set = {name: float(tokens[sets == name].sum()) for name in shares}
    factors = np.array([shares[name] / of_set[name] for name in sets])

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

    parts = texts.parts(depth)
    fixed = [
        row(stacked([replay(p.chances(k), p.lengths, [k])[k] for p in parts]), 0.0) for k in ks
    ]
    grid = [row(replayed_adaptively(texts, k, value), value) for k in ks for value in THRESHOLDS]
    best = max(grid, key=lambda entry: entry.speedup)
    cost = latency.relative(depth)
    per_round, flags = (
        float(factors @ np.concatenate([bound(p.chances(depth), p.lengths, cost) for p in parts]))
        for bound in (best_k_per_round, flag_oracle)
    )
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

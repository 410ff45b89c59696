"""Adaptive drafting by replay: every threshold and K from the scores and confidences of a draft.

Rounds are priced by R(n) of rounds that were timed with a fixed number of draft tokens. In those of
a sweep that drafts adaptively every draft step is read back, as a threshold needs it; in an
audition's that is not in it. Threshold and K are chosen as a verdict's candidate is, with bounds
that allow for the choice (`harness.stats.two_phase`); no verdict rests on them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.analysis.cells import Weights, prompts_of
from harness.analysis.replayed import Limits, in_chunks, padded_traces
from harness.analysis.round_costs import Latency
from harness.records import DraftConfidence, Rule, TextKey, TextTrace
from harness.stats.jackknife import CONFIDENCE, Array, set_weights
from harness.stats.two_phase import two_phase
from harness.stats.workload import VisitCosts, Workload
from harness.summary import AdaptiveDrafting, AdaptiveRow
from harness.theory.acceptance_rules import ACCEPTANCE_RULES
from harness.theory.replay import (
    Counts,
    Replayed,
    drafted_by_accepted,
    replay,
    stacked,
    until_unlikely,
)

# In steps of 0.1: what a user would try
THRESHOLDS = tuple(round(0.1 * step, 1) for step in range(1, 10))


@dataclass(frozen=True, eq=False)
class ScoredTexts:
    """One draft's texts at one temperature, with its confidences, under one rule.

    Attributes:
        drops_unlikely: as of the engine that drafts (`EngineSpec`).
        limits: as of `padded_traces`.
    """

    traces: Sequence[TextTrace]
    confidences: Mapping[TextKey, DraftConfidence]
    rule: Rule
    drops_unlikely: bool = False
    limits: Limits | None = None

    def drafting(self, most: Counts, k: int, threshold: float) -> tuple[Counts, Counts]:
        """Tokens drafted from each start: where all are the text's, and by how many stand.

        Shapes (texts, starts) and (texts, starts, K + 1), as `replay` takes them; `most` are
        drafted at most, (texts, starts).
        """
        along = np.full((*most.shape, k), np.nan)
        away = np.full((most.shape[0], most.shape[1] + 1, k), np.nan)
        for row, trace in enumerate(self.traces):
            count = len(trace.tokens)
            values = self.confidences[trace.key].values[: count + (trace.depth is None), :k]
            away[row, : len(values)] = values
            along[row, :count] = along_text(trace, values, k, self.rule)
        dropped = self.drops_unlikely
        proposed = np.minimum(until_unlikely(along, threshold, dropped=dropped), most)
        off_text = until_unlikely(away, threshold, dropped=dropped)
        if self.traces[0].depth is None:
            drafted = drafted_by_accepted(proposed, off_text, k)
            return proposed, np.minimum(drafted, most[:, :, None])
        drawn = np.minimum(off_text[:, :-1], most)
        return proposed, np.repeat(drawn[:, :, None], k + 1, axis=2)


def along_text(trace: TextTrace, values: Array, k: int, rule: Rule) -> Array:
    """[n, K] the draft's probability of each token where it is the text's.

    `values` are those of its `DraftConfidence`.
    """
    drawn = trace.temperature > 0.0 and not ACCEPTANCE_RULES[rule].draft_chooses
    if trace.depth is not None:
        return np.exp(trace.draft_logprob[:, :k]) if drawn else values
    along = np.exp(trace.draft_logprob) if drawn else values[:-1, 0]
    padded = np.pad(along, (0, k - 1), constant_values=np.nan)
    return np.lib.stride_tricks.sliding_window_view(padded, k)


def replayed_adaptively(texts: ScoredTexts, k: int, threshold: float) -> Replayed:
    """Expected counts of each text where a round drafts no more after an unlikely token."""
    parts: list[Replayed] = []
    for part in in_chunks(texts.traces, k):
        padded = padded_traces(part, texts.rule, k, texts.limits)
        proposed, drafted = replace(texts, traces=part).drafting(padded.proposed, k, threshold)
        counts = replay(padded.chances, padded.lengths, [k], proposed=proposed, drafted=drafted)
        parts.append(counts[k])
    return stacked(parts)


def adaptive_drafting(
    texts: ScoredTexts,
    ks: Sequence[int],
    latency: Latency,
    weights: Weights = None,
    *,
    seed: int = 0,
) -> AdaptiveDrafting:
    """The best threshold next to the best fixed K.

    The texts are of one draft and temperature, each K was timed, and sets count alike without
    weights.
    """
    shares = set_weights([trace.prompt_set for trace in texts.traces], weights)
    texts = replace(texts, traces=[t for t in texts.traces if shares[t.prompt_set] > 0.0])
    grid = [(k, value) for k in ks for value in THRESHOLDS]
    return AdaptiveDrafting(
        draft=texts.traces[0].draft,
        temperature=texts.traces[0].temperature,
        fixed=_chosen(texts, [(k, 0.0) for k in ks], latency, shares, seed),
        best=_chosen(texts, grid, latency, shares, seed),
    )


def _chosen(
    texts: ScoredTexts,
    choices: Sequence[tuple[int, float]],
    latency: Latency,
    shares: Mapping[str, float],
    seed: int,
) -> AdaptiveRow:
    """The best (K, threshold), less the optimism of choosing it where there are prompts enough.

    Turns and repetitions are of one prompt.
    """
    prompts, groups = prompts_of(texts.traces)
    made = [
        replayed_adaptively(texts, k, threshold).summed(groups, len(prompts))
        for k, threshold in choices
    ]
    tokens, visits = made[0].new_tokens, ()
    if latency.visits is not None and len(latency.visits.plain_s) > 1:
        costs = np.stack([latency.visit_costs(counts) for counts in made])
        visits = (VisitCosts(np.arange(len(made)), costs),)
    workload = Workload(
        baseline_s=tokens,
        baseline_tokens=tokens,
        seconds=np.stack([counts.proposals @ latency.relative(counts.k) for counts in made]),
        tokens=np.tile(tokens, (len(made), 1)),
        prompt_sets=tuple(prompt_set for prompt_set, _ in prompts),
        weights=shares,
        visits=visits,
    )
    fit = two_phase(workload, seed=seed)
    if fit is None:
        speedups = np.exp(workload.log_speedups())
        best = int(speedups.argmax())
        return AdaptiveRow(*choices[best], speedup=float(speedups[best]))
    lo, hi = fit.interval(CONFIDENCE)
    return AdaptiveRow(*choices[fit.named], fit.speedup, lo, hi)

"""Adaptive drafting by replay: every threshold and K from the scores and confidences of a draft.

Rounds are priced by R(n) of rounds that were timed with a fixed number of draft tokens. In those of
a sweep that drafts adaptively every draft step is read back, as a threshold needs it; in an
audition's that is not in it. Threshold and K are chosen as a verdict's candidate is, with bounds
that allow for the choice (`harness.stats.two_phase`); no verdict rests on them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from harness.analysis.cells import prompts_of
from harness.analysis.replayed import ScoredTexts, replayed_adaptively
from harness.analysis.round_costs import Latency
from harness.stats.jackknife import CONFIDENCE, Weights, set_weights
from harness.stats.two_phase import two_phase
from harness.stats.workload import Workload
from harness.summary import AdaptiveDrafting, AdaptiveRow

# In steps of 0.1: what a user would try
THRESHOLDS = tuple(round(0.1 * step, 1) for step in range(1, 10))


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
    tokens, error = made[0].new_tokens, latency.visit_error(made)
    workload = Workload(
        baseline_s=tokens,
        baseline_tokens=tokens,
        seconds=np.stack([counts.proposals @ latency.relative(counts.k) for counts in made]),
        tokens=np.tile(tokens, (len(made), 1)),
        prompt_sets=tuple(prompt_set for prompt_set, _ in prompts),
        weights=shares,
        timing=() if error is None else (error,),
    )
    fit = two_phase(workload, seed=seed)
    if fit is None:
        speedups = np.exp(workload.log_speedups.value)
        best = int(speedups.argmax())
        return AdaptiveRow(*choices[best], speedup=float(speedups[best]))
    lo, hi = fit.interval(CONFIDENCE)
    return AdaptiveRow(*choices[fit.named], fit.speedup, lo, hi)

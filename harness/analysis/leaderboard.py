"""The leaderboard: every draft at its best K, and not speculating, in order of predicted speedup.

The best K is chosen on the prompts it is shown for, so a row's speedup is a little optimistic. The
verdict (`harness.analysis.verdict`) is the number without that optimism; no row is corrected.

The acceptance rule belongs to the engine that will serve, so there is one leaderboard per rule.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from harness.analysis.predicted import (
    Latencies,
    Predicted,
    Speedup,
    alpha_of,
    break_even_alpha,
    speedups,
)
from harness.analysis.replayed import Replays
from harness.analysis.verdict import Candidate
from harness.engine_facts.engines import with_lines
from harness.records import Rule, grouped
from harness.stats.jackknife import Variance, Weights, enough_prompts, set_weights, share_interval
from harness.stats.workload import Workload
from harness.summary import Leaderboard, LeaderboardRow

# Of the speedups, for the chance that a draft is the fastest
DRAWS = 4000
# An error of predictions that is not known, so that draws are the same as with one of 0
NONE = Variance(np.zeros(()), np.ones(()))


def rank(
    predicted: Predicted, weights: Weights = None, *, seed: int = 0, error: Variance | None = None
) -> Leaderboard:
    """The leaderboard of one rule and temperature, "do not speculate" among its rows.

    `error` is that of predictions besides prompts and visits (`PredictionError`).
    """
    replays, evidence = predicted.replays, predicted.evidence
    gains = speedups(evidence, weights, error)
    by_draft = grouped(replays.candidates, lambda name: name.draft).values()
    best = [max(names, key=lambda name: (gains[name].value, -name.k)) for names in by_draft]
    shares = set_weights(replays.prompt_sets, weights)
    counted = replays.only([name for name, share in shares.items() if share > 0.0])
    rows = [_row(name, counted, predicted.latencies, gains[name], weights) for name in best]
    rows.append(LeaderboardRow(rank=0, draft=None, k=0, speedup=1.0))
    columns = [list(replays.candidates).index(name) for name in best]
    chances = _chances_best(evidence.workload(weights, error or NONE), columns, seed)
    rows = [replace(row, probability_best=p) for row, p in zip(rows, chances, strict=True)]
    # On a tie plain decoding comes first.
    rows.sort(key=lambda row: (-row.speedup, row.draft is not None))
    ranked = tuple(replace(row, rank=place) for place, row in enumerate(rows, start=1))
    return Leaderboard(replays.rule, replays.temperature, _engines(replays.rule), ranked)


def _engines(rule: Rule) -> tuple[str, ...]:
    """The engines that accept by a rule, variants of others last."""
    specs = [spec for spec in with_lines().values() if spec.rule == rule]
    specs.sort(key=lambda spec: spec.variant_of is not None)
    return tuple(spec.in_headlines for spec in specs)


def _chances_best(workload: Workload, best: Sequence[int], seed: int) -> list[float | None]:
    """For each draft's best K, then plain decoding: how often it is the fastest."""
    if not enough_prompts(workload.prompt_sets):
        return [None] * (len(best) + 1)
    drawn = workload.drawn(DRAWS, seed)[:, best]
    # Plain decoding, the first column, wins a tie, and so costs nothing to prefer.
    fastest = np.argmax(np.insert(drawn, 0, 0.0, axis=1), axis=1)
    return [float((fastest == row).mean()) for row in (*range(1, len(best) + 1), 0)]


def _row(
    name: Candidate, replays: Replays, latencies: Latencies, gain: Speedup, weights: Weights
) -> LeaderboardRow:
    counts, interval = replays.weighted(name, weights), gain.interval
    latency, on_prompts = latencies[name.draft], replays.candidates[name]
    judged, accepted, sets = on_prompts.judged, on_prompts.accepted, replays.prompt_sets
    alphas = share_interval(accepted, judged, sets, tokens=replays.new_tokens, weights=weights)
    return LeaderboardRow(
        rank=0,
        draft=name.draft,
        k=name.k,
        speedup=gain.value,
        speedup_lo=interval.lo if interval else None,
        speedup_hi=interval.hi if interval else None,
        tokens_per_round=counts.tokens_per_round,
        alpha=alpha_of(counts),
        alpha_lo=alphas.lo if alphas else None,
        alpha_hi=alphas.hi if alphas else None,
        breakeven_alpha=break_even_alpha(latency, name),
        p_min=name.p_min or None,
    )

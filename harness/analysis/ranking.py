"""The leaderboard: every draft at its best K, and not speculating, in order of predicted speedup.

The best K is chosen on the prompts it is shown for, so a row's speedup is a little optimistic; the
verdict (`harness.analysis.verdict`) is the number without that optimism. Intervals resample prompts
and step times, and are paired between drafts (`harness.stats.draws`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from harness.analysis.evidence import Candidate
from harness.analysis.latency import Latency, break_even
from harness.analysis.predicted import alpha_of
from harness.analysis.replays import Replays
from harness.records import Rule
from harness.stats.draws import DRAWS, SpeedupDraws, speedup_draws
from harness.stats.intervals import Array


@dataclass(frozen=True)
class LeaderboardRow:
    """One draft at its best K, or plain decoding (draft None, k 0, speedup 1).

    Attributes:
        rank: from 1.
        rule, temperature: of the leaderboard.
        speedup, speedup_lo, speedup_hi: of the weighted workload.
        alpha, alpha_lo, alpha_hi: at this K, over all prompts.
        breakeven_alpha: the iid formula's, from the step times; None where even 1 loses.
        draft_step_ms: one draft step (one look-up for an n-gram).
        probability_best: share of resamples in which no other row is faster.
    """

    rank: int
    draft: str | None
    k: int
    rule: Rule
    temperature: float
    speedup: float
    speedup_lo: float | None = None
    speedup_hi: float | None = None
    alpha: float | None = None
    alpha_lo: float | None = None
    alpha_hi: float | None = None
    breakeven_alpha: float | None = None
    draft_step_ms: float | None = None
    probability_best: float | None = None


@dataclass(frozen=True, eq=False)
class Ranking:
    """A leaderboard with what it was read off: `rank` makes it.

    Attributes:
        rows: in order of rank.
        draws: resampled speedups of every candidate.
    """

    replays: Replays
    rows: tuple[LeaderboardRow, ...]
    draws: SpeedupDraws

    @property
    def best(self) -> tuple[Candidate, ...]:
        """Each draft at its best K, fastest first."""
        return tuple((row.draft, row.k) for row in self.rows if row.draft is not None)


def rank(
    replays: Replays,
    latency_by_draft: Mapping[str, Latency],
    weights: Mapping[str, float] | None = None,
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> Ranking:
    """The leaderboard of one rule and temperature, "do not speculate" among its rows.

    Args:
        replays: of `audition.replay_drafts`.
        latency_by_draft: of each draft with the target.
        weights: of the prompt sets, equal if None.
        draws: resamples.
        seed: of the resampling.

    Raises:
        UserError: as `draws.speedup_draws`.
    """
    found = speedup_draws(replays, latency_by_draft, weights, draws=draws, seed=seed)
    best = [
        max(
            (name for name in replays.candidates if name[0] == draft),
            key=lambda name: (found.point(name), -name[1]),
        )
        for draft in replays.drafts
    ]
    rows = [_row(name, replays, latency_by_draft[name[0]], found) for name in best]
    rows.append(LeaderboardRow(0, None, 0, replays.rule, replays.temperature, 1.0))
    chances = _chances_best(best, found)
    rows = [replace(row, probability_best=p) for row, p in zip(rows, chances, strict=True)]
    # On a tie plain decoding comes first.
    rows.sort(key=lambda row: (-row.speedup, row.draft is not None))
    numbered = tuple(replace(row, rank=place) for place, row in enumerate(rows, start=1))
    return Ranking(replays, numbered, found)


def _chances_best(best: list[Candidate], found: SpeedupDraws) -> list[float | None]:
    """For each draft's best K, then plain decoding: the share of resamples that it wins."""
    if found.prompts.level is None:
        return [None] * (len(best) + 1)
    speedups = np.stack([*(found.joint[name][1:] for name in best), np.ones_like(_any(found))])
    # Plain decoding, the last row, wins a tie, and so costs nothing to prefer.
    winners = len(best) - np.argmax(speedups[::-1], axis=0)
    return [float((winners == row).mean()) for row in range(len(best) + 1)]


def _any(found: SpeedupDraws) -> Array:
    return next(iter(found.joint.values()))[1:]


def _row(
    name: Candidate, replays: Replays, latency: Latency, found: SpeedupDraws
) -> LeaderboardRow:
    """One draft's row, not yet ranked."""
    draft, k = name
    counts, interval = replays.candidates[name], found.interval(name)
    alphas = found.prompts.interval(found.prompts.pooled(counts.accepted, counts.judged))
    return LeaderboardRow(
        rank=0,
        draft=draft,
        k=k,
        rule=replays.rule,
        temperature=replays.temperature,
        speedup=found.point(name),
        speedup_lo=interval.lo if interval else None,
        speedup_hi=interval.hi if interval else None,
        alpha=alpha_of(counts),
        alpha_lo=alphas.lo if alphas else None,
        alpha_hi=alphas.hi if alphas else None,
        breakeven_alpha=break_even(latency.times, k, lookup=draft in replays.lookups),
        draft_step_ms=latency.times.draft_s * 1e3,
    )

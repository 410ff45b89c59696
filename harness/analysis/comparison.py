"""How drafts, and how acceptance rules, compare: read off the rankings' own resamples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from harness.analysis.evidence import Candidate
from harness.analysis.predicted import alpha_of
from harness.analysis.ranking import Ranking
from harness.records import Rule
from harness.stats.intervals import Interval

MAX_PROMPTS = 10_000


@dataclass(frozen=True)
class PairRow:
    """Two drafts compared on the same prompts, each at its best K; `a` is the faster-looking one.

    Attributes:
        probability: that `a` beats `b`: the share of resamples in which it does.
        difference, difference_lo, difference_hi: speedup of `a` - speedup of `b`, paired.
        separated: whether the interval excludes 0.
        prompts: how many there were.
        prompts_needed: about how many would separate them, were the difference as seen; None where
            they are separated, or where no number up to MAX_PROMPTS would do.
        limited_by: what keeps them apart: "prompts", or "latency" where the scatter of the step
            times alone hides the difference, so that longer timing is what would help.
    """

    rule: Rule
    temperature: float
    a: str
    a_k: int
    b: str
    b_k: int
    probability: float | None
    difference: float
    difference_lo: float | None
    difference_hi: float | None
    separated: bool
    prompts: int
    prompts_needed: int | None
    limited_by: str | None


def pairwise(ranking: Ranking) -> tuple[PairRow, ...]:
    """Every pair of drafts, each at its best K, the faster-looking first.

    The probabilities are of one pair each: with many drafts some pair looks separated by luck.
    """
    return tuple(_pair(a, b, ranking) for a, b in combinations(ranking.best, 2))


def _pair(a: Candidate, b: Candidate, ranking: Ranking) -> PairRow:
    found, replays = ranking.draws, ranking.replays
    both = found.joint[a] - found.joint[b]
    alone = found.prompts_only[a] - found.prompts_only[b]
    interval = found.prompts.interval(both)
    separated = interval is not None and not interval.lo <= 0.0 <= interval.hi
    size = sum(len(members) for members, _ in found.prompts.parts)
    needed, limit = None, None
    if interval is not None and not separated:
        needed, limit = _needed(
            abs(float(both[0])), interval, found.prompts.interval(alone) or interval, size
        )
    above = (both[1:] > 0.0).mean() + (both[1:] == 0.0).mean() / 2.0
    return PairRow(
        rule=replays.rule,
        temperature=replays.temperature,
        a=a[0],
        a_k=a[1],
        b=b[0],
        b_k=b[1],
        probability=float(above) if interval is not None else None,
        difference=float(both[0]),
        difference_lo=interval.lo if interval else None,
        difference_hi=interval.hi if interval else None,
        separated=separated,
        prompts=size,
        prompts_needed=needed,
        limited_by=limit,
    )


def _needed(
    difference: float, joint: Interval, alone: Interval, size: int
) -> tuple[int | None, str]:
    """Prompts at which the half width would be the difference: only its prompts' part shrinks."""
    total, prompts = ((bounds.hi - bounds.lo) / 2.0 for bounds in (joint, alone))
    steps = max(0.0, total**2 - prompts**2)
    spare = difference**2 - steps
    if spare <= 0.0:
        return None, "latency" if steps > 0.0 and difference > 0.0 else "prompts"
    needed = max(size + 1, math.ceil(size * prompts**2 / spare))
    return (needed, "prompts") if needed <= MAX_PROMPTS else (None, "prompts")


@dataclass(frozen=True)
class RuleGapRow:
    """One draft under one rule, for the table of how far the rules differ.

    Attributes:
        k: its best K under this rule.
        speedup, alpha: at that K.
        alpha_at: alpha at `at_k`, the same K under every rule.
        speedup_ratio: this speedup / that under the first rule given.
    """

    temperature: float
    draft: str
    rule: Rule
    k: int
    speedup: float
    alpha: float | None
    at_k: int
    alpha_at: float | None
    speedup_ratio: float


def rules_gap(rankings: Sequence[Ranking]) -> tuple[RuleGapRow, ...]:
    """How far the acceptance rules differ, per draft, at one temperature.

    Args:
        rankings: one per rule, of the same drafts and temperature; the first is compared with.
    """
    rows: list[RuleGapRow] = []
    for draft in rankings[0].replays.drafts if rankings else ():
        k = next(row.k for row in rankings[0].rows if row.draft == draft)
        first = rankings[0].draws.point((draft, k))
        for ranking in rankings:
            row = next(row for row in ranking.rows if row.draft == draft)
            alpha = alpha_of(ranking.replays.candidates[draft, k])
            rows.append(
                RuleGapRow(
                    row.temperature,
                    draft,
                    row.rule,
                    row.k,
                    row.speedup,
                    row.alpha,
                    k,
                    alpha,
                    row.speedup / first,
                )
            )
    return tuple(rows)

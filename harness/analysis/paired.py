"""Measured against replayed: are the loop's tokens per round those that replay expects?

Both are ratios of sums over prompts, so their difference has the standard error of a ratio
estimator (linearised; Cochran, "Sampling Techniques", 1977, section 6.4). On the same prompts it is
taken prompt by prompt, which cancels what the prompts have in common, whether or not the texts are
the same; on different prompts it is a two-sample one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr

from harness.analysis.counts import completed, latest, new_tokens, per_prompt
from harness.analysis.replays import Replays
from harness.records import Trial, UserError
from harness.stats.intervals import Array

PromptKey = tuple[str, str]
# Rounding of sums that are equal on paper.
ZERO = 1e-9


@dataclass(frozen=True)
class ReplayGap:
    """One cell's measured and replayed tokens per round.

    Attributes:
        paired: whether the prompts are the same, and were compared one by one.
        prompts: how many (of the smaller side where not paired).
        measured, replayed: tokens per round.
        gap: measured - replayed.
        standard_error: of the gap; 0.0 where every prompt agrees exactly.
        gap_in_standard_errors: their quotient; 0.0 where both are 0, infinite where only the
            error is.
        p_value: two-sided, Student's; None with fewer than 2 prompts.
    """

    paired: bool
    prompts: int
    measured: float
    replayed: float
    gap: float
    standard_error: float | None
    gap_in_standard_errors: float | None
    p_value: float | None


def gap_in_standard_errors(
    measured: Mapping[PromptKey, tuple[float, float]],
    replayed: Mapping[PromptKey, tuple[float, float]],
) -> ReplayGap:
    """Compare tokens per round.

    Args:
        measured: by (prompt set, prompt): tokens and rounds, repetitions added up.
        replayed: likewise; prompts in common are compared and the others passed over, and only
            where there are none is it a two-sample comparison.

    Raises:
        UserError: a side without prompts, or without rounds.
    """
    if not measured or not replayed:
        raise UserError("replay: no prompt to compare; measure and replay at least one")
    common = sorted(measured.keys() & replayed.keys())
    paired = bool(common)
    names = (common, common) if paired else (sorted(measured), sorted(replayed))
    sides = [
        np.array([side[name] for name in order], dtype=np.float64)
        for side, order in zip((measured, replayed), names, strict=True)
    ]
    if any(not side[:, 1].sum() > 0.0 for side in sides):
        raise UserError("replay: no rounds to compare; every generation failed or drafted nothing")
    rates = [float(side[:, 0].sum() / side[:, 1].sum()) for side in sides]
    influence = [_influence(side) for side in sides]
    sizes = [len(side) for side in sides]
    error = _error([influence[0] - influence[1]] if paired else influence)
    gap = rates[0] - rates[1]
    if abs(gap) < ZERO:
        gap = 0.0
    score = None if error is None else 0.0 if gap == 0.0 else gap / error if error else math.inf
    degrees = sizes[0] - 1 if paired else sum(sizes) - 2
    return ReplayGap(
        paired=paired,
        prompts=min(sizes),
        measured=rates[0],
        replayed=rates[1],
        gap=gap,
        standard_error=error,
        gap_in_standard_errors=math.copysign(score, gap) if score else score,
        p_value=None if score is None else 2.0 * float(stdtr(degrees, -abs(score))),
    )


def _influence(side: Array) -> Array:
    """How much each prompt moves the ratio, times the number of prompts."""
    tokens, rounds = side[:, 0], side[:, 1]
    return (tokens - rounds * (tokens.sum() / rounds.sum())) / rounds.mean()


def _error(samples: Sequence[Array]) -> float | None:
    """Standard error of the sum of independent means."""
    if min(len(values) for values in samples) < 2:
        return None
    variance = sum(float(values.var(ddof=1)) / len(values) for values in samples)
    error = math.sqrt(variance)
    return 0.0 if error < ZERO else error


def measured_rounds(trials: Sequence[Trial]) -> dict[PromptKey, tuple[float, float]]:
    """Tokens and rounds of each prompt from the generations of one cell."""
    sums = per_prompt(completed(latest(trials)), [new_tokens, lambda trial: trial.rounds or 0])
    return {name: (float(row[0]), float(row[1])) for name, row in sums.items()}


def replayed_rounds(replays: Replays, draft: str, k: int) -> dict[PromptKey, tuple[float, float]]:
    """Tokens and expected rounds of each prompt of one candidate."""
    found = replays.candidates[draft, k]
    names = zip(replays.prompt_sets, replays.prompts, strict=True)
    rows = zip(found.new_tokens, found.rounds, strict=True)
    return {name: (float(t), float(r)) for name, (t, r) in zip(names, rows, strict=True)}

"""Step times from a server's own log, without a profiler: what K and the rounds give away.

A server that reports, for several K, its tokens per round and its ms per token has told what its
rounds cost, for a round takes tokens_per_round x ms_per_token. A round drafts K tokens and verifies
once:

    round_ms(K) = K draft_ms + v(K) target_ms + overhead_ms

and the row K = 0 is target_ms. So a straight line through the rounds has the draft step as its
slope, and its intercept is the verify and the overhead *together*: no log of this kind can part
them. They are reported as one number, `(v + overhead)` in target steps, unless a verify curve is
given; then the verify is taken off first and the intercept is the overhead. Without a curve, what
one more position adds to a verify hides in the slope as well: the slope is then what one more draft
token costs in all.

The line is fitted by ordinary least squares, and its intervals are Student's with n - 2 degrees of
freedom: they hold if the noise is in the times and rounds are linear in K. The residuals, in
percent of each round, show where they are not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from harness.records import UserError
from harness.stats.intervals import CONFIDENCE, Array, Interval
from harness.theory.speedup import StepTimes


@dataclass(frozen=True)
class LogRow:
    """A line of a server's log: K, tokens per round (1 at K = 0) and ms per token."""

    k: int
    tokens_per_round: float
    ms_per_token: float

    @property
    def round_ms(self) -> float:
        """Milliseconds of a round."""
        return self.tokens_per_round * self.ms_per_token


@dataclass(frozen=True)
class FittedRow:
    """A speculative line of the log beside what the fit says of it.

    Attributes:
        acceptance_rate: (tokens_per_round - 1) / K.
        speedup: of the log itself: baseline ms_per_token / this one.
        fitted_round_ms: of the line.
        residual: round_ms / fitted_round_ms - 1.
    """

    k: int
    tokens_per_round: float
    acceptance_rate: float
    ms_per_token: float
    speedup: float
    round_ms: float
    fitted_round_ms: float
    residual: float


@dataclass(frozen=True)
class RoundFit:
    """What a log's rounds are made of.

    Attributes:
        target_ms: the baseline's ms per token, its rows averaged.
        draft_ms, draft: slope and its interval; None without spare points.
        rest_ms, rest: intercept and its interval: verify + overhead, or, where `separated`, the
            overhead alone.
        separated: whether a verify curve told the two apart.
        verify_ms: the curve that did, entry i for i + 1 positions; empty otherwise.
        rows: the log's speculative rows.
    """

    target_ms: float
    draft_ms: float
    draft: Interval | None
    rest_ms: float
    rest: Interval | None
    separated: bool
    verify_ms: tuple[float, ...]
    rows: tuple[FittedRow, ...]

    @property
    def c(self) -> float:
        """Draft step / target step."""
        return self.draft_ms / self.target_ms

    @property
    def rest_steps(self) -> float:
        """The intercept in target steps: v + overhead, or the overhead where `separated`."""
        return self.rest_ms / self.target_ms

    def step_times(self, largest_k: int) -> StepTimes:
        """The fit as step times up to K = largest_k, the overhead of a round in its verify.

        Raises:
            UserError: a typed verify curve is too short for largest_k.
        """
        if not self.separated:
            verify = [self.rest_ms] * (largest_k + 1)
        elif len(self.verify_ms) <= largest_k:
            raise UserError(
                f"verify_ms: {len(self.verify_ms)} entries, but k={largest_k} verifies"
                f" {largest_k + 1} positions; give {largest_k + 1} times"
            )
        else:
            verify = [value + self.rest_ms for value in self.verify_ms[: largest_k + 1]]
        return StepTimes(
            self.draft_ms / 1e3, self.target_ms / 1e3, tuple(value / 1e3 for value in verify)
        )


def fit_rounds(rows: Sequence[LogRow], verify_ms: Sequence[float] = ()) -> RoundFit:
    """Fit draft step and verify + overhead to a log's rounds.

    Args:
        rows: at least one with K = 0 and two different K above 0; several rows of one K count each.
        verify_ms: entry i (from 1) is the target's time over i positions, where known.

    Raises:
        UserError: no baseline, fewer than two K, impossible tokens per round or times, a verify
            curve too short for the log's K, or a line that no draft step could have drawn.
    """
    _check(rows)
    target_ms = float(np.mean([row.ms_per_token for row in rows if row.k == 0]))
    spoken = sorted((row for row in rows if row.k > 0), key=lambda row: row.k)
    ks = np.array([row.k for row in spoken], dtype=np.float64)
    known = np.zeros(len(spoken))
    if verify_ms:
        if len(verify_ms) <= spoken[-1].k:
            raise UserError(
                f"verify_ms: {len(verify_ms)} entries, but the log's k={spoken[-1].k} verifies"
                f" {spoken[-1].k + 1} positions; give {spoken[-1].k + 1} times"
            )
        known = np.array([verify_ms[row.k] for row in spoken], dtype=np.float64)
    taken = np.array([row.round_ms for row in spoken])
    design = np.stack([ks, np.ones(len(ks))], axis=1)
    line = np.linalg.lstsq(design, taken - known, rcond=None)[0]
    fitted = design @ line + known
    slope, rest = float(line[0]), float(line[1])
    _check_line(slope, rest, separated=bool(verify_ms))
    half = _half_widths(design, taken - fitted)
    return RoundFit(
        target_ms=target_ms,
        draft_ms=slope,
        draft=Interval(slope - half[0], slope + half[0]) if half else None,
        rest_ms=rest,
        rest=Interval(rest - half[1], rest + half[1]) if half else None,
        separated=bool(verify_ms),
        verify_ms=tuple(verify_ms),
        rows=tuple(
            FittedRow(
                k=row.k,
                tokens_per_round=row.tokens_per_round,
                acceptance_rate=(row.tokens_per_round - 1.0) / row.k,
                ms_per_token=row.ms_per_token,
                speedup=target_ms / row.ms_per_token,
                round_ms=row.round_ms,
                fitted_round_ms=float(expected),
                residual=row.round_ms / float(expected) - 1.0,
            )
            for row, expected in zip(spoken, fitted, strict=True)
        ),
    )


def _half_widths(design: Array, residuals: Array) -> tuple[float, float] | None:
    """Half of the interval's width of slope and intercept; None where the line has no choice."""
    degrees = len(residuals) - 2
    if degrees < 1:
        return None
    covariance = np.linalg.inv(design.T @ design) * float(residuals @ residuals) / degrees
    student = float(stdtrit(degrees, (1.0 + CONFIDENCE) / 2.0))
    return student * math.sqrt(covariance[0, 0]), student * math.sqrt(covariance[1, 1])


def _check(rows: Sequence[LogRow]) -> None:
    for row in rows:
        if not (math.isfinite(row.ms_per_token) and row.ms_per_token > 0.0):
            raise UserError(f"log: ms_per_token={row.ms_per_token:g} at k={row.k}: must be above 0")
        if not 1.0 <= row.tokens_per_round <= row.k + 1 + 1e-9:
            raise UserError(
                f"log: tokens_per_round={row.tokens_per_round:g} at k={row.k}: must lie between 1"
                f" and {row.k + 1}, K+1"
            )
    if not any(row.k == 0 for row in rows):
        raise UserError("log: no baseline; add a row with k=0 and its ms_per_token")
    ks = sorted({row.k for row in rows if row.k > 0})
    if len(ks) < 2:
        raise UserError(
            f"log: {len(ks)} different k above 0; a line needs at least two, and three to judge it"
        )


def _check_line(slope: float, rest: float, *, separated: bool) -> None:
    if slope <= 0.0:
        raise UserError(
            f"log: the fitted draft step is {slope:.3g} ms: rounds do not grow with k, so this is"
            " no log of k draft steps per round (are tokens_per_round per round, not per request?)"
        )
    if not separated and rest <= 0.0:
        raise UserError(
            f"log: verify and overhead come out as {rest:.3g} ms: rounds grow faster than k, which"
            " K draft steps cannot explain; check ms_per_token at the largest k"
        )

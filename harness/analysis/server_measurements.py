"""Numbers that were measured elsewhere: by a server, from its log or benchmark, or by a run.

A server that reports, for several K, its tokens per round and its time per token says what its
rounds cost, for a round takes tokens_per_round x seconds_per_token. A round drafts K tokens and
verifies once:

    round(K) = K draft_s + v(K) target_s + overhead

and the row K = 0 is target_s. So a straight line through the rounds has the draft step as its
slope, and its intercept is the verify and the overhead *together*: no log of this kind can separate
them. They are reported as one number unless a verify curve is given; then the verify is taken off
first and the intercept is the overhead. Without a curve, what one more position adds to a verify is
in the slope as well: the slope is then what one more draft token costs in all.

The line is fitted by ordinary least squares, and its intervals are Student's with n - 2 degrees of
freedom: they hold if the scatter is in the times and rounds are linear in K. The residuals, in
percent of each round, show where they are not.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.special import stdtrit

from harness.analysis.latency import Latency
from harness.records import UserError
from harness.stats.jackknife import CONFIDENCE
from harness.summary import Caveat, FittedRound, RoundFit, Values


@dataclass(frozen=True)
class ServerRound:
    """A row of a server's log: K, tokens per round (1 at K = 0) and seconds per token."""

    k: int
    tokens_per_round: float
    seconds_per_token: float

    @property
    def round_s(self) -> float:
        """Seconds of a round."""
        return self.tokens_per_round * self.seconds_per_token


@dataclass(frozen=True)
class ServerBenchmark:
    """What a server's benchmark says."""

    file: str  # where it was read
    k: int | None  # None where the server did not speculate
    positions: tuple[float, ...]  # acceptance by position, K shares; empty where the file has none
    acceptance_rate: float | None  # accepted / drafted
    seconds_per_token: float | None  # None where the file has none
    concurrency: int | None  # most requests at once; None where the client did not limit them
    failed: int
    requests: int | None = None  # that were completed; None where the file has no count


@dataclass(frozen=True)
class MeasuredInputs:
    """What files of elsewhere say, under the keys of break-even's configuration that they fill."""

    # draft_ms, target_ms, verify_ms, k, acceptance_rate, acceptance_by_position: None where no
    # file has it.
    draft_ms: float | None = None
    target_ms: float | None = None
    verify_ms: tuple[float, ...] | None = None
    # plain_ms, round_ms: R(0), and R(K) by K, of a run that timed rounds.
    plain_ms: float | None = None
    round_ms: dict[int, float] | None = None
    k: tuple[int, ...] | None = None
    acceptance_rate: dict[int, float] | None = None
    acceptance_by_position: tuple[float, ...] | None = None
    # K to the speedup that the server itself measured.
    served: dict[int, float] = field(default_factory=dict[int, float])
    requests: int | None = None  # behind the acceptance; of a baseline too, the fewer
    caveats: tuple[Caveat, ...] = ()
    round_fit: RoundFit | None = None


def from_log(
    file: str, rounds: Sequence[ServerRound], ks: Sequence[int], verify_s: Sequence[float] = ()
) -> MeasuredInputs:
    """Everything from a log; a verify curve separates the verify from the overhead.

    `ks` are further K to answer.
    """
    fit = fit_rounds(rounds, verify_s)
    logged = sorted({row.k for row in fit.rows})
    answered = sorted({*(k for k in ks if not verify_s or k < len(verify_s)), *logged})
    rest = [fit.rest_s + (verify_s[k] if verify_s else 0.0) for k in range(max(answered) + 1)]

    def mean(k: int, name: str) -> float:
        return float(np.mean([getattr(row, name) for row in fit.rows if row.k == k]))

    worst = max(fit.rows, key=lambda row: abs(row.residual))
    caveats = [Caveat("round_fit", {"file": file, "residual": abs(worst.residual), "k": worst.k})]
    if not fit.separated:
        caveats.append(Caveat("fit_not_separated"))
    elif fit.rest_s < 0:
        caveats.append(Caveat("fit_negative_overhead"))
    if fit.draft_lo_s is None:
        caveats.append(Caveat("fit_untested"))
    return MeasuredInputs(
        draft_ms=1e3 * fit.draft_s,
        target_ms=1e3 * fit.target_s,
        verify_ms=tuple(1e3 * value for value in rest),
        k=tuple(answered),
        acceptance_rate={k: mean(k, "acceptance_rate") for k in logged},
        served={k: fit.target_s / mean(k, "seconds_per_token") for k in logged},
        caveats=tuple(caveats),
        round_fit=fit,
    )


def from_run(run: str, latency: Latency, ks: Sequence[int]) -> MeasuredInputs:
    """A run's round times, and the steps that explain them; K that were not timed are left out.

    A run of a version that timed no rounds gives its steps alone.
    """
    steps, rounds = latency.steps, latency.rounds
    covered = tuple(k for k in ks if rounds.covers(k))
    if not covered or steps is None:
        raise UserError(f"latency_from={run}: times no rounds for k={list(ks)}")
    left_out = ", ".join(str(k) for k in ks if k not in covered)
    inputs = MeasuredInputs(
        draft_ms=1e3 * steps.draft_s,
        target_ms=1e3 * steps.target_s,
        verify_ms=tuple(1e3 * value for value in steps.verify_s) or None,
        k=covered,
        caveats=(Caveat("latency_from_too_short", {"ks": left_out}),) if left_out else (),
    )
    if latency.visits is None:
        return replace(inputs, caveats=(Caveat("priced_from_steps"), *inputs.caveats))
    round_ms = {k: 1e3 * rounds.at(k) for k in covered}
    return replace(inputs, plain_ms=1e3 * rounds.plain_s, round_ms=round_ms)


def with_baseline(inputs: MeasuredInputs, baseline: ServerBenchmark) -> MeasuredInputs:
    """The target's time per token from a benchmark of the server without speculation."""
    if baseline.k is not None:
        raise UserError(
            f"baseline_from={baseline.file}: that server speculated; give one that did not"
        )
    assert baseline.seconds_per_token is not None  # a file with neither is refused when read
    caveats = (*inputs.caveats, *_load(baseline))
    return replace(inputs, target_ms=1e3 * baseline.seconds_per_token, caveats=caveats)


def with_acceptance(
    inputs: MeasuredInputs,
    speculative: ServerBenchmark,
    ks: Sequence[int],
    baseline: ServerBenchmark | None = None,
) -> MeasuredInputs:
    """The acceptance of a benchmark, and the server's own speedup where its baseline is known."""
    k, rate = speculative.k, speculative.acceptance_rate
    if k is None or rate is None:
        raise UserError(
            f"acceptance_from={speculative.file}: no spec_decode_acceptance_rate or other"
            " spec_decode_* field: that server did not speculate"
        )
    plain_s = baseline.seconds_per_token if baseline else None
    counts = (each.requests for each in (speculative, baseline) if each is not None)
    served_s = speculative.seconds_per_token
    return replace(
        inputs,
        k=tuple(sorted({*(inputs.k or ks), k})),
        acceptance_rate=None if speculative.positions else {k: rate},
        acceptance_by_position=speculative.positions or None,
        served={k: plain_s / served_s} if plain_s and served_s else {},
        requests=min((count for count in counts if count is not None), default=None),
        caveats=(*inputs.caveats, *_load(speculative)),
    )


def _load(benchmark: ServerBenchmark) -> Iterator[Caveat]:
    """What stands between a benchmark under load and one request at a time."""
    if benchmark.concurrency != 1:
        asked = benchmark.concurrency
        yield Caveat("server_concurrency", {"file": benchmark.file, "max_concurrency": asked})
    if benchmark.failed:
        values: Values = {"file": benchmark.file, "requests": benchmark.failed}
        yield Caveat("server_failed_requests", values)


def fit_rounds(rounds: Sequence[ServerRound], verify_s: Sequence[float] = ()) -> RoundFit:
    """Fit draft step and verify + overhead to a log's rounds.

    Needs a row with K = 0 and two different K above 0; several of one K count each. Entry i of
    `verify_s` is the target's time over i + 1 positions, where known.
    """
    _check(rounds)
    target_s = float(np.mean([row.seconds_per_token for row in rounds if row.k == 0]))
    speculative = sorted((row for row in rounds if row.k > 0), key=lambda row: row.k)
    largest = speculative[-1].k
    if verify_s and len(verify_s) <= largest:
        raise UserError(
            f"verify_ms: {len(verify_s)} entries, but the log's k={largest} verifies"
            f" {largest + 1} positions; give {largest + 1} times"
        )
    ks = np.array([row.k for row in speculative], dtype=np.float64)
    known = np.array([verify_s[row.k] if verify_s else 0.0 for row in speculative])
    from scipy.stats import linregress  # takes as long to import as a short run to analyse

    line = linregress(ks, np.array([row.round_s for row in speculative]) - known)
    draft_s, rest_s = float(line.slope), float(line.intercept)
    _check_line(draft_s, rest_s, separated=bool(verify_s))
    draft_half = rest_half = math.nan
    degrees = len(speculative) - 2
    if degrees > 0:
        student = float(stdtrit(degrees, (1.0 + CONFIDENCE) / 2.0))
        draft_half, rest_half = student * line.stderr, student * line.intercept_stderr
    fitted = ks * draft_s + rest_s + known
    return RoundFit(
        target_s=target_s,
        draft_s=draft_s,
        draft_lo_s=draft_s - draft_half if degrees else None,
        draft_hi_s=draft_s + draft_half if degrees else None,
        rest_s=rest_s,
        rest_lo_s=rest_s - rest_half if degrees else None,
        rest_hi_s=rest_s + rest_half if degrees else None,
        separated=bool(verify_s),
        rows=tuple(
            FittedRound(
                k=row.k,
                tokens_per_round=row.tokens_per_round,
                acceptance_rate=(row.tokens_per_round - 1.0) / row.k,
                seconds_per_token=row.seconds_per_token,
                speedup=target_s / row.seconds_per_token,
                round_s=row.round_s,
                fitted_round_s=float(expected),
                residual=row.round_s / float(expected) - 1.0,
            )
            for row, expected in zip(speculative, fitted, strict=True)
        ),
    )


def _check(rounds: Sequence[ServerRound]) -> None:
    for row in rounds:
        if not (math.isfinite(row.seconds_per_token) and row.seconds_per_token > 0.0):
            ms = 1e3 * row.seconds_per_token
            raise UserError(f"log: ms_per_token={ms:g} at k={row.k}: must be above 0")
        if not 1.0 <= row.tokens_per_round <= row.k + 1 + 1e-9:
            raise UserError(
                f"log: tokens_per_round={row.tokens_per_round:g} at k={row.k}: must lie between 1"
                f" and {row.k + 1}, K+1"
            )
    if not any(row.k == 0 for row in rounds):
        raise UserError("log: no baseline; add a row with k=0 and its ms_per_token")
    ks = {row.k for row in rounds if row.k > 0}
    if len(ks) < 2:
        raise UserError(
            f"log: {len(ks)} different k above 0; a line needs at least two, and three to judge it"
        )


def _check_line(draft_s: float, rest_s: float, *, separated: bool) -> None:
    if draft_s <= 0.0:
        raise UserError(
            f"log: the fitted draft step is {1e3 * draft_s:.3g} ms: rounds do not grow with k, so"
            " this is no log of k draft steps per round (are tokens_per_round per round, not per"
            " request?)"
        )
    if not separated and rest_s <= 0.0:
        raise UserError(
            f"log: verify and overhead come out as {1e3 * rest_s:.3g} ms: rounds grow faster than"
            " k, which K draft steps cannot explain; check ms_per_token at the largest k"
        )

"""Break-even: from two latencies, or a run's round times, to speedups and the alpha that they need.

For each K and alpha the iid model's speedup, for each K the ideal speedup and the alpha that breaks
even. Typed latencies price a round by the formula, R(K) / R(0) = K c + v (Leviathan et al. 2023,
theorem 3.8, with v(K) where verify times are given); a run's round times (latency_from) are R
itself. A measured acceptance, a rate at one K or a list by position, needs no model of the text at
the K of its rounds: its speedup is tokens_per_round x R(0) / R(K) exactly, and its row carries that
acceptance_rate. At a smaller K a list is estimated, at other K a rate, by the iid model at its
alpha. With an acceptance there is a verdict, of the best K. The
uncertainty of such numbers is unknown: a rate without its rounds and a latency without its samples
have no interval. A speedup within UNDECIDED_MARGIN of 1 is therefore undecided.

A file that says how many requests it rests on has a bound. All rounds of a request may accept
alike, so the tokens per round of one request vary at most as those of one round do, whose variance
follows from the acceptance by position: with n requests the standard error of the mean is at most
that round's deviation / sqrt(n), for requests of like length. Fewer than MIN_PROMPTS requests, or
an interval by this bound that has 1 in it, decide nothing. It is the error of the acceptance alone:
a speedup that a server measured has that of its clock as well, so it is given no interval.

The rules of thumb are a Rust engine's documentation (draft five, better ten times as fast; K = 2 at
low acceptance, 4 by default, 8 above 75 %, 16 above 85 %; a warning under 40 %). That warning
counts accepted / emitted, a third rate besides acceptance_rate and alpha
(harness/reporting/metrics.md). They are shown, never obeyed.

Numbers that files gave are in the manifest's entry `inputs`, a `MeasuredInputs`; they go before the
configuration's.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import numpy as np
from pydantic import TypeAdapter, ValidationError
from scipy.special import stdtrit

from harness.analysis.caveats import given
from harness.analysis.caveats.prompts import k_left_out
from harness.analysis.caveats.timing import priced_from_steps
from harness.analysis.cells import priced
from harness.analysis.round_costs import Latency, ceilings
from harness.analysis.setup import Setup, run_facts
from harness.command_words import as_typed
from harness.config import BreakevenConfig
from harness.records import Decision, LatencyRow, ResultRow, UserError
from harness.stats.jackknife import CONFIDENCE, MIN_PROMPTS, Interval
from harness.storage import StoredRun
from harness.summary import Answer, Caveat, RuleOfThumb, SpeedupByK, Summary
from harness.theory import acceptance as theory
from harness.theory.speedup import RoundTimes, StepTimes

UNDECIDED_MARGIN = 0.05
LEAST_STEP_RATIO, IDEAL_STEP_RATIO = 5.0, 10.0
WARNING = 0.40
# acceptance_rate from which on a K is suggested; below WARNING it is 2
SUGGESTED_K = ((0.85, 16), (0.75, 8), (WARNING, 4))


@dataclass(frozen=True)
class ServerBenchmark:
    """The acceptance and times of a server's benchmark."""

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
    """Numbers from files, under the keys of break-even's configuration that they fill."""

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


@dataclass(frozen=True)
class Inputs:
    """The numbers that a break-even is computed from."""

    times: StepTimes  # draft step, target step and, where known, the verify curve
    rounds: RoundTimes  # as a run measured them, else by the formula from `times`
    ks: tuple[int, ...]  # above 0, ascending
    alphas: tuple[float, ...]
    # By the K that it was measured at.
    acceptance_rate: Mapping[int, float] = field(default_factory=dict[int, float])
    acceptance_by_position: tuple[float, ...] = ()  # empty where none was given
    measured: MeasuredInputs = field(default_factory=MeasuredInputs)  # what files say besides


def from_run(run: str, latency: Latency, ks: Sequence[int]) -> MeasuredInputs:
    """A run's round times, or its steps alone where none were timed, at the K that it covers."""
    steps, rounds = latency.steps, latency.rounds
    covered = tuple(k for k in ks if rounds.covers(k))
    if not covered or steps is None:
        raise UserError(f"{as_typed('latency_from', run)}: times no rounds for k={list(ks)}")
    inputs = MeasuredInputs(
        draft_ms=1e3 * steps.draft_s,
        target_ms=1e3 * steps.target_s,
        verify_ms=tuple(1e3 * value for value in steps.verify_s) or None,
        k=covered,
        caveats=tuple(k_left_out.of([k for k in ks if k not in covered], "latency_from")),
    )
    if latency.visits is None:
        from_steps = priced_from_steps.of([latency.round_summary("")])
        return replace(inputs, caveats=(*from_steps, *inputs.caveats))
    round_ms = {k: 1e3 * rounds.at(k) for k in covered}
    return replace(inputs, plain_ms=1e3 * rounds.plain_s, round_ms=round_ms)


def with_baseline(inputs: MeasuredInputs, baseline: ServerBenchmark) -> MeasuredInputs:
    """The target's time per token from a benchmark of the server without speculation."""
    if baseline.k is not None:
        raise UserError(
            f"baseline_from={baseline.file}: that server speculated; give one that did not"
        )
    assert baseline.seconds_per_token is not None  # a file with neither is refused when read
    caveats = (*inputs.caveats, *_of_requests(baseline))
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
            " spec_decode_* field: that server did not speculate, or vllm bench serve was older"
            " than 0.14"
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
        caveats=(*inputs.caveats, *_of_requests(speculative)),
    )


def _of_requests(of: ServerBenchmark) -> Iterator[Caveat]:
    return given.benchmark_requests.of(of.file, of.concurrency, of.failed)


def inputs_of(config: BreakevenConfig, measured: MeasuredInputs) -> Inputs:
    """The configuration's numbers, those measured by files in their place.

    Raises:
        UserError: times, alphas or acceptances that cannot be, or a K whose time is not known.
    """
    verify_ms = measured.verify_ms or config.verify_ms
    if verify_ms == []:
        raise UserError("verify_ms=[]: give the times for 1, 2, ... positions, or leave it out")
    if not config.alpha:
        raise UserError("alpha=[]: give at least one, for example alpha=[0.6,0.8,1.0]")
    if len(set(config.alpha)) != len(config.alpha):
        raise UserError("alpha: a value is given twice; list each once")
    ks = tuple(sorted({k for k in measured.k or config.k if k > 0}))
    positions = tuple(measured.acceptance_by_position or config.acceptance_by_position or ())
    if positions:
        theory.acceptance_rate_from_positions(positions)  # refuses a bad list whatever k is
    times = StepTimes(
        (measured.draft_ms or config.draft_ms or 0.0) / 1e3,
        (measured.target_ms or config.target_ms or 0.0) / 1e3,
        tuple(value / 1e3 for value in verify_ms or ()),
    )
    largest = max(ks, default=0)
    rounds = known_round_times(measured, times, largest)
    assert rounds is not None  # there are step times
    # Refuses a K beyond what is known
    (rounds.at if measured.round_ms else times.v)(largest)
    return Inputs(
        times=times,
        rounds=rounds,
        ks=ks,
        alphas=tuple(theory.check_share("alpha", alpha) for alpha in config.alpha),
        acceptance_rate=_rates(measured.acceptance_rate or config.acceptance_rate, ks),
        acceptance_by_position=positions,
        measured=measured,
    )


def known_round_times(
    measured: MeasuredInputs, steps: StepTimes | None, largest: int
) -> RoundTimes | None:
    """R as far as it is known: as a run measured it, else by the formula; None without either."""
    if measured.round_ms and measured.plain_ms is not None:
        by_k = sorted((k, ms / 1e3) for k, ms in measured.round_ms.items())
        return RoundTimes(measured.plain_ms / 1e3, tuple(by_k))
    return None if steps is None else RoundTimes.from_steps(steps, largest)


def _rates(value: Any, ks: Sequence[int]) -> dict[int, float]:
    """acceptance_rate by K: what was typed is {K: rate}, or one number where k holds one K."""
    if value is None:
        return {}
    if isinstance(value, int | float) and not isinstance(value, bool):
        if len(ks) != 1:
            raise UserError(
                f"acceptance_rate={value}: a rate belongs to the K it was measured at; give that"
                " K alone as k=[K], or a rate for each as 'acceptance_rate={4:0.34,8:0.21}'"
            )
        return {ks[0]: theory.check_share("acceptance_rate", value)}
    if not isinstance(value, Mapping):
        raise UserError(f"acceptance_rate={value}: give a number, or {{K: rate}}")
    entries = cast("Mapping[Any, Any]", value)
    wrong = next((k for k in entries if not str(k).isdigit() or int(k) not in ks), None)
    if wrong is not None:
        raise UserError(f"acceptance_rate: {wrong} is not among k={list(ks)}")
    return {int(k): theory.check_share("acceptance_rate", rate) for k, rate in entries.items()}


def analyse_breakeven(setup: Setup) -> Summary:
    run = setup.run
    known = {each.name for each in fields(BreakevenConfig)}
    config = BreakevenConfig(**{name: run.config[name] for name in known & run.config.keys()})
    inputs = inputs_of(config, stored_inputs(run))
    rates, positions = inputs.acceptance_rate, inputs.acceptance_by_position
    accepted = [*acceptance_rows(rates, positions, inputs.ks)]
    if not positions and not inputs.measured.served:
        accepted += _other_ks(accepted, inputs.ks)
    measured = [priced(row, inputs.rounds) for row in sorted(accepted, key=lambda row: row.k)]
    iid = list(iid_rows(inputs))
    rows = (*iid, *measured)
    latency = Latency(inputs.rounds, steps=inputs.times)
    steps, rounds = latency.summary(""), latency.round_summary("")
    if inputs.measured.round_ms:
        rounds = replace(rounds, source="rounds")
    answers = answers_of(measured, positions, inputs.measured.requests, inputs.measured.served)
    return Summary(
        run=run_facts(setup, rows),
        answers=answers,
        caveats=tuple(_caveats(inputs)),
        results=rows,
        latency=tuple(_typed_rows(inputs.times)),
        steps=() if steps is None else (steps,),
        round_times=(rounds,),
        ceilings=ceilings(inputs.rounds, inputs.ks),
        speedups_by_k=tuple(
            SpeedupByK(alpha, {row.k: row.speedup or 0.0 for row in iid if row.alpha == alpha})
            for alpha in sorted(inputs.alphas)
        ),
        rules_of_thumb=tuple(rules_of_thumb(inputs, measured, *answers)),
        from_acceptance=tuple(measured),
        server_speedups=dict(inputs.measured.served),
    )


def stored_inputs(run: StoredRun) -> MeasuredInputs:
    """The numbers from files that a run's manifest holds; UserError where they are others."""
    try:
        return TypeAdapter(MeasuredInputs).validate_python(run.manifest.inputs)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        at = ".".join(map(str, ("inputs", *wrong["loc"])))
        raise UserError(f"{run.folder}/manifest.json: {at}: {wrong['msg']}") from error


def _typed_rows(times: StepTimes) -> Iterator[LatencyRow]:
    """Latencies that were typed, not measured: no samples stand behind them."""
    steps = [("draft", "step", 1, times.draft_s), ("target", "step", 1, times.target_s)]
    steps += [("target", "verify", n, value) for n, value in enumerate(times.verify_s, start=1)]
    for role, kind, tokens, seconds in steps:
        ms = 1e3 * seconds
        yield LatencyRow(role, "", kind, tokens, 0, 1, ms, ms, ms, samples=0)


def iid_rows(inputs: Inputs) -> Iterator[ResultRow]:
    for k in inputs.ks:
        for alpha in inputs.alphas:
            tokens = theory.expected_tokens_per_round(alpha, k)
            rate = theory.acceptance_rate_from_alpha(alpha, k)
            yield priced(_row(k, alpha, rate, tokens), inputs.rounds)


def acceptance_rows(
    rates: Mapping[int, float], positions: Sequence[float], ks: Sequence[int]
) -> Iterator[ResultRow]:
    """A row for each K whose acceptance was measured; its alpha is derived from the measured value.

    From a rate, alpha is the one that gives this rate under the iid model. From a list by position
    it is accepted / (accepted + rejected), and K up to the list's length are answered; below it by
    an estimate of the list at that K (`positions_at_k`).
    """
    for k, rate in rates.items():
        yield _row(k, theory.alpha_from_acceptance_rate(rate, k), rate, 1.0 + k * rate)
    for k in (k for k in ks if k <= len(positions)):
        of_k = theory.positions_at_k(positions, k)
        rate = theory.acceptance_rate_from_positions(of_k)
        tokens = theory.mean_acceptance_length_from_positions(of_k)
        yield _row(k, theory.alpha_from_positions(of_k), rate, tokens)


def _other_ks(accepted: Sequence[ResultRow], ks: Sequence[int]) -> Iterator[ResultRow]:
    """Rows of further K by the iid model, at the alpha of the nearest K whose rate is known."""
    for k in {*ks} - {row.k for row in accepted} if accepted else ():
        alpha = min(accepted, key=lambda row: (abs(row.k - k), row.k)).alpha or 0.0
        rate = theory.acceptance_rate_from_alpha(alpha, k)
        yield _row(k, alpha, rate, theory.expected_tokens_per_round(alpha, k))


def _row(k: int, alpha: float, rate: float, tokens: float) -> ResultRow:
    return ResultRow(
        k=k,
        source="theory",
        acceptance_rate=rate,
        alpha=alpha,
        mean_acceptance_length=tokens,
        tokens_per_round=tokens,
    )


def answers_of(
    measured: Sequence[ResultRow],
    positions: Sequence[float],
    requests: int | None,
    server_speedups: Mapping[int, float] | None = None,
) -> tuple[Answer, ...]:
    """The one verdict, or none; speedups that a server measured itself go before computed ones."""
    server_speedups = server_speedups or {}
    speedups = {
        row.k: server_speedups.get(row.k, row.speedup or 0.0)
        for row in measured
        if row.k in server_speedups or not server_speedups
    }
    if not speedups:
        return ()
    k = max(speedups, key=lambda number: (speedups[number], -number))
    speedup, row = speedups[k], next(row for row in reversed(measured) if row.k == k)
    by_server = k in server_speedups
    interval = None
    if requests is not None:
        interval = _interval(speedup, row, positions, requests, len(speedups))
    few = requests is not None and requests < MIN_PROMPTS
    spans = interval is not None and interval.lo < 1.0 < interval.hi
    decision: Decision = "undecided"
    if abs(speedup - 1.0) > UNDECIDED_MARGIN and not few and not spans:
        decision = "speculate" if speedup > 1.0 else "does_not_pay"
    answer = Answer(
        decision=decision,
        draft=None,
        k=0 if decision == "does_not_pay" else k,
        temperature=None,
        prompt_set="all",
        speedup=speedup,
        speedup_lo=None if by_server else interval and interval.lo,
        speedup_hi=None if by_server else interval and interval.hi,
        reason="given_numbers",
        reason_values={
            "k": k,
            "measured": by_server,
            "alpha": row.alpha,
            "breakeven_alpha": row.breakeven_alpha,
            "near": UNDECIDED_MARGIN,
            "requests": requests if few or spans else None,
            "needed": MIN_PROMPTS if few else None,
        },
        source="measured" if by_server else "theory",
    )
    return (answer,)


def _interval(
    speedup: float, row: ResultRow, positions: Sequence[float], requests: int, candidates: int
) -> Interval | None:
    """By the bound of this module's docstring; None below MIN_PROMPTS requests.

    The best of several K was chosen by the same requests, so it holds for all of them (Bonferroni).
    """
    if requests < MIN_PROMPTS:
        return None
    if row.k <= len(positions):
        of_k = np.array(theory.positions_at_k(positions, row.k))
    else:  # a rate alone: as the iid model has it
        of_k = (row.alpha or 0.0) ** np.arange(1.0, row.k + 1)
    # Of accepted tokens a: E[a^2] = sum over j of (2 j - 1) P(a >= j)
    squares = float((2 * np.arange(1, row.k + 1) - 1) @ of_k)
    variance = max(0.0, squares - float(of_k.sum()) ** 2)
    student = float(stdtrit(requests - 1, 1.0 - (1.0 - CONFIDENCE) / (2.0 * candidates)))
    width = student * math.sqrt(variance / requests) / (row.tokens_per_round or 1.0)
    return Interval(speedup * (1.0 - min(1.0, width)), speedup * (1.0 + width))


def suggested_k(acceptance_rate: float) -> int:
    return next((k for bound, k in SUGGESTED_K if acceptance_rate >= bound), 2)


def rules_of_thumb(
    inputs: Inputs, measured: Sequence[ResultRow], answer: Answer | None = None
) -> Iterator[RuleOfThumb]:
    """Every rule that has numbers, at the verdict's K, else at that of the least alpha."""
    needed = {k: inputs.rounds.break_even_alpha(k) for k in inputs.ks}
    by_alpha = [k for k in needed if needed[k] is not None] or list(needed)
    if not by_alpha:
        return
    k = min(by_alpha, key=lambda each: needed[each] or 0.0)
    row = None
    if answer is not None:
        k = int(answer.reason_values["k"] or 0)
        row = next(each for each in reversed(measured) if each.k == k)
    if inputs.times.draft_s and inputs.times.target_s:
        ratio = inputs.times.target_s / inputs.times.draft_s
        yield RuleOfThumb(
            "step_ratio",
            ratio >= LEAST_STEP_RATIO,
            ratio,
            {
                "least": LEAST_STEP_RATIO,
                "ideal": IDEAL_STEP_RATIO,
                "k": k,
                "breakeven_alpha": needed[k],
            },
        )
    if row is None or answer is None or row.acceptance_rate is None:
        return
    # 0: not to speculate; None: undecided
    verdict_k = {"speculate": answer.k, "does_not_pay": 0}.get(answer.decision)
    suggested = suggested_k(row.acceptance_rate)
    yield RuleOfThumb(
        "suggested_k",
        None if verdict_k is None else suggested == verdict_k,
        row.acceptance_rate,
        {"k": k, "suggested_k": suggested, "verdict_k": verdict_k},
    )
    share = theory.accepted_over_emitted(row.tokens_per_round or 1.0)
    yield RuleOfThumb(
        "accepted_over_emitted",
        share >= WARNING,
        share,
        {
            "least": WARNING,
            "alpha": row.alpha,
            "breakeven_alpha": needed[k],
            "speedup": answer.speedup,
        },
    )


def _caveats(inputs: Inputs) -> Iterator[Caveat]:
    if not inputs.measured.round_ms:
        yield from given.verify_assumed_equal_step.of("verify_ms", inputs.times.verify_s)
    listed = len(inputs.acceptance_by_position)
    if listed:
        yield from k_left_out.of([k for k in inputs.ks if k > listed], "positions")
        yield from given.positions_of_longer_drafts.of(inputs.ks, listed)
    yield from inputs.measured.caveats

"""A profile: what a plain token and a round take, what they are made of, and the most to be gained.

R(0) and R(K) are of the running loop (`harness.analysis.round_costs`). The largest speedup at K is
(K + 1) R(0) / R(K), with every draft token accepted; break-even alphas follow from the same R.

The waterfall. If a round took no longer than a plain token it would bring K + 1. Then what was
measured is put in, one thing after the other: K draft steps; the verify in place of a plain token;
accepting; reading the outcome on the host; the rewind; and what these parts leave unexplained of
R(K). That is the largest speedup; with the measured acceptance it is the speedup.

Rounds were timed in parts, and plain decoding next to them, within moments. Times are means over
the quarter of them with the smallest sum: whatever else runs on a machine only ever adds, and
unlike medians means of the same rounds add up. They are then scaled to the plain token of R, so
that parts and R(K) are of one speed of the machine.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from harness.analysis.caveats import of_setup
from harness.analysis.caveats.timing import launch_bound, priced_from_steps
from harness.analysis.cells import measured_rows, priced
from harness.analysis.failures import failures
from harness.analysis.round_costs import ceilings, latency_of_draft, latency_table
from harness.analysis.setup import Setup, run_facts
from harness.analysis.unstable import unstable_steps
from harness.records import (
    GREEDY,
    VERIFY_AND_ACCEPT,
    LatencyRow,
    PartTiming,
    ResultRow,
    Trial,
    grouped,
)
from harness.summary import RoundBreakdown, RoundPart, StepCurve, Summary, WaterfallStep
from harness.theory.roofline import shortest_context, step_bounds
from harness.theory.speedup import RoundTimes

# Parts in the order of a round; recorded as one graph, verify and accept cannot be timed apart.
ORDER = ("draft", "verify", "accept", VERIFY_AND_ACCEPT, "host", "rewind")
NOT_FORWARDS = ("accept", "rewind", "host")
FASTEST = 4


def analyse_profile(setup: Setup) -> Summary:
    """Everything a profile says; what was not measured is empty."""
    run = setup.run
    measured = [row for name in (setup.model, setup.draft) for row in _plain_rows(run.trials, name)]
    latency = latency_table(setup)
    bounds = step_bounds(latency)
    latency_of_pair = latency_of_draft(run, setup.draft, GREEDY)
    bandwidth = run.manifest.bandwidth
    timed_rounds = latency_of_pair.rounds if latency_of_pair and latency_of_pair.visits else None
    base = Summary(
        run=run_facts(setup, measured),
        failures=failures(setup),
        results=tuple(measured),
        latency=latency,
        bandwidth=bandwidth if bandwidth and bandwidth.source else None,
        step_bounds=tuple(bounds),
        rounds=tuple(round_breakdowns(run.parts, timed_rounds)),
        step_curves=tuple(step_curves(latency)),
        skipped_cells=run.manifest.skipped_cells or (),
    )
    if latency_of_pair is None:
        return replace(base, caveats=(*of_setup(setup, measured),))
    rounds, steps = latency_of_pair.rounds, latency_of_pair.summary(setup.draft)
    # Of every context and batch
    unstable = unstable_steps(run.timings, timed_rounds and timed_rounds.plain_s)
    ks = [k for k in range(1, max(setup.ks, default=0) + 1) if rounds.covers(k)]
    # The speedup if all of the draft were accepted, and the alpha that breaks even
    ideal = ResultRow(model=setup.model, draft=setup.draft, k=0, source="theory", alpha=1.0)
    of_k = (replace(ideal, k=k, tokens_per_round=k + 1.0) for k in ks)
    return replace(
        base,
        results=(*measured, *(priced(row, rounds) for row in of_k)),
        caveats=(
            *of_setup(setup, measured),
            *launch_bound.of(shortest_context(bounds), latency_of_pair.steps),
            *priced_from_steps.of([latency_of_pair.round_summary(setup.draft)]),
        ),
        unstable=unstable,
        steps=() if steps is None else (steps,),
        round_times=(latency_of_pair.round_summary(setup.draft),),
        ceilings=ceilings(rounds, ks),
    )


def _plain_rows(trials: Sequence[Trial], model: str) -> list[ResultRow]:
    """One row for a model over all prompt sets together; none where it decoded nothing."""
    trials_of_model = [
        replace(trial, prompt_set="all", prompt=f"{trial.prompt_set}/{trial.prompt}")
        for trial in trials
        if trial.model == model
    ]
    rows = measured_rows(trials_of_model, model=model, draft="", times={})
    return [replace(row, draft=None) for row in rows]


# ---- rounds in parts -----------------------------------------------------------------------------


def round_breakdowns(
    timings: Sequence[PartTiming], rounds: RoundTimes | None = None
) -> list[RoundBreakdown]:
    """Each K's round in parts, K ascending; empty without plain decoding to compare with.

    They explain R(K) of `rounds`; without it, the whole rounds that were timed next to the parts.
    """
    timed = {(timing.k, timing.part): timing for timing in timings}
    if (0, "step") not in timed or (0, "round") not in timed:
        return []
    step, plain = _fastest_quarter([timed[0, name].samples_s for name in ("step", "round")])
    ks = sorted({timing.k for timing in timings} - {0})
    return [
        _breakdown(k, timed, step, plain, rounds)
        for k in ks
        if (k, "round") in timed and (rounds is None or rounds.covers(k))
    ]


def _fastest_quarter(samples_s: Sequence[Sequence[float]]) -> list[float]:
    """Means over the rounds of least total time; a row per thing timed, a column per round."""
    table: NDArray[np.float64] = np.array(samples_s)
    kept = max(1, table.shape[1] // FASTEST)
    order = np.argsort(table.sum(axis=0), kind="stable")[:kept]
    return [float(value) for value in table[:, order].mean(axis=1)]


def _breakdown(
    k: int,
    timed: Mapping[tuple[int, str], PartTiming],
    step_s: float,
    plain_s: float,
    rounds: RoundTimes | None,
) -> RoundBreakdown:
    whole = timed[k, "round"]
    names = [name for name in ORDER if (k, name) in timed]
    round_s, *parts = _fastest_quarter(
        [whole.samples_s, *(timed[k, name].samples_s for name in names)]
    )
    scale = 1.0 if rounds is None else rounds.plain_s / plain_s
    round_s = round_s if rounds is None else rounds.at(k)
    seconds = {name: scale * value for name, value in zip(names, parts, strict=True)}
    tokens = sum(whole.tokens) / len(whole.tokens)
    waterfall = _waterfall(k, seconds, round_s, tokens, scale * plain_s)
    return RoundBreakdown(
        k=k,
        rounds=len(whole.samples_s),
        round_s=round_s,
        parts=tuple(RoundPart(name, value) for name, value in seconds.items()),
        unexplained_s=round_s - sum(seconds.values()),
        tokens_per_round=tokens,
        step_s=scale * step_s,
        plain_s=scale * plain_s,
        speedup=waterfall[-1].speedup,
        waterfall=waterfall,
    )


def _waterfall(
    k: int, parts: Mapping[str, float], round_s: float, tokens: float, plain_s: float
) -> tuple[WaterfallStep, ...]:
    """The speedup from K + 1 to that of the timed rounds."""
    verify = "verify" if "verify" in parts else VERIFY_AND_ACCEPT
    drafting, verifying = parts.get("draft", 0.0), parts.get(verify, 0.0)
    most = (k + 1) * plain_s
    cost = drafting + verifying
    speeds: list[tuple[str, float, float | None]] = [
        ("free", k + 1.0, None),
        ("draft", most / (drafting + plain_s), drafting / plain_s),
        ("verify", most / cost, verifying / plain_s),
    ]
    for name in NOT_FORWARDS:
        if parts.get(name):
            cost += parts[name]
            speeds.append((name, most / cost, None))
    speeds.append(("unexplained", most / round_s, None))
    speeds.append(("acceptance", tokens * plain_s / round_s, tokens))
    before = [speeds[0][1], *(value for _, value, _ in speeds[:-1])]
    return tuple(
        WaterfallStep(cause, after, after / last, value)
        for (cause, after, value), last in zip(speeds, before, strict=True)
    )


# ---- contexts and batches ------------------------------------------------------------------------


def step_curves(rows: Sequence[LatencyRow]) -> Iterator[StepCurve]:
    """Every context and batch at which both models' steps and several positions were timed."""
    decoding = (row for row in rows if row.kind != "prefill")
    cells = grouped(decoding, lambda row: (row.context_tokens, row.batch))
    for (context, batch), timed in sorted(cells.items()):
        cell = {(row.role, row.kind, row.tokens): row for row in timed}
        draft, target = cell.get(("draft", "step", 1)), cell.get(("target", "step", 1))
        verify: list[float] = []
        while (row := cell.get(("target", "verify", len(verify) + 1))) is not None:
            verify.append(row.median_ms / 1e3)
        if draft is not None and target is not None and len(verify) > 1:
            yield StepCurve(
                context_tokens=context,
                batch=batch,
                target_step_s=target.median_ms / 1e3,
                draft_step_s=draft.median_ms / 1e3,
                verify_s=tuple(verify),
                target_mbu=target.mbu,
                draft_mbu=draft.mbu,
            )

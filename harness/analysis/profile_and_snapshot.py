"""A profile: what a plain token, a round and a step take, and the most to be gained.

R(0) and R(K) are of the running loop (`harness.analysis.round_costs`). The largest speedup at K is
(K + 1) R(0) / R(K), with every draft token accepted; break-even alphas follow from the same R.

A snapshot: greedy texts compared with plain decoding's, and tests of distributions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from harness.analysis.caveats import of_setup
from harness.analysis.caveats.texts import routing_ties
from harness.analysis.caveats.timing import launch_bound, priced_from_steps
from harness.analysis.cells import measured_rows, priced
from harness.analysis.lossless import failures, text_checks
from harness.analysis.round_costs import ceilings, latency_of_draft, latency_table
from harness.analysis.setup import Setup, run_facts
from harness.analysis.unstable import unstable_steps
from harness.records import GREEDY, LatencyRow, ResultRow, Trial, grouped
from harness.summary import DistributionTest, StepCurve, Summary
from harness.theory.roofline import shortest_context, step_bounds


def analyse_profile(setup: Setup) -> Summary:
    run = setup.run
    measured = [row for name in (setup.model, setup.draft) for row in _plain_rows(run.trials, name)]
    latency = latency_table(setup)
    bounds = step_bounds(latency)
    latency_of_pair = latency_of_draft(run, setup.draft, GREEDY)
    bandwidth = run.manifest.bandwidth
    base = Summary(
        run=run_facts(setup, measured),
        failures=failures(setup),
        results=tuple(measured),
        latency=latency,
        bandwidth=bandwidth if bandwidth and bandwidth.gb_s else None,
        step_bounds=tuple(bounds),
        step_curves=tuple(step_curves(latency)),
        skipped_cells=run.manifest.skipped_cells or (),
    )
    if latency_of_pair is None:
        return replace(base, caveats=(*of_setup(setup, measured),))
    rounds, steps = latency_of_pair.rounds, latency_of_pair.summary(setup.draft)
    # Of every context and batch
    plain_s = rounds.plain_s if latency_of_pair.visits else None
    unstable = unstable_steps(run.timings, plain_s)
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


def analyse_snapshot(setup: Setup) -> Summary:
    run = setup.run
    checks = text_checks(run.trials, run.checks)
    tests = tuple(check for check in run.checks if isinstance(check, DistributionTest))
    rows = measured_rows(run.trials, model=setup.model, draft=setup.draft, times={})
    return Summary(
        run=run_facts(setup, rows),
        failures=failures(setup, checks=checks, tests=tests),
        caveats=(*of_setup(setup), *routing_ties.of(checks)),
        results=tuple(rows),
        text_checks=tuple(checks),
        distribution_tests=tests,
    )

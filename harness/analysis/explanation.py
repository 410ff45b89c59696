"""Why a verdict is what it is, and what would change it: counterfactuals, one factor at a time.

speedup = tokens_per_round x R(0) / R(K). Steps explain a round: in target steps it takes K c for
drafting, v(K) for the verify, and for what the steps leave over (accepting, sampling, host work:
the loop) the rest, so that the three add up to R(K). Speculation loses because too little is
accepted, the draft is too slow (c), the verify too expensive (v), the loop too slow, or because
steps are not the models' own time at all: a step that is bound by launches makes c a property of
the engine. Each factor is set to what it would have to be, or could be, with the others left as
they were measured. A break-even alpha is compared with alpha alone, never with an acceptance_rate
at K > 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.analysis.cells import ratio
from harness.analysis.round_costs import Latency
from harness.records import Decision, LatencyRow, ResultRow, grouped
from harness.stats.jackknife import token_weights
from harness.summary import Answer, Explanation, Factor
from harness.theory.roofline import LAUNCH_BOUND_MBU
from harness.theory.speedup import RoundTimes, StepTimes

# The rule of thumb of the engines' own documents: a draft five times as fast as its target
SLOW_DRAFT = 0.2


@dataclass(frozen=True)
class CellOfK:
    """One draft at one K on the workload, whose prompt sets count by their weights."""

    tokens_per_round: float
    alpha: float | None  # None where nothing was judged


@dataclass(frozen=True)
class Case:
    """A verdict's draft on the verdict's workload: its acceptance and its times."""

    draft: str
    k: int  # the K that the verdict's number is of
    # By K, measured where there are measured ones, else replayed; holds `k`.
    cells: Mapping[int, CellOfK]
    rounds: RoundTimes
    steps: StepTimes
    # Memory floors of the draft's and the target's step, seconds; None if unknown.
    floors: tuple[float, float] | None = None


def case_of(
    verdict: Answer,
    draft: str,
    rows: Sequence[ResultRow],
    latency: Latency,
    floors: Sequence[LatencyRow] = (),
    *,
    weights: Mapping[str, float] | None = None,
) -> Case | None:
    """The case of a verdict; None where no step was timed, or nothing accepted or rejected."""
    steps = latency.steps
    cells = {
        k: cell
        for k, cell in _cells(verdict, draft, rows, weights).items()
        if steps is not None and steps.covers(k) and latency.rounds.covers(k)
    }
    if not cells or steps is None:
        return None
    gains = {k: latency.rounds.speedup(cell.tokens_per_round, k) for k, cell in cells.items()}
    named = verdict.named[1]
    k = named if named in cells else max(gains, key=gains.__getitem__)
    if cells[k].alpha is None:
        return None
    return Case(draft, k, cells, latency.rounds, steps, _floors(floors, draft))


def _cells(
    verdict: Answer, draft: str, rows: Sequence[ResultRow], weights: Mapping[str, float] | None
) -> dict[int, CellOfK]:
    for source in ("measured", "replayed"):
        cells = [
            row
            for row in rows
            if row.k > 0
            and (row.draft, row.source) == (draft, source)
            and row.temperature == verdict.temperature
            and row.rounds
            and verdict.prompt_set in ("all", row.prompt_set)
            and (weights or {}).get(row.prompt_set or "", 1.0) > 0.0
        ]
        if cells:
            by_k = grouped(cells, lambda row: row.k)
            return {k: _workload_cell(cell, weights) for k, cell in by_k.items()}
    return {}


def _workload_cell(rows: Sequence[ResultRow], weights: Mapping[str, float] | None) -> CellOfK:
    """The rows of all prompt sets at one K, each set's counts per token times its weight."""
    sizes = np.array([row.new_tokens or 1 for row in rows])
    factors = token_weights([row.prompt_set or "" for row in rows], sizes, weights).tolist()
    tokens, rounds, accepted, rejected = (
        sum(factor * (getattr(row, name) or 0) for factor, row in zip(factors, rows, strict=True))
        for name in ("new_tokens", "rounds", "accepted", "rejected")
    )
    return CellOfK(tokens / rounds, ratio(accepted, accepted + rejected))


def _floors(latency: Sequence[LatencyRow], draft: str) -> tuple[float, float] | None:
    """Floors of the two steps at the context and batch that the step times are of."""
    steps = [row for row in latency if row.kind == "step" and row.batch == 1 and row.floor_ms]
    target = next((row.floor_ms for row in steps if row.role == "target"), None)
    drafting = [row.floor_ms for row in steps if row.role == "draft" and row.model == draft]
    return (drafting[0] / 1e3, target / 1e3) if drafting and drafting[0] and target else None


def explain(case: Case, decision: Decision, temperature: float) -> Explanation:
    """The counterfactuals of a case."""
    k, steps = case.k, case.steps
    c, v, tokens = steps.c, steps.v(k), case.cells[k].tokens_per_round
    alpha = case.cells[k].alpha
    assert alpha is not None  # of `case_of`
    # In target steps: a plain token, and what the steps leave over of a round
    plain = case.rounds.baseline_s / steps.target_s
    loop = case.rounds.at(k) / steps.target_s - k * c - v
    explanation = Explanation(
        draft=case.draft,
        k=k,
        temperature=temperature,
        decision=decision,
        speedup=case.rounds.speedup(tokens, k),
        alpha=alpha,
        breakeven_alpha=case.rounds.break_even_alpha(k),
        ceiling=case.rounds.speedup(k + 1.0, k),
        plain=plain,
        c=c,
        c_allowed=(tokens * plain - v - loop) / k,
        v=v,
        speedup_at_v1=tokens * plain / (k * c + 1.0 + loop),
        loop=loop,
        speedup_without_loop=tokens / (k * c + v),
    )
    return _with_factors(_with_floors(explanation, case))


def _with_floors(explanation: Explanation, case: Case) -> Explanation:
    """The speedup at the best K with both steps at their memory floors, v = 1 and no loop."""
    if case.floors is None:
        return explanation
    draft_s, target_s = case.floors
    rounds = RoundTimes.from_steps(StepTimes(draft_s, target_s), max(case.cells))
    gains = {k: rounds.speedup(cell.tokens_per_round, k) for k, cell in case.cells.items()}
    best = max(gains, key=gains.__getitem__)
    shares = draft_s / case.steps.draft_s, target_s / case.steps.target_s
    return replace(
        explanation,
        launch_bound=min(shares) < LAUNCH_BOUND_MBU,
        floor_c=draft_s / target_s,
        floor_k=best,
        floor_speedup=gains[best],
        draft_floor_share=shares[0],
        target_floor_share=shares[1],
    )


def _with_factors(explanation: Explanation) -> Explanation:
    """The factors that alone would turn a loss into a gain, the most telling first.

    An engine that is bound by launches comes first, since c and v are then not the models'. Then a
    verify at the price of a step, then a loop that takes no time besides its forwards, then the
    draft and the acceptance, of which one is as good as the other on paper: the draft is named if
    it is more than a fifth of the target's step.
    """
    if explanation.speedup > 1:
        return explanation
    candidates: tuple[tuple[Factor, bool], ...] = (
        ("launch_bound_engine", explanation.launch_bound and (explanation.floor_speedup or 0) > 1),
        ("expensive_verify", explanation.speedup_at_v1 > 1),
        ("slow_loop", explanation.speedup_without_loop > 1),
        ("slow_draft", explanation.c_allowed > 0 and explanation.c > SLOW_DRAFT),
        ("acceptance", explanation.breakeven_alpha is not None),
    )
    return replace(explanation, factors=tuple(name for name, holds in candidates if holds))

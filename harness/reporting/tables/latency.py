"""Tables of the costs of rounds and steps: R(K), each model alone, v(n), bounds.

v(n) is a target forward over n positions / a target step of the same context and batch.
"""

from typing import NamedTuple

from harness import formatting as fmt
from harness.records import ResultRow, first, grouped
from harness.reporting import grid
from harness.reporting.tables import stability
from harness.reporting.tables.specification import Column, Table, columns_by, table
from harness.summary import (
    RoundSummary,
    StepBound,
    StepCurve,
    Summary,
    Unstable,
)
from harness.theory.roofline import LAUNCH_BOUND_MBU, LAUNCH_BOUND_OVERHEAD


class Alone(NamedTuple):
    """A model that decoded alone, and the prompt tokens per second of its prefill."""

    row: ResultRow
    prefill_rate: float | None


ALONE: tuple[Column[Alone], ...] = (
    Column("model", lambda alone: alone.row.model, key=True),
    Column("tok/s", lambda alone: alone.row.tokens_per_second, fmt.rate),
    Column("mean\nms/tok", lambda alone: alone.row.ms_per_token, fmt.milliseconds),
    Column("p50\nms/tok", lambda alone: alone.row.ms_per_token_p50, fmt.milliseconds),
    Column("p90\nms/tok", lambda alone: alone.row.ms_per_token_p90, fmt.milliseconds),
    Column("TTFT\nms", lambda alone: alone.row.ttft_ms, fmt.milliseconds),
    Column("prompt\ntok/s", lambda alone: alone.prefill_rate, fmt.rate),
    Column("peak\nmemory", lambda alone: alone.row.peak_memory_bytes, fmt.memory),
)
BOUNDS: tuple[Column[StepBound], ...] = (
    Column("step of", lambda bound: f"{bound.role} {bound.model}", key=True),
    Column("con-\ntext", lambda bound: bound.context_tokens, fmt.count, key=True),
    Column("median\nms", lambda bound: bound.step_s, fmt.in_ms),
    Column("floor\nms", lambda bound: bound.floor_s, fmt.in_ms),
    Column("MBU", lambda bound: bound.mbu, fmt.decimal),
    Column("arithmetic", lambda bound: bound.arithmetic_share, fmt.percent),
    Column("overhead", lambda bound: bound.overhead_share, fmt.percent),
    Column("n", lambda bound: bound.positions, fmt.count),
    Column("n positions\n/ one", lambda bound: bound.positions_ratio, fmt.decimal),
    Column("bound by", lambda bound: "launches (overhead)" if bound.launch_bound else bound.bound),
)

ALONE_NOTES = (
    "p50 and p90 are over generations, not over tokens.",
    "peak memory: of the whole process (on CUDA of its allocator), which holds both models.",
)
ROUND_NOTE = (
    "K=...: R(K) / R(0), a round with so many draft tokens in plain tokens, by the trimmed mean of"
    " visits that timed all K within moments. A predicted speedup is tokens per round / this."
)
SERVER_ROUND_NOTE = (
    "K=...: R(K) / R(0), a round with so many draft tokens in plain tokens, fitted over all"
    " requests without their starts."
)
ROUND_BY_STEPS_NOTE = (
    "K=...: R(K) / R(0) by the formula, K draft steps + a verify of K + 1 positions: no rounds were"
    " timed, so what a loop does besides its forwards is left out."
)
BOUND_NOTES = (
    "MBU: floor / median. arithmetic: what one further position adds, beyond its bytes, / the step,"
    " at most 1 - MBU. overhead: the rest, neither reading nor arithmetic.",
    f"launch-bound: MBU below {LAUNCH_BOUND_MBU:g} and overhead above"
    f" {100 * LAUNCH_BOUND_OVERHEAD:.0f} % of the step.",
)
IN_CACHE_NOTE = (
    "MBU above 1: the model is read from a cache that is faster than the memory copy that measured"
    " the bandwidth."
)


def alone_table(summary: Summary) -> Table:
    """One row per model that decoded alone (its measured k = 0 row)."""
    prefill_s: dict[str | None, float | None] = {}
    for step in summary.steps[:1]:
        prefill_s[summary.run.draft] = step.draft_prefill_s
        prefill_s[summary.run.model] = step.target_prefill_s
    rows = [
        Alone(row, 1 / seconds if (seconds := prefill_s.get(row.model)) else None)
        for row in summary.generated
        if row.k == 0
    ]
    return table("How fast each model is alone", ALONE, rows, notes=ALONE_NOTES)


def rounds_table(summary: Summary) -> Table:
    """R(0) and R(K) / R(0), the costs behind predictions, by draft and temperature."""
    timed = sorted(summary.round_times, key=lambda times: times.temperature or 0.0)
    ks = sorted({k for times in timed for k in times.round_s})
    columns: tuple[Column[RoundSummary], ...] = (
        Column("draft", lambda times: times.draft or "draft", key=True),
        Column("T", lambda times: times.temperature, fmt.temperature, key=True),
        Column("plain\ntoken ms", lambda times: times.plain_s, fmt.in_ms),
        *columns_by(ks, "K={}", _cost, fmt.decimal, definition="R(K) / R(0)"),
        Column("visits", lambda times: times.visits or None, fmt.count),
    )
    sources = {times.source for times in timed}
    notes = (
        ROUND_NOTE if "rounds" in sources else "",
        SERVER_ROUND_NOTE if "requests" in sources else "",
        ROUND_BY_STEPS_NOTE if sources & {"steps", "typed"} else "",
    )
    title = f"What a round costs, in plain tokens{grid.timed_by(summary.served)}"
    return table(title, columns, timed, notes=notes)


def _cost(times: RoundSummary, k: int) -> float | None:
    return times.relative(k) if k in times.round_s else None


def _context_and_batch(timed: StepCurve | Unstable) -> tuple[int | None, int | None]:
    return timed.context_tokens, timed.batch


def bounds_table(summary: Summary) -> Table:
    """The shares of a step's time by model and context: reading, arithmetic and overhead."""
    notes = (
        _floor_note(summary),
        *BOUND_NOTES,
        IN_CACHE_NOTE if any(bound.mbu > 1 for bound in summary.step_bounds) else "",
        stability.note(summary, "step"),
    )
    unstable: Column[StepBound] = stability.column(
        lambda row: stability.of_step(summary, row.role, "step", row.context_tokens, row.batch)
    )
    title = "What the steps wait for"
    return table(title, (*BOUNDS, unstable), summary.step_bounds, notes=notes)


def _floor_note(summary: Summary) -> str:
    note = "floor: bytes read (weights used, cached keys and values) / bandwidth"
    bandwidth = summary.bandwidth
    if bandwidth is None:
        return f"{note}."
    by_model = [
        f"{role} {fmt.decimal(value)}"
        for role, value in (("target", bandwidth.target_gb_s), ("draft", bandwidth.draft_gb_s))
        if value is not None
    ]
    at_its_size = f"; at each model's own size: {', '.join(by_model)}" if by_model else ""
    source = "measured" if bandwidth.source == "measured" else "data sheet"
    return f"{note} ({fmt.decimal(bandwidth.gb_s)} GB/s, {source}{at_its_size})."


CURVE_NOTE = (
    "v(n): a target forward over n positions / a target step of the same context and batch."
)


def curve_table(summary: Summary) -> Table:
    """The steps of both models and v(n), a row for each timed context and batch."""
    curves = summary.step_curves
    longest = max((len(curve.verify_s) for curve in curves), default=0)
    columns: tuple[Column[StepCurve], ...] = (
        Column("context", lambda curve: curve.context_tokens, fmt.count, key=True),
        Column("batch", lambda curve: curve.batch, fmt.count, key=True),
        Column("target\nstep ms", lambda curve: curve.target_step_s, fmt.in_ms),
        Column("draft\nstep ms", lambda curve: curve.draft_step_s, fmt.in_ms),
        Column("target\nMBU", lambda curve: curve.target_mbu, fmt.decimal),
        Column("draft\nMBU", lambda curve: curve.draft_mbu, fmt.decimal),
        Column("c", lambda curve: curve.c, fmt.decimal),
        *columns_by(range(2, longest + 1), "v({})", _v, fmt.decimal, definition="v(n)"),
        stability.column(
            lambda curve: first(
                entry
                for entry in summary.unstable
                if _context_and_batch(entry) == _context_and_batch(curve)
            )
        ),
    )
    not_timed = (
        f"not timed (context x batch"
        f" {', '.join(f'{cell.context_tokens} x {cell.batch}' for cell in cells)}): {reason}."
        for reason, cells in grouped(summary.skipped_cells, lambda cell: cell.reason).items()
    )
    title = "Steps and verifies by context and batch"
    notes = (CURVE_NOTE, stability.note(summary, "step", "verify"), *not_timed)
    return table(title, columns, curves, notes=notes)


def _v(curve: StepCurve, n: int) -> float | None:
    return curve.verify_s[n - 1] / curve.target_step_s if n <= len(curve.verify_s) else None

"""What steps and forwards cost: each model alone, the verify curve v(n), bounds, bytes read.

v(n) is a target forward over n positions / a target step of the same context and batch.
"""

from typing import NamedTuple

from harness.records import LatencyRow, ResultRow
from harness.reporting import formatting as fmt
from harness.reporting.tables.specification import Column, Table, table
from harness.summary import BytesRead, StepBound, Summary
from harness.theory.roofline import LAUNCH_BOUND_MBU, LAUNCH_BOUND_OVERHEAD


class Forward(NamedTuple):
    """A timed target forward over `row.tokens` positions, with the step that it is compared to."""

    row: LatencyRow
    step: LatencyRow

    @property
    def v(self) -> float:
        """The forward / the step."""
        return self.row.median_ms / self.step.median_ms


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
VERIFY: tuple[Column[Forward], ...] = (
    Column("n", lambda forward: forward.row.tokens, fmt.count, key=True),
    Column("K", lambda forward: forward.row.tokens - 1 or None, fmt.count),
    Column("median\nms", lambda forward: forward.row.median_ms, fmt.milliseconds),
    Column("p10\nms", lambda forward: forward.row.p10_ms, fmt.milliseconds),
    Column("p90\nms", lambda forward: forward.row.p90_ms, fmt.milliseconds),
    Column("v(n)", lambda forward: forward.v, fmt.decimal),
    Column("samples", lambda forward: forward.row.samples, fmt.count),
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
READS: tuple[Column[BytesRead], ...] = (
    Column("forward of", lambda read: f"{read.role} {read.model}", key=True),
    Column("positions", lambda read: read.tokens, fmt.count, key=True),
    Column("con-\ntext", lambda read: read.context_tokens, fmt.count, key=True),
    Column("weights", lambda read: read.weights_bytes, fmt.memory),
    Column("cache", lambda read: read.kv_bytes, fmt.memory),
    Column("experts\ntouched", lambda read: read.experts_touched, lambda e: fmt.decimal(e, 1)),
    Column("of\nexperts", lambda read: read.experts, fmt.count),
)

ALONE_NOTES = (
    "p50 and p90 are over generations, not over tokens.",
    "peak memory: of the whole process (on CUDA of its allocator), which holds both models.",
)
VERIFY_NOTE = "v(n): a target forward over n = K + 1 positions / a target step."
BOUND_NOTES = (
    "MBU: floor / median. arithmetic: what one further position adds, beyond its bytes, / the step."
    " overhead: the rest, neither reading nor arithmetic.",
    f"launch-bound: MBU below {LAUNCH_BOUND_MBU:g} and overhead above"
    f" {100 * LAUNCH_BOUND_OVERHEAD:.0f} % of the step.",
)
IN_CACHE_NOTE = (
    "MBU above 1: the model is read from a cache that is faster than the memory copy that measured"
    " the bandwidth."
)
READ_NOTE = (
    "What one forward must read: the weights in use, and every cached key and value. Experts:"
    " expected number per layer under uniform routing."
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


def verify_curves(summary: Summary) -> list[list[Forward]]:
    """The target's forwards over n positions, n ascending: one list per timed context and batch."""
    target = [row for row in summary.latency if row.role == "target"]
    curves = [
        sorted(
            (
                Forward(row, step)
                for row in target
                if row.kind == "verify"
                and (row.context_tokens, row.batch) == (step.context_tokens, step.batch)
            ),
            key=lambda forward: forward.row.tokens,
        )
        for step in target
        if step.kind == "step"
    ]
    return [curve for curve in curves if curve]


def verify_tables(summary: Summary) -> list[Table]:
    """The verify curve, one table per context and batch."""
    made = []
    for curve in verify_curves(summary):
        step = curve[0].step
        batch = f", batch {step.batch}" if step.batch > 1 else ""
        title = f"What verifying costs the target, after {step.context_tokens} tokens of context"
        made.append(table(title + batch, VERIFY, curve, notes=(VERIFY_NOTE,)))
    return made


def bounds_table(summary: Summary) -> Table:
    """What a step's time goes to, per model and context at batch 1."""
    in_cache = any(bound.mbu > 1 for bound in summary.step_bounds)
    notes = [_floor_note(summary), *BOUND_NOTES, *([IN_CACHE_NOTE] if in_cache else [])]
    return table("What the steps wait for", BOUNDS, summary.step_bounds, notes=notes)


def reads_table(summary: Summary) -> Table:
    """What a forward of each model must read."""
    return table("Bytes read by a forward", READS, summary.bytes_read, notes=(READ_NOTE,))


def _floor_note(summary: Summary) -> str:
    note = "floor: bytes read (weights used, cached keys and values) / bandwidth"
    bandwidth = summary.bandwidth
    if bandwidth is None:
        return f"{note}."
    own = [
        f"{role} {fmt.decimal(value)}"
        for role, value in (("target", bandwidth.target_gb_s), ("draft", bandwidth.draft_gb_s))
        if value is not None
    ]
    at_its_size = f"; at each model's own size: {', '.join(own)}" if own else ""
    source = "measured" if bandwidth.source == "measured" else "data sheet"
    return f"{note} ({fmt.decimal(bandwidth.gb_s)} GB/s, {source}{at_its_size})."

"""What steps cost: the profile's table per model, the verify curve v(n), and the prefills.

v(n) is a target forward over n positions / a target step. Peers assume 1.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from harness.records import LatencyRow, ResultRow
from harness.reporting import formatting as fmt
from harness.reporting.tables.model import Column, Row, Table
from harness.theory.speedup import StepTimes

PROFILE_COLUMNS = (
    Column("model", "left", key=True),
    Column("tok/s"),
    Column("mean\nms/tok"),
    Column("p50\nms/tok"),
    Column("p90\nms/tok"),
    Column("TTFT\nms"),
    Column("prompt\ntok/s"),
    Column("peak\nmemory"),
)
VERIFY_COLUMNS = (
    Column("n", key=True),
    Column("K"),
    Column("median\nms"),
    Column("p10\nms"),
    Column("p90\nms"),
    Column("v(n)"),
    Column("samples"),
)
VERIFY_NOTE = "v(n): a target forward over n = K + 1 positions / a target step."


def profile_table(
    results: Iterable[ResultRow], latency: Iterable[LatencyRow], headline: Mapping[str, Any]
) -> Table:
    """One row per model that was profiled alone (its measured k = 0 row)."""
    steps = tuple(latency)
    rows = [
        Row(
            (
                fmt.text(row.model),
                fmt.rate(row.tokens_per_second),
                fmt.milliseconds(row.ms_per_token),
                fmt.milliseconds(row.ms_per_token_p50),
                fmt.milliseconds(row.ms_per_token_p90),
                fmt.milliseconds(row.ttft_ms),
                fmt.rate(_prompt_rate(row.model, steps, headline)),
                fmt.memory(row.peak_memory_bytes),
            )
        )
        for row in results
        if row.source == "measured" and row.k == 0
    ]
    notes = (
        "p50 and p90 are over generations, not over tokens.",
        "peak memory: of the whole process (on CUDA of its allocator), which holds both models.",
    )
    return Table("How fast each model is alone", PROFILE_COLUMNS, tuple(rows), notes)


def verify_tables(latency: Iterable[LatencyRow]) -> tuple[Table, ...]:
    """The verify curve, one table per (context, batch) that was timed."""
    curves = verify_curves(latency)
    tables = []
    for (context, batch), (step, forwards) in curves.items():
        rows = tuple(Row(_verify_cells(row, step)) for row in forwards)
        several = f", {batch} sequences side by side" if batch > 1 else ""
        title = f"What verifying costs the target, after {context} tokens of context{several}"
        tables.append(Table(title, VERIFY_COLUMNS, rows, (VERIFY_NOTE,)))
    return tuple(tables)


Curve = tuple[LatencyRow, list[LatencyRow]]


def verify_curves(latency: Iterable[LatencyRow]) -> dict[tuple[int, int], Curve]:
    """For each (context_tokens, batch): the target's step, and its forwards over n positions."""
    target = [row for row in latency if row.role == "target" and row.kind in ("step", "verify")]
    curves: dict[tuple[int, int], Curve] = {}
    for step in (row for row in target if row.kind == "step"):
        where = (step.context_tokens, step.batch)
        forwards = [
            row
            for row in target
            if row.kind == "verify" and (row.context_tokens, row.batch) == where
        ]
        if forwards:
            curves[where] = (step, sorted(forwards, key=lambda row: row.tokens))
    return curves


def verify_ratio(forward: LatencyRow, step: LatencyRow) -> float:
    """v(n) of one timed forward: by the theory's own division, from the two medians."""
    return StepTimes(step.median_ms, step.median_ms, (forward.median_ms,)).v(0)


def _verify_cells(row: LatencyRow, step: LatencyRow) -> tuple[str, ...]:
    return (
        str(row.tokens),
        str(row.tokens - 1) if row.tokens > 1 else fmt.EMPTY,
        fmt.milliseconds(row.median_ms),
        fmt.milliseconds(row.p10_ms),
        fmt.milliseconds(row.p90_ms),
        fmt.decimal(verify_ratio(row, step)),
        str(row.samples),
    )


def _prompt_rate(
    model: str | None, latency: tuple[LatencyRow, ...], headline: Mapping[str, Any]
) -> float | None:
    """Prompt tokens per second: the summary's, or the longest timed prefill in that unit."""
    mine = [row for row in latency if row.model == model]
    for role in dict.fromkeys(row.role for row in mine):
        stored = headline.get(f"{role}_prompt_tokens_per_second")
        if stored is not None:
            return float(stored)
    prefills = [row for row in mine if row.kind == "prefill" and row.median_ms]
    longest = max(prefills, key=lambda row: row.tokens, default=None)
    return None if longest is None else 1e3 * longest.tokens / longest.median_ms

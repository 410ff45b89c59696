"""What a step's time goes to, and whether it says more about the engine than about the model."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.records import LatencyRow
from harness.reporting import formatting as fmt
from harness.reporting.tables.model import Column, Row, Table, without_empty
from harness.summary import StepBound
from harness.theory.roofline import (
    LAUNCH_BOUND_MBU,
    LAUNCH_BOUND_OVERHEAD,
    shortest_context,
    step_bounds,
)

BOUND_COLUMNS = (
    Column("step of", "left", key=True),
    Column("con-\ntext", key=True),
    Column("median\nms"),
    Column("floor\nms"),
    Column("MBU"),
    Column("arithmetic"),
    Column("overhead"),
    Column("n positions\n/ one"),
    Column("bound by", "left"),
)
BOUND_NOTES = (
    "floor: bytes read (weights used, cached keys and values) / bandwidth. MBU: floor / median.",
    "arithmetic: what one further position adds, beyond its bytes, / the step. overhead: the rest,"
    " neither reading nor arithmetic.",
    f"launch-bound: MBU below {LAUNCH_BOUND_MBU:g} and overhead above"
    f" {100 * LAUNCH_BOUND_OVERHEAD:.0f} % of the step.",
)
IN_CACHE_NOTE = (
    "MBU above 1: the model is read from a cache that is faster than the copy it is held against."
)


READ_COLUMNS = (
    Column("forward of", "left", key=True),
    Column("positions", key=True),
    Column("con-\ntext", key=True),
    Column("weights"),
    Column("cache"),
    Column("experts\ntouched"),
)
READ_NOTES = (
    "What one forward must read: the weights in use, and every cached key and value. Experts:"
    " expected number per layer under uniform routing.",
)


def reads_table(entries: Iterable[Mapping[str, Any]]) -> Table:
    """One row per forward of the manifest's `bytes_read`."""
    rows = tuple(
        Row(
            (
                f"{entry.get('role')} {entry.get('model')}",
                fmt.count(entry.get("tokens")),
                fmt.count(entry.get("context_tokens")),
                fmt.memory(entry.get("weights_bytes")),
                fmt.memory(entry.get("kv_bytes")),
                _experts(entry),
            )
        )
        for entry in entries
    )
    table = Table("Bytes read by a forward", READ_COLUMNS, rows, READ_NOTES)
    return without_empty(table, fmt.text(None))


def _experts(entry: Mapping[str, Any]) -> str:
    if entry.get("experts_touched") is None:
        return fmt.text(None)
    return f"{fmt.decimal(entry['experts_touched'], 1)} of {entry.get('experts')}"


def bounds_table(latency: Sequence[LatencyRow]) -> Table | None:
    """One row per model and context at batch 1; None where no floor is known."""
    bounds = step_bounds(latency)
    rows = tuple(
        Row(
            (
                f"{bound.role} {bound.model}",
                fmt.count(bound.context_tokens),
                fmt.milliseconds(bound.step_s * 1e3),
                fmt.milliseconds(bound.floor_s * 1e3),
                fmt.decimal(bound.mbu),
                fmt.percent(bound.arithmetic_share),
                fmt.percent(bound.overhead_share),
                f"{fmt.decimal(bound.positions_ratio)} (n={bound.positions})",
                "launches (overhead)" if bound.launch_bound else bound.bound,
            )
        )
        for bound in bounds
    )
    if not rows:
        return None
    cached = (IN_CACHE_NOTE,) if any(bound.mbu > 1 for bound in bounds) else ()
    return Table("What the steps wait for", BOUND_COLUMNS, rows, (*BOUND_NOTES, *cached))


def bound_sentences(bounds: Sequence[StepBound], c: float) -> tuple[str, ...]:
    """The caveat that a launch-bound step deserves, with the numbers that show it."""
    bound = [entry for entry in shortest_context(bounds) if entry.launch_bound]
    if not bound:
        return ()
    shown = "; ".join(
        f"{entry.role} step {fmt.milliseconds(entry.step_s * 1e3)} ms where reading its weights"
        f" takes {fmt.milliseconds(entry.floor_s * 1e3)} ms (MBU {fmt.decimal(entry.mbu)}), and"
        f" {entry.positions} positions take {fmt.decimal(entry.positions_ratio)} x one:"
        f" {fmt.percent(entry.overhead_share)} of it is overhead"
        for entry in bound
    )
    return (
        f"launch-bound (overhead-bound): {shown}. c = {fmt.decimal(c)} says more about this engine"
        " than about the models",
    )

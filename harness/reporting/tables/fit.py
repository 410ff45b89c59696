"""A server's log taken apart: what a draft step and the rest of a round cost."""

from collections.abc import Mapping, Sequence
from typing import Any

from harness.reporting import formatting as fmt
from harness.reporting.tables.model import Column, Row, Table

Entry = Mapping[str, Any]

PART_COLUMNS = (
    Column("part of a round", "left", key=True),
    Column("ms [lo, hi]"),
    Column("in target steps [lo, hi]"),
)
LOG_COLUMNS = (
    Column("K", key=True),
    Column("tokens/\nround"),
    Column("acceptance\n_rate"),
    Column("ms/tok"),
    Column("speedup"),
    Column("round,\nms"),
    Column("round of\nthe fit, ms"),
    Column("off by"),
)
PART_NOTE = (
    "round ms = K x draft step + verify + overhead, by least squares over the rounds of the log"
    " (round ms = tokens per round x ms per token); 95 % intervals, Student's."
)
TOGETHER_NOTE = (
    "The log cannot part verify and overhead. With v = 1 the overhead would be what is above 1."
)


def fit_tables(fit: Entry | None) -> tuple[Table, ...]:
    """The parts, then the log beside the fit; nothing where there was no log."""
    if not fit:
        return ()
    rest = "overhead" if fit.get("separated") else "v + overhead (not separable)"
    parts = (
        Row(("target step (K = 0)", fmt.milliseconds(fit.get("target_ms")), "1")),
        Row(
            (
                "draft step",
                _bounded(fit, "draft_ms", "draft_lo_hi"),
                _bounded(fit, "c", "c_lo_hi"),
            )
        ),
        Row(
            (
                rest,
                _bounded(fit, "rest_ms", "rest_lo_hi"),
                _bounded(fit, "rest_steps", "rest_steps_lo_hi"),
            )
        ),
    )
    notes = (PART_NOTE,) if fit.get("separated") else (PART_NOTE, TOGETHER_NOTE)
    rows = tuple(Row(_cells(entry)) for entry in fit.get("rows") or ())
    return (
        Table("What the log's rounds are made of", PART_COLUMNS, parts, notes),
        Table("The log, and the fit", LOG_COLUMNS, rows),
    )


def _cells(entry: Entry) -> tuple[str, ...]:
    return (
        fmt.text(entry.get("k")),
        fmt.decimal(entry.get("tokens_per_round")),
        fmt.percent(entry.get("acceptance_rate")),
        fmt.milliseconds(entry.get("ms_per_token")),
        fmt.speedup(entry.get("speedup")),
        fmt.decimal(entry.get("round_ms"), 1),
        fmt.decimal(entry.get("fitted_round_ms"), 1),
        fmt.percent(entry.get("residual")),
    )


def _bounded(fit: Entry, name: str, bounds: str) -> str:
    interval: Sequence[float] | None = fit.get(bounds)
    text = fmt.decimal(fit.get(name))
    return text if interval is None else f"{text} [{interval[0]:.2f}, {interval[1]:.2f}]"

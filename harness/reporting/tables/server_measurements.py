"""A server's log: what a draft step and the rest of a round cost, and how well a line fits."""

from harness.reporting import formatting as fmt
from harness.reporting.tables.model import Column, Row, Table
from harness.summary import FittedRound, RoundFit

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
    "The log cannot separate verify and overhead. With v = 1 the overhead would be what is above 1."
)


def server_tables(fit: RoundFit) -> tuple[Table, Table]:
    """The parts of a round, then the log next to the fit."""
    rest = "overhead" if fit.separated else "v + overhead (not separable)"
    parts = (
        ("target step (K = 0)", (fit.target_s, None, None)),
        ("draft step", (fit.draft_s, fit.draft_lo_s, fit.draft_hi_s)),
        (rest, (fit.rest_s, fit.rest_lo_s, fit.rest_hi_s)),
    )
    rows = tuple(
        Row((name, _bounded(1e3, seconds), _bounded(1 / fit.target_s, seconds)))
        for name, seconds in parts
    )
    notes = (PART_NOTE,) if fit.separated else (PART_NOTE, TOGETHER_NOTE)
    return (
        Table("What the log's rounds are made of", PART_COLUMNS, rows, notes),
        Table("The log, and the fit", LOG_COLUMNS, tuple(Row(_cells(row)) for row in fit.rows)),
    )


def _cells(row: FittedRound) -> tuple[str, ...]:
    return (
        fmt.text(row.k),
        fmt.decimal(row.tokens_per_round),
        fmt.percent(row.acceptance_rate),
        fmt.milliseconds(1e3 * row.seconds_per_token),
        fmt.speedup(row.speedup),
        fmt.decimal(1e3 * row.round_s, 1),
        fmt.decimal(1e3 * row.fitted_round_s, 1),
        fmt.percent(row.residual),
    )


def _bounded(scale: float, seconds: tuple[float, float | None, float | None]) -> str:
    value, low, high = seconds
    text = fmt.decimal(scale * value)
    if low is None or high is None:
        return text
    return f"{text} [{scale * low:.2f}, {scale * high:.2f}]"

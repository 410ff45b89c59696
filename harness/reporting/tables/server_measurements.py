"""A server's log: what a draft step and the rest of a round cost, and how well a line fits."""

from typing import NamedTuple

from harness.reporting import formatting as fmt
from harness.reporting.tables.specification import Column, Table, ValueWithBounds, table
from harness.summary import FittedRound, RoundFit


class Part(NamedTuple):
    """One part of a round with its interval, seconds."""

    name: str
    target_s: float
    seconds: float
    lo_s: float | None = None
    hi_s: float | None = None

    def scaled(self, factor: float) -> ValueWithBounds:
        """Value and bounds times a factor; without bounds where there is no interval."""
        if self.lo_s is None or self.hi_s is None:
            return factor * self.seconds, None, None
        return factor * self.seconds, factor * self.lo_s, factor * self.hi_s


PARTS: tuple[Column[Part], ...] = (
    Column("part of a round", lambda part: part.name, key=True),
    Column("ms [lo, hi]", lambda part: part.scaled(1e3), fmt.with_bounds),
    Column(
        "in target steps [lo, hi]", lambda part: part.scaled(1 / part.target_s), fmt.with_bounds
    ),
)
LOG: tuple[Column[FittedRound], ...] = (
    Column("K", lambda row: row.k, fmt.count, key=True),
    Column("tokens/\nround", lambda row: row.tokens_per_round, fmt.decimal),
    Column("acceptance\n_rate", lambda row: row.acceptance_rate, fmt.percent),
    Column("ms/tok", lambda row: row.seconds_per_token, fmt.in_ms),
    Column("speedup", lambda row: row.speedup, fmt.speedup),
    Column("round,\nms", lambda row: row.round_s, fmt.in_ms),
    Column("round of\nthe fit, ms", lambda row: row.fitted_round_s, fmt.in_ms),
    Column("off by", lambda row: row.residual, fmt.percent),
)
PART_NOTE = (
    "round ms = K x draft step + verify + overhead, by least squares over the rounds of the log"
    " (round ms = tokens per round x ms per token); 95 % intervals, Student's."
)
TOGETHER_NOTE = (
    "The log cannot separate verify and overhead. With v = 1 the overhead would be what is above 1."
)


def server_tables(fit: RoundFit) -> list[Table]:
    """The parts of a round, then the log next to the fit."""
    rest = "overhead" if fit.separated else "v + overhead (not separable)"
    parts = (
        Part("target step (K = 0)", fit.target_s, fit.target_s),
        Part("draft step", fit.target_s, fit.draft_s, fit.draft_lo_s, fit.draft_hi_s),
        Part(rest, fit.target_s, fit.rest_s, fit.rest_lo_s, fit.rest_hi_s),
    )
    notes = (PART_NOTE,) if fit.separated else (PART_NOTE, TOGETHER_NOTE)
    return [
        table("What the log's rounds are made of", PARTS, parts, notes=notes),
        table("The log, and the fit", LOG, fit.rows),
    ]

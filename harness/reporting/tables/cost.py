"""What a run would take and cost on each card; of a dry run."""

from collections.abc import Sequence

from harness.reporting import formatting as fmt
from harness.reporting.tables.specification import Column, Table, table
from harness.theory.cost import ALPHA, LOAD_BYTES_PER_S, SECONDS_PER_LAYER, START_S, Estimate

NOTE = (
    "Time and cost are modelled, not measured. From: every forward at its floor (bytes read /"
    f" bandwidth); to: {SECONDS_PER_LAYER * 1e3:g} ms a layer, an engine that launches kernels one"
    f" by one. Both: alpha {ALPHA:g} (assumed), every text as long as its budget,"
    f" {START_S:.0f} s to start and weights at {LOAD_BYTES_PER_S / 1e9:g} GB/s (assumed)."
    " Prices: conf/gpu, the card alone."
)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f}" if seconds < 600 else f"{seconds / 60:.0f}"


def _time(low_s: float, _low: float, high_s: float) -> str:
    return f"{_minutes(low_s)} to {_minutes(high_s)} min"


def _cost(low_usd: float, _low: float, high_usd: float) -> str:
    return f"{fmt.dollars(low_usd)} to {fmt.dollars(high_usd)}"


COLUMNS: tuple[Column[Estimate], ...] = (
    Column("card", lambda row: row.card, key=True),
    Column(
        "time",
        lambda row: (row.low_s, row.low_s, row.high_s) if row.fits else "does not fit",
        _time,
    ),
    Column(
        "cost", lambda row: (row.low_usd, row.low_usd, row.high_usd) if row.fits else None, _cost
    ),
    Column("price an hour", lambda row: row.price_per_hour, fmt.dollars),
)


def cost_table(estimates: Sequence[Estimate]) -> Table:
    """One row per card, cheapest first."""
    return table("Time and cost (modelled)", COLUMNS, estimates, notes=(NOTE,))

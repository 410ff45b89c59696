"""What a run would take and cost on each card, as a table for the terminal."""

from dataclasses import dataclass

from rich.table import Table as RichTable

from harness.reporting import formatting as fmt
from harness.theory.cost import ALPHA, LOAD_BYTES_PER_S, SECONDS_PER_LAYER, START_S, Estimate

NOTES = (
    "time and cost are modelled, not measured. From: every forward at its floor (bytes read /"
    f" bandwidth); to: {SECONDS_PER_LAYER * 1e3:g} ms a layer, an engine that launches kernels one"
    f" by one. Both: alpha {ALPHA:g} (assumed), every text as long as its budget,"
    f" {START_S:.0f} s to start and weights at {LOAD_BYTES_PER_S / 1e9:g} GB/s (assumed)."
    " Prices: conf/gpu, the card alone."
)


@dataclass(frozen=True)
class Costs:
    """Estimates, cheapest first, or the models whose sizes are not known.

    Attributes:
        estimates: one per card.
        unknown: names of the models without sizes; then there is no estimate.
    """

    estimates: tuple[Estimate, ...]
    unknown: tuple[str, ...]


def cost_table(costs: Costs) -> RichTable:
    """One row per card."""
    table = RichTable(title="time and cost (modelled)")
    for name in ("card", "time", "cost", "price an hour"):
        table.add_column(name, justify="left" if name == "card" else "right")
    for entry in costs.estimates:
        if not entry.fits:
            table.add_row(entry.card, "does not fit", fmt.EMPTY, fmt.dollars(entry.price_per_hour))
            continue
        table.add_row(
            entry.card,
            f"{_minutes(entry.low_s)} to {_minutes(entry.high_s)} min",
            f"{fmt.dollars(entry.low_usd)} to {fmt.dollars(entry.high_usd)}",
            fmt.dollars(entry.price_per_hour),
        )
    return table


def unknown_line(costs: Costs) -> str:
    """Why there is no estimate."""
    names = " and ".join(costs.unknown)
    return (
        f"estimated cost: unknown; the sizes of {names} are not in its config"
        " (model.architecture={family: ..., layers: ...} gives them)"
    )


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f}" if seconds < 600 else f"{seconds / 60:.0f}"

"""The pair on cards that are not at hand; everything in this table is modelled."""

from collections.abc import Mapping
from typing import Any

from harness.reporting import formatting as fmt
from harness.reporting.tables.model import Column, Row, Table

NOTES = (
    "modelled, not measured: every forward at the longer of bytes read / bandwidth and operations /"
    " bf16 rate (both from the data sheet), experts touched under uniform routing. Engines are"
    " slower, small drafts most of all, so speedups are upper bounds at that alpha.",
    "fits: weights and caches of both models in 90 % of the memory; cards needed by memory alone."
    " USD: per 10^6 tokens of all sequences together, the card's price alone.",
    "stops at: the batch (1, 2, 4, ...) from which on no K pays, of those that fit, up to 1024.",
)


def cards_table(planned: Mapping[str, Any] | None) -> Table | None:
    """One row per card of what summary.json stores under `modelled_cards`; the chosen one marked.

    Args:
        planned: what was planned for, and the rows; None where there is nothing to model from.
    """
    if not planned or not planned.get("rows"):
        return None
    rows = planned["rows"]
    alphas = [gain["alpha"] for gain in rows[0]["gains"]]
    columns = (
        Column("card", "left", key=True),
        Column("fits", "left"),
        Column("needed"),
        Column("target\nms"),
        Column("draft\nms"),
        Column("c"),
        Column(f"v(K={rows[0]['largest_k']})"),
        Column("USD,\nplain"),
        *(
            column
            for alpha in alphas
            for column in (
                Column(f"alpha {alpha:g}:\nbest K"),
                Column(f"alpha {alpha:g}:\nspeedup"),
                Column(f"alpha {alpha:g}:\nUSD"),
                Column(f"alpha {alpha:g}:\nstops at"),
            )
        ),
    )
    chosen = planned.get("chosen")
    shown = tuple(Row(_cells(row, chosen), best=row["card"] == chosen) for row in rows)
    several = f" x {planned['batch']} sequences" if planned["batch"] > 1 else ""
    dtype = "bf16" if planned["bytes_per_parameter"] == 2 else "float32"
    title = f"Cards (modelled): {planned['context_tokens']} tokens of context{several}, {dtype}"
    return Table(title, columns, shown, NOTES)


def _cells(row: Mapping[str, Any], chosen: str | None) -> tuple[str, ...]:
    cells = [
        f"{row['card']} (gpu=)" if row["card"] == chosen else str(row["card"]),
        "yes" if row["fits"] else f"no ({row['cards_needed']} cards)",
        f"{row['needed_bytes'] / 1e9:,.3g} GB",
        fmt.milliseconds(row["target_ms"]),
        fmt.milliseconds(row["draft_ms"]),
        fmt.decimal(row["c"], 3),
        fmt.decimal(row["v"]),
        fmt.dollars(row["usd_per_million_tokens"]),
    ]
    for gain in row["gains"]:
        stops = gain["stops_at_batch"]
        where = f"> {row['largest_batch']}" if stops is None else str(stops)
        cells += [
            str(gain["k"]),
            fmt.speedup(gain["speedup"]),
            fmt.dollars(gain["usd_per_million_tokens"]),
            where if row["sequences"] else fmt.EMPTY,
        ]
    return tuple(cells)

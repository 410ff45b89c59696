"""Synthetic acceptance: what step times predict at the imposed acceptance, and what happened."""

from collections.abc import Iterable

from harness.analysis.cells import ratio
from harness.records import ResultRow
from harness.reporting import formatting as fmt
from harness.reporting.tables.model import Column, Row, Table

COLUMNS = (
    Column("prompt set", "left", key=True),
    Column("temperature", key=True),
    Column("K", key=True),
    Column("tokens/round\nexpected"),
    Column("tokens/round\nmeasured"),
    Column("speedup\npredicted"),
    Column("speedup\nmeasured"),
    Column("measured/\npredicted"),
)
NOTES = (
    "Expected: by the renewal recursion from the imposed acceptance. Predicted: that, with the step"
    " times of this run. Measured / predicted below 1 is time that the steps do not explain.",
)


def imposed_table(rows: Iterable[ResultRow]) -> Table:
    """One row per cell that was both predicted and measured."""
    everything = tuple(rows)
    theory = {
        (row.prompt_set, row.temperature, row.k): row
        for row in everything
        if row.source == "theory"
    }
    pairs = [
        (row, theory[row.prompt_set, row.temperature, row.k])
        for row in everything
        if row.source == "measured" and (row.prompt_set, row.temperature, row.k) in theory
    ]
    return Table(
        "Synthetic acceptance: predicted beside measured",
        COLUMNS,
        tuple(_row(measured, predicted) for measured, predicted in pairs),
        NOTES,
    )


def _row(measured: ResultRow, predicted: ResultRow) -> Row:
    return Row(
        (
            fmt.text(measured.prompt_set),
            fmt.temperature(measured.temperature),
            fmt.text(measured.k),
            fmt.decimal(predicted.tokens_per_round),
            fmt.decimal(measured.tokens_per_round),
            fmt.speedup(predicted.speedup),
            fmt.speedup(measured.speedup),
            fmt.decimal(ratio(measured.speedup, predicted.speedup)),
        )
    )

"""Rules of thumb beside the measurement."""

from collections.abc import Iterable, Mapping
from typing import Any

from harness.reporting import formatting as fmt
from harness.reporting.tables.model import Column, Row, Table

COLUMNS = (
    Column("rule of thumb", "left", key=True, flexible=True),
    Column("here", "left"),
    Column("met", "left"),
    Column("what the measurement says", "left", flexible=True),
)
NOTES = (
    "The rules are in circulation (harness/reporting/metrics.md names them). They are shown to be"
    " checked, not obeyed: the verdict rests on the measurement.",
)
MET = {True: "yes", False: "no", None: "-"}


def thumb_table(entries: Iterable[Mapping[str, Any]]) -> Table:
    """One row per rule, from summary.json's `rules_of_thumb`."""
    rows = tuple(
        Row(
            (
                fmt.text(entry.get("rule")),
                fmt.text(entry.get("value")),
                MET.get(entry.get("met"), "-"),
                fmt.text(entry.get("instead")),
            )
        )
        for entry in entries
    )
    return Table("Rules of thumb", COLUMNS, rows, NOTES)

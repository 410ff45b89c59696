"""What a table is, before anyone decides how it is drawn.

The console and the markdown draw the same `Table`; which columns exist, how a number is rounded
and which row is best is decided where the table is made.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

BEST = "best"


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        title: its header; a line break says where a narrow header may fold.
        align: numbers to the right, words to the left.
        key: names the row; repeated when a wide table is folded into parts.
        flexible: long words, which may be broken over lines.
        means: the quantity below it (a name in metrics.md) where the title does not name it.
    """

    title: str
    align: Literal["left", "right"] = "right"
    key: bool = False
    flexible: bool = False
    means: str = ""

    @property
    def one_line(self) -> str:
        """The header without its folds ("tokens/round")."""
        whole = self.title.replace("/\n", "/").replace("\n_", "_").replace("-\n", "")
        return whole.replace("\n", " ")


@dataclass(frozen=True)
class Row:
    """One row: a text per column, and whether this is the row to look at."""

    cells: tuple[str, ...]
    best: bool = False


@dataclass(frozen=True)
class Table:
    """A titled table with the remarks that belong under it."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def column(self, title: str) -> tuple[str, ...]:
        """Every cell under the column called `title` (its one-line header)."""
        index = [column.one_line for column in self.columns].index(title)
        return tuple(row.cells[index] for row in self.rows)


def without_empty(table: Table, empty: str) -> Table:
    """The table without the columns that have nothing in any row; those naming rows stay."""
    kept = [
        index
        for index, column in enumerate(table.columns)
        if column.key or any(row.cells[index] != empty for row in table.rows)
    ]
    rows = tuple(Row(tuple(row.cells[index] for index in kept), row.best) for row in table.rows)
    return replace(table, columns=tuple(table.columns[index] for index in kept), rows=rows)


def with_best_column(
    columns: Sequence[Column], rows: Sequence[Row]
) -> tuple[tuple[Column, ...], tuple[Row, ...]]:
    """A leading column that marks the best row in words, for those who see no colour."""
    marked = tuple(Row((BEST if row.best else "", *row.cells), row.best) for row in rows)
    return (Column("", "left", key=True), *columns), marked

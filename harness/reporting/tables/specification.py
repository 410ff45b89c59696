r"""What a table is, before anyone decides how it is drawn.

A table is specified by its columns: a title, the value that a record has in it, and how that value
is written. `table` applies the columns to records. A cell carries both its value (to sort by, to
compare) and its text (to read), so that no renderer parses a formatted number back.

    COLUMNS = (
        Column("draft", lambda row: row.draft, key=True),
        Column("best\nK", lambda row: row.k, fmt.count),
        Column("speedup\n[lo, hi]", lambda row: (row.speedup, row.lo, row.hi), fmt.speedup),
    )
    table("Drafts", COLUMNS, rows, best=lambda row: row.rank == 1, notes=("speedup: predicted.",))
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from harness import formatting as fmt
from harness.records import Key, Record

R = TypeVar("R", contravariant=True)
Value = float | str | None

BEST = "best"


@dataclass(frozen=True)
class Cell:
    """One cell."""

    text: str
    value: Value = None  # what it is sorted by, in one unit per column; None where there is none


@dataclass(frozen=True)
class Column(Generic[R]):
    """One column over records of one type."""

    title: str  # its header; a line break says where a narrow header may fold
    # Of a record; with an interval (value, low, high). A word is shown as it is, and None as a
    # dash.
    value: Callable[[R], Value | fmt.Bounded]
    # How a number is written, with its bounds where there are any; None for a column of words.
    text: Callable[..., str] | None = None
    key: bool = False  # names the row; repeated when a wide table is folded into parts
    flexible: bool = False  # long words, which may be broken over lines
    definition: str = ""  # the quantity's name in metrics.md where the title is not it

    @property
    def align(self) -> Literal["left", "right"]:
        """Numbers to the right, words to the left."""
        return "left" if self.text is None else "right"

    @property
    def one_line(self) -> str:
        """The header without its folds ("tokens/round")."""
        joined = self.title.replace("/\n", "/").replace("\n_", "_").replace("-\n", "")
        return joined.replace("\n", " ")

    def cell(self, record: R) -> Cell:
        """The record's cell in this column."""
        given = self.value(record)
        value, *bounds = given if isinstance(given, tuple) else (given,)
        if value is None or value == "":
            return Cell(fmt.EMPTY)
        if self.text is None or isinstance(value, str):
            return Cell(str(value), value)
        return Cell(self.text(value, *bounds), value)


@dataclass(frozen=True)
class Row:
    """One row: a cell per column, whether it is the best one, and whether a phone lacks it."""

    cells: tuple[Cell, ...]
    best: bool = False
    minor: bool = False


@dataclass(frozen=True)
class Table:
    """A titled table with the remarks that belong under it."""

    title: str
    columns: tuple[Column[Any], ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def column(self, title: str) -> tuple[Cell, ...]:
        """Every cell under the column called `title` (its one-line header)."""
        index = [column.one_line for column in self.columns].index(title)
        return tuple(row.cells[index] for row in self.rows)


def table(
    title: str,
    columns: Sequence[Column[Record]],
    records: Iterable[Record],
    *,
    best: Callable[[Record], bool] | None = None,
    notes: Sequence[str] = (),
) -> Table:
    """One row per record; columns that are empty in every row, and empty notes, are left out.

    The row that is `best` says so in words too: "best 4" in its first cell.
    """
    listed = tuple(records)
    made = [[column.cell(record) for column in columns] for record in listed]
    kept = [n for n in range(len(columns)) if any(cells[n].text != fmt.EMPTY for cells in made)]
    return Table(
        title,
        tuple(columns[index] for index in kept),
        tuple(
            _row([cells[index] for index in kept], best is not None and best(record))
            for record, cells in zip(listed, made, strict=True)
        ),
        tuple(filter(None, notes)),
    )


def columns_by(
    keys: Iterable[Key],
    title: str,
    value: Callable[[Record, Key], Value | fmt.Bounded],
    text: Callable[..., str] | None = None,
    definition: str = "",
) -> tuple[Column[Record], ...]:
    """A column per key, such as K: the title has {} in the key's place."""
    return tuple(
        Column(title.format(key), lambda row, key=key: value(row, key), text, definition=definition)
        for key in keys
    )


def _row(cells: list[Cell], best: bool) -> Row:
    """The cells as a row; the best row says so without colour too."""
    if best:
        cells[0] = Cell(f"{BEST} {cells[0].text}", cells[0].value)
    return Row(tuple(cells), best)

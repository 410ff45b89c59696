r"""The types of tables, which every renderer draws, and the function that makes a table of records.

A table is specified by its columns: a title, the value of a record, and the format of that value.
`table` applies the columns to records. A cell has both a value (to sort by, to compare) and a text
(to read), so that no renderer parses a formatted number.

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
    """One cell of a table."""

    text: str
    value: Value = None  # the sort key, in one unit per column; None for an empty cell


@dataclass(frozen=True)
class Column(Generic[R]):
    """One column over records of one type."""

    title: str  # its header; a line break is where a narrow header may fold
    # The value of a record; (value, low, high) with an interval. A word is shown as it is, None as
    # a dash.
    value: Callable[[R], Value | fmt.Bounded]
    # The text of a number and of its bounds, if any; None for a column of words
    text: Callable[..., str] | None = None
    key: bool = False  # names the row; repeated when a wide table is folded into parts
    flexible: bool = False  # long words, which may be broken over lines
    definition: str = ""  # the quantity's name in metrics.md where the title is not it

    @property
    def align(self) -> Literal["left", "right"]:
        """The alignment: numbers to the right, words to the left."""
        return "left" if self.text is None else "right"

    @property
    def one_line(self) -> str:
        """The header without its line breaks ("tokens/round")."""
        joined = self.title.replace("/\n", "/").replace("\n_", "_").replace("-\n", "")
        return joined.replace("\n", " ")

    def cell(self, record: R) -> Cell:
        given = self.value(record)
        value, *bounds = given if isinstance(given, tuple) else (given,)
        if value is None or value == "":
            return Cell(fmt.EMPTY)
        if self.text is None or isinstance(value, str):
            return Cell(str(value), value)
        return Cell(self.text(value, *bounds), value)


@dataclass(frozen=True)
class Row:
    """One row: a cell per column, whether it is the best, and whether a phone leaves it out."""

    cells: tuple[Cell, ...]
    best: bool = False
    minor: bool = False


@dataclass(frozen=True)
class Table:
    """A table with its title and the notes under it."""

    title: str
    columns: tuple[Column[Any], ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def column(self, title: str) -> tuple[Cell, ...]:
        """The cells of the column with this one-line header."""
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
    """A table with a row per record, without columns that are empty in every row and empty notes.

    The row that is `best` has that word in its first cell: "best 4".
    """
    listed = tuple(records)
    made = [[column.cell(record) for column in columns] for record in listed]
    kept = [n for n in range(len(columns)) if any(cells[n].text != fmt.EMPTY for cells in made)]
    return Table(
        title,
        tuple(columns[index] for index in kept),
        tuple(
            _marked_row([cells[index] for index in kept], best is not None and best(record))
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
    """A column for each key, such as K; the title has {} in the place of the key."""
    return tuple(
        Column(title.format(key), lambda row, key=key: value(row, key), text, definition=definition)
        for key in keys
    )


def _marked_row(cells: list[Cell], best: bool) -> Row:
    if best:
        cells[0] = Cell(f"{BEST} {cells[0].text}", cells[0].value)
    return Row(tuple(cells), best)

"""A table in a page's terms: definitions behind its headers, values to sort by behind its cells."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from harness.reporting.definitions import Definition, lookup
from harness.reporting.tables.model import BEST, Column, Row, Table

_NUMBER = re.compile(
    r"^[<>≈]?\s*\$?\s*([+-]?[\d,]*\.?\d+(?:e[+-]?\d+)?)(?:\s*(KiB|MiB|GiB|ms|s)\b)?"
)
_NAMING = ("quantity", "part")  # columns whose cells name what stands beside them
# In one column the same quantity may be printed in several units; sorting needs one.
_SCALES = {"KiB": 1024.0, "MiB": 1024.0**2, "GiB": 1024.0**3, "ms": 1e-3}


@dataclass(frozen=True)
class HtmlColumn:
    """A header: its words in one line and as they may be folded, its class, what they mean."""

    title: str
    lines: tuple[str, ...]
    css: str
    definition: Definition | None


@dataclass(frozen=True)
class HtmlCell:
    """A cell: its text, and whether it heads its row.

    Attributes:
        text, css: what is shown, and how.
        value: what to sort by, "" for an empty cell; None where the text itself is.
        heads_row: whether it names the row for screen readers.
        mark: a word behind the text ("best").
        definition: of a quantity that the cell names.
        href: where it leads.
    """

    text: str
    css: str = ""
    value: str | None = None
    heads_row: bool = False
    mark: str = ""
    definition: Definition | None = None
    href: str = ""


@dataclass(frozen=True)
class HtmlRow:
    """Cells, and whether this is the row to look at."""

    cells: tuple[HtmlCell, ...]
    best: bool = False


@dataclass(frozen=True)
class HtmlTable:
    """A table with an id of its own in the page."""

    id: str
    title: str
    columns: tuple[HtmlColumn, ...]
    rows: tuple[HtmlRow, ...]
    notes: tuple[str, ...]

    @property
    def definitions(self) -> tuple[Definition, ...]:
        """Every definition that its headers and cells link to."""
        cells = (cell.definition for row in self.rows for cell in row.cells)
        heads = (column.definition for column in self.columns)
        return tuple(entry for entry in (*heads, *cells) if entry is not None)


def html_table(table: Table, name: str) -> HtmlTable:
    """The table for a page; its leading column of marks, if any, moves into the row's name.

    Args:
        table: as every door makes it.
        name: an id, unique in the page.
    """
    marked = bool(table.columns) and not table.columns[0].title and table.columns[0].key
    first = 1 if marked else 0
    columns = table.columns[first:]
    return HtmlTable(
        id=name,
        title=table.title,
        columns=tuple(_column(column) for column in columns),
        rows=tuple(_row(row, columns, first) for row in table.rows),
        notes=table.notes,
    )


def linked(table: HtmlTable, hrefs: Sequence[str]) -> HtmlTable:
    """The table with each row's first cell leading to its address."""
    rows = tuple(
        replace(row, cells=(replace(row.cells[0], href=href, css="link"), *row.cells[1:]))
        for row, href in zip(table.rows, hrefs, strict=True)
    )
    return replace(table, rows=rows)


def marked(table: HtmlTable, title: str, css: Mapping[str, str], other: str) -> HtmlTable:
    """The table with a class on each cell of one column: by its text, or else `other`."""
    index = [column.title for column in table.columns].index(title)

    def cells(row: HtmlRow) -> tuple[HtmlCell, ...]:
        cell = row.cells[index]
        changed = replace(cell, css=css.get(cell.text, other))
        return (*row.cells[:index], changed, *row.cells[index + 1 :])

    return replace(table, rows=tuple(replace(row, cells=cells(row)) for row in table.rows))


def sort_value(text: str) -> str:
    """The number that a cell's text starts with, in one unit; "" where it has none."""
    found = _NUMBER.match(text)
    if found is None:
        return ""
    return f"{float(found[1].replace(',', '')) * _SCALES.get(found[2] or '', 1.0):.10g}"


def _row(row: Row, columns: Sequence[Column], first: int) -> HtmlRow:
    mark = row.cells[0] if first else (BEST if row.best else "")
    cells = []
    for index, (text, column) in enumerate(zip(row.cells[first:], columns, strict=True)):
        names_row = index == 0 and column.key
        cells.append(
            HtmlCell(
                text=text,
                css=_css(column),
                value=sort_value(text) if column.align == "right" else None,
                heads_row=names_row,
                mark=mark if index == 0 and BEST not in text else "",
                definition=lookup(text) if names_row and column.title in _NAMING else None,
            )
        )
    return HtmlRow(tuple(cells), row.best)


def _column(column: Column) -> HtmlColumn:
    lines = tuple(column.title.replace("\n_", "_").split("\n"))
    return HtmlColumn(column.one_line, lines, _css(column), lookup(column.means or column.one_line))


def _css(column: Column) -> str:
    if column.align == "right":
        return "num"
    return "words" if column.flexible else ""

"""What a person reads at the end of a door: the verdict, the tables, and the verdict again.

Nothing depends on colour. A table too wide for the terminal is folded into parts that each repeat
the columns naming the row, rather than wrapped inside its cells.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from harness.reporting.content import Content, content_of
from harness.reporting.snippets import Snippet
from harness.reporting.tables import Column, Table

if TYPE_CHECKING:
    from harness.storage import StoredRun

_GAP = 2
_NARROWEST = 12


def show(run: "StoredRun", console: Console | None = None) -> None:
    """Print a run's report.

    Args:
        run: what was stored, complete or not.
        console: where to; a new one on standard output by default.
    """
    out = console or Console(highlight=False)
    content = content_of(run)
    _line(out, content.title, "bold underline")
    if content.banner:
        _line(out, content.banner, "bold")
    if content.status:
        _line(out, content.status, "bold")
    _verdict(out, content)
    if content.engine:
        _line(out, content.engine)
    _paragraph(out, content.reasons)
    notes = [f"Note: {caveat}" for caveat in content.caveats]
    _paragraph(out, [*notes, *(f"Did not complete: {text}" for text in content.failures)])
    for snippet in content.snippets[:1]:
        _snippet(out, snippet)
    if content.snippets[1:]:
        others = ", ".join(snippet.title for snippet in content.snippets[1:])
        _line(out, f"In report.md, each with its own K and speedup: {others}.")
    for table in content.tables:
        _table(out, table)
    if content.acceptance:
        out.print()
        _line(out, content.acceptance)
    if content.verdicts and content.tables:
        _verdict(out, content)


def fold(table: Table, width: int) -> tuple[Table, ...]:
    """Split a table by columns into parts that fit `width`, key columns in every part."""
    widths = _widths(table, width)
    keys = [index for index, column in enumerate(table.columns) if column.key]
    others = [index for index, column in enumerate(table.columns) if not column.key]
    room = width - sum(widths[index] + _GAP for index in keys)
    parts: list[list[int]] = [[]]
    left = room
    for index in others:
        needed = widths[index] + (_GAP if parts[-1] else 0)
        if parts[-1] and needed > left:
            parts.append([])
            left, needed = room, widths[index]
        parts[-1].append(index)
        left -= needed
    return tuple(
        _part(table, sorted(keys + part), first=number == 0, last=number == len(parts) - 1)
        for number, part in enumerate(parts)
    )


def _part(table: Table, indices: Sequence[int], *, first: bool, last: bool) -> Table:
    rows = tuple(
        type(row)(tuple(row.cells[index] for index in indices), row.best) for row in table.rows
    )
    title = table.title if first else f"{table.title} (more columns)"
    columns = tuple(table.columns[index] for index in indices)
    return Table(title, columns, rows, table.notes if last else ())


def _widths(table: Table, width: int) -> list[int]:
    """Each column's width; flexible ones share what the others leave, within reason."""
    widths = []
    for index, column in enumerate(table.columns):
        texts = [*column.title.split("\n"), *(row.cells[index] for row in table.rows)]
        widths.append(max(len(text) for text in texts))
    flexible = [index for index, column in enumerate(table.columns) if column.flexible]
    rigid = sum(widths) - sum(widths[index] for index in flexible) + _GAP * (len(widths) - 1)
    for index in flexible:
        widths[index] = min(widths[index], max(_NARROWEST, (width - rigid) // len(flexible)))
    return widths


def _verdict(out: Console, content: Content) -> None:
    if content.verdicts:
        out.print()
    for number, sentence in enumerate(content.verdicts):
        _line(out, sentence, "bold" if number == 0 else "")


def _paragraph(out: Console, lines: Sequence[str]) -> None:
    if lines:
        out.print()
    for line in lines:
        _line(out, line)


def _snippet(out: Console, snippet: Snippet) -> None:
    """Something to paste: its lines are never broken, a terminal wraps them by itself."""
    out.print()
    _line(out, snippet.title, "bold")
    if snippet.code:
        out.print(Text(snippet.code), soft_wrap=True)
    for note in snippet.notes:
        out.print(Padding(Text(note), (0, 0, 0, 2), expand=False))


def print_table(table: Table, out: Console) -> None:
    """Print one table, folded to the console's width."""
    _table(out, table)


def _table(out: Console, table: Table) -> None:
    for part in fold(table, out.width):
        out.print()
        _line(out, part.title, "bold")
        out.print(_drawn(part, out.width))
        for note in part.notes:
            out.print(Padding(Text(note), (0, 0, 0, 2), expand=False))


def _drawn(table: Table, width: int) -> RichTable:
    drawn = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column, most in zip(table.columns, _widths(table, width), strict=True):
        drawn.add_column(_header(column), justify=column.align, max_width=most, overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(cell) for cell in row.cells), style="bold" if row.best else "")
    return drawn


def _header(column: Column) -> Text:
    return Text(column.title, justify=column.align)


def _line(out: Console, text: str, style: str = "") -> None:
    out.print(Text(text, style=style), overflow="fold")

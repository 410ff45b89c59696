"""What a person reads at the end of a command: verdict, tables, verdict; texts token by token.

Nothing depends on colour. A table too wide for the terminal is folded into parts that each repeat
the columns naming the row, rather than wrapped inside its cells.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from harness.reporting.content import Content
from harness.reporting.serving import Snippet
from harness.reporting.tables.specification import Row, Table

_GAP = 2
_NARROWEST = 12


def show(content: Content, console: Console | None = None) -> None:
    """Print a report."""
    out = console or Console(highlight=False)
    _line(out, content.title, "bold underline")
    for warning in (content.banner, content.status):
        if warning:
            _line(out, warning, "bold")
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
        print_table(table, out)
    _paragraph(out, [content.acceptance] if content.acceptance else [])
    if content.verdicts and content.tables:
        _verdict(out, content)


def print_table(table: Table, out: Console) -> None:
    """Print one table, folded to the console's width."""
    for part in fold(table, out.width):
        out.print()
        _line(out, part.title, "bold")
        out.print(_rich_table(part, out.width))
        _notes(out, part.notes)


def fold(table: Table, width: int) -> tuple[Table, ...]:
    """Split a table by columns into parts that fit `width`, key columns in every part."""
    widths = _widths(table, width)
    keys = [index for index, column in enumerate(table.columns) if column.key]
    others = [index for index, column in enumerate(table.columns) if not column.key]
    most = width - sum(widths[index] + _GAP for index in keys)
    parts: list[list[int]] = [[]]
    left = most
    for index in others:
        needed = widths[index] + (_GAP if parts[-1] else 0)
        if parts[-1] and needed > left:
            parts.append([])
            left, needed = most, widths[index]
        parts[-1].append(index)
        left -= needed
    if len(parts) == 1:
        return (table,)
    selected = [_selected(table, sorted(keys + part)) for part in parts]
    more = f"{table.title} (more columns)"
    return (
        replace(selected[0], notes=()),
        *(replace(part, title=more, notes=()) for part in selected[1:-1]),
        replace(selected[-1], title=more),
    )


def _selected(table: Table, indices: Sequence[int]) -> Table:
    columns = tuple(table.columns[index] for index in indices)
    rows = (Row(tuple(row.cells[index] for index in indices), row.best) for row in table.rows)
    return replace(table, columns=columns, rows=tuple(rows))


def _widths(table: Table, width: int) -> list[int]:
    """Each column's width; flexible ones share what the others leave, within reason."""
    widths = [
        max(map(len, (*column.title.split("\n"), *(row.cells[index].text for row in table.rows))))
        for index, column in enumerate(table.columns)
    ]
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
    _notes(out, snippet.notes)


def _rich_table(table: Table, width: int) -> RichTable:
    rich = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column, most in zip(table.columns, _widths(table, width), strict=True):
        header = Text(column.title, justify=column.align)
        rich.add_column(header, justify=column.align, max_width=most, overflow="fold")
    for row in table.rows:
        rich.add_row(*(Text(cell.text) for cell in row.cells), style="bold" if row.best else "")
    return rich


def _notes(out: Console, notes: Sequence[str]) -> None:
    for note in notes:
        out.print(Padding(Text(note), (0, 0, 0, 2), expand=False))


def _line(out: Console, text: str, style: str = "") -> None:
    out.print(Text(text, style=style), overflow="fold")


class Piece(NamedTuple):
    """One token's text, and whether the draft proposed it."""

    text: str
    from_draft: bool


class MarkedText(NamedTuple):
    """A generation in pieces, with the name it is shown under."""

    name: str
    pieces: tuple[Piece, ...]


def show_tokens(texts: Sequence[MarkedText], console: Console | None = None) -> None:
    """Print each text: drafted tokens green, the target's own in [brackets] and magenta."""
    out = console or Console(highlight=False)
    legend = Text("\nTokens: ")
    legend.append("drafted and kept", style="green")
    legend.append(", ")
    legend.append("[the target's own: a correction or a bonus]", style="bold magenta")
    out.print(legend, soft_wrap=True)
    for name, pieces in texts:
        line = Text(f"{name}: ", style="bold")
        for piece in pieces:
            shown = piece.text.replace("\n", "\\n")
            if piece.from_draft:
                line.append(shown, style="not bold green")
            else:
                line.append(f"[{shown}]", style="bold magenta")
        out.print(line, soft_wrap=True)

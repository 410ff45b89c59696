"""The report that a command prints at its end: at most `MOST_LINES` lines, more with `verbose`.

Nothing depends on colour. A table too wide for the terminal is folded into parts that each repeat
the columns naming the row, rather than wrapped inside its cells.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from textwrap import shorten

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from harness.command_words import as_typed, command
from harness.records import Verbose
from harness.reporting import picture
from harness.reporting.content import Content
from harness.reporting.grid import MARK
from harness.reporting.picture import Bar
from harness.reporting.serving_commands import Snippet
from harness.reporting.tables.specification import Row, Table

MOST_LINES = 28  # a command's answer takes 30 lines: two are left for `fail_below` and `run:`
MOST_CODE = 4
MOST_FAILURES = 5
FAILURE_ROWS = 2  # lines of one failure
MOST_TABLE = 12  # lines of a table after the grid, so that the caveats still fit
LEAST_ROWS = 2  # a table that has more rows is shown with at least this many, or not at all
UNWRAPPED = 10_000  # columns where standard output is a pipe or a file: no line is wrapped there
_GAP = 2
_NARROWEST = 12


def show(content: Content, console: Console | None = None, *, verbose: Verbose = False) -> None:
    """Print a report: at most MOST_LINES lines, or with `verbose` its main tables, or every one."""
    out = console or standard_output()
    if verbose:
        _show_all(content, content.main if verbose == "tables" else content.tables, out)
    else:
        _fit(list(_blocks(content, out)), out)


def standard_output() -> Console:
    """The console of standard output; in a pipe nothing is wrapped, unless COLUMNS is set."""
    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, width=UNWRAPPED if wide else None)


# ---- the answer ----------------------------------------------------------------------------------


Lines = tuple[Text, ...]


@dataclass(frozen=True)
class _Block:
    """A head and its parts (rows or sentences); the last parts are left out if space is short."""

    head: Lines
    parts: tuple[Lines, ...] = ()
    importance: int = 0  # blocks with a smaller number keep more parts; 0 keeps all
    most: int = MOST_LINES
    apart: bool = True  # whether a blank line comes before the block

    @property
    def lines(self) -> Lines:
        """The lines of the head and of all parts."""
        return (*self.head, *(line for part in self.parts for line in part))

    def cut(self, most: int, width: int) -> "_Block":
        """The block with as many of its parts as fit into `most` rows of the terminal.

        Where no part fits, a table is left out, and sentences are replaced by their number.
        """
        most = min(most, self.most)
        kept = len(self.parts)
        if _height(self.lines, width) <= most:
            return self
        while kept and _height(replace(self, parts=self.parts[:kept]).lines, width) > most - 1:
            kept -= 1
        if most < 1 or (self.head and not kept):
            return replace(self, head=(), parts=())
        left = len(self.parts) - kept
        if self.head and kept < LEAST_ROWS <= left + kept:  # a table of one row compares nothing
            return replace(self, head=(), parts=())
        what = f"{'row' if self.head else 'note'}{'s' if left > 1 else ''}"
        more = (Text(f"{left}{' more' if kept else ''} {what} with verbose=tables."),)
        return replace(self, parts=(*self.parts[:kept], more))


def print_brief(parts: Sequence[Table | str], out: Console) -> None:
    """Print tables and sentences in at most MOST_LINES lines, the first ones whole if possible."""
    blocks: list[_Block] = []
    for place, part in enumerate(parts, start=1):
        notes = part.notes if isinstance(part, Table) else (part,)
        if isinstance(part, Table):  # without its notes it would mislead
            blocks.append(_table_block(part, out, importance=2 * place, most=MOST_LINES))
        blocks.append(_sentences(notes, out, importance=2 * place - 1, most=MOST_LINES))
    _fit([replace(blocks[0], apart=False), *blocks[1:]], out)


def _fit(every: Sequence[_Block], out: Console) -> None:
    """Print blocks in reading order, cutting the less important ones."""
    blocks = [block for block in every if block.lines]
    left = MOST_LINES
    fitted: dict[int, Lines] = {}
    for index in sorted(range(len(blocks)), key=lambda index: blocks[index].importance):
        block, apart = blocks[index], int(blocks[index].apart)
        if block.importance:
            # One line is kept for the sentences after a table: it says how many were left out
            later = [other for other in blocks if other.importance > block.importance]
            kept = 2 if block.head and any(not other.head for other in later) else 0
            block = block.cut(left - apart - kept, out.width)
        if block.lines:
            fitted[index] = (*([Text()] * apart), *block.lines)
            left -= _height(fitted[index], out.width)
    for index in sorted(fitted):
        for line in fitted[index]:
            out.print(line, soft_wrap=True)


def _blocks(content: Content, out: Console) -> Iterator[_Block]:
    """The blocks of the short report, in reading order."""
    head = [Text(content.title, "bold underline")]
    head += [Text(warning, "bold") for warning in (content.banner, content.status) if warning]
    head += [Text(text, "bold") for text in content.verdicts[:1]]
    head += map(Text, content.verdicts[1:2])
    yield _Block(_wrapped(out, head), apart=False)
    # A failure may quote a server's whole log, so it is shortened
    failures = [
        shorten(f"Did not complete: {text}", FAILURE_ROWS * out.width, placeholder=" ...")
        for text in content.failures
    ]
    yield _sentences(failures, out, importance=1, most=MOST_FAILURES)
    yield _Block((*_bar_lines(content.bars, out), *_wrapped(out, map(Text, content.worth))))
    cautions = [f"Caution: {text}" for text in content.cautions]
    yield _Block(_wrapped(out, map(Text, cautions)))
    for number, table in enumerate(content.brief):
        yield _table_block(table, out, importance=2 + number, most=MOST_TABLE)
    # One command at most: the next step, or more prompts, come before measuring another engine
    step = content.next_step
    nearer = (step and step.command) or content.too_few
    lines = [each for each in content.snippets[:1] if not (each.measure and nearer)]
    for snippet in lines:
        yield _Block(_snippet_lines(snippet, out))
    ending = [*_next_step(content, out)]
    if content.folder:
        again = command("report", as_typed("run", content.folder), "verbose=tables")
        ending.append(Text(f"More: {again}"))
    yield _Block((*ending, Text(f"report: {content.page}")))


def _bar_lines(bars: Sequence[Bar], out: Console) -> Lines:
    """A bar for each speedup, filled where it was measured, with a line at 1.0."""
    if not bars:
        return ()
    fancy = out.encoding.lower().startswith("utf")
    *drawn, key = picture.drawn(bars, out.width, picture.FANCY if fancy else picture.PLAIN)
    lines = (Text(text, "bold" if bar.best else "") for bar, text in zip(bars, drawn, strict=True))
    return (*lines, *_wrapped(out, [Text(key)]))


def _next_step(content: Content, out: Console) -> Lines:
    """The lines of the next step; its command is one line, which the terminal wraps by itself."""
    if content.next_step is None:
        return ()
    text, command = content.next_step.text, content.next_step.command
    lines = _wrapped(out, [Text(f"Next: {text}{':' if command else '.'}")])
    return (*lines, Text(command)) if command else lines


def _sentences(texts: Sequence[str], out: Console, *, importance: int, most: int) -> _Block:
    parts = tuple(_wrapped(out, [Text(text)]) for text in texts)
    return _Block((), parts, importance, most=most)


def _table_block(table: Table, out: Console, *, importance: int, most: int) -> _Block:
    """A table as a block: the columns that fit the terminal, a part for each row."""
    title = _wrapped(out, [Text(table.title, "bold")])
    table = fold(table, out.width)[0]
    lines = _table_lines(table, out)
    widths = _widths(table, out.width)
    heights = [
        max(
            len(Text(cell.text).wrap(out, width, overflow="fold"))
            for cell, width in zip(row.cells, widths, strict=True)
        )
        for row in table.rows
    ]
    ends = [*accumulate(heights, initial=len(lines) - sum(heights))]
    rows = tuple(lines[begin:end] for begin, end in pairwise(ends))
    return _Block((*title, *lines[: ends[0]]), rows, importance, most)


def _wrapped(out: Console, texts: Iterable[Text]) -> Lines:
    return tuple(line for text in texts for line in text.wrap(out, out.width))


def _table_lines(table: Table, out: Console) -> Lines:
    """A table without its title, rules and notes, as rich lays it out."""
    lines = [
        Text.assemble(*((piece.text, piece.style or "") for piece in line))
        for part in fold(table, out.width)
        for line in out.render_lines(_rich_table(part, out.width, None), out.options, pad=False)
    ]
    for line in lines:  # cells are filled up to the width of their column
        line.rstrip()
    return tuple(lines)


def _snippet_lines(snippet: Snippet, out: Console) -> Lines:
    """The lines of a serving command.

    A command that was not measured is replaced by the command that measures it, a long one by a
    reference to the report.
    """
    if snippet.measure:
        return (Text(f"Measure it on {snippet.engine}:", "bold"), Text(snippet.measure))
    title = _wrapped(out, [Text("Serve it so:", "bold")])
    code = snippet.code.splitlines()
    if len(code) > MOST_CODE:
        where = f"{len(code)} lines of code, to copy from the report that is named below."
        return (*title, *_wrapped(out, [Text(where)]))
    return (*title, *map(Text, code)) if code else _wrapped(out, map(Text, snippet.notes))


def _title(snippet: Snippet) -> str:
    """A snippet's title, with a star where the snippet is for the marked row of the grid."""
    return f"{MARK} {snippet.title}" if snippet.marked else snippet.title


def _height(lines: Sequence[Text], width: int) -> int:
    """The number of terminal rows that the lines take."""
    return sum(max(1, -(-line.cell_len // width)) for line in lines)


# ---- the report with `verbose` -------------------------------------------------------------------


def _show_all(content: Content, tables: Sequence[Table], out: Console) -> None:
    _print_line(out, content.title, "bold underline")
    for warning in (content.banner, content.status):
        if warning:
            _print_line(out, warning, "bold")
    _paragraph(out, content.verdicts, "bold")
    if content.engine:
        _print_line(out, content.engine)
    if content.grid:
        print_table(content.grid, out)
    _paragraph(out, content.reasons)
    notes = [f"Caution: {text}" for text in content.cautions]
    notes += [f"Note: {text}" for text in content.caveats[len(notes) :]]
    _paragraph(out, [*notes, *(f"Did not complete: {text}" for text in content.failures)])
    for snippet in content.snippets[:1]:
        _print_snippet(out, snippet)
    if content.snippets[1:]:
        others = ", ".join(snippet.title for snippet in content.snippets[1:])
        _print_line(out, f"In report.md: {others}.")
    for table in tables:
        print_table(table, out)
    if tables:
        _paragraph(out, content.verdicts, "bold")


def print_table(table: Table, out: Console) -> None:
    """Print one table, folded to the console's width."""
    for part in fold(table, out.width):
        out.print()
        _print_line(out, part.title, "bold")
        out.print(_rich_table(part, out.width, box.SIMPLE_HEAD))
        _print_notes(out, part.notes)


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
    """The width of each column; where the table is too wide, the widest flexible columns shrink."""
    widths = [
        max(map(len, (*column.title.split("\n"), *(row.cells[index].text for row in table.rows))))
        for index, column in enumerate(table.columns)
    ]
    flexible = [index for index, column in enumerate(table.columns) if column.flexible]
    excess = sum(widths) + _GAP * (len(widths) - 1) - width
    while excess > 0 and flexible:
        widest = max(flexible, key=lambda index: widths[index])
        if widths[widest] <= _NARROWEST:
            break
        widths[widest] -= 1
        excess -= 1
    return widths


def _paragraph(out: Console, lines: Sequence[str], style: str = "") -> None:
    """Print an empty line, then the lines, the first of them in `style`."""
    if lines:
        out.print()
    for number, line in enumerate(lines):
        _print_line(out, line, "" if number else style)


def _print_snippet(out: Console, snippet: Snippet) -> None:
    """Print a serving command; its lines are not broken, the terminal wraps them by itself."""
    out.print()
    _print_line(out, _title(snippet), "bold")
    if snippet.measure:
        out.print(Text(snippet.measure), soft_wrap=True)
        _print_line(out, snippet.then)
    if snippet.code:
        out.print(Text(snippet.code), soft_wrap=True)
    _print_notes(out, snippet.notes)
    if snippet.measured:
        _print_notes(out, ("What the measurement used:",))
        out.print(Text(snippet.measured), soft_wrap=True)


def _rich_table(table: Table, width: int, lines: box.Box | None) -> RichTable:
    padding = (0, 1 if lines else _GAP, 0, 0)
    rich = RichTable(box=lines, show_edge=False, pad_edge=False, padding=padding)
    for column, most in zip(table.columns, _widths(table, width), strict=True):
        header = Text(column.title, justify=column.align)
        rich.add_column(header, justify=column.align, max_width=most, overflow="fold")
    for row in table.rows:
        rich.add_row(*(Text(cell.text) for cell in row.cells), style="bold" if row.best else "")
    return rich


def _print_notes(out: Console, notes: Sequence[str]) -> None:
    for note in notes:
        out.print(Padding(Text(note), (0, 0, 0, 2), expand=False))


def _print_line(out: Console, text: str, style: str = "") -> None:
    out.print(Text(text, style=style), overflow="fold")

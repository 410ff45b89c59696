"""report.md: the report as a file that reads well on a code host and in an editor."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from harness.reporting.content import Content
from harness.reporting.definitions import METRICS
from harness.reporting.grid import MARK
from harness.reporting.picture import Bar, drawn
from harness.reporting.serving_commands import snippet_groups, without_line
from harness.reporting.tables.specification import Row, Table

if TYPE_CHECKING:  # matplotlib takes a second
    from harness.reporting.plots.style import Plot

# Characters of a line of the picture at most
PICTURE = 80
# Characters with a meaning in markdown; an underscore inside a word (acceptance_rate) has none
_SPECIAL = re.compile(r"([\\`*|<]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")


def report(content: Content, plots: "Sequence[Plot]", folder: Path) -> str:
    # Markdown, not HTML: `escape` below knows its special characters
    environment = environment_of(
        autoescape=False, escape_md=escape, table=table, fenced=fenced, drawn=drawn_bars
    )
    template = environment.get_template("report.md.j2")
    return template.render(
        report=content,
        plots=plots,
        mark=MARK,
        snippet_groups=snippet_groups(content.snippets[1:]),
        remarks=without_line(content.snippets[1:]),
        definitions=_definitions(folder),
    )


def environment_of(*, autoescape: bool, **filters: Callable[..., Any]) -> Environment:
    """The environment of the report templates, with these filters."""
    environment = Environment(
        loader=PackageLoader("harness.reporting", "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=autoescape,
    )
    environment.filters.update(filters)
    return environment


def table(model: Table) -> str:
    """A table in markdown, with aligned columns in the source too; the best row is bold."""
    titles = [escape(column.one_line) for column in model.columns]
    rows = [_cells(row) for row in model.rows]
    widths = [max(3, *map(len, texts)) for texts in zip(titles, *rows, strict=True)]
    right = [column.align == "right" for column in model.columns]
    rule = ["-" * (width - flush) + ":" * flush for width, flush in zip(widths, right, strict=True)]
    return "\n".join(_table_row(cells, widths, right) for cells in (titles, rule, *rows))


def escape(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text).replace("\n", " ")


def fenced(code: str, language: str) -> str:
    """A code block whose fences are longer than any sequence of backticks in the code."""
    longest = max((len(found) for found in re.findall(r"`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{code}\n{fence}"


def drawn_bars(bars: Sequence[Bar]) -> str:
    return "\n".join(drawn(bars, PICTURE))


def _cells(row: Row) -> list[str]:
    texts = [escape(cell.text) for cell in row.cells]
    return [f"**{text}**" if row.best and text else text for text in texts]


def _table_row(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    layout = zip(cells, widths, right, strict=True)
    padded = [text.rjust(width) if flush else text.ljust(width) for text, width, flush in layout]
    return f"| {' | '.join(padded)} |"


def _definitions(folder: Path) -> str:
    """A link to metrics.md where the run is inside a checkout; else its name only."""
    checkout = METRICS.parents[2]
    name = METRICS.relative_to(checkout).as_posix()
    if folder.resolve().is_relative_to(checkout):
        return f"[{name}]({Path(os.path.relpath(METRICS, folder.resolve())).as_posix()})"
    return f"{name} of the harness"

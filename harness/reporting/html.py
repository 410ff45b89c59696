"""report.html and index.html: pages that are one file each and open anywhere, in print too.

report.html has the contents of report.md in the same order. Nothing is loaded from elsewhere, and
the page's own policy forbids it. The template escapes every text, since the user chooses the names
of models. Plots are images inside the file, so that their ids do not collide, no script in them can
run, and the style sheet can invert them in a dark scheme. A page is complete without its script,
which adds buttons to copy commands.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment
from markupsafe import Markup

from harness.reporting.content import Content
from harness.reporting.definitions import Definition, closure, lookup
from harness.reporting.markdown import environment_of
from harness.reporting.picture import scale
from harness.reporting.serving_commands import snippet_groups, without_line
from harness.reporting.tables.specification import Cell, Column, Table

if TYPE_CHECKING:  # matplotlib takes a second
    from harness.reporting.plots.style import Plot

# The line under the title: labels of `content.measured_with`, and the characters shown of each
_FACTS = (("device", 100), ("date", len("2026-01-31T12:00")), ("git commit", 10))
_WIDE = 600.0  # from this width on (in the drawing's own units) a plot takes the page's width
_VIEW_BOX = re.compile(r'viewBox="0 0 ([\d.]+) ([\d.]+)"')
_NAMING = ("quantity", "part")  # columns whose cells name a quantity, so that they have a link


class Image(NamedTuple):
    """A plot in a page: its caption, its drawing as a data address, and its size in own units."""

    caption: str
    source: str
    width: float
    height: float

    @property
    def wide(self) -> bool:
        """True where it has several panels next to each other."""
        return self.width >= _WIDE


class Term(NamedTuple):
    """An entry of the definitions at the end of a page."""

    definition: Definition
    titles: tuple[str, ...]  # its names in the page; its name in metrics.md where it has none

    @property
    def name_in_files(self) -> str:
        """The name in metrics.md and in a run's files; "" where the page uses it too."""
        return "" if self.definition.name in self.titles else self.definition.name


def report(content: Content, plots: "Sequence[Plot]") -> str:
    first, rest = (*content.verdicts, "", "")[:2]
    shown = content.snippets[:1] if first else ()
    first_line = shown[0] if shown and shown[0].code else None
    return page(
        "report.html.j2",
        title=content.title,
        skip_to="the verdict",
        report=content,
        verdict=first,
        verdict_numbers=rest,
        facts=_facts(content),
        snippet_groups=snippet_groups(content.snippets[1:] if first_line else content.snippets),
        first_line=first_line,
        remarks=without_line(content.snippets),
        plots=[_image(plot) for plot in plots],
        definitions=glossary([*content.tables, *filter(None, [content.grid])]),
    )


def page(template: str, **values: Any) -> str:
    """A complete HTML page, with the script page.js inside."""
    environment = _environment()
    assert environment.loader is not None
    script = environment.loader.get_source(environment, "page.js")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return environment.get_template(template).render(
        script=Markup(script), script_hash=f"sha256-{digest}", **values
    )


def _image(plot: "Plot") -> Image:
    size = _VIEW_BOX.search(plot.svg)
    width, height = (float(size[1]), float(size[2])) if size else (_WIDE, _WIDE)
    encoded = base64.b64encode(plot.svg.encode()).decode("ascii")
    return Image(plot.caption, f"data:image/svg+xml;base64,{encoded}", width, height)


def glossary(tables: Iterable[Table]) -> tuple[Term, ...]:
    """The definitions that the tables link to, and those that these definitions link to."""
    titles: dict[Definition, dict[str, None]] = {}
    for table in tables:
        # The titles of columns without "[lo, hi]"
        linked = [
            (column_definition(c), c.definition or c.one_line.removesuffix(" [lo, hi]"))
            for c in table.columns
        ]
        for row in table.rows:
            linked.append((cell_definition(row.cells[0], table.columns[0]), row.cells[0].text))
        for definition, title in linked:
            if definition is not None:
                titles.setdefault(definition, {})[title] = None
    return tuple(Term(each, tuple(titles.get(each, {each.name: None}))) for each in closure(titles))


def column_definition(column: Column[Any]) -> Definition | None:
    return lookup(column.definition or column.one_line)


def cell_definition(cell: Cell, column: Column[Any]) -> Definition | None:
    """The definition that a cell links to, in a column that names quantities; else None."""
    return lookup(cell.text) if column.title in _NAMING else None


def _css(column: Column[Any]) -> str:
    return "num" if column.align == "right" else "words" if column.flexible else ""


def _header_lines(column: Column[Any]) -> list[str]:
    """A column's title in lines, broken after an underscore rather than before it."""
    return column.title.replace("\n_", "_\n").split("\n")


def _facts(content: Content) -> list[str]:
    """The parts of the line under the title: device, date and commit."""
    known = dict(content.measured)
    texts = {label: known[label][:length] for label, length in _FACTS if label in known}
    if "date" in texts:
        texts["date"] = f"{texts['date'].replace('T', ' ')} UTC"
    if "git commit" in texts:
        texts["git commit"] = f"harness commit {texts['git commit']}"
    return list(texts.values())


@cache
def _environment() -> Environment:
    return environment_of(
        autoescape=True,
        css=_css,
        lines=_header_lines,
        column_definition=column_definition,
        cell_definition=cell_definition,
        bar_scale=scale,
    )

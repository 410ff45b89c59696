"""report.html and index.html: pages that are one file each and open anywhere, in print too.

A report says what report.md says, in the same order. Nothing is loaded from elsewhere, and the
page's own policy forbids it. Every text goes through the template's escaping, since names of models
are the user's. Plots are images inside the file: their ids stay apart, nothing in them can run, and
the style sheet inverts them in a dark scheme. Without script a page is complete; a few lines of it
sort tables by the values of their cells.
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
from harness.reporting.serving import cards_of, without_line
from harness.reporting.tables.specification import Cell, Column, Table

if TYPE_CHECKING:  # matplotlib takes a second
    from harness.reporting.plots import Drawn

# What stands under the title: labels of `content.measured_with`, and how much of each
_FACTS = (("device", 100), ("date", len("2026-01-31T12:00")), ("git commit", 10))
_WIDE = 600.0  # from this width on (in the drawing's own units) a plot takes the page's width
_VIEW_BOX = re.compile(r'viewBox="0 0 ([\d.]+) ([\d.]+)"')
_NAMING = ("quantity", "part")  # columns whose cells name what the rest of the row is about


class Picture(NamedTuple):
    """A drawing as a data address, and its size in its own units."""

    source: str
    width: float
    height: float


class Image(NamedTuple):
    """A plot in a page: what it shows, and its drawing for a page and for a phone."""

    caption: str
    page: Picture
    phone: Picture

    @property
    def wide(self) -> bool:
        """Whether it has several panels next to each other."""
        return self.page.width >= _WIDE


class Term(NamedTuple):
    """An entry of the definitions at the end of a page."""

    definition: Definition
    titles: tuple[str, ...]  # how the page calls it; its name in metrics.md where only that does

    @property
    def name_in_files(self) -> str:
        """Its name in metrics.md and in a run's files where the page uses another."""
        return "" if self.definition.name in self.titles else self.definition.name


def report(content: Content, plots: "Sequence[Drawn]") -> str:
    """The text of report.html."""
    first, rest = _what_and_why(content.verdicts[0]) if content.verdicts else ("", "")
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
        cards=cards_of(content.snippets[1:] if first_line else content.snippets),
        first_line=first_line,
        remarks=without_line(content.snippets),
        plots=[Image(plot.caption, picture(plot.svg), picture(plot.narrow)) for plot in plots],
        definitions=glossary([*content.tables, *filter(None, [content.grid])]),
    )


def _what_and_why(headline: str) -> tuple[str, str]:
    """Where and what to do, in large letters, and the rest of the headline.

    "Serve small at K=3: 1.42x, ..." and "On your server (vLLM), temperature 0: serve small at K=3,
    1.42x, ...", whose first part is "On your server (vLLM): serve small at K=3".
    """
    first, _, rest = headline.partition(": ")
    if not first.startswith(("On ", "At ")):
        return first, rest
    place, _, circumstances = first.partition(", ")
    what, mark, why = [*re.split(r"([,;] )", rest, maxsplit=1), "", ""][:3]
    circumstances = f"{circumstances[0].upper()}{circumstances[1:]}" if circumstances else ""
    return f"{place}: {what}", f"{circumstances}{mark if circumstances else ''}{why}"


def page(template: str, *, scripts: Sequence[str] = ("page.js",), **values: Any) -> str:
    """A whole HTML page, with these scripts of the templates inside it."""
    environment = _environment()
    assert environment.loader is not None
    script = "".join(environment.loader.get_source(environment, name)[0] for name in scripts)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return environment.get_template(template).render(
        script=Markup(script), script_hash=f"sha256-{digest}", **values
    )


def picture(svg: str) -> Picture:
    """A plot's SVG as an address inside the page."""
    size = _VIEW_BOX.search(svg)
    width, height = (float(size[1]), float(size[2])) if size else (_WIDE, _WIDE)
    encoded = base64.b64encode(svg.encode()).decode("ascii")
    return Picture(f"data:image/svg+xml;base64,{encoded}", width, height)


def glossary(tables: Iterable[Table]) -> tuple[Term, ...]:
    """Every definition that the tables link to, and those which these link to."""
    titles: dict[Definition, dict[str, None]] = {}
    for table in tables:
        # What a column is about, without its interval
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
    """What a header links to."""
    return lookup(column.definition or column.one_line)


def cell_definition(cell: Cell, column: Column[Any]) -> Definition | None:
    """What the name of a row links to, where it names a quantity."""
    return lookup(cell.text) if column.title in _NAMING else None


def _sort_value(cell: Cell) -> str:
    """What a column of numbers is sorted by; empty cells stay at the end."""
    return f"{cell.value:.10g}" if isinstance(cell.value, int | float) else ""


def _css(column: Column[Any]) -> str:
    return "num" if column.align == "right" else "words" if column.flexible else ""


def _lines(column: Column[Any]) -> list[str]:
    """The header as it may be folded, after an underscore rather than before it."""
    return column.title.replace("\n_", "_\n").split("\n")


def _facts(content: Content) -> list[str]:
    """Where, when and with what: the line under the title."""
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
        lines=_lines,
        sort_value=_sort_value,
        column_definition=column_definition,
        cell_definition=cell_definition,
    )

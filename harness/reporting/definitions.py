"""metrics.md, next to this module, as data: the definition of every word and column of a report.

The file is the one place where a quantity is defined; report.html contains the definitions that it
uses. A definition is a heading with the name in backticks and the text below it, or a table row
with the name in its first cell; a plain heading with text (Intervals, Verdict) is one as well. A
row that only points to another entry (`tok/s` to `tokens_per_second`) is an alias.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markupsafe import Markup, escape

# Inside the package, so that every installation has the definitions
METRICS = Path(__file__).resolve().with_name("metrics.md")
_HEADING = re.compile(r"^(#{1,4}) +(.+?)\s*$")
_NAMES = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\[([^\]]+)\]\(#([^)]+)\)")
_MARKS = re.compile(r"\*\*|`|(?<!\w)\*|\*(?!\w)")
_INTERVAL = re.compile(r"\s*\[lo, hi\]")
_NUMBER = re.compile(r"=[\d.]+|^[\d,.]+\s+")  # "j=3" is j, "48 new tokens" are new tokens


@dataclass(frozen=True)
class Definition:
    """One entry: its name in metrics.md, its anchor in a page, and its text in markdown."""

    name: str
    anchor: str
    source: str

    @property
    def text(self) -> str:
        """The text without markdown, for a tooltip."""
        return _MARKS.sub("", _LINK.sub(r"\1", self.source))

    @property
    def html(self) -> Markup:
        """The text as HTML, with code, emphasis and links within the page."""
        text = _LINK.sub(r'<a href="#m-\2">\1</a>', str(escape(self.source)))
        text = _NAMES.sub(r"<code>\1</code>", text)
        text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)
        return Markup(re.sub(r"(?<!\w)\*(.+?)\*(?!\w)", r"<em>\1</em>", text))

    @property
    def refers_to(self) -> tuple[str, ...]:
        """The anchors that the text links to."""
        return tuple(f"m-{anchor}" for _, anchor in _LINK.findall(self.source))


@cache
def definitions() -> Mapping[str, Definition]:
    """Every definition by its name in lower case; of two with one name the first."""
    return parse(METRICS.read_text(encoding="utf-8"))


def parse(text: str) -> dict[str, Definition]:
    """The definitions in a text of the form of metrics.md, by name in lower case."""
    by_name: dict[str, Definition] = {}
    for names, source in _entries(text.splitlines()):
        for name in names:
            # As code hosts make anchors: lower case, punctuation gone, spaces as hyphens
            anchor = re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-")
            by_name.setdefault(name.lower(), Definition(name, f"m-{anchor}", source))
    return by_name


def lookup(title: str) -> Definition | None:
    """The definition of a column or a named quantity; aliases are followed."""
    known = definitions()
    entry = next((known[name] for name in _spellings(title) if name in known), None)
    if entry is not None and _LINK.fullmatch(entry.source):
        target = entry.refers_to[0]
        return next((other for other in known.values() if other.anchor == target), entry)
    return entry


def _spellings(title: str) -> Iterator[str]:
    """The names under which a title may be defined: also without interval, number, unit, remark."""
    plain = _INTERVAL.sub("", title.lower())
    general = _NUMBER.sub("", plain)
    shorter = (general.split(mark)[0] for mark in (":", ",", "(", " ms"))
    for name in (title.lower(), plain, general, *shorter, general.rpartition(":")[2]):
        yield name.strip()
        yield name.strip().replace(" ", "_")


def closure(entries: Iterable[Definition]) -> tuple[Definition, ...]:
    """The given definitions and those that their texts link to, in the order of the file."""
    known = {entry.anchor: entry for entry in definitions().values()}
    waiting, wanted = [entry.anchor for entry in entries], set[str]()
    while waiting:
        anchor = waiting.pop()
        if anchor in known and anchor not in wanted:
            wanted.add(anchor)
            waiting += known[anchor].refers_to
    return tuple(entry for anchor, entry in known.items() if anchor in wanted)


def _entries(lines: Iterable[str]) -> Iterator[tuple[list[str], str]]:
    """(names, text) of each heading and of each row of a table, in order."""
    names: list[str] = []
    body: list[str] = []
    level = ""
    for line in [*lines, "# end"]:
        heading = _HEADING.match(line)
        if heading is not None:
            source = " ".join(part for part in body if part)
            if source and names:
                yield names, source
            if source or heading[1] != level:  # headings in a row share the text below the last
                names = []
            body, level = [], heading[1]
            names += _NAMES.findall(heading[2]) or [heading[2]]
        elif line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("| ").split("|")]
            row, text = _NAMES.findall(cells[0]), cells[1:2]
            if row and text and text[0]:
                unit = f" ({cells[2]})" if len(cells) > 2 and cells[2] else ""
                yield row, text[0] + unit
        else:
            body.append(line.strip())

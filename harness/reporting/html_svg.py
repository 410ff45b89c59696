"""A plot's SVG as a part of a page: its colours follow the page's scheme, its ids stay its own.

The file in plots/ is ink on white, and complete in itself. Inlined, the same drawing takes its
colours from the page's custom properties (so that it is legible in a dark scheme and in print),
loses what only a file needs (declaration, metadata, style sheet) and gets a name for screen
readers. It goes through a parser both ways: what a model is called stays text.
"""

import re
from typing import NamedTuple
from xml.etree import ElementTree as Tree

from markupsafe import Markup

from harness.reporting.plots import acceptance, style

# What a colour of the plots is in the page: a custom property of the style sheet.
_VARIABLES = {
    style.INK: "--ink",
    style.GREY: "--muted",
    style.FAINT: "--line",
    "#ffffff": "--paper",
    "#000000": "--ink",
    **{colour: f"--series-{index}" for index, colour in enumerate(style.COLOURS)},
    **{colour: f"--shade-{index}" for index, colour in enumerate(acceptance.SHADES)},
}
_SKIPPED = frozenset({"metadata", "style", "script"})
_COLOUR = re.compile(r"#[0-9a-fA-F]{6}\b")
_FONT = re.compile(r"font-family:[^;]*(;|$)")
_REFERENCE = re.compile(r"url\(#([^)]+)\)")


class Inlined(NamedTuple):
    """An `<svg>` element, whether its colours follow the page, and its width in its own units."""

    svg: Markup
    themed: bool
    width: float


def inline(svg: str, caption: str, prefix: str) -> Inlined:
    """The drawing as an `<svg>` element for an HTML page.

    A drawing with colours that the page does not know (a scale of shades, say) keeps all of its
    own: half of them turned for a dark scheme would be legible in none.

    Args:
        svg: a whole SVG file, as `style.svg` writes it.
        caption: what it shows, read out in its place.
        prefix: makes its ids unique in the page.

    Raises:
        xml.etree.ElementTree.ParseError: not an SVG file.
    """
    root = Tree.fromstring(svg)
    _prune(root)
    used = {colour.lower() for node in root.iter() for colour in _colours(node)}
    themed = used <= _VARIABLES.keys()
    for node in root.iter():
        node.tag = _local(node.tag)
        node.attrib = dict(
            _attribute(name, value, prefix, themed) for name, value in node.attrib.items()
        )
    box = root.attrib["viewBox"]
    width, height = box.split()[2:]
    root.attrib = {
        "viewBox": box, "width": width, "height": height, "role": "img", "aria-label": caption
    }  # fmt: skip
    return Inlined(Markup(Tree.tostring(root, encoding="unicode")), themed, float(width))


def _colours(node: Tree.Element) -> list[str]:
    return _COLOUR.findall(node.attrib.get("style", ""))


def _prune(node: Tree.Element) -> None:
    for child in list(node):
        if not isinstance(child.tag, str) or _local(child.tag) in _SKIPPED:
            node.remove(child)
        else:
            _prune(child)


def _attribute(name: str, value: str, prefix: str, themed: bool) -> tuple[str, str]:
    name = _local(name)
    if name == "id":
        return name, f"{prefix}-{value}"
    if name == "href":  # of a `use`: a place in the same drawing
        return name, value.replace("#", f"#{prefix}-", 1)
    if name == "style":
        value = _FONT.sub("", value).strip()
        value = _COLOUR.sub(_variable, value) if themed else value
    return name, _REFERENCE.sub(rf"url(#{prefix}-\1)", value)


def _variable(found: re.Match[str]) -> str:
    return f"var({_VARIABLES[found[0].lower()]})"


def _local(name: str) -> str:
    return name.rpartition("}")[2]

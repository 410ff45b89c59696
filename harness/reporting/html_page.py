"""What every HTML page shares: the frame, its policy, its one script, and drawings in it."""

import base64
import hashlib
from functools import cache
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from harness.reporting import html_svg

# From this width on (in the drawing's own units) a drawing takes all the room there is.
_WIDE = 600.0


class Drawing(NamedTuple):
    """A plot in a page.

    Attributes:
        svg: the element.
        caption: what it shows.
        themed: whether its colours follow the page's scheme; else it lies on white.
        wide: whether it has several panels side by side.
    """

    svg: Markup
    caption: str
    themed: bool
    wide: bool


def drawing(svg: str, caption: str, prefix: str) -> Drawing:
    """A plot's file as a part of a page; see `html_svg.inline`."""
    inlined = html_svg.inline(svg, caption, prefix)
    return Drawing(inlined.svg, caption, inlined.themed, inlined.width >= _WIDE)


def page(template: str, **values: Any) -> str:
    """A whole HTML page.

    Args:
        template: a file in templates/ that extends frame.html.j2.
        values: what it shows; `title` and `skip_to` among them.
    """
    environment = _environment()
    script = _source("page.js")
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return environment.get_template(template).render(
        script=Markup(script),
        script_hash=f"sha256-{base64.b64encode(digest).decode('ascii')}",
        **values,
    )


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("harness.reporting", "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=True,
    )


def _source(name: str) -> str:
    """A template's own text, as it is."""
    environment = _environment()
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]

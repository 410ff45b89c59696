"""A command or a configuration that a reader pastes elsewhere, before anyone lays it out."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Snippet:
    """What to paste, and what to know of it.

    Attributes:
        title: for whom: the engine, and the version whose syntax it is.
        code: the text to paste, line breaks included; empty where there is nothing to paste.
        notes: whole sentences on it: the speedup under the engine's own rule, caveats.
        language: of the code, as a code host names it.
    """

    title: str
    code: str
    notes: tuple[str, ...] = ()
    language: str = "sh"

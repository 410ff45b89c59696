"""A generated text with the draft's tokens and the target's own marked by colour and brackets."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.text import Text


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

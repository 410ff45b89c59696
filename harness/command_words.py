"""Words of command lines as they are printed: a shell and then Hydra read each as it was meant.

A value with spaces, brackets, commas, quotes, = or letters beyond ASCII is quoted twice: for
Hydra's grammar, and the whole word for the shell, as 'resume="/x/ra (1)"'.
"""

import re
import shlex
from collections.abc import Mapping
from typing import Any

# Hydra takes such a text as it stands; one that begins like a number is quoted
_BARE = re.compile(r"(?:\.{0,2}/|[A-Za-z_])[A-Za-z0-9_./:@+%-]*", re.ASCII)
_NOT_TEXTS = frozenset({"null", "true", "false", "nan", "inf"})
_ESCAPED_IN_NAMES = re.compile(r"[\\()\[\]{}:=, \t]")


def as_typed(key: str, value: Any) -> str:
    """`key=value`, to be pasted into a shell; the value may be a list or a mapping."""
    return shlex.quote(f"{key}={of_hydra(value)}")


def command(name: str, *words: str) -> str:
    """The line that runs a command of the harness with words that are quoted already."""
    return " ".join([f"python -m harness.{name}", *filter(None, words)])


def of_hydra(value: Any) -> str:
    """A value in the grammar of Hydra's overrides, not quoted for a shell."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:g}" if float(value).is_integer() and abs(value) < 1e6 else str(value)
    if isinstance(value, Mapping):
        entries = (f"{_name(name)}:{of_hydra(entry)}" for name, entry in value.items())
        return f"{{{','.join(entries)}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(of_hydra, value))}]"
    text = str(value)
    if _BARE.fullmatch(text) and text.lower() not in _NOT_TEXTS:
        return text
    return _quoted(text)


def _name(name: Any) -> str:
    """A name in a mapping, which Hydra lets nobody quote."""
    return _ESCAPED_IN_NAMES.sub(r"\\\g<0>", str(name))


def _quoted(text: str) -> str:
    """A text in double quotes; backslashes before a quote, the last one included, are doubled."""
    literal = text.replace("${", r"\${")
    inside = re.sub(r'(\\*)("|\Z)', lambda at: 2 * at[1] + ('\\"' if at[2] else ""), literal)
    return f'"{inside}"'

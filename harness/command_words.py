r"""Words of command lines as they are printed: a shell and then Hydra read each as it was meant.

A value with spaces, brackets, commas, quotes, = or letters beyond ASCII is quoted twice: for
Hydra's grammar, and the whole word for the shell, as 'resume="/x/ra (1)"'. A mapping that has such
a name is written as JSON, a text of its own: 'prompts.weights="{\"ra (1)\": 1}"'.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

# Hydra takes such a text as it stands; one that begins like a number is quoted
_BARE = re.compile(r"(?:\.{0,2}/|[A-Za-z_])[A-Za-z0-9_./:@+%-]*", re.ASCII)
# In a mapping; Hydra lets nobody quote a name there
_BARE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./+-]*", re.ASCII)
_NOT_TEXTS = frozenset({"null", "true", "false", "nan", "inf"})


def as_typed(key: str, value: Any) -> str:
    """`key=value`, to be pasted into a shell; the value may be a list or a mapping."""
    return shlex.quote(f"{key}={of_hydra(value)}")


def ks_as_typed(ks: Sequence[int]) -> str:
    return as_typed("k", ks[0] if len(ks) == 1 else [*ks])


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
        if not all(_is_bare(name, _BARE_NAME) for name in value):
            return _quoted(json.dumps(value, ensure_ascii=False))
        entries = (f"{name}:{of_hydra(entry)}" for name, entry in value.items())
        return f"{{{','.join(entries)}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(of_hydra, value))}]"
    text = str(value)
    return text if _is_bare(text) else _quoted(text)


def _is_bare(text: Any, form: re.Pattern[str] = _BARE) -> bool:
    return form.fullmatch(str(text)) is not None and str(text).lower() not in _NOT_TEXTS


def _quoted(text: str) -> str:
    literal = text.replace("${", r"\${")
    inside = re.sub(r'(\\*)("|\Z)', lambda at: 2 * at[1] + ('\\"' if at[2] else ""), literal)
    return f'"{inside}"'

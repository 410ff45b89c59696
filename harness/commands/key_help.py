"""The text of `--help`: a command's keys, each with its value and its meaning.

Both come from the schemas of `harness.config` and from what Hydra composed.
"""

import textwrap
from collections.abc import Iterator
from functools import reduce
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from harness.config import keys_of

WIDTH, COLUMN = 100, 34


def help_of_keys(*, _root_: DictConfig) -> str:
    """The groups and keys of a composed command, for Hydra's help template; a resolver `keys`."""
    schema = OmegaConf.get_type(_root_)
    groups = [*_groups(_root_)]
    heading = " Groups, of which one is chosen by its name:" if groups else ""
    lines = [
        "key=value sets a key; a list is [a,b], and one value of a list stands for itself (k=4).",
        f"docs/keys.md has examples.{heading}",
        "",
        *([*groups, ""] if groups else []),
        "Keys, with their values:",
        "",
        *_keys(_root_, schema),
    ]
    return "\n".join(lines).replace("$", "$$")  # the template's own character


def _groups(config: DictConfig) -> Iterator[str]:
    loader: Any = GlobalHydra.instance().config_loader()
    for group, chosen in config.hydra.runtime.choices.items():
        # The loader itself copies all that is registered, for every group
        names = [] if "/" in group else sorted(loader.repository.get_group_options(group))
        if len(names) > 1:
            head = f"  {group}={'null' if chosen is None else chosen}"
            text = textwrap.wrap(", ".join(names), WIDTH - COLUMN)
            yield from _row(head, text)


def _keys(config: DictConfig, schema: Any) -> Iterator[str]:
    values: Any = OmegaConf.to_container(config)
    for name, entry in keys_of(schema):
        group, _, rest = name.partition(".")
        if group == "draft" and rest:  # the same keys again
            if rest == "id":
                yield from _row("  draft.KEY", ["as model.KEY, of the draft"])
            continue
        value = reduce(lambda part, at: (part or {}).get(at), name.split("."), values)
        yield from _row(f"  {name}={_value(value)}", [entry.metadata["meaning"]])


def _row(head: str, text: list[str]) -> Iterator[str]:
    """A key and its text, which begins on a line of its own where the key is long."""
    head = head if len(head) <= WIDTH else f"{head[: WIDTH - 3]}..."
    if len(head) < COLUMN:
        head, text = head.ljust(COLUMN) + text[0], text[1:]
    yield head
    yield from (" " * COLUMN + line for line in text)


def _value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(_value, value))}]"
    return "{...}" if isinstance(value, dict) else str(value)

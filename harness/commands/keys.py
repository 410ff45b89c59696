"""Keys of a command line: what `--help` says of them, and those that another run gives.

`resume=RUN` continues a run, so all of its keys are that run's; a key that is typed all the same is
compared with it. `traces_from=RUN` takes the run's texts, and so the model, prompts, temperatures
and budgets that they were made with; a key that is typed replaces the run's. Drafts that were
dropped there are not taken, since they scored a part of the texts. A draft of either is found by
its name.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from harness.config import keys_of, split_draft
from harness.records import UserError
from harness.storage.contents import read_config
from harness.storage.manifest import read_manifest
from harness.storage.resume import FREE_KEYS, free_keys

WIDTH, COLUMN = 100, 34
# Keys that mean one thing together: where one is typed, none of them is the run's
TOGETHER = (("draft", "drafts"), ("latency", "latency_from", "gpu"))
# Of traces: the machine is another one, and the times that a run took from elsewhere are in it
NOT_OF_TRACES = (
    *("device", "threads", "backend", "clock", "until"),
    *("traces_from", "latency_from", "latency.measure", "p_min"),
)


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


def with_keys_of_run(config: DictConfig, words: Sequence[str]) -> DictConfig:
    """The configuration, with what `words` do not set taken from its `resume` or `traces_from`.

    Raises:
        UserError: that is no run folder.
    """
    schema: Any = OmegaConf.get_type(config)
    resumed = config.get("resume") is not None
    key = "resume" if resumed else "traces_from"
    folder = Path(str(config[key]))
    try:
        door = read_manifest(folder).door  # its error says what a run folder is
        stored = read_config(folder)
    except UserError as error:
        raise UserError(f"{key}: {error}") from error
    typed = {o.key_or_group for o in OverridesParser.create().parse_overrides(list(words))}
    known = {name.split(".")[0] for name, _ in keys_of(schema)}
    if not {name.split(".")[0] for name in typed} <= known:
        return config  # an experiment sets what it likes: all keys count as typed
    free = free_keys(door) if resumed else FREE_KEYS
    kept = {*free, "combine", *(() if resumed else NOT_OF_TRACES), *typed}
    for names in TOGETHER:
        if any(_overlap(name, other) for name in typed for other in names):
            kept |= {*names}
    if "drafts" in typed and config.get("drafts"):
        config, own = _drafts_by_name(config, stored)
        kept -= {"draft"} if own and "draft" not in typed else set()
    taken: dict[str, Any] = {}
    for name, _ in keys_of(schema):
        *groups, key = name.split(".")
        group: Any = reduce(lambda part, at: (part or {}).get(at), groups, stored)
        if group and key in group and not any(_overlap(name, other) for other in kept):
            reduce(lambda part, at: part.setdefault(at, {}), groups, taken)[key] = group[key]
    if not resumed and taken.get("drafts"):
        dropped = read_manifest(folder).audition.dropped
        taken["drafts"] = [e for e in taken["drafts"] if split_draft(e).name not in dropped]
    merged = OmegaConf.merge(config, taken)
    assert isinstance(merged, DictConfig)
    return merged


def _drafts_by_name(config: DictConfig, stored: Mapping[str, Any]) -> tuple[DictConfig, bool]:
    """Entries of `drafts` that only name a draft of the run, as the run had them.

    The second part says whether one of them is the run's `draft`.
    """
    by_name = {split_draft(entry).name: entry for entry in stored.get("drafts") or ()}
    entries = [by_name.get(entry, entry) for entry in config.get("drafts") or ()]
    own = (stored.get("draft") or {}).get("name")
    merged = OmegaConf.merge(config, {"drafts": entries})
    assert isinstance(merged, DictConfig)
    return merged, own in entries


def _overlap(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")

"""Prompt sets: the prompts that the models answer.

Two sets ship with the package, `easy` and `hard`; the user's own come from files (prompts.files) or
from a data set of the hub (prompts.hub), in the formats of docs/prompts.md, or are a sample of a
log of requests (prompts.log, `harness.prompts.log`). An entry becomes a `Prompt`: the user's turns,
the answers between them where they are given, and a system message where there is one. Its prompt
set is its category, or the file's stem where it has none. A category with the name of a shipped set
that is used, too, gets the file's name before its own.

Here a prompt is text; chat templates and tokenizers are in `harness.models.tokenizer`.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.config import AuditionConfig, PairConfig, PromptsConf
from harness.prompts.entries import checked_text, encodes
from harness.prompts.log import SAMPLE, SAMPLE_SEED, LogSample, RequestLog
from harness.prompts.readers import hub_label, read_file, read_hub, stem_of
from harness.records import BYTES_PER_TOKEN, Prompt, UserError, grouped

SHIPPED_DIR = Path(__file__).resolve().parents[1] / "prompt_sets"
THINKING = "+thinking"


def load(config: PromptsConf) -> tuple[Prompt, ...]:
    """The prompts of a configuration, set by set, each set evenly subsampled.

    Raises:
        UserError: an unknown set, a source that cannot be read, or an entry that is not a prompt.
    """
    sets = _sets(config).values()
    return tuple(prompt for prompts, limit in sets for prompt in spread(prompts, limit))


def available(config: PromptsConf) -> dict[str, int]:
    """The number of prompts of each set, before subsampling."""
    sample = log_sample(config)
    if sample is not None:
        return dict(sample.sizes)
    return {name: len(prompts) for name, (prompts, _) in _sets(config).items()}


def log_sample(config: PromptsConf) -> LogSample | None:
    """The sample of prompts.log; None without a log. It is read once and then cached."""
    if config.log is None:
        return None
    file = Path(config.log)
    return _sample(file, config.sample or SAMPLE, _version(file))


@lru_cache(maxsize=1)
def _sample(file: Path, size: int, _: tuple[int, int] | None) -> LogSample:
    """The sample of a log, cached by its arguments; the last one is the file's version."""
    return RequestLog(file).sample(size, SAMPLE_SEED)


# The prompts of a set, and how many of them are used at most; None: all
_Set = tuple[Sequence[Prompt], int | None]


def _sets(config: PromptsConf) -> dict[str, _Set]:
    """The prompt sets by name, cached for the same configuration and unchanged files."""
    labels = file_labels(config)
    files = [*config.files, *filter(None, [config.log])]
    read = (repr(config), *(_version(Path(file)) for file in files))
    if read not in _loaded:
        _loaded.clear()
        _loaded[read] = _load(config, labels)
    return _loaded[read]


_loaded: dict[tuple[Any, ...], dict[str, _Set]] = {}


def _version(file: Path) -> tuple[int, int] | None:
    """A value that changes when a file does; None where there is none."""
    try:
        known = file.stat()
    except OSError:
        return None
    return known.st_mtime_ns, known.st_size


def _load(config: PromptsConf, labels: Sequence[str]) -> dict[str, _Set]:
    prompts = [prompt for name in config.sets or () for prompt in _shipped(name)]
    of_files, ids = set[str](), set[tuple[str, str]]()
    for file, label in zip(config.files, labels, strict=True):
        read = read_file(Path(file), label=label, skip_unusable=bool(config.skip_unusable))
        read = _unique(read, label, config, ids)
        ids |= {(prompt.prompt_set, prompt.id) for prompt in read}
        of_files |= {prompt.prompt_set for prompt in read}
        prompts += read
    if config.hub:
        prompts += _unique(read_hub(config), hub_label(config.hub), config)
    sample = log_sample(config)
    if sample is not None:
        prompts += sample.prompts
        of_files |= {*sample.sizes}
    prompts = _modes([_fitted(prompt, config) for prompt in prompts], config)
    _refuse_repeated_ids(prompts)
    sets = grouped(prompts, lambda prompt: prompt.prompt_set)
    for name in config.weights or {}:
        if name not in sets:
            raise UserError(f"prompts.weights: no prompt set {name!r}; there are {_names(sets)}")
    for name in sets if config.weights else ():
        if name not in config.weights:
            raise UserError(f"prompts.weights: no weight for prompt set {name!r}; add one")
    whole = set[str]() if config.limit_files is not False else of_files
    return {
        name: (group, None if {name, name.removesuffix(THINKING)} & whole else config.limit)
        for name, group in sets.items()
    }


def available_sets() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in SHIPPED_DIR.glob("*.jsonl")))


def spread(prompts: Sequence[Prompt], limit: int | None) -> tuple[Prompt, ...]:
    """At most `limit` prompts, evenly spread over the set and always the same ones.

    Taking the first n would leave out whole categories of a file that is sorted by them. So every
    category contributes its first prompt before any contributes its second. Within a category the
    order is the first prompt, the middle, the quarters, and so on. The result is in file order.
    """
    if limit is None or limit >= len(prompts):
        return tuple(prompts)
    by_category = grouped(range(len(prompts)), lambda index: prompts[index].category)
    ranked: list[tuple[int, int, int]] = []
    for place, indices in enumerate(by_category.values()):
        bits = max(len(indices) - 1, 1).bit_length()
        order = sorted(range(len(indices)), key=lambda at: int(f"{at:0{bits}b}"[::-1], 2))
        ranked += [(rank, place, indices[at]) for rank, at in enumerate(order)]
    return tuple(prompts[index] for index in sorted(entry[2] for entry in sorted(ranked)[:limit]))


def prompt_set_hash(prompts: Iterable[Prompt]) -> str:
    """The SHA-256 over every field of every prompt, in order: equal only for the same workload."""
    digest = hashlib.sha256()
    for prompt in prompts:
        fields: list[Any] = [prompt.prompt_set, prompt.id, prompt.turns, prompt.category]
        # Added only where there are any, so that other prompts keep the hash of earlier versions
        if prompt.answers or prompt.system is not None:
            fields += [prompt.answers, prompt.system]
        if prompt.first_turn > 1:
            fields.append(prompt.first_turn)
        if prompt.tools is not None:
            fields.append(prompt.tools)
        digest.update(json.dumps(fields).encode() + b"\n")
    return digest.hexdigest()


def missing_answers(prompt: Prompt) -> list[int]:
    """The turns, from 1, whose answers later turns need and the prompt does not have."""
    given = dict(enumerate(prompt.answers, start=1))
    return [turn for turn in range(1, len(prompt.turns)) if given.get(turn) is None]


def estimated_tokens(prompts: Sequence[Prompt], config: PairConfig | AuditionConfig) -> list[int]:
    """The estimated prompt tokens of each turn of each conversation.

    Text is counted in bytes, because no tokenizer is loaded yet; answers that the target has yet to
    generate count with their whole budget.
    """
    lengths: list[int] = []
    for prompt in prompts:
        missing = missing_answers(prompt)
        for turn in prompt.answered:
            answers = prompt.answers[: turn - 1]
            parts = [prompt.system or "", *prompt.turns[:turn], *(text or "" for text in answers)]
            size = -(-len("".join(parts).encode()) // BYTES_PER_TOKEN)
            lengths.append(size + config.new_tokens * sum(n < turn for n in missing))
    return lengths


def file_labels(config: PromptsConf) -> list[str]:
    """A unique name for each of prompts.files, different from shipped sets and the hub data set.

    It is the file's stem, with the suffix where one folder has two such stems, after as many parent
    folders as the names need to differ.
    """
    for file in config.files:
        if not file.isprintable() or not encodes(file):
            raise UserError(f"prompts.files: {file!a} holds a character that is not printable")
    files = [Path(os.path.abspath(file)) for file in config.files]
    twice = next((file for file in files if files.count(file) > 1), None)
    if twice is not None:
        raise UserError(f"prompts.files: {twice} is listed twice; list it once")
    taken = {*(config.sets or ()), *([hub_label(config.hub)] if config.hub else [])}
    places = [(file.parent, stem_of(file)) for file in files]
    names = [
        file.name if places.count(place) > 1 else place[1]
        for file, place in zip(files, places, strict=True)
    ]
    labels = list(names)
    for depth in range(1, max((len(file.parents) for file in files), default=0)):
        clashing = {name for name in labels if name in taken or labels.count(name) > 1}
        labels = [
            "/".join([*file.parts[1:-1][-depth:], name]) if label in clashing else label
            for file, name, label in zip(files, names, labels, strict=True)
        ]
    return labels


def _shipped(name: str) -> tuple[Prompt, ...]:
    if name not in available_sets():
        known = _names(available_sets())
        raise UserError(
            f"prompts.sets: no set {name!r}; there are {known}, and prompts.files=[...]"
        )
    return read_file(SHIPPED_DIR / f"{name}.jsonl", prompt_set=name)


def _unique(
    prompts: Iterable[Prompt],
    label: str,
    config: PromptsConf,
    taken: Set[tuple[str, str]] = frozenset(),
) -> list[Prompt]:
    """The user's prompts, with `label` before a category that has the name of a shipped set.

    Likewise before an id that another file has in the same set, for files that share categories may
    each number their prompts from 1.
    """
    made: list[Prompt] = []
    for prompt in prompts:
        if prompt.prompt_set in (config.sets or ()):
            prompt = replace(prompt, prompt_set=f"{label}/{prompt.prompt_set}")
        if (prompt.prompt_set, prompt.id) in taken:
            prompt = replace(prompt, id=f"{label}/{prompt.id}")
        made.append(prompt)
    return made


def _fitted(prompt: Prompt, config: PromptsConf) -> Prompt:
    """The prompt with the configured system message, and at most the configured turns."""
    if config.system is not None and prompt.system is None:
        prompt = replace(prompt, system=checked_text(config.system, "message", "prompts.system"))
    turns = prompt.turns[: config.max_turns]
    return replace(prompt, turns=turns, answers=prompt.answers[: len(turns) - 1])


def _modes(prompts: Sequence[Prompt], config: PromptsConf) -> list[Prompt]:
    """The prompts, once for each thinking mode."""
    modes = config.thinking_modes
    return [
        replace(
            prompt,
            thinking=mode,
            prompt_set=prompt.prompt_set + (THINKING if mode and len(modes) > 1 else ""),
        )
        for mode in modes
        for prompt in prompts
    ]


def _refuse_repeated_ids(prompts: Iterable[Prompt]) -> None:
    """Refuse an id that occurs twice in a set, also one of a later turn (`Prompt.up_to`)."""
    seen: dict[tuple[str, str], str] = {}
    for prompt in prompts:
        for turn in prompt.answered:
            key = (prompt.prompt_set, prompt.up_to(turn, ()).id)
            if key in seen:
                raise UserError(
                    f"{prompt.origin}: id {key[1]!r} occurs twice in set {key[0]!r}, first in"
                    f" {seen[key]}; give each prompt of a set an id of its own"
                )
            seen[key] = prompt.origin


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"

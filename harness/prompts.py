"""Prompt sets: what the models are asked to write.

A set is a jsonl file, one prompt a line: `prompt` (a text) or `turns` (a list of the user's texts,
or of `{"role": ..., "content": ...}` messages), and where wanted `id` and `category`. Two sets ship
with the package, `easy` and `hard`; the user's own files are given as prompts.files=[...], where
the prompt set is a line's category, or the file's stem for lines without one.

Chat templates and tokenizers are the models' affair; here a prompt is text.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from harness.config import PromptsConf
from harness.records import Prompt, UserError

SHIPPED_DIR = Path(__file__).resolve().parent / "prompt_sets"
KNOWN_FIELDS = frozenset({"prompt", "turns", "category", "id"})
EXPECTED = 'expected {"prompt": "..."} or {"turns": ["...", ...]}, optionally "category" and "id"'


def load(config: PromptsConf) -> tuple[Prompt, ...]:
    """The prompts that a configuration asks for, set by set, each set evenly subsampled.

    Raises:
        UserError: an unknown set, a file that cannot be read, or a line that is not a prompt.
    """
    prompts = [prompt for name in config.sets for prompt in _shipped(name)]
    prompts += [prompt for file in config.files for prompt in read_file(Path(file))]
    _refuse_repeated_ids(prompts)
    sets = dict.fromkeys(prompt.prompt_set for prompt in prompts)
    unknown = sorted(set(config.weights or {}) - set(sets))
    if unknown:
        raise UserError(f"prompts.weights: no prompt set {unknown[0]!r}; there are {_names(sets)}")
    absent = [name for name in sets if config.weights and name not in config.weights]
    if absent:
        raise UserError(f"prompts.weights: no weight for prompt set {absent[0]!r}; add one")
    grouped = ([prompt for prompt in prompts if prompt.prompt_set == name] for name in sets)
    return tuple(prompt for group in grouped for prompt in spread(group, config.limit))


def available_sets() -> tuple[str, ...]:
    """Names of the prompt sets that ship with the package."""
    return tuple(sorted(path.stem for path in SHIPPED_DIR.glob("*.jsonl")))


def read_file(path: Path, prompt_set: str | None = None) -> tuple[Prompt, ...]:
    """Every prompt of one jsonl file, in its order; empty lines are passed over.

    Args:
        path: the file.
        prompt_set: the set all of them belong to; None takes a line's category, else the stem.

    Raises:
        UserError: naming the file, the line and what was expected.
    """
    try:
        # Not splitlines(): JSON texts may hold U+2028 and its like, which are no ends of line.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"prompts.files: cannot read {path} ({reason})") from error
    prompts = tuple(
        _parse(line, number, path, prompt_set)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    )
    if not prompts:
        raise UserError(f"{path}: no prompts in it; {EXPECTED}, one a line")
    return prompts


def spread(prompts: Sequence[Prompt], limit: int | None) -> tuple[Prompt, ...]:
    """At most `limit` prompts, evenly spread over the set and always the same ones.

    The first n alone would leave out whole categories of a file that is sorted by them: so every
    category gives its first prompt before any gives its second, in the file's order throughout.
    """
    if limit is None or limit >= len(prompts):
        return tuple(prompts)
    chosen = sorted(_round_robin(prompts)[:limit])
    return tuple(prompts[index] for index in chosen)


def prompt_set_hash(prompts: Iterable[Prompt]) -> str:
    """SHA-256 over every field of every prompt, in order: equal only for the same workload."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps(astuple(prompt)).encode() + b"\n")
    return digest.hexdigest()


def _shipped(name: str) -> tuple[Prompt, ...]:
    if name not in available_sets():
        known = _names(available_sets())
        raise UserError(
            f"prompts.sets: no set {name!r}; there are {known}, and prompts.files=[...]"
        )
    return read_file(SHIPPED_DIR / f"{name}.jsonl", prompt_set=name)


def _parse(line: str, number: int, path: Path, prompt_set: str | None) -> Prompt:
    where = f"{path}, line {number}"
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg}); {EXPECTED}") from error
    if not isinstance(entry, dict):
        raise UserError(f"{where}: not a JSON object; {EXPECTED}")
    unknown = sorted(entry.keys() - KNOWN_FIELDS)
    if unknown:
        raise UserError(f"{where}: unknown field {unknown[0]!r}; {EXPECTED}")
    category = _text_or_none(entry, "category", where)
    return Prompt(
        prompt_set=prompt_set or category or path.stem,
        id=_text_or_none(entry, "id", where) or f"{path.stem}-{number:02d}",
        turns=tuple(_turns(entry, where)),
        category=category,
    )


def _turns(entry: dict[str, Any], where: str) -> Iterator[str]:
    if ("prompt" in entry) == ("turns" in entry):
        raise UserError(f"{where}: needs either prompt or turns; {EXPECTED}")
    turns = [entry["prompt"]] if "prompt" in entry else entry["turns"]
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{where}: turns must be a list of at least one text; {EXPECTED}")
    for turn in _users_texts(turns, where):
        if not isinstance(turn, str):
            raise UserError(f"{where}: a prompt must be text, not {turn!r}; {EXPECTED}")
        if not turn.strip():
            raise UserError(f"{where}: an empty prompt; there is nothing to generate from")
        yield turn


def _users_texts(turns: list[Any], where: str) -> list[Any]:
    """The turns of a message list that are the user's; plain texts pass as they are."""
    if not all(isinstance(turn, dict) for turn in turns):
        return turns
    if not all({"role", "content"} <= turn.keys() for turn in turns):
        raise UserError(f"{where}: a message in turns needs role and content; {EXPECTED}")
    if any(turn["role"] == "system" for turn in turns):
        raise UserError(f"{where}: system messages are not supported; put the text into the prompt")
    texts = [turn["content"] for turn in turns if turn["role"] == "user"]
    if not texts:
        raise UserError(f"{where}: turns holds no message with role user; {EXPECTED}")
    return texts


def _text_or_none(entry: dict[str, Any], key: str, where: str) -> str | None:
    value = entry.get(key)
    if key == "id" and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if value is not None and not (isinstance(value, str) and value.strip()):
        raise UserError(f"{where}: {key} must be text, not {value!r}")
    return value


def _round_robin(prompts: Sequence[Prompt]) -> list[int]:
    """Indices in the order of choice: category by category, and within one evenly spread."""
    by_category: dict[str | None, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_category.setdefault(prompt.category, []).append(index)
    ranked = [
        (rank, place, index)
        for place, indices in enumerate(by_category.values())
        for rank, index in enumerate(_halving(indices))
    ]
    return [index for _, _, index in sorted(ranked)]


def _halving(indices: Sequence[int]) -> list[int]:
    """The first, the middle, then the quarters, ...: every beginning of it is evenly spread."""
    bits = max(len(indices) - 1, 1).bit_length()
    order = sorted(range(len(indices)), key=lambda place: int(f"{place:0{bits}b}"[::-1], 2))
    return [indices[place] for place in order]


def _refuse_repeated_ids(prompts: Iterable[Prompt]) -> None:
    seen: set[tuple[str, str]] = set()
    for prompt in prompts:
        key = (prompt.prompt_set, prompt.id)
        if key in seen:
            raise UserError(f"prompts: id {prompt.id!r} occurs twice in set {prompt.prompt_set!r}")
        seen.add(key)


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"

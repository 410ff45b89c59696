"""Read one entry of a prompt file, in any of the known formats, as a `Prompt`.

A format is recognised by its fields. An entry that is not a prompt raises an error of one line with
its place, its content and the expected content.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.records import Prompt, UserError

# The fields that have a prompt; the first one in an entry is read
LISTS = ("messages", "conversations", "conversation", "turns")
TEXTS = ("prompt", "question", "instruction", "text")
IDS = ("id", "question_id", "task_id", "prompt_id", "conversation_id", "custom_id")
# The fields that may contain the request with the prompt, as in batch files and gateways' logs
WRAPPERS = ("body", "request")
PROMPTS = (*LISTS, *TEXTS, *WRAPPERS)
# Next to a prompt: what follows an instruction, and a system message
INPUTS, SYSTEMS = ("input", "context"), ("system", "system_prompt")
# The fields of an answer of a server, in OpenAI's batch files or by itself
ANSWERS = ("response", "choices", "meta_info", "timings")
READ = frozenset({*PROMPTS, *IDS, *INPUTS, *SYSTEMS, *ANSWERS, "category"})
EXPECTED = f"read are {', '.join(LISTS)}, {', '.join(TEXTS)} (docs/prompts.md)"
ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bing", "bard"), "assistant"),
}
# SPEED-Bench's text in place of prompts that its licence excludes
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
MAX_LABEL = 200
Entry = Mapping[str, Any]
Conversation = tuple[str | None, list[str], list[str | None]]


@dataclass(frozen=True)
class Source:
    """A source of entries: a file or a data set of the hub."""

    name: str  # in errors
    label: str  # prompt set of entries without a category, and the prefix of ids of those without
    unit: str  # of its entries: line, row or entry
    prompt_set: str | None = None  # the set of all entries, in place of their categories
    skip_unusable: bool = False  # whether entries that are not prompts are skipped


def prompt_of(entry: Any, number: int, source: Source) -> Prompt:
    """The prompt of one entry; without an id, its id is `number`, that of the line or row.

    Raises:
        UserError: the entry is not a prompt.
    """
    where = f"{source.name}, {source.unit} {number}"
    if not isinstance(entry, Mapping):
        raise UserError(f"{where}: not an object; {EXPECTED}")
    ids = (_label(entry.get(key), key, where) for key in IDS)
    name = next((each for each in ids if each is not None), None)
    fields = _with_prompt(entry, where)
    labels = (_label(each.get("category"), "category", where) for each in (entry, fields))
    category = next((each for each in labels if each is not None), None)
    system, turns, answers = _conversation(fields, where)
    return Prompt(
        prompt_set=source.prompt_set or category or source.label,
        id=name or f"{source.label}-{number:02d}",
        turns=tuple(turns),
        category=category,
        answers=tuple(answers),
        system=system,
        tools=_tools(fields.get("tools")),
        origin=where,
    )


def request_in(entry: Entry) -> Entry:
    """The request under `body` or `request` of an entry; the entry itself where it has neither."""
    return next((entry[key] for key in WRAPPERS if isinstance(entry.get(key), Mapping)), entry)


def _with_prompt(entry: Entry, where: str) -> Entry:
    """The entry, or the request in it, whichever has the prompt."""
    if any(entry.get(name) is not None for name in (*LISTS, *TEXTS)):
        return entry
    request = request_in(entry)
    several = request.get("prompt") if request is not entry else None
    if isinstance(several, list) and len(several) > 1 and isinstance(several[0], str):
        raise UserError(f"{where}: a request with several prompts; give each one of its own")
    return request


def _tools(given: Any) -> str | None:
    """Tools in the form of OpenAI's API, as JSON text; None for any other value."""
    if not isinstance(given, list) or not given:
        return None
    functions = [tool.get("function") for tool in given if isinstance(tool, Mapping)]
    named = [each for each in functions if isinstance(each, Mapping) and each.get("name")]
    return json.dumps(given) if len(named) == len(given) else None


def decoded(text: str, where: str) -> Any:
    """Parsed JSON; raises UserError for invalid, too deeply nested or too long content."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _not_json(error, where) from error


def _not_json(error: Exception, where: str) -> UserError:
    return UserError(f"{where}: not JSON ({getattr(error, 'msg', error)}); {EXPECTED}")


def decoded_values(text: str, where: str) -> Iterator[Any]:
    """The JSON values of a text, one after another; raises as `decoded` does."""
    decoder, end, place = json.JSONDecoder(), len(text.rstrip()), where
    at = len(text) - len(text.lstrip())
    for number in itertools.count(2):
        if at >= end:
            return
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise _not_json(error, place) from error
        yield value
        while text[at : at + 1].isspace():
            at += 1
        place = f"{where}, entry {number}"


def _conversation(entry: Entry, where: str) -> Conversation:
    """The system message, the turns and the answers between them, of an entry."""
    name = next((name for name in (*LISTS, *TEXTS) if entry.get(name) is not None), None)
    answered = any(isinstance(entry.get(key), Mapping | list) for key in ANSWERS)
    failed = "response" in entry and bool(entry.get("error"))
    # SGLang's answer has its text in the field that others have a prompt in
    if (name is None and (answered or failed)) or (name == "text" and "meta_info" in entry):
        raise UserError(
            f"{where}: an answer of a server, without its request; give the file of the requests"
        )
    if name is None:
        raise UserError(f"{where}: no prompt in it, found {some(list(entry))}; {EXPECTED}")
    value = entry[name]
    if name == "turns" and entry.get("prompt") is not None:
        raise UserError(f"{where}: either prompt or turns, not both; {EXPECTED}")
    if name in LISTS or (name == "prompt" and isinstance(value, list)):
        system, turns, answers = _listed(value, name, where)
        return _system_in(entry, where) if system is None else system, turns, answers
    text = checked_text(value, name, where)
    for field in INPUTS if name == "instruction" else ():
        if entry.get(field):
            text = f"{text}\n\n{checked_text(entry[field], field, where)}"
    return _system_in(entry, where), [text], []


def _system_in(entry: Entry, where: str) -> str | None:
    """The system message next to a prompt (Anthropic's requests, OpenOrca); None without one."""
    given = next((entry[name] for name in SYSTEMS if entry.get(name)), None)
    return None if given is None else checked_text(_message_text(given, where), "system", where)


def _listed(items: Any, name: str, where: str) -> Conversation:
    if not isinstance(items, list) or not items:
        raise UserError(f"{where}: {name} must be a list of at least one text or message")
    if not all(isinstance(item, dict) for item in items):
        return None, [checked_text(item, name, where) for item in items], [None] * (len(items) - 1)
    system: str | None = None
    turns: list[str] = []
    answers: list[str | None] = []
    shared = name.startswith("conversation")
    for index, item in enumerate(items):
        role, content = _message(item, name, where)
        if role == "assistant" and shared and not turns:
            continue  # shared conversations often begin in the middle, with an answer
        text = checked_text(_message_text(content, where), f"{role} message", where)
        if role == "system":
            if index > 0:
                raise UserError(f"{where}: a system message after another; it must come first")
            system = text
        elif role == "user":
            answers += [None] * (len(turns) - len(answers))
            turns.append(text)
        elif len(answers) == len(turns):
            raise UserError(f"{where}: an assistant message must follow one with role user")
        else:
            answers.append(text)
    if not turns:
        raise UserError(f"{where}: {name} holds no message with role user; {EXPECTED}")
    return system, turns, answers[: len(turns) - 1]


def _message(item: Mapping[str, Any], name: str, where: str) -> tuple[str, Any]:
    """The role and content of one message, in OpenAI's form, ShareGPT's or a mixture of them."""
    role, content = _first_of(item, "role", "from"), _first_of(item, "content", "value")
    if role is None or content is None:
        raise UserError(f"{where}: a message in {name} needs role and content (or from and value)")
    if not isinstance(item[role], str) or item[role].lower() not in ROLES:
        raise UserError(
            f"{where}: role {_shown(item[role])} is not read; use system, user and assistant"
        )
    return ROLES[item[role].lower()], item[content]


def _first_of(item: Mapping[str, Any], *names: str) -> str | None:
    """The first of the names with a value; else the first with null; None without any."""
    there = [name for name in names if name in item]
    return next((name for name in there if item[name] is not None), there[0] if there else None)


def _message_text(content: Any, where: str) -> Any:
    """A message's content, with its parts joined where it is a list of text parts."""
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise UserError(f"{where}: a message has a part that is not text; only text is read")
        texts.append(text)
    return "".join(texts)


def checked_text(value: Any, name: str, where: str) -> str:
    """A prompt's text; raises UserError if it is empty or not valid text for a tokenizer."""
    if not isinstance(value, str):
        raise UserError(f"{where}: {name} must be text, not {_shown(value)}; {EXPECTED}")
    if not value.strip():
        what = name if name.endswith("message") else "prompt; there is nothing to generate from"
        raise UserError(f"{where}: an empty {what}")
    if "\0" in value:
        raise UserError(f"{where}: {name} holds a NUL character; is the file text?")
    if not encodes(value):
        raise UserError(f"{where}: {name} holds half a surrogate pair; write the character itself")
    if value.startswith(PLACEHOLDER):
        raise UserError(
            f"{where}: SPEED-Bench's placeholder in place of a prompt; fetch the texts with its "
            "own prepare script first"
        )
    return value


def _label(value: Any, name: str, where: str) -> str | None:
    """An id or a category, checked to be one short line; None where it is empty or not given.

    A number is its text, so that one table is the same in csv, jsonl and parquet.
    """
    if isinstance(value, float):
        # In a table with empty cells, which may be nan, whole numbers are floats
        whole = value.is_integer() and abs(value) < 2**53
        value = None if math.isnan(value) else int(value) if whole else value
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise UserError(f"{where}: {name} must be a text or a number, not {_shown(value)}")
    if len(value) > MAX_LABEL:
        raise UserError(f"{where}: {name} has {len(value):,} characters; at most {MAX_LABEL}")
    if not value.isprintable() or not encodes(value):
        raise UserError(f"{where}: {name} holds a character that cannot be printed")
    return value


def encodes(text: str) -> bool:
    """True where a text can be encoded as UTF-8, so that it has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    """A short text of a value of any size or depth, for an error."""
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, Mapping):
        return "an object"
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def some(names: Sequence[Any]) -> str:
    """The first names as text, for an error."""
    shown = [_shown(str(name)) for name in names[:8]]
    return ", ".join([*shown, *(["..."] if len(names) > 8 else [])]) or "nothing"

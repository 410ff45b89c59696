"""What an answer is held to besides being the target's: a JSON schema, tools, the end of reasoning.

- `schema`: the text is JSON that has the schema, by the package `jsonschema`. A text that stops in
  the middle is no JSON, whether the budget or the server ended it.
- `tools`: the text calls at least one tool, each call can be read, names a tool of the prompt, and
  its arguments have that tool's schema. Read are the tags of Hermes and Qwen
  (`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`), Mistral's list after `[TOOL_CALLS]`,
  and, as Llama 3 calls and as `tool_choice` "required" is asked for here, a text that is such an
  object or a list of them; `parameters` may stand for `arguments`.
- `reasoning`: the text leaves its reasoning before its budget, by the closing tag, once.

A schema goes to the engine's grammar, and so do tools that must be called; other answers are the
target's own.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from harness import PACKAGE
from harness.records import Check, Prompt, UserError

MOST = 120  # characters of a fault
TAGGED = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
LISTED = "[TOOL_CALLS]"
# Where a tool's parameters define what they refer to, from their root
DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True)
class AnswerCheck:
    """One kind of check of a prompt's answers.

    Attributes:
        prompt: that has the schema, the tools or the closing tag.
        grammar: the JSON schema that the engine's grammar holds the answer to, as JSON text; None
            for an answer of the target's own.
    """

    kind: Check
    prompt: Prompt
    grammar: str | None = None

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether tags may be special tokens, which are text here."""
        return self.kind != "schema"

    def fault_of(self, text: str) -> str:
        """Why a text is not what it must be; "" where it is."""
        prompt = self.prompt
        if self.kind == "tools":
            if self.grammar is None and prompt.reasoning_end is not None:
                text = text.rpartition(prompt.reasoning_end)[2]
            return tool_fault(text, tools_of(prompt))
        if self.kind == "reasoning":
            return reasoning_fault(text, prompt.reasoning_end or "")
        return schema_fault(text, prompt.schema or "")


def checks_of(prompt: Prompt) -> Iterator[AnswerCheck]:
    """The checks that a prompt asks for. Each has an answer of its own, since grammars differ."""
    if prompt.schema is not None:
        yield AnswerCheck("schema", prompt, prompt.schema)
    if prompt.tools is not None:
        yield AnswerCheck("tools", prompt, _call_schema(prompt) if prompt.must_call else None)
    if prompt.reasoning_end is not None:
        yield AnswerCheck("reasoning", prompt)


def check_schemas(prompts: Iterable[Prompt]) -> None:
    """Refuse a schema that is none, and a machine on which no text could be held against it."""
    for prompt in prompts:
        given: list[tuple[str, Any]] = []
        if prompt.schema is not None:
            given.append(("its JSON schema", json.loads(prompt.schema)))
        if prompt.tools is not None:
            given += [
                (f"the parameters of its tool {name}", parameters)
                for name, parameters in tools_of(prompt).items()
            ]
            given.append(("what its tools make", json.loads(_call_schema(prompt))))
        if given and find_spec("jsonschema") is None:
            raise UserError(
                f"{prompt.origin or 'prompts.schema'}: has a JSON schema, and no package is here"
                f" that checks texts against it: `pip install {PACKAGE}[schema]`"
            )
        for what, schema in given:
            _check_schema(f"{prompt.origin}: {what}", schema)


def _check_schema(what: str, schema: Any) -> None:
    jsonschema: Any = import_module("jsonschema")
    try:
        jsonschema.validators.validator_for(schema).check_schema(schema)
    except jsonschema.SchemaError as error:
        raise UserError(f"{what} is none: {_short(error.message)}") from error
    try:
        jsonschema.validate(None, schema)
    except jsonschema.ValidationError:
        pass
    except Exception as error:  # of references or patterns, by whatever library reads them
        raise UserError(f"{what} cannot be applied: {_short(str(error))}") from error


def schema_fault(text: str, schema: str) -> str:
    """Why a text is not JSON that has a schema; "" where it is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return _short(f"not JSON: {error}")
    return _value_fault(value, json.loads(schema))


def _value_fault(value: Any, schema: Any) -> str:
    jsonschema: Any = import_module("jsonschema")
    try:
        jsonschema.validate(value, schema)
    except jsonschema.ValidationError as error:
        return _short(error.message)
    except RecursionError:
        return "nested too deep to be checked"
    return ""


# ---- tools ---------------------------------------------------------------------------------------


def tools_of(prompt: Prompt) -> dict[str, Any]:
    """The JSON schema of each tool's arguments, by its name."""
    functions = [tool.get("function", tool) for tool in json.loads(prompt.tools or "[]")]
    return {each["name"]: each.get("parameters") or {"type": "object"} for each in functions}


def tool_fault(text: str, tools: Mapping[str, Any]) -> str:
    """Why a text calls none of the tools (see `tools_of`) as it should; "" where it does."""
    try:
        calls = [*_calls_in(text)]
    except (ValueError, RecursionError) as error:
        return _short(f"a tool call that cannot be read: {error}")
    if not calls:
        return "no tool call"
    for call in calls:
        known = isinstance(call, dict) and isinstance(call.get("name"), str)
        if not known:
            return "a tool call without a name"
        if call["name"] not in tools:
            return _short(f"a call of {call['name']}, which is no tool of the prompt")
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):  # as OpenAI's API has them
            try:
                arguments = json.loads(arguments)
            except ValueError as error:
                return _short(f"arguments of {call['name']} that are no JSON: {error}")
        if not isinstance(arguments, dict):
            return _short(f"a call of {call['name']} without arguments")
        fault = _value_fault(arguments, tools[call["name"]])
        if fault:
            return _short(f"arguments of {call['name']}: {fault}")
    return ""


def _calls_in(text: str) -> Iterator[Any]:
    tagged = TAGGED.findall(text)
    for call, end in tagged:
        if not end:
            raise ValueError("it has no closing tag")
        yield json.loads(call)
    if tagged:
        return
    before, mark, listed = text.partition(LISTED)
    body = (listed if mark else before).strip()
    if not mark and not body.startswith(("{", "[")):
        return
    value = json.loads(body)
    yield from value if isinstance(value, list) else [value]


def _call_schema(prompt: Prompt) -> str:
    calls: list[Any] = []
    shared: dict[str, dict[str, Any]] = {}
    for name, parameters in tools_of(prompt).items():
        own = dict(parameters)
        for key in DEFINITIONS:
            for term, meaning in (own.pop(key, None) or {}).items():
                if shared.setdefault(key, {}).setdefault(term, meaning) != meaning:
                    raise UserError(
                        f"{prompt.origin}: two of its tools define {term} differently in {key};"
                        " name them apart"
                    )
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": own},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return json.dumps({"anyOf": calls, **shared})


# ---- the end of reasoning ------------------------------------------------------------------------


def reasoning_fault(text: str, closing: str) -> str:
    """Why a text does not leave its reasoning by the closing tag, once; "" where it does."""
    count = text.count(closing)
    if not count:
        return f"no {closing} within the budget"
    return "" if count == 1 else f"{count} times {closing}"


def _short(message: str) -> str:
    return " ".join(message.split())[:MOST]

"""Whether a text is JSON that has a schema, by the package `jsonschema`.

A text that stops in the middle is no JSON, whether the budget or the server ended it.
"""

import json
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from harness import PACKAGE
from harness.records import Prompt, UserError

MOST = 120  # characters of a fault


def check_schemas(prompts: Iterable[Prompt]) -> None:
    """Refuse a schema that is none, and a machine on which no text could be held against it."""
    given = [prompt for prompt in prompts if prompt.schema is not None]
    if not given:
        return
    if find_spec("jsonschema") is None:
        raise UserError(
            f"{given[0].origin or 'prompts.schema'}: has a JSON schema, and no package is here that"
            f" checks texts against it: `pip install {PACKAGE}[schema]`"
        )
    jsonschema: Any = import_module("jsonschema")
    for prompt in given:
        schema = json.loads(prompt.schema or "")
        try:
            jsonschema.validators.validator_for(schema).check_schema(schema)
        except jsonschema.SchemaError as error:
            raise UserError(
                f"{prompt.origin}: its JSON schema is none: {_short(error.message)}"
            ) from error
        try:
            jsonschema.validate(None, schema)
        except jsonschema.ValidationError:
            pass
        except Exception as error:  # of references, by whatever library resolves them
            raise UserError(
                f"{prompt.origin}: its JSON schema cannot be applied: {_short(str(error))}"
            ) from error


def fault_of(text: str, schema: str) -> str:
    """Why a text is not JSON that has a schema; "" where it is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return _short(f"not JSON: {error}")
    jsonschema: Any = import_module("jsonschema")
    try:
        jsonschema.validate(value, json.loads(schema))
    except jsonschema.ValidationError as error:
        return _short(error.message)
    except RecursionError:
        return "nested too deep to be checked"
    return ""


def _short(message: str) -> str:
    return " ".join(message.split())[:MOST]

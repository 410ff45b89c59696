"""Exports of other tools, given as prompts, as logs or as metrics: read rightly, or refused.

docs/reliability.md lists them; what servers and checkpoints are given is in their own tests.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.config import PromptsConf
from harness.engines.counters import Samples
from harness.prompts import load
from harness.prompts.log import RequestLog
from harness.records import UserError

HI = {"role": "user", "content": "Hi."}
ANSWER = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "Yes."}}]}
BATCH = {"id": "b", "custom_id": "r1", "error": None, "response": {"body": ANSWER}}
EXPIRED = {**BATCH, "response": None, "error": {"message": "expired"}}
SGLANG = {"text": "The answer.", "output_ids": [1], "meta_info": {"completion_tokens": 1}}
ANTHROPIC = {"system": [{"type": "text", "text": "Be brief."}], "messages": [HI]}
AN_ANSWER = "an answer of a server, without its request"
NOT_ONE = "no prompt in it"


@pytest.mark.parametrize(
    ("entry", "read"),
    [
        ({"instruction": "Sum up.", "context": "A text."}, (None, "Sum up.\n\nA text.")),
        ({"system_prompt": "Be brief.", "question": "Hi."}, ("Be brief.", "Hi.")),
        ({"system": "Be brief.", "conversations": [HI]}, ("Be brief.", "Hi.")),
        ({"system": "", "prompt": "Hi."}, (None, "Hi.")),
        ({"request": ANTHROPIC}, ("Be brief.", "Hi.")),
        ({"prompt": "Hi.", "chosen": [HI], "rejected": [HI]}, (None, "Hi.")),
        ({"prompt": "Hi.", "outputs": [{"text": "Yes."}]}, (None, "Hi.")),
        (BATCH, AN_ANSWER),
        (EXPIRED, AN_ANSWER),
        (SGLANG, AN_ANSWER),
        (ANSWER, AN_ANSWER),
        ({"generated_text": "Yes."}, NOT_ONE),
        ({"conversation_a": [HI], "conversation_b": [HI]}, NOT_ONE),
        ({"custom_id": "1", "body": {"model": "m", "input": "Hi."}}, NOT_ONE),
        ({"custom_id": "1", "params": ANTHROPIC}, NOT_ONE),
        ({"request": {"contents": [{"role": "user", "parts": [{"text": "Hi."}]}]}}, NOT_ONE),
        ({"timestamp": 0, "input_length": 100, "hash_ids": [1]}, NOT_ONE),
        ({"Prompt": "Hi."}, NOT_ONE),
        ({"prompt": [1, 2, 3]}, "prompt must be text, not 1"),
        ({"messages": [{**HI, "role": "prompter"}]}, "role 'prompter' is not read"),
        ({"prompt": "Hi.", "category": ["a"]}, "category must be a text or a number"),
    ],
)
def test_an_entry_of_another_tool_is_read_or_said_to_be_what_it_is(
    entry: dict[str, Any], read: str | tuple[str | None, str], tmp_path: Path
) -> None:
    file = tmp_path / "export.jsonl"
    file.write_text(json.dumps(entry))
    if isinstance(read, str):
        for work in (
            lambda: load(PromptsConf(sets=[], files=[str(file)])),
            lambda: RequestLog(file),
        ):
            with pytest.raises(UserError, match=read):
                work()
        return
    (prompt,) = load(PromptsConf(sets=[], files=[str(file)]))
    (logged,) = RequestLog(file).sample(20, 0).prompts
    assert (prompt.system, prompt.turns[-1]) == (logged.system, logged.turns[-1]) == read


@pytest.mark.parametrize(
    ("name", "content", "read"),
    [
        ("old.txt", b"one\rtwo\r", ["one", "two"]),
        ("windows.txt", b"\xef\xbb\xbfone\r\ntwo\r\n", ["one", "two"]),
        ("pretty.jsonl", b'{\n "prompt": "one"\n}\n{\n "prompt": "two"\n}', ["one", "two"]),
        ("text.csv", b'id,messages\n1,"[{""role"": ""user"", ""content"": ""one""}]"', ["one"]),
        ("python.csv", b"messages\n\"[{'role': 'user'}]\"", "column messages: not JSON"),
        ("semicolons.csv", b"id;prompt\n1;one", "its header has 'id;prompt'"),
        ("utf16.jsonl", '{"prompt": "one"}'.encode("utf-16"), "it is not UTF-8 text"),
        ("latin1.jsonl", '{"prompt": "é"}'.encode("latin-1"), "it is not UTF-8 text"),
    ],
)
def test_a_file_of_another_system_is_read_or_said_to_be_what_it_is(
    name: str, content: bytes, read: str | list[str], tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    if isinstance(read, str):
        with pytest.raises(UserError, match=read):
            load(PromptsConf(sets=[], files=[str(file)]))
        return
    assert [prompt.turns[0] for prompt in load(PromptsConf(sets=[], files=[str(file)]))] == read


def test_an_exemplar_of_openmetrics_is_not_the_value_of_its_counter() -> None:
    page = 'a_total{model_name="m"} 5000 # {trace_id="x"} 1.0 1763900000.5\na_total 1 1763900000.5'
    assert Samples.of(page).sums == {"a_total": 5001.0}
    assert Samples.of(page).models == ("m",)

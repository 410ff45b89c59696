"""Checked answers: grammars reach the engines, and a K that makes answers invalid is named."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs import ran
from served_pair import embedded
from stand_in_server import StandIn

from harness import prompts as prompt_sets
from harness.analysis import analyse
from harness.analysis.server_structured import structured_caveats, structured_gates
from harness.commands.run_lifecycle import load_prompts
from harness.commands.server_structured import check_structured
from harness.config import PromptsConf, ServerConfig, SweepConfig
from harness.decoding.sampling import SamplingParameters
from harness.engines import llamacpp, sglang, vllm
from harness.engines.protocol import Asked
from harness.measurement.answer_checks import (
    checks_of,
    reasoning_fault,
    schema_fault,
    tool_fault,
    tools_of,
)
from harness.models.tokenizer import check_tools, encode
from harness.records import StructuredAnswer, UserError
from harness.reporting.content import content_of
from harness.serving.engines import ENGINES
from harness.summary import StructuredGate

SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
TEXT = json.dumps(SCHEMA)
VALID, INVALID = '{"ok": true}', '{"ok": true'


# ---- what is asked -------------------------------------------------------------------------------


def test_each_engine_is_sent_the_schema_in_its_own_field_and_nothing_without_one() -> None:
    asked = Asked([1, 2], SamplingParameters(0.0), 0, 8)
    told = asked._replace(schema=TEXT)
    assert llamacpp.request_body(told)["json_schema"] == SCHEMA
    assert vllm.request_body(told)["structured_outputs"] == {"json": SCHEMA}
    assert sglang.request_body(told)["sampling_params"]["json_schema"] == TEXT
    for client in (llamacpp, vllm, sglang):
        assert "schema" not in json.dumps(client.request_body(asked))
        assert "structured" not in json.dumps(client.request_body(asked))


def prompts_of(folder: Path, *entries: dict[str, Any], **settings: Any) -> PromptsConf:
    file = folder / "mine.jsonl"
    file.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    return PromptsConf(files=[str(file)], **settings)


def test_a_prompt_has_its_own_schema_or_that_of_all(tmp_path: Path) -> None:
    shared = tmp_path / "shared.json"
    shared.write_text('{"type": "array"}')
    config = prompts_of(
        tmp_path,
        {"prompt": "a", "schema": SCHEMA},
        {
            "prompt": "b",
            "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        },
        {"prompt": "c", "schema": "CREATE TABLE t (x INT)"},
        {"prompt": "d", "schema": {"tables": ["t"]}},
    )
    alone = prompt_sets.load(config)
    assert [prompt.schema for prompt in alone] == [TEXT, TEXT, None, None]
    every = prompt_sets.load(replace(config, schema=str(shared)))
    assert [prompt.schema for prompt in every] == [
        TEXT,
        TEXT,
        '{"type": "array"}',
        '{"type": "array"}',
    ]
    assert prompt_sets.prompt_set_hash(alone) != prompt_sets.prompt_set_hash(every)


@pytest.mark.parametrize(
    ("content", "said"),
    [("[1]", "not a JSON schema"), ("{", "not JSON"), (None, "prompts.schema: cannot read")],
)
def test_a_file_without_a_schema_is_refused(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "schema.json"
    if content is not None:
        file.write_text(content)
    config = prompts_of(tmp_path, {"prompt": "a"}, schema=str(file))
    with pytest.raises(UserError, match=said):
        prompt_sets.load(config)


def test_what_cannot_send_or_check_a_schema_refuses_it(tmp_path: Path) -> None:
    config = ServerConfig(
        engine="own", prompts=prompts_of(tmp_path, {"prompt": "a", "schema": SCHEMA})
    )
    prompts = prompt_sets.load(config.prompts)
    with pytest.raises(UserError, match=r"mine\.jsonl, line 1: .* engine=own carry no grammar"):
        check_structured(config, prompts, ENGINES["own"])
    check_structured(config, prompts, ENGINES["vllm"])
    bad = [replace(prompts[0], schema='{"type": "text"}')]
    with pytest.raises(UserError, match=r"mine\.jsonl, line 1: its JSON schema is none"):
        check_structured(config, bad, ENGINES["vllm"])
    for conf in (PromptsConf(schema="x"), PromptsConf(reasoning_end="x")):
        with pytest.raises(UserError, match=r"prompts\.\w+: only .*harness\.server"):
            load_prompts(SweepConfig(prompts=conf))


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "$defs": {"city": {"type": "string"}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]


def test_a_prompt_has_its_own_tools_or_those_of_all(tmp_path: Path) -> None:
    shared = tmp_path / "tools.json"
    shared.write_text(json.dumps({"tools": [CLOCK], "tool_choice": "required"}))
    config = prompts_of(
        tmp_path,
        {"prompt": "a", "tools": TOOLS},
        {"prompt": "b", "tools": TOOLS, "tool_choice": "required", "reasoning_end": "</r>"},
        {"prompt": "c", "tools": ["hammer"]},
    )
    first, second, third = prompt_sets.load(config)
    assert [first.must_call, second.must_call] == [False, True]
    assert [*tools_of(first)] == ["weather", "clock"]
    assert (third.tools, third.reasoning_end) == (None, None)
    assert [(check.kind, check.grammar) for check in checks_of(first)] == [("tools", None)]
    required, reasoning = checks_of(second)
    assert (reasoning.kind, reasoning.grammar) == ("reasoning", None)
    call = {"name": "weather", "arguments": {"city": "Bern"}}
    assert schema_fault(json.dumps(call), required.grammar or "") == ""
    call["arguments"] = {"city": 1}
    assert schema_fault(json.dumps(call), required.grammar or "")
    every = prompt_sets.load(replace(config, tools=str(shared), reasoning_end="</think>"))
    assert [[*tools_of(each)] for each in every] == [["weather", "clock"]] * 2 + [["clock"]]
    assert [each.must_call for each in every] == [False, True, True]
    assert [each.reasoning_end for each in every] == ["</think>", "</r>", "</think>"]
    hashes = {prompt_sets.prompt_set_hash([each]) for each in (first, replace(first, tools=None))}
    assert len(hashes) == 2


def test_tools_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    file.write_text('[{"name": "clock"}]')
    with pytest.raises(UserError, match=r"prompts\.tools=.*: not a list of tools, each as"):
        prompt_sets.load(prompts_of(tmp_path, {"prompt": "a"}, tools=str(file)))
    entry = {"prompt": "a", "tools": TOOLS, "tool_choice": "required"}
    config = ServerConfig(engine="own", prompts=prompts_of(tmp_path, entry))
    (prompt,) = prompt_sets.load(config.prompts)
    with pytest.raises(UserError, match=r'line 1: has tools and tool_choice "required", and'):
        check_structured(config, [prompt], ENGINES["own"])
    check_structured(config, [replace(prompt, must_call=False)], ENGINES["own"])
    wrong: Any = json.loads(json.dumps(TOOLS))
    wrong[0]["function"]["parameters"]["type"] = "text"
    with pytest.raises(UserError, match="the parameters of its tool weather is none"):
        check_structured(config, [replace(prompt, tools=json.dumps(wrong))], ENGINES["vllm"])
    wrong[0] = WEATHER
    wrong[1]["function"]["parameters"] = {"$defs": {"city": {"type": "number"}}}
    with pytest.raises(UserError, match="two of its tools define city differently"):
        check_structured(config, [replace(prompt, tools=json.dumps(wrong))], ENGINES["vllm"])


def test_tools_go_through_the_chat_template_or_are_refused() -> None:
    tokenizer, conf = embedded("tiny").tokenizer, PromptsConf(sets=["easy"])
    prompt = replace(prompt_sets.load(conf)[0], tools=json.dumps(TOOLS))
    check_tools(tokenizer, [prompt], conf)  # without a template they are in the text, or nowhere
    before = tokenizer.chat_template
    try:
        tokenizer.chat_template = "{{ messages[0].content }}{% for t in tools or [] %}T{% endfor %}"
        assert len(encode(tokenizer, prompt, conf)) > len(
            encode(tokenizer, replace(prompt, tools=None), conf)
        )
        check_tools(tokenizer, [prompt], conf)
        tokenizer.chat_template = "{{ messages[0].content }}"
        with pytest.raises(UserError, match="has tools, which the chat template leaves out"):
            check_tools(tokenizer, [prompt], conf)
        check_tools(tokenizer, [replace(prompt, must_call=True)], conf)
    finally:
        tokenizer.chat_template = before


# ---- what is said of the answers -----------------------------------------------------------------


def test_an_answer_is_valid_where_it_parses_and_has_the_schema() -> None:
    assert schema_fault(VALID, TEXT) == ""
    assert schema_fault(INVALID, TEXT).startswith("not JSON")
    assert schema_fault('{"ok": 1}', TEXT) == "1 is not of type 'boolean'"


CALL = '{"name": "weather", "arguments": {"city": "Bern"}}'


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (CALL, ""),
        (f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>", ""),
        (f"<tool_call>{CALL}</tool_call><tool_call>" + '{"name": "clock", "arguments": {}}'
         "</tool_call>", ""),
        (f"[TOOL_CALLS][{CALL}]", ""),
        ('{"name": "weather", "parameters": {"city": "Bern"}}', ""),
        ('{"name": "weather", "arguments": "{\\"city\\": \\"Bern\\"}"}', ""),
        ("It is sunny in Bern.", "no tool call"),
        (f"<tool_call>{CALL}", "a tool call that cannot be read: it has no closing tag"),
        (CALL[:-1], "a tool call that cannot be read: "),
        ('{"city": "Bern"}', "a tool call without a name"),
        ('{"name": "hammer", "arguments": {}}', "a call of hammer, which is no tool of the"),
        ('{"name": "weather"}', "a call of weather without arguments"),
        ('{"name": "weather", "arguments": {}}', "arguments of weather: 'city' is a required"),
        ('{"name": "weather", "arguments": {"city": 1}}', "arguments of weather: 1 is not of"),
        ('{"name": "weather", "arguments": "city"}', "arguments of weather that are no JSON"),
    ],
)  # fmt: skip
def test_a_tool_call_is_valid_where_its_name_and_arguments_are(text: str, fault: str) -> None:
    schemas = {"weather": WEATHER["function"]["parameters"], "clock": {"type": "object"}}
    said = tool_fault(text, schemas)
    assert said.startswith(fault)
    assert bool(said) == bool(fault)


def test_reasoning_is_left_once_and_before_the_budget() -> None:
    assert reasoning_fault("so it is 4.</think>4", "</think>") == ""
    assert reasoning_fault("so it is 4", "</think>") == "no </think> within the budget"
    assert reasoning_fault("4</think>or</think>5", "</think>") == "2 times </think>"


def test_a_call_is_read_behind_the_reasoning(tmp_path: Path) -> None:
    text = f"<tool_call>no</tool_call>?</think>{CALL}"
    faults: dict[str | None, str] = {}
    for end in (None, "</think>"):
        config = prompts_of(tmp_path, {"prompt": "a", "tools": TOOLS, "reasoning_end": end})
        (prompt,) = prompt_sets.load(config)
        faults[end] = next(iter(checks_of(prompt))).fault_of(text)
    assert faults[None].startswith("a tool call that cannot be read")
    assert faults["</think>"] == ""
    (check, _) = checks_of(replace(prompt, must_call=True))  # a grammar leaves no room for it
    assert check.fault_of(CALL.replace("Bern", "</think>")) == ""


def answers(k: int, valid: Sequence[bool], temperature: float = 1.0) -> list[StructuredAnswer]:
    return [
        StructuredAnswer(
            *("easy", f"p{n}", 0, k, temperature, TEXT, n, "ok"),
            tokens=(n, int(each)),
            complete=each,
            fault="" if each else "not JSON",
        )
        for n, each in enumerate(valid)
    ]


def gate_of(answers: Sequence[StructuredAnswer]) -> StructuredGate:
    return structured_gates(answers)[-1]


def test_a_k_that_loses_valid_answers_fails_and_one_that_loses_as_many_as_it_gains_does_not() -> (
    None
):
    plain = answers(0, [True] * 23 + [False])
    broken = gate_of([*plain, *answers(2, [True] * 14 + [False] * 10)])
    assert (broken.valid, broken.plain_valid, broken.lost, broken.gained) == (14, 23, 9, 0)
    assert broken.p_value == pytest.approx(2.0**-9)
    assert broken.lowered
    equal = gate_of([*plain, *answers(2, [False] + [True] * 23)])
    assert (equal.lost, equal.gained, equal.lowered) == (1, 1, False)
    (caveat,) = structured_caveats([broken, replace(broken, k=4, p_value=1e-4), equal])
    assert caveat.code == "structured_output_invalid"
    assert caveat.values["k"] == 4
    every = structured_caveats([broken, replace(broken, check="tools")])
    assert [caveat.values["check"] for caveat in every] == ["schema", "tools"]


def test_too_few_valid_plain_answers_give_no_verdict() -> None:
    gate = gate_of([*answers(0, [True] * 3 + [False] * 9), *answers(2, [True] * 3 + [False] * 9)])
    assert gate.lowered is None


def test_greedy_answers_are_held_against_plain_decodings_token_by_token() -> None:
    gate = gate_of([*answers(0, [True] * 6, 0.0), *answers(2, [True] * 5 + [False], 0.0)])
    assert (gate.pairs, gate.equal) == (6, 5)


def test_an_answer_that_failed_and_was_asked_again_counts_once() -> None:
    (first, *others) = answers(2, [True] * 6)
    missing = replace(first, status="failed", error="status 500")
    gate = gate_of([*answers(0, [True] * 6), missing, *others])
    assert (gate.answers, gate.failed, gate.pairs) == (5, 1, 5)
    assert {caveat.code for caveat in structured_caveats([gate])} == {
        "structured_output_unanswered"
    }
    assert gate_of([*answers(0, [True] * 6), missing, *others, first]).failed == 0


# ---- a run ---------------------------------------------------------------------------------------


def llamacpp_answers(k: int, tokenizer: Any, written: str, by_grammar: bool) -> dict[str, Any]:
    """A text that is always the same, no draft of which is accepted.

    `written` to what is checked: to requests with a schema, or to every request.
    """

    def complete(body: dict[str, Any]) -> dict[str, Any]:
        tokens, stop = [17] * body["n_predict"], "limit"
        if "json_schema" in body or not by_grammar:
            tokens, stop = tokenizer(written, add_special_tokens=False)["input_ids"], "eos"
        timings = {"prompt_ms": 1.0, "predicted_ms": 9.0, "predicted_n": len(tokens)}
        if k and len(tokens) > 1:
            timings |= {"draft_n": k * (len(tokens) - 1), "draft_n_accepted": 0}
        return {"tokens": tokens, "stop_type": stop, "timings": timings}

    return {
        "/health": {},
        "/props": {"build_info": "b11549-c0ffee", "total_slots": 1},
        "/completion": complete,
        "/detokenize": lambda body: {"content": tokenizer.decode(body["tokens"])},
    }


@pytest.mark.usefixtures("few_samples")
@pytest.mark.parametrize(
    ("entry", "valid", "invalid", "named"),
    [
        ({"schema": SCHEMA}, VALID, INVALID, "STRUCTURED OUTPUT"),
        ({"tools": TOOLS, "tool_choice": "required"}, CALL, CALL[:-1], "TOOL CALLS"),
        ({"tools": TOOLS}, f"<tool_call>{CALL}</tool_call>", f"<tool_call>{CALL}", "TOOL CALLS"),
        ({"reasoning_end": "</t>"}, "4.</t>4", "4. But wait, 4", "THE END OF REASONING"),
    ],
)
def test_a_server_that_breaks_checked_answers_where_it_drafts_is_named(
    entry: dict[str, Any], valid: str, invalid: str, named: str, tmp_path: Path
) -> None:
    by_grammar = "schema" in entry or "tool_choice" in entry
    lines = ({"prompt": f"Count to {n}.", **entry} for n in range(6))
    prompts = prompts_of(tmp_path, *lines)
    tokenizer = embedded("tiny").tokenizer
    servers = [
        StandIn(llamacpp_answers(k, tokenizer, text, by_grammar))
        for k, text in ((0, valid), (2, invalid))
    ]
    urls = ",".join(server.url for server in servers)
    words = [
        *("engine=llamacpp", f"url=[{urls}]", "k=[2]", "score=false", "own_loop=false"),
        *("temperature=[0]", "repetitions=2", "new_tokens=64"),
    ]
    run = ran("server", tmp_path, *words, f"prompts.files=[{prompts.files[0]}]")
    for server in servers:
        asked = [body for body in server.asked if "json_schema" in body]
        assert len(asked) == (6 if by_grammar else 0)  # a greedy answer is asked for once
        assert server.asked[-6:] == asked or not by_grammar  # after all that is timed
        server.close()
    seeds = [{(each.prompt, each.seed) for each in run.structured if each.k == k} for k in (0, 2)]
    assert seeds[0] == seeds[1]
    summary = analyse(run)
    assert summary.served is not None
    plain, drafting = summary.served.structured
    assert (plain.k, plain.valid, plain.lowered) == (0, 6, None)
    assert (drafting.k, drafting.valid, drafting.lost, drafting.lowered) == (2, 0, 6, True)
    assert summary.served.invalid_output(2) == (drafting,)
    broken = f"BREAKS {named} at temperature 0, K=2: 0 of 6 answers are valid, and 6 of plain"
    assert any(broken in text for text in content_of(summary).caveats)
    assert "Structured output" in (run.folder / "report.md").read_text(encoding="utf-8")

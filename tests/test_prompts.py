"""Prompt sets: what ships, what a user's file may hold, and how its mistakes are told."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.config import PromptsConf
from harness.prompts import available_sets, load, prompt_set_hash, read_file, spread
from harness.records import Prompt, UserError


def own(path: Path, *lines: object) -> PromptsConf:
    """A configuration with only this file, which holds one line per object (or text as it is)."""
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines),
        encoding="utf-8",
    )
    return PromptsConf(sets=[], files=[str(path)])


def made(count: int, categories: int = 1) -> list[Prompt]:
    return [Prompt("set", str(n), ("text",), f"c{n * categories // count}") for n in range(count)]


def test_easy_and_hard_ship_with_at_least_24_prompts_each() -> None:
    assert {"easy", "hard"} <= set(available_sets())
    counts = Counter(prompt.prompt_set for prompt in load(PromptsConf()))
    assert all(counts[name] >= 24 for name in ("easy", "hard"))


def test_every_shipped_prompt_has_its_own_id_and_text() -> None:
    prompts = load(PromptsConf())
    assert len({(prompt.prompt_set, prompt.id) for prompt in prompts}) == len(prompts)
    assert len({prompt.turns for prompt in prompts}) == len(prompts)


def test_limit_is_per_set_and_sees_every_category() -> None:
    everything = load(PromptsConf())
    few = load(PromptsConf(limit=8))
    assert Counter(prompt.prompt_set for prompt in few) == {"easy": 8, "hard": 8}
    for name in ("easy", "hard"):
        known = {prompt.category for prompt in everything if prompt.prompt_set == name}
        assert {prompt.category for prompt in few if prompt.prompt_set == name} == known


def test_an_unknown_set_is_refused_with_the_ones_there_are() -> None:
    with pytest.raises(UserError, match=r"no set 'medium'; there are easy, hard"):
        load(PromptsConf(sets=["medium"]))


def test_weights_for_a_set_that_is_not_there_are_refused() -> None:
    with pytest.raises(UserError, match=r"prompts\.weights: no prompt set 'code'"):
        load(PromptsConf(weights={"code": 1.0}))


def test_a_prompt_set_is_the_category_where_there_is_one_and_else_the_files_stem(
    tmp_path: Path,
) -> None:
    config = own(
        tmp_path / "mine.jsonl",
        {"prompt": "one"},
        "",
        {"prompt": "two", "category": "code", "id": "second"},
        {"turns": ["three", "four"], "id": 7},
    )
    assert [(p.prompt_set, p.id, p.turns) for p in load(config)] == [
        ("mine", "mine-01", ("one",)),
        ("mine", "7", ("three", "four")),
        ("code", "second", ("two",)),
    ]


def test_the_users_turns_are_taken_from_a_list_of_messages(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "an answer"},
        {"role": "user", "content": "second"},
    ]
    (prompt,) = load(own(tmp_path / "chat.jsonl", {"turns": messages}))
    assert prompt.turns == ("first", "second")


def test_line_separators_inside_a_text_do_not_end_the_line(tmp_path: Path) -> None:
    line = json.dumps({"prompt": "before\u2028after\x85end"}, ensure_ascii=False)
    (prompt,) = load(own(tmp_path / "odd.jsonl", line))
    assert prompt.turns == ("before\u2028after\x85end",)


def test_windows_line_ends_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    file = tmp_path / "windows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\r\n{"prompt": "two"}\r\n')
    assert [prompt.turns for prompt in read_file(file)] == [("one",), ("two",)]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{prompt: one}", "not JSON"),
        ('"just text"', "not a JSON object"),
        ('{"words": "one", "n": 1}', "no prompt in it, found 'words', 'n'; read are messages"),
        ('{"id": "a"}', "no prompt in it, found 'id'"),
        ("{}", "no prompt in it, found nothing"),
        ('{"prompt": "a", "turns": ["b"]}', "either prompt or turns"),
        ('{"prompt": 3}', "must be text, not 3"),
        ('{"prompt": ""}', "an empty prompt"),
        ('{"prompt": "  \\n"}', "an empty prompt"),
        ('{"turns": []}', "at least one text"),
        ('{"turns": "one"}', "at least one text"),
        ('{"turns": ["one", 2]}', "must be text, not 2"),
        ('{"turns": [{"role": "user"}]}', "role and content"),
        ('{"turns": [{"role": "assistant", "content": "a"}]}', "must follow one with role user"),
        ('{"turns": [{"role": "system", "content": "a"}]}', "no message with role user"),
        ('{"messages": "a"}', "messages must be a list"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "role 'tool' is not read"),
        ('{"messages": [{"role": "user", "content": null}]}', "must be text, not None"),
        ('{"messages": [{"role": "user", "content": " "}]}', "an empty user message"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "only text is read"),
        (
            '{"turns": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}',
            "it must come first",
        ),
        (
            '{"turns": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},'
            ' {"role": "assistant", "content": "c"}]}',
            "must follow one with role user",
        ),
        ('{"conversations": []}', "conversations must be a list of at least one"),
        ('{"conversations": [{"from": "gpt", "value": "a"}]}', "no message with role user"),
        ('{"instruction": "a", "input": 3}', "input must be text, not 3"),
        ('{"prompt": "a\\u0000b"}', "a NUL character"),
        ('{"prompt": "a\\ud800b"}', "half a surrogate pair"),
        ('{"prompt": "a\x00b"}', "not JSON"),
        ('{"prompt": "a", "id": "' + "7" * 5000 + '"}', "id has 5,000 characters"),
        ('{"prompt": "a", "id": ' + "7" * 5000 + "}", "a number of more than"),
        ('{"prompt": "a", "id": "a\\nb"}', "cannot be printed"),
        ("[" * 100_000, "nested too deep"),
        ('{"prompt": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deep"),
        (
            '{"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"]}',
            "SPEED-Bench's placeholder",
        ),
        ('{"prompt": "a", "category": 4}', "category must be text"),
        ('{"prompt": "a", "id": ""}', "id must be text"),
    ],
)
def test_a_bad_line_is_told_with_file_number_and_reason(
    line: str, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.jsonl"
    with pytest.raises(UserError) as refused:
        load(own(file, {"prompt": "a good one"}, line))
    text = str(refused.value)
    assert text.startswith(f"{file}, line 2: ")
    assert says in text
    assert "\n" not in text


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"mine\.jsonl: no prompts in it"):
        load(own(tmp_path / "mine.jsonl", "", "  "))


def test_a_file_that_is_not_there_or_not_text_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"prompts\.files: cannot read .*gone\.jsonl"):
        load(PromptsConf(sets=[], files=[str(tmp_path / "gone.jsonl")]))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"binary\.jsonl \(it is not UTF-8 text\)"):
        load(PromptsConf(sets=[], files=[str(tmp_path / "binary.jsonl")]))


def test_an_id_may_occur_once_in_a_set_and_again_in_another(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    a, b = {"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"}
    with pytest.raises(UserError, match=r"id 'x' occurs twice in set 'mine'"):
        load(own(file, a, b))
    assert len(load(own(file, a, {**b, "category": "other"}))) == 2


def test_the_hash_changes_with_any_field_and_with_the_order() -> None:
    first, second = Prompt("s", "1", ("a",)), Prompt("s", "2", ("b",))
    variants = [
        [first, second],
        [second, first],
        [first],
        [first, replace(second, turns=("b", "c"))],
        [first, replace(second, category="c")],
        [first, replace(second, prompt_set="t")],
    ]
    hashes = [prompt_set_hash(variant) for variant in variants]
    assert len(set(hashes)) == len(variants)
    assert prompt_set_hash([first, second]) == hashes[0]


@given(count=st.integers(1, 60), categories=st.integers(1, 5), limit=st.integers(1, 70))
def test_a_subsample_has_its_size_keeps_the_order_and_sees_the_categories(
    count: int, categories: int, limit: int
) -> None:
    prompts = made(count, categories)
    chosen = spread(prompts, limit)
    assert len(chosen) == min(limit, count)
    assert [int(p.id) for p in chosen] == sorted({int(p.id) for p in chosen})
    known = {p.category for p in prompts}
    assert len({p.category for p in chosen}) == min(limit, len(known))


@given(count=st.integers(2, 60))
def test_a_larger_limit_keeps_what_a_smaller_one_chose(count: int) -> None:
    prompts = made(count, 3)
    for limit in range(1, count):
        assert set(spread(prompts, limit)) < set(spread(prompts, limit + 1))


def test_a_subsample_is_spread_over_the_set_and_not_its_beginning() -> None:
    chosen = [int(prompt.id) for prompt in spread(made(32), 4)]
    assert chosen == [0, 8, 16, 24]

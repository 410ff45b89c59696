"""Prompt sets: what ships, every format of docs/prompts.md, damage, and generated files."""

import csv
import gzip
import io
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from runs import outcome_of

from harness.cli import compose
from harness.config import PromptsConf, checked
from harness.prompts import (
    available,
    available_sets,
    load,
    prompt_set_hash,
    read_file,
    readers,
    spread,
)
from harness.records import Prompt, UserError

DOCS = Path(__file__).parent.parent / "docs" / "prompts.md"
EXAMPLES = dict(re.findall(r"`([\w.]+)`:\s+```\w+\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL))
Read = tuple[str, str, str | None, tuple[str, ...], tuple[str | None, ...]]

# Of each example: set, id, system, turns, answers
FORMATS: dict[str, list[Read]] = {
    "messages.jsonl": [
        ("messages", "messages-01", "Be brief.", ("What is 2 + 2?", "And doubled?"), ("4.",))
    ],
    "sharegpt.json": [
        ("sharegpt", "QWJhYvA_0", None, ("Name a river.", "Where is it?"), ("The Rhine.",))
    ],
    "mt_bench.jsonl": [
        ("writing", "81", None, ("Write a haiku about snow.", "Rewrite it about sand."), (None,))
    ],
    "gsm8k.jsonl": [
        ("gsm8k", "gsm8k-01", None, ("Anna has 3 apples and buys 2. How many has she?",), ())
    ],
    "humaneval.jsonl": [("humaneval", "HumanEval/0", None, ("def add(a, b):\n",), ())],
    "alpaca.json": [
        ("alpaca", "alpaca-01", None, ("Sort these numbers.\n\n3, 1, 2",), ()),
        ("alpaca", "alpaca-02", None, ("Name a colour.",), ()),
    ],
    "text.jsonl": [("text", "text-01", None, ("Once upon a time",), ())],
    "custom.jsonl": [("custom", "custom-01", None, ("What is the capital of India?",), ())],
    "tools.jsonl": [("tools", "tools-01", None, ("Is it warm in Bern?",), ())],
    "batch.jsonl": [
        ("batch", "request-1", "Be brief.", ("Name a river.",), ()),
        ("batch", "request-2", None, ("Once upon a time",), ()),
    ],
    "object.json": [
        ("object", "object-01", None, ("Count to ten.",), ()),
        ("object", "object-02", None, ("Count to five.",), ()),
    ],
    "table.csv": [
        ("code", "a", None, ("Write a loop, please.",), ()),
        ("facts", "b", None, ("What is the capital of France?",), ()),
    ],
    "lines.txt": [
        ("lines", "lines-01", None, ("Write a poem about rain.",), ()),
        ("lines", "lines-02", None, ("Explain what a cache is.",), ()),
    ],
}


def as_read(prompts: tuple[Prompt, ...]) -> list[Read]:
    return [(p.prompt_set, p.id, p.system, p.turns, p.answers) for p in prompts]


def own(path: Path | str) -> PromptsConf:
    return PromptsConf(sets=[], files=[str(path)])


def refused(path: Path) -> str:
    """The one line that refuses a file."""
    with pytest.raises(UserError) as error:
        load(own(path))
    assert "\n" not in str(error.value)
    return str(error.value)


def made(count: int, categories: int = 1) -> list[Prompt]:
    return [Prompt("set", str(n), ("text",), f"c{n * categories // count}") for n in range(count)]


# What ships, and how much of it is taken


def test_the_shipped_sets_are_large_enough_and_a_limit_sees_every_category() -> None:
    both = ["easy", "hard"]
    everything, few = load(PromptsConf(both)), load(PromptsConf(both, limit=8))
    assert {"easy", "hard"} <= set(available_sets())
    assert len({(prompt.prompt_set, prompt.id) for prompt in everything}) == len(everything)
    assert len({prompt.turns for prompt in everything}) == len(everything)
    for name in ("easy", "hard"):
        all_of, some_of = ([p for p in ps if p.prompt_set == name] for ps in (everything, few))
        assert (len(all_of), len(some_of)) == (64, 8)
        assert {p.category for p in some_of} == {p.category for p in all_of}
    assert [int(prompt.id) for prompt in spread(made(32), 4)] == [0, 8, 16, 24]
    for conf, said in (
        (PromptsConf(sets=["medium"]), "no set 'medium'; there are easy, hard"),
        (PromptsConf(both, weights={"code": 1.0}), "prompts.weights: no prompt set 'code'"),
        (
            PromptsConf(both, weights={"easy": 1.0}),
            "prompts.weights: no weight for prompt set 'hard'",
        ),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            load(conf)


def test_own_files_are_taken_whole_unless_a_number_limits_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.jsonl"
    rows = (json.dumps({"prompt": f"text {n}", "category": "ab"[n % 2]}) for n in range(40))
    file.write_text("\n".join(rows))
    words = [f"prompts.files=[{file}]", "prompts.sets=[easy]"]
    whole = compose("audition", words).prompts
    assert Counter(p.prompt_set for p in load(whole)) == {"easy": 16, "a": 20, "b": 20}
    words.append("prompts.limit=8")
    limited = compose("audition", words).prompts
    assert Counter(p.prompt_set for p in load(limited)) == {"easy": 8, "a": 8, "b": 8}
    assert available(limited) == {"easy": available(whole)["easy"], "a": 20, "b": 20}
    outcome_of("audition", *words, "dry_run=true")
    assert re.search(r"prompt set a +8 of 20 prompts \(prompts.limit\)", capsys.readouterr().out)
    one = ["prompts.sets=[easy]", "prompts.limit=1", "dry_run=true"]
    outcome_of("sweep", *one)
    assert "1 prompts" not in capsys.readouterr().out


@given(count=st.integers(1, 60), categories=st.integers(1, 5), limit=st.integers(1, 70))
def test_a_subsample_keeps_the_order_the_categories_and_what_a_smaller_one_chose(
    count: int, categories: int, limit: int
) -> None:
    prompts = made(count, categories)
    chosen = spread(prompts, limit)
    assert len(chosen) == min(limit, count)
    assert [int(p.id) for p in chosen] == sorted({int(p.id) for p in chosen})
    assert set(chosen) <= set(spread(prompts, limit + 1))
    known = {p.category for p in prompts}
    assert len({p.category for p in chosen}) == min(limit, len(known))


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


# Formats


def test_every_format_of_the_page_has_an_example_and_every_example_a_test() -> None:
    assert set(EXAMPLES) == set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read_as_its_page_says(name: str, tmp_path: Path) -> None:
    """As it is, compressed, and from jsonl as a list and a table too."""
    file, stem = tmp_path / name, Path(name).stem
    file.write_text(EXAMPLES[name], encoding="utf-8")
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(EXAMPLES[name].encode()))
    files = [file, tmp_path / f"{name}.gz"]
    if name.endswith("jsonl"):
        entries = [json.loads(line) for line in EXAMPLES[name].splitlines()]
        files += [tmp_path / f"{stem}.parquet", tmp_path / f"{stem}.json"]
        pd.DataFrame(entries).to_parquet(files[-2])
        files[-1].write_text(json.dumps(entries), encoding="utf-8")
    for written in files:
        assert as_read(read_file(written)) == FORMATS[name]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (
            "mine.jsonl",
            '{"prompt": "one"}\n\n{"prompt": "two", "category": "code", "id": "second"}\n'
            '{"turns": ["three", "four"], "id": 7}',
            [("mine", "mine-01", ("one",)), ("mine", "7", ("three", "four")),
             ("code", "second", ("two",))],
        ),
        ("a.jsonl", '{"conversations": [{"from": "gpt", "value": "the end"}, {"from": "human", '
         '"value": "Hi"}, {"from": "gpt", "value": "Hello"}]}', [("a", "a-01", ("Hi",))]),
        ("mt.csv", 'question_id,turns\n81,"[""one"", ""two""]"\n', [("mt", "81", ("one", "two"))]),
        ("u.jsonl", '{"prompt": "be\u2028fore\x85end"}', [("u", "u-01", ("be\u2028fore\x85end",))]),
        ("n.json", '{"prompt": "one"}\n\n{"prompt": "two", "id": 7}\n',
         [("n", "n-01", ("one",)), ("n", "7", ("two",))]),
        ("t.json", '"one"\n"two"', [("t", "t-01", ("one",)), ("t", "t-02", ("two",))]),
        ("l.jsonl", ' [{"prompt": "one"},\n {"prompt": "two"}]\n',
         [("l", "l-01", ("one",)), ("l", "l-02", ("two",))]),
        ("o.jsonl", '{\n "data": [\n  {"prompt": "one"}\n ]\n}\n', [("o", "o-01", ("one",))]),
        ("r.jsonl", '{"conversations": [{"role": "user", "value": "Hi"}]}\n'
         '{"messages": [{"from": "human", "content": "Ho", "role": null}]}',
         [("r", "r-01", ("Hi",)), ("r", "r-02", ("Ho",))]),
        ("w.jsonl", '\ufeff{"prompt": "one"}\r\n{"prompt": "two"}\r\n',
         [("w", "w-01", ("one",)), ("w", "w-02", ("two",))]),
    ],
)  # fmt: skip
def test_files_as_users_have_them(
    name: str, content: str, expected: list[tuple[str, str, tuple[str, ...]]], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content.encode())
    assert [(p.prompt_set, p.id, p.turns) for p in load(own(tmp_path / name))] == expected


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "json", "parquet"])
def test_numbers_and_empty_cells_are_alike_in_every_kind_of_table(
    suffix: str, tmp_path: Path
) -> None:
    """A level of 1 to 5, as MATH has it, and ids that some rows lack; floats are their text."""
    table = pd.DataFrame(
        {
            "id": [7, None, 9, None],
            "question_id": ["a", "", "c", "d"],
            "category": [4, 5, None, 4],
            "prompt": ["one", "two", "three", "four"],
        }
    )
    file = tmp_path / f"table.{suffix}"
    if suffix == "csv":
        table.to_csv(file, index=False)
    elif suffix == "parquet":
        table.to_parquet(file)
    else:
        rows = [dict(zip(table, row, strict=True)) for row in table.itertuples(index=False)]
        file.write_text(json.dumps(rows, allow_nan=True))
    ids = [(p.prompt_set, p.id) for p in read_file(file)]
    # A csv counts its header as a line
    assert ids == [
        ("4", "7"),
        ("5", f"table-0{3 if suffix == 'csv' else 2}"),
        ("table", "9"),
        ("4", "d"),
    ]


def test_a_file_of_answers_and_a_request_of_several_prompts_are_said_to_be_that(
    tmp_path: Path,
) -> None:
    answer = {"choices": [{"message": {"content": "Hi."}}], "usage": {"completion_tokens": 1}}
    batch = {"custom_id": "a", "response": {"status_code": 200, "body": answer}, "error": None}
    for entry, says in (
        (answer, "line 1: an answer of a server, without its request"),
        (batch, "line 1: an answer of a server, without its request"),
        ({"body": {"prompt": ["a", "b"]}}, "line 1: a request with several prompts"),
        ({"body": {"model": "m"}}, "line 1: no prompt in it, found 'model'"),
    ):
        (tmp_path / "a.jsonl").write_text(json.dumps(entry))
        assert says in refused(tmp_path / "a.jsonl")


def test_a_file_is_read_again_only_when_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, reads, read = tmp_path / "a.txt", [], read_file
    file.write_text("one")
    monkeypatch.setattr(
        "harness.prompts.read_file", lambda *args, **more: reads.append(1) or read(*args, **more)
    )
    assert load(own(file)) == load(own(file))
    file.write_text("another")
    assert load(own(file))[0].turns == ("another",)
    assert len(reads) == 2


def test_unusable_entries_are_skipped_where_asked_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    talks: list[Any] = [{"conversations": [{"from": "human", "value": f"{n}?"}]} for n in range(3)]
    talks[1:1] = [{"conversations": []}, {"conversations": [{"from": "human", "value": ""}]}]
    file = tmp_path / "dump.json"
    file.write_text(json.dumps(talks), encoding="utf-8")
    conf = PromptsConf(sets=[], files=[str(file)])
    with pytest.raises(UserError, match="entry 2: conversations must be a list"):
        load(conf)
    conf.skip_unusable = True
    assert [(p.id, p.turns) for p in load(conf)] == [
        ("dump-01", ("0?",)),
        ("dump-04", ("1?",)),
        ("dump-05", ("2?",)),
    ]
    load(conf)
    (said,) = caplog.messages
    assert f"{file}: 2 of 5 entries skipped; " in said
    assert "entry 2" in said
    file.write_text(json.dumps(talks[:3]), encoding="utf-8")
    with pytest.raises(UserError, match=r"2 of 3 entries are unusable.*entry 2"):
        load(conf)


def test_files_of_one_stem_are_kept_apart_by_their_folders_and_only_those(tmp_path: Path) -> None:
    files = [tmp_path / "a" / "mine.jsonl", tmp_path / "b" / "mine.jsonl", tmp_path / "own.txt"]
    files += [tmp_path / "c" / "easy.txt", tmp_path / "d" / "two.txt", tmp_path / "d" / "two.csv"]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text({".jsonl": '{"prompt": "x"}', ".csv": "prompt\nx"}.get(file.suffix, "x"))
    prompts = load(PromptsConf(sets=["easy"], files=[str(file) for file in files]))
    named = {prompt.prompt_set: prompt.id for prompt in prompts if prompt.turns == ("x",)}
    assert named == {
        "a/mine": "a/mine-01",
        "b/mine": "b/mine-01",
        "own": "own-01",
        "c/easy": "c/easy-01",
        "two.txt": "two.txt-01",
        "two.csv": "two.csv-02",
    }
    with pytest.raises(UserError, match="is listed twice"):
        load(PromptsConf(sets=[], files=[str(files[2]), f"{tmp_path}/./own.txt"]))


def test_a_small_limit_takes_the_prompts_that_it_took_of_sets_of_32() -> None:
    for name in ("easy", "hard"):
        kept = load(PromptsConf([name]))
        before = [prompt for prompt in kept if int(prompt.id.rpartition("-")[2]) <= 32]
        for limit in (1, 8, 16):
            assert load(PromptsConf([name], limit=limit)) == spread(before, limit)


def test_own_files_replace_the_shipped_sets_and_are_kept_apart_where_both_are_used(
    tmp_path: Path,
) -> None:
    mine, easy = tmp_path / "mine.jsonl", tmp_path / "easy.jsonl"
    mine.write_text('{"prompt": "one", "category": "easy"}\n{"prompt": "two", "category": "b"}\n')
    easy.write_text('{"prompt": "three"}\n')
    files = [str(mine), str(easy)]
    alone = load(checked(PromptsConf(files=files)))
    assert {p.prompt_set for p in alone} == {"easy", "b"}, "no shipped set to be taken for"
    assert len(alone) == 3
    both = load(checked(PromptsConf(files=files, sets=["easy"], limit=2)))
    names = Counter(prompt.prompt_set for prompt in both)
    assert names == {"easy": 2, "mine/easy": 1, "b": 1, f"{tmp_path.name}/easy": 1}
    shipped = load(PromptsConf(["easy"], limit=2))
    assert [p for p in both if p.prompt_set == "easy"] == list(shipped)


def test_a_limit_on_turns_and_a_system_message_are_for_every_conversation(tmp_path: Path) -> None:
    for name in ("messages.jsonl", "mt_bench.jsonl"):
        (tmp_path / name).write_text(EXAMPLES[name], encoding="utf-8")
    files = [str(tmp_path / name) for name in ("messages.jsonl", "mt_bench.jsonl")]
    given_, without = load(PromptsConf(sets=[], files=files, system="Rhyme.", max_turns=1))
    assert (given_.system, given_.turns) == ("Be brief.", ("What is 2 + 2?",))
    assert (without.system, len(without.turns)) == ("Rhyme.", 1)


def test_both_thinking_modes_are_two_prompt_sets() -> None:
    for modes, expected in (
        ([False, True], [("easy", False), ("easy+thinking", True)]),
        (True, [("easy", True)]),
    ):
        prompts = load(PromptsConf(sets=["easy"], limit=1, enable_thinking=modes))
        assert [(p.prompt_set, p.thinking) for p in prompts] == expected
    for wrong in ([], "yes", [True, True], 1, [[True]]):
        with pytest.raises(UserError, match="enable_thinking"):
            checked(PromptsConf(enable_thinking=wrong))


# Damage


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{prompt: one}", "not JSON"),
        ('"just text"', "not a JSON object"),
        ('{"words": "one", "n": 1}', "no prompt in it, found 'words', 'n'; read are messages"),
        ("{}", "no prompt in it, found nothing"),
        ('{"prompt": "a", "turns": ["b"]}', "either prompt or turns"),
        ('{"prompt": 3}', "must be text, not 3"),
        ('{"prompt": ""}', "an empty prompt"),
        ('{"turns": "one"}', "at least one text"),
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
        ('{"conversations": [{"from": "gpt", "value": "a"}]}', "no message with role user"),
        ('{"instruction": "a", "input": 3}', "input must be text, not 3"),
        ('{"prompt": "a\\u0000b"}', "a NUL character"),
        ('{"prompt": "a\\ud800b"}', "half a surrogate pair"),
        ('{"prompt": "a\x00b"}', "not JSON"),
        ('{"prompt": "a", "id": "' + "7" * 5000 + '"}', "id has 5,000 characters"),
        ('{"prompt": "a", "id": ' + "7" * 5000 + "}", "not JSON (Exceeds the limit"),
        ('{"prompt": "a", "id": "a\\nb"}', "cannot be printed"),
        ('{"prompt": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}", "not JSON (maximum rec"),
        (
            '{"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"]}',
            "SPEED-Bench's placeholder",
        ),
        ('{"prompt": "a", "category": true}', "category must be a text or a number, not True"),
    ],
)
def test_a_bad_line_is_refused_with_its_number_and_the_reason(
    line: str, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(f'{{"prompt": "a good one"}}\n{line}', encoding="utf-8")
    text = refused(file)
    assert text.startswith(f"{file}, line 2: ")
    assert says in text


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        *((f"a.{kind}", b"", "a.") for kind in ("jsonl", "json", "csv", "txt", "tsv", "jsonl.gz")),
        ("a.parquet", b"", "not a parquet file"),
        ("a.jsonl.gz", b"not compressed", "cannot read"),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "a"}' * 99, mtime=0)[:-20], "cannot read"),
        ("a.parquet", b"PAR1 and no more PAR1", "damaged, or not a parquet file"),
        ("a.csv", b'prompt,id\n"never closed,1\n', "cannot read"),
        ("a.csv", b"prompt,id\na,1,2\n", "line 2: 3 cells under 2 columns"),
        ("a.csv", b"words,id\na,1\n", "its header has 'words', 'id'"),
        ("a.csv", b"prompt,prompt\na,b\n", "'prompt' twice"),
        ("a.csv", b"prompt,id\n,1\n", "an empty prompt"),
        ("a.csv", b"prompt\na\x00b\n", "a NUL character"),
        ("a.csv", b"turns\nnot json\n", "column turns: not JSON"),
        ("a.txt", b"one\ntw\x00o\n", "line 2: prompt holds a NUL character"),
        ("a.txt", "one".encode("utf-16"), "not UTF-8"),
        ("a.json", b'{"a": [], "b": []}', "an object with 2 lists"),
        ("a.json", b'{"data": [3]}', "entry 1: not an object"),
        ("a.json", b'[{"prompt": ["a", []]}]', "must be text, not a list"),
        ("a.jsonl", b"\n  \n", "no prompts in it"),
        ("a.jsonl", b"\xff\xfe\x00", "it is not UTF-8 text"),
    ],
)
def test_an_empty_or_damaged_file_is_one_line(
    name: str, content: bytes, says: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    text = refused(tmp_path / name)
    assert says in text
    assert str(tmp_path / name) in text


def test_flipped_bytes_of_parquet_and_gzip_are_one_line_or_whole_prompts(tmp_path: Path) -> None:
    entries = [{"prompt": f"prompt number {n}", "id": str(n)} for n in range(200)]
    pd.DataFrame(entries).to_parquet(tmp_path / "a.parquet")
    text = "\n".join(map(json.dumps, entries))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    dice = random.Random(1)
    for name in ("a.parquet", "a.jsonl.gz"):
        content = (tmp_path / name).read_bytes()
        for _ in range(60):
            damaged = bytearray(content)
            damaged[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
            (tmp_path / f"b{name[1:]}").write_bytes(damaged)
            try:
                assert_sound(load(own(tmp_path / f"b{name[1:]}")))
            except UserError as error:
                assert_plain(str(error))


def test_a_source_beyond_the_bounds_is_refused_and_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MAX_CHARACTERS", 5000)
    monkeypatch.setattr(readers, "MAX_LINE", 1000)
    monkeypatch.setattr(readers, "MAX_PROMPTS", 50)
    bomb = gzip.compress(b"a" * 50_000_000)
    many = [{"prompt": "a"}] * 51
    contents: dict[str, bytes] = {
        "line.txt.gz": bomb,
        "line.jsonl.gz": bomb,
        "line.json.gz": bomb,
        "long.txt": b"a" * 900 + b"\n" + (b"b" * 900 + b"\n") * 6,
        "many.jsonl": "\n".join(map(json.dumps, many)).encode(),
        "wide.csv": b"prompt\n" + b"a" * 2000,
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        assert re.search(r"longer than|more than", refused(tmp_path / name)), name
    pd.DataFrame(many).to_parquet(tmp_path / "many.parquet")
    assert "51 rows" in refused(tmp_path / "many.parquet")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    assert "it is not a file" in refused(tmp_path)
    assert "not a file" in refused(Path("/dev/zero"))
    for odd in ("a\0b.jsonl", "a\nb.jsonl", "a\ud800.jsonl"):
        with pytest.raises(UserError, match="not printable"):
            load(PromptsConf(sets=[], files=[odd]))
    with pytest.raises(UserError, match="cannot read"):
        load(PromptsConf(sets=[], files=["a" * 5000]))


def test_ids_are_unique_in_a_set_those_of_later_turns_included(tmp_path: Path) -> None:
    for other, said in (
        ('{"prompt": "b", "id": "x"}', "id 'x' occurs twice in set 'mine'"),
        ('{"prompt": "b", "id": "x/2"}', "id 'x/2' occurs twice in set 'mine'"),
        ('{"prompt": "b", "id": "x", "category": "other"}', None),
    ):
        (tmp_path / "mine.jsonl").write_text(f'{{"turns": ["a", "c"], "id": "x"}}\n{other}')
        if said is None:
            assert len(load(own(tmp_path / "mine.jsonl"))) == 2
        else:
            line = refused(tmp_path / "mine.jsonl")
            assert said in line
            assert "mine.jsonl, line 2: " in line
            assert "mine.jsonl, line 1;" in line


def test_an_id_of_two_files_is_no_error_where_they_share_a_category(tmp_path: Path) -> None:
    """Files that number their prompts each from 1; one file must still do so once."""
    files = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    for file, text in zip(files, "ab", strict=True):
        file.write_text(f'{{"prompt": "{text}", "id": 1, "category": "code"}}\n')
    conf = PromptsConf(sets=[], files=[str(file) for file in files])
    assert [(p.prompt_set, p.id) for p in load(conf)] == [("code", "1"), ("code", "second/1")]
    files[1].write_text('{"prompt": "b", "id": 1, "category": "code"}\n' * 2)
    with pytest.raises(UserError, match="id 'second/1' occurs twice in set 'code'"):
        load(conf)


# The hub


class Rows(list[dict[str, Any]]):
    """A split, as the datasets library gives it."""

    @property
    def column_names(self) -> list[str]:
        return list(self[0])

    def select_columns(self, names: list[str]) -> "Rows":
        return Rows({name: row[name] for name in names} for row in self)


def stub(monkeypatch: pytest.MonkeyPatch, loads: Callable[..., Any]) -> None:
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=loads))


def test_a_hub_data_set_is_read_with_subset_split_and_column(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Any, ...]] = []
    rows = Rows({"n": n, "question": f"q{n}", "body": f"b{n}"} for n in range(3))

    def loads(name: str, subset: str | None, split: str | None) -> Any:
        asked.append((name, subset, split))
        return {"train": rows, "test": rows} if split is None else rows

    stub(monkeypatch, loads)
    conf = PromptsConf(sets=[], hub="openai/gsm8k", hub_subset="main", hub_split="test[:3]")
    rows_read = load(conf)
    assert asked == [("openai/gsm8k", "main", "test[:3]")]
    assert [(p.prompt_set, p.id, p.turns) for p in rows_read] == [
        ("gsm8k", f"gsm8k-0{n + 1}", (f"q{n}",)) for n in range(3)
    ]
    column = load(PromptsConf(sets=[], hub="openai/gsm8k", hub_split="test", hub_column="body"))
    assert [p.turns for p in column] == [("b0",), ("b1",), ("b2",)]
    for conf, says in (
        (PromptsConf(sets=[], hub="a/b"), "prompts.hub_split, one of 'train', 'test'"),
        (PromptsConf(sets=[], hub="a/b", hub_split="x", hub_column="c"), "one of 'n', 'question'"),
        (PromptsConf(sets=[], hub="a/b", hub_split="x", hub_column="n"), "row 1: prompt must be"),
    ):
        with pytest.raises(UserError, match=re.escape(says)):
            load(conf)


def test_an_unreachable_hub_and_an_absent_library_are_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loads(*_: Any, **__: Any) -> Any:
        raise ConnectionError("Couldn't reach 'a/b' on the Hub (LocalEntryNotFoundError)\nmore")

    stub(monkeypatch, loads)
    with pytest.raises(UserError) as error:
        load(PromptsConf(sets=[], hub="a/b"))
    assert "prompts.hub=a/b: cannot be loaded (Couldn't reach 'a/b' on the Hub more)" in str(
        error.value
    )
    assert_plain(str(error.value))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'speculation-harness\[datasets\]'"):
        load(PromptsConf(sets=[], hub="a/b"))


# Generated files: nothing raises but one clear line, and nothing senseless is accepted

TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["a prompt", "", " ", "\n", "\0", "\ud800", "ünï \u2028", "x, y\t'z'", "x" * 300]
    ),
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=True), TEXTS, st.just(10**5000)
)
ROLES = st.sampled_from(["user", "human", "assistant", "gpt", "system", "tool", "", "User", 3])
MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": ROLES, "content": st.one_of(TEXTS, SCALARS)}),
    st.fixed_dictionaries({"from": st.sampled_from(["human", "gpt"]), "value": TEXTS}),
    TEXTS,
)
LISTED = st.one_of(st.lists(MESSAGE, max_size=5), st.lists(TEXTS, min_size=1, max_size=3))
FIELDS = ("messages", "conversations", "conversation", "turns", "prompt", "question", "instruction",
          "text", "input", "id", "question_id", "task_id", "category", "other")  # fmt: skip
# Entries as users have them, a little wrong at most, and any others
USUAL = st.one_of(
    st.fixed_dictionaries({"prompt": TEXTS}, optional={"id": SCALARS, "category": TEXTS}),
    st.fixed_dictionaries({"instruction": TEXTS, "input": TEXTS, "text": TEXTS}),
    *(st.fixed_dictionaries({name: LISTED}, optional={"id": SCALARS}) for name in FIELDS[:4]),
)
UNUSUAL = st.one_of(
    st.dictionaries(st.sampled_from(FIELDS), st.one_of(SCALARS, LISTED), max_size=4),
    SCALARS,
    LISTED,
)
ENTRIES = st.one_of(
    st.lists(USUAL, min_size=1, max_size=4), st.lists(st.one_of(USUAL, UNUSUAL), max_size=4)
)
SUFFIXES = st.sampled_from(["jsonl", "json", "csv", "tsv", "txt", "parquet", "jsonl.gz", "csv.gz"])
DAMAGE = st.none() | st.none() | st.tuples(st.integers(0, 10**6), st.integers(0, 255))
SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
NAMES = re.compile(r"Traceback|\b\w+(Error|Exception)\b")


def assert_plain(text: str) -> None:
    assert "\n" not in text
    assert len(text) < 1500
    assert not NAMES.search(text), text


def assert_sound(prompts: tuple[Prompt, ...]) -> None:
    """Every accepted prompt is text that can be generated from, in an order that makes sense."""
    assert prompts
    seen = [(p.prompt_set, p.id) for p in prompts]
    assert len(set(seen)) == len(seen)
    for prompt in prompts:
        texts = [*prompt.turns, *filter(None, prompt.answers), *filter(None, [prompt.system])]
        assert prompt.turns
        assert all(text.strip() and "\0" not in text and text.encode() for text in texts)
        assert len(prompt.answers) == len(prompt.turns) - 1
        assert prompt.id.isprintable()
        assert prompt.prompt_set.isprintable()


def encoded(entries: list[Any], suffix: str) -> bytes:
    """Entries as a file of a format, whether they suit it or not."""
    kind = suffix.removesuffix(".gz")
    previous = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        if kind == "json":
            text = json.dumps(entries)
        elif kind in ("csv", "tsv"):
            buffer = io.StringIO()
            rows = [entry for entry in entries if isinstance(entry, dict)]
            names = list(dict.fromkeys(name for row in rows for name in row))
            writer = csv.writer(buffer, delimiter="," if kind == "csv" else "\t", escapechar="\\")
            writer.writerow(names)
            for row in rows:
                cells = (row.get(name) for name in names)
                writer.writerow([c if isinstance(c, str) else json.dumps(c) for c in cells])
            text = buffer.getvalue()
        elif kind == "txt":
            text = "\n".join(str(entry) for entry in entries)
        else:
            text = "\n".join(json.dumps(entry) for entry in entries)
    finally:
        sys.set_int_max_str_digits(previous)
    content = text.encode("utf-8", "surrogatepass")
    return gzip.compress(content) if suffix.endswith(".gz") else content


def write_generated(path: Path, entries: list[Any], suffix: str) -> None:
    """The entries in a file; as jsonl bytes under the suffix parquet where they are no table."""
    if suffix == "parquet":
        try:
            pd.DataFrame([entry for entry in entries if isinstance(entry, dict)]).to_parquet(path)
            return
        except Exception:  # pyarrow refuses it in many ways; what is left is a damaged file
            suffix = "jsonl"
    path.write_bytes(encoded(entries, suffix))


@pytest.mark.parametrize("examples", [150, pytest.param(2500, marks=pytest.mark.exhaustive)])
def test_a_generated_file_gives_sound_prompts_or_one_line(examples: int, tmp_path: Path) -> None:
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=SLOW)
    @given(ENTRIES, SUFFIXES, DAMAGE)
    def one(entries: list[Any], suffix: str, damage: tuple[int, int] | None) -> None:
        path = tmp_path / f"made.{suffix}"
        write_generated(path, entries, suffix)
        if damage is not None and (content := bytearray(path.read_bytes())):
            content[damage[0] % len(content)] = damage[1]
            path.write_bytes(content)
        try:
            prompts = load(PromptsConf(sets=[], files=[str(path)], limit=3))
        except UserError as error:
            event("refused")
            assert_plain(str(error))
        else:
            event("accepted")
            assert_sound(prompts)

    one()

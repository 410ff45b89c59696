"""Conversations run turn by turn: whose answers they continue, and how statistics take them."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import qwen3, save
from runs import outcome_of, ran

from harness import reporting
from harness.analysis import analyse
from harness.analysis.cells import per_prompt
from harness.analysis.verdict import evidence_from_trials
from harness.cli import draft_conf
from harness.commands import requests
from harness.config import ModelConf, PromptsConf
from harness.models.load import LoadedModel
from harness.models.load import load as load_model
from harness.models.tokenizer import encode
from harness.prompts import prompt_set_hash, read_file
from harness.records import Prompt, Trial, UserError
from harness.storage import RunFolder, StoredRun, load

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("few_samples")
GIVEN = [
    {"role": "user", "content": "What is the capital of Italy?"},
    {"role": "assistant", "content": "Rome."},
    {"role": "user", "content": "And of Spain?"},
]
TALKS = [
    {"id": "a", "turns": ["What is the capital of France?", "And of Spain?", "Count to 5."]},
    {"id": "b", "turns": ["Count from 12 to 20.", "Now to 30."]},
    {"id": "given", "messages": GIVEN},
    {"id": "single", "prompt": "Name a colour."},
]
TURNS = ["a", "a/2", "a/3", "b", "b/2", "given", "given/2", "single"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if enable_thinking %}<think>{% endif %}"
)


def words(root: Path, *more: str) -> list[str]:
    file = root / "talks.jsonl"
    file.write_text("\n".join(map(json.dumps, TALKS)), encoding="utf-8")
    return [
        f"results_root={root}/results",
        *("prompts.sets=[]", f"prompts.files=[{file}]", "prompts.limit=null"),
        *("temperature=[0,1]", "new_tokens=8", "threads=1", "k=[2]"),
        *more,
    ]


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is looked at once, with `swept`."""
    for name in ("render", "show"):
        monkeypatch.setattr(reporting, name, lambda *_, **__: None)


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model(draft_conf("tiny"), CPU)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    root = tmp_path_factory.mktemp("swept")
    return ran("sweep", *words(root, "until=all"))


def answers_of(run: StoredRun) -> dict[str, Trial]:
    return {trial.prompt: trial for trial in RunFolder(run.folder, run.manifest).answers.read()}


def test_every_turn_is_a_prompt_of_its_own_in_every_cell(swept: StoredRun) -> None:
    for temperature in (0.0, 1.0):
        for k in (0, 2):
            of_cell = [t for t in swept.trials if (t.temperature, t.k) == (temperature, k)]
            assert [t.prompt for t in sorted(of_cell, key=lambda t: t.prompt)] == TURNS
    assert {t.prompt: (t.conversation, t.turn) for t in swept.trials}["a/3"] == ("a", 3)


def test_a_turn_continues_the_greedy_targets_own_answers_in_every_cell(
    swept: StoredRun, tiny: LoadedModel
) -> None:
    answers = answers_of(swept)
    assert sorted(answers) == ["a", "a/2", "b"]
    plain = {t.prompt: t.tokens for t in swept.trials if (t.temperature, t.k) == (0.0, 0)}
    assert all(answers[name].tokens == plain[name] for name in answers)
    first, second = (
        tiny.tokenizer.decode(answers[name].tokens, skip_special_tokens=True)
        for name in ("a", "a/2")
    )
    turns = TALKS[0]["turns"]
    conversation = "\n\n".join([turns[0], first, turns[1], second, turns[2]])
    expected = len(tiny.tokenizer(conversation)["input_ids"])
    assert {t.prompt_tokens for t in swept.trials if t.prompt == "a/3"} == {expected}
    # Answers that are given are used as they are
    expected = len(tiny.tokenizer("\n\n".join(m["content"] for m in GIVEN))["input_ids"])
    assert {t.prompt_tokens for t in swept.trials if t.prompt == "given/2"} == {expected}


def test_results_and_manifest_count_conversations(swept: StoredRun) -> None:
    assert (swept.results.prompts == 4).all()
    assert swept.manifest.prompts == {"talks": 4}
    assert "talks" in (swept.folder / "report.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("unrendered")
def test_a_resumed_run_asks_for_no_answer_again(
    swept: StoredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    generate = requests.generate_texts

    def counted(model: Any, requests: Any, **more: Any) -> Any:
        asked.append(len(requests))
        return generate(model, requests, **more)

    monkeypatch.setattr(requests, "generate_texts", counted)
    lines = (swept.folder / "answers.jsonl").read_bytes()
    again = [*words(swept.folder.parent.parent, "until=all"), f"resume={swept.folder}"]
    outcome_of("sweep", *again)
    assert asked == []
    # A run that was killed while it stored the second answer has lost that one and no other
    first = lines.index(b"\n") + 1
    (swept.folder / "answers.jsonl").write_bytes(lines[: first + 40])
    outcome_of("sweep", *again)
    assert (swept.folder / "answers.jsonl").read_bytes().count(b"\n") == 3
    assert sum(asked) == 2
    assert load(swept.folder).trials == swept.trials


@pytest.mark.exhaustive
@pytest.mark.usefixtures("unrendered")
def test_an_audition_scores_every_draft_on_the_same_conversations(tmp_path: Path) -> None:
    drafts = "drafts=[tiny_good,ngram]"
    asked = words(tmp_path, drafts, "temperature=[0]")
    run = ran("audition", *asked)
    assert (run.results[run.results.source == "replayed"].prompts == 4).all()
    assert len(answers_of(run)) == 3
    # The same texts elsewhere continue the same answers
    more = [f"traces_from={run.folder}", "latency.measure=true"]
    other = ran("audition", *asked, *more)
    assert answers_of(other) == answers_of(run)
    assert other.trials == run.trials


@pytest.mark.exhaustive
@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("command", ["profile", "snapshot"])
def test_profile_and_snapshot_run_every_turn(command: str, tmp_path: Path) -> None:
    settings = [word for word in words(tmp_path) if not word.startswith("temperature")]
    if command == "profile":
        settings += ["contexts=[16]", "batches=[1]"]
    assert {trial.prompt for trial in ran(command, *settings).trials} == set(TURNS)


@pytest.mark.parametrize("command", ["sweep", "audition", "profile", "snapshot"])
def test_a_dry_run_counts_turns_and_answers(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [*words(tmp_path, "dry_run=true")]
    if command == "profile":
        settings = [word for word in settings if not word.startswith("temperature")]
    outcome_of(command, *settings)
    shown = " ".join(capsys.readouterr().out.split())
    assert "8, one generation for each" in shown
    assert "3 by the target, 8 tokens at most" in shown


def test_a_conversation_beyond_the_context_is_refused_before_anything_is_generated(
    tmp_path: Path,
) -> None:
    settings = words(tmp_path, "new_tokens=600")
    with pytest.raises(UserError, match=r"prompt talks/a has \d+ tokens"):
        outcome_of("sweep", *settings)
    assert not (tmp_path / "results").exists()


def test_the_turns_of_a_conversation_are_one_prompt_to_the_statistics() -> None:
    def trial(prompt: str, turn: int, k: int, seconds: float) -> Trial:
        return Trial(
            f"{prompt}{k}", "s", prompt, 0, k, 0.0, None, "ok",
            new_tokens=4, decode_s=seconds, turn=turn,
        )  # fmt: skip

    # An id with a slash of its own is no turn, as HumanEval's are
    names = [("a", 1), ("a/2", 2), ("HumanEval/1", 1), ("HumanEval/2", 1)]
    trials = [trial(name, turn, k, 1.0 + k) for name, turn in names for k in (0, 1)]
    assert {key[1] for key in per_prompt(trials, [])} == {"a", "HumanEval/1", "HumanEval/2"}
    evidence = evidence_from_trials(trials, draft="d", temperature=0.0, times=None)
    assert [prompt for _, prompt in evidence.names] == ["HumanEval/1", "HumanEval/2", "a"]
    assert evidence.baseline.seconds.tolist() == [1.0, 1.0, 2.0]
    # A conversation of which a turn failed is not complete
    failed = [t for t in trials if (t.prompt, t.k) != ("a/2", 1)]
    part = evidence_from_trials(failed, draft="d", temperature=0.0, times=None)
    assert [prompt for _, prompt in part.names] == ["HumanEval/1", "HumanEval/2"]


# Encoding


def chatty_folder(root: Path, template: str = TEMPLATE) -> Path:
    folder = save(qwen3(), root / "chatty")
    (folder / "chat_template.jinja").write_text(template)
    return folder


def with_template(root: Path) -> list[str]:
    """Of a replayed sweep of a model that has a thinking mode, with itself."""
    folder = chatty_folder(root)
    return [f"model.id={folder}", f"draft.id={folder}", "model=hf", "draft=hf", "mode=replay"]


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = chatty_folder(tmp_path_factory.mktemp("models"))
    return load_model(ModelConf(name="chatty", id=str(folder)), CPU)


TALK = Prompt("s", "x/2", ("Hi", "Bye"), answers=("Yes",), system="Be brief.")


def test_a_chat_template_gets_system_turns_answers_and_thinking(chatty: LoadedModel) -> None:
    text = chatty.tokenizer.decode(encode(chatty.tokenizer, TALK, PromptsConf()))
    assert text == "<system>Be brief.<user>Hi<assistant>Yes<user>Bye<assistant>"
    thinking = Prompt("s", "x", ("Hi",), thinking=True)
    text = chatty.tokenizer.decode(encode(chatty.tokenizer, thinking, PromptsConf()))
    assert text == "<user>Hi<assistant><think>"


def test_tools_of_an_entry_go_through_the_chat_template(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "clock"}}]
    entries = [{"prompt": "Hi", "tools": tools}, {"prompt": "Hi", "tools": ["hammer"]}]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, entries)))
    offered, without = read_file(tmp_path / "mine.jsonl")
    assert prompt_set_hash([offered]) != prompt_set_hash([replace(offered, tools=None)])
    template = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + TEMPLATE
    folder = chatty_folder(tmp_path, template)
    tokenizer = load_model(ModelConf(name="chatty", id=str(folder)), CPU).tokenizer
    for prompt, text in ((offered, "[clock]<user>Hi<assistant>"), (without, "<user>Hi<assistant>")):
        assert tokenizer.decode(encode(tokenizer, prompt, PromptsConf())) == text


def test_a_system_message_without_a_template_is_refused(
    tiny: LoadedModel, chatty: LoadedModel, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"s/x/2: a system message .* has no template"):
        encode(tiny.tokenizer, TALK, PromptsConf())
    with pytest.raises(UserError, match=r"and prompts\.chat_template=never"):
        encode(chatty.tokenizer, TALK, PromptsConf(chat_template="never"))
    with pytest.raises(UserError, match=r"prompts\.system: a system message goes through the chat"):
        outcome_of("sweep", *words(tmp_path, "prompts.system=Rhyme."))


@pytest.mark.parametrize(
    ("template", "reason"),
    [("{{ raise_exception('no role') }}", "no role"), ("{{ 1 // 0 }}", ""), ("{% for %}", "")],
)
def test_a_template_that_raises_is_one_line(template: str, reason: str, tmp_path: Path) -> None:
    folder = chatty_folder(tmp_path, template)
    strict = load_model(ModelConf(name="strict", id=str(folder)), CPU)
    line = rf"prompt s/x/2: the chat template of .*chatty cannot render it \(.*{reason}.*=never"
    with pytest.raises(UserError, match=line) as raised:
        encode(strict.tokenizer, TALK, PromptsConf())
    assert "\n" not in str(raised.value)


ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% endfor %}"
) + TEMPLATE


def test_a_template_without_a_place_for_a_system_message_names_its_key(tmp_path: Path) -> None:
    folder = chatty_folder(tmp_path, ALTERNATING)
    tokenizer = load_model(ModelConf(name="strict", id=str(folder)), CPU).tokenizer
    assert encode(tokenizer, replace(TALK, system=None), PromptsConf())
    for conf, key in (
        (PromptsConf(system="Be brief."), r"prompts\.system"),
        (PromptsConf(), "prompt s/x/2"),
    ):
        line = rf"^{key}: the chat template of .* has no place for a system message \(.*alternate"
        with pytest.raises(UserError, match=line):
            encode(tokenizer, TALK, conf)


def test_a_thinking_mode_that_changes_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"prompts\.enable_thinking=\[False, True\]: the prompts"):
        outcome_of("sweep", *words(tmp_path, "prompts.enable_thinking=[false,true]"))


@pytest.mark.usefixtures("unrendered")
def test_both_thinking_modes_run_side_by_side(tmp_path: Path) -> None:
    settings = words(tmp_path, *with_template(tmp_path), "prompts.enable_thinking=[false,true]")
    run = ran("sweep", *settings, "prompts.weights={talks:1,talks+thinking:2}")
    assert "server_defaults" not in {caveat.code for caveat in analyse(run).caveats}
    lengths = {(t.prompt_set, t.prompt): t.prompt_tokens or 0 for t in run.trials}
    assert {name for name, _ in lengths} == {"talks", "talks+thinking"}
    assert lengths["talks+thinking", "a"] > lengths["talks", "a"]
    # Each mode continues the answers that it gave itself
    answers = RunFolder(run.folder, run.manifest).answers.read()
    assert Counter(t.prompt_set for t in answers) == {"talks": 3, "talks+thinking": 3}

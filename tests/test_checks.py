"""What is known before any weights are read: said at once, by a run and by its dry run alike."""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import change_special_tokens, qwen3, save, swap_tokens
from runs import FROZEN, assert_replay_is_exact, outcome_of, ran

from harness.cli import run_app
from harness.config import ModelConf
from harness.models.load import load
from harness.records import UserError

COMMANDS = ("sweep", "profile", "snapshot", "server", "audition")
THERE = "give one that is there, or a hub id"
TEXTS_FROM = "texts_from=http://127.0.0.1:9 latency.target_ms=10 latency.draft_ms=1"
TRACES_FROM = f"traces_from={FROZEN / 'audition'} prompts.limit=8"
SMALL = ("prompts.limit=1", "new_tokens=4", "k=[1]")


@pytest.fixture(params=["run", "dry run"])
def refused(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[str, ...]]:
    """The lines with which a command, or its dry run, refuses; no weights are read."""

    def unread(*_: object, **__: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", unread)
    dry = ["dry_run=true"] if request.param == "dry run" else []

    def lines_of(command: str, root: Path, *words: str) -> tuple[str, ...]:
        with pytest.raises(UserError) as error:
            outcome_of(command, root / "results", *SMALL, *words, *dry)
        assert not (root / "results").exists()
        return error.value.lines

    return lines_of


@pytest.fixture
def other_family(tmp_path: Path) -> Path:
    """A model whose tokenizer is not the embedded models'."""
    folder = save(qwen3(), tmp_path / "other")
    swap_tokens(folder)
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_a_draft_folder_that_is_not_there_is_refused_first(
    command: str, tmp_path: Path, refused: Callable[..., tuple[str, ...]]
) -> None:
    engine = ["engine=own"] if command == "server" else []
    (line,) = refused(command, tmp_path, "draft=hf", "draft.id=./nowhere", *engine)
    assert line == f"draft.id=./nowhere: no such folder; {THERE}"


def test_an_audition_names_every_folder_that_is_not_there(
    tmp_path: Path, refused: Callable[..., tuple[str, ...]]
) -> None:
    drafts = "drafts=[tiny_good,a@./nowhere,b@./elsewhere,eagle3@./no_head]"
    assert refused("audition", tmp_path, drafts) == (
        f"drafts=[a@./nowhere]: no such folder; {THERE}",
        f"drafts=[b@./elsewhere]: no such folder; {THERE}",
        f"drafts=[eagle3@./no_head]: no such folder; {THERE}",
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_more_tokens_than_positions_are_refused_first(
    command: str, tmp_path: Path, refused: Callable[..., tuple[str, ...]]
) -> None:
    engine = ["engine=own"] if command == "server" else []
    target, *_ = refused(command, tmp_path, "new_tokens=100000", *engine)
    assert target.startswith("new_tokens=100000: prompt easy/")
    assert "beyond the 1024 of model=tiny" in target


def test_a_prompt_beyond_the_context_is_refused_first(
    tmp_path: Path, refused: Callable[..., tuple[str, ...]]
) -> None:
    (tmp_path / "long.txt").write_text("one two three four " * 2000)
    line, *_ = refused("sweep", tmp_path, f"prompts.files={tmp_path / 'long.txt'}")
    assert "prompt long/" in line
    assert "leave the prompt out" in line


def test_a_draft_of_another_family_is_refused_first(
    other_family: Path, tmp_path: Path, refused: Callable[..., tuple[str, ...]]
) -> None:
    (line,) = refused("sweep", tmp_path, f"draft={other_family}")
    assert line == (
        "draft=other: another tokenizer than model=tiny (token '!' is 2 in the target's vocabulary"
        " and 32 in the draft's; 2 of 1022 ordinary tokens differ); choose a draft to which the"
        " target's ids are the same tokens"
    )
    (line,) = refused("audition", tmp_path, f"drafts=[other@{other_family}]")
    assert line.startswith("drafts=[other]: another tokenizer than model=tiny")


@pytest.mark.usefixtures("few_samples")
def test_a_draft_with_other_special_tokens_drafts_as_replay_says_and_what_differs_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its token after the target's last row would often be its choice, and is never proposed."""
    network: Any = load(
        ModelConf(name="good", id="embedded:tiny_good"), torch.device("cpu")
    ).network
    rows = network.config.vocab_size
    network.resize_token_embeddings(rows + 1, mean_resizing=False)
    weight = network.get_output_embeddings().weight.data
    with torch.inference_mode():
        choices = network(torch.arange(2, 200)[None]).logits.argmax(-1)
        weight[rows] = 2.0 * weight[choices.mode().values.item()]
        choices = network(torch.arange(2, 200)[None]).logits.argmax(-1)
    assert (choices == rows).float().mean() > 0.1
    folder = save(network, tmp_path / "instruct")
    change_special_tokens(folder, "<think>")
    with caplog.at_level(logging.WARNING):
        words = ["k=[1,3]", "temperature=[0]", "new_tokens=12", "prompts.limit=4", "threads=1"]
        run = ran("sweep", tmp_path / "results", f"draft={folder}", "until=all", *words)
    assert_replay_is_exact(run)
    texts = {(trial.prompt_set, trial.prompt, trial.tokens) for trial in run.trials}
    assert len(texts) == 8
    (line,) = [line for line in caplog.messages if "ordinary tokens" in line]
    assert line == (
        "draft=instruct: ordinary tokens are those of model=tiny, others are not ('<|end|>' is"
        " absent in the target's vocabulary and 1 in the draft's; '<|pad|>' is 1 in the target's"
        " vocabulary and absent in the draft's; '<think>' is absent in the target's vocabulary and"
        " 1024 in the draft's; ids that end a text are 0 in the target and 0, 1 in the draft);"
        " tokens are compared by id, and a text ends where the target's does"
    )


def test_the_default_draft_of_another_family_is_refused_by_what_the_configurations_claim(
    tmp_path: Path,
) -> None:
    """Of a model of the hub a dry run fetches nothing."""
    with pytest.raises(UserError) as error:
        outcome_of("sweep", tmp_path, "model=qwen3_4b", "dry_run=true")
    assert str(error.value) == (
        "draft=tiny_good: another tokenizer (tiny) than model=qwen3_4b (qwen3); choose a draft of"
        " the target's own family"
    )
    outcome_of("sweep", tmp_path, "model=qwen3_4b", "draft=qwen3_0_6b", "dry_run=true")


def test_an_audition_ranks_the_others_and_says_first_which_draft_is_unfit(
    other_family: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with caplog.at_level(logging.WARNING):
        drafts = f"drafts=[tiny_good,other@{other_family}]"
        outcome_of("audition", tmp_path / "results", drafts, "dry_run=true")
    (line,) = caplog.messages
    assert line.startswith("drafts=[other]: another tokenizer than model=tiny")
    assert line.endswith("; the other drafts are ranked without it")
    assert str(other_family) not in capsys.readouterr().out  # the plan is of the others


def test_a_folder_without_a_tokenizer_is_refused_with_the_file_that_it_lacks(
    tmp_path: Path, refused: Callable[..., tuple[str, ...]]
) -> None:
    folder = save(qwen3(), tmp_path / "bare")
    for file in folder.glob("*token*"):
        file.unlink()
    (line,) = refused("sweep", tmp_path, f"draft={folder}")
    assert line.startswith(f"draft.id={folder}: no tokenizer in this folder; add tokenizer.json")


def test_all_that_is_wrong_is_said_at_once(
    other_family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "results").write_text("a file")
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["engine=vllm", "new_tokens=100000", f"draft={other_family}"]
    with pytest.raises(UserError) as error:
        outcome_of("server", tmp_path / "results", *words)
    place, engine, length, family = error.value.lines
    assert place.endswith("results is a file; give a folder")
    assert engine.startswith("engine=vllm: no vllm on PATH")
    assert length.startswith("new_tokens=100000: ")
    assert family.startswith("draft=other: another tokenizer")


def test_the_names_of_the_documents_commands_are_no_models(
    tmp_path: Path, refused: Callable[..., tuple[str, ...]]
) -> None:
    says = "stands for a model of yours; give its hub id or folder"
    assert refused("sweep", tmp_path, "model=ORG/TARGET", "draft=ORG/DRAFT") == (
        f"model.id=ORG/TARGET: {says}",
        f"draft.id=ORG/DRAFT: {says}",
    )


def test_a_place_where_nothing_can_be_made_is_refused_whoever_asks(tmp_path: Path) -> None:
    """The superuser may write wherever the system lets anyone."""
    with pytest.raises(UserError, match=r"^results_root=/proc/\d+/results: cannot write there"):
        outcome_of("sweep", f"results_root=/proc/{os.getpid()}/results", "dry_run=true")
    made = tmp_path / "new" / "results"
    outcome_of("sweep", made, "dry_run=true")
    assert list(tmp_path.iterdir()) == []


def test_a_command_prints_each_problem_on_a_line_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["draft=./nowhere", "new_tokens=100000", "dry_run=true"]
    monkeypatch.setattr(sys, "argv", ["harness/sweep.py", *words])
    with pytest.raises(SystemExit) as ended:
        run_app("sweep")
    assert ended.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert [line.partition(":")[2][:16] for line in lines] == [
        " new_tokens=1000",
        " draft.id=./nowh",
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "words", "says"),
    [
        ("profile", "contexts=[16,1023]", "1023 tokens with K + 1 = 2 more are beyond the 1,024"),
        ("server", "engine=own draft=tiny_eagle3 backend=cuda_graphs", "use backend=eager"),
        ("server", "score=false prompts.files={turns}", "max_turns=1"),
        ("audition", f"{TEXTS_FROM} temperature=0.7", "a server tells log-probabilities"),
        ("audition", f"{TEXTS_FROM} api_key_env=NOT_SET", "no such variable is set"),
        ("audition", f"{TEXTS_FROM} prompts.files={{turns}}", "lacks answers to its earlier turns"),
        ("audition", f"{TEXTS_FROM} drafts=[tiny_eagle3]", "which servers do not return"),
        ("audition", f"{TRACES_FROM} latency_from={{folder}}", "not a run folder"),
        ("audition", f"{TRACES_FROM} drafts=[a@tiny]", "no traces of draft 'a'"),
        ("audition", f"{TRACES_FROM} latency.measure=true", "made with new_tokens=32"),
    ],
)
def test_what_needs_no_weights_to_be_refused_is_refused_first(
    command: str, words: str, says: str, tmp_path: Path, refused: Callable[..., tuple[str, ...]]
) -> None:
    turns = tmp_path / "turns.jsonl"
    turns.write_text('{"turns": ["One?", "And two?"]}')
    line, *_ = refused(command, tmp_path, *words.format(folder=tmp_path, turns=turns).split())
    assert says in line

"""`drafts=auto`: which shipped drafts serve a target, before any weight is loaded."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import outcome_of

from harness.cli import compose, draft_confs
from harness.commands.eligible_drafts import pairings, shipped_drafts
from harness.config import AuditionConfig
from harness.models.load import load_vocabulary
from harness.models.tokenizer import tokenizer_difference
from harness.reporting.console import MOST_LINES


def drafts_of(*overrides: str) -> list[str]:
    return [conf.name for conf in draft_confs(compose("audition", [*overrides]))]


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ([], ["ngram", "tiny_small", "tiny_good", "tiny_unrelated", "tiny_eagle3"]),
        (["model=qwen3_4b"], ["ngram", "qwen3_0_6b", "qwen3_1_7b"]),
        (["model=llama3_1_8b"], ["ngram", "llama3_2_1b", "llama3_2_3b"]),
        (
            ["model=qwen3_32b", "gpu=h100"],
            ["ngram", "qwen3_0_6b", "qwen3_1_7b"],
        ),
        (["model=hf", "model.id=org/mine", "model.tokenizer_family=tiny"], None),
    ],
)
def test_auto_names_every_smaller_draft_of_the_targets_family(
    overrides: list[str], names: list[str] | None
) -> None:
    wanted = names or ["ngram", "tiny_small", "tiny_good", "tiny_unrelated", "tiny"]
    drafts = drafts_of("drafts=auto", *overrides)
    assert "early_exit" in drafts
    assert [name for name in drafts if name != "early_exit"] == wanted


def test_auto_may_be_listed_with_named_drafts() -> None:
    names = drafts_of("drafts=[tiny_good@dtype:bfloat16,auto]")
    assert names[:2] == ["tiny_good", "ngram"]
    assert {*names[2:]} == {"tiny_eagle3", "tiny_small", "tiny_unrelated", "early_exit"}


def test_auto_takes_what_needs_no_tokenizer_family_and_says_that_models_are_not_compared(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"num_nextn_predict_layers": 1}')
    names = drafts_of("drafts=auto", "model=hf", f"model.id={tmp_path}")
    assert set(names) == {"ngram", "early_exit", "mtp"}
    assert "no models are compared" in caplog.text
    assert "model.tokenizer_family= (shipped: llama3, qwen3, tiny)" in caplog.text


@pytest.mark.parametrize(
    ("model", "draft", "result", "why"),
    [
        ("qwen3_4b", "qwen3_4b", "not eligible", "the target itself"),
        ("qwen3_4b", "tiny_good", "not eligible", "another tokenizer (tiny) than model=qwen3_4b"),
        ("qwen3_4b", "qwen3_8b", "not eligible", "has no fewer parameters than the target"),
        ("qwen3_30b_a3b", "qwen3_4b", "not eligible", "reads 1.3 times"),
        ("qwen3_14b", "qwen3_8b", "with a note", "reads 54% of the target's bytes per token"),
        ("qwen3_14b", "qwen3_0_6b", "eligible", ""),
        ("qwen3_14b", "early_exit", "with a note", "if the target is trained for early exit"),
        ("qwen3_14b", "int8", "not eligible", "taken where it is named"),
    ],
)
def test_a_pairing_says_why(model: str, draft: str, result: str, why: str) -> None:
    config: AuditionConfig = compose("audition", [f"model={model}"])
    entry = next(entry for entry in pairings(config.model) if entry.conf.name == draft)
    assert (entry.result, why in entry.why) == (result, True), entry


Planned = Callable[..., str]


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str]) -> Planned:
    """What a dry run of an audition prints."""

    def run(*words: str) -> str:
        outcome_of("audition", "dry_run=true", *words)
        return capsys.readouterr().out

    return run


def test_a_plan_says_in_its_first_lines_what_it_costs_and_that_the_target_does_not_fit(
    planned: Planned,
) -> None:
    large = planned("drafts=auto", "model=llama3_1_70b", "gpu=h100").splitlines()
    assert any("does not fit: 141 GB of weights, 80 GB of memory" in line for line in large[:6])
    small = planned("drafts=auto", "model=qwen3_4b")
    assert "Time and cost (modelled)" in small
    assert "$" in small
    assert len(small.splitlines()) <= MOST_LINES
    assert small.index("Time and cost") < small.index("Drafts for qwen3_4b")


def test_the_embedded_models_share_the_tokenizer_that_their_family_claims() -> None:
    family = [conf for conf in shipped_drafts() if conf.tokenizer_family == "tiny"]
    first, *others = [load_vocabulary(conf).tokenizer for conf in family]
    assert len(others) == 3
    assert all(tokenizer_difference(first, other) is None for other in others)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["qwen3_32b"])
def test_no_draft_is_eligible_and_does_not_fit(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table of drafts, and the cost of them all, go by the same share of the card's memory."""
    words = ("drafts=auto", "gpu=h100", f"model={model}", "dry_run=true", "verbose=true")
    outcome_of("audition", *words)
    plan = capsys.readouterr().out
    assert re.search("^early_exit +with a note", plan, re.MULTILINE)
    assert "does not fit" not in plan
    # Of 80 GB models may fill 72, and this target takes 65.5
    assert bool(re.search("^qwen3_4b +not eligible", plan, re.MULTILINE)) == (model == "qwen3_32b")


def test_early_exit_is_charged_for_no_weights() -> None:
    config: AuditionConfig = compose("audition", ["model=qwen3_32b"])
    found = {entry.conf.name: entry for entry in pairings(config.model)}
    assert found["early_exit"].weight_bytes == 0.0
    assert found["early_exit"].parameters

"""Logits that are NaN or infinite: one clear error per cell, at every temperature and command."""

import copy
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from random_models import qwen3, save
from runs import outcome_of, ran
from stubs import TableModel
from test_measurement import PROMPT, request
from torch import Tensor
from transformers import PreTrainedModel

from harness import prompts as prompt_sets
from harness.cli import compose
from harness.commands.pair import open_pair
from harness.commands.requests import request as request_of
from harness.commands.tasks import grid_tasks
from harness.decoding.sampling import SamplingParameters
from harness.measurement.generations import run_trial
from harness.models.cached import CachedModel
from harness.models.lean.model import LeanModel
from harness.models.lean.static import StaticModel
from harness.records import BrokenLogitsError, Trial, UserError
from harness.storage import StoredRun

pytestmark = pytest.mark.usefixtures("few_samples")
NAN, INF = float("nan"), float("inf")
FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "one NaN": lambda row: row.index_fill(0, torch.tensor([3]), NAN),
    "one +inf": lambda row: row.index_fill(0, torch.tensor([3]), INF),
    "all NaN": lambda row: torch.full_like(row, NAN),
    "all -inf": lambda row: torch.full_like(row, -INF),
}


class Faulty(TableModel):
    """Its logits are broken once the text is longer than `sound` tokens."""

    def __init__(self, fault: str, sound: int, strangeness: float = 0.0) -> None:
        super().__init__(strangeness=strangeness)
        self.fault, self.sound = FAULTS[fault], sound

    def logits(self, prefix: tuple[int, ...]) -> Tensor:
        row = super().logits(prefix)
        return self.fault(row) if len(prefix) - len(PROMPT) >= self.sound else row


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("sound", [0, 7])
def test_a_broken_target_fails_the_trial_at_the_position_where_it_breaks(
    fault: str, temperature: float, sound: int
) -> None:
    for k, draft in ((0, None), (1, TableModel(strangeness=0.3)), (4, TableModel())):
        trial = run_trial(request(k, temperature=temperature), Faulty(fault, sound), draft)
        assert (trial.status, trial.tokens) == ("failed", None), k
        assert trial.error == (
            f"model=target: its logits are not finite at position {sound}; "
            "check its weights or its dtype"
        )


@pytest.mark.parametrize(
    "more",
    [
        {"rule": "exact_match"},
        {"rule": "greedy_draft"},
        {"rule": "block"},
        {"sampling": SamplingParameters(1.0, top_k=3, top_p=0.9)},
        {"stop_below": 0.3},
        {"synthetic": (0.9, 0.9, 0.9, 0.9)},
    ],
    ids=str,
)
@pytest.mark.parametrize("fault", FAULTS)
def test_under_every_rule_and_way_of_drafting_too(fault: str, more: dict[str, object]) -> None:
    changed = replace(request(4, temperature=1.0), **more)  # type: ignore[arg-type]
    for target, draft, who in (
        (Faulty(fault, 6), TableModel(strangeness=0.2), "model=target"),
        (TableModel(), Faulty(fault, 6, strangeness=0.2), "draft=draft"),
    ):
        trial = run_trial(changed, target, draft)
        assert trial.status == "failed"
        assert str(trial.error).startswith(f"{who}: its logits are not finite at position")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_draft_fails_the_trial_where_its_round_begins(temperature: float) -> None:
    draft = Faulty("one NaN", 9)  # whose third round of five begins at position 10
    trial = run_trial(request(4, temperature=temperature), TableModel(), draft)
    assert str(trial.error).startswith("draft=draft: its logits are not finite at position 10;")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_few_suppressed_tokens_are_no_fault(temperature: float) -> None:
    class Suppressing(TableModel):
        def logits(self, prefix: tuple[int, ...]) -> Tensor:
            return super().logits(prefix).index_fill(0, torch.tensor([0, 5]), -INF)

    for k, draft in ((0, None), (4, Suppressing(strangeness=0.3))):
        trial = run_trial(request(k, temperature=temperature), Suppressing(), draft)
        assert trial.status == "ok"
        assert not {0, 5} & set(trial.tokens or ())


def test_rows_after_a_rejected_token_do_not_matter() -> None:
    """Only what the text is made from is looked at: plain decoding never sees those rows."""

    class Fragile(TableModel):
        def logits(self, prefix: tuple[int, ...]) -> Tensor:
            row = super().logits(prefix)
            return row if prefix[len(PROMPT) :] == text[: len(prefix) - len(PROMPT)] else row * NAN

    text = run_trial(request(0), TableModel(), None).tokens or ()
    trial = run_trial(request(4), Fragile(), TableModel(strangeness=0.6))
    assert trial.tokens == text


def breaking_at(network: PreTrainedModel, token: int) -> PreTrainedModel:
    """A network whose logits are NaN once it has read `token`."""
    with torch.no_grad():
        network.get_parameter("model.embed_tokens.weight")[token] = NAN
    return network


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "engine",
    [CachedModel, LeanModel, lambda *args: StaticModel(*args, compiled=False)],
    ids=["transformers", "lean", "recorded"],
)
def test_every_engine_notices_it(engine: Callable[..., CachedModel], temperature: float) -> None:
    def untied(seed: int = 0) -> PreTrainedModel:
        return qwen3(seed, tie_word_embeddings=False)

    sound, draft = engine(untied(), 1024), engine(untied(1), 1024)
    for k in (0, 3):
        asked = replace(request(k, temperature=temperature), tokens=(5, 9, 77, 3))
        text = run_trial(asked, sound, draft).tokens or ()
        position = next(i for i, token in enumerate(text) if token not in asked.tokens)
        broken = engine(breaking_at(untied(), text[position]), 1024)
        trial = run_trial(asked, broken, draft)
        assert trial.status == "failed"
        assert str(trial.error).startswith("model=target: its logits are not finite at position")
        if k == 0:  # in a verify a NaN key reaches the positions before it, masked or not
            assert f"at position {position + 1};" in str(trial.error)
        elif temperature == 0.0:  # the text is the same, whoever drafts it
            trial = run_trial(asked, sound, broken)
            assert str(trial.error).startswith("draft=draft: its logits are not finite")


GRID = ["prompts.sets=[easy]", "prompts.limit=4", "new_tokens=10", "threads=1", "k=[2]"]


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded target, NaN once it has read a token that it emits after some of the prompts."""
    settings = compose("sweep", [*GRID, "temperature=[0]"])
    pair = open_pair(settings, prompt_sets.load(settings.prompts))
    plain = [
        run_trial(request_of(pair, settings, task), pair.target_model, None)
        for task in grid_tasks(pair.prompts, settings, [1], [0.0])
        if task.k == 0
    ]
    # Not those of a prompt, nor of the probe, which would refuse the model at once
    early = {token for entry in pair.prompts for token in entry.tokens}
    early |= {(37 * index + add) % 997 for index in range(30) for add in (11, 16)}
    texts = [set((trial.tokens or ())[:-2]) for trial in plain]
    token = next(
        token
        for token in sorted(set.union(*texts) - early)
        if 0 < sum(token in text for text in texts) < len(texts)
    )
    network = pair.target.network
    network.set_output_embeddings(copy.deepcopy(network.get_output_embeddings()))
    network.config.tie_word_embeddings = False
    network.all_tied_weights_keys = {}
    return save(breaking_at(network, token), tmp_path_factory.mktemp("late") / "model")


@pytest.fixture(scope="module")
def at_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    network = qwen3()
    with torch.no_grad():
        network.get_parameter("model.norm.weight").fill_(NAN)
    return save(network, tmp_path_factory.mktemp("at_once") / "model")


def loading(role: str, folder: Path) -> list[str]:
    return [f"{role}=hf", f"{role}.id={folder}", f"{role}.name=late"]


def failed_run(command: str, *words: str) -> tuple[StoredRun, list[Trial], list[str]]:
    """The run with its failed trials and the errors in its summary, round times' apart."""
    run = ran(command, *words, status=1)
    errors = json.loads((run.folder / "summary.json").read_text())["failures"]
    rounds = ("rounds of ", "plain tokens ")
    of_texts = [entry["error"] for entry in errors if not entry["where"].startswith(rounds)]
    return run, [t for t in run.trials if t.status == "failed"], of_texts


LINE = "its logits are not finite at position"


def test_a_sweep_stores_each_broken_cell_as_failed_and_measures_the_rest(
    late: Path, tmp_path: Path
) -> None:
    words = [f"results_root={tmp_path}", *GRID]
    target = [*words, *loading("model", late), "temperature=[0,1]"]
    run, failed, errors = failed_run("sweep", *target)
    assert {(trial.k, trial.temperature) for trial in failed} >= {(0, 0.0), (2, 0.0)}
    assert all(str(trial.error).startswith(f"model=late: {LINE}") for trial in failed)
    assert any(trial.status == "ok" for trial in run.trials)
    assert len(errors) == len(failed)
    draft = [*words, *loading("draft", late), "temperature=[0]"]
    _, failed, errors = failed_run("sweep", *draft)
    assert {trial.k for trial in failed} == {2}
    assert all(line.startswith(f"draft=late: {LINE}") for line in errors)
    # Nor could the draft score those texts
    assert len(errors) == len(failed) + 1


def test_a_snapshot_reports_it_at_every_temperature(late: Path, tmp_path: Path) -> None:
    words = [f"results_root={tmp_path}", *GRID, "k=[8]", "temperature=[0,1]"]
    run, _, errors = failed_run("snapshot", *words, *loading("model", late))
    summary = json.loads((run.folder / "summary.json").read_text())
    places = [entry["where"] for entry in summary["failures"]]
    assert any("temperature=0" in place for place in places)
    assert "K=8 temperature=1" in places
    assert errors
    assert all(LINE.removesuffix(" at position") in line for line in errors)


def test_a_profile_reports_it_and_keeps_the_step_times(late: Path, tmp_path: Path) -> None:
    words = [f"results_root={tmp_path}", *GRID, *loading("model", late)]
    run, _, errors = failed_run("profile", *words, "contexts=[16]", "batches=[1]")
    assert errors
    assert all("model=late: its logits are not finite" in line for line in errors)
    assert not run.latency.empty


def test_an_audition_goes_on_without_a_draft_that_breaks_later(late: Path, tmp_path: Path) -> None:
    words = [f"results_root={tmp_path}", *GRID, "temperature=[0,1]"]
    run, _, (line,) = failed_run("audition", *words, f"drafts=[late@{late},tiny_good]")
    assert line.startswith(f"drafts=[late]: {LINE}")
    assert set(run.results.draft.dropna()) == {"tiny_good"}


def test_a_model_that_is_broken_at_once_is_refused_by_every_command(
    at_once: Path, tmp_path: Path
) -> None:
    line = f"=late: {LINE} 0 of the probe's text; check its weights"
    words = [f"results_root={tmp_path}", *GRID]
    for name, role in itertools.product(("sweep", "snapshot", "profile"), ("model", "draft")):
        with pytest.raises(UserError, match=f"{role}{line}"):
            outcome_of(name, *words, *loading(role, at_once))
    with pytest.raises(BrokenLogitsError, match=f"model{line}"):
        outcome_of("audition", *words, *loading("model", at_once), "drafts=[tiny_good]")

"""Generations that take turns: the texts and counts are those of each alone, and so is the time."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import small
from stubs import REQUEST, TableModel
from test_models import recurrent
from transformers import Qwen3Config

from harness.cli import compose
from harness.commands import sweep
from harness.commands.checks import check_run
from harness.commands.pair import Pair, SideBySide, open_pair
from harness.commands.requests import request, side_by_side
from harness.commands.run_lifecycle import load_prompts
from harness.commands.tasks import sweep_tasks
from harness.decoding.sampling import SamplingParameters
from harness.measurement import generations
from harness.measurement.generations import SLICE, Models, Request, run_side_by_side, run_trial
from harness.models.cached import CachedModel, SnapshotModel
from harness.models.lean.model import LeanModel
from harness.records import Trial
from harness.storage import RunFolder, load

VOCAB = 128
PROMPT = (5, 9, 2, 40, 77, 3)
MODELS: dict[str, Callable[[], CachedModel]] = {
    "crop": lambda: CachedModel(small(Qwen3Config), VOCAB),
    "lean": lambda: LeanModel(small(Qwen3Config), VOCAB),
    "snapshot": lambda: SnapshotModel(recurrent(), VOCAB),
}


def asked(k: int, *, budget: int = 24, temperature: float = 0.0, **more: Any) -> Request:
    sampling = SamplingParameters(temperature)
    return replace(REQUEST, tokens=PROMPT, k=k, budget=budget, sampling=sampling, **more)


def told(trial: Trial) -> dict[str, Any]:
    """All but the times."""
    names = ("status", "tokens", "rounds", "accepted_lengths", "stop_reason")
    return {name: getattr(trial, name) for name in names}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_side_by_side_are_those_of_each_alone(kind: str, temperature: float) -> None:
    target, draft = MODELS[kind](), LeanModel(small(Qwen3Config, 1), VOCAB)
    requests = [asked(k, temperature=temperature) for k in (0, 2, 0, 5)]
    alone = [run_trial(each, target, draft) for each in requests]
    models: list[Models] = [(target.with_own_cache(), draft.with_own_cache()) for _ in requests]
    assert [told(each) for each in run_side_by_side(requests, models)] == [
        told(each) for each in alone
    ]


@pytest.mark.parametrize("kind", MODELS)
def test_a_prompt_that_another_has_read_goes_on_as_if_it_had_been_read(kind: str) -> None:
    model = MODELS[kind]()
    model.prefill(PROMPT * 100 if kind == "lean" else PROMPT)  # of which the first makes it grow
    other = model.with_own_cache()
    other.read_as(model)
    assert other.cached_tokens == model.cached_tokens
    tokens = torch.tensor([7, 8])
    own = other.forward(tokens)
    assert torch.equal(own, model.forward(tokens))
    other.rewind(1)
    model.forward(torch.tensor([1]))  # what one appends is not the other's
    again = other.forward(torch.tensor([8]))
    assert torch.allclose(again[-1], own[-1], atol=1e-5)


@pytest.mark.parametrize("draft", ["tiny_good", "tiny_eagle3", "ngram", "early_exit"])
def test_every_kind_of_pair_has_pairs_beside_it(draft: str) -> None:
    pair, requests = opened(draft, "k=[2,4]", "new_tokens=16")
    models = (pair.target_model, pair.drafting)
    alone = [run_trial(each, *models) for each in requests]
    beside = run_side_by_side(requests, SideBySide(pair).models(len(requests)))
    assert [told(each) for each in beside] == [told(each) for each in alone]


def opened(draft: str, *keys: str) -> tuple[Pair, list[Request]]:
    """A pair of embedded models, and plain decoding and every K of one prompt."""
    words = [f"draft={draft}", "prompts.limit=2", "prompts.sets=[easy]", "temperature=[0]", *keys]
    config = compose("sweep", [*words, "threads=1"])
    prompts = load_prompts(config)
    check_run(config, prompts, [config.draft])
    pair = open_pair(config, prompts)
    tasks = sweep_tasks(pair.prompts[:1], config).measured
    return pair, [request(pair, config, task) for task in tasks]


def test_the_one_that_has_emitted_the_fewest_tokens_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns: list[tuple[int, int]] = []
    go_on = generations._Generating.go_on

    def noted(self: Any, tokens: int | None) -> None:
        before = self.emitted
        go_on(self, tokens)
        turns.append((self.request.k, self.emitted - before))

    monkeypatch.setattr(generations._Generating, "go_on", noted)
    requests = [asked(0, budget=20), asked(3, budget=20)]
    run_side_by_side(requests, [(TableModel(), TableModel()) for _ in requests])
    assert turns[0] == (0, SLICE + 1)  # the first is not timed
    for of_k in (0, 3):
        lengths = [length for k, length in turns if k == of_k]
        assert sum(lengths) == 20
    gaps = [0, 0]
    for k, length in turns:
        gaps[k > 0] += length
        assert abs(gaps[0] - gaps[1]) <= SLICE + 4


def test_first_plain_tokens_of_slices_count_as_the_others_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock that goes on by 1 s at each reading every slice takes as long."""
    ticks = count()
    monkeypatch.setattr(generations.Clock, "now", lambda _: float(next(ticks)))
    requests = [asked(0, budget=20), asked(3, budget=200)]
    plain, _ = run_side_by_side(requests, [(TableModel(), TableModel()) for _ in requests])
    # Four slices of five tokens, of which four are timed within one second
    assert plain.decode_s == pytest.approx(4 * 20 / 16)


def test_one_that_fails_leaves_the_others_alone() -> None:
    class Failing(TableModel):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            if len(tokens) == 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            return super().forward(tokens)

    requests = [asked(0), asked(3), asked(2)]
    trials = run_side_by_side(requests, [(Failing(), TableModel()) for _ in requests])
    assert [trial.status for trial in trials] == ["ok", "failed", "ok"]
    assert "out of memory" in str(trials[1].error)
    assert trials[0].tokens == run_trial(asked(0), TableModel(), None).tokens


@pytest.mark.usefixtures("few_samples")
@pytest.mark.parametrize("fits", [True, False])
def test_a_resumed_run_goes_on_as_it_was_begun_side_by_side_or_one_after_the_other(
    fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the memory that is free when it is begun, whatever is free later."""
    groups: list[int] = []

    def interrupted(requests: Sequence[Request], models: Sequence[Models]) -> list[Trial]:
        if len(groups) == 2:
            raise KeyboardInterrupt
        return counted(requests, models)

    def counted(requests: Sequence[Request], models: Sequence[Models]) -> list[Trial]:
        groups.append(len(requests))
        return run_side_by_side(requests, models)

    def begin(words: Sequence[str], share: float, run: Any) -> None:
        monkeypatch.setattr("harness.commands.pair.CACHES_SHARE", share)
        monkeypatch.setattr("harness.commands.requests.run_side_by_side", run)
        asked = ["k=[1,2]", "temperature=[0]", "new_tokens=8", "prompts.limit=2", "threads=1"]
        sweep.run(compose("sweep", [f"results_root={tmp_path}", "until=all", *asked, *words]))

    with pytest.raises(KeyboardInterrupt):
        begin([], 0.5 if fits else 0.0, interrupted)
    (folder,) = tmp_path.iterdir()
    before = load(folder)
    assert before.manifest.side_by_side is fits
    assert ("generations follow each other" in capsys.readouterr().err) is not fits
    begin([f"resume={folder}"], 0.0 if fits else 0.5, counted)
    assert set(groups) == ({3} if fits else {1})
    after = load(folder)
    assert after.manifest.side_by_side is fits
    assert after.trials[: len(before.trials)] == before.trials
    assert len(after.trials) == 3 * 4


def test_a_run_of_a_version_without_turns_goes_on_without_them(tmp_path: Path) -> None:
    pair, (first, *_) = opened("tiny_good", "k=[2]", "new_tokens=8")
    folder = RunFolder.create(str(tmp_path), "sweep", ["tiny"], {})
    folder.trials.append(run_trial(first, pair.target_model, pair.drafting))
    assert not side_by_side(folder, pair, [2])
    assert side_by_side(RunFolder.create(str(tmp_path), "sweep", ["tiny"], {}), pair, [2])

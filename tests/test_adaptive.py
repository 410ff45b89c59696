"""Thresholds by replay: equal to the loop.

The embedded pairs run in the loop that a sweep with p_min runs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from runs import ran
from stubs import CPU, REQUEST, TableModel, assert_counts, decoded

from harness import prompts
from harness.analysis import analyse
from harness.analysis.replayed import ScoredTexts, replayed_adaptively
from harness.analysis.scored_drafts import scored_drafts
from harness.analysis.setup import Setup
from harness.analysis.verdict import Candidate
from harness.cli import compose
from harness.commands.pair import Pair, Scoring, open_pair
from harness.commands.requests import request
from harness.commands.tasks import Task
from harness.config import SweepConfig
from harness.decoding.drafters import ModelDrafter
from harness.decoding.sampling import SamplingParameters
from harness.engine_facts.engines import ENGINES
from harness.measurement.confidences import draft_confidences
from harness.measurement.generations import Request, round_counts, run_trial
from harness.measurement.target_texts import GeneratedText
from harness.records import Round, Rule, TextTrace, Trial, UserError, where
from harness.stats.jackknife import Array
from harness.theory.replay import drafted_by_accepted, until_unlikely

pytestmark = pytest.mark.usefixtures("few_samples")
K = 4
FIVE = (0.1, 0.3, 0.5, 0.7, 0.9)


def request_of(number: int, temperature: float, rule: Rule, budget: int) -> Request:
    return replace(
        REQUEST,
        prompt=str(number),
        tokens=(1, number % 7, number // 7 % 7, number // 49),
        sampling=SamplingParameters(temperature),
        budget=budget,
        seed=3,
        eos=frozenset({9}),
        draft="draft",
        k=K,
        rule=rule,
    )


def loop(request: Request, threshold: float) -> list[Round]:
    drafter = ModelDrafter(TableModel(strangeness=0.3), request.sampling, request.rule, threshold)
    return decoded(TableModel(), drafter, request.generation(CPU))


def replayed(requests: list[Request], rounds: list[list[Round]], threshold: float):
    """Expected counts of the loop's own texts, from scores and confidences of the draft."""
    texts = [
        GeneratedText(replace(request, k=0), tuple(t for r in done for t in r.tokens), "budget")
        for request, done in zip(requests, rounds, strict=True)
    ]
    draft, rule = TableModel(strangeness=0.3), requests[0].rule
    traces = [trace_of(text, draft) for text in texts]
    known = draft_confidences(
        texts,
        TableModel(),
        draft,
        draft_name="draft",
        rule=rule,
        num_draft_tokens=K,
        least=min(FIVE),
    )
    return replayed_adaptively(ScoredTexts(traces, {c.key: c for c in known}, rule), K, threshold)


def trace_of(text: GeneratedText, draft: TableModel) -> TextTrace:
    """What `score_texts` says of a text, of models that are no networks."""
    request, tokens = text.request, torch.tensor(text.tokens)
    fed = torch.tensor([*request.tokens[-1:], *text.tokens[:-1]])
    logits: list[torch.Tensor] = []
    for model in (TableModel(), draft):
        model.prefill(request.tokens[:-1])
        logits.append(model.forward(fed))
    is_argmax = (logits[1].argmax(-1) == tokens).numpy()
    if request.sampling.greedy:
        with np.errstate(divide="ignore"):
            logprobs = [np.zeros(len(tokens)), np.log(is_argmax.astype(float))]
    else:
        rows = [row.log_softmax(-1).gather(-1, tokens[:, None])[:, 0] for row in logits]
        logprobs = [row.numpy() for row in rows]
    return TextTrace(
        draft="draft",
        draft_temperature=request.sampling.temperature,
        prompt_set=request.prompt_set,
        prompt=request.prompt,
        category=None,
        repetition=0,
        temperature=request.sampling.temperature,
        top_k=None,
        top_p=None,
        prompt_tokens=len(request.tokens),
        stop_reason=text.stop_reason,
        tokens=tokens.numpy(),
        target_logprob=logprobs[0],
        draft_logprob=logprobs[1],
        draft_is_argmax=is_argmax,
    )


@pytest.mark.parametrize(("temperature", "rule"), [(0.0, "ratio"), (1.0, "greedy_draft")])
@pytest.mark.parametrize("threshold", FIVE)
def test_of_tokens_that_are_chosen_every_count_is_the_loops(
    threshold: float, temperature: float, rule: Rule
) -> None:
    requests = [request_of(number, temperature, rule, 30) for number in range(12)]
    rounds = [loop(request, threshold) for request in requests]
    expected = replayed(requests, rounds, threshold)
    for row, done in enumerate(rounds):
        assert_counts(expected, row, done)


@pytest.mark.parametrize("rule", ["ratio", "exact_match"])
@pytest.mark.parametrize(
    "threshold",
    [0.5, *(pytest.param(t, marks=pytest.mark.exhaustive) for t in (0.1, 0.3, 0.7, 0.9))],
)
def test_of_tokens_that_are_drawn_rounds_and_drafted_tokens_are_the_loops_on_average(
    threshold: float, rule: Rule
) -> None:
    requests = [request_of(number, 1.0, rule, 12) for number in range(200)]
    rounds = [loop(request, threshold) for request in requests]
    expected = replayed(requests, rounds, threshold)
    for name in ("rounds", "drafted"):
        measured = np.array([round_counts(done, K)[name] for done in rounds], dtype=float)
        gaps = measured - getattr(expected, name)
        assert abs(gaps.mean() / (gaps.std(ddof=1) / np.sqrt(len(gaps)))) < 3, name


# The embedded pairs


class Opened(NamedTuple):
    pair: Pair
    config: SweepConfig

    def loop(
        self, threshold: float, temperature: float, repetitions: Iterable[int]
    ) -> tuple[list[Trial], list[GeneratedText]]:
        """The generations that stop drafting below the threshold, and their texts."""
        target, draft = self.pair.target_model, self.pair.drafting
        requests = [
            request(self.pair, self.config, Task(entry, temperature, K, repetition, threshold))
            for repetition in repetitions
            for entry in self.pair.prompts
        ]
        trials = [run_trial(each, target, draft) for each in requests]
        texts = [
            GeneratedText(replace(each, k=0), trial.tokens or (), trial.stop_reason or "budget")
            for each, trial in zip(requests, trials, strict=True)
        ]
        return trials, texts

    def scored(self, texts: Sequence[GeneratedText]) -> ScoredTexts:
        """The texts as they are replayed at any threshold."""
        known = self.pair.confidences(texts, self.config)
        traces = self.pair.score(texts, Scoring(K))
        return ScoredTexts(traces, {each.key: each for each in known}, "ratio")


def gaps_of(trials: Sequence[Trial], scored: ScoredTexts, threshold: float) -> Array:
    """[2, texts] rounds and drafted tokens of the loop minus those expected of its text."""
    expected = replayed_adaptively(scored, K, threshold)
    return np.array(
        [
            [getattr(trial, name) for trial in trials] - getattr(expected, name)
            for name in ("rounds", "drafted")
        ]
    )


@pytest.fixture(
    scope="module",
    params=["tiny_good", pytest.param("tiny_eagle3", marks=pytest.mark.exhaustive)],
)
def pair(request: pytest.FixtureRequest) -> Opened:
    words = [f"draft={request.param}", "p_min=[0.1]", "new_tokens=12", "threads=1"]
    config = compose("sweep", [*words, "k=[4]", "temperature=[0,1]", "prompts.limit=6"])
    return Opened(open_pair(config, prompts.load(config.prompts)), config)


def test_greedy_rounds_and_drafted_tokens_of_an_embedded_pair_are_those_replayed(
    pair: Opened,
) -> None:
    thresholds = FIVE[::2]
    trials, texts = zip(*(pair.loop(threshold, 0.0, [0]) for threshold in thresholds), strict=True)
    for others in texts[1:]:
        assert [text.tokens for text in others] == [text.tokens for text in texts[0]]
    scored = pair.scored(texts[0])
    for threshold, of_loop in zip(thresholds, trials, strict=True):
        assert np.abs(gaps_of(of_loop, scored, threshold)).max() < 1e-9


@pytest.mark.parametrize(
    ("generations", "thresholds"),
    [(12, FIVE[1:2]), pytest.param(480, FIVE, marks=pytest.mark.exhaustive)],
)
def test_sampled_rounds_and_drafted_tokens_of_an_embedded_pair_are_those_replayed_on_average(
    pair: Opened, generations: int, thresholds: tuple[float, ...]
) -> None:
    repetitions = generations // 12
    gaps = []
    for threshold in thresholds:
        place = FIVE.index(threshold)  # other draws for each
        these = range(place * repetitions, (place + 1) * repetitions)
        trials, texts = pair.loop(threshold, 1.0, these)
        gaps.append(gaps_of(trials, pair.scored(texts), threshold))
    for each in (*gaps, np.concatenate(gaps, axis=1)):
        errors = each.sum(axis=1) / np.sqrt(np.square(each).sum(axis=1))
        assert np.abs(errors).max() < 3


def test_drafting_stops_after_the_first_unlikely_token_and_not_at_a_texts_end() -> None:
    confidence = [[0.9, 0.1, 0.9], [0.9, np.nan, 0.9], [np.nan] * 3]
    assert until_unlikely(confidence, 0.5).tolist() == [2, 3, 3]
    assert until_unlikely(confidence, 0.5, dropped=True).tolist() == [1, 3, 3]
    along, off_text = np.array([[2, 1, 3]]), np.array([[1, 2, 3, 1]])
    assert drafted_by_accepted(along, off_text, 3).tolist() == [
        [[1, 3, 2, 2], [2, 1, 1, 1], [3, 2, 3, 3]]
    ]


# Runs


def test_a_sweep_measures_the_best_k_and_threshold_and_its_rounds_are_those_replayed(
    tmp_path: Path,
) -> None:
    words = ["k=[2,4]", "p_min=[0.5,0.9]", "temperature=[0]", "new_tokens=24", "prompts.limit=4"]
    run = ran("sweep", tmp_path, *words, "threads=1")
    assert run.manifest.looks is not None
    (chosen,) = run.manifest.looks.chosen
    setup = Setup(run)
    predicted = scored_drafts(setup).predicted("ratio", 0.0)
    assert predicted is not None
    grid = {Candidate("tiny_good", k, p_min) for k in (2, 4) for p_min in (0.5, 0.9)}
    assert {*predicted.replays.candidates} == grid
    gains = predicted.evidence.speedups(None)
    # Further rounds are timed after the choice, which may change which of two ties is ahead
    named = Candidate("tiny_good", chosen.k or 0, chosen.p_min)
    assert gains[named] > 0.9 * max(gains.values())
    for k in (2, 4):  # every K at the one threshold, text by text
        counts = predicted.replays.candidates[named._replace(k=k)]
        rows = {name: row for row, name in enumerate(predicted.replays.names)}
        measured = where(run.trials, k=k, status="ok")
        assert measured
        for trial in measured:
            row = rows[trial.prompt_set, trial.prompt]
            expected = counts.rounds[row], counts.drafted[row]
            assert (trial.rounds, trial.drafted) == pytest.approx(expected)
    summary = analyse(run)
    answer = summary.headline
    assert answer is not None
    assert {Candidate(e.draft, e.k, e.p_min or 0.0) for e in answer.candidates} == grid
    assert (*answer.named, answer.named_p_min) == named
    assert [row.k for row in summary.results if row.source == "replayed"] == [0, 2, 4] * 2
    written = (run.folder / "report.md").read_text()
    assert "## Every K and threshold" in written
    assert f"Drafts ended at p_min={named.p_min:g} (T=0)." in written


@pytest.mark.parametrize("draft", ["tiny_good", "tiny_eagle3"])
def test_every_k_is_measured_at_one_threshold_next_to_what_replay_expects_of_it(
    draft: str, tmp_path: Path
) -> None:
    words = ["prompts.limit=2", "temperature=[0.0]", "new_tokens=12", f"draft={draft}", "k=[4]"]
    run = ran("sweep", tmp_path, *words, "threads=1", "p_min=[0.9]", "until=all")
    drafting = [trial for trial in run.trials if trial.k == 4]
    assert sum(t.drafted or 0 for t in drafting) < 4 * sum(t.rounds or 0 for t in drafting)
    summary = analyse(run)
    for prompt_set in ("easy", "hard"):
        loop, replayed = where(summary.results, k=4, prompt_set=prompt_set)
        assert (loop.source, replayed.source) == ("measured", "replayed")
        assert replayed.tokens_per_round == pytest.approx(loop.tokens_per_round)
        by_round = ((row.drafted or 0) / (row.rounds or 1) for row in (loop, replayed))
        assert next(by_round) == pytest.approx(next(by_round))
    assert [(check.prompt_set, check.k) for check in summary.replay_checks] == [
        ("easy", 4),
        ("hard", 4),
    ]
    assert summary.headline is not None
    assert summary.headline.reason_values["p_min"] == 0.9


def test_an_audition_ranks_every_k_and_threshold_of_each_draft(tmp_path: Path) -> None:
    words = ["drafts=[tiny_good,tiny_eagle3,ngram]", "k=[1,2,4]", "prompts.limit=2", "threads=1"]
    words, times = [*words, "new_tokens=12"], ["latency.target_ms=10", "latency.draft_ms=2"]
    run = ran("audition", tmp_path, *words, *times, "temperature=[0,1]", "p_min=[0,0.5,0.9]")
    summary = analyse(run)
    for answer in where(summary.answers, timed=True, prompt_set="all"):
        named = {(each.draft, each.k, each.p_min) for each in answer.candidates}
        models = product(("tiny_good", "tiny_eagle3"), (1, 2, 4), (None, 0.5, 0.9))
        assert named == {*models, *(("ngram", k, None) for k in (1, 2, 4))}
    # An engine with no such threshold is told what its own rounds emit
    for answer in where(summary.answers, timed=False):
        assert answer.p_min is None or ENGINES[str(answer.engine)].stops_early
    assert "## Every K and threshold" in (run.folder / "report.md").read_text()
    rows = [(row.draft, row.k) for row in summary.results if row.prompt_set == "easy"]
    assert len(rows) == len({*rows}) * 2, "a row for each draft and K"
    with pytest.raises(UserError, match=r"p_min=\[0.0, 0.5\]: not with traces_from"):
        compose("audition", ["p_min=[0,0.5]", f"traces_from={run.folder}"])
    assert compose("audition", [f"traces_from={run.folder}", *times]).p_min == [0.0]

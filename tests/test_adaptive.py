"""Adaptive drafting by replay: equal to the loop.

The embedded pairs run in the loop that a sweep with decode.stop=threshold runs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from runs import ran
from stubs import CPU, REQUEST, TableModel, assert_counts, decoded

from harness import prompts
from harness.analysis import analyse
from harness.analysis.adaptive import THRESHOLDS, adaptive_drafting
from harness.analysis.replayed import ScoredTexts, replayed_adaptively
from harness.analysis.round_costs import Latency
from harness.cli import compose
from harness.commands.opening import open_pair
from harness.commands.pair import Pair, Scoring
from harness.commands.requests import request
from harness.config import SweepConfig
from harness.decoding.model_drafter import ModelDrafter
from harness.decoding.sampling import SamplingParameters
from harness.measurement.confidences import draft_confidences
from harness.measurement.generations import Request, round_counts, run_trial
from harness.measurement.target_texts import GeneratedText
from harness.records import DraftConfidence, Round, Rule, TextTrace, Trial, UserError
from harness.stats.jackknife import Array
from harness.theory.replay import drafted_by_accepted, until_unlikely
from harness.theory.speedup import RoundTimes

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
        config = replace(self.config, decode=replace(self.config.decode, stop_threshold=threshold))
        target, draft = self.pair.target_model, self.pair.drafting
        requests = [
            request(self.pair, config, entry, K, temperature, repetition)
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
    words = [f"draft={request.param}", "decode.stop=threshold", "new_tokens=12", "threads=1"]
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


LATENCY = Latency(RoundTimes(1.0, ((1, 1.5), (2, 2.0), (4, 3.0))))


def two_token_texts(prompts: int, length: int = 40) -> ScoredTexts:
    """The target always emits one token, which the draft draws with 0.6, else another, with 0.4."""
    traces = [
        replace(
            trace_of(GeneratedText(each, (0,), "budget"), TableModel()),
            tokens=np.zeros(length, dtype=np.int32),
            target_logprob=np.zeros(length),
            draft_logprob=np.full(length, np.log(0.6)),
            draft_is_argmax=np.ones(length, dtype=bool),
        )
        for each in (request_of(number, 1.0, "ratio", 1) for number in range(prompts))
    ]
    unlikely = np.full((length + 1, K), 0.4)
    confidences = {
        t.key: DraftConfidence("draft", t.prompt_set, t.prompt, t.repetition, 1.0, unlikely)
        for t in traces
    }
    return ScoredTexts(traces, confidences, "ratio")


def test_the_best_threshold_is_less_the_optimism_of_its_choice_and_has_an_interval() -> None:
    # Confidence tells nothing of acceptance: next to the best, thresholds differ by little but luck
    for seed in (1, 3, 5):
        rng, texts = np.random.default_rng(seed), two_token_texts(12)
        traces = [
            replace(t, temperature=0.0, draft_logprob=np.where(rng.random(40) < 0.6, 0.0, -np.inf))
            for t in texts.traces
        ]
        known = {
            trace.key: replace(each, temperature=0.0, values=rng.random((41, K)))
            for trace, each in zip(traces, texts.confidences.values(), strict=True)
        }
        found = adaptive_drafting(ScoredTexts(traces, known, "ratio"), [2, 4], LATENCY, seed=seed)
        for chosen in (found.fixed, found.best):
            assert chosen.speedup_lo is not None
            assert chosen.speedup_hi is not None
            assert chosen.speedup_lo < chosen.speedup < chosen.speedup_hi
        k, scored = found.best.k, ScoredTexts(traces, known, "ratio")
        counts = replayed_adaptively(scored, k, found.best.threshold)
        cost = (counts.proposals @ LATENCY.relative(k)).sum()
        assert found.best.speedup < 0.999 * counts.new_tokens.sum() / cost
    few = adaptive_drafting(two_token_texts(4), [2, 4], LATENCY)
    assert (few.best.speedup_lo, few.fixed.speedup_hi) == (None, None)


@pytest.mark.exhaustive
def test_an_audition_shows_the_best_threshold_of_each_draft(tmp_path: Path) -> None:
    words = ["drafts=[tiny_good,tiny_eagle3,ngram]", "k=[1,2,4]", "prompts.limit=2"]
    words += ["new_tokens=12"]
    times = ["latency.target_ms=10", "latency.draft_ms=2", "threads=1", "temperature=[0,1]"]
    words = [f"results_root={tmp_path}", "decode.stop=threshold", *words, *times]
    run = ran("audition", *words)
    summary = analyse(run)
    assert [(entry.draft, entry.temperature) for entry in summary.adaptive] == [
        (draft, temperature) for temperature in (0.0, 1.0) for draft in ("tiny_good", "tiny_eagle3")
    ]
    assert all(entry.best.threshold in THRESHOLDS for entry in summary.adaptive)
    written = (run.folder / "report.md").read_text()
    assert "Adaptive drafting" in written
    assert "Not available for ngram: it gives its tokens no probability" in written
    with pytest.raises(UserError, match=r"decode\.stop=threshold: not with traces_from"):
        compose("audition", [*words[:2], f"traces_from={run.folder}"])

"""A threshold ends drafts where the draft is unsure; the n-gram drafter looks its tokens up."""

import itertools
from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import assert_replay_is_exact, ran
from stubs import (
    FunctionModel,
    ScriptedModel,
    TableModel,
    assert_counts,
    decoded,
    generation_of,
    text_of,
)
from test_verification import cells, emitted_after, random_distribution, sequence_probabilities
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from harness.analysis.replayed import as_served
from harness.decoding.drafters import ModelDrafter
from harness.decoding.lookups import (
    NgramDrafter,
    SimpleNgramDrafter,
    lookups,
)
from harness.decoding.sampling import SamplingParameters
from harness.engine_facts.draft_kinds import DRAFTS
from harness.measurement.draft_scores import lookup_traces
from harness.measurement.generations import Request
from harness.measurement.target_texts import GeneratedText
from harness.records import RULES, Round, Rule
from harness.theory.replay import replay, replay_texts

K = 3
SAMPLED = SamplingParameters(1.0)

# Thresholds


def proposals(probabilities, threshold: float) -> dict[tuple[int, ...], float]:
    """What the production drafter proposes and how often, by the midpoints of its draws' cells."""
    chances: dict[tuple[int, ...], float] = defaultdict(float)
    grids = [
        cells(
            value
            for prefix in itertools.product(range(3), repeat=index)
            for value in probabilities(prefix).cumsum(0).tolist()
        )
        for index in range(K)
    ]
    for combination in itertools.product(*grids):
        drafter = ModelDrafter(FunctionModel(probabilities), SAMPLED, "ratio", threshold)
        drafter.begin([0])
        uniforms = torch.tensor([middle for middle, _ in combination], dtype=torch.float64)
        tokens = tuple(drafter.propose(K, uniforms).tokens.tolist())
        chances[tokens] += float(np.prod([size for _, size in combination]))
    return chances


def test_emitted_tokens_of_an_adaptive_draft_have_the_target_distribution_exactly() -> None:
    target, draft = random_distribution(1), random_distribution(2)
    proposed = proposals(draft, 0.4)
    assert {len(tokens) for tokens in proposed} == {1, 2, 3}
    total: dict[tuple[int, ...], float] = defaultdict(float)
    for drafted, weight in proposed.items():
        for tokens, share in emitted_after(target, draft, drafted, K + 1).items():
            total[tokens] += weight * share
    for tokens, probability in sequence_probabilities(target, K + 1).items():
        assert total[tokens] == pytest.approx(probability, abs=1e-12)


def adaptive(threshold: float, temperature: float = 0.0) -> list[Round]:
    sampling = SamplingParameters(temperature)
    drafter = ModelDrafter(TableModel(strangeness=0.3), sampling, "ratio", threshold)
    return decoded(TableModel(), drafter, generation_of([1, 2, 3], 60, 4, sampling=sampling))


def test_the_threshold_decides_how_much_is_drafted_and_not_the_greedy_text() -> None:
    plain = decoded(TableModel(), None, generation_of([1, 2, 3], 60))
    for threshold in (0.0, 0.5, 1.0):
        assert text_of(adaptive(threshold)) == text_of(plain)
    assert {entry.drafted for entry in adaptive(0.0)} == {4}
    assert {entry.drafted for entry in adaptive(1.0)} == {1}
    some = {entry.drafted for entry in adaptive(0.5, temperature=1.0)}
    assert some > {1}
    assert max(some) <= 4


# N-grams

IDS = st.lists(st.integers(0, 4), min_size=1, max_size=12)
PROMPT = (3, 1, 4, 1, 5, 3, 1)


def looked_up(text: Sequence[int], count: int, eos: Collection[int] = ()) -> list[int]:
    drafter = NgramDrafter(eos)
    drafter.begin(text)
    return drafter.propose(count, torch.ones(count)).tokens.tolist()


def test_it_proposes_what_followed_the_first_occurrence() -> None:
    drafter = NgramDrafter({9})
    drafter.begin((1, 2, 3, 4, 1, 2, 5, 1, 2))
    proposal = drafter.propose(3, torch.ones(3))
    assert proposal.tokens.tolist() == [3, 4, 1]
    assert proposal.probs is None
    drafter.advance(proposal, 1, torch.tensor([7]))
    assert drafter.propose(3, torch.ones(3)).tokens.tolist() == []
    drafter.advance(drafter.propose(3, torch.ones(3)), 0, torch.tensor([5]))
    assert drafter.propose(3, torch.ones(3)).tokens.tolist() == [1, 2, 3]


def test_it_proposes_no_end_of_text_and_has_no_limit_of_its_own() -> None:
    assert looked_up((1, 2, 3, 4, 1, 2), 3, eos={4}) == [3]
    assert looked_up([1, 2, 3, *range(10, 200), 1, 2], 2) == [3, 10]


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("rule", RULES)
def test_the_greedy_text_is_the_targets_also_through_rounds_without_a_proposal(
    k: int, rule: Rule
) -> None:
    rounds = decoded(TableModel(), NgramDrafter(()), generation_of(PROMPT, 30, k, rule=rule))
    assert text_of(rounds) == text_of(decoded(TableModel(), None, generation_of(PROMPT, 30)))
    empty = [entry for entry in rounds if entry.drafted == 0]
    assert empty
    assert all(entry.outcome == "bonus" and len(entry.tokens) == 1 for entry in empty)


@pytest.mark.parametrize("rule", RULES)
def test_at_a_temperature_it_decodes_to_the_budget(rule: Rule) -> None:
    generation = generation_of(PROMPT, 80, 4, sampling=SamplingParameters(0.3), rule=rule)
    rounds = decoded(TableModel(), NgramDrafter(()), generation)
    assert len(text_of(rounds)) == 80
    assert any(entry.accepted for entry in rounds)


@settings(max_examples=150, deadline=None)
@given(IDS, IDS, st.integers(1, 5), st.sets(st.integers(0, 4), max_size=1), st.integers(1, 3))
def test_lookups_are_the_proposals_of_transformers_from_every_start(
    prompt: list[int], text: list[int], k: int, eos: set[int], ngram: int
) -> None:
    along = lookups(NgramDrafter(eos, ngram), prompt, text, k)
    smaller = lookups(NgramDrafter(eos, ngram), prompt, text, 1)
    assert np.array_equal(smaller.matches, along.matches[:, :1])
    assert np.array_equal(smaller.proposed, np.minimum(along.proposed, 1))
    generator: Any = PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor(sorted(eos), dtype=torch.long),
        num_output_tokens=k,
        max_matching_ngram_size=ngram,
        max_length=1 << 40,  # without one it proposes nothing
    )
    for start in range(len(text)):
        before = [*prompt, *text[:start]]
        longer, _ = generator.get_candidates(torch.tensor([before]))
        draft = longer[0].tolist()[len(before) :]
        assert along.proposed[start] == len(draft)
        padded, rest = [*draft, *[-1] * k][:k], [*text[start:], *[-2] * k][:k]
        assert along.matches[start].tolist() == [a == b for a, b in zip(padded, rest, strict=True)]


def as_llamacpp_looks_up(text: Sequence[int], size: int, longest: int) -> list[int]:
    """A transcription of common_ngram_simple_draft: the last token is not in the history yet."""
    history, number = text[:-1], len(text) - 1
    if number <= size + longest + 1:
        return []
    matches = (
        start
        for start in range(number - size - 1, 0, -1)
        if [*history[start : start + size]] == [*text[-size:]]
    )
    start = next(matches, 0)
    copied = min(longest, number - (start + size))
    if not start or copied < size:
        return []
    return [*history[start + size : start + size + copied]]


def test_the_look_up_of_llamacpp_proposes_what_followed_the_last_occurrence() -> None:
    rng, proposed = np.random.default_rng(4), 0
    for size, k in ((1, 1), (1, 2), (2, 2), (2, 16), (3, 5)):
        drafter = SimpleNgramDrafter((), size)
        text = rng.integers(4, size=60).tolist()
        drafter.begin(text[:5])
        for end in range(5, 60):
            expected = as_llamacpp_looks_up(text[:end], size, k)
            assert drafter.draft(k) == expected
            proposed += len(expected)
            drafter.append(text[end : end + 1])
    assert proposed > 100


@pytest.mark.parametrize("kind", ["ngram_simple", "ngram_simple_1"])
def test_rounds_of_llamacpps_look_up_are_its_own_at_every_k_after_prompts_of_any_length(
    kind: str,
) -> None:
    rng, size, early = np.random.default_rng(6), DRAFTS[kind].least_k, 0
    for length in range(2, 24):
        prompt, text = (rng.integers(3, size=n).tolist() for n in (length, 40))
        request = Request(
            *("cell", "easy", "a", None, tuple(prompt), SamplingParameters(0.0)),
            *(40, 0, 0, frozenset[int](), "tiny"),
        )
        (trace,) = lookup_traces(
            [GeneratedText(request, tuple(text), "budget")],
            kind,
            num_draft_tokens=16,
            draft_name=kind,
        )
        for k in (2, 4, 16):
            rounds = drafted = start = 0
            while start < len(text):
                draft = as_llamacpp_looks_up([*prompt, *text[:start]], size, k)
                early += bool(draft) and start == 0
                rounds, drafted = rounds + 1, drafted + len(draft)
                kept = takewhile(
                    lambda pair: pair[0] == pair[1], zip(draft, text[start:], strict=False)
                )
                start += len([*kept]) + 1
            served = as_served([trace], [len(text)], [np.full(40, k)], "greedy_draft", k)
            counts = replay_texts(*served)
            assert (counts.rounds[0], counts.drafted[0]) == (rounds, drafted)
    assert early > 5


@settings(max_examples=100, deadline=None)
@given(IDS, IDS, st.integers(1, 6), st.booleans())
def test_replayed_rounds_equal_the_loops(
    prompt: list[int], text: list[int], k: int, ends: bool
) -> None:
    """Rounds, drafted, accepted and how they ended, of a target that generates any given text."""
    eos = frozenset({9}) if ends else frozenset()
    text = [*text, 9] if ends else text
    generation = generation_of(prompt, len(text), k, eos=eos)
    drafter = NgramDrafter(eos)
    rounds = decoded(ScriptedModel(prompt, text), drafter, generation)
    assert text_of(rounds) == text
    along = lookups(drafter, prompt, text, k)
    replayed = replay(along.matches[None], [len(text)], [k], proposed=along.proposed[None])[k]
    assert_counts(replayed, 0, rounds)


@pytest.mark.usefixtures("few_samples")
def test_a_sweep_measures_and_replays_a_look_up(tmp_path: Path) -> None:
    grid = ["k=[1,4]", "temperature=[0,1]", "new_tokens=16", "threads=1", "prompts.limit=3"]
    words = [f"results_root={tmp_path}", "draft=ngram", *grid]
    run = ran("sweep", *words, "until=all")
    cells = run.results.groupby("source").size().to_dict()
    assert cells == {"measured": 12, "replayed": 12}
    assert run.results.breakeven_alpha.isna().all()
    assert_replay_is_exact(run)

"""The n-gram drafter: transformers' prompt lookup in the loop, and its proposals along a text."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stubs import CPU, TableModel

from harness.decoding.candidates import NgramDrafter, lookups
from harness.decoding.sampling import SamplingParameters, Uniforms
from harness.decoding.speculative import speculative_rounds
from harness.measurement.trials import Request, run_trial
from harness.records import RULES, Round, Rule
from harness.theory.replay import replay

PROMPT = (3, 1, 4, 1, 5, 3, 1)
IDS = st.lists(st.integers(0, 4), min_size=1, max_size=12)


class Writer(TableModel):
    """A model that writes `text` after the prompt, whatever it is asked."""

    def __init__(self, prompt: Sequence[int], text: Sequence[int]) -> None:
        super().__init__()
        self.script = [*prompt, *text, 0]

    def logits(self, prefix: tuple[int, ...]) -> torch.Tensor:
        place = min(len(prefix), len(self.script) - 1)
        return torch.nn.functional.one_hot(torch.tensor(self.script[place]), self.vocab).double()


def rounds_of(
    target: TableModel,
    k: int,
    *,
    prompt: Sequence[int] = PROMPT,
    budget: int = 30,
    eos: frozenset[int] = frozenset(),
    sampling: SamplingParameters | None = None,
    rule: Rule = "ratio",
) -> list[Round]:
    drafter = NgramDrafter(eos)
    target.prefill(prompt[:-1])
    drafter.begin(prompt)
    rounds = speculative_rounds(
        target,
        drafter,
        prompt[-1],
        num_draft_tokens=k,
        budget=budget,
        eos=eos,
        sampling=sampling or SamplingParameters(0.0),
        uniforms=Uniforms.keyed(1, "p", 0, budget + k + 1, CPU),
        rule=rule,
    )
    return list(rounds)


def tokens(rounds: list[Round]) -> list[int]:
    return [token for entry in rounds for token in entry.tokens]


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


def test_it_never_proposes_an_end_of_text() -> None:
    drafter = NgramDrafter({4})
    drafter.begin((1, 2, 3, 4, 1, 2))
    assert drafter.propose(3, torch.ones(3)).tokens.tolist() == [3]


def test_a_longer_text_than_transformers_default_limit_is_still_continued() -> None:
    drafter = NgramDrafter(frozenset())
    drafter.begin([1, 2, 3, *range(10, 200), 1, 2])
    assert drafter.propose(2, torch.ones(2)).tokens.tolist() == [3, 10]


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("rule", RULES)
def test_the_greedy_text_is_the_targets_also_through_rounds_without_a_proposal(
    k: int, rule: Rule
) -> None:
    plain = run_trial(request(0), TableModel(), None)
    rounds = rounds_of(TableModel(), k, rule=rule)
    assert tokens(rounds) == list(plain.tokens or ())
    nothing = [entry for entry in rounds if entry.drafted == 0]
    assert nothing
    assert all(entry.outcome == "bonus" and len(entry.tokens) == 1 for entry in nothing)


@pytest.mark.parametrize("rule", RULES)
def test_at_a_temperature_it_decodes_to_the_budget(rule: Rule) -> None:
    rounds = rounds_of(TableModel(), 4, sampling=SamplingParameters(0.3), rule=rule)
    assert len(tokens(rounds)) == 30
    assert any(entry.accepted for entry in rounds)


def request(k: int) -> Request:
    return Request(
        cell="cell",
        prompt_set="set",
        prompt="one",
        category=None,
        tokens=PROMPT,
        k=k,
        sampling=SamplingParameters(0.0),
        rule="ratio",
        budget=30,
        repetition=0,
        seed=1,
        eos=frozenset({-1}),
        model="target",
        draft="ngram" if k else None,
    )


def test_a_trial_runs_a_drafter_that_is_no_model() -> None:
    trial = run_trial(request(4), TableModel(), lambda entry: NgramDrafter(entry.eos))
    plain = run_trial(request(0), TableModel(), None)
    assert trial.tokens == plain.tokens
    assert trial.drafted is not None
    assert trial.rounds is not None
    assert trial.accepted <= trial.drafted < 4 * trial.rounds  # type: ignore[operator]


@settings(max_examples=150, deadline=None)
@given(IDS, IDS, st.integers(1, 5), st.sets(st.integers(0, 4), max_size=1), st.integers(1, 3))
def test_lookups_are_the_drafters_proposals_from_every_start(
    prompt: list[int], text: list[int], k: int, eos: set[int], ngram: int
) -> None:
    found = lookups(prompt, text, num_draft_tokens=k, eos=eos, ngram=ngram)
    for start in range(len(text)):
        drafter = NgramDrafter(eos, ngram)
        drafter.begin([*prompt, *text[:start]])
        draft = drafter.propose(k, torch.ones(k)).tokens.tolist()
        assert found.proposed[start] == len(draft)
        padded = [*draft, *[-1] * k][:k]
        rest = [*text[start:], *[-2] * k][:k]
        assert found.matches[start].tolist() == [a == b for a, b in zip(padded, rest, strict=True)]


@given(IDS, IDS, st.integers(1, 4))
def test_a_smaller_k_proposes_the_beginning(prompt: list[int], text: list[int], k: int) -> None:
    large = lookups(prompt, text, num_draft_tokens=8, eos=())
    small = lookups(prompt, text, num_draft_tokens=k, eos=())
    assert np.array_equal(small.matches, large.matches[:, :k])
    assert np.array_equal(small.proposed, np.minimum(large.proposed, k))


@settings(max_examples=100, deadline=None)
@given(IDS, IDS, st.integers(1, 6), st.booleans())
def test_replayed_rounds_equal_the_loops(
    prompt: list[int], text: list[int], k: int, ends: bool
) -> None:
    """Rounds, drafted, accepted and how they ended, of a target that writes any given text."""
    eos = frozenset({9}) if ends else frozenset()
    text = [*text, 9] if ends else text
    rounds = rounds_of(Writer(prompt, text), k, prompt=prompt, budget=len(text), eos=eos)
    assert tokens(rounds) == text
    found = lookups(prompt, text, num_draft_tokens=k, eos=eos)
    replayed = replay(found.matches[None], [len(text)], [k], proposed=found.proposed[None])[k]
    assert replayed.rounds[0] == len(rounds)
    assert replayed.drafted[0] == sum(entry.drafted for entry in rounds)
    assert replayed.accepted[0] == sum(entry.accepted for entry in rounds)
    outcomes = [entry.outcome for entry in rounds]
    assert replayed.bonus[0] == outcomes.count("bonus")
    assert replayed.cut[0] == outcomes.count("cut")
    assert replayed.rejected[0] == outcomes.count("rejected")

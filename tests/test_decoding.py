"""The loops, on lookup-table models: no transformers, no files."""

import itertools
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from runs import sample
from scipy.stats import chisquare
from stubs import CPU, GREEDY, TableModel, decoded, generation_of, text_of
from torch.utils._python_dispatch import TorchDispatchMode

from harness.decoding.drafters import ModelDrafter
from harness.decoding.loops import emitted_round
from harness.decoding.sampling import SamplingParameters, Uniforms, sampler_for
from harness.records import RULES, Round, Rule
from harness.theory.acceptance_rules import accept_probabilities
from harness.theory.replay import by_start, replay, rounds_variance

PROMPT = (3, 1, 4, 1, 5)


class CountReads(TorchDispatchMode):
    """Counts what makes a device wait: a tensor's number or its whole read to the host.

    The stand-in models read their tokens themselves; those calls are not the loop's.
    """

    count = 0

    def __enter__(self) -> "CountReads":
        self._tolist = torch.Tensor.tolist
        outer = self

        def counted(tensor: torch.Tensor) -> object:
            caller = sys._getframe(1).f_code.co_filename
            outer.count += not caller.endswith("stubs.py")
            return outer._tolist(tensor)

        torch.Tensor.tolist = counted  # type: ignore[method-assign,assignment]
        return super().__enter__()

    def __exit__(self, *failure: object) -> None:
        torch.Tensor.tolist = self._tolist  # type: ignore[method-assign]
        super().__exit__(*failure)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def plain(sampling: SamplingParameters = GREEDY, prompt=PROMPT, **more) -> list[int]:
    return text_of(decoded(TableModel(), None, generation_of(prompt, sampling=sampling, **more)))


def speculative(k: int, strangeness: float = 0.4, prompt=PROMPT, **more) -> list[Round]:
    generation = generation_of(prompt, k=k, **more)
    return decoded(TableModel(), TableModel(strangeness=strangeness), generation)


@pytest.mark.parametrize("k", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("strangeness", [0.15, 0.4, 1.0])
def test_greedy_speculative_text_is_the_greedy_text(k: int, rule: Rule, strangeness: float) -> None:
    assert text_of(speculative(k, strangeness, rule=rule)) == plain()


def test_the_greedy_identity_covers_rejections_and_full_acceptances() -> None:
    outcomes = Counter(entry.outcome for entry in speculative(2))
    assert outcomes["rejected"] / outcomes.total() >= 0.3
    assert outcomes["bonus"] >= 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_draft_equal_to_the_target_is_always_accepted(k: int, temperature: float) -> None:
    rounds = speculative(k, 0.0, sampling=SamplingParameters(temperature))
    ends = {(entry.outcome, len(entry.tokens)) for entry in rounds[:-1]}
    assert ends == {("bonus", k + 1)}


def test_target_forwards_are_rounds_and_nothing_else() -> None:
    target, draft = TableModel(), TableModel(strangeness=0.4)
    rounds = decoded(target, draft, generation_of(PROMPT, k=4))
    assert (target.forwards, target.prefills) == (len(rounds), 1)
    assert draft.forwards == 4 * len(rounds)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_round_is_read_back_to_the_host_once(rule: Rule, temperature: float) -> None:
    """Nothing reads a tensor's number but the one `tolist` of a round, or of a plain step."""
    generation = generation_of(PROMPT, k=4, sampling=SamplingParameters(temperature), rule=rule)
    for draft in (None, TableModel(strangeness=0.4)):
        with CountReads() as reads:
            rounds = decoded(TableModel(), draft, generation)
        assert reads.count == len(rounds)


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("budget", [1, 2, 3, 7, 40])
def test_the_budget_is_met_exactly(k: int, budget: int) -> None:
    for prompt in (PROMPT, (2,)):  # one token needs no prefill
        tokens = text_of(speculative(k, 0.2, budget=budget, prompt=prompt))
        assert tokens == plain(budget=budget, prompt=prompt)
        assert len(tokens) == budget


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("strangeness", [0.0, 0.4])
def test_the_text_ends_with_the_first_end_token(k: int, strangeness: float) -> None:
    for end in sorted(set(plain())):
        eos = frozenset({end})
        tokens = text_of(speculative(k, strangeness, eos=eos))
        assert tokens == plain(eos=eos)
        assert tokens[-1] == end


@pytest.mark.parametrize(
    ("accepted", "left", "eos", "expected"),
    [
        (3, 9, (), Round((5, 6, 7, 8), 3, 3, "bonus")),
        (1, 9, (), Round((5, 8), 1, 3, "rejected")),
        (0, 1, (), Round((8,), 0, 3, "rejected")),
        (3, 3, (), Round((5, 6, 7), 3, 3, "cut")),
        (2, 2, (), Round((5, 6), 2, 3, "cut")),
        (1, 2, (), Round((5, 8), 1, 3, "rejected")),
        (3, 9, (6,), Round((5, 6), 2, 3, "cut")),
        (3, 9, (7,), Round((5, 6, 7), 3, 3, "cut")),
        (3, 9, (8,), Round((5, 6, 7, 8), 3, 3, "bonus")),
        (1, 9, (8,), Round((5, 8), 1, 3, "rejected")),
        (1, 9, (6,), Round((5, 8), 1, 3, "rejected")),
    ],
)
def test_a_round_emits_what_end_and_budget_allow(
    accepted: int, left: int, eos: tuple[int, ...], expected: Round
) -> None:
    generation = generation_of(PROMPT, budget=2 + left, k=3, eos=eos)
    assert emitted_round(generation, (1, 2), [5, 6, 7, 8], accepted) == expected


def p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Of a chi-square test; what is rarer than five times is one class."""
    common = [key for key, count in expected.items() if count >= 5]
    observed, wanted = [counts[key] for key in common], [expected[key] for key in common]
    if len(common) < len(expected):
        observed.append(counts.total() - sum(observed))
        wanted.append(counts.total() - sum(wanted))
    return float(chisquare(observed, wanted).pvalue)


@pytest.mark.parametrize("rule", sample(RULES, "ratio", "block"))
@pytest.mark.parametrize("k", sample([3, 1], 3))
def test_sampled_text_has_the_target_distribution(rule: Rule, k: int) -> None:
    """Of four tokens, so of several rounds, over 800 repetitions, vocabulary 2."""
    draws, sampling, prompt = 800, SamplingParameters(0.9), (1, 0)
    target, draft = TableModel(2), TableModel(2, strangeness=3.0)
    options = {"budget": 4, "k": k, "sampling": sampling, "rule": rule}
    counts = Counter(
        tuple(text_of(decoded(target, draft, generation_of(prompt, repetition=number, **options))))
        for number in range(draws)
    )
    probabilities = sampler_for(sampling)

    def chance(text: tuple[int, ...]) -> float:
        rows = torch.stack([target.logits((*prompt, *text[:place])) for place in range(4)])
        return float(probabilities(rows)[range(4), list(text)].prod())

    expected = {text: draws * chance(text) for text in itertools.product(range(2), repeat=4)}
    assert p_value(counts, expected) > 1e-4


@pytest.mark.parametrize("generations", [60, pytest.param(5000, marks=pytest.mark.exhaustive)])
def test_the_rounds_of_block_verification_are_those_that_replay_expects(generations: int) -> None:
    """Given each text, at K = 4 and temperature 1."""
    k, budget, sampling = 4, 24, SamplingParameters(1.0)
    target, draft = TableModel(6), TableModel(6, strangeness=0.5)
    drafter = ModelDrafter(draft, sampling, "block")
    rounds, scores = np.zeros(generations), np.zeros((2, generations, budget))
    for row in range(generations):
        more: dict[str, Any] = {"repetition": row, "sampling": sampling, "rule": "block"}
        done = decoded(target, drafter, generation_of(PROMPT, budget, k, **more))
        text = text_of(done)
        rounds[row] = len(done)
        for score, model in zip(scores, (target, draft), strict=True):
            logits = torch.stack([model.logits((*PROMPT, *text[:i])) for i in range(budget)])
            score[row] = sampler_for(sampling)(logits)[range(budget), text].log()
    of_target, of_draft = scores
    chances = accept_probabilities("block", by_start(of_target, k), by_start(of_draft, k), False)
    expected = replay(chances, [budget] * generations, [k])[k].rounds
    variance = rounds_variance([*chances], [np.full(budget, k)] * generations, k)
    assert abs((rounds - expected).sum()) < 3 * variance.sum() ** 0.5
    by_ratio = by_start(accept_probabilities("ratio", of_target, of_draft, False), k)
    fewer = replay(by_ratio, [budget] * generations, [k])[k].rounds - expected
    assert fewer.sum() > 6 * variance.sum() ** 0.5 or generations < 1000
    assert fewer.min() > -1e-9


def test_the_same_key_gives_the_same_text_and_another_key_another() -> None:
    def once(repetition: int) -> list[int]:
        return text_of(speculative(4, sampling=SamplingParameters(1.0), repetition=repetition))

    assert once(0) == once(0)
    assert once(0) != once(1)


def test_a_uniform_does_not_depend_on_how_many_are_asked_for() -> None:
    short, long = (Uniforms.keyed(7, "set/prompt", 0, count, CPU) for count in (5, 50))
    assert torch.equal(short.draft, long.draft[:5])
    assert torch.equal(short.resample, long.resample[:5])
    assert not torch.equal(short.draft, short.accept)
    assert float(long.accept.min()) > 0.0


@pytest.mark.parametrize(
    "sampling", [SamplingParameters(1.0, top_k=3), SamplingParameters(0.7, top_p=0.6)]
)
def test_top_k_and_top_p_bound_what_is_emitted(sampling: SamplingParameters) -> None:
    assert text_of(speculative(4, sampling=SamplingParameters(1.0, top_k=1))) == plain()
    probabilities, target = sampler_for(sampling), TableModel()
    prefix: list[int] = [*PROMPT]
    for token in text_of(speculative(4, 0.5, sampling=sampling)):
        assert probabilities(target.logits(tuple(prefix)).unsqueeze(0))[0, token] > 0
        prefix.append(token)


def test_temperature_scales_logits_and_zero_has_no_distribution() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0]])
    probabilities = sampler_for(SamplingParameters(2.0))(logits)
    assert torch.allclose(probabilities, torch.softmax(logits / 2.0, -1))
    with pytest.raises(ValueError, match="greedy"):
        sampler_for(GREEDY)


# A repetition penalty, on a pair of Markov chains small enough to list every text

PENALTY, LENGTH, DRAWS, START = 2.5, 3, 800, (0,)


class Chain(TableModel):
    """A model whose logits depend on the last token alone."""

    def __init__(self, seed: int) -> None:
        super().__init__(3)
        self.table = torch.from_numpy(np.random.default_rng(seed).normal(size=(3, 3)) * 1.5)

    def logits(self, prefix: tuple[int, ...]) -> torch.Tensor:
        return self.table[prefix[-1]]

    def along(self, tokens: tuple[int, ...]) -> list[np.ndarray]:
        """The distribution before each token, penalised by hand."""
        rows = []
        for end in range(len(tokens)):
            text = (*START, *tokens[:end])
            logits = self.table[text[-1]].numpy().copy()
            for token in set(text):
                logits[token] *= PENALTY if logits[token] < 0 else 1 / PENALTY
            rows.append(np.exp(logits) / np.exp(logits).sum())
        return rows


@pytest.mark.parametrize(
    ("rule", "k"),
    [
        ("ratio", 2),
        ("block", 1),
        pytest.param("exact_match", 1, marks=pytest.mark.exhaustive),
        pytest.param("greedy_draft", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_the_loop_draws_the_penalised_target_and_needs_the_rounds_that_replay_expects(
    rule: Rule, k: int
) -> None:
    target, draft = Chain(1), Chain(2)
    sampling = SamplingParameters(1.0, repetition_penalty=PENALTY)
    drafter = ModelDrafter(draft, sampling, rule)
    counts: Counter[tuple[int, ...]] = Counter()
    rounds: list[int] = []
    for seed in range(DRAWS):
        generation = generation_of(START, LENGTH, k, seed=seed, sampling=sampling, rule=rule)
        done = decoded(target, drafter, generation)
        counts[tuple(text_of(done))] += 1
        rounds.append(len(done))

    texts = list(itertools.product(range(3), repeat=LENGTH))
    steps = [list(zip(target.along(t), draft.along(t), t, strict=True)) for t in texts]
    of_target = np.array([[p[x] for p, _, x in text] for text in steps])
    of_draft = np.array([[q[x] for _, q, x in text] for text in steps])
    best = [[int(q.argmax()) == x for _, q, x in text] for text in steps]
    chances = of_target.prod(axis=1)
    assert p_value(counts, dict(zip(texts, chances * DRAWS, strict=True))) > 1e-4
    accepts = by_start(accept_probabilities(rule, np.log(of_target), np.log(of_draft), best), k)
    expected = float(chances @ replay(accepts, [LENGTH] * len(texts), [k])[k].rounds)
    assert np.mean(rounds) == pytest.approx(expected, abs=4 * np.std(rounds) / DRAWS**0.5)

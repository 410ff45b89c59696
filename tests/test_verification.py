"""Losslessness of the production verification, by exact enumeration in float64."""

import itertools
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.decoding.sampling import inverse_cdf
from harness.decoding.verification import verify_exact_match, verify_greedy, verify_sampled

VOCAB = 3
Law = Callable[[tuple[int, ...]], Tensor]


def random_law(seed: int) -> Law:
    def law(prefix: tuple[int, ...]) -> Tensor:
        rng = np.random.default_rng([seed, len(prefix), *prefix])
        return torch.from_numpy(rng.dirichlet(np.ones(VOCAB)))

    return law


def law_with_zeros(seed: int) -> Law:
    full = random_law(seed)

    def law(prefix: tuple[int, ...]) -> Tensor:
        probs = full(prefix).clone()
        probs[(seed + len(prefix)) % VOCAB] = 0.0
        return probs / probs.sum()

    return law


def tied(_prefix: tuple[int, ...]) -> Tensor:
    return torch.full((VOCAB,), 1.0 / VOCAB, dtype=torch.float64)


def half_tied(_prefix: tuple[int, ...]) -> Tensor:
    return torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)


def point(_prefix: tuple[int, ...]) -> Tensor:
    return torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)


PAIRS: dict[str, tuple[Law, Law]] = {
    "unlike": (random_law(1), random_law(2)),
    "equal": (random_law(3), random_law(3)),
    "zeros in both": (law_with_zeros(1), law_with_zeros(2)),
    "ties": (tied, half_tied),
    "disjoint": (half_tied, lambda _: torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)),
    "certain draft": (random_law(4), point),
    "certain target": (point, random_law(5)),
}


def sequence_law(law: Law, length: int) -> dict[tuple[int, ...], float]:
    """Probability of every sequence of `length` tokens under `law`."""
    return {
        tokens: float(np.prod([float(law(tokens[:i])[tokens[i]]) for i in range(length)]))
        for tokens in itertools.product(range(VOCAB), repeat=length)
    }


def cells(breakpoints: list[float]) -> list[tuple[float, float]]:
    """(midpoint, length) of the intervals that the breakpoints cut (0, 1] into."""
    edges = sorted({0.0, 1.0, *(point for point in breakpoints if 0.0 < point < 1.0)})
    return [((low + high) / 2, high - low) for low, high in itertools.pairwise(edges)]


def resample_cells(target: Tensor, draft: Tensor, accepted: int) -> list[tuple[float, float]]:
    """Cells of the uniform that decides the target's own token after `accepted` draft tokens."""
    row = target[accepted]
    points: list[float] = (row.cumsum(0) / row.sum()).tolist()
    if accepted < len(draft):
        residual = (row - draft[accepted]).clamp_min(0)
        if residual.sum() > 0:
            points += (residual.cumsum(0) / residual.sum()).tolist()
    return cells(points)


def emitted_law(
    target_law: Law, draft_law: Law, k: int, *, rule: str
) -> dict[tuple[int, ...], float]:
    """Exact law of the first k + 1 tokens when a round is followed by plain target sampling."""
    total: dict[tuple[int, ...], float] = defaultdict(float)
    for drafted in itertools.product(range(VOCAB), repeat=k):
        rows = [draft_law(drafted[:i]) for i in range(k)]
        if rule == "greedy_draft":
            weight = float(all(int(rows[i].argmax()) == drafted[i] for i in range(k)))
        else:
            weight = float(np.prod([float(rows[i][drafted[i]]) for i in range(k)]))
        if weight == 0.0:
            continue
        target = torch.stack([target_law(drafted[:i]) for i in range(k + 1)])
        draft = torch.stack(rows)
        for (accepted, token), share in round_outcomes(target, draft, drafted, rule).items():
            emitted = (*drafted[:accepted], token)
            for rest in itertools.product(range(VOCAB), repeat=k + 1 - len(emitted)):
                whole = emitted + rest
                tail = [float(target_law(whole[:i])[whole[i]]) for i in range(len(emitted), k + 1)]
                total[whole] += weight * share * float(np.prod(tail))
    return total


def round_outcomes(
    target: Tensor, draft: Tensor, drafted: tuple[int, ...], rule: str
) -> dict[tuple[int, int], float]:
    """Law of (accepted, next token), by calling the production function once per cell."""
    k = len(drafted)
    tokens = torch.tensor(drafted)
    law: dict[tuple[int, int], float] = defaultdict(float)
    if rule == "exact_match":
        rows = (cells((row.cumsum(0) / row.sum()).tolist()) for row in target)
        for combination in itertools.product(*rows):
            uniforms = torch.tensor([mid for mid, _ in combination], dtype=torch.float64)
            decision = verify_exact_match(target, tokens, uniforms)
            share = float(np.prod([length for _, length in combination]))
            law[int(decision.accepted), int(decision.next_token)] += share
        return law
    deterministic = rule == "greedy_draft"
    ratios = [
        float(target[i, t] / (1.0 if deterministic else draft[i, t])) for i, t in enumerate(drafted)
    ]
    if deterministic:
        draft = torch.zeros_like(draft).scatter_(1, tokens.unsqueeze(1), 1.0)
    laws = None if deterministic else draft
    for flags in itertools.product(*(cells([ratio]) for ratio in ratios)):
        accept = torch.tensor([flag for flag, _ in flags], dtype=torch.float64)
        probe = verify_sampled(target, tokens, laws, accept, torch.full((k + 1,), 0.5))
        for mid, length in resample_cells(target, draft, int(probe.accepted)):
            uniforms = torch.full((k + 1,), mid, dtype=torch.float64)
            decision = verify_sampled(target, tokens, laws, accept, uniforms)
            assert decision.accepted == probe.accepted
            share = length * float(np.prod([size for _, size in flags]))
            law[int(decision.accepted), int(decision.next_token)] += share
    return law


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_emitted_tokens_have_the_target_law_exactly(name: str, k: int) -> None:
    target_law, draft_law = PAIRS[name]
    law = emitted_law(target_law, draft_law, k, rule="ratio")
    for tokens, probability in sequence_law(target_law, k + 1).items():
        assert law.get(tokens, 0.0) == pytest.approx(probability, abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_draft_that_proposes_its_argmax_is_lossless_too(k: int) -> None:
    target_law, draft_law = PAIRS["unlike"]
    law = emitted_law(target_law, draft_law, k, rule="greedy_draft")
    for tokens, probability in sequence_law(target_law, k + 1).items():
        assert law.get(tokens, 0.0) == pytest.approx(probability, abs=1e-12)


@pytest.mark.parametrize("k", [1, 2])
def test_exact_match_is_lossless_too(k: int) -> None:
    target_law, draft_law = PAIRS["unlike"]
    law = emitted_law(target_law, draft_law, k, rule="exact_match")
    for tokens, probability in sequence_law(target_law, k + 1).items():
        assert law.get(tokens, 0.0) == pytest.approx(probability, abs=1e-12)


def test_the_enumeration_notices_a_rule_that_is_not_lossless() -> None:
    """The same enumeration over a law that is not the target's must not pass."""
    target_law, draft_law = PAIRS["unlike"]
    law = emitted_law(target_law, draft_law, 2, rule="ratio")
    other = sequence_law(draft_law, 3)
    assert max(abs(law[tokens] - other[tokens]) for tokens in other) > 1e-2


def test_equal_laws_accept_everything_even_at_the_largest_uniform() -> None:
    law = torch.softmax(torch.randn(5, 50, generator=torch.Generator().manual_seed(0)), -1)
    decision = verify_sampled(law, torch.arange(4), law[:-1], torch.ones(4), torch.ones(5))
    assert int(decision.accepted) == 4


def test_a_token_the_target_gives_zero_is_never_accepted() -> None:
    target = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    tiny = torch.tensor([5e-324], dtype=torch.float64)  # underflows against any draft mass
    for draft in (torch.tensor([[1e-30, 1.0]]), None):
        decision = verify_sampled(target, torch.tensor([0]), draft, tiny, torch.tensor([0.5, 0.5]))
        assert (int(decision.accepted), int(decision.next_token)) == (0, 1)


def test_an_empty_proposal_draws_the_target_token() -> None:
    target = torch.tensor([[0.25, 0.75]])
    empty = torch.empty(0, dtype=torch.long)
    decision = verify_sampled(target, empty, None, torch.empty(0), torch.tensor([0.3]))
    assert (int(decision.accepted), int(decision.next_token)) == (0, 1)


def test_greedy_accepts_up_to_the_first_difference() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([2, 0, 1, 1]), 3).float()
    decision = verify_greedy(logits, torch.tensor([2, 1, 1]))
    assert (int(decision.accepted), int(decision.next_token)) == (1, 0)


def test_inverse_cdf_never_leaves_the_support() -> None:
    probs = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0])
    uniforms = torch.tensor([1e-300, 0.3, 0.30001, 1.0], dtype=torch.float64)
    drawn = inverse_cdf(probs.expand(4, -1), uniforms)
    assert set(drawn.tolist()) <= {1, 3}
    assert drawn[0] == 1
    assert drawn[-1] == 3

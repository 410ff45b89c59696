"""Losslessness of the production verification, by exact enumeration in float64."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.decoding.sampling import BROKEN, inverse_cdf
from harness.decoding.verification import (
    VERIFY,
    verify_block,
    verify_greedy,
    verify_sampled,
)
from harness.records import Rule
from harness.theory.acceptance_rules import accept_probabilities

VOCAB = 3
# The next token's distribution after a text
Distribution = Callable[[tuple[int, ...]], Tensor]


def random_distribution(seed: int, *, zeros: bool = False) -> Distribution:
    def after(prefix: tuple[int, ...]) -> Tensor:
        rng = np.random.default_rng([seed, len(prefix), *prefix])
        probs = torch.from_numpy(rng.dirichlet(np.ones(VOCAB)))
        if zeros:
            probs[(seed + len(prefix)) % VOCAB] = 0.0
        return probs / probs.sum()

    return after


def constant(*probs: float) -> Distribution:
    return lambda _: torch.tensor(probs, dtype=torch.float64)


TIED, HALF_TIED, CERTAIN = constant(1 / 3, 1 / 3, 1 / 3), constant(0.5, 0.5, 0), constant(0, 1, 0)
PAIRS: dict[str, tuple[Distribution, Distribution]] = {
    "unlike": (random_distribution(1), random_distribution(2)),
    "equal": (random_distribution(3), random_distribution(3)),
    "zeros in both": (random_distribution(1, zeros=True), random_distribution(2, zeros=True)),
    "ties": (TIED, HALF_TIED),
    "disjoint": (HALF_TIED, constant(0, 0, 1)),
    "certain draft": (random_distribution(4), CERTAIN),
    "certain target": (CERTAIN, random_distribution(5)),
}


def sequence_probabilities(after: Distribution, length: int) -> dict[tuple[int, ...], float]:
    """Of every sequence of `length` tokens."""
    return {
        tokens: float(np.prod([float(after(tokens[:i])[tokens[i]]) for i in range(length)]))
        for tokens in itertools.product(range(VOCAB), repeat=length)
    }


def cells(breakpoints: Iterable[float]) -> list[tuple[float, float]]:
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


def emitted_probabilities(
    target: Distribution, draft: Distribution, k: int, *, rule: Rule
) -> dict[tuple[int, ...], float]:
    """Of the first k + 1 tokens when a round is followed by plain target sampling."""
    total: dict[tuple[int, ...], float] = defaultdict(float)
    for drafted in itertools.product(range(VOCAB), repeat=k):
        rows = [draft(drafted[:i]) for i in range(k)]
        if rule == "greedy_draft":
            weight = float(all(int(rows[i].argmax()) == drafted[i] for i in range(k)))
        else:
            weight = float(np.prod([float(rows[i][drafted[i]]) for i in range(k)]))
        if weight:
            for tokens, share in emitted_after(target, draft, drafted, k + 1, rule).items():
                total[tokens] += weight * share
    return total


def emitted_after(
    target: Distribution,
    draft: Distribution,
    drafted: tuple[int, ...],
    length: int,
    rule: Rule = "ratio",
) -> dict[tuple[int, ...], float]:
    """Of the first `length` tokens, given what was drafted."""
    total: dict[tuple[int, ...], float] = defaultdict(float)
    target_rows = torch.stack([target(drafted[:i]) for i in range(len(drafted) + 1)])
    draft_rows = torch.stack([draft(drafted[:i]) for i in range(len(drafted))])
    for (accepted, token), share in round_outcomes(target_rows, draft_rows, drafted, rule).items():
        emitted = (*drafted[:accepted], token)
        for rest in itertools.product(range(VOCAB), repeat=length - len(emitted)):
            tokens = emitted + rest
            tail = [float(target(tokens[:i])[tokens[i]]) for i in range(len(emitted), length)]
            total[tokens] += share * float(np.prod(tail))
    return total


def round_outcomes(
    target: Tensor, draft: Tensor, drafted: tuple[int, ...], rule: Rule
) -> dict[tuple[int, int], float]:
    """Of (accepted, next token), by calling the production function once per cell."""
    k = len(drafted)
    tokens = torch.tensor(drafted)
    chances: dict[tuple[int, int], float] = defaultdict(float)
    if rule == "exact_match":
        rows = (cells((row.cumsum(0) / row.sum()).tolist()) for row in target)
        for combination in itertools.product(*rows):
            uniforms = torch.tensor([mid for mid, _ in combination], dtype=torch.float64)
            decision = VERIFY[rule](target, tokens, None, uniforms[:k], uniforms)
            share = float(np.prod([length for _, length in combination]))
            chances[int(decision.accepted), int(decision.next_token)] += share
        return chances
    certain = rule == "greedy_draft"
    if certain:
        draft = torch.zeros_like(draft).scatter_(1, tokens.unsqueeze(1), 1.0)
    limits = [float(target[i, t] / draft[i, t]) for i, t in enumerate(drafted)]
    probs, verify, weighted = None if certain else draft, VERIFY[rule], target
    if rule == "block":
        limits, weighted = block_limits(target, draft, limits)
    for flags in itertools.product(*(cells([limit]) for limit in limits)):
        accept = torch.tensor([flag for flag, _ in flags], dtype=torch.float64)
        probe = verify(target, tokens, probs, accept, torch.full((k + 1,), 0.5))
        for mid, length in resample_cells(weighted, draft, int(probe.accepted)):
            uniforms = torch.full((k + 1,), mid, dtype=torch.float64)
            decision = verify(target, tokens, probs, accept, uniforms)
            assert decision.accepted == probe.accepted
            share = length * float(np.prod([size for _, size in flags]))
            chances[int(decision.accepted), int(decision.next_token)] += share
    return chances


def block_limits(
    target: Tensor, draft: Tensor, ratios: Iterable[float]
) -> tuple[list[float], Tensor]:
    """h_1 .. h_n of Sun et al. 2024, and the target's rows times p_0 .. p_n."""
    stands = [1.0]
    for ratio in ratios:
        stands.append(min(1.0, stands[-1] * ratio))
    weighted = target * torch.tensor(stands, dtype=torch.float64).unsqueeze(1)
    limits: list[float] = []
    for i in range(1, len(draft)):
        left = float((weighted[i] - draft[i]).clamp_min(0).sum())
        limits.append(left / (left + 1 - stands[i]) if left else float(stands[i] == 1.0))
    return [*limits, stands[-1]], weighted


CASES: list[tuple[str, Rule, int]] = [
    *((name, "ratio", k) for name in PAIRS for k in (1, 2, 3, 4)),
    *(("unlike", "greedy_draft", k) for k in (1, 2, 3, 4)),
    *(("unlike", "exact_match", k) for k in (1, 2)),
    *((name, "block", 2) for name in PAIRS),
]


@pytest.mark.parametrize(("name", "rule", "k"), CASES)
def test_emitted_tokens_have_the_target_distribution_exactly(name: str, rule: Rule, k: int) -> None:
    target, draft = PAIRS[name]
    emitted = emitted_probabilities(target, draft, k, rule=rule)
    for tokens, probability in sequence_probabilities(target, k + 1).items():
        assert emitted.get(tokens, 0.0) == pytest.approx(probability, abs=1e-12)


@pytest.mark.parametrize(
    ("k", "pair"),
    [
        *itertools.product((1, 2, 3), range(3)),
        (4, 0),
        *(pytest.param(4, pair, marks=pytest.mark.exhaustive) for pair in (1, 2)),
    ],
)
def test_block_verification_accepts_given_the_text_what_replay_expects(k: int, pair: int) -> None:
    """Of all that one round can do on random pairs whose tokens depend on all before them."""
    target, draft = random_distribution(10 + pair), random_distribution(20 + pair)
    accepted: dict[tuple[int, ...], np.ndarray] = defaultdict(lambda: np.zeros(k + 1))
    for drafted in itertools.product(range(VOCAB), repeat=k):
        target_rows = torch.stack([target(drafted[:i]) for i in range(k + 1)])
        draft_rows = torch.stack([draft(drafted[:i]) for i in range(k)])
        weight = float(np.prod([float(draft_rows[i, t]) for i, t in enumerate(drafted)]))
        for (count, token), share in round_outcomes(
            target_rows, draft_rows, drafted, "block"
        ).items():
            start = (*drafted[:count], token)
            for rest in itertools.product(range(VOCAB), repeat=k + 1 - len(start)):
                tail = [float(target((*start, *rest[:i]))[t]) for i, t in enumerate(rest)]
                accepted[start + rest][count] += weight * share * float(np.prod(tail))
    for text, probability in sequence_probabilities(target, k + 1).items():
        assert accepted[text].sum() == pytest.approx(probability, abs=1e-12)
        at_least = accepted[text][::-1].cumsum()[::-1][1:]
        log_target, log_draft = (
            [float(model(text[:i])[text[i]].log()) for i in range(k)] for model in (target, draft)
        )
        expected = accept_probabilities("block", log_target, log_draft, False).cumprod()
        assert at_least == pytest.approx(probability * expected, abs=1e-12)
        by_ratio = accept_probabilities("ratio", log_target, log_draft, False).cumprod()
        assert (expected >= by_ratio - 1e-12).all()


def test_block_verification_reads_a_draft_of_fewer_rows_and_a_broken_row() -> None:
    generator = torch.Generator().manual_seed(1)
    target = torch.softmax(torch.randn(4, 9, generator=generator, dtype=torch.float64), -1)
    draft = torch.softmax(torch.randn(3, 7, generator=generator, dtype=torch.float64), -1)
    tokens, uniforms = torch.tensor([2, 0, 5]), torch.full((4,), 0.4, dtype=torch.float64)
    padded = torch.nn.functional.pad(draft, (0, 2))
    for accept in (torch.full((3,), 1e-9, dtype=torch.float64), uniforms[:3]):
        narrow = verify_block(target, tokens, draft, accept, uniforms)
        assert narrow == verify_block(target, tokens, padded, accept, uniforms)
    target[1] = torch.nan
    broken = verify_block(target, tokens, draft, torch.full_like(uniforms[:3], 1e-9), uniforms)
    assert (int(broken.accepted), int(broken.next_token)) == (1, BROKEN)


def test_the_enumeration_notices_a_rule_that_is_not_lossless() -> None:
    """The same enumeration compared with another distribution must not pass."""
    target, draft = PAIRS["unlike"]
    emitted = emitted_probabilities(target, draft, 2, rule="ratio")
    other = sequence_probabilities(draft, 3)
    assert max(abs(emitted[tokens] - other[tokens]) for tokens in other) > 1e-2


def test_equal_distributions_accept_everything_even_at_the_largest_uniform() -> None:
    probs = torch.softmax(torch.randn(5, 50, generator=torch.Generator().manual_seed(0)), -1)
    for verify in (verify_sampled, verify_block):
        decision = verify(probs, torch.arange(4), probs[:-1], torch.ones(4), torch.ones(5))
        assert int(decision.accepted) == 4


def test_a_token_the_target_gives_zero_is_never_accepted() -> None:
    target = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    tiny = torch.tensor([5e-324], dtype=torch.float64)  # underflows against any draft mass
    for draft in (torch.tensor([[1e-30, 1.0]]), None):
        for verify in (verify_sampled, verify_block):
            decision = verify(target, torch.tensor([0]), draft, tiny, torch.tensor([0.5, 0.5]))
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

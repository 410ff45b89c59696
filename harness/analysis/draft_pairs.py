"""Two drafts on the same tokens: which accepts where, and what the better before each round brings.

Both scored the same texts of the target. Where they accept is compared at the first draft token of
a round from every position; given the text, what the two draw is independent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.analysis.cells import prompts_of
from harness.analysis.predicted import evidence_of
from harness.analysis.scored import Array, Labels, Scored, of_texts
from harness.analysis.token_classes import CLASSES
from harness.stats.jackknife import CONFIDENCE, enough_prompts, half_width, workload_ratio
from harness.theory.replay import RoundChoice, cheapest_rounds

# Prompts at which two drafts must differ by a token for an interval of their difference
LEAST_DIFFERING = 5


@dataclass(frozen=True)
class JointRow:
    """Where two drafts accept the first token of a round, by class of token; shares of it."""

    name: str
    token_share: float
    both: float
    first: float
    second: float
    neither: float


@dataclass(frozen=True)
class Compared:
    """Two drafts on the same tokens.

    Attributes:
        first, second, k, second_k: the drafts, each at its best K.
        ratio: speedup of the second / that of the first, with its interval over prompts.
        alpha_difference: share of tokens that only the second accepts less that only the first
            does, with its interval over prompts.
        rows: by class; the first one is of all tokens.
        router: the speedup of the best choice before every round, were all chances known; None
            where requests of a server cost more than their rounds.
        rounds_of_second: share of its rounds that the second drafts.
    """

    temperature: float
    first: str
    second: str
    k: int
    second_k: int
    ratio: float
    ratio_lo: float | None
    ratio_hi: float | None
    alpha_difference: float
    alpha_difference_lo: float | None
    alpha_difference_hi: float | None
    rows: tuple[JointRow, ...]
    router: float | None
    rounds_of_second: float | None


def compare(first: Scored, second: Scored, classes: Sequence[Labels]) -> Compared:
    """Two drafts on the same texts; the ratio of their speedups is taken prompt by prompt."""
    texts = first.texts
    # Of each text, [n] the chance that a round from there has its first draft token accepted
    chances = [
        [each for part in scored.parts for each in of_texts(part, part.chances[:, :, 0])]
        for scored in (first, second)
    ]
    joined = [np.concatenate(each) for each in chances]
    weights = np.repeat(first.factors, [len(text.tokens) for text in texts])
    labels = np.concatenate(classes)
    rows = [_joint("all", weights, *joined)]
    for number, name in enumerate(CLASSES):
        inside = labels == number
        if inside.any():
            rows.append(_joint(name, weights * inside, *joined))
    latencies = {each.name.draft: each.latency for each in (first, second)}
    replays = [each.replays() for each in (first, second)]
    both = replace(
        replays[0],
        candidates={**replays[0].candidates, **replays[1].candidates},
        lookups=replays[0].lookups | replays[1].lookups,
    )
    workload = evidence_of(both, latencies).workload(first.weights)
    ratios, variance = workload.log_ratios(0)
    bounds: tuple[float | None, float | None] = (None, None)
    if enough_prompts(workload.prompt_sets):
        half = float(half_width(variance, CONFIDENCE)[1])
        bounds = float(np.exp(ratios[1] - half)), float(np.exp(ratios[1] + half))
    router, share = _router(first, second)
    (draft, k), (second_draft, second_k) = first.name, second.name
    ratio, difference = float(np.exp(ratios[1])), _difference(first, chances[1], chances[0])
    names = (texts[0].temperature, draft, second_draft, k, second_k)
    return Compared(*names, ratio, *bounds, *difference, tuple(rows), router, share)


def _joint(name: str, weights: Array, first: Array, second: Array) -> JointRow:
    """Both drafts at tokens of these weights; drafts are drawn apart, given the text."""
    share = float(weights.sum())
    both, one, other = (
        float(weights @ each) / share
        for each in (first * second, first * (1.0 - second), second * (1.0 - first))
    )
    return JointRow(name, share, both, one, other, max(0.0, 1.0 - both - one - other))


def _difference(
    scored: Scored, second: Sequence[Array], first: Sequence[Array]
) -> tuple[float, float | None, float | None]:
    """Share of the tokens that the second accepts and the first does not, less the reverse.

    By prompt, as McNemar's test has it by pair: only what one of them alone accepts counts. Without
    an interval where the two differ at a token or more of fewer than `LEAST_DIFFERING` prompts.
    """
    prompts, rows = prompts_of(scored.texts)
    sums, differing = np.zeros((2, len(prompts))), np.zeros(len(prompts))
    for row, a, b in zip(rows, first, second, strict=True):
        sums[:, row] += float((b - a).sum()), len(a)
        differing[row] += float(np.abs(b - a).sum())
    sets = tuple(name for name, _ in prompts)
    estimate = workload_ratio(sums[0], sums[1], sets, scored.weights)
    enough = int((differing >= 1.0).sum()) >= LEAST_DIFFERING
    interval = estimate.interval() if enough else None
    return (estimate.value, interval and interval.lo, interval and interval.hi)


def _router(first: Scored, second: Scored) -> tuple[float | None, float | None]:
    """The speedup of the better of two drafts before every round, and the second's share of these.

    None where requests of a server cost a start besides their rounds.
    """
    if first.latency.served is not None or second.latency.served is not None:
        return None, None
    cost, rounds = 0.0, np.zeros(2)
    for one, other, at in zip(first.parts, second.parts, first.offsets, strict=True):
        factors = first.factors[at : at + len(one.lengths)]
        choices: list[RoundChoice] = []
        for scored, part in ((first, one), (second, other)):
            k, proposed = scored.name.k, np.minimum(part.proposed, scored.name.k)
            drafted = part._replace(chances=part.chances[:, :, :k], proposed=proposed)
            choices.append(RoundChoice(drafted, scored.latency.relative(k)))
        costs, by_drafts = cheapest_rounds(choices)
        cost += float(factors @ costs)
        rounds += by_drafts @ factors
    return 1.0 / cost, float(rounds[1] / rounds.sum())

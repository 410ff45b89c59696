"""What prevents a gain: the factors of a round, one at a time.

speedup = tokens_per_round x R(0) / R(K). Steps explain a round: in target steps it takes K c for
drafting, v(K) for the verify, and for what the steps leave over (accepting, sampling, host work:
the loop) the rest, so that the three add up to R(K). Each factor is set to what it would have to
be, or could be, with the others left as they were measured. A step that is bound by launches is no
property of the models: c is one of the engine then.
"""

from collections.abc import Sequence
from dataclasses import replace

from harness.analysis.cells import Weights
from harness.analysis.predicted import Predicted
from harness.analysis.verdict import Candidate
from harness.records import LatencyRow
from harness.summary import Answer, Explanation, Factor
from harness.theory.roofline import LAUNCH_BOUND_MBU
from harness.theory.speedup import StepTimes

# The rule of thumb of the engines' own documents: a draft five times as fast as its target
SLOW_DRAFT = 0.2


def explain(
    predicted: Predicted,
    answer: Answer,
    draft: str,
    floors: Sequence[LatencyRow] = (),
    weights: Weights = None,
) -> Explanation | None:
    """What prevents a gain of a draft at the K of an answer, else at its best K.

    `floors` are rows of latency.csv. None of a draft that was not replayed, of which no step was
    timed, or that looks its tokens up.
    """
    speedups = predicted.evidence.speedups(weights).items()
    gains = {name.k: gain for name, gain in speedups if name.draft == draft}
    if not gains or draft in predicted.replays.lookups:
        return None
    latency = predicted.latencies[draft]
    steps, rounds, named = latency.steps, latency.rounds, answer.named[1]
    k = named if named in gains else max(gains, key=gains.__getitem__)
    if steps is None or not steps.covers(k):
        return None
    explanation = Explanation(draft, k, predicted.replays.temperature, steps.c)
    explanation = _with_floors(explanation, steps, floors)
    if gains[k] > 1.0:
        return explanation
    tokens = predicted.replays.weighted(Candidate(draft, k), weights).tokens_per_round
    # In target steps: what a round has to emit, and what it takes besides drafting and the verify
    plain, c, v = rounds.baseline_s / steps.target_s, steps.c, steps.v(k)
    loop = rounds.at(k) / steps.target_s - k * c - v
    largest_c = (tokens * plain - v - loop) / k
    alone: tuple[tuple[Factor, bool], ...] = (
        ("expensive_verify", tokens * plain > k * c + 1.0 + loop),
        ("slow_loop", tokens > k * c + v),
        ("slow_draft", largest_c > 0.0 and c > SLOW_DRAFT),
        ("acceptance", rounds.break_even_alpha(k) is not None),
    )
    factors = tuple(name for name, holds in alone if holds)
    return replace(explanation, factors=factors, largest_c=largest_c)


def _with_floors(
    explanation: Explanation, steps: StepTimes, latency: Sequence[LatencyRow]
) -> Explanation:
    """With the share of both steps that reading takes, at the context that they were timed at."""
    floors = [row for row in latency if row.kind == "step" and row.batch == 1 and row.floor_ms]
    target = next((row.floor_ms for row in floors if row.role == "target"), None)
    of_draft = (row for row in floors if row.role == "draft" and row.model == explanation.draft)
    draft = next((row.floor_ms for row in of_draft), None)
    if not target or not draft:
        return explanation
    shares = draft / (1e3 * steps.draft_s), target / (1e3 * steps.target_s)
    return replace(
        explanation,
        launch_bound=min(shares) < LAUNCH_BOUND_MBU,
        floor_c=draft / target,
        draft_floor_share=shares[0],
        target_floor_share=shares[1],
    )

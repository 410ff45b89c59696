"""What prevents a gain: the factors of a round, one at a time.

speedup = tokens_per_round x R(0) / R(K). Steps explain a round: in target steps it takes K c for
drafting, v(K) for the verify, and for what the steps leave over (accepting, sampling, host work:
the loop) the rest, so that the three add up to R(K). Each factor is set to what it would have to
be, or could be, with the others left as they were measured.
"""

from harness.analysis.cells import Weights
from harness.analysis.predicted import Predicted
from harness.analysis.verdict import Candidate
from harness.summary import Answer, Explanation, Factor

# The rule of thumb of the engines' own documents: a draft five times as fast as its target
SLOW_DRAFT = 0.2


def explain(
    predicted: Predicted, answer: Answer, draft: str, weights: Weights = None
) -> Explanation | None:
    """What prevents a gain of a draft at the K of an answer, else at its best K.

    None where it gains, and of a draft that was not replayed, of which no step was timed, or that
    looks its tokens up.
    """
    speedups = predicted.evidence.speedups(weights).items()
    gains = {name.k: gain for name, gain in speedups if name.draft == draft}
    if not gains or draft in predicted.replays.lookups:
        return None
    latency = predicted.latencies[draft]
    steps, rounds, named = latency.steps, latency.rounds, answer.named[1]
    k = named if named in gains else max(gains, key=gains.__getitem__)
    if steps is None or not steps.covers(k) or gains[k] > 1.0:
        return None
    tokens = predicted.replays.weighted(Candidate(draft, k), weights).tokens_per_round
    # In target steps: a plain token, and what a round takes besides drafting and the verify
    plain, c, v = rounds.baseline_s / steps.target_s, steps.c, steps.v(k)
    loop = rounds.at(k) / steps.target_s - k * c - v
    largest_c = (tokens * plain - v - loop) / k
    alone: tuple[tuple[Factor, bool], ...] = (
        ("expensive_verify", tokens * plain > k * c + 1.0 + loop),
        ("slow_loop", tokens > k * c + v),
        ("slow_draft", largest_c > 0.0 and c > SLOW_DRAFT),
        ("acceptance", rounds.break_even_alpha(k) is not None),
    )
    factors: tuple[Factor, ...] = tuple(name for name, holds in alone if holds)
    return Explanation(draft, k, predicted.replays.temperature, factors, c, largest_c)

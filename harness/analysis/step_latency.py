"""What a round costs, and how well that is known: step times with their raw samples.

A round of a model draft costs K draft steps and a verify of K + 1 positions. A drafter that looks
its proposal up (an n-gram) costs one look-up however much it proposes, and where it proposes n < K
tokens the verify is of n + 1 positions; n = 0 is a plain step. Plain decoding costs a step a token.

Step times are known to within their samples, so an interval must resample those as well: the
bootstrap of a median of m samples is the law of the middle order statistic of m draws from them,
which is sampled directly from uniform order statistics (Beta laws; David and Nagaraja, "Order
Statistics", 2003, section 2), without drawing m samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.analysis.steps import VERIFY, reference, step_times
from harness.records import StepTiming, UserError
from harness.stats.intervals import Array
from harness.theory.speedup import StepTimes, break_even_alpha


@dataclass(frozen=True)
class Latency:
    """Step times of one draft with the target, and what is known of their accuracy.

    Attributes:
        times: medians.
        timings: the raw samples behind them; none where the times were typed in, and then an
            interval takes them as exact.
        target_prefill_s, draft_prefill_s: prefill seconds per prompt token; None if unknown.
    """

    times: StepTimes
    timings: tuple[StepTiming, ...] = ()
    target_prefill_s: float | None = None
    draft_prefill_s: float | None = None


def latency_of(timings: Sequence[StepTiming]) -> Latency:
    """The latency of one pair from its raw samples; of several contexts or batches, the first.

    Raises:
        UserError: no draft step or no target step among them.
    """
    timings = reference(timings)
    for role in ("draft", "target"):
        if not any(t.role == role and t.kind == "step" for t in timings):
            raise UserError(f"latency: no {role} step was timed; time it or type its time in")
    prefill = {
        t.role: float(np.median(t.samples_s)) / t.tokens
        for t in timings
        if t.kind == "prefill" and t.tokens
    }
    return Latency(step_times(timings), tuple(timings), prefill.get("target"), prefill.get("draft"))


def round_costs(times: StepTimes, k: int, *, lookup: bool) -> Array:
    """Seconds of a round by how many tokens it proposes, n = 0..k, shape (k + 1,).

    Args:
        times: step times; where `lookup`, draft_s is one look-up.
        k: num_draft_tokens.
        lookup: whether the drafter looks its proposal up.

    Raises:
        UserError: a verify that the times do not cover.
    """
    verify = [times.target_s, *(times.v(n) * times.target_s for n in range(1, k + 1))]
    steps = np.ones(k + 1) if lookup else np.arange(k + 1.0)
    return times.draft_s * steps + np.array(verify)


def break_even(times: StepTimes, k: int, *, lookup: bool) -> float | None:
    """The iid break-even alpha; a look-up costs its time once a round, not once a token."""
    return break_even_alpha(k, times.c / k if lookup else times.c, times.v(k))


class LatencyDraws:
    """Resampled step times: each timing's median is drawn once, and shared by all drafts."""

    def __init__(self, draws: int, seed: int) -> None:
        """Draw `draws` medians of each timing, from this seed."""
        self._draws = draws
        self._rng = np.random.default_rng([seed, 1])
        self._medians: dict[StepTiming, Array] = {}

    def relative_costs(self, latency: Latency, k: int, *, lookup: bool) -> Array:
        """`round_costs` / target step, resampled, shape (draws, k + 1); (1, k + 1) if exact."""
        times = latency.times
        if not latency.timings:
            return round_costs(times, k, lookup=lookup)[None] / times.target_s
        by_name = {(t.role, t.kind, t.tokens): t for t in latency.timings}
        target = self._drawn(by_name["target", "step", 1])
        draft = self._drawn(by_name["draft", "step", 1])
        verify = [target] * (k + 1)
        if times.verify_s:
            verify[1:] = [self._drawn(by_name[(*VERIFY, n + 1)]) for n in range(1, k + 1)]
        drafting = draft[:, None] * (np.ones(k + 1) if lookup else np.arange(k + 1.0))
        return (drafting + np.stack(verify, axis=1)) / target[:, None]

    def _drawn(self, timing: StepTiming) -> Array:
        if timing not in self._medians:
            self._medians[timing] = median_draws(timing.samples_s, self._draws, self._rng)
        return self._medians[timing]


def median_draws(samples: Sequence[float], draws: int, rng: np.random.Generator) -> Array:
    """Medians of `draws` bootstrap resamples of the samples, [draws], exact in law.

    Args:
        samples: m durations.
        draws: how many.
        rng: source of randomness.
    """
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    size = len(ordered)
    half = (size + 1) // 2
    # The half-th smallest of `size` uniforms, and above it the next one where size is even.
    lower = rng.beta(half, size - half + 1, draws)
    picked = ordered[np.minimum((lower * size).astype(np.intp), size - 1)]
    if size % 2:
        return picked
    upper = lower + (1.0 - lower) * rng.beta(1, size - half, draws)
    return (picked + ordered[np.minimum((upper * size).astype(np.intp), size - 1)]) / 2.0

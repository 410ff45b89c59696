"""What steps and rounds cost, and how well that is known: from raw samples to the formulas.

One record per timed thing: a `StepTiming` holds the raw samples of one forward as they are stored,
and `Latency` all that is known of one draft with the target: the medians that the formulas take
(`StepTimes`), the samples behind them, and the prefills.

A round of a model draft costs K draft steps and a verify of K + 1 positions. A drafter that looks
its proposal up (an n-gram) costs one look-up however much it proposes, and where it proposes n < K
tokens the verify is of n + 1 positions; n = 0 is a plain step. Plain decoding costs a step a token.

Step times are known to within their samples, so an interval must resample those as well: the
bootstrap of a median of m samples is the distribution of the middle order statistic of m draws from
them, which is sampled directly from uniform order statistics (Beta distributions; David and
Nagaraja, "Order Statistics", 2003, section 2), without drawing m samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pandas as pd

from harness.records import LatencyRow, StepTiming, UserError
from harness.stats.bootstrap import Array
from harness.storage import StoredRun
from harness.summary import StepSummary
from harness.theory.speedup import StepTimes, break_even_alpha

VERIFY = ("target", "verify")
# Of a look-up in a text of some thousand tokens, where step times were typed in
LOOKUP_S = 1e-5


@dataclass(frozen=True)
class Latency:
    """Step times of one draft with the target, and what is known of their accuracy."""

    times: StepTimes
    # The raw samples behind them; none where the times were typed in, and then an interval takes
    # them as exact.
    timings: tuple[StepTiming, ...] = ()
    # target_prefill_s, draft_prefill_s: prefill seconds per prompt token; None if unknown.
    target_prefill_s: float | None = None
    draft_prefill_s: float | None = None

    @property
    def context_tokens(self) -> int | None:
        """In the cache before the timed steps; None where the times were typed in."""
        return next((t.context_tokens for t in self.timings if t.kind == "step"), None)

    def summary(self, draft: str) -> StepSummary:
        """The medians as a report shows them."""
        return StepSummary(
            draft=draft,
            draft_step_s=self.times.draft_s,
            target_step_s=self.times.target_s,
            verify_s=self.times.verify_s,
            context_tokens=self.context_tokens,
            target_prefill_s=self.target_prefill_s,
            draft_prefill_s=self.draft_prefill_s,
            typed=not self.timings,
        )


# ---- from samples to medians ---------------------------------------------------------------------


def merged(timings: Sequence[StepTiming]) -> list[StepTiming]:
    """One timing per forward, with the samples of all that are of the same, in their order."""
    pooled: dict[StepTiming, tuple[float, ...]] = {}
    for timing in timings:
        key = replace(timing, samples_s=())
        pooled[key] = pooled.get(key, ()) + timing.samples_s
    return [replace(key, samples_s=samples) for key, samples in pooled.items()]


def latency_rows(timings: Sequence[StepTiming]) -> list[LatencyRow]:
    """Rows of latency.csv from raw samples: median, p10 and p90 in ms, without floors.

    A forward that was timed with several drafts is one row over all its samples.
    """
    rows: list[LatencyRow] = []
    for timing in merged([replace(timing, beside=None) for timing in timings]):
        p10, median, p90 = np.percentile(np.array(timing.samples_s) * 1e3, [10, 50, 90])
        rows.append(
            LatencyRow(
                role=timing.role,
                model=timing.model,
                kind=timing.kind,
                tokens=timing.tokens,
                context_tokens=timing.context_tokens,
                batch=timing.batch,
                median_ms=float(median),
                p10_ms=float(p10),
                p90_ms=float(p90),
                samples=len(timing.samples_s),
            )
        )
    return rows


def stored_rows(run: StoredRun) -> tuple[LatencyRow, ...]:
    """The rows of latency.csv, in stored order; an empty field is None."""
    integers = {"tokens", "context_tokens", "batch", "samples"}
    names = [field.name for field in fields(LatencyRow)]
    rows: list[LatencyRow] = []
    for entry in run.latency.to_dict("records"):
        values: dict[str, Any] = {
            name: None if pd.isna(entry.get(name)) else entry.get(name) for name in names
        }
        values |= {name: int(values[name]) for name in integers if values[name] is not None}
        rows.append(LatencyRow(**{**values, "model": values["model"] or ""}))
    return tuple(rows)


def reference(timings: Sequence[StepTiming]) -> list[StepTiming]:
    """The timings at the context and batch of the first step: those a prediction is made from.

    A profile times further contexts and batches after them.
    """
    first = next((timing for timing in timings if timing.kind == "step"), None)
    if first is None:
        return list(timings)
    where = (first.context_tokens, first.batch)
    return [
        timing
        for timing in timings
        if timing.kind == "prefill" or (timing.context_tokens, timing.batch) == where
    ]


def step_times(timings: Sequence[StepTiming]) -> StepTimes:
    """Medians as the formulas want them; of several contexts or batches the first counts."""
    medians = {
        (timing.role, timing.kind, timing.tokens): float(np.median(timing.samples_s))
        for timing in reference(timings)
    }
    for role in ("draft", "target"):
        if (role, "step", 1) not in medians:
            raise UserError(f"latency: no {role} step was timed; time it or type its time in")
    verify = sorted(tokens for role, kind, tokens in medians if (role, kind) == VERIFY)
    return StepTimes(
        draft_s=medians["draft", "step", 1],
        target_s=medians["target", "step", 1],
        verify_s=tuple(medians[(*VERIFY, tokens)] for tokens in verify),
    )


def latency_of(timings: Sequence[StepTiming]) -> Latency:
    """The latency of one pair from its raw samples."""
    timings = reference(timings)
    prefill = {
        t.role: float(np.median(t.samples_s)) / t.tokens
        for t in timings
        if t.kind == "prefill" and t.tokens
    }
    return Latency(step_times(timings), tuple(timings), prefill.get("target"), prefill.get("draft"))


def latency_of_draft(name: str, timings: Sequence[StepTiming]) -> Latency | None:
    """A draft's own samples with those of the target that were taken with it; None without any."""
    draft = [t for t in timings if t.role == "draft" and t.model == name]
    if not draft:
        return None
    target = [t for t in timings if t.role == "target" and t.beside == draft[0].beside]
    return latency_of([*target, *draft])


# ---- what a round costs --------------------------------------------------------------------------


def round_costs(times: StepTimes, k: int, *, lookup: bool) -> Array:
    """Seconds of a round by how many tokens it proposes, n = 0..k, shape (k + 1,).

    Where `lookup`, draft_s is one look-up.
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
    """Medians of `draws` bootstrap resamples of the samples, [draws], exact in distribution."""
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

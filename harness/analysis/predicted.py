"""Predicted seconds: replayed rounds times what a round costs, and every number that follows.

Rows of results.csv, workload speedups with their intervals, whole requests, alpha by category.
Counts are expectations, so they are not whole. Rates are ratios of sums over prompts; percentiles
are over prompts, a prompt's repetitions taken together.

Every candidate is judged against a target step that was timed with its own draft; where these
differ, its seconds are scaled to the first draft's target step, so that a machine whose pace
changed between drafts does not favour any.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from harness.analysis.cells import ratio
from harness.analysis.latency import (
    Latency,
    LatencyDraws,
    break_even,
    latency_of,
    round_costs,
)
from harness.analysis.replayed import Replays
from harness.analysis.verdict import Candidate, Evidence, Facts, Timed
from harness.records import ResultRow, StepTiming, UserError
from harness.stats.bootstrap import RESAMPLES, Array, Interval, Resamples, resample
from harness.stats.crossfit import FoldTimes
from harness.summary import CategoryAlpha, RequestSummary
from harness.theory.replay import Replayed

Latencies = Mapping[str, Latency]
# Fewer samples of a step than this in a fold give a median that is worse than no hold-out at all.
FOLD_SAMPLES = 4
FOLD_DRAWS = 200
PERCENTILE = 95
# The K at which categories are compared, or the nearest there is
CATEGORY_K = 4


def alpha_of(counts: Replayed) -> float | None:
    """Alpha over all prompts; None where nothing was judged."""
    return counts.alpha if counts.judged.sum() > 0.0 else None


def _round_costs(name: Candidate, replays: Replays, latency: Latency) -> Array:
    return round_costs(latency.times, name.k, lookup=name.draft in replays.lookups)


def _check_times(replays: Replays, latencies: Latencies) -> None:
    """Refuse a draft without step times, or a K that they do not cover."""
    for name in replays.candidates:
        if name.draft not in latencies:
            raise UserError(
                f"latency: no step times for draft {name.draft!r}; time it or type them in"
            )
        latencies[name.draft].times.v(name.k)


# ---- what a verdict rests on ---------------------------------------------------------------------


def evidence_of(replays: Replays, latencies: Latencies, *, seed: int = 0) -> Evidence:
    """Predicted decode seconds of every candidate on each prompt.

    A latency without samples is taken as exact.
    """
    _check_times(replays, latencies)
    tokens = replays.new_tokens
    target_s = latencies[replays.drafts[0]].times.target_s
    seconds = {
        name: counts.proposals
        @ _round_costs(name, replays, latencies[name.draft])
        * (target_s / latencies[name.draft].times.target_s)
        for name, counts in replays.candidates.items()
    }
    sampled = any(latencies[draft].timings for draft in replays.drafts)
    return Evidence(
        temperature=replays.temperature,
        prompts=replays.prompts,
        prompt_sets=replays.prompt_sets,
        baseline=Timed(tokens * target_s, tokens),
        candidates={name: Timed(decode_s, tokens) for name, decode_s in seconds.items()},
        facts={
            name: Facts(
                alpha_of(counts),
                break_even(
                    latencies[name.draft].times, name.k, lookup=name.draft in replays.lookups
                ),
            )
            for name, counts in replays.candidates.items()
        },
        times_by_fold=partial(times_by_fold, replays=replays, latencies=latencies, seed=seed)
        if sampled
        else None,
    )


def times_by_fold(
    folds: int, *, replays: Replays, latencies: Latencies, seed: int = 0
) -> FoldTimes:
    """How far predicted seconds depend on which samples the steps were timed with, by fold.

    The verdict chooses on some prompts and scores on others; for predicted seconds it must do the
    same with the samples of the step times, which all prompts share. Every step's samples are dealt
    into folds in turn, so that drift hits all folds alike. A step sampled fewer than FOLD_SAMPLES
    times per fold is not split: then every fold is chosen and scored on all samples, and the
    scatter alone is counted, once for all folds. Step times without samples are taken as exact.
    """
    sampled = {draft: latency for draft, latency in latencies.items() if latency.timings}
    timings = [timing for latency in sampled.values() for timing in latency.timings]
    split = all(len(timing.samples_s) >= folds * FOLD_SAMPLES for timing in timings)
    draws = [LatencyDraws(FOLD_DRAWS, seed + fold) for fold in range(folds)]
    parts = {draft: _parts(latency, folds) for draft, latency in sampled.items()} if split else {}
    shape = (len(replays.candidates), folds)
    times = FoldTimes(np.ones(shape), np.ones(shape), np.zeros(shape))
    for row, name in enumerate(replays.candidates):
        if name.draft not in sampled:
            continue
        if not split:
            # One error for all folds, which does not average out over them
            scatter = _scatter(name, replays, sampled[name.draft], draws[0])
            times.spread[row] = scatter * np.sqrt(folds)
            continue
        every = _cost(name, replays, sampled[name.draft])
        for fold, (inside, outside) in enumerate(zip(*parts[name.draft], strict=True)):
            times.chosen[row, fold] = _cost(name, replays, outside) / every
            times.scored[row, fold] = _cost(name, replays, inside) / every
            times.spread[row, fold] = _scatter(name, replays, inside, draws[fold])
    return times


def _cost(name: Candidate, replays: Replays, latency: Latency) -> float:
    """Seconds of all the candidate's rounds in target steps, at the medians."""
    proposals = replays.candidates[name].proposals.sum(axis=0)
    return float(proposals @ _round_costs(name, replays, latency)) / latency.times.target_s


def _scatter(name: Candidate, replays: Replays, latency: Latency, draws: LatencyDraws) -> float:
    """Standard deviation of the logarithm of `_cost` over resampled medians."""
    costs = draws.relative_costs(latency, name.k, lookup=name.draft in replays.lookups)
    return float(np.log(costs @ replays.candidates[name].proposals.sum(axis=0)).std())


def _parts(latency: Latency, folds: int) -> tuple[list[Latency], list[Latency]]:
    """The latency on each fold's samples, and on all but those."""

    def part(timing: StepTiming, fold: int, *, inside: bool) -> StepTiming:
        kept = [s for i, s in enumerate(timing.samples_s) if (i % folds == fold) == inside]
        return replace(timing, samples_s=tuple(kept))

    def latencies(*, inside: bool) -> list[Latency]:
        return [
            latency_of([part(timing, fold, inside=inside) for timing in latency.timings])
            for fold in range(folds)
        ]

    return latencies(inside=True), latencies(inside=False)


# ---- speedups with their intervals ---------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SpeedupDraws:
    """Workload speedups of every candidate, from the same resamples."""

    prompts: Resamples
    # By candidate, [1 + draws], prompts and step times resampled; entry 0 is the estimate.
    joint: Mapping[Candidate, Array]

    def point(self, name: Candidate) -> float:
        """The speedup itself."""
        return float(self.joint[name][0])

    def interval(self, name: Candidate) -> Interval | None:
        """Its interval."""
        return self.prompts.interval(self.joint[name])


def speedup_draws(
    replays: Replays,
    latencies: Latencies,
    weights: Mapping[str, float] | None = None,
    *,
    draws: int = RESAMPLES,
    seed: int = 0,
) -> SpeedupDraws:
    """Resample prompts and step times, and take every candidate's workload speedup.

    A workload's speedup is 1 / the weighted mean over sets of seconds per token in target steps.
    All candidates are resampled alike, so that "A beats B" is the share of resamples in which it
    does.
    """
    _check_times(replays, latencies)
    prompts = resample(replays.prompt_sets, weights, draws=draws, seed=seed)
    steps = LatencyDraws(draws, seed)
    joint: dict[Candidate, Array] = {}
    for name, counts in replays.candidates.items():
        latency, lookup = latencies[name.draft], name.draft in replays.lookups
        medians = steps.relative_costs(Latency(latency.times), name.k, lookup=lookup)
        resampled = steps.relative_costs(latency, name.k, lookup=lookup)
        per_token = prompts.ratio(counts.proposals, counts.new_tokens)
        costs = np.concatenate([medians, np.broadcast_to(resampled, (draws, name.k + 1))])
        joint[name] = 1.0 / (per_token * costs).sum(axis=1)
    return SpeedupDraws(prompts, joint)


# ---- rows of results.csv -------------------------------------------------------------------------


def replayed_rows(
    replays: Replays, latencies: Latencies, *, model: str, draws: int = RESAMPLES, seed: int = 0
) -> list[ResultRow]:
    """One row per prompt set and candidate, `source` replayed, and a k = 0 row per prompt set.

    The baseline rows use the first draft's step times.
    """
    rows: list[ResultRow] = []
    for prompt_set in sorted(set(replays.prompt_sets)):
        part = replays.only([prompt_set])
        gains = speedup_draws(part, latencies, draws=draws, seed=seed)
        baseline = latencies[part.drafts[0]]
        rows.append(_baseline_row(part, baseline, model))
        for name in part.candidates:
            latency = latencies[name.draft]
            pace = baseline.times.target_s / latency.times.target_s
            rows.append(_at_pace(_row(name, part, latency, gains, model), pace))
    return rows


def _at_pace(row: ResultRow, pace: float) -> ResultRow:
    """A row's times on the machine as it was when the baseline's target step was timed."""
    names = ("ms_per_token", "ms_per_token_p50", "ms_per_token_p90", "ttft_ms")
    times = {name: value * pace for name in names if (value := getattr(row, name)) is not None}
    return replace(row, **times, tokens_per_second=ratio(row.tokens_per_second, pace))


def _timed(part: Replays, k: int, seconds: Array, model: str) -> ResultRow:
    """What every row has, from decode seconds per prompt."""
    tokens = part.new_tokens
    prompt_ms = 1e3 * seconds / tokens
    ms_per_token = 1e3 * float(seconds.sum() / tokens.sum())
    return ResultRow(
        model=model,
        draft=None,
        prompt_set=part.prompt_sets[0],
        temperature=part.temperature,
        k=k,
        source="replayed" if k else "theory",
        status="complete",
        prompts=len(part.prompts),
        new_tokens=round(float(tokens.sum())),
        ms_per_token=ms_per_token,
        ms_per_token_p50=float(np.percentile(prompt_ms, 50)),
        ms_per_token_p90=float(np.percentile(prompt_ms, 90)),
        tokens_per_second=ratio(1e3, ms_per_token),
    )


def _baseline_row(part: Replays, latency: Latency, model: str) -> ResultRow:
    target_s = latency.times.target_s
    row = _timed(part, 0, part.new_tokens * target_s, model)
    prefill = _prefill_seconds(part, latency)
    if prefill is not None:
        row = replace(row, ttft_ms=1e3 * float(np.median(prefill / part.texts) + target_s))
    return replace(row, speedup=1.0, request_speedup=1.0 if prefill is not None else None)


def _row(
    name: Candidate, part: Replays, latency: Latency, gains: SpeedupDraws, model: str
) -> ResultRow:
    counts, lookup = part.candidates[name], name.draft in part.lookups
    seconds = counts.proposals @ _round_costs(name, part, latency)
    bounds = gains.interval(name)
    alphas = gains.prompts.interval(gains.prompts.pooled(counts.accepted, counts.judged))
    accepted, drafted = float(counts.accepted.sum()), float(counts.drafted.sum())
    row = replace(
        _timed(part, name.k, seconds, model),
        draft=name.draft,
        rounds=float(counts.rounds.sum()),
        drafted=drafted,
        accepted=accepted,
        rejected=float(counts.rejected.sum()),
        acceptance_rate=ratio(accepted, drafted),
        alpha=alpha_of(counts),
        alpha_lo=alphas.lo if alphas else None,
        alpha_hi=alphas.hi if alphas else None,
        mean_acceptance_length=counts.mean_acceptance_length,
        tokens_per_round=counts.tokens_per_round,
        rule=part.rule,
        speedup=gains.point(name),
        speedup_lo=bounds.lo if bounds else None,
        speedup_hi=bounds.hi if bounds else None,
        breakeven_alpha=break_even(latency.times, name.k, lookup=lookup),
    )
    plain = _prefill_seconds(part, latency)
    both = _prefill_seconds(part, latency, name.draft)
    if plain is None or both is None:
        return row
    before = plain.sum() + part.new_tokens.sum() * latency.times.target_s
    round_s = float(seconds.sum() / counts.rounds.sum())
    return replace(
        row,
        ttft_ms=1e3 * float(np.median(both / part.texts) + round_s),
        request_speedup=float(before / (both.sum() + seconds.sum())),
    )


# ---- whole requests ------------------------------------------------------------------------------


def _prefill_seconds(replays: Replays, latency: Latency, draft: str | None = None) -> Array | None:
    """Prefill seconds of each prompt, its repetitions added up, [n]; None where unknown.

    Taken as linear in the prompt's tokens, which understates a long prompt's attention.

    A draft's prefill is added to the target's; a look-up has none.
    """
    if latency.target_prefill_s is None:
        return None
    rate = latency.target_prefill_s
    if draft is not None and draft not in replays.lookups:
        if latency.draft_prefill_s is None:
            return None
        rate += latency.draft_prefill_s
    return replays.prompt_tokens * rate


def request_summary(replays: Replays, name: Candidate, latency: Latency) -> RequestSummary | None:
    """Whole requests with one candidate, prefills included: what a user waits for.

    Speculation adds the draft's prefill and saves decoding, so it gains less on a request than on
    its decoding, and may lose where the prompt is long and the answer short. None where a prefill
    was not timed.
    """
    counts = replays.candidates[name]
    plain = _prefill_seconds(replays, latency)
    both = _prefill_seconds(replays, latency, name.draft)
    if plain is None or both is None:
        return None
    before = plain + counts.new_tokens * latency.times.target_s
    after = both + counts.proposals @ _round_costs(name, replays, latency)
    return RequestSummary(
        draft=name.draft,
        k=name.k,
        temperature=replays.temperature,
        prompts=len(replays.prompts),
        speedup=float(before.sum() / after.sum()),
        plain_p95_s=float(np.percentile(before / replays.texts, PERCENTILE)),
        speculative_p95_s=float(np.percentile(after / replays.texts, PERCENTILE)),
        slower_share=float((after > before).mean()),
    )


# ---- alpha by category ---------------------------------------------------------------------------


def category_alpha(
    replays: Replays, *, draws: int = RESAMPLES, seed: int = 0
) -> tuple[CategoryAlpha, ...]:
    """Alpha of every draft on every category, at one K for all, since alpha drifts with K."""
    k = min(replays.ks, key=lambda k: (abs(k - CATEGORY_K), k))
    pairs = zip(replays.categories, replays.prompt_sets, strict=True)
    names = [category or prompt_set for category, prompt_set in pairs]
    rows: list[CategoryAlpha] = []
    for category in sorted(set(names)):
        part = replays.rows([name == category for name in names])
        prompts = resample(("",) * len(part.prompts), draws=draws, seed=seed)
        for draft in part.drafts:
            counts = part.candidates[Candidate(draft, k)]
            bounds = prompts.interval(prompts.pooled(counts.accepted, counts.judged))
            rows.append(
                CategoryAlpha(
                    temperature=part.temperature,
                    draft=draft,
                    k=k,
                    category=category,
                    prompts=len(part.prompts),
                    accepted=float(counts.accepted.sum()),
                    judged=float(counts.judged.sum()),
                    alpha=alpha_of(counts),
                    alpha_lo=bounds.lo if bounds else None,
                    alpha_hi=bounds.hi if bounds else None,
                )
            )
    return tuple(rows)

"""Rows of results.csv, and of the draft x category matrix, from replayed candidates.

Counts are expectations, so they are not whole. Rates are ratios of sums over prompts, times the
medians of the step times; percentiles are over prompts, a prompt's repetitions taken together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from harness.analysis.counts import ratio
from harness.analysis.evidence import Candidate
from harness.analysis.latency import Latency, break_even, round_costs
from harness.analysis.predicted import alpha_of
from harness.analysis.replays import Replays
from harness.analysis.requests import prefill_seconds
from harness.records import ResultRow, Rule, UserError
from harness.stats.draws import DRAWS, SpeedupDraws, draw_prompts, speedup_draws
from harness.stats.intervals import Array


@dataclass(frozen=True)
class CategoryAlphaRow:
    """One entry of the draft x category matrix.

    Attributes:
        category: the prompts' category, or their prompt set where they have none.
        prompts: how many; below MIN_PROMPTS there is no interval.
        accepted, judged: expected counts; alpha is their quotient.
    """

    rule: Rule
    temperature: float
    draft: str
    k: int
    category: str
    prompts: int
    accepted: float
    judged: float
    alpha: float | None
    alpha_lo: float | None
    alpha_hi: float | None


def category_alpha(
    replays: Replays, k: int, *, draws: int = DRAWS, seed: int = 0
) -> tuple[CategoryAlphaRow, ...]:
    """Alpha of every draft on every category, at one K for all, since alpha drifts with K.

    Args:
        replays: the candidates.
        k: the K at which they are compared.
        draws: resamples of the prompts.
        seed: of the resampling.

    Raises:
        UserError: a K that was not replayed.
    """
    if k not in replays.ks:
        raise UserError(f"k={k}: not among the replayed k={list(replays.ks)}; choose one of them")
    pairs = zip(replays.categories, replays.prompt_sets, strict=True)
    names = [category or prompt_set for category, prompt_set in pairs]
    rows: list[CategoryAlphaRow] = []
    for category in sorted(set(names)):
        part = replays.rows([name == category for name in names])
        prompts = draw_prompts(("",) * len(part.prompts), None, draws=draws, seed=seed)
        for draft in part.drafts:
            counts = part.candidates[draft, k]
            bounds = prompts.interval(prompts.pooled(counts.accepted, counts.judged))
            rows.append(
                CategoryAlphaRow(
                    part.rule,
                    part.temperature,
                    draft,
                    k,
                    category,
                    len(part.prompts),
                    float(counts.accepted.sum()),
                    float(counts.judged.sum()),
                    alpha_of(counts),
                    bounds.lo if bounds else None,
                    bounds.hi if bounds else None,
                )
            )
    return tuple(rows)


def replayed_rows(
    replays: Replays,
    latency_by_draft: Mapping[str, Latency],
    *,
    model: str,
    draws: int = DRAWS,
    seed: int = 0,
) -> list[ResultRow]:
    """One row per prompt set and candidate, `source` replayed, and a k = 0 row per prompt set.

    Args:
        replays: of one rule and temperature.
        latency_by_draft: of each draft; the baseline rows use the first's.
        model: the target's name.
        draws: resamples of prompts and step times.
        seed: of the resampling.

    Raises:
        UserError: a draft without step times, or a K that they do not cover.
    """
    rows: list[ResultRow] = []
    for prompt_set in sorted(set(replays.prompt_sets)):
        part = replays.only([prompt_set])
        found = speedup_draws(part, latency_by_draft, draws=draws, seed=seed)
        baseline = latency_by_draft[part.drafts[0]]
        rows.append(_baseline_row(part, baseline, model))
        for name in part.candidates:
            latency = latency_by_draft[name[0]]
            pace = baseline.times.target_s / latency.times.target_s
            rows.append(_at_pace(_row(name, part, latency, found, model), pace))
    return rows


def _at_pace(row: ResultRow, pace: float) -> ResultRow:
    """A row's times on the machine as it was when the baseline's target step was timed.

    Each draft is timed beside its own target steps; without this a machine that sped up between
    drafts would show a loss beside a better ms_per_token.
    """

    def scaled(value: float | None) -> float | None:
        return None if value is None else value * pace

    return replace(
        row,
        ms_per_token=scaled(row.ms_per_token),
        ms_per_token_p50=scaled(row.ms_per_token_p50),
        ms_per_token_p90=scaled(row.ms_per_token_p90),
        tokens_per_second=None if row.tokens_per_second is None else row.tokens_per_second / pace,
        ttft_ms=scaled(row.ttft_ms),
    )


def _timed(part: Replays, k: int, seconds: Array, model: str) -> ResultRow:
    """What every row has, from decode seconds per prompt."""
    tokens = part.new_tokens
    own_ms = 1e3 * seconds / tokens
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
        ms_per_token_p50=float(np.percentile(own_ms, 50)),
        ms_per_token_p90=float(np.percentile(own_ms, 90)),
        tokens_per_second=ratio(1e3, ms_per_token),
    )


def _baseline_row(part: Replays, latency: Latency, model: str) -> ResultRow:
    target_s = latency.times.target_s
    row = _timed(part, 0, part.new_tokens * target_s, model)
    prefill = prefill_seconds(part, latency, draft=False, lookup=False)
    if prefill is not None:
        row = replace(row, ttft_ms=1e3 * float(np.median(prefill / part.texts) + target_s))
    return replace(row, speedup=1.0, request_speedup=1.0 if prefill is not None else None)


def _row(
    name: Candidate, part: Replays, latency: Latency, found: SpeedupDraws, model: str
) -> ResultRow:
    (draft, k), counts = name, part.candidates[name]
    lookup = draft in part.lookups
    seconds = counts.proposals @ round_costs(latency.times, k, lookup=lookup)
    bounds = found.interval(name)
    alphas = found.prompts.interval(found.prompts.pooled(counts.accepted, counts.judged))
    accepted, drafted = float(counts.accepted.sum()), float(counts.drafted.sum())
    row = replace(
        _timed(part, k, seconds, model),
        draft=draft,
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
        speedup=found.point(name),
        speedup_lo=bounds.lo if bounds else None,
        speedup_hi=bounds.hi if bounds else None,
        breakeven_alpha=break_even(latency.times, k, lookup=lookup),
    )
    return _with_request(row, part, latency, seconds, float(seconds.sum() / counts.rounds.sum()))


def _with_request(
    row: ResultRow, part: Replays, latency: Latency, seconds: Array, round_s: float
) -> ResultRow:
    """Time to first token and the whole request's speedup, where the prefills are known."""
    plain = prefill_seconds(part, latency, draft=False, lookup=False)
    both = prefill_seconds(part, latency, draft=True, lookup=row.draft in part.lookups)
    if plain is None or both is None:
        return row
    before = plain.sum() + part.new_tokens.sum() * latency.times.target_s
    return replace(
        row,
        ttft_ms=1e3 * float(np.median(both / part.texts) + round_s),
        request_speedup=float(before / (both.sum() + seconds.sum())),
    )

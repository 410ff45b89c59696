"""From generations to the rows of results.csv: one row per prompt set, temperature and K.

Every rate here is a ratio of sums over generations, never a mean of ratios: a long text counts for
more than a short one, as it does for the machine. A cell's speedup is taken over the generations
(prompt, repetition) that finished both in it and in its baseline, the k = 0 cell of the same prompt
set and temperature, so that a prompt that failed on one side shifts neither.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.analysis.counts import (
    acceptance_by_position,
    accepted,
    completed,
    decode_s,
    judged,
    latest,
    new_tokens,
    per_prompt,
    ratio,
    request_s,
)
from harness.records import ResultRow, Trial
from harness.stats.intervals import Array, ratio_interval, speedup_interval
from harness.theory.speedup import StepTimes, speedup_from_tokens_per_round

__all__ = ["acceptance_by_position", "measured_rows", "theory_rows"]

CellKey = tuple[str, float, int]


@dataclass(frozen=True)
class _Context:
    """What every row of one call shares."""

    model: str
    draft: str
    times: StepTimes | None
    seed: int


def measured_rows(
    trials: Sequence[Trial], *, model: str, draft: str, times: StepTimes | None, seed: int = 0
) -> list[ResultRow]:
    """One row per (prompt_set, temperature, k), in that order, from the generations of one pair.

    Args:
        trials: every generation of the run, failed ones included.
        model: the target's name.
        draft: the draft's name; baseline rows carry it too, so that a pair's rows stay together.
        times: step times of this run, for breakeven_alpha; None leaves it empty.
        seed: of the bootstrap.
    """
    cells: dict[CellKey, list[Trial]] = {}
    for trial in latest(trials):
        cells.setdefault((trial.prompt_set, trial.temperature, trial.k), []).append(trial)
    context = _Context(model, draft, times, seed)
    return [_measured_row(key, cells, context) for key in sorted(cells)]


def _measured_row(
    key: CellKey, cells: Mapping[CellKey, Sequence[Trial]], context: _Context
) -> ResultRow:
    prompt_set, temperature, k = key
    done = completed(cells[key])
    failed = [trial for trial in cells[key] if trial.status == "failed"]
    row = ResultRow(
        model=context.model,
        draft=context.draft,
        prompt_set=prompt_set,
        temperature=temperature,
        k=k,
        source="measured",
        status="partial" if failed and done else "failed" if failed else "complete",
        error=_error(failed, len(cells[key])),
        rule=next((trial.rule for trial in cells[key] if trial.k > 0), None),
    )
    if k > 0 and context.times is not None:
        row = replace(row, breakeven_alpha=context.times.break_even_alpha(k))
    if not done:
        return row
    row = _with_times(row, done)
    if k == 0:
        return replace(row, speedup=1.0, request_speedup=1.0)
    row = _with_acceptance(row, done, context.seed)
    return _with_speedup(row, done, completed(cells.get((prompt_set, temperature, 0), [])), context)


def _error(failed: Sequence[Trial], total: int) -> str | None:
    """The first error and how many generations failed."""
    if not failed:
        return None
    return f"{len(failed)} of {total} generations failed, first: {failed[0].error}"


def _with_times(row: ResultRow, done: Sequence[Trial]) -> ResultRow:
    tokens = sum(map(new_tokens, done))
    own_ms = [1e3 * decode_s(trial) / new_tokens(trial) for trial in done]
    ms_per_token = 1e3 * sum(map(decode_s, done)) / tokens
    first_s = [
        request_s(trial) - decode_s(trial) + trial.first_token_s
        for trial in done
        if trial.first_token_s is not None
    ]
    peaks = [trial.peak_memory_bytes for trial in done if trial.peak_memory_bytes is not None]
    return replace(
        row,
        prompts=len({trial.conversation for trial in done}),
        new_tokens=int(tokens),
        ms_per_token=ms_per_token,
        ms_per_token_p50=float(np.percentile(own_ms, 50)),
        ms_per_token_p90=float(np.percentile(own_ms, 90)),
        tokens_per_second=ratio(1e3, ms_per_token),
        ttft_ms=1e3 * float(np.median(first_s)) if first_s else None,
        peak_memory_bytes=max(peaks, default=None),
    )


def _with_acceptance(row: ResultRow, done: Sequence[Trial], seed: int) -> ResultRow:
    rounds = float(sum(trial.rounds or 0 for trial in done))
    drafted = float(sum(trial.drafted or 0 for trial in done))
    kept = float(sum(map(accepted, done)))
    rejected = float(sum(trial.rejected or 0 for trial in done))
    columns = np.array(list(per_prompt(done, [accepted, judged]).values()))
    interval = ratio_interval(columns[:, 0], columns[:, 1], seed=seed)
    return replace(
        row,
        rounds=rounds,
        drafted=drafted,
        accepted=kept,
        rejected=rejected,
        acceptance_rate=ratio(kept, drafted),
        alpha=ratio(kept, kept + rejected),
        alpha_lo=interval.lo if interval else None,
        alpha_hi=interval.hi if interval else None,
        mean_acceptance_length=1.0 + kept / rounds if rounds else None,
        tokens_per_round=ratio(row.new_tokens, rounds),
    )


def _with_speedup(
    row: ResultRow, done: Sequence[Trial], baseline: Sequence[Trial], context: _Context
) -> ResultRow:
    shared = {_generation(trial) for trial in done} & {_generation(trial) for trial in baseline}
    if not shared:
        return row
    fields = [decode_s, new_tokens, request_s]
    plain, speculative = (
        np.array(list(per_prompt([t for t in side if _generation(t) in shared], fields).values()))
        for side in (baseline, done)
    )
    interval = speedup_interval(
        plain[:, 0], plain[:, 1], speculative[:, 0], speculative[:, 1], seed=context.seed
    )
    return replace(
        row,
        speedup=_speedup(plain, speculative, 0),
        speedup_lo=interval.lo if interval else None,
        speedup_hi=interval.hi if interval else None,
        request_speedup=_speedup(plain, speculative, 2),
    )


def _generation(trial: Trial) -> tuple[str, int]:
    return trial.prompt, trial.repetition


def _speedup(plain: Array, speculative: Array, column: int) -> float | None:
    """Ratio of seconds per token; the tokens are column 1."""
    before, after = (side[:, column].sum() / side[:, 1].sum() for side in (plain, speculative))
    return ratio(float(before), float(after))


def theory_rows(measured: Sequence[ResultRow], times: StepTimes) -> list[ResultRow]:
    """What the step times predict for each measured cell from its own tokens_per_round.

    speedup = tokens_per_round / (K c + v(K)): no iid model, so a gap between the two rows is time
    that the steps do not explain (overhead of the loop, or a step that is slower in context).

    Args:
        measured: rows of `measured_rows`; baselines and rows without rounds are passed over.
        times: step times of the same run.
    """
    return [
        _theory_row(row, row.tokens_per_round, times)
        for row in measured
        if row.k > 0 and row.tokens_per_round is not None and times.covers(row.k)
    ]


def _theory_row(row: ResultRow, tokens_per_round: float, times: StepTimes) -> ResultRow:
    ms_per_token = 1e3 * times.round_s(row.k) / tokens_per_round
    return ResultRow(
        model=row.model,
        draft=row.draft,
        prompt_set=row.prompt_set,
        temperature=row.temperature,
        k=row.k,
        source="theory",
        status="complete",
        alpha=row.alpha,
        tokens_per_round=tokens_per_round,
        rule=row.rule,
        ms_per_token=ms_per_token,
        tokens_per_second=1e3 / ms_per_token,
        speedup=speedup_from_tokens_per_round(tokens_per_round, row.k, times.c, times.v(row.k)),
        breakeven_alpha=times.break_even_alpha(row.k),
    )

"""Two runs of the same cells, compared prompt by prompt.

A run's speedup moves with its prompts far more than with what changed between two runs, so runs are
compared on the prompts that both have: a prompt's four generations (plain and speculative, in
either run) are resampled together, and what the prompts have in common cancels. Two ratios tell two
stories:

    speedup_ratio   speedup of the other run / speedup of the reference. Each speedup is taken
                    against its own run's baseline, so a machine that is 10 % slower today cancels.
    ms_ratio        ms_per_token of the other run / that of the reference: machine and all.

Intervals are those of `harness.stats.intervals`. With 40 cells two look different by chance alone,
so every cell carries a p-value adjusted by Holm's method (Holm, "A simple sequentially rejective
multiple test procedure", 1979) beside its own. The p-value is Student's, on the linearised log
ratio (`harness.analysis.compare_cells`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.analysis.compare_cells import (
    ACCEPTED_DRAFTED,
    ACCEPTED_JUDGED,
    BASELINE,
    CELL,
    PairedCell,
)
from harness.analysis.compare_rows import ALL_SETS, ComparisonRow, with_holm
from harness.analysis.counts import (
    accepted,
    completed,
    decode_s,
    judged,
    latest,
    new_tokens,
    per_prompt,
)
from harness.records import Trial
from harness.stats.intervals import Array, set_weights

Generation = tuple[str, int]
CellKey = tuple[str, float, int]
Cells = Mapping[CellKey, Mapping[Generation, Trial]]


def compare_trials(
    reference: Sequence[Trial],
    other: Sequence[Trial],
    blank: ComparisonRow,
    *,
    weights: Mapping[str, float] | None = None,
    seed: int = 0,
) -> list[ComparisonRow]:
    """Every (prompt set, temperature, K) that both runs measured, then the whole workload's.

    Args:
        reference: every generation of the run that is compared with, failed ones included.
        other: likewise of the run that is judged.
        blank: the row whose names the result carries.
        weights: of the prompt sets in the workload; equal if None.
        seed: of the bootstrap.

    Returns:
        Rows by temperature, K and prompt set, the workload ("all", where there are several sets)
        last in its group; empty where the runs share no prompt.
    """
    sides = (cells_of(reference), cells_of(other))
    keys = sorted(
        sides[0].keys() & sides[1].keys(), key=lambda key: (key[1], key[2] > 0, key[2], key[0])
    )
    rows: list[ComparisonRow] = []
    for temperature, k in dict.fromkeys((key[1], key[2]) for key in keys):
        sets = [name for name, t, n in keys if (t, n) == (temperature, k)]
        pairs = {name: _paired(sides, (name, temperature, k)) for name in sets}
        found = {name: pair for name, pair in pairs.items() if len(pair.columns)}
        here = replace(blank, temperature=temperature, k=k, source="measured")
        rows += [_row(replace(here, prompt_set=s), {s: found[s]}, None, seed) for s in found]
        if len(found) > 1:
            rows.append(_row(replace(here, prompt_set=ALL_SETS), found, weights, seed))
    return with_holm(rows)


def cells_of(trials: Sequence[Trial]) -> Cells:
    """Every generation by cell, failed ones included, a resumed run's retry replacing the first."""
    cells: dict[CellKey, dict[Generation, Trial]] = {}
    for trial in latest(trials):
        cell = cells.setdefault((trial.prompt_set, trial.temperature, trial.k), {})
        cell[trial.prompt, trial.repetition] = trial
    return cells


def shared_prompts(reference: Sequence[Trial], other: Sequence[Trial]) -> tuple[int, int]:
    """How many prompts both runs have, and how many share a name but not a length.

    The second kind is not the same prompt: a file was edited, or a chat template came in between.
    """
    lengths = [
        {(trial.prompt_set, trial.prompt): trial.prompt_tokens for trial in completed(side)}
        for side in (reference, other)
    ]
    names = lengths[0].keys() & lengths[1].keys()
    same = sum(lengths[0][name] == lengths[1][name] for name in names)
    return same, len(names) - same


@dataclass(frozen=True)
class _Pair:
    """One cell's shared prompts.

    Attributes:
        columns: [n, 16], as `PairedCell` wants them.
        baselines: whether both have one.
        partial: whether a generation of the cell failed in either run.
    """

    columns: Array
    baselines: bool
    partial: bool


def _paired(sides: tuple[Cells, Cells], key: CellKey) -> _Pair:
    """The sums of each prompt over the generations that all sides finished."""
    name, temperature, k = key
    plain = (name, temperature, 0)
    baselines = k > 0 and all(plain in side for side in sides)
    whole = [side[key] for side in sides]
    group = [*whole, *(side[plain] for side in sides if baselines)]
    shared = _finished(group[0]).intersection(*map(_finished, group[1:]))
    shared = {name for name in shared if len({cell[name].prompt_tokens for cell in group}) == 1}
    kept = [decode_s, new_tokens, accepted, judged, accepted, _drafted]
    tables = [
        np.array(list(per_prompt([cell[name] for name in shared], kept).values())).reshape(-1, 6)
        for cell in group
    ]
    zeros = [np.zeros((len(tables[0]), 2))] * 2
    before = [table[:, :2] for table in tables[2:]] or zeros
    parts = [*(t[:, :2] for t in tables[:2]), *before, *(t[:, 2:] for t in tables[:2])]
    partial = any(trial.status == "failed" for cell in whole for trial in cell.values())
    return _Pair(np.concatenate(parts, axis=1), baselines, partial)


def _drafted(trial: Trial) -> float:
    return trial.drafted or 0


def _finished(cell: Mapping[Generation, Trial]) -> set[Generation]:
    return {name for name, trial in cell.items() if completed([trial])}


def _row(
    row: ComparisonRow,
    pairs: Mapping[str, _Pair],
    weights: Mapping[str, float] | None,
    seed: int,
) -> ComparisonRow:
    names = sorted(pairs)
    columns = np.concatenate([pairs[name].columns for name in names])
    strata = [name for name in names for _ in range(len(pairs[name].columns))]
    cell = PairedCell(columns, strata, set_weights(strata, weights), seed)
    before, after = (1e3 * cell.value(column) for column in CELL)
    ms_interval = cell.interval([(CELL[1], 1), (CELL[0], -1)])
    row = replace(
        row,
        status="partial" if any(pair.partial for pair in pairs.values()) else "complete",
        prompts=len(columns),
        reference_ms_per_token=before,
        ms_per_token=after,
        ms_ratio=after / before,
        ms_ratio_lo=ms_interval.lo if ms_interval else None,
        ms_ratio_hi=ms_interval.hi if ms_interval else None,
    )
    if row.k == 0:
        return row
    if all(pair.baselines for pair in pairs.values()):
        row = _with_speedups(row, cell)
    return _with_acceptance(row, cell)


def _with_speedups(row: ComparisonRow, cell: PairedCell) -> ComparisonRow:
    factors = [(BASELINE[1], 1), (CELL[1], -1), (BASELINE[0], -1), (CELL[0], 1)]
    interval = cell.interval(factors)
    speedups = [cell.value(BASELINE[side]) / cell.value(CELL[side]) for side in (0, 1)]
    return replace(
        row,
        reference_speedup=speedups[0],
        speedup=speedups[1],
        speedup_ratio=speedups[1] / speedups[0],
        speedup_ratio_lo=interval.lo if interval else None,
        speedup_ratio_hi=interval.hi if interval else None,
        p_value=cell.p_value(factors),
    )


def _with_acceptance(row: ComparisonRow, cell: PairedCell) -> ComparisonRow:
    alpha, alpha_interval = cell.difference(*ACCEPTED_JUDGED)
    rate, rate_interval = cell.difference(*ACCEPTED_DRAFTED)
    return replace(
        row,
        reference_alpha=cell.pooled(ACCEPTED_JUDGED[0]),
        alpha=cell.pooled(ACCEPTED_JUDGED[1]),
        alpha_difference=alpha,
        alpha_difference_lo=alpha_interval.lo if alpha_interval else None,
        alpha_difference_hi=alpha_interval.hi if alpha_interval else None,
        reference_acceptance_rate=cell.pooled(ACCEPTED_DRAFTED[0]),
        acceptance_rate=cell.pooled(ACCEPTED_DRAFTED[1]),
        acceptance_rate_difference=rate,
        acceptance_rate_difference_lo=rate_interval.lo if rate_interval else None,
        acceptance_rate_difference_hi=rate_interval.hi if rate_interval else None,
    )

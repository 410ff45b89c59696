"""Measured cells that cannot be right, or whose speedup a few generations decide.

A round of one K costs about the same whatever its text and acceptance, and so does a plain token.
So seconds per round / seconds per plain token of the same prompt tell a disturbed generation from
one of unusual acceptance. Where the speedup changes with the slowest and fastest of these left out,
because a few of them are far from the others, both numbers are reported.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from harness.analysis.cells import Count, completed, decode_s, latest, new_tokens
from harness.records import Cell, ResultRow, Trial
from harness.stats.jackknife import Array
from harness.summary import Doubt, OutlierCell, Unstable

# Of the generations, left out at either end, and at least one
TRIMMED = 0.1
LEAST_GENERATIONS = 5
# How far the two speedups must be from one another, and an outlier from the median
LEAST_EFFECT, FAR = math.log(1.05), math.log(1.5)
# How far noise lifts a speedup above the tokens of a round
NOISE = 1.2


def outlier_cells(trials: Sequence[Trial]) -> tuple[OutlierCell, ...]:
    """The cells whose speedup changes by more than 5 % without their far generations."""
    cells: dict[Cell, dict[object, Trial]] = {}
    for trial in completed(latest(trials)):
        cells.setdefault(trial.cell_key, {})[trial.key] = trial
    outliers: list[OutlierCell] = []
    for cell, drafted in sorted(cells.items()):
        plain = cells.get(replace(cell, k=0), {})
        pairs = [(plain[key], trial) for key, trial in drafted.items() if key in plain]
        if cell.k > 0 and len(pairs) >= LEAST_GENERATIONS:
            outlier = _outlier(cell, pairs)
            outliers += [outlier] if outlier else []
    return tuple(outliers)


def _outlier(cell: Cell, pairs: Sequence[tuple[Trial, Trial]]) -> OutlierCell | None:
    seconds, tokens = _table(pairs, decode_s), _table(pairs, new_tokens)
    rounds = np.array([drafted.rounds or 1 for _, drafted in pairs], dtype=np.float64)
    costs = np.log(seconds[:, 1] / rounds) - np.log(seconds[:, 0] / tokens[:, 0])
    cut = max(1, int(TRIMMED * len(pairs)))
    kept = np.argsort(costs, kind="stable")[cut:-cut]
    speedup, trimmed = _speedup(seconds, tokens), _speedup(seconds[kept], tokens[kept])
    far = int((np.abs(costs - np.median(costs)) > FAR).sum())
    if abs(math.log(speedup / trimmed)) <= LEAST_EFFECT or not 1 <= far <= 2 * cut:
        return None
    return OutlierCell(cell.prompt_set, cell.temperature, cell.k, speedup, trimmed, far)


def impossible(cells: Sequence[Unstable], temperature: float) -> Doubt | None:
    """Why no verdict of a temperature can rest on what was measured; None where it can."""
    found = [cell for cell in cells if cell.kind == "cell" and cell.temperature == temperature]
    if not found:
        return None
    worst = max(found, key=lambda cell: cell.value)
    return "impossible_speedup", {
        "k": worst.tokens,
        "speedup": worst.value,
        "prompt_set": worst.prompt_set,
    }


def _table(pairs: Sequence[tuple[Trial, Trial]], count: Count) -> Array:
    """[generation, 2], plain and drafted."""
    return np.array([[count(trial) for trial in pair] for pair in pairs])


def _speedup(seconds: Array, tokens: Array) -> float:
    plain, drafted = seconds.sum(axis=0) / tokens.sum(axis=0)
    return float(plain / drafted)


def unstable_cells(rows: Sequence[ResultRow]) -> Iterator[Unstable]:
    """The measured cells whose speedup is far above their tokens per round, or above K + 1.

    A round takes at least as long as a plain token, so its tokens are the most that it gains.
    """
    for row in rows:
        most = min(row.k + 1, NOISE * (row.tokens_per_round or np.inf))
        if row.source == "measured" and row.k and (row.speedup or 0.0) > most:
            yield Unstable(
                "speedup_above_most",
                row.speedup or 0.0,
                "target",
                "cell",
                row.k,
                prompt_set=row.prompt_set,
                temperature=row.temperature,
            )

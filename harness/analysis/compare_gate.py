"""One number for a whole comparison, and whether it is a regression.

A comparison has many cells and a build has one exit status. The cell that decides is the one that
would be served: the whole workload at the temperature and K of the reference's verdict. Where the
reference serves without speculation, or the other run lacks that K, it is the shared K at which the
reference was fastest.

A threshold on the ratio itself fails one build in two when the truth lies on it, and some builds by
noise wherever it lies. So a comparison fails only when the *upper* bound of the ratio's interval is
below the threshold: the regression is then larger than the noise. A ratio below the threshold whose
interval reaches over it is called unclear, and passes: more prompts would tell. Where there is no
interval (fewer than 8 shared prompts) the ratio itself decides. The bootstrap's seed is fixed, so
the same two folders always give the same answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.analysis.compare_rows import ALL_SETS, ComparisonRow
from harness.records import UserError

SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Headline:
    """One run against the reference in one line.

    Attributes:
        row: the cell that decides; None where no speedup can be compared.
        cells: how many cells have a p-value.
        differing: how many of them differ beyond chance, by Holm's p-value.
        threshold: what the ratio was held against; None where nothing was asked for.
        outcome: pass, fail or unclear; None where nothing was asked for.
    """

    run: str
    row: ComparisonRow | None
    cells: int
    differing: int
    threshold: float | None = None
    outcome: Literal["pass", "fail", "unclear"] | None = None


def headline(
    run: str,
    rows: Sequence[ComparisonRow],
    *,
    temperature: float | None,
    k: int,
    fail_below: float | None = None,
) -> Headline:
    """The cell that decides, and what it says of `fail_below`.

    Args:
        run: the name of the run that is compared.
        rows: its comparison, in order.
        temperature: of the reference's verdict; None takes the first.
        k: of the reference's verdict, 0 where it serves without speculation.
        fail_below: the least ratio of speedups that passes.

    Raises:
        UserError: a threshold is given, and no speedup can be compared.
    """
    row = _deciding(rows, temperature, k)
    judged = [entry.p_value_holm for entry in rows if entry.p_value_holm is not None]
    found = sum(value < SIGNIFICANT for value in judged)
    if fail_below is None:
        return Headline(run, row, len(judged), found)
    if row is None or row.speedup_ratio is None:
        raise UserError(f"fail_below={fail_below:g}: no speedup of {run} can be compared")
    outcome: Literal["pass", "fail", "unclear"] = "pass"
    if row.speedup_ratio < fail_below:
        highest = row.speedup_ratio if row.speedup_ratio_hi is None else row.speedup_ratio_hi
        outcome = "fail" if highest < fail_below else "unclear"
    return Headline(run, row, len(judged), found, fail_below, outcome)


def _deciding(
    rows: Sequence[ComparisonRow], temperature: float | None, k: int
) -> ComparisonRow | None:
    known = [row for row in rows if row.speedup_ratio is not None]
    whole = [row for row in known if row.prompt_set == ALL_SETS] or known
    same = [row for row in whole if row.temperature == temperature]
    first = same or [row for row in whole if row.temperature == whole[0].temperature]
    chosen = [row for row in first if row.k == k]
    pool = chosen or first
    return max(pool, key=lambda row: row.reference_speedup or 0.0, default=None)

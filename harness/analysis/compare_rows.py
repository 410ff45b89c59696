"""What a comparison of two runs says of one cell: a row of comparison.csv.

Where a run was not measured generation by generation (replay, arithmetic) there is nothing to pair:
its rows of results.csv are held against each other as they stand, without an interval.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.analysis.counts import ratio
from harness.records import ResultRow, Source

ALL_SETS = "all"
UNPAIRED = "replayed or predicted, not paired by prompt: no interval"


@dataclass(frozen=True)
class ComparisonRow:
    """One cell in two runs: a row of comparison.csv, in this column order.

    Attributes:
        reference, run: names of the two run folders; every ratio is run / reference, every
            difference run - reference.
        reference_draft, draft: the drafts in either; they may differ.
        prompt_set: a set, or "all" for the weighted workload.
        source: measured, or replayed or theory where a side was not measured (then unpaired).
        prompts: prompts that both runs have; None where results.csv alone was compared.
        p_value: of speedup_ratio = 1, two-sided; `p_value_holm` adjusted for all cells compared.
        status: complete; partial where generations failed on a side.
        note: what keeps a column empty, or how a number is to be taken.
    """

    reference: str
    run: str
    reference_draft: str | None
    draft: str | None
    prompt_set: str | None
    temperature: float | None
    k: int
    source: Source
    status: str
    prompts: int | None = None
    reference_ms_per_token: float | None = None
    ms_per_token: float | None = None
    ms_ratio: float | None = None
    ms_ratio_lo: float | None = None
    ms_ratio_hi: float | None = None
    reference_speedup: float | None = None
    speedup: float | None = None
    speedup_ratio: float | None = None
    speedup_ratio_lo: float | None = None
    speedup_ratio_hi: float | None = None
    p_value: float | None = None
    p_value_holm: float | None = None
    reference_alpha: float | None = None
    alpha: float | None = None
    alpha_difference: float | None = None
    alpha_difference_lo: float | None = None
    alpha_difference_hi: float | None = None
    reference_acceptance_rate: float | None = None
    acceptance_rate: float | None = None
    acceptance_rate_difference: float | None = None
    acceptance_rate_difference_lo: float | None = None
    acceptance_rate_difference_hi: float | None = None
    note: str | None = None


def compare_results(
    reference: Sequence[ResultRow], other: Sequence[ResultRow], blank: ComparisonRow
) -> list[ComparisonRow]:
    """The cells that both tables have, as they stand.

    Args:
        reference: rows of the run that is compared with, one per cell.
        other: likewise of the run that is judged.
        blank: the row whose names the result carries; a cell's draft must be the same in both,
            unless each run has only one.
    """
    drafts = [{row.draft for row in rows if row.k > 0} for rows in (reference, other)]
    lone = all(len(names) == 1 for names in drafts)
    theirs = {_key(row, lone=lone): row for row in other}
    pairs = [(row, theirs[key]) for row in reference if (key := _key(row, lone=lone)) in theirs]
    return [_from_results(blank, one, two) for one, two in pairs]


def _key(row: ResultRow, *, lone: bool) -> tuple[object, ...]:
    draft = None if lone or row.k == 0 else row.draft
    return row.prompt_set, row.temperature, row.k, draft


def _from_results(blank: ComparisonRow, one: ResultRow, two: ResultRow) -> ComparisonRow:
    row = replace(
        blank,
        reference_draft=one.draft,
        draft=two.draft,
        prompt_set=one.prompt_set,
        temperature=one.temperature,
        k=one.k,
        source="replayed" if "replayed" in (one.source, two.source) else one.source,
        status="complete" if one.status == two.status == "complete" else "partial",
        reference_ms_per_token=one.ms_per_token,
        ms_per_token=two.ms_per_token,
        ms_ratio=ratio(two.ms_per_token, one.ms_per_token),
        note=UNPAIRED,
    )
    if one.k == 0:
        return row
    return replace(
        row,
        reference_speedup=one.speedup,
        speedup=two.speedup,
        speedup_ratio=ratio(two.speedup, one.speedup),
        reference_alpha=one.alpha,
        alpha=two.alpha,
        alpha_difference=_gap(one.alpha, two.alpha),
        reference_acceptance_rate=one.acceptance_rate,
        acceptance_rate=two.acceptance_rate,
        acceptance_rate_difference=_gap(one.acceptance_rate, two.acceptance_rate),
    )


def _gap(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def with_holm(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """The rows with p_value_holm filled in: Holm's step-down over every row that has a p_value."""
    order = sorted(
        (index for index, row in enumerate(rows) if row.p_value is not None),
        key=lambda index: rows[index].p_value or 0.0,
    )
    adjusted: dict[int, float] = {}
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * (rows[index].p_value or 0.0)))
        adjusted[index] = largest
    return [replace(row, p_value_holm=adjusted.get(index)) for index, row in enumerate(rows)]

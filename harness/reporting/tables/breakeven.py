"""What the formulas say of two latencies: ideal speedup, break-even alpha, speedup by alpha.

Two rules stand beside each other, each under its name. The geometric rule takes an alpha. The
linear rule of thumb takes an acceptance_rate; given an alpha, as people do, it promises too much
at every K above 1.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.records import ResultRow
from harness.reporting import formatting as fmt
from harness.reporting.tables.model import Column, Row, Table
from harness.theory.speedup import StepTimes, linear_speedup

NO_ROOT = "none: even alpha = 1 loses"
IDEAL_COLUMNS = (
    Column("K", key=True),
    Column("ideal ms/tok"),
    Column("ideal speedup"),
    Column("break-even alpha"),
)
IDEAL_NOTE = "ideal: every draft token accepted (alpha = 1)."
MEASURED_COLUMNS = (
    Column("K", key=True),
    Column("acceptance\n_rate"),
    Column("alpha"),
    Column("tokens/\nround"),
    Column("ms/tok"),
    Column("speedup"),
    Column("break-even\nalpha"),
)
MEASURED_NOTE = (
    "speedup = tokens per round / (K c + v), which for a measured acceptance_rate a is the linear"
    " rule (1 + K a) / (K c + v). Hold alpha, not acceptance_rate, against the break-even alpha."
)
RULES_NOTES = (
    "geometric: (1 - alpha^(K+1)) / (1 - alpha) / (K c + v), the iid model.",
    "linear: (1 + K a) / (K c + v), right for a measured acceptance_rate a; given an alpha, as"
    " here, it overstates at every K above 1.",
    "best K 0: do not speculate.",
)


def ideal_table(
    results: Iterable[ResultRow], by_k: Sequence[Mapping[str, Any]] = ()
) -> Table | None:
    """Per K: the speedup at alpha = 1, and the alpha below which it loses.

    Args:
        results: theory rows; those at alpha = 1 are the ideal ones.
        by_k: the summary's own list, where there is one (alpha = 1 need not be tabulated then).
    """
    rows = [Row(_ideal_cells(entry)) for entry in by_k or _by_k(results)]
    title = "What each K could gain, and the alpha it needs"
    return Table(title, IDEAL_COLUMNS, tuple(rows), (IDEAL_NOTE,)) if rows else None


def _by_k(results: Iterable[ResultRow]) -> list[Mapping[str, Any]]:
    theory = [row for row in results if row.source == "theory" and row.k > 0]
    entries: list[Mapping[str, Any]] = []
    for k in sorted({row.k for row in theory}):
        mine = [row for row in theory if row.k == k]
        ideal = next((row for row in mine if row.alpha == 1.0), None)
        entries.append(
            {
                "k": k,
                "ideal_ms_per_token": ideal.ms_per_token if ideal else None,
                "ideal_speedup": ideal.speedup if ideal else None,
                "breakeven_alpha": mine[0].breakeven_alpha,
            }
        )
    return entries


def _ideal_cells(entry: Mapping[str, Any]) -> tuple[str, ...]:
    needed = entry.get("breakeven_alpha")
    return (
        fmt.text(entry.get("k")),
        fmt.milliseconds(entry.get("ideal_ms_per_token")),
        fmt.speedup(entry.get("ideal_speedup")),
        NO_ROOT if needed is None else fmt.alpha(needed),
    )


def measured_table(results: Iterable[ResultRow], config: Mapping[str, Any]) -> Table | None:
    """What an acceptance measured elsewhere comes to; no model of the text behind it."""
    rows = tuple(
        Row(
            (
                str(row.k),
                fmt.percent(row.acceptance_rate),
                fmt.alpha(row.alpha),
                fmt.decimal(row.tokens_per_round),
                fmt.milliseconds(row.ms_per_token),
                fmt.speedup(row.speedup),
                NO_ROOT if row.breakeven_alpha is None else fmt.alpha(row.breakeven_alpha),
            )
        )
        for row in _split(results, config)[1]
    )
    title = "From the acceptance that was measured"
    return Table(title, MEASURED_COLUMNS, rows, (MEASURED_NOTE,)) if rows else None


def rules_table(results: Iterable[ResultRow], config: Mapping[str, Any]) -> Table | None:
    """Speedup per alpha and K by both rules, and the best K of each."""
    theory, _ = _split(results, config)
    alphas = sorted({row.alpha for row in theory if row.alpha is not None})
    if not alphas:
        return None
    ks = sorted({row.k for row in theory})
    times = _times(config)
    rows: list[Row] = []
    for alpha in alphas:
        geometric = {row.k: row.speedup for row in theory if row.alpha == alpha}
        rows.append(_rule_row(alpha, "geometric", ks, geometric))
        if times is not None:
            covered = [k for k in ks if times.covers(k)]
            linear = {k: linear_speedup(alpha, k, times.c, times.v(k)) for k in covered}
            rows.append(_rule_row(alpha, "linear", ks, linear))
    columns = (
        Column("alpha", key=True),
        Column("rule", "left", key=True),
        Column("best\nK"),
        *(Column(f"K={k}", means="speedup") for k in ks),
    )
    return Table("Speedup by alpha and K, by each rule", columns, tuple(rows), RULES_NOTES)


def _rule_row(
    alpha: float, rule: str, ks: Sequence[int], speedups: Mapping[int, float | None]
) -> Row:
    known = {k: value for k in ks if (value := speedups.get(k)) is not None}
    best = max(known, key=lambda k: known[k], default=None)
    chosen = fmt.EMPTY if best is None else str(best if known[best] > 1.0 else 0)
    cells = (fmt.speedup(speedups.get(k)) for k in ks)
    return Row((f"{alpha:.4g}", rule, chosen, *cells))


def _split(
    results: Iterable[ResultRow], config: Mapping[str, Any]
) -> tuple[list[ResultRow], list[ResultRow]]:
    """The rows at the alphas that were asked for, and those from a measured acceptance.

    A measured acceptance may happen to have an alpha that was asked for; its row comes second.
    """
    listed = [float(value) for value in config.get("alpha") or ()]
    asked: dict[tuple[int, float], ResultRow] = {}
    measured: list[ResultRow] = []
    for row in results:
        if row.source != "theory" or row.k < 1 or row.alpha is None:
            continue
        known = any(math.isclose(row.alpha, value) for value in listed)
        if known and (row.k, row.alpha) not in asked:
            asked[row.k, row.alpha] = row
        else:
            measured.append(row)
    return list(asked.values()), measured


def _times(config: Mapping[str, Any]) -> StepTimes | None:
    """The latencies that were typed in; milliseconds serve, since only ratios are asked for."""
    draft, target = config.get("draft_ms"), config.get("target_ms")
    if draft is None or target is None:
        return None
    return StepTimes(float(draft), float(target), tuple(config.get("verify_ms") or ()))

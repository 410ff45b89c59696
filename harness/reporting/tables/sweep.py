"""The founding post's K-sweep table, with what it missed beside it.

One table per temperature and prompt set. A row is a K; its predicted speedup and break-even alpha
come from the theory row of the same cell. Where nothing was measured (mode=replay) the replayed
rows take the measured ones' place and the title says so; where both were made, the replayed ones
stand beside the measured in a table of their own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from harness.records import ResultRow
from harness.reporting import formatting as fmt
from harness.reporting.reading import ran, replays_only
from harness.reporting.tables.model import Column, Row, Table, with_best_column, without_empty

COLUMNS = (
    Column("K", key=True),
    Column("tok/s"),
    Column("ms/tok"),
    Column("acceptance\n_rate"),
    Column("alpha\n[lo, hi]"),
    Column("speedup\n[lo, hi]"),
    Column("predicted\nspeedup"),
    Column("tokens/\nround"),
    Column("break-even\nalpha"),
)
BEST_NOTE = (
    "best: the fastest row of this table. The verdict is scored on held-out prompts and may differ."
)
REPLAYED_NOTE = (
    "Replayed: acceptance from texts of the target that each draft scored, times from the step"
    " times. No generation was timed."
)
GAP_COLUMNS = (
    Column("prompt set", "left", key=True),
    Column("temperature", key=True),
    Column("K", key=True),
    Column("tokens/round\nmeasured"),
    Column("tokens/round\nreplayed"),
    Column("gap, in\nstandard errors"),
)
GAP_NOTE = (
    "The same texts give every K of the replayed column. Of 20 cells about one gap is"
    " beyond 2 by chance; several, or one far beyond, say that loop and replay disagree."
)
NO_ROOT_NOTE = "Break-even alpha none: even alpha = 1 loses at that K."


def sweep_tables(rows: Iterable[ResultRow]) -> tuple[Table, ...]:
    """Every (draft, temperature, prompt set) that was run, temperatures together."""
    everything = tuple(rows)
    generations, replayed = ran(everything), replays_only(everything)
    theory = {_cell(row): row for row in everything if row.source == "theory"}
    drafts = list(dict.fromkeys(row.draft for row in generations if row.k > 0 and row.draft))
    tables = []
    for draft in drafts or [None]:
        mine = [row for row in generations if row.k == 0 or row.draft == draft]
        for temperature in sorted({row.temperature or 0.0 for row in mine}):
            at_temperature = [row for row in mine if (row.temperature or 0.0) == temperature]
            for prompt_set in dict.fromkeys(row.prompt_set for row in at_temperature):
                cells = [row for row in at_temperature if row.prompt_set == prompt_set]
                several = draft if len(drafts) > 1 else None
                table = _table(several, temperature, prompt_set, cells, theory)
                tables.append(_as_replayed(table) if replayed else table)
    return tuple(tables)


def gap_table(gaps: Iterable[Mapping[str, Any]]) -> Table | None:
    """Tokens per round as the loop gave them and as replay expects them, cell by cell."""
    rows = tuple(
        Row(
            (
                fmt.text(gap.get("prompt_set")),
                fmt.temperature(gap.get("temperature")),
                fmt.text(gap.get("k")),
                fmt.decimal(gap.get("measured_tokens_per_round")),
                fmt.decimal(gap.get("replayed_tokens_per_round")),
                fmt.signed(gap.get("gap_standard_errors"), 1),
            )
        )
        for gap in gaps
    )
    return Table("Replayed beside measured", GAP_COLUMNS, rows, (GAP_NOTE,)) if rows else None


def _as_replayed(table: Table) -> Table:
    """The table marked as not measured; its speedup is the prediction itself."""
    marked = replace(table, title=f"{table.title} (replayed)", notes=(*table.notes, REPLAYED_NOTE))
    return without_empty(marked, fmt.EMPTY)


def best_row(cells: Iterable[ResultRow]) -> ResultRow | None:
    """The row of the largest speedup; the baseline's is 1 by definition."""
    known = [row for row in cells if row.k == 0 or row.speedup is not None]
    if not any(row.k > 0 for row in known):
        return None
    return max(known, key=lambda row: 1.0 if row.k == 0 else row.speedup or 0.0)


def _table(
    draft: str | None,
    temperature: float,
    prompt_set: str | None,
    cells: list[ResultRow],
    theory: dict[tuple[object, ...], ResultRow],
) -> Table:
    ordered = sorted(cells, key=lambda row: row.k)
    best = best_row(ordered)
    rows = [
        Row(_cells(row, theory.get(_cell(row))), best=best is not None and row.k == best.k)
        for row in ordered
    ]
    columns, marked = with_best_column(COLUMNS, rows)
    name = f"temperature {fmt.temperature(temperature)}, {prompt_set or 'all'} prompts"
    title = f"{draft}, {name}" if draft else name[0].upper() + name[1:]
    return Table(title, columns, marked, _notes(ordered, marked))


def _cells(row: ResultRow, predicted: ResultRow | None) -> tuple[str, ...]:
    return (
        str(row.k),
        fmt.rate(row.tokens_per_second),
        fmt.milliseconds(row.ms_per_token),
        fmt.percent(row.acceptance_rate),
        fmt.alpha(row.alpha, row.alpha_lo, row.alpha_hi),
        fmt.EMPTY if row.k == 0 else fmt.speedup(row.speedup, row.speedup_lo, row.speedup_hi),
        fmt.EMPTY if row.k == 0 else fmt.speedup(predicted.speedup if predicted else None),
        fmt.decimal(row.tokens_per_round) if row.k else fmt.EMPTY,
        break_even(row, predicted),
    )


def break_even(row: ResultRow, predicted: ResultRow | None) -> str:
    """The alpha this K needs; "none" where step times say that even alpha = 1 loses."""
    if row.k == 0:
        return fmt.EMPTY
    for source in (row, predicted):
        if source is not None and source.breakeven_alpha is not None:
            return fmt.alpha(source.breakeven_alpha)
    known = predicted is not None or row.source == "replayed"
    return fmt.NO_ROOT if known else fmt.EMPTY


def _notes(cells: list[ResultRow], rows: tuple[Row, ...]) -> tuple[str, ...]:
    troubles = tuple(
        f"K={row.k} is {row.status}" + (f": {row.error}" if row.error else ".")
        for row in cells
        if row.status != "complete"
    )
    no_root = any(row.cells[-1] == fmt.NO_ROOT for row in rows)
    best = any(row.best for row in rows)
    return (*troubles, *((NO_ROOT_NOTE,) if no_root else ()), *((BEST_NOTE,) if best else ()))


def _cell(row: ResultRow) -> tuple[object, ...]:
    return (row.model, row.draft, row.prompt_set, row.temperature, row.k)

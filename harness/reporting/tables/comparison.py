"""Tables of compared runs: the cells, and the settings that differ."""

from harness import formatting as fmt
from harness.reporting.tables.specification import Column, Table, table
from harness.summary import ComparisonRow, Difference, Summary

COLUMNS: tuple[Column[ComparisonRow], ...] = (
    Column("prompt set", lambda row: row.prompt_set, key=True),
    Column("temperature", lambda row: row.temperature, fmt.temperature, key=True),
    Column("K", lambda row: row.k, fmt.count, key=True),
    Column("ms/tok\nreference", lambda row: row.reference_ms_per_token, fmt.milliseconds),
    Column("ms/tok\nrun", lambda row: row.ms_per_token, fmt.milliseconds),
    Column("speedup\nreference", lambda row: row.reference_speedup, fmt.speedup),
    Column("speedup\nrun", lambda row: row.speedup, fmt.speedup),
    Column("speedup ratio\n[lo, hi]", lambda row: fmt.bounded(row, "speedup_ratio"), fmt.speedup),
    Column("p, Holm", lambda row: row.p_value_holm, fmt.p_value),
    Column("alpha\ndifference", lambda row: row.alpha_difference, lambda a: fmt.signed(a, 3)),
    Column("prompts", lambda row: row.prompts, fmt.count),
    Column("status", lambda row: None if row.status == "complete" else row.status),
)
RATIO_NOTE = (
    "speedup ratio: speedup of the run / speedup of the reference; below 1 the run gains less."
    " alpha difference: run - reference. Both are over the prompts that both runs have, each prompt"
    " paired with itself; prompt sets weigh as in the reference."
)
HOLM_NOTE = (
    "p, Holm: the chance of a difference as large as this if there were none, adjusted for the"
    " number of cells (Holm). Below 0.05 a cell differs significantly. Intervals are not adjusted."
)


def comparison_tables(summary: Summary) -> list[Table]:
    compared = summary.comparison
    if compared is None:
        return []
    made: list[Table] = []
    for run in compared.runs:
        rows = [row for row in compared.rows if row.run == run.name]
        notes = (RATIO_NOTE, HOLM_NOTE) if run.cells else (RATIO_NOTE,)
        made.append(table(f"{run.name} against {compared.reference}", COLUMNS, rows, notes=notes))
    columns: tuple[Column[Difference], ...] = (
        Column("setting", lambda entry: entry.name, key=True),
        *(
            Column(name, lambda entry, place=place: fmt.text(entry.values[place]), flexible=True)
            for place, name in enumerate(compared.names)
        ),
    )
    return [*made, table("Settings that differ", columns, compared.differences)]


def brief_tables(summary: Summary) -> list[Table]:
    """The whole workload at every K above 0."""
    compared = summary.comparison
    if compared is None:
        return []
    cells = [row for row in compared.rows if row.prompt_set in (None, "all") and row.k]
    of_cells: list[Column[ComparisonRow]] = [*COLUMNS[1:3], *COLUMNS[7:9]]
    if len(compared.runs) > 1:
        of_cells.insert(0, Column("run", lambda row: row.run, key=True, flexible=True))
    title = f"Whole workload, against {compared.reference}"
    return [table(title, of_cells, cells)]

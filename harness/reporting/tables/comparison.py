"""Tables of compared runs: the runs, the cells, and the settings that differ."""

from harness import formatting as fmt
from harness.reporting.tables.specification import Column, Table, table
from harness.serving.engines import spec_of
from harness.summary import ComparisonRow, Difference, RunCompared, Summary

RUNS: tuple[Column[RunCompared], ...] = (
    Column("run", lambda run: run.name, key=True, flexible=True),
    Column("command", lambda run: run.command),
    Column("draft", lambda run: run.draft, flexible=True),
    Column("engine", lambda run: spec_of(run.engine).title),
    Column("version", lambda run: run.version, flexible=True),
    Column("seed", lambda run: str(run.seed)),
    Column("prompt sets\nweigh", lambda run: _weights(run), flexible=True),
)
RUNS_NOTE = "{} is the reference: its weights of prompt sets are used for every run here."
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
    " paired with itself."
)
HOLM_NOTE = (
    "p, Holm: the chance of a difference as large as this if there were none, adjusted for the"
    " number of cells (Holm). Below 0.05 a cell differs significantly. Intervals are not adjusted."
)


def comparison_tables(summary: Summary) -> list[Table]:
    """The runs, the cells of each compared run, and the settings that differ."""
    compared = summary.comparison
    if compared is None:
        return []
    weighted = any(run.weights for run in compared.every)
    runs_notes = (RUNS_NOTE.format(compared.reference),) if weighted else ()
    made = [table("The runs", RUNS, compared.every, notes=runs_notes)]
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


def _weights(run: RunCompared) -> str:
    return ", ".join(f"{name} {share:g}" for name, share in run.weights.items()) or "equally"


def brief_tables(summary: Summary) -> list[Table]:
    """The runs, and the whole workload at every K above 0."""
    compared = summary.comparison
    if compared is None:
        return []
    cells = [row for row in compared.rows if row.prompt_set in (None, "all") and row.k]
    of_cells: list[Column[ComparisonRow]] = [*COLUMNS[1:3], *COLUMNS[5:9]]
    if len(compared.runs) > 1:
        of_cells.insert(0, Column("run", lambda row: row.run, key=True, flexible=True))
    title = f"Whole workload, against {compared.reference}"
    return [table("The runs", RUNS, compared.every), table(title, of_cells, cells)]

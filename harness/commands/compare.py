"""Compare stored runs, cell by cell, with the first as the reference; no model is loaded."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from harness.analysis.comparable import Comparability, check_doors, comparability
from harness.analysis.compare import compare_trials
from harness.analysis.compare_gate import Headline, headline
from harness.analysis.compare_rows import ComparisonRow, compare_results
from harness.analysis.differences import differences
from harness.commands.outcome import Outcome
from harness.commands.running import shown
from harness.config import ReportConfig
from harness.measurement.host import describe_host
from harness.records import ResultRow, Summary, UserError
from harness.reporting.reading import ran, results_of
from harness.storage import RunFolder, StoredRun, load, refuse_lost_trials

NO_SPEEDUP = "acceptance is not comparable: times only"
OTHER_DEVICE = "other device"
# Every column that rests on acceptance.
ACCEPTANCE = ("speedup", "p_value", "alpha", "acceptance_rate")


def run(config: ReportConfig) -> Outcome:
    """Compare `runs`, store the comparison as a run of its own, render and show it.

    Returns:
        Its folder; status 1 where a run's speedup fell below `fail_below` of the reference's.

    Raises:
        UserError: fewer than two runs, one of them twice, runs that cannot be compared, or a
            threshold where no speedup can be compared.
    """
    names, runs = _loaded(config.runs)
    reference = runs[0]
    rows: list[ComparisonRow] = []
    warnings: list[str] = []
    headlines: list[Headline] = []
    for name, other in zip(names[1:], runs[1:], strict=True):
        fitness = comparability((names[0], name), (reference, other))
        if config.fail_below is not None and fitness.unlike is not None:
            raise UserError(
                f"fail_below={config.fail_below:g}: no speedup of {name} can be compared; "
                f"{fitness.unlike}"
            )
        found = _rows((names[0], name), (reference, other), fitness, config.seed)
        if not found:
            raise UserError(f"runs: {names[0]} and {name} have no cell in common")
        rows += found
        warnings += fitness.warnings
        headlines.append(headline(name, found, **_served(reference), fail_below=config.fail_below))

    folder = RunFolder.create(config.results_root, "report", ("compare",), asdict(config))
    folder.write_table("comparison.csv", ComparisonRow, rows)
    folder.write_summary(
        Summary(verdict=None, caveats=tuple(dict.fromkeys(warnings))),
        {
            "comparison": [asdict(row) for row in rows],
            "comparison_headlines": [asdict(entry) for entry in headlines],
            "differences": [asdict(entry) for entry in differences(runs)],
            "compared": [_described(name, run) for name, run in zip(names, runs, strict=True)],
        },
    )
    folder.update_manifest({"environment": describe_host(), "status": "complete"})
    failed = any(entry.outcome == "fail" for entry in headlines)
    return shown(folder.path, 1 if failed else 0)


def _loaded(folders: Sequence[str]) -> tuple[list[str], list[StoredRun]]:
    """The runs and the names they go by: folder names, whole paths where those are the same.

    Raises:
        UserError: fewer than two, one twice, or a folder that is not a run with cells.
    """
    if len(folders) < 2:
        raise UserError("runs: give at least two run folders, runs=[results/A,results/B]")
    runs = [load(folder) for folder in folders]
    for run in runs:
        refuse_lost_trials(run)
    paths = [run.folder.resolve() for run in runs]
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise UserError(f"runs: {folders[index]} is given twice; list each once")
    short = [path.name for path in paths]
    names = short if len(set(short)) == len(short) else [str(folder) for folder in folders]
    check_doors(names, runs)
    return names, runs


def _rows(
    names: Sequence[str], runs: Sequence[StoredRun], fitness: Comparability, seed: int
) -> list[ComparisonRow]:
    reference, other = runs
    blank = ComparisonRow(
        names[0], names[1], _draft(reference), _draft(other), None, None, 0, "measured", "complete"
    )
    if fitness.measured:
        weights = (reference.config.get("prompts") or {}).get("weights")
        rows = compare_trials(reference.trials, other.trials, blank, weights=weights, seed=seed)
    else:
        rows = compare_results(_cells(reference), _cells(other), blank)
    if fitness.unlike is not None:
        rows = [_times_only(row) for row in rows]
    return rows if fitness.times else [_noted(row, OTHER_DEVICE) for row in rows]


def _cells(run: StoredRun) -> tuple[ResultRow, ...]:
    return ran(results_of(run))


def _draft(run: StoredRun) -> str | None:
    return (run.config.get("draft") or {}).get("name")


def _times_only(row: ComparisonRow) -> ComparisonRow:
    """The row without what rests on acceptance."""
    parts = tuple(
        name for name in asdict(row) if name.removeprefix("reference_").startswith(ACCEPTANCE)
    )
    return _noted(replace(row, **dict.fromkeys(parts)), NO_SPEEDUP)


def _noted(row: ComparisonRow, note: str) -> ComparisonRow:
    return replace(row, note=f"{row.note}; {note}" if row.note else note)


def _served(reference: StoredRun) -> dict[str, Any]:
    """Temperature and K of the reference's verdict."""
    verdict = (reference.summary or {}).get("verdict") or {}
    return {"temperature": verdict.get("temperature"), "k": verdict.get("k") or 0}


def _described(name: str, run: StoredRun) -> dict[str, Any]:
    """What a reader wants to know of a compared run without opening it."""
    environment = run.manifest.get("environment") or {}
    return {
        "name": name,
        "folder": str(run.folder),
        "door": run.door,
        "status": run.manifest.get("status"),
        "created_utc": run.manifest.get("created_utc"),
        "commit": (environment.get("git") or {}).get("commit"),
        "dirty": (environment.get("git") or {}).get("dirty"),
        "verdict": (run.summary or {}).get("verdict"),
    }

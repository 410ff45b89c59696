"""Render stored runs again, compare them, or list them all; no model is loaded.

A run that was killed has trials but no results yet: they are derived first, from what is there.
"""

import math
from dataclasses import asdict

from rich.console import Console

from harness import reporting
from harness.analysis import analyse
from harness.analysis.comparison import compare
from harness.analysis.unfinished import derived
from harness.commands import index
from harness.commands.run import Outcome, shown
from harness.config import ReportConfig
from harness.measurement.environment import describe_host
from harness.records import Summary, UserError
from harness.storage import RunFolder, StoredRun, load, refuse_lost_trials
from harness.summary import ComparisonRow


def run(config: ReportConfig) -> Outcome:
    """Render a run's report and show it, compare several, or write the index of a folder.

    Returns:
        The run folder; status 1 where its speedup is below `fail_below`.

    Raises:
        UserError: no run named, or not a run folder, or one of a newer schema; more than one of
            run, runs and index.
    """
    if config.fail_below is not None and not 0 < config.fail_below < math.inf:
        raise UserError(f"fail_below={config.fail_below}: give a ratio above 0, for example 0.95")
    given = [name for name in ("run", "runs", "index") if getattr(config, name)]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)}: give one of them")
    if config.index is not None:
        if config.fail_below is not None:
            raise UserError("fail_below: needs run= or runs=; an index judges nothing")
        return index.run(config.index)
    if config.runs:
        return _compared(config)
    if config.run is None:
        raise UserError("run: name the run folder to render, run=results/...")
    stored = derived(load(config.run))
    summary = analyse(stored)
    reporting.render(summary, stored.folder)
    reporting.show(summary)
    return Outcome(stored.folder, 1 if _below(stored, config.fail_below) else 0)


def _compared(config: ReportConfig) -> Outcome:
    """Compare `runs`, store the comparison as a run of its own, render and show it.

    Returns:
        Its folder; status 1 where a run's speedup fell below `fail_below` of the reference's.
    """
    runs = [load(folder) for folder in config.runs]
    for run in runs:
        refuse_lost_trials(run)
    comparison = compare(runs, config.fail_below, seed=config.seed)
    folder = RunFolder.create(config.results_root, "report", ("compare",), asdict(config))
    folder.write_table("comparison.csv", ComparisonRow, comparison.rows)
    folder.write_summary(Summary(verdict=None), {"comparison": asdict(comparison)})
    folder.update_manifest({"environment": describe_host(), "status": "complete"})
    return shown(folder.path, int(comparison.failed))


def _below(stored: StoredRun, least: float | None) -> bool:
    """Whether the headline verdict's speedup is below what was asked for.

    Raises:
        UserError: asked for, and the run has no verdict with a speedup.
    """
    if least is None:
        return False
    verdict = (stored.summary or {}).get("verdict") or {}
    speedup = verdict.get("speedup")
    if speedup is None:
        raise UserError(f"fail_below={least:g}: {stored.folder} has no verdict with a speedup")
    below = bool(speedup < least)
    said = "FAIL, the verdict's speedup is below it" if below else "PASS, it is not below it"
    Console(highlight=False, soft_wrap=True).print(
        f"fail_below={least:g}: {said}: {speedup:.2f}x at K={verdict.get('k')}"
    )
    return below

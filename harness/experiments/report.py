"""Render stored runs again; no model is loaded.

A run that was killed has trials but no results yet: they are derived first, from what is there.
"""

from harness import reporting
from harness.config import ReportConfig
from harness.experiments.finish import finish_sweep
from harness.experiments.outcome import Outcome
from harness.experiments.validate import validated
from harness.records import UserError
from harness.storage import RunFolder, StoredRun, load


def run(config: ReportConfig) -> Outcome:
    """Render a run's report.md and plots and show it.

    Returns:
        The run folder; status 1 where its speedup is below `fail_below`.

    Raises:
        UserError: no run named, or not a run folder, or one of a newer schema.
    """
    validated(config)
    if config.runs:
        raise UserError("runs=[...]: comparing runs is not available yet; render one with run=")
    if config.run is None:
        raise UserError("run: name the run folder to render, run=results/...")
    stored = load(config.run)
    if stored.door == "sweep" and stored.manifest.get("status") != "complete" and stored.trials:
        finish_sweep(RunFolder(stored.folder, stored.manifest), stored)
        stored = load(config.run)
    reporting.render(stored)
    reporting.show(stored)
    return Outcome(stored.folder, 1 if _below(stored, config.fail_below) else 0)


def _below(stored: StoredRun, least: float | None) -> bool:
    """Whether the headline verdict's speedup is below what was asked for.

    Raises:
        UserError: asked for, and the run has no verdict with a speedup.
    """
    if least is None:
        return False
    speedup = ((stored.summary or {}).get("verdict") or {}).get("speedup")
    if speedup is None:
        raise UserError(f"fail_below={least:g}: {stored.folder} has no verdict with a speedup")
    return bool(speedup < least)

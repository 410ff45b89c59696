"""Render stored runs again, or compare them; no model is loaded.

A run that was killed has trials but no results yet: they are derived first, from what is there.
"""

import math

from rich.console import Console

from harness import reporting
from harness.config import ReportConfig
from harness.experiments import compare
from harness.experiments.finish import finish_sweep
from harness.experiments.outcome import Outcome
from harness.experiments.validate import validated
from harness.records import UserError
from harness.storage import RunFolder, StoredRun, load


def run(config: ReportConfig) -> Outcome:
    """Render a run's report and show it, or compare several.

    Returns:
        The run folder; status 1 where its speedup is below `fail_below`.

    Raises:
        UserError: no run named, or not a run folder, or one of a newer schema; both run and runs.
    """
    validated(config)
    if config.fail_below is not None and not 0 < config.fail_below < math.inf:
        raise UserError(f"fail_below={config.fail_below}: give a ratio above 0, for example 0.95")
    if config.runs and config.run is not None:
        raise UserError("run and runs: give one of the two")
    if config.runs:
        return compare.run(config)
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

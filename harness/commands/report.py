"""Render stored runs again, compare them, or list them all; no model is loaded.

A run that was killed has trials but no results yet: they are derived first, from what is there.
"""

import math

from rich.console import Console

from harness import reporting
from harness.analysis.unfinished import derived
from harness.commands import compare, index
from harness.commands.outcome import Outcome
from harness.commands.validate import validated
from harness.config import ReportConfig
from harness.records import UserError
from harness.storage import StoredRun, load


def run(config: ReportConfig) -> Outcome:
    """Render a run's report and show it, compare several, or write the index of a folder.

    Returns:
        The run folder; status 1 where its speedup is below `fail_below`.

    Raises:
        UserError: no run named, or not a run folder, or one of a newer schema; more than one of
            run, runs and index.
    """
    validated(config)
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
        return compare.run(config)
    if config.run is None:
        raise UserError("run: name the run folder to render, run=results/...")
    stored = derived(load(config.run))
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

"""Break-even and speedups from two latencies, without a model and without torch.

Latencies and acceptance are typed in; latencies may be those of a run's rounds.
"""

from collections.abc import Sequence
from dataclasses import asdict

from harness.analysis.breakeven import MeasuredInputs, from_run, inputs_of
from harness.analysis.round_costs import Latency, latency_of_draft
from harness.commands.run_lifecycle import Outcome, concluded
from harness.config import BreakevenConfig
from harness.measurement.environment import describe_host
from harness.records import GREEDY, UserError
from harness.storage import RunFolder, load


def run(config: BreakevenConfig) -> Outcome:
    """Compute every row, store the run and print it."""
    measured = measured_inputs(config)
    inputs_of(config, measured)  # refuses what cannot be before a folder is made
    stored = {name: value for name, value in asdict(measured).items() if value}
    folder = RunFolder.create(config.results_root, "breakeven", (), asdict(config))
    folder.write_timings(())  # none stand behind times that are typed
    folder.note(environment=describe_host(), inputs=stored)
    return concluded(folder, verbose=config.verbose)


# ---- times of a run ------------------------------------------------------------------------------


def measured_inputs(config: BreakevenConfig) -> MeasuredInputs:
    """Read the times of the run that the configuration names: one source of each number."""
    _only_one(config, ("acceptance_rate", "acceptance_by_position"))
    for key in ("target_ms", "draft_ms", "verify_ms"):
        _only_one(config, (key, "latency_from"))
    if config.latency_from is not None:
        return from_run(config.latency_from, latency_of_run(config.latency_from), config.k)
    missing = [key for key in ("draft_ms", "target_ms") if getattr(config, key) is None]
    if missing:
        give = " ".join(f"{key}=..." for key in missing)
        raise UserError(f"{missing[0]}: no value and no default; give {give} (or latency_from=RUN)")
    return MeasuredInputs()


def _only_one(config: BreakevenConfig, keys: Sequence[str]) -> None:
    """Refuse two sources of one number."""
    given = [key for key in keys if getattr(config, key) is not None]
    if len(given) > 1:
        raise UserError(f"{given[0]} and {given[1]}: give one of the two")


def latency_of_run(folder: str) -> Latency:
    """Round and step times of a run with one draft, greedy where it timed greedy rounds."""
    run = load(folder)
    drafts = sorted({timing.model for timing in run.timings if timing.role == "draft"})
    if not drafts or not any(timing.role == "target" for timing in run.timings):
        raise UserError(f"latency_from={folder}: no step times there; name a profile or a sweep")
    if len(drafts) > 1:
        raise UserError(
            f"latency_from={folder}: times of {', '.join(drafts)}; name a run with one draft"
        )
    latency = latency_of_draft(run, drafts[0], GREEDY)
    assert latency is not None  # its steps were timed
    return latency

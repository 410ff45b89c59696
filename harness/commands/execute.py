"""What profile and sweep share: begin or resume a folder, time the steps, run the generations."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from harness.analysis.latency import latency_rows
from harness.commands.pair import Pair, typical_context
from harness.commands.progress import progress
from harness.commands.requests import missing
from harness.commands.running import resumed_run
from harness.config import PairConfig
from harness.measurement.generations import Request, run_trial
from harness.measurement.step_times import REPETITIONS, time_forwards
from harness.models.cached import CachedModel
from harness.records import StepTiming, Trial, UserError
from harness.storage import RunFolder

# What of a model's entry in the manifest must stay as it was for a run to be resumed
WEIGHTS = ("name", "dtype", "commit", "parameters", "weights_sample_sha256")
ENGINE = ("engine", "compiled")
WARMUP_TOKENS = 8


def resumed(config: PairConfig, door: str) -> RunFolder | None:
    """The folder to resume, checked before any model is loaded; None for a new run.

    Raises:
        UserError: it is not a run of this door with this configuration.
    """
    if config.resume is None:
        return None
    return resumed_run(config, door)


def note_or_check(folder: RunFolder, described: dict[str, Any], seed: int) -> None:
    """Write a new run's manifest; hold a resumed one's against the machine and prompts of now.

    Raises:
        UserError: the prompts or the device changed, so the run would mix two workloads.
    """
    if "prompts_sha256" in folder.manifest:
        check_unchanged(folder, described)
    else:
        folder.update_manifest({**described, "seed": seed})


def check_unchanged(folder: RunFolder, described: dict[str, Any]) -> None:
    """Hold a resumed run's manifest against the prompts, the machine and the models of now.

    Args:
        folder: of the run; models that are not described now are passed over.
        described: what a new run's manifest would say.

    Raises:
        UserError: the prompts, the device or a model changed, so the run would mix two workloads.
    """
    known = folder.manifest
    here, before = described["environment"], known.get("environment", {})
    models = {role: known["models"][role] for role in described["models"]}
    stored = {**known, "models": models}
    changed = [
        what
        for what, one, other in (
            ("prompts", known["prompts_sha256"], described["prompts_sha256"]),
            ("device", before.get("device_name"), here["device_name"]),
            ("models", _noted(WEIGHTS, stored, stored), _noted(WEIGHTS, described, stored)),
            ("engines", _noted(ENGINE, stored, stored), _noted(ENGINE, described, stored)),
        )
        if one != other
    ]
    if changed:
        raise UserError(
            f"resume={folder.path}: {' and '.join(changed)} changed since; "
            "one run cannot mix the two, start a new one without resume="
        )


def _noted(
    names: Sequence[str], manifest: dict[str, Any], known: dict[str, Any]
) -> list[tuple[Any, ...]]:
    """These entries of each model, as far as the run that is resumed noted them."""
    keys = [[key for key in names if key in entry] for entry in _models(known)]
    return [
        tuple(entry.get(key) for key in noted)
        for entry, noted in zip(_models(manifest), keys, strict=True)
    ]


def _models(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return list(manifest["models"].values())


def create(config: PairConfig, door: str) -> RunFolder:
    """A new folder, made only when everything that can be checked beforehand was.

    Raises:
        UserError: it cannot be made.
    """
    names = [config.model.name, config.draft.name]
    return RunFolder.create(config.results_root, door, names, asdict(config))


def measure_steps(folder: RunFolder, pair: Pair, config: PairConfig) -> list[StepTiming]:
    """Time every forward, unless the folder already holds the timings; store them."""
    stored = folder.timings()
    if stored:
        return stored
    with progress("timing steps", REPETITIONS) as tick:
        timings = time_forwards(
            pair.timed,
            max(config.k),
            context=typical_context(pair.prompts, config.new_tokens),
            tick=tick,
        )
    folder.write_latency(latency_rows(timings), timings)
    return timings


def run_requests(
    folder: RunFolder,
    requests: Sequence[Request],
    models: Callable[[Request], tuple[CachedModel, CachedModel | None]],
    label: str,
) -> list[Trial]:
    """Run what the folder lacks, one durable line each; return every stored trial of `requests`."""
    finished = (trial.cell for trial in folder.trials() if trial.status == "ok")
    waiting = missing(requests, finished)
    _warm_up(waiting, models)
    with progress(label, len(waiting)) as tick:
        for entry in waiting:
            folder.append_trial(run_trial(entry, *models(entry)))
            tick()
    wanted = {entry.cell for entry in requests}
    return [trial for trial in folder.trials() if trial.cell in wanted]


def _recorded_apart(request: Request) -> object:
    """What a recorded phase is particular to; elsewhere only whether tokens are drawn matters."""
    return request.sampling, request.rule, request.synthetic


def _warm_up(
    requests: Sequence[Request],
    models: Callable[[Request], tuple[CachedModel, CachedModel | None]],
) -> None:
    """A few unmeasured tokens of each kind: first calls allocate, compile, record, fill caches."""
    shapes = {(entry.model, entry.k, _recorded_apart(entry)): entry for entry in requests}
    with progress("warming up (compiling and recording new work)", len(shapes)) as tick:
        for entry in shapes.values():
            run_trial(replace(entry, budget=min(entry.budget, WARMUP_TOKENS)), *models(entry))
            tick()

"""What every command shares: begin or resume a run's folder, note what becomes of it, end it.

A command measures what its folder lacks inside `running`, so that the manifest says what ended an
unfinished run, and hands the rest to `concluded`: analyse, write, render, show. An error in there
loses no measurement. `Outcome` is what it returns to whoever started it.

Nothing here imports torch: `--help` of every command imports this module.
"""

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import prompts as prompt_sets
from harness.analysis import analyse
from harness.commands.progress import fetching, progress
from harness.config import AuditionConfig, PairConfig
from harness.measurement.environment import CardWatch, OtherLoad
from harness.records import BrokenLogitsError, Prompt, UserError, in_one_line
from harness.storage import RunFolder, check_writable, load
from harness.summary import Summary

if TYPE_CHECKING:
    import torch

INTERRUPTED = "interrupted_by"
# The manifest's entries for what others did on the machine while it measured: processors that they
# kept busy, and processes on the card
OTHER_LOAD, OTHER_PROCESSES = "other_load", "other_gpu_processes"
# The manifest's entry for the card's clocks, power and temperature, a list: one each time that the
# run was begun or resumed
CARD_READINGS = "card_readings"
# The manifest's entry for measurements that failed because logits were not finite
NOT_MEASURED = "not_measured"
# What of a model's entry in the manifest must stay as it was for a run to be resumed
WEIGHTS = ("name", "dtype", "commit", "parameters", "weights_sample_sha256")
ENGINE = ("engine", "compiled")


class Interrupted(KeyboardInterrupt):
    """A signal asked the process to end; a file being written is completed or restored first."""

    def __init__(self, number: int) -> None:
        """For the signal of this number."""
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass(frozen=True)
class Outcome:
    """The end of a command's work.

    Attributes:
        folder: the run folder, or None when nothing was stored (a dry run).
        status: 0 when all that was asked for is complete, 1 when cells failed or a check did, 2
            when the user must fix something.
        error: what failed after everything was measured: the folder holds the measurements, but not
            its results or its report.
    """

    folder: Path | None
    status: int = 0
    error: Exception | None = None

    @property
    def reason(self) -> str | None:
        """The error in one line; None where there is none."""
        return None if self.error is None else in_one_line(self.error)


# ---- beginning -----------------------------------------------------------------------------------


def load_prompts(config: PairConfig | AuditionConfig) -> tuple[Prompt, ...]:
    """The prompts that a configuration asks for."""
    with fetching("reading the prompts", config.prompts.hub):
        return prompt_sets.load(config.prompts)


def create(config: PairConfig | AuditionConfig, command: str) -> RunFolder:
    """A new folder, made only when everything that can be checked beforehand was."""
    names = [config.model.name]
    if isinstance(config, PairConfig):
        names.append(config.draft.name)
    return RunFolder.create(config.results_root, command, names, asdict(config))


def begin(
    config: PairConfig | AuditionConfig,
    command: str,
    folder: RunFolder | None,
    described: Mapping[str, Any],
) -> RunFolder:
    """The folder to resume, or a new one, with the manifest's entries noted or checked."""
    folder = folder or create(config, command)
    note_or_check(folder, described, config.seed)
    return folder


def resumed(config: PairConfig | AuditionConfig, command: str) -> RunFolder | None:
    """The folder to resume, checked before any model is loaded; None for a new run.

    What is auto becomes what the run began with: its backend, and the attention of its models,
    which was sdpa before auto was the default.

    Raises:
        UserError: a folder that is not this run's, or no new one can be made.
    """
    if config.resume is None:
        check_writable(config.results_root)
        return None
    began = load(config.resume).config
    if config.backend == "auto":
        config.backend = began.get("backend", config.backend)
    for role in ("model", "draft"):
        model, stored = getattr(config, role, None), began.get(role) or {}
        if model is not None and model.attention == "auto":
            model.attention = stored.get("attention", model.attention)
    return RunFolder.resume(config.resume, command, asdict(config))


def note_or_check(folder: RunFolder, described: Mapping[str, Any], seed: int) -> None:
    """Write a new run's manifest entries; refuse to resume one whose prompts or models changed.

    Of the run's models, those that are not in `described` are passed over.
    """
    known = folder.manifest.get("models") or {}
    if "prompts_sha256" in folder.manifest:
        _check_unchanged(folder, described)
    models = {**known, **described["models"]}
    folder.update_manifest({**described, "models": models, "seed": seed})


def _check_unchanged(folder: RunFolder, described: Mapping[str, Any]) -> None:
    known = folder.manifest
    models = {role: known["models"][role] for role in described["models"]}
    stored = {**known, "models": models}
    now, before = described["environment"], known.get("environment", {})
    changed = [
        what
        for what, one, other in (
            ("prompts", known["prompts_sha256"], described["prompts_sha256"]),
            ("device", before.get("device_name"), now["device_name"]),
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
    names: Sequence[str], manifest: Mapping[str, Any], known: Mapping[str, Any]
) -> list[tuple[Any, ...]]:
    """These entries of each model, as far as the run that is resumed noted them."""
    return [
        tuple(entry.get(name) for name in names if name in noted)
        for entry, noted in zip(manifest["models"].values(), known["models"].values(), strict=True)
    ]


# ---- while it is measured ------------------------------------------------------------------------


@contextmanager
def running(folder: RunFolder) -> Iterator[None]:
    """Mark the run failed if the block raises; what was measured stays.

    A run that was interrupted is not failed: it is unfinished, and its manifest says what ended it.
    """
    folder.manifest.pop(INTERRUPTED, None)
    folder.update_manifest({"status": "running"})
    try:
        yield
    except KeyboardInterrupt as stop:
        name = str(stop) if isinstance(stop, Interrupted) else "SIGINT"
        _note(folder, {INTERRUPTED: name})
        raise
    except BaseException:
        _note(folder, {"status": "failed"})
        raise


@contextmanager
def measuring(folder: RunFolder, device: "torch.device") -> Iterator[None]:
    """`running`, with a note of how busy other work kept the machine while the block ran.

    Of a run that was resumed, the busier time counts. What the card did is noted too.
    """
    load, processes, card = OtherLoad(), _others_on(device), CardWatch(device)
    with running(folder):
        try:
            with card:
                yield
        finally:
            if readings := card.readings():
                noted = folder.manifest.get(CARD_READINGS) or []
                _note(folder, {CARD_READINGS: [*noted, *map(asdict, readings)]})
            before = folder.manifest.get(OTHER_LOAD) or {}
            now = load.so_far()
            _note(folder, {OTHER_LOAD: max(before, now, key=lambda one: one.get("load", 0.0))})
            known = [folder.manifest.get(OTHER_PROCESSES), processes, _others_on(device)]
            counts = [count for count in known if count is not None]
            if counts:
                _note(folder, {OTHER_PROCESSES: max(counts)})


@contextmanager
def resumable(folder: RunFolder) -> Iterator[None]:
    """Say in the error of a server how the run continues; a disk's says so itself."""
    try:
        yield
    except UserError as error:
        again = f"what was measured is stored, resume={folder.path} continues the run"
        error.args = (f"{error}; {again}",)
        raise


def _others_on(device: "torch.device") -> int | None:
    """How many other processes use the card now; None where there is none, or it is not known."""
    if device.type != "cuda":
        return None
    from harness.models.device import other_gpu_processes  # imports torch

    return other_gpu_processes(device)


def _note(folder: RunFolder, entries: Mapping[str, Any]) -> None:
    with suppress(UserError):  # on a full disk what ended the run is the error to show
        folder.update_manifest(entries)


@contextmanager
def unless_broken(folder: RunFolder, what: str) -> Iterator[None]:
    """Note in the manifest that `what` met logits that are not finite, and let the run go on.

    `harness.analysis` makes failures of these notes.
    """
    notes = dict(folder.manifest.get(NOT_MEASURED) or {})
    try:
        yield
        notes.pop(what, None)  # of the attempt that this one resumes
    except BrokenLogitsError as error:
        notes[what] = str(error)
    if notes != (folder.manifest.get(NOT_MEASURED) or {}):
        folder.update_manifest({NOT_MEASURED: notes})


# ---- ending --------------------------------------------------------------------------------------


def concluded(folder: RunFolder, *, verbose: bool) -> Outcome:
    """Analyse a measured run; write results.csv, summary.json and its status; render and show it.

    An error here loses no measurement: it becomes the outcome's error, and the folder is kept.
    """
    try:
        with running(folder), progress("analysing what was measured"):
            summary = analyse(load(folder.path))
            status = "failed" if summary.failures else "complete"
            environment = {**summary.run.environment, "status": status}
            facts = replace(summary.run, status=status, environment=environment)
            summary = replace(summary, run=facts)
            write_analysis(folder, summary)
    except UserError:
        raise
    except Exception as error:  # the caller reports it
        return Outcome(folder.path, 1, error)
    folder.update_manifest({"status": status})
    return shown(summary, folder.path, int(bool(summary.failures)), verbose=verbose)


def write_analysis(folder: RunFolder, summary: Summary) -> None:
    """Store what the analysis of a run gave."""
    folder.write_results(summary.results)
    if any(row.kind == "round" for row in summary.latency):
        folder.write_latency_rows(summary.latency)
    folder.write_summary(summary)


def shown(summary: Summary, folder: Path, status: int = 0, *, verbose: bool) -> Outcome:
    """Render a run's report and show it; an error there becomes the outcome's error."""
    from harness import reporting

    try:
        with progress("writing the report"):
            reporting.render(summary, folder)
        reporting.show(summary, verbose=verbose)
    except UserError as error:  # the folder cannot be written any more
        return Outcome(folder, 2, error)
    except Exception as error:  # see `concluded`
        return Outcome(folder, 1, error)
    return Outcome(folder, status)

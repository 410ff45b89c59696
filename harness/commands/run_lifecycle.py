"""The life of a run in every command: begin or resume its folder, note its state, end it.

A command measures what its folder lacks inside `running`, so that the manifest says what ended an
unfinished run, and hands the rest to `concluded`: analyse, write, render, show. An error in there
loses no measurement. `Outcome` is what it returns to whoever started it.

Nothing here imports torch: `--help` of every command imports this module.
"""

import logging
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness import prompts as prompt_sets
from harness.analysis import analyse
from harness.command_words import as_typed
from harness.commands.progress import fetching, progress, say
from harness.config import AuditionConfig, PairConfig
from harness.measurement.environment import OtherLoad, watched_cards
from harness.records import (
    BrokenLogitsError,
    CardReadings,
    LatencyRow,
    NotMeasured,
    Prompt,
    ResultRow,
    UserError,
    Verbose,
    in_one_line,
)
from harness.storage import RunFolder, load
from harness.storage.manifest import Environment, ModelEntry
from harness.storage.resume import check_loaded
from harness.summary import Summary

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Described:
    """Manifest entries of a new run."""

    environment: Environment
    models: Mapping[str, ModelEntry]
    prompts: Mapping[str, int]
    prompts_sha256: str


class Interrupted(KeyboardInterrupt):
    """A signal asked the process to end; a file being written is completed or restored first."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass(frozen=True)
class Outcome:
    """The end of a command's work."""

    folder: Path | None  # None when nothing was stored (a dry run)
    # 0: all that was asked for is complete; 1: cells failed or a check did; 2: the user's to fix
    status: int = 0
    error: Exception | None = None  # after everything was measured: no results, or no report
    summary: Summary | None = None  # None where nothing was analysed

    @property
    def reason(self) -> str | None:
        return None if self.error is None else in_one_line(self.error)


# ---- beginning -----------------------------------------------------------------------------------


def load_prompts(config: PairConfig | AuditionConfig) -> tuple[Prompt, ...]:
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
    described: Described,
) -> RunFolder:
    """The folder to resume, or a new one, with the manifest's entries noted or checked."""
    folder = folder or create(config, command)
    _note_or_check(folder, described)
    sample = prompt_sets.log_sample(config.prompts)
    folder.note(
        seed=config.seed,
        prompts_available=prompt_sets.available(config.prompts),
        prompts_log=sample and sample.facts,
    )
    return folder


def resumed(config: PairConfig | AuditionConfig, command: str) -> RunFolder | None:
    """The folder to resume, checked before a model is loaded; UserError for another run's."""
    if config.resume is None:
        return None
    return RunFolder.resume(config.resume, command, asdict(config))


def note_models(folder: RunFolder, models: Mapping[str, ModelEntry]) -> None:
    """Note models that are loaded while a run goes on, as `begin` does at its beginning."""
    known = folder.manifest
    assert known.prompts_sha256 is not None  # it has begun
    _note_or_check(
        folder, Described(known.environment, models, known.prompts, known.prompts_sha256)
    )


def _note_or_check(folder: RunFolder, described: Described) -> None:
    """Write a new run's manifest entries; refuse to resume one whose prompts or models changed."""
    known, given = folder.manifest, described
    if known.prompts_sha256 is not None:
        check_loaded(folder.path, known, given.prompts_sha256, given.environment, given.models)
    environment = given.environment
    if begun_by := known.environment.command:  # printed lines name the keys of this one
        environment = Environment.of({**environment.entries, "command": [*begun_by]})
    models = {**known.models, **given.models}
    folder.note(**{**vars(given), "models": models, "environment": environment})


# ---- while it is measured ------------------------------------------------------------------------


@contextmanager
def running(folder: RunFolder) -> Iterator[None]:
    """Mark the run failed if the block raises; what was measured stays.

    A run that was interrupted is not failed: it is unfinished, and its manifest says what ended it.
    """
    folder.note(status="running", interrupted_by=None)
    try:
        yield
    except BaseException as error:  # raised again
        with suppress(UserError):  # on a full disk what ended the run is the error to show
            if isinstance(error, KeyboardInterrupt):
                name = str(error) if isinstance(error, Interrupted) else "SIGINT"
                folder.note(interrupted_by=name)
            else:
                folder.note(status="failed")
        raise


@contextmanager
def measuring(folder: RunFolder, device: "torch.device") -> Iterator[None]:
    """`running`, with a note of how busy other work kept the machine while the block ran.

    Of a run that was resumed, the busier time counts. What the card did is noted too.
    """
    load, processes, readings = OtherLoad(), _others_on(device), list[CardReadings]()
    with running(folder):
        try:
            with watched_cards(device, readings):
                yield
        finally:
            known, now = folder.manifest, load.so_far()
            before, others = known.other_load, (known.other_gpu_processes, processes)
            counts = [count for count in (*others, _others_on(device)) if count is not None]
            with suppress(UserError):  # as in `running`
                folder.note(
                    card_readings=(*known.card_readings, *readings),
                    other_load=before if before and before.load > now.load else now,
                    other_gpu_processes=max(counts, default=None),
                )


@contextmanager
def resumable(folder: RunFolder) -> Iterator[None]:
    """Say in the error of a server how the run continues; a disk's says so itself."""
    try:
        yield
    except UserError as error:
        again = f"what was measured is stored, {as_typed('resume', folder.path)} continues the run"
        error.args = (f"{error}; {again}",)
        raise


def _others_on(device: "torch.device") -> int | None:
    """The number of other processes on the card; None without a card, or where it is not known."""
    if device.type != "cuda":
        return None
    from harness.models.device import other_gpu_processes  # imports torch

    return other_gpu_processes(device)


@contextmanager
def unless_broken(folder: RunFolder, measurement: NotMeasured) -> Iterator[None]:
    """Note in the manifest that a measurement met logits that are not finite; let the run go on.

    `harness.analysis` makes failures of these notes.
    """
    try:
        yield
        folder.note_not_measured(retried=[measurement])  # of the attempt that this one resumes
    except BrokenLogitsError as error:
        folder.note_not_measured(replace(measurement, error=str(error)))


# ---- ending --------------------------------------------------------------------------------------


def concluded(folder: RunFolder, *, verbose: Verbose) -> Outcome:
    """Analyse a measured run; write results.csv, summary.json and its status; render and show it.

    An error here loses no measurement: it becomes the outcome's error, and the folder is kept.
    """
    try:
        with running(folder), progress("analysing the run"):
            summary = analyse(load(folder.path))
            status = "failed" if summary.failures else "complete"
            summary = replace(summary, run=replace(summary.run, status=status))
            write_analysis(folder, summary)
    except UserError:
        raise
    except Exception as error:  # of analysis; the caller reports it, and no measurement is lost
        return Outcome(folder.path, 1, error)
    folder.note(status=status)
    return shown(summary, folder.path, int(bool(summary.failures)), verbose=verbose)


def answer_so_far(folder: RunFolder, label: str, *, page: bool = False) -> None:
    """Store and say what is known while a run goes on, with `page` in a report, too.

    Whatever goes wrong in it does not end the run.
    """
    from harness import reporting
    from harness.reporting import grid
    from harness.reporting.sentences.verdict import so_far

    try:
        summary = analyse(load(folder.path))
        write_analysis(folder, summary)
        if page:
            reporting.render(summary, folder.path)
        shown = grid.marked(summary)
        if shown is not None and shown.answer.named[1]:
            say(f"{label}: {so_far(shown.answer)}")
    except Exception as error:  # the run's end analyses it again
        _log.warning("%s: no answer yet (%s)", label, in_one_line(error))


def write_analysis(folder: RunFolder, summary: Summary) -> None:
    folder.write_table("results.csv", ResultRow, summary.results)
    if summary.latency:
        folder.write_table("latency.csv", LatencyRow, summary.latency)
    folder.write_summary(summary)


def shown(summary: Summary, folder: Path, status: int = 0, *, verbose: Verbose) -> Outcome:
    """Render a run's report and show it; an error there becomes the outcome's error."""
    from harness import reporting

    try:
        with progress("writing the report"):
            reporting.render(summary, folder)
        reporting.show(summary, verbose=verbose)
    except UserError as error:  # the folder cannot be written any more
        return Outcome(folder, 2, error)
    except Exception as error:  # of rendering; see `concluded`
        return Outcome(folder, 1, error)
    return Outcome(folder, status, summary=summary)

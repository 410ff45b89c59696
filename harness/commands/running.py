"""A run's status while it is measured, and its end: results derived, rendered and shown."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from harness import reporting
from harness.commands.outcome import Interrupted, Outcome
from harness.config import AuditionConfig, PairConfig
from harness.records import BrokenLogitsError, Summary, UserError
from harness.storage import RunFolder, load

INTERRUPTED = "interrupted_by"
# The manifest's entry for measurements that failed because logits were not finite
NOT_MEASURED = "not_measured"


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


def _note(folder: RunFolder, entries: dict[str, str]) -> None:
    with suppress(UserError):  # on a full disk what ended the run is the error to show
        folder.update_manifest(entries)


@contextmanager
def unless_broken(folder: RunFolder, what: str) -> Iterator[None]:
    """Note in the manifest that `what` met logits that are not finite, and let the run go on.

    `told.not_measured` makes failures of these notes.
    """
    notes = dict(folder.manifest.get(NOT_MEASURED) or {})
    try:
        yield
        notes.pop(what, None)  # of the attempt that this one resumes
    except BrokenLogitsError as error:
        notes[what] = str(error)
    if notes != (folder.manifest.get(NOT_MEASURED) or {}):
        folder.update_manifest({NOT_MEASURED: notes})


def resumed_run(config: PairConfig | AuditionConfig, door: str) -> RunFolder:
    """The folder that `config.resume` names; what is auto becomes what the run began with.

    Its backend, and the attention of its models, which was sdpa before auto was the default.

    Raises:
        UserError: it is not a run of this door with this configuration.
    """
    began = load(str(config.resume)).config
    if config.backend == "auto":
        config.backend = began.get("backend", config.backend)
    for role in ("model", "draft"):
        model, stored = getattr(config, role, None), began.get(role) or {}
        if model is not None and model.attention == "auto":
            model.attention = stored.get("attention", model.attention)
    return RunFolder.resume(str(config.resume), door, asdict(config))


def concluded(folder: RunFolder, derive: Callable[[], Summary]) -> Outcome:
    """Derive a measured run's summary, store its status, render and show it.

    An error here loses no measurement: it becomes the outcome's error, and the folder is kept.

    Args:
        folder: everything measured is in it.
        derive: writes its results and its summary.

    Raises:
        UserError: what was measured cannot be used.
    """
    try:
        with running(folder):
            summary = derive()
    except UserError:
        raise
    except Exception as error:  # the caller reports it: the door, or the delivery of a rented run
        return Outcome(folder.path, 1, error)
    folder.update_manifest({"status": "failed" if summary.failures else "complete"})
    return shown(folder.path, 1 if summary.failures else 0)


def shown(folder: Path, status: int = 0) -> Outcome:
    """Render and show a stored run; an error there becomes the outcome's error.

    Args:
        folder: the run.
        status: exit status where there is no error.
    """
    try:
        stored = load(folder)
        reporting.render(stored)
        reporting.show(stored)
    except UserError as error:  # the folder cannot be written any more, or not be read back
        return Outcome(folder, 2, error)
    except Exception as error:  # see `concluded`
        return Outcome(folder, 1, error)
    return Outcome(folder, status)

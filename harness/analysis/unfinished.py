"""A run that was stopped, derived as far as it got, so that it can be rendered without a model.

What the doors derive at their end is derived here from what they had stored by then. The run keeps
its status: its report says at the top that it is not whole.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from omegaconf import OmegaConf

from harness.analysis.cells import measured_rows
from harness.analysis.finish import finish_sweep
from harness.analysis.told import caveats, failures, headline
from harness.config import AuditionConfig, DoorConfig, ProfileConfig
from harness.records import Summary, Trial, UserError
from harness.storage import RunFolder, StoredRun, copied, load, refuse_lost_trials
from harness.storage.lock import Busy

C = TypeVar("C", bound=DoorConfig)
# Doors that derive all they say from what is stored, so that nothing is lost by doing it again.
_FROM_STORED = frozenset({"sweep", "profile"})
_DERIVED = "derived_unfinished"  # in summary.json: written here, to be written again


def derived(stored: StoredRun) -> StoredRun:
    """The run with results and summary, as far as what it stored allows; whole runs as they are.

    A run that another process is writing is derived in a copy, so that one process writes a folder.

    Raises:
        UserError: what it stored cannot be used.
    """
    refuse_lost_trials(stored)
    status = stored.manifest.get("status")
    if status == "complete" or stored.door not in _DOORS:
        return stored
    ended = stored.summary is not None and _DERIVED not in stored.summary
    if ended and stored.door not in _FROM_STORED:
        return stored  # it came to its end, and knows more than can be derived here
    try:
        folder = RunFolder.reopen(stored)
    except Busy:
        with tempfile.TemporaryDirectory() as scratch:
            now = copied(stored, Path(scratch))
            now = _derive(RunFolder(now.folder, now.manifest), now, stored.folder)
            return replace(now, folder=stored.folder)
    return _derive(folder, stored, stored.folder)


def _derive(folder: RunFolder, stored: StoredRun, named: Path) -> StoredRun:
    try:
        _DOORS[stored.door](folder, stored)
    except KeyError as error:  # of a version whose configuration lacked this key
        if stored.summary is None:
            raise UserError(
                f"{named}: stopped early, and its configuration has no {error}; "
                "finish it with the version that made it (resume=)"
            ) from error
        return stored
    return load(stored.folder)


def _sweep(folder: RunFolder, stored: StoredRun) -> None:
    if stored.trials:
        finish_sweep(folder, stored)


def _profile(folder: RunFolder, stored: StoredRun) -> None:
    """Step times, and the generations that were made; nothing where no step was timed."""
    from harness.commands.profile import finish_profile  # imports torch, with what it measures

    timings = folder.timings()
    if timings:
        config = _config(ProfileConfig, stored)
        finish_profile(folder, config, timings, stored.trials)


def _snapshot(folder: RunFolder, stored: StoredRun) -> None:
    """The texts that have both halves; whether a difference is a tie only the models could say."""
    if not stored.trials:
        return
    names = {"model": stored.config["model"]["name"], "draft": stored.config["draft"]["name"]}
    rows = measured_rows(stored.trials, **names, times=None)
    folder.write_results(rows)
    compared = _compared(stored.trials)
    results = [entry["result"] for entry in compared]
    timings = folder.timings()
    summary = Summary(
        verdict=None,
        failures=tuple(failures(stored.trials)),
        caveats=tuple(caveats(stored, rows, timings)),
        headline={
            **headline(timings),
            **{name: results.count(name) for name in dict.fromkeys(results)},
        },
    )
    folder.write_summary(summary, {"prompts": compared, _DERIVED: True})


def _compared(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """PASS where the texts are the same, OPEN where they differ."""
    done = [trial for trial in trials if trial.status == "ok" and trial.tokens is not None]
    plain = {(t.prompt_set, t.prompt, t.repetition): t.tokens for t in done if t.k == 0}
    entries: list[dict[str, Any]] = []
    for trial in done:
        baseline = plain.get((trial.prompt_set, trial.prompt, trial.repetition))
        if trial.k == 0 or baseline is None:
            continue
        entries.append(
            {
                "prompt_set": trial.prompt_set,
                "prompt": trial.prompt,
                "temperature": trial.temperature,
                "k": trial.k,
                "result": "PASS" if trial.tokens == baseline else "OPEN",
                "first_difference": _first_difference(baseline, trial.tokens or ()),
                "acceptance_rate": (trial.accepted or 0) / trial.drafted if trial.drafted else None,
            }
        )
    return entries


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    if one == other:
        return None
    pairs = zip(one, other, strict=False)
    shorter = min(len(one), len(other))
    return next((index for index, (a, b) in enumerate(pairs) if a != b), shorter)


def _audition(folder: RunFolder, stored: StoredRun) -> None:
    """The drafts that were scored and timed by then."""
    from harness.commands.audition import finish, latencies

    config = _config(AuditionConfig, stored)
    if not stored.traces or not latencies(config, [t.draft for t in stored.traces], stored.timings):
        return
    finish(folder, config)
    written = load(stored.folder).summary or {}
    folder._write("summary.json", json.dumps({**written, _DERIVED: True}))


def _config(schema: type[C], stored: StoredRun) -> C:
    """The stored configuration; keys that are gone are dropped, later ones get their default."""
    known = {field.name for field in fields(schema)}
    given = {key: value for key, value in stored.config.items() if key in known}
    return cast("C", OmegaConf.to_object(OmegaConf.merge(schema, given)))


_DOORS = {"sweep": _sweep, "profile": _profile, "snapshot": _snapshot, "audition": _audition}

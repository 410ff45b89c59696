"""Records of requests that were served elsewhere become a run of the server door."""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.commands.progress import progress
from harness.commands.run_lifecycle import Outcome, concluded
from harness.config import ReportConfig
from harness.engines.protocol import Completion
from harness.engines.stored_answers import PROMPT_SET, FailedAnswerError, imported, record_of
from harness.measurement.environment import describe_host
from harness.records import UserError
from harness.storage import RunFolder

_log = logging.getLogger(__name__)


def run(config: ReportConfig) -> Outcome:
    asked = config.temperature or [None]
    if len(asked) > 1:
        listed = ",".join(f"{temperature:g}" for temperature in asked if temperature is not None)
        raise UserError(f"temperature=[{listed}]: records= are of one temperature; give that one")
    with progress("reading the records"):
        files = {file: list(read_records(file)) for file in config.records}
    found = imported(files, config.k, asked[0])
    ks = sorted({trial.k for trial in found.trials})
    settings = {
        "records": list(config.records),
        "results_root": config.results_root,
        "seed": config.seed,
        "model": {"name": found.model},
        "draft": {"name": "draft"},
        "engine": found.engine.name,
        "k": [k for k in ks if k],
        "temperature": [found.temperature],
        "new_tokens": max((trial.new_tokens or 0) + 1 for trial in found.trials),
    }
    folder = RunFolder.create(config.results_root, "server", [found.model, "records"], settings)
    prompts = {trial.prompt for trial in found.trials}
    folder.note(
        environment=describe_host(),
        prompts={PROMPT_SET: len(prompts)},
        engine=found.engine,
        records={file: len(records) for file, records in files.items()},
    )
    for trial in found.trials:
        folder.trials.append(trial)
    return concluded(folder, verbose=config.verbose)


def read_records(file: str) -> Iterator[Completion]:
    """The records of a file: one JSON object per line, one alone, or one JSON array of them.

    Failed requests are left out and counted. A record that does not say its prompt has its place
    in the file instead, failed ones included.

    Raises:
        UserError: it cannot be read, or holds something else, or nothing, or most requests failed.
    """
    where = f"records={file}"
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{where}: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: cannot be read as text; give JSON, an object a line") from error
    count, failed = 0, list[str]()
    for place, entry in _entries(text, where):
        count += 1
        try:
            record = record_of(entry, place)
        except FailedAnswerError as error:
            failed.append(str(error))
        else:
            yield replace(record, prompt=record.prompt or str(count))
    if not count:
        raise UserError(f"{where}: no request in it")
    if len(failed) > count / 2:
        raise UserError(f"{len(failed)} of {count} requests failed; the first: {failed[0]}")
    if failed:
        _log.warning("%d of %d requests failed; the first: %s", len(failed), count, failed[0])


def _entries(text: str, where: str) -> Iterator[tuple[str, Mapping[str, Any] | str]]:
    if text.lstrip().startswith("["):
        entries = enumerate(_parsed(text, where), start=1)
        numbered = [(f"{where}, entry {number}", entry) for number, entry in entries]
    elif "\n" in text.strip() and (entry := _whole(text)) is not None:
        numbered = [(where, entry)]
    else:
        numbered = [
            (f"{where}, line {number}", _line(line.strip(), f"{where}, line {number}"))
            for number, line in enumerate(text.split("\n"), start=1)
            if line.strip()
        ]
    for place, entry in numbered:
        if not isinstance(entry, dict | str):
            raise UserError(f"{place}: not a JSON object")
        yield place, entry


def _line(line: str, place: str) -> Any:
    """The JSON value of a line; a line of plain text, as of a proxy's error, is that text."""
    return _parsed(line, place) if line[:1] in '{["' else line


def _whole(text: str) -> Any:
    """The only object of a file, over several lines perhaps; None where it has other entries."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not JSON ({error}); give one object per request") from error

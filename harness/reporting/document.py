"""The answer and the rows of a command as one JSON document, which `json=true` prints."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.records import SCHEMA_VERSION
from harness.reporting.content import content_of
from harness.summary import Summary, to_json

# Of summary.json: the answer, every answer, and the rows of results.csv
FIELDS = ("verdict", "answers", "results", "failures")


def document(
    command: str,
    status: int,
    *,
    summary: Summary | None = None,
    folder: Path | None = None,
    errors: Sequence[str] = (),
    printed: str = "",
) -> str:
    """One line of JSON.

    Args:
        command: its name.
        status: the exit status.
        summary: of the run; None where the command made or read none.
        folder: the run folder.
        errors: lines of standard error on what failed.
        printed: what a command without a run prints otherwise, as a dry run does.
    """
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "status": status,
        "error": " ".join(errors) or None,
        "run": None if folder is None else str(folder),
    }
    if summary is not None:
        stored = json.loads(to_json(summary))
        record["sentences"] = list(content_of(summary).verdicts)
        record |= {name: stored[name] for name in FIELDS}
    elif printed:
        record["text"] = printed.splitlines()
    return json.dumps(record, ensure_ascii=False)

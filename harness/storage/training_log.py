"""What a training framework logged of a head's accuracy, by offset of the draft token.

SpecForge (scripts/train_eagle3.py) logs `train/acc_0`, `eval/acc_0`, ... of each pass of its
training-time test: the share of all positions at which that pass has the target's token, whatever
the passes before had. speculators (Trainer) logs `val/full_acc_0`, ...: all drafts up to that one
are right, and `val/cond_acc_0`: this one is, given that those before it are; with `_epoch` behind
them in a mean over an epoch, as in its val_metrics.json.

They are read from a console log, json, jsonl (a tracker's history) or csv (its export): the last
value of each name, those of evaluation before those of training.
"""

import csv
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.records import UserError
from harness.storage import files

Framework = Literal["SpecForge", "speculators"]
_NAME = r"(?:(train|eval|val)/)?(acc|full_acc|cond_acc)_(\d+)(?:_epoch)?"
_VALUE = re.compile(rf"(?<![\w/]){_NAME}[\"']?\s*[=:]\s*([-+\d.eE]+|nan)", re.IGNORECASE)
_COLUMN = re.compile(rf"(?:.* - )?{_NAME}$")
READ = (
    "read are SpecForge's eval/acc_0, acc_1, ... or train/acc_0, ..., and speculators'"
    " val/full_acc_0, ... or cond_acc_0, ..., in a console log, json, jsonl or csv"
)


@dataclass(frozen=True)
class TrainingLog:
    """Accuracies of draft tokens 1, 2, ... as they were logged last.

    Attributes:
        of: evaluation, or training where nothing was evaluated.
        accuracies: SpecForge's of each pass; of speculators given the drafts before.
    """

    framework: Framework
    of: Literal["eval", "train"]
    accuracies: tuple[float, ...]


def read_training_log(name: str) -> TrainingLog:
    """The last accuracies of a log.

    Raises:
        UserError: it cannot be read, or has none; says what was found and what is read.
    """
    file, where = Path(name), f"training_log={name}"
    content = files.read(file, files.TEXT_BYTES)
    if content is None:
        raise UserError(f"{where}: no such file; {READ}")
    text = content.decode(errors="replace")
    found = _of_csv(text) if file.suffix == ".csv" else _VALUE.findall(text)
    values: dict[tuple[str, str], dict[int, float]] = {}
    for split, kind, offset, value in found:
        of = "train" if split == "train" else "eval"
        values.setdefault((of, kind), {})[int(offset)] = float(value)
    for of in ("eval", "train"):
        for kind in ("cond_acc", "full_acc", "acc"):
            row = values.get((of, kind))
            if row:
                return _checked(where, of, kind, row)
    first = " ".join(text.split())[:80]
    raise UserError(f"{where}: no accuracy by offset in it ({first!r} ...); {READ}")


def _checked(
    where: str, of: Literal["eval", "train"], kind: str, row: dict[int, float]
) -> TrainingLog:
    offsets = [n for n in range(len(row)) if n in row]
    if len(offsets) < len(row):
        raise UserError(f"{where}: {kind} of offsets {sorted(row)}; {READ}, from 0 on")
    values = [row[n] for n in offsets]
    bad = next((value for value in values if not 0.0 <= value <= 1.0), None)
    if bad is not None:
        raise UserError(f"{where}: {kind} has {bad:g}, which is no share; {READ}")
    if kind == "full_acc":
        before = [1.0, *values]
        values = [
            value / last if last else 0.0 for value, last in zip(values, before, strict=False)
        ]
        values = [min(1.0, value) for value in values]
    return TrainingLog("SpecForge" if kind == "acc" else "speculators", of, tuple(values))


def _of_csv(text: str) -> list[tuple[str, str, str, str]]:
    """Names and values of a table's columns, row after row."""
    rows = list(csv.reader(text.splitlines()))
    heads = [_COLUMN.match(cell.strip()) for cell in rows[0]] if rows else []
    return [
        (head[1] or "", head[2], head[3], cell)
        for row in rows[1:]
        for head, cell in zip(heads, row, strict=False)
        if head and cell.strip()
    ]

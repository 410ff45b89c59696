"""What a training framework logged of a head's accuracy, by draft token of a round.

Of SpecForge's sources:
    its trainer since July 2026 (specforge/training) prints `step N: {'acc_0': 0.7, ...}` of
    training and `step N: {'eval/per_position_acc': [0.7, ...], ...}` of evaluation; with a tracker
    the names are `train/acc_0` and `eval/per_position_acc/0`.
    scripts/train_eagle3.py before that logs `train/acc_0` and `eval/acc_0`; its console has lines
    `Eval - Step N [n/m], position 0,  Acc: 0.70` of either, with two digits.
    They are shares of all positions at which that pass of the training-time test has the target's
    token, whatever the passes before had.
Of speculators (speculators/train/trainer.py, models/*/metrics.py), `train/...` of a batch and
`val/..._epoch` of an epoch, without `val/` in val_metrics.json:
    full_acc_0      EAGLE-3: all drafts up to that one are right
    cond_acc_0      EAGLE-3: this one is, given that those before it are
    position_1_acc  P-EAGLE and block drafters: this one is; from 1 on where 0 is the anchor
    All against the target's likeliest token of the draft's vocabulary, so that tokens outside of
    this count as right.

They are read from a console log, json, jsonl (a tracker's history) or csv (its export): the last
value of each name, those of evaluation before those of training.
"""

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.records import UserError
from harness.storage import files
from harness.theory.acceptance import conditional

Framework = Literal["SpecForge", "speculators"]
Split = Literal["eval", "train"]
_NAME = (
    r"(?:(?P<split>train|eval|val)/)?"
    r"(?:(?P<kind>acc|full_acc|cond_acc|per_position_acc)[_/](?P<number>\d+)"
    r"|position_(?P<at>\d+)_acc)(?P<epoch>_epoch)?"
)
_NUMBER = r"(?P<value>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan)"
_VALUE = re.compile(rf"(?<![\w/]){_NAME}[\"']?\s*[=:]\s*{_NUMBER}")
_LIST = re.compile(r"(?:(train|eval)/)?per_position_acc[\"']?\s*[=:]\s*\[([^\]]*)\]")
_LINE = re.compile(r"Eval - Step \d+.*?position (\d+),\s+Acc: ([\d.]+|nan)")
_COLUMN = re.compile(rf"(?:.* - )?{_NAME}$")
_ANY_NAME = re.compile(r"([A-Za-z_][\w/.-]*)[\"']?\s*[=:]\s*[-+\d.\[]")
NAMED = 6
READ = (
    "read are SpecForge's eval/per_position_acc, eval/acc_0, ... or train/acc_0, ..., and"
    " speculators' val/full_acc_0, cond_acc_0 or position_0_acc, ..., in a console log, json,"
    " jsonl or csv"
)


@dataclass(frozen=True)
class TrainingLog:
    """Accuracies of draft tokens 1, 2, ... as they were logged last."""

    framework: Framework
    of: Split  # evaluation, or training where nothing was evaluated
    accuracies: tuple[float, ...]  # of each draft token
    given: bool = False  # whether each is counted only where the drafts before it were right


@dataclass(frozen=True)
class _Value:
    of: Split
    kind: str
    offset: int
    value: float


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
    rows: dict[tuple[Split, str], dict[int, float]] = {}
    for each in _of_csv(text) if file.suffix == ".csv" else _of_text(text):
        rows.setdefault((each.of, each.kind), {})[each.offset] = each.value
    splits: tuple[Split, ...] = ("eval", "train")
    for of in splits:
        for kind in ("cond_acc", "full_acc", "position_acc", "acc"):
            row = rows.get((of, kind))
            if row:
                return _checked(where, of, kind, row)
    found = dict.fromkeys(match[1] for match in _ANY_NAME.finditer(text))
    named = sorted(found, key=lambda each: "acc" not in each.lower())[:NAMED]
    what = f"found are {', '.join(named)}" if named else "it names no values"
    raise UserError(f"{where}: no accuracy by draft token in it, {what}; {READ}")


def _checked(where: str, of: Split, kind: str, row: dict[int, float]) -> TrainingLog:
    # A block drafter's position 0 is the token that it starts from
    first = 1 if kind == "position_acc" and 0 not in row else 0
    offsets = [n for n in range(first, first + len(row)) if n in row]
    if len(offsets) < len(row):
        raise UserError(f"{where}: {kind} of offsets {sorted(row)}; {READ}, from 0 on")
    values = [row[n] for n in offsets]
    bad = next((value for value in values if not 0.0 <= value <= 1.0), None)
    if bad is not None:
        raise UserError(f"{where}: {kind} has {bad:g}, which is no share; {READ}")
    if kind == "full_acc":
        values = [min(1.0, value) for value in conditional(values)]
    framework: Framework = "SpecForge" if kind == "acc" else "speculators"
    return TrainingLog(framework, of, tuple(values), given=kind in ("full_acc", "cond_acc"))


def _of_text(text: str) -> Iterator[_Value]:
    """Names with values, and the lists and lines of SpecForge's console."""
    for match in _VALUE.finditer(text):
        yield _value(match, match["value"])
    for split, listed in _LIST.findall(text):
        for offset, value in enumerate(re.findall(r"[^\s,]+", listed)):
            yield _Value("train" if split == "train" else "eval", "acc", offset, float(value))
    for offset, value in _LINE.findall(text):
        yield _Value("train", "acc", int(offset), float(value))


def _value(match: re.Match[str], value: str) -> _Value:
    """What a name says; one without a split is of evaluation where it is an epoch's mean."""
    split, kind, at = match["split"], match["kind"], match["at"]
    evaluated = split in ("eval", "val") or (
        split is None and (match["epoch"] is not None or kind == "per_position_acc")
    )
    kind = "position_acc" if kind is None else "acc" if kind == "per_position_acc" else kind
    offset = int(match["number"] if at is None else at)
    return _Value("eval" if evaluated else "train", kind, offset, float(value))


def _of_csv(text: str) -> Iterator[_Value]:
    rows = list(csv.reader(text.splitlines()))
    heads = [_COLUMN.match(cell.strip()) for cell in rows[0]] if rows else []
    for row in rows[1:]:
        for head, cell in zip(heads, row, strict=False):
            if head and cell.strip():
                yield _value(head, cell)

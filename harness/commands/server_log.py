"""A server's own log of rounds: a csv of K, tokens per round and ms per token."""

import csv
import math
from collections.abc import Mapping
from pathlib import Path

from harness.analysis.fit import LogRow
from harness.records import UserError
from harness.theory.acceptance import check_share

K, TOKENS, RATE, TIME = "k", "tokens_per_round", "acceptance_rate", "ms_per_token"
NEEDED = f"{K},{TOKENS} (or {RATE}),{TIME}"


def read_log(file: str) -> list[LogRow]:
    """Read `log=`: columns k, ms_per_token, and tokens_per_round or acceptance_rate.

    A row of k = 0 is the baseline and needs neither of the two. Other columns are passed over.

    Raises:
        UserError: not a file, a column missing, or an entry that is not a number.
    """
    where = f"log={file}"
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: cannot be read as text; give a csv of {NEEDED}") from error
    reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
    names = [name.strip().lower() for name in reader.fieldnames or ()]
    lacking = [name for name in (K, TIME) if name not in names]
    if not {TOKENS, RATE} & set(names):
        lacking.append(f"{TOKENS} or {RATE}")
    if lacking:
        raise UserError(
            f"{where}: no column {', '.join(lacking)}; the first line must name {NEEDED}"
        )
    reader.fieldnames = names
    return [
        _row(f"{where}, line {reader.line_num}", entry) for entry in reader if any(entry.values())
    ]


def _row(where: str, entry: Mapping[str, str | None]) -> LogRow:
    k = _number(where, entry, K)
    if k < 0 or not k.is_integer():
        raise UserError(f"{where}: k={k:g} is not a number of draft tokens")
    time = _number(where, entry, TIME)
    if k == 0:
        return LogRow(0, 1.0, time)
    if (entry.get(TOKENS) or "").strip():
        return LogRow(int(k), _number(where, entry, TOKENS), time)
    rate = check_share(f"{where}: {RATE}", _number(where, entry, RATE))
    return LogRow(int(k), 1.0 + k * rate, time)


def _number(where: str, entry: Mapping[str, str | None], name: str) -> float:
    try:
        value = float(entry.get(name) or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{where}: {name}={entry.get(name)!r} is not a number")
    return value

"""Two runs or more, cell by cell: what became faster, what slower, and what differs around them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.reporting import formatting as fmt
from harness.reporting.tables.model import Column, Row, Table, without_empty

Entry = Mapping[str, Any]

COLUMNS = (
    Column("prompt set", "left", key=True),
    Column("temperature", key=True),
    Column("K", key=True),
    Column("speedup\nreference"),
    Column("speedup\nrun"),
    Column("speedup ratio\n[lo, hi]"),
    Column("p, Holm"),
    Column("ms/tok ratio\n[lo, hi]"),
    Column("alpha difference\n[lo, hi]"),
    Column("acceptance_rate\ndifference [lo, hi]"),
    Column("prompts"),
    Column("", "left", flexible=True),
)
DIFFERENCE_TITLE = "What differs around them"
RATIO_NOTE = (
    "Every ratio is run / reference and every difference run - reference, over the prompts that"
    " both have, each with itself. A speedup ratio below 1 is a loss; an ms/tok ratio above 1 is"
    " one, of the machine included."
)
HOLM_NOTE = (
    "p, Holm: chance of so large a difference in any cell were there none, adjusted for how many"
    " cells are compared. Below 0.05 a cell differs beyond chance; the intervals are not adjusted."
)
OUTCOMES = {"pass": "PASS", "fail": "FAIL", "unclear": "PASS, but unclear"}


def comparison_tables(summary: Entry) -> tuple[Table, ...]:
    """One table per compared run."""
    rows: Sequence[Entry] = summary.get("comparison") or ()
    tables = []
    for name in dict.fromkeys(str(row.get("run")) for row in rows):
        mine = [row for row in rows if str(row.get("run")) == name]
        title = f"{name} against {mine[0].get('reference')}"
        lines = tuple(Row(_cells(row), best=row.get("prompt_set") == "all") for row in mine)
        notes = (RATIO_NOTE, HOLM_NOTE) if _any(mine, "p_value_holm") else (RATIO_NOTE,)
        tables.append(without_empty(Table(title, COLUMNS, lines, notes), fmt.EMPTY))
    return tuple(tables)


def difference_table(summary: Entry) -> Table | None:
    """The settings and facts in which the runs differ."""
    names = [str(entry.get("name")) for entry in summary.get("compared") or ()]
    rows = tuple(
        Row((str(entry.get("name")), *(_value(value) for value in entry.get("values") or ())))
        for entry in summary.get("differences") or ()
    )
    columns = (
        Column("setting", "left", key=True),
        *(Column(name, "left", flexible=True) for name in names),
    )
    return Table(DIFFERENCE_TITLE, columns, rows) if rows else None


def comparison_sentences(summary: Entry) -> tuple[str, ...]:
    """Each compared run in one sentence, the threshold's outcome first where there is one."""
    return tuple(_sentence(entry) for entry in summary.get("comparison_headlines") or ())


def _sentence(entry: Entry) -> str:
    row: Entry = entry.get("row") or {}
    if row.get("speedup_ratio") is None:
        return f"{entry.get('run')}: no speedup to compare."
    gain = fmt.gain(row["speedup_ratio"], row.get("speedup_ratio_lo"), row.get("speedup_ratio_hi"))
    unsure = "" if row.get("speedup_ratio_lo") is not None else ", no interval"
    where = (
        f"{_workload(row.get('prompt_set'))}, temperature"
        f" {fmt.temperature(row.get('temperature'))}, K={row.get('k')}"
    )
    told = (
        f"{entry.get('run')} has {gain}{unsure} the speedup of {row.get('reference')} ({where}):"
        f" {fmt.speedup(row.get('speedup'))} after {fmt.speedup(row.get('reference_speedup'))}"
    )
    cells = (
        f"; {entry.get('differing')} of {entry.get('cells')} cells differ beyond chance."
        if entry.get("cells")
        else "."
    )
    return f"{_outcome(entry, unsure)}{told}{cells}"


def _outcome(entry: Entry, unsure: str) -> str:
    outcome = entry.get("outcome")
    if outcome is None:
        return ""
    reason = {
        "pass": "the ratio is not below it",
        "fail": "the ratio is below it" if unsure else "the whole interval is below it",
        "unclear": "the ratio is below it, its interval reaches over it; more prompts would tell",
    }[str(outcome)]
    return f"fail_below={entry.get('threshold'):g}: {OUTCOMES[str(outcome)]}, {reason}. "


def _cells(row: Entry) -> tuple[str, ...]:
    return (
        fmt.text(row.get("prompt_set")),
        fmt.temperature(row.get("temperature")),
        fmt.text(row.get("k")),
        fmt.speedup(row.get("reference_speedup")),
        fmt.speedup(row.get("speedup")),
        fmt.gain(*_bounds(row, "speedup_ratio")),
        _probability(row.get("p_value_holm")),
        fmt.gain(*_bounds(row, "ms_ratio")),
        _difference(row, "alpha_difference"),
        _points(row, "acceptance_rate_difference"),
        fmt.text(row.get("prompts")),
        _note(row),
    )


def _bounds(row: Entry, name: str) -> tuple[float | None, float | None, float | None]:
    return row.get(name), row.get(f"{name}_lo"), row.get(f"{name}_hi")


def _difference(row: Entry, name: str) -> str:
    value, low, high = _bounds(row, name)
    interval = "" if low is None else f" [{fmt.signed(low, 3)}, {fmt.signed(high, 3)}]"
    return fmt.EMPTY if value is None else fmt.signed(value, 3) + interval


def _points(row: Entry, name: str) -> str:
    """A difference of two shares in percentage points: "+1.2 pts [+0.4, +2.0]"."""
    value, low, high = (fmt.signed(100 * v, 1) if v is not None else "" for v in _bounds(row, name))
    interval = f" [{low}, {high}]" if low else ""
    return f"{value} pts{interval}" if value else fmt.EMPTY


def _probability(value: float | None) -> str:
    return "< 0.001" if value is not None and value < 1e-3 else fmt.decimal(value, 3)


def _note(row: Entry) -> str:
    status = "" if row.get("status") == "complete" else f"{row.get('status')}"
    return "; ".join(part for part in (status, row.get("note") or "") if part) or fmt.EMPTY


def _value(value: object) -> str:
    return fmt.EMPTY if value is None else fmt.text(value)


def _workload(prompt_set: object) -> str:
    return "whole workload" if prompt_set in (None, "all") else f"{prompt_set} prompts"


def _any(rows: Iterable[Entry], name: str) -> bool:
    return any(row.get(name) is not None for row in rows)

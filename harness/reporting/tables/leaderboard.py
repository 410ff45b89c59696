"""The drafts ranked under each acceptance rule, that is for the engines that use it.

Not speculating is a row like any other. Rules that rank alike to the last digit shown (at
temperature 0 all do) share one table.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from harness.reporting import formatting as fmt
from harness.reporting.tables.model import BEST, Column, Row, Table, without_empty

Entry = Mapping[str, Any]

PLAIN = "do not speculate"
COLUMNS = (
    Column("rank", "left", key=True),
    Column("draft", "left", key=True),
    Column("best\nK"),
    Column("speedup\n[lo, hi]"),
    Column("chance\nto be best"),
    Column("cost per\n10^6 tokens"),
    Column("alpha\n[lo, hi]"),
    Column("break-even\nalpha"),
)
SPEEDUP_NOTE = (
    "speedup: predicted (replayed acceptance, timed steps), at the K that looks best on these"
    " prompts, so a little flattering. The verdict is scored on held-out prompts."
)
ALPHA_NOTE = (
    "break-even: the alpha below which the draft loses at that K, if alpha is the same at every"
    " position."
)
NO_ROOT_NOTE = "none: even alpha = 1 loses."


class Board(NamedTuple):
    """One leaderboard and the rules that it holds for."""

    rules: tuple[str, ...]
    every_rule: bool
    engines: tuple[str, ...]
    temperature: float
    entries: tuple[Entry, ...]

    @property
    def name(self) -> str:
        """As "temperature 1, rule ratio"; "every rule" where they all rank alike."""
        rules = "every rule" if self.every_rule else f"rule {' and '.join(self.rules)}"
        return f"temperature {fmt.temperature(self.temperature)}, {rules}"


def boards(stored: Iterable[Entry]) -> tuple[Board, ...]:
    """The stored leaderboards rule by rule, as first listed; those with the same rows as one."""
    entries = [entry for entry in stored if entry.get("rows")]
    rules = list(dict.fromkeys(str(entry.get("rule")) for entry in entries))
    found: dict[tuple[object, ...], list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: rules.index(str(entry.get("rule")))):
        shown = tuple(_cells(row) for row in entry["rows"])
        found.setdefault((entry.get("temperature"), shown), []).append(entry)
    return tuple(
        Board(
            rules=tuple(str(entry.get("rule")) for entry in alike),
            every_rule=1 < len(rules) == len(alike),
            engines=tuple(str(name) for entry in alike for name in entry.get("engines") or ()),
            temperature=float(alike[0].get("temperature") or 0.0),
            entries=tuple(alike[0]["rows"]),
        )
        for alike in found.values()
    )


def leaderboard_tables(stored: Iterable[Entry]) -> tuple[Table, ...]:
    """One table per rule and temperature, the verdict's rule first."""
    tables: list[Table] = []
    for board in boards(stored):
        title = board.name[0].upper() + board.name[1:]
        if board.engines and not board.every_rule:
            title = f"{title}: {', '.join(board.engines)}"
        rows = tuple(Row(_cells(entry), best=entry.get("rank") == 1) for entry in board.entries)
        tables.append(without_empty(Table(title, COLUMNS, rows, _notes(board)), fmt.EMPTY))
    return tuple(tables)


def name_of(entry: Entry) -> str:
    """The draft; without one, what the row stands for."""
    return PLAIN if entry.get("draft") is None else str(entry["draft"])


def _cells(entry: Entry) -> tuple[str, ...]:
    rank = fmt.text(entry.get("rank"))
    bounds = (entry.get("speedup_lo"), entry.get("speedup_hi"))
    alphas = (entry.get("alpha"), entry.get("alpha_lo"), entry.get("alpha_hi"))
    return (
        f"{rank} {BEST}" if entry.get("rank") == 1 else rank,
        name_of(entry),
        fmt.text(entry.get("k")),
        fmt.speedup(entry.get("speedup"), *bounds),
        fmt.chance(entry.get("probability_best")),
        fmt.dollars(entry.get("cost_per_million_tokens")),
        fmt.alpha(*alphas),
        _root(entry, "breakeven_alpha"),
    )


def _root(entry: Entry, key: str) -> str:
    """An alpha to reach: "none" where it was looked for and even 1 is not enough."""
    if entry.get("draft") is None or key not in entry or entry.get("alpha") is None:
        return fmt.EMPTY
    return fmt.NO_ROOT if entry[key] is None else fmt.alpha(entry[key])


def _notes(board: Board) -> tuple[str, ...]:
    notes: list[str] = []
    if board.every_rule and board.engines:
        notes.append(f"Holds for every engine: {', '.join(board.engines)}.")
    cells = [cell for entry in board.entries for cell in _cells(entry)]
    roots = any(entry.get("breakeven_alpha") is not None for entry in board.entries)
    no_root = (NO_ROOT_NOTE,) if fmt.NO_ROOT in cells else ()
    return (*notes, *no_root, *((ALPHA_NOTE,) if roots else ()), SPEEDUP_NOTE)

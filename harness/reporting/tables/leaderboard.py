"""Who gets the part: drafts ranked for each acceptance rule, that is for the engines that use it.

Not speculating is a row like any other. Rules that rank alike to the last digit shown (at
temperature 0 all do) share one table.
"""

from collections.abc import Iterable, Mapping, Sequence
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
    Column("wins above\nalpha"),
    Column("margin"),
)
PAIR_COLUMNS = (
    Column("rule", "left", key=True),
    Column("temperature", key=True),
    Column("faster", "left", key=True),
    Column("slower", "left", key=True),
    Column("chance that\nit is faster"),
    Column("told apart?", "left"),
)
SPEEDUP_NOTE = (
    "speedup: predicted (replayed acceptance, timed steps), at the K that looks best on these"
    " prompts, so a little flattering. The verdict is scored on held-out prompts."
)
ALPHA_NOTE = (
    "wins above: the alpha below which the draft loses at that K, texts as uneven as these; margin:"
    " alpha less that. break-even: the same for an alpha that is even everywhere."
)
NO_ROOT_NOTE = "none: even alpha = 1 loses."
PAIR_NOTE = (
    "Each draft at its best K; the same prompts and texts are resampled for both. Of many pairs"
    " some look apart by luck."
)


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
        _root(entry, "wins_above_alpha"),
        fmt.signed(entry.get("margin_alpha"), 3),
    )


def _root(entry: Entry, key: str) -> str:
    """An alpha to reach: "none" where it was looked for and even 1 is not enough."""
    if entry.get("draft") is None or key not in entry or entry.get("alpha") is None:
        return fmt.EMPTY
    return fmt.NO_ROOT if entry[key] is None else fmt.alpha(entry[key])


def _notes(board: Board) -> tuple[str, ...]:
    first = min(board.entries, key=lambda entry: entry.get("rank") or len(board.entries))
    needed = first.get("wins_above_alpha")
    notes: list[str] = []
    if first.get("draft") is not None and needed is not None:
        notes.append(
            f"{first['draft']} at K={first.get('k')} wins unless alpha falls below"
            f" {fmt.alpha(needed)} ({board.name})."
        )
    if board.every_rule and board.engines:
        notes.append(f"Holds for every engine: {', '.join(board.engines)}.")
    cells = [cell for entry in board.entries for cell in _cells(entry)]
    roots = any(entry.get("wins_above_alpha") is not None for entry in board.entries)
    no_root = (NO_ROOT_NOTE,) if fmt.NO_ROOT in cells else ()
    return (*notes, *no_root, *((ALPHA_NOTE,) if roots else ()), SPEEDUP_NOTE)


def pairwise_table(stored: Iterable[Entry]) -> Table | None:
    """How certain the order is, pair by pair."""
    entries = list(stored)
    rules = list(dict.fromkeys(str(entry.get("rule")) for entry in entries))
    entries.sort(key=lambda entry: rules.index(str(entry.get("rule"))))
    rows = tuple(
        Row(
            (
                fmt.text(entry.get("rule")),
                fmt.temperature(entry.get("temperature")),
                fmt.text(entry.get("better")),
                fmt.text(entry.get("worse")),
                fmt.chance(entry.get("probability")),
                _apart(entry),
            )
        )
        for entry in entries
    )
    if not rows:
        return None
    if len(rules) > 1:
        return Table("How certain the order is", PAIR_COLUMNS, rows, (PAIR_NOTE,))
    alone = tuple(Row(row.cells[1:]) for row in rows)
    title = f"How certain the order is, rule {rules[0]}"
    return Table(title, PAIR_COLUMNS[1:], alone, (PAIR_NOTE,))


def _apart(entry: Entry) -> str:
    """Whether the prompts suffice to order the pair; else what would."""
    needed = entry.get("prompts_needed")
    if entry.get("separated"):
        return "yes"
    if needed is not None:
        return f"about {fmt.count(needed)} prompts"
    if entry.get("limited_by") == "latency":
        return "time the steps longer"
    return fmt.EMPTY if entry.get("separated") is None else "no"


def rules_gap_table(stored: Iterable[Entry]) -> Table | None:
    """How far the acceptance rules differ, draft by draft; where they agree there is no row."""
    entries = list(stored)
    rules = list(dict.fromkeys(rule for entry in entries for rule in entry.get("speedup") or ()))
    lines = [_gap_cells(entry, rules) for entry in entries]
    rows = [Row(cells) for cells in lines if not _alike(cells[2:], len(rules))]
    at = {entry.get("at_k") for entry in entries}
    where = f" at K={next(iter(at))}" if len(at) == 1 and None not in at else ""
    columns = (
        Column("draft", "left", key=True),
        Column("temperature", key=True),
        *(Column(f"alpha\n{rule}") for rule in rules),
        *(Column(f"speedup\n{rule}") for rule in rules),
    )
    note = (
        f"alpha{where or ': at the same K under every rule'}; speedup: at each rule's own best K."
        " Where the rules agree, as they always do at temperature 0, there is no row."
    )
    title = "How far the acceptance rules differ"
    return Table(title, columns, tuple(rows), (note,)) if rows else None


def _gap_cells(entry: Entry, rules: Sequence[str]) -> tuple[str, ...]:
    alpha, speedup, k = (entry.get(key) or {} for key in ("alpha", "speedup", "k"))
    return (
        fmt.text(entry.get("draft")),
        fmt.temperature(entry.get("temperature")),
        *(fmt.alpha(alpha.get(rule)) for rule in rules),
        *(_at_k(speedup.get(rule), k.get(rule)) for rule in rules),
    )


def _at_k(speedup: float | None, k: int | None) -> str:
    return fmt.speedup(speedup) + (f" K={k}" if speedup is not None and k is not None else "")


def _alike(cells: Sequence[str], rules: int) -> bool:
    return len(set(cells[:rules])) <= 1 and len(set(cells[rules:])) <= 1

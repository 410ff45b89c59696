"""What an audition took, who could not take part, and what a draft takes of memory."""

from collections.abc import Iterable, Mapping
from typing import Any

from harness.reporting import formatting as fmt
from harness.reporting.tables.leaderboard import PLAIN, name_of
from harness.reporting.tables.model import Column, Row, Table, without_empty

Entry = Mapping[str, Any]

DRAFT_COLUMNS = (
    Column("draft", "left", key=True),
    Column("step\nms"),
    Column("extra\nmemory"),
    Column("cache\nper token"),
    Column("context\ntokens lost"),
    Column("sequences\nlost"),
    Column("on", "left"),
)
STEP_NOTE = "step: one draft token; for an n-gram one look-up, whatever it proposes."
MEMORY_NOTE = (
    "context tokens lost: cached tokens of the target that no longer fit beside the draft;"
    " sequences lost: concurrent ones of a typical length."
)
REFUSED_COLUMNS = (
    Column("draft", "left", key=True),
    Column("why", "left", flexible=True),
)
COST_COLUMNS = (Column("what", "left", key=True), Column("time"))
COSTS = {
    "generation_s": "the target's texts",
    "scoring_s": "scoring them, all drafts",
}


def draft_table(leaderboards: Iterable[Entry], memory: Iterable[Entry]) -> Table | None:
    """What each draft takes of time and memory, whatever the rule and the temperature.

    Args:
        leaderboards: the stored ones; a draft's step and weights are the same in all.
        memory: the stored memory view, where the device's memory is known.
    """
    views = {name_of(view): view for view in memory}
    entries = {name_of(row): row for board in leaderboards for row in board.get("rows") or ()}
    entries.pop(PLAIN, None)
    names = list(dict.fromkeys([*entries, *views]))
    rows = tuple(
        Row(_draft_cells(name, entries.get(name, {}), views.get(name, {}))) for name in names
    )
    notes = (STEP_NOTE, *((MEMORY_NOTE,) if views else ()))
    table = Table("What each draft takes", DRAFT_COLUMNS, rows, notes)
    shown = without_empty(table, fmt.EMPTY)
    return shown if len(shown.columns) > 1 else None


def _draft_cells(name: str, entry: Entry, view: Entry) -> tuple[str, ...]:
    extra = entry.get("extra_memory_bytes")
    return (
        name,
        fmt.milliseconds(entry.get("draft_step_ms")),
        fmt.memory(view.get("weights_bytes") if extra is None else extra),
        fmt.memory(view.get("kv_bytes_per_token")),
        fmt.count(view.get("context_tokens_lost")),
        fmt.count(view.get("sequences_lost")),
        fmt.text(view.get("gpu")),
    )


def not_eligible_table(stored: Iterable[Entry]) -> Table | None:
    """The drafts that cannot play with this target."""
    rows = tuple(Row((name_of(entry), fmt.text(entry.get("reason")))) for entry in stored)
    return Table("Not eligible", REFUSED_COLUMNS, rows) if rows else None


def cost_table(stored: Entry | None) -> Table | None:
    """Where the audition's time went."""
    rows = tuple(
        Row((COSTS.get(name, name), fmt.seconds(value)))
        for name, value in (stored or {}).items()
        if value is not None
    )
    return Table("What this audition took", COST_COLUMNS, rows) if rows else None

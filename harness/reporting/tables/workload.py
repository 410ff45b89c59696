"""Where a draft is good and where not: categories, positions, temperatures, whole requests."""

from collections.abc import Iterable, Mapping
from typing import Any

from harness.reporting import formatting as fmt
from harness.reporting.tables.leaderboard import name_of
from harness.reporting.tables.model import Column, Row, Table

Entry = Mapping[str, Any]

CATEGORY_NOTE = (
    "alpha with its interval, where a category has prompts enough for one. Speculate on a category"
    " only where alpha is above what the draft needs to win."
)
POSITION_NOTE = (
    "Column j: share of rounds, among those with at least j text positions left, in which at least"
    " j draft tokens were accepted."
)
REQUEST_COLUMNS = (
    Column("draft", "left", key=True),
    Column("K", key=True),
    Column("temperature", key=True),
    Column("request\nspeedup"),
    Column("p95 plain"),
    Column("p95\nspeculative"),
    Column("slower\nrequests"),
)
REQUEST_NOTE = (
    "Request speedup: both prefills included, over the prompts of this run; p95: of a request's"
    " latency over these prompts."
)
REGRET_COLUMNS = (
    Column("temperature", key=True),
    Column("draft", "left"),
    Column("K"),
)
REGRET_NOTE = "The choice that gives away least of the best speedup in any one prompt set."


def category_tables(stored: Iterable[Entry]) -> tuple[Table, ...]:
    """The draft x category matrix of alpha, one table per temperature."""
    entries = list(stored)
    tables = []
    for temperature in dict.fromkeys(entry.get("temperature") for entry in entries):
        mine = [entry for entry in entries if entry.get("temperature") == temperature]
        drafts = list(dict.fromkeys(str(entry.get("draft")) for entry in mine))
        matrix = {(entry.get("category"), str(entry.get("draft"))): entry for entry in mine}
        prompts = {entry.get("category"): entry.get("prompts") for entry in mine}
        rows = tuple(
            Row(
                (
                    fmt.text(category),
                    fmt.count(prompts[category]),
                    *(_alpha(matrix.get((category, draft))) for draft in drafts),
                )
            )
            for category in prompts
        )
        columns = (
            Column("category", "left", key=True),
            Column("prompts", key=True),
            *(Column(draft, means="alpha") for draft in drafts),
        )
        title = f"Alpha by category, temperature {fmt.temperature(temperature)}{_at_k(mine)}"
        tables.append(Table(title, columns, rows, (CATEGORY_NOTE,)))
    return tuple(tables)


def position_tables(stored: Iterable[Entry]) -> tuple[Table, ...]:
    """acceptance_by_position of every draft, one table per temperature."""
    entries = [entry for entry in stored if entry.get("positions")]
    tables = []
    for temperature in dict.fromkeys(entry.get("temperature") for entry in entries):
        mine = [entry for entry in entries if entry.get("temperature") == temperature]
        depth = max(len(entry["positions"]) for entry in mine)
        rows = tuple(
            Row(
                (
                    name_of(entry),
                    fmt.text(entry.get("k")),
                    *(fmt.percent(share) for share in entry["positions"]),
                    *(fmt.EMPTY for _ in range(depth - len(entry["positions"]))),
                )
            )
            for entry in mine
        )
        columns = (
            Column("draft", "left", key=True),
            Column("K", key=True),
            *(Column(f"j={j}") for j in range(1, depth + 1)),
        )
        title = f"acceptance_by_position, temperature {fmt.temperature(temperature)}"
        tables.append(Table(title, columns, rows, (POSITION_NOTE,)))
    return tuple(tables)


def request_table(view: Entry | None) -> Table | None:
    """Whole requests of the best draft, both prefills included: what a user waits for."""
    if not view:
        return None
    cells = (
        name_of(view),
        fmt.text(view["k"]),
        fmt.temperature(view["temperature"]),
        fmt.speedup(view.get("request_speedup")),
        fmt.seconds(view.get("p95_baseline_s")),
        fmt.seconds(view.get("p95_speculative_s")),
        fmt.percent(view.get("share_slower")),
    )
    return Table("Whole requests", REQUEST_COLUMNS, (Row(cells),), (REQUEST_NOTE,))


def least_regret_table(stored: Iterable[Entry]) -> Table | None:
    """The robust choice, should traffic shift between prompt sets."""
    rows = tuple(
        Row((fmt.temperature(entry.get("temperature")), name_of(entry), fmt.text(entry.get("k"))))
        for entry in stored
    )
    title = "If traffic shifts between prompt sets"
    return Table(title, REGRET_COLUMNS, rows, (REGRET_NOTE,)) if rows else None


def _alpha(entry: Entry | None) -> str:
    keys = ("alpha", "alpha_lo", "alpha_hi")
    return fmt.EMPTY if entry is None else fmt.alpha(*(entry.get(key) for key in keys))


def _at_k(entries: Iterable[Entry]) -> str:
    """The K of all entries, with a comma before it; nothing where they differ."""
    ks = {entry.get("k") for entry in entries}
    return f", K={next(iter(ks))}" if len(ks) == 1 and None not in ks else ""

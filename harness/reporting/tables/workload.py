"""Where a draft is good and where not: categories, positions of a round, whole requests."""

from collections.abc import Iterable
from typing import NamedTuple

from harness.reporting import formatting as fmt
from harness.reporting.tables.specification import Column, Table, table
from harness.summary import AcceptanceByPosition, CategoryAlpha, RequestSummary, Summary


class Category(NamedTuple):
    """One category of prompts, and the alpha of every draft on it."""

    name: str
    prompts: int
    alphas: dict[str, tuple[float | None, float | None, float | None]]


REQUEST: tuple[Column[RequestSummary], ...] = (
    Column("draft", lambda request: request.draft, key=True),
    Column("K", lambda request: request.k, fmt.count, key=True),
    Column("temperature", lambda request: request.temperature, fmt.temperature, key=True),
    Column("prompts", lambda request: request.prompts, fmt.count),
    Column("request\nspeedup", lambda request: request.speedup, fmt.speedup),
    Column("p95\nplain", lambda request: request.plain_p95_s, fmt.seconds),
    Column("p95\nspeculative", lambda request: request.speculative_p95_s, fmt.seconds),
    Column("slower\nrequests", lambda request: request.slower_share, fmt.percent),
)
CATEGORY_NOTE = (
    "alpha with its interval, where a category has prompts enough for one. Speculate on a category"
    " only where alpha is above the break-even alpha."
)
POSITION_NOTE = (
    "Column j: share of rounds, among those with at least j text positions left, in which at least"
    " j draft tokens were accepted."
)
REQUEST_NOTE = (
    "Whole requests at the prompts' own lengths, both prefills included: what a user waits for."
    " p95: of request latency over the prompts."
)


def category_tables(summary: Summary) -> list[Table]:
    """The draft x category matrix of alpha, one table per temperature."""
    made = []
    for temperature in dict.fromkeys(entry.temperature for entry in summary.category_alpha):
        entries = [entry for entry in summary.category_alpha if entry.temperature == temperature]
        title = f"Alpha by category, temperature {fmt.temperature(temperature)}{at_k(entries)}"
        columns: tuple[Column[Category], ...] = (
            Column("category", lambda row: row.name, key=True),
            Column("prompts", lambda row: row.prompts, fmt.count, key=True),
            *(_alpha_of(draft) for draft in dict.fromkeys(entry.draft for entry in entries)),
        )
        rows: dict[str, Category] = {}
        for entry in entries:
            row = rows.setdefault(entry.category, Category(entry.category, entry.prompts, {}))
            row.alphas[entry.draft] = (entry.alpha, entry.alpha_lo, entry.alpha_hi)
        made.append(table(title, columns, rows.values(), notes=(CATEGORY_NOTE,)))
    return made


def position_tables(summary: Summary) -> list[Table]:
    """acceptance_by_position of every draft as replayed, one table per temperature."""
    replayed = [entry for entry in summary.acceptance_by_position if entry.source == "replayed"]
    made = []
    for temperature in dict.fromkeys(entry.temperature for entry in replayed):
        entries = [entry for entry in replayed if entry.temperature == temperature]
        deepest = max(len(entry.shares) for entry in entries)
        columns: tuple[Column[AcceptanceByPosition], ...] = (
            Column("draft", lambda entry: entry.draft, key=True),
            Column("K", lambda entry: entry.k, fmt.count, key=True),
            *(_share_at(j) for j in range(1, deepest + 1)),
        )
        title = f"acceptance_by_position, temperature {fmt.temperature(temperature)}"
        made.append(table(title, columns, entries, notes=(POSITION_NOTE,)))
    return made


def request_table(summary: Summary) -> Table:
    """What a user waits for, with and without the best draft."""
    requests = (summary.request,) if summary.request else ()
    return table("Whole requests", REQUEST, requests, notes=(REQUEST_NOTE,))


def at_k(entries: Iterable[CategoryAlpha]) -> str:
    """The K of all entries, with a comma before it; nothing where they differ."""
    ks = {entry.k for entry in entries}
    return f", K={ks.pop()}" if len(ks) == 1 else ""


def _alpha_of(draft: str) -> Column[Category]:
    return Column(draft, lambda row: row.alphas.get(draft), fmt.alpha, definition="alpha")


def _share_at(j: int) -> Column[AcceptanceByPosition]:
    return Column(
        f"j={j}",
        lambda entry: entry.shares[j - 1] if j <= len(entry.shares) else None,
        fmt.percent,
        definition="acceptance_by_position",
    )

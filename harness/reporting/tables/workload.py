"""Where a draft is good and where not: categories, positions, temperatures, whole requests."""

from collections.abc import Iterable, Mapping
from typing import Any

from harness.reporting import formatting as fmt
from harness.reporting.tables.leaderboard import name_of
from harness.reporting.tables.model import Column, Row, Table, without_empty

Entry = Mapping[str, Any]

TEMPERATURE_COLUMNS = (
    Column("draft", "left", key=True),
    Column("temperature", key=True),
    Column("best draft\ntemperature"),
    Column("K"),
    Column("speedup"),
    Column("at the\ntarget's own"),
    Column("gain\n[lo, hi]"),
    Column("scored on", "left", flexible=True),
)
TEMPERATURE_NOTE = (
    "Under rule ratio any draft temperature leaves the output's law as it is, so this knob is free."
    " gain: speedup over that at the target's own temperature; where its interval reaches 1, leave"
    " the knob alone."
)
CATEGORY_NOTE = (
    "alpha with its interval, where a category has prompts enough for one. Speculate on a category"
    " only where alpha is above what the draft needs to win."
)
POSITION_NOTE = (
    "Column j: share of rounds, among those with at least j text positions left, in which at least"
    " j draft tokens were accepted."
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


def draft_temperature_table(stored: Iterable[Entry]) -> Table | None:
    """The draft temperature that would serve each draft best."""
    rows = tuple(
        Row(
            (
                fmt.text(entry.get("draft")),
                fmt.temperature(entry.get("temperature")),
                fmt.temperature(entry.get("best_draft_temperature")),
                fmt.text(entry.get("k")),
                fmt.speedup(entry.get("speedup")),
                fmt.speedup(entry.get("default_speedup")),
                fmt.gain(entry.get("gain"), entry.get("gain_lo"), entry.get("gain_hi")),
                fmt.text(entry.get("note")),
            )
        )
        for entry in stored
    )
    table = Table("Another temperature for the draft", TEMPERATURE_COLUMNS, rows)
    noted = Table(table.title, table.columns, table.rows, (TEMPERATURE_NOTE,))
    return without_empty(noted, fmt.EMPTY) if rows else None


def request_table(view: Entry | None) -> Table | None:
    """Speedup of the whole request by its prompt's and its answer's length."""
    if not view or not view.get("rows"):
        return None
    found = {
        (entry["prompt_tokens"], entry["new_tokens"]): entry.get("request_speedup")
        for entry in view["rows"]
    }
    lengths = sorted({new for _, new in found})
    rows = tuple(
        Row((fmt.count(prompt), *(fmt.speedup(found.get((prompt, new))) for new in lengths)))
        for prompt in sorted({prompt for prompt, _ in found})
    )
    columns = (
        Column("prompt\ntokens", key=True),
        *(Column(f"{fmt.count(new)}\nnew tokens") for new in lengths),
    )
    where = f"temperature {fmt.temperature(view.get('temperature'))}"
    title = f"Whole requests: {view.get('draft')} at K={view.get('k')}, {where}"
    return Table(title, columns, rows, _request_notes(view))


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


def _request_notes(view: Entry) -> tuple[str, ...]:
    notes = ["Request speedup, both prefills included: what a user waits for."]
    before, after = view.get("p95_baseline_s"), view.get("p95_speculative_s")
    if before is not None and after is not None:
        notes.append(
            f"p95 of request latency over these prompts: {fmt.seconds(before)} without,"
            f" {fmt.seconds(after)} with."
        )
    if view.get("share_slower") is not None:
        notes.append(f"Prompts whose request gets slower: {fmt.percent(view['share_slower'])}.")
    return tuple(notes)

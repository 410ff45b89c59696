"""The grid of answers, and tokens per round on other engines."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePath

from harness import formatting as fmt
from harness.engine_facts.draft_kinds import kind_of
from harness.engine_facts.engines import drafts_alike, spec_of
from harness.records import first
from harness.reporting import grid
from harness.reporting.grid import GridRow
from harness.reporting.tables.specification import Column, Table, columns_by, table
from harness.summary import RoundTokens, Summary

GRID: tuple[Column[GridRow], ...] = (
    Column("T", lambda row: row.at, key=True),
    Column("engines", lambda row: row.engines, key=True, flexible=True),
    Column("serve", lambda row: row.serve, flexible=True),
    Column("speedup [lo, hi]", lambda row: fmt.bounded(row.answer), fmt.speedup),
    Column("evidence", lambda row: grid.evidence(row.answer)),
)
TITLE = "What to serve"
NO_DRAFT_NOTE = "no draft (...): the speedup is that of what is in brackets, which loses least."
COST_NOTE = (
    "A round drafts and checks K tokens; its time is counted in plain tokens of that engine."
)


def grid_table(summary: Summary) -> Table:
    """The grid of answers, with a column for each prompt set where these are few."""
    rows = list(grid.rows(summary))
    names = list(dict.fromkeys(answer.prompt_set for row in rows for answer in row.sets))
    alone = names if 1 < len(names) <= grid.MOST_SETS else []
    # Elsewhere the cells have the speedups
    of_set = partial(_words_of_set, with_speedup=summary.run.command == "audition")
    columns = columns_by(alone, "{} alone", of_set)
    notes = (*_shares(summary), *_grid_notes(rows, summary))
    return _grid((*GRID, *columns), rows, notes)


def _grid(
    columns: Sequence[Column[GridRow]], rows: Sequence[GridRow], notes: Iterable[str]
) -> Table:
    made = table(TITLE, columns, rows, notes=tuple(notes))
    pairs = zip(made.rows, rows, strict=True)
    shown = tuple(replace(each, best=row.marked, minor=row.minor) for each, row in pairs)
    return replace(made, rows=shown)


def _shares(summary: Summary) -> Iterator[str]:
    if summary.run.weights:
        weights = summary.run.weights
        total = sum(weights.values())
        shares = ", ".join(f"{name} {share / total:.1%}" for name, share in weights.items())
        yield f"Share of each prompt set in the workload: {shares}."


def _grid_notes(rows: Sequence[GridRow], summary: Summary) -> Iterator[str]:
    elsewhere = {(row.engines, row.answer.run): None for row in rows}
    for engines, run in elsewhere:
        if run is not None:
            yield f"{engines}: predicted, round times of {PurePath(run).name}."
    answers = [row.answer for row in rows]
    if any(answer.decision == "does_not_pay" and answer.timed for answer in answers):
        yield NO_DRAFT_NOTE
    if any(answer.decision == "not_measured" for answer in answers):
        yield COST_NOTE
    yield from _faster_elsewhere(summary)


def _faster_elsewhere(summary: Summary) -> Iterator[str]:
    """A note on drafts that rank higher and that the headline's engine does not have."""
    shown = grid.marked(summary)
    if shown is None or shown.answer.timed or shown.answer.engine is None:
        return
    engine, temperature = spec_of(shown.answer.engine), shown.row.temperature
    board = first(summary.leaderboards, rule=engine.rule, temperature=temperature)
    faster: list[str] = []
    for row in board.rows if board else ():
        kind = kind_of(row.draft, summary.run.models)
        if row.draft is None or drafts_alike(engine.name, kind, temperature):
            break
        faster.append(f"{row.draft} at K={row.k}")
    if faster:
        yield f"Faster here, but not available on {engine.in_rows}: {', '.join(faster)}."


def _words_of_set(row: GridRow, name: str, *, with_speedup: bool) -> str | None:
    """The answer of one prompt set.

    Where one K was measured, the best by replay follows it if it is another one: "small, K=2; K=8
    predicted faster".
    """
    answer = first(row.sets, prompt_set=name)
    if answer is None:
        return None
    gain = f": {fmt.speedup(answer.speedup)}" if with_speedup and answer.speculates else ""
    best = max(answer.by_k, key=lambda each: each.speedup, default=None)
    other = ""
    predicted = best is not None and best.source == "replayed" and answer.source == "measured"
    if best and predicted and best.speedup > max(1.0, answer.speedup or 0.0):
        other = f"; K={best.k} predicted faster"
    return f"{grid.words(answer)}{gain}{other}"


EMITS_NOTE = (
    "tokens/round by replay, under the rule by which these engines accept. Nothing was timed there:"
    " K pays while a round costs fewer of that engine's plain tokens than the lower bound."
)


def emits_table(summary: Summary) -> Table:
    """The tokens per round at every K on engines whose rounds were not timed."""
    rows = [row for row in grid.rows(summary) if not row.answer.timed]
    emitted = {(id(row), each.k): each for row in rows for each in row.answer.rounds}
    columns: tuple[Column[GridRow], ...] = (
        Column("T", lambda row: row.temperature, fmt.temperature, key=True),
        Column("engines", lambda row: row.engines, key=True, flexible=True),
        Column("draft", lambda row: row.answer.named[0]),
        *columns_by(
            sorted({k for _, k in emitted}),
            "K={}",
            lambda row, k: _emits(emitted.get((id(row), k))),
            fmt.with_bounds,
            definition="tokens/round",
        ),
    )
    notes = (
        EMITS_NOTE,
        *grid.unknown_above_zero(rows),
        *dict.fromkeys(note for row in rows for note in grid.left_out(row.servers)),
    )
    shown = [row for row in rows if row.answer.rounds]
    return table("Tokens per round on other engines", columns, shown, notes=notes)


def _emits(emitted: RoundTokens | None) -> fmt.Bounded | None:
    return emitted and fmt.bounded(emitted, "tokens_per_round")

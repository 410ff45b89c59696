"""The grid of answers, and tokens per round on other engines."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import NamedTuple

from harness import formatting as fmt
from harness.records import first
from harness.reporting import grid
from harness.reporting.tables.specification import Column, Table, columns_by, table
from harness.serving.drafts import kind_of
from harness.serving.engines import drafts_alike, spec_of
from harness.summary import RoundTokens, Summary

MOST_ROWS = 9  # rows of the grid on the console


class GridLine(NamedTuple):
    """A row of the grid, and whether it is the headline's.

    Engines that were not timed are `minor` at other temperatures: a short grid leaves them out.
    """

    row: grid.GridRow
    marked: bool
    minor: bool

    @property
    def temperature(self) -> str:
        """The temperature, with a star where the row is the headline's."""
        return f"{f'{grid.MARK} ' if self.marked else '  '}{fmt.temperature(self.row.temperature)}"


GRID: tuple[Column[GridLine], ...] = (
    Column("T", lambda line: line.temperature, key=True),
    Column("engines", lambda line: line.row.engines, key=True, flexible=True),
    Column("serve", lambda line: line.row.serve, flexible=True),
    Column("speedup [lo, hi]", lambda line: fmt.bounded(line.row.answer), fmt.speedup),
    Column("evidence", lambda line: grid.evidence(line.row.answer)),
)
TITLE = "What to serve"
STAR_NOTE = "marked: the row of the headline."
NO_DRAFT_NOTE = "no draft (...): the speedup is that of what is in brackets, which loses least."
COST_NOTE = "cost: time of a round in plain tokens."


def grid_table(summary: Summary) -> Table:
    """The grid of answers, with a column for each prompt set where these are few."""
    lines = _grid_lines(summary)
    names = list(dict.fromkeys(answer.prompt_set for line in lines for answer in line.row.sets))
    alone = names if 1 < len(names) <= grid.MOST_SETS else []
    columns = columns_by(alone, "{} alone", _words_of_set)
    star = [STAR_NOTE] if len(lines) > 1 and any(line.marked for line in lines) else []
    notes = (*star, *_shares(summary), *_grid_notes(lines, summary))
    return _grid((*GRID, *columns), lines, notes)


def short_grid(summary: Summary) -> Table:
    """The grid in few rows: where there are many, those of the headline's engine."""
    every, shown = [line for line in _grid_lines(summary) if not line.minor], grid.marked(summary)
    lines = every
    if shown is not None and len(every) > MOST_ROWS:
        lines = [line for line in every if shown.answer.engine in line.row.servers]
        if len(lines) > MOST_ROWS:
            start = [line.marked for line in lines].index(True)
            lines = lines[start : start + MOST_ROWS]
    notes = [STAR_NOTE] if any(line.marked for line in lines[1:]) else []
    notes += _grid_notes(lines, summary)
    if len(lines) < len(every):
        left = len(every) - len(lines)
        notes.append(f"{left} more rows are in the report; engine= shows another engine.")
    return _grid(GRID, lines, notes)


def timed_grid(summary: Summary) -> Table:
    """The rows of the timed engine and of the headline: an audition's ranking needs the space."""
    lines = [line for line in _grid_lines(summary) if line.marked or line.row.answer.timed]
    return _grid(GRID, lines, _grid_notes(lines, summary))


def _grid(
    columns: Sequence[Column[GridLine]], lines: Sequence[GridLine], notes: Iterable[str]
) -> Table:
    """The table of these rows, the marked one bold."""
    made = table(TITLE, columns, lines, notes=tuple(notes))
    pairs = zip(made.rows, lines, strict=True)
    rows = tuple(replace(row, best=line.marked, minor=line.minor) for row, line in pairs)
    return replace(made, rows=rows)


def _grid_lines(summary: Summary) -> list[GridLine]:
    shown = grid.marked(summary)
    first_shown = None if shown is None else shown.row
    return [
        GridLine(
            row,
            row == first_shown,
            first_shown is not None
            and not row.answer.timed
            and row.temperature != first_shown.temperature,
        )
        for row in grid.rows(summary)
    ]


def _shares(summary: Summary) -> Iterator[str]:
    if summary.run.weights:
        weights = summary.run.weights
        total = sum(weights.values())
        shares = ", ".join(f"{name} {share / total:.1%}" for name, share in weights.items())
        yield f"Share of each prompt set in the workload: {shares}."


def _grid_notes(lines: Sequence[GridLine], summary: Summary) -> Iterator[str]:
    elsewhere = {(line.row.engines, line.row.answer.run): None for line in lines}
    for engines, run in elsewhere:
        if run is not None:
            yield f"{engines}: predicted, round times of {PurePath(run).name}."
    answers = [line.row.answer for line in lines]
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


def _words_of_set(line: GridLine, name: str) -> str | None:
    """The answer of one prompt set, with the speedup where a draft pays."""
    answer = first(line.row.sets, prompt_set=name)
    if answer is None:
        return None
    gain = f": {fmt.speedup(answer.speedup)}" if answer.speculates else ""
    return f"{grid.words(answer)}{gain}"


EMITS_NOTE = (
    "tokens/round by replay, under the rule by which these engines accept. Nothing was timed there:"
    " K pays while a round costs fewer of that engine's plain tokens than the lower bound."
)


def emits_table(summary: Summary) -> Table:
    """The tokens per round at every K on engines whose rounds were not timed."""
    rows = [row for row in grid.rows(summary) if not row.answer.timed]
    emitted = {(id(row), each.k): each for row in rows for each in row.answer.rounds}
    columns: tuple[Column[grid.GridRow], ...] = (
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

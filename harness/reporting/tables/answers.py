"""The first screen's tables: the grid of answers, and the prompt sets one by one."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from harness.records import GREEDY, ResultRow, first, where
from harness.reporting import formatting as fmt
from harness.reporting import grid
from harness.reporting.tables.specification import Column, Table, columns_by, table
from harness.serving.drafts import kind_of
from harness.serving.engines import OWN, drafts_alike, spec_of, with_lines
from harness.summary import Answer, LeaderboardRow, Summary

MOST_SETS = 4  # prompt sets that get a column of the grid
MOST_ROWS = 9  # of the grid on the console


class Line(NamedTuple):
    """A row of the grid, and whether the headline is its."""

    row: grid.GridRow
    marked: bool

    @property
    def temperature(self) -> str:
        """The temperature, with a star where the row is the headline's."""
        return f"{f'{grid.MARK} ' if self.marked else '  '}{fmt.temperature(self.row.temperature)}"


GRID: tuple[Column[Line], ...] = (
    Column("T", lambda line: line.temperature, key=True, definition="temperature"),
    Column("engines", lambda line: line.row.engines, key=True, flexible=True),
    Column("serve", lambda line: grid.words_of_row(line.row.answer), flexible=True),
    Column("speedup [lo, hi]", lambda line: fmt.bounded(line.row.answer), fmt.speedup),
    Column("evidence", lambda line: grid.SOURCES[line.row.answer.source]),
)
TITLE = "What to serve"
NO_DRAFT_NOTE = "no draft: the speedup is that of the draft and K that lose least."


class SetLine(NamedTuple):
    """One prompt set's answer at one temperature, with the rows of its draft and K."""

    answer: Answer
    measured: ResultRow | None
    predicted: ResultRow | None

    @property
    def serve(self) -> str | None:
        """The draft to serve, or that there is none, or not yet."""
        speculates = self.answer.decision == "speculate"
        return self.answer.draft if speculates else grid.words(self.answer)

    @property
    def k(self) -> float | None:
        """The K to serve; where there is none, the one that the numbers are of."""
        return grid.k_of(self.answer) or None

    @property
    def row(self) -> ResultRow | None:
        """The row that the answer rests on."""
        return self.measured or self.predicted

    @property
    def alphas(self) -> str | None:
        """Alpha at its K, and the alpha that this K needs."""
        if self.row is None or self.row.alpha is None:
            return None
        known = (row.breakeven_alpha for row in (self.predicted, self.measured) if row is not None)
        needed = next((alpha for alpha in known if alpha is not None), None)
        return f"{self.row.alpha:.2f} / {fmt.NO_ROOT if needed is None else f'{needed:.2f}'}"


SETS: tuple[Column[SetLine], ...] = (
    Column(
        "T",
        lambda line: line.answer.temperature,
        fmt.temperature,
        key=True,
        definition="temperature",
    ),
    Column("prompts", lambda line: line.answer.prompt_set, key=True, flexible=True),
    Column("serve", lambda line: line.serve, flexible=True),
    Column("K", lambda line: line.k, fmt.count),
    Column("speedup\n[lo, hi]", lambda line: fmt.bounded(line.answer), fmt.speedup),
    Column(
        "predicted\nspeedup",
        lambda line: line.predicted.speedup if line.measured and line.predicted else None,
        fmt.speedup,
    ),
    Column("tokens/\nround", lambda line: line.row and line.row.tokens_per_round, fmt.decimal),
    Column("alpha /\nneeded", lambda line: line.alphas),
)


def grid_table(summary: Summary) -> Table:
    """Every temperature and kind of engine, with a column for each of a few prompt sets."""
    lines = _lines(summary)
    names = list(dict.fromkeys(answer.prompt_set for line in lines for answer in line.row.sets))
    alone = names if 1 < len(names) <= MOST_SETS else []
    columns = columns_by(alone, "{} alone", _words_of_set)
    return _grid((*GRID, *columns), lines, _grid_notes(lines, summary))


def short_grid(summary: Summary) -> Table:
    """The workload's answers in few lines: of many rows those of the marked row's server."""
    every, shown = _lines(summary, alone=False), grid.marked(summary)
    lines = every
    if shown is not None and len(every) > MOST_ROWS:
        lines = [line for line in every if _for_server(line.row, shown)]
        if len(lines) > MOST_ROWS:
            start = [line.marked for line in lines].index(True)
            lines = lines[start : start + MOST_ROWS]
    notes = list(_grid_notes(lines, summary))
    if len(lines) < len(every):
        notes.append(
            f"{len(every) - len(lines)} more rows are in the report; engine= shows another engine."
        )
    return _grid(GRID, lines, notes)


def _for_server(row: grid.GridRow, shown: grid.Marked) -> bool:
    """Whether a row holds for the marked row's server."""
    if shown.row.served is not None:
        return row.served == shown.row.served
    return shown.server in (*row.servers, OWN.name)


def _grid(columns: Sequence[Column[Line]], lines: Sequence[Line], notes: Iterable[str]) -> Table:
    """The rows, the marked one bold as well."""
    made = table(TITLE, columns, lines, notes=tuple(notes))
    rows = zip(made.rows, lines, strict=True)
    return replace(made, rows=tuple(replace(row, best=line.marked) for row, line in rows))


def _lines(summary: Summary, *, alone: bool = True) -> list[Line]:
    shown = grid.marked(summary)
    return [
        Line(row, shown is not None and _holds(row, shown.row))
        for row in grid.rows(summary, alone=alone)
    ]


def _holds(row: grid.GridRow, marked: grid.GridRow) -> bool:
    """Whether a row is the marked one, or the marked one with more servers in it."""
    same = (row.temperature, row.served) == (marked.temperature, marked.served)
    return same and set(marked.servers) <= set(row.servers)


def _grid_notes(lines: Sequence[Line], summary: Summary) -> Iterator[str]:
    if summary.run.weights:
        shares = ", ".join(f"{name} {share:g}" for name, share in summary.run.weights.items())
        yield f"Prompt sets weigh {shares} (prompts.weights)."
    if any(line.row.answer.decision == "does_not_pay" for line in lines):
        yield NO_DRAFT_NOTE
    yield from dict.fromkeys(note for line in lines for note in grid.left_out(line.row.servers))
    yield from _lacking(summary)


def _lacking(summary: Summary) -> Iterator[str]:
    """The drafts that look faster than the marked row's, and that its server does not have."""
    shown = grid.marked(summary)
    if shown is None or not spec_of(shown.server).lines:
        return
    engine, temperature = spec_of(shown.server), shown.row.temperature
    board = first(summary.leaderboards, rule=engine.rule, temperature=temperature)
    faster: list[str] = []
    for row in board.rows if board else ():
        kind = kind_of(row.draft, summary.run.models)
        if row.draft is None or drafts_alike(engine.name, kind, temperature):
            break
        faster.append(f"{row.draft} at K={row.k} ({fmt.speedup(row.speedup)})")
    if faster:
        yield f"Faster here, but not available on {engine.in_rows}: {', '.join(faster)}."


def _words_of_set(line: Line, name: str) -> str | None:
    answer = first(line.row.sets, prompt_set=name)
    return answer and grid.words_of_set(answer)


def sets_table(summary: Summary) -> Table:
    """Each prompt set alone, on the engine that was asked for, else under the run's own rule."""
    rule, served, shown = grid.rule_of(summary), summary.served, grid.marked(summary)
    engine = served.engine if served else OWN.name
    rows: dict[float, grid.GridRow] = {}
    for row in grid.rows(summary):
        # Of several with one rule the marked one's
        if rule in row.rules and row.answer.engine == engine:
            rows[row.temperature] = rows.get(row.temperature, row)
        if shown is not None and row == shown.row and rule in row.rules:
            rows[row.temperature] = row
    lines = [
        _set_line(answer, summary)
        for answer in where(summary.answers, rule=rule, engine=engine)
        if answer.prompt_set != "all"
        and set(answer.servers) <= set(rows[answer.temperature].servers)
    ]
    common = set(with_lines()).intersection(*(row.servers for row in rows.values()))
    of_rule = [name for name in common if spec_of(name).rule == rule]
    on = spec_of(served.engine).title if served else grid.names_of(of_rule)
    return table(f"Each prompt set alone ({on})", SETS, lines)


def _set_line(answer: Answer, summary: Summary) -> SetLine:
    """The answer with the rows of the draft and K that its speedup is of."""
    draft = answer.draft or answer.reason_values.get("draft")
    k = answer.k or answer.reason_values.get("k")
    own = answer.rule == summary.run.sampling.rule or answer.temperature == GREEDY
    cell = {"prompt_set": answer.prompt_set, "temperature": answer.temperature, "k": k}
    rows = [row for row in where(summary.alone, **cell) if own and draft in (None, row.draft)]
    by_source = {row.source: row for row in rows}
    return SetLine(
        answer, by_source.get("measured"), by_source.get("replayed") or by_source.get("theory")
    )


DRAFTS: tuple[Column[LeaderboardRow], ...] = (
    Column("draft", lambda row: row.draft, key=True, flexible=True),
    Column("K", lambda row: row.k, fmt.count),
    Column("speedup\n[lo, hi]", fmt.bounded, fmt.speedup),
    Column("tokens/\nround", lambda row: row.tokens_per_round, fmt.decimal),
    Column("alpha", lambda row: row.alpha, fmt.alpha),
    Column("break-even\nalpha", lambda row: row.breakeven_alpha or fmt.NO_ROOT, fmt.alpha),
)


def drafts_table(summary: Summary) -> Table:
    """An audition's drafts where the marked row is, each at the K that looks best."""
    shown = grid.marked(summary)
    if shown is None:
        return table("", DRAFTS, ())
    answer = shown.row.answer
    temperature = shown.row.temperature
    boards = where(summary.leaderboards, rule=answer.rule, temperature=temperature)
    rows = [row for board in boards for row in board.rows if row.draft is not None]
    where_shown = f"temperature {fmt.temperature(temperature)}"
    return table(f"Every draft at its fastest K, predicted ({where_shown})", DRAFTS, rows)

"""The first screen's tables: the grid of answers, and the prompt sets one by one."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import NamedTuple

from harness import formatting as fmt
from harness.records import RULES, ResultRow, first, where
from harness.reporting import grid
from harness.reporting.tables.leaderboard import (
    DROPPED,
    as_decided,
    breakeven,
    dropped_notes,
    marks_of,
    name_of,
)
from harness.reporting.tables.specification import Column, Table, columns_by, table
from harness.serving.drafts import kind_of
from harness.serving.engines import drafts_alike, spec_of
from harness.summary import Answer, LeaderboardRow, RoundTokens, Summary

MOST_SETS = 4  # prompt sets that get a column of the grid
MOST_ROWS = 9  # of the grid on the console


class Line(NamedTuple):
    """A row of the grid, and whether the headline is its.

    Where there is little room, engines that were not timed are `minor` at other temperatures.
    """

    row: grid.GridRow
    marked: bool
    minor: bool

    @property
    def temperature(self) -> str:
        """The temperature, with a star where the row is the headline's."""
        return f"{f'{grid.MARK} ' if self.marked else '  '}{fmt.temperature(self.row.temperature)}"


GRID: tuple[Column[Line], ...] = (
    Column("T", lambda line: line.temperature, key=True),
    Column("engines", lambda line: line.row.engines, key=True, flexible=True),
    Column("serve", lambda line: line.row.serve, flexible=True),
    Column("speedup [lo, hi]", lambda line: fmt.bounded(line.row.answer), fmt.speedup),
    Column("evidence", lambda line: grid.evidence(line.row.answer)),
)
TITLE = "What to serve"
STAR_NOTE = "marked: the row of the headline."
NO_DRAFT_NOTE = "no draft (...): the speedup is that of what is in brackets, which loses least."
COST_NOTE = "cost: time of a round in plain tokens{}."
# Tokens per round and cost of a round stand next to a speedup that is not their ratio
CORRECTED_NOTE = "speedup: {how}; predicted: {tokens} / {cost} = {ratio}."
LOAD_NOTE = "One request at a time; nothing was run under load (harness.server measures that)."
SERVER_NOTE = "No other engine was measured in this run."
# What was not measured, by command
LIMITS = {"sweep": LOAD_NOTE, "audition": LOAD_NOTE, "server": SERVER_NOTE}
PAIRED = (
    "replayed rounds of all {prompts} prompts, at the cost of a round on the {measured} measured"
)
LESS = "less what choosing {chosen} adds by chance"


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
        return self.answer.named[1] or None

    @property
    def row(self) -> ResultRow | None:
        """The row that the answer rests on."""
        return self.measured or self.predicted

    @property
    def tokens_per_round(self) -> float | None:
        """As the row has it; where nothing was timed, by replay."""
        emitted = self.answer.round
        return self.row.tokens_per_round if self.row else emitted and emitted.tokens_per_round

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
    Column("tokens/\nround", lambda line: line.tokens_per_round, fmt.decimal),
    Column("alpha /\nneeded", lambda line: line.alphas),
)


def grid_table(summary: Summary) -> Table:
    """Every temperature and kind of engine, with a column for each of a few prompt sets."""
    lines = _lines(summary)
    names = list(dict.fromkeys(answer.prompt_set for line in lines for answer in line.row.sets))
    alone = names if 1 < len(names) <= MOST_SETS else []
    columns = columns_by(alone, "{} alone", _words_of_set)
    star = [STAR_NOTE] if len(lines) > 1 and any(line.marked for line in lines) else []
    limit = LIMITS.get(summary.run.command, "")
    notes = (*star, limit, *_shares(summary), *_grid_notes(lines, summary))
    return _grid((*GRID, *columns), lines, notes)


def short_grid(summary: Summary) -> Table:
    """The workload's answers in few lines: of many rows those of the marked row's server.

    Of an audition those of what was timed.
    """
    every, shown = [line for line in _lines(summary) if not line.minor], grid.marked(summary)
    lines = every
    if summary.run.command == "audition":  # whose ranking is the answer, and needs the room
        lines = [line for line in every if line.marked or line.row.answer.timed]
    elif shown is not None and len(every) > MOST_ROWS:
        lines = [line for line in every if shown.answer.engine in line.row.servers]
        if len(lines) > MOST_ROWS:
            start = [line.marked for line in lines].index(True)
            lines = lines[start : start + MOST_ROWS]
    notes = list(_grid_notes(lines, summary))
    if summary.run.command != "audition":
        if any(line.marked for line in lines[1:]):
            notes = [STAR_NOTE, *notes]
        if len(lines) < len(every):
            left = len(every) - len(lines)
            notes.append(f"{left} more rows are in the report; engine= shows another engine.")
    return _grid(GRID, lines, notes)


def _grid(columns: Sequence[Column[Line]], lines: Sequence[Line], notes: Iterable[str]) -> Table:
    """The rows, the marked one bold as well."""
    made = table(TITLE, columns, lines, notes=tuple(notes))
    pairs = zip(made.rows, lines, strict=True)
    rows = tuple(replace(row, best=line.marked, minor=line.minor) for row, line in pairs)
    return replace(made, rows=rows)


def _lines(summary: Summary) -> list[Line]:
    shown = grid.marked(summary)
    first_shown = None if shown is None else shown.row
    return [
        Line(
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


def _grid_notes(lines: Sequence[Line], summary: Summary) -> Iterator[str]:
    elsewhere = {(line.row.engines, line.row.answer.run): None for line in lines}
    for engines, run in elsewhere:
        if run is not None:
            yield f"{engines}: predicted, round times of {PurePath(run).name}."
    answers = [line.row.answer for line in lines]
    if any(answer.decision == "does_not_pay" and answer.timed for answer in answers):
        yield NO_DRAFT_NOTE
    if any(answer.decision == "not_measured" for answer in answers):
        emitted, k = answers[0].round, answers[0].named[1]
        cost = emitted.own_cost if emitted and answers[0].timed else None
        at = f", T={fmt.temperature(answers[0].temperature)}"
        at = at if len({answer.temperature for answer in answers}) > 1 else ""
        at += ", interpolated" if emitted and emitted.interpolated else ""
        known = (
            "" if cost is None else f"; {grid.at_place(answers[0])} {fmt.decimal(cost)} (K={k}{at})"
        )
        yield COST_NOTE.format(known)
        if emitted is not None and cost is not None and answers[0].speedup is not None:
            tokens = emitted.tokens_per_round
            ratio, how = fmt.speedup(tokens / cost), _how(answers[0], summary)
            if how and ratio != fmt.speedup(answers[0].speedup):
                of = {"tokens": fmt.decimal(tokens), "cost": fmt.decimal(cost), "ratio": ratio}
                yield CORRECTED_NOTE.format(how=how, **of)
    yield from grid.unknown_above_zero(line.row for line in lines)
    yield from dict.fromkeys(note for line in lines for note in grid.left_out(line.row.servers))
    yield from _lacking(summary)


def _how(answer: Answer, summary: Summary) -> str:
    """What a speedup is of, as far as tokens per round / the cost of a round has that not in it."""
    several = {
        "draft": summary.run.command == "audition" and summary.run.draft is None,
        "K": sum(k > 0 for k in summary.run.ks) > 1,
    }
    chosen = " and ".join(name for name, choice in several.items() if choice)
    parts = [LESS.format(chosen=chosen)] if chosen else []
    if answer.pairs is not None:
        part = answer.pairs
        parts.insert(0, PAIRED.format(prompts=part.prompts, measured=part.measured))
    elif not parts and answer.source == "measured":
        parts = [grid.evidence(answer)]
    return ", ".join(parts)


def _lacking(summary: Summary) -> Iterator[str]:
    """The drafts that look faster here, and that the headline's engine does not have."""
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


def _words_of_set(line: Line, name: str) -> str | None:
    """What to serve to one prompt set, with the speedup where a draft pays."""
    answer = first(line.row.sets, prompt_set=name)
    if answer is None:
        return None
    gain = f": {fmt.speedup(answer.speedup)}" if answer.speculates else ""
    return f"{grid.words(answer)}{gain}"


def sets_table(summary: Summary) -> Table:
    """Each prompt set alone, on the headline's engine."""
    shown, lines = grid.marked(summary), [_set_line(a, summary) for a in summary.per_prompt_set]
    if shown is None:
        return table("", SETS, ())
    title = f"Each prompt set alone, {grid.at_place(shown.answer)}, {grid.evidence(shown.answer)}"
    return table(title, SETS, lines)


def _set_line(answer: Answer, summary: Summary) -> SetLine:
    """The answer with the rows of the draft and K that its speedup is of."""
    draft, k = answer.named
    cell = {"prompt_set": answer.prompt_set, "temperature": answer.temperature, "k": k}
    # Of another rule than the run's there are none
    rows = [
        row
        for row in where(summary.alone, **cell)
        if answer.timed and draft in (None, row.draft) and answer.rule in (None, row.rule)
    ]
    by_source = {row.source: row for row in rows}
    return SetLine(
        answer, by_source.get("measured"), by_source.get("replayed") or by_source.get("theory")
    )


class EmitsLine(NamedTuple):
    """What a round of one K emits on engines whose rounds were not timed."""

    row: grid.GridRow
    draft: str | None
    emitted: RoundTokens


EMITS: tuple[Column[EmitsLine], ...] = (
    Column("temperature", lambda line: line.row.temperature, fmt.temperature, key=True),
    Column("engines", lambda line: line.row.engines, key=True, flexible=True),
    Column("draft", lambda line: line.draft),
    Column("K", lambda line: line.emitted.k, fmt.count),
    Column(
        "tokens/round\n[lo, hi]",
        lambda line: fmt.bounded(line.emitted, "tokens_per_round"),
        fmt.with_bounds,
    ),
    Column("cost of\na round here", lambda line: line.emitted.own_cost, fmt.decimal),
)
EMITS_NOTE = (
    "Nothing was timed on these engines. tokens/round: by replay, under the rule by which they"
    " accept; K pays there while a round costs fewer of that engine's plain tokens than the lower"
    " bound. cost of a round here: {here}, which says nothing of theirs."
)


def emits_table(summary: Summary) -> Table:
    """What carries over to engines whose rounds were not timed: tokens per round at every K."""
    lines = [
        EmitsLine(row, row.answer.named[0], emitted)
        for row in grid.rows(summary)
        if not row.answer.timed
        for emitted in row.answer.rounds
    ]
    note = EMITS_NOTE.format(here=grid.timed_place(summary))
    notes = (note, *grid.unknown_above_zero(line.row for line in lines))
    return table("What carries over to other engines", EMITS, lines, notes=notes)


# A header of one line, so that more drafts fit the console
DRAFTS: tuple[Column[LeaderboardRow], ...] = (
    Column("K", lambda row: row.k, fmt.count),
    Column("speedup [lo, hi]", fmt.bounded, fmt.speedup),
    Column("tokens/round", lambda row: row.tokens_per_round, fmt.decimal),
    Column("alpha / needed", lambda row: _alpha_needed(row)),
    DROPPED,
)


def drafts_table(summary: Summary) -> Table:
    """An audition's ranking where the marked row is: each draft at the K that looks best."""
    shown = grid.marked(summary)
    if shown is None or summary.run.command != "audition":
        return table("", DRAFTS, ())
    rule, temperature = summary.run.sampling.rule, shown.row.temperature
    boards = where(summary.leaderboards, rule=rule, temperature=temperature)
    rows = [row for board in boards for row in board.rows]
    own = grid.own_answer(summary, temperature)
    place = "" if own is None else f" {grid.at_place(own)}"
    at = f"temperature {fmt.temperature(temperature)}"
    marks = marks_of(summary, rows, temperature, RULES)
    name = Column[LeaderboardRow]("draft", lambda row: name_of(row, marks), key=True, flexible=True)
    title = f"Every draft at its fastest K, predicted{place} ({at})"
    if own is not None and own.speedup not in [row.speedup for row in rows]:
        known = f"predicted, T={fmt.temperature(temperature)}"  # in one line of the console
        title = f"Every draft's fastest K on these prompts,{place} ({known})"
    notes = (as_decided(summary, rows, temperature), *dropped_notes(rows))
    return table(title, (name, *DRAFTS), rows, notes=notes)


def _alpha_needed(row: LeaderboardRow) -> str | None:
    needed = breakeven(row)
    if row.alpha is None or needed is None:
        return None
    return f"{row.alpha:.2f} / {needed if isinstance(needed, str) else fmt.decimal(needed)}"

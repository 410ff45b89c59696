"""Tables of drafts: the leaderboards, the answer of each prompt set, the costs of each draft.

A leaderboard holds for the engines that accept by its rule, and plain decoding is one of its rows.
Rules with the same rows share a leaderboard; at temperature 0 all rules do.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from harness import formatting as fmt
from harness.engine_facts.draft_kinds import DRAFTS, looks_up
from harness.engine_facts.engines import OWN, spec_of
from harness.records import Rule, first, grouped
from harness.reporting import grid
from harness.reporting.tables.specification import Column, Table, Value, columns_by, table
from harness.summary import (
    Answer,
    DraftMemory,
    LeaderboardRow,
    StepSummary,
    Summary,
)
from harness.theory.acceptance_rules import ACCEPTANCE_RULES

PLAIN = grid.DECISIONS["does_not_pay"]
# Marks a draft that another engine has, but none of the ranking's engines
NOT_THESE = "none of these engines"


class Board(NamedTuple):
    """A leaderboard, and the acceptance rules that it holds for."""

    place: str  # the engine whose round times the speedups are from, as "on vLLM"
    own: bool  # whether the rounds that were timed accept by one of its rules
    rules: tuple[Rule, ...]
    every_rule: bool  # whether it holds for every rule that was replayed, if these are several
    engines: tuple[str, ...]
    temperature: float
    rows: tuple[LeaderboardRow, ...]
    marks: Mapping[str, str]  # by draft that none of its engines has

    @property
    def best(self) -> LeaderboardRow | None:
        """The fastest row that its engines have; None where no timed round accepts by its rules."""
        served = (row for row in self.rows if row.draft not in self.marks)
        return next(served, None) if self.own else None

    @property
    def name(self) -> str:
        """Engine, temperature and rules: "on vLLM at temperature 1, accepted as on mlx-lm".

        It ends in "accepted by any rule" where all rules have the same rows, and in "if accepted as
        on mlx-lm" where no timed round accepts by its rules.
        """
        names = ", ".join(grid.engines_by_rule()[rule] for rule in self.rules)
        accepted = f"accepted as on {names}" if self.own else f"if accepted as on {names}"
        accepted = "accepted by any rule" if self.every_rule else accepted
        return f"{self.place} at temperature {fmt.temperature(self.temperature)}, {accepted}"

    @property
    def acceptance(self) -> str:
        return "; ".join(ACCEPTANCE_RULES[rule].phrase for rule in self.rules)


class DraftCosts(NamedTuple):
    """The step times and the memory of one draft; None where they were not measured."""

    draft: str
    step: StepSummary | None
    memory: DraftMemory | None


def breakeven(row: LeaderboardRow) -> Value:
    if row.draft is None or looks_up(row.draft) or row.alpha is None:
        return None
    return fmt.NO_ROOT if row.breakeven_alpha is None else row.breakeven_alpha


def name_of(row: LeaderboardRow, marks: Mapping[str, str]) -> str:
    """The name of a row's draft with its marks, or "do not speculate" for plain decoding."""
    if row.draft is None:
        return PLAIN
    mark = marks.get(row.draft)
    return f"{row.draft} ({mark})" if mark else row.draft


RANK = Column[LeaderboardRow]("rank", lambda row: row.rank, fmt.count, key=True)
DROPPED: Column[LeaderboardRow] = Column(
    "dropped after\nprompts",
    lambda row: row.dropped and f"{row.dropped.prompts} of {row.dropped.of}",
)
RANKS: tuple[Column[LeaderboardRow], ...] = (
    Column("best\nK", lambda row: row.k, fmt.count),
    Column("best\np_min", lambda row: row.p_min, fmt.decimal),
    Column("speedup\n[lo, hi]", fmt.bounded, fmt.speedup),
    Column("chance\nto be best", lambda row: row.probability_best, fmt.chance),
    Column("alpha\n[lo, hi]", lambda row: fmt.bounded(row, "alpha"), fmt.alpha),
    Column("break-even\nalpha", breakeven, fmt.alpha),
    DROPPED,
)
SETS: tuple[Column[Answer], ...] = (
    Column("prompt set", lambda answer: answer.prompt_set, key=True),
    Column("temperature", lambda answer: answer.temperature, fmt.temperature, key=True),
    Column("decision", lambda answer: grid.DECISIONS[answer.decision]),
    Column("draft", lambda answer: answer.draft),
    Column("K", lambda answer: answer.k, fmt.count),
    Column("speedup [lo, hi]", fmt.bounded, fmt.speedup),
)
COSTS: tuple[Column[DraftCosts], ...] = (
    Column("draft", lambda row: row.draft, key=True),
    Column("draft\nstep ms", lambda row: row.step and row.step.draft_step_s, fmt.in_ms),
    Column("target\nstep ms", lambda row: row.step and row.step.target_step_s, fmt.in_ms),
    Column("c", lambda row: row.step and row.step.c, lambda c: fmt.decimal(c, 3)),
    Column("extra\nmemory", lambda row: row.memory and row.memory.weights_bytes, fmt.memory),
    Column("context\ntokens lost", lambda r: r.memory and r.memory.context_tokens_lost, fmt.count),
    Column("sequences\nlost", lambda r: r.memory and r.memory.sequences_lost, fmt.count),
)

SPEEDUP_NOTE = (
    "speedup: by replay and this run's round times, at the K that is best on these prompts, which"
    " makes it slightly too high. On an engine that was not timed"
    " another draft may be best: the first table names it."
)
CHOICE_NOTE = (
    "Rows are not corrected for choosing draft and K: of {draft} with {k} that leaves {speedup}."
)
NO_ROOT_NOTE = "none: even alpha = 1 loses."
LOOKUP_NOTE = "A look-up ({}) has no break-even alpha: most rounds find fewer than K tokens."
SET_NOTE = "A row holds for a server that gets prompts of this set only."
TOO_FEW_NOTE = "Of fewer than {} prompts a set is undecided."
STEP_NOTE = (
    "draft step: one draft token; of an n-gram look-up, one look-up. c: draft step / target step."
)
MEMORY_NOTE = (
    "context tokens lost: cached tokens of the target that no longer fit next to the draft;"
    " sequences lost: concurrent ones of a typical length."
)


def boards(summary: Summary) -> list[Board]:
    """The leaderboards of the rules that matter to the answers, by temperature.

    These rules are that of the timed rounds and that of the engine which `engine=` names. Rules
    with the same rows share a leaderboard.
    """
    ranked = [board for board in summary.leaderboards if board.rows]
    asked: set[Rule | None] = {summary.run.sampling.rule}
    if summary.run.serve_on is not None:
        asked.add(spec_of(summary.run.serve_on).rule)
    rules = list(dict.fromkeys(board.rule for board in ranked))
    by_rule = sorted(ranked, key=lambda board: rules.index(board.rule))
    alike = grouped(by_rule, lambda board: (board.temperature, board.rows))
    return [
        Board(
            place=grid.timed_place(summary),
            own=summary.run.sampling.rule in {board.rule for board in group},
            rules=tuple(board.rule for board in group),
            every_rule=1 < len(rules) == len(group),
            engines=tuple(engine for board in group for engine in board.engines),
            temperature=temperature,
            rows=group[0].rows,
            marks=marks_of(summary, group[0].rows, temperature, [each.rule for each in group]),
        )
        for (temperature, _), group in alike.items()
        if asked & {board.rule for board in group}
    ]


def marks_of(
    summary: Summary, rows: Iterable[LeaderboardRow], temperature: float, rules: Sequence[Rule]
) -> dict[str, str]:
    """The marks of drafts that no engine has which accepts by one of these rules."""
    marks: dict[str, str] = {}
    timed = first(summary.answers, timed=True)
    if timed is not None and timed.engine not in (None, OWN.name):
        return marks  # all of them ran there
    for draft in (row.draft for row in rows if row.draft is not None):
        if grid.engines_with(summary, draft, temperature, rules) == ():
            elsewhere = grid.engines_with(summary, draft, temperature)
            marks[draft] = NOT_THESE if elsewhere else grid.NO_ENGINE
    return marks


def leaderboard_tables(summary: Summary) -> list[Table]:
    """A table for each leaderboard, the verdict's rule first."""
    made = []
    for board in boards(summary):
        title = f"Predicted {board.name}"
        no_root = any(breakeven(row) == fmt.NO_ROOT for row in board.rows)
        shown = {row.draft for row in board.rows}
        looked_up = ", ".join(kind for kind in DRAFTS if kind in shown and looks_up(kind))
        notes = (
            ""
            if board.every_rule
            else f"{'Accepted' if board.own else 'Ranked as if accepted'} as on"
            f" {', '.join(board.engines)}: {board.acceptance}.",
            NO_ROOT_NOTE if no_root else "",
            SPEEDUP_NOTE,
            as_decided(summary, board.temperature) if board.own else "",
            LOOKUP_NOTE.format(looked_up) if looked_up else "",
            *dropped_notes(board.rows),
        )
        draft = Column[LeaderboardRow](
            "draft", lambda row, marks=board.marks: name_of(row, marks), key=True
        )
        columns, best = (RANK, draft, *RANKS), board.best
        made.append(
            table(title, columns, board.rows, best=lambda row, best=best: row is best, notes=notes)
        )
    return made


# ---- every K and threshold -----------------------------------------------------------------------

GRID_NOTE = (
    "By replay and what rounds cost. What the measured one's took beyond that is in all of its"
    " draft; none is corrected for having been chosen."
)


class GridRow(NamedTuple):
    """The speedups of a draft at one threshold, by K."""

    draft: str
    p_min: float
    by_k: Mapping[int, float]


def threshold_tables(summary: Summary) -> list[Table]:
    """Every K and threshold of each draft, by temperature; no rows where drafts end by K alone."""
    several = len(summary.per_temperature) > 1
    return [_thresholds(answer, several) for answer in summary.per_temperature]


def _thresholds(answer: Answer, several_temperatures: bool) -> Table:
    candidates = answer.candidates
    thresholds = grouped(candidates, lambda each: (each.draft, each.p_min or 0.0))
    rows = [
        GridRow(*name, {each.k: each.speedup for each in some})
        for name, some in sorted(thresholds.items())
    ]
    columns: tuple[Column[GridRow], ...] = (
        Column("draft", lambda row: row.draft, key=True),
        Column("p_min", lambda row: row.p_min, fmt.decimal, key=True),
        *columns_by(
            sorted({each.k for each in candidates}),
            "K={}",
            lambda row, k: row.by_k.get(k),
            fmt.speedup,
            definition="speedup",
        ),
    )
    several = any(row.p_min for row in rows)
    at = f" at temperature {fmt.temperature(answer.temperature)}" if several_temperatures else ""
    title = f"Every K and threshold{at}"
    return table(title, columns, rows if several else [], notes=(GRID_NOTE,))


# ---- several targets -----------------------------------------------------------------------------


@dataclass(frozen=True)
class TargetRow:
    """A target with one draft at its best K, or decoding plainly."""

    target: str
    row: LeaderboardRow
    speedup: tuple[float | None, float | None, float | None]  # with its bounds
    plain_s: float | None  # seconds of a token of this target, decoded plainly
    first_s: float | None  # likewise of the first target

    @property
    def token_s(self) -> float | None:
        speedup = self.speedup[0]
        return self.plain_s / speedup if self.plain_s and speedup else None

    @property
    def over_first(self) -> float | None:
        """Its speed over that of the first target, decoded plainly."""
        return self.first_s / self.token_s if self.first_s and self.token_s else None


TARGETS: tuple[Column[TargetRow], ...] = (
    Column("target", lambda row: row.target, key=True),
    Column("draft", lambda row: row.row.draft or "none, plain decoding", key=True),
    Column("best\nK", lambda row: row.row.k or None, fmt.count),
    Column("best\np_min", lambda row: row.row.p_min, fmt.decimal),
    Column("speedup\n[lo, hi]", lambda row: row.speedup, fmt.speedup),
    Column("ms\nper token", lambda row: row.token_s, fmt.in_ms),
    Column("speed / first\ntarget, plain", lambda row: row.over_first, fmt.speedup),
)


def targets_table(summaries: Sequence[Summary]) -> Table:
    """Auditions of several targets: each target with each draft; no rows of other runs."""
    rows: list[TargetRow] = []
    first_s: float | None = None
    for summary in summaries:
        answer = summary.headline
        if answer is None or not summary.leaderboards:
            continue
        first_s = answer.plain_s if first_s is None else first_s
        for row in summary.leaderboards[0].rows:
            named = row.draft is not None and (row.draft, row.k) == answer.named
            named = named and row.p_min == answer.named_p_min
            speedup = fmt.bounded(answer if named else row)
            target = summary.run.model or ""
            rows.append(TargetRow(target, row, speedup, answer.plain_s, first_s))
    several = sum(bool(summary.leaderboards) for summary in summaries) > 1
    return table("Every target with every draft", TARGETS, rows if several else [])


def dropped_notes(rows: Iterable[LeaderboardRow]) -> Iterator[str]:
    """A note on each draft that was dropped (early elimination)."""
    for row in rows:
        if row.dropped is not None:
            names = " and ".join(name or "plain decoding" for name in row.dropped.slower_than)
            yield (
                f"{row.draft}: dropped after {row.dropped.prompts} of {row.dropped.of} prompts,"
                f" significantly slower than {names}; its numbers are of these prompts."
            )


def as_decided(summary: Summary, temperature: float) -> str:
    """A note on what the answer's speedup is after the correction for the choice."""
    own = grid.own_answer(summary, temperature)
    if own is None or own.speedup is None or own.source != "replayed" or not own.speculates:
        return ""
    return CHOICE_NOTE.format(draft=own.named[0], k=grid.k_of(own), speedup=fmt.gain(own))


def prompt_set_table(summary: Summary) -> Table:
    """The answer of each prompt set, where there are too many for columns of the grid."""
    answers = summary.per_prompt_set
    if len({answer.prompt_set for answer in answers}) <= grid.MOST_SETS:
        answers = ()
    too_few = first(answers, reason="too_few_prompts")
    notes = (
        SET_NOTE,
        "" if too_few is None else TOO_FEW_NOTE.format(too_few.reason_values["needed"]),
    )
    shown = summary.headline
    place = f", {grid.at_place(shown)}, {grid.evidence(shown)}" if shown else ""
    columns = SETS if summary.run.command == "audition" else SETS[:-1]  # the cells have the speedup
    return table(f"Each prompt set alone{place}", columns, answers, notes=notes)


def costs_table(summary: Summary) -> Table:
    steps = {step.draft: step for step in summary.steps}
    memory = {entry.draft: entry for entry in summary.memory}
    rows = [
        DraftCosts(draft or "draft", steps.get(draft), memory.get(draft))
        for draft in dict.fromkeys([*summary.drafts, *memory, *steps])
        if draft in steps or draft in memory
    ]
    notes = (
        STEP_NOTE,
        MEMORY_NOTE if any(e.context_tokens_lost is not None for e in memory.values()) else "",
        _token_prices(summary),
    )
    title = "What each draft takes" if len(rows) > 1 else "What the draft takes"
    return table(title, COSTS, rows, notes=notes)


def _token_prices(summary: Summary) -> str:
    if summary.price_per_hour_usd is None or summary.plain_usd_per_million_tokens is None:
        return ""
    return (
        f"10^6 tokens at {fmt.dollars(summary.price_per_hour_usd)} an hour:"
        f" {fmt.dollars(summary.plain_usd_per_million_tokens)} with plain decoding,"
        f" {fmt.dollars(summary.usd_per_million_tokens)} as the verdict says."
    )

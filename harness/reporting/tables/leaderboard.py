"""Which draft to serve: ranked per acceptance rule, judged per prompt set and category.

A leaderboard holds for the engines that accept by its rule, and not speculating is a row of it.
Rules whose rows are alike to the last digit shown (at temperature 0 all are) share one.
"""

from collections.abc import Iterable
from typing import NamedTuple

from harness.records import LOOKUPS, Decision, Failure, Rule
from harness.reporting import formatting as fmt
from harness.reporting import grid
from harness.reporting.sentences.explanation import rule_of_thumb
from harness.reporting.sentences.verdict import RULES
from harness.reporting.tables import stability
from harness.reporting.tables.specification import Column, Table, Value, table
from harness.summary import (
    AcceptanceByPosition,
    CategoryAlpha,
    DraftMemory,
    LeaderboardRow,
    RequestSummary,
    RuleOfThumb,
    StepSummary,
    Summary,
    Unstable,
    Verdict,
)

PLAIN = "do not speculate"
DECISIONS: dict[Decision, str] = {
    "speculate": "speculate",
    "does_not_pay": PLAIN,
    "undecided": "undecided",
}


class Board(NamedTuple):
    """One leaderboard and the rules that it holds for."""

    rules: tuple[Rule, ...]
    every_rule: bool  # whether it holds for every rule that was replayed, of several
    engines: tuple[str, ...]
    temperature: float
    rows: tuple[LeaderboardRow, ...]

    @property
    def name(self) -> str:
        """As "temperature 1, mlx-lm"; "all engines" where they all rank alike."""
        names = ", ".join(grid.ENGINES[rule] for rule in self.rules)
        engines = "all engines" if self.every_rule else names
        return f"temperature {fmt.temperature(self.temperature)}, {engines}"

    @property
    def acceptance(self) -> str:
        """How these engines accept, in words."""
        return "; ".join(RULES[rule] for rule in self.rules)


class DraftCosts(NamedTuple):
    """What one draft takes of time and memory; None where it was not measured."""

    draft: str
    step: StepSummary | None
    memory: DraftMemory | None
    weights_bytes: float | None


def _breakeven(row: LeaderboardRow) -> Value:
    if row.draft in (None, *LOOKUPS) or row.alpha is None:
        return None
    return fmt.NO_ROOT if row.breakeven_alpha is None else row.breakeven_alpha


RANKS: tuple[Column[LeaderboardRow], ...] = (
    Column("rank", lambda row: row.rank, fmt.count, key=True),
    Column("draft", lambda row: row.draft or PLAIN, key=True),
    Column("best\nK", lambda row: row.k, fmt.count),
    Column(
        "speedup\n[lo, hi]", lambda row: (row.speedup, row.speedup_lo, row.speedup_hi), fmt.speedup
    ),
    Column("chance\nto be best", lambda row: row.probability_best, fmt.chance),
    Column("cost per\n10^6 tokens", lambda row: row.usd_per_million_tokens, fmt.dollars),
    Column("alpha\n[lo, hi]", lambda row: (row.alpha, row.alpha_lo, row.alpha_hi), fmt.alpha),
    Column("break-even\nalpha", _breakeven, fmt.alpha),
)
SETS: tuple[Column[Verdict], ...] = (
    Column("prompt set", lambda verdict: verdict.prompt_set, key=True),
    Column("temperature", lambda verdict: verdict.temperature, fmt.temperature, key=True),
    Column("decision", lambda verdict: DECISIONS[verdict.decision]),
    Column("draft", lambda verdict: verdict.draft),
    Column("K", lambda verdict: verdict.k, fmt.count),
    Column(
        "speedup [lo, hi]",
        lambda verdict: (verdict.speedup, verdict.speedup_lo, verdict.speedup_hi),
        fmt.speedup,
    ),
)
COSTS: tuple[Column[DraftCosts], ...] = (
    Column("draft", lambda costs: costs.draft, key=True),
    Column("draft\nstep ms", lambda costs: costs.step and costs.step.draft_step_s, fmt.in_ms),
    Column("target\nstep ms", lambda costs: costs.step and costs.step.target_step_s, fmt.in_ms),
    Column("c", lambda costs: costs.step and costs.step.c, lambda c: fmt.decimal(c, 3)),
    Column("context\ntokens", lambda costs: costs.step and costs.step.context_tokens, fmt.count),
    Column("extra\nmemory", lambda costs: costs.weights_bytes, fmt.memory),
    Column(
        "cache\nper token",
        lambda costs: costs.memory and costs.memory.kv_bytes_per_token,
        fmt.memory,
    ),
    Column(
        "context\ntokens lost",
        lambda costs: costs.memory and costs.memory.context_tokens_lost,
        fmt.count,
    ),
    Column(
        "sequences\nlost", lambda costs: costs.memory and costs.memory.sequences_lost, fmt.count
    ),
    Column("on", lambda costs: costs.memory and costs.memory.device),
)
INELIGIBLE: tuple[Column[Failure], ...] = (
    Column("draft", lambda failure: failure.where, key=True),
    Column("why", lambda failure: failure.error, flexible=True),
)
STEP_ROLES = ("target", "draft")
MET = {True: "yes", False: "no", None: None}
THUMBS: tuple[Column[RuleOfThumb], ...] = (
    Column("rule of thumb", lambda rule: rule_of_thumb(rule).rule, key=True, flexible=True),
    Column("here", lambda rule: rule_of_thumb(rule).value),
    Column("met", lambda rule: MET[rule.met]),
    Column(
        "what the measurement says", lambda rule: rule_of_thumb(rule).measurement, flexible=True
    ),
)

SPEEDUP_NOTE = (
    "speedup: predicted (replayed acceptance and round times), at the K that looks best on these"
    " prompts, so a little flattering. The verdict takes the optimism of choosing off."
)
NO_ROOT_NOTE = "none: even alpha = 1 loses."
LOOKUP_NOTE = (
    "A look-up ({}) has no break-even alpha: most of its rounds find fewer than K tokens to"
    " propose, and cost and emit less, which its speedup takes into account."
)
SET_NOTE = "Each prompt set judged alone: right only for a server that sees nothing else."
STEP_NOTE = (
    "draft step: one draft token; of a look-up all that it proposes at once. c: draft step /"
    " target step."
)
MEMORY_NOTE = (
    "context tokens lost: cached tokens of the target that no longer fit next to the draft;"
    " sequences lost: concurrent ones of a typical length."
)
THUMB_NOTE = (
    "The rules are in circulation (harness/reporting/metrics.md names them). They are shown to be"
    " checked, not obeyed: the verdict rests on the measurement."
)


def boards(summary: Summary) -> list[Board]:
    """The leaderboards rule by rule; those whose rows read alike as one."""
    ranked = [board for board in summary.leaderboards if board.rows]
    rules = list(dict.fromkeys(board.rule for board in ranked))
    alike: dict[object, list[int]] = {}
    for index, board in sorted(enumerate(ranked), key=lambda item: rules.index(item[1].rule)):
        shown = tuple(row.cells for row in table("", RANKS, board.rows).rows)
        alike.setdefault((board.temperature, shown), []).append(index)
    return [
        Board(
            rules=tuple(ranked[index].rule for index in indices),
            every_rule=1 < len(rules) == len(indices),
            engines=tuple(engine for index in indices for engine in ranked[index].engines),
            temperature=ranked[indices[0]].temperature,
            rows=ranked[indices[0]].rows,
        )
        for indices in alike.values()
    ]


def leaderboard_tables(summary: Summary) -> list[Table]:
    """One table per rule and temperature, the verdict's rule first."""
    made = []
    for board in boards(summary):
        title = board.name[0].upper() + board.name[1:]
        notes = [SPEEDUP_NOTE, *_to_serve(summary, board)]
        if any(_breakeven(row) == fmt.NO_ROOT for row in board.rows):
            notes.insert(0, NO_ROOT_NOTE)
        looked_up = [name for name in LOOKUPS if any(row.draft == name for row in board.rows)]
        if looked_up:
            notes.append(LOOKUP_NOTE.format(", ".join(looked_up)))
        how = "" if board.every_rule else f": {board.acceptance}"
        notes.insert(0, f"Holds for {', '.join(board.engines)}{how}.")
        made.append(table(title, RANKS, board.rows, best=lambda row: row.rank == 1, notes=notes))
    return made


def _to_serve(summary: Summary, board: Board) -> list[str]:
    """What the grid of answers says for the same engines."""
    return [
        f"What to serve on these engines is chosen on held-out prompts: {grid.words(answer)},"
        f" {fmt.speedup(answer.speedup, answer.speedup_lo, answer.speedup_hi)}."
        for answer in summary.answers
        if (answer.rule, answer.temperature, answer.prompt_set)
        == (board.rules[0], board.temperature, "all")
    ]


def prompt_set_table(summary: Summary) -> Table:
    """Each prompt set judged alone, and what is safe if traffic shifts between them."""
    notes = [SET_NOTE]
    if summary.least_regret:
        choices = ", ".join(
            (f"{entry.draft or 'the draft'} at K={entry.k}" if entry.k else PLAIN)
            + f" (temperature {fmt.temperature(entry.temperature)})"
            for entry in summary.least_regret
        )
        notes.append(
            "Least regret, the choice that gives away least of the best speedup in any one set"
            f" should traffic shift between them: {choices}."
        )
    return table("Each prompt set alone", SETS, summary.per_prompt_set, notes=notes)


def costs_table(summary: Summary) -> Table:
    """What each draft takes of time and memory, whatever the rule and the temperature."""
    steps = {step.draft: step for step in summary.steps}
    memory = {entry.draft: entry for entry in summary.memory}
    weights = {
        row.draft: row.draft_memory_bytes
        for board in summary.leaderboards
        for row in board.rows
        if row.draft is not None
    }
    weights |= {draft: entry.weights_bytes for draft, entry in memory.items()}
    rows = [
        DraftCosts(draft or "draft", steps.get(draft), memory.get(draft), weights.get(draft))
        for draft in dict.fromkeys([*weights, *steps])
    ]
    notes = [STEP_NOTE, *([MEMORY_NOTE] if memory else ()), *_money(summary), *_seconds(summary)]
    title = "What each draft takes" if len(rows) > 1 else "What the draft takes"
    unstable: Column[DraftCosts] = stability.column(
        lambda costs: _unstable_step(summary, costs.step)
    )
    notes += stability.notes(summary, "step")
    return table(title, (*COSTS, unstable), rows, notes=notes)


def _unstable_step(summary: Summary, step: StepSummary | None) -> Unstable | None:
    """What is wrong with a draft's steps, or with the target's next to them."""
    if step is None:
        return None
    steps = (stability.of_step(summary, r, "step", step.context_tokens, 1) for r in STEP_ROLES)
    return next(filter(None, steps), None)


def ineligible_table(summary: Summary) -> Table:
    """The drafts that cannot be used with this target."""
    return table("Not eligible", INELIGIBLE, summary.ineligible)


def thumb_table(summary: Summary) -> Table:
    """Rules of thumb in circulation, each next to what was measured."""
    return table("Rules of thumb", THUMBS, summary.rules_of_thumb, notes=(THUMB_NOTE,))


def _money(summary: Summary) -> list[str]:
    """What a token costs on the card, where its price is known."""
    if summary.price_per_hour_usd is None or summary.plain_usd_per_million_tokens is None:
        return []
    return [
        f"10^6 tokens at {fmt.dollars(summary.price_per_hour_usd)} an hour:"
        f" {fmt.dollars(summary.plain_usd_per_million_tokens)} with plain decoding,"
        f" {fmt.dollars(summary.usd_per_million_tokens)} as the verdict says."
    ]


def _seconds(summary: Summary) -> list[str]:
    """What an audition's own work took."""
    if summary.generation_s is None or summary.scoring_s is None:
        return []
    return [
        f"The target's completions took {fmt.seconds(summary.generation_s)}, scoring them with all"
        f" drafts {fmt.seconds(summary.scoring_s)}."
    ]


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
LENGTH_NOTE = (
    "Where in an answer, and after how many tokens in all, the draft token was judged. Buckets have"
    " different prompts: a long context is another prompt, too."
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


def length_tables(summary: Summary) -> list[Table]:
    """Alpha by position in the answer and by context length, one table per temperature."""
    made = []
    for temperature, axis in dict.fromkeys((e.temperature, e.axis) for e in summary.length_alpha):
        at_temperature = [e for e in summary.length_alpha if e.temperature == temperature]
        entries = [entry for entry in at_temperature if entry.axis == axis]
        of = "position in the answer" if axis == "answer" else "tokens of context"
        head = "position in\nthe answer" if axis == "answer" else "tokens of\ncontext"
        title = f"Alpha by {of}, temperature {fmt.temperature(temperature)}, K={entries[0].k}"
        columns: tuple[Column[Category], ...] = (
            Column(head, lambda row: row.name, key=True),
            Column("prompts", lambda row: row.prompts, fmt.count, key=True),
            *(_alpha_of(draft) for draft in dict.fromkeys(entry.draft for entry in entries)),
        )
        rows: dict[int, Category] = {}
        for entry in sorted(entries, key=lambda entry: entry.low):
            name = f"{entry.low:,} to {entry.high - 1:,}"
            row = rows.setdefault(entry.low, Category(name, entry.prompts, {}))
            row.alphas[entry.draft] = (entry.alpha, entry.alpha_lo, entry.alpha_hi)
        made.append(table(title, columns, rows.values(), notes=(LENGTH_NOTE,)))
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

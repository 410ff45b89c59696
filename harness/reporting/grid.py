"""The answers as a reader sees them: a row for every temperature and engine.

`Summary.answers` holds an answer for every engine; those whose rounds were not timed share a row
where the same is known of them. One row is marked: that of the headline, `Summary.headline`. Of a
sweep and an audition it is our own loop's at the first temperature, or that of the engine which
`engine=` names; of a server run the server's own, and our own loop's stand below it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from harness import formatting as fmt
from harness.records import RULES, Decision, Rule, Source, first, grouped, where
from harness.serving.drafts import UNKNOWN, kind_of
from harness.serving.engines import OWN, drafts_alike, spec_of, with_lines
from harness.summary import Answer, RoundTokens, ServedSummary, Summary

MOST_SETS = 4  # prompt sets that get a column of the grid
DECISIONS: Mapping[Decision, str] = {
    "speculate": "speculate",
    "does_not_pay": "do not speculate",
    "undecided": "undecided",
    "not_measured": "not measured",
}
MARK = "*"  # of the marked row and of its serving line
SOURCES: Mapping[Source, str] = {
    "measured": "measured",
    "replayed": "predicted",
    "theory": "predicted",
}
GIVEN = "the given times"  # what has times that were given
NO_ENGINE = "harness's loop only"  # of a draft that no engine has


@dataclass(frozen=True)
class GridRow:
    """One temperature on engines of which the same is known."""

    temperature: float
    servers: tuple[str | None, ...]  # engines, in their order; None: what has the given times
    answer: Answer  # of the whole workload, the first engine's
    sets: tuple[Answer, ...]  # of each prompt set alone; none of engines that were not timed
    every: bool  # whether it holds of every engine whose rounds were not timed
    adaptive: bool  # whether drafting stopped early
    same_draft: bool  # whether its draft is the only one, or that of the first row, which names it
    no_engine: bool  # whether it is of our own loop, and no engine has its draft

    @property
    def engines(self) -> str:
        """The engines in words."""
        if self.every:
            return "any other engine"
        named = [name for name in self.servers if name is not None]
        names = names_of(named) if named else GIVEN
        return f"{names}, adaptive" if self.adaptive else names

    @property
    def serve(self) -> str:
        """What to serve, or when; a draft that no engine has is marked."""
        text = words_of_row(self.answer, name_draft=not self.same_draft)
        return f"{text} ({NO_ENGINE})" if self.no_engine else text


def evidence(answer: Answer) -> str:
    """How an answer is known: of an engine that was not timed never "measured"."""
    return SOURCES[answer.source] if answer.timed else DECISIONS["not_measured"]


def names_of(servers: Collection[str]) -> str:
    """Engines in words.

    A variant is left out next to its engine, and next to another that accepts alike.
    """
    named = [spec_of(name) for name in servers]
    accepts_alike = {spec.rule for spec in named if spec.variant_of is None}
    shown = (
        spec.in_rows
        for spec in named
        if spec.variant_of not in servers
        and (spec.variant_of is None or spec.rule not in accepts_alike)
    )
    return ", ".join(shown)


def left_out(servers: Collection[str | None]) -> tuple[str, ...]:
    """Of each variant that stands for itself there, that it accepts as another engine does."""
    named = [spec for name, spec in with_lines().items() if name in servers]
    return tuple(
        f"{spec.in_headlines} accepts as {other.title} does."
        for spec in named
        if spec.variant_of is not None and spec.variant_of not in servers
        for other in named
        if other.variant_of is None and other.rule == spec.rule
    )


def unknown_above_zero(rows: Iterable[GridRow]) -> tuple[str, ...]:
    """Of which builds of engines that were not timed nothing is known, as a sentence."""
    sampled = [row.servers for row in rows if row.temperature and not row.answer.timed]
    named = [spec_of(name) for servers in sampled for name in servers if name is not None]
    places = dict.fromkeys(spec.unknown_above_zero for spec in named)
    said = " and ".join(filter(None, places))
    return (f"Above temperature 0 nothing is known of {said}.",) if said else ()


def engines_by_rule() -> dict[Rule, str]:
    """Of the rules, the engines that accept by them; the first engine's rule first.

    By default, where one does: variants are named of a rule that no engine has by default.
    """
    every, names = with_lines().values(), dict[Rule, str]()
    rules: list[Rule] = [spec.rule for spec in every if spec.rule is not None]
    for rule in rules:
        specs = [spec for spec in every if spec.rule == rule]
        by_default = [spec.title for spec in specs if spec.variant_of is None]
        names[rule] = ", ".join(by_default or [spec.in_rows for spec in specs])
    return names


@dataclass(frozen=True)
class Marked:
    """The headline's answer, and its row."""

    row: GridRow
    answer: Answer

    @property
    def phrase(self) -> str:
        """As "vLLM with its defaults at temperature 0"."""
        engine = self.answer.engine
        name = GIVEN if engine is None else spec_of(engine).in_headlines
        return f"{name} at temperature {fmt.temperature(self.row.temperature)}"


def engines_with(
    summary: Summary, draft: str, temperature: float, rules: Collection[Rule] = RULES
) -> tuple[str, ...] | None:
    """The engines that draft as a run's draft does, of those that accept by these rules.

    None where it is not known what the draft is.
    """
    kind = kind_of(draft, summary.run.models)
    if kind == UNKNOWN:
        return None
    by_rule = (name for name, spec in with_lines().items() if spec.rule in rules)
    return tuple(name for name in by_rule if drafts_alike(name, kind, temperature))


def rows(summary: Summary) -> Iterator[GridRow]:
    """Every row, temperatures and engines as the answers have them."""
    shown: set[str | None] = {*summary.drafts} if len(summary.drafts) == 1 else set()
    for temperature, answers in grouped(summary.answers, lambda each: each.temperature).items():
        if temperature is None:
            continue
        by_engine = grouped(answers, lambda answer: answer.engine)
        # Engines that were not timed share a row where the same is known of the whole workload
        alike: dict[tuple[str | None, str], list[str | None]] = {}
        for engine, (answer, *_) in by_engine.items():
            of_one = engine if answer.timed else None
            alike.setdefault((of_one, words_of_row(answer)), []).append(engine)
        untimed = {answer.engine for answer in answers if not answer.timed}
        for engines in alike.values():
            group = by_engine[engines[0]]
            named = group[0].named[0]
            yield GridRow(
                temperature,
                tuple(engines),
                group[0],
                tuple(group[1:]) if group[0].timed else (),
                every=untimed == set(engines) == set(with_lines()),
                adaptive=summary.run.sampling.stop_threshold is not None
                and any(answer.rule == summary.run.sampling.rule for answer in group),
                same_draft=named in shown,
                no_engine=group[0].engine in (None, OWN.name)
                and group[0].decision in ("speculate", "undecided")
                and named is not None
                and engines_with(summary, named, temperature) == (),
            )
            shown = shown or {named}


def marked(summary: Summary) -> Marked | None:
    """The row to read first; None where nothing is known of the engine that was asked for."""
    answer = summary.headline
    if answer is None or answer.temperature is None:
        return None
    at = where(rows(summary), temperature=answer.temperature)
    return Marked(next(row for row in at if answer.engine in row.servers), answer)


def words(answer: Answer) -> str:
    """What to serve, in a cell: "small, K=4", "no draft", "undecided" or "not measured"."""
    if answer.speculates:
        return f"{answer.draft}, K={answer.k}"
    return "no draft" if answer.decision == "does_not_pay" else DECISIONS[answer.decision]


def words_of_row(answer: Answer, *, name_draft: bool = True) -> str:
    """What to serve, in a row: with the draft and K that its number is of, where not to serve.

    Of an engine that was not timed the cost of a round below which K pays, the lower bound of what
    a round emits: "K=4 if cost < 2.87".
    """
    draft, k = answer.named
    named = f"K={k}" if draft is None or not name_draft else f"{draft}, K={k}"
    if answer.decision == "not_measured":
        limit = answer.round and fmt.decimal(answer.round.pays_below)
        return fmt.EMPTY if limit is None else f"{named} if cost < {limit}"
    unserved = not answer.speculates and k and answer.speedup is not None
    return f"{words(answer)} ({named})" if unserved else words(answer)


def at_place(answer: Answer) -> str:
    """Where an answer holds: "on the harness's loop", or "at the given times"."""
    return f"at {GIVEN}" if answer.engine is None else f"on {spec_of(answer.engine).title}"


def timed_place(summary: Summary) -> str:
    """Where the rounds ran that a report's speedups are of."""
    timed = first(summary.answers, timed=True)
    if timed is not None:
        return at_place(timed)
    served = summary.served
    return f"on {OWN.title if served is None else spec_of(served.engine).title}"


def timed_by(served: ServedSummary | None) -> str:
    """What titles say of the clock of a server's times, where that is no clock on the wall."""
    return ", by processor time" if served is not None and served.clock == "cpu" else ""


def own_cost(emitted: RoundTokens) -> str:
    """What a round costs on the harness's loop, in brackets; "" where that is not known.

    Or at the times that were given.
    """
    if emitted.own_cost is None:
        return ""
    how = ", interpolated" if emitted.interpolated else ""
    place = GIVEN if emitted.given else "the harness"
    return f" ({place}: {fmt.decimal(emitted.own_cost)}{how})"


def own_answer(summary: Summary, temperature: float) -> Answer | None:
    """What was decided besides a server's own answer, on the whole workload.

    That of our own loop, at the times that were given, or of the engine whose costs were.
    """
    at = where(summary.answers, temperature=temperature, prompt_set="all", timed=True)
    served = summary.served.engine if summary.served else None
    return first(answer for answer in at if served is None or answer.engine != served)

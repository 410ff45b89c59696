"""The grid of answers: a row for every temperature and engine.

`Summary.answers` holds an answer for every engine. Engines whose rounds were not timed share a row
where their answers are the same. The row of `Summary.headline` is marked. In a sweep and an
audition that is the harness's loop at the first temperature, or the engine that `engine=` names; in
a server run it is the server.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from harness import formatting as fmt
from harness.engine_facts.draft_kinds import UNKNOWN, kind_of
from harness.engine_facts.engines import OWN, drafts_alike, spec_of, with_lines
from harness.records import RULES, Decision, Rule, Source, first, grouped
from harness.summary import Answer, Caveat, RoundTokens, ServedSummary, Summary

MOST_SETS = 4  # prompt sets that get a column of the grid
DECISIONS: Mapping[Decision, str] = {
    "speculate": "speculate",
    "does_not_pay": "do not speculate",
    "undecided": "undecided",
    "not_measured": "not measured",
}
MARK = "*"  # in front of the marked row and of its serving command
SOURCES: Mapping[Source, str] = {
    "measured": "measured",
    "replayed": "predicted",
    "theory": "predicted",
}
GIVEN = "the given times"  # in place of an engine, where times were given
NO_ENGINE = "harness's loop only"  # a draft that no engine has


@dataclass(frozen=True)
class GridRow:
    """One temperature, and the engines that have the same answer at it."""

    temperature: float
    servers: tuple[str | None, ...]  # engines in their order; None: the times were given
    answer: Answer  # of the first engine, on the whole workload
    sets: tuple[Answer, ...]  # on each prompt set alone; empty for engines that were not timed
    every: bool  # whether the row holds for every engine whose rounds were not timed
    same_draft: bool  # whether an earlier row names the draft, or the run has one draft only
    no_engine: bool  # whether the answer is of the harness's loop, and no engine has the draft
    marked: bool  # whether it is the headline's
    minor: bool  # engines that were not timed, at another temperature than the headline's

    @property
    def at(self) -> str:
        return f"{MARK if self.marked else ' '} {fmt.temperature(self.temperature)}"

    @property
    def engines(self) -> str:
        if self.every:
            return "any other engine"
        named = [name for name in self.servers if name is not None]
        return names_of(named) if named else GIVEN

    @property
    def serve(self) -> str:
        """The draft and K to serve, or the decision; marked where no engine has the draft."""
        text = words_of_row(self.answer, name_draft=not self.same_draft)
        return f"{text} ({NO_ENGINE})" if self.no_engine else text


def evidence(answer: Answer) -> str:
    """The kind of evidence of an answer: "measured", "predicted" or "not measured"."""
    return SOURCES[answer.source] if answer.timed else DECISIONS["not_measured"]


def names_of(servers: Collection[str]) -> str:
    """The names of engines.

    A variant is left out next to its engine, and next to an engine that accepts by the same rule.
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
    """A sentence for each variant without its engine: which other engine accepts as it does."""
    named = [spec for name, spec in with_lines().items() if name in servers]
    return tuple(
        f"{spec.in_headlines} accepts as {other.title} does."
        for spec in named
        if spec.variant_of is not None and spec.variant_of not in servers
        for other in named
        if other.variant_of is None and other.rule == spec.rule
    )


def unknown_above_zero(rows: Iterable[GridRow]) -> tuple[str, ...]:
    """A sentence on the builds of engines whose acceptance above temperature 0 is not known."""
    sampled = [row.servers for row in rows if row.temperature and not row.answer.timed]
    named = [spec_of(name) for servers in sampled for name in servers if name is not None]
    places = dict.fromkeys(spec.unknown_above_zero for spec in named)
    builds = " and ".join(filter(None, places))
    return (f"Above temperature 0 nothing is known of {builds}.",) if builds else ()


def engines_by_rule() -> dict[Rule, str]:
    """The engines that accept by each rule, as text; the first engine's rule first.

    Variants are named only for a rule that no engine has by default.
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
    """The answer of the headline, and its row."""

    row: GridRow
    answer: Answer

    @property
    def phrase(self) -> str:
        """Engine and temperature, as "vLLM with its defaults at temperature 0"."""
        engine = self.answer.engine
        name = GIVEN if engine is None else spec_of(engine).in_headlines
        return f"{name} at temperature {fmt.temperature(self.row.temperature)}"


def engines_with(
    summary: Summary, draft: str, temperature: float, rules: Collection[Rule] = RULES
) -> tuple[str, ...] | None:
    """The engines that have the run's draft and accept by one of these rules.

    None where the kind of the draft is not known.
    """
    kind = kind_of(draft, summary.run.models)
    if kind == UNKNOWN:
        return None
    by_rule = (name for name, spec in with_lines().items() if spec.rule in rules)
    return tuple(name for name in by_rule if drafts_alike(name, kind, temperature))


def rows(summary: Summary) -> Iterator[GridRow]:
    """The rows of the grid, in the order of the answers."""
    shown: set[str | None] = {*summary.drafts} if len(summary.drafts) == 1 else set()
    headline = summary.headline
    at = headline and headline.temperature
    for temperature, answers in grouped(summary.answers, lambda each: each.temperature).items():
        if temperature is None:
            continue
        by_engine = grouped(answers, lambda answer: answer.engine)
        # Engines that were not timed share a row where their answers on the workload are the same
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
                same_draft=named in shown,
                no_engine=group[0].engine in (None, OWN.name)
                and group[0].decision in ("speculate", "undecided")
                and named is not None
                and engines_with(summary, named, temperature) == (),
                marked=headline is not None and at == temperature and headline.engine in engines,
                minor=at not in (None, temperature) and not group[0].timed,
            )
            shown = shown or {named}


def marked(summary: Summary) -> Marked | None:
    """The row of the headline; None where the engine that was asked for has no answer."""
    answer, row = summary.headline, first(rows(summary), marked=True)
    return None if answer is None or row is None else Marked(row, answer)


def words(answer: Answer) -> str:
    """The answer in a table cell: "small, K=4", "no draft", "undecided" or "not measured"."""
    if answer.speculates:
        return f"{answer.draft}, {k_of(answer)}"
    return "no draft" if answer.decision == "does_not_pay" else DECISIONS[answer.decision]


def words_of_row(answer: Answer, *, name_draft: bool = True) -> str:
    """The answer in a row of the grid.

    Where nothing is to be served, the draft and K of the row's speedup follow in brackets. For an
    engine that was not timed it is the cost of a round below which K pays (the lower bound of the
    tokens per round): "K=4 if round < 2.87 tokens".
    """
    draft, k = answer.named
    named = k_of(answer) if draft is None or not name_draft else f"{draft}, {k_of(answer)}"
    if answer.decision == "not_measured":
        limit = answer.round and fmt.decimal(answer.round.pays_below)
        return fmt.EMPTY if limit is None else f"{named} if round < {limit} tokens"
    unserved = not answer.speculates and k and answer.speedup is not None
    return f"{words(answer)} ({named})" if unserved else words(answer)


def k_of(answer: Answer) -> str:
    """The K that an answer names, with its threshold: "K=4", or "K=8, p_min=0.5"."""
    k, p_min = answer.named[1], answer.named_p_min
    return f"K={k}" if p_min is None else f"K={k}, p_min={p_min:g}"


def at_place(answer: Answer) -> str:
    """The engine of an answer: "on the harness's loop", or "at the given times"."""
    return f"at {GIVEN}" if answer.engine is None else f"on {spec_of(answer.engine).title}"


def timed_place(summary: Summary) -> str:
    """The engine whose rounds were timed, as "on vLLM"."""
    timed = first(summary.answers, timed=True)
    if timed is not None:
        return at_place(timed)
    served = summary.served
    return f"on {OWN.title if served is None else spec_of(served.engine).title}"


def timed_by(served: ServedSummary | None) -> str:
    """The ending of titles where a server's times are processor time; else ""."""
    return ", by processor time" if served is not None and served.clock == "cpu" else ""


def cost_that_pays(emitted: RoundTokens) -> str:
    """The cost of a round below which it pays, and that of the engine that was timed.

    "pays if drafting and checking 2 tokens takes less time than 2.30 ordinary tokens (here 1.65)"
    """
    return (
        f"pays if drafting and checking {fmt.number_of(emitted.k, 'token', 'tokens')} takes less"
        f" time than {fmt.decimal(emitted.pays_below)} ordinary tokens{_own_cost(emitted)}"
    )


def _own_cost(emitted: RoundTokens) -> str:
    """The cost of a round on the engine that was timed, or at the given times, in brackets.

    Empty where it is not known.
    """
    if emitted.own_cost is None:
        return ""
    how = ", interpolated" if emitted.interpolated else ""
    place = f"at {GIVEN}" if emitted.given else "here"
    return f" ({place} {fmt.decimal(emitted.own_cost)}{how})"


def larger_to_try(summary: Summary) -> Caveat | None:
    """The caveat that the K to serve is the largest tried; None where another choice is as good."""
    caveat, shown = first(summary.caveats, code="k_at_edge"), marked(summary)
    if caveat is None or shown is None or not shown.answer.speculates:
        return None
    answer, values = shown.answer, caveat.values
    named = {"draft": answer.named[0], "k": answer.named[1], "temperature": answer.temperature}
    at_edge = named.items() <= values.items()
    return caveat if at_edge and not any(each.tied for each in answer.candidates) else None


def own_answer(summary: Summary, temperature: float) -> Answer | None:
    """The answer on the whole workload of the engine that was timed, or at the given times."""
    return first(summary.answers, temperature=temperature, prompt_set="all", timed=True)

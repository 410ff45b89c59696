"""The grid of answers as a reader sees it: temperature x engines that accept alike.

`Summary.answers` holds one answer per temperature, acceptance rule and prompt set, or several where
servers of a rule have different drafts; servers with one answer share a row here. One row is
marked: the headline and the serving line are its. It is the first temperature that speculates on
the server that `engine=` names; without that key on vLLM with its defaults, and where nothing does
there, the first row that speculates at all.

Of a server run the marked row is the server's own, and our own loop's stand below it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from harness.records import Decision, Rule, Source, grouped, where
from harness.reporting import formatting as fmt
from harness.serving.engines import ENGINES, OWN, spec_of, with_lines
from harness.summary import (
    Answer,
    SamplingFacts,
    ServedSummary,
    Summary,
    UserLatency,
    Value,
    Verdict,
    VerdictReason,
)

# Those whose reports say what to serve
DECIDING_COMMANDS = frozenset({"sweep", "audition", "server"})
DECISIONS: Mapping[Decision, str] = {
    "speculate": "speculate",
    "does_not_pay": "do not speculate",
    "undecided": "undecided",
}
# Of the marked row and of its serving line
MARK = "*"
SOURCES = {"measured": "measured", "replayed": "predicted", "theory": "predicted"}


@dataclass(frozen=True)
class GridRow:
    """One temperature on engines with one answer."""

    temperature: float
    rules: tuple[Rule | None, ...]
    servers: tuple[str, ...]  # engines, in their order; none of a server run, or of our own loop
    answer: Answer  # of the whole workload
    sets: tuple[Answer, ...]  # of each prompt set alone
    every: bool  # whether it holds on every engine
    adaptive: bool  # whether drafting stopped early
    served: str | None = None  # the engine, of a server run

    @property
    def engines(self) -> str:
        """The engines in words."""
        if self.served is not None:
            return spec_of(self.served).title
        if self.every:
            return "all engines"
        names = names_of(self.servers)
        return f"{names}, adaptive" if self.adaptive else names

    @property
    def where(self) -> str:
        """Temperature and engines, as a sentence starts with them."""
        return f"temperature {fmt.temperature(self.temperature)}, {self.engines}"

    @property
    def speculates(self) -> bool:
        """Whether a draft is to be served."""
        return self.answer.decision == "speculate"


def names_of(servers: Collection[str]) -> str:
    """Engines in words.

    A variant is left out next to its engine, and next to another that accepts alike.
    """
    named = [spec for name, spec in with_lines().items() if name in servers]
    accepts_alike = {spec.rule for spec in named if spec.variant_of is None}
    shown = (
        spec.in_rows
        for spec in named
        if spec.variant_of not in servers
        and (spec.variant_of is None or spec.rule not in accepts_alike)
    )
    return ", ".join(shown) or OWN.title


def left_out(servers: Collection[str]) -> tuple[str, ...]:
    """Of each variant that stands for itself there, that it accepts as another engine does."""
    named = [spec for name, spec in with_lines().items() if name in servers]
    return tuple(
        f"{spec.in_headlines} accepts as {other.title} does."
        for spec in named
        if spec.variant_of is not None and spec.variant_of not in servers
        for other in named
        if other.variant_of is None and other.rule == spec.rule
    )


def engines_by_rule() -> dict[Rule, str]:
    """Of the rules, the engines that accept by them by default; the first engine's rule first."""
    names: dict[Rule, list[str]] = {}
    for spec in with_lines().values():
        if spec.rule is not None:
            names.setdefault(spec.rule, []).extend([] if spec.variant_of else [spec.title])
    return {rule: ", ".join(titles) for rule, titles in names.items()}


@dataclass(frozen=True)
class Marked:
    """The row whose headline and serving line are shown, and the server that they are for."""

    row: GridRow
    server: str  # an engine; of a server run the one that was measured

    @property
    def phrase(self) -> str:
        """As "vLLM with its defaults at temperature 0"."""
        spec = spec_of(self.row.served or self.server)
        name = spec.in_headlines if self.row.served is None else spec.title
        return f"{name} at temperature {fmt.temperature(self.row.temperature)}"


def rows(summary: Summary, *, alone: bool = True) -> tuple[GridRow, ...]:
    """Every row, temperatures as listed, vLLM's default first.

    Servers share a row where it shows the same of each, of prompt sets `alone` too.
    """
    if summary.served is not None:
        return tuple(_served_rows(summary))
    sampling = summary.run.sampling
    made: list[GridRow] = []
    for temperature, answers in grouped(summary.answers, lambda answer: answer.temperature).items():
        alike: dict[tuple[_Shown, ...], list[Answer]] = {}
        by_question = grouped(answers, lambda answer: (answer.servers, answer.rule))
        for _, group in sorted(by_question.items(), key=lambda item: _place(*item[0])):
            compared = group if alone else where(group, prompt_set="all")
            shown = tuple(map(_shown, compared))
            alike.setdefault(shown, []).extend(group)
        made += [_row(temperature, group, sampling) for group in alike.values()]
    return tuple(made)


class _Shown(NamedTuple):
    prompt_set: str
    decision: Decision
    draft: Value
    k: Value
    gain: tuple[float | None, ...]
    source: Source | None = None
    reason: VerdictReason | None = None


def _shown(answer: Answer) -> _Shown:
    """What a row shows of an answer: engines with the same share it."""
    gain = tuple(value and round(value, 2) for value in fmt.bounded(answer))
    pays, alone = answer.decision == "speculate", answer.prompt_set != "all"
    draft, k = (answer.draft, answer.k) if pays else (None, None)
    if alone:
        return _Shown(answer.prompt_set, answer.decision, draft, k, gain[:1] if pays else ())
    if answer.decision == "undecided":
        draft, k = (answer.reason_values.get(name) for name in ("draft", "k"))
    return _Shown("all", answer.decision, draft, k, gain, answer.source, answer.reason)


def _place(servers: tuple[str, ...], rule: Rule | None) -> tuple[int, int]:
    """The place of a row: by its first server, and our own loop last."""
    first = min(map([*ENGINES].index, servers), default=len(ENGINES))
    return first, [*engines_by_rule(), None].index(rule)


def _served_rows(summary: Summary) -> Iterator[GridRow]:
    """The server's row of each temperature, then our own loop's where it is known."""
    for temperature, answers in grouped(summary.answers, lambda answer: answer.temperature).items():
        for engine, group in grouped(answers, lambda answer: answer.engine).items():
            row = _row(temperature, group, summary.run.sampling)
            yield replace(row, every=False, served=engine)


def _row(temperature: float, answers: Sequence[Answer], sampling: SamplingFacts) -> GridRow:
    by_rule: dict[Rule | None, list[Answer]] = grouped(answers, lambda answer: answer.rule)
    first, *_ = by_rule.values()
    servers = {server for answer in answers for server in answer.servers}
    return GridRow(
        temperature,
        tuple(by_rule),
        tuple(server for server in with_lines() if server in servers),
        next(answer for answer in first if answer.prompt_set == "all"),
        tuple(answer for answer in first if answer.prompt_set != "all"),
        every=servers == set(with_lines()),
        adaptive=sampling.stop_threshold is not None and sampling.rule in by_rule,
    )


def marked(summary: Summary) -> Marked | None:
    """The row to read first; None where nothing was decided for the server that was asked for."""
    made = rows(summary)
    if summary.served is not None:
        own = [row for row in made if row.served == summary.served.engine]
        best = [*(row for row in own if row.speculates), *own]
        return Marked(best[0], summary.served.engine) if best else None
    asked = summary.run.serve_on
    server = asked or next(iter(with_lines()))
    for_server = [row for row in made if server in row.servers]
    serving = [row for row in for_server if row.speculates]
    if serving or asked:
        return next((Marked(row, server) for row in (*serving, *for_server)), None)
    others = [row for row in made if row.speculates]
    return next(
        (Marked(row, (*row.servers, OWN.name)[0]) for row in (*others, *for_server, *made)), None
    )


def k_of(answer: Answer) -> int:
    """The K to serve; where there is none, the one that the answer's numbers are of; else 0."""
    k = answer.k or answer.reason_values.get("k")
    return k if isinstance(k, int) else 0


def latencies(served: ServedSummary, answer: Answer) -> tuple[UserLatency, ...]:
    """What users wait for outside of a load: with plain decoding, and at an answer's K."""
    rows = where(served.latencies, load=False, temperature=answer.temperature)
    return tuple(row for row in rows if row.k in (0, k_of(answer)))


def words(answer: Answer) -> str:
    """What to serve, in a cell: "small, K=4", "no draft" or "undecided"."""
    if answer.decision == "speculate":
        return f"{answer.draft}, K={answer.k}"
    return "no draft" if answer.decision == "does_not_pay" else "undecided"


def words_of_set(answer: Answer) -> str:
    """What to serve to one prompt set, with the speedup where a draft pays."""
    gain = f": {fmt.speedup(answer.speedup)}" if answer.decision == "speculate" else ""
    return f"{words(answer)}{gain}"


def words_of_row(answer: Answer) -> str:
    """The same, with the draft and K that an undecided answer's number is of."""
    draft, k = (answer.reason_values.get(name) for name in ("draft", "k"))
    if answer.decision != "undecided" or k is None:
        return words(answer)
    return f"undecided ({'' if draft is None else f'{draft}, '}K={k})"


def decided(summary: Summary) -> Answer | Verdict | None:
    """The decision that a report leads with: the marked row's, or of numbers that were given.

    None where nothing is known for the server that was asked for.
    """
    shown = marked(summary)
    if shown is None:
        return None if summary.answers else summary.verdict
    return shown.row.answer


def rule_of(summary: Summary) -> Rule | None:
    """The acceptance rule of the server that was measured or asked for, else the run's own."""
    if summary.served is not None:
        return summary.served.rule
    asked = summary.run.serve_on
    return spec_of(asked).rule if asked else summary.run.sampling.rule

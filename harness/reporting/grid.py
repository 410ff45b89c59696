"""The grid of answers as a reader sees it: temperature x engines that accept alike.

`Summary.answers` holds one answer per temperature, acceptance rule and prompt set; rules with one
answer share a row here. One row is marked: the headline and the serving line are its. It is the
first temperature that speculates on the server that `engine=` names; without that key on vLLM with
its defaults, and where nothing does there, the first row that speculates at all.

Of a server run the marked row is the server's own, and our own loop's stand below it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from harness.records import SERVERS, Decision, Rule, grouped, where
from harness.reporting import formatting as fmt
from harness.summary import Answer, SamplingFacts, Summary, Verdict

# Those whose reports say what to serve
DECIDING_COMMANDS = frozenset({"sweep", "audition", "server"})
DECISIONS: Mapping[Decision, str] = {
    "speculate": "speculate",
    "does_not_pay": "do not speculate",
    "undecided": "undecided",
}
DEFAULT_SERVER = "vllm"
# Of the marked row and of its serving line
MARK = "*"
# Of the rules, the engines that accept by them; vLLM's default first
ENGINES: dict[Rule, str] = {
    "greedy_draft": "vLLM, SGLang, llama.cpp",
    "ratio": "transformers",
    "exact_match": "mlx-lm",
}
PHRASES = {
    "vllm": "vLLM with its defaults",
    "vllm_probabilistic": "vLLM with draft_sample_method=probabilistic",
    "sglang": "SGLang",
    "llamacpp": "llama.cpp",
    "mlx": "mlx-lm",
    "transformers": "transformers",
}
PROBABILISTIC = "vLLM with draft_sample_method=probabilistic accepts as transformers does."
SOURCES = {"measured": "measured", "replayed": "predicted", "theory": "predicted"}
# What a server run can measure, and what else its answers are of
SERVED: Mapping[str, str] = {
    "own": "our own loop",
    "llamacpp": "llama.cpp",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "mlx": "mlx-lm",
    "openai": "OpenAI-compatible server",
}


@dataclass(frozen=True)
class GridRow:
    """One temperature on engines with one answer."""

    temperature: float
    rules: tuple[Rule | None, ...]
    answer: Answer  # of the whole workload
    sets: tuple[Answer, ...]  # of each prompt set alone
    every: bool  # whether it holds on every engine
    adaptive: bool  # whether drafting stopped early
    served: str | None = None  # the engine, of a server run

    @property
    def engines(self) -> str:
        """The engines in words."""
        if self.served is not None:
            return SERVED[self.served]
        if self.every:
            return "all engines"
        names = ", ".join(name for rule, name in ENGINES.items() if rule in self.rules)
        if not self.adaptive:
            return names
        return f"{names if self.rules == ('ratio',) else 'own loop'}, adaptive"

    @property
    def where(self) -> str:
        """Temperature and engines, as a sentence starts with them."""
        return f"temperature {fmt.temperature(self.temperature)}, {self.engines}"

    @property
    def speculates(self) -> bool:
        """Whether a draft is to be served."""
        return self.answer.decision == "speculate"


@dataclass(frozen=True)
class Marked:
    """The row whose headline and serving line are shown, and the server that they are for."""

    row: GridRow
    server: str  # a key of SERVERS; of a server run one of SERVED

    @property
    def phrase(self) -> str:
        """As "vLLM with its defaults at temperature 0"."""
        name = PHRASES[self.server] if self.row.served is None else SERVED[self.row.served]
        return f"{name} at temperature {fmt.temperature(self.row.temperature)}"


def rows(summary: Summary) -> tuple[GridRow, ...]:
    """Every row, temperatures as listed, vLLM's default first."""
    if summary.served is not None:
        return tuple(_served_rows(summary))
    sampling = summary.run.sampling
    made: list[GridRow] = []
    for temperature, answers in grouped(summary.answers, lambda answer: answer.temperature).items():
        alike: dict[str, list[Answer]] = {}
        for of_rule in (where(answers, rule=rule) for rule in ENGINES):
            if of_rule:
                shown = repr([replace(answer, rule="ratio") for answer in of_rule])
                alike.setdefault(shown, []).extend(of_rule)
        made += [_row(temperature, group, sampling) for group in alike.values()]
    return tuple(made)


def _served_rows(summary: Summary) -> Iterator[GridRow]:
    """The server's row of each temperature, then our own loop's where it is known."""
    for temperature, answers in grouped(summary.answers, lambda answer: answer.temperature).items():
        for engine, group in grouped(answers, lambda answer: answer.engine).items():
            row = _row(temperature, group, summary.run.sampling)
            yield replace(row, every=False, served=engine)


def _row(temperature: float, answers: Sequence[Answer], sampling: SamplingFacts) -> GridRow:
    by_rule: dict[Rule | None, list[Answer]] = grouped(answers, lambda answer: answer.rule)
    first, *_ = by_rule.values()
    return GridRow(
        temperature,
        tuple(by_rule),
        next(answer for answer in first if answer.prompt_set == "all"),
        tuple(answer for answer in first if answer.prompt_set != "all"),
        every=set(by_rule) == set(ENGINES),
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
    server = asked or DEFAULT_SERVER
    for_server = [row for row in made if SERVERS[server] in row.rules]
    serving = [row for row in for_server if row.speculates]
    if serving or asked:
        return next((Marked(row, server) for row in (*serving, *for_server)), None)
    others = [row for row in made if row.speculates]
    return next((Marked(row, _server(row)) for row in (*others, *for_server, *made)), None)


def _server(row: GridRow) -> str:
    """The first server that accepts so; only transformers can stop drafting early."""
    if row.adaptive and "ratio" in row.rules:
        return "transformers"
    return next(server for server, rule in SERVERS.items() if rule in row.rules)


def words(answer: Answer) -> str:
    """What to serve, in a cell: "small, K=4", "no draft" or "undecided"."""
    if answer.decision == "speculate":
        return f"{answer.draft}, K={answer.k}"
    return "no draft" if answer.decision == "does_not_pay" else "undecided"


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
    return SERVERS[asked] if asked else summary.run.sampling.rule

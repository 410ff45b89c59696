"""The grid of answers: what to serve at every temperature, under every acceptance rule.

The engine that will serve decides how drafts are accepted, so one pair has up to three answers at a
temperature. Under the run's own rule the verdict rests on what the run measured; under another on
replay, chosen and scored on held-out prompts in the same way. Where the rules coincide (at
temperature 0, for a draft that is a look-up, under synthetic acceptance) one verdict serves all.
A server without the draft that looks best is given a verdict on the drafts that it has.

Every decision that a report shows is one of these, and all of them share one error budget.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from harness.analysis.verdict import ErrorBudget, Evidence, decide
from harness.records import GREEDY, RULES, Rule, Source
from harness.serving.engines import ENGINES, OWN, with_lines
from harness.summary import Answer, Doubt, Verdict, Visits

# What an answer says of its verdict
OF_VERDICT = {field.name for field in fields(Answer)} & {field.name for field in fields(Verdict)}


@dataclass(frozen=True, eq=False)
class Question:
    """The evidence at one temperature, and the acceptance rules that it holds for."""

    evidence: Evidence
    rules: tuple[Rule | None, ...]  # None: of a server that does not say
    source: Source  # "measured" or "replayed"
    engine: str = OWN.name  # which it is of; our own loop, or a server
    servers: tuple[str, ...] = ()  # the engines that it is for

    # By prompt set, and "all": the drafts to choose from; every draft where there is no entry
    drafts: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    # Of a server's K that lack some of the visits asked for
    visits: Mapping[int, Visits] = field(default_factory=dict[int, Visits])

    def by_servers(
        self, alike: Callable[[str, str], bool], weights: Mapping[str, float] | None
    ) -> "Iterator[Question]":
        """One question for each group of servers that choose from the same drafts.

        A server that has the draft that looks best chooses from all of them, another from those
        that it has. Where no server has any of the drafts, it is our own loop's question alone.

        Args:
            alike: whether a server's drafts of a name are those of the run.
            weights: of the prompt sets.
        """
        names = frozenset(candidate.draft for candidate in self.evidence.candidates)
        best = self.evidence.best_looking(weights)
        by_drafts: dict[tuple[frozenset[str], ...], list[str]] = {}
        for server in self.servers:
            has = frozenset(name for name in names if alike(server, name))
            if has or not names:
                chosen = (names if one is None or one in has else has for one in best.values())
                by_drafts.setdefault(tuple(chosen), []).append(server)
        for chosen, servers in by_drafts.items():
            rules = tuple(rule for rule in self.rules if rule in {ENGINES[s].rule for s in servers})
            drafts = dict(zip(best, chosen, strict=True))
            yield replace(self, rules=rules, servers=tuple(servers), drafts=drafts)
        if not by_drafts:
            yield replace(self, servers=())

    def visits_of(self, verdict: Verdict) -> Visits | None:
        """Those that a verdict rests on; of one that names no K, the fewest."""
        k = verdict.k or verdict.reason_values.get("k")
        if isinstance(k, int):
            return self.visits.get(k)
        return min(self.visits.values(), key=lambda visits: visits.timed, default=None)

    def on(self, prompt_set: str) -> Evidence:
        """The evidence to decide a prompt set on, or "all"."""
        drafts = self.drafts.get(prompt_set)
        return self.evidence if drafts is None else self.evidence.of(drafts)


@dataclass(frozen=True)
class Answered:
    """The verdicts on one question: the whole workload, then each prompt set."""

    question: Question
    verdicts: tuple[Verdict, ...]

    def answers(self) -> Iterator[Answer]:
        """One per rule and verdict; none where the temperature is not known."""
        for rule in self.question.rules:
            for verdict in self.verdicts:
                if verdict.temperature is not None:
                    yield Answer(
                        engine=self.question.engine,
                        rule=rule,
                        source=self.question.source,
                        visits=self.question.visits_of(verdict),
                        servers=tuple(s for s in self.question.servers if ENGINES[s].rule == rule),
                        **{name: getattr(verdict, name) for name in OF_VERDICT},
                    )


def questions(
    own: Sequence[Evidence],
    replayed: Mapping[tuple[Rule, float], Evidence],
    *,
    rule: Rule,
    replay_only: bool,
    coincide: bool,
    adaptive: bool,
    alike: Callable[[str, str, float], bool],
    weights: Mapping[str, float] | None,
) -> Iterator[Question]:
    """What is to be decided: the run's own evidence, and replay for the rules that it leaves open.

    Args:
        own: what the run's own verdicts rest on, by temperature.
        replayed: the evidence that replay gives, by rule and temperature.
        rule: the run's.
        replay_only: whether `own` was replayed as well.
        coincide: whether all rules accept alike at every temperature.
        adaptive: whether the run stopped drafting early, which few engines do.
        alike: whether a server's drafts of a name are the run's at a temperature.
        weights: of the prompt sets.
    """

    def asked(evidence: Evidence, rules: Sequence[Rule], source: Source) -> Iterator[Question]:
        stopping = adaptive and rule in rules
        servers = [
            name
            for name, spec in with_lines().items()
            if spec.rule in rules and (spec.stops_early or not stopping)
        ]
        question = Question(evidence, tuple(rules), source, servers=tuple(servers))
        return question.by_servers(
            lambda server, draft: alike(server, draft, evidence.temperature), weights
        )

    for evidence in own:
        every = not adaptive and (coincide or evidence.temperature == GREEDY)
        source: Source = "replayed" if replay_only else "measured"
        yield from asked(evidence, RULES if every else (rule,), source)
        others: list[Rule] = [] if every else [other for other in RULES if other != rule]
        for other in others:
            if (other, evidence.temperature) in replayed:
                known = asked(replayed[other, evidence.temperature], (other,), "replayed")
                yield from (question for question in known if question.servers)


def answered(
    asked: Sequence[Question],
    *,
    weights: Mapping[str, float] | None,
    seed: int,
    distrust: Callable[[Question], Doubt | None],
) -> tuple[Answered, ...]:
    """Decide every question, for the whole workload and for each prompt set.

    A single prompt set is the whole workload, so its verdict is the same one. Where `distrust` says
    why the texts behind a question cannot be trusted, its verdicts are undecided for that reason.
    """
    counted = {name for name, share in (weights or {}).items() if share > 0.0}

    def apart(evidence: Evidence) -> list[str]:
        """The prompt sets that are not the whole workload."""
        names = set(evidence.prompt_sets)
        return sorted(names) if len(names | counted) > 1 else []

    budget = ErrorBudget(len(asked), sum(len(apart(question.evidence)) for question in asked))

    def verdicts(question: Question) -> Iterator[Verdict]:
        workload = decide(question.on("all"), budget, weights=weights, seed=seed)
        yield workload
        for name in sorted(set(question.evidence.prompt_sets)):
            if apart(question.evidence):
                yield decide(question.on(name), budget, prompt_set=name, seed=seed)
            else:
                yield replace(workload, prompt_set=name)

    return tuple(
        Answered(question, tuple(_distrusted(v, distrust(question)) for v in verdicts(question)))
        for question in asked
    )


def _distrusted(verdict: Verdict, reason: Doubt | None) -> Verdict:
    """The verdict; undecided, without a speedup, where there is a reason to distrust the texts."""
    if reason is None:
        return verdict
    return Verdict.undecided(verdict.temperature, verdict.prompt_set, *reason)

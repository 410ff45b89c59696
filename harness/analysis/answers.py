"""The answers: what is known of every engine, at every temperature, on the workload and each set.

A speedup belongs to the engine whose rounds were timed. A sweep and an audition time those of our
own loop, a server run those of that server. Each temperature is a `Question`: it is decided, from
what ran or from replay at the round times, and shares the report's error.

To an engine whose rounds were not timed only acceptance carries over (`carried_over`): by the rule
by which it accepts, how many tokens a round of each K emits. K pays there while a round costs fewer
plain tokens than that. The least that a round can cost is a plain token: its verify is a forward of
the same weights as a plain token's, over that position and more, and drafting takes time besides.
So a gain is excluded where no K emits more than one token a round, which is where no drafted token
was ever accepted: a round is then a plain token and what drafting takes. As a round emits one token
at least, the upper bound of a mean is 1 only where all prompts agree, so no level decides it, and
it takes nothing of the report's error.

What prevents a gain is told by the factors of a round, one at a time. Speedup = tokens_per_round x
R(0) / R(K). Steps explain a round: in target steps it takes K c for drafting, v(K) for the verify,
and for what the steps leave over (accepting, sampling, host work: the loop) the rest, so that the
three add up to R(K). Each factor is set to what it would have to be, or could be, with the others
left as they were measured.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from harness.analysis.predicted import Predicted
from harness.analysis.setup import Setup, shares_of_sets
from harness.analysis.verdict import ONE_SIDED, Candidate, Evidence, decide, in_turn
from harness.engine_facts.engines import OWN
from harness.records import Rule, Source
from harness.stats.jackknife import ZERO, Weights, exponential, workload_ratio
from harness.summary import Answer, Doubt, Explanation, Factor, RoundTokens, Values, Visits

# Of a round, in plain tokens: see above
LEAST_COST = 1.0


@dataclass(frozen=True, eq=False)
class Question:
    """The evidence for a verdict on one engine at one temperature."""

    evidence: Evidence
    rule: Rule | None  # None: of a server that does not say
    source: Source  # "measured" or "replayed"
    engine: str | None = OWN.name  # None: whose times were given
    run: str | None = None  # that timed the engine's rounds, where it is another one
    # Of a server's K that lack some of the visits asked for
    visits: Mapping[int, Visits] = field(default_factory=dict[int, Visits])
    p_min: float = 0.0  # at which every candidate drafted; 0: without a threshold
    share: float | None = None  # of the report's error; None: as much as each other question
    doubt: Doubt | None = None  # why its texts or times cannot be trusted, so that it is undecided

    def answer(self, decided: Answer) -> Answer:
        k = decided.named[1]
        known: Source = self.source
        candidates = tuple(
            replace(
                each,
                source=known if each.source == "measured" else "replayed",
                p_min=each.p_min or self.p_min or None,
            )
            for each in decided.candidates
        )
        fewest = min(self.visits.values(), key=lambda visits: visits.timed, default=None)
        if self.p_min and k:
            values = {**decided.reason_values, "p_min": self.p_min}
            decided = replace(decided, p_min=self.p_min, reason_values=values)
        return replace(
            decided,
            engine=self.engine,
            run=self.run,
            rule=self.rule,
            source=self.source,
            candidates=candidates,
            visits=self.visits.get(k) if k else fewest,
        )


@dataclass(frozen=True)
class Answered:
    """The answers to one question: on the whole workload, then on each prompt set."""

    question: Question
    answers: tuple[Answer, ...]

    @property
    def workload(self) -> Answer:
        return self.answers[0]


def answered(setup: Setup, asked: Sequence[Question]) -> tuple[Answered, ...]:
    """Decide every question; a single prompt set is the whole workload, and has its answer."""
    weights = shares_of_sets(setup)
    counted = {name for name, share in (weights or {}).items() if share > 0.0}

    def decided(question: Question) -> Answered:
        evidence, doubt = question.evidence, question.doubt

        def one(prompt_set: str, error: float) -> Answer:
            if doubt is not None:
                made = Answer.undecided(evidence.temperature, prompt_set, *doubt)
            else:
                made = decide(
                    evidence, error, prompt_set=prompt_set, weights=weights, seed=setup.seed
                )
            return question.answer(made)

        names = sorted({*evidence.prompt_sets})
        apart = len({*names} | counted) > 1
        share = 1.0 / len(asked) if question.share is None else question.share
        answers = [*in_turn(one, names if apart else (), share * ONE_SIDED)]
        if not apart:
            answers += [replace(answers[0], prompt_set=name) for name in names]
        return Answered(question, tuple(answers))

    return tuple(map(decided, asked))


# ---- engines whose rounds were not timed ---------------------------------------------------------


def with_round_tokens(answer: Answer, predicted: Predicted, shares: Weights) -> Answer:
    """Our own loop's answer, with what a round emits and costs at every K, by the K's speedup."""
    part = _only(answer.prompt_set, predicted, shares)
    if part is None:
        return replace(answer, rounds=())
    named = Candidate(answer.named[0] or "", answer.named[1], answer.named_p_min or 0.0)
    known = {each.name: each.speedup for each in answer.candidates}
    rounds = tuple(
        each if speedup is None else replace(each, own_cost=each.tokens_per_round / speedup)
        for each in _rounds(*part, named)
        for speedup in [known.get((named.draft, each.k, named.p_min or None))]
    )
    return replace(answer, rounds=rounds)


def carried_over(
    answer: Answer, engine: str, predicted: Predicted, has: Collection[str], shares: Weights
) -> Answer:
    """Our own loop's answer for an engine whose rounds were not timed: acceptance carries over.

    The draft and K are those that it names; where the engine lacks that draft, or none is named,
    those that look best on our own loop among what it `has`. `predicted` is under the rule by which
    the engine accepts, at our own loop's round times.
    """
    unknown = replace(
        Answer.undecided(answer.temperature, answer.prompt_set, "not_timed", {}),
        decision="not_measured",
        engine=engine,
        timed=False,
        rule=predicted.replays.rule,
    )
    part = _only(answer.prompt_set, predicted, shares)
    every = {} if part is None else part[0].evidence.speedups(part[1])
    gains = {name: gain for name, gain in every.items() if name.draft in has}
    if part is None or not gains:
        return unknown
    draft, k = answer.named
    named = Candidate(draft or "", k, answer.named_p_min or 0.0)
    if named not in gains:
        named = max(gains, key=gains.__getitem__)
    values: Values = {"draft": named.draft, "k": named.k}
    rounds = _rounds(*part, named)
    if named == (draft, k, answer.named_p_min or 0.0):  # there a round costs what it costs
        costs = {each.k: each.own_cost for each in answer.rounds}
        rounds = tuple(replace(r, own_cost=costs.get(r.k, r.own_cost)) for r in rounds)
    values |= {"p_min": named.p_min} if named.p_min else {}
    made = replace(unknown, rounds=rounds, reason_values=values)
    highest = [entry.tokens_per_round_hi for entry in rounds]
    if all(bound is not None and bound <= LEAST_COST + ZERO for bound in highest):
        return replace(made, decision="does_not_pay", reason="nothing_accepted")
    return replace(made, draft=named.draft, k=named.k, p_min=named.p_min or None)


def _only(
    prompt_set: str, predicted: Predicted, shares: Weights
) -> tuple[Predicted, Weights] | None:
    """Predictions on one prompt set, or all, and weights; None where a counted set has no text."""
    replays = predicted.replays
    if prompt_set == "all":
        counted = {name for name, share in (shares or {}).items() if share > 0}
        return None if counted - {*replays.prompt_sets} else (predicted, shares)
    if prompt_set not in replays.prompt_sets:
        return None
    return replace(predicted, replays=replays.only([prompt_set])), None


def _rounds(predicted: Predicted, shares: Weights, named: Candidate) -> tuple[RoundTokens, ...]:
    """Tokens per round of a draft at every K and the named threshold, and our loop's round cost."""
    replays, made = predicted.replays, list[RoundTokens]()
    for name, gain in predicted.evidence.speedups(shares).items():
        if (name.draft, name.p_min) != (named.draft, named.p_min):
            continue
        counts, latency = replays.candidates[name], predicted.latencies[name.draft]
        per_token = workload_ratio(counts.rounds, counts.new_tokens, replays.prompt_sets, shares)
        tokens, rounds = 1.0 / float(per_token.value), exponential(per_token.log().interval())
        made.append(
            RoundTokens(
                k=name.k,
                tokens_per_round=tokens,
                tokens_per_round_lo=rounds and max(LEAST_COST, 1.0 / rounds.hi),
                tokens_per_round_hi=rounds and 1.0 / rounds.lo,
                own_cost=tokens / gain,
                interpolated=name.k not in dict(latency.rounds.round_s),
                given=latency.source == "typed",
            )
        )
    return tuple(made)


# ---- why a draft does not gain -------------------------------------------------------------------

# The rule of thumb of the engines' own documents: a draft five times as fast as its target
SLOW_DRAFT = 0.2


def explain(
    predicted: Predicted, answer: Answer, draft: str, weights: Weights = None
) -> Explanation | None:
    """The obstacles to a gain of a draft at the K of an answer, else at its best K.

    None where it gains, and of a draft that was not replayed, of which no step was timed, or that
    looks its tokens up. Nor at a threshold, whose rounds have no fixed length.
    """
    speedups = predicted.evidence.speedups(weights).items()
    gains = {name.k: gain for name, gain in speedups if (name.draft, name.p_min) == (draft, 0.0)}
    if not gains or draft in predicted.replays.lookups or answer.named_p_min:
        return None
    latency = predicted.latencies[draft]
    steps, rounds, named = latency.steps, latency.rounds, answer.named[1]
    k = named if named in gains else max(gains, key=gains.__getitem__)
    if steps is None or not steps.covers(k) or gains[k] > 1.0:
        return None
    tokens = predicted.replays.weighted(Candidate(draft, k), weights).tokens_per_round
    # In target steps: a plain token, and what a round takes besides drafting and the verify
    plain, c, v = rounds.baseline_s / steps.target_s, steps.c, steps.v(k)
    loop = rounds.at(k) / steps.target_s - k * c - v
    largest_c = (tokens * plain - v - loop) / k
    alone: tuple[tuple[Factor, bool], ...] = (
        ("expensive_verify", tokens * plain > k * c + 1.0 + loop),
        ("slow_loop", tokens > k * c + v),
        ("slow_draft", largest_c > 0.0 and c > SLOW_DRAFT),
        ("acceptance", rounds.break_even_alpha(k) is not None),
    )
    factors: tuple[Factor, ...] = tuple(name for name, holds in alone if holds)
    return Explanation(draft, k, predicted.replays.temperature, factors, c, largest_c)

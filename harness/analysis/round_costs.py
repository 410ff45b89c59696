"""The cost of a plain token and a round, R(0) and R(K), from raw timings, with its error.

Rounds. A visit timed, within moments of one another, plain decoding and rounds of several K in the
running loop (`RoundTiming`). The machine drifts between visits, so each gives ratios R(K) / R(0) of
its own; the ratio that prices a draft is their interquartile mean (a visit in which something else
ran counts little), R(0) is the median over visits, and R(K) is their product. Sampling takes the
same work at any temperature above 0, so timings of all of these are averaged. An interval leaves
out one visit at a time: all K of a draft together, since a visit that was disturbed was so for all.

Steps. One record per timed forward: a `StepTiming` holds its raw samples. Their medians
(`StepTimes`) explain a round; where no rounds were timed (typed latencies, a draft that loses
whatever these cost) they price it, and are taken as exact: a model draft's round costs K draft
steps and a verify of K + 1 positions. A drafter that looks its proposal up (an n-gram) costs one
look-up however much it proposes, and where it proposes n < K tokens the verify is of n + 1
positions.

Requests of a server. Where R is another engine's (`harness.analysis.engine_costs`), a request costs
a start besides its rounds, and how well R is known follows from leaving out parts of the requests.
"""

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Literal

import numpy as np

from harness.analysis.server_costs import ServerCosts
from harness.analysis.setup import Setup, architecture
from harness.records import GREEDY, LatencyRow, RoundTiming, StepTiming, UserError, grouped, where
from harness.stats.jackknife import Array, Variance, half_width, joined
from harness.stats.workload import TRIMMED, SharedError, visit_error
from harness.storage import StoredRun
from harness.storage.manifest import Manifest, ModelEntry
from harness.summary import Basis, CeilingAtK, RoundSummary, StepSummary
from harness.theory.architecture import COUNTED
from harness.theory.replay import Replayed
from harness.theory.roofline import ReadingModel, with_floors
from harness.theory.speedup import RoundTimes, StepTimes

VERIFY = ("target", "verify")
# Times of the target's plain token, slowest / fastest, beyond which drafts do not compare
UNLIKE = 1.5
# The chance that times which differ by chance alone are taken for a change of the machine's pace
BY_CHANCE = 0.01
# Of a look-up in a text of some thousand tokens, where step times were typed in
LOOKUP_S = 1e-5
# The standard error of the logarithm of a measured ratio to plain decoding that is small enough
PRECISE = 0.015
# A ceiling of the speedup that is as low as this is below 1 whatever the machine does meanwhile
CEILING_THAT_LOSES = 0.8
# Or one that is below 1 by so many standard errors, of six visits' scatter or more
SURELY = 4.0
# Turns of visits from which a draft is timed by these alone
LEAST_TURNS = 3
# Of a draft step's time as it is timed alone, what every draft step of a round takes at least.
# Steps timed alone came out up to a tenth too slow or too fast (docs/LOG.md); this is far below.
SURE_OF_A_STEP = 0.5


@dataclass(frozen=True, eq=False)
class TimedVisits:
    """The visits that timed one draft at one temperature."""

    temperature: float
    plain_s: Array  # [visit] of a plain token
    ks: tuple[int, ...]  # ascending
    ratios: Array  # [visit, K] R(K) / R(0) by that visit alone
    # [visit] its turn, which has one visit of every draft; empty of drafts visited apart
    turns: tuple[int, ...] = ()

    @property
    def mean_ratios(self) -> Array:
        """[K] interquartile means over the visits."""
        cut = int(TRIMMED * len(self.ratios))
        return np.sort(self.ratios, axis=0)[cut : len(self.ratios) - cut].mean(axis=0)

    @property
    def errors(self) -> Array:
        """[K] standard errors of the logarithms of `mean_ratios`; infinite of a single visit."""
        if len(self.ratios) < 2:
            return np.full(len(self.ks), np.inf)
        return np.sqrt(visit_error(self.ratios.T).variance.value)

    def plain_gap(self, other: "TimedVisits") -> tuple[float, Variance]:
        """The logarithm of how many times as long a plain token took as in another's visits.

        With its variance: over turns, in which drifts cancel, where both have them; else of two
        independent means (Welch, "The generalization of Student's problem", 1947).
        """
        samples = [np.log(self.plain_s), -np.log(other.plain_s)]
        common = sorted({*self.turns} & {*other.turns})
        if len(common) >= LEAST_TURNS:
            places = [[each.turns.index(turn) for turn in common] for each in (self, other)]
            samples = [samples[0][places[0]] + samples[1][places[1]]]
        gap = float(sum(each.mean() for each in samples))
        if min(map(len, samples)) < 2:  # a single visit has no error
            return gap, Variance(np.array(np.inf), np.array(1.0))
        return gap, joined(
            Variance(each.var(ddof=1) / len(each), np.array(len(each) - 1.0)) for each in samples
        )

    def rounds(self, lookup_s: float | None) -> RoundTimes:
        """R; `lookup_s` is what a look-up that finds nothing adds to a token."""
        plain_s = float(np.median(self.plain_s))
        nothing = () if lookup_s is None else ((0, plain_s + lookup_s),)
        timed = zip(self.ks, (self.mean_ratios * plain_s).tolist(), strict=True)
        return RoundTimes(plain_s, (*nothing, *timed))


@dataclass(frozen=True, eq=False)
class ServedTimes:
    """Costs of a server's requests with one draft, and their error."""

    engine: str
    run: str  # that measured it
    temperature: float  # at which its requests were timed
    visits: int
    basis: Basis
    costs: ServerCosts  # what prices every prediction
    without: tuple[ServerCosts, ...]  # each part of the server's prompts, the same of every draft
    # The two between which the costs of a draft are that was not measured
    ends: tuple[ServerCosts, ServerCosts] | None = None
    # Of a prediction's logarithm beyond all of this, by the server's own run: variance, its degrees
    error: tuple[float, float] = (0.0, 1.0)
    own_requests: bool = False  # whether each draft was timed in requests of its own


@dataclass(frozen=True, eq=False)
class Latency:
    """The cost of one draft with the target at one temperature, and its error."""

    rounds: RoundTimes  # R(0) and R(K): what prices every prediction
    visits: TimedVisits | None = None  # None where rounds follow from steps, taken as exact
    steps: StepTimes | None = None  # what explains rounds; None where no step was timed
    timings: tuple[StepTiming, ...] = ()  # samples behind the steps; none of typed ones
    served: ServedTimes | None = None  # another engine's, where requests cost a start, too
    dropped_s: float = 0.0  # of the draft step whose token a threshold drops

    def at_threshold(self, k: int, p_min: float) -> "Latency":
        """The cost of rounds of up to `k` tokens that end at a token below a probability.

        A round that ends before `k` tokens has made one more draft step than it has tokens, where
        the engine drops the last one. One that drafted nothing is no plain token, therefore.
        """
        if not p_min or not self.dropped_s:
            return self

        def stopped(costs: ServerCosts) -> ServerCosts:
            seconds = (costs.times.at(n) + self.dropped_s * (n < k) for n in range(k + 1))
            return replace(costs, times=replace(costs.times, round_s=(*enumerate(seconds),)))

        assert self.served is not None
        costs = stopped(self.served.costs)
        without = tuple(map(stopped, self.served.without))
        served = replace(self.served, costs=costs, without=without)
        return replace(self, rounds=costs.times, served=served)

    @property
    def source(self) -> Literal["rounds", "requests", "steps", "typed"]:
        if self.served is not None:
            return "requests"
        return "rounds" if self.visits is not None else "steps" if self.timings else "typed"

    def plain_cost(self, tokens: Array, requests: Array) -> Array:
        """[n] plain tokens that it takes to decode so many of so many requests plainly."""
        if self.served is None:
            return tokens
        return self.served.costs.plain_s(tokens, requests) / self.rounds.baseline_s

    def rounds_cost(self, counts: Replayed, requests: Array) -> Array:
        """[n] plain tokens that the rounds of so many requests take."""
        if self.served is None:
            return counts.proposals @ self.relative(counts.k)
        return self.served.costs.speculative_s(counts, requests) / self.rounds.baseline_s

    def relative(self, k: int) -> Array:
        """R(n) / R(0) by how many tokens a round proposes, n = 0..k, shape (k + 1,)."""
        return np.array([self.rounds.relative(n) for n in range(k + 1)])

    def by_visit(self, k: int) -> Array:
        """`relative` as each visit timed it, [visit, k + 1]; (1, k + 1) where it is exact."""
        if self.visits is None:
            return self.relative(k)[None]
        # Visits are relative to the plain token that was timed with the draft
        to_baseline = self.rounds.plain_s / self.rounds.baseline_s
        # A look-up that found nothing is exact
        columns = {
            0: np.full(len(self.visits.ratios), self.rounds.relative(0)),
            **dict(zip(self.visits.ks, self.visits.ratios.T * to_baseline, strict=True)),
        }
        lines = [
            sum(share * columns[timed] for timed, share in self.rounds.parts(n))
            for n in range(k + 1)
        ]
        return np.stack(lines, axis=1)  # type: ignore[arg-type]

    def visit_error(self, candidates: Sequence[Replayed]) -> SharedError | None:
        """The error of what all of each candidate's rounds cost; None without several visits."""
        if self.visits is None or len(self.visits.plain_s) < 2:
            return None
        costs: list[Array] = []  # in each visit, relative to all visits
        for counts in candidates:
            rounds = counts.proposals.sum(axis=0)
            costs.append(self.by_visit(counts.k) @ rounds / (rounds @ self.relative(counts.k)))
        return visit_error(np.stack(costs))

    def summary(self, draft: str) -> StepSummary | None:
        """The steps' medians as a report shows them; None where none were timed."""
        if self.steps is None:
            return None
        return StepSummary(
            draft=draft,
            draft_step_s=self.steps.draft_s,
            target_step_s=self.steps.target_s,
            target_prefill_s=self._prefill_per_token("target"),
            draft_prefill_s=self._prefill_per_token("draft"),
        )

    def _prefill_per_token(self, role: str) -> float | None:
        """At the middle one of the timed lengths."""
        timed = where(self.timings, role=role, kind="prefill", batch=1)
        per_token = {t.tokens: typical_s(t.samples_s) / t.tokens for t in timed if t.tokens}
        return per_token[sorted(per_token)[len(per_token) // 2]] if per_token else None

    def round_summary(self, draft: str) -> RoundSummary:
        summary = RoundSummary(
            draft=draft,
            temperature=self.visits.temperature if self.visits else None,
            source=self.source,
            plain_s=self.rounds.plain_s,
            other_plain_s=self.rounds.other_plain_s,
            round_s={k: seconds for k, seconds in self.rounds.round_s if k > 0},
            visits=len(self.visits.plain_s) if self.visits else 0,
        )
        if self.served is None:
            return summary
        known = ("temperature", "visits", "engine", "run", "basis")
        return replace(summary, **{name: getattr(self.served, name) for name in known})


def plain_tokens_apart(latencies: Mapping[str, Latency]) -> dict[tuple[str, str], float]:
    """By two drafts, how many times as long a plain token took next to the first as to the second.

    Of those between which the machine's pace changed too much for their speedups to compare: by
    more than `UNLIKE`, and by more than their visits scatter. A target that runs in a slower way
    for a draft is another one.
    """
    visits = {
        draft: latency.visits
        for draft, latency in latencies.items()
        if latency.visits is not None and latency.rounds.other_plain_s is None
    }
    pairs = [*permutations(visits, 2)]
    gaps = {(one, other): visits[one].plain_gap(visits[other]) for one, other in pairs}
    return {
        drafts: math.exp(gap)
        for drafts, (gap, variance) in gaps.items()
        if gap > max(math.log(UNLIKE), half_width(variance, 1.0 - BY_CHANCE / len(pairs)))
    }


# ---- costs ---------------------------------------------------------------------------------------


def typed_latency(times: StepTimes, largest: int, *, lookup: bool = False) -> Latency:
    """The latency by typed step times, up to K = `largest`."""
    return Latency(RoundTimes.from_steps(times, largest, lookup=lookup), steps=times)


def least_rounds(steps: StepTimes, largest: int) -> RoundTimes:
    """The least that rounds of a model draft can cost, from its step alone.

    A verify is a forward of the same weights as a plain token's, over that position and more, so a
    round takes a plain token's time at least, and its draft steps on top of that.
    """
    plain_s, step_s = steps.target_s, SURE_OF_A_STEP * steps.draft_s
    return RoundTimes(plain_s, tuple((n, plain_s + n * step_s) for n in range(1, largest + 1)))


def without_rounds(latency: Latency) -> Latency:
    """By steps alone: no less than `least_rounds`, which a disturbed target step may exceed."""
    if latency.steps is None:
        return latency
    least = least_rounds(latency.steps, latency.rounds.largest)
    rounds = tuple((n, max(s, least.at(n))) for n, s in latency.rounds.round_s)
    return replace(latency, rounds=replace(latency.rounds, round_s=rounds))


def ceilings(rounds: RoundTimes, ks: Iterable[int]) -> tuple[CeilingAtK, ...]:
    """The ideal speedup and the break-even alpha of each K."""
    return tuple(
        CeilingAtK(
            k=k,
            ideal_speedup=rounds.speedup(k + 1.0, k),
            ideal_seconds_per_token=rounds.at(k) / (k + 1),
            breakeven_alpha=rounds.break_even_alpha(k),
        )
        for k in ks
    )


# ---- from samples to medians ---------------------------------------------------------------------


def merged(timings: Sequence[StepTiming]) -> list[StepTiming]:
    """One timing per forward, with the samples of all that are of the same, in their order."""
    pooled: dict[StepTiming, tuple[float, ...]] = {}
    for timing in timings:
        key = replace(timing, samples_s=())
        pooled[key] = pooled.get(key, ()) + timing.samples_s
    return [replace(key, samples_s=samples) for key, samples in pooled.items()]


def latency_rows(timings: Sequence[StepTiming]) -> list[LatencyRow]:
    """Rows of latency.csv without floors; a forward timed with several drafts is one row."""
    return [
        latency_row(t.role, t.model, t.kind, t.tokens, t.context_tokens, t.batch, t.samples_s)
        for t in merged([replace(timing, beside=None) for timing in timings])
    ]


def _round_rows(timings: Sequence[RoundTiming]) -> Iterator[LatencyRow]:
    """Seconds of a plain token, or of a round, over visits; their context is the median one."""
    groups = grouped(timings, lambda t: (t.temperature, t.batch, t.k, t.draft if t.k else t.model))
    for (temperature, batch, k, name), group in sorted(groups.items()):
        context = round(float(np.median([t.context_tokens for t in group])))
        seconds = tuple(seconds_per_round(t) for t in group)
        named = ("draft" if k else "target", name)
        row = latency_row(*named, "round", k, context, batch, seconds)
        yield replace(row, temperature=temperature)


def seconds_per_round(timing: RoundTiming) -> float:
    """Seconds of one round, of one token where they are of plain decoding."""
    return timing.seconds / (timing.rounds if timing.k else timing.new_tokens)


def latency_row(
    role: str,
    model: str,
    kind: str,
    tokens: int,
    context_tokens: int,
    batch: int,
    samples_s: Sequence[float],
) -> LatencyRow:
    """A row of latency.csv: median, p10 and p90 of samples, without a floor."""
    p10, p90 = (float(ms) for ms in np.percentile(np.array(samples_s) * 1e3, [10, 90]))
    median, samples = 1e3 * typical_s(samples_s), len(samples_s)
    return LatencyRow(role, model, kind, tokens, context_tokens, batch, median, p10, p90, samples)


def latency_table(setup: Setup) -> tuple[LatencyRow, ...]:
    """Rows of latency.csv: single forwards, with floors where bytes are counted, and rounds."""
    run, keys = setup.run, {"target": "model", "draft": "draft"}
    quantized = [role for role, key in keys.items() if setup.conf(key).get("quantization")]
    reading = reading_models(run.manifest, quantized)
    return (*with_floors(latency_rows(run.timings), reading), *_round_rows(run.rounds))


def reading_models(manifest: Manifest, quantized: Container[str] = ()) -> dict[str, ReadingModel]:
    """Target and draft with the bandwidth they are read at; those whose bytes can be counted."""
    models: dict[str, ReadingModel] = {}
    speeds = manifest.bandwidth
    if speeds is None or speeds.source is None:
        return models
    for role, own_gb_s in (("target", speeds.target_gb_s), ("draft", speeds.draft_gb_s)):
        entry, speed = manifest.models.get(role, ModelEntry()), own_gb_s or speeds.gb_s
        shape = architecture(entry) if entry.architecture in COUNTED.values() else None
        width = entry.bytes_per_parameter
        if shape is not None and speed is not None and width and role not in quantized:
            models[role] = ReadingModel(shape, width, speed, speeds.source)
    return models


def reference(timings: Sequence[StepTiming]) -> list[StepTiming]:
    """Timings at the first step's context and batch, which predictions use."""
    first = next((timing for timing in timings if timing.kind == "step"), None)
    if first is None:
        return list(timings)
    at = (first.context_tokens, first.batch)
    return [t for t in timings if t.kind == "prefill" or (t.context_tokens, t.batch) == at]


def typical_s(samples_s: Sequence[float]) -> float:
    """The median; the mean where a coarse clock (clock=cpu) stood still in most samples."""
    median = float(np.median(samples_s))
    return median if median > 0.0 else float(np.mean(samples_s))


def step_times(timings: Sequence[StepTiming]) -> StepTimes:
    """Medians as the formulas want them; of several contexts or batches the first counts."""
    medians = {
        (timing.role, timing.kind, timing.tokens): typical_s(timing.samples_s)
        for timing in reference(timings)
    }
    for role in ("draft", "target"):
        if (role, "step", 1) not in medians:
            raise UserError(f"latency: no {role} step was timed; time it or type its time in")
        if medians[role, "step", 1] <= 0.0:
            raise UserError(
                f"clock=cpu: the processor clock of this machine is too coarse for a {role} step of"
                " this size; give clock=wall"
            )
    verify = sorted(tokens for role, kind, tokens in medians if (role, kind) == VERIFY)
    return StepTimes(
        draft_s=medians["draft", "step", 1],
        target_s=medians["target", "step", 1],
        verify_s=tuple(medians[(*VERIFY, tokens)] for tokens in verify),
    )


# ---- from timings to what a draft costs ----------------------------------------------------------


def visits_of(timings: Sequence[RoundTiming], draft: str, temperature: float) -> TimedVisits | None:
    """The visits of a draft, at all temperatures of this one's work; None without a whole visit."""
    timings = in_turn(where(timings, draft=draft, batch=1))
    nearest = near(timings, temperature)
    if not nearest:
        return None
    timed_at = nearest[0].temperature
    timings = [t for t in timings if (t.temperature > GREEDY) == (timed_at > GREEDY)]
    visits = grouped(timings, lambda t: t.visit)
    turn_of = {t.visit: t.turn for t in timings if t.turn is not None}
    by_visit = {
        visit: {
            k: float(np.mean([seconds_per_round(t) for t in of_k]))
            for k, of_k in grouped(of_visit, lambda t: t.k).items()
        }
        for visit, of_visit in visits.items()
    }
    timed = [k for seconds in by_visit.values() for k in seconds if k]
    # A K that ran out of memory on the way is none that was timed
    ks = tuple(sorted(k for k in set(timed) if 2 * timed.count(k) > len(by_visit)))
    complete = [visit for visit, seconds in by_visit.items() if {0, *ks} <= {*seconds}]
    if not complete or not ks:
        return None
    table = np.array([[by_visit[visit][k] for k in (0, *ks)] for visit in complete])
    turns = tuple(turn_of[visit] for visit in complete if visit in turn_of)
    turns = turns if len(turns) == len(complete) else ()
    return TimedVisits(timed_at, table[:, 0], ks, table[:, 1:] / table[:, :1], turns)


def in_turn(timings: Sequence[RoundTiming]) -> Sequence[RoundTiming]:
    """The timings of visits in turn with other drafts' alone, where these are enough; else all."""
    in_turns = [timing for timing in timings if timing.turn is not None]
    return in_turns if len({t.turn for t in in_turns}) >= LEAST_TURNS else timings


def near(timings: Sequence[RoundTiming], temperature: float) -> list[RoundTiming]:
    """Timings at the nearest temperature; at 0, where no probability is computed, only such."""

    def distance(timed: float) -> tuple[bool, float]:
        return (timed > GREEDY) != (temperature > GREEDY), abs(timed - temperature)

    nearest = min({t.temperature for t in timings}, key=distance, default=None)
    return [t for t in timings if t.temperature == nearest]


def can_pay(timings: Sequence[RoundTiming], draft: str) -> bool:
    """True where a model draft could gain at some timed K if every token were accepted.

    Between two timed K the ceiling (K + 1) R(0) / R(K) lies between theirs. True where it is not
    known; a ceiling that its error may put above 1 counts as one that is.
    """

    def may(visits: TimedVisits) -> bool:
        ceilings = (np.array(visits.ks) + 1) / visits.mean_ratios
        highest = ceilings * np.exp(SURELY * np.maximum(visits.errors, PRECISE))
        return bool(((ceilings > CEILING_THAT_LOSES) & (highest >= 1.0)).any())

    return any(visits is None or may(visits) for visits in _at_each_temperature(timings, draft))


def timed_precisely(timings: Sequence[RoundTiming], draft: str) -> bool:
    """True where a draft's R(K) / R(0) has an error of `PRECISE` or less at every temperature.

    The errors of all K count, as the root of their mean square: the largest of four, which are
    estimated themselves, would ask for a third more visits.
    """
    return all(
        visits is not None and np.sqrt((visits.errors**2).mean()) <= PRECISE
        for visits in _at_each_temperature(timings, draft)
    )


def _at_each_temperature(
    timings: Sequence[RoundTiming], draft: str
) -> Iterator[TimedVisits | None]:
    temperatures = {timing.temperature for timing in timings if timing.draft == draft}
    return (visits_of(timings, draft, value) for value in temperatures)


def latency_of(
    timings: Sequence[StepTiming], visits: TimedVisits | None = None, *, lookup: bool = False
) -> Latency:
    """The latency of a draft by its visits; without any, by its steps."""
    timings = tuple(reference(timings))
    steps = step_times(timings) if timings else None
    if visits is not None:
        lookup_s = steps.draft_s if lookup and steps else None
        return Latency(visits.rounds(lookup_s), visits, steps, timings)
    if steps is None:
        raise UserError("latency: neither rounds nor steps were timed; time them or type them in")
    rounds = RoundTimes.from_steps(steps, len(steps.verify_s) - 1, lookup=lookup)
    return Latency(rounds, None, steps, timings)


def latency_of_draft(
    run: StoredRun, draft: str, temperature: float, *, lookup: bool = False
) -> Latency | None:
    """The latency of a stored run's draft; None where neither rounds nor steps were timed."""
    timings = where(run.timings, role="draft", model=draft)
    if timings:  # with those of the target that were taken with them
        timings = [*where(run.timings, role="target", beside=timings[0].beside), *timings]
    visits = visits_of(run.rounds, draft, temperature)
    return latency_of(timings, visits, lookup=lookup) if timings or visits else None

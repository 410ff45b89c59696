"""Which K or policy meets a latency goal at a rate of requests, and on how many cards.

From a server run with requests side by side, or an audition that such a run prices
(`harness.analysis.planned_server`): its texts say what rounds accept (match bits, or
chances from which flags are drawn), its closed loops what iterations and starts cost, R(K, B)
(`harness.analysis.batch_schedule`), its single requests what a prompt's length costs. These drive a
simulated server (`harness.simulation`) at a grid of rates up to nearly each choice's capacity.

One seed is one sequence of requests and arrivals, the same for every choice and rate; so choices
are compared in pairs. A goal is met where the mean over seeds of the percentile is within it, and
the largest rate lies on the line between two simulated ones. Beyond its capacity, at which a server
ends requests while all of its slots are taken, a queue grows without end: no goal is met there.

Intervals have two parts: seeds (the error of a mean), and prompts (the jackknife over groups of
them: each group is replaced by other prompts in the same sequences). The error of the costs is not
in them; `PlanCheck`s show it, where closed loops are simulated at costs that other prompts gave.

A fleet splits its requests between cards at random, so of Poisson arrivals each card sees such at
its share of the rate: cards = the rate / the largest rate of one card, rounded up. Recorded
arrivals and bursts are stretched to a card's rate, and keep their shape.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import takewhile
from math import ceil
from typing import Literal

import numpy as np

from harness.analysis.batch_schedule import costs_without
from harness.analysis.planned_server import PlannedDraft, Server, planned
from harness.analysis.setup import Setup
from harness.config import PlanConfig
from harness.records import GREEDY, LoadTiming, TextTrace, UserError, grouped
from harness.serving.engines import spec_of
from harness.simulation.policies import SGLANG_TIERS, ByLoad, Fixed, Oracle, Tiers
from harness.simulation.requests import Request, Text, as_recorded, at_random
from harness.simulation.server import Costs, Policy, Served, simulate
from harness.stats.jackknife import (
    CONFIDENCE,
    Array,
    Index,
    Interval,
    Variance,
    enough_prompts,
    half_width,
    joined,
    left_out_variance,
    set_weights,
)
from harness.storage import StoredRun
from harness.summary import (
    Caveat,
    Percentiles,
    Plan,
    PlanCheck,
    PlanChoice,
    PlanPoint,
    PlanPolicy,
)
from harness.theory.cost import SECONDS_PER_HOUR

# Simulated rates, and the shares of a capacity that are the least and the largest of them
RATES, LEAST, MOST = 10, 0.02, 0.97
# How often the two rates between which a goal is just met are brought closer
HALVINGS = 2
# Of a seed's requests, those that find the server emptier than it will be
WARM_UP = 0.2
# Groups of prompts, each left out in turn
GROUPS = 6
# Seeds of the oracle, which is no choice and has no interval
BOUND_SEEDS = 2


# ---- what is simulated ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Choice:
    """A way to serve, with what it costs; `draft` is None where nothing is ever drafted."""

    draft: str | None
    policy: PlanPolicy
    k: int
    costs: Costs
    make: Callable[[], Policy]
    ks: tuple[int, ...] = ()


class _Traffic:
    """The requests and arrivals of each seed, and with a group of the prompts left out."""

    def __init__(
        self,
        texts_of: Mapping[str, Sequence[Text]],
        shares: Mapping[str, float],
        config: PlanConfig,
        recorded: Sequence[float] | None,
    ) -> None:
        """Prompt sets count by their shares, the texts of a set alike.

        `texts_of`: by draft, the same texts in the same order.
        """
        self._texts_of, self._config, self._recorded = texts_of, config, recorded
        texts = next(iter(texts_of.values()))
        self._longest = max(
            (len(t.chances) for each in texts_of.values() for t in each if t.certain is None),
            default=0,
        )
        names = [text.prompt_set for text in texts]
        self._weights = np.array([shares[name] / names.count(name) for name in names])
        self.prompts = list(dict.fromkeys((text.prompt_set, text.prompt) for text in texts))
        # With too few prompts leaving some out says nothing
        self.groups = GROUPS if enough_prompts([name for name, _ in self.prompts]) else 0
        places = [self.prompts.index((text.prompt_set, text.prompt)) for text in texts]
        self._group = np.array(places) % GROUPS
        self._drawn = cache(self._drawn_of)
        self.requests = cache(self._requests)

    @property
    def number(self) -> int:
        """Requests of a seed."""
        return self._config.requests

    def _drawn_of(self, seed: int, left_out: int | None) -> tuple[Index, Array, Array]:
        """Of a seed: [request] which text, [request, position] uniforms, and when they come.

        Arrivals are in units of the mean time between two.
        """
        random = np.random.default_rng((self._config.seed, seed))
        first, second = random.random((2, self.number))
        uniforms = random.random((self.number, self._longest))
        if self._recorded is not None:
            arrivals = as_recorded(self._recorded, self.number, random)
        else:
            arrivals = at_random(self.number, random, together=self._config.together)
        rows = _drawn(self._weights, first)
        if left_out is not None:
            others = _drawn(self._weights * (self._group != left_out), second)
            rows = np.where(self._group[rows] == left_out, others, rows)
        return rows, uniforms, arrivals

    def _requests(self, draft: str | None, seed: int, left_out: int | None = None) -> list[Request]:
        """The requests of a seed as a draft accepts them; without one as any does."""
        texts = self._texts_of[draft or next(iter(self._texts_of))]
        rows, uniforms, _ = self._drawn(seed, left_out)
        drawn = zip(rows.tolist(), uniforms, strict=True)
        return [texts[row].drawn(chance) for row, chance in drawn]

    def served(
        self, choice: _Choice, rate: float, seed: int, left_out: int | None = None
    ) -> Served:
        """What becomes of a seed's requests at a rate; an infinite one is a closed loop."""
        requests = self.requests(choice.draft, seed, left_out)
        _, _, arrivals = self._drawn(seed, left_out)
        return simulate(requests, arrivals / rate, choice.costs, choice.make())


def _drawn(weights: Array, uniforms: Array) -> Index:
    """A place for each uniform, with these chances."""
    ends = np.cumsum(weights) / weights.sum()
    return np.minimum(np.searchsorted(ends, uniforms, side="right"), len(ends) - 1)


def _choices(
    server: Server,
    drafts: Sequence[PlannedDraft],
    slots: int,
    ks: Sequence[int],
    traffic: _Traffic,
) -> Iterator[_Choice]:
    """Plain decoding and each draft at each K; then what adapts K, with the draft that leads."""
    prices = {each.name: server.prices(each.costs, slots, ks) for each in drafts}
    plain = _Choice(None, "fixed", 0, prices[drafts[0].name][0], lambda: Fixed(0))
    yield plain
    fixed = [
        _Choice(name, "fixed", k, speculative, lambda k=k: Fixed(k))
        for name, (_, speculative) in prices.items()
        for k in ks
        if k
    ]
    yield from fixed

    def emptied(choice: _Choice) -> Served:
        return traffic.served(choice, np.inf, 0)

    done = {(each.draft, each.k): emptied(each) for each in (plain, *fixed)}
    best = min(fixed, key=lambda each: done[each.draft, each.k].ended_s.max()).draft
    emitted = {
        k: float(each.tokens.sum() / each.rounds.sum())
        for (draft, k), each in done.items()
        if draft in (best, None)
    }
    speculative, largest = prices[best or ""][1], max(ks)
    by_load = tuple(
        max(ks, key=lambda k, row=row: emitted[k] / row[k]) for row in speculative.iteration_s[1:]
    )
    yield _Choice(best, "by_load", largest, speculative, lambda: ByLoad((0, *by_load)), by_load)
    tiers = [
        replace(tier, ks=tuple(takewhile(lambda k: k <= largest, tier.ks))) for tier in SGLANG_TIERS
    ]
    yield _Choice(best, "tiers", largest, speculative, lambda: Tiers(largest, tiers))
    yield _Choice(best, "oracle", largest, speculative, lambda: Oracle(largest, speculative))


class _Curve:
    """What users wait for with a choice, by rate; each rate is simulated once.

    Attributes:
        choice: itself.
        capacity: requests per second that leave while all slots are taken and others wait.
        rates: at which it was asked for.
    """

    def __init__(self, traffic: _Traffic, choice: _Choice, config: PlanConfig) -> None:
        """Nothing but the capacity is simulated yet."""
        self.choice, self._traffic, self._percentile = choice, traffic, config.percentile
        few = choice.policy == "oracle"
        self._seeds = range(min(BOUND_SEEDS, config.seeds) if few else config.seeds)
        self._groups = () if few else range(traffic.groups)
        self._values: dict[float, Array] = {}
        self.without = cache(self._without)
        self.capacities = self._capacities()
        self.capacity = float(self.capacities.mean())

    @property
    def rates(self) -> list[float]:
        """At which it was simulated, ascending."""
        return sorted(self._values)

    def values(self, rate: float) -> Array:
        """[seed, (TPOT, TTFT)] the percentiles at a rate, seconds."""
        if rate not in self._values:
            made = [self._waits(rate, seed, None) for seed in self._seeds]
            self._values[rate] = np.array(made)
        return self._values[rate]

    def _without(self, rate: float) -> Array:
        """[group, (TPOT, TTFT)] their means without each group of the prompts."""
        return np.array(
            [
                np.mean([self._waits(rate, seed, group) for seed in self._seeds], axis=0)
                for group in self._groups
            ]
        )

    def _waits(self, rate: float, seed: int, left_out: int | None) -> Array:
        done = self._traffic.served(self.choice, rate, seed, left_out)
        kept = slice(int(WARM_UP * self._traffic.number), None)
        waits = (done.per_token_s[kept], done.first_token_s[kept])
        return np.array([np.nanpercentile(each, self._percentile) for each in waits])

    def _capacities(self, left_out: int | None = None) -> Array:
        """[seed] of a closed loop, from when all slots are taken to when the last one enters."""
        rates: list[float] = []
        for seed in self._seeds:
            entered = self._traffic.served(self.choice, np.inf, seed, left_out).entered_s
            first = min(self.choice.costs.slots, len(entered) - 2)
            rates.append((len(entered) - 1 - first) / (entered[-1] - entered[first]))
        return np.array(rates)

    def held(self, goals: Array) -> "_Varied":
        """The largest rate at which [(TPOT, TTFT)] are within the goals; 0.0 for none.

        On the line between two simulated rates; where seeds or prompts differ in how far they are
        from the goal there, the rate differs by that much / the line's slope.
        """

        def excess(values: Array) -> Array:
            return (values / goals).max(axis=-1)

        def mean(rate: float) -> float:
            return float(excess(self.values(rate).mean(axis=0)))

        rates = self.rates
        beyond = [rate for rate in rates if mean(rate) > 1.0]
        if not beyond:
            without = [self._capacities(group).mean() for group in self._groups]
            return _Varied(MOST * self.capacity, MOST * self.capacities, MOST * np.array(without))
        if beyond[0] == rates[0]:
            return _Varied(0.0, np.zeros(len(self._seeds)), np.zeros(len(self._groups)))
        low, high = max(rate for rate in rates if rate < beyond[0]), beyond[0]
        for _ in range(HALVINGS):
            middle = (low + high) / 2.0
            low, high = (low, middle) if mean(middle) > 1.0 else (middle, high)
        slope = (mean(high) - mean(low)) / (high - low)
        rate = low + (1.0 - mean(low)) / slope

        def moved(of: Callable[[float], Array]) -> Array:
            off = [excess(of(each)) - mean(each) for each in (low, high)]
            return np.maximum(0.0, rate - np.mean(off, axis=0) / slope)

        without = moved(self.without) if self._groups else np.zeros(0)
        return _Varied(rate, moved(self.values), without)


@dataclass(frozen=True, eq=False)
class _Varied:
    """A number, and how it varies.

    Attributes:
        value: itself.
        by_seed: [seed] with that seed alone.
        without: [group] without that group of the prompts; empty where that is not known.
    """

    value: float
    by_seed: Array
    without: Array

    def interval(self) -> Interval | None:
        """Over other prompts and arrivals; None where too little is known."""
        if len(self.by_seed) < 2 or len(self.without) < 2:
            return None
        of_seeds = self.by_seed.var(ddof=1) / len(self.by_seed)
        parts = [
            Variance(np.asarray(of_seeds), np.asarray(len(self.by_seed) - 1.0)),
            left_out_variance(self.without, np.ones(len(self.without))),
        ]
        half = float(half_width(joined(parts), CONFIDENCE))
        return Interval(max(0.0, self.value - half), self.value + half)

    def over(self, other: "_Varied") -> "_Varied | None":
        """The ratio of the two, seed by seed and group by group; None where the other may be 0."""
        seeds = len(self.by_seed)
        if min(other.value, *other.by_seed, *other.without) <= 0.0:
            return None
        without = self.without / other.without if len(self.without) else self.without
        by_seed = self.by_seed / other.by_seed[:seeds]
        return _Varied(self.value / other.value, by_seed, without)


# ---- the plan ------------------------------------------------------------------------------------


def plan_of(
    run: StoredRun,
    config: PlanConfig,
    *,
    recorded: Sequence[float] | None = None,
    price_per_hour: float | None = None,
    expect: Callable[[int], None] = lambda _: None,
    tick: Callable[[], None] = lambda: None,
) -> tuple[Plan, tuple[Caveat, ...]]:
    """What each choice holds, and what to mind.

    Args:
        run: of a server, with requests side by side; or an audition that one prices.
        config: the goal, and how much is simulated.
        recorded: time stamps of requests, ascending; None for random arrivals.
        price_per_hour: of a card, US dollars.
        expect: called with the number of choices.
        tick: called as each of them is done.

    Raises:
        UserError: the run does not tell what is needed.
    """
    server, drafts = planned(run, config.temperature[0] if config.temperature else None)
    slots, ks = _slots(server, config.slots), server.ks
    if len(ks) == 1:
        raise UserError(
            f"run={server.folder}: every K changes what is generated at temperature"
            f" {server.temperature:g}; there is nothing to plan until its server is lossless"
        )
    setup = Setup(run)
    asked = setup.new_tokens or 0
    texts_of = {each.name: server.texts(each.traces, max(ks), asked) for each in drafts}
    names = [text.prompt_set for text in texts_of[drafts[0].name]]
    traffic = _Traffic(texts_of, set_weights(names, setup.request_weights), config, recorded)
    choices = [*_choices(server, drafts, slots, ks, traffic)]
    expect(len(choices))
    curves = [_Curve(traffic, each, config) for each in choices]
    top = max(curve.capacity for curve in curves if curve.choice.policy != "oracle")
    shared = (top * np.array([LEAST, *np.arange(1, RATES) / RATES])).tolist()
    goals = np.array(
        [np.inf if ms is None else ms / 1e3 for ms in (config.tpot_ms, config.ttft_ms)]
    )
    held: list[_Varied] = []
    for curve in curves:
        most = MOST * curve.capacity
        for rate in (*shared, config.rate, most):
            if rate <= most:
                curve.values(rate)
        held.append(curve.held(goals))
        tick()
    requests = [each for seed in range(config.seeds) for each in traffic.requests(None, seed)]
    tokens = server.counting.first_position + float(np.mean([each.tokens for each in requests]))
    plan = Plan(
        run=str(server.folder),
        engine=server.served.engine.name,
        drafts=tuple(each.name for each in drafts),
        measured_draft=server.draft.name,
        temperature=server.temperature,
        slots=slots,
        rate=config.rate,
        percentile=config.percentile,
        tpot_s=None if config.tpot_ms is None else config.tpot_ms / 1e3,
        ttft_s=None if config.ttft_ms is None else config.ttft_ms / 1e3,
        arrivals=_arrivals(config, recorded),
        seeds=config.seeds,
        requests=config.requests,
        prompts=len(traffic.prompts),
        tokens=tokens,
        choices=tuple(
            _planned(curve, largest, held[0], config.rate, price_per_hour, tokens)
            for curve, largest in zip(curves, held, strict=True)
        ),
        stops_paying=_stops_paying(curves, shared),
        checks=tuple(_checks(server, ks)) if server.temperature == GREEDY else (),
    )
    return plan, tuple(_caveats(server, drafts))


def _slots(server: Server, asked: int | None) -> int:
    """Requests side by side on a card."""
    if asked is not None and asked > server.slots:
        raise UserError(
            f"slots={asked}: run={server.folder} timed up to {server.slots} requests side by side;"
            f" lower it, or measure it with concurrency=[1,...,{asked}]"
        )
    return asked or server.slots


def _arrivals(
    config: PlanConfig, recorded: Sequence[float] | None
) -> Literal["poisson", "bursts", "recorded"]:
    if recorded is not None:
        return "recorded"
    return "bursts" if config.together > 1 else "poisson"


def _planned(
    curve: _Curve,
    held: _Varied,
    plain: _Varied,
    rate: float,
    price_per_hour: float | None,
    tokens: float,
) -> PlanChoice:
    """What a choice holds, next to plain decoding."""
    interval, ratio = held.interval(), held.over(plain)
    of_ratio = ratio and ratio.interval()
    cards = ceil(rate / held.value - 1e-9) if held.value > 0.0 else None
    usd = None if cards is None or price_per_hour is None else cards * price_per_hour
    points = tuple(
        PlanPoint(each, *curve.values(each).mean(axis=0).tolist()) for each in curve.rates
    )
    at_rate = next((point for point in points if point.rate == rate), None)
    if at_rate is not None:
        at_rate = _with_intervals(at_rate, curve)
    return PlanChoice(
        draft=curve.choice.draft,
        policy=curve.choice.policy,
        k=curve.choice.k,
        ks=curve.choice.ks,
        capacity=curve.capacity,
        points=points,
        at_rate=at_rate,
        largest_rate=held.value,
        largest_rate_lo=interval and interval.lo,
        largest_rate_hi=interval and interval.hi,
        rate_ratio=ratio and ratio.value,
        rate_ratio_lo=of_ratio and of_ratio.lo,
        rate_ratio_hi=of_ratio and of_ratio.hi,
        cards=cards,
        usd_per_hour=usd,
        usd_per_million_tokens=None
        if usd is None
        else 1e6 * usd / (rate * tokens * SECONDS_PER_HOUR),
    )


def _with_intervals(point: PlanPoint, curve: _Curve) -> PlanPoint:
    by_seed, without = curve.values(point.rate), curve.without(point.rate)
    tpot, ttft = (
        _Varied(value, by_seed[:, at], without[:, at]).interval() if len(without) else None
        for at, value in enumerate((point.tpot_s, point.ttft_s))
    )
    return replace(
        point,
        tpot_lo_s=tpot and tpot.lo,
        tpot_hi_s=tpot and tpot.hi,
        ttft_lo_s=ttft and ttft.lo,
        ttft_hi_s=ttft and ttft.hi,
    )


def _stops_paying(curves: Sequence[_Curve], rates: Sequence[float]) -> float | None:
    """The least of the shared rates at which plain decoding has the shortest TPOT."""
    plain, *others = curves
    for rate in rates:
        waits = [
            float(curve.values(rate)[:, 0].mean())
            for curve in (plain, *others)
            if curve.choice.policy != "oracle" and rate in curve.rates
        ]
        if rate in plain.rates and waits[0] <= min(waits):
            return rate
    return None


def _caveats(server: Server, drafts: Sequence[PlannedDraft]) -> Iterator[Caveat]:
    engine, measured = server.served.engine, server.draft.name
    others = [each.name for each in drafts if each.name != measured]
    if others:
        yield Caveat("plan_other_drafts", {"drafts": ", ".join(others), "measured": measured})
    if server.lossy:
        yield Caveat("plan_without_ks", {"ks": ", ".join(map(str, server.lossy))})
    if engine.clock == "cpu":
        yield Caveat("plan_processor_time")
    if server.by_runs is not False and server.slots > 1:
        spec = spec_of(engine.name)
        known = server.by_runs is not None
        yield Caveat(
            "plan_separate_passes",
            {"engine": spec.title, "flag": spec.unified_flag, "simulated": known},
        )
    if not server.prompts_priced:
        yield Caveat("plan_mean_prompts")


# ---- next to what was measured -------------------------------------------------------------------


def _checks(server: Server, ks: Sequence[int]) -> Iterator[PlanCheck]:
    """The closed loops of full budgets, each at the costs of the other groups of prompts."""
    traces = {f"{trace.prompt_set}/{trace.prompt}": trace for trace in server.traces}
    groups = {key.group for key in server.loads}
    costs = {group: costs_without(server.loads, group) for group in groups}
    full = [
        load
        for load in server.loads.values()
        if load.full and load.key.k in ks and costs[load.key.group]
    ]
    cells = grouped(full, lambda load: (load.key.concurrency, load.key.k))
    for (concurrency, k), loads in sorted(cells.items()):
        cell = _Cell()
        for load in loads:
            known = costs[load.key.group]
            assert known is not None
            plain, speculative = server.prices(known, server.slots, ks)
            done: list[Served] = []
            for timing in load.timings:
                sent = _sent(server, timing, traces, max(ks))
                if sent is None:
                    continue
                priced = speculative if k else plain
                done.append(simulate(sent, np.zeros(len(sent)), priced, Fixed(k), concurrency))
                # With clock=cpu a load's seconds are not those of a user
                cell.add(timing, done[-1], told=server.served.engine.clock == "engine")
            if done:
                cell.tokens += load.tokens
                cell.seconds += load.seconds
                cell.simulated_s += float(np.mean([each.ended_s.max() for each in done]))
        if cell.simulated:
            yield PlanCheck(
                k=k,
                concurrency=concurrency,
                requests=len(cell.simulated),
                tokens_per_second=cell.tokens / cell.seconds,
                simulated_tokens_per_second=cell.tokens / cell.simulated_s,
                per_token=_percentiles(cell.measured) if cell.told else None,
                simulated_per_token=_percentiles(cell.simulated),
            )


@dataclass
class _Cell:
    """What the closed loops of a K and concurrency took, measured and simulated.

    Attributes:
        tokens, seconds, simulated_s: of their requests together, settled over visits.
        measured, simulated: seconds per token after the first, of each request in each visit.
        told: whether the server tells all of these.
    """

    tokens: float = 0.0
    seconds: float = 0.0
    simulated_s: float = 0.0
    measured: list[float] = field(default_factory=list[float])
    simulated: list[float] = field(default_factory=list[float])
    told: bool = True

    def add(self, timing: LoadTiming, done: Served, *, told: bool) -> None:
        """One visit."""
        emitted = done.tokens > 0
        self.simulated += done.per_token_s[emitted].tolist()
        decode_s = (timing.user_decode_s if told else ()) or (None,) * len(emitted)
        self.told = self.told and None not in decode_s
        if self.told:
            seconds = np.array(decode_s, dtype=np.float64)[emitted]
            self.measured += (seconds / done.tokens[emitted]).tolist()


def _sent(
    server: Server, timing: LoadTiming, traces: Mapping[str, TextTrace], k: int
) -> list[Request] | None:
    """A load's requests; None where they returned other texts than those that were scored."""
    made: list[Request] = []
    for name, budget, returned in zip(timing.texts, timing.budgets, timing.returned, strict=True):
        size = returned - server.counting.first_position
        trace = traces.get(name)
        if trace is None or size > len(trace.tokens):
            return None
        request = server.text(trace, k, budget, size).certain
        assert request is not None  # at temperature 0
        made.append(request)
    return made


def _percentiles(seconds: Sequence[float]) -> Percentiles:
    p50, p95 = np.percentile(seconds, [50, 95]).tolist()
    return Percentiles(p50, p95 if len(seconds) >= 20 else None)

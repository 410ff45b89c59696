"""A plan from its simulations: which K meets a goal, and on how many cards.

A goal is met where the percentile over the requests of all seeds is within it. The largest rate
lies on the line between two simulated ones. Beyond its capacity, at which a server ends requests
while all of its slots are taken, a queue grows without end: no goal is met there.

Intervals have two parts, both by the jackknife: parts of the seeds, and groups of the prompts.

A fleet splits its requests between cards at random, so of Poisson arrivals each card sees such at
its share of the rate: cards = the rate / the largest rate of one card, rounded up. Recorded
arrivals are stretched to a card's rate, and keep their shape.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np

from harness.analysis.caveats.models import other_card
from harness.analysis.caveats.prompts import k_left_out
from harness.analysis.caveats.servers import loads_disturbed, plan_few_beyond, plan_not_measured
from harness.analysis.setup import Setup, card_of, run_facts
from harness.records import SimulatedChoice
from harness.stats.jackknife import (
    CONFIDENCE,
    Array,
    Interval,
    half_width,
    joined,
    left_out_variance,
)
from harness.storage.manifest import PlannedServer
from harness.summary import Caveat, Plan, PlanChoice, PlanPoint, Summary
from harness.theory.cost import usd_per_million_tokens

# Simulated rates, and the shares of a capacity that are the least and the largest of them
RATES, LEAST, MOST = 10, 0.02, 0.97
# Of a seed's requests, those that find the server emptier than it will be
WARM_UP = 0.2


def analyse_plan(setup: Setup) -> Summary:
    """The plan that a run simulated, and what to mind; neither where it simulated nothing."""
    run = setup.run
    summary, server = Summary(run=run_facts(setup, ())), run.manifest.planned
    if server is None or not run.simulated:
        return summary
    plan = plan_from(server, run.simulated, run.config)
    card = card_of(setup)
    elsewhere = card.name if card and server.other_device else None
    said = [*other_card.of(elsewhere, server.other_device), *caveats_of(server, plan)]
    return replace(summary, plan=plan, caveats=tuple(said))


def plan_from(
    server: PlannedServer, simulated: Sequence[SimulatedChoice], config: Mapping[str, Any]
) -> Plan:
    """The plan of the simulated choices, the first of which is no draft; `config` has the goal."""
    rate, goals = float(config["rate"]), goals_of(config["tpot_ms"], config["ttft_ms"])
    curves = [Curve(each) for each in simulated]
    held = [curve.held(goals) for curve in curves]
    tpot_s, ttft_s = (None if goal == np.inf else goal for goal in goals.tolist())
    return Plan(
        run=server.run,
        engine=server.engine,
        draft=server.draft,
        temperature=server.temperature,
        slots=server.slots,
        rate=rate,
        percentile=float(config["percentile"]),
        tpot_s=tpot_s,
        ttft_s=ttft_s,
        arrivals="poisson" if config["arrivals"] is None else "recorded",
        seeds=config["seeds"],
        requests=config["requests"],
        prompts=server.prompts,
        tokens=server.tokens,
        choices=tuple(
            _choice(curve, largest, held[0], rate, server)
            for curve, largest in zip(curves, held, strict=True)
        ),
        stops_paying=_stops_paying(curves),
        checks=server.checks,
    )


def goals_of(tpot_ms: float | None, ttft_ms: float | None) -> Array:
    """(TPOT, TTFT) in seconds; infinite where there is no goal."""
    return np.array([np.inf if ms is None else ms / 1e3 for ms in (tpot_ms, ttft_ms)])


def excess(waits: Array, goals: Array) -> Array:
    """The larger of [..., (TPOT, TTFT)] / their goals."""
    return (waits / goals).max(axis=-1)


def bracket(waits: Mapping[float, Array], goals: Array) -> tuple[float | None, float] | None:
    """The rates between which the goals, (TPOT, TTFT), are just met, of waits by rate.

    None where they are met at every rate; the first is None where they are met at none.
    """
    rates = sorted(waits)
    beyond = next((rate for rate in rates if excess(waits[rate], goals) > 1.0), None)
    if beyond is None:
        return None
    return max((rate for rate in rates if rate < beyond), default=None), beyond


def shared_rates(capacities: Sequence[float]) -> list[float]:
    """The rates that all choices are simulated at, by the capacities of those on the engine."""
    return (max(capacities) * np.array([LEAST, *np.arange(1, RATES) / RATES])).tolist()


class Curve:
    """Waits of users with a choice, by rate, seconds."""

    def __init__(self, choice: SimulatedChoice) -> None:
        self.choice = choice
        self._place = {rate: at for at, rate in enumerate(choice.rates)}
        self.waits = {rate: np.array(choice.waits_s[at]) for rate, at in self._place.items()}
        self.capacity = Varied(
            choice.capacity,
            np.array(choice.capacity_without_seeds),
            np.array(choice.capacity_without_prompts),
        )

    def varied(self, rate: float) -> tuple[Array, Array]:
        """[part, (TPOT, TTFT)] at a rate without each part of the seeds, then of the prompts."""
        at = self._place[rate]
        without = (self.choice.without_seeds_s[at], self.choice.without_prompts_s[at])
        return np.reshape(without[0], (-1, 2)), np.reshape(without[1], (-1, 2))

    def held(self, goals: Array) -> "Varied":
        """The largest rate at which [(TPOT, TTFT)] are within the goals; 0.0 for none.

        On the line between two simulated rates; where seeds or prompts differ in how far they are
        from the goal there, the rate differs by that much / the line's slope.
        """
        between, most = bracket(self.waits, goals), self.capacity
        if between is None:
            return Varied(MOST * most.value, MOST * most.without_seeds, MOST * most.without)
        low, high = between
        if low is None:
            return Varied(0.0, 0.0 * most.without_seeds, 0.0 * most.without)
        above = [float(excess(self.waits[rate], goals)) for rate in (low, high)]
        slope = (above[1] - above[0]) / (high - low)
        rate = low + (1.0 - above[0]) / slope

        def moved(at_low: Array, at_high: Array) -> Array:
            off = [excess(at_low, goals) - above[0], excess(at_high, goals) - above[1]]
            return np.maximum(0.0, rate - np.mean(off, axis=0) / slope)

        return Varied(rate, *map(moved, self.varied(low), self.varied(high)))


@dataclass(frozen=True, eq=False)
class Varied:
    """A number, and how it varies."""

    value: float
    without_seeds: Array  # [part] without that part of the seeds
    without: Array  # [group] without that group of the prompts; empty where that is not known

    def interval(self) -> Interval | None:
        """Over other prompts and arrivals; None where too little is known."""
        both = (self.without_seeds, self.without)
        if min(map(len, both)) < 2:
            return None
        variance = joined(left_out_variance(each, np.ones(len(each))) for each in both)
        half = float(half_width(variance, CONFIDENCE))
        return Interval(max(0.0, self.value - half), self.value + half)

    def over(self, other: "Varied") -> "Varied | None":
        """The ratio of the two, part by part and group by group; None where the other may be 0."""
        if min(other.value, *other.without_seeds, *other.without) <= 0.0:
            return None
        without = self.without / other.without if len(self.without) else self.without
        without_seeds = self.without_seeds / other.without_seeds
        return Varied(self.value / other.value, without_seeds, without)


def _choice(
    curve: Curve, held: Varied, plain: Varied, rate: float, server: PlannedServer
) -> PlanChoice:
    interval, ratio, capacity = held.interval(), held.over(plain), curve.capacity.interval()
    of_ratio = ratio and ratio.interval()
    cards = ceil(rate / held.value - 1e-9) if held.value > 0.0 else None
    price = server.price_per_hour_usd
    usd = None if cards is None or price is None else cards * price
    points = tuple(PlanPoint(each, *waits.tolist()) for each, waits in sorted(curve.waits.items()))
    at_rate = next((_with_intervals(each, curve) for each in points if each.rate == rate), None)
    return PlanChoice(
        draft=curve.choice.draft,
        policy=curve.choice.policy,
        k=curve.choice.k,
        ks=tuple(curve.choice.ks),
        on_engine=curve.choice.on_engine,
        capacity=curve.capacity.value,
        capacity_lo=capacity and capacity.lo,
        capacity_hi=capacity and capacity.hi,
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
        else usd_per_million_tokens(1.0 / (rate * server.tokens), usd),
    )


def _with_intervals(point: PlanPoint, curve: Curve) -> PlanPoint:
    without_seeds, without = curve.varied(point.rate)
    tpot, ttft = (
        Varied(value, without_seeds[:, at], without[:, at]).interval()
        for at, value in enumerate((point.tpot_s, point.ttft_s))
    )
    return replace(
        point,
        tpot_lo_s=tpot and tpot.lo,
        tpot_hi_s=tpot and tpot.hi,
        ttft_lo_s=ttft and ttft.lo,
        ttft_hi_s=ttft and ttft.hi,
    )


def _stops_paying(curves: Sequence[Curve]) -> float | None:
    """The shared rate from which on plain decoding has the shortest TPOT at every one."""
    plain, *_ = served = [curve for curve in curves if curve.choice.on_engine]
    stops: float | None = None
    for rate in sorted(shared_rates([curve.capacity.value for curve in served])):
        if rate not in plain.waits:
            continue
        waits = [float(curve.waits[rate][0]) for curve in served if rate in curve.waits]
        if waits[0] > min(waits):
            stops = None
        elif stops is None:
            stops = rate
    return stops


def caveats_of(server: PlannedServer, plan: Plan) -> Iterator[Caveat]:
    yield from k_left_out.of(server.lossy, "not_lossless")
    yield from loads_disturbed.of(server.disturbed)
    yield from plan_few_beyond.of(plan, 1.0 - WARM_UP)
    yield from plan_not_measured.of(server, plan)

"""Which K or policy meets a latency goal at a rate of requests, and on how many cards.

From a server run with requests side by side: its texts say what rounds accept (match bits, or chances
from which flags are drawn), its closed loops what iterations and starts cost, R(K, B)
(`harness.analysis.batch_schedule`), its single requests what a prompt's length costs. These drive a
simulated server (`harness.simulation`) at a grid of rates up to nearly each choice's capacity.

One seed is one sequence of requests and arrivals, the same for every choice and rate; so choices are
compared in pairs. A goal is met where the mean over seeds of the percentile is within it, and the
largest rate lies on the line between two simulated ones. Beyond its capacity, at which a server ends
requests while all of its slots are taken, a queue grows without end: no goal is met there.

Intervals have two parts: seeds (the error of a mean), and prompts (the jackknife over groups of
them: each group is replaced by other prompts in the same sequences). The error of the costs is not in
them; `PlanCheck`s show it, where closed loops are simulated at costs that other prompts gave.

A fleet splits its requests between cards at random, so of Poisson arrivals each card sees such at its
share of the rate: cards = the rate / the largest rate of one card, rounded up.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from math import ceil
from typing import Literal

import numpy as np

from harness.analysis.batch_schedule import (
    ClosedLoad,
    LoadCosts,
    LoadKey,
    ReplayedRequests,
    closed_loads,
    costs_without,
    fit_load_costs,
)
from harness.analysis.cells import completed
from harness.analysis.replayed import accept_chances
from harness.analysis.request_times import fit_line
from harness.analysis.server_run import ServedRun
from harness.analysis.setup import Setup
from harness.config import PlanConfig
from harness.records import GREEDY, LoadTiming, Rule, TextTrace, UserError, grouped
from harness.serving.engines import spec_of
from harness.serving.round_counting import Counting
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
from harness.storage import SERVER, StoredRun
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
RATES, LEAST, MOST = 12, 0.02, 0.97
# Of a seed's requests, those that find the server emptier than it will be
WARM_UP = 0.2
# Groups of prompts, each left out in so many of the seeds
GROUPS, LEFT_OUT_SEEDS = 8, 2


@dataclass(frozen=True, eq=False)
class Server:
    """What a stored server run says of one temperature.

    Attributes:
        served: the run.
        temperature: of its requests.
        counting, rule: of its engine.
        traces: of the plain server's texts.
        loads: its closed loops with room for all of their requests.
        costs: of these.
    """

    served: ServedRun
    temperature: float
    counting: Counting
    rule: Rule
    traces: Sequence[TextTrace]
    loads: Mapping[LoadKey, ClosedLoad]
    costs: LoadCosts

    @classmethod
    def of(cls, run: StoredRun, temperature: float | None) -> "Server":
        """Of a stored run, at its first temperature if None.

        Raises:
            UserError: it is no server run, or does not tell what requests side by side cost.
        """
        key = f"run={run.folder}"
        if run.door != SERVER:
            raise UserError(f"{key}: made by {run.door}, not by {SERVER}; name a server run")
        if run.manifest.engine is None or not run.trials:
            raise UserError(f"{key}: it measured nothing; resume={run.folder} continues it")
        served = ServedRun(Setup(run))
        known = served.temperatures
        if temperature is not None and temperature not in known:
            listed = ", ".join(f"{value:g}" for value in known)
            raise UserError(f"temperature={temperature:g}: {key} has {listed}; give one of these")
        chosen = known[0] if temperature is None else temperature
        counting, rule = served.counting, served.engine.rule
        traces = [t for t in run.traces if t.k == 0 and t.temperature == chosen]
        if counting is None or rule is None or not traces:
            raise UserError(
                f"{key}: its texts are not scored by the pair, or how its engine counts rounds is"
                " not known, so what rounds accept is not known; measure it with score=true"
            )
        timings = [t for t in run.loads if t.temperature == chosen and _has_room(t)]
        loads = closed_loads(timings, ReplayedRequests(traces, rule, counting))
        replayed = [load for load in loads.values() if load.replayed is not None]
        costs = fit_load_costs(replayed) if replayed else None
        if costs is None:
            raise UserError(
                f"{key}: no R(K, B) at temperature {chosen:g}: it timed too few requests side by"
                f" side; this measures them: {_with_loads(run)}"
            )
        return cls(served, chosen, counting, rule, traces, loads, costs)

    @property
    def slots(self) -> int:
        """Requests side by side of the largest closed loop."""
        return max(self.costs.times.by_batch)

    @property
    def by_runs(self) -> bool | None:
        """Whether neighbouring slots alone share a pass; None where that is not known."""
        engine = self.served.engine
        flag = spec_of(engine.name).unified_flag
        if flag is None:
            return False
        lines = [command.line for command in engine.commands if command.slots > 1]
        return not any(flag in line.split() for line in lines) if lines else None

    def prices(self, costs: LoadCosts, slots: int, ks: Sequence[int]) -> tuple[Costs, Costs]:
        """The plain server's, and that of one that drafts up to the largest of these K."""
        times = costs.times
        if self.by_runs:
            # In between the slots were neighbours at times, and at times not
            batches = {min(times.by_batch), max(times.by_batch)}
            times = replace(times, by_batch={b: times.by_batch[b] for b in sorted(batches)})
        rows = [[times.at(n, b) for n in range(max(ks) + 1)] for b in range(slots + 1)]
        lengths = {f"{t.prompt_set}/{t.prompt}": t.prompt_tokens for t in self.traces}
        sent = [lengths[name] for load in self.loads.values() for name in load.timings[0].texts]
        mean = float(np.mean(sent))

        def priced(start_s: float, token_s: float, rows: Sequence[Sequence[float]]) -> Costs:
            token_s = min(token_s, start_s / mean)
            return Costs(rows, start_s - token_s * mean, token_s, bool(self.by_runs))

        return (
            priced(costs.plain_start_s, self._prompt_token_s([0]), [row[:1] for row in rows]),
            priced(costs.start_s, self._prompt_token_s(ks), rows),
        )

    def _prompt_token_s(self, ks: Sequence[int]) -> float:
        """Of a prefill, by requests that were sent one at a time; 0.0 where these do not tell."""
        done = [
            (trial.prompt_tokens, trial.prefill_s)
            for trial in completed(self.served.trials)
            if trial.k in ks and trial.concurrency == 1
            if trial.prompt_tokens is not None and trial.prefill_s
        ]
        by_length = grouped(done, lambda pair: pair[0])
        if len(by_length) < 2:
            return 0.0
        seconds = [float(np.median([each for _, each in made])) for made in by_length.values()]
        return fit_line(np.array([*by_length], dtype=np.float64), np.array(seconds), net=False)[1]

    @property
    def prompts_priced(self) -> bool:
        """Whether it is known what a prompt's length costs."""
        return self._prompt_token_s([0]) > 0.0

    def text(self, trace: TextTrace, k: int, budget: int, size: int) -> Text:
        """The first `size` tokens that rounds emitted of a text, as drafted up to k by the engine."""
        most = self.counting.proposed(k, budget)[:size]
        if trace.proposed is not None:
            most = np.minimum(most, trace.proposed[:size])
        chances = accept_chances(trace, self.rule, k)[:size]
        return Text(trace.prompt_set, trace.prompt, trace.prompt_tokens, chances, most)

    def texts(self, k: int) -> list[Text]:
        """The plain server's texts, with the budgets that they had."""
        asked = int(self.served.setup.run.config["new_tokens"])
        first = self.counting.first_position
        sizes = [len(trace.tokens) for trace in self.traces]
        budgets = [
            size + first if trace.stop_reason == "budget" else asked
            for trace, size in zip(self.traces, sizes, strict=True)
        ]
        asked_of = zip(self.traces, budgets, sizes, strict=True)
        return [self.text(trace, k, budget, size) for trace, budget, size in asked_of]


def _has_room(timing: LoadTiming) -> bool:
    return timing.slots is None or timing.slots >= (timing.concurrency or 1)


def _with_loads(run: StoredRun) -> str:
    """The command that made a run, with requests side by side."""
    words = [each for each in run.manifest.environment.command[1:] if "concurrency=" not in each]
    return " ".join(["python -m harness.server", *words, "concurrency=[1,2,4]"])


# ---- what is simulated ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Choice:
    """A way to serve, with what it costs."""

    policy: PlanPolicy
    k: int
    costs: Costs
    make: Callable[[], Policy]
    ks: tuple[int, ...] = ()


class _Traffic:
    """The requests and arrivals of each seed, and with a group of the prompts left out."""

    def __init__(
        self,
        texts: Sequence[Text],
        shares: Mapping[str, float],
        config: PlanConfig,
        recorded: Sequence[float] | None,
    ) -> None:
        """Prompt sets count by their shares, the texts of a set alike."""
        self._texts, self._config, self._recorded = texts, config, recorded
        names = [text.prompt_set for text in texts]
        self._weights = np.array([shares[name] / names.count(name) for name in names])
        prompts = list(dict.fromkeys((text.prompt_set, text.prompt) for text in texts))
        self.prompts = prompts
        self.groups = min(GROUPS, len(prompts))
        places = [prompts.index((text.prompt_set, text.prompt)) for text in texts]
        self._group = np.array(places) % self.groups
        self.of = cache(self._of)

    @property
    def number(self) -> int:
        """Requests of a seed."""
        return self._config.requests

    def _of(self, seed: int, left_out: int | None = None) -> tuple[list[Request], Array]:
        """The requests of a seed, and when they come in units of the mean time between two."""
        random = np.random.default_rng((self._config.seed, seed))
        first, second = random.random((2, self.number))
        longest = max(len(text.chances) for text in self._texts)
        uniforms = random.random((self.number, longest))
        if self._recorded is not None:
            arrivals = as_recorded(self._recorded, self.number, random)
        else:
            arrivals = at_random(self.number, random, together=self._config.together)
        rows = _drawn(self._weights, first)
        if left_out is not None:
            others = _drawn(self._weights * (self._group != left_out), second)
            rows = np.where(self._group[rows] == left_out, others, rows)
        drawn = zip(rows.tolist(), uniforms, strict=True)
        return [self._texts[row].drawn(chance) for row, chance in drawn], arrivals

    def served(
        self, choice: _Choice, rate: float, seed: int, left_out: int | None = None
    ) -> Served:
        """What becomes of a seed's requests at a rate; an infinite one is a closed loop."""
        requests, arrivals = self.of(seed, left_out)
        return simulate(requests, arrivals / rate, choice.costs, choice.make())


def _drawn(weights: Array, uniforms: Array) -> Index:
    """A place for each uniform, with these chances."""
    ends = np.cumsum(weights) / weights.sum()
    return np.minimum(np.searchsorted(ends, uniforms, side="right"), len(ends) - 1)


def _choices(
    server: Server, prices: tuple[Costs, Costs], ks: Sequence[int], traffic: _Traffic
) -> Iterator[_Choice]:
    """Plain decoding, each K that was measured, by load, SGLang's tiers, and the oracle."""
    plain, speculative = prices
    fixed = [_Choice("fixed", k, speculative if k else plain, lambda k=k: Fixed(k)) for k in ks]
    yield from fixed
    emitted: dict[int, float] = {}
    for choice in fixed:
        done = traffic.served(choice, np.inf, 0)
        emitted[choice.k] = float(done.tokens.sum() / done.rounds.sum())
    rows, largest = speculative.iteration_s, max(ks)
    by_load = tuple(max(ks, key=lambda k, row=row: emitted[k] / row[k]) for row in rows[1:])
    yield _Choice("by_load", largest, speculative, lambda: ByLoad((0, *by_load)), by_load)
    tiers = [
        replace(tier, ks=tuple(takewhile(lambda k: k <= largest, tier.ks))) for tier in SGLANG_TIERS
    ]
    yield _Choice("tiers", largest, speculative, lambda: Tiers(largest, tiers))
    yield _Choice("oracle", largest, speculative, lambda: Oracle(largest, speculative))


@dataclass(frozen=True, eq=False)
class _Simulated:
    """A choice at its rates.

    Attributes:
        rates: ascending.
        values: [rate, seed, (TPOT, TTFT)] the percentile of each.
        without: [rate, group, (TPOT, TTFT)] its mean over the first seeds without a group of the
            prompts.
    """

    choice: _Choice
    capacity: float
    rates: Array
    values: Array
    without: Array

    def largest(self, goals: Array, values: Array) -> float:
        """The largest rate at which [rate, (TPOT, TTFT)] are within the goals; 0.0 for none."""
        excess = (values / goals).max(axis=1)
        beyond = np.flatnonzero(excess > 1.0)
        if len(beyond) == 0:
            return float(self.rates[-1])
        if beyond[0] == 0:
            return 0.0
        pair = slice(beyond[0] - 1, beyond[0] + 1)
        return float(np.interp(1.0, excess[pair], self.rates[pair]))


def _capacity(traffic: _Traffic, choice: _Choice, seeds: int) -> float:
    """Requests per second that leave while all slots are taken and others wait."""
    rates: list[float] = []
    for seed in range(seeds):
        entered = traffic.served(choice, np.inf, seed).entered_s
        first = min(choice.costs.slots, len(entered) - 2)
        rates.append((len(entered) - 1 - first) / (entered[-1] - entered[first]))
    return float(np.mean(rates))


def _simulated(
    traffic: _Traffic, choice: _Choice, capacity: float, rates: Array, config: PlanConfig
) -> _Simulated:
    def percentiles(rate: float, seed: int, left_out: int | None = None) -> Array:
        done = traffic.served(choice, rate, seed, left_out)
        kept = slice(int(WARM_UP * traffic.number), None)
        waits = (done.per_token_s[kept], done.first_token_s[kept])
        return np.array([np.nanpercentile(each, config.percentile) for each in waits])

    few = range(min(LEFT_OUT_SEEDS, config.seeds))
    return _Simulated(
        choice,
        capacity,
        rates,
        np.array([[percentiles(rate, seed) for seed in range(config.seeds)] for rate in rates]),
        np.array(
            [
                [
                    np.mean([percentiles(r, s, g) for s in few], axis=0)
                    for g in range(traffic.groups)
                ]
                for r in rates
            ]
        ),
    )


# ---- the plan ------------------------------------------------------------------------------------


def plan_of(
    run: StoredRun,
    config: PlanConfig,
    *,
    recorded: Sequence[float] | None = None,
    price_per_hour: float | None = None,
    tick: Callable[[], None] = lambda: None,
) -> tuple[Plan, tuple[Caveat, ...]]:
    """What each choice holds, and what to mind.

    Args:
        run: of a server, with requests side by side.
        config: the goal, and how much is simulated.
        recorded: time stamps of requests, ascending; None for random arrivals.
        price_per_hour: of a card, US dollars.
        tick: called as each of the choices is done.

    Raises:
        UserError: the run does not tell what is needed.
    """
    server = Server.of(run, config.temperature)
    slots = server.slots if config.slots is None else config.slots
    if slots > server.slots:
        raise UserError(
            f"slots={slots}: run={run.folder} timed up to {server.slots} requests side by side;"
            f" lower it, or measure it with concurrency=[1,...,{slots}]"
        )
    ks = [0, *sorted({key.k for key in server.loads if key.k})]
    texts = server.texts(max(ks))
    shares = set_weights([text.prompt_set for text in texts], server.served.setup.weights)
    traffic = _Traffic(texts, shares, config, recorded)
    prices = server.prices(server.costs, slots, ks)
    choices = [*_choices(server, prices, ks, traffic)]
    capacities = [_capacity(traffic, choice, config.seeds) for choice in choices]
    able = [c for c, each in zip(capacities, choices, strict=True) if each.policy != "oracle"]
    shared = max(able) * np.array([LEAST, *np.arange(1, RATES) / RATES])
    simulated: list[_Simulated] = []
    for choice, capacity in zip(choices, capacities, strict=True):
        rates = np.unique([*shared, config.rate, MOST * capacity])
        rates = rates[rates <= MOST * capacity]
        simulated.append(_simulated(traffic, choice, capacity, rates, config))
        tick()
    goals = np.array(
        [np.inf if ms is None else ms / 1e3 for ms in (config.tpot_ms, config.ttft_ms)]
    )
    prompt_sets = [name for name, _ in traffic.prompts]
    errors = _Errors(enough_prompts(prompt_sets))
    requests = [request for seed in range(config.seeds) for request in traffic.of(seed)[0]]
    tokens = server.counting.first_position + float(np.mean([each.tokens for each in requests]))
    arrivals: Literal["poisson", "bursts", "recorded"] = "poisson"
    if recorded is not None:
        arrivals = "recorded"
    elif config.together > 1:
        arrivals = "bursts"
    plan = Plan(
        run=str(run.folder),
        engine=server.served.engine.name,
        draft=server.served.setup.draft,
        temperature=server.temperature,
        slots=slots,
        rate=config.rate,
        percentile=config.percentile,
        tpot_s=None if config.tpot_ms is None else config.tpot_ms / 1e3,
        ttft_s=None if config.ttft_ms is None else config.ttft_ms / 1e3,
        arrivals=arrivals,
        seeds=config.seeds,
        requests=config.requests,
        prompts=len(traffic.prompts),
        tokens=tokens,
        choices=tuple(
            _planned(each, simulated[0], goals, config.rate, errors, price_per_hour, tokens)
            for each in simulated
        ),
        stops_paying=_stops_paying(simulated, shared),
        checks=tuple(_checks(server, ks)) if server.temperature == GREEDY else (),
    )
    return plan, tuple(_caveats(server))


@dataclass(frozen=True)
class _Errors:
    """Intervals of what seeds and prompts vary, where there are prompts enough."""

    known: bool

    def interval(self, value: float, by_seed: Array, without: Array) -> Interval | None:
        """From the values by seed, and without each group of the prompts."""
        if not self.known or len(by_seed) < 2:
            return None
        of_seeds = by_seed.var(ddof=1) / len(by_seed)
        parts = [
            Variance(np.asarray(of_seeds), np.asarray(len(by_seed) - 1.0)),
            left_out_variance(without, np.ones(len(without))),
        ]
        half = float(half_width(joined(parts), CONFIDENCE))
        return Interval(max(0.0, value - half), value + half)


def _planned(
    made: _Simulated,
    plain: _Simulated,
    goals: Array,
    rate: float,
    errors: _Errors,
    price_per_hour: float | None,
    tokens: float,
) -> PlanChoice:
    """What a choice holds, next to plain decoding."""
    points = tuple(
        _point(float(each), values, without, errors)
        for each, values, without in zip(made.rates, made.values, made.without, strict=True)
    )

    def largest(of: _Simulated) -> tuple[float, Array, Array]:
        """On the mean, by seed, and without each group."""
        return (
            of.largest(goals, of.values.mean(axis=1)),
            np.array([of.largest(goals, each) for each in of.values.swapaxes(0, 1)]),
            np.array([of.largest(goals, each) for each in of.without.swapaxes(0, 1)]),
        )

    held, before = largest(made), largest(plain)
    interval, ratio = errors.interval(*held), None
    if min(before[0], before[1].min(), before[2].min()) > 0.0:
        value, *others = (one / other for one, other in zip(held, before, strict=True))
        ratio = (value, errors.interval(value, *others))
    cards = ceil(rate / held[0] - 1e-9) if held[0] > 0.0 else None
    usd = None if cards is None or price_per_hour is None else cards * price_per_hour
    per_hour = rate * tokens * SECONDS_PER_HOUR
    return PlanChoice(
        policy=made.choice.policy,
        k=made.choice.k,
        ks=made.choice.ks,
        capacity=made.capacity,
        points=points,
        at_rate=next((point for point in points if point.rate == rate), None),
        largest_rate=held[0],
        largest_rate_lo=interval and interval.lo,
        largest_rate_hi=interval and interval.hi,
        rate_ratio=ratio and ratio[0],
        rate_ratio_lo=ratio and ratio[1] and ratio[1].lo,
        rate_ratio_hi=ratio and ratio[1] and ratio[1].hi,
        cards=cards,
        usd_per_hour=usd,
        usd_per_million_tokens=None if usd is None else 1e6 * usd / per_hour,
    )


def _point(rate: float, values: Array, without: Array, errors: _Errors) -> PlanPoint:
    """Of [seed, (TPOT, TTFT)], and [group, (TPOT, TTFT)]."""
    tpot_s, ttft_s = values.mean(axis=0).tolist()
    tpot, ttft = (
        errors.interval(value, values[:, at], without[:, at])
        for at, value in enumerate((tpot_s, ttft_s))
    )
    return PlanPoint(
        rate,
        tpot_s,
        ttft_s,
        tpot and tpot.lo,
        tpot and tpot.hi,
        ttft and ttft.lo,
        ttft and ttft.hi,
    )


def _stops_paying(simulated: Sequence[_Simulated], rates: Array) -> float | None:
    """The least of the shared rates at which plain decoding has the shortest TPOT."""
    plain, *others = simulated
    for rate in rates.tolist():
        by_policy = [
            float(each.values[each.rates == rate, :, 0].mean())
            for each in (plain, *others)
            if each.choice.policy != "oracle" and rate in each.rates
        ]
        if rate in plain.rates and by_policy[0] <= min(by_policy):
            return rate
    return None


def _caveats(server: Server) -> Iterator[Caveat]:
    engine = server.served.engine
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
    full = [load for load in server.loads.values() if load.full and costs[load.key.group]]
    cells = grouped(full, lambda load: (load.key.concurrency, load.key.k))
    for (concurrency, k), loads in sorted(cells.items()):
        measured, simulated = [list[float]() for _ in range(2)], [list[float]() for _ in range(2)]
        tokens, requests, told = 0, 0, True
        for load in loads:
            known = costs[load.key.group]
            assert known is not None
            plain, speculative = server.prices(known, server.slots, ks)
            priced = speculative if k else plain
            for timing in load.timings:
                sent = _sent(server, timing, traces, max(ks))
                if sent is None:
                    continue
                done = simulate(sent, np.zeros(len(sent)), priced, Fixed(k), concurrency)
                simulated[0].append(float(done.ended_s.max()))
                simulated[1] += done.per_token_s[done.tokens > 0].tolist()
                measured[0].append(timing.seconds)
                decode_s = timing.user_decode_s or (None,) * len(sent)
                told = told and None not in decode_s
                measured[1] += [
                    seconds / request.tokens
                    for seconds, request in zip(decode_s, sent, strict=True)
                    if seconds is not None and request.tokens
                ]
                tokens, requests = tokens + sum(timing.returned), requests + len(sent)
        if requests:
            yield PlanCheck(
                k=k,
                concurrency=concurrency,
                requests=requests,
                tokens_per_second=tokens / sum(measured[0]),
                simulated_tokens_per_second=tokens / sum(simulated[0]),
                per_token=_percentiles(measured[1]) if told else None,
                simulated_per_token=_percentiles(simulated[1]),
            )


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

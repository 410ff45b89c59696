"""The simulations of a plan, from a server run with requests side by side.

Its texts say what rounds accept (match bits, or chances from which flags are drawn), its loads what
iterations and prompts cost, R(K, B), by the server's own clock
(`harness.analysis.iteration_costs`). These drive a simulated server (`harness.simulation`) at a
grid of rates up to nearly each choice's capacity, and between the two rates at which a goal is just
met (`harness.analysis.plan`). The choices are no draft, the draft at each K that was timed under
load, and K by load: at each number of active requests the K of the most tokens per second.

One seed is one sequence of requests and arrivals, the same for every choice and rate; so choices
are compared in pairs. A percentile is over the requests of all seeds: a queue holds up many
requests or none, so that the mean over seeds of each one's percentile is too low. Everything is
simulated again without parts of the seeds, and with groups of the prompts replaced by other prompts
in the same sequences, at costs that were fitted without their times. `PlanCheck`s show the error of
both, where loads are simulated at costs that other prompts gave.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from harness.analysis.batch_schedule import MOST_OTHERS, by_load, disturbed, full_loads
from harness.analysis.plan import MOST, WARM_UP, bracket, goals_of, shared_rates
from harness.analysis.planned_server import Server, at_usual_pace
from harness.analysis.setup import Setup, request_weights
from harness.command_words import as_typed
from harness.config import PlanConfig
from harness.engine_facts.engines import spec_of
from harness.records import GREEDY, LoadTiming, PlanPolicy, SimulatedChoice, UserError
from harness.simulation import (
    Costs,
    Request,
    Served,
    Stream,
    Text,
    as_recorded,
    at_random,
    sent_at_once,
    simulate,
)
from harness.stats.jackknife import Array, Index, enough_prompts, set_weights
from harness.storage import StoredRun
from harness.storage.manifest import PlannedServer
from harness.summary import Percentiles, PlanCheck

# By which more requests come than end, where a capacity is simulated; and of these, a slot's least
# number, so that all slots are taken while the middle half of them ends
OVERLOAD, REQUESTS_PER_SLOT = 1.5, 4
# How often the two rates between which a goal is just met are brought closer
HALVINGS = 2
# Groups of prompts, each left out in turn; and parts of the seeds, at most
GROUPS, PARTS = 6, 20
# Positions of drawn requests that are kept from one rate to the next
MOST_KEPT = 1_000_000


# ---- what is simulated ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Choice:
    """A way to serve, with what it costs."""

    draft: str | None  # None where nothing is ever drafted
    policy: PlanPolicy
    k: int
    # Of its server; then by group of the prompts, fitted without their times, where these are
    # known, else it is the first without them too
    costs: Sequence[Costs]
    by_active: Sequence[int]  # K by how many requests are active, as `simulate` takes it
    on_engine: bool = True  # whether the engine can be started with it


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
        self.number = config.requests  # of a seed
        self._texts, self._config, self._recorded = texts, config, recorded
        self._longest = max((len(t.chances) for t in texts if t.certain is None), default=0)
        names = [text.prompt_set for text in texts]
        of_set = Counter(names)
        self._weights = np.array([shares[name] / of_set[name] for name in names])
        self._of_sets = [np.array(names) == name for name in dict.fromkeys(names)]
        self.prompts = list(dict.fromkeys((text.prompt_set, text.prompt) for text in texts))
        # With too few prompts leaving some out says nothing
        self.groups = GROUPS if enough_prompts([name for name, _ in self.prompts]) else 0
        places = {prompt: place for place, prompt in enumerate(self.prompts)}
        self._group = np.array([places[t.prompt_set, t.prompt] for t in texts]) % GROUPS
        self.texts_of_group = [
            {f"{name}/{prompt}" for name, prompt in self.prompts[group::GROUPS]}
            for group in range(self.groups)
        ]
        self._drawn = cache(self._drawn_of)
        # More than these are drawn again each time they are served
        kept = config.requests * self._longest <= MOST_KEPT
        self.requests = cache(self._requests) if kept else self._streamed

    def _uniforms(self, seed: int, place: int) -> Array:
        """[position] of a request of a seed, whatever text it has."""
        return np.random.default_rng((self._config.seed, seed, place)).random(self._longest)

    def _drawn_of(self, seed: int, left_out: int | None) -> tuple[Index, Array]:
        """[request] the texts of a seed, and arrivals in units of the mean time between two."""
        random = np.random.default_rng((self._config.seed, seed))
        first, second = random.random((2, self.number))
        if self._recorded is not None:
            arrivals = as_recorded(self._recorded, self.number, random)
        else:
            arrivals = at_random(self.number, random)
        rows = _drawn(self._weights, first)
        if left_out is not None:
            # By another of its set, whose share stays
            for of_set in self._of_sets:
                kept = self._weights * of_set * (self._group != left_out)
                if kept.any():
                    others = _drawn(kept, second)
                    replaced = of_set[rows] & (self._group[rows] == left_out)
                    rows = np.where(replaced, others, rows)
        return rows, arrivals

    def _requests(self, seed: int, left_out: int | None = None) -> list[Request]:
        return [*self._streamed(seed, left_out)]

    def _streamed(self, seed: int, left_out: int | None = None) -> Stream:
        """The requests of a seed, each drawn when it enters the server."""
        rows, _ = self._drawn(seed, left_out)
        return Stream(self._texts, rows.tolist(), partial(self._uniforms, seed))

    def served(
        self,
        choice: _Choice,
        rate: float,
        seed: int,
        left_out: int | None = None,
        *,
        evenly: bool = False,
    ) -> Served:
        """A seed's requests at a rate, evenly or not; at an infinite one all are there at once."""
        requests = self.requests(seed, left_out)
        _, arrivals = self._drawn(seed, left_out)
        if evenly:
            arrivals = np.arange(self.number, dtype=np.float64)
        costs, *without = choice.costs
        if left_out is not None and without:
            costs = without[left_out]
        return simulate(requests, arrivals / rate, costs, choice.by_active)


def _drawn(weights: Array, uniforms: Array) -> Index:
    ends = np.cumsum(weights) / weights.sum()
    return np.minimum(np.searchsorted(ends, uniforms, side="right"), len(ends) - 1)


def _choices(
    server: Server, slots: int, ks: Sequence[int], cache: Sequence[float], traffic: _Traffic
) -> Iterator[_Choice]:
    """No draft, a draft at each K, K by load; `cache` tokens of a plain server and with draft."""
    # Of all prompts, then without each group; of the plain server, and of one with a draft
    known = [server.costs, *server.costs_without_texts(traffic.texts_of_group)]
    pairs = [each.priced(slots, max(ks)) for each in known]
    plain_costs, drafting = (
        [replace(each, cache_tokens=tokens) for each in costs]
        for costs, tokens in zip(zip(*pairs, strict=True), (cache[0], cache[-1]), strict=True)
    )
    setup, emitted = server.served.setup, dict[int, float]()
    name = setup.draft
    # A look-up is named as its kind is
    kind = name if server.traces[0].chosen else setup.kind_of(name)
    for k in ks:
        choice = _Choice(name if k else None, "fixed", k, drafting if k else plain_costs, (k,))
        served = traffic.served(choice, np.inf, 0)
        emitted[k] = float(served.tokens.sum() / served.rounds.sum())
        yield choice
    by_load = [
        max(ks, key=lambda k, row=row: emitted[k] / row[k]) for row in drafting[0].iteration_s[1:]
    ]
    on_engine = spec_of(server.served.engine.name).has_k_by_load(kind)
    yield _Choice(name, "by_load", max(ks), drafting, (0, *by_load), on_engine)


class _Curve:
    """Waits of users with a choice, by rate; each rate is simulated once."""

    def __init__(self, traffic: _Traffic, choice: _Choice, config: PlanConfig) -> None:
        self.choice, self._traffic, self._percentile = choice, traffic, config.percentile
        self._seeds, self._groups = range(config.seeds), range(traffic.groups)
        self._waits: dict[float, Array] = {}  # (TPOT, TTFT) in seconds
        # Without each part of the seeds; and without each group of the prompts, at some rates
        self._without_seeds: dict[float, Array] = {}
        self._without_prompts: dict[float, Array] = {}
        self._capacities = self._capacities_of()
        # Requests per second that leave while all slots are taken and others wait
        self.capacity = float(self._capacities.mean())

    def at(self, rate: float) -> Array:
        """The waits at a rate, (TPOT, TTFT) in seconds."""
        if rate not in self._waits:
            done = [self._traffic.served(self.choice, rate, seed) for seed in self._seeds]
            parts = [[done[seed] for seed in kept] for kept in self._parts()]
            self._waits[rate] = self._percentiles(done)
            self._without_seeds[rate] = np.array([self._percentiles(part) for part in parts])
        return self._waits[rate]

    def _parts(self) -> list[list[int]]:
        """The seeds without each part of them."""
        parts = min(PARTS, len(self._seeds))
        return [[seed for seed in self._seeds if seed % parts != part] for part in range(parts)]

    def _leave_out(self, rate: float) -> None:
        """Simulate a rate without each group of the prompts, too."""
        served = partial(self._traffic.served, self.choice, rate)
        done = [[served(seed, group) for seed in self._seeds] for group in self._groups]
        self._without_prompts[rate] = np.array([self._percentiles(each) for each in done])

    def _percentiles(self, seeds: Sequence[Served]) -> Array:
        """[(TPOT, TTFT)] over the requests of some seeds."""
        kept = slice(int(WARM_UP * self._traffic.number), None)
        per_token_s = np.concatenate([each.per_token_s[kept] for each in seeds])
        first_s = np.concatenate([each.first_token_s[kept] for each in seeds])
        # In each draw of what prefills take
        first_s = np.percentile(first_s, self._percentile, axis=0)
        return np.array([np.nanpercentile(per_token_s, self._percentile), first_s.mean()])

    def _capacities_of(self, left_out: int | None = None) -> Array:
        """[seed] requests of the middle half that end a second, while more come than can end.

        They come evenly: requests that all begin at once would end in bursts.
        """
        rates: list[float] = []
        for seed in self._seeds:
            together = self._traffic.served(self.choice, np.inf, seed, left_out).ended_s
            rate = OVERLOAD * len(together) / together.max()
            served = self._traffic.served(self.choice, rate, seed, left_out, evenly=True)
            ended = np.sort(served.ended_s)
            begin, end = len(ended) // 4, 3 * len(ended) // 4
            rates.append((end - begin) / (ended[end] - ended[begin]))
        return np.array(rates)

    def simulate(self, rates: Sequence[float], goals: Array, asked: float) -> SimulatedChoice:
        """Some rates up to nearly the capacity, the asked one, and where the goals are just met."""
        most = MOST * self.capacity
        for rate in (*rates, asked, most):
            if rate <= most:
                self.at(rate)
        for _ in range(HALVINGS):
            between = bracket(self._waits, goals)
            if between is not None and between[0] is not None:
                self.at((between[0] + between[1]) / 2.0)
        low, high = bracket(self._waits, goals) or (None, None)
        for rate in {asked, *((low, high) if low is not None else ())} & {*self._waits}:
            self._leave_out(rate)
        return self.made()

    def made(self) -> SimulatedChoice:
        choice, rates, none = self.choice, sorted(self._waits), np.zeros((0, 2))
        return SimulatedChoice(
            draft=choice.draft,
            policy=choice.policy,
            k=choice.k,
            ks=tuple(choice.by_active[1:]),
            on_engine=choice.on_engine,
            capacity=self.capacity,
            capacity_without_seeds=tuple(
                float(self._capacities[kept].mean()) for kept in self._parts()
            ),
            capacity_without_prompts=tuple(
                float(self._capacities_of(group).mean()) for group in self._groups
            ),
            rates=tuple(rates),
            waits_s=tuple(self._waits[rate].tolist() for rate in rates),
            without_seeds_s=tuple(self._without_seeds[rate].tolist() for rate in rates),
            without_prompts_s=tuple(
                self._without_prompts.get(rate, none).tolist() for rate in rates
            ),
        )


# ---- the plan ------------------------------------------------------------------------------------


def simulated_plan(
    run: StoredRun,
    config: PlanConfig,
    *,
    recorded: Sequence[float] | None = None,
    expect: Callable[[int], None] = lambda _: None,
    tick: Callable[[], None] = lambda: None,
) -> tuple[PlannedServer, tuple[SimulatedChoice, ...]]:
    """The planned server, and the simulated waits of each choice.

    `recorded` are ascending time stamps of requests; None for random arrivals. `expect` is called
    with the number of choices, `tick` as each is done. Raises UserError where the run does not tell
    what is needed.
    """
    server = Server.of(run, config.temperature[0] if config.temperature else None)
    slots, ks = _slots(server, config), server.ks
    if len(ks) == 1:
        raise UserError(
            f"{as_typed('run', run.folder)}: every K changes what is generated at temperature"
            f" {server.temperature:g}; there is nothing to plan until its server is lossless"
        )
    setup = Setup(run)
    texts = server.texts(max(ks), setup.new_tokens or 0)
    shares = set_weights([text.prompt_set for text in texts], request_weights(setup))
    traffic = _Traffic(texts, shares, config, recorded)
    choices = [*_choices(server, slots, ks, config.cache_tokens or [np.inf], traffic)]
    expect(len(choices))
    curves = [_Curve(traffic, each, config) for each in choices]
    rates = shared_rates([curve.capacity for curve in curves if curve.choice.on_engine])
    goals = goals_of(config.tpot_ms, config.ttft_ms)
    made: list[SimulatedChoice] = []
    for curve in curves:
        made.append(curve.simulate(rates, goals, config.rate))
        tick()
    sizes = [each.tokens for seed in range(config.seeds) for each in traffic.requests(seed)]
    tokens = server.counting.first_position + float(np.mean(sizes))
    checks = tuple(load_checks(server, ks)) if server.temperature == GREEDY else ()
    known = replace(
        facts_of(server), slots=slots, prompts=len(traffic.prompts), tokens=tokens, checks=checks
    )
    return known, tuple(made)


def facts_of(server: Server) -> PlannedServer:
    """A plan's facts of its server, with as many slots as were timed."""
    loads = server.served.setup.run.loads
    of_loops = [timing for load in server.loads.values() for timing in load.timings]
    return PlannedServer(
        run=str(server.served.setup.run.folder),
        engine=server.served.engine.name,
        draft=server.served.setup.draft,
        temperature=server.temperature,
        slots=server.slots,
        slots_timed=server.slots,
        lossy=server.lossy,
        prompts_priced=server.costs.plain.token_s > 0.0,
        disturbed=disturbed(loads, server.served.engine.clock),
        largest_rate=max((timing.rate for timing in server.arriving if timing.rate), default=None),
        other_slots=tuple(sorted({t.slots for t in loads if t.rate and t.slots} - {server.slots})),
        context=max(trace.prompt_tokens + len(trace.tokens) for trace in server.traces),
        # Tokens of prompt and text of the longest request of the loops
        context_timed=max(
            server.by_name[name].prompt_tokens + returned - server.counting.first_position
            for timing in of_loops
            for name, returned in zip(timing.texts, timing.returned, strict=True)
            if name in server.by_name
        ),
    )


def _slots(server: Server, config: PlanConfig) -> int:
    asked = config.slots
    if asked is not None and asked > server.slots:
        raise UserError(
            f"slots={asked}: {as_typed('run', server.served.setup.run.folder)} timed up to"
            f" {server.slots}"
            f" requests side by side; lower it, or measure it with concurrency=[1,...,{asked}]"
        )
    slots = asked or server.slots
    if config.requests < REQUESTS_PER_SLOT * slots:
        raise UserError(
            f"requests={config.requests}: too few to keep {slots} slots busy; give"
            f" requests={REQUESTS_PER_SLOT * slots} or more, or fewer slots="
        )
    return slots


# ---- next to what was measured -------------------------------------------------------------------


def load_checks(server: Server, ks: Sequence[int]) -> Iterator[PlanCheck]:
    """The loads with full budgets, at what those of the other groups of prompts cost.

    Each is simulated as fast as the machine was around it, by the request that it decoded alone.
    Loads that others disturbed say nothing of the simulation, and are left out.
    """
    loads = [
        timing
        for timing in full_loads(server.served.setup.run.loads)
        if timing.temperature == server.temperature and not timing.varying and timing.k in ks
        if timing.slots is None or timing.slots >= (timing.concurrency or 1)
        if timing.concurrency or timing in server.arriving
        if (timing.others or 0.0) <= MOST_OTHERS
    ]
    costs = {group: server.costs_without(group) for group in {each.group for each in loads}}
    for timings in by_load(loads):
        done: list[_Simulated] = []
        for timing in timings:
            known, sent = costs[timing.group], _sent(server, timing, max(ks))
            if known is None or sent is None:
                continue
            plain, speculative = known.priced(server.slots, max(ks))
            usual = at_usual_pace(timing, server.pace(timing))
            arrivals = usual.due_s or sent_at_once(len(sent), timing.concurrency)
            priced = speculative if timing.k else plain
            served = simulate(sent, arrivals, priced, [timing.k], timing.concurrency)
            done.append(_Simulated(timing, served, server.pace(timing)))
        if done:
            yield _checked(done)


class _Simulated(NamedTuple):
    """A load, its simulation, and how many times as long the machine's pace makes that."""

    timing: LoadTiming
    served: Served
    pace: float


def _checked(loads: Sequence[_Simulated]) -> PlanCheck:
    first = loads[0].timing
    told = all(t.user_decode_s and None not in t.user_decode_s for t, _, _ in loads)
    seconds = np.sum([(t.seconds, pace * each.ended_s.max()) for t, each, pace in loads], axis=0)
    tokens = sum(sum(timing.returned) for timing, _, _ in loads)
    per_second = tokens / seconds if first.concurrency else (None, None)
    per_token, first_token = (
        map(_percentiles, zip(*map(_waits, loads), strict=True)) if told else (None, None)
    )
    return PlanCheck(
        k=first.k,
        concurrency=first.concurrency,
        rate=first.rate,
        requests=sum(len(each.tokens) for _, each, _ in loads),
        tokens_per_second=per_second[0],
        simulated_tokens_per_second=per_second[1],
        per_token=per_token,
        simulated_per_token=_percentiles(
            [pace * each.per_token_s[each.tokens > 0, None] for _, each, pace in loads]
        ),
        first_token=first_token,
        simulated_first_token=_percentiles([pace * each.first_token_s for _, each, pace in loads]),
    )


def _waits(load: _Simulated) -> tuple[Array, Array]:
    """Measured: [n, 1] of each token after the first, and of each request until its first."""
    timing, served = load.timing, load.served
    emitted, decoding_s = served.tokens > 0, np.array(timing.user_decode_s, dtype=np.float64)
    late_s = np.subtract(timing.sent_s, timing.due_s) if timing.due_s else 0.0
    per_token_s = decoding_s[emitted] / served.tokens[emitted]
    return per_token_s[:, None], (np.array(timing.user_s) + late_s - decoding_s)[:, None]


def _sent(server: Server, timing: LoadTiming, k: int) -> list[Request] | None:
    """A load's requests; None where they returned other texts than those that were scored."""
    made: list[Request] = []
    for name, budget, returned in zip(timing.texts, timing.budgets, timing.returned, strict=True):
        size = returned - server.counting.first_position
        trace = server.by_name.get(name)
        if trace is None or size > len(trace.tokens):
            return None
        request = server.text(trace, k, budget, size).certain
        assert request is not None  # at temperature 0
        made.append(request)
    return made


def _percentiles(loads: Sequence[Array]) -> Percentiles:
    """Over the requests of [n, draw] of each load, the means over the draws."""
    draws = max(each.shape[1] for each in loads)
    waits = np.concatenate([np.broadcast_to(each, (len(each), draws)) for each in loads])
    p50, p95 = np.percentile(waits, [50, 95], axis=0).mean(axis=1).tolist()
    return Percentiles(p50, p95 if len(waits) >= 20 else None)

"""A server that is to be planned, from a stored server run: its costs, texts and draft."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import numpy as np

from harness.analysis.batch_schedule import MOST_OTHERS, ClosedLoad, LoadKey, closed_loads
from harness.analysis.iteration_costs import (
    IterationCosts,
    SentLoad,
    evenly_emitted,
    fit_iterations,
    fit_without_texts,
    rounds_of,
    tells_times,
)
from harness.analysis.replayed import as_served, proposed_at
from harness.analysis.server_lossless import failed_gates, gates
from harness.analysis.server_texts import ServedTexts, served_texts
from harness.analysis.setup import Setup
from harness.command_words import as_typed
from harness.engine_facts.engines import spec_of
from harness.engine_facts.spec import Counting
from harness.records import LoadTiming, Rule, ServingEngine, TextTrace, UserError, grouped, where
from harness.simulation import Request, Text
from harness.storage import StoredRun
from harness.storage.manifest import SERVER


@dataclass(frozen=True, eq=False)
class Server:
    """A server run at one temperature: traces of plain texts, loops with room for all requests."""

    served: ServedTexts
    temperature: float
    counting: Counting
    rule: Rule
    traces: Sequence[TextTrace]
    loads: Mapping[LoadKey, ClosedLoad]

    @classmethod
    def of(cls, run: StoredRun, temperature: float | None) -> "Server":
        """The server of a run, at its first temperature if None; UserError where texts lack."""
        key = as_typed("run", run.folder)
        if run.door != SERVER:
            raise UserError(
                f"{key}: made by {run.door}; name a server run with concurrency=[1,2,4], since a"
                " plan is of the draft that was served under load"
            )
        if run.manifest.engine is None or not run.trials:
            raise UserError(
                f"{key}: it measured nothing; {as_typed('resume', run.folder)} continues it"
            )
        served = served_texts(Setup(run))
        known = served.temperatures
        if temperature is not None and temperature not in known:
            listed = ", ".join(f"{value:g}" for value in known)
            raise UserError(f"temperature={temperature:g}: {key} has {listed}; give one of these")
        chosen = known[0] if temperature is None else temperature
        counting, rule = served.counting, served.engine.rule
        scored = (t for t in run.traces if t.k == 0 and t.temperature == chosen)
        traces = sorted(scored, key=lambda trace: trace.key)
        if counting is None or rule is None or not traces:
            raise UserError(
                f"{key}: its texts are not scored by the pair, or how its engine counts rounds is"
                " not known, so what rounds accept is not known; measure it with score=true"
            )
        timings = [
            t
            for t in run.loads
            if t.temperature == chosen and not t.varying
            if t.slots is None or t.slots >= (t.concurrency or 1)
        ]
        return cls(served, chosen, counting, rule, traces, closed_loads(timings))

    @cached_property
    def costs(self) -> IterationCosts:
        """Costs of iterations by all loads; UserError where these do not tell them."""
        fitted = _fitted(self, [*self.loads.values()])
        setup, engine = self.served.setup, self.served.engine
        if fitted is not None:
            _check_one_forward(engine, as_typed("run", setup.run.folder))
            return fitted
        timings = [timing for load in self.loads.values() for timing in load.timings]
        if engine.clock != "engine" or not tells_times(timings):
            why = f"this {spec_of(engine.name).title} does not tell them"
            if engine.clock != "engine":
                why = "this one was timed by processor time; run it again with clock=engine"
            raise UserError(
                f"{as_typed('run', setup.run.folder)}: a plan needs the prefill and the decoding"
                f" of each request by the clock of the server, and {why}"
            )
        # Where the run's command can be typed again
        command = setup.command_line("concurrency=[1,2,4]")
        how = f"this measures them: {command}" if command else "give the run concurrency=[1,2,4]"
        raise UserError(
            f"{as_typed('run', setup.run.folder)}: it timed {'too few' if timings else 'no'}"
            f" requests side by side at temperature {self.temperature:g}; {how}"
        )

    def costs_without(self, group: str) -> IterationCosts | None:
        """The costs by the loads of the other groups; None where these do not tell."""
        return _fitted(self, [each for each in self.loads.values() if each.key.group != group])

    def costs_without_texts(self, groups: Sequence[Collection[str]]) -> list[IterationCosts]:
        """The costs without the times of each group of texts; empty where one is not known."""
        fits = fit_without_texts(_sent(self, [*self.loads.values()]), self.costs, groups)
        return [each for each in fits if each is not None] if None not in fits else []

    @cached_property
    def by_name(self) -> dict[str, TextTrace]:
        """A text of each prompt."""
        return {f"{trace.prompt_set}/{trace.prompt}": trace for trace in self.traces}

    @property
    def slots(self) -> int:
        """Requests side by side of the largest closed loop."""
        return max(self.costs.times.by_batch)

    @cached_property
    def lossy(self) -> tuple[int, ...]:
        """The K that change what is generated."""
        failed = where(failed_gates(gates(self.served)), temperature=self.temperature)
        return tuple(sorted(gate.k for gate in failed))

    @cached_property
    def arriving(self) -> list[LoadTiming]:
        """Loads at a rate, with full budgets, on servers of the largest loop's slots alone.

        What a server with more or fewer slots costs is not known.
        """
        most = max((key.concurrency for key in self.loads), default=0)
        return [
            each
            for each in self.served.setup.run.loads
            if each.rate and each.temperature == self.temperature and not each.varying
            if each.slots in (None, most)
        ]

    def pace(self, timing: LoadTiming) -> float:
        """The machine's time during a load / its usual time; 1.0 if not known.

        The best linear estimate from two references, what a token took alone before the load and
        after it: what is common to both, over all loads, lasts as long as a load does, and the rest
        is chance.
        """
        loads = where(self.served.setup.run.loads, temperature=self.temperature)
        known = np.log([load.alone_s for load in loads if load.alone_s])
        if not timing.alone_s or len(known) < 2:
            return 1.0
        (var_before, common), (_, var_after) = np.cov(known.T)
        variance = (var_before + var_after) / 2.0
        lasting = 2.0 * common / (variance + common) if common > 0.0 else 0.0
        off = float(np.mean(np.log(timing.alone_s)) - np.median(known.mean(axis=1)))
        return float(np.exp(lasting * off))

    @property
    def ks(self) -> list[int]:
        """The K to plan: 0 and those timed under load, without those that change texts."""
        return [0, *sorted({key.k for key in self.loads if key.k} - {*self.lossy})]

    def text(self, trace: TextTrace, k: int, budget: int, size: int) -> Text:
        """The first `size` tokens that rounds emitted of a text, as drafted by the engine."""
        limits = self.counting.proposed(k, budget)[:size]
        (chances,), (most,), _ = as_served([trace], [size], [limits], self.rule, k)
        return Text(trace.prompt_set, trace.prompt, trace.prompt_tokens, chances, most)

    def texts(self, k: int, asked: int) -> list[Text]:
        """The part of each text that rounds emit, with its budget, `asked` tokens at most."""
        made: list[Text] = []
        for trace in self.traces:
            size = len(trace.tokens)
            whole = size + self.counting.first_position
            budget = whole if trace.stop_reason == "budget" else asked
            made.append(self.text(trace, k, budget, size))
        return made

    @cached_property
    def returned(self) -> Callable[[LoadTiming], list[Request] | None]:
        """A load's requests as the server decoded them, made once for each load."""
        return cache(partial(_as_returned, self))


def at_usual_pace(timing: LoadTiming, pace: float) -> LoadTiming:
    """The load as it would have been: all of its times divided by its pace, arrivals too."""
    names = ("user_s", "user_decode_s", "user_prefill_s", "due_s", "sent_s")
    usual = {
        name: tuple(None if each is None else each / pace for each in getattr(timing, name))
        for name in names
    }
    return replace(timing, seconds=timing.seconds / pace, **usual)


def _fitted(server: Server, loads: Sequence[ClosedLoad]) -> IterationCosts | None:
    engine = server.served.engine
    if engine.clock != "engine":
        return None
    return fit_iterations(
        _sent(server, loads),
        max((load.key.concurrency for load in loads), default=0),
        mixes=spec_of(engine.name).mixes_prompts,
    )


def _sent(server: Server, loads: Sequence[ClosedLoad]) -> list[SentLoad]:
    """These loads and those at a rate, each with its requests, where these are known."""
    groups = {load.key.group for load in loads}
    arriving = [each for each in server.arriving if each.group in groups]
    timings = _quiet([*(timing for load in loads for timing in load.timings), *arriving])
    sent = [(at_usual_pace(each, server.pace(each)), server.returned(each)) for each in timings]
    return [(timing, requests) for timing, requests in sent if requests is not None]


def _as_returned(server: Server, timing: LoadTiming) -> list[Request] | None:
    """Requests as decoded, by replay if it has the rounds that were told; None if unknown."""
    made: list[Request] = []
    rounds = timing.rounds if timing.k else (None,) * len(timing.texts)
    asked = zip(timing.texts, timing.budgets, timing.returned, rounds, strict=True)
    for name, budget, returned, told in asked:
        size, trace = returned - server.counting.first_position, server.by_name.get(name)
        if trace is None:
            return None
        most = server.counting.proposed(timing.k, budget)[:size]
        if not timing.k or not size:
            made.append(evenly_emitted(trace.prompt_tokens, size, size, most))
            continue
        drafted = proposed_at(trace, timing.k)
        if drafted is not None and len(drafted):
            # A sampled text is another one, of which a look-up finds about as much
            most = np.minimum(most, np.resize(drafted, size))
        replayed = None
        if size <= len(trace.tokens):
            replayed = server.text(trace, timing.k, budget, size).certain
        if replayed is not None and told in (None, rounds_of(replayed, timing.k)):
            made.append(replayed)
        elif told is not None:  # perhaps with rounds that emitted nothing
            made.append(evenly_emitted(trace.prompt_tokens, size, min(told, size), most))
        else:
            return None
    return made


def _check_one_forward(engine: ServingEngine, key: str) -> None:
    flag = spec_of(engine.name).unified_flag
    lines = [command.line for command in engine.commands if command.slots > 1]
    if flag is not None and lines and not any(flag in line.split() for line in lines):
        raise UserError(
            f"{key}: without {flag} its servers decode each run of neighbouring slots by itself,"
            f" which is not simulated; measure it again without flags=[--no{flag[1:]}]"
        )


def _quiet(timings: Sequence[LoadTiming]) -> list[LoadTiming]:
    """The timings that others did not disturb; of loads of which each was disturbed, all."""
    alike = grouped(timings, lambda t: (t.concurrency, t.rate, t.k, t.group, sum(t.budgets)))
    return [
        timing
        for group in alike.values()
        for timing in [t for t in group if (t.others or 0.0) <= MOST_OTHERS] or group
    ]

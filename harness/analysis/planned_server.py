"""What a stored run says of a server that is to be planned: costs, texts, and the drafts on it.

A server run with requests side by side measures one draft there. An audition that such a run prices
(`latency_from=`) brings other drafts: its texts with their scores, and what their rounds cost one
request at a time, R'(n) (`harness.analysis.engine_costs`). Side by side a round of another draft is
taken to cost R(n, B) + R'(n) - R(n): a draft is small, so its forwards are bound by reading its
weights, which one request causes as well as several.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from harness.analysis.batch_schedule import (
    ClosedLoad,
    LoadCosts,
    LoadKey,
    ReplayedRequests,
    closed_loads,
    fit_load_costs,
)
from harness.analysis.cells import completed
from harness.analysis.engine_costs import priced_by
from harness.analysis.replayed import accept_chances, decoded
from harness.analysis.request_times import fit_line
from harness.analysis.server_run import ServedRun
from harness.analysis.setup import Setup
from harness.records import Rule, TextTrace, UserError, grouped
from harness.serving.engines import spec_of
from harness.serving.round_counting import Counting
from harness.simulation.requests import Text
from harness.simulation.server import Costs
from harness.storage import StoredRun, load
from harness.storage.manifest import SERVER
from harness.theory.batching import BatchTimes
from harness.theory.speedup import RoundTimes


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
            raise UserError(
                f"{key}: made by {run.door}; name a server run, or an audition with"
                " latency_from=SERVER_RUN"
            )
        if run.manifest.engine is None or not run.trials:
            raise UserError(f"{key}: it measured nothing; resume={run.folder} continues it")
        served = ServedRun(Setup(run))
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
        by_runs = bool(_by_runs(served))
        loads = closed_loads(timings, ReplayedRequests(traces, rule, counting, by_runs=by_runs))
        replayed = [load for load in loads.values() if load.replayed is not None]
        costs = fit_load_costs(replayed) if replayed else None
        if costs is None:
            raise UserError(
                f"{key}: no R(K, B) at temperature {chosen:g}: it timed too few requests side by"
                f" side; {_how_to_measure(served)}"
            )
        return cls(served, chosen, counting, rule, traces, loads, costs)

    @property
    def folder(self) -> Path:
        """The server run's."""
        return self.served.setup.run.folder

    @property
    def slots(self) -> int:
        """Requests side by side of the largest closed loop."""
        return max(self.costs.times.by_batch)

    @property
    def by_runs(self) -> bool | None:
        """Whether neighbouring slots alone share a pass; None where that is not known."""
        return _by_runs(self.served)

    def prices(self, costs: LoadCosts, slots: int, ks: Sequence[int]) -> tuple[Costs, Costs]:
        """The plain server's, and that of one that drafts up to the largest of these K."""
        rows = [[costs.times.at(n, b) for n in range(max(ks) + 1)] for b in range(slots + 1)]
        lengths = {f"{t.prompt_set}/{t.prompt}": t.prompt_tokens for t in self.traces}
        texts = (name for load in self.loads.values() for name in load.timings[0].texts)
        # A text whose tokens all come from the prefill is not scored
        mean = float(np.mean([lengths[name] for name in texts if name in lengths]))

        def priced(start_s: float, token_s: float, rows: Sequence[Sequence[float]]) -> Costs:
            token_s = min(token_s, start_s / mean)
            return Costs(rows, start_s - token_s * mean, token_s, bool(self.by_runs))

        return (
            priced(costs.plain_start_s, self._prompt_token_s([0]), [row[:1] for row in rows]),
            priced(costs.start_s, self._prompt_token_s([k for k in ks if k]), rows),
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

    @cached_property
    def lossy(self) -> tuple[int, ...]:
        """The K that change what is generated."""
        gates = (g for g in self.served.failed_gates if g.temperature == self.temperature)
        return tuple(sorted(gate.k for gate in gates))

    @property
    def prompts_priced(self) -> bool:
        """Whether it is known what a prompt's length costs."""
        return self._prompt_token_s([0]) > 0.0

    @property
    def ks(self) -> list[int]:
        """Those that can be planned: 0 and what was timed under load, but what changes texts."""
        return [0, *sorted({key.k for key in self.loads if key.k} - {*self.lossy})]

    @property
    def draft(self) -> "PlannedDraft":
        """The one that the run measured."""
        return PlannedDraft(self.served.setup.draft, self.traces, self.costs)

    def text(self, trace: TextTrace, k: int, budget: int, size: int) -> Text:
        """The first `size` tokens that rounds emitted of a text, as drafted by the engine."""
        most = self.counting.proposed(k, budget)[:size]
        if trace.proposed is not None:
            most = np.minimum(most, trace.proposed[:size])
        chances = accept_chances(trace, self.rule, k)[:size]
        return Text(trace.prompt_set, trace.prompt, trace.prompt_tokens, chances, most)

    def texts(self, traces: Sequence[TextTrace], k: int, asked: int) -> list[Text]:
        """What rounds emit of texts, with the budgets that they had, `asked` tokens at most."""
        first = self.counting.first_position
        sizes = [len(trace.tokens) for trace in traces]
        budgets = [
            size + first if trace.stop_reason == "budget" else asked
            for trace, size in zip(traces, sizes, strict=True)
        ]
        asked_of = zip(traces, budgets, sizes, strict=True)
        return [self.text(trace, k, budget, size) for trace, budget, size in asked_of]


@dataclass(frozen=True, eq=False)
class PlannedDraft:
    """A draft that the server can be started with.

    Attributes:
        name: its own.
        traces: what rounds emit of each text as it scores them; of every draft the same texts.
        costs: what requests side by side cost with it.
    """

    name: str
    traces: Sequence[TextTrace]
    costs: LoadCosts


def planned(run: StoredRun, temperature: float | None) -> tuple[Server, tuple[PlannedDraft, ...]]:
    """A server and its drafts, from a server run, or an audition that one prices.

    Raises:
        UserError: the run does not tell what is needed.
    """
    if run.door != "audition":
        server = Server.of(run, temperature)
        return server, (server.draft,)
    setup, costs = Setup(run), run.manifest.engine_costs
    if costs is None:
        raise UserError(
            f"run={run.folder}: its drafts are priced by rounds of the harness's loop, not of a"
            " server; run the audition with latency_from=SERVER_RUN"
        )
    chosen = setup.temperatures[0] if temperature is None else temperature
    server = Server.of(load(costs.run), chosen)
    dropped = run.manifest.audition.dropped  # which scored a part of the texts alone
    by_draft = grouped(
        [t for t in run.traces if t.temperature == chosen and t.draft not in dropped],
        lambda trace: trace.draft,
    )
    if not by_draft:
        listed = ", ".join(f"{value:g}" for value in setup.temperatures)
        raise UserError(
            f"temperature={chosen:g}: run={run.folder} has texts at {listed}; give one of these"
        )
    entry = costs.draft
    of_measured = priced_by(costs, entry.name or "", entry.kind or "model", entry, chosen)
    drafts: list[PlannedDraft] = []
    for name, traces in by_draft.items():
        kind = name if traces[0].chosen else setup.kind_of(name)
        of_draft = priced_by(costs, name, kind, setup.described_draft(name), chosen)
        in_order = sorted(traces, key=lambda trace: trace.key)
        emitted = [
            # As a server run's texts have it: what the prefill emits is before the rounds
            replace(each, prompt_tokens=each.prompt_tokens + server.counting.first_position)
            for trace in in_order
            if (each := decoded(trace, server.counting)) is not None
        ]
        drafts.append(
            PlannedDraft(
                name, emitted, _with_rounds(server.costs, of_measured.rounds, of_draft.rounds)
            )
        )
    return server, tuple(drafts)


def _with_rounds(costs: LoadCosts, measured: RoundTimes, other: RoundTimes) -> LoadCosts:
    """The costs of requests side by side with another draft, whose R(n) are `other`."""
    by_batch = {
        batch: replace(
            times,
            round_s=tuple(
                (n, seconds + other.at(n) - measured.at(n) if n else seconds)
                for n, seconds in times.round_s
            ),
        )
        for batch, times in costs.times.by_batch.items()
    }
    return replace(costs, times=BatchTimes(by_batch))


def _by_runs(served: ServedRun) -> bool | None:
    engine = served.engine
    flag = spec_of(engine.name).unified_flag
    if flag is None:
        return False
    lines = [command.line for command in engine.commands if command.slots > 1]
    return not any(flag in line.split() for line in lines) if lines else None


def _how_to_measure(served: ServedRun) -> str:
    """The run's command with requests side by side, where it can be typed again."""
    command = served.setup.command_line("concurrency=[1,2,4]")
    return f"this measures them: {command}" if command else "give the run concurrency=[1,2,4]"

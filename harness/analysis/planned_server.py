"""What a stored run says of a server that is to be planned: costs, texts, and the drafts on it.

A server run with requests side by side measures one draft there. An audition that such a run prices
(`latency_from=`) brings other drafts: its texts with their scores, and what their rounds cost one
request at a time, R'(n) (`harness.analysis.engine_costs`). Side by side a round of another draft is
taken to cost R(n, B) + R'(n) - R(n): a draft is small, so its forwards are bound by reading its
weights, which one request causes as well as several.

How sure a draft is of its tokens, along a text and off it, is known of an audition with
decode.stop=threshold: the run itself, or another one of the same texts (`confidences_from=`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path

import numpy as np

from harness.analysis.adaptive import along_text
from harness.analysis.batch_schedule import (
    MOST_OTHERS,
    ClosedLoad,
    LoadKey,
    ReplayedRequests,
    closed_loads,
    fit_load_costs,
)
from harness.analysis.cells import completed
from harness.analysis.engine_costs import priced_by
from harness.analysis.iteration_costs import (
    IterationCosts,
    SentLoad,
    Starts,
    fit_iterations,
    fit_without_texts,
    rounds_of,
    with_rounds,
)
from harness.analysis.replayed import accept_chances, decoded, proposed_at
from harness.analysis.request_times import fit_line
from harness.analysis.server_run import ServedRun
from harness.analysis.setup import Setup
from harness.records import (
    DraftConfidence,
    LoadTiming,
    Rule,
    TextKey,
    TextTrace,
    UserError,
    grouped,
)
from harness.serving.drafts import DraftKind
from harness.serving.engines import spec_of
from harness.serving.round_counting import Counting
from harness.simulation.requests import Confidences, Request, Text
from harness.stats.jackknife import Array
from harness.storage import StoredRun, load
from harness.storage.manifest import SERVER
from harness.theory.batching import BatchTimes
from harness.theory.speedup import RoundTimes


@dataclass(frozen=True, eq=False)
class Server:
    """What a stored server run says of one temperature.

    `traces` are of the plain server's texts, `loads` its closed loops with room for all of their
    requests.
    """

    served: ServedRun
    temperature: float
    counting: Counting
    rule: Rule
    traces: Sequence[TextTrace]
    loads: Mapping[LoadKey, ClosedLoad]

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
        server = cls(served, chosen, counting, rule, traces, loads)
        if server.fitted is None:
            # Where the run's command can be typed again
            command = served.setup.command_line("concurrency=[1,2,4]")
            how = (
                f"this measures them: {command}" if command else "give the run concurrency=[1,2,4]"
            )
            raise UserError(
                f"{key}: no R(K, B) at temperature {chosen:g}: it timed too few requests side by"
                f" side; {how}"
            )
        return server

    @property
    def costs(self) -> IterationCosts:
        """Of all its loads."""
        assert self.fitted is not None
        return self.fitted

    @cached_property
    def fitted(self) -> IterationCosts | None:
        """The same; None where these do not tell."""
        return self._fitted_iterations or self._by_load([*self.loads.values()])

    def costs_without(self, group: str) -> IterationCosts | None:
        """Of the loads of the other groups; None where these do not tell."""
        loads = [load for load in self.loads.values() if load.key.group != group]
        return self._by_iteration(loads) or self._by_load(loads)

    def costs_without_texts(self, groups: Sequence[Collection[str]]) -> list[IterationCosts]:
        """Of all its loads, without the times of each group of texts.

        Empty where one of these is not known, or where costs rest on whole loads, in which all
        texts are.
        """
        if self._fitted_iterations is None:
            return []
        fits = fit_without_texts(self._sent([*self.loads.values()]), self.costs, groups)
        return [each for each in fits if each is not None] if None not in fits else []

    @cached_property
    def _fitted_iterations(self) -> IterationCosts | None:
        return self._by_iteration([*self.loads.values()])

    def _by_iteration(self, loads: Sequence[ClosedLoad]) -> IterationCosts | None:
        """By the server's own clock; None where that is not the run's, or tells too little."""
        if self.served.engine.clock != "engine":
            return None
        return fit_iterations(
            self._sent(loads),
            max((load.key.concurrency for load in loads), default=0),
            mixes=spec_of(self.served.engine.name).mixes_prompts,
            by_runs=bool(self.by_runs),
        )

    def _sent(self, loads: Sequence[ClosedLoad]) -> list[SentLoad]:
        """What these loads and those at a rate took, each with its requests where known."""
        groups = {load.key.group for load in loads}
        arriving = [each for each in self.arriving if each.group in groups]
        timings = quiet_ones([*(timing for load in loads for timing in load.timings), *arriving])
        sent = [(self.at_usual_pace(timing), self._returned(timing)) for timing in timings]
        return [(timing, requests) for timing, requests in sent if requests is not None]

    def _by_load(self, loads: Sequence[ClosedLoad]) -> IterationCosts | None:
        """By the seconds of whole loads, as predictions of throughput have it.

        They know a prompt's cost at the mean length alone; what each of its tokens costs is that of
        single requests' prefills. None where they do not tell.
        """
        costs = fit_load_costs(loads)
        if costs is None:
            return None
        texts = [name for load in self.loads.values() for name in load.timings[0].texts]
        # A text whose tokens all come from the prefill is not scored
        known = [self.by_name[name].prompt_tokens for name in texts if name in self.by_name]
        mean = float(np.mean(known))

        def starts(start_s: float, token_s: float) -> Starts:
            token_s = min(token_s, start_s / mean)
            return Starts(start_s - token_s * mean, token_s)

        ks = {load.key.k for load in self.loads.values() if load.key.k}
        return IterationCosts(
            costs.times,
            starts(costs.plain_start_s, self._prompt_token_s({0})),
            starts(costs.start_s, self._prompt_token_s(ks)),
            by_runs=bool(self.by_runs),
        )

    @cached_property
    def by_name(self) -> dict[str, TextTrace]:
        """A text of each prompt."""
        return {f"{trace.prompt_set}/{trace.prompt}": trace for trace in self.traces}

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

    def _prompt_token_s(self, ks: Collection[int]) -> float:
        """Of a prefill, by requests that were sent one at a time; 0.0 where these do not tell."""
        done = [
            (trial.prompt_tokens, trial.prefill_s)
            for trial in completed(self.served.trials)
            if trial.k in ks
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
        return self.costs.plain.token_s > 0.0

    @cached_property
    def arriving(self) -> list[LoadTiming]:
        """Its loads at a rate, with full budgets, that say when each request was due.

        Without those of servers with more or fewer slots than the largest closed loop filled: what
        such a server costs is not known.
        """
        most = max((key.concurrency for key in self.loads), default=0)
        loads = (each for each in self.served.setup.run.loads if each.rate and each.due_s)
        return [
            each
            for each in loads
            if each.temperature == self.temperature and not each.varying
            if each.slots in (None, most)
        ]

    @cached_property
    def _references(self) -> Array:
        """[load, (before, after)] what a token took alone, logarithms; empty where not known."""
        loads = self.served.setup.run.loads
        of_these = [each for each in loads if each.temperature == self.temperature]
        return np.log([load.alone_s for load in of_these if load.alone_s])

    def pace(self, timing: LoadTiming) -> float:
        """How many times as long as usually the machine took during a load; 1.0 if not known.

        The best linear estimate from the two references: what is common to both, over all loads,
        lasts as long as a load does, and the rest is chance.
        """
        known = self._references
        if not timing.alone_s or len(known) < 2:
            return 1.0
        (var_before, common), (_, var_after) = np.cov(known.T)
        variance = (var_before + var_after) / 2.0
        lasting = 2.0 * common / (variance + common) if common > 0.0 else 0.0
        off = float(np.mean(np.log(timing.alone_s)) - np.median(known.mean(axis=1)))
        return float(np.exp(lasting * off))

    def at_usual_pace(self, timing: LoadTiming) -> LoadTiming:
        """The load as it would have been: all of its times divided by its pace, arrivals too."""
        pace = self.pace(timing)
        names = ("user_s", "user_decode_s", "user_prefill_s", "due_s", "sent_s")
        usual = {
            name: tuple(None if each is None else each / pace for each in getattr(timing, name))
            for name in names
        }
        return replace(timing, seconds=timing.seconds / pace, **usual)

    @cached_property
    def longest_context(self) -> int:
        """Tokens of prompt and text of the longest request of the loads."""
        timings = [timing for load in self.loads.values() for timing in load.timings]
        return max(
            self.by_name[name].prompt_tokens + returned - self.counting.first_position
            for timing in timings
            for name, returned in zip(timing.texts, timing.returned, strict=True)
            if name in self.by_name
        )

    @property
    def ks(self) -> list[int]:
        """Those that can be planned: 0 and what was timed under load, but what changes texts."""
        return [0, *sorted({key.k for key in self.loads if key.k} - {*self.lossy})]

    @property
    def draft(self) -> "PlannedDraft":
        """The one that the run measured."""
        name = self.served.setup.draft
        return PlannedDraft(name, _kind(self.served.setup, name, self.traces), self.traces)

    def text(
        self,
        trace: TextTrace,
        k: int,
        budget: int,
        size: int,
        confidence: DraftConfidence | None = None,
    ) -> Text:
        """The first `size` tokens that rounds emitted of a text, as drafted by the engine.

        `confidence` is of what rounds emit, too.
        """
        most = self.counting.proposed(k, budget)[:size]
        drafted = proposed_at(trace, k)
        if drafted is not None:
            most = np.minimum(most, drafted[:size])
        chances = accept_chances(trace, self.rule, k)[:size]
        drafted = None
        if confidence is not None:
            values = confidence.values[:, :k]
            along = along_text(trace, values, k, self.rule)[:size]
            drafted = Confidences(along, values[: size + 1] if trace.depth is None else None)
        return Text(trace.prompt_set, trace.prompt, trace.prompt_tokens, chances, most, drafted)

    @cached_property
    def _returned(self) -> Callable[[LoadTiming], list[Request] | None]:
        """`_as_returned`, once for each load."""
        return cache(self._as_returned)

    def _as_returned(self, timing: LoadTiming) -> list[Request] | None:
        """A load's requests as the server decoded them; None where that is not known.

        By replay where it has the rounds that the server told, else by these alone.
        """
        made: list[Request] = []
        rounds = timing.rounds if timing.k else (None,) * len(timing.texts)
        asked = zip(timing.texts, timing.budgets, timing.returned, rounds, strict=True)
        for name, budget, returned, told in asked:
            size, trace = returned - self.counting.first_position, self.by_name.get(name)
            if trace is None:
                return None
            most = self.counting.proposed(timing.k, budget)[:size]
            if not timing.k or not size:
                made.append(with_rounds(trace.prompt_tokens, size, size, most))
                continue
            drafted = proposed_at(trace, timing.k)
            if drafted is not None and len(drafted):
                # A sampled text is another one, of which a look-up finds about as much
                most = np.minimum(most, np.resize(drafted, size))
            replayed = None
            if size <= len(trace.tokens):
                replayed = self.text(trace, timing.k, budget, size).certain
            if replayed is not None and told in (None, rounds_of(replayed, timing.k)):
                made.append(replayed)
            elif told is not None:  # perhaps with rounds that emitted nothing
                made.append(with_rounds(trace.prompt_tokens, size, min(told, size), most))
            else:
                return None
        return made

    def texts(self, draft: "PlannedDraft", k: int, asked: int) -> list[Text]:
        """What rounds emit of a draft's texts, with the budgets that these had.

        That is `asked` tokens at most.
        """
        made: list[Text] = []
        for trace in draft.traces:
            size = len(trace.tokens)
            whole = size + self.counting.first_position
            budget = whole if trace.stop_reason == "budget" else asked
            made.append(self.text(trace, k, budget, size, draft.confidences.get(trace.key)))
        return made


@dataclass(frozen=True, eq=False)
class PlannedDraft:
    """A draft that the server can be started with."""

    name: str
    kind: DraftKind
    # What rounds emit of each text as it scores them; of every draft the same texts
    traces: Sequence[TextTrace]
    # What rounds cost of the draft that the server run measured, and of this one, alone; None of
    # the former itself
    rounds: tuple[RoundTimes, RoundTimes] | None = None
    # How sure it is off each text, by what rounds emit; empty where not known
    confidences: Mapping[TextKey, DraftConfidence] = field(
        default_factory=dict[TextKey, DraftConfidence]
    )

    def costs(self, measured: IterationCosts) -> IterationCosts:
        """What requests side by side cost with it, where they cost this with the measured one."""
        if self.rounds is None:
            return measured
        of_measured, of_draft = self.rounds
        by_batch: dict[int, RoundTimes] = {}
        for batch, times in measured.times.by_batch.items():
            # A look-up that finds nothing costs other than a plain token; only a look-up does that
            finds_nothing = [0] if of_draft.round_s[:1] and of_draft.round_s[0][0] == 0 else []
            ns = [*finds_nothing, *(n for n, _ in times.round_s if n)]
            round_s = [(n, times.at(n) + of_draft.at(n) - of_measured.at(n)) for n in ns]
            by_batch[batch] = replace(times, round_s=tuple(round_s))
        return replace(measured, times=BatchTimes(by_batch))


def planned(
    run: StoredRun, temperature: float | None, confidences_from: StoredRun | None = None
) -> tuple[Server, tuple[PlannedDraft, ...]]:
    """A server and its drafts, from a server run, or an audition that one prices.

    Args:
        run: the one or the other.
        temperature: None for its first one.
        confidences_from: an audition of the same texts that stored confidences; None for the run
            itself, where it has them.

    Raises:
        UserError: the run does not tell what is needed, or the other one is of other texts.
    """
    server, drafts = _planned(run, temperature)
    asked = confidences_from is not None
    if asked or run.confidences:
        drafts = _with_confidences(drafts, confidences_from or run, server, asked=asked)
    return server, drafts


def _planned(run: StoredRun, temperature: float | None) -> tuple[Server, tuple[PlannedDraft, ...]]:
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
    if server.served.engine.name != costs.engine.name:
        raise UserError(
            f"run={run.folder}: its drafts are priced by rounds of {costs.engine.name}, and its"
            f" latency_from={costs.run} is a run of {server.served.engine.name}; run the audition"
            " again"
        )
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
        kind = _kind(setup, name, traces)
        of_draft = priced_by(costs, name, kind, setup.described_draft(name), chosen)
        in_order = sorted(traces, key=lambda trace: trace.key)
        emitted = [
            # As a server run's texts have it: what the prefill emits is before the rounds
            replace(each, prompt_tokens=each.prompt_tokens + server.counting.first_position)
            for trace in in_order
            if (each := decoded(trace, server.counting)) is not None
        ]
        drafts.append(PlannedDraft(name, kind, emitted, (of_measured.rounds, of_draft.rounds)))
    return server, tuple(drafts)


def _kind(setup: Setup, name: str, traces: Sequence[TextTrace]) -> DraftKind:
    """Of a draft by its texts: one that looks its tokens up is named as its kind is."""
    return name if traces[0].chosen else setup.kind_of(name)


def _with_confidences(
    drafts: Sequence[PlannedDraft], run: StoredRun, server: Server, *, asked: bool
) -> tuple[PlannedDraft, ...]:
    """The drafts with the confidences that a run stored of what they draft on the same texts.

    Raises:
        UserError: it has none of any draft, or not of all texts of one; unless nobody asked.
    """
    where, first = f"confidences_from={run.folder}", server.counting.first_position
    stored = grouped(run.confidences, lambda each: each.draft)
    if not stored:
        raise UserError(
            f"{where}: stored no confidences; run the audition with decode.stop=threshold"
        )
    if asked and not {*stored} & {each.name for each in drafts}:
        names = ", ".join(each.name for each in drafts)
        raise UserError(f"{where}: its confidences are of {', '.join(stored)}, not of {names}")
    largest, made = max(server.ks), list[PlannedDraft]()
    for draft in drafts:
        known = {each.key: each for each in stored.get(draft.name, ())}
        texts = {each.key: each.tokens for each in run.traces if each.draft == draft.name}
        same = {
            trace.key: replace(known[trace.key], values=known[trace.key].values[first:])
            for trace in draft.traces
            if trace.key in known and np.array_equal(texts[trace.key][first:], trace.tokens)
        }
        depth = min((each.values.shape[1] for each in known.values()), default=largest)
        if known and asked and depth < largest:
            raise UserError(
                f"{where}: {draft.name} was followed for K={depth}, and run={server.folder} drafts"
                f" up to {largest}; run the audition with k=[...,{largest}]"
            )
        if known and asked and len(same) < len(draft.traces):
            raise UserError(
                f"{where}: has the confidences of {draft.name} for {len(same)} of the"
                f" {len(draft.traces)} texts of run={server.folder}; run the audition on the same"
                " prompts, at the same temperature and with as many new_tokens"
            )
        whole = len(same) == len(draft.traces) and depth >= largest
        made.append(replace(draft, confidences=same) if whole else draft)
    return tuple(made)


def _by_runs(served: ServedRun) -> bool | None:
    engine = served.engine
    flag = spec_of(engine.name).unified_flag
    if flag is None:
        return False
    lines = [command.line for command in engine.commands if command.slots > 1]
    return not any(flag in line.split() for line in lines) if lines else None


def quiet_ones(timings: Sequence[LoadTiming]) -> list[LoadTiming]:
    """Those that others did not disturb; of loads of which each was disturbed, all."""

    def load_of(t: LoadTiming) -> tuple[int | None, float | None, int, str, int]:
        return (t.concurrency, t.rate, t.k, t.group, sum(t.budgets))

    kept: list[LoadTiming] = []
    for alike in grouped(timings, load_of).values():
        quiet = [each for each in alike if (each.others or 0.0) <= MOST_OTHERS]
        kept += quiet or alike
    return kept

"""A server run: which K to serve on the engine that was measured, and what a prediction is worth.

Its folder is a sweep's: trials, rounds, traces. What differs is where they come from, and what a
round costs (`server_predictions`).

Where replay chose the K that was measured (`until=decided`), the verdict is that K's, measured on
all prompts. It allows for the choice as where all K are measured: that is made again on folds, with
the seconds of the others taken to differ from its own as replay says.

A temperature at which a speculating server is not lossless (`server_lossless`) gets no verdict, and
above 0 no prediction: replay is of lossless sampling.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from harness.analysis.answers import Answered, Question, answered
from harness.analysis.batch_schedule import (
    MOST_OTHERS,
    LoadResults,
    analyse_loads,
    kept_busy_by_others,
)
from harness.analysis.caveats import of_setup, servers, texts
from harness.analysis.caveats.prompts import k_at_edge
from harness.analysis.caveats.timing import predictions_off
from harness.analysis.cells import Weights, completed, ratio
from harness.analysis.failures import failures
from harness.analysis.lossless import by_text, distrust
from harness.analysis.predicted import evidence_of
from harness.analysis.request_times import Visit, paired_seconds, with_enough_visits
from harness.analysis.server_lossless import gate_caveats
from harness.analysis.server_predictions import ServedPredictions
from harness.analysis.setup import Setup
from harness.analysis.unstable import impossible, unstable_cells
from harness.analysis.user_latency import Goals, one_by_one, under_load
from harness.analysis.verdict import Candidate, CostError, Evidence, evidence_from_trials
from harness.records import GREEDY, Cell, ResultRow, ServingEngine, Trial, where
from harness.serving.engines import OWN, spec_of
from harness.stats.jackknife import CONFIDENCE, speedup_interval, token_weights
from harness.stats.two_phase import look_shares
from harness.summary import (
    AcceptanceByPosition,
    Answer,
    Caveat,
    Doubt,
    LoadCell,
    OtherK,
    ServedK,
    ServedMemory,
    ServedSummary,
    StartedServers,
    Summary,
    Unstable,
    UserLatency,
    Values,
    Visits,
)

# What gains more at another K by less than this share is not worth a sentence
LEAST_GAIN = 0.01


def analyse_served(setup: Setup) -> Summary:
    """Everything a server run says, as far as what it stored allows."""
    if setup.engine is None:  # no server answered
        return Summary(setup.facts(()), failures=failures(setup), caveats=(*of_setup(setup),))
    run = ServedRun(setup)
    results, unstable = run.results, run.unstable
    answers = tuple(each for entry in run.answered for each in (entry.workload, *entry.sets))
    return Summary(
        run=setup.facts(results),
        answers=answers,
        failures=failures(setup, run.trials),
        caveats=(
            *run.caveats(),
            *texts.greedy_texts_differ.of(by_text(run.checks)),
            *texts.routing_ties.of(by_text(run.checks)),
            *of_setup(setup, results),
            # Of this server: another loop's best K says nothing of it
            *k_at_edge.of(setup, [each for each in answers if each.engine == run.engine.name]),
        ),
        results=tuple(results),
        latency=(*run.prefill_rows(), *run.round_rows()),
        round_times=tuple(run.round_times()),
        unstable=unstable,
        acceptance_by_position=tuple(run.positions()),
        text_checks=tuple(run.checks),
        served=run.summary(),
    )


@dataclass(frozen=True)
class ServedRun(ServedPredictions):
    """What follows from a server run's texts and times, derived step by step; each once."""

    @cached_property
    def results(self) -> list[ResultRow]:
        """Rows of results.csv: measured ones, and what is predicted of each cell."""
        return [
            *self.measured,
            *(row for row in self.predicted if row is not None),
            *(made.with_interval(self.prediction_errors) for made in self.unmeasured),
            *(row for row in self.loads.rows if row.concurrency > 1),
        ]

    @cached_property
    def loads(self) -> LoadResults:
        """What the server took under load."""
        plain = [
            trace
            for trace in self.setup.run.traces
            if trace.k == 0 and self.replay_holds(trace.temperature)
        ]
        engine = self.engine
        loads, asked, weights = self.setup.run.loads, self.visits_asked, self.setup.weights
        return analyse_loads(loads, plain, engine.rule, self.counting, engine.name, asked, weights)

    def by_k(self) -> Iterator[ServedK]:
        """Every K on the whole workload, weighted."""
        for entry in self.answered:
            temperature = entry.question.evidence.temperature
            if entry.question.source != "measured":
                continue
            evidence = self._measured_evidence(temperature)
            costs = self.costs_by_temperature.get(temperature)
            whole = self._evidence(self._whole_requests(temperature), temperature)
            whole_request_speedups = whole.speedups(self.setup.weights)
            for name, speedup in evidence.speedups(self.setup.weights).items():
                done = where(completed(self.settled), k=name.k, temperature=temperature)
                done = [trial for trial in done if trial.rounds]
                tokens = np.array([trial.new_tokens for trial in done], dtype=np.float64)
                sets = [trial.prompt_set for trial in done]
                factors = token_weights(sets, tokens, self.setup.weights) if done else tokens
                rounds = float(factors @ np.array([trial.rounds or 0.0 for trial in done]))
                priced = costs if costs and costs.times.covers(name.k) else None
                yield ServedK(
                    temperature=temperature,
                    k=name.k,
                    speedup=speedup,
                    tokens_per_round=ratio(1.0, rounds),
                    round_cost=priced and priced.times.relative(name.k),
                    whole_request_speedup=whole_request_speedups.get(name),
                )

    def _whole_requests(self, temperature: float) -> list[Trial]:
        """The trials of a temperature, their prefills part of the decoding, by the run's clock.

        That is the client's where the server's is: loads are timed by it. What came before the
        decoding is of the visits that plain decoding shares, as the decoding is.
        """

        def before_s(trial: Trial) -> float | None:
            client = self.engine.clock == "engine" and trial.user_s is not None
            decode_s = trial.user_decode_s if client else 0.0
            request_s = trial.user_s if client else trial.prefill_s
            return None if request_s is None or decode_s is None else request_s - decode_s

        def cell(trial: Trial) -> tuple[str, str, int]:
            return (trial.prompt_set, trial.prompt, trial.k)

        done = where(completed(self.trials), temperature=temperature)
        visits: dict[tuple[str, str, int], list[Visit]] = {}
        for place, trial in enumerate(done):
            each_s = before_s(trial)
            if each_s is not None:
                visits.setdefault(cell(trial), []).append(Visit(trial.repetition, place, each_s))
        whole: list[Trial] = []
        for trial in where(completed(self.settled), temperature=temperature):
            if trial.decode_s is None:
                continue
            plain = visits.get((*cell(trial)[:2], 0), []) if trial.k else []
            started_s = paired_seconds(visits.get(cell(trial), []), plain, self.settle)
            if started_s is not None:
                whole.append(replace(trial, decode_s=trial.decode_s + started_s))
        return whole

    def other_ks(self) -> Iterator[OtherK]:
        """What gains more at another K than at the headline's.

        A prompt set of the headline's temperature, or the whole workload at another one. Nothing
        where the headline is undecided, or speculation is in doubt.
        """
        asked = [entry for entry in self.answered if entry.question.engine == self.engine.name]
        first = next(iter(asked), None)
        if first is None or first.workload.decision == "undecided":
            return
        served_k, weights = first.workload.k, self.setup.weights
        evidence = self._measured_evidence(first.question.evidence.temperature)
        sets = [name for name in sorted(set(evidence.prompt_sets)) if (weights or {}).get(name, 1)]
        for name in sets if len(sets) > 1 else ():
            yield from self._other_k(evidence.only([name]), name, served_k, None)
        for entry in asked:
            if entry is not first and self._doubt(entry.question) is None:
                measured = self._measured_evidence(entry.question.evidence.temperature)
                yield from self._other_k(measured, "all", served_k, weights)

    def _other_k(
        self, evidence: Evidence, prompt_set: str, served_k: int, weights: Weights
    ) -> Iterator[OtherK]:
        """The fastest K of some prompts, where it is another and gains more."""
        timed = {0: evidence.baseline, **{name.k: t for name, t in evidence.candidates.items()}}
        gains = evidence.speedups(weights).items()
        speedups = {0: 1.0, **{name.k: speedup for name, speedup in gains}}
        k = max(speedups, key=lambda each: speedups[each])
        if served_k not in speedups or speedups[k] < (1.0 + LEAST_GAIN) * speedups[served_k]:
            return
        one, other, sets = timed[served_k], timed[k], evidence.prompt_sets
        # It is the fastest of several by the same requests (Bonferroni)
        level = 1.0 - (1.0 - CONFIDENCE) / max(1, len(evidence.candidates))
        interval = speedup_interval(
            one.seconds, one.tokens, other.seconds, other.tokens, sets, weights, level=level
        )
        yield OtherK(
            temperature=evidence.temperature,
            prompt_set=prompt_set,
            k=k,
            speedup=speedups[k],
            served_k=served_k,
            served_speedup=speedups[served_k],
            ratio_lo=interval and interval.lo,
            ratio_hi=interval and interval.hi,
        )

    def positions(self) -> Iterator[AcceptanceByPosition]:
        """Replayed acceptance by position at each verdict's K, of the weighted workload."""
        for answer in self.workloads:
            name, temperature = Candidate(self.setup.draft, answer.named[1]), answer.temperature
            if self.not_predicted or not name.k or temperature is None:
                continue
            if not self.replay_holds(temperature):
                continue
            replays = self._replays(temperature, [name.k])
            if replays is not None:
                shares = replays.weighted(name, self.setup.weights).acceptance_by_position
                yield AcceptanceByPosition(
                    name.draft, "all", temperature, name.k, "replayed", shares
                )

    # ---- answers ---------------------------------------------------------------------------------

    @cached_property
    def answered(self) -> tuple[Answered, ...]:
        """Every question decided: the server's, then our own loop's."""
        asked, weights = [*self._questions(), *self._own_questions()], self.setup.shares
        return answered(asked, self._doubt, weights=weights, seed=self.setup.seed)

    @property
    def workloads(self) -> list[Answer]:
        """The server's answers on the whole workload, by temperature."""
        served = (entry for entry in self.answered if entry.question.engine == self.engine.name)
        return [entry.workload for entry in served]

    def _questions(self) -> Iterator[Question]:
        if self.trials and all(trial.k for trial in self.trials):  # records of no plain server
            return
        for temperature in self.temperatures:
            done = where(completed(self.settled), temperature=temperature)
            if not any(trial.k for trial in done):  # a run that ended before it measured any K
                evidence = self.predicted_evidence(temperature)
                if evidence is not None:
                    yield Question(evidence, self.engine.rule, "replayed", self.engine.name)
                    continue
            if any(trial.decode_s is None for trial in done):  # records without a time of decoding
                continue
            lacking = {k: self._lacking(temperature, k) for k in self._answered_ks(temperature)}
            yield Question(
                self._chosen_evidence(temperature) or self._measured_evidence(temperature),
                self.engine.rule,
                "measured",
                self.engine.name,
                visits={k: visits for k, visits in lacking.items() if visits and visits.timed},
            )

    def _measured_evidence(self, temperature: float) -> Evidence:
        """Seconds per prompt of every K that was measured on all."""
        return self._evidence(self._comparable(temperature), temperature)

    def _lacking(self, temperature: float, k: int) -> Visits | None:
        """The fewest visits of a K on any prompt set; None where it has all."""
        cells = (Cell(name, temperature, k) for name in self.sets_at(temperature))
        known = [lacking for cell in cells if (lacking := self.visits_lacking(cell)) is not None]
        return min(known, key=lambda visits: visits.timed, default=None)

    def _answered_ks(self, temperature: float) -> list[int]:
        """The K that an answer chooses from: those with enough visits."""
        lacking = {k: self._lacking(temperature, k) for k in self.ks_at(temperature)}
        every = self.visits_asked or 0
        return sorted(
            with_enough_visits({k: every if v is None else v.timed for k, v in lacking.items()})
        )

    def _comparable(self, temperature: float) -> list[Trial]:
        """The settled requests that an answer rests on.

        Sampled ones are those of the visits that all of its cells finished; all, where none is.
        """
        ks = {0, *self._answered_ks(temperature)}
        trials = [t for t in self.settled if t.temperature == temperature and t.k in ks]
        prompts = {(t.prompt_set, t.prompt) for t in trials}
        finished = Counter(t.repetition for t in trials if t.status == "ok")
        whole = {visit for visit, count in finished.items() if count == len(ks) * len(prompts)}
        return [trial for trial in trials if trial.repetition in whole] or trials

    def _evidence(self, trials: Sequence[Trial], temperature: float) -> Evidence:
        """Seconds per prompt of one temperature's trials."""
        costs, draft = self.costs_by_temperature.get(temperature), self.setup.draft
        times = costs.times if costs else None
        return evidence_from_trials(trials, draft=draft, temperature=temperature, times=times)

    def _own_questions(self) -> Iterator[Question]:
        """The same on our own loop, predicted; none of its own run."""
        if self.engine.name == OWN.name or self.not_predicted in (
            "no_counting",
            "no_weights",
            "no_texts",
        ):
            return
        for temperature in self.temperatures:
            evidence = self.own_evidence(temperature)
            if evidence is not None:
                yield Question(evidence, self.engine.rule, "replayed", OWN.name)

    # ---- one K, that replay chose ----------------------------------------------------------------

    def _chosen_evidence(self, temperature: float) -> Evidence | None:
        """The chosen K as it was measured, and every other priced one as replay has it differ.

        None where every K is measured, or that one on no prompt that was replayed.
        """
        k, latency = self.chosen_k(temperature), self._latencies.get(temperature)
        measured = self._measured_evidence(temperature)
        replays = self._replays(temperature, self.priced_at(temperature))
        chosen = Candidate(self.setup.draft, k or 0)
        if latency is None or replays is None or chosen not in measured.candidates:
            return None
        rows = {name: row for row, name in enumerate(measured.names)}
        replays = replays.rows([name in rows for name in replays.names])
        if chosen not in replays.candidates or not replays.names:
            return None
        predicted = evidence_of(replays, {self.setup.draft: latency})
        kept = np.array([rows[name] for name in predicted.names])
        plain, timed = measured.baseline.rows(kept), measured.candidates[chosen].rows(kept)
        of_chosen_s = predicted.candidates[chosen].seconds
        looks = self.setup.run.manifest.served_ks
        made = 0 if looks is None else looks.made_at(temperature)
        return replace(
            predicted,
            looks=look_shares(made) if made else (),
            baseline=plain,
            candidates={
                name: replace(
                    each, seconds=timed.seconds * (each.seconds / of_chosen_s), tokens=timed.tokens
                )
                for name, each in predicted.candidates.items()
            },
            cost_errors=tuple(
                CostError(
                    {name: moves - error.moves[chosen] for name, moves in error.moves.items()},
                    error.degrees,
                )
                for error in predicted.cost_errors
            ),
            named=chosen,
        )

    @cached_property
    def unstable(self) -> tuple[Unstable, ...]:
        """The measured cells that cannot be right."""
        return tuple(unstable_cells(self.measured))

    def _doubt(self, question: Question) -> Doubt | None:
        """Why a question of the server's has no verdict: its texts or timings cannot be right."""
        temperature = question.evidence.temperature
        if question.engine != self.engine.name:
            return None
        doubt = impossible(self.unstable, temperature)
        if temperature == GREEDY:
            judged = [check for check in self.checks if check.result != "OPEN"]
            return distrust(by_text(judged)) or doubt
        failed = [gate for gate in self.failed_gates if gate.temperature == temperature]
        if not failed:
            return doubt
        worst = max(failed, key=lambda gate: abs(gate.text_z or 0))
        values: Values = {"k": worst.k, "text_z": worst.text_z, "plain_z": worst.plain_z}
        return "server_not_lossless", values

    # ---- the record ------------------------------------------------------------------------------

    @cached_property
    def latencies(self) -> tuple[UserLatency, ...]:
        """What users wait for, of requests sent one by one and of loads."""
        engine, weights = self.engine, self.setup.request_weights
        config = self.setup.run.config
        tpot_ms, ttft_ms = config.get("tpot_ms"), config.get("ttft_ms")
        goals = Goals(tpot_ms and tpot_ms / 1e3, ttft_ms and ttft_ms / 1e3)
        loaded = {(c.temperature, c.concurrency, c.k): c.visits for c in self.loads.cells}
        alone = one_by_one(self.trials, engine, weights)
        loads = under_load(where(self.setup.run.loads, varying=""), engine, weights, goals)
        return (
            *(replace(row, visits=self._lacking(row.temperature, row.k)) for row in alone),
            *(
                replace(row, visits=loaded.get((row.temperature, row.concurrency, row.k)))
                for row in loads
            ),
        )

    def summary(self) -> ServedSummary:
        """What the server is, and what a prediction of it is worth."""
        engine = self.engine
        # Where some K changes what is generated, no K is given for any load
        changed = {gate.temperature for gate in self.failed_gates}
        schedules = [each for each in self.loads.schedules if each.temperature not in changed]
        return ServedSummary(
            engine=engine.name,
            version=engine.version,
            rule=engine.rule,
            clock=engine.clock,
            started=engine.started,
            commands=engine.commands,
            cells=tuple(sorted(self.cells(), key=lambda c: (c.prompt_set, c.temperature, c.k))),
            by_k=tuple(self.by_k()),
            other_ks=tuple(self.other_ks()),
            latencies=self.latencies,
            gates=self.gates,
            costs=tuple(self.recorded(*each) for each in self.costs_by_temperature.items()),
            not_predicted=self.not_predicted,
            load=self.loads.cells,
            varying=self.loads.varying,
            varying_commands=engine.varying,
            schedules=() if self.disturbed is not None else tuple(schedules),
            memory=self._memory(),
            servers=self._servers(),
        )

    def _servers(self) -> StartedServers | None:
        """The speculating servers behind the answers; None where none was started."""
        if not self.engine.started or self.engine.name == OWN.name:
            return None
        rejecting = sorted({timing.k for timing in self.setup.run.rounds if timing.k})
        return StartedServers(self.asked_ks, self.priced_ks, self.ks, tuple(rejecting))

    def _memory(self) -> ServedMemory | None:
        """What the draft takes next to the target, at the verdict's K or else the largest."""
        commands = {each.k: each for each in self.engine.commands}  # of most slots
        k = next((answer.k for answer in self.workloads), 0)
        served = commands.get(k or max(commands, default=0))
        if served is None or not served.k or served.context_tokens is None:
            return None
        setup, plain = self.setup, commands.get(0)
        kv_type, of_draft_cache = _cache_types(self.engine, setup.run.config.get("flags") or ())
        target, draft = setup.model_bytes(), setup.model_bytes(setup.draft)
        of_target, of_draft = target and target.weights, draft and draft.weights
        if plain is not None and None not in (plain.weights_bytes, served.weights_bytes):
            of_target = plain.weights_bytes
            of_draft = (served.weights_bytes or 0) - (plain.weights_bytes or 0)
        return ServedMemory(
            k=served.k,
            slots=served.slots,
            context_tokens=served.context_tokens,
            kv_type=kv_type or self.engine.dtype,
            target_weights_bytes=of_target,
            draft_weights_bytes=of_draft,
            target_kv_bytes_per_token=setup.kv_bytes_per_token(None, kv_type),
            draft_kv_bytes_per_token=setup.kv_bytes_per_token(setup.draft, of_draft_cache),
        )

    def caveats(self) -> Iterator[Caveat]:
        """What to mind of this server, the most serious first."""
        yield from gate_caveats(self.gates, self.engine.rule)
        scored = self.setup.described_draft(self.setup.draft).dtype
        yield from servers.draft_served_in_other_dtype.of(self.engine, scored)
        yield from servers.server_asked_less.of(self.setup)
        lacking = [
            servers.FewerVisits(temperature, k, visits, k in self._answered_ks(temperature))
            for temperature in self.temperatures
            for k in self.ks_at(temperature)
            if (visits := self._lacking(temperature, k)) is not None
        ]
        yield from servers.server_visits_lacking.of(lacking, load=False)
        yield from servers.loads_disturbed.of(self.disturbed)
        yield from servers.server_queues.of(self.engine, self.loads.cells)
        yield from servers.rate_beyond_capacity.of(self.latencies)
        lacking = [
            servers.FewerVisits(cell.temperature, cell.k, cell.visits, self._may_be_named(cell))
            for cell in self.loads.cells
            if cell.visits is not None
        ]
        yield from servers.server_visits_lacking.of(lacking, load=True)
        yield from predictions_off.of(self.prediction_errors)

    @cached_property
    def disturbed(self) -> float | None:
        """Processors that others kept busy during loads, where these are too many to compare them.

        Processor time counts none of theirs.
        """
        others = kept_busy_by_others(self.setup.run.loads)
        if self.engine.clock == "cpu" or others is None or others <= MOST_OTHERS:
            return None
        return others

    def _may_be_named(self, cell: LoadCell) -> bool:
        """Whether a schedule may name the K of a cell."""
        every, at = self.visits_asked or 0, (cell.temperature, cell.concurrency)
        timed = {
            c.k: every if c.visits is None else c.visits.timed
            for c in self.loads.cells
            if c.k and (c.temperature, c.concurrency) == at
        }
        return not cell.k or cell.k in with_enough_visits(timed)


def _cache_types(engine: ServingEngine, flags: Sequence[str]) -> tuple[str | None, str | None]:
    """Of the target's cache and the draft's, with these flags of the user; None: as loaded."""
    names = spec_of(engine.name).cache_flags
    if names is None:
        return None, None
    given = dict(pairwise(word for flag in flags for word in flag.split("=", 1)))
    of_target, of_draft = (given.get(name, "f16") for name in names)
    return of_target, of_draft

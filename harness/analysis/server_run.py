"""A server run: which K to serve on the engine that was measured, and what a prediction is worth.

Its folder is a sweep's: trials, rounds, traces. What differs is where they come from, and what a
round costs. Every cell that was measured is predicted as well, from two factors that have not seen
it: the rounds that replay expects of the plain server's texts, and what this engine's rounds take,
in the requests of the other prompt sets, and on servers that were told to reject every draft. What
our own loop's rounds would have predicted stands next to it.

Where replay chose the K that was measured (`until=decided`), the verdict is that K's, measured on
all prompts. It allows for the choice as where all K are measured: that is made again on folds, with
the seconds of the others taken to differ from its own as replay says. They are predicted from
rounds that few requests priced, or that lie on a line between two.

A temperature at which a speculating server is not lossless (`server_lossless`) gets no verdict.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from harness.analysis.acceptance_lengths import acceptance_lengths
from harness.analysis.answers import Answered, Question, answered
from harness.analysis.batch_schedule import (
    MOST_OTHERS,
    LoadResults,
    analyse_loads,
    kept_busy_by_others,
)
from harness.analysis.caveats import (
    caveats,
    failures,
    greedy_texts_differ,
    k_at_edge,
    of_the_timings,
)
from harness.analysis.cells import (
    completed,
    lacking_visits,
    measured_rows,
    paired_sums,
    ratio,
    with_counts,
    with_times,
)
from harness.analysis.latency import (
    Latency,
    ServedTimes,
    latency_of,
    latency_row,
    near,
    visits_of,
)
from harness.analysis.lossless import distrust
from harness.analysis.predicted import evidence_of
from harness.analysis.prediction_error import Gap, PredictionError, prediction_errors
from harness.analysis.replayed import Replays, by_prompt
from harness.analysis.request_times import Visit, paired_seconds, with_enough_visits
from harness.analysis.server_costs import (
    PlainRequests,
    Requests,
    ServerCosts,
    TimedRequests,
    fit_costs,
    left_out_costs,
    seconds_of_rounds,
    speedup_variance,
    timed_rounds,
)
from harness.analysis.server_lossless import gate_caveats, gates
from harness.analysis.server_structured import structured_caveats, structured_gates
from harness.analysis.server_texts import ServedTexts, Texts
from harness.analysis.setup import Setup
from harness.analysis.unstable import impossible, unstable_cells
from harness.analysis.user_latency import Goals, one_by_one, under_load
from harness.analysis.verdict import (
    Candidate,
    CostError,
    Evidence,
    Timed,
    evidence_from_trials,
)
from harness.records import GREEDY, Cell, LatencyRow, ResultRow, RoundTiming, Trial, grouped, where
from harness.serving.drafts import looks_up
from harness.serving.engines import OWN, spec_of
from harness.stats.crossfit import KNOWN
from harness.stats.jackknife import (
    CONFIDENCE,
    Array,
    Variance,
    independent_errors,
    joined,
    log_speedup,
    speedup_interval,
    token_weights,
)
from harness.summary import (
    AcceptanceByPosition,
    Answer,
    BlockGain,
    Caveat,
    Doubt,
    LoadCell,
    NotPredicted,
    OtherK,
    RoundSummary,
    ServedCell,
    ServedCosts,
    ServedGate,
    ServedK,
    ServedMemory,
    ServedSummary,
    StartedServers,
    StructuredGate,
    Summary,
    Unstable,
    UserLatency,
    Values,
    Visits,
    load_errors,
)
from harness.theory.speedup import RoundTimes

# Of the logarithm of a predicted speedup, what a round time costs that lies on a line between those
# of two measured K: about 3 % (docs/validation.md, "from two K")
ON_A_LINE = Variance(np.array(0.03**2), np.array(KNOWN))
# What gains more at another K by less than this share is not worth a sentence
LEAST_GAIN = 0.01
# From this median error on, a prediction under load is worth a caveat
LARGE_ERROR = 0.1


def analyse_served(setup: Setup) -> Summary:
    """Everything a server run says, as far as what it stored allows."""
    if setup.engine is None:  # no server answered
        return Summary(setup.facts(()), failures=failures(setup), caveats=caveats(setup))
    run = ServedRun(setup)
    results, unstable = run.results, run.unstable
    answers = tuple(each for entry in run.answered for each in (entry.workload, *entry.sets))
    return Summary(
        run=setup.facts(results),
        answers=answers,
        failures=failures(setup, run.trials),
        caveats=(
            *run.caveats(),
            *greedy_texts_differ(run.checks),
            *caveats(setup, results),
            *of_the_timings(unstable, (), {}),
            # Of this server: another loop's best K says nothing of it
            *k_at_edge(setup, [each for each in answers if each.engine == run.engine.name]),
        ),
        results=tuple(results),
        latency=(*run.prefill_rows(), *run.round_rows()),
        round_times=tuple(run.round_times()),
        unstable=unstable,
        acceptance_by_position=tuple(run.positions()),
        text_checks=tuple(run.checks),
        block_gains=tuple(run.block_gains()),
        served=run.summary(),
    )


@dataclass(frozen=True)
class ServedRun(ServedTexts):
    """What follows from a server run's texts and times, derived step by step; each once."""

    # ---- costs -----------------------------------------------------------------------------------

    def costs(
        self, temperature: float, prompt_set: str | None, ks: Sequence[int] | None = None
    ) -> ServerCosts | None:
        """What decoding costs, by requests that are not of this prompt set.

        Args:
            temperature: of the requests.
            prompt_set: that is predicted; None takes the requests of all sets.
            ks: whose rounds are known; None for all that were measured.

        Returns:
            None where nothing else was timed: no other set, and no synthetic acceptance.
        """
        asked = (temperature, prompt_set, self.priced_ks if ks is None else tuple(ks))
        if asked not in self._costs:
            timed = self._timed_requests(*asked)
            self._costs[asked] = None if timed is None else fit_costs(timed)
        return self._costs[asked]

    def recorded(self, temperature: float, costs: ServerCosts) -> ServedCosts:
        """Costs at a temperature, as they are stored."""
        without = self.left_out_costs(temperature)
        starts = np.array([[each.plain_start_s, each.start_s] for each in without]).T
        squares = (independent_errors(starts) ** 2).sum(axis=-1) if without else None
        plain_error_s, error_s = (None, None) if squares is None else np.sqrt(squares).tolist()
        return ServedCosts(
            temperature=temperature,
            source="synthetic" if self._rounds_near(temperature) else "other_sets",
            plain_start_s=costs.plain_start_s,
            start_s=costs.start_s,
            plain_s=costs.times.plain_s,
            round_s=dict(costs.times.round_s),
            plain_start_error_s=plain_error_s,
            start_error_s=error_s,
        )

    def left_out_costs(self, temperature: float) -> list[ServerCosts]:
        """The costs by requests of all sets, without each part of their prompts.

        Empty where they rest on too few prompts to do without some.
        """
        timed = self._timed_requests(temperature, None, self.priced_ks)
        return [] if timed is None else left_out_costs(timed, max(self.priced_ks))

    @cached_property
    def _costs(self) -> dict[tuple[float, str | None, tuple[int, ...]], ServerCosts | None]:
        """Those that were fitted so far."""
        return {}

    @cached_property
    def costs_by_temperature(self) -> dict[float, ServerCosts]:
        """By requests of all sets, where these tell."""
        made = {temperature: self.costs(temperature, None) for temperature in self.temperatures}
        return {temperature: costs for temperature, costs in made.items() if costs is not None}

    def _timed_requests(
        self, temperature: float, prompt_set: str | None, ks: Sequence[int]
    ) -> TimedRequests | None:
        """What costs are fitted from."""
        rejected = self._rejected_requests(temperature, ks)
        requests = self._requests(temperature, prompt_set, ks)
        if rejected is None or requests is None:
            return rejected or requests
        return rejected + requests

    def _rejected_requests(self, temperature: float, ks: Sequence[int]) -> TimedRequests | None:
        """Those of servers that were told to reject every draft; None where there are none."""
        timings = self._rounds_near(temperature)
        if self.counting is None or not timings:
            return None
        timings = [timing for timing in timings if timing.k in (0, *ks)]
        return timed_rounds(timings, self.counting, self.settle)

    def _requests(
        self, temperature: float, prompt_set: str | None, ks: Sequence[int]
    ) -> TimedRequests | None:
        """Those of the other prompt sets, whole and of shorter budgets; None where none is."""
        if self.counting is None or self.engine.rule is None:
            return None
        names = [name for name in self.sets_at(temperature) if name != prompt_set]
        # Before any K is measured, plain texts are there of one visit, and probes of all
        trials = self.settled if self.ks or not self._settled_probes else []
        requests = [*trials, *self._settled_starts, *self._settled_probes]
        plain = self.texts(requests, 0, temperature).of(names)
        speculative: dict[int, Requests] = {}
        for k in ks:
            texts = self.texts(requests, k, temperature).of(names)
            if texts.trials:
                counts = self.replayed(texts, k)
                speculative[k] = Requests(texts.seconds, counts, texts.prompts)
        if not plain.trials or not speculative:
            return None
        net = any(trial.one_token_s is not None for trial in plain.trials)
        of_plain = PlainRequests(plain.seconds, plain.tokens, plain.prompts)
        return TimedRequests(of_plain, speculative, net, looks_up(self.setup.draft))

    def _rounds_near(self, temperature: float) -> list[RoundTiming]:
        """Those of servers that were told to reject every draft."""
        return near([t for t in self.setup.run.rounds if t.batch == 1], temperature)

    def own_times(self, temperature: float) -> RoundTimes | None:
        """What our own loop's rounds take, where the run timed them next to the server's."""
        visits = visits_of(self.setup.run.own_rounds, self.setup.draft, temperature)
        return None if visits is None else latency_of((), visits).rounds

    def round_times(self) -> Iterator[RoundSummary]:
        """R(0) and R(K) of the server, by temperature."""
        for temperature, costs in self.costs_by_temperature.items():
            yield RoundSummary(
                draft=self.setup.draft,
                temperature=temperature,
                source="requests",
                plain_s=costs.times.plain_s,
                round_s={k: seconds for k, seconds in costs.times.round_s if k},
                visits=len({trial.repetition for trial in self.trials}),
            )

    def prefill_rows(self) -> Iterator[LatencyRow]:
        """Rows of latency.csv: the plain server's prefills, over visits, by length."""
        prefills = [
            (t.prompt_tokens, t.prefill_s)
            for t in completed(self.trials)
            if t.k == 0 and t.concurrency == 1
            if t.prefill_s is not None and t.prompt_tokens is not None
        ]
        for length, group in sorted(grouped(prefills, lambda pair: pair[0]).items()):
            seconds = [prefill_s for _, prefill_s in group]
            yield latency_row("target", self.setup.model, "prefill", length, 0, 1, seconds)

    def round_rows(self) -> Iterator[LatencyRow]:
        """Rows of latency.csv: a plain token, and a round, of each request less its start."""
        asked = product(self.costs_by_temperature.items(), (0, *self.ks))
        for (temperature, costs), k in asked if self.concurrency == 1 else ():
            start_s = costs.start_s if k else costs.plain_start_s
            done = [
                trial
                for trial in completed(self.settled)
                if (trial.temperature, trial.k) == (temperature, k)
            ]
            seconds = [
                max(0.0, trial.decode_s - start_s) / rounds
                for trial in done
                if (rounds := trial.rounds if k else trial.new_tokens)
                and trial.decode_s is not None
            ]
            if seconds:
                named = ("draft", self.setup.draft) if k else ("target", self.setup.model)
                context = round(float(np.median([trial.prompt_tokens or 0 for trial in done])))
                row = latency_row(*named, "round", k, context, 1, seconds)
                yield replace(row, temperature=temperature)

    @property
    def not_predicted(self) -> NotPredicted | None:
        """Why there is no prediction; None where there is one."""
        if self.counting is None or self.engine.rule is None:
            return "no_counting"
        if not self._traces:
            return "no_weights"
        known = (
            self.costs(t, name)
            for t in self.temperatures
            for name in (*self.sets_at(t), *([] if self.chosen_k(t) is None else [None]))
        )
        return None if any(costs is not None for costs in known) else "no_costs"

    # ---- cells -----------------------------------------------------------------------------------

    @cached_property
    def measured(self) -> list[ResultRow]:
        """What the server took, one row per cell; visits that it lacks show in its status."""
        names = {
            "model": self.setup.model,
            "draft": self.setup.draft,
            "times": {value: costs.times for value, costs in self.costs_by_temperature.items()},
        }
        served = {"engine": self.engine.name, "concurrency": self.concurrency}
        pairs = zip(  # of the same cells, in order
            measured_rows(self.settled, **names), measured_rows(self.trials, **names), strict=True
        )
        return [replace(row, **served, **self._completeness(every)) for row, every in pairs]

    def _completeness(self, row: ResultRow) -> dict[str, Any]:
        """Status and error of a cell: those of its requests, partial where it lacks visits."""
        lacking = self.visits_lacking(_cell(row))
        if lacking is None or row.status == "failed":
            return {"status": row.status, "error": row.error}
        few = lacking_visits(lacking)
        return {"status": "partial", "error": few if row.error is None else f"{few}; {row.error}"}

    @cached_property
    def predicted(self) -> list[ResultRow | None]:
        """What is predicted of each row of `measured`; None where nothing is."""
        return [made and made.with_interval(self.prediction_errors) for made in self._predictions]

    @cached_property
    def _predictions(self) -> "list[_Prediction | None]":
        """The same, as far as other requests tell."""
        return [self._predicted_cell(row) for row in self.measured]

    @cached_property
    def unmeasured(self) -> "list[_Prediction]":
        """What is predicted of the cells of every K that another one was chosen over."""
        rows = [
            replace(row, draft=self.setup.draft, k=k, status="complete", error=None)
            for row in self.measured
            if row.k == 0 and row.temperature is not None
            if self.chosen_k(row.temperature) is not None
            for k in self.asked_ks
            if k not in self.ks_at(row.temperature)
        ]
        return [made for row in rows if (made := self._predicted_cell(row)) is not None]

    @property
    def asked_ks(self) -> tuple[int, ...]:
        """The K above 0 that the run is of, ascending; of one that measures all, those it has."""
        chosen = self.setup.run.manifest.served_ks
        return tuple(sorted({*self.setup.ks})) if chosen and chosen.chosen else self.ks

    @cached_property
    def prediction_errors(self) -> dict[float, PredictionError]:
        """By temperature, how far what was measured is from these."""
        cells = grouped(completed(self.settled), lambda trial: trial.cell_key)
        gaps: dict[Cell, Gap | None] = {}
        for made in self._predictions:
            if made is None or made.row.k == 0:
                continue
            cell = _cell(made.row)
            sums = paired_sums(cells.get(cell, []), cells.get(replace(cell, k=0), []))
            gaps[cell] = made.gap(sums)
        return prediction_errors(gaps)

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
        plain = [trace for trace in self.setup.run.traces if trace.k == 0]
        engine = self.engine
        loads, asked = self.setup.run.loads, self.visits_asked
        return analyse_loads(loads, plain, engine.rule, self.counting, engine.name, asked)

    def plain_texts(self, row: ResultRow) -> Texts:
        """The plain server's texts of a cell's prompts."""
        assert row.temperature is not None
        texts = self.texts(self.settled, 0, row.temperature)
        return texts.of([row.prompt_set or ""])

    def _predicted_cell(self, row: ResultRow) -> "_Prediction | None":
        """What is predicted of a measured cell; None where nothing is."""
        if self.not_predicted is not None or row.temperature is None or row.new_tokens is None:
            return None
        # Of a K that is not measured there is no cell that its prediction should not have seen
        measured = row.k in (0, *self.ks_at(row.temperature))
        unseen = row.prompt_set if measured else None
        costs, texts = self.costs(row.temperature, unseen), self.plain_texts(row)
        if costs is None or not texts.trials:
            return None
        plain_s = costs.plain_s(texts.tokens)
        made = ResultRow(
            model=row.model,
            draft=row.draft,
            prompt_set=row.prompt_set,
            temperature=row.temperature,
            k=row.k,
            source="replayed",
            prompts=len({trial.conversation for trial in texts.trials}),
            engine=self.engine.name,
            status=row.status,
            error=row.error,
        )
        if row.k == 0:
            return _Prediction(replace(with_times(made, plain_s, texts.tokens), speedup=1.0))
        if not costs.times.covers(row.k):
            return None
        counts = self.replayed(texts, row.k)
        seconds = costs.speculative_s(counts)
        timed = self._timed_requests(row.temperature, unseen, self.priced_ks)
        made = replace(
            with_counts(with_times(made, seconds, texts.tokens), counts),
            rule=self.engine.rule,
            speedup=costs.speedup(texts.tokens, counts),
            # No prediction: what a round costs here, by the requests of this cell too
            breakeven_alpha=self.costs_by_temperature.get(
                row.temperature, costs
            ).times.break_even_alpha(row.k),
        )
        names, (before, after, tokens) = _by_prompt(texts, plain_s, seconds, texts.tokens)
        costs_error = None if timed is None else speedup_variance(timed, texts.tokens, counts)
        if costs_error is not None and row.k not in self.priced_ks:
            costs_error = joined([costs_error, ON_A_LINE])
        return _Prediction(made, tuple(names), np.stack([before, after, tokens]), costs_error)

    def cells(self) -> Iterator[ServedCell]:
        """Prediction and measurement of every cell that drafts."""
        for row, found in zip(self.measured, self.predicted, strict=True):
            if row.k == 0 or row.speedup is None or row.temperature is None:
                continue
            yield ServedCell(
                prompt_set=row.prompt_set or "",
                temperature=row.temperature,
                k=row.k,
                concurrency=row.concurrency,
                speedup=row.speedup,
                tokens_per_round=row.tokens_per_round,
                replayed_tokens_per_round=found and found.tokens_per_round,
                predicted=found and found.speedup,
                own_predicted=self._own_prediction(row),
                predicted_from_two_k=found and self._from_two_k(row),
                visits=self.visits_lacking(_cell(row)),
            )
        for row in (made.row for made in self.unmeasured):
            assert row.temperature is not None
            yield ServedCell(
                prompt_set=row.prompt_set or "",
                temperature=row.temperature,
                k=row.k,
                concurrency=row.concurrency,
                speedup=None,
                tokens_per_round=None,
                replayed_tokens_per_round=row.tokens_per_round,
                predicted=row.speedup,
                own_predicted=self._own_prediction(row),
            )

    def _own_prediction(self, row: ResultRow) -> float | None:
        """The cell's speedup at our own loop's round times."""
        assert row.temperature is not None
        times = self.own_times(row.temperature)
        if times is None or self.not_predicted in ("no_counting", "no_weights"):
            return None
        texts = self.plain_texts(row)
        if not texts.trials or not times.covers(row.k):
            return None
        seconds = seconds_of_rounds(self.replayed(texts, row.k, OWN.counting), times)
        return float(texts.tokens.sum() * times.plain_s / seconds.sum())

    def _from_two_k(self, row: ResultRow) -> float | None:
        """The prediction, had only the smallest and the largest K been measured."""
        if row.temperature is None or self.chosen_k(row.temperature) is not None:
            return None
        if len(self.ks) < 3 or row.k in (self.ks[0], self.ks[-1]):
            return None
        costs = self.costs(row.temperature, row.prompt_set, (self.ks[0], self.ks[-1]))
        texts = self.plain_texts(row)
        if costs is None or not costs.times.covers(row.k):
            return None
        return costs.speedup(texts.tokens, self.replayed(texts, row.k))

    def by_k(self) -> Iterator[ServedK]:
        """Every K on the whole workload, weighted."""
        own = {
            (name.k, entry.question.evidence.temperature): speedup
            for entry in self.answered
            if entry.question.source == "replayed"
            for name, speedup in entry.question.evidence.speedups(self.setup.weights).items()
        }
        for entry in self.answered:
            temperature = entry.question.evidence.temperature
            if entry.question.source != "measured":
                continue
            evidence = self._measured_evidence(temperature)
            costs = self.costs_by_temperature.get(temperature)
            whole = self._evidence(self._whole_requests(temperature), temperature)
            whole_request_speedups = whole.speedups(self.setup.weights)
            for name, speedup in evidence.speedups(self.setup.weights).items():
                done = [
                    trial
                    for trial in completed(self.settled)
                    if (trial.k, trial.temperature) == (name.k, temperature) and trial.rounds
                ]
                tokens = sum(trial.new_tokens or 0 for trial in done)
                yield ServedK(
                    temperature=temperature,
                    k=name.k,
                    speedup=speedup,
                    own_predicted=own.get((name.k, temperature)),
                    tokens_per_round=ratio(tokens, sum(trial.rounds or 0 for trial in done)),
                    round_cost=costs.times.relative(name.k)
                    if costs and costs.times.covers(name.k)
                    else None,
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

        done = [trial for trial in completed(self.trials) if trial.temperature == temperature]
        visits = {
            name: [
                Visit(trial.repetition, place, each)
                for place, trial in made
                if (each := before_s(trial)) is not None
            ]
            for name, made in grouped(enumerate(done), lambda entry: cell(entry[1])).items()
        }
        whole: list[Trial] = []
        for trial in completed(self.settled):
            if trial.temperature != temperature or trial.decode_s is None:
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
        self,
        evidence: Evidence,
        prompt_set: str,
        served_k: int,
        weights: Mapping[str, float] | None,
    ) -> Iterator[OtherK]:
        """The fastest K of some prompts, where it is another and gains more."""
        timed = {0: evidence.baseline, **{name.k: t for name, t in evidence.candidates.items()}}
        gains = evidence.speedups(weights).items()
        speedups = {0: 1.0, **{name.k: speedup for name, speedup in gains}}
        k = max(speedups, key=lambda each: speedups[each])
        if served_k not in speedups or speedups[k] < (1.0 + LEAST_GAIN) * speedups[served_k]:
            return
        interval = speedup_interval(
            timed[served_k].seconds,
            timed[served_k].tokens,
            timed[k].seconds,
            timed[k].tokens,
            evidence.prompt_sets,
            weights,
            # It is the fastest of several by the same requests (Bonferroni)
            level=1.0 - (1.0 - CONFIDENCE) / max(1, len(evidence.candidates)),
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
        """Replayed acceptance by position at each verdict's K."""
        for answer in self.workloads:
            k, temperature = answer.named[1], answer.temperature
            if self.not_predicted or not k or temperature is None:
                continue
            texts = self.texts(self.settled, 0, temperature)
            if texts.trials:
                shares = self.replayed(texts, k).acceptance_by_position
                yield AcceptanceByPosition(
                    self.setup.draft, "all", temperature, k, "replayed", shares
                )

    # ---- answers ---------------------------------------------------------------------------------

    @cached_property
    def answered(self) -> tuple[Answered, ...]:
        """Every question decided: the server's, then our own loop's."""
        asked = [*self._questions(), *self._own_questions()]
        return answered(
            asked,
            weights=self.setup.shares,
            seed=self.setup.seed,
            doubts=[self._doubt(question) for question in asked],
        )

    @cached_property
    def gates(self) -> tuple[ServedGate, ...]:
        """Whether the server is lossless, by temperature and K."""
        return gates(self)

    @cached_property
    def structured(self) -> tuple[StructuredGate, ...]:
        """Whether speculation lowers the validity of structured output."""
        return structured_gates(self.setup.run.structured)

    @property
    def failed_gates(self) -> tuple[ServedGate, ...]:
        """Those of a K that changes what is generated."""
        return tuple(gate for gate in self.gates if gate.k and gate.lossless is False)

    @property
    def workloads(self) -> list[Answer]:
        """The server's answers on the whole workload, by temperature."""
        served = (entry for entry in self.answered if entry.question.engine == self.engine.name)
        return [entry.workload for entry in served]

    def _questions(self) -> Iterator[Question]:
        if all(trial.k for trial in self.trials):  # records of no plain server
            return
        for temperature in self.temperatures:
            done = (t for t in completed(self.settled) if t.temperature == temperature)
            if any(trial.decode_s is None for trial in done):  # records without a time of decoding
                continue
            yield Question(
                self._chosen_evidence(temperature) or self._measured_evidence(temperature),
                self.engine.rule,
                "measured",
                self.engine.name,
                visits={
                    k: lacking
                    for k in self._answered_ks(temperature)
                    if (lacking := self._lacking(temperature, [k])) is not None
                },
            )

    def _measured_evidence(self, temperature: float) -> Evidence:
        """Seconds per prompt of every K that was measured on all."""
        return self._evidence(self._comparable(temperature), temperature)

    def _lacking(self, temperature: float, ks: Iterable[int]) -> Visits | None:
        """The fewest visits of some K; None where they have all."""
        cells = (Cell(name, temperature, k) for name in self.sets_at(temperature) for k in ks)
        known = [lacking for cell in cells if (lacking := self.visits_lacking(cell)) is not None]
        return min(known, key=lambda visits: visits.timed, default=None)

    def _answered_ks(self, temperature: float) -> list[int]:
        """The K that an answer chooses from: those with enough visits."""
        lacking = {k: self._lacking(temperature, [k]) for k in self.ks_at(temperature)}
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
        if self.engine.name == OWN.name or self.not_predicted in ("no_counting", "no_weights"):
            return
        for temperature in self.temperatures:
            times = self.own_times(temperature)
            texts = self.texts(self.settled, 0, temperature)
            if times is not None and texts.trials:
                evidence = self._predicted_evidence(texts, temperature, times)
                yield Question(evidence, self.engine.rule, "replayed", OWN.name)

    def _predicted_evidence(self, texts: Texts, temperature: float, times: RoundTimes) -> Evidence:
        """Seconds per prompt at our own loop's round times."""
        ks = [k for k in self.asked_ks if times.covers(k)]
        rounds_s = (seconds_of_rounds(self.replayed(texts, k, OWN.counting), times) for k in ks)
        plain_s = texts.tokens * times.plain_s
        names, (tokens, plain, *seconds) = _by_prompt(texts, texts.tokens, plain_s, *rounds_s)
        return Evidence(
            temperature=temperature,
            prompts=tuple(prompt for _, prompt in names),
            prompt_sets=tuple(prompt_set for prompt_set, _ in names),
            baseline=Timed(plain, tokens),
            candidates={
                Candidate(self.setup.draft, k): Timed(of_k, tokens)
                for k, of_k in zip(ks, seconds, strict=True)
            },
            facts={},
        )

    # ---- one K, that replay chose ----------------------------------------------------------------

    def predicted_speedups(self, temperature: float) -> dict[int, float]:
        """Of every K on the whole workload; empty where nothing is replayed or priced."""
        latency, replays = self._latency(temperature), self._replays(temperature)
        if latency is None or replays is None:
            return {}
        evidence = evidence_of(replays, {self.setup.draft: latency})
        speedups = evidence.speedups(self.setup.weights)
        return {name.k: speedup for name, speedup in speedups.items()}

    def _latency(self, temperature: float) -> Latency | None:
        """What requests at any K cost, by those of all sets."""
        costs = self.costs_by_temperature.get(temperature)
        if costs is None:
            return None
        times = ServedTimes(
            engine=self.engine.name,
            run=str(self.setup.run.folder),
            temperature=temperature,
            visits=self.visits_asked or 0,
            basis="measured",
            costs=costs,
            without=tuple(self.left_out_costs(temperature)) or (costs, costs),
        )
        return Latency(costs.times, served=times)

    def _replays(self, temperature: float) -> Replays | None:
        """The plain server's texts at every K whose rounds are priced, or lie between two."""
        costs = self.costs_by_temperature.get(temperature)
        texts = self.texts(self.settled, 0, temperature)
        if costs is None or self.engine.rule is None or not texts.trials:
            return None
        counts = {
            Candidate(self.setup.draft, k): self.replayed(texts, k)
            for k in sorted({*self.setup.ks})
            if costs.times.covers(k)
        }
        lookups = frozenset([self.setup.draft] if texts.traces[0].chosen else [])
        return by_prompt(texts.traces, self.engine.rule, counts, lookups)

    def _chosen_evidence(self, temperature: float) -> Evidence | None:
        """The chosen K as it was measured, and every other as replay has its rounds differ.

        None where every K is measured, or that one on no prompt that was replayed.
        """
        k, latency = self.chosen_k(temperature), self._latency(temperature)
        replays, measured = self._replays(temperature), self._measured_evidence(temperature)
        chosen = Candidate(self.setup.draft, k or 0)
        if latency is None or replays is None or chosen not in measured.candidates:
            return None
        rows = {name: row for row, name in enumerate(_names(measured))}
        replays = replays.rows([name in rows for name in _names(replays)])
        if chosen not in replays.candidates or not replays.prompts:
            return None
        predicted = evidence_of(replays, {self.setup.draft: latency})
        kept = np.array([rows[name] for name in _names(predicted)])
        plain, timed = (
            Timed(each.seconds[kept], each.tokens[kept])
            for each in (measured.baseline, measured.candidates[chosen])
        )
        of_chosen_s = predicted.candidates[chosen].seconds
        return replace(
            predicted,
            baseline=plain,
            candidates={
                name: Timed(timed.seconds * (each.seconds / of_chosen_s), timed.tokens)
                for name, each in predicted.candidates.items()
            },
            cost_errors=tuple(
                CostError(
                    {name: moves - error.moves[chosen] for name, moves in error.moves.items()},
                    error.degrees,
                )
                for error in (*predicted.cost_errors, self._line_error(predicted))
            ),
            named=chosen,
        )

    def _line_error(self, predicted: Evidence) -> CostError:
        """That of the K whose rounds were not timed."""
        factors = ON_A_LINE.value**0.5 * np.eye(len(predicted.candidates))
        of_each = zip(predicted.candidates, factors, strict=True)
        return CostError({name: row * (name.k not in self.priced_ks) for name, row in of_each})

    def _choice_caveats(self) -> Iterator[Caveat]:
        """Why every K is measured, where one was to be."""
        chosen = self.setup.run.manifest.served_ks
        if chosen is not None and chosen.why_all is not None:
            yield Caveat("server_every_k", {"reason": chosen.why_all})

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
        if doubt is not None:
            doubt = doubt[0], {**doubt[1], "clock": self.engine.clock}
        if temperature == GREEDY:
            failed = [check for check in self.checks if check.result == "FAIL"]
            return distrust(failed) or doubt
        failed = [gate for gate in self.failed_gates if gate.temperature == temperature]
        if not failed:
            return doubt
        worst = max(failed, key=lambda gate: abs(gate.text_z or 0))
        return "server_not_lossless", {
            "k": worst.k,
            "text_z": worst.text_z,
            "plain_z": worst.plain_z,
        }

    def block_gains(self) -> Iterator[BlockGain]:
        """What block verification would bring to the server above temperature 0."""
        for answer in self.workloads:
            temperature, (_, k) = answer.temperature or GREEDY, answer.named
            costs = self.costs_by_temperature.get(temperature)
            texts = self.texts(self.settled, 0, temperature)
            if temperature == GREEDY or costs is None or not k or not costs.times.covers(k):
                continue
            if self.counting is None or not texts.trials:
                continue
            if texts.traces[0].chosen:  # what is looked up is accepted alike
                continue
            sets = [trial.prompt_set for trial in texts.trials]
            factors = token_weights(sets, texts.tokens, self.setup.weights)
            by_rule = [self.replayed(texts, k, rule=rule) for rule in ("ratio", "block")]
            plain_s = float(factors @ costs.plain_s(texts.tokens))
            yield BlockGain(
                self.setup.draft,
                k,
                temperature,
                self.setup.kind_of(self.setup.draft),
                *(counts.scaled(factors).tokens_per_round for counts in by_rule),
                *(plain_s / float(factors @ costs.speculative_s(counts)) for counts in by_rule),
            )

    # ---- the record ------------------------------------------------------------------------------

    @cached_property
    def latencies(self) -> tuple[UserLatency, ...]:
        """What users wait for, of requests sent one by one and of loads."""
        engine, weights = self.engine, self.setup.request_weights
        config = self.setup.run.config
        tpot_ms, ttft_ms = config.get("tpot_ms"), config.get("ttft_ms")
        goals = Goals(tpot_ms and tpot_ms / 1e3, ttft_ms and ttft_ms / 1e3)
        loaded = {(c.temperature, c.concurrency, c.k): c.visits for c in self.loads.cells}
        of_one_k = where(self.setup.run.loads, varying="")
        return (
            *(
                replace(row, visits=self._lacking(row.temperature, [row.k]))
                for row in one_by_one(self.trials, engine, weights)
            ),
            *(
                replace(row, visits=loaded.get((row.temperature, row.concurrency, row.k)))
                for row in under_load(of_one_k, engine, weights, goals)
            ),
        )

    def summary(self) -> ServedSummary:
        """What the server is, and what a prediction of it is worth."""
        engine, first = self.engine, self.engine.first_position
        # Where some K changes what is generated, no K is given for any load
        changed = {gate.temperature for gate in self.failed_gates}
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
            structured=self.structured,
            costs=tuple(
                self.recorded(temperature, costs)
                for temperature, costs in self.costs_by_temperature.items()
            ),
            not_predicted=self.not_predicted,
            load=self.loads.cells,
            varying=self.loads.varying,
            varying_commands=engine.varying,
            schedules=()
            if self.disturbed is not None
            else tuple(
                schedule for schedule in self.loads.schedules if schedule.temperature not in changed
            ),
            memory=self._memory(),
            servers=self._servers(),
            acceptance_lengths=()
            if first is None
            else tuple(acceptance_lengths(self.settled, first)),
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
        kv_type = setup.run.config.get("kv_type") if spec_of(self.engine.name).reads_gguf else None
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
            draft_kv_bytes_per_token=setup.kv_bytes_per_token(setup.draft, kv_type),
        )

    def caveats(self) -> Iterator[Caveat]:
        """What to mind of this server, the most serious first."""
        if self.concurrency > 1:
            files = ", ".join(self.setup.run.config.get("records") or ())
            values = {"file": files, "max_concurrency": self.concurrency}
            yield Caveat("server_concurrency", values)
        yield from gate_caveats(self.gates, self.engine.rule)
        yield from structured_caveats(self.structured)
        served, scored = self.engine.dtype, self.setup.described_draft(self.setup.draft).dtype
        if served is not None and scored not in (None, served):
            values: Values = {"engine": self.engine.name, "served": served, "scored": scored}
            yield Caveat("draft_served_in_other_dtype", values)
        yield from self._choice_caveats()
        yield from self._visits_lacking()
        yield from self._load_caveats()
        for error in self.prediction_errors.values():
            yield from error.caveats()
        if self.not_predicted is not None:
            yield Caveat("server_not_predicted", {"reason": self.not_predicted})

    def _visits_lacking(self) -> Iterator[Caveat]:
        """The K that were timed in fewer visits than the run asked for, by how many these are."""
        for temperature in self.temperatures:
            answered_ks = self._answered_ks(temperature)
            lacking = [(k, self._lacking(temperature, [k])) for k in self.ks_at(temperature)]
            by_visits = grouped((pair for pair in lacking if pair[1]), lambda pair: pair[1])
            for visits, pairs in by_visits.items():
                assert visits is not None
                yield Caveat(
                    "server_visits_lacking",
                    {
                        "temperature": temperature,
                        "ks": ", ".join(str(k) for k, _ in pairs),
                        "timed": visits.timed,
                        "asked": visits.asked,
                        "left_out": not {k for k, _ in pairs} & {*answered_ks},
                        "load": False,
                    },
                )

    @cached_property
    def disturbed(self) -> float | None:
        """Processors that others kept busy during loads, where these are too many to compare them.

        Processor time counts none of theirs.
        """
        others = kept_busy_by_others(self.setup.run.loads)
        if self.engine.clock == "cpu" or others is None or others <= MOST_OTHERS:
            return None
        return others

    def _load_caveats(self) -> Iterator[Caveat]:
        """Loads that others disturbed, or that are queues, and K that lack visits under them."""
        if self.disturbed is not None:
            yield Caveat("loads_disturbed", {"others": self.disturbed, "most": MOST_OTHERS})
        queues = [cell for cell in self.loads.cells if cell.slots is not None]
        if queues:
            first = min(queues, key=lambda cell: cell.concurrency or 0)
            values: Values = {"concurrency": first.concurrency, "slots": first.slots}
            yield Caveat("server_queues", {"engine": self.engine.name, **values})
        behind = [row for row in self.latencies if row.queue_grows]
        if behind:
            rates = sorted({row.rate or 0.0 for row in behind})
            ks = {row.k: None for row in behind if row.rate == rates[0]}
            values = {"rate": rates[0], "ks": ", ".join(map(str, sorted(ks)))}
            yield Caveat("rate_beyond_capacity", values)
        errors = np.abs(load_errors(self.loads.cells))
        if errors.size and np.median(errors) > LARGE_ERROR:
            of = {"median": float(np.median(errors)), "largest": float(errors.max())}
            yield Caveat("load_predictions_off", {**of, "cells": errors.size})
        lacking = [cell for cell in self.loads.cells if cell.visits is not None]
        for (temperature, visits), cells in grouped(
            lacking, lambda cell: (cell.temperature, cell.visits)
        ).items():
            assert visits is not None
            ks = {cell.k for cell in cells}
            yield Caveat(
                "server_visits_lacking",
                {
                    "temperature": temperature,
                    "ks": ", ".join(map(str, sorted(ks))),
                    "timed": visits.timed,
                    "asked": visits.asked,
                    "left_out": not any(self._may_be_named(cell) for cell in cells),
                    "load": True,
                },
            )

    def _may_be_named(self, cell: LoadCell) -> bool:
        """Whether a schedule may name the K of a cell."""
        every = self.visits_asked or 0
        timed = {
            c.k: every if c.visits is None else c.visits.timed
            for c in where(
                self.loads.cells, temperature=cell.temperature, concurrency=cell.concurrency
            )
            if c.k
        }
        return not cell.k or cell.k in with_enough_visits(timed)


@dataclass(frozen=True, eq=False)
class _Prediction:
    """What is predicted of a cell by other requests.

    Attributes:
        row: without an interval.
        prompts: [prompt] with their sets; none of plain decoding.
        sums: [3, prompt] predicted plain seconds, speculative ones, and tokens.
        costs: the error of what tokens and rounds cost; None where too few prompts tell it.
    """

    row: ResultRow
    prompts: tuple[tuple[str, str], ...] = ()
    sums: Array = field(default_factory=lambda: np.zeros((3, 0)))
    costs: Variance | None = None

    def with_interval(self, errors: Mapping[float, PredictionError]) -> ResultRow:
        """The row with an interval over other prompts, and others whose requests tell costs.

        By temperature, `errors` are those of all predictions.
        """
        if self.costs is None:
            return self.row
        plain_s, seconds, tokens = self.sums
        error = errors.get(self.row.temperature or 0.0)
        shared = joined([self.costs] if error is None else [self.costs, error.variance])
        interval = speedup_interval(plain_s, tokens, seconds, tokens, shared=shared)
        if interval is None:
            return self.row
        return replace(self.row, speedup_lo=interval.lo, speedup_hi=interval.hi)

    def gap(self, measured: Mapping[tuple[str, str], Array]) -> Gap | None:
        """Against `paired_sums` of the same cell, on the prompts that both have.

        None without any, or where the error of the costs is not known.
        """
        rows = [row for row, name in enumerate(self.prompts) if name in measured]
        if not rows or self.costs is None:
            return None
        sets, (before_s, after_s, texts) = ("",) * len(rows), self.sums[:, rows]
        of_prompts = np.array([measured[self.prompts[row]] for row in rows])
        plain_s, plain_tokens, seconds, tokens = of_prompts.T
        return Gap.of(
            log_speedup(before_s, texts, after_s, texts, sets),
            log_speedup(plain_s, plain_tokens, seconds, tokens, sets),
            self.costs,
        )


def _names(of: Evidence | Replays) -> list[tuple[str, str]]:
    """The prompts, with their sets."""
    return [*zip(of.prompt_sets, of.prompts, strict=True)]


def _cell(row: ResultRow) -> Cell:
    """That a row is of."""
    assert row.temperature is not None
    return Cell(row.prompt_set or "", row.temperature, row.k)


def _by_prompt(texts: Texts, *values: Array) -> tuple[list[tuple[str, str]], list[Array]]:
    """The prompts of n texts, and for each of the [n] values its sums, [prompt]."""
    names = sorted(set(texts.prompts))
    places = [names.index(name) for name in texts.prompts]
    return names, [np.bincount(places, each).astype(np.float64) for each in values]

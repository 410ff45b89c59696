"""What decoding costs on a server, by its requests, and what that predicts of every cell.

A cell that was measured is predicted from two factors that have not seen it: the rounds that replay
expects of the plain server's texts, and what this engine's rounds take, in the requests of the
other prompt sets, and on servers that were told to reject every draft. What our own loop's rounds
would have predicted stands next to it. A K that no server measured on all prompts is predicted from
rounds that few requests priced, or that lie on a line between two.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from harness.analysis.cells import (
    PromptId,
    completed,
    lacking_visits,
    measured_rows,
    paired_sums,
    prompts_of,
    with_counts,
    with_times,
)
from harness.analysis.latency import Latency, ServedTimes, latency_of, latency_row, near, visits_of
from harness.analysis.predicted import evidence_of
from harness.analysis.prediction_error import Gap, PredictionError, prediction_errors
from harness.analysis.replayed import Replays, by_prompt
from harness.analysis.server_costs import (
    Requests,
    ServerCosts,
    TimedRequests,
    fit_costs,
    left_out_costs,
    seconds_of_rounds,
    speedup_variance,
    timed_rounds,
)
from harness.analysis.server_lossless import gates
from harness.analysis.server_texts import ServedTexts, Texts
from harness.analysis.verdict import Candidate, Evidence
from harness.records import GREEDY, Cell, LatencyRow, ResultRow, RoundTiming, grouped, where
from harness.serving.drafts import looks_up
from harness.serving.engines import OWN
from harness.serving.round_counting import Counting
from harness.stats.jackknife import (
    Array,
    Variance,
    independent_errors,
    joined,
    speedup_interval,
)
from harness.summary import NotPredicted, RoundSummary, ServedCell, ServedCosts, ServedGate


@dataclass(frozen=True)
class ServedPredictions(ServedTexts):
    """What follows from the texts and times of a server run, before anything is decided."""

    # ---- whether it is lossless ------------------------------------------------------------------

    @cached_property
    def gates(self) -> tuple[ServedGate, ...]:
        """Whether the server is lossless, by temperature and K."""
        return gates(self)

    @property
    def failed_gates(self) -> tuple[ServedGate, ...]:
        """Those of a K that changes what is generated."""
        return tuple(gate for gate in self.gates if gate.k and gate.lossless is False)

    def replay_holds(self, temperature: float) -> bool:
        """Whether replay tells the rounds at a temperature, for the server is lossless there.

        Greedy texts that differ from plain decoding's are left out one by one.
        """
        failed = {gate.temperature for gate in self.failed_gates}
        return temperature == GREEDY or temperature not in failed

    # ---- costs -----------------------------------------------------------------------------------

    def costs(self, temperature: float, prompt_set: str | None) -> ServerCosts | None:
        """What decoding costs, by requests that are not of this prompt set.

        None where nothing else was timed: no other set, and no synthetic acceptance; and where its
        rounds are not replay's, since the server is not lossless.

        Args:
            prompt_set: that is predicted; None takes the requests of all sets.
        """
        asked = (temperature, prompt_set)
        if not self.replay_holds(temperature):
            return None
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
        timed = self._timed_requests(temperature, None)
        return [] if timed is None else left_out_costs(timed, max(self.priced_ks))

    @cached_property
    def _costs(self) -> dict[tuple[float, str | None], ServerCosts | None]:
        """Those that were fitted so far."""
        return {}

    @cached_property
    def costs_by_temperature(self) -> dict[float, ServerCosts]:
        """By requests of all sets, where these tell."""
        made = {temperature: self.costs(temperature, None) for temperature in self.temperatures}
        return {temperature: costs for temperature, costs in made.items() if costs is not None}

    def _timed_requests(self, temperature: float, prompt_set: str | None) -> TimedRequests | None:
        rejected = self._rejected_requests(temperature)
        requests = self._requests(temperature, prompt_set)
        if rejected is None or requests is None:
            return rejected or requests
        return rejected + requests

    def _rejected_requests(self, temperature: float) -> TimedRequests | None:
        """Those of servers that were told to reject every draft; None where there are none."""
        timings = self._rounds_near(temperature)
        if self.counting is None or not timings:
            return None
        timings = [timing for timing in timings if timing.k in (0, *self.priced_ks)]
        return timed_rounds(timings, self.counting, self.settle)

    def _requests(self, temperature: float, prompt_set: str | None) -> TimedRequests | None:
        """Those of the other prompt sets, whole and of shorter budgets; None where none is."""
        if self.counting is None or self.engine.rule is None:
            return None
        names = [name for name in self.sets_at(temperature) if name != prompt_set]
        # Before any K is measured, plain texts are there of one visit, and probes of all
        trials = self.settled if self.ks or not self._settled_probes else []
        requests = [*trials, *self._settled_starts, *self._settled_probes]
        texts = {k: self.texts(requests, k, temperature).of(names) for k in (0, *self.priced_ks)}
        by_k = {
            k: Requests(
                each.seconds,
                self.replayed(each, k).proposals if k else each.tokens[:, None],
                each.prompts,
            )
            for k, each in texts.items()
            if each.trials
        }
        if 0 not in by_k or len(by_k) == 1:
            return None
        net = any(trial.one_token_s is not None for trial in texts[0].trials)
        return TimedRequests(by_k, net, looks_up(self.setup.draft))

    def _rounds_near(self, temperature: float) -> list[RoundTiming]:
        """Those of servers that were told to reject every draft."""
        return near(where(self.setup.run.rounds, batch=1), temperature)

    def own_latency(self, temperature: float) -> Latency | None:
        """What our own loop's rounds take, where the run timed them next to the server's."""
        visits = visits_of(self.setup.run.own_rounds, self.setup.draft, temperature)
        return None if visits is None else latency_of((), visits)

    def round_times(self) -> Iterator[RoundSummary]:
        """R(0) and R(K) of the server, by temperature."""
        for latency in self._latencies.values():
            yield replace(latency.round_summary(self.setup.draft), run=None)

    def prefill_rows(self) -> Iterator[LatencyRow]:
        """Rows of latency.csv: the plain server's prefills, over visits, by length."""
        by_length: dict[int, list[float]] = {}
        for t in where(completed(self.trials), k=0):
            if t.prefill_s is not None and t.prompt_tokens is not None:
                by_length.setdefault(t.prompt_tokens, []).append(t.prefill_s)
        for length, seconds in sorted(by_length.items()):
            yield latency_row("target", self.setup.model, "prefill", length, 0, 1, seconds)

    def round_rows(self) -> Iterator[LatencyRow]:
        """Rows of latency.csv: a plain token, and a round, of each request less its start."""
        asked = product(self.costs_by_temperature.items(), (0, *self.ks))
        for (temperature, costs), k in asked:
            start_s = costs.start_s if k else costs.plain_start_s
            done = where(completed(self.settled), temperature=temperature, k=k)
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
            return "no_texts" if self.setup.run.config.get("score") else "no_weights"
        if not any(map(self.replay_holds, self.temperatures)):
            return "not_lossless"
        known = (
            self.costs(t, name)
            for t in self.temperatures
            for name in (*self.sets_at(t), *([] if self.chosen_k(t) is None else [None]))
        )
        if any(costs is not None for costs in known):
            return None
        timed = {trial.k for trial in completed(self.trials)}
        if 0 not in timed or timed == {0}:
            return "servers_failed"
        several = any(len(self.sets_at(t)) > 1 or self._rounds_near(t) for t in self.temperatures)
        return "costs_untold" if several else "no_costs"

    # ---- cells -----------------------------------------------------------------------------------

    @cached_property
    def measured(self) -> list[ResultRow]:
        """What the server took, one row per cell; visits that it lacks show in its status."""
        names = {
            "model": self.setup.model,
            "draft": self.setup.draft,
            "times": {value: costs.times for value, costs in self.costs_by_temperature.items()},
        }
        rows, every = (measured_rows(trials, **names) for trials in (self.settled, self.trials))
        pairs = zip(rows, every, strict=True)  # of the same cells, in order
        return [
            replace(row, engine=self.engine.name, **self._completeness(each)) for row, each in pairs
        ]

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
        """What is predicted of the cells of every priced K that another one was chosen over."""
        rows = [
            replace(row, draft=self.setup.draft, k=k, status="complete", error=None)
            for row in self.measured
            if row.k == 0 and row.temperature is not None
            if self.chosen_k(row.temperature) is not None
            for k in self.priced_at(row.temperature)
            if k not in self.ks_at(row.temperature)
        ]
        return [made for row in rows if (made := self._predicted_cell(row)) is not None]

    def priced_at(self, temperature: float) -> tuple[int, ...]:
        """The K above 0 whose rounds were timed at a temperature, and do not lie on a line."""
        costs = self.costs_by_temperature.get(temperature)
        return () if costs is None else tuple(k for k, _ in costs.times.round_s if k)

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
            gaps[cell] = made.costs and Gap.of(made.sums, sums, made.costs)
        return prediction_errors(gaps)

    def plain_texts(self, row: ResultRow) -> Texts:
        """The plain server's texts of a cell's prompts."""
        assert row.temperature is not None
        texts = self.texts(self.settled, 0, row.temperature)
        return texts.of([row.prompt_set or ""])

    def _predicted_cell(self, row: ResultRow) -> "_Prediction | None":
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
        timed = self._timed_requests(row.temperature, unseen)
        # No prediction: what a round costs here, by the requests of this cell too
        every = self.costs_by_temperature.get(row.temperature, costs)
        made = replace(
            with_counts(with_times(made, seconds, texts.tokens), counts),
            rule=self.engine.rule,
            speedup=costs.speedup(texts.tokens, counts),
            breakeven_alpha=every.times.break_even_alpha(row.k),
        )
        names, rows = prompts_of(texts.trials)
        before, after, tokens = (
            np.bincount(rows, each).astype(np.float64) for each in (plain_s, seconds, texts.tokens)
        )
        sums = np.stack([before, tokens, after, tokens], axis=1)
        costs_error = None if timed is None else speedup_variance(timed, texts.tokens, counts)
        return _Prediction(made, dict(zip(names, sums, strict=True)), costs_error)

    def cells(self) -> Iterator[ServedCell]:
        """Prediction and measurement of every cell that drafts; of a K that was not, the former."""
        measured = zip(self.measured, self.predicted, strict=True)
        both = [(row, made) for row, made in measured if row.k and row.speedup is not None]
        for row, made in (*both, *((None, made.row) for made in self.unmeasured)):
            known = row or made
            assert known is not None
            cell = _cell(known)
            yield ServedCell(
                prompt_set=cell.prompt_set,
                temperature=cell.temperature,
                k=cell.k,
                speedup=row and row.speedup,
                tokens_per_round=row and row.tokens_per_round,
                replayed_tokens_per_round=made and made.tokens_per_round,
                predicted=made and made.speedup,
                own_predicted=self._own_prediction(known),
                visits=row and self.visits_lacking(cell),
            )

    def _own_prediction(self, row: ResultRow) -> float | None:
        """The cell's speedup at our own loop's round times."""
        assert row.temperature is not None
        latency = self.own_latency(row.temperature)
        if latency is None or self.not_predicted in ("no_counting", "no_weights", "no_texts"):
            return None
        if not self.replay_holds(row.temperature):
            return None
        times, texts = latency.rounds, self.plain_texts(row)
        if not texts.trials or not times.covers(row.k):
            return None
        seconds = seconds_of_rounds(self.replayed(texts, row.k, OWN.counting), times)
        return float(texts.tokens.sum() * times.plain_s / seconds.sum())

    # ---- every K on the whole workload -----------------------------------------------------------

    def predicted_evidence(self, temperature: float) -> Evidence | None:
        """Of every K that is priced, by replay of the plain texts; None where none is."""
        latency = self._latencies.get(temperature)
        replays = self._replays(temperature, self.priced_at(temperature))
        if latency is None or replays is None:
            return None
        return evidence_of(replays, {self.setup.draft: latency})

    def predicted_speedups(self, temperature: float) -> dict[int, float]:
        """Of every K that is priced, on the whole workload; empty where nothing is replayed."""
        evidence = self.predicted_evidence(temperature)
        speedups = {} if evidence is None else evidence.speedups(self.setup.weights)
        return {name.k: speedup for name, speedup in speedups.items()}

    @cached_property
    def _latencies(self) -> dict[float, Latency]:
        """By temperature, what requests at any K cost, by those of all sets."""
        visits = len({trial.repetition for trial in self.trials})
        made = {
            temperature: ServedTimes(
                engine=self.engine.name,
                run=str(self.setup.run.folder),
                temperature=temperature,
                visits=visits,
                basis="measured",
                costs=costs,
                without=tuple(self.left_out_costs(temperature)) or (costs, costs),
            )
            for temperature, costs in self.costs_by_temperature.items()
        }
        return {at: Latency(times.costs.times, served=times) for at, times in made.items()}

    def _replays(
        self, temperature: float, ks: Sequence[int], counting: Counting | None = None
    ) -> Replays | None:
        """The plain server's texts at some K, counted as the engine does unless told otherwise."""
        texts, rule, draft = (
            self.texts(self.plain_trials, 0, temperature),
            self.engine.rule,
            self.setup.draft,
        )
        if rule is None or not ks or not texts.trials:
            return None
        counts = {Candidate(draft, k): self.replayed(texts, k, counting) for k in ks}
        lookups = frozenset([draft] if texts.traces[0].chosen else [])
        return by_prompt(texts.traces, rule, counts, lookups)

    def own_evidence(self, temperature: float) -> Evidence | None:
        """What our own loop's round times predict; None where these are of no K."""
        latency = self.own_latency(temperature)
        ks = [] if latency is None else [k for k in self.asked_ks if latency.rounds.covers(k)]
        replays = self._replays(temperature, ks, OWN.counting)
        if latency is None or replays is None:
            return None
        return evidence_of(replays, {self.setup.draft: latency})


@dataclass(frozen=True, eq=False)
class _Prediction:
    """What is predicted of a cell by other requests.

    Attributes:
        row: without an interval.
        sums: [4] of each prompt, as `paired_sums` has them; none of plain decoding.
        costs: the error of what tokens and rounds cost; None where too few prompts tell it.
    """

    row: ResultRow
    sums: Mapping[PromptId, Array] = field(default_factory=dict[PromptId, Array])
    costs: Variance | None = None

    def with_interval(self, errors: Mapping[float, PredictionError]) -> ResultRow:
        """The row with an interval over other prompts, and others whose requests tell costs.

        By temperature, `errors` are those of all predictions.
        """
        if self.costs is None:
            return self.row
        error = errors.get(self.row.temperature or 0.0)
        shared = joined([self.costs] if error is None else [self.costs, error.variance])
        interval = speedup_interval(*np.array([*self.sums.values()]).T, shared=shared)
        if interval is None:
            return self.row
        return replace(self.row, speedup_lo=interval.lo, speedup_hi=interval.hi)


def _cell(row: ResultRow) -> Cell:
    """That a row is of."""
    assert row.temperature is not None
    return Cell(row.prompt_set or "", row.temperature, row.k)

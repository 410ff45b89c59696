"""A server run: which K to serve on the engine that was measured, and what a prediction is worth.

Its folder is a sweep's: trials, rounds, traces. What differs is where they come from, and what a
round costs. Every cell that was measured is predicted as well, from two factors that have not seen
it: the rounds that replay expects of the plain server's texts, and what this engine's rounds take,
in the requests of the other prompt sets, and on servers that were told to reject every draft. What
our own loop's rounds would have predicted stands next to it.

A temperature at which a speculating server is not lossless (`server_gate`) gets no verdict.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from harness.analysis.acceptance_lengths import acceptance_lengths
from harness.analysis.answers import Answered, Question, answered
from harness.analysis.batch_schedule import LoadResults, analyse_loads
from harness.analysis.caveats import caveats, failures, greedy_texts_differ, of_the_timings
from harness.analysis.cells import completed, measured_rows, ratio
from harness.analysis.latency import latency_of, latency_row, visits_of
from harness.analysis.leaderboard import draft_memory
from harness.analysis.lossless import distrust
from harness.analysis.outliers import impossible, unstable_cells
from harness.analysis.served_texts import ServedTexts, Texts
from harness.analysis.server_costs import (
    PlainRequests,
    Requests,
    ServerCosts,
    TimedRequests,
    fit_costs,
    seconds_of_rounds,
    speedup_variance,
    timed_rounds,
)
from harness.analysis.server_gate import gate_caveats, gates
from harness.analysis.setup import Setup
from harness.analysis.verdict import Candidate, Evidence, Timed, evidence_from_trials
from harness.records import GREEDY, LatencyRow, ResultRow, RoundTiming
from harness.serving.counting import Counting
from harness.stats.jackknife import Array, Interval, enough_prompts, speedup_interval
from harness.summary import (
    AcceptanceByPosition,
    Caveat,
    Doubt,
    NotPredicted,
    RoundSummary,
    ServedCell,
    ServedCosts,
    ServedGate,
    ServedK,
    ServedSummary,
    Summary,
    Unstable,
    Verdict,
)
from harness.theory.replay import Replayed
from harness.theory.speedup import RoundTimes

# Our own loop takes every token from a round, and always drafts K
OWN_LOOP = Counting(first_position=0, shortens_last_draft=False)


def analyse_served(setup: Setup) -> Summary:
    """Everything a server run says, as far as what it stored allows."""
    run = ServedRun(setup)
    results, unstable = run.results, run.unstable
    verdicts = run.verdicts
    return Summary(
        run=setup.facts(results),
        verdict=verdicts[0][0] if verdicts else None,
        per_temperature=tuple(workload for workload, _ in verdicts),
        per_prompt_set=tuple(verdict for _, sets in verdicts for verdict in sets),
        answers=tuple(answer for entry in run.answered for answer in entry.answers()),
        failures=failures(setup, run.trials),
        caveats=(
            *run.caveats(),
            *greedy_texts_differ(run.checks),
            *caveats(setup, results),
            *of_the_timings(unstable, (), {}),
        ),
        results=tuple(results),
        latency=(*run.prefill_rows(), *run.round_rows()),
        round_times=tuple(run.round_times()),
        unstable=unstable,
        acceptance_by_position=tuple(run.positions()),
        memory=draft_memory(setup, [setup.draft], run.longest) if setup.draft else (),
        text_checks=tuple(run.checks),
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
        asked = (temperature, prompt_set, self.ks if ks is None else tuple(ks))
        if asked not in self._costs:
            self._costs[asked] = self._fitted_costs(*asked)
        return self._costs[asked]

    @cached_property
    def _costs(self) -> dict[tuple[float, str | None, tuple[int, ...]], ServerCosts | None]:
        """Those that were fitted so far."""
        return {}

    def _fitted_costs(
        self, temperature: float, prompt_set: str | None, ks: tuple[int, ...]
    ) -> ServerCosts | None:
        timed = self._timed_requests(temperature, prompt_set, ks)
        return fit_costs(timed) if timed is not None else None

    def _timed_requests(
        self, temperature: float, prompt_set: str | None, ks: Sequence[int]
    ) -> TimedRequests | None:
        """What costs are fitted from."""
        parts = [
            part
            for part in (
                self._rejected_requests(temperature, ks),
                self._requests(temperature, prompt_set, ks),
            )
            if part is not None
        ]
        return sum(parts[1:], parts[0]) if parts else None

    def _rejected_requests(self, temperature: float, ks: Sequence[int]) -> TimedRequests | None:
        """Those of servers that were told to reject every draft; None where there are none."""
        timings = self._rounds_near(temperature)
        if self.counting is None or not timings:
            return None
        return timed_rounds([t for t in timings if t.k in (0, *ks)], self.counting)

    def _requests(
        self, temperature: float, prompt_set: str | None, ks: Sequence[int]
    ) -> TimedRequests | None:
        """Those of the other prompt sets, whole and of shorter budgets; None where none is."""
        if self.counting is None or self.engine.rule is None:
            return None
        names = [name for name in self.sets_at(temperature) if name != prompt_set]
        requests = [*self.settled, *self._settled_starts]
        plain = self.texts(requests, 0, temperature).of(names)
        speculative: dict[int, Requests] = {}
        for k in ks:
            texts = self.texts(requests, k, temperature).of(names)
            if texts.trials:
                speculative[k] = Requests(texts.seconds, self.replayed(texts, k))
        if not plain.trials or not speculative:
            return None
        return TimedRequests(PlainRequests(plain.seconds, plain.tokens), speculative)

    def _rounds_near(self, temperature: float) -> list[RoundTiming]:
        """The rounds of the nearest temperature that was timed; sampling stands for sampling."""
        rounds = [t for t in self.setup.run.rounds if t.batch == 1]

        def distance(timed: float) -> tuple[bool, float]:
            return (timed > GREEDY) != (temperature > GREEDY), abs(timed - temperature)

        nearest = min({t.temperature for t in rounds}, key=distance, default=None)
        return [t for t in rounds if t.temperature == nearest]

    def own_times(self, temperature: float) -> RoundTimes | None:
        """What our own loop's rounds take, where the run timed them next to the server's."""
        visits = visits_of(self.setup.run.own_rounds, self.setup.draft, temperature)
        return None if visits is None else latency_of((), visits).rounds

    def round_times(self) -> Iterator[RoundSummary]:
        """R(0) and R(K) of the server, by temperature."""
        for temperature in self.temperatures:
            costs = self.costs(temperature, None)
            if costs is not None:
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
        by_length: dict[int, list[float]] = {}
        for trial in completed(self.trials):
            alone = trial.k == 0 and trial.concurrency == 1
            if alone and trial.prefill_s is not None and trial.prompt_tokens is not None:
                by_length.setdefault(trial.prompt_tokens, []).append(trial.prefill_s)
        for length, seconds in sorted(by_length.items()):
            yield latency_row("target", self.setup.model, "prefill", length, 0, 1, seconds)

    def round_rows(self) -> Iterator[LatencyRow]:
        """Rows of latency.csv: a plain token, and a round, of each request less its start."""
        for temperature in self.temperatures:
            costs = self.costs(temperature, None)
            if costs is None or self.concurrency > 1:
                continue
            for k in (0, *self.ks):
                start_s = costs.start_s if k else costs.plain_start_s
                done = [
                    (trial, (trial.rounds if k else trial.new_tokens) or 0)
                    for trial in completed(self.settled)
                    if (trial.temperature, trial.k) == (temperature, k)
                ]
                seconds = [
                    max(0.0, trial.decode_s - start_s) / rounds
                    for trial, rounds in done
                    if rounds and trial.decode_s is not None
                ]
                if seconds:
                    named = ("draft", self.setup.draft) if k else ("target", self.setup.model)
                    context = round(
                        float(np.median([trial.prompt_tokens or 0 for trial, _ in done]))
                    )
                    row = latency_row(*named, "round", k, context, 1, seconds)
                    yield replace(row, temperature=temperature)

    @property
    def not_predicted(self) -> NotPredicted | None:
        """Why there is no prediction; None where there is one."""
        if self.counting is None or self.engine.rule is None:
            return "no_counting"
        if not self._traces:
            return "no_weights"
        known = (self.costs(t, name) for t in self.temperatures for name in self.sets_at(t))
        return None if any(costs is not None for costs in known) else "no_costs"

    # ---- cells -----------------------------------------------------------------------------------

    @cached_property
    def measured(self) -> list[ResultRow]:
        """What the server took, one row per cell; a failure in any visit shows in its status."""
        times = {
            temperature: costs.times
            for temperature in self.temperatures
            if (costs := self.costs(temperature, None)) is not None
        }
        names = {"model": self.setup.model, "draft": self.setup.draft, "times": times}
        rows = measured_rows(self.settled, **names)
        every = {
            (row.prompt_set, row.temperature, row.k): row
            for row in measured_rows(self.trials, **names)
        }
        made: list[ResultRow] = []
        for row in rows:
            all_visits = every[row.prompt_set, row.temperature, row.k]
            made.append(
                replace(
                    row,
                    status=all_visits.status,
                    error=all_visits.error,
                    engine=self.engine.name,
                    concurrency=self.concurrency,
                )
            )
        return made

    @cached_property
    def results(self) -> list[ResultRow]:
        """Rows of results.csv: measured ones, and what is predicted of each cell."""
        predicted = (self._replayed_row(row) for row in self.measured)
        return [
            *self.measured,
            *(row for row in predicted if row is not None),
            *(row for row in self.loads.rows if row.concurrency > 1),
        ]

    @cached_property
    def loads(self) -> LoadResults:
        """What the server took under load."""
        plain = [trace for trace in self.setup.run.traces if trace.k == 0]
        engine = self.engine
        return analyse_loads(self.setup.run.loads, plain, engine.rule, self.counting, engine.name)

    def plain_texts(self, row: ResultRow) -> Texts:
        """The plain server's texts of a cell's prompts."""
        assert row.temperature is not None
        texts = self.texts(self.settled, 0, row.temperature)
        return texts.of([row.prompt_set or ""])

    def _replayed_row(self, row: ResultRow) -> ResultRow | None:
        """What is predicted of a measured cell; None where nothing is."""
        if self.not_predicted is not None or row.temperature is None or row.new_tokens is None:
            return None
        costs, texts = self.costs(row.temperature, row.prompt_set), self.plain_texts(row)
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
            status="complete",
            prompts=len({trial.conversation for trial in texts.trials}),
            engine=self.engine.name,
        )
        if row.k == 0:
            return replace(_timed(made, plain_s, texts.tokens), speedup=1.0)
        if not costs.times.covers(row.k):
            return None
        counts = self.replayed(texts, row.k)
        seconds = costs.speculative_s(counts)
        interval = self._interval(row, texts, plain_s, seconds, counts)
        accepted, drafted = float(counts.accepted.sum()), float(counts.drafted.sum())
        return replace(
            _timed(made, seconds, texts.tokens),
            rounds=float(counts.rounds.sum()),
            drafted=drafted,
            accepted=accepted,
            rejected=float(counts.rejected.sum()),
            acceptance_rate=ratio(accepted, drafted),
            alpha=ratio(accepted, float(counts.judged.sum())),
            mean_acceptance_length=counts.mean_acceptance_length,
            tokens_per_round=counts.tokens_per_round,
            rule=self.engine.rule,
            speedup=costs.speedup(texts.tokens, counts),
            speedup_lo=interval.lo if interval else None,
            speedup_hi=interval.hi if interval else None,
            breakeven_alpha=costs.times.break_even_alpha(row.k),
        )

    def _interval(
        self, row: ResultRow, texts: Texts, plain_s: Array, seconds: Array, counts: Replayed
    ) -> Interval | None:
        """Of a predicted speedup: other prompts, and other requests that tell the costs."""
        assert row.temperature is not None
        timed = self._timed_requests(row.temperature, row.prompt_set, self.ks)
        if timed is None or not enough_prompts([""] * len(_prompts(texts)[0])):
            return None
        costs_error = speedup_variance(timed, texts.tokens, counts)
        if costs_error is None:
            return None
        return speedup_interval(*_per_prompt(texts, plain_s, seconds), shared=costs_error)

    def cells(self) -> Iterator[ServedCell]:
        """Prediction and measurement of every cell that drafts."""
        predicted = {
            (row.prompt_set, row.temperature, row.k): row
            for row in self.results
            if row.source == "replayed" and row.concurrency == 1
        }
        for row in self.measured:
            if row.k == 0 or row.speedup is None or row.temperature is None:
                continue
            found = predicted.get((row.prompt_set, row.temperature, row.k))
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
        seconds = seconds_of_rounds(self.replayed(texts, row.k, OWN_LOOP), times)
        return float(texts.tokens.sum() * times.plain_s / seconds.sum())

    def _from_two_k(self, row: ResultRow) -> float | None:
        """The prediction, had only the smallest and the largest K been measured."""
        if len(self.ks) < 3 or row.k in (self.ks[0], self.ks[-1]) or row.temperature is None:
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
            for name, speedup in _speedups(entry.question.evidence, self.setup).items()
        }
        for entry in self.answered:
            evidence, temperature = entry.question.evidence, entry.question.evidence.temperature
            if entry.question.source != "measured":
                continue
            costs = self.costs(temperature, None)
            for name, speedup in _speedups(evidence, self.setup).items():
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
                )

    def positions(self) -> Iterator[AcceptanceByPosition]:
        """Replayed acceptance by position at each verdict's K."""
        for verdict, _ in self.verdicts:
            k = verdict.k or verdict.reason_values.get("k")
            if self.not_predicted or not isinstance(k, int) or verdict.temperature is None:
                continue
            texts = self.texts(self.settled, 0, verdict.temperature)
            if texts.trials:
                shares = self.replayed(texts, k).acceptance_by_position
                temperature = verdict.temperature
                yield AcceptanceByPosition(
                    self.setup.draft, "all", temperature, k, "replayed", shares
                )

    # ---- verdicts --------------------------------------------------------------------------------

    @cached_property
    def answered(self) -> tuple[Answered, ...]:
        """Every question decided: the server's, then our own loop's."""
        return answered(
            [*self._questions(), *self._own_questions()],
            weights=self.setup.shares,
            seed=self.setup.seed,
            distrust=self._doubt,
        )

    @cached_property
    def gates(self) -> tuple[ServedGate, ...]:
        """Whether the server is lossless, by temperature and K."""
        return gates(self)

    @property
    def verdicts(self) -> list[tuple[Verdict, Sequence[Verdict]]]:
        """The server's by temperature: that of the workload, and its prompt sets'."""
        served = [entry for entry in self.answered if entry.question.engine == self.engine.name]
        measured = [entry for entry in served if entry.question.source == "measured"]
        return [(entry.verdicts[0], entry.verdicts[1:]) for entry in measured]

    def _questions(self) -> Iterator[Question]:
        if all(trial.k for trial in self.trials):  # records of no plain server
            return
        for temperature in self.temperatures:
            done = (t for t in completed(self.settled) if t.temperature == temperature)
            if any(trial.decode_s is None for trial in done):  # records without a time of decoding
                continue
            costs = self.costs(temperature, None)
            evidence = evidence_from_trials(
                self.settled,
                draft=self.setup.draft,
                temperature=temperature,
                times=costs.times if costs else None,
            )
            yield Question(evidence, (self.engine.rule,), "measured", self.engine.name)

    def _own_questions(self) -> Iterator[Question]:
        """The same on our own loop, predicted; none of its own run."""
        if self.engine.name == "own" or self.not_predicted in ("no_counting", "no_weights"):
            return
        for temperature in self.temperatures:
            times = self.own_times(temperature)
            texts = self.texts(self.settled, 0, temperature)
            if times is not None and texts.trials:
                evidence = self._predicted_evidence(texts, temperature, times)
                yield Question(evidence, (self.engine.rule,), "replayed", "own")

    def _predicted_evidence(self, texts: Texts, temperature: float, times: RoundTimes) -> Evidence:
        """Seconds per prompt at our own loop's round times."""
        names, of_text = _prompts(texts)

        def timed(seconds: Array) -> Timed:
            return Timed(_summed(seconds, of_text), _summed(texts.tokens, of_text))

        candidates: dict[Candidate, Timed] = {}
        for k in self.ks:
            if times.covers(k):
                seconds = seconds_of_rounds(self.replayed(texts, k, OWN_LOOP), times)
                candidates[Candidate(self.setup.draft, k)] = timed(seconds)
        return Evidence(
            temperature=temperature,
            prompts=tuple(prompt for _, prompt in names),
            prompt_sets=tuple(prompt_set for prompt_set, _ in names),
            baseline=timed(texts.tokens * times.plain_s),
            candidates=candidates,
            facts={},
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
        if doubt is not None:
            doubt = doubt[0], {**doubt[1], "clock": self.engine.clock}
        if temperature == GREEDY:
            failed = [check for check in self.checks if check.result == "FAIL"]
            return distrust(failed) or doubt
        failed = [
            gate
            for gate in self.gates
            if gate.temperature == temperature and gate.k and gate.lossless is False
        ]
        if not failed:
            return doubt
        worst = max(failed, key=lambda gate: abs(gate.text_z or 0))
        return "server_not_lossless", {
            "k": worst.k,
            "text_z": worst.text_z,
            "plain_z": worst.plain_z,
        }

    # ---- the record ------------------------------------------------------------------------------

    def summary(self) -> ServedSummary:
        """What the server is, and what a prediction of it is worth."""
        engine, first = self.engine, self.engine.first_position
        return ServedSummary(
            engine=engine.name,
            version=engine.version,
            rule=engine.rule,
            clock=engine.clock,
            started=engine.started,
            commands=engine.commands,
            cells=tuple(self.cells()),
            by_k=tuple(self.by_k()),
            gates=self.gates,
            costs=tuple(self._costs_by_temperature()),
            not_predicted=self.not_predicted,
            load=self.loads.cells,
            schedules=self.loads.schedules,
            acceptance_lengths=()
            if first is None
            else tuple(acceptance_lengths(self.settled, first)),
        )

    def _costs_by_temperature(self) -> Iterator[ServedCosts]:
        for temperature in self.temperatures:
            costs = self.costs(temperature, None)
            if costs is not None:
                yield ServedCosts(
                    temperature=temperature,
                    source="synthetic" if self._rounds_near(temperature) else "other_sets",
                    plain_start_s=costs.plain_start_s,
                    start_s=costs.start_s,
                    plain_s=costs.times.plain_s,
                    round_s=dict(costs.times.round_s),
                )

    def caveats(self) -> Iterator[Caveat]:
        """What to mind of this server, the most serious first."""
        if self.concurrency > 1:
            files = ", ".join(self.setup.run.config.get("records") or ())
            values = {"file": files, "max_concurrency": self.concurrency}
            yield Caveat("server_concurrency", values)
        yield from gate_caveats(self.gates, self.engine.rule)
        if self.not_predicted is not None:
            yield Caveat("server_not_predicted", {"reason": self.not_predicted})


def _speedups(evidence: Evidence, setup: Setup) -> dict[Candidate, float]:
    """Of the whole workload; empty without a prompt that is complete in every cell."""
    if not evidence.prompts or not evidence.candidates:
        return {}
    speedups = np.exp(evidence.workload(setup.weights).log_speedups()).tolist()
    return dict(zip(evidence.candidates, speedups, strict=True))


def _prompts(texts: Texts) -> tuple[list[tuple[str, str]], NDArray[np.intp]]:
    """The prompts of some texts, and the place of each text's among them, [n]."""
    of_text = [(trial.prompt_set, trial.conversation) for trial in texts.trials]
    names = sorted(set(of_text))
    return names, np.array([names.index(name) for name in of_text], dtype=np.intp)


def _summed(values: Array, of_text: NDArray[np.intp]) -> Array:
    """[prompt] sums of [n] values."""
    return np.bincount(of_text, values).astype(np.float64)


def _per_prompt(texts: Texts, plain_s: Array, seconds: Array) -> tuple[Array, Array, Array, Array]:
    """Plain and speculative seconds and tokens of each prompt, as `speedup_interval` takes them."""
    _, of_text = _prompts(texts)
    tokens = _summed(texts.tokens, of_text)
    return _summed(plain_s, of_text), tokens, _summed(seconds, of_text), tokens


def _timed(row: ResultRow, seconds: Array, tokens: Array) -> ResultRow:
    """A row with what so many seconds for so many tokens of each text come to."""
    text_ms, ms_per_token = 1e3 * seconds / tokens, 1e3 * float(seconds.sum() / tokens.sum())
    return replace(
        row,
        new_tokens=int(tokens.sum()),
        ms_per_token=ms_per_token,
        ms_per_token_p50=float(np.percentile(text_ms, 50)),
        ms_per_token_p90=float(np.percentile(text_ms, 90)),
        tokens_per_second=ratio(1e3, ms_per_token),
    )

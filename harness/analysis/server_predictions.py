"""Costs of decoding on a server, by its requests, and the prediction of every cell.

A cell that was measured is predicted from two factors that have not seen it: the rounds that replay
expects of the plain server's texts, and what this engine's rounds take, in the requests of the
other prompt sets, and on servers that were told to reject every draft. A K that no server measured
on all prompts is predicted from rounds that few requests priced, or that lie on a line between two.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from harness.analysis.cells import (
    completed,
    few_visits_error,
    measured_rows,
    paired_sums,
    with_counts,
    with_times,
)
from harness.analysis.predicted import evidence_of, gap_of, speedups
from harness.analysis.prediction_error import Gap, PredictionError, prediction_errors
from harness.analysis.replayed import Replays, by_prompt
from harness.analysis.round_costs import (
    Latency,
    ServedTimes,
    latency_row,
    near,
)
from harness.analysis.server_costs import (
    Requests,
    ServerCosts,
    TimedRequests,
    fit_costs,
    left_out_costs,
    timed_rounds,
)
from harness.analysis.server_lossless import gates, replay_holds
from harness.analysis.server_texts import ServedTexts
from harness.analysis.setup import Setup, p_min_of
from harness.analysis.verdict import Candidate, Evidence
from harness.engine_facts.draft_kinds import looks_up
from harness.records import Cell, LatencyRow, ResultRow, RoundTiming, grouped, where
from harness.summary import NotPredicted, RoundSummary, ServedCosts, ServedGate


@dataclass(frozen=True, eq=False)
class Fit:
    """Some requests of a temperature, and the costs that follow."""

    requests: TimedRequests
    costs: ServerCosts


@dataclass(frozen=True, eq=False)
class TimedServer:
    """A server run with what decoding costs there.

    Attributes:
        ks: above 0, whose rounds were timed, if on a few prompts; ascending.
        fits: by temperature and prompt set, of requests that are not of this set; of all, if None.
            Only those that tell costs.
        without: by temperature, the costs by requests of all sets, without each part of their
            prompts; empty where they rest on too few prompts to do without some.
    """

    texts: ServedTexts
    gates: tuple[ServedGate, ...]
    ks: tuple[int, ...]
    fits: Mapping[tuple[float, str | None], Fit]
    without: Mapping[float, Sequence[ServerCosts]]

    @property
    def setup(self) -> Setup:
        """The run's."""
        return self.texts.setup

    @property
    def costs_by_temperature(self) -> dict[float, ServerCosts]:
        """By requests of all sets, where these tell and the server is lossless."""
        return {at: fit.costs for (at, name), fit in self.fits.items() if name is None}

    def costs(self, temperature: float) -> ServerCosts | None:
        """By requests of all sets; None where there are none."""
        return self.costs_by_temperature.get(temperature)

    def priced_at(self, temperature: float) -> tuple[int, ...]:
        """The K above 0 whose rounds were timed at a temperature, and do not lie on a line."""
        costs = self.costs(temperature)
        return () if costs is None else tuple(k for k, _ in costs.times.round_s if k)

    @property
    def asked_ks(self) -> tuple[int, ...]:
        """The K above 0 that the run is of, ascending; of one that measures all, those it has."""
        chosen = self.setup.run.manifest.served_ks
        return tuple(sorted({*self.setup.ks})) if chosen and chosen.chosen else self.texts.ks

    def latency(self, temperature: float) -> Latency | None:
        """The latency by requests of all sets."""
        costs = self.costs(temperature)
        if costs is None:
            return None
        return self.priced(temperature, costs, self.without[temperature] or (costs, costs))

    def priced(
        self, temperature: float, costs: ServerCosts, without: Sequence[ServerCosts]
    ) -> Latency:
        """The latency at some costs, with those `without` each part of their prompts."""
        times = ServedTimes(
            engine=self.texts.engine.name,
            run=str(self.setup.run.folder),
            temperature=temperature,
            visits=len({trial.repetition for trial in self.texts.trials}),
            basis="measured",
            costs=costs,
            without=tuple(without),
        )
        return Latency(costs.times, served=times)

    @property
    def not_predicted(self) -> NotPredicted | None:
        """Why there is no prediction; None where there is one."""
        texts = self.texts
        if texts.counting is None or texts.engine.rule is None:
            return "no_counting"
        if not texts.scored:
            return "no_texts" if self.setup.run.config.get("score") else "no_weights"
        if not any(replay_holds(self.gates, at) for at in texts.temperatures):
            return "not_lossless"
        if any(
            (at, name) in self.fits
            for at in texts.temperatures
            for name in (*texts.sets_at(at), *([] if texts.chosen_k(at) is None else [None]))
        ):
            return None
        timed = {trial.k for trial in completed(texts.trials)}
        if 0 not in timed or timed == {0}:
            return "servers_failed"
        several = any(
            len(texts.sets_at(at)) > 1 or _rounds_near(self.setup, at) for at in texts.temperatures
        )
        return "costs_untold" if several else "no_costs"


def timed_server(texts: ServedTexts) -> TimedServer:
    """A run with its gates, and costs fitted without each prompt set and with all of them."""
    made = gates(texts)
    ks = tuple(sorted({*texts.ks, *(t.k for t in completed(texts.probes) if t.k)}))
    fits: dict[tuple[float, str | None], Fit] = {}
    without: dict[float, Sequence[ServerCosts]] = {}
    for temperature in texts.temperatures:
        for name in (*texts.sets_at(temperature), None) if replay_holds(made, temperature) else ():
            timed = _timed_requests(texts, ks, temperature, name)
            costs = timed and fit_costs(timed)
            if timed is not None and costs is not None:
                fits[temperature, name] = Fit(timed, costs)
                if name is None:
                    without[temperature] = left_out_costs(timed, max(ks))
    return TimedServer(texts, made, ks, fits, without)


def _timed_requests(
    texts: ServedTexts, ks: Sequence[int], temperature: float, prompt_set: str | None
) -> TimedRequests | None:
    """The requests of other prompt sets, and of servers that were told to reject every draft.

    The latter are of all sets. None where there are none.
    """
    rejected = None
    timings = _rounds_near(texts.setup, temperature)
    if texts.counting is not None and timings:
        timings = [timing for timing in timings if timing.k in (0, *ks)]
        rejected = timed_rounds(timings, texts.counting, texts.settle)
    requests = requests_of(texts, ks, temperature, prompt_set)
    if rejected is None or requests is None:
        return rejected or requests
    return rejected + requests


def requests_of(
    texts: ServedTexts, ks: Sequence[int], temperature: float, prompt_set: str | None
) -> TimedRequests | None:
    """The requests of other prompt sets, whole and of shorter budgets; None without any."""
    if texts.counting is None or texts.engine.rule is None:
        return None
    names = [name for name in texts.sets_at(temperature) if name != prompt_set]
    # Before any K is measured, plain texts are there of one visit, and probes of all
    trials = texts.settled if texts.ks or not texts.probes else []
    asked = [*trials, *texts.starts, *texts.probes]
    known = {k: texts.texts(asked, k, temperature).of(names) for k in (0, *ks)}
    by_k = {
        k: Requests(
            np.array([trial.decode_s for trial in each.trials], dtype=np.float64),
            texts.replayed(each, k).proposals if k else each.tokens[:, None],
            # Turns of one conversation are one prompt
            tuple((trial.prompt_set, trial.conversation) for trial in each.trials),
        )
        for k, each in known.items()
        if each.trials
    }
    if 0 not in by_k or len(by_k) == 1:
        return None
    net = any(trial.one_token_s is not None for trial in known[0].trials)
    # At a threshold rounds that draft nothing take a step of the draft, too
    return TimedRequests(by_k, net, looks_up(texts.setup.draft) or p_min_of(texts.setup) > 0.0)


def _rounds_near(setup: Setup, temperature: float) -> list[RoundTiming]:
    """The rounds of servers that were told to reject every draft."""
    return near(where(setup.run.rounds, batch=1), temperature)


# ---- costs, as they are stored and shown ---------------------------------------------------------


def recorded(server: TimedServer, temperature: float, costs: ServerCosts) -> ServedCosts:
    """Costs at a temperature, as they are stored."""
    return ServedCosts(
        temperature=temperature,
        source="synthetic" if _rounds_near(server.setup, temperature) else "other_sets",
        plain_start_s=costs.plain_start_s,
        start_s=costs.start_s,
        plain_s=costs.times.plain_s,
        round_s=dict(costs.times.round_s),
    )


def round_summaries(server: TimedServer) -> Iterator[RoundSummary]:
    """R(0) and R(K) of the server, by temperature."""
    for temperature in server.texts.temperatures:
        latency = server.latency(temperature)
        if latency is not None:
            yield replace(latency.round_summary(server.setup.draft), run=None)


def request_rows(server: TimedServer) -> Iterator[LatencyRow]:
    """Rows of latency.csv: prefills by length, then a plain token, and a round, of each request.

    Prefills are the plain server's, over visits; of a request its start is taken off.
    """
    texts, setup = server.texts, server.setup
    by_length: dict[int, list[float]] = {}
    for t in where(completed(texts.trials), k=0):
        if t.prefill_s is not None and t.prompt_tokens is not None:
            by_length.setdefault(t.prompt_tokens, []).append(t.prefill_s)
    for length, seconds in sorted(by_length.items()):
        yield latency_row("target", setup.model, "prefill", length, 0, 1, seconds)
    for (temperature, costs), k in product(server.costs_by_temperature.items(), (0, *texts.ks)):
        start_s = costs.start_s if k else costs.plain_start_s
        done = where(completed(texts.settled), temperature=temperature, k=k)
        seconds = [
            max(0.0, trial.decode_s - start_s) / rounds
            for trial in done
            if (rounds := trial.rounds if k else trial.new_tokens) and trial.decode_s is not None
        ]
        if seconds:
            named = ("draft", setup.draft) if k else ("target", setup.model)
            context = round(float(np.median([trial.prompt_tokens or 0 for trial in done])))
            row = latency_row(*named, "round", k, context, 1, seconds)
            yield replace(row, temperature=temperature)


# ---- cells ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ServedRows:
    """Rows of results.csv of requests sent one at a time.

    Attributes:
        measured: one per cell; visits that it lacks show in its status.
        predicted: of each of these, by other requests; None where nothing is.
        unmeasured: of the cells of every priced K that another one was chosen over.
        errors: by temperature, how far what was measured is from what is predicted.
    """

    measured: Sequence[ResultRow]
    predicted: Sequence[ResultRow | None]
    unmeasured: Sequence[ResultRow]
    errors: Mapping[float, PredictionError]


def served_rows(server: TimedServer) -> ServedRows:
    """Every cell as it was measured, and as it is predicted."""
    measured = _measured(server)
    predicted = [_predicted_cell(server, row) for row in measured]
    errors = _errors(server.texts, [made for made in predicted if made is not None])
    return ServedRows(
        measured,
        [made and _with_interval(made, errors) for made in predicted],
        [
            _with_interval(made, errors)
            for row in measured
            if row.k == 0 and row.temperature is not None
            if server.texts.chosen_k(row.temperature) is not None
            for k in server.priced_at(row.temperature)
            if k not in server.texts.ks_at(row.temperature)
            for other in [
                replace(row, draft=server.setup.draft, k=k, status="complete", error=None)
            ]
            if (made := _predicted_cell(server, other)) is not None
        ],
        errors,
    )


def _measured(server: TimedServer) -> list[ResultRow]:
    texts = server.texts
    names: dict[str, Any] = {
        "model": server.setup.model,
        "draft": server.setup.draft,
        "times": {value: costs.times for value, costs in server.costs_by_temperature.items()},
    }
    rows, every = (measured_rows(trials, **names) for trials in (texts.settled, texts.trials))
    made: list[ResultRow] = []
    for row, of_trials in zip(rows, every, strict=True):  # of the same cells, in order
        status, error = of_trials.status, of_trials.error
        lacking = texts.visits_lacking(_cell(row))
        if lacking is not None and status != "failed":
            few = few_visits_error(lacking)
            status, error = "partial", few if error is None else f"{few}; {error}"
        made.append(replace(row, engine=texts.engine.name, status=status, error=error))
    return made


# A cell's row without an interval, and of what costs are known well enough their evidence
_Predicted = tuple[ResultRow, Evidence | None]


def _errors(texts: ServedTexts, predicted: Sequence[_Predicted]) -> dict[float, PredictionError]:
    cells = grouped(completed(texts.settled), lambda trial: trial.cell_key)
    gaps: dict[Cell, Gap | None] = {}
    for row, evidence in predicted:
        if evidence is not None:
            cell = _cell(row)
            sums = paired_sums(cells.get(cell, []), cells.get(replace(cell, k=0), []))
            gaps[cell] = gap_of(evidence, sums)
    return prediction_errors(gaps)


def _with_interval(made: _Predicted, errors: Mapping[float, PredictionError]) -> ResultRow:
    """The row with an interval over other prompts, and others whose requests tell costs.

    By temperature, `errors` are those of all predictions.
    """
    row, evidence = made
    if evidence is None:
        return row
    error = errors.get(evidence.temperature)
    (gain,) = speedups(evidence, error=error and error.variance).values()
    lo, hi = gain.interval or (None, None)
    return replace(row, speedup_lo=lo, speedup_hi=hi)


def _predicted_cell(server: TimedServer, row: ResultRow) -> _Predicted | None:
    temperature, served, rule = row.temperature, server.texts, server.texts.engine.rule
    if server.not_predicted or temperature is None or row.new_tokens is None or rule is None:
        return None
    # Of a K that is not measured there is no cell that its prediction should not have seen
    measured = row.k in (0, *served.ks_at(temperature))
    fit = server.fits.get((temperature, row.prompt_set if measured else None))
    texts = served.texts(served.settled, 0, temperature).of([row.prompt_set or ""])
    if fit is None or not texts.trials:
        return None
    costs = fit.costs
    made = ResultRow(
        model=row.model,
        draft=row.draft,
        prompt_set=row.prompt_set,
        temperature=temperature,
        k=row.k,
        source="replayed",
        prompts=len({trial.conversation for trial in texts.trials}),
        engine=served.engine.name,
        status=row.status,
        error=row.error,
    )
    if row.k == 0:
        made = with_times(made, costs.plain_s(texts.tokens), texts.tokens)
        return replace(made, speedup=1.0), None
    if not costs.times.covers(row.k):
        return None
    counts = served.replayed(texts, row.k)
    # No prediction: what a round costs here, by the requests of this cell too
    every = server.costs(temperature) or costs
    made = replace(
        with_counts(with_times(made, costs.speculative_s(counts), texts.tokens), counts),
        rule=rule,
        speedup=costs.speedup(texts.tokens, counts),
        breakeven_alpha=every.times.break_even_alpha(row.k),
    )
    without = left_out_costs(fit.requests, row.k)
    if not without:
        return made, None
    draft = server.setup.draft
    replays = by_prompt(texts.traces, rule, {Candidate(draft, row.k): counts}, frozenset())
    return made, evidence_of(replays, {draft: server.priced(temperature, costs, without)})


def _cell(row: ResultRow) -> Cell:
    assert row.temperature is not None
    return Cell(row.prompt_set or "", row.temperature, row.k)


# ---- every K on the whole workload ---------------------------------------------------------------


def predicted_evidence(server: TimedServer, temperature: float) -> Evidence | None:
    """Predicted seconds of every priced K, by replay of the plain texts; None without any."""
    latency = server.latency(temperature)
    replays = plain_replays(server, temperature, server.priced_at(temperature))
    if latency is None or replays is None:
        return None
    return evidence_of(replays, {server.setup.draft: latency})


def predicted_speedups(server: TimedServer, temperature: float) -> dict[int, float]:
    """The predicted speedup of every priced K on the workload; empty without replay."""
    evidence = predicted_evidence(server, temperature)
    speedups = {} if evidence is None else evidence.speedups(server.setup.weights)
    return {name.k: speedup for name, speedup in speedups.items()}


def plain_replays(server: TimedServer, temperature: float, ks: Sequence[int]) -> Replays | None:
    """The plain server's texts at some K.

    Of prompts that were asked for few tokens of every K alone, those.
    """
    served, rule, draft = server.texts, server.texts.engine.rule, server.setup.draft
    plain = where(served.settled, k=0)
    asked = {(t.prompt_set, t.prompt, t.temperature) for t in completed(plain)}
    few = where(completed(served.probes), k=0)
    plain += [t for t in few if (t.prompt_set, t.prompt, t.temperature) not in asked]
    texts = served.texts(plain, 0, temperature)
    if rule is None or not ks or not texts.trials:
        return None
    counts = {Candidate(draft, k): served.replayed(texts, k) for k in ks}
    lookups = frozenset([draft] if texts.traces[0].chosen else [])
    return by_prompt(texts.traces, rule, counts, lookups)

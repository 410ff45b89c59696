"""Costs of decoding on a server, by its requests, and the prediction of every cell.

A cell that was measured is predicted from two factors that have not seen it: the rounds that replay
expects of the plain server's texts, and what this engine's rounds take, in the requests of the
other prompt sets, and on servers that were told to reject every draft. A K that no server measured
on all prompts is predicted from rounds that few requests priced, or that lie on a line between two.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from harness.analysis.cells import (
    Gap,
    PredictionError,
    completed,
    few_visits_error,
    measured_rows,
    paired_sums,
    prediction_errors,
    with_counts,
    with_times,
)
from harness.analysis.engine_costs import nearest
from harness.analysis.predicted import Predicted, evidence_of, gap_of, speedups
from harness.analysis.replayed import by_prompt
from harness.analysis.round_costs import Latency, ServedTimes, latency_row, near
from harness.analysis.server_costs import (
    Requests,
    ServerCosts,
    TimedRequests,
    fit_costs,
    left_out_costs,
    timed_rounds,
)
from harness.analysis.server_lossless import failed_gates, gates, replay_holds
from harness.analysis.server_texts import ServedTexts, served_texts
from harness.analysis.setup import Setup, p_min_of
from harness.analysis.verdict import Candidate, Evidence
from harness.command_words import as_typed
from harness.engine_facts.draft_kinds import looks_up
from harness.records import (
    GREEDY,
    Cell,
    LatencyRow,
    ResultRow,
    RoundTiming,
    UserError,
    grouped,
    where,
)
from harness.storage import StoredRun
from harness.storage.manifest import CostsAt, EngineCosts, ModelEntry
from harness.summary import NotPredicted, RoundSummary, ServedCosts, ServedGate


@dataclass(frozen=True, eq=False)
class Fit:
    """Some requests of a temperature, and the costs that follow."""

    requests: TimedRequests
    costs: ServerCosts


@dataclass(frozen=True, eq=False)
class TimedServer:
    """A server run with what decoding costs there."""

    texts: ServedTexts
    gates: tuple[ServedGate, ...]
    ks: tuple[int, ...]  # above 0, whose rounds were timed, if on a few prompts; ascending
    # By temperature and prompt set, of the other sets, or all if None; only those that tell costs
    fits: Mapping[tuple[float, str | None], Fit]
    # By temperature, costs of all sets without each part of their prompts; empty of too few prompts
    without: Mapping[float, Sequence[ServerCosts]]

    @property
    def setup(self) -> Setup:
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

    def latency(self, temperature: float) -> Latency | None:
        """The latency by requests of all sets."""
        costs = self.costs(temperature)
        if costs is None:
            return None
        without = self.without[temperature] or (costs, costs)
        return served_latency(self.texts, temperature, costs, without)

    @property
    def not_predicted(self) -> NotPredicted | None:
        """Why there is no prediction; None where there is one."""
        texts = self.texts
        if texts.counting is None or texts.engine.rule is None:
            return "no_counting"
        if not self.setup.run.traces:
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


def served_latency(
    texts: ServedTexts, temperature: float, costs: ServerCosts, without: Sequence[ServerCosts]
) -> Latency:
    """The latency at a server's costs, with those `without` each part of their prompts."""
    times = ServedTimes(
        engine=texts.engine.name,
        run=str(texts.setup.run.folder),
        temperature=temperature,
        visits=len({trial.repetition for trial in texts.trials}),
        basis="measured",
        costs=costs,
        without=tuple(without),
    )
    return Latency(costs.times, served=times)


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
    """Requests of other sets, with those that reject every draft, of all sets; None without any."""
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
    return ServedCosts(
        temperature=temperature,
        source="synthetic" if _rounds_near(server.setup, temperature) else "other_sets",
        plain_start_s=costs.plain_start_s,
        start_s=costs.start_s,
        plain_s=costs.times.plain_s,
        round_s=dict(costs.times.round_s),
    )


def round_summaries(server: TimedServer) -> Iterator[RoundSummary]:
    for temperature in server.texts.temperatures:
        latency = server.latency(temperature)
        if latency is not None:
            yield replace(latency.round_summary(server.setup.draft), run=None)


def request_rows(server: TimedServer) -> Iterator[LatencyRow]:
    """Rows of latency.csv: plain prefills by length, a plain token, and a round, without starts."""
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
    """Rows of results.csv of requests sent one at a time."""

    measured: Sequence[ResultRow]  # one per cell; visits that it lacks show in its status
    predicted: Sequence[ResultRow | None]  # of each of these, by other requests
    unmeasured: Sequence[ResultRow]  # cells of every priced K that another one was chosen over
    errors: Mapping[float, PredictionError]  # by temperature


def served_rows(server: TimedServer) -> ServedRows:
    measured = _measured(server)
    predicted = [_predicted_cell(server, row) for row in measured]
    errors = _errors(server.texts, [made for made in predicted if made is not None])
    return ServedRows(
        measured,
        [None if made is None else _with_interval(made, errors) for made in predicted],
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


class _PredictedCell(NamedTuple):
    """A cell as it is predicted."""

    row: ResultRow  # without an interval
    evidence: Evidence | None = None  # None where its costs are not known well enough for one


def _errors(
    texts: ServedTexts, predicted: Sequence[_PredictedCell]
) -> dict[float, PredictionError]:
    cells = grouped(completed(texts.settled), lambda trial: trial.cell_key)
    gaps: dict[Cell, Gap | None] = {}
    for made in predicted:
        if made.evidence is not None:
            cell = _cell(made.row)
            sums = paired_sums(cells.get(cell, []), cells.get(replace(cell, k=0), []))
            gaps[cell] = gap_of(made.evidence, sums)
    return prediction_errors(gaps)


def _with_interval(made: _PredictedCell, errors: Mapping[float, PredictionError]) -> ResultRow:
    """The row with its interval over other prompts and requests, with the predictions' `errors`."""
    row, evidence = made
    if evidence is None:
        return row
    (gain,) = speedups(evidence, error=errors.get(evidence.temperature)).values()
    return replace(row, speedup_lo=gain.lo, speedup_hi=gain.hi)


def _predicted_cell(server: TimedServer, row: ResultRow) -> _PredictedCell | None:
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
        return _PredictedCell(replace(made, speedup=1.0))
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
        return _PredictedCell(made)
    draft = server.setup.draft
    replays = by_prompt(texts.traces, rule, {Candidate(draft, row.k): counts}, frozenset())
    latencies = {draft: served_latency(served, temperature, costs, without)}
    return _PredictedCell(made, evidence_of(replays, latencies))


def _cell(row: ResultRow) -> Cell:
    assert row.temperature is not None
    return Cell(row.prompt_set or "", row.temperature, row.k)


# ---- every K on the whole workload ---------------------------------------------------------------


def predicted_at(server: TimedServer, temperature: float) -> Predicted | None:
    """Every priced K by replay of the plain texts; of probes where prompts have no others."""
    served, rule, draft = server.texts, server.texts.engine.rule, server.setup.draft
    latency, ks = server.latency(temperature), server.priced_at(temperature)
    plain = where(served.settled, k=0)
    asked = {(t.prompt_set, t.prompt, t.temperature) for t in completed(plain)}
    few = where(completed(served.probes), k=0)
    plain += [t for t in few if (t.prompt_set, t.prompt, t.temperature) not in asked]
    texts = served.texts(plain, 0, temperature)
    if latency is None or rule is None or not ks or not texts.trials:
        return None
    counts = {Candidate(draft, k): served.replayed(texts, k) for k in ks}
    lookups = frozenset([draft] if texts.traces[0].chosen else [])
    return Predicted(by_prompt(texts.traces, rule, counts, lookups), {draft: latency})


def predicted_speedups(server: TimedServer, temperature: float) -> dict[int, float]:
    """The predicted speedup of every priced K on the workload; empty without replay."""
    predicted = predicted_at(server, temperature)
    speedups = {} if predicted is None else predicted.evidence.speedups(server.setup.weights)
    return {name.k: speedup for name, speedup in speedups.items()}


# ---- costs of a run, as others use them to price drafts ------------------------------------------


def costs_of(run: StoredRun, temperatures: Sequence[float], ks: Sequence[int]) -> EngineCosts:
    """The costs on the engine of a server run, to price rounds of `ks` at `temperatures`.

    Raises UserError where it timed too little, does not say how its engine accepts or counts, or
    that engine is not lossless there.
    """
    setup, key = Setup(run), as_typed("latency_from", run.folder)
    if setup.engine is None or not run.trials:
        raise UserError(f"{key}: no request of that run was answered; name another one")
    texts, engine = served_texts(setup), setup.engine
    if engine.rule is None or texts.counting is None:
        raise UserError(
            f"{key}: {engine.name} does not say how it accepts drafts and counts rounds, so none"
            " can be predicted there"
        )
    server = timed_server(texts)
    at = tuple(_costs_at(server))
    if not at and not failed_gates(server.gates):
        raise UserError(
            f"{key}: it has too few requests to tell what a round costs there, and how well that"
            " is known; name a run with more prompts"
        )
    draft, conf = setup.described_draft(setup.draft).entries, setup.conf("draft")
    identity = {"id": conf.get("id"), "kind": conf.get("kind") or "model"}
    target_id = setup.conf("model").get("id")
    costs = EngineCosts(
        run=str(run.folder),
        engine=replace(engine, commands=()),
        device=setup.environment.device_name if engine.started else None,
        visits=len({trial.repetition for trial in texts.trials}),
        target=ModelEntry.of({"name": setup.model, **setup.target.entries, "id": target_id}),
        draft=ModelEntry.of({"name": setup.draft, **draft, **identity}),
        bytes_factor=_bytes_factor(setup),
        at=at,
    )
    problems = [*_not_timed(costs, server, temperatures, ks)]
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return costs


def _not_timed(
    costs: EngineCosts, server: TimedServer, temperatures: Sequence[float], ks: Sequence[int]
) -> Iterator[str]:
    """A line for each asked temperature or K whose costs the run does not tell."""
    key, most = as_typed("latency_from", costs.run), max(ks, default=0)
    for temperature in temperatures:
        unlike = _changes_texts(server, temperature)
        if unlike is not None:
            yield (
                f"{key}: at temperature={unlike:g} that server's texts are not plain decoding's;"
                " leave the temperature out, or name another run"
            )
            continue
        try:
            timed = nearest(costs, temperature)
        except UserError as error:
            yield from error.lines
            continue
        known = sorted(k for k in timed.costs.round_s if k)
        if most > max(known):
            yield (
                f"{key}: rounds of K = {', '.join(map(str, known))} were timed there, not of"
                f" K = {most}; give k=[{','.join(map(str, known))}]"
            )


def _costs_at(server: TimedServer) -> Iterator[CostsAt]:
    """By temperature, where how well they are known can be told."""
    errors = served_rows(server).errors
    for temperature, costs in server.costs_by_temperature.items():
        if server.without[temperature]:
            every = (costs, *server.without[temperature])
            stored, *without = (recorded(server, temperature, each) for each in every)
            at = CostsAt(stored, tuple(without))
            if temperature in errors:
                error = errors[temperature].variance
                at = replace(at, error=float(error.value), error_degrees=float(error.degrees))
            yield at


def _changes_texts(server: TimedServer, temperature: float) -> float | None:
    """The nearest temperature that was measured, where the server changes texts at it."""
    known = server.texts.temperatures
    alike = [each for each in known if (each > GREEDY) == (temperature > GREEDY)]
    nearest = min(alike, key=lambda each: abs(each - temperature), default=GREEDY)
    return nearest if where(failed_gates(server.gates), temperature=nearest) else None


def _bytes_factor(setup: Setup) -> float:
    assert setup.engine is not None
    served = {each.k: each.weights_bytes or 0 for each in setup.engine.commands}
    of_target = served.get(0, 0)
    of_draft = max(served.values(), default=0) - of_target
    loaded = setup.target.weights_bytes or 0
    loaded_draft = setup.described_draft(setup.draft).weights_bytes or 0
    if 0 in (of_target, loaded, loaded_draft) or of_draft <= 0:
        return 1.0
    return (of_draft / of_target) / (loaded_draft / loaded)

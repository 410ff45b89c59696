"""A server run: which K to serve on the engine that was measured, and what a prediction is worth.

Its folder is a sweep's: trials, rounds, traces. What differs is where they come from, and what a
round costs (`server_predictions`).

Where replay chose the K that was measured (`until=decided`), the verdict is that K's, measured on
all prompts. Its bounds allow for the choice as where all K are measured, with the seconds of the
others taken to differ from its own as replay says.

A temperature at which a speculating server is not lossless (`server_lossless`) gets no verdict, and
above 0 no prediction: replay is of lossless sampling.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from harness.analysis.answers import Answered, Question, answered
from harness.analysis.batch_schedule import LoadResults, analyse_loads, disturbed
from harness.analysis.caveats import of_setup, servers
from harness.analysis.caveats.prompts import k_at_edge
from harness.analysis.caveats.texts import greedy_texts_differ, routing_ties
from harness.analysis.caveats.timing import predictions_off
from harness.analysis.cells import completed, ratio, telling_rounds
from harness.analysis.lossless import by_text, failures
from harness.analysis.predicted import evidence_of
from harness.analysis.server_lossless import failed_gates, gate_caveats, replay_holds
from harness.analysis.server_predictions import (
    ServedRows,
    TimedServer,
    predicted_at,
    recorded,
    request_rows,
    round_summaries,
    served_rows,
    timed_server,
)
from harness.analysis.server_texts import ServedTexts, served_texts
from harness.analysis.settled_times import with_enough_visits
from harness.analysis.setup import (
    Setup,
    kv_bytes_per_token,
    model_bytes,
    p_min_of,
    request_weights,
    run_facts,
)
from harness.analysis.unstable import impossible, unstable_cells
from harness.analysis.user_latency import one_by_one, under_load
from harness.analysis.verdict import Candidate, Evidence, evidence_from_trials
from harness.engine_facts.engines import OWN, spec_of
from harness.records import GREEDY, Cell, ServingEngine, where
from harness.stats.jackknife import token_weights
from harness.stats.verdict_interval import look_shares
from harness.summary import (
    Answer,
    Caveat,
    Doubt,
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


@dataclass(frozen=True, eq=False)
class ServedRun:
    """Everything that follows from a server run's texts and times, decided."""

    server: TimedServer
    rows: ServedRows
    loads: LoadResults
    unstable: tuple[Unstable, ...]  # measured cells that cannot be right
    answered: tuple[Answered, ...]  # by temperature

    @property
    def workloads(self) -> list[Answer]:
        return [each.workload for each in self.answered]


def served_run(setup: Setup) -> ServedRun:
    """A run whose engine is noted, decided as far as what it stored allows."""
    server = timed_server(served_texts(setup))
    texts, rows = server.texts, served_rows(server)
    unstable = tuple(unstable_cells(rows.measured))
    plain = [t for t in setup.run.traces if t.k == 0 and replay_holds(server.gates, t.temperature)]
    loads = analyse_loads(
        setup.run.loads,
        plain,
        texts.engine.rule,
        texts.counting,
        texts.engine.name,
        texts.visits_asked,
        setup.weights,
    )
    decided = answered(setup, [*_questions(server, unstable)])
    return ServedRun(server, rows, loads, unstable, decided)


def analyse_served(setup: Setup) -> Summary:
    if setup.engine is None:  # no server answered
        return Summary(run_facts(setup, ()), failures=failures(setup), caveats=(*of_setup(setup),))
    run = served_run(setup)
    server, rows, texts = run.server, run.rows, run.server.texts
    results = (
        *rows.measured,
        *(row for row in rows.predicted if row is not None),
        *rows.unmeasured,
        *run.loads.rows,
    )
    answers = tuple(each for entry in run.answered for each in entry.answers)
    latencies = _latencies(run)
    return Summary(
        run=run_facts(setup, results),
        answers=answers,
        failures=failures(setup, texts.trials),
        caveats=(
            *_caveats(run, latencies),
            *greedy_texts_differ.of(by_text(texts.checks)),
            *routing_ties.of(by_text(texts.checks)),
            *of_setup(setup, results),
            *k_at_edge.of(setup, answers),
        ),
        results=results,
        latency=tuple(request_rows(server)),
        round_times=tuple(round_summaries(server)),
        unstable=run.unstable,
        text_checks=tuple(texts.checks),
        served=served_summary(run, latencies),
    )


# ---- questions, and the evidence for them --------------------------------------------------------


def _questions(server: TimedServer, unstable: Sequence[Unstable]) -> Iterator[Question]:
    texts = server.texts
    engine, p_min = texts.engine, p_min_of(server.setup)
    if texts.trials and all(trial.k for trial in texts.trials):  # records of no plain server
        return
    for temperature in texts.temperatures:
        done = where(completed(texts.settled), temperature=temperature)
        doubt = _doubt(server, unstable, temperature)
        if not any(trial.k for trial in done):  # a run that ended before it measured any K
            predicted = predicted_at(server, temperature)
            if predicted is not None:
                evidence = predicted.evidence
                yield Question(
                    evidence, engine.rule, "replayed", engine.name, p_min=p_min, doubt=doubt
                )
                continue
        if any(trial.decode_s is None for trial in done):  # records without a time of decoding
            continue
        ks, lacking = _answered_ks(texts, temperature), _fewest_visits(texts, temperature)
        yield Question(
            _chosen_evidence(server, temperature)
            or replace(measured_evidence(server, temperature), looks=_looks(server, temperature)),
            engine.rule,
            "measured",
            engine.name,
            visits={k: lacking[k] for k in ks if k in lacking and lacking[k].timed},
            p_min=p_min,
            doubt=doubt,
        )


def _fewest_visits(texts: ServedTexts, temperature: float) -> dict[int, Visits]:
    """By K that lacks visits, the fewest on any prompt set."""
    fewest: dict[int, Visits] = {}
    for k in texts.ks_at(temperature):
        cells = (Cell(name, temperature, k) for name in texts.sets_at(temperature))
        known = [lacking for cell in cells if (lacking := texts.visits_lacking(cell)) is not None]
        if known:
            fewest[k] = min(known, key=lambda visits: visits.timed)
    return fewest


def _answered_ks(texts: ServedTexts, temperature: float) -> list[int]:
    """The K that an answer chooses from: those with enough visits."""
    every, lacking = texts.visits_asked or 0, _fewest_visits(texts, temperature)
    ks = texts.ks_at(temperature)
    return sorted(with_enough_visits({k: lacking[k].timed if k in lacking else every for k in ks}))


def measured_evidence(server: TimedServer, temperature: float) -> Evidence:
    """Seconds per prompt of every K measured on all, in visits that all cells finished, if any."""
    texts = server.texts
    ks = {0, *_answered_ks(texts, temperature)}
    trials = [t for t in texts.settled if t.temperature == temperature and t.k in ks]
    prompts = {(t.prompt_set, t.prompt) for t in trials}
    finished = Counter(t.repetition for t in trials if t.status == "ok")
    whole = {visit for visit, count in finished.items() if count == len(ks) * len(prompts)}
    of_whole = [trial for trial in trials if trial.repetition in whole]
    costs, draft = server.costs(temperature), server.setup.draft
    times = costs.times if costs else None
    return evidence_from_trials(
        of_whole or trials, draft=draft, temperature=temperature, times=times
    )


def _looks(server: TimedServer, temperature: float) -> tuple[float, ...]:
    chosen = server.setup.run.manifest.served_ks
    made = chosen.made_at(temperature) if chosen else 0
    return look_shares(made) if made else ()


def _chosen_evidence(server: TimedServer, temperature: float) -> Evidence | None:
    """The chosen K as measured, others as replay has them differ; None if all are measured."""
    chosen = Candidate(server.setup.draft, server.texts.chosen_k(temperature) or 0)
    made, measured = predicted_at(server, temperature), measured_evidence(server, temperature)
    if made is None or chosen not in measured.candidates:
        return None
    rows = {name: row for row, name in enumerate(measured.names)}
    replays = made.replays.rows([name in rows for name in made.replays.names])
    if chosen not in replays.candidates or not replays.names:
        return None
    predicted = evidence_of(replays, made.latencies)
    kept = np.array([rows[name] for name in predicted.names])
    plain, timed = measured.baseline.rows(kept), measured.candidates[chosen].rows(kept)
    of_chosen_s, row = predicted.candidates[chosen].seconds, [*predicted.candidates].index(chosen)
    return replace(
        predicted,
        looks=_looks(server, temperature),
        baseline=plain,
        candidates={
            name: replace(
                each, seconds=timed.seconds * (each.seconds / of_chosen_s), tokens=timed.tokens
            )
            for name, each in predicted.candidates.items()
        },
        timing=tuple(
            replace(error, moves=error.moves - error.moves[row]) for error in predicted.timing
        ),
        named=chosen,
    )


def _doubt(server: TimedServer, unstable: Sequence[Unstable], temperature: float) -> Doubt | None:
    doubt = impossible(unstable, temperature)
    if temperature == GREEDY:
        return server.texts.distrusted or doubt
    failed = where(failed_gates(server.gates), temperature=temperature)
    if not failed:
        return doubt
    worst = max(failed, key=lambda gate: abs(gate.text_z or 0))
    values: Values = {"k": worst.k, "text_z": worst.text_z, "plain_z": worst.plain_z}
    return "server_not_lossless", values


# ---- the record ----------------------------------------------------------------------------------


def served_summary(run: ServedRun, latencies: tuple[UserLatency, ...] = ()) -> ServedSummary:
    server, engine, loads = run.server, run.server.texts.engine, run.loads
    # Where some K changes what is generated, or others disturbed loads, no K is given for any load
    changed = {gate.temperature for gate in failed_gates(server.gates)}
    if disturbed(server.setup.run.loads, engine.clock) is not None:
        changed |= {each.temperature for each in loads.schedules}
    schedules = [each for each in loads.schedules if each.temperature not in changed]
    return ServedSummary(
        engine=engine.name,
        version=engine.version,
        rule=engine.rule,
        clock=engine.clock,
        started=engine.started,
        commands=engine.commands,
        by_k=tuple(_by_k(run)),
        latencies=latencies,
        gates=server.gates,
        costs=tuple(recorded(server, *each) for each in server.costs_by_temperature.items()),
        not_predicted=server.not_predicted,
        load=loads.cells,
        varying=loads.varying,
        varying_commands=engine.varying,
        schedules=tuple(schedules),
        memory=_memory(run),
        servers=_servers(server),
    )


def _by_k(run: ServedRun) -> Iterator[ServedK]:
    server, weights = run.server, run.server.setup.weights
    for entry in run.answered:
        temperature = entry.question.evidence.temperature
        if entry.question.source != "measured":
            continue
        evidence = measured_evidence(server, temperature)
        for name, speedup in evidence.speedups(weights).items():
            done = where(completed(server.texts.settled), k=name.k, temperature=temperature)
            done = [trial for trial in telling_rounds(done) if trial.rounds]
            tokens = np.array([trial.new_tokens for trial in done], dtype=np.float64)
            sets = [trial.prompt_set for trial in done]
            factors = token_weights(sets, tokens, weights) if done else tokens
            rounds = float(factors @ np.array([trial.rounds or 0.0 for trial in done]))
            yield ServedK(temperature, name.k, speedup, ratio(1.0, rounds))


def _latencies(run: ServedRun) -> tuple[UserLatency, ...]:
    """Waits of users, of requests sent one by one and of loads."""
    texts, setup = run.server.texts, run.server.setup
    engine, weights = texts.engine, request_weights(setup)
    loads = where(setup.run.loads, varying="")
    alone = one_by_one(texts.trials, engine, weights)
    return (*alone, *under_load(loads, engine, weights))


def _servers(server: TimedServer) -> StartedServers | None:
    """The speculating servers behind the answers; None where none was started."""
    engine = server.texts.engine
    if not engine.started or engine.name == OWN.name:
        return None
    rejecting = sorted({timing.k for timing in server.setup.run.rounds if timing.k})
    chosen = server.setup.run.manifest.served_ks  # of a run that measures all, those it has
    asked = sorted({*server.setup.ks}) if chosen and chosen.chosen else server.texts.ks
    return StartedServers(tuple(asked), server.ks, server.texts.ks, tuple(rejecting))


def _memory(run: ServedRun) -> ServedMemory | None:
    """The memory of draft and target at the verdict's K or else the largest."""
    setup, engine = run.server.setup, run.server.texts.engine
    commands = {each.k: each for each in engine.commands}  # of most slots
    k = next((answer.k for answer in run.workloads), 0)
    served, plain = commands.get(k or max(commands, default=0)), commands.get(0)
    if served is None or not served.k or served.context_tokens is None:
        return None
    kv_type, of_draft_cache = _cache_types(engine, setup.run.config.get("flags") or ())
    target, draft = model_bytes(setup), model_bytes(setup, setup.draft)
    of_target, of_draft = target and target.weights, draft and draft.weights
    if plain is not None and None not in (plain.weights_bytes, served.weights_bytes):
        of_target = plain.weights_bytes
        of_draft = (served.weights_bytes or 0) - (plain.weights_bytes or 0)
    return ServedMemory(
        k=served.k,
        slots=served.slots,
        context_tokens=served.context_tokens,
        kv_type=kv_type or engine.dtype,
        target_weights_bytes=of_target,
        draft_weights_bytes=of_draft,
        target_kv_bytes_per_token=kv_bytes_per_token(setup, None, kv_type),
        draft_kv_bytes_per_token=kv_bytes_per_token(setup, setup.draft, of_draft_cache),
    )


def _cache_types(engine: ServingEngine, flags: Sequence[str]) -> tuple[str | None, str | None]:
    """Types of the target's cache and the draft's, by the user's flags; None: as loaded."""
    names = spec_of(engine.name).cache_flags
    if names is None:
        return None, None
    given = dict(pairwise(word for flag in flags for word in flag.split("=", 1)))
    of_target, of_draft = (given.get(name, "f16") for name in names)
    return of_target, of_draft


# ---- caveats -------------------------------------------------------------------------------------


def _caveats(run: ServedRun, latencies: Sequence[UserLatency]) -> Iterator[Caveat]:
    server, setup, texts = run.server, run.server.setup, run.server.texts
    yield from gate_caveats(server.gates, texts.engine.rule)
    scored = setup.described_draft(setup.draft).dtype
    yield from servers.draft_served_in_other_dtype.of(texts.engine, scored)
    yield from servers.server_asked_less.of(setup)
    lacking = [
        (temperature, k, visits)
        for temperature in texts.temperatures
        for k, visits in _fewest_visits(texts, temperature).items()
    ]
    yield from servers.server_visits_lacking.of(lacking, load=False)
    yield from servers.loads_disturbed.of(disturbed(setup.run.loads, texts.engine.clock))
    yield from servers.server_queues.of(texts.engine, run.loads.cells)
    yield from servers.rate_beyond_capacity.of(latencies)
    lacking = [
        (cell.temperature, cell.k, cell.visits)
        for cell in run.loads.cells
        if cell.visits is not None
    ]
    yield from servers.server_visits_lacking.of(lacking, load=True)
    yield from predictions_off.of(run.rows.errors)

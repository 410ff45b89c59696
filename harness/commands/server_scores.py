"""Scores and checks of texts that servers returned, by the pair's weights, loaded only meanwhile.

Texts are scored for replay (traces.parquet) and held against the target (checks.jsonl). At
temperature 0 replay needs the draft's likeliest tokens alone, so the target is not loaded for it.
Of a draft that is a file of the user's they are asked of the engine itself, which needs no weights
here (`measurement.draft_scores.asked_traces`).
"""

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from harness.analysis.cells import latest
from harness.analysis.lossless import greedy_pairs
from harness.commands.completions import check_texts
from harness.commands.opening import open_draft
from harness.commands.pair import Pair, Scoring
from harness.commands.progress import progress
from harness.commands.run_lifecycle import note_models, unless_broken
from harness.commands.server_requests import Workload
from harness.commands.server_start import check_target, draft_engine, stored_facts
from harness.engines.protocol import RefusedError, RequestFailedError, ServerDiedError
from harness.measurement.draft_scores import asked_traces, lookup_traces, score_texts
from harness.measurement.server_request import decoded, largest_gap, likelihood_test
from harness.measurement.target_texts import GeneratedText
from harness.models.device import release_memory
from harness.records import (
    GREEDY,
    NotMeasured,
    TextTrace,
    Trial,
    grouped,
    in_one_line,
    where,
)
from harness.serving.engines import OWN
from harness.storage import RunFolder
from harness.storage.manifest import ModelEntry
from harness.summary import TextCheck, TextLikelihood


def score(folder: RunFolder, work: Workload) -> None:
    """Score what is stored, while the run goes on or at its end; nothing with score=false."""
    if work.config.score and stored_facts(folder).spec.counting is not None:
        lost = NotMeasured("returned_texts")
        try:
            with unless_broken(folder, lost):
                _score(folder, work)
        except (ServerDiedError, RequestFailedError, RefusedError) as error:  # the draft's server
            folder.note_not_measured(replace(lost, error=in_one_line(error)))
        release()


def judge(folder: RunFolder, work: Workload) -> None:
    """Hold the returned texts against the target's own, where it takes the target to judge them."""
    if not work.config.score or not _judged_by_target(folder):
        return
    with unless_broken(folder, NotMeasured("returned_texts")), work.weights() as pair:
        if work.pair is None:
            check_target(folder, work, pair)
        _judge(folder, replace(work, pair=pair), pair)
    release()


def release() -> None:
    """Give back the memory of weights that nothing holds any more."""
    gc.collect()
    release_memory()


def _judged_by_target(folder: RunFolder) -> bool:
    """True where texts are sampled, or greedy ones differ and no engine has judged them."""
    stored = latest(list(folder.trials.read()))
    trials = [trial for trial in stored if trial.status == "ok" and trial.tokens]
    by_engine = {check.k for check in _judged_by_engine(folder)}
    differing = (check for check, *_ in greedy_pairs(trials) if check.result == "OPEN")
    sampled = any(trial.temperature != GREEDY for trial in trials)
    return sampled or any(check.k not in by_engine for check in differing)


def _judged_by_engine(folder: RunFolder) -> list[TextCheck]:
    """The texts of every K that the engine's own log-probabilities judged."""
    checks = [check for check in folder.checks() if isinstance(check, TextCheck)]
    by_engine = {check.k for check in checks if check.noise_positions is not None}
    return [check for check in checks if check.k in by_engine]


def _judge(folder: RunFolder, work: Workload, pair: Pair) -> None:
    stored = latest(list(folder.trials.read()))
    trials = [trial for trial in stored if trial.status == "ok" and trial.tokens]
    note_models(folder, pair.describe().models)
    judged, noise = _judged_by_engine(folder), None
    by_engine = {check.k for check in judged}
    left = (check for check, *_ in greedy_pairs(trials) if check.k not in by_engine)
    if work.config.engine != OWN.name and any(check.result == "OPEN" for check in left):
        plain = where(trials, temperature=GREEDY, k=0, repetition=0)
        noise = largest_gap([work.returned(each) for each in plain], pair.target_model)
    likelihoods = _likelihoods(trials, work, pair)
    check_texts(folder, trials, pair, work.config, likelihoods, judged, noise)
    if stored_facts(folder).spec.counting is not None:
        _score(folder, work)


def _likelihoods(trials: Sequence[Trial], work: Workload, pair: Pair) -> list[TextLikelihood]:
    sampled = [trial for trial in trials if trial.temperature != GREEDY]
    cells = grouped(sampled, lambda trial: (trial.temperature, trial.k))
    with progress("testing the returned texts", len(cells)) as tick:
        tests: list[TextLikelihood] = []
        for _, cell in sorted(cells.items()):
            tests.append(likelihood_test([work.returned(each) for each in cell], pair.target_model))
            tick()
    return tests


def _score(folder: RunFolder, work: Workload) -> None:
    """Score plain decoding's greedy texts, which are every K's, and all sampled ones; each once."""
    facts = stored_facts(folder)
    counting = facts.spec.counting
    assert counting is not None
    wanted: dict[tuple[Any, int], Trial] = {}
    for trial in (*latest(list(folder.trials.read())), *latest(list(folder.probes.read()))):
        if trial.status != "ok" or not trial.tokens or not trial.new_tokens:
            continue
        if trial.temperature != GREEDY:
            wanted.setdefault((trial.key, trial.k), trial)
        elif trial.k == 0:
            wanted.setdefault((replace(trial.key, repetition=0), 0), replace(trial, repetition=0))
    emitted = {name: tuple(counting.decoded(t.tokens or ())) for name, t in wanted.items()}
    known = {(trace.key, trace.k): trace for trace in folder.traces()}
    scored = [
        trace for name, trace in known.items() if emitted.get(name) == tuple(trace.tokens.tolist())
    ]
    kept = {(trace.key, trace.k) for trace in scored}
    lacking = [trial for name, trial in wanted.items() if name not in kept]
    if not lacking:
        return
    by_k = grouped(lacking, lambda trial: trial.k)
    of_k = {k: [decoded(work.returned(t), facts) for t in texts] for k, texts in by_k.items()}
    how = Scoring(max(work.ks), facts.draft_sampling)
    for k, texts in _traces_of(folder, work, of_k, how).items():
        scored += [replace(trace, k=k) for trace in texts]
    folder.write_traces(scored)


def _traces_of(
    folder: RunFolder, work: Workload, of_k: dict[int, list[GeneratedText]], how: Scoring
) -> dict[int, list[TextTrace]]:
    """Traces of texts, by K, by as few weights as they need."""
    draft, first = work.config.draft, next(iter(of_k))
    greedy = all(t.request.sampling.temperature == GREEDY for ts in of_k.values() for t in ts)
    count = sum(map(len, of_k.values()))
    if work.pair is None and draft.spec.looks_up:
        return {
            k: lookup_traces(
                texts, draft.kind, num_draft_tokens=how.largest_k, draft_name=draft.name
            )
            for k, texts in of_k.items()
        }
    alone = draft.spec.weights == "own" and not draft.spec.reads_states
    # Whose model a server has that runs elsewhere, only the target tells
    by_draft = work.pair is None and greedy and alone and work.config.url is None
    engine = draft_engine(folder, work) if by_draft else None
    if engine is not None:
        with engine.open(0) as server, progress("scoring the returned texts", count) as tick:
            made = asked_traces(of_k[first], server, draft_name=draft.name, tick=tick)
        traces = {first: made}
    elif by_draft:
        if folder.manifest.server_threads is not None:
            torch.set_num_threads(folder.manifest.server_threads)
        loaded, model = open_draft(draft, work.vocabulary, work.config)
        note_models(folder, {"draft": ModelEntry.of({**loaded.describe(), **model.describe()})})
        with progress("scoring the returned texts", count) as tick:
            made = score_texts(
                of_k[first],
                None,
                model,
                draft_name=draft.name,
                draft_shown=loaded.shown,
                draft_sampling=how.draft_sampling,
                batch=how.batch,
                tick=tick,
            )
        traces = {first: made}
    else:
        with work.weights() as pair:
            note_models(folder, pair.describe().models)
            check_target(folder, work, pair)
            with progress("scoring the returned texts", count) as tick:
                how = replace(how, tick=tick)
                traces = {k: pair.score(texts, how) for k, texts in sorted(of_k.items())}
    return traces

"""What is made of the texts that servers returned: scores for replay, and checks of losslessness.

Texts are scored (traces.parquet) and held against the target (checks.jsonl) by the pair's weights,
loaded only meanwhile. At temperature 0 replay needs the draft's likeliest tokens alone, so the
target is not loaded for it. Of a draft that is a file of the user's they are asked of the engine
itself, which needs no weights here (`measurement.remote_scores.asked_scores`).

Greedy texts that differ from plain decoding's are judged while its server answers. Which
differences are ties is measured on that server (`harness.measurement.engine_noise`), in requests
that are not timed: where all texts are equal nothing is asked. Of an engine that lists no
log-probabilities the checkpoint judges, where it is loaded.
"""

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from harness.analysis.cells import latest
from harness.analysis.lossless import greedy_pairs
from harness.commands.pair import Scoring, open_draft
from harness.commands.progress import progress
from harness.commands.requests import check_texts
from harness.commands.run_lifecycle import note_models, unless_broken
from harness.commands.server_requests import Workload
from harness.commands.server_start import check_target, started, stored_facts, to_serve
from harness.commands.tasks import PLAIN, Role
from harness.engine_facts.engines import OWN, spec_of
from harness.engines.protocol import RefusedError, RequestFailedError, Server, ServerDiedError
from harness.measurement.draft_scores import lookup_traces, score_texts
from harness.measurement.engine_noise import (
    MOST_NOISE,
    WANTED_POSITIONS,
    Margins,
    PlainText,
    ask_margins,
    noise_of,
)
from harness.measurement.remote_scores import asked_scores
from harness.measurement.server_request import decoded, largest_gap, likelihood_test
from harness.measurement.target_texts import GeneratedText
from harness.models.device import release_memory
from harness.records import (
    GREEDY,
    NotMeasured,
    TextTrace,
    Trial,
    UserError,
    grouped,
    in_one_line,
    where,
)
from harness.storage import RunFolder
from harness.storage.manifest import ModelEntry
from harness.summary import TextCheck, TextLikelihood

_log = logging.getLogger(__name__)
Scorer = Callable[[Sequence[GeneratedText], Scoring], list[TextTrace]]
# Texts that differ at one K, of which as many are judged: enough to tell a wrong cache from noise;
# and equal texts that are asked for where these do not tell the noise
MOST_JUDGED, MOST_EQUAL = 12, 4


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
    """Hold the returned texts against the target's own, where it takes the target to judge them.

    That is where texts are sampled, or greedy ones differ at a K that no engine has judged.
    """
    stored = latest(list(folder.trials.read()))
    trials = [trial for trial in stored if trial.status == "ok" and trial.tokens]
    sampled = [trial for trial in trials if trial.temperature != GREEDY]
    # Of every K that the engine's own log-probabilities judged
    checks = [check for check in folder.checks() if isinstance(check, TextCheck)]
    by_engine = {check.k for check in checks if check.noise_positions is not None}
    judged = [check for check in checks if check.k in by_engine]
    left = (check for check, *_ in greedy_pairs(trials) if check.k not in by_engine)
    differ = any(check.result == "OPEN" for check in left)
    # A file alone has no weights here: the engine has judged what it can
    if not work.config.score or work.config.model.is_file or not (sampled or differ):
        return
    with unless_broken(folder, NotMeasured("returned_texts")), work.weights() as pair:
        check_target(folder, work, pair)
        note_models(folder, pair.describe().models)
        noise = None
        if differ and work.config.engine != OWN.name:
            plain = where(trials, temperature=GREEDY, k=0, repetition=0)
            noise = largest_gap([work.returned(each) for each in plain], pair.target_model)
        cells = grouped(sampled, lambda trial: (trial.temperature, trial.k))
        likelihoods: list[TextLikelihood] = []
        with progress("testing the returned texts", len(cells)) as tick:
            for _, cell in sorted(cells.items()):
                texts = [work.returned(each) for each in cell]
                likelihoods.append(likelihood_test(texts, pair.target_model))
                tick()
        check_texts(folder, trials, pair, work.config, likelihoods, judged, noise)
        if stored_facts(folder).spec.counting is not None:
            _score(folder, replace(work, pair=pair))
    release()


def release() -> None:
    """Give back the memory of weights that nothing holds any more."""
    gc.collect()
    release_memory()


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
    texts = [text for some in of_k.values() for text in some]
    greedy = all(text.request.sampling.temperature == GREEDY for text in texts)
    with ExitStack() as stack:
        score_by = _scorer(folder, work, stack, greedy=greedy)
        with progress("scoring the returned texts", len(texts)) as tick:
            how = replace(how, tick=tick)
            return {k: score_by(some, how) for k, some in sorted(of_k.items())}


def _scorer(folder: RunFolder, work: Workload, stack: ExitStack, *, greedy: bool) -> Scorer:
    """The way to score texts, which are `greedy` or not, that needs the fewest weights."""
    draft = work.config.draft
    if work.pair is None and draft.spec.looks_up:
        return lambda texts, how: lookup_traces(
            texts, draft.kind, num_draft_tokens=how.largest_k, draft_name=draft.name
        )
    alone = draft.spec.weights == "own" and not draft.spec.reads_states
    # Whose model a server has that runs elsewhere, only the target tells
    by_draft = alone and (greedy or work.config.model.is_file) and work.config.url is None
    if work.pair is not None or not by_draft:
        pair = stack.enter_context(work.weights())
        note_models(folder, pair.describe().models)
        check_target(folder, work, pair)
        return pair.score
    engine = work.adapter.start_draft(to_serve(folder, work, slots=1))
    if engine is not None:
        return partial(scores_by_server, folder, work, stack.enter_context(engine.open(0)))
    if folder.manifest.server_threads is not None:
        torch.set_num_threads(folder.manifest.server_threads)
    loaded, model = open_draft(draft, work.vocabulary, work.config)
    note_models(folder, {"draft": ModelEntry.of({**loaded.describe(), **model.describe()})})
    return lambda texts, how: score_texts(
        texts,
        None,
        model,
        draft_name=draft.name,
        draft_shown=loaded.shown,
        draft_sampling=how.draft_sampling,
        batch=how.batch,
        tick=how.tick,
    )


def scores_by_server(
    folder: RunFolder, work: Workload, draft: Server, texts: Sequence[GeneratedText], how: Scoring
) -> list[TextTrace]:
    """Traces by the draft's own server; where there is a threshold, confidences are stored, too."""
    name, threshold = work.config.draft.name, work.config.threshold
    traces, confidences = asked_scores(
        texts,
        draft,
        draft_name=name,
        num_draft_tokens=how.largest_k,
        least=threshold or None,
        among=(work.adapter.spec.draft_top_k or 0) if threshold else 0,
        tick=how.tick,
    )
    if confidences:
        folder.add_confidences(confidences)
    return traces


# ---- greedy texts that differ, by the engine's noise ---------------------------------------------


def judge_greedy_texts(folder: RunFolder, work: Workload, servers: Mapping[Role, Server]) -> None:
    """Judge the stored texts that differ, each once, where the plain server is among these."""
    plain, waiting = servers.get(PLAIN), _waiting(folder, work)
    if plain is None or not waiting:
        return
    by_k = grouped(waiting, lambda entry: entry[0].k)
    judged: list[TextCheck] = []
    with progress("judging the greedy texts that differ", len(waiting)) as tick:
        for k, differing in sorted(by_k.items()):
            try:
                judged += judged_by(plain, k, differing, _equal_texts(folder, work, k))
            except ServerDiedError as error:
                _log.warning("texts that differ at K=%d are not judged: %s", k, in_one_line(error))
                break
            for _ in differing:
                tick()
    folder.write_checks([*folder.checks(), *judged])


def judge_the_rest(folder: RunFolder, work: Workload) -> None:
    """The same of texts whose plain server was not up with theirs: it is started once more."""
    if not _waiting(folder, work):
        return
    try:
        with started(folder, work, [PLAIN], slots=1) as servers:
            judge_greedy_texts(folder, work, servers)
    except UserError as error:
        _log.warning("texts that differ are not judged: %s", in_one_line(error))


def judged_by(
    plain: Server,
    k: int,
    differing: Sequence[tuple[TextCheck, PlainText]],
    equal: Iterator[PlainText],
) -> list[TextCheck]:
    """The checks of one K that can be judged, with their results; OPEN where noise is too large."""
    # The same text in several visits is asked for once
    texts = list(dict.fromkeys(text for _, text in differing))[:MOST_JUDGED]
    margins: dict[PlainText, Margins] = {}
    try:
        for text in (*texts, *islice(equal, MOST_EQUAL)):
            lacking = WANTED_POSITIONS - noise_of([*margins.values()])[1]
            if text.position is None and (lacking <= 0 or not margins):
                break
            measured = ask_margins(plain, text, k, lacking)
            if measured is not None:
                margins[text] = measured
    except (RequestFailedError, RefusedError) as error:
        _log.warning("texts that differ at K=%d are not judged: %s", k, in_one_line(error))
    noise, positions = noise_of([*margins.values()])
    if noise is None:
        return []
    if noise > MOST_NOISE:
        _log.warning(
            "texts that differ at K=%d are not judged: from single tokens to batches of %d the"
            " plain server's log-probabilities change by %.2g nats, which is no rounding",
            k,
            k + 1,
            noise,
        )
    return [
        replace(
            check,
            result="OPEN"
            if noise > MOST_NOISE
            else "TIE"
            if margins[text].is_tie(noise)
            else "FAIL",
            target_margin=margins[text].step,
            verify_margin=margins[text].batch,
            noise=noise,
            noise_positions=positions,
        )
        for check, text in differing
        if text in margins
    ]


def _waiting(folder: RunFolder, work: Workload) -> list[tuple[TextCheck, PlainText]]:
    """The texts that differ and have no check, of an engine that can be asked."""
    if not spec_of(work.config.engine).lists_logprobs:
        return []
    pairs = _pairs_of_draft(folder, work)
    ids = {check.id for check, *_ in pairs}
    stored = [c for c in folder.checks() if isinstance(c, TextCheck) and c.id in ids]
    judged = Counter(k for k, *_ in {(check.k, check.prompt_set, check.prompt) for check in stored})
    known = {check.id for check in stored}
    waiting: list[tuple[TextCheck, PlainText]] = []
    for check, trial, plain in pairs:
        position = check.first_difference
        if position is None or check.id in known or judged[check.k] >= MOST_JUDGED:
            continue
        other = (trial.tokens or ())[position : position + 1]
        text = _plain_text(work, plain)
        waiting.append((check, replace(text, position=position, other=other[0] if other else None)))
    return waiting


def _pairs_of_draft(folder: RunFolder, work: Workload) -> list[tuple[TextCheck, Trial, Trial]]:
    """The greedy texts of the workload's draft next to plain decoding's; an audition has others."""
    trials = folder.trials.read()
    of_draft = where(trials, draft=work.config.draft.name)
    return [*greedy_pairs([*where(trials, k=0), *(trial for trial in of_draft if trial.k)])]


def _equal_texts(folder: RunFolder, work: Workload, k: int) -> Iterator[PlainText]:
    seen: set[tuple[str, str]] = set()
    for check, _, plain in _pairs_of_draft(folder, work):
        name = check.prompt_set, check.prompt
        if check.k == k and check.result == "PASS" and name not in seen:
            seen.add(name)
            yield _plain_text(work, plain)


def _plain_text(work: Workload, trial: Trial) -> PlainText:
    asked = work.request(work.entry(trial.prompt_set, trial.prompt), GREEDY, 0, 0).asked
    return PlainText(asked._replace(prompt=tuple(asked.prompt)), trial.tokens or ())

"""An audition on an engine's servers: which draft, K and threshold to serve, or none.

The plain server's texts are every draft's texts. The draft's own server says which of their tokens
it would have drafted, and with which probability, so the rounds of every K and threshold follow by
replay. What a round of n drafted tokens costs is timed once for each draft: on servers that reject
every draft, or for a look-up in requests for a few prompts (`harness.analysis.server_costs`). So
every (draft, K, threshold) is a candidate of one verdict. The best by replay is measured next to
plain decoding, in pairs, as a sweep's is (`harness.stats.verdict_interval`). Where that leaves it
undecided, and another draft is expected to be faster than it was, that draft is measured, too: each
of the two finalists has its share of the report's error.

What is stored of one draft, with the plain server's requests, is what a server run of that draft
stores (`of_draft`), and is read as that is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from harness.analysis.answers import Answered, Question, answered
from harness.analysis.caveats import of_setup, timing
from harness.analysis.caveats.prompts import k_at_edge
from harness.analysis.caveats.texts import greedy_texts_differ
from harness.analysis.lossless import by_text, failures
from harness.analysis.pairs import (
    Pair,
    evidence_from_pairs,
    measured_pairs,
    pairs_of,
    rounds_as_replayed,
)
from harness.analysis.predicted import Predicted, rank, replayed_rows
from harness.analysis.replayed import by_prompt
from harness.analysis.round_costs import Latency, TimedVisits
from harness.analysis.server_costs import fit_costs, left_out_costs, timed_rounds
from harness.analysis.server_lossless import gate_caveats
from harness.analysis.server_predictions import (
    TimedServer,
    requests_of,
    served_latency,
    served_rows,
    timed_server,
)
from harness.analysis.server_texts import ServedTexts, Texts, served_texts
from harness.analysis.setup import Setup, asked_drafts, draft_memory, run_facts
from harness.analysis.verdict import Candidate, Evidence, closed
from harness.engine_facts.draft_kinds import DRAFTS, looks_up
from harness.engine_facts.engines import spec_of
from harness.records import GREEDY, Failure, ResultRow, Trial, grouped, where
from harness.stats.verdict_interval import look_shares
from harness.storage import StoredRun
from harness.storage.manifest import SERVER, ChosenK
from harness.summary import DraftMemory, Leaderboard, LeaderboardRow, Summary

# Drafts that are measured at most, and the share of the error that the first has of several
FINALISTS = 2
FIRST_SHARE = 0.8
NO_COSTS = (
    "its requests do not tell what its rounds cost, since other work disturbed them; try again on a"
    " quiet machine"
)


def of_draft(setup: Setup, draft: str, chosen: ChosenK | None = None) -> Setup:
    """One draft's part of an audition as a server run; `chosen` None: before it was measured."""
    run, notes = setup.run, setup.run.manifest
    role = notes.models.get(draft)
    models = {name: entry for name, entry in notes.models.items() if name == "target"}
    plain, measured = where(run.trials, k=0), list[Trial]()
    # Those that price a look-up, with the plain ones next to them
    visits = {trial.repetition for trial in where(run.probes, draft=draft)}
    of_lookup = {
        name: tuple(t for t in getattr(run, name) if t.repetition in visits)
        for name in ("probes", "starts")
    }
    if chosen is not None:  # on the prompts of the looks so far
        measured = where(run.trials, draft=draft)
        prompts = {(trial.prompt_set, trial.prompt) for trial in measured}
        plain = [trial for trial in plain if (trial.prompt_set, trial.prompt) in prompts]
    ks = notes.served_ks
    manifest = replace(
        notes,
        door=SERVER,
        models={**models, **({} if role is None else {"draft": role})},
        served_ks=replace(ks, chosen=(chosen,)) if ks is not None and chosen is not None else None,
    )
    config = {
        **run.config,
        "draft": {"name": draft, "kind": role.kind if role else draft},
        "p_min": [chosen.p_min if chosen else 0.0],
        "repetitions": 1,
    }
    view = replace(
        run,
        config=config,
        manifest=manifest,
        trials=(*plain, *measured),
        **({"probes": (), "starts": ()} if chosen else of_lookup),
        rounds=tuple(where(run.rounds, draft=draft)),
        checks=run.checks if chosen else (),
    )
    # Both are read from files once, for every draft
    vars(view)["traces"] = where(run.traces, draft=draft)
    vars(view)["confidences"] = where(run.confidences, draft=draft)
    return Setup(view)


@dataclass(frozen=True, eq=False)
class ServedDraft:
    """A draft whose texts are scored, and what its rounds cost on the engine."""

    name: str
    served: ServedTexts
    plain: Texts  # the plain server's, with the draft's scores
    latency: Latency
    thresholds: tuple[float, ...]  # that are replayed; 0 is none

    @property
    def least_k(self) -> int:
        return DRAFTS[self.name].least_k if looks_up(self.name) else 1

    def only(self, prompts: set[tuple[str, str]]) -> Texts:
        return Texts(
            tuple(
                pair for pair in self.plain.pairs if (pair[0].prompt_set, pair[0].prompt) in prompts
            )
        )


def served_draft(setup: Setup, draft: str) -> ServedDraft | None:
    """A draft as far as it is stored; None while no text is scored, or no round timed."""
    served = served_texts(of_draft(setup, draft))
    plain = served.texts(where(served.settled, k=0), 0, GREEDY)
    latency = _latency(served) if plain.trials else None
    if latency is None:
        return None
    # A look-up has no confidences, and without the time of a dropped token no threshold has a cost
    known = bool(served.setup.run.confidences) and latency.dropped_s > 0.0
    asked = setup.run.config.get("p_min") or [0.0]
    thresholds = tuple(map(float, asked)) if known else (0.0,)
    return ServedDraft(draft, served, plain, latency, thresholds)


def _latency(served: ServedTexts) -> Latency | None:
    """Costs of rounds, by servers that reject every draft or by requests; None without either."""
    setup, counting = served.setup, served.counting
    timed = None if counting is None else timed_rounds(setup.run.rounds, counting, served.settle)
    if timed is not None:  # a server of the largest K drafts fewer tokens near the budget
        timed = replace(timed, fitted_at=tuple(sorted({1, *setup.ks})))
    if timed is None and setup.run.probes:
        as_trials = replace(setup.run, trials=setup.run.probes, probes=())
        vars(as_trials)["traces"] = setup.run.traces
        requests = served_texts(Setup(as_trials))
        timed = requests_of(requests, requests.ks, GREEDY, None)
        timed = timed and replace(timed, fitted_at=requests.ks)
    costs = None if timed is None else fit_costs(timed)
    without = [] if timed is None or costs is None else left_out_costs(timed, costs.times.largest)
    if timed is None or costs is None or not without:
        return None
    # A step of the draft, in plain tokens of the target next to it
    steps = where(setup.run.timings, beside=setup.draft, kind="step")
    medians = {step.role: float(np.median(step.samples_s)) for step in steps}
    step = medians["draft"] / medians["target"] if len(medians) > 1 else 0.0
    latency = served_latency(served, GREEDY, costs, without)
    assert latency.served is not None
    visits = len({each.visit for each in setup.run.rounds})
    times = replace(latency.served, visits=visits, own_requests=True)
    return replace(latency, served=times, dropped_s=step * costs.times.plain_s)


def predicted_drafts(setup: Setup) -> Predicted | None:
    """Every draft, K and threshold on the prompts that all drafts scored; None before the first."""
    failed = {each.where for each in setup.run.manifest.audition.failures}
    names = [name for name in asked_drafts(setup) if name not in failed]
    drafts = [made for name in names if (made := served_draft(setup, name)) is not None]
    if not drafts:
        return None
    prompts = set.intersection(
        *({(t.prompt_set, t.prompt) for t in each.plain.trials} for each in drafts)
    )
    counts = {
        Candidate(draft.name, k, p_min): draft.served.replayed(texts, k, p_min)
        for draft in drafts
        for texts in [draft.only(prompts)]
        for k, p_min in product(setup.ks, draft.thresholds)
        if draft.latency.rounds.covers(k) and k >= draft.least_k
    }
    first = drafts[0].only(prompts)
    rule = drafts[0].served.engine.rule
    if not counts or not first.trials or rule is None:
        return None
    lookups = frozenset(each.name for each in drafts if looks_up(each.name))
    return Predicted(
        by_prompt(first.traces, rule, counts, lookups), {each.name: each.latency for each in drafts}
    )


def best_by_replay(run: StoredRun) -> Candidate | None:
    """The draft, K and threshold to measure: of the largest predicted speedup; None without any."""
    setup = Setup(run)
    predicted = predicted_drafts(setup)
    if predicted is None:
        return None
    speedups = predicted.evidence.speedups(setup.weights)
    # Of equal ones that of fewer drafted tokens
    return max(speedups, key=lambda name: (speedups[name], -name.k), default=None)


def served_audition_decided(run: StoredRun, look: int) -> bool:
    """True where the verdict on the workload needs no more requests after so many looks."""
    ks = run.manifest.served_ks
    if ks is None:
        return False
    setup = Setup(replace(run, manifest=replace(run.manifest, served_ks=replace(ks, made=look))))
    made = _of_finalists(setup, predicted_drafts(setup))
    if len(made) < len(_finalists(setup)):  # the last one has too few pairs
        return False
    return bool(made) and made[-1].question.source == "measured" and closed(made[-1].workload)


def next_finalist(run: StoredRun) -> Candidate | None:
    """The candidate to measure after the first; None where there is no reason to.

    The best of the other drafts, where it is expected to be faster than the first was measured to
    be, and that one is undecided, or its texts are not plain decoding's.
    """
    setup = Setup(run)
    predicted = predicted_drafts(setup)
    made = _of_finalists(setup, predicted)
    if predicted is None or len(made) != 1 or made[0].question.source != "measured":
        return None
    first, measured = made[0].workload, _finalists(setup)[0].draft
    gains = predicted.evidence.speedups(setup.weights)
    others = {name: gain for name, gain in gains.items() if name.draft != measured}
    best = max(others, key=lambda name: (others[name], -name.k), default=None)
    if best is None or first.decision != "undecided" or others[best] <= (first.speedup or 0.0):
        return None
    return best


# ---- the record ----------------------------------------------------------------------------------


def _finalists(setup: Setup) -> tuple[ChosenK, ...]:
    """What is measured next to plain decoding, in that order."""
    ks = setup.run.manifest.served_ks
    return () if ks is None else tuple(each for each in ks.chosen if each.draft and each.k)


def _measured_alone(setup: Setup) -> tuple[ChosenK, ...]:
    """Drafts that replay does not know, which are measured on every prompt at the largest K."""
    names = [name for name in asked_drafts(setup) if name in DRAFTS and not DRAFTS[name].replayed]
    return tuple(ChosenK(GREEDY, max(setup.ks), looks=1, draft=name) for name in names)


# Of two measured drafts the answer is that of what may be served, and a loss only where both lose
_FIRST_SAID = {"speculate": 2, "undecided": 1, "does_not_pay": 0}


def _answered(setup: Setup, predicted: Predicted | None) -> tuple[Answered, ...]:
    """The answer on the workload, each measured draft with the speedups that its pairs have."""
    alone = [_by_pairs(setup, chosen) for chosen in _measured_alone(setup)]
    of_alone = answered(setup, [question for question in alone if question is not None])
    made = (*_of_finalists(setup, predicted), *of_alone)
    if not made:
        return ()
    best = max(
        made, key=lambda each: (_FIRST_SAID[each.workload.decision], each.workload.speedup or 0.0)
    )
    known = {each.name: each for each in best.workload.candidates}
    for other in made:
        if other is best:
            continue
        own = other.workload.named[0] if other.question.source == "measured" else None
        for each in other.workload.candidates:  # ties are to the one that is named
            if each.draft == own or each.name not in known:
                known[each.name] = replace(each, tied=False)
    workload = replace(best.workload, candidates=tuple(known.values()))
    return (replace(best, answers=(workload, *best.answers[1:])),)


def _of_finalists(setup: Setup, predicted: Predicted | None) -> tuple[Answered, ...]:
    """The answers by each finalist's measured pairs; by replay before there are some."""
    engine = setup.engine
    if predicted is None or engine is None:
        return ()
    asked = [
        _by_pairs(setup, chosen, predicted, leads=not number)
        for number, chosen in enumerate(_finalists(setup))
    ]
    if made := answered(setup, [question for question in asked if question is not None]):
        return made
    # Each draft at its fastest, before anything is measured: how well round times are known differs
    # much between K, and the optimism of a choice is taken from errors that are alike
    best = predicted.best_of(lambda name: name.draft, setup.weights).evidence
    share = FIRST_SHARE if len(asked_drafts(setup)) > 1 else 1.0
    return answered(setup, [Question(best, engine.rule, "replayed", engine.name, share=share)])


def _by_pairs(
    setup: Setup, chosen: ChosenK, predicted: Predicted | None = None, *, leads: bool = False
) -> Question | None:
    """The question on a measured draft; None while its pairs are too few.

    Where its texts are not plain decoding's none of its times count. `predicted` is None of a draft
    that replay does not know; the first finalist `leads`, the others share what it leaves of the
    error.
    """
    engine, ks, draft = setup.engine, setup.run.manifest.served_ks, str(chosen.draft)
    assert engine is not None
    served = served_texts(of_draft(setup, draft, chosen))
    name, doubt = Candidate(draft, chosen.k or 0, chosen.p_min), served.distrusted
    pairs = pairs_of(served.trials, GREEDY, name.k)
    if predicted is None:
        evidence = evidence_from_pairs(pairs, GREEDY, name, None) if pairs else None
    else:
        looks = look_shares(max(1, chosen.looks or (ks.made if ks else 0)))
        evidence = _with_pairs(predicted, pairs, name, looks)
        evidence = predicted.evidence if evidence is None and doubt is not None else evidence
    if evidence is None:
        return None
    share = 1.0
    if len(asked_drafts(setup)) > 1:
        others = 1 + len(_measured_alone(setup))
        share = FIRST_SHARE if leads else (1.0 - FIRST_SHARE) / others
    return Question(evidence, engine.rule, "measured", engine.name, share=share, doubt=doubt)


def _with_pairs(
    predicted: Predicted, pairs: Sequence[Pair], name: Candidate, looks: tuple[float, ...]
) -> Evidence | None:
    """Predicted evidence with measured pairs, or pairs alone if rounds differ; None if too few."""
    evidence = predicted.evidence
    pairs = [pair for pair in pairs if pair.name in evidence.names]
    measured = measured_pairs(pairs, predicted, name) if name in evidence.candidates else None
    if measured is None:
        return None
    # After an end of text a server does not tell the rounds at a threshold
    counted = [pair for pair in pairs if all(t.rounds is not None for t in pair.drafted)]
    if counted and not rounds_as_replayed(counted, predicted.replays, name):
        return replace(evidence_from_pairs(pairs, GREEDY, name, None), looks=looks)
    return replace(evidence, named=name, pairs=measured, looks=looks)


def analyse_served_audition(setup: Setup) -> Summary:
    if setup.engine is None:  # no server answered
        return Summary(run_facts(setup, ()), failures=failures(setup), caveats=(*of_setup(setup),))
    predicted = predicted_drafts(setup)
    made = _answered(setup, predicted)
    answers = tuple(each for entry in made for each in entry.answers)
    measured = [
        timed_server(served_texts(of_draft(setup, str(chosen.draft), chosen)))
        for chosen in (*_finalists(setup), *_measured_alone(setup))
        if where(setup.run.trials, draft=chosen.draft)
    ]
    results = tuple(_results(setup, predicted, measured))
    notes = setup.run.manifest.audition
    boards = _boards(setup, predicted, made)
    latencies = {} if predicted is None else dict(predicted.latencies)
    names = asked_drafts(setup)
    ranked = [row.draft for board in boards for row in board.rows if row.draft]
    lacking = tuple(name for name in names if name not in ranked)
    facts = run_facts(setup, results)
    failed = failures(setup)
    explained = {*ranked, *(each.where for each in failed)}
    explained |= {each.draft for each in notes.not_eligible}
    timed = {each.draft for each in (*setup.run.rounds, *setup.run.probes)}
    failed += tuple(
        Failure(name, NO_COSTS) for name in names if name in timed and name not in explained
    )
    checks = tuple(check for server in measured for check in server.texts.checks)
    return Summary(
        run=replace(facts, not_scored=lacking, ranked=len(ranked)),
        answers=answers,
        failures=failed,
        caveats=(
            *(
                caveat
                for server in measured
                for caveat in gate_caveats(server.gates, setup.engine.rule)
            ),
            *(
                caveat
                for server in measured
                for caveat in greedy_texts_differ.of(by_text(server.texts.checks))
            ),
            *of_setup(setup, results),
            *timing.plain_tokens_unlike.of({GREEDY: _plain_visits(setup, latencies)}, answers),
            *k_at_edge.of(setup, answers),
        ),
        results=results,
        round_times=tuple(
            replace(latency.round_summary(name), run=None) for name, latency in latencies.items()
        ),
        leaderboards=boards,
        memory=tuple(_memory(setup, predicted)),
        text_checks=checks,
        ineligible=tuple(Failure(each.draft, each.reason) for each in notes.not_eligible),
    )


def _plain_visits(setup: Setup, latencies: Mapping[str, Latency]) -> dict[str, Latency]:
    """The costs of drafts with the plain tokens that each visit timed next to them."""
    made: dict[str, Latency] = {}
    for draft, latency in latencies.items():
        timed = where(setup.run.rounds, draft=draft, k=0)
        by_visit = grouped(timed, lambda each: each.visit).values()
        plain_s = [sum(t.seconds for t in ts) / sum(t.rounds for t in ts) for ts in by_visit]
        if plain_s:  # of a look-up there are requests for a few prompts
            visits = TimedVisits(GREEDY, np.array(plain_s), (), np.empty((len(plain_s), 0)))
            made[draft] = replace(latency, visits=visits)
    return made


def _boards(
    setup: Setup, predicted: Predicted | None, made: Sequence[Answered]
) -> tuple[Leaderboard, ...]:
    """The leaderboard; none while nothing is replayed or measured."""
    assert setup.engine is not None
    rows: Sequence[LeaderboardRow] = ()
    if predicted is not None:
        rows = rank(predicted, setup.weights, seed=setup.seed).rows
    rows, rule = _with_measured(rows, made), setup.engine.rule
    engine = spec_of(setup.engine.name).title
    return (Leaderboard(rule, GREEDY, (engine,), rows),) if rows and rule is not None else ()


def _with_measured(
    rows: Sequence[LeaderboardRow], made: Sequence[Answered]
) -> tuple[LeaderboardRow, ...]:
    """The rows of a leaderboard, with those of what is measured and not replayed."""
    known = {row.draft for row in rows}
    more = [
        LeaderboardRow(0, each.draft, each.k, each.speedup)
        for answered in made
        for each in answered.workload.candidates
        if each.source == "measured" and each.draft not in known
    ]
    if more and not rows:
        more.append(LeaderboardRow(0, None, 0, 1.0))  # plain decoding
    ranked = sorted((*rows, *more), key=lambda row: (-row.speedup, row.draft is not None))
    return tuple(replace(row, rank=place) for place, row in enumerate(ranked, start=1))


def _results(
    setup: Setup, predicted: Predicted | None, measured: Sequence[TimedServer]
) -> Iterator[ResultRow]:
    """Measured rows, and predicted ones at the measured threshold of a draft and K, or the best."""
    for server in measured:
        yield from served_rows(server).measured
    if predicted is None:
        return
    shown = predicted.at_one_threshold(
        setup.weights,
        [Candidate(str(each.draft), each.k or 0, each.p_min) for each in _finalists(setup)],
    )
    yield from replayed_rows(shown, model=setup.model)


def _memory(setup: Setup, predicted: Predicted | None) -> Iterator[DraftMemory]:
    if predicted is None:
        return
    replays = predicted.replays
    plain = where(setup.run.trials, k=0)
    longest = max((t.prompt_tokens or 0) + len(t.tokens or ()) for t in plain)
    yield from draft_memory(setup, [*replays.drafts], longest, lookups=replays.lookups)

"""An audition on an engine's servers: which draft, K and threshold to serve, or none.

The plain server's texts are every draft's texts. The draft's own server says which of their tokens
it would have drafted, and with which probability, so the rounds of every K and threshold follow by
replay. What a round of n drafted tokens costs is timed once for each draft: on servers that reject
every draft, or for a look-up in requests for a few prompts (`harness.analysis.server_costs`). So
every (draft, K, threshold) is a candidate of one verdict. The best by replay is measured next to
plain decoding, in pairs, as a sweep's is (`harness.stats.two_phase`). Where that leaves it
undecided, and another draft is expected to be faster than it was, that draft is measured, too: each
of the two finalists has its share of the report's error.

What is stored of one draft, with the plain server's requests, is what a server run of that draft
stores (`of_draft`), and is read as that is.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from harness.analysis.answers import Answered, Question, answered
from harness.analysis.caveats import of_setup
from harness.analysis.caveats.prompts import k_at_edge
from harness.analysis.caveats.texts import greedy_texts_differ
from harness.analysis.device import draft_memory
from harness.analysis.failures import failures
from harness.analysis.leaderboard import rank
from harness.analysis.lossless import by_text, distrust
from harness.analysis.pairs import (
    Pair,
    check_of_pairs,
    evidence_from_pairs,
    pairs_of,
    rounds_as_replayed,
)
from harness.analysis.predicted import Predicted, replayed_rows
from harness.analysis.replayed import by_prompt
from harness.analysis.round_costs import Latency, ServedTimes
from harness.analysis.server_costs import fit_costs, left_out_costs, timed_rounds
from harness.analysis.server_lossless import gate_caveats
from harness.analysis.server_predictions import (
    TimedServer,
    requests_of,
    served_rows,
    timed_server,
)
from harness.analysis.server_texts import ServedTexts, Texts, served_texts
from harness.analysis.setup import Setup, run_facts, shares_of_sets
from harness.analysis.verdict import Candidate, Evidence, closed
from harness.config import AUTO_DRAFTS, split_draft
from harness.engine_facts.draft_kinds import DRAFTS, looks_up
from harness.engine_facts.engines import spec_of
from harness.records import GREEDY, Failure, ResultRow, Trial, first, where
from harness.stats.two_phase import MIN_MEASURED, Pairs, look_shares
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
    """The part of an audition that is of one draft, as a server run of it.

    Args:
        chosen: the K and threshold at which the draft was measured; None: without what was measured
            to decide.
    """
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
    """A draft whose texts are scored, and what its rounds cost on the engine.

    Attributes:
        plain: the plain server's texts, with the draft's scores.
        thresholds: those that are replayed; 0 is none.
    """

    name: str
    served: ServedTexts
    plain: Texts
    latency: Latency
    thresholds: tuple[float, ...]

    @property
    def least_k(self) -> int:
        """The smallest K at which it drafts."""
        return DRAFTS[self.name].least_k if looks_up(self.name) else 1

    def only(self, prompts: set[tuple[str, str]]) -> Texts:
        """The plain server's texts of some prompts."""
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


def _as_trials(run: StoredRun) -> StoredRun:
    """The requests that time a look-up's rounds, as the trials of a run."""
    made = replace(run, trials=run.probes, probes=())
    vars(made)["traces"] = run.traces
    return made


def _latency(served: ServedTexts) -> Latency | None:
    """Costs of rounds, by servers that reject every draft or by requests; None without either."""
    setup, counting = served.setup, served.counting
    timed = None if counting is None else timed_rounds(setup.run.rounds, counting, served.settle)
    if timed is not None:  # a server of the largest K drafts fewer tokens near the budget
        timed = replace(timed, fitted_at=tuple(sorted({1, *setup.ks})))
    if timed is None and setup.run.probes:
        requests = served_texts(Setup(_as_trials(setup.run)))
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
    return Latency(
        costs.times,
        served=ServedTimes(
            engine=served.engine.name,
            run=str(setup.run.folder),
            temperature=GREEDY,
            visits=len({each.visit for each in setup.run.rounds}),
            basis="measured",
            costs=costs,
            without=tuple(without),
            own_requests=True,
        ),
        dropped_s=step * costs.times.plain_s,
    )


def predicted_drafts(setup: Setup) -> Predicted | None:
    """Every draft, K and threshold on the prompts that all drafts scored; None before the first."""
    names = _names(setup)
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


def _names(setup: Setup) -> list[str]:
    """The drafts that were asked for, those of which nothing is stored included."""
    entries: Sequence[str] = setup.run.config.get("drafts") or ()
    return [split_draft(entry).name for entry in entries if entry != AUTO_DRAFTS]


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
    be, and that one is undecided.
    """
    setup = Setup(run)
    made = _of_finalists(setup, predicted_drafts(setup))
    first = made[0].workload if len(made) == 1 else None
    if first is None or made[0].question.source != "measured" or first.decision != "undecided":
        return None
    others = [each for each in first.candidates if each.draft != first.named[0]]
    best = max(others, key=lambda each: each.speedup, default=None)
    if best is None or first.speedup is None or best.speedup <= first.speedup:
        return None
    return Candidate(best.draft, best.k, best.p_min or 0.0)


# ---- the record ----------------------------------------------------------------------------------


def _finalists(setup: Setup) -> tuple[ChosenK, ...]:
    """What is measured next to plain decoding, in that order."""
    ks = setup.run.manifest.served_ks
    return () if ks is None else tuple(each for each in ks.chosen if each.draft and each.k)


def _measured_alone(setup: Setup) -> tuple[ChosenK, ...]:
    """Drafts that replay does not know, which are measured on every prompt at the largest K."""
    names = [name for name in _names(setup) if name in DRAFTS and not DRAFTS[name].replayed]
    return tuple(ChosenK(GREEDY, max(setup.ks), looks=1, draft=name) for name in names)


def _answered(setup: Setup, predicted: Predicted | None) -> tuple[Answered, ...]:
    """The answer on the workload: that of what may be served, else of the faster one."""
    made = (*_of_finalists(setup, predicted), *_of_alone(setup))
    if not made:
        return ()
    best = max(made, key=lambda each: (each.workload.speculates, each.workload.speedup or 0.0))
    candidates = (*made[0].workload.candidates, *best.workload.candidates)
    known = {each.name: each for each in candidates}
    for other in made:
        own = first(other.workload.candidates, name=other.workload.name)
        if own is not None and other is not best and other.question.source == "measured":
            known[own.name] = replace(own, speedup=other.workload.speedup or own.speedup)
    return (replace(best, workload=replace(best.workload, candidates=tuple(known.values()))),)


def _of_finalists(setup: Setup, predicted: Predicted | None) -> tuple[Answered, ...]:
    """The answers by each finalist's measured pairs; by replay before there are some."""
    if predicted is None:
        return ()
    ks, made = setup.run.manifest.served_ks, list[Answered]()
    for number, chosen in enumerate(_finalists(setup)):
        looks = look_shares(max(1, chosen.looks or (ks.made if ks else 0)))
        made += _by_pairs(
            setup,
            chosen,
            lambda pairs, name, looks=looks: _with_pairs(predicted, pairs, name, looks),
            leads=not number,
        )
    if made:
        return tuple(made)
    engine = setup.engine
    assert engine is not None
    # How well round times are known differs much between K, and the optimism of a choice is taken
    # from errors that are alike: each draft at its fastest
    best = predicted.best_of(lambda name: name.draft, setup.weights).evidence
    question = Question(best, engine.rule, "replayed", engine.name)
    return answered([question], lambda _: None, weights=shares_of_sets(setup), seed=setup.seed)


def _of_alone(setup: Setup) -> tuple[Answered, ...]:
    """The answers of what replay does not know, by the measured pairs alone."""
    made = list[Answered]()
    for chosen in _measured_alone(setup):
        made += _by_pairs(
            setup,
            chosen,
            lambda pairs, name: evidence_from_pairs(pairs, GREEDY, name, None) if pairs else None,
            leads=False,
        )
    return tuple(made)


def _by_pairs(
    setup: Setup,
    chosen: ChosenK,
    evidence_of: Callable[[Sequence[Pair], Candidate], Evidence | None],
    *,
    leads: bool,
) -> tuple[Answered, ...]:
    """The answer by the pairs of a draft that is measured; empty while there are too few.

    Args:
        leads: whether it is the first finalist; the others share what that leaves of the error.
    """
    engine, draft = setup.engine, str(chosen.draft)
    assert engine is not None
    served = served_texts(of_draft(setup, draft, chosen))
    name = Candidate(draft, chosen.k or 0, chosen.p_min)
    evidence = evidence_of(pairs_of(served.trials, GREEDY, name.k), name)
    if evidence is None:
        return ()
    share = 1.0
    if len(_names(setup)) > 1:
        others = 1 + len(_measured_alone(setup))
        share = FIRST_SHARE if leads else (1.0 - FIRST_SHARE) / others
    doubt = distrust(by_text([each for each in served.checks if each.result != "OPEN"]))
    question = Question(evidence, engine.rule, "measured", engine.name, share=share)
    return answered([question], lambda _: doubt, weights=shares_of_sets(setup), seed=setup.seed)


def _with_pairs(
    predicted: Predicted, pairs: Sequence[Pair], name: Candidate, looks: tuple[float, ...]
) -> Evidence | None:
    """Predicted evidence with the measured pairs of a candidate; None while there are too few.

    The pairs alone, where rounds are not those that replay expects.
    """
    evidence = predicted.evidence
    rows = {prompt: row for row, prompt in enumerate(evidence.names)}
    pairs = [pair for pair in pairs if pair.name in rows]
    if name not in evidence.candidates or len({each.name for each in pairs}) < MIN_MEASURED:
        return None
    # After an end of text a server does not tell the rounds at a threshold
    counted = [pair for pair in pairs if all(t.rounds is not None for t in pair.drafted)]
    check = check_of_pairs(counted, predicted.replays, name)
    if counted and not rounds_as_replayed(check):
        return replace(evidence_from_pairs(pairs, GREEDY, name, None), looks=looks)
    replayed = [rows[pair.name] for pair in pairs]
    seconds, plain_s = (
        np.array([sum(trial.decode_s or 0.0 for trial in side) for side in sides])
        for sides in ([pair.drafted for pair in pairs], [pair.plain for pair in pairs])
    )
    # Next to what is predicted of the same prompts, a request's start included
    costs = evidence.candidates[name].seconds[replayed], evidence.baseline.seconds[replayed]
    timed = Pairs(tuple(pair.name for pair in pairs), seconds, costs[0], plain_s, costs[1])
    return replace(evidence, named=name, pairs=timed, looks=looks)


def analyse_served_audition(setup: Setup) -> Summary:
    """Everything an audition on servers says, as far as what it stored allows."""
    if setup.engine is None:  # no server answered
        return Summary(run_facts(setup, ()), failures=failures(setup), caveats=(*of_setup(setup),))
    predicted = predicted_drafts(setup)
    made = _answered(setup, predicted)
    answers = tuple(each for entry in made for each in (entry.workload, *entry.sets))
    measured = [
        timed_server(served_texts(of_draft(setup, str(chosen.draft), chosen)))
        for chosen in (*_finalists(setup), *_measured_alone(setup))
        if where(setup.run.trials, draft=chosen.draft)
    ]
    results = tuple(_results(setup, predicted, measured))
    engine, notes = spec_of(setup.engine.name), setup.run.manifest.audition
    boards, latencies = (), dict[str, Latency]()
    if predicted is not None:
        board = rank(predicted, setup.weights, seed=setup.seed)
        board = _with_rows(board, made)
        boards, latencies = (replace(board, engines=(engine.title,)),), dict(predicted.latencies)
    names = _names(setup)
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
            *greedy_texts_differ.of(by_text(checks)),
            *of_setup(setup, results),
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


def _with_rows(board: Leaderboard, made: Sequence[Answered]) -> Leaderboard:
    """A leaderboard with rows of what is measured and not replayed."""
    known = {row.draft for row in board.rows}
    rows = [
        LeaderboardRow(0, each.draft, each.k, each.speedup)
        for answered in made
        for each in answered.workload.candidates
        if each.source == "measured" and each.draft not in known
    ]
    rows = sorted((*board.rows, *rows), key=lambda row: (-row.speedup, row.draft is not None))
    return replace(board, rows=tuple(replace(row, rank=n) for n, row in enumerate(rows, start=1)))


def _results(
    setup: Setup, predicted: Predicted | None, measured: Sequence[TimedServer]
) -> Iterator[ResultRow]:
    """Rows of what was measured, by prompt set, and of what is predicted of each draft and K.

    Of a measured draft and K they are at its threshold, of others at their best.
    """
    for server in measured:
        yield from served_rows(server).measured
    if predicted is None:
        return
    finalists = [Candidate(str(c.draft), c.k or 0, c.p_min) for c in _finalists(setup)]
    shown = predicted.at_one_threshold(setup.weights, finalists)
    yield from replayed_rows(shown, model=setup.model)


def _memory(setup: Setup, predicted: Predicted | None) -> Iterator[DraftMemory]:
    """The memory of each draft next to the target."""
    if predicted is None:
        return
    replays = predicted.replays
    plain = where(setup.run.trials, k=0)
    longest = max((t.prompt_tokens or 0) + len(t.tokens or ()) for t in plain)
    yield from draft_memory(setup, [*replays.drafts], longest, lookups=replays.lookups)

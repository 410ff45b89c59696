"""A run that is measured in looks: which K to measure, which drafts to drop, whether to go on.

A sweep decodes every prompt plainly and replays it at every K. It then measures one K, the best by
replay, next to plain decoding, and looks at its verdicts four times on the way
(`harness.stats.verdict_interval`). What decides here is what decides in the report, so that a run
that stopped because everything was decided is one whose report decides everything.

A server run chooses its K likewise, of the few whose servers it starts, and looks on the way.

An audition measures one draft after the other, each in four looks, and drops one that loses (early
elimination): its scores and its visits so far are a part of what they would be. It loses a question
where, at every K, it is significantly slower than plain decoding, or than the best of the drafts
that were not dropped. A question is a temperature and an acceptance rule, on the whole workload or
on a prompt set that can have a verdict. A draft is dropped only if it loses all of them, so that
the chance to drop the one which is the fastest anywhere is at most that of two comparisons. What it
is compared with is chosen on the prompts that it has not scored, so that no choice flatters the
comparison, and is compared with it on those that both have. The looks spend the error of a
temperature's verdict, which is the last look of them (`Evidence.looks`).

Of a model draft no rounds are timed where they cannot pay, whatever they cost (`cannot_pay`):
replay says what a round emits, and it takes the time of a plain token and of its draft steps at
least.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import numpy as np

from harness.analysis.answers import Answered
from harness.analysis.predicted import Latencies, evidence_of
from harness.analysis.replayed import Replays
from harness.analysis.scored_drafts import scored_drafts
from harness.analysis.server_predictions import predicted_speedups, timed_server
from harness.analysis.server_run import served_run
from harness.analysis.server_texts import served_texts
from harness.analysis.setup import Setup
from harness.analysis.sweep_and_audition import answered_questions, pair_run
from harness.analysis.verdict import ONE_SIDED, closed
from harness.records import GREEDY, TextTrace, grouped, where
from harness.stats.jackknife import MIN_PROMPTS, Weights, enough_prompts, half_width
from harness.stats.verdict_interval import look_shares, nominal_error
from harness.storage import StoredRun
from harness.storage.manifest import ChosenK
from harness.summary import VerdictReason

# Of what is undecided, what no further pair of the same prompts would change
FIXED: frozenset[VerdictReason] = frozenset(
    ("too_few_prompts", "no_complete_prompt", "greedy_texts_differ")
)


def choice(run: StoredRun, temperature: float) -> ChosenK:
    """The K and threshold to measure at a temperature: the best on the whole workload, by replay.

    The traces of the run say how many rounds each takes, its timed rounds what a round costs. All
    prompts that were decoded plainly count, and none of the measured pairs.
    Every K where nothing was replayed or no round was timed at this temperature.
    """
    setup = Setup(run)
    predicted = scored_drafts(setup).predicted(setup.rule, temperature)
    if predicted is None:
        return ChosenK(temperature, None, p_min=setup.thresholds[0])
    speedups = predicted.evidence.speedups(setup.weights)
    best = max(speedups, key=speedups.__getitem__)
    return ChosenK(temperature, best.k, p_min=best.p_min)


def decided(run: StoredRun, look: int) -> Set[float]:
    """The temperatures that need no more pairs, or requests, after so many looks.

    The workload is decided there, or further pairs would not decide it. A prompt set keeps no run
    going: replay says most of its verdict, and pairs of all sets the price. The bounds allow for
    this look and those before. A report of a run whose manifest has as many looks says the same.

    `run` has traces, round times and the trials so far; `look` is 1 to 4, of four.
    """
    notes, entries = run.manifest, tuple[Answered, ...]()
    if notes.looks is not None:
        notes = replace(notes, looks=replace(notes.looks, made=look))
        entries = answered_questions(pair_run(Setup(replace(run, manifest=notes))))
    elif notes.served_ks is not None:
        notes = replace(notes, served_ks=replace(notes.served_ks, made=look))
        entries = served_run(Setup(replace(run, manifest=notes))).answered
    return {
        entry.question.evidence.temperature
        for entry in entries
        if entry.question.source == "measured"
        if closed(entry.workload)
        or (entry.question.evidence.pairs is not None and entry.workload.reason in FIXED)
    }


# ---- servers -------------------------------------------------------------------------------------


def most_started(ks: int, temperatures: int) -> int:
    """The speculating servers that `to_start` starts at most, of two K or more."""
    near, width, searched = 1, 2, 1
    while width < ks + 1:
        near, width, searched = width, near + width, searched + 1
    return min(ks, 2 + temperatures * (searched - 2))


def to_start(run: StoredRun, ks: Sequence[int], started: Sequence[int]) -> tuple[int, ...]:
    """The K whose servers are to price their rounds next, on the way to the fastest; `ks` ascend.

    Rounds of a K that was not timed do not follow from those of others: on llama.cpp a line through
    K = 1, 2 and 8 is 17 to 24 % off at K = 4, which may be the fastest (docs/decisions/0018). So
    the fastest is searched for among K that have a server. Speedups are taken to rise with K up to
    the fastest and to fall from there, for each further drafted token adds less to what a round
    emits. Then a Fibonacci search needs the fewest servers (Kiefer, "Sequential minimax search for
    a maximum", 1953): three for four K. Empty where every temperature's search has ended, or
    nothing can be told. `run` has plain texts, their traces, and probes of the K that were started.
    """
    if not started:
        return searched_next(ks, {})
    speedups = _speedups_of(run, started)
    next_ks = [k for known in speedups.values() for k in searched_next(ks, known)]
    # More requests may tell that two K which nearly tie are the other way round. Both are then near
    # the fastest, and no new search begins.
    left = most_started(len(ks), len(speedups)) - len(started)
    return tuple(dict.fromkeys(next_ks))[:left]


def _speedups_of(run: StoredRun, started: Sequence[int]) -> dict[float, dict[int, float]]:
    """By temperature, as predicted of the started K; empty where costs or texts do not tell all."""
    server = timed_server(served_texts(Setup(run)))
    known = {at: predicted_speedups(server, at) for at in server.setup.temperatures}
    if not all(speedups.keys() >= {*started} for speedups in known.values()):
        return {}
    return {at: {k: speedups[k] for k in started} for at, speedups in known.items()}


def searched_next(ks: Sequence[int], speedups: Mapping[int, float]) -> tuple[int, ...]:
    """The K that a Fibonacci search over ascending `ks` needs next; empty at its end."""
    low, near, width = -1, 1, 2  # the largest lies above `low` and below `low + width`
    while width < len(ks) + 1:
        near, width = width, near + width
    while width > 2:
        inner = [low + width - near, low + near]
        known = [at for at in inner if at < len(ks)]
        lacking = tuple(ks[at] for at in known if ks[at] not in speedups)
        if lacking:
            return lacking
        if len(known) == 2 and speedups[ks[inner[0]]] < speedups[ks[inner[1]]]:
            low = inner[0]
        near, width = width - near, near
    return ()


def best_started(run: StoredRun, started: Sequence[int]) -> tuple[ChosenK, ...]:
    """By temperature the best started K by replay; empty where costs or texts do not tell it."""
    speedups = _speedups_of(run, started)
    return tuple(ChosenK(at, max(known, key=known.__getitem__)) for at, known in speedups.items())


# ---- the drafts of an audition -------------------------------------------------------------------


def cannot_pay(run: StoredRun, traces: Sequence[TextTrace], draft: str, *, surely: bool) -> bool:
    """True where a model draft loses at every K and temperature at the least its rounds can cost.

    On the whole workload and on every prompt set of it, as far as its texts are scored; `surely` by
    the upper bound of the workload's speedup, too.
    """
    setup = Setup(run)
    drafts = scored_drafts(setup, {draft: where(traces, draft=draft)})
    level = 1.0 - 2.0 * ONE_SIDED / len(setup.temperatures)
    for temperature in setup.temperatures:
        predicted = drafts.predicted(setup.rule, temperature)
        evidence = predicted and predicted.at_least(draft)
        if evidence is None:
            return False
        sets = (evidence.only([name]).speedups(None) for name in {*evidence.prompt_sets})
        if any(max(gains.values()) >= 1.0 for gains in (evidence.speedups(setup.weights), *sets)):
            return False
        workload = evidence.workload(setup.weights)
        if surely and not enough_prompts(workload.prompt_sets):
            return False
        if surely:
            half = half_width(workload.variance(), level)
            if (workload.log_speedups.value + half).max() >= 0.0:
                return False
    return True


def slower_than(
    run: StoredRun, traces: Sequence[TextTrace], draft: str, look: int
) -> tuple[str | None, ...]:
    """The drafts that a draft loses to significantly, None for plain decoding, each once.

    Empty where it is not to be dropped. `traces` are those of the draft so far, and of the drafts
    before it; `look` is 1 to 3, of four.
    """
    setup, by_draft = Setup(run), grouped(traces, lambda trace: trace.draft)
    everyone = scored_drafts(setup, by_draft)
    others = scored_drafts(setup, {name: by_draft[name] for name in by_draft if name != draft})
    error = nominal_error(ONE_SIDED / len(setup.temperatures), look_shares(look))
    found: dict[str | None, None] = {}
    for temperature in setup.temperatures:
        # At temperature 0 all acceptance rules coincide
        for rule in everyone.rules if temperature > GREEDY else everyone.rules[:1]:
            before = others.predicted(rule, temperature)
            both = everyone.predicted(rule, temperature) if before else None
            if both is None or before is None:  # the first draft has nothing to lose to
                return ()
            latencies = both.latencies
            for part, rest, weights in _questions(both.replays, before.replays, setup.weights):
                winner = _winner(part, rest, latencies, weights, draft, 1.0 - 2.0 * error)
                if winner is None:
                    return ()
                found[winner[0]] = None
    return tuple(found)


def _questions(
    both: Replays, before: Replays, weights: Weights
) -> list[tuple[Replays, Replays, Weights]]:
    """The workload and each prompt set to be decided: a draft's prompts, others', the weights."""
    scored = {*both.names}
    rest = before.rows([name not in scored for name in before.names])
    if {*rest.prompt_sets} < {*before.prompt_sets}:  # nothing else to choose on
        rest = before
    counted = {name for name in before.prompt_sets if (weights or {}).get(name, 1.0) > 0.0}
    sets = [n for n in sorted(counted) if before.prompt_sets.count(n) >= MIN_PROMPTS]
    apart = [(both.only([name]), rest.only([name]), None) for name in sets]
    return [(both, rest, weights), *(apart if len(counted) > 1 else [])]


def _winner(
    part: Replays, rest: Replays, latencies: Latencies, weights: Weights, draft: str, level: float
) -> tuple[str | None] | None:
    """The draft that wins over a draft at every K, (None,) for plain decoding; None without one."""
    evidence = evidence_of(part, latencies)
    workload = evidence.workload(weights)
    if not enough_prompts(workload.prompt_sets):
        return None
    gains = evidence_of(rest, latencies).speedups(weights)
    best, candidates = max(gains, key=gains.__getitem__), [*evidence.candidates]
    of_draft = np.array([name.draft == draft for name in candidates])
    logs, place = workload.log_speedups.value, candidates.index(best)
    ratios = logs - logs[place] + half_width(workload.variance(place), level)
    if ratios[of_draft].max() < 0.0:
        return (best.draft,)
    speedups = logs + half_width(workload.variance(), level)
    return (None,) if speedups[of_draft].max() < 0.0 else None

"""A sweep or an audition: which draft and K to serve, from generations, traces and round times.

A sweep has one draft and also runs generations: those of one K next to plain decoding, whose price
and replay's rounds give the verdict, or of every K, on which alone it rests. Replay is checked
against them. Without generations the verdict rests on replay. Rankings under every
acceptance rule and memory come from replay in both. A pair that changes greedy texts gets no
verdict.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from harness.analysis.answers import (
    Answered,
    Question,
    answered,
    carried_over,
    explain,
    with_round_tokens,
)
from harness.analysis.caveats import of_setup, timing
from harness.analysis.caveats.prompts import k_at_edge, k_left_out
from harness.analysis.caveats.texts import greedy_texts_differ, routing_ties
from harness.analysis.cells import (
    Gap,
    PredictionError,
    completed,
    latest,
    measured_rows,
    paired_sums,
    prediction_errors,
    steadied,
    timed,
)
from harness.analysis.lossless import distrust, failures, text_checks, without_faulty
from harness.analysis.pairs import evidence_from_pairs, measured_pairs, pairs_of, rounds_as_replayed
from harness.analysis.predicted import (
    Predicted,
    evidence_of,
    gap_of,
    rank,
    replayed_rows,
    synthetic_rows,
)
from harness.analysis.replayed import replay_check
from harness.analysis.round_costs import Latency, latency_table, plain_tokens_apart
from harness.analysis.scored_drafts import ScoredDrafts, scored_drafts
from harness.analysis.setup import (
    Setup,
    asked_drafts,
    draft_memory,
    measured_p_min,
    model_facts,
    price_per_hour,
    run_facts,
    shares_of_sets,
)
from harness.analysis.unstable import impossible, unstable_cells
from harness.analysis.verdict import Candidate, Evidence, evidence_from_trials
from harness.engine_facts.draft_kinds import kind_of
from harness.engine_facts.engines import ENGINES, OWN, drafts_alike, spec_of, with_lines
from harness.records import Cell, Failure, LatencyRow, ResultRow, Source, Trial, grouped, where
from harness.stats.verdict_interval import LOOKS, look_shares
from harness.summary import (
    Answer,
    Caveat,
    Doubt,
    DraftMemory,
    Explanation,
    Leaderboard,
    ReplayCheck,
    StepBound,
    Summary,
    TextCheck,
    Unstable,
    Values,
)
from harness.theory.cost import usd_per_million_tokens
from harness.theory.roofline import shortest_context, step_bounds
from harness.theory.speedup import StepTimes


@dataclass(frozen=True, eq=False)
class PairRun:
    """The data of a sweep or an audition that its verdict rests on."""

    setup: Setup
    drafts: ScoredDrafts
    trials: Sequence[Trial]  # of a sweep, timed; those whose text is not the target's have failed
    checks: Sequence[TextCheck]  # greedy texts compared with plain decoding's
    distrusted: Doubt | None  # why no verdict can rest on these texts
    generated: Sequence[ResultRow]  # of the cells that were measured
    unstable: tuple[Unstable, ...]  # cells that cannot be right
    evidence: Sequence[Evidence]  # by temperature


def pair_run(setup: Setup) -> PairRun:
    """The data of a run; an audition, and a sweep with mode=replay, generated nothing."""
    drafts, trials, checks = scored_drafts(setup), list[Trial](), list[TextCheck]()
    if not setup.replay_only:
        if not setup.synthetic:  # texts are not the target's where acceptance was set
            checks = text_checks(setup.run.trials, setup.run.checks)
        trials = without_faulty(timed(setup.run.trials), checks)
    generated = [] if setup.replay_only else _generated(drafts, trials)
    if setup.replay_only:
        evidence = [each.evidence for each in drafts.by_own_rule]
        if setup.command == "audition" and setup.run.config.get("until") == "decided":
            # Where losers are dropped at looks, the verdict is the last look
            evidence = [replace(each, looks=look_shares(LOOKS)) for each in evidence]
    else:
        measured = {trial.temperature for trial in trials}
        evidence = [
            _evidence_at(drafts, trials, value) for value in setup.temperatures if value in measured
        ]
    unstable = tuple(unstable_cells(generated))
    doubt = distrust(checks)
    return PairRun(setup, drafts, trials, checks, doubt, generated, unstable, evidence)


# ---- generations of a sweep ----------------------------------------------------------------------


def _generated(drafts: ScoredDrafts, trials: Sequence[Trial]) -> list[ResultRow]:
    """With what the acceptance that was set, if any, predicts of the same cells."""
    setup = drafts.setup
    latencies = {at: each[setup.draft] for at, each in drafts.latencies.items() if each}
    times = {temperature: latency.rounds for temperature, latency in latencies.items()}
    rows = measured_rows(trials, model=setup.model, draft=setup.draft, times=times, steady=True)
    rates = setup.run.manifest.synthetic_rates
    if not rates:
        return rows
    return [*rows, *synthetic_rows(rows, completed(latest(trials)), rates, latencies)]


def _evidence_at(drafts: ScoredDrafts, trials: Sequence[Trial], temperature: float) -> Evidence:
    """From replay and the pairs of the chosen K; without one, or a replay, from generations."""
    setup, draft, looks = drafts.setup, drafts.setup.draft, drafts.setup.run.manifest.looks
    latency = drafts.latencies.get(temperature, {}).get(draft)
    times = latency.rounds if latency else None
    k, p_min = looks.k_at(temperature) if looks else None, measured_p_min(setup, temperature) or 0.0
    shares = look_shares(max(1, looks.made_at(temperature))) if looks else ()
    if looks is None or k is None:
        return replace(
            evidence_from_trials(
                trials, draft=draft, temperature=temperature, times=times, steady=True, p_min=p_min
            ),
            looks=shares,
        )
    pairs, candidate = pairs_of(trials, temperature, k), Candidate(draft, k, p_min)
    predicted = drafts.predicted(setup.rule, temperature)
    if latency and predicted and rounds_as_replayed(pairs, predicted.replays, candidate):
        measured = measured_pairs(pairs, predicted, candidate)
        if measured is not None:
            return replace(predicted.evidence, named=candidate, pairs=measured, looks=shares)
    alpha = times.break_even_alpha(k) if times else None
    return replace(evidence_from_pairs(pairs, temperature, candidate, alpha), looks=shares)


def _shown(drafts: ScoredDrafts, predicted: Predicted) -> Predicted:
    """Predictions of each draft and K at one threshold: the measured one, else the fastest."""
    setup = drafts.setup
    p_min = measured_p_min(setup, predicted.replays.temperature)
    measured = [] if p_min is None else [Candidate(setup.draft, k, p_min) for k in setup.ks]
    return predicted.at_one_threshold(setup.weights, measured)


def errors_of(run: PairRun) -> dict[float, PredictionError]:
    """By temperature, how far measured cells that can be right are from what is predicted."""
    draft, cells = run.setup.draft, grouped(latest(run.trials), lambda t: t.cell_key)
    wrong = {(each.prompt_set, each.temperature, each.tokens) for each in run.unstable}
    gaps: dict[Cell, Gap | None] = {}
    for cell, trials in cells.items():
        predicted = run.drafts.predicted(run.setup.rule, cell.temperature)
        name = Candidate(draft, cell.k, measured_p_min(run.setup, cell.temperature) or 0.0)
        if predicted is None or (cell.prompt_set, cell.temperature, cell.k) in wrong:
            continue
        times, plain = predicted.latencies[draft].rounds, cells.get(replace(cell, k=0), [])
        measured = paired_sums(steadied(trials, times), steadied(plain, times))
        replays = predicted.replays.rows([n in measured for n in predicted.replays.names])
        if replays.names and name in replays.candidates:
            replays = replace(replays, candidates={name: replays.candidates[name]})
            gaps[cell] = gap_of(evidence_of(replays, predicted.latencies), measured)
    return prediction_errors(gaps)


def _replay_checks(run: PairRun) -> Iterator[ReplayCheck]:
    by_cell = grouped(run.trials, lambda trial: trial.cell_key)
    for predicted in run.drafts.by_own_rule if run.trials else ():
        replays = _shown(run.drafts, predicted).replays
        for prompt_set in sorted(set(replays.prompt_sets)):
            part = replays.only([prompt_set])
            for candidate in sorted(replays.candidates, key=lambda name: name.k):
                cell = Cell(prompt_set, replays.temperature, candidate.k)
                check = replay_check(cell, by_cell.get(cell, []), part, candidate)
                if check is not None:
                    yield check


# ---- answers -------------------------------------------------------------------------------------


def answered_questions(run: PairRun) -> tuple[Answered, ...]:
    """The questions to decide, by temperature, answered.

    They are of our own loop, or at the times that were given: typed, or another engine's, whose
    question it is then. Of every other engine `_answers` says what carries over. None whose texts,
    or timings, cannot be right has a verdict.
    """
    setup, priced = run.setup, run.setup.priced_by
    source: Source = "replayed" if setup.replay_only else "measured"
    engine, timed_in = None if setup.typed_latency else OWN.name, None
    if priced is not None:
        engine, timed_in = priced.engine.name, priced.run
    asked: list[Question] = []
    for each in run.evidence:
        wrong = None if setup.replay_only else impossible(run.unstable, each.temperature)
        doubt = run.distrusted or wrong
        asked.append(Question(each, setup.rule, source, engine, timed_in, doubt=doubt))
    return tuple(
        replace(entry, answers=tuple(_compared(run.drafts, answer) for answer in entry.answers))
        for entry in answered(setup, asked)
    )


def _compared(drafts: ScoredDrafts, answer: Answer) -> Answer:
    """The answer, undecided where a draft would lead at the pace of another one's minutes.

    A speedup is of the machine as it was; between drafts that were timed at unlike paces it may be
    off by as much as their plain tokens differ.
    """
    latencies = drafts.latencies.get(answer.temperature or 0.0, {})
    draft, k = answer.named
    if not answer.speculates or draft is None or len(latencies) < 2:
        return answer
    by_draft = grouped(answer.candidates, lambda each: each.draft)
    speedups = {name: max(each.speedup for each in ks) for name, ks in by_draft.items()}
    doubtful = {
        pair: gap
        for pair, gap in plain_tokens_apart(latencies).items()
        if draft in pair and all(speedups.get(name, 0.0) * gap > speedups[draft] for name in pair)
    }
    if not doubtful:
        return answer
    slow, fast = max(doubtful, key=doubtful.__getitem__)
    values: Values = {"slow": slow, "slow_s": latencies[slow].rounds.plain_s}
    values |= {"fast": fast, "fast_s": latencies[fast].rounds.plain_s, "draft": draft, "k": k}
    return replace(
        answer,
        decision="undecided",
        reason="drafts_not_compared",
        reason_values={**answer.reason_values, **values},
        chance=None,
        gain=None,
    )


def _answers(run: PairRun, made: Sequence[Answered]) -> Iterator[Answer]:
    """By temperature, those that were decided, then what carries over to other engines."""
    setup, by_rule = run.setup, run.drafts.by_rule
    for entry in made:
        temperature = entry.question.evidence.temperature
        of_loop, own = by_rule.get((setup.rule, temperature)), [*entry.answers]
        if of_loop is not None and not setup.synthetic and not run.distrusted:
            own = [with_round_tokens(answer, of_loop, shares_of_sets(setup)) for answer in own]
        yield from own
        for engine in with_lines():
            if engine != entry.question.engine:
                rule = ENGINES[engine].rule
                assert rule is not None
                same = {"thresholds": ENGINES[engine].stops_early}
                predicted = run.drafts.predicted(rule, temperature, **same)
                yield from _carried_over(run, own, engine, predicted)


def _carried_over(
    run: PairRun, own: Sequence[Answer], engine: str, predicted: Predicted | None
) -> Iterator[Answer]:
    """Answers for an untimed engine; none if it drafts otherwise or acceptance was set."""
    setup = run.setup
    if predicted is None or setup.synthetic or run.distrusted:
        return
    facts, temperature = model_facts(setup), predicted.replays.temperature
    has = {
        name
        for name in predicted.replays.drafts
        if drafts_alike(engine, kind_of(name, facts), temperature)
    }
    for answer in own if has else ():
        made = carried_over(answer, engine, predicted, has, shares_of_sets(setup))
        if setup.priced_by is not None:  # what a round costs on our own loop is not known
            made = replace(made, rounds=tuple(replace(r, own_cost=None) for r in made.rounds))
        yield made


# ---- rankings and rows ---------------------------------------------------------------------------

Errors = Mapping[float, PredictionError]


def leaderboard(drafts: ScoredDrafts, predicted: Predicted, errors: Errors) -> Leaderboard:
    """The drafts by what is predicted; those that were dropped last, by their own prompts."""
    setup, at = drafts.setup, predicted.replays.temperature
    error = errors.get(at)
    board = rank(predicted, setup.weights, seed=setup.seed, error=error)
    rows = [
        replace(row, probability_best=None, dropped=drafts.dropped[name])
        for name, both in drafts.next_to_first(predicted)
        for row in rank(both, setup.weights, error=error).rows
        if row.draft == name
    ]
    rows.sort(key=lambda row: -row.speedup)
    ranked = (replace(row, rank=len(board.rows) + 1 + n) for n, row in enumerate(rows))
    board = replace(board, rows=(*board.rows, *ranked))
    if setup.priced_by is None:
        return board
    return replace(board, engines=(spec_of(setup.priced_by.engine.name).title,))


def _results(run: PairRun, errors: Errors) -> Iterator[ResultRow]:
    yield from run.generated
    for predicted in run.drafts.by_own_rule:
        error = errors.get(predicted.replays.temperature)
        shown = _shown(run.drafts, predicted)
        yield from replayed_rows(shown, model=run.setup.model, error=error)
        for name, both in run.drafts.next_to_first(predicted):
            both = _shown(run.drafts, both)
            rows = replayed_rows(both, model=run.setup.model, error=error)
            yield from (row for row in rows if row.draft == name)


def _explained(run: PairRun, verdict: Answer | None) -> Explanation | None:
    if verdict is None or run.distrusted or verdict.temperature is None:
        return None
    predicted = run.drafts.predicted(run.setup.rule, verdict.temperature)
    draft = verdict.named[0] or run.setup.draft
    return predicted and explain(predicted, verdict, draft, run.setup.weights)


# ---- caveats -------------------------------------------------------------------------------------


def _caveats(
    run: PairRun,
    results: Sequence[ResultRow],
    answers: Sequence[Answer],
    rows: Sequence[LatencyRow],
    errors: Errors,
) -> Iterator[Caveat]:
    setup, latencies = run.setup, run.drafts.latencies
    yield from greedy_texts_differ.of(run.checks)
    yield from routing_ties.of(run.checks)
    if setup.priced_by is not None:
        yield from timing.latency_from.of(setup, setup.priced_by, latencies)
    prompts = None
    if setup.command == "audition":  # by the prompts of the whole workload, not of each cell
        first = next(iter(_first_latencies(run.drafts)), None)
        scored = () if first is None else run.drafts.traces[first]
        prompts = len({(trace.prompt_set, trace.conversation) for trace in scored}) or None
    yield from of_setup(setup, results, prompts_of_all=prompts)
    # Predictions rest on the times of the first draft
    untimed = setup.run.manifest.audition.untimed
    times = [
        latency.round_summary(draft)
        for each in latencies.values()
        for draft, latency in [(n, each[n]) for n in each if n not in untimed][:1]
    ]
    yield from timing.priced_from_steps.of(times, [*_not_timed(run.drafts)])
    yield from timing.launch_bound.of(*_steps(run, answers, rows))
    yield from timing.plain_tokens_unlike.of(latencies, answers)
    yield from timing.predictions_off.of(errors)
    rounds = [each.rounds for by_draft in latencies.values() for each in by_draft.values()]
    beyond = [k for k in setup.ks if not all(each.covers(k) for each in rounds)]
    if beyond:
        yield from k_left_out.of(beyond, "not_timed")
    else:
        yield from k_at_edge.of(setup, answers)


def _steps(
    run: PairRun, answers: Sequence[Answer], rows: Sequence[LatencyRow]
) -> tuple[Sequence[StepBound], StepTimes | None]:
    """The bounds of the steps, as far as a bandwidth tells, and those of the verdict's draft."""
    bandwidth = run.setup.run.manifest.bandwidth
    draft = next((answer.named[0] for answer in answers), None) or run.setup.draft
    latency = _first_latencies(run.drafts).get(draft)
    told = bandwidth is None or bandwidth.plausible
    return shortest_context(step_bounds(rows)) if told else (), latency and latency.steps


def _not_timed(drafts: ScoredDrafts) -> Iterator[Values]:
    """Drafts that lose whatever rounds cost, with the most that each gains at its best K."""
    setup = drafts.setup
    for draft in setup.run.manifest.audition.untimed:
        at, latency = next((at, e[draft]) for at, e in drafts.latencies.items() if draft in e)
        predicted = drafts.predicted_of([draft], setup.rule, at)
        evidence = predicted and predicted.at_least(draft)
        if predicted is None or evidence is None or latency.steps is None:
            continue
        gains = evidence.speedups(setup.weights)
        best = max(gains, key=gains.__getitem__)
        yield {
            "draft": draft,
            "temperature": at,
            "k": best.k,
            "tokens_per_round": predicted.replays.weighted(best, setup.weights).tokens_per_round,
            "step": latency.steps.draft_s / latency.steps.target_s,
            "speedup": gains[best],
        }


# ---- the summary ---------------------------------------------------------------------------------


def _first_latencies(drafts: ScoredDrafts) -> Mapping[str, Latency]:
    return next(iter(drafts.latencies.values()), {})


def analyse_pair(setup: Setup) -> Summary:
    run = pair_run(setup)
    drafts, errors, made = run.drafts, errors_of(run), answered_questions(run)
    results, answers = tuple(_results(run, errors)), tuple(_answers(run, made))
    latencies = latency_table(setup)
    boards = {at: leaderboard(drafts, each, errors) for at, each in drafts.by_rule.items()}
    of_drafts = (pair for by_draft in drafts.latencies.values() for pair in by_draft.items())
    round_times = [latency.round_summary(draft) for draft, latency in of_drafts]
    steps = (latency.summary(draft) for draft, latency in _first_latencies(drafts).items())
    summary = Summary(
        run=run_facts(setup, results),
        answers=answers,
        failures=failures(setup, run.trials),
        caveats=tuple(_caveats(run, results, answers, latencies, errors)),
        results=results,
        latency=latencies,
        steps=tuple(each for each in steps if each is not None),
        # Temperatures that were not timed themselves share the times of another
        round_times=tuple({(each.draft, each.temperature): each for each in round_times}.values()),
        unstable=run.unstable,
        leaderboards=tuple(
            board
            for (rule, _), board in boards.items()
            # Another engine's rounds price what it accepts alone
            if setup.priced_by is None or rule == setup.rule
        ),
        replay_checks=tuple(_replay_checks(run)),
        explanation=_explained(run, made[0].workload if made else None),
        memory=tuple(_memory(drafts)),
        text_checks=tuple(run.checks),
    )
    summary = _with_cost(summary, run)
    return _with_audition(summary, run) if setup.command == "audition" else summary


def _memory(drafts: ScoredDrafts) -> Iterator[DraftMemory]:
    for replays in (each.replays for each in drafts.by_own_rule[:1]):
        longest = max(t.prompt_tokens + len(t.tokens) for t in drafts.traces[replays.drafts[0]])
        names = dict.fromkeys((*replays.drafts, *drafts.dropped))
        yield from draft_memory(drafts.setup, [*names], longest, lookups=replays.lookups)


def _with_cost(summary: Summary, run: PairRun) -> Summary:
    """The summary with what a token costs with plain decoding, where the card has a price."""
    price, answer = price_per_hour(run.setup), summary.headline
    if price is None or answer is None or answer.temperature is None or run.distrusted:
        return summary
    latency = next(iter(run.drafts.latencies.get(answer.temperature, {}).values()), None)
    if latency is None:
        return summary
    plain_usd = usd_per_million_tokens(latency.rounds.baseline_s, price)
    return replace(summary, price_per_hour_usd=price, plain_usd_per_million_tokens=plain_usd)


def _with_audition(summary: Summary, run: PairRun) -> Summary:
    notes = run.setup.run.manifest.audition
    timed = _first_latencies(run.drafts)
    lacking = tuple(name for name in asked_drafts(run.setup) if name not in timed)
    ranked = 0
    if run.drafts.by_own_rule and len(summary.failures) == len(notes.failures):
        # With those that were dropped early, which have their rows too
        board = where(summary.leaderboards, rule=run.setup.rule)[0]
        ranked = len({row.draft for row in board.rows} - {None})
    return replace(
        summary,
        run=replace(summary.run, not_scored=lacking, ranked=ranked),
        ineligible=tuple(Failure(each.draft, each.reason) for each in notes.not_eligible),
    )

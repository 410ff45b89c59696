"""A sweep or an audition: which draft and K to serve, from generations, traces and round times.

A sweep has one draft and also runs generations: those of one K next to plain decoding, whose price
and replay's rounds give the verdict, or of every K, on which alone it rests. Replay is checked
against them. Without generations the verdict rests on replay. Rankings under every
acceptance rule, alpha by category, whole requests and memory come from replay in both. A pair
that changes greedy texts gets no verdict.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from harness.analysis.adaptive import ScoredTexts, adaptive_drafting, replayed_adaptively
from harness.analysis.answers import Answered, Question, answered, carried_over, with_rounds
from harness.analysis.caveats import of_setup, timing
from harness.analysis.caveats.prompts import k_at_edge, k_left_out
from harness.analysis.caveats.texts import greedy_texts_differ, routing_ties
from harness.analysis.cells import completed, latest, measured_positions, measured_rows, timed
from harness.analysis.engine_costs import priced_by
from harness.analysis.explanation import case_of, explain
from harness.analysis.failures import failures
from harness.analysis.latency import (
    LOOKUP_S,
    Latency,
    latency_of_draft,
    latency_table,
    least_rounds,
    typed_latency,
    without_rounds,
)
from harness.analysis.leaderboard import (
    Ranking,
    draft_memory,
    rank,
    with_costs,
    with_speedup,
)
from harness.analysis.lossless import distrust, text_checks, without_faulty
from harness.analysis.pairs import (
    check_of_pairs,
    evidence_from_pairs,
    measured_pairs,
    pairs_of,
    replay_holds,
)
from harness.analysis.predicted import (
    category_alpha,
    evidence_of,
    gap_of,
    replayed_rows,
    synthetic_rows,
)
from harness.analysis.prediction_error import Gap, PredictionError, prediction_errors
from harness.analysis.replayed import (
    Limits,
    Replays,
    decoded,
    replay_check,
    replay_drafts,
    replayed,
)
from harness.analysis.setup import Setup
from harness.analysis.unstable import impossible, outlier_cells, unstable_cells
from harness.analysis.verdict import Candidate, Evidence, evidence_from_trials, least_regret
from harness.config import AUTO_DRAFTS, split_draft
from harness.records import (
    Cell,
    DraftConfidence,
    Failure,
    LatencyRow,
    ResultRow,
    Rule,
    Source,
    TextKey,
    TextTrace,
    Trial,
    UserError,
    grouped,
    where,
)
from harness.serving.drafts import kind_of
from harness.serving.engines import ENGINES, OWN, drafts_alike, spec_of, with_lines
from harness.serving.round_counting import Counting
from harness.stats.jackknife import Variance
from harness.stats.two_phase import LOOKS, look_shares
from harness.storage.manifest import EngineCosts
from harness.summary import (
    AcceptanceByPosition,
    AdaptiveDrafting,
    Answer,
    Caveat,
    Doubt,
    Dropped,
    Explanation,
    Leaderboard,
    OutlierCell,
    ReplayCheck,
    Summary,
    TextCheck,
    Unstable,
    Values,
)
from harness.theory.cost import usd_per_million_tokens
from harness.theory.replay import Replayed
from harness.theory.speedup import StepTimes


def analyse_pair(setup: Setup) -> Summary:
    """Everything a sweep or an audition says, as far as what it stored allows."""
    if setup.command == "audition":
        return Audition(setup).summary()
    return (PairAnalysis if setup.replay_only else MeasuredSweep)(setup).summary()


class PairAnalysis:
    """What replay and round times say of a run's drafts, derived step by step, each step once.

    This is all of a sweep with mode=replay, which runs no speculative generation.

    Attributes:
        drafts: those to predict for.
        dropped: those of them that have scored a part of the texts, since they lost; by name.
        untimed: names of those that lose whatever their rounds cost, which steps price.
        trials: timed generations; those whose text is not the target's have failed.
        checks: greedy texts compared with plain decoding's.
        distrusted: why no verdict can rest on these texts.
    """

    trials: Sequence[Trial] = ()
    checks: Sequence[TextCheck] = ()
    distrusted: Doubt | None = None

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.drafts = [setup.draft]
        self.dropped: Mapping[str, Dropped] = {}
        self.untimed: Sequence[str] = ()
        self.replays, self.ranking = cache(self._replays), cache(self._ranking)

    @cached_property
    def generated(self) -> Sequence[ResultRow]:
        """Rows of results.csv about the cells that were measured."""
        return ()

    @cached_property
    def evidence(self) -> Sequence[Evidence]:
        """What each temperature's verdict rests on."""
        return [ranking.evidence for ranking in self.own_rankings]

    def run_caveats(self) -> Sequence[Caveat]:
        """Those of the configuration, the machine and the rows."""
        return (*of_setup(self.setup, self.results),)

    def not_timed(self) -> Iterator[Values]:
        """Drafts whose rounds were not timed, since they lose whatever these cost."""
        return iter(())

    # ---- what a round costs ----

    @cached_property
    def traces(self) -> dict[str, list[TextTrace]]:
        """The run's traces by draft, in stored order; not of drafts that failed."""
        failed = {entry.draft for entry in self.setup.run.manifest.audition.failures}
        scored = (trace for trace in self.setup.run.traces if trace.draft not in failed)
        return grouped(scored, lambda trace: trace.draft)

    def looks_up(self, draft: str) -> bool:
        """Whether a draft's tokens are looked up, by its traces."""
        return draft in self.traces and self.traces[draft][0].chosen

    @cached_property
    def latencies(self) -> dict[float, dict[str, Latency]]:
        """By temperature, what each draft costs; of the drafts that were timed."""
        return {value: self.latencies_at(value) for value in self.setup.temperatures}

    def latencies_at(self, temperature: float) -> dict[str, Latency]:
        """Those of one temperature."""
        if self.setup.priced_by is not None:
            return dict(self._on_engine(self.setup.priced_by, temperature))
        found = {
            draft: latency_of_draft(self.setup.run, draft, temperature, lookup=self.looks_up(draft))
            for draft in self.drafts
        }
        return {draft: latency for draft, latency in found.items() if latency is not None}

    def _on_engine(self, costs: EngineCosts, temperature: float) -> Iterator[tuple[str, Latency]]:
        """What each draft costs on another engine; not one whose costs there are not known."""
        for draft in self.drafts:
            entry = self.setup.described_draft(draft)
            kind = draft if self.looks_up(draft) else self.setup.kind_of(draft)
            with suppress(UserError):  # which the command refused; a manifest may be edited
                yield draft, priced_by(costs, draft, kind, entry, temperature)

    @property
    def first_latencies(self) -> dict[str, Latency]:
        """Those at the first temperature."""
        return next(iter(self.latencies.values()), {})

    @cached_property
    def latency_rows(self) -> tuple[LatencyRow, ...]:
        """Rows of latency.csv."""
        return latency_table(self.setup)

    @cached_property
    def unstable(self) -> tuple[Unstable, ...]:
        """Steps and cells that cannot be right; a target's verify once, however many drafts."""
        coolest = min(self.latencies, default=None)
        by_draft = {} if coolest is None else self.latencies[coolest]
        entries = (
            replace(entry, draft=draft if entry.kind == "step" else None)
            for draft, latency in by_draft.items()
            for entry in latency.unstable()
        )
        forwards = grouped(
            entries, lambda e: (e.kind, e.tokens, e.context_tokens, e.batch, e.draft)
        )
        return (*(group[0] for group in forwards.values()), *unstable_cells(self.results))

    # ---- replay ----

    @cached_property
    def confidences(self) -> dict[str, dict[TextKey, DraftConfidence]]:
        """By draft and text, how sure it is off the text; none unless drafting may stop early."""
        by_draft = grouped(self.setup.run.confidences, lambda entry: entry.draft)
        return {draft: {each.key: each for each in known} for draft, known in by_draft.items()}

    @property
    def rules(self) -> list[Rule]:
        """The acceptance rules that drafts are replayed by, the verdict's first."""
        accepted_by: list[Rule] = [spec.rule for spec in with_lines().values() if spec.rule]
        return [*dict.fromkeys((self.setup.rule, *accepted_by))]

    def _replays(self, rule: Rule, temperature: float) -> Replays | None:
        """Of the drafts that were scored and timed at a temperature; None where there are none."""
        timed = self.latencies.get(temperature, {})
        ranked = [name for name in timed if name in self.traces and name not in self.dropped]
        return self._replays_of(ranked, rule, temperature)

    def _replays_of(self, drafts: Sequence[str], rule: Rule, temperature: float) -> Replays | None:
        """Some of the drafts, on the prompts that all of these scored."""
        latencies = self.latencies.get(temperature, {})
        # Engines with the other rules stop no drafting early
        adaptive = self.setup.adaptive and rule == self.setup.rule
        if adaptive and not self.confidences:  # those of a repetition penalty are not known
            return None
        traces = {name: self.replayed_texts(name) for name in drafts}
        ks = [k for k in self.setup.ks if all(each.rounds.covers(k) for each in latencies.values())]
        scored = (any(t.temperature == temperature for t in texts) for texts in traces.values())
        if not traces or not ks or not all(scored):
            return None
        counts_of = self._adaptive_counts if adaptive else None
        if self.setup.priced_by is not None:  # as that engine drafts near a text's end
            counts_of = partial(replayed, limits=self.limits(ks))
        return replay_drafts(traces, rule, ks, temperature, counts_of)

    @cached_property
    def prediction_errors(self) -> dict[float, PredictionError]:
        """By temperature, how far the run's own measurements are from what is predicted."""
        return {}

    def _error(self, temperature: float) -> Variance | None:
        """Of every prediction, besides prompts and visits; None where nothing was measured."""
        error = self.prediction_errors.get(temperature)
        return error and error.variance

    def _ranking(self, rule: Rule, temperature: float) -> Ranking | None:
        """The drafts of `replays`, ranked by what is predicted of them."""
        setup, replays = self.setup, self.replays(rule, temperature)
        if replays is None:
            return None
        latencies, error = self.latencies[temperature], self._error(temperature)
        ranking = rank(replays, latencies, setup.weights, seed=setup.seed, error=error)
        baseline_s = latencies[replays.drafts[0]].rounds.baseline_s
        board = with_costs(self._with_dropped(ranking), setup, baseline_s)
        if setup.priced_by is not None:
            board = replace(board, engines=(spec_of(setup.priced_by.engine.name).title,))
        return replace(ranking, leaderboard=board)

    def _next_to_first(self, replays: Replays) -> Iterator[tuple[str, Replays]]:
        """Each draft that was dropped, with the first one of a ranking, on the prompts it has."""
        for name in self.dropped:
            if name in self.latencies[replays.temperature]:
                both = [replays.drafts[0], name]
                found = self._replays_of(both, replays.rule, replays.temperature)
                if found is not None:
                    yield name, found

    def _with_dropped(self, ranking: Ranking) -> Leaderboard:
        """The leaderboard with the drafts that were dropped, by their own prompts, at its end."""
        setup, replays, board = self.setup, ranking.replays, ranking.leaderboard
        latencies, error = self.latencies[replays.temperature], self._error(replays.temperature)
        rows = [
            replace(row, probability_best=None, dropped=self.dropped[name])
            for name, both in self._next_to_first(replays)
            for row in rank(both, latencies, setup.weights, error=error).leaderboard.rows
            if row.draft == name
        ]
        rows.sort(key=lambda row: -row.speedup)
        ranked = (replace(row, rank=len(board.rows) + 1 + n) for n, row in enumerate(rows))
        return replace(board, rows=(*board.rows, *ranked))

    @property
    def rankings(self) -> dict[tuple[Rule, float], Ranking]:
        """By rule, the verdict's first, and temperature."""
        return {
            (rule, temperature): ranking
            for temperature in self.latencies
            for rule in self.rules
            if (ranking := self.ranking(rule, temperature)) is not None
        }

    def replayed_texts(self, draft: str) -> Sequence[TextTrace]:
        """A draft's texts, as far as the engine's rounds emit them."""
        counting = self._counting
        if counting is None:
            return self.traces[draft]
        emitted = (decoded(trace, counting) for trace in self.traces[draft])
        return [trace for trace in emitted if trace is not None]

    @property
    def _counting(self) -> Counting | None:
        """How the engine counts that prices the drafts; None for our own loop."""
        engine = self.setup.priced_by and self.setup.priced_by.engine
        if engine is None or engine.first_position is None or engine.shortens_last_draft is None:
            return None
        return Counting(engine.first_position, engine.shortens_last_draft)

    def limits(self, ks: Sequence[int]) -> Limits | None:
        """What an engine that prices the drafts drafts at most; None for our own loop."""
        counting, asked = self._counting, self.setup.new_tokens or 0
        if counting is None:
            return None

        def limits(trace: TextTrace) -> NDArray[np.intp]:
            emitted = len(trace.tokens) + counting.first_position
            budget = emitted if trace.stop_reason == "budget" else max(asked, emitted)
            return counting.proposed(max(ks), budget)

        return limits

    def _adaptive_counts(
        self, texts: Sequence[TextTrace], rule: Rule, ks: Sequence[int]
    ) -> dict[int, Replayed]:
        """A draft's texts replayed at the threshold that the run drafted with."""
        scored = ScoredTexts(texts, self.confidences[texts[0].draft], rule)
        threshold = self.setup.stop_threshold or 0.0
        return {k: replayed_adaptively(scored, k, threshold) for k in ks}

    @property
    def own_rankings(self) -> list[Ranking]:
        """The rankings under the run's own rule, which is the verdict's, by temperature."""
        rankings = (self.ranking(self.setup.rule, temperature) for temperature in self.latencies)
        return [ranking for ranking in rankings if ranking is not None]

    @cached_property
    def results(self) -> list[ResultRow]:
        """Rows of results.csv: measured ones, and what is predicted of each cell."""
        rows = [*self.generated]
        for ranking in self.own_rankings:
            rows += self._replayed_rows(ranking.replays)
            for name, both in self._next_to_first(ranking.replays):
                rows += [row for row in self._replayed_rows(both) if row.draft == name]
        return rows

    def _replayed_rows(self, replays: Replays) -> list[ResultRow]:
        at = replays.temperature
        return replayed_rows(
            replays, self.latencies[at], model=self.setup.model, error=self._error(at)
        )

    def _texts(self, ranking: Ranking) -> dict[str, list[TextTrace]]:
        """By draft, the texts that a ranking replays."""
        at = ranking.replays.temperature
        return {
            draft: where(self.traces[draft], temperature=at) for draft in ranking.replays.drafts
        }

    def adaptive_drafting(self) -> Iterator[AdaptiveDrafting]:
        """What thresholds would bring to the drafts whose confidences are stored."""
        for ranking in self.own_rankings:
            replays, setup = ranking.replays, self.setup
            for draft, texts in self._texts(ranking).items():
                known = self.confidences.get(draft, {})
                scored = ScoredTexts([t for t in texts if t.key in known], known, replays.rule)
                if not scored.traces:
                    continue
                latency = self.latencies[replays.temperature][draft]
                made = adaptive_drafting(
                    scored, replays.ks, latency, setup.weights, seed=setup.seed
                )
                answer = self._replayed_answer(made.temperature)
                if answer and answer.named == (draft, made.fixed.k):
                    made = replace(made, fixed=with_speedup(made.fixed, answer))
                yield made

    # ---- answers ----

    @cached_property
    def questions(self) -> tuple[Question, ...]:
        """What is to be decided, by temperature: for our own loop, or at the times that were given.

        These are typed, or another engine's, whose question it is then. Of every other engine
        `answers` says what carries over.
        """
        setup, priced = self.setup, self.setup.priced_by
        engine = None if setup.typed_latency else OWN.name
        source: Source = "replayed" if setup.replay_only else "measured"
        asked = (Question(evidence, setup.rule, source, engine) for evidence in self.evidence)
        if priced is None:
            return tuple(asked)
        return tuple(replace(each, engine=priced.engine.name, run=priced.run) for each in asked)

    @cached_property
    def answered(self) -> tuple[Answered, ...]:
        """Every question decided."""
        weights, seed = self.setup.shares, self.setup.seed
        return answered(self.questions, self._doubt, weights=weights, seed=seed)

    def _doubt(self, question: Question) -> Doubt | None:
        """Why a question has no verdict: its texts, or its timings, cannot be right."""
        if self.distrusted is None and question.source == "measured":
            return impossible(self.unstable, question.evidence.temperature)
        return self.distrusted

    @cached_property
    def answers(self) -> tuple[Answer, ...]:
        """By temperature, those that were decided, then what carries over to other engines."""
        made: list[Answer] = []
        by_temperature = grouped(self.answered, lambda each: each.question.evidence.temperature)
        for temperature, entries in by_temperature.items():
            (entry,) = entries
            own = [self._with_rounds(each) for each in (entry.workload, *entry.sets)]
            made += own
            for engine in with_lines():
                if engine != entry.question.engine:
                    made += self._carried_over(own, engine, temperature)
        return tuple(made)

    def _with_rounds(self, answer: Answer) -> Answer:
        ranking = self.rankings.get((self.setup.rule, answer.temperature or 0.0))
        if ranking is None or self.setup.synthetic or self.distrusted:
            return answer
        return with_rounds(answer, ranking, self.setup.shares)

    def _carried_over(
        self, own: Sequence[Answer], engine: str, temperature: float
    ) -> Iterator[Answer]:
        """Of every prompt set; nothing of an engine that has none of the drafts, or drafts else.

        Nor where acceptance was set, which is no property of the models.
        """
        setup, spec = self.setup, ENGINES[engine]
        assert spec.rule is not None
        ranking = self.rankings.get((spec.rule, temperature))
        stops = setup.adaptive and spec.rule == setup.rule and not spec.stops_early
        if ranking is None or stops or setup.synthetic or self.distrusted:
            return
        facts, drafts = setup.model_facts, ranking.replays.drafts
        has = {name for name in drafts if drafts_alike(engine, kind_of(name, facts), temperature)}
        for answer in own if has else ():
            made = carried_over(answer, engine, ranking, has, setup.shares)
            if setup.priced_by is not None:  # what a round costs on our own loop is not known
                made = replace(made, rounds=tuple(replace(r, own_cost=None) for r in made.rounds))
            yield made

    def _replayed_answer(self, temperature: float) -> Answer | None:
        """The answer for the whole workload, where it is a prediction that has a number."""
        found = (each.workload for each in self.answered)
        answer = next((each for each in found if each.temperature == temperature), None)
        predicted = answer and answer.source == "replayed" and answer.speedup is not None
        return answer if predicted else None

    def _as_answered(self, board: Leaderboard) -> Leaderboard:
        """A ranking in which the draft and K of the answer have the number that the answer has.

        Where all rules rank alike, so do their answers. Where that number is below those that are
        ranked behind it, or has them before it, the ranking stays as these prompts have it.
        """
        own = self.ranking(self.setup.rule, board.temperature)
        answer = self._replayed_answer(board.temperature)
        if answer is None or own is None or own.leaderboard.rows != board.rows:
            return board
        rows = [
            with_speedup(row, answer) if (row.draft, row.k) == answer.named else row
            for row in board.rows
        ]
        in_order = all(one.speedup >= other.speedup for one, other in pairwise(rows))
        return replace(board, rows=tuple(rows)) if in_order else board

    def explained(self, verdict: Answer | None) -> Explanation | None:
        """Why a verdict is what it is.

        Of the draft and K that its number is of; none of a look-up, which has no draft step.
        """
        if verdict is None or self.distrusted or verdict.temperature is None:
            return None
        draft = verdict.named[0] or self.setup.draft
        latency = self.latencies.get(verdict.temperature, {}).get(draft)
        if latency is None or self.looks_up(draft):
            return None
        measured = self.setup.run.manifest.bandwidth
        floors = self.latency_rows if measured is None or measured.plausible else ()
        case = case_of(verdict, draft, self.results, latency, floors, weights=self.setup.weights)
        return case and explain(case, verdict.decision, verdict.temperature)

    # ---- the summary ----

    def all_caveats(self, outliers: Sequence[OutlierCell]) -> Iterator[Caveat]:
        """What to mind: of the texts, the run, the timings, and the K that are left out."""
        yield from greedy_texts_differ.of(self.checks)
        yield from routing_ties.of(self.checks)
        if self.setup.priced_by is not None:
            yield from timing.latency_from.of(self.setup, self.setup.priced_by, self.latencies)
        yield from self.run_caveats()
        # Predictions rest on the times of the first draft
        times = {
            at: latency.round_summary(draft)
            for at, each in self.latencies.items()
            for draft, latency in [(n, each[n]) for n in each if n not in self.untimed][:1]
        }
        yield from timing.outlier_generations.of(outliers)
        yield from timing.priced_from_steps.of([*times.values()], [*self.not_timed()])
        yield from timing.plain_tokens_unlike.of(self.latencies)
        yield from timing.predictions_off.of(self.prediction_errors)
        rounds = [each.rounds for by_draft in self.latencies.values() for each in by_draft.values()]
        beyond = [k for k in self.setup.ks if not all(each.covers(k) for each in rounds)]
        if beyond:
            yield from k_left_out.of(beyond, "not_timed")
        else:
            yield from k_at_edge.of(self.setup, self.answers)

    def positions(self) -> Iterator[AcceptanceByPosition]:
        """Acceptance by position: measured, and replayed of each draft at its best K."""
        yield from measured_positions(self.setup.draft, self.trials, self.setup.weights)
        for ranking in self.own_rankings:
            at = ranking.replays.temperature
            for name in ranking.best:
                counts = ranking.replays.weighted(name, self.setup.weights)
                shares = counts.acceptance_by_position
                yield AcceptanceByPosition(name.draft, "all", at, name.k, "replayed", shares)

    def summary(self) -> Summary:
        """Everything that the run says."""
        setup = self.setup
        own = self.answered[0].workload if self.answered else None
        outliers = outlier_cells(self.trials)
        of_drafts = (pair for by_draft in self.latencies.values() for pair in by_draft.items())
        round_times = [latency.round_summary(draft) for draft, latency in of_drafts]
        steps = (latency.summary(draft) for draft, latency in self.first_latencies.items())
        summary = Summary(
            run=setup.facts(self.results),
            answers=self.answers,
            failures=failures(setup, self.trials),
            caveats=tuple(self.all_caveats(outliers)),
            results=tuple(self.results),
            latency=self.latency_rows,
            steps=tuple(each for each in steps if each is not None),
            # Temperatures that were not timed themselves share the times of another
            round_times=tuple(
                {(each.draft, each.temperature): each for each in round_times}.values()
            ),
            unstable=self.unstable,
            outlier_cells=outliers,
            leaderboards=tuple(
                self._as_answered(ranking.leaderboard)
                # Another engine's rounds price what it accepts alone
                for ranking in (self.own_rankings if setup.priced_by else self.rankings.values())
            ),
            least_regret=tuple(
                row
                for evidence in (() if self.distrusted else self.evidence)
                if (row := least_regret(evidence, setup.weights)) is not None
            ),
            acceptance_by_position=tuple(self.positions()),
            category_alpha=tuple(
                row for ranking in self.own_rankings for row in category_alpha(ranking.replays)
            ),
            adaptive=tuple(self.adaptive_drafting()),
            explanation=self.explained(own),
            text_checks=tuple(self.checks),
        )
        if self.own_rankings:
            summary = self._with_memory(summary, self.own_rankings[0])
        return self._with_cost(summary)

    def _with_memory(self, summary: Summary, ranking: Ranking) -> Summary:
        """The summary with the memory that drafts use."""
        replays = ranking.replays
        longest = max(t.prompt_tokens + len(t.tokens) for t in self.traces[replays.drafts[0]])
        return replace(
            summary,
            memory=draft_memory(self.setup, replays.drafts, longest, lookups=replays.lookups),
        )

    def _with_cost(self, summary: Summary) -> Summary:
        """The summary with what a token costs with plain decoding, where the card has a price."""
        price, answer = self.setup.price_per_hour, summary.headline
        if price is None or answer is None or answer.temperature is None or self.distrusted:
            return summary
        latency = next(iter(self.latencies.get(answer.temperature, {}).values()), None)
        if latency is None:
            return summary
        plain_usd = usd_per_million_tokens(latency.rounds.baseline_s, price)
        return replace(summary, price_per_hour_usd=price, plain_usd_per_million_tokens=plain_usd)


class MeasuredSweep(PairAnalysis):
    """A sweep that ran generations: its verdicts rest on them, and they check replay."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        if not setup.synthetic:  # texts are not the target's where acceptance was set
            self.checks = text_checks(setup.run.trials, setup.run.checks)
        self.trials = without_faulty(timed(setup.run.trials), self.checks)
        self.distrusted = distrust(self.checks)

    @property
    def latency_of_draft(self) -> dict[float, Latency]:
        """By temperature, of those at which the draft was timed."""
        return {at: each[self.setup.draft] for at, each in self.latencies.items() if each}

    @cached_property
    def generated(self) -> Sequence[ResultRow]:
        """With what the acceptance that was set, if any, predicts of the same cells."""
        setup, latencies = self.setup, self.latency_of_draft
        times = {temperature: latency.rounds for temperature, latency in latencies.items()}
        rows = measured_rows(self.trials, model=setup.model, draft=setup.draft, times=times)
        rates = setup.run.manifest.synthetic_rates
        if not rates or setup.adaptive:  # a round of adaptive drafting has no fixed length
            return rows
        return [*rows, *synthetic_rows(rows, completed(latest(self.trials)), rates, latencies)]

    @cached_property
    def prediction_errors(self) -> dict[float, PredictionError]:
        """By every measured cell that can be right and is predicted."""
        draft, cells = self.setup.draft, grouped(latest(self.trials), lambda t: t.cell_key)
        unstable = unstable_cells(self.generated)
        wrong = {(each.prompt_set, each.temperature, each.tokens) for each in unstable}
        gaps: dict[Cell, Gap | None] = {}
        for cell, trials in cells.items():
            replays = self.replays(self.setup.rule, cell.temperature)
            where = (cell.prompt_set, cell.temperature, cell.k)
            if replays and Candidate(draft, cell.k) in replays.candidates and where not in wrong:
                latency = self.latencies[cell.temperature][draft]
                plain = cells.get(replace(cell, k=0), [])
                gaps[cell] = gap_of(cell, trials, plain, replays, draft, latency)
        return prediction_errors(gaps)

    @cached_property
    def evidence(self) -> Sequence[Evidence]:
        """From generations, at the temperatures that have some."""
        measured = {trial.temperature for trial in self.trials}
        return [self._evidence_at(value) for value in self.setup.temperatures if value in measured]

    def _evidence_at(self, temperature: float) -> Evidence:
        """From replay and the pairs of the chosen K; without one, or a replay, from generations."""
        draft, looks = self.setup.draft, self.setup.run.manifest.looks
        latency = self.latency_of_draft.get(temperature)
        times = latency.rounds if latency else None
        k = looks.k_at(temperature) if looks else None
        if looks is None or k is None:
            return evidence_from_trials(
                self.trials, draft=draft, temperature=temperature, times=times
            )
        pairs, candidate = pairs_of(self.trials, temperature, k), Candidate(draft, k)
        ranking = self.ranking(self.setup.rule, temperature)
        if latency and ranking and replay_holds(self._check_of_pairs(temperature, k)):
            shares = look_shares(max(1, looks.made_at(temperature)))
            measured = measured_pairs(pairs, ranking.replays, latency, candidate, shares)
            if measured is not None:
                return replace(ranking.evidence, pairs=measured)
        alpha = times.break_even_alpha(k) if times else None
        return evidence_from_pairs(pairs, temperature, candidate, alpha)

    def _check_of_pairs(self, temperature: float, k: int) -> ReplayCheck | None:
        ranking = self.ranking(self.setup.rule, temperature)
        if ranking is None:
            return None
        pairs = pairs_of(self.trials, temperature, k)
        return check_of_pairs(pairs, ranking.replays, Candidate(self.setup.draft, k))

    def summary(self) -> Summary:
        """With replayed next to measured tokens per round, cell by cell."""
        return replace(super().summary(), replay_checks=tuple(self._replay_checks()))

    def _replay_checks(self) -> Iterator[ReplayCheck]:
        by_cell = grouped(self.trials, lambda trial: trial.cell_key)
        for ranking in self.own_rankings:
            replays = ranking.replays
            for prompt_set in sorted(set(replays.prompt_sets)):
                part = replays.only([prompt_set])
                for k in replays.ks:
                    cell = Cell(prompt_set, replays.temperature, k)
                    candidate = Candidate(self.setup.draft, k)
                    check = replay_check(cell, by_cell.get(cell, []), part, candidate)
                    if check is not None:
                        yield check


class Audition(PairAnalysis):
    """Several drafts, ranked by replay at times that were measured, typed in or another run's."""

    def __init__(self, setup: Setup, traces: Mapping[str, list[TextTrace]] | None = None) -> None:
        """Of a run; `traces` by draft stand for those that are stored."""
        super().__init__(setup)
        if traces is not None:
            self.traces = {**traces}
        self.drafts = list(self.traces)
        dropped = setup.run.manifest.audition.dropped
        self.dropped = {name: dropped[name] for name in self.traces if name in dropped}
        self.untimed = setup.run.manifest.audition.untimed

    @cached_property
    def evidence(self) -> Sequence[Evidence]:
        """Where losers are dropped at looks, the verdict is the last look."""
        looks = look_shares(LOOKS) if self.setup.run.config.get("until") == "decided" else ()
        return [replace(ranking.evidence, looks=looks) for ranking in self.own_rankings]

    def latencies_at(self, temperature: float) -> dict[str, Latency]:
        """Speedups of drafts that were timed apart are over the others' plain token.

        Next to its own plain token, a head whose target ran eagerly would be compared with a
        baseline that nobody serves, and with drafts that are compared with another one.
        """
        if self.setup.typed_latency:
            typed = {draft: self._typed(draft) for draft in self.drafts}
            return {draft: latency for draft, latency in typed.items() if latency is not None}
        latencies, apart = super().latencies_at(temperature), self.setup.timed_apart
        for name in {*latencies} & {*self.untimed}:
            latencies[name] = without_rounds(latencies[name])
        first = next((draft for draft in latencies if draft not in apart), None)
        if first is not None:
            plain_s = latencies[first].rounds.plain_s
            for name in apart & set(latencies):
                rounds = replace(latencies[name].rounds, other_plain_s=plain_s)
                latencies[name] = replace(latencies[name], rounds=rounds)
        return latencies

    def _typed(self, draft: str) -> Latency | None:
        """From the step times in the configuration; None where it has none of the draft."""
        typed, lookup = self.setup.conf("latency"), self.looks_up(draft)
        draft_ms = typed.get("draft_ms")
        if isinstance(draft_ms, Mapping):
            draft_ms = draft_ms.get(draft)
        elif lookup:
            draft_ms = LOOKUP_S * 1e3
        if draft_ms is None:
            return None
        verify = tuple(value / 1e3 for value in typed.get("verify_ms") or ())
        times = StepTimes(draft_ms / 1e3, typed["target_ms"] / 1e3, verify)
        return typed_latency(times, max(self.setup.ks, default=0), lookup=lookup)

    def run_caveats(self) -> Sequence[Caveat]:
        """By the prompts of the whole workload, not of each cell."""
        first = next(iter(self.first_latencies), None)
        scored = () if first is None else self.traces[first]
        prompts = len({(trace.prompt_set, trace.conversation) for trace in scored})
        return (*of_setup(self.setup, self.results, prompts_of_all=prompts or None),)

    def not_timed(self) -> Iterator[Values]:
        """With what each can gain at most, at its best K."""
        for draft in self.untimed:
            at, latency = next(((at, e[draft]) for at, e in self.latencies.items() if draft in e))
            replays = self._replays_of([draft], self.setup.rule, at)
            if replays is None or latency.steps is None:
                continue
            least = Latency(least_rounds(latency.steps, max(replays.ks)))
            gains = evidence_of(replays, {draft: least}).speedups(self.setup.weights)
            best = max(gains, key=gains.__getitem__)
            tokens = replays.weighted(best, self.setup.weights).tokens_per_round
            yield {
                "draft": draft,
                "temperature": at,
                "k": best.k,
                "tokens_per_round": tokens,
                "step": latency.steps.draft_s / latency.steps.target_s,
                "speedup": gains[best],
            }

    def summary(self) -> Summary:
        """With the drafts that the ranking lacks, and what making the texts took."""
        summary, notes = super().summary(), self.setup.run.manifest.audition
        entries: Sequence[str] = self.setup.run.config.get("drafts") or ()
        names = [split_draft(entry).name for entry in entries if entry != AUTO_DRAFTS]
        lacking = tuple(name for name in names if name not in self.first_latencies)
        ranked = 0
        if self.own_rankings and len(summary.failures) == len(notes.failures):
            # With those that were dropped early, which have their rows too
            ranked = len({row.draft for row in self.own_rankings[0].leaderboard.rows} - {None})
        return replace(
            summary,
            run=replace(summary.run, not_scored=lacking, ranked=ranked),
            ineligible=tuple(Failure(each.draft, each.reason) for each in notes.not_eligible),
            generation_s=notes.costs.generation_s,
            scoring_s=notes.costs.scoring_s,
        )

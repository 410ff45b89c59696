"""A sweep or an audition: which draft and K to serve, from generations, traces and round times.

A sweep has one draft and also runs generations. Where generations ran the verdict rests on them,
and replay is checked against them; else the verdict rests on replay. Rankings under every
acceptance rule, alpha by category, whole requests and memory come from replay in both. A pair
that changes greedy texts gets no verdict.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from harness.analysis.adaptive import ScoredTexts, adaptive_drafting, replayed_adaptively
from harness.analysis.answers import Answered, Question, answered, questions
from harness.analysis.caveats import caveats, failures, greedy_texts_differ, of_the_timings
from harness.analysis.cells import (
    completed,
    latest,
    measured_positions,
    measured_rows,
)
from harness.analysis.explanation import Case, case_of, explain, rules_of_thumb
from harness.analysis.latency import (
    LOOKUP_S,
    Latency,
    latency_of_draft,
    latency_table,
    typed_latency,
)
from harness.analysis.leaderboard import Ranking, draft_memory, rank, with_costs
from harness.analysis.lengths import length_alpha
from harness.analysis.lossless import distrust, text_checks, without_faulty
from harness.analysis.predicted import (
    category_alpha,
    category_k,
    replayed_rows,
    request_summary,
    synthetic_rows,
)
from harness.analysis.replayed import replay_check, replay_drafts
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
    TextKey,
    TextTrace,
    Trial,
    grouped,
)
from harness.serving.drafts import kind_of
from harness.serving.engines import drafts_alike, with_lines
from harness.summary import (
    AcceptanceByPosition,
    AdaptiveDrafting,
    Caveat,
    Doubt,
    DraftMemory,
    Explanation,
    LengthAlpha,
    OutlierCell,
    ReplayCheck,
    RequestSummary,
    RoundSummary,
    RuleOfThumb,
    Summary,
    TextCheck,
    Unstable,
    Verdict,
)
from harness.theory.cost import usd_per_million_tokens
from harness.theory.replay import Replayed
from harness.theory.speedup import RoundTimes, StepTimes


def analyse_pair(setup: Setup) -> Summary:
    """Everything a sweep or an audition says, as far as what it stored allows."""
    pair = PairAnalysis(setup)
    explanation, rules = pair.explained()
    notes = setup.run.manifest.audition
    summary = Summary(
        run=replace(setup.facts(pair.results), not_scored=tuple(pair.not_scored())),
        verdict=pair.verdict,
        per_temperature=tuple(whole_workload for whole_workload, _ in pair.verdicts),
        per_prompt_set=tuple(verdict for _, sets in pair.verdicts for verdict in sets),
        answers=tuple(answer for entry in pair.answered for answer in entry.answers()),
        failures=failures(setup, pair.trials),
        caveats=(
            *greedy_texts_differ(pair.checks),
            *caveats(
                setup,
                pair.results,
                () if setup.command == "audition" else setup.run.timings,
                prompts=pair.audition_prompts,
            ),
            *of_the_timings(pair.unstable, pair.outlier_cells, pair.times_of_first_draft),
            *pair.k_not_timed(),
        ),
        results=tuple(pair.results),
        latency=pair.latency,
        steps=tuple(
            steps
            for draft, latency in pair.first_latencies.items()
            if (steps := latency.summary(draft)) is not None
        ),
        round_times=pair.round_times,
        unstable=pair.unstable,
        outlier_cells=pair.outlier_cells,
        leaderboards=tuple(ranking.leaderboard for ranking in pair.rankings.values()),
        least_regret=tuple(
            row
            for evidence in (() if pair.texts_differ else pair.evidence)
            if (row := least_regret(evidence, setup.weights)) is not None
        ),
        acceptance_by_position=(
            *measured_positions(setup.draft, pair.trials, setup.weights),
            *pair.positions(),
        ),
        category_alpha=tuple(
            row for ranking in pair.rankings_of_run_rule for row in category_alpha(ranking.replays)
        ),
        length_alpha=tuple(pair.length_alpha()),
        adaptive=tuple(pair.adaptive_drafting()),
        replay_checks=tuple(pair.replay_checks()),
        explanation=explanation,
        rules_of_thumb=rules,
        request=pair.request(),
        memory=pair.memory(),
        ineligible=tuple(Failure(each.draft, each.reason) for each in notes.not_eligible),
        generation_s=notes.costs.generation_s,
        scoring_s=notes.costs.scoring_s,
        text_checks=tuple(pair.checks),
    )
    return pair.with_cost(summary)


@dataclass(frozen=True)
class PairAnalysis:
    """A run's inputs, derived step by step; each is computed once."""

    setup: Setup

    @cached_property
    def checks(self) -> list[TextCheck]:
        """Greedy texts compared with plain decoding's; none where acceptance was set."""
        if self.setup.synthetic or self.setup.replay_only:
            return []
        return text_checks(self.setup.run.trials, self.setup.run.checks)

    @property
    def texts_differ(self) -> bool:
        """Whether speculation changed a text, or may have."""
        return distrust(self.checks) is not None

    @cached_property
    def trials(self) -> Sequence[Trial]:
        """Timed generations; those whose text is not the target's have failed."""
        if self.setup.replay_only:
            return ()
        return without_faulty(self.setup.run.trials, self.checks)

    @cached_property
    def latency(self) -> tuple[LatencyRow, ...]:
        """Rows of latency.csv."""
        return latency_table(self.setup)

    @cached_property
    def traces(self) -> dict[str, list[TextTrace]]:
        """The run's traces by draft, in stored order; not of drafts that failed."""
        failed = {entry.draft for entry in self.setup.run.manifest.audition.failures}
        return grouped(
            (trace for trace in self.setup.run.traces if trace.draft not in failed),
            lambda trace: trace.draft,
        )

    @cached_property
    def latencies(self) -> dict[float, dict[str, Latency]]:
        """By temperature, what each draft costs; of the drafts that were timed."""
        drafts = [self.setup.draft] if self.setup.command == "sweep" else list(self.traces)
        return {
            temperature: self._on_one_baseline(
                {
                    draft: latency
                    for draft in drafts
                    if (latency := self._latency(draft, temperature)) is not None
                }
            )
            for temperature in self.setup.temperatures
        }

    def _on_one_baseline(self, latencies: dict[str, Latency]) -> dict[str, Latency]:
        """The same seconds; speedups of drafts that were timed apart are over the others' token.

        Next to its own plain token, a head whose target ran eagerly would be compared with a
        baseline that nobody serves, and with drafts that are compared with another one.
        """
        apart = self.setup.timed_apart
        first = next((draft for draft in latencies if draft not in apart), None)
        if first is None:
            return latencies
        plain_s = latencies[first].rounds.plain_s
        return {
            name: replace(latency, rounds=replace(latency.rounds, other_plain_s=plain_s))
            if name in apart
            else latency
            for name, latency in latencies.items()
        }

    def _latency(self, draft: str, temperature: float) -> Latency | None:
        """From the configuration if target_ms is given, otherwise timed."""
        traces = self.traces.get(draft)
        lookup = traces is not None and traces[0].chosen
        if not self.setup.typed_latency:
            return latency_of_draft(self.setup.run, draft, temperature, lookup=lookup)
        typed = self.setup.conf("latency")
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

    @property
    def first_latencies(self) -> dict[str, Latency]:
        """Those at the first temperature."""
        return next(iter(self.latencies.values()), {})

    @property
    def round_times(self) -> tuple[RoundSummary, ...]:
        """R(0) and R(K) of each draft, at each temperature where rounds were timed."""
        timed = (pair for by_draft in self.latencies.values() for pair in by_draft.items())
        made = (latency.round_summary(draft) for draft, latency in timed)
        return tuple({(entry.draft, entry.temperature): entry for entry in made}.values())

    @property
    def times_of_first_draft(self) -> dict[float, RoundSummary]:
        """By temperature, the round times of the first draft: where predictions are from."""
        first = {at: next(iter(each.items())) for at, each in self.latencies.items() if each}
        return {at: latency.round_summary(draft) for at, (draft, latency) in first.items()}

    @cached_property
    def unstable(self) -> tuple[Unstable, ...]:
        """Steps and cells that cannot be right; a target's forward once, however many drafts."""
        coolest = min(self.latencies, default=None)
        by_draft = {} if coolest is None else self.latencies[coolest]
        entries = (entry for latency in by_draft.values() for entry in latency.unstable())
        forwards = grouped(entries, lambda e: (e.kind, e.tokens, e.context_tokens, e.batch))
        first = (group[0] for group in forwards.values())
        return (*first, *unstable_cells(self.results))

    @cached_property
    def outlier_cells(self) -> tuple[OutlierCell, ...]:
        """Measured cells whose speedup a few generations decide."""
        return outlier_cells(self.trials)

    @property
    def latencies_of_draft(self) -> dict[float, Latency]:
        """By temperature, what a sweep's draft costs."""
        return {
            temperature: by_draft[self.setup.draft]
            for temperature, by_draft in self.latencies.items()
            if self.setup.draft in by_draft
        }

    @property
    def times(self) -> dict[float, RoundTimes]:
        """A sweep's R by temperature."""
        return {value: latency.rounds for value, latency in self.latencies_of_draft.items()}

    def k_not_timed(self) -> Iterator[Caveat]:
        """The K that are asked for and left out, since they are beyond some draft's times."""
        rounds = [each.rounds for by_draft in self.latencies.values() for each in by_draft.values()]
        beyond = [k for k in self.setup.ks if not all(each.covers(k) for each in rounds)]
        if beyond:
            yield Caveat("k_not_timed", {"ks": ", ".join(map(str, beyond))})

    @property
    def audition_prompts(self) -> int | None:
        """How many prompts an audition's drafts were scored on."""
        if self.setup.command != "audition" or not self.first_latencies:
            return None
        traces = self.traces[next(iter(self.first_latencies))]
        return len({(t.prompt_set, t.conversation) for t in traces})

    @cached_property
    def rankings(self) -> dict[tuple[Rule, float], Ranking]:
        """By rule, the verdict's first, and temperature; of drafts that were scored and timed."""
        accepted_by: list[Rule] = [spec.rule for spec in with_lines().values() if spec.rule]
        rules: list[Rule] = [*dict.fromkeys((self.setup.rule, *accepted_by))]
        # Engines with the other rules stop no drafting early
        adaptive = self.setup.rule if self.setup.adaptive else None
        if adaptive and not self.confidences:  # those of a repetition penalty are not known
            rules = rules[1:]
        rankings: dict[tuple[Rule, float], Ranking] = {}
        for temperature, latencies in self.latencies.items():
            traces = {name: self.traces[name] for name in latencies if name in self.traces}
            covered = [latency.rounds.covers for latency in latencies.values()]
            ks = [k for k in self.setup.ks if all(covers(k) for covers in covered)]
            scored_here = (
                any(t.temperature == temperature for t in scored) for scored in traces.values()
            )
            if not traces or not ks or not all(scored_here):
                continue
            for rule in rules:
                counts_of = self._adaptive_counts if rule == adaptive else None
                replays = replay_drafts(traces, rule, ks, temperature, counts_of)
                ranking = rank(replays, latencies, self.setup.weights, seed=self.setup.seed)
                baseline_s = latencies[replays.drafts[0]].rounds.baseline_s
                board = with_costs(ranking.leaderboard, self.setup, baseline_s)
                rankings[rule, temperature] = replace(ranking, leaderboard=board)
        return rankings

    @cached_property
    def confidences(self) -> dict[str, dict[TextKey, DraftConfidence]]:
        """By draft and text, how sure it is off the text; none unless drafting may stop early."""
        by_draft = grouped(self.setup.run.confidences, lambda entry: entry.draft)
        return {draft: {each.key: each for each in known} for draft, known in by_draft.items()}

    def _adaptive_counts(
        self, texts: Sequence[TextTrace], rule: Rule, ks: Sequence[int]
    ) -> dict[int, Replayed]:
        """A draft's texts replayed at the threshold that the run drafted with."""
        scored = ScoredTexts(texts, self.confidences[texts[0].draft], rule)
        threshold = self.setup.stop_threshold or 0.0
        return {k: replayed_adaptively(scored, k, threshold) for k in ks}

    @property
    def rankings_of_run_rule(self) -> list[Ranking]:
        """The rankings under the verdict's rule, by temperature."""
        return [ranking for (rule, _), ranking in self.rankings.items() if rule == self.setup.rule]

    @cached_property
    def results(self) -> list[ResultRow]:
        """Rows of results.csv: measured ones, and what is predicted of each cell."""
        setup = self.setup
        measured = measured_rows(
            self.trials, model=setup.model, draft=setup.draft, times=self.times
        )
        replayed = [
            row
            for ranking in self.rankings_of_run_rule
            for row in replayed_rows(
                ranking.replays,
                self.latencies[ranking.replays.temperature],
                model=setup.model,
            )
        ]
        return [*measured, *self._synthetic(measured), *replayed]

    def _synthetic(self, measured: Sequence[ResultRow]) -> list[ResultRow]:
        """What the acceptance that was set predicts of the measured cells; none where none was.

        A round of adaptive drafting has no fixed length, so its cells have no prediction.
        """
        rates = self.setup.run.manifest.synthetic_rates
        if not rates or self.setup.adaptive:
            return []
        done = completed(latest(self.trials))
        return synthetic_rows(measured, done, rates, self.latencies_of_draft)

    @cached_property
    def evidence(self) -> list[Evidence]:
        """What each temperature's verdict rests on: generations where they ran, else replay."""
        setup = self.setup
        if not setup.replay_only:
            return [
                evidence_from_trials(
                    self.trials,
                    draft=setup.draft,
                    temperature=value,
                    times=self.times.get(value),
                )
                for value in setup.temperatures
                if any(trial.temperature == value for trial in self.trials)
            ]
        return [ranking.evidence for ranking in self.rankings_of_run_rule]

    @cached_property
    def answered(self) -> tuple[Answered, ...]:
        """Every question decided, for every temperature and acceptance rule."""
        setup = self.setup
        asked = questions(
            self.evidence,
            {key: ranking.evidence for key, ranking in self.rankings.items()},
            rule=setup.rule,
            replay_only=setup.replay_only,
            coincide=setup.synthetic or self._only_lookups,
            adaptive=setup.adaptive,
            alike=self._alike,
            weights=setup.weights,
        )
        return answered(list(asked), weights=setup.shares, seed=setup.seed, distrust=self._doubt)

    def _alike(self, server: str, draft: str, temperature: float) -> bool:
        """Whether a server proposes what a draft of this run does."""
        return drafts_alike(server, kind_of(draft, self.setup.model_facts), temperature)

    def _doubt(self, question: Question) -> Doubt | None:
        """Why a question has no verdict: its texts, or its timings, cannot be right."""
        doubt = distrust(self.checks)
        if doubt is None and question.source == "measured":
            doubt = impossible(self.unstable, question.evidence.temperature)
        return doubt

    @property
    def _only_lookups(self) -> bool:
        """Whether no draft is a model: a look-up is accepted alike by every rule."""
        return bool(self.rankings) and all(
            set(ranking.replays.drafts) <= ranking.replays.lookups
            for ranking in self.rankings.values()
        )

    @property
    def verdicts(self) -> list[tuple[Verdict, Sequence[Verdict]]]:
        """By temperature, under the run's rule: that of the workload, and its prompt sets'.

        Where servers have different drafts, on as many of them as any server has.
        """
        chosen: list[tuple[Verdict, Sequence[Verdict]]] = []
        for entries in grouped(
            self.answered, lambda entry: entry.question.evidence.temperature
        ).values():
            own = [entry for entry in entries if self.setup.rule in entry.question.rules]
            most = max(own or entries, key=lambda entry: len(entry.question.drafts.get("all", ())))
            chosen.append((most.verdicts[0], most.verdicts[1:]))
        return chosen

    @property
    def verdict(self) -> Verdict | None:
        """The workload's at the first temperature."""
        return self.verdicts[0][0] if self.verdicts else None

    def not_scored(self) -> Iterator[str]:
        """The drafts of an audition that its ranking lacks."""
        if self.setup.command == "audition":
            entries: Sequence[str] = self.setup.run.config.get("drafts") or ()
            names = (split_draft(entry).name for entry in entries if entry != AUTO_DRAFTS)
            yield from (name for name in names if name not in self.first_latencies)

    def positions(self) -> Iterator[AcceptanceByPosition]:
        """Replayed acceptance by position, of each draft at its best K."""
        for ranking in self.rankings_of_run_rule:
            for candidate in ranking.best:
                counts = ranking.replays.weighted(candidate, self.setup.weights)
                shares = counts.acceptance_by_position
                temperature = ranking.replays.temperature
                yield AcceptanceByPosition(
                    candidate.draft, "all", temperature, candidate.k, "replayed", shares
                )

    def replay_checks(self) -> Iterator[ReplayCheck]:
        """Replayed next to measured tokens per round, cell by cell."""
        for ranking in self.rankings_of_run_rule if self.trials else ():
            replays = ranking.replays
            for prompt_set in sorted(set(replays.prompt_sets)):
                for k in replays.ks:
                    cell = Cell(prompt_set, replays.temperature, k)
                    trials = [trial for trial in self.trials if trial.cell_key == cell]
                    candidate = Candidate(self.setup.draft, k)
                    check = replay_check(cell, trials, replays.only([prompt_set]), candidate)
                    if check is not None:
                        yield check

    def length_alpha(self) -> Iterator[LengthAlpha]:
        """Alpha by position in the answer and by context, at the K of `category_alpha`."""
        # Of a fixed K, at which such a sweep never drafts
        for ranking in () if self.setup.adaptive else self.rankings_of_run_rule:
            replays = ranking.replays
            by_draft = {
                draft: [t for t in self.traces[draft] if t.temperature == replays.temperature]
                for draft in replays.drafts
            }
            k, weights = category_k(replays), self.setup.weights
            yield from length_alpha(by_draft, replays.rule, k, weights)

    def adaptive_drafting(self) -> Iterator[AdaptiveDrafting]:
        """What thresholds would bring to the drafts whose confidences are stored."""
        for ranking in self.rankings_of_run_rule:
            replays = ranking.replays
            for draft in replays.drafts:
                known = self.confidences.get(draft, {})
                traces = [
                    trace
                    for trace in self.traces[draft]
                    if trace.temperature == replays.temperature and trace.key in known
                ]
                if traces:
                    texts = ScoredTexts(traces, known, replays.rule)
                    latency = self.latencies[replays.temperature][draft]
                    yield adaptive_drafting(texts, replays.ks, latency, self.setup.weights)

    def case(self) -> Case | None:
        """What explains the verdict: its draft, or the best-looking one, at the verdict's K.

        A look-up has no draft step, so the explanation does not apply to it.
        """
        verdict = self.verdict
        if verdict is None or self.texts_differ or verdict.temperature is None:
            return None
        draft = verdict.draft or self.setup.draft
        lookups: frozenset[str] = frozenset()
        for ranking in self.rankings_of_run_rule[:1]:
            lookups = ranking.replays.lookups
            draft = draft or ranking.best[0].draft
        latency = self.latencies.get(verdict.temperature, {}).get(draft)
        if draft in lookups or latency is None:
            return None
        return case_of(
            verdict, draft, self.results, latency, self.latency, weights=self.setup.weights
        )

    def explained(self) -> tuple[Explanation | None, tuple[RuleOfThumb, ...]]:
        """Why the verdict is what it is, and the rules of thumb next to it."""
        case, verdict = self.case(), self.verdict
        if case is None or verdict is None:
            return None, ()
        explanation = explain(case, verdict.decision, verdict.temperature or 0.0)
        rules = rules_of_thumb(
            explanation,
            case,
            verdict_k={"speculate": verdict.k, "does_not_pay": 0}.get(verdict.decision),
            parameter_share=self.setup.parameter_share(case.draft),
            same_vocabulary=True if self.setup.tokenizers_compared else None,
        )
        return explanation, tuple(rules)

    def request(self) -> RequestSummary | None:
        """Whole requests with the best draft."""
        if not self.rankings_of_run_rule:
            return None
        ranking = self.rankings_of_run_rule[0]
        best = ranking.best[0]
        latency = self.latencies[ranking.replays.temperature][best.draft]
        return request_summary(ranking.replays, best, latency, self.setup.weights)

    def memory(self) -> tuple[DraftMemory, ...]:
        """Memory of the device used by each draft."""
        if not self.rankings_of_run_rule:
            return ()
        replays = self.rankings_of_run_rule[0].replays
        traces = self.traces[replays.drafts[0]]
        longest = max(trace.prompt_tokens + len(trace.tokens) for trace in traces)
        return draft_memory(self.setup, replays.drafts, longest, lookups=replays.lookups)

    def with_cost(self, summary: Summary) -> Summary:
        """The summary with the cost of a token, plain and as the verdict says to serve."""
        price, verdict = self.setup.price_per_hour, summary.verdict
        if price is None or verdict is None or verdict.temperature is None or self.texts_differ:
            return summary
        latency = next(iter(self.latencies.get(verdict.temperature, {}).values()), None)
        if latency is None:
            return summary
        plain = usd_per_million_tokens(latency.rounds.baseline_s, price)
        speedup = verdict.speedup if verdict.speculate and verdict.speedup else 1.0
        return replace(
            summary,
            price_per_hour_usd=price,
            plain_usd_per_million_tokens=plain,
            usd_per_million_tokens=plain / speedup,
        )

"""A sweep or an audition: which draft and K to serve, from generations, traces and step times.

A sweep has one draft and also runs generations. Where generations ran the verdict rests on them,
and replay is checked against them; else the verdict rests on replay. Rankings under every
acceptance rule, alpha by category, whole requests and memory come from replay in both. A pair
that changes greedy texts gets no verdict.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from harness.analysis.caveats import caveats, failures, greedy_texts_differ
from harness.analysis.cells import (
    completed,
    expected_tokens_per_round,
    latest,
    measured_positions,
    measured_rows,
    theory_rows,
)
from harness.analysis.explanation import Case, case_of, explain, rules_of_thumb
from harness.analysis.latency import LOOKUP_S, Latency, latency_of, latency_of_draft, stored_rows
from harness.analysis.leaderboard import ENGINES, Ranking, draft_memory, rank, with_costs
from harness.analysis.lossless import distrust, text_checks, without_faulty
from harness.analysis.predicted import (
    category_alpha,
    evidence_of,
    replayed_rows,
    request_summary,
)
from harness.analysis.replayed import replay_check, replay_drafts
from harness.analysis.setup import Setup
from harness.analysis.verdict import Candidate, Evidence, decide, evidence_from_trials, least_regret
from harness.records import (
    Cell,
    Decision,
    Failure,
    LatencyRow,
    ResultRow,
    Rule,
    Source,
    StepTiming,
    TextTrace,
    Trial,
)
from harness.summary import (
    AcceptanceByPosition,
    Answer,
    BestCell,
    DraftMemory,
    Explanation,
    LeaderboardRow,
    LeastRegret,
    ReplayCheck,
    RequestSummary,
    RuleOfThumb,
    Summary,
    TextCheck,
    Verdict,
)
from harness.theory.cost import usd_per_million_tokens
from harness.theory.speedup import StepTimes


def analyse_pair(setup: Setup) -> Summary:
    """Everything a sweep or an audition says, as far as what it stored allows."""
    pair = _Pair(setup)
    explanation, rules = pair.explained()
    costs: Mapping[str, float] = setup.audition.get("costs") or {}
    summary = Summary(
        run=setup.facts(pair.results),
        verdict=pair.verdict,
        per_temperature=tuple(whole_workload for whole_workload, _ in pair.verdicts),
        per_prompt_set=tuple(verdict for _, sets in pair.verdicts for verdict in sets),
        answers=tuple(pair.answers()),
        failures=failures(setup, pair.trials),
        caveats=(
            *greedy_texts_differ(pair.checks),
            *caveats(setup, pair.results, pair.sweep_timings, prompts=pair.audition_prompts),
        ),
        results=tuple(pair.results),
        latency=pair.latency,
        steps=tuple(latency.summary(draft) for draft, latency in pair.latencies.items()),
        best_cell=None if pair.texts_differ else _best_cell(pair.results),
        leaderboards=tuple(ranking.leaderboard for ranking in pair.rankings.values()),
        least_regret=() if pair.texts_differ else tuple(_least_regret(pair.evidence)),
        acceptance_by_position=(*measured_positions(setup.draft, pair.trials), *pair.positions()),
        category_alpha=tuple(
            row
            for ranking in pair.rankings_of_run_rule
            for row in category_alpha(ranking.replays, seed=setup.seed)
        ),
        replay_checks=tuple(pair.replay_checks()),
        explanation=explanation,
        rules_of_thumb=rules,
        request=pair.request(),
        memory=pair.memory(),
        ineligible=tuple(
            Failure(entry["draft"], entry["reason"])
            for entry in setup.audition.get("not_eligible") or ()
        ),
        generation_s=costs.get("generation_s"),
        scoring_s=costs.get("scoring_s"),
        text_checks=tuple(pair.checks),
    )
    return pair.with_cost(summary)


@dataclass(frozen=True)
class _Pair:
    """A run's inputs, derived step by step; each is computed once."""

    setup: Setup

    @cached_property
    def checks(self) -> list[TextCheck]:
        """Greedy texts compared with plain decoding's; none where acceptance was set."""
        if self.setup.synthetic or self.setup.replay_only:
            return []
        return text_checks(self.setup.run)

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

    @property
    def sweep_timings(self) -> Sequence[StepTiming]:
        """The steps whose scatter is looked at: those of a sweep."""
        return () if self.setup.command == "audition" else self.setup.run.timings

    @cached_property
    def latency(self) -> tuple[LatencyRow, ...]:
        """Rows of latency.csv."""
        return stored_rows(self.setup.run)

    @cached_property
    def traces(self) -> dict[str, list[TextTrace]]:
        """The run's traces by draft, in stored order; not of drafts that failed."""
        failed = {entry.where.removeprefix("draft ") for entry in self.setup.draft_failures}
        by_draft: dict[str, list[TextTrace]] = {}
        for trace in self.setup.run.traces:
            if trace.draft not in failed:
                by_draft.setdefault(trace.draft, []).append(trace)
        return by_draft

    @cached_property
    def latencies(self) -> dict[str, Latency]:
        """Step times by draft, of those that have any."""
        timings = self.setup.run.timings
        if self.setup.command == "sweep":
            return {self.setup.draft: latency_of(timings)} if timings else {}
        by_draft = {name: self._latency(name) for name in self.traces}
        return {name: latency for name, latency in by_draft.items() if latency is not None}

    def _latency(self, draft: str) -> Latency | None:
        """From the configuration if target_ms is given, otherwise timed."""
        typed = self.setup.conf("latency")
        if not self.setup.typed_latency:
            return latency_of_draft(draft, self.setup.run.timings)
        draft_ms = typed.get("draft_ms")
        if isinstance(draft_ms, Mapping):
            draft_ms = draft_ms.get(draft)
        elif self.traces[draft][0].matches is not None:
            draft_ms = LOOKUP_S * 1e3
        if draft_ms is None:
            return None
        verify = tuple(value / 1e3 for value in typed.get("verify_ms") or ())
        return Latency(StepTimes(draft_ms / 1e3, typed["target_ms"] / 1e3, verify))

    @property
    def times(self) -> StepTimes | None:
        """A sweep's step times."""
        latency = self.latencies.get(self.setup.draft)
        return latency.times if latency else None

    @property
    def target_s(self) -> float | None:
        """Plain decoding's seconds per token; of the first draft's target steps."""
        return next((latency.times.target_s for latency in self.latencies.values()), None)

    @property
    def audition_prompts(self) -> int | None:
        """How many prompts an audition's drafts were scored on."""
        if self.setup.command != "audition" or not self.latencies:
            return None
        return len(
            {(t.prompt_set, t.conversation) for t in self.traces[next(iter(self.latencies))]}
        )

    @cached_property
    def rankings(self) -> dict[tuple[Rule, float], Ranking]:
        """By rule, the verdict's first, and temperature; of drafts with traces and step times."""
        traces = {name: self.traces[name] for name in self.latencies if name in self.traces}
        ks = [k for k in self.setup.ks if all(t.times.covers(k) for t in self.latencies.values())]
        if not traces or not ks:
            return {}
        rules: list[Rule] = [
            self.setup.rule,
            *(rule for rule in ENGINES if rule != self.setup.rule),
        ]
        rankings: dict[tuple[Rule, float], Ranking] = {}
        for temperature in self.setup.temperatures:
            if not all(
                any(t.temperature == temperature for t in scored) for scored in traces.values()
            ):
                continue
            for rule in rules:
                replays = replay_drafts(traces, rule, ks, temperature)
                ranking = rank(replays, self.latencies, self.setup.weights, seed=self.setup.seed)
                board = with_costs(ranking.leaderboard, self.setup, self.target_s or 0.0)
                rankings[rule, temperature] = replace(ranking, leaderboard=board)
        return rankings

    @property
    def rankings_of_run_rule(self) -> list[Ranking]:
        """The rankings under the verdict's rule, by temperature."""
        return [ranking for (rule, _), ranking in self.rankings.items() if rule == self.setup.rule]

    @cached_property
    def results(self) -> list[ResultRow]:
        """Rows of results.csv: measured, what steps predict of them, and replayed."""
        setup = self.setup
        measured = measured_rows(
            self.trials, model=setup.model, draft=setup.draft, times=self.times, seed=setup.seed
        )
        replayed = [
            row
            for ranking in self.rankings_of_run_rule
            for row in replayed_rows(
                ranking.replays, self.latencies, model=setup.model, seed=setup.seed
            )
            if row.k > 0 or not measured
        ]
        return [*measured, *self._theory(measured), *replayed]

    def _theory(self, measured: Sequence[ResultRow]) -> list[ResultRow]:
        """What step times predict: from synthetic acceptance where there is one, else the row's.

        A round of adaptive drafting has no fixed length, so its cells have no prediction.
        """
        if self.times is None or self.setup.adaptive:
            return []
        rates = {
            Cell(entry["prompt_set"], float(entry["temperature"]), int(entry["k"])): entry["rates"]
            for entry in self.setup.synthetic_rates
        }
        if not rates:
            return theory_rows(measured, self.times)
        expected: list[ResultRow] = []
        trials = completed(latest(self.trials))
        for row in measured:
            cell = Cell(row.prompt_set or "", row.temperature or 0.0, row.k)
            lengths = [trial.new_tokens or 0 for trial in trials if trial.cell_key == cell]
            if cell in rates and lengths:
                tokens = expected_tokens_per_round(rates[cell], lengths)
                expected.append(replace(row, tokens_per_round=tokens, alpha=None))
        return theory_rows(expected, self.times)

    @cached_property
    def evidence(self) -> list[Evidence]:
        """What each temperature's verdict rests on: generations where they ran, else replay."""
        setup = self.setup
        if not setup.replay_only:
            return [
                evidence_from_trials(
                    self.trials, draft=setup.draft, temperature=value, times=self.times
                )
                for value in setup.temperatures
                if any(trial.temperature == value for trial in self.trials)
            ]
        return [
            evidence_of(ranking.replays, self.latencies, seed=setup.seed)
            for ranking in self.rankings_of_run_rule
        ]

    @cached_property
    def verdicts(self) -> list[tuple[Verdict, list[Verdict]]]:
        """By temperature: that of the workload, and those of its prompt sets."""
        seed = self.setup.seed
        return [
            (
                self._undecided_if_texts_differ(
                    decide(evidence, weights=self.setup.weights, seed=seed)
                ),
                [
                    self._undecided_if_texts_differ(decide(evidence, prompt_set=name, seed=seed))
                    for name in sorted(set(evidence.prompt_sets))
                ],
            )
            for evidence in self.evidence
        ]

    @property
    def verdict(self) -> Verdict | None:
        """The workload's at the first temperature."""
        return self.verdicts[0][0] if self.verdicts else None

    def _undecided_if_texts_differ(self, verdict: Verdict) -> Verdict:
        """The verdict; undecided, without a speedup, where texts may differ beyond a tie."""
        reason = distrust(self.checks)
        if reason is None:
            return verdict
        return replace(
            verdict,
            decision="undecided",
            speculate=False,
            draft=None,
            k=0,
            speedup=None,
            speedup_lo=None,
            speedup_hi=None,
            reason=reason[0],
            reason_values=reason[1],
        )

    def answers(self) -> Iterator[Answer]:
        """What to serve by temperature and rule: verdicts, and for other rules replay's best."""
        source = "replayed" if self.setup.replay_only else "measured"
        for verdict in (v for whole, per_set in self.verdicts for v in (whole, *per_set)):
            if verdict.speedup is not None and verdict.temperature is not None:
                scope = verdict.temperature, self.setup.rule, verdict.prompt_set
                yield _answer(verdict, scope, source, verdict.decision)
        for (rule, temperature), ranking in self.rankings.items():
            if rule != self.setup.rule:
                fastest = ranking.leaderboard.rows[0]
                yield _answer(fastest, (temperature, rule, "all"), "replayed", None)

    def positions(self) -> Iterator[AcceptanceByPosition]:
        """Replayed acceptance by position, of each draft at its best K."""
        for ranking in self.rankings_of_run_rule:
            for candidate in ranking.best:
                shares = ranking.replays.candidates[candidate].acceptance_by_position
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
        if draft in lookups or draft not in self.latencies:
            return None
        return case_of(verdict, draft, self.results, self.latencies[draft].times, self.latency)

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
            same_vocabulary=None if self.setup.dummy else True,
        )
        return explanation, tuple(rules)

    def request(self) -> RequestSummary | None:
        """Whole requests with the best draft."""
        if not self.rankings_of_run_rule:
            return None
        ranking = self.rankings_of_run_rule[0]
        best = ranking.best[0]
        return request_summary(ranking.replays, best, self.latencies[best.draft])

    def memory(self) -> tuple[DraftMemory, ...]:
        """Memory of the device used by each draft."""
        if not self.rankings_of_run_rule:
            return ()
        replays = self.rankings_of_run_rule[0].replays
        traces = self.traces[replays.drafts[0]]
        longest = max(trace.prompt_tokens + len(trace.tokens) for trace in traces)
        return draft_memory(self.setup, replays, longest)

    def with_cost(self, summary: Summary) -> Summary:
        """The summary with the cost of a token, plain and as the verdict says to serve."""
        price, target_s, verdict = self.setup.price_per_hour, self.target_s, summary.verdict
        if price is None or target_s is None or verdict is None or self.texts_differ:
            return summary
        plain = usd_per_million_tokens(target_s, price)
        speedup = verdict.speedup if verdict.speculate and verdict.speedup else 1.0
        return replace(
            summary,
            price_per_hour_usd=price,
            plain_usd_per_million_tokens=plain,
            usd_per_million_tokens=plain / speedup,
        )


def _answer(
    best: Verdict | LeaderboardRow,
    scope: tuple[float, Rule, str],
    source: Source,
    decision: Decision | None,
) -> Answer:
    """What is best at a temperature, under a rule, for a prompt set."""
    temperature, rule, prompt_set = scope
    return Answer(
        temperature=temperature,
        engine="own",
        rule=rule,
        prompt_set=prompt_set,
        draft=best.draft,
        k=best.k,
        speedup=best.speedup or 0.0,
        speedup_lo=best.speedup_lo,
        speedup_hi=best.speedup_hi,
        source=source,
        decision=decision,
    )


def _best_cell(rows: Sequence[ResultRow]) -> BestCell | None:
    """The largest plain speedup of any cell: what a reader will look for, and must distrust."""
    drafted = [row for row in rows if row.k and row.speedup is not None and row.source != "theory"]
    candidates = [row for row in drafted if row.source == "measured"] or drafted
    if not candidates:
        return None
    best = max(candidates, key=lambda row: row.speedup or 0.0)
    return BestCell(best.prompt_set, best.temperature, best.k, best.speedup or 0.0)


def _least_regret(evidence: Sequence[Evidence]) -> Iterator[LeastRegret]:
    """What loses the least speedup if traffic shifts between several prompt sets."""
    for evidence_at_temperature in evidence:
        by_set = evidence_at_temperature.by_set()
        if len(by_set) > 1:
            yield LeastRegret(evidence_at_temperature.temperature, *least_regret(by_set))

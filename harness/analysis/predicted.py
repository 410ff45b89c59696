"""Predicted seconds: replayed rounds times what a round costs, and every number that follows.

prediction = tokens per round x R(0) / R(K). Rows of results.csv, workload speedups with their
intervals. Counts are expectations, so they are not whole. Rates are ratios of sums over prompts;
percentiles are over prompts, a prompt's repetitions taken together. What is said of the whole
workload weighs the prompt sets (`prompts.weights`).

Every candidate is judged against the plain token that was timed with its own draft; where these
differ, its seconds are scaled to the first draft's, so that a machine whose speed changed between
drafts does not favour any. A draft for which the target ran in a slower way is judged against the
plain token of the others (`RoundTimes.other_plain_s`), its seconds as they were timed.
"""

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from harness.analysis.cells import (
    Gap,
    PredictionError,
    PromptId,
    expected_tokens_per_round,
    new_tokens,
    priced,
    ratio,
    with_counts,
    with_times,
)
from harness.analysis.replayed import Replays
from harness.analysis.round_costs import Latency, least_rounds
from harness.analysis.server_costs import ServerCosts
from harness.analysis.verdict import Candidate, Evidence, Timed
from harness.engine_facts.engines import with_lines
from harness.records import Cell, ResultRow, Rule, Trial, grouped
from harness.stats.jackknife import (
    Array,
    Variance,
    Weights,
    enough_prompts,
    independent_errors,
    set_weights,
    share_interval,
)
from harness.stats.workload import KNOWN, SharedError, Workload
from harness.summary import Leaderboard, LeaderboardRow

# Of the speedups, for the chance that a draft is the fastest
DRAWS = 4000
# An error of predictions that is not known, so that draws are the same as with one of 0
NONE = Variance(np.zeros(()), np.ones(()))
# By draft, at the temperature of what is predicted
Latencies = Mapping[str, Latency]


# ---- what a verdict rests on ---------------------------------------------------------------------


def evidence_of(replays: Replays, latencies: Latencies) -> Evidence:
    """Predicted decode seconds of every candidate on each prompt."""
    tokens, requests, first = replays.new_tokens, _texts(replays), latencies[replays.drafts[0]]
    baseline_s = first.rounds.baseline_s
    return Evidence(
        temperature=replays.temperature,
        names=replays.names,
        baseline=Timed(
            first.plain_cost(tokens, requests) * baseline_s, tokens, generations=requests
        ),
        candidates={
            name: Timed(
                latency.rounds_cost(counts, requests) * baseline_s,
                tokens,
                counts.accepted,
                counts.judged,
                break_even_alpha(latency, name),
            )
            for name, counts in replays.candidates.items()
            for latency in [latencies[name.draft].at_threshold(name.k, name.p_min)]
        },
        timing=(*_cost_errors(replays, latencies), *_visit_errors(replays, latencies)),
    )


@dataclass(frozen=True, eq=False)
class Predicted:
    """Replayed drafts at their costs, under one rule and at one temperature."""

    replays: Replays
    latencies: Latencies

    @cached_property
    def evidence(self) -> Evidence:
        """The predicted seconds of every candidate on each prompt."""
        return evidence_of(self.replays, self.latencies)

    def at_least(self, draft: str) -> Evidence | None:
        """The evidence of a draft at the least that its rounds can cost; None without its steps."""
        steps = self.latencies[draft].steps
        least = steps and Latency(least_rounds(steps, max(self.replays.ks)))
        return least and evidence_of(self.replays, {draft: least})

    def best_of(
        self,
        group: Callable[[Candidate], Hashable],
        weights: Weights,
        measured: Collection[Candidate] = (),
    ) -> "Predicted":
        """The candidate of each group that was measured, else the fastest one."""
        names = [*self.replays.candidates]
        groups = grouped(names, group).values()
        if len(groups) == len(names):
            return self
        gains = {**self.evidence.speedups(weights), **dict.fromkeys(measured, math.inf)}
        best = {max(some, key=lambda name: gains.get(name, 0.0)) for some in groups}
        kept = {name: self.replays.candidates[name] for name in names if name in best}
        return Predicted(replace(self.replays, candidates=kept), self.latencies)

    def at_one_threshold(
        self, weights: Weights, measured: Collection[Candidate] = ()
    ) -> "Predicted":
        """Each draft and K at the threshold that was measured, else at its fastest."""
        return self.best_of(lambda name: (name.draft, name.k), weights, measured)


def _visit_errors(replays: Replays, latencies: Latencies) -> Iterator[SharedError]:
    """The errors of round times, which the candidates of a draft share with its visits."""
    place = {name: row for row, name in enumerate(replays.candidates)}
    for draft, names in grouped(place, lambda name: name.draft).items():
        error = latencies[draft].visit_error([replays.candidates[name] for name in names])
        if error is not None:
            yield error.among(len(place), [place[name] for name in names])


def _cost_errors(replays: Replays, latencies: Latencies) -> Iterator[SharedError]:
    """The errors of a server's costs, which are the same on all prompts.

    Leaving out a part of that server's prompts changes the costs of all drafts, unless each was
    timed in requests of its own. Its own run may show an error beyond that, at each K. Where a
    draft was not measured there, its costs may be anywhere between two ends. One engine prices all
    drafts, or none of them.
    """
    every, tokens, requests = replays.candidates, replays.new_tokens, _texts(replays)
    served = {
        name: each
        for name in every
        if (each := latencies[name.draft].at_threshold(name.k, name.p_min).served) is not None
    }
    if not served:
        return

    def log_costs(name: Candidate, of: Sequence[ServerCosts]) -> Array:
        return -np.log([each.speedup(tokens, every[name], requests) for each in of])

    every_draft = [*served]
    alike = [every_draft]  # whose costs are of the same requests
    if any(each.own_requests for each in served.values()):
        alike = [*grouped(every_draft, lambda name: name.draft).values()]
    for names in alike:
        parts = np.stack([log_costs(name, served[name].without) for name in names])
        error = SharedError(independent_errors(parts), float(parts.shape[1] - 1))
        yield error.among(len(served), [every_draft.index(name) for name in names])
    variance, degrees = next(iter(served.values())).error
    of_k = [replays.ks.index(name.k) for name in served]
    yield SharedError(np.sqrt(variance) * np.eye(len(replays.ks))[of_k], degrees)
    for draft in replays.drafts:
        priced = latencies[draft].served
        if priced is not None and (ends := priced.ends) is not None:
            between = [
                np.diff(log_costs(n, ends)) if n.draft == draft else np.zeros(1) for n in served
            ]
            yield SharedError(np.stack(between) / np.sqrt(12.0), KNOWN)


# ---- speedups with their intervals ---------------------------------------------------------------


class Speedup(NamedTuple):
    """A candidate's speedup on a workload, with its interval over prompts and visits, if any."""

    value: float
    lo: float | None
    hi: float | None


def speedups(
    evidence: Evidence, weights: Weights = None, error: PredictionError | None = None
) -> dict[Candidate, Speedup]:
    """Every candidate's: 1 / the weighted mean over sets of what a token costs in plain tokens.

    Its interval is over prompts and visits; `error` is that of predictions besides these.
    """
    workload = evidence.workload(weights, error and error.variance)
    values = np.exp(workload.log_speedups.value).tolist()
    intervals = workload.intervals() or [(None, None)] * len(values)
    found = zip(evidence.candidates, values, intervals, strict=True)
    return {name: Speedup(value, *interval) for name, value, interval in found}


def gap_of(evidence: Evidence, measured: Mapping[PromptId, Array]) -> Gap | None:
    """A measured cell (`paired_sums`) against the evidence of its one predicted candidate."""
    plain, (timed,) = evidence.baseline, evidence.candidates.values()
    sums = np.stack([plain.seconds, plain.tokens, timed.seconds, timed.tokens], axis=1)
    costs = Variance(*(each[0] for each in evidence.workload(None).timing_variance()))
    return Gap.of(dict(zip(evidence.names, sums, strict=True)), measured, costs)


# ---- rows of results.csv -------------------------------------------------------------------------


def replayed_rows(
    predicted: Predicted, *, model: str, error: PredictionError | None = None
) -> list[ResultRow]:
    """A row per prompt set and candidate, and one of plain decoding, by the first draft's times."""
    replays, latencies = predicted.replays, predicted.latencies
    rows: list[ResultRow] = []
    for prompt_set in sorted(set(replays.prompt_sets)):
        part = replays.only([prompt_set])
        gains = speedups(evidence_of(part, latencies), error=error)
        baseline = latencies[part.drafts[0]]
        seconds = baseline.plain_cost(part.new_tokens, _texts(part)) * baseline.rounds.baseline_s
        rows.append(replace(_timed(part, 0, seconds, model), speedup=1.0))
        rows += [_row(name, part, latencies, gains[name], model) for name in part.candidates]
    engine = latencies[replays.drafts[0]].served
    return rows if engine is None else [replace(row, engine=engine.engine) for row in rows]


def synthetic_rows(
    measured: Sequence[ResultRow],
    trials: Sequence[Trial],
    rates: Mapping[Cell, Sequence[float]],
    latencies: Mapping[float, Latency],
) -> list[ResultRow]:
    """A row per measured cell, from the acceptance that was set and the texts' own lengths."""
    rows: list[ResultRow] = []
    for row in measured:
        cell = Cell(row.prompt_set or "", row.temperature or 0.0, row.k)
        lengths = [round(new_tokens(trial)) for trial in trials if trial.cell_key == cell]
        latency = latencies.get(cell.temperature)
        if latency is None or not lengths or not (row.k == 0 or cell in rates):
            continue
        tokens = expected_tokens_per_round(rates[cell], lengths) if row.k else None
        if latency.rounds.covers(row.k):
            predicted = ResultRow(
                model=row.model,
                draft=row.draft,
                prompt_set=row.prompt_set,
                temperature=row.temperature,
                k=row.k,
                source="replayed",
                prompts=row.prompts,
                new_tokens=row.new_tokens,
                rounds=ratio(row.new_tokens, tokens),
                tokens_per_round=tokens,
                rule=row.rule,
            )
            rows.append(priced(predicted, latency.rounds))
    return rows


def _timed(part: Replays, k: int, seconds: Array, model: str) -> ResultRow:
    """A row with the numbers that follow from decode seconds per prompt."""
    row = ResultRow(
        model=model,
        prompt_set=part.prompt_sets[0],
        temperature=part.temperature,
        k=k,
        source="replayed",
        prompts=len(part.names),
    )
    return with_times(row, seconds, part.new_tokens)


def _row(
    name: Candidate, part: Replays, latencies: Latencies, gain: Speedup, model: str
) -> ResultRow:
    """The row of a candidate, on the machine as it was when the first draft was timed."""
    counts = part.candidates[name]
    latency = latencies[name.draft].at_threshold(name.k, name.p_min)
    plain_s = latencies[part.drafts[0]].rounds.baseline_s
    seconds = plain_s * latency.rounds_cost(counts, _texts(part))
    alpha_lo, alpha_hi = share_interval(counts.accepted, counts.judged) or (None, None)
    return replace(
        with_counts(_timed(part, name.k, seconds, model), counts),
        draft=name.draft,
        alpha_lo=alpha_lo,
        alpha_hi=alpha_hi,
        rule=part.rule,
        speedup=gain.value,
        speedup_lo=gain.lo,
        speedup_hi=gain.hi,
        breakeven_alpha=break_even_alpha(latency, name),
    )


def break_even_alpha(latency: Latency, name: Candidate) -> float | None:
    """The alpha that rounds of K tokens need; None of rounds that a threshold ends earlier."""
    return None if name.p_min else latency.rounds.break_even_alpha(name.k)


def _texts(replays: Replays) -> Array:
    """The number of texts of each prompt, [n]."""
    return np.array([len(lengths) for lengths in replays.prompt_tokens], dtype=np.float64)


# ---- the leaderboard -----------------------------------------------------------------------------


def rank(
    predicted: Predicted,
    weights: Weights = None,
    *,
    seed: int = 0,
    error: PredictionError | None = None,
) -> Leaderboard:
    """Every draft at its best K, and not speculating, by predicted speedup, under one rule.

    The best K is chosen on the prompts it is shown for, so a row's speedup is a little optimistic.
    The verdict is the number without that optimism; no row is corrected.
    """
    replays, evidence = predicted.replays, predicted.evidence
    gains = speedups(evidence, weights, error)
    by_draft = grouped(replays.candidates, lambda name: name.draft).values()
    best = [max(names, key=lambda name: (gains[name].value, -name.k)) for names in by_draft]
    shares = set_weights(replays.prompt_sets, weights)
    counted = replays.only([name for name, share in shares.items() if share > 0.0])
    rows = [_board_row(name, counted, predicted.latencies, gains[name], weights) for name in best]
    rows.append(LeaderboardRow(rank=0, draft=None, k=0, speedup=1.0))
    columns = [list(replays.candidates).index(name) for name in best]
    chances = _chances_best(
        evidence.workload(weights, error.variance if error else NONE), columns, seed
    )
    rows = [replace(row, probability_best=p) for row, p in zip(rows, chances, strict=True)]
    # On a tie plain decoding comes first.
    rows.sort(key=lambda row: (-row.speedup, row.draft is not None))
    ranked = tuple(replace(row, rank=place) for place, row in enumerate(rows, start=1))
    return Leaderboard(replays.rule, replays.temperature, _engines(replays.rule), ranked)


def _engines(rule: Rule) -> tuple[str, ...]:
    """The engines that accept by a rule, variants of others last."""
    specs = [spec for spec in with_lines().values() if spec.rule == rule]
    specs.sort(key=lambda spec: spec.variant_of is not None)
    return tuple(spec.in_headlines for spec in specs)


def _chances_best(workload: Workload, best: Sequence[int], seed: int) -> list[float | None]:
    """For each draft's best K, then plain decoding: how often it is the fastest."""
    if not enough_prompts(workload.prompt_sets):
        return [None] * (len(best) + 1)
    drawn = workload.drawn(DRAWS, seed)[:, best]
    # Plain decoding, the first column, wins a tie, and so costs nothing to prefer.
    fastest = np.argmax(np.insert(drawn, 0, 0.0, axis=1), axis=1)
    return [float((fastest == row).mean()) for row in (*range(1, len(best) + 1), 0)]


def _board_row(
    name: Candidate, replays: Replays, latencies: Latencies, gain: Speedup, weights: Weights
) -> LeaderboardRow:
    counts = replays.weighted(name, weights)
    latency, on_prompts = latencies[name.draft], replays.candidates[name]
    judged, accepted, sets = on_prompts.judged, on_prompts.accepted, replays.prompt_sets
    tokens = replays.new_tokens
    alphas = share_interval(accepted, judged, sets, tokens=tokens, weights=weights)
    alpha_lo, alpha_hi = alphas or (None, None)
    return LeaderboardRow(
        rank=0,
        draft=name.draft,
        k=name.k,
        speedup=gain.value,
        speedup_lo=gain.lo,
        speedup_hi=gain.hi,
        tokens_per_round=counts.tokens_per_round,
        alpha=counts.alpha if counts.judged.sum() > 0.0 else None,
        alpha_lo=alpha_lo,
        alpha_hi=alpha_hi,
        breakeven_alpha=break_even_alpha(latency, name),
        p_min=name.p_min or None,
    )

"""The verdict: which draft and K to serve, or none, in a way that survives its own selection.

It rests on seconds and tokens per prompt, of plain decoding and of every candidate, a (draft, K),
on the same prompts (`Evidence`). The best-looking of 8 candidates that all tie with plain decoding
"wins" 12-18 % of the time. So candidates are chosen on folds of the prompts and scored on the
held-out ones, over many deals of the folds (`harness.stats.crossfit`), K = 0, speedup 1, among the
choices. The best candidate on all prompts is named, and the speedup is its own, less the optimism
of choosing it:

- `speculate`: most choices prefer a K above 0, and the speedup's lower bound is above 1;
- `does_not_pay`: the upper bound of every candidate is below 1, which no deal of the folds moves;
- `undecided` otherwise, with what would decide it: more prompts, or less timing noise, or nothing.

A report prints many verdicts, and the chance that any of them is wrong is at most ERROR: their
intervals share it (`ErrorBudget`). An interval is the one that decides. "Every upper bound" needs
no further correction: a wrong `does_not_pay` means that the bound of one candidate, whichever pays,
is wrong (an intersection-union test: Berger, "Multiparameter hypothesis testing and acceptance
sampling", 1982).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from harness.analysis.cells import (
    Count,
    accepted,
    completed,
    decode_s,
    judged,
    latest,
    new_tokens,
    per_prompt,
    ratio,
)
from harness.records import Trial, grouped
from harness.stats.crossfit import CrossFit, VisitCosts, Workload, cross_fit, deals_for
from harness.stats.jackknife import (
    CONFIDENCE,
    MIN_PROMPTS,
    MIN_SET,
    Array,
    Variance,
    half_width,
    joined,
    set_weights,
    workload_ratio,
)
from harness.summary import Answer, Doubt, LeastRegret, Values
from harness.theory.speedup import RoundTimes

# Chance of a wrong verdict in a report, and what part of it those on the whole workload take where
# there are verdicts on single prompt sets too
ERROR = 0.05
WORKLOADS_SHARE = 0.5
# An interval within this of 1: whichever it is, it matters little.
NEAR = 0.05
# Where the logarithm of a lower bound is closer to 0, so many times the deals are made.
CLOSE = 0.02
CLOSE_DEALS = 8
# A number of prompts is named where it decides with this chance, up to so many times today's.
DECIDES = 0.9
MOST_TIMES = 10

# ---- evidence ------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """What a verdict chooses from: a draft at one K above 0."""

    draft: str
    k: int


@dataclass(frozen=True, eq=False)
class Timed:
    """Decode seconds and emitted tokens of each prompt, repetitions summed; n entries each."""

    seconds: Array
    tokens: Array


@dataclass(frozen=True, eq=False)
class Facts:
    """What explains a candidate's speed: acceptance by prompt, and the alpha that would suffice.

    Attributes:
        accepted, judged: [prompt]; alpha is their ratio.
        breakeven_alpha: that its round times ask for; None where there is none.
    """

    accepted: Array
    judged: Array
    breakeven_alpha: float | None


@dataclass(frozen=True, eq=False)
class Evidence:
    """One temperature's measurements on the prompts that every cell completed."""

    temperature: float
    prompts: tuple[str, ...]  # prompt ids, n
    prompt_sets: tuple[str, ...]  # the set of each prompt, n
    baseline: Timed
    candidates: Mapping[Candidate, Timed]  # by (draft, K), K > 0
    facts: Mapping[Candidate, Facts]  # by (draft, K); may lack any
    # Of predicted seconds, by (draft, K), [visit]: what the candidate's rounds cost next to plain
    # decoding as that visit timed both, relative to all visits. Candidates of a draft share visits.
    # Empty where the seconds were measured, or times were typed in and are taken as exact.
    visit_costs: Mapping[Candidate, Array] = field(default_factory=dict[Candidate, Array])

    def only(self, prompt_sets: Sequence[str]) -> "Evidence":
        """The evidence of some prompt sets alone."""
        keep = np.array([name in prompt_sets for name in self.prompt_sets], dtype=bool)
        return replace(
            self,
            prompts=tuple(np.array(self.prompts, dtype=object)[keep]),
            prompt_sets=tuple(np.array(self.prompt_sets, dtype=object)[keep]),
            baseline=_rows(self.baseline, keep),
            candidates={name: _rows(timed, keep) for name, timed in self.candidates.items()},
            facts={
                name: replace(facts, accepted=facts.accepted[keep], judged=facts.judged[keep])
                for name, facts in self.facts.items()
            },
        )

    def workload(self, weights: Mapping[str, float] | None) -> Workload:
        """The candidates in their order, prompt sets of weight 0 left out."""
        shares = set_weights(self.prompt_sets, weights)
        evidence = self.only([name for name, share in shares.items() if share > 0.0])
        timed = evidence.candidates.values()
        return Workload(
            baseline_s=evidence.baseline.seconds,
            baseline_tokens=evidence.baseline.tokens,
            seconds=np.stack([candidate.seconds for candidate in timed]),
            tokens=np.stack([candidate.tokens for candidate in timed]),
            prompt_sets=evidence.prompt_sets,
            weights={name: shares[name] for name in evidence.prompt_sets},
            visits=evidence._visits(),
        )

    def speedups(self, weights: Mapping[str, float] | None) -> dict[Candidate, float]:
        """Of the whole workload; empty without a prompt that is complete in every cell."""
        if not self.prompts or not self.candidates:
            return {}
        speedups = np.exp(self.workload(weights).log_speedups()).tolist()
        return dict(zip(self.candidates, speedups, strict=True))

    def _visits(self) -> tuple[VisitCosts, ...]:
        """The visits of each draft that was timed more than once."""
        place = {name: index for index, name in enumerate(self.candidates)}
        groups = (
            VisitCosts(
                np.array([place[name] for name in names]),
                np.stack([self.visit_costs[name] for name in names]),
            )
            for names in grouped(self.visit_costs, lambda name: name.draft).values()
        )
        return tuple(group for group in groups if group.costs.shape[1] > 1)

    def alphas(self, name: Candidate, weights: Mapping[str, float] | None) -> Values:
        """A candidate's alpha on the weighted workload, and the alpha that it needs."""
        if name not in self.facts:
            return {"alpha": None, "breakeven_alpha": None}
        facts, tokens = self.facts[name], self.candidates[name].tokens
        accepted, judged = (
            workload_ratio(counts, tokens, self.prompt_sets, weights).value
            for counts in (facts.accepted, facts.judged)
        )
        return {"alpha": ratio(accepted, judged), "breakeven_alpha": facts.breakeven_alpha}


def _rows(timed: Timed, keep: NDArray[np.bool_]) -> Timed:
    return Timed(timed.seconds[keep], timed.tokens[keep])


# Seconds, tokens, accepted and judged drafts, generations
COUNTS: tuple[Count, ...] = (decode_s, new_tokens, accepted, judged, lambda _: 1.0)


def evidence_from_trials(
    trials: Sequence[Trial], *, draft: str, temperature: float, times: RoundTimes | None
) -> Evidence:
    """The evidence of one pair at one temperature, on the prompts complete in every cell.

    A prompt is complete in a cell when every repetition seen at this temperature, of every turn
    where it is a conversation, finished there. A K that completed fewer than half of the baseline's
    prompts (out of memory, say) is left out, rather than every prompt that it failed; so is one
    that failed most of a single set, unless every K did.
    """
    considered = [trial for trial in latest(trials) if trial.temperature == temperature]
    kept = _kept(considered)
    # A server may not tell how its rounds ended
    uncounted = {t.k for t in completed(considered) if t.accepted is None or t.rejected is None}
    names = sorted(name for name in kept[0] if all(name in cell for cell in kept.values()))
    timed: dict[Candidate, Timed] = {}
    facts: dict[Candidate, Facts] = {}
    for k, cell in kept.items():
        columns = np.array([cell[name] for name in names]).reshape(-1, len(COUNTS)).T
        seconds, tokens, accepted_tokens, judged_tokens, _ = columns
        timed[Candidate(draft, k)] = Timed(seconds, tokens)
        if k > 0 and k not in uncounted:
            alpha = times.break_even_alpha(k) if times else None
            facts[Candidate(draft, k)] = Facts(accepted_tokens, judged_tokens, alpha)
    return Evidence(
        temperature=temperature,
        prompts=tuple(prompt for _, prompt in names),
        prompt_sets=tuple(prompt_set for prompt_set, _ in names),
        baseline=timed.pop(Candidate(draft, 0)),
        candidates=timed,
        facts=facts,
    )


def _kept(trials: Sequence[Trial]) -> dict[int, dict[tuple[str, str], Array]]:
    """By K that is not left out, the sums of `COUNTS` of each prompt that is complete there."""
    repetitions = len({trial.repetition for trial in trials})
    turns = Counter(name for name, _ in {((t.prompt_set, t.conversation), t.turn) for t in trials})
    kept: dict[int, dict[tuple[str, str], Array]] = {0: {}}
    for k, of_k in sorted(grouped(trials, lambda trial: trial.k).items()):
        sums = per_prompt(completed(of_k), COUNTS)
        cell = {name: row for name, row in sums.items() if row[-1] == repetitions * turns[name]}
        if 2 * len(cell) >= len(kept[0]):
            kept[k] = cell
    failed = {k for k in kept if k and _mostly_failed([t for t in trials if t.k == k])}
    return {k: cell for k, cell in kept.items() if k not in failed or {0, *failed} == {*kept}}


def _mostly_failed(trials: Sequence[Trial]) -> bool:
    """Whether more than half of the prompts of any set failed."""
    prompts = {(t.prompt_set, t.conversation) for t in trials}
    failed = {(t.prompt_set, t.conversation) for t in trials if t.status == "failed"}
    sizes, failures = (Counter(name for name, _ in each) for each in (prompts, failed))
    return any(2 * failures[name] > size for name, size in sizes.items())


# ---- decision ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ErrorBudget:
    """How many verdicts a report prints, each counted once however often it is shown.

    Verdicts on the whole workload share one half of ERROR and those on single prompt sets the
    other, in equal parts (Bonferroni).
    """

    workloads: int = 1
    prompt_sets: int = 0

    def level(self, prompt_set: str) -> float:
        """The level of a verdict's interval, at least CONFIDENCE.

        What is true leaves a verdict one way to be wrong, `speculate` or `does_not_pay`, so one
        bound has half of its part of ERROR. The other half is for what Student's t does not know:
        where prompts differ in speed several times over, bounds miss more often than they say.
        """
        of_workloads = WORKLOADS_SHARE if self.prompt_sets else 1.0
        if prompt_set == "all":
            error = ERROR * of_workloads / self.workloads
        else:
            error = ERROR * (1.0 - WORKLOADS_SHARE) / max(1, self.prompt_sets)
        return max(CONFIDENCE, 1.0 - error)


def decide(
    evidence: Evidence,
    budget: ErrorBudget,
    *,
    prompt_set: str = "all",
    weights: Mapping[str, float] | None = None,
    seed: int = 0,
    deals: int | None = None,
) -> Answer:
    """The verdict on a workload, or on one prompt set of it, as an answer of no engine yet.

    With fewer than MIN_PROMPTS prompts, or a set of fewer than MIN_SET, there is no interval: the
    verdict is `undecided`, and its speedup the plain one of the best-looking candidate.

    Args:
        evidence: of one temperature.
        budget: the verdicts of the same report.
        prompt_set: "all" for the weighted workload, or one set, to which weights do not apply.
        weights: of the sets, equal if None.
        seed: of the deals of the folds.
        deals: how many; None for `deals_for`, and more where the lower bound is close to 1.
    """
    if prompt_set != "all":
        evidence, weights = evidence.only([prompt_set]), None
    asked = [name for name, weight in (weights or {}).items() if weight > 0]
    unseen = [name for name in asked if name not in evidence.prompt_sets]
    undecided = Answer.undecided(
        evidence.temperature,
        prompt_set,
        "no_complete_prompt",
        {"prompt_set": next(iter(unseen), None)},
    )
    if unseen or not evidence.prompts or not evidence.candidates:
        return undecided
    workload = evidence.workload(weights)
    level = budget.level(prompt_set)
    fit = cross_fit(workload, seed, deals=deals or deals_for(workload))
    if fit and not deals and abs(math.log(fit.interval(level).lo)) < CLOSE:
        fit = cross_fit(workload, seed, deals=CLOSE_DEALS * deals_for(workload)) or fit
    speedups = np.exp(workload.log_speedups())
    best = list(evidence.candidates)[int(np.argmax(speedups))]
    named: Values = {"draft": best.draft, "k": best.k}
    verdict = replace(undecided, draft=best.draft, k=best.k)
    if fit is None:
        reason, values = _too_few(workload.prompt_sets)
        speedup = float(speedups.max())
        return replace(verdict, speedup=speedup, reason=reason, reason_values={**named, **values})
    interval = fit.interval(level)
    verdict = replace(verdict, speedup=fit.speedup, speedup_lo=interval.lo, speedup_hi=interval.hi)
    if 2 * fit.chose_plain < fit.choices and interval.lo > 1.0:
        verdict = replace(verdict, decision="speculate")
        reason, values = "held_out_gain", {}
    elif fit.ceiling(level) < 1.0:
        verdict = replace(verdict, decision="does_not_pay", draft=None, k=0)
        reason, values = "held_out_loss", evidence.alphas(best, weights)
    else:
        reason, values = _why_undecided(fit, workload, level)
    return replace(verdict, reason=reason, reason_values={**named, "level": level, **values})


def _too_few(prompt_sets: tuple[str, ...]) -> Doubt:
    """Why there is no interval."""
    if len(prompt_sets) < MIN_PROMPTS:
        return "too_few_prompts", {"prompts": len(prompt_sets), "needed": MIN_PROMPTS}
    few = (name for name in prompt_sets if prompt_sets.count(name) < MIN_SET)
    small = next(few, prompt_sets[0])
    return "too_few_in_set", {"prompt_set": small, "needed": MIN_SET}


def _why_undecided(fit: CrossFit, workload: Workload, level: float) -> Doubt:
    """What keeps the interval from deciding, and what would change it."""
    interval = fit.interval(level)
    if interval.lo >= 1.0 - NEAR and interval.hi <= 1.0 + NEAR:
        return "near_one", {"near": NEAR}
    timing_share = _timing_share(fit, workload)
    if timing_share > 0.5:
        measured = not workload.visits
        return "timing_noise", {"timing_share": timing_share, "measured": measured}
    prompts = len(workload.prompt_sets)
    needed = _needed(fit, prompts, level)
    return "interval_spans_one", {"prompts": prompts, "prompts_needed": needed}


def _timing_share(fit: CrossFit, workload: Workload) -> float:
    """The share of the variance that is due to timing and not to what the prompts are.

    Of predicted seconds the visits' part. Of measured seconds, what plain decoding shows: its
    seconds per token hardly depend on the prompt, so their scatter is the machine's, and a speedup
    is a ratio of two such times.
    """
    total = float(fit.variance.value)
    plain = workload_ratio(
        workload.baseline_s, workload.baseline_tokens, workload.prompt_sets, workload.weights
    )
    of_plain = plain.log().standard_error
    timing = float(fit.visits.value) + 2.0 * (of_plain or 0.0) ** 2
    return min(1.0, timing / total) if total > 0.0 else 0.0


def _needed(fit: CrossFit, prompts: int, level: float) -> int | None:
    """About how many prompts would decide with a chance of DECIDES; None beyond MOST_TIMES today's.

    The speedup is known only as well as its error now says, so that a run of more prompts errs by
    both errors. The prompts' part of the variance shrinks with their number, the visits' does not.
    """
    number = np.arange(prompts + 1, MOST_TIMES * prompts + 1)
    of_prompts = Variance(
        fit.prompts.value * prompts / number, fit.prompts.degrees * number / prompts
    )
    variance = joined([of_prompts, fit.visits])
    margin = abs(fit.score) - half_width(variance, level)
    decides = margin >= ndtri(DECIDES) * np.sqrt(variance.value + fit.variance.value)
    return int(number[decides.argmax()]) if decides.any() else None


def least_regret(evidence: Evidence, weights: Mapping[str, float] | None) -> LeastRegret | None:
    """What gives away least if traffic shifts between the prompt sets that have a weight.

    Regret on a set is the best speedup there over this candidate's, and what counts is the worst
    set. No mix of sets can be worse than the worst set: the regret on a mix is a ratio of two sums
    that are linear in the mix. K = 0, speedup 1, is a candidate; plain speedups, no interval.

    None with fewer than two sets.
    """
    names = sorted({name for name in evidence.prompt_sets if (weights or {}).get(name, 1.0) > 0.0})
    if len(names) < 2:
        return None
    of_sets = [evidence.only([name]).speedups(None) for name in names]
    speedups = np.array([[1.0, *of_set.values()] for of_set in of_sets])
    regret = (speedups.max(axis=1, keepdims=True) / speedups).max(axis=0)
    draft, k = [(None, 0), *evidence.candidates][int(np.argmin(regret))]
    return LeastRegret(evidence.temperature, draft, k)

"""The verdict: which draft and K to serve, or none, in a way that survives its own selection.

It rests on seconds and tokens per prompt, of plain decoding and of every candidate, a (draft, K),
on the same prompts (`Evidence`). The best-looking of 8 candidates that all tie with plain decoding
"wins" 12-18 % of the time. So the candidate is chosen on folds of the prompts and scored on the
held-out ones (`harness.stats.crossfit`), with K = 0, speedup 1, among the choices:

- `speculate`: every fold chooses a K above 0 and the held-out speedup's lower bound is above 1;
- `does_not_pay`: every fold chooses K = 0, or the best candidate of each resample of the prompts
  stays below 1 (its upper bound does), so that no candidate is excused for being one of many;
- `undecided` otherwise, with about how many prompts would decide.

The draft and K that are named are the best on all prompts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.analysis.cells import (
    accepted,
    completed,
    decode_s,
    judged,
    latest,
    new_tokens,
    per_prompt,
    ratio,
)
from harness.records import Decision, Trial
from harness.stats.bootstrap import MIN_PROMPTS, MIN_SET, Array, set_weights
from harness.stats.crossfit import CrossFit, TimesByFold, Workload, cross_fit
from harness.summary import Value, Verdict, VerdictReason
from harness.theory.speedup import RoundTimes

FOLDS = 4
MAX_PROMPTS = 10_000

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


@dataclass(frozen=True)
class Facts:
    """What explains a candidate's speed: its alpha, and the alpha its step times ask for."""

    alpha: float | None
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
    # For predicted seconds, what the scatter of the step times does to them; None where the seconds
    # were measured, or the step times are taken as exact.
    times_by_fold: TimesByFold | None = None
    # By (draft, K), [visit]: what its rounds cost in plain tokens as each visit timed them, over
    # the same from all visits. Candidates of one draft share visits. Empty where the seconds were
    # measured, or no rounds were timed.
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
            times_by_fold=evidence.times_by_fold,
        )

    def by_set(self) -> "dict[str, Evidence]":
        """The evidence of each prompt set alone, in order of name."""
        return {name: self.only([name]) for name in sorted(set(self.prompt_sets))}


def _rows(timed: Timed, keep: NDArray[np.bool_]) -> Timed:
    return Timed(timed.seconds[keep], timed.tokens[keep])


def evidence_from_trials(
    trials: Sequence[Trial], *, draft: str, temperature: float, times: RoundTimes | None
) -> Evidence:
    """The evidence of one pair at one temperature, on the prompts complete in every cell.

    A prompt is complete in a cell when every repetition seen at this temperature, of every turn
    where it is a conversation, finished there. A K that completed fewer than half of the baseline's
    prompts (out of memory, say) is left out, rather than every prompt that it failed.
    """
    considered = [trial for trial in latest(trials) if trial.temperature == temperature]
    repetitions = len({trial.repetition for trial in considered})
    turns = {(t.prompt_set, t.conversation): 0 for t in considered}
    for prompt_set, conversation, _ in {(t.prompt_set, t.conversation, t.turn) for t in considered}:
        turns[prompt_set, conversation] += 1
    done: dict[int, dict[tuple[str, str], Array]] = {0: {}}
    for k in sorted({trial.k for trial in considered}):
        cell = completed([trial for trial in considered if trial.k == k])
        sums = per_prompt(cell, [decode_s, new_tokens, accepted, judged, lambda _: 1.0])
        done[k] = {name: row for name, row in sums.items() if row[-1] == repetitions * turns[name]}
    kept = {k: cell for k, cell in done.items() if 2 * len(cell) >= len(done[0])}
    names = sorted(name for name in done[0] if all(name in cell for cell in kept.values()))
    sums_of = {
        k: np.array([cell[name] for name in names]).reshape(len(names), 5)
        for k, cell in kept.items()
    }
    return Evidence(
        temperature=temperature,
        prompts=tuple(prompt for _, prompt in names),
        prompt_sets=tuple(prompt_set for prompt_set, _ in names),
        baseline=Timed(sums_of[0][:, 0], sums_of[0][:, 1]),
        candidates={
            Candidate(draft, k): Timed(sums[:, 0], sums[:, 1])
            for k, sums in sums_of.items()
            if k > 0
        },
        facts={Candidate(draft, k): _facts(sums, k, times) for k, sums in sums_of.items() if k > 0},
    )


def _facts(sums: Array, k: int, times: RoundTimes | None) -> Facts:
    alpha = ratio(float(sums[:, 2].sum()), float(sums[:, 3].sum()))
    return Facts(alpha, times.break_even_alpha(k) if times else None)


# ---- decision ------------------------------------------------------------------------------------


def decide(
    evidence: Evidence,
    *,
    prompt_set: str = "all",
    weights: Mapping[str, float] | None = None,
    folds: int = FOLDS,
    seed: int = 0,
) -> Verdict:
    """The verdict on a workload, or on one prompt set of it.

    With fewer than MIN_PROMPTS prompts, or a set of one, nothing can be held out: the verdict is
    `undecided`, and its speedup the plain one of the best-looking candidate.

    `prompt_set` is "all" for the weighted workload, or one set, to which weights do not apply.
    Prompts are dealt into `folds` parts, fewer where they are few.
    """
    if prompt_set != "all":
        evidence, weights = evidence.only([prompt_set]), None
    undecided = Verdict(
        decision="undecided",
        speculate=False,
        draft=None,
        k=0,
        temperature=evidence.temperature,
        prompt_set=prompt_set,
        speedup=None,
        speedup_lo=None,
        speedup_hi=None,
        reason="no_complete_prompt",
        reason_values={"prompt_set": None},
    )
    asked = [name for name, weight in (weights or {}).items() if weight > 0]
    unseen = [name for name in asked if name not in evidence.prompt_sets]
    if unseen or not evidence.prompts or not evidence.candidates:
        return replace(undecided, reason_values={"prompt_set": next(iter(unseen), None)})
    workload = evidence.workload(weights)
    plain = workload.speedups()
    best = list(evidence.candidates)[int(np.argmax(plain))]
    several = len({name.draft for name in evidence.candidates}) > 1
    named: dict[str, Value] = {"draft": best.draft if several else None, "k": best.k}
    fit = cross_fit(workload, folds, seed)
    if fit is None:
        reason, values = _too_few(workload.prompt_sets)
        return replace(
            undecided,
            draft=best.draft,
            k=best.k,
            speedup=float(plain.max()),
            reason=reason,
            reason_values={**named, **values},
        )
    decision = _decision(fit)
    reason, values = _reason(decision, fit, len(workload.prompt_sets), evidence.facts.get(best))
    return replace(
        undecided,
        decision=decision,
        speculate=decision == "speculate",
        draft=None if decision == "does_not_pay" else best.draft,
        k=0 if decision == "does_not_pay" else best.k,
        speedup=fit.speedup,
        speedup_lo=fit.interval.lo,
        speedup_hi=fit.interval.hi,
        reason=reason,
        reason_values={**named, **values},
    )


def _decision(fit: CrossFit) -> Decision:
    if fit.chose == fit.folds and fit.interval.lo > 1.0:
        return "speculate"
    if fit.ceiling < 1.0 or (fit.chose == 0 and fit.interval.hi < 1.0):
        return "does_not_pay"
    return "undecided"


def _too_few(prompt_sets: tuple[str, ...]) -> tuple[VerdictReason, dict[str, Value]]:
    """Why there is no interval."""
    if len(prompt_sets) < MIN_PROMPTS:
        return "too_few_prompts", {"prompts": len(prompt_sets), "needed": MIN_PROMPTS}
    small = next(
        (name for name in prompt_sets if prompt_sets.count(name) < MIN_SET), prompt_sets[0]
    )
    return "too_few_in_set", {"prompt_set": small, "needed": MIN_SET}


def _reason(
    decision: Decision, fit: CrossFit, prompts: int, facts: Facts | None
) -> tuple[VerdictReason, dict[str, Value]]:
    """The code of a held-out verdict, and the numbers that it rests on."""
    if decision == "speculate":
        return "held_out_gain", {}
    if decision == "does_not_pay":
        facts = facts or Facts(None, None)
        return "held_out_loss", {"alpha": facts.alpha, "breakeven_alpha": facts.breakeven_alpha}
    return "interval_spans_one", {
        "prompts": prompts,
        "prompts_needed": _needed(fit, prompts),
        "most_prompts": MAX_PROMPTS,
    }


def _needed(fit: CrossFit, prompts: int) -> int | None:
    """About how many prompts would put 1 outside the interval, were the speedup as seen.

    The half width of the log speedup's interval shrinks with the square root of the number of
    prompts. None for more than MAX_PROMPTS.
    """
    half_width = math.log(fit.interval.hi / fit.interval.lo) / 2.0
    distance = abs(math.log(fit.speedup))
    if half_width >= distance * math.sqrt(MAX_PROMPTS / prompts):
        return None
    return max(prompts + 1, math.ceil(prompts * (half_width / distance) ** 2))


def least_regret(evidences: Mapping[str, Evidence]) -> tuple[str | None, int]:
    """The (draft, K) that gives away least if traffic shifts between prompt sets.

    Regret on a set is the best speedup there over this candidate's, and what counts is the worst
    set. No mix of sets can be worse than the worst set: the regret on a mix is a ratio of two sums
    that are linear in the mix. K = 0, speedup 1, is a candidate; plain speedups, no interval.

    (None, 0) if not speculating is the safest, or if nothing was measured.
    """
    filled = [evidence for evidence in evidences.values() if evidence.prompts]
    if not filled:
        return None, 0
    names = [name for name in filled[0].candidates if all(name in e.candidates for e in filled)]
    speedups = np.array([[1.0, *(_plain(evidence, name) for name in names)] for evidence in filled])
    regret = (speedups.max(axis=1, keepdims=True) / speedups).max(axis=0)
    best = int(np.argmin(regret))
    return (None, 0) if best == 0 else names[best - 1]


def _plain(evidence: Evidence, name: Candidate) -> float:
    before, after = evidence.baseline, evidence.candidates[name]
    seconds = before.seconds.sum() / after.seconds.sum()
    return float(seconds * after.tokens.sum() / before.tokens.sum())

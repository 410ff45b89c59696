"""The verdict: which draft and K to serve, or none, in a way that survives its own selection.

The best-looking of 8 candidates that all tie with plain decoding "wins" 12-18 % of the time. So the
candidate is chosen on folds of the prompts and scored on the held-out ones
(`harness.stats.crossfit`), with K = 0, speedup 1, among the choices:

- `speculate`: every fold chooses a K above 0 and the held-out speedup's lower bound is above 1;
- `does_not_pay`: every fold chooses K = 0, or the best candidate of each resample of the prompts
  stays below 1 (its upper bound does), so that no candidate is excused for being one of many;
- `undecided` otherwise, with about how many prompts would decide.

The draft and K that are named are the best on all prompts.
"""

import math
from collections.abc import Mapping

import numpy as np

from harness.analysis.evidence import Candidate, Evidence, Facts, Timed, evidence_from_trials
from harness.records import Decision, Verdict
from harness.stats.crossfit import Held, cross_fit, workload_of
from harness.stats.intervals import MIN_PROMPTS, MIN_SET

__all__ = ["Evidence", "Facts", "Timed", "decide", "evidence_from_trials", "least_regret"]

FOLDS = 4
MAX_PROMPTS = 10_000


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

    Args:
        evidence: of one temperature.
        prompt_set: "all" for the weighted workload, or the name of one set.
        weights: of the sets in the workload, equal if None; not used for one set.
        folds: parts that the prompts are dealt into; fewer where prompts are few.
        seed: of the dealing and the resampling.

    Raises:
        UserError: weights that do not fit the prompt sets.
    """
    if prompt_set != "all":
        evidence, weights = evidence.only([prompt_set]), None
    asked = [name for name, weight in (weights or {}).items() if weight > 0]
    unseen = [name for name in asked if name not in evidence.prompt_sets]
    if unseen or not evidence.prompts or not evidence.candidates:
        what = f"prompt set {unseen[0]!r} has no prompt" if unseen else "no prompt is"
        reason = f"{what} complete in every cell"
        return Verdict(
            "undecided", None, 0, evidence.temperature, prompt_set, None, None, None, reason
        )
    workload = workload_of(evidence, weights)
    plain = workload.plain()
    best = workload.candidates[int(np.argmax(plain))]
    held = cross_fit(workload, folds, seed)
    if held is None:
        reason = (
            f"{_too_few(workload.strata)}; the best so far is {_label(best, evidence)} at"
            f" {plain.max():.2f}x, not held out"
        )
        speedup, lo, hi, decision = float(plain.max()), None, None, "undecided"
    else:
        decision = _decision(held)
        reason = _reason(decision, held, len(workload.strata), best, evidence)
        speedup, (lo, hi) = held.speedup, held.interval
    draft, k = (None, 0) if decision == "does_not_pay" else best
    return Verdict(decision, draft, k, evidence.temperature, prompt_set, speedup, lo, hi, reason)


def _decision(held: Held) -> Decision:
    if held.chose == held.folds and held.interval.lo > 1.0:
        return "speculate"
    if held.ceiling < 1.0 or (held.chose == 0 and held.interval.hi < 1.0):
        return "does_not_pay"
    return "undecided"


def _too_few(strata: tuple[str, ...]) -> str:
    """Why there is no interval."""
    if len(strata) < MIN_PROMPTS:
        return f"{len(strata)} prompts, and below {MIN_PROMPTS} there is no interval"
    small = next((name for name in strata if strata.count(name) < MIN_SET), strata[0])
    return f"prompt set {small!r} needs at least {MIN_SET} prompts that differ"


def _label(best: Candidate, evidence: Evidence) -> str:
    """The candidate in words; its draft only where there are several."""
    draft, k = best
    several = len({draft for draft, _ in evidence.candidates}) > 1
    return f"{draft} with K={k}" if several else f"K={k}"


def _reason(decision: Decision, held: Held, n: int, best: Candidate, evidence: Evidence) -> str:
    """One sentence with the numbers that the decision rests on."""
    label = _label(best, evidence)
    measured = f"{held.speedup:.2f}x [{held.interval.lo:.2f}, {held.interval.hi:.2f}]"
    if decision == "speculate":
        return f"{label} gives {measured} on held-out prompts"
    if decision == "does_not_pay":
        return f"the best is {label} at {measured} on held-out prompts{_why(best, evidence)}"
    return f"the best is {label} at {measured} on held-out prompts of {n}; {_needed(held, n)}"


def _why(best: Candidate, evidence: Evidence) -> str:
    """How the candidate's alpha stands to the one its step times ask for."""
    facts = evidence.facts.get(best)
    if facts is None or facts.alpha is None:
        return ""
    if facts.breakeven_alpha is None:
        return f"; alpha is {facts.alpha:.2f}"
    if facts.alpha < facts.breakeven_alpha:
        return f"; alpha {facts.alpha:.2f} is below the {facts.breakeven_alpha:.2f} it needs"
    return (
        f"; alpha {facts.alpha:.2f} is not below the {facts.breakeven_alpha:.2f} that the steps"
        " need, so the loss is time outside the steps or stretches of low acceptance"
    )


def _needed(held: Held, n: int) -> str:
    """About how many prompts would put 1 outside the interval, were the speedup as seen.

    The half width of the log speedup's interval shrinks with the square root of n.
    """
    half_width = math.log(held.interval.hi / held.interval.lo) / 2.0
    distance = abs(math.log(held.speedup))
    if half_width >= distance * math.sqrt(MAX_PROMPTS / n):
        return f"more than {MAX_PROMPTS:,} prompts would be needed to tell it from 1"
    needed = max(n + 1, math.ceil(n * (half_width / distance) ** 2))
    return f"needs about {needed:,} prompts"


def least_regret(evidences: Mapping[str, Evidence]) -> tuple[str | None, int]:
    """The (draft, K) that gives away least if traffic shifts between prompt sets.

    Regret on a set is the best speedup there over this candidate's, and what counts is the worst
    set. No mix of sets can be worse than the worst set: the regret on a mix is a ratio of two sums
    that are linear in the mix. K = 0, speedup 1, is a candidate; plain speedups, no interval.

    Args:
        evidences: by prompt set, such as `Evidence.by_set()`.

    Returns:
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

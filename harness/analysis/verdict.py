"""The verdict: which draft and K to serve, or none.

It rests on seconds and tokens per prompt, of plain decoding and of every candidate, a (draft, K),
on the same prompts (`Evidence`). The best candidate is named, or the one that replay chose to be
measured. The best of 8 candidates that all tie with plain decoding "wins" 12-18 % of the time
(docs/decisions/0012): the speedup is the named one's, less the optimism of choosing it, and bounds
allow for the choice (`harness.stats.verdict_interval`).

- `speculate`: the speedup's lower bound is above 1;
- `does_not_pay`: the upper bound of every candidate is below 1;
- `undecided` otherwise, with what would decide it: more prompts, or less timing noise, or nothing.

A report prints many verdicts, and the chance that any of them is wrong is at most ONE_SIDED, which
they share (`in_turn`). An interval is the one that decides. "Every upper bound" needs no further
correction: a wrong `does_not_pay` means that the bound of one candidate, whichever pays, is wrong
(an intersection-union test: Berger, "Multiparameter hypothesis testing and acceptance sampling",
1982).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from harness.analysis.cells import (
    Count,
    PromptId,
    accepted,
    completed,
    decode_s,
    judged,
    latest,
    new_tokens,
    per_prompt,
    ratio,
    steadied,
)
from harness.records import Trial, grouped
from harness.stats.jackknife import (
    CONFIDENCE,
    MIN_PROMPTS,
    Array,
    Variance,
    Weights,
    half_width,
    joined,
    set_weights,
    strata,
    token_weights,
    workload_ratio,
)
from harness.stats.verdict_interval import MIN_MEASURED, Pairs, TwoPhase, most_measured, two_phase
from harness.stats.workload import SharedError, Workload
from harness.summary import Answer, CandidateSpeedup, Doubt, MeasuredPart, Values
from harness.theory.speedup import RoundTimes

# Chance of a wrong verdict in a report. What is true leaves a verdict one way to be wrong,
# `speculate` or `does_not_pay`, so this is the error of one bound.
ONE_SIDED = 0.025
# What part of it prompt sets have while the whole workload is undecided
SETS_SHARE = 0.1
# An interval within this of 1: whichever it is, it matters little.
NEAR = 0.05
# A number of prompts is named where it decides with this chance, up to so many times today's.
DECIDES = 0.9
MOST_TIMES = 10

# ---- evidence ------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """A draft at one K above 0; a probability below `p_min` ends its draft (0: never)."""

    draft: str
    k: int
    p_min: float = 0.0


@dataclass(frozen=True, eq=False)
class Timed:
    """Decode seconds and emitted tokens of each prompt, repetitions summed; n entries each.

    Of a candidate, where known, also what explains its speed: draft tokens accepted and judged,
    whose ratio is alpha, and the alpha that its round times ask for; None where there is none.
    """

    seconds: Array
    tokens: Array
    accepted: Array | None = None
    judged: Array | None = None
    breakeven_alpha: float | None = None
    generations: Array | None = None  # of each prompt, repetitions and turns

    def rows(self, keep: NDArray[np.bool_] | NDArray[np.intp]) -> "Timed":
        counts = (self.accepted, self.judged, self.generations)
        accepted, judged, generations = (None if each is None else each[keep] for each in counts)
        seconds, tokens = self.seconds[keep], self.tokens[keep]
        return Timed(seconds, tokens, accepted, judged, self.breakeven_alpha, generations)


@dataclass(frozen=True, eq=False)
class Evidence:
    """One temperature's measurements on the prompts that every cell completed."""

    temperature: float
    names: tuple[PromptId, ...]  # [prompt] with its set
    baseline: Timed
    candidates: Mapping[Candidate, Timed]  # by (draft, K), K > 0
    # Of predicted seconds: the errors of what rounds cost, in the order of the candidates. None
    # where the seconds were measured, or times were typed in and are taken as exact
    timing: tuple[SharedError, ...] = ()
    # The only one that was measured, where replay chose it: in pairs; or on all prompts, and then
    # the seconds of others follow from its own as replay has their rounds differ
    named: Candidate | None = None
    # Of the named one, by prompt set and id. Those of other prompts tell its price as well
    pairs: Pairs | None = None
    # The share of what is measured in all at each look so far; none of a run without looks
    looks: tuple[float, ...] = ()

    @property
    def prompt_sets(self) -> tuple[str, ...]:
        """[prompt] its set."""
        return tuple(prompt_set for prompt_set, _ in self.names)

    def only(self, prompt_sets: Sequence[str]) -> "Evidence":
        keep = np.array([name in prompt_sets for name in self.prompt_sets], dtype=bool)
        return replace(
            self,
            names=tuple(compress(self.names, keep)),
            baseline=self.baseline.rows(keep),
            candidates={name: timed.rows(keep) for name, timed in self.candidates.items()},
        )

    def workload(self, weights: Weights, error: Variance | None = None) -> Workload:
        """Candidates in order, sets of weight 0 left out, small ones joined; `error` of each."""
        shares = set_weights(self.prompt_sets, weights)
        evidence = self.only([name for name, share in shares.items() if share > 0.0])
        sets, timing = evidence.prompt_sets, self.timing
        if error is not None:
            moves = math.sqrt(float(error.value)) * np.eye(len(self.candidates))
            timing = (*timing, SharedError(moves, float(error.degrees)))
        every = (evidence.baseline, *evidence.candidates.values())
        tokens = np.stack([timed.tokens for timed in every])
        # Sets that are joined keep their weights
        factors, joined_sets = token_weights(sets, tokens, shares), strata(sets)
        seconds, tokens = factors * np.stack([timed.seconds for timed in every]), factors * tokens
        return Workload(
            baseline_s=seconds[0],
            baseline_tokens=tokens[0],
            seconds=seconds[1:],
            tokens=tokens[1:],
            prompt_sets=tuple(joined_sets[name] for name in sets),
            weights={
                stratum: sum(shares[name] for name in names)
                for stratum, names in grouped(joined_sets, joined_sets.__getitem__).items()
            },
            timing=timing,
            names=evidence.names,
        )

    def estimate(self, workload: Workload, seed: int) -> TwoPhase | None:
        """The speedup of the named candidate with its errors; None with too few prompts."""
        names = list(self.candidates)
        return two_phase(
            workload,
            self.pairs,
            candidate=None if self.named is None else names.index(self.named),
            alike=self.named and [name.draft == self.named.draft for name in names],
            looks=self.looks or (1.0,),
            seed=seed,
        )

    def best_looking(self, workload: Workload) -> tuple[Candidate, float]:
        """The candidate that was measured, else the one of the largest speedup; its speedup."""
        names, logs = list(self.candidates), workload.log_speedups.value
        named = int(logs.argmax()) if self.named is None else names.index(self.named)
        price = 0.0 if self.pairs is None else self.pairs.log_price
        return names[named], math.exp(float(logs[named]) - price)

    def speedups(self, weights: Weights) -> dict[Candidate, float]:
        """The speedups on the workload; empty without a prompt that is complete in every cell."""
        if not self.names or not self.candidates:
            return {}
        speedups = np.exp(self.workload(weights).log_speedups.value).tolist()
        return dict(zip(self.candidates, speedups, strict=True))

    def mean(self, counts: Array | None, per: Array | None, weights: Weights) -> float | None:
        """A ratio of such counts on the weighted workload; None where either is not known."""
        if counts is None or per is None:
            return None
        return float(workload_ratio(counts, per, self.prompt_sets, weights).value)

    def alphas(self, name: Candidate, weights: Weights) -> Values:
        """A candidate's alpha on the weighted workload, and the alpha that it needs."""
        timed = self.candidates[name]
        kept, judged = (
            self.mean(each, timed.tokens, weights) for each in (timed.accepted, timed.judged)
        )
        return {"alpha": ratio(kept, judged), "breakeven_alpha": timed.breakeven_alpha}


# Seconds, tokens, accepted and judged drafts, generations
COUNTS: tuple[Count, ...] = (decode_s, new_tokens, accepted, judged, lambda _: 1.0)


def evidence_from_trials(
    trials: Sequence[Trial],
    *,
    draft: str,
    temperature: float,
    times: RoundTimes | None,
    steady: bool = False,
    p_min: float = 0.0,
) -> Evidence:
    """The evidence of one pair at one temperature, on the prompts complete in every cell.

    A prompt is complete in a cell when every repetition seen at this temperature, of every turn
    where it is a conversation, finished there. A K that completed fewer than half of the baseline's
    prompts (out of memory, say) is left out, rather than every prompt that it failed; so is one
    that failed most of a single set, unless every K did. With `steady` seconds are winsorised;
    those of a server are low quantiles already.
    """
    considered = [trial for trial in latest(trials) if trial.temperature == temperature]
    kept = _kept(considered, times if steady else None)
    # A server may not tell how its rounds ended
    uncounted = {t.k for t in completed(considered) if t.accepted is None or t.rejected is None}
    names = sorted(name for name in kept[0] if all(name in cell for cell in kept.values()))
    timed: dict[Candidate, Timed] = {}
    for k, cell in kept.items():
        columns = np.array([cell[name] for name in names]).reshape(-1, len(COUNTS)).T
        seconds, tokens, accepted_tokens, judged_tokens, generations = columns
        of_k = Timed(seconds, tokens, generations=generations)
        if k > 0 and k not in uncounted:
            alpha = times.break_even_alpha(k) if times else None
            of_k = Timed(seconds, tokens, accepted_tokens, judged_tokens, alpha)
        timed[Candidate(draft, k, p_min)] = of_k
    return Evidence(temperature, tuple(names), timed.pop(Candidate(draft, 0, p_min)), timed)


def _kept(trials: Sequence[Trial], times: RoundTimes | None) -> dict[int, dict[PromptId, Array]]:
    """By K that is not left out, the sums of `COUNTS` of each prompt that is complete there."""
    repetitions = len({trial.repetition for trial in trials})
    turns = Counter(name for name, _ in {((t.prompt_set, t.conversation), t.turn) for t in trials})
    kept: dict[int, dict[PromptId, Array]] = {0: {}}
    for k, of_k in sorted(grouped(trials, lambda trial: trial.k).items()):
        sums = per_prompt(steadied(of_k, times), COUNTS)
        cell = {name: row for name, row in sums.items() if row[-1] == repetitions * turns[name]}
        if 2 * len(cell) >= len(kept[0]):
            kept[k] = cell
    failed = {k for k in kept if k and _mostly_failed([t for t in trials if t.k == k])}
    return {k: cell for k, cell in kept.items() if k not in failed or {0, *failed} == {*kept}}


def _mostly_failed(trials: Sequence[Trial]) -> bool:
    prompts = {(t.prompt_set, t.conversation) for t in trials}
    failed = {(t.prompt_set, t.conversation) for t in trials if t.status == "failed"}
    sizes, failures = (Counter(name for name, _ in each) for each in (prompts, failed))
    return any(2 * failures[name] > size for name, size in sizes.items())


# ---- decision ------------------------------------------------------------------------------------


def decide(
    evidence: Evidence,
    error: float = ONE_SIDED,
    *,
    prompt_set: str = "all",
    weights: Weights = None,
    seed: int = 0,
) -> Answer:
    """The verdict on a workload, or on one prompt set of it, as an answer of no engine yet.

    With fewer than MIN_PROMPTS prompts there is no interval: the verdict is `undecided`, and its
    speedup the plain one of the best-looking candidate. A prompt set of fewer than MIN_SET counts
    in the workload with its weight, and has no verdict of its own. `error` is the verdict's part of
    the report's, one-sided; `weights` do not apply to one `prompt_set`.
    """
    of_all_sets = len(evidence.names)
    if prompt_set != "all":
        evidence, weights = evidence.only([prompt_set]), None
    asked = [name for name, weight in (weights or {}).items() if weight > 0]
    unseen = next((name for name in asked if name not in evidence.prompt_sets), None)
    lacking: Values = {"prompt_set": unseen}
    undecided = Answer.undecided(evidence.temperature, prompt_set, "no_complete_prompt", lacking)
    if unseen is not None or not evidence.names or not evidence.candidates:
        return undecided
    workload, level = evidence.workload(weights), 1.0 - 2.0 * error
    fit, plain = evidence.estimate(workload, seed), evidence.baseline
    best, looks_like = evidence.best_looking(workload)
    named: Values = {"draft": best.draft, "k": best.k}
    if best.p_min:
        named = {**named, "p_min": best.p_min}
    verdict = replace(
        undecided,
        draft=best.draft,
        k=best.k,
        p_min=best.p_min or None,
        speedup=looks_like,
        candidates=_candidates(evidence, workload, best, fit),
        plain_s=evidence.mean(plain.seconds, plain.tokens, weights),
        request_tokens=evidence.mean(plain.tokens, plain.generations, weights),
    )
    if fit is None:
        values = {**named, **_too_few(workload, evidence.pairs)}
        return replace(verdict, reason="too_few_prompts", reason_values=values)
    verdict = _with_interval(verdict, fit, level, evidence.pairs)
    if (verdict.speedup_lo or 0.0) > 1.0:
        verdict = replace(verdict, decision="speculate")
        reason, values = "held_out_gain", {}
    elif fit.ceiling(level) < 1.0:
        verdict = replace(verdict, decision="does_not_pay", draft=None, k=0, p_min=None)
        reason, values = "held_out_loss", evidence.alphas(best, weights)
    else:
        reason, values = _why_undecided(verdict, fit, workload, level, of_all_sets)
    return replace(verdict, reason=reason, reason_values={**named, "level": level, **values})


def _with_interval(verdict: Answer, fit: TwoPhase, level: float, pairs: Pairs | None) -> Answer:
    interval, part = fit.interval(level), None
    if pairs is not None:
        part = MeasuredPart(fit.number, len({*pairs.prompts}), *fit.on_these_prompts())
    return replace(
        verdict,
        speedup=fit.speedup,
        speedup_lo=interval.lo,
        speedup_hi=interval.hi,
        chance=fit.chance,
        gain=math.expm1(fit.score + float(fit.variance.value) / 2.0),
        pairs=part,
    )


def _candidates(
    evidence: Evidence, workload: Workload, best: Candidate, fit: TwoPhase | None
) -> tuple[CandidateSpeedup, ...]:
    """The speedups of all candidates, and which are as fast as the best within the error.

    All are "measured" here, but for those that were not where replay chose the one that was. What
    measured rounds cost next to the price that replay has of them holds for all candidates.
    """
    names, logs = list(evidence.candidates), workload.log_speedups.value
    place = names.index(best)
    tied = np.zeros(len(names), dtype=bool)
    scores = logs if fit is None else fit.scores
    if fit is not None:
        error = half_width(workload.variance(place), CONFIDENCE)
        tied = np.abs(logs - logs[place]) <= error
    return tuple(
        CandidateSpeedup(
            name.draft,
            name.k,
            math.exp(float(score)),
            bool(equal) and name != best,
            "measured" if evidence.named in (None, name) else "replayed",
            math.exp(float(log)),
            name.p_min or None,
        )
        for name, score, log, equal in zip(names, scores, logs, tied, strict=True)
    )


def in_turn(
    verdict_on: Callable[[str, float], Answer], prompt_sets: Sequence[str], error: float
) -> Iterator[Answer]:
    """The verdicts on a workload and on its prompt sets, with one error between them.

    The workload comes first. Its sets share what it leaves them: a small part, so that sets which
    differ much are told apart whatever the mix; all of the error once the workload is decided. What
    they have they share by Holm's procedure: a set that is decided leaves its part to the others.
    Source: Wiens, "A fixed sequence Bonferroni procedure for testing multiple endpoints", 2003; at
    interim looks Maurer and Bretz, "Multiple testing in group sequential trials using graphical
    approaches", 2013.
    """
    workload = verdict_on("all", error * (1.0 - SETS_SHARE if prompt_sets else 1.0))
    yield workload
    shared = SETS_SHARE * error if workload.decision == "undecided" else error
    of_sets: dict[str, Answer] = {}
    left = list(prompt_sets)
    while left:
        of_sets |= {name: verdict_on(name, shared / len(left)) for name in left}
        undecided = [name for name in left if of_sets[name].decision == "undecided"]
        left = undecided if len(undecided) < len(left) else []
    yield from (of_sets[name] for name in prompt_sets)


def closed(verdict: Answer) -> bool:
    """True where a verdict is decided, or too near 1 for more measurements to matter."""
    return verdict.decision != "undecided" or verdict.reason == "near_one"


def _too_few(workload: Workload, pairs: Pairs | None) -> Values:
    """The number of prompts and the number needed: replayed ones, else measured ones."""
    prompts = len(workload.prompt_sets)
    if prompts < MIN_PROMPTS or pairs is None:
        return {"prompts": prompts, "needed": MIN_PROMPTS}
    return {"prompts": len({*pairs.prompts}), "needed": MIN_MEASURED}


def _why_undecided(
    verdict: Answer, fit: TwoPhase, workload: Workload, level: float, of_all_sets: int
) -> Doubt:
    lo, hi, pairs = verdict.speedup_lo or 0.0, verdict.speedup_hi or math.inf, verdict.pairs
    if lo >= 1.0 - NEAR and hi <= 1.0 + NEAR:
        return "near_one", {"near": NEAR}
    needed = _needed(fit, level, pairs, of_all_sets)
    timing_share = _timing_share(fit, workload, pairs)
    if timing_share <= 0.5:
        return "interval_spans_one", needed
    measured = pairs is not None or not workload.timing
    values: Values = {"timing_share": timing_share, "measured": measured}
    return "timing_noise", {**values, **needed} if pairs else values


def _timing_share(fit: TwoPhase, workload: Workload, pairs: MeasuredPart | None) -> float:
    """The share of the variance that is due to timing and not to what the prompts are.

    Of two phases that of the pairs. Of predicted seconds the visits' part. Of measured seconds,
    what plain decoding shows: its seconds per token hardly depend on the prompt, so their scatter
    is the machine's, and a speedup is a ratio of two such times.
    """
    total, timing = float(fit.variance.value), float(fit.of_named(fit.timing).value)
    if pairs is None:
        sums = workload.baseline_s, workload.baseline_tokens
        plain = workload_ratio(*sums, workload.prompt_sets, workload.weights)
        timing += 2.0 * (plain.log().standard_error or 0.0) ** 2
    return min(1.0, timing / total) if total > 0.0 else 0.0


def _needed(fit: TwoPhase, level: float, pairs: MeasuredPart | None, of_all_sets: int) -> Values:
    """About how many prompts would decide with a chance of DECIDES; None beyond MOST_TIMES today's.

    The speedup is known only as well as its error now says, so that a run of more prompts errs by
    both errors. The prompts' part of the variance shrinks with their number. That of timing shrinks
    with the number of measured ones, of which there are as many as a run of so many has, and stays
    where none is measured next to plain decoding.
    """
    prompts = fit.number
    number = np.arange(prompts, MOST_TIMES * prompts + 1)
    more, grown = number / prompts, np.ones(len(number))
    measured = [most_measured(math.ceil(of_all_sets * times)) for times in more.tolist()]
    if pairs is not None:
        grown = np.array(measured) / pairs.measured
    parts = (fit.of_named(fit.prompts), more), (fit.of_named(fit.timing), grown)
    variance = joined(Variance(one.value / times, one.degrees * times) for one, times in parts)
    margin = abs(fit.score) - half_width(variance, level)
    decides = margin >= ndtri(DECIDES) * np.sqrt(variance.value + fit.variance.value)
    decides &= (more > 1.0) | (grown > 1.0)
    at = int(decides.argmax()) if decides.any() else None
    values: Values = {"prompts": prompts}
    values["prompts_needed"] = None if at is None else int(number[at])
    if pairs is not None:
        values["pairs_needed"] = None if at is None else measured[at]
    return values

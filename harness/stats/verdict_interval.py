"""The speedup of the best of several candidates, with bounds that allow for the choice.

Texts differ far more in how many rounds they take than rounds differ in what they cost, and replay
counts the rounds of every candidate on a text that was decoded plainly once. So every prompt is
decoded plainly and replayed, one candidate is chosen, and it alone is measured, next to plain
decoding, on a random part of the prompts (two-phase, or double, sampling: Neyman, "Contribution to
the theory of sampling human populations", 1938; Cochran, "Sampling Techniques", 1977, chapter 12).
With T tokens, r the cost of a text's rounds in plain tokens by round times R that were timed apart,
w the weights of the prompt sets, and s and p the seconds of a measured pair, the log speedup is

    L = -ln(sum over sets of w x sum r / sum T) - g,  g = mean of ln(s / r) - ln(p / T),

the first term over all prompts, g over the measured pairs, which count by r / T, the cost of a
token of their text. An error of R is in both terms and cancels. Without measured pairs L is the
first term alone, of seconds that were predicted or, at every K, measured.

The error of L is the jackknife's over prompts, and that of timing (`Workload.timing`). Both sides
of g are winsorised next to the pairs around them (`spread_winsorised`). Where a machine drifts, so
that contiguous blocks of time vary significantly more than independent pairs would, the variance of
g is that of the blocks.

A lower bound holds for all candidates at once: it is so many standard errors below L as the largest
of their errors exceeds with the chance of an error, by draws with the jackknife's covariance. What
candidates share (g, and most of what prompts do) is no part of the choice, hence these are few more
standard errors than Student's. Candidates that are clearly worse than the chosen one do not count
(as in Hansen, "A test for superior predictive ability", 2005). Times are skew, so that L is too
high where its error looks small: see `jackknife.skew_term`. An upper bound is Student's, since a
choice and skew times err upwards.

Looks at a run that goes on share the error as Lan and DeMets spend it ("Discrete sequential
boundaries for clinical trials", 1983), with the square of the share of pairs (Kim and DeMets,
"Design and analysis of group sequential tests based on the type I error spending rate function",
1987). The replayed prompts are known at the first look, so the looks are more alike than the bounds
assume, which is on the safe side. Intervals hold the truth at all looks together (Jennison and
Turnbull, "Interim analyses: the repeated confidence interval approach", 1989).

What else was tried, and how often these bounds err: docs/decisions/0018 and 0030.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from scipy.optimize import brentq
from scipy.special import fdtrc, ndtr, stdtr, stdtrit

from harness.stats.jackknife import (
    CONFIDENCE,
    MIN_SET,
    Array,
    Index,
    Interval,
    Variance,
    enough_prompts,
    half_width,
    independent_errors,
    joined,
    left_out_variance,
    skew_term,
)
from harness.stats.workload import Workload

LOOKS = 4
# Exponent of the share of pairs, of the error that is spent by then
SPENDING = 2.0
# Prompts up to which all are measured; of more, half is
ALL_MEASURED = 64
# Share of the pairs at either end of which a side is winsorised
WINSORISED = 0.25
# Pairs around one, itself among them, next to which it may be far
NEIGHBOURS = 11
# Of the test that blocks of time vary more than pairs do
DRIFTS = 0.3
# Contiguous, of time
BLOCKS = 10
# Measured prompts below which g has no error to speak of
MIN_MEASURED = MIN_SET
# Standard errors of the difference by which a candidate is clearly worse
CLEARLY = 3.0
# Bounds of a log speedup that say no more than that nothing is known
BEYOND = math.log(1000.0)
# For the quantile of the largest error, and the optimism of the choice; in so many strata
DRAWS, STRATA = 1024, 64
# The least and, taken off 1, the most that two variance estimates share
SHARED = 1e-6
# Of the numerical integrals behind the bounds: nodes, and standard deviations that they reach down
NODES, REACH = 240, 12.0


@dataclass(frozen=True, eq=False)
class Pairs:
    """A candidate and plain decoding, measured next to one another, in the order of time."""

    prompts: tuple[Hashable, ...]  # [pair] by name, in the workload (`Workload.names`) or not
    seconds: Array  # [pair] of the candidate
    # [pair] of its rounds, in plain tokens, by the round times that predict the workload
    cost: Array
    # plain_s, plain_tokens: [pair] of plain decoding
    plain_s: Array
    plain_tokens: Array

    @property
    def sides(self) -> tuple[Array, Array]:
        """[pair] what a round took next to its prediction, and a plain token, as logarithms.

        Winsorised, so that their means differ by g, and spread, so that these err as g does.
        """
        rounds, plain = self.seconds / self.cost, self.plain_s / self.plain_tokens
        return spread_winsorised(np.log(rounds)), spread_winsorised(np.log(plain))

    @property
    def log_prices(self) -> Array:
        """[pair] how much longer the candidate's rounds took than predicted, as a logarithm."""
        rounds, plain = self.sides
        return rounds - plain

    @property
    def log_price(self) -> float:
        """g, their mean: texts count by what a token of theirs costs, as in the sums."""
        return float(np.average(self.log_prices, weights=self.weights))

    @property
    def weights(self) -> Array:
        """[pair] what a token of the text costs next to one of all texts."""
        weights = self.cost / self.plain_tokens
        return weights / weights.mean()


@dataclass(frozen=True, eq=False)
class TwoPhase:
    """Outcome; speedups are logarithms, variances those of the logarithms."""

    named: int  # the candidate that was measured, or is the best of all
    scores: Array  # [candidate] of all prompts, at the price that was measured of the named one
    optimism: float  # what the choice of the named one adds to its score on average
    # prompts, timing: [candidate] the parts of the scores' variances that more prompts would lower,
    # and that more pairs or visits on the same prompts would; of candidates other than the named
    # one with the error of their relative price
    prompts: Variance
    timing: Variance
    # [candidate, part] independent parts of the scores' errors, those of relative prices left out
    errors: Array
    by_prompt: Array  # of the named one's errors, those of each prompt
    number: int  # of prompts replayed
    looks: tuple[float, ...]  # so far, share of all that is measured at each
    seed: int  # of the draws

    @property
    def score(self) -> float:
        """The named candidate's, without the optimism of its choice."""
        return float(self.scores[self.named]) - self.optimism

    @property
    def speedup(self) -> float:
        return math.exp(self.score)

    @property
    def chance(self) -> float:
        """The chance that the named candidate gains, by Student's distribution around its score."""
        deviation = math.sqrt(float(self.variance.value))
        if deviation == 0.0:
            return float(self.score > 0.0)
        return float(stdtr(float(self.variance.degrees), self.score / deviation))

    @property
    def variances(self) -> Variance:
        """The variances of the scores, [candidate]."""
        return joined([self.prompts, self.timing])

    @property
    def variance(self) -> Variance:
        """The variance of the logarithm of the named candidate's speedup."""
        return self.of_named(self.variances)

    def of_named(self, variances: Variance) -> Variance:
        """The named candidate's of such variances."""
        return Variance(*(np.asarray(each[self.named]) for each in variances))

    def interval(self, level: float) -> Interval:
        """The interval of the named candidate's speedup; its level is of all looks."""
        error = nominal_error((1.0 - level) / 2.0, self.looks)
        value, deviation = self.scores[self.named], math.sqrt(float(self.variance.value))
        degrees = float(self.variance.degrees)
        # The named candidate's rivals are those that are not clearly worse, itself among them
        between = ((self.errors - self.errors[self.named]) ** 2).sum(axis=1)
        rivals = self.errors[value - self.scores <= CLEARLY * np.sqrt(between)]
        lower = largest_quantile(rivals @ rivals.T, degrees, error, self.seed)
        lower += float(skew_term(self.by_prompt, self.variance.value, self.number, lower))
        upper = -float(stdtrit(degrees, error))
        return Interval(_speedup(value - lower * deviation), _speedup(value + upper * deviation))

    def ceiling(self, level: float) -> float:
        """The largest upper bound of any candidate's speedup."""
        error = nominal_error((1.0 - level) / 2.0, self.looks)
        variances = self.variances
        upper = -stdtrit(variances.degrees, error) * np.sqrt(variances.value)
        return _speedup(float((self.scores + upper).max()))

    def on_these_prompts(self) -> Interval:
        """The interval on the prompts of the run: the error of timing alone."""
        half = float(half_width(self.of_named(self.timing), CONFIDENCE))
        value = self.scores[self.named]
        return Interval(_speedup(value - half), _speedup(value + half))


def _speedup(log: float) -> float:
    """A bound, which an early look on few pairs may put beyond all numbers."""
    return math.exp(min(max(log, -BEYOND), BEYOND))


def two_phase(
    workload: Workload,
    pairs: Pairs | None = None,
    *,
    candidate: int | None = None,
    alike: Sequence[bool] | None = None,
    looks: tuple[float, ...] = (1.0,),
    seed: int,
) -> TwoPhase | None:
    """Judge one candidate on all prompts of a workload; None with too few, replayed or measured.

    Args:
        workload: seconds of every candidate, predicted from replayed rounds where there are pairs.
        pairs: of one of them, which was chosen on this workload or on one that holds it.
        candidate: its position in the workload; None for the best.
        alike: [candidate] True where its rounds were timed with the named one's; None for all.
        looks: the share of all that is measured at each look so far.
        seed: of the draws.
    """
    logs = workload.log_speedups
    if not enough_prompts(logs.prompt_sets):
        return None
    if pairs is not None and len({*pairs.prompts}) < MIN_MEASURED:
        return None
    named = int(logs.value.argmax()) if candidate is None else candidate
    # Optimism is that of rounds alone where pairs measure what they cost
    by_choice = workload.errors if pairs is None else logs.errors
    fit = TwoPhase(
        named=named,
        scores=logs.value,
        optimism=_optimism(logs.value, by_choice @ by_choice.T, seed),
        prompts=workload.prompt_variance(),
        timing=workload.timing_variance(),
        errors=workload.errors,
        by_prompt=logs.errors[named],
        number=len(logs.prompt_sets),
        looks=looks,
        seed=seed,
    )
    if pairs is None:
        return fit
    same = np.ones(len(logs.value)) if alike is None else np.array(alike, dtype=np.float64)
    return _at_measured_price(fit, workload, pairs, same)


def _at_measured_price(fit: TwoPhase, workload: Workload, pairs: Pairs, same: Array) -> TwoPhase:
    """The outcome with g; [candidate] `same` is 1.0 for those whose rounds it prices, else 0.0."""
    names = [*dict.fromkeys([*(workload.names or range(fit.number)), *pairs.prompts])]
    place = {name: row for row, name in enumerate(names)}
    price = _Price.of(pairs, np.array([place[name] for name in pairs.prompts]))
    rounds = workload.log_speedups.errors
    by_prompt = np.pad(rounds, ((0, 0), (0, len(names) - fit.number)))  # measured ones beyond it
    by_prompt[:, price.prompts] -= np.outer(same, price.errors)
    without_price = (by_prompt**2).sum(axis=1) - same * price.by_prompts.value
    # Its variance, and where the candidates were timed together that of their relative prices
    timing = Variance(same * price.variance.value, price.variance.degrees + 0.0 * same)
    relative = workload.timing_variance(fit.named, same)
    # What drift adds to the scatter of the pairs; of the others their own round times
    drift = np.sqrt(price.variance.value - price.by_prompts.value) * same
    others = [(1.0 - same)[:, None] * error.moves for error in workload.timing]
    return replace(
        fit,
        scores=fit.scores - same * price.mean,
        prompts=Variance(np.maximum(without_price, 0.0), fit.prompts.degrees),
        timing=joined([timing, relative]),
        errors=np.hstack([by_prompt, drift[:, None], *others]),
        by_prompt=by_prompt[fit.named],
    )


@dataclass(frozen=True, eq=False)
class _Price:
    """g: how much longer the rounds of the pairs took than their prediction, as a logarithm."""

    mean: float
    # prompts, errors: [measured prompt] which, and its independent part of the error of g
    prompts: Index
    errors: Array
    by_prompts: Variance  # the variance of g by the prompts' jackknife
    variance: Variance  # by that of blocks of time where the machine drifts, by prompts elsewhere

    @classmethod
    def of(cls, pairs: Pairs, prompts: Index) -> "_Price":
        """The winsorised mean of the pairs, which are of these prompts, and its errors."""
        values = pairs.log_prices
        measured, place = np.unique(prompts, return_inverse=True)
        without, sizes = _without_groups(values, place, pairs.weights)
        value, degrees = left_out_variance(without, sizes)
        # Values that are winsorised add no freedom; each side has its own
        kept = max(1.0, len(sizes) - 2 * int(WINSORISED * len(sizes)) - 1.0)
        sides = joined(Variance(side.var(), np.array(kept)) for side in pairs.sides)
        by_prompts = Variance(value, np.minimum(sides.degrees, degrees))
        blocks = min(BLOCKS, len(values))
        block = np.arange(len(values)) * blocks // len(values)
        by_blocks = left_out_variance(*_without_groups(values, block, pairs.weights))
        larger = by_blocks.value > value
        if larger and value > 0.0:
            larger = fdtrc(by_blocks.degrees, by_prompts.degrees, by_blocks.value / value) < DRIFTS
        variance = by_blocks if larger else by_prompts
        return cls(pairs.log_price, measured, independent_errors(without), by_prompts, variance)


def spread_winsorised(values: Array, share: float = WINSORISED) -> Array:
    """Values in order of time, winsorised by their distance from the median of those around them.

    So drift is kept, and a few disturbed values do not move the mean. They are spread, so that
    their mean errs as a winsorised mean does; `share` is that at either end.

    Source: Dixon and Tukey, "Approximate behavior of the distribution of winsorized t", 1968: the
    winsorised values' standard error times (n - 1) / (h - 1), h of n values being left as they are.
    """
    number = len(values)
    width, cut = min(NEIGHBOURS, number), int(share * number)
    medians = np.median(np.lib.stride_tricks.sliding_window_view(values, width), axis=1)
    around = medians[np.clip(np.arange(number) - width // 2, 0, number - width)]
    distances = values - around
    ordered = np.sort(distances)
    kept = np.clip(distances, ordered[cut], ordered[number - 1 - cut])
    middle = kept.mean()
    return around + middle + (kept - middle) * (number - 1) / max(1, number - 2 * cut - 1)


def _without_groups(values: Array, group: Index, weights: Array) -> tuple[Array, Array]:
    """The mean without each group of values, and the groups' sizes, by weight."""
    sums, sizes = (
        np.bincount(group, each).astype(np.float64) for each in (weights * values, weights)
    )
    return (sums.sum() - sums) / (sizes.sum() - sizes), sizes


def _optimism(scores: Array, covariance: Array, seed: int) -> float:
    """The mean excess of the best of such scores, [candidate].

    Scores spread by their errors too. So they are drawn around scores that spread that much less
    (James and Stein, "Estimation with quadratic loss", 1961).
    """
    by_errors = float(np.diagonal(covariance).mean() - covariance.mean())
    spread = float(scores.var())
    kept = max(0.0, 1.0 - by_errors / spread) if spread > 0.0 else 0.0
    drawn = np.random.default_rng(seed).normal(size=(DRAWS, len(scores))) @ _root(covariance)
    drawn -= drawn.mean(axis=0)
    best = (kept * scores + drawn).argmax(axis=1)
    return float(drawn[np.arange(DRAWS), best].mean())


def _root(covariance: Array) -> Array:
    """The factor by which independent standard normal numbers get this covariance."""
    values, vectors = np.linalg.eigh(covariance)
    return (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T


# ---- bounds --------------------------------------------------------------------------------------


def largest_quantile(covariance: Array, degrees: float, error: float, seed: int) -> float:
    """The quantile that the largest of several Student's t exceeds with the chance `error`.

    The chance that any of m exceeds q is m times the chance that a given one does, times the mean,
    given that one drawn at random does, of 1 / how many do. So rare errors take no more draws.
    Each t has a variance estimate of its own; two of them correlate as the square of what they are
    of does. With one estimate for all, 24 prompts of 32 candidates erred twice as often as asked.

    Source: Naiman and Priebe, "Computing scan statistic p values using importance sampling", 2001.

    `covariance` is [candidate, candidate] and scaled to variances of 1; `error` is one-sided.
    """
    least = -float(stdtrit(degrees, error))
    deviations = np.sqrt(np.diagonal(covariance))
    candidates = len(deviations)
    if candidates == 1 or not deviations.all():
        return least
    correlation = covariance / np.outer(deviations, deviations)
    rng = np.random.default_rng(seed)
    given, draws = rng.integers(candidates, size=DRAWS), np.arange(DRAWS)
    uniform, to_given = (np.arange(STRATA) + 0.5) / STRATA, correlation[:, given]
    normal = _root(correlation) @ rng.normal(size=(candidates, DRAWS))
    rest = normal - to_given * normal[given, draws]
    # A t and the chi-squared number below it, given that t; a part of that is in the others'
    chi_squared = rng.chisquare(degrees + 1.0, DRAWS)
    in_both = np.clip(to_given**2, SHARED, 1.0 - SHARED) * degrees
    part = rng.beta(in_both / 2.0, (degrees - in_both) / 2.0)
    own = rng.chisquare(degrees - in_both)

    def excess(quantile: float) -> float:
        """Log of the chance that the largest exceeds it, over the error."""
        alone = float(stdtr(degrees, -quantile))
        values = np.resize(-stdtrit(degrees, alone * uniform), DRAWS)
        below = chi_squared / (1.0 + values**2 / degrees)
        of_given = values * np.sqrt(below / degrees)
        others = (to_given * of_given + rest) / np.sqrt((part * below + own) / degrees)
        others[given, draws] = np.inf
        in_common = float((1.0 / (others > quantile).sum(axis=0)).mean())
        return math.log(candidates * alone * in_common / error)

    most = -float(stdtrit(degrees, error / candidates))
    if excess(least) <= 0.0:
        return least
    if excess(most) >= 0.0:  # by the luck of the draws
        return most
    return float(brentq(excess, least, most + 1e-6, xtol=1e-3))


def _crossing(bound: float, at: Array, mass: Array, step: float, spend: float) -> float:
    """The chance of crossing a bound one step on, less what may be spent."""
    return float(mass @ ndtr((at - bound) / step)) - spend


@cache
def nominal_error(error: float, looks: tuple[float, ...]) -> float:
    """The one-sided error of the last of several looks, so that all of them together err that much.

    Source: Lan and DeMets, 1983, with the spending function of Kim and DeMets, 1987; the chance of
    crossing by the recursion of Armitage, McPherson and Rowe, "Repeated significance tests on
    accumulating data", 1969.

    Args:
        error: of all looks together.
        looks: share of the information at each so far, ascending; 1.0 is the last of all.
    """
    points, weights = np.polynomial.legendre.leggauss(NODES)
    # The statistic is a Brownian motion over the shares, here at 0 to begin with
    at, mass, spent, before, nominal = np.zeros(1), np.ones(1), 0.0, 0.0, error
    for share in looks:
        # What is spent of the error at a share of the information
        spends = error * share**SPENDING
        step, spend = math.sqrt(share - before), spends - spent
        far = REACH * math.sqrt(share)
        bound = float(brentq(_crossing, -far, far, args=(at, mass, step, spend)))
        nominal = float(ndtr(-bound / math.sqrt(share)))
        # The motion where it has not crossed any bound
        half = (bound + far) / 2.0
        inside = bound - half + half * points
        density = np.exp(-0.5 * ((inside[:, None] - at) / step) ** 2) @ mass
        at, mass = inside, half * weights * density / (step * math.sqrt(2.0 * math.pi))
        spent, before = spent + spend, share
    return nominal


def most_measured(replayed: int) -> int:
    """The number of prompts that are measured at most where so many are replayed.

    A text that is decoded in a batch and replayed costs a fraction of a measured pair, and texts
    differ more than pairs do.
    """
    return min(replayed, max(ALL_MEASURED, math.ceil(replayed / 2)))


def look_shares(look: int) -> tuple[float, ...]:
    """The shares of all that is measured at the looks so far; LOOKS are of one size."""
    return tuple((each + 1) / LOOKS for each in range(look))

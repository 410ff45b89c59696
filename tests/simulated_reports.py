"""Simulated reports of known truth, for the coverage test and benchmarks/interval_coverage.py.

A report has two temperatures of two prompt sets, so two verdicts on the whole workload and four on
single sets, each a choice among four drafts at eight K. Every world has the true speedups that were
asked for: seconds are tokens / speedup, times what prompts differ by and what timing adds, both of
mean 1. Tokens, prompts and timings are drawn anew for every temperature.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
from scipy.signal import lfilter
from scipy.stats import trim_mean

from harness.analysis.verdict import ONE_SIDED, Candidate, Evidence, Timed, decide, in_turn
from harness.stats.jackknife import independent_errors, share_interval
from harness.stats.workload import TRIMMED, SharedError, visit_error
from harness.summary import Answer

DRAFTS, KS = 4, 8
SETS = ("easy", "hard")
CANDIDATES = [Candidate(f"draft{d}", k) for d in range(DRAFTS) for k in range(1, KS + 1)]
NULL = np.ones(DRAFTS * KS)
# The best K gains 10 %, and three worse drafts
GAIN = np.outer((1.0, 0.98, 0.9, 0.7), (0.9, 1.0, 1.05, 1.08, 1.1, 1.08, 1.0, 0.85)).ravel()
TEMPERATURES = (0.0, 1.0)
VISITS = 12
# One-sided error of all verdicts of a temperature
ERROR = ONE_SIDED / len(TEMPERATURES)
# In how many cells of a report the interval of a speedup, and of an alpha, is looked at
CELLS = 3


@dataclass(frozen=True)
class World:
    """How prompts differ and how timing errs.

    Attributes:
        timing: standard deviation of the logarithm of a generation's time.
        spread: of a prompt's speedups, in common; half of it again for each candidate.
        lengths: of the logarithm of a prompt's tokens.
        tails: Student's t with 2.5 degrees of freedom in place of the normal.
        outliers: share of the generations that take several times as long.
        drift: of the steps of an AR(1) machine pace, correlated by .99 between generations.
        speculative_drift: of a pace of speculation alone, correlated by .9.
        visits: seconds are predicted from round times that scatter by this between visits.
        requests: from what requests of a server cost, known by parts that scatter by this.
        one: one K is measured, which replay chose; the others follow from it by their rounds.
    """

    timing: float = 0.06
    spread: float = 0.15
    lengths: float = 0.5
    tails: bool = False
    outliers: float = 0.0
    drift: float = 0.0
    speculative_drift: float = 0.0
    visits: float = 0.0
    requests: float = 0.0
    one: bool = False


WORLDS = {
    "plain": World(),
    "heavy tails": World(tails=True),
    "1 % outliers": World(outliers=0.01),
    "AR(1) drift": World(drift=0.03),
    "uneven lengths": World(lengths=1.2),
    "prompt spread x3": World(spread=0.45),
    "replay only": World(timing=0.0, visits=0.05),
    "one K": World(one=True),
    "server, replayed": World(timing=0.0, requests=0.06),
}
# Parts of a server's requests, by leaving out which its costs' error is known
PARTS = 8


def texts(rng: np.random.Generator, world: World, size: int, truth):
    """Tokens of `size` texts, and what every candidate takes without an error of timing."""
    tokens = np.clip(rng.lognormal(np.log(64.0), world.lengths, size), 4, 2000).round()
    prompt = rng.normal(0.0, world.spread, size)
    prompt = prompt + rng.normal(0.0, world.spread / 2, (len(truth), size))
    return tokens, np.exp(-prompt - 1.25 * world.spread**2 / 2) * tokens / truth[:, None]


def evidence(rng: np.random.Generator, world: World, size: int, truth, temperature=1.0):
    """`size` prompts, in turn of either set."""
    tokens, seconds = texts(rng, world, size, truth)
    times = np.concatenate([tokens[None], seconds])
    if world.one:
        return one_measured(rng, world, tokens, times, temperature)
    times = times * timing(rng, world, times.shape)
    errors: tuple[SharedError, ...] = ()
    if world.visits:
        relative, errors = visits(rng, world.visits, len(truth) // KS)
        times[1:] *= relative[:, None]
    if world.requests:
        # A start and a slope over K, which all candidates share
        slope = np.resize(np.linspace(-1.0, 1.0, KS), len(truth))
        parts = world.requests * rng.normal(size=(2, PARTS))
        of_parts = parts[0] + slope[:, None] * parts[1]
        times[1:] *= np.exp(of_parts.mean(axis=1))[:, None]
        without = (of_parts.sum(axis=1, keepdims=True) - of_parts) / (PARTS - 1)
        errors = (SharedError(independent_errors(without), PARTS - 1.0),)
    return evidence_of(tokens, times, errors, temperature)


def one_measured(rng: np.random.Generator, world: World, tokens, times, temperature: float):
    """The K that replay chooses is measured on every prompt, next to plain decoding."""
    best = 1 + int(times[1:].sum(axis=1).argmin())
    plain, drafted = timing(rng, world, (2, len(tokens)))
    times = np.concatenate([times[:1] * plain, times[1:] * drafted])
    return replace(evidence_of(tokens, times, (), temperature), named=CANDIDATES[best - 1])


def evidence_of(tokens, times, errors, temperature=1.0):
    """From [plain or candidate, prompt] times, and the errors of timing, if any."""
    size = len(tokens)
    return Evidence(
        temperature=temperature,
        names=tuple((SETS[i % len(SETS)], f"p{i}") for i in range(size)),
        baseline=Timed(times[0], tokens),
        candidates={n: Timed(time, tokens) for n, time in zip(CANDIDATES, times[1:], strict=False)},
        timing=errors,
    )


def timing(rng, world: World, shape):
    """What timing multiplies the seconds of each generation by, [plain or candidate, prompt]."""
    if world.tails:
        factors = np.maximum(0.3, 1.0 + world.timing * rng.standard_t(2.5, shape))
    else:
        factors = np.exp(world.timing * rng.normal(size=shape))
    late = rng.random(shape) < world.outliers
    factors = factors * np.where(late, 1.0 + rng.exponential(4.0, shape), 1.0)
    # Within each prompt the runs follow each other, in an order that rotates.
    order = (np.arange(shape[0]) + np.arange(shape[1])[:, None]) % shape[0]
    if world.drift:
        path = pace(rng, world.drift, 0.99, factors.size).reshape(shape[::-1])
        factors[order, np.arange(shape[1])[:, None]] *= path
    if world.speculative_drift:
        path = pace(rng, world.speculative_drift, 0.9, factors.size).reshape(shape[::-1])
        factors[order, np.arange(shape[1])[:, None]] *= np.where(order, path, 1.0)
    return factors


def pace(rng, steps, correlation, size):
    """What a drifting machine multiplies the seconds of successive generations by, AR(1)."""
    steps = rng.normal(0.0, steps, size)
    steps[0] /= np.sqrt(1.0 - correlation**2)
    return np.exp(lfilter([1.0], [1.0, -correlation], steps))


def _scatter(rng, spread, shape):
    """Costs of rounds by visit: some in common to a draft's K, and now and then a late visit."""
    late = np.where(rng.random(shape[-1]) < 0.05, rng.exponential(0.3, shape[-1]), 0.0)
    common = spread * rng.normal(size=shape[-1]) + late
    return np.exp(common + 0.6 * spread * rng.normal(size=shape))


@cache
def _typical(spread):
    """What the trimmed mean of such costs is on average."""
    rng = np.random.default_rng(12345)
    timed = [_scatter(rng, spread, (KS, VISITS)) for _ in range(20_000)]
    return float(trim_mean(np.array(timed), TRIMMED, axis=2).mean())


def visits(rng, spread, drafts):
    """The error of each candidate's round time, and what each draft's visits tell of it."""
    relative, errors = [], []
    for draft in range(drafts):
        timed = _scatter(rng, spread, (KS, VISITS))
        estimates = np.asarray(trim_mean(timed, TRIMMED, axis=1))
        relative.append(estimates / _typical(spread))
        rows = range(draft * KS, (draft + 1) * KS)
        errors.append(visit_error(timed / estimates[:, None]).among(drafts * KS, rows))
    return np.concatenate(relative), tuple(errors)


def verdict_on(evidence: Evidence, prompt_set: str, error: float, **more) -> Answer:
    """At a one-sided error."""
    return decide(evidence, error, prompt_set=prompt_set, **more)


def counted(verdicts: Sequence[Sequence[Answer]], truth) -> Counter:
    """What a report's verdicts say, and how many of their intervals hold the truth."""
    speedups = dict(zip(CANDIDATES, truth, strict=False))
    every = [verdict for of_temperature in verdicts for verdict in of_temperature]
    counts: Any = Counter(reports=1)  # of numbers that are not whole, too
    for decision in ("speculate", "does_not_pay"):
        counts[f"reports with {decision}"] += any(v.decision == decision for v in every)
    for verdict in every:
        kind = "workload" if verdict.prompt_set == "all" else "set"
        counts[f"{kind} verdicts"] += 1
        counts[f"{kind} {verdict.decision}"] += 1
        if verdict.speedup_lo is None or verdict.speedup is None:
            continue
        true = speedups[Candidate(str(verdict.named[0]), verdict.named[1])]
        counts[f"{kind} intervals"] += 1
        counts[f"{kind} covered"] += bool(verdict.speedup_lo <= true <= verdict.speedup_hi)
        counts[f"{kind} level"] += float(str(verdict.reason_values["level"]))
        counts[f"{kind} log error"] += math.log(verdict.speedup / true)
    return counts


def report(rng: np.random.Generator, world: World, size: int, truth) -> Counter:
    """What one report says: its verdicts, their intervals, some cells' intervals."""
    verdicts: list[list[Answer]] = []
    counts: Any = Counter()  # of numbers that are not whole, too
    for temperature in TEMPERATURES:
        seen = evidence(rng, world, size, truth, temperature)
        on = partial(verdict_on, seen, seed=int(rng.integers(2**31)))
        verdicts.append([*in_turn(on, SETS, ERROR)])
        names = tuple(("all", prompt) for _, prompt in seen.names)
        cells = replace(seen, names=names).workload(None).intervals()
        assert cells is not None
        for row in rng.choice(len(CANDIDATES), CELLS, replace=False):
            counts["cells"] += 1
            counts["cells covered"] += bool(cells[row].lo <= truth[row] <= cells[row].hi)
            counts["cells optimistic"] += bool(cells[row].lo > truth[row])
            alpha, accepted, judged = acceptance(rng, seen.baseline.tokens)
            bounds = share_interval(accepted.astype(np.float64), judged.astype(np.float64))
            assert bounds is not None
            counts["alphas covered"] += bool(bounds.lo <= alpha <= bounds.hi)
    counts.update(counted(verdicts, truth))
    return counts


def acceptance(rng, tokens):
    """A true alpha, and accepted and judged tokens of prompts that differ around it."""
    alpha = rng.choice([0.4, 0.7, 0.9])
    judged = np.maximum(1, (tokens * 0.8).round())
    chances = rng.beta(8 * alpha, 8 * (1 - alpha), len(tokens))
    return alpha, rng.binomial(judged.astype(int), chances), judged


def reports(world: str, truth, size: int, number: int, seed) -> Counter:
    """So many of one kind."""
    rng = np.random.default_rng(seed)
    counts: Counter[str] = Counter()
    for _ in range(number):
        counts.update(report(rng, WORLDS[world], size, truth))
    return counts

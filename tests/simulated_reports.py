"""Simulated reports of known truth, for the coverage test and benchmarks/interval_coverage.py.

A report has two temperatures of two prompt sets, so two verdicts on the whole workload and four on
single sets, each a choice among four drafts at eight K. Every world has the true speedups that were
asked for: seconds are tokens / speedup, times what prompts differ by and what timing adds, both of
mean 1. Tokens, prompts and timings are drawn anew for every temperature.
"""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
from scipy.signal import lfilter
from scipy.stats import trim_mean

from harness.analysis.verdict import Candidate, ErrorBudget, Evidence, Timed, decide
from harness.stats.crossfit import TRIMMED
from harness.stats.jackknife import share_interval

DRAFTS, KS = 4, 8
SETS = ("easy", "hard")
CANDIDATES = [Candidate(f"draft{d}", k) for d in range(DRAFTS) for k in range(1, KS + 1)]
NULL = np.ones(DRAFTS * KS)
# The best K gains 10 %, and three worse drafts
GAIN = np.outer((1.0, 0.98, 0.9, 0.7), (0.9, 1.0, 1.05, 1.08, 1.1, 1.08, 1.0, 0.85)).ravel()
TEMPERATURES = (0.0, 1.0)
VISITS = 12
# Fewer than a report's, for the sake of time; a verdict then depends more on luck, not less
DEALS = 60
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
        visits: seconds are predicted from round times that scatter by this between visits.
    """

    timing: float = 0.06
    spread: float = 0.15
    lengths: float = 0.5
    tails: bool = False
    outliers: float = 0.0
    drift: float = 0.0
    visits: float = 0.0


WORLDS = {
    "plain": World(),
    "heavy tails": World(tails=True),
    "1 % outliers": World(outliers=0.01),
    "AR(1) drift": World(drift=0.03),
    "uneven lengths": World(lengths=1.2),
    "prompt spread x3": World(spread=0.45),
    "predicted": World(timing=0.0, visits=0.05),
}


def evidence(rng: np.random.Generator, world: World, size: int, truth, temperature=1.0):
    """`size` prompts, in turn of either set."""
    shape = (len(truth) + 1, size)
    tokens = np.clip(rng.lognormal(np.log(64.0), world.lengths, size), 4, 2000).round()
    prompt = rng.normal(0.0, world.spread, size)
    prompt = prompt + rng.normal(0.0, world.spread / 2, (len(truth), size))
    seconds = np.exp(-prompt - 1.25 * world.spread**2 / 2) * tokens / truth[:, None]
    times = np.concatenate([tokens[None], seconds]) * _timing(rng, world, shape)
    costs: dict[Candidate, np.ndarray] = {}
    if world.visits:
        relative, costs = _visits(rng, world.visits)
        times[1:] *= relative[:, None]
    return Evidence(
        temperature=temperature,
        prompts=tuple(f"p{i}" for i in range(size)),
        prompt_sets=tuple(SETS[i % len(SETS)] for i in range(size)),
        baseline=Timed(times[0], tokens),
        candidates={n: Timed(times[i], tokens) for i, n in enumerate(CANDIDATES, start=1)},
        facts={},
        visit_costs=costs,
    )


def _timing(rng, world: World, shape):
    """What timing multiplies the seconds of each generation by, [plain or candidate, prompt]."""
    if world.tails:
        factors = np.maximum(0.3, 1.0 + world.timing * rng.standard_t(2.5, shape))
    else:
        factors = np.exp(world.timing * rng.normal(size=shape))
    late = rng.random(shape) < world.outliers
    factors = factors * np.where(late, 1.0 + rng.exponential(4.0, shape), 1.0)
    if world.drift:
        # Within each prompt the runs follow each other, in an order that rotates.
        steps = rng.normal(0.0, world.drift, factors.size)
        steps[0] /= np.sqrt(1.0 - 0.99**2)
        pace = np.exp(lfilter([1.0], [1.0, -0.99], steps)).reshape(shape[::-1])
        order = (np.arange(shape[0]) + np.arange(shape[1])[:, None]) % shape[0]
        factors[order, np.arange(shape[1])[:, None]] *= pace
    return factors


def _scatter(rng, spread, shape):
    """Costs of rounds by visit: some in common to a draft's K, and now and then a late visit."""
    late = np.where(rng.random(shape[-1]) < 0.05, rng.exponential(0.3, shape[-1]), 0.0)
    common = spread * rng.normal(size=shape[-1]) + late
    return np.exp(common + 0.6 * spread * rng.normal(size=shape))


def _typical(spread=0.05):
    """What the trimmed mean of such costs is on average."""
    rng = np.random.default_rng(12345)
    visits = [_scatter(rng, spread, (KS, VISITS)) for _ in range(20_000)]
    return float(trim_mean(np.array(visits), TRIMMED, axis=2).mean())


TYPICAL = _typical(WORLDS["predicted"].visits)


def _visits(rng, spread):
    """The error of each candidate's round time, and its visits' costs."""
    relative, costs = [], {}
    for draft in range(DRAFTS):
        visits = _scatter(rng, spread, (KS, VISITS))
        estimates = np.asarray(trim_mean(visits, TRIMMED, axis=1))
        relative.append(estimates / TYPICAL)
        names = CANDIDATES[draft * KS : (draft + 1) * KS]
        costs.update(zip(names, visits / estimates[:, None], strict=True))
    return np.concatenate(relative), costs


def budget() -> ErrorBudget:
    """Of a report."""
    return ErrorBudget(len(TEMPERATURES), len(TEMPERATURES) * len(SETS))


def report(rng: np.random.Generator, world: World, size: int, truth, counts: Counter) -> None:
    """Count what one report says: its verdicts, their intervals, some cells' intervals."""
    speedups = dict(zip(CANDIDATES, truth, strict=True))
    scopes = ["all", *SETS]
    decisions = []
    for temperature in TEMPERATURES:
        seen = evidence(rng, world, size, truth, temperature)
        for scope in scopes:
            seed = int(rng.integers(2**31))
            verdict = decide(seen, budget(), prompt_set=scope, seed=seed, deals=DEALS)
            decisions.append(verdict.decision)
            kind = "workload" if scope == "all" else "set"
            counts[f"{kind} {verdict.decision}"] += 1
            counts[f"{kind} verdicts"] += 1
            if verdict.speedup_lo is not None:
                named = verdict.reason_values
                true = next(
                    s for c, s in speedups.items() if (c.draft, c.k) == (named["draft"], named["k"])
                )
                counts[f"{kind} intervals"] += 1
                counts[f"{kind} covered"] += bool(verdict.speedup_lo <= true <= verdict.speedup_hi)
        cells = replace(seen, prompt_sets=("all",) * size).workload(None).intervals()
        assert cells is not None
        for row in rng.choice(len(CANDIDATES), CELLS, replace=False):
            counts["cells"] += 1
            counts["cells covered"] += bool(cells[row].lo <= truth[row] <= cells[row].hi)
            counts["cells optimistic"] += bool(cells[row].lo > truth[row])
            alpha, accepted, judged = acceptance(rng, seen.baseline.tokens)
            bounds = share_interval(accepted.astype(np.float64), judged.astype(np.float64))
            assert bounds is not None
            counts["alphas covered"] += bool(bounds.lo <= alpha <= bounds.hi)
    counts["reports"] += 1
    counts["reports with speculate"] += "speculate" in decisions
    counts["reports with does_not_pay"] += "does_not_pay" in decisions


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
        report(rng, WORLDS[world], size, truth, counts)
    return counts

"""Simulated auditions of known truth, for the coverage test and benchmarks/interval_coverage.py.

A population of prompts is replayed once; a workload is prompts drawn from it with replacement, so
the truth is the population's own. Prompts differ in acceptance, texts have easy and hard stretches
and differ in length, and drafts share what makes a prompt hard. Round times are known from noisy
visits with a tail, as on a machine that is sometimes busy.
"""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import brentq

from harness.analysis.latency import Latency, Visits, latency_of, typed_latency
from harness.analysis.predicted import evidence_of, speedup_draws
from harness.analysis.replayed import Replays, replay_drafts
from harness.analysis.verdict import decide
from harness.records import StepTiming, TextTrace
from harness.theory.speedup import RoundTimes, StepTimes

KS = (1, 2, 3, 4, 5, 6, 7, 8)
SAMPLES = 30
STEP_NOISE = 0.05
VISITS, VISIT_NOISE = 12, 0.03
DRAFTS = {"good": 1.4, "fair": 0.9, "small": 0.5, "poor": -0.2}
SETS = ("easy", "hard")


def stretches(rng, size):
    """A two-state path that stays put with .9: +1 in easy stretches, -1 in hard ones."""
    switch = rng.random(size) < 0.1
    return np.where((np.cumsum(switch) + rng.integers(2)) % 2, 1.0, -1.0)


def trace(draft, prompt_set, prompt, chances):
    """A text whose acceptance under `ratio` is `chances`, [n]."""
    size = len(chances)
    zeros = np.zeros(size)
    return TextTrace(
        draft=draft,
        draft_temperature=1.0,
        prompt_set=prompt_set,
        prompt=prompt,
        category=None,
        repetition=0,
        temperature=1.0,
        top_k=None,
        top_p=None,
        prompt_tokens=20 + size % 30,
        stop_reason="budget",
        tokens=np.arange(size),
        target_logprob=zeros,
        draft_logprob=np.log(np.clip(chances, 1e-12, 1.0)),
        draft_is_argmax=chances > 0.5,
        last_ratio=chances,
        last_exact_match=chances,
        last_greedy_draft=chances,
        target_entropy=zeros,
        draft_entropy=zeros,
    )


def population(seed, size):
    """Traces of every draft on `size` prompts."""
    rng = np.random.default_rng(seed)
    traces = {draft: [] for draft in DRAFTS}
    for index in range(size):
        prompt_set = SETS[index % 2]
        ease = rng.normal(0.3 if prompt_set == "easy" else -0.3, 0.7)
        length = int(np.clip(rng.lognormal(np.log(64), 0.5), 8, 256))
        path = 0.8 * stretches(rng, length)
        for draft, level in DRAFTS.items():
            logit = level + ease + path + rng.normal(0.0, 0.3) + rng.normal(0.0, 1.0, length)
            chances = 1.0 / (1.0 + np.exp(-logit))
            # As with real models: much is certain, and some tokens are never proposed.
            chances = np.where(rng.random(length) < 0.3 * chances, 1.0, chances)
            traces[draft].append(trace(draft, prompt_set, f"p{index:05d}", chances))
    return traces


def drawn(replays: Replays, rows) -> Replays:
    """The workload of these prompts of a population, which may repeat."""
    return replace(
        replays,
        prompts=tuple(f"{place}" for place in range(len(rows))),
        prompt_sets=tuple(replays.prompt_sets[row] for row in rows),
        categories=tuple(replays.categories[row] for row in rows),
        prompt_tokens=tuple(replays.prompt_tokens[row] for row in rows),
        candidates={name: replayed.rows(rows) for name, replayed in replays.candidates.items()},
    )


@dataclass(frozen=True)
class Steps:
    """The true step times, seconds, of which rounds are made."""

    draft_s: float
    target_s: float
    verify_s: tuple[float, ...]

    @property
    def times(self) -> StepTimes:
        """As the formulas take them."""
        return StepTimes(self.draft_s, self.target_s, self.verify_s)

    def latency(self, rng) -> Latency:
        """What a run would know of these from its visits."""
        rounds = RoundTimes.from_steps(self.times, max(KS))
        true = np.array([rounds.at(k) for k in (0, *KS)])
        late = np.where(rng.random((VISITS, len(true))) < 0.05, rng.exponential(0.2), 0.0)
        seconds = true * np.exp(VISIT_NOISE * rng.normal(size=(VISITS, len(true))) + late)
        visits = Visits(1.0, seconds[:, 0], KS, seconds[:, 1:] / seconds[:, :1])
        return latency_of((), visits)


def timing(role, kind, tokens, median_s, rng):
    """Noisy samples around a median: lognormal, and now and then much longer."""
    noise = STEP_NOISE * rng.normal(size=SAMPLES)
    late = np.where(rng.random(SAMPLES) < 0.1, rng.exponential(0.3, SAMPLES), 0.0)
    # The median of noise plus lateness is not the noise's; divide by what it is (simulated).
    values = median_s * np.exp(noise + late) / MEDIAN
    return StepTiming(role, role, kind, tokens, 64, 1, tuple(values.tolist()))


def _noise_median():
    rng = np.random.default_rng(12345)
    size = 1_000_000
    late = np.where(rng.random(size) < 0.1, rng.exponential(0.3, size), 0.0)
    return float(np.exp(np.median(STEP_NOISE * rng.normal(size=size) + late)))


MEDIAN = _noise_median()


def tokens_per_round(replays: Replays):
    """By candidate, the population's workload tokens per round, sets weighted equally."""
    rates = {}
    for name, replayed in replays.candidates.items():
        members = [np.array(replays.prompt_sets) == prompt_set for prompt_set in SETS]
        per_set = [
            replayed.rounds[rows].sum() / replayed.new_tokens[rows].sum() for rows in members
        ]
        rates[name] = 1.0 / float(np.mean(per_set))
    return rates


def population_replays(seed, size) -> Replays:
    """Every draft at every K on the population."""
    return replay_drafts(population(seed, size), "ratio", KS, 1.0)


def rows_of(rng, replays: Replays, size):
    """Prompts of a workload: half from each set, with replacement."""
    sets = np.array(replays.prompt_sets)
    members = [np.flatnonzero(sets == name) for name in SETS]
    return np.concatenate([rng.choice(own, size // 2) for own in members])


def null_steps(replays: Replays) -> dict[str, Steps]:
    """Step times at which every draft's best K just breaks even, its other K lose."""
    rates = tokens_per_round(replays)
    verify = tuple(1.0 + 0.02 * n for n in range(max(KS) + 1))

    def gain(step_s, draft):
        return max(rates[draft, k] / (k * step_s + verify[k]) for k in KS) - 1.0

    return {
        draft: Steps(brentq(gain, 1e-3, 3.0, args=(draft,)), 1.0, verify)
        for draft in replays.drafts
    }


def latencies(rng, steps: dict[str, Steps]) -> dict[str, Latency]:
    """What a run would know of all drafts, each with its own visits."""
    return {draft: own.latency(rng) for draft, own in steps.items()}


def coverage(replays: Replays, sizes, workloads, *, draws=2000, seed=0):
    """By number of prompts, the share of 95 % intervals that hold the truth: speedup, alpha.

    Over every draft at K = 1, 4 and 8, all on one target whose steps cost more with K.
    """
    rates = tokens_per_round(replays)
    verify = tuple(1.0 + 0.02 * n for n in range(max(KS) + 1))
    steps = {draft: Steps(0.08 + 0.04 * i, 1.0, verify) for i, draft in enumerate(replays.drafts)}
    shown = [name for name in replays.candidates if name[1] in (1, 4, 8)]
    truth = {n: rates[n] / (n[1] * steps[n[0]].draft_s + verify[n[1]]) for n in shown}
    alphas = {name: replays.candidates[name].alpha for name in shown}
    shares = {}
    for size in sizes:
        rng = np.random.default_rng([seed, size])
        covered = []
        for index in range(workloads):
            workload = drawn(replays, rows_of(rng, replays, size))
            workload = replace(workload, candidates={n: workload.candidates[n] for n in shown})
            result = speedup_draws(workload, latencies(rng, steps), draws=draws, seed=index)
            prompts = result.prompts
            for name, counts in workload.candidates.items():
                bounds = result.interval(name)
                own = prompts.interval(prompts.pooled(counts.accepted, counts.judged))
                assert bounds is not None
                assert own is not None
                covered.append(
                    (bounds.lo <= truth[name] <= bounds.hi, own.lo <= alphas[name] <= own.hi)
                )
        shares[size] = tuple(np.mean(covered, axis=0).tolist())
    return shares


def decisions(replays: Replays, steps, size, workloads, *, sampled=True, seed=0):
    """How often the whole selection over every draft and K says what."""
    rng = np.random.default_rng([seed, size])
    counts = Counter()
    for index in range(workloads):
        workload = drawn(replays, rows_of(rng, replays, size))
        given = {draft: typed_latency(own.times, max(KS)) for draft, own in steps.items()}
        known = latencies(rng, steps)
        counts[decide(evidence_of(workload, known if sampled else given), seed=index).decision] += 1
    return counts

"""Simulated traces and round times.

Prompts differ in acceptance, texts have easy and hard stretches and differ in length, and drafts
share what makes a prompt hard. Round times are known from noisy visits with a tail, as on a machine
that is sometimes busy.
"""

import numpy as np

from harness.analysis.round_costs import Latency, TimedVisits, latency_of
from harness.records import TextTrace
from harness.theory.speedup import RoundTimes, StepTimes

KS = (1, 2, 3, 4, 5, 6, 7, 8)
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


def visited(times: StepTimes, rng) -> Latency:
    """What a run would know from its visits of rounds that are made of such steps."""
    rounds = RoundTimes.from_steps(times, max(KS))
    true = np.array([rounds.at(k) for k in (0, *KS)])
    late = np.where(rng.random((VISITS, len(true))) < 0.05, rng.exponential(0.2), 0.0)
    seconds = true * np.exp(VISIT_NOISE * rng.normal(size=(VISITS, len(true))) + late)
    return latency_of((), TimedVisits(1.0, seconds[:, 0], KS, seconds[:, 1:] / seconds[:, :1]))

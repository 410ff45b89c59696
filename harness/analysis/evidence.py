"""What a verdict rests on: seconds and tokens per prompt, for plain decoding and every candidate.

A candidate is a (draft, K). All candidates and the baseline are held on the same prompts, so that
they can be compared prompt by prompt and resampled together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from harness.records import Trial
from harness.stats.bootstrap import Array, set_weights
from harness.stats.crossfit import StepNoise, Workload
from harness.theory.speedup import StepTimes


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
    """One temperature's measurements on the prompts that every cell completed.

    Attributes:
        temperature: of all of them.
        prompts: prompt ids, n.
        prompt_sets: the set of each prompt, n.
        baseline: plain decoding.
        candidates: by (draft, K), K > 0.
        facts: by (draft, K); may lack any.
        step_noise: for predicted seconds, what the scatter of the step times does to them; None
            where the seconds were measured, or the step times are taken as exact.
    """

    temperature: float
    prompts: tuple[str, ...]
    prompt_sets: tuple[str, ...]
    baseline: Timed
    candidates: Mapping[Candidate, Timed]
    facts: Mapping[Candidate, Facts]
    step_noise: StepNoise | None = None

    def only(self, prompt_sets: Sequence[str]) -> "Evidence":
        """The evidence of some prompt sets alone."""
        keep = np.array([name in prompt_sets for name in self.prompt_sets], dtype=bool)
        return Evidence(
            temperature=self.temperature,
            prompts=tuple(np.array(self.prompts, dtype=object)[keep]),
            prompt_sets=tuple(np.array(self.prompt_sets, dtype=object)[keep]),
            baseline=_rows(self.baseline, keep),
            candidates={name: _rows(timed, keep) for name, timed in self.candidates.items()},
            facts=self.facts,
            step_noise=self.step_noise,
        )

    def workload(self, weights: Mapping[str, float] | None) -> Workload:
        """The candidates in their order, prompt sets of weight 0 left out.

        Raises:
            UserError: weights that do not fit the prompt sets.
        """
        shares = set_weights(self.prompt_sets, weights)
        evidence = self.only([name for name, share in shares.items() if share > 0.0])
        timed = evidence.candidates.values()
        return Workload(
            baseline_s=evidence.baseline.seconds,
            baseline_tokens=evidence.baseline.tokens,
            seconds=np.stack([each.seconds for each in timed]),
            tokens=np.stack([each.tokens for each in timed]),
            prompt_sets=evidence.prompt_sets,
            weights={name: shares[name] for name in evidence.prompt_sets},
            step_noise=evidence.step_noise,
        )

    def by_set(self) -> "dict[str, Evidence]":
        """The evidence of each prompt set alone, in order of name."""
        return {name: self.only([name]) for name in sorted(set(self.prompt_sets))}


def _rows(timed: Timed, keep: NDArray[np.bool_]) -> Timed:
    return Timed(timed.seconds[keep], timed.tokens[keep])


def evidence_from_trials(
    trials: Sequence[Trial], *, draft: str, temperature: float, times: StepTimes | None
) -> Evidence:
    """The evidence of one pair at one temperature, on the prompts complete in every cell.

    A prompt is complete in a cell when every repetition seen at this temperature, of every turn
    where it is a conversation, finished there. A K that completed fewer than half of the baseline's
    prompts (out of memory, say) is left out, rather than every prompt that it failed.

    Args:
        trials: of the run; other temperatures are passed over.
        draft: the draft's name.
        temperature: which one.
        times: step times of the run, for the break-even alphas.
    """
    here = [trial for trial in latest(trials) if trial.temperature == temperature]
    repetitions = len({trial.repetition for trial in here})
    turns = {(t.prompt_set, t.conversation): 0 for t in here}
    for prompt_set, conversation, _ in {(t.prompt_set, t.conversation, t.turn) for t in here}:
        turns[prompt_set, conversation] += 1
    done: dict[int, dict[tuple[str, str], Array]] = {0: {}}
    for k in sorted({trial.k for trial in here}):
        cell = completed([trial for trial in here if trial.k == k])
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


def _facts(sums: Array, k: int, times: StepTimes | None) -> Facts:
    alpha = ratio(float(sums[:, 2].sum()), float(sums[:, 3].sum()))
    return Facts(alpha, times.break_even_alpha(k) if times else None)

"""The evidence of replayed candidates, with what the scatter of the step times does to it.

The verdict chooses on some prompts and scores on others (`harness.theory.crossfit`); for predicted
seconds it must do the same with the samples of the step times, which all prompts share.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from harness.records import StepTiming
from harness.theory.evidence import Candidate, Evidence, Facts, FoldTimes, Timed
from harness.theory.intervals import Array
from harness.theory.predicted import (
    Latency,
    LatencyDraws,
    alpha_of,
    break_even,
    latency_of,
    predicted_seconds,
)
from harness.theory.replays import Replays
from harness.theory.speedup import StepTimes

# Fewer samples of a step than this in a fold give a median that is worse than no hold-out at all.
FOLD_SAMPLES = 4
DRAWS = 400


@dataclass(frozen=True, eq=False)
class SampledSteps:
    """`evidence.StepNoise` of replayed candidates: their rounds, and their drafts' samples.

    A step sampled fewer than FOLD_SAMPLES times per fold is not split: then every fold is chosen
    and scored on all samples, and the scatter alone is counted, once for all folds.
    """

    replays: Replays
    latency_by_draft: Mapping[str, Latency]
    seed: int = 0

    def by_fold(self, folds: int) -> Mapping[Candidate, FoldTimes]:
        """Deal every step's samples into folds in turn, so that drift hits all folds alike.

        Args:
            folds: how many.

        Returns:
            By candidate; step times without samples are left out, being taken as exact.
        """
        sampled = {d: lat for d, lat in self.latency_by_draft.items() if lat.timings}
        timings = [timing for lat in sampled.values() for timing in lat.timings]
        split = all(len(timing.samples_s) >= folds * FOLD_SAMPLES for timing in timings)
        drawn = [LatencyDraws(DRAWS, self.seed + fold) for fold in range(folds)]
        found: dict[Candidate, FoldTimes] = {}
        for (draft, k), counts in self.replays.candidates.items():
            if draft not in sampled:
                continue
            weights = counts.proposals.sum(axis=0)
            whole = self._costs(sampled[draft], draft, k, weights, None)[0]
            if not split:
                log = np.log(self._costs(sampled[draft], draft, k, weights, drawn[0]))
                # Not averaged out over the folds: every fold has the same error.
                spread = np.full(folds, float(log.std()) * np.sqrt(folds))
                found[draft, k] = FoldTimes(np.ones(folds), np.ones(folds), spread)
                continue
            rest, own = (_parts(sampled[draft], folds, inside) for inside in (False, True))
            logs = [
                np.log(self._costs(part, draft, k, weights, drawn[fold]))
                for fold, part in enumerate(own)
            ]
            found[draft, k] = FoldTimes(
                np.array([self._costs(p, draft, k, weights, None)[0] for p in rest]) / whole,
                np.array([self._costs(p, draft, k, weights, None)[0] for p in own]) / whole,
                np.array([float(log.std()) for log in logs]),
            )
        return found

    def _costs(
        self, latency: Latency, draft: str, k: int, weights: Array, drawn: LatencyDraws | None
    ) -> Array:
        """Seconds of all the candidate's rounds in target steps, [draws] or [1]."""
        lookup = draft in self.replays.lookups
        if drawn is None:
            exact = LatencyDraws(1, 0)
            return exact.relative_costs(Latency(latency.times), k, lookup=lookup) @ weights
        return drawn.relative_costs(latency, k, lookup=lookup) @ weights


def _parts(latency: Latency, folds: int, inside: bool) -> list[Latency]:
    """The latency on each fold's samples, or on all but those."""

    def part(timing: StepTiming, fold: int) -> StepTiming:
        kept = [s for i, s in enumerate(timing.samples_s) if (i % folds == fold) == inside]
        return replace(timing, samples_s=tuple(kept))

    return [latency_of([part(t, fold) for t in latency.timings]) for fold in range(folds)]


def evidence_of(
    replays: Replays, times_by_draft: Mapping[str, Latency | StepTimes], *, seed: int = 0
) -> Evidence:
    """The evidence of replayed candidates, for `verdict.decide` and `verdict.least_regret`.

    Args:
        replays: the candidates.
        times_by_draft: of each draft; StepTimes are taken as exact, a Latency's samples are not.
        seed: of the resampling of those.

    Raises:
        UserError: a draft without step times, or a K that they do not cover.
    """
    latency = {
        draft: given if isinstance(given, Latency) else Latency(given)
        for draft, given in times_by_draft.items()
    }
    times = {draft: given.times for draft, given in latency.items()}
    seconds = predicted_seconds(replays, times)
    tokens = replays.new_tokens
    noisy = any(latency[draft].timings for draft in replays.drafts)
    return Evidence(
        temperature=replays.temperature,
        prompts=replays.prompts,
        prompt_sets=replays.prompt_sets,
        baseline=Timed(tokens * times[replays.drafts[0]].target_s, tokens),
        candidates={name: Timed(own, tokens) for name, own in seconds.items()},
        facts={
            (draft, k): Facts(
                alpha_of(found), break_even(times[draft], k, lookup=draft in replays.lookups)
            )
            for (draft, k), found in replays.candidates.items()
        },
        step_noise=SampledSteps(replays, latency, seed) if noisy else None,
    )

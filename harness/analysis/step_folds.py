"""Step times on parts of their samples, for a verdict that no lucky one decides.

The verdict chooses on some prompts and scores on others (`harness.stats.crossfit`); for predicted
seconds it must do the same with the samples of the step times, which all prompts share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.analysis.evidence import Candidate, FoldTimes
from harness.analysis.latency import (
    Latency,
    LatencyDraws,
    latency_of,
    round_costs,
)
from harness.analysis.replays import Replays
from harness.records import StepTiming
from harness.stats.intervals import Array

# Fewer samples of a step than this in a fold give a median that is worse than no hold-out at all.
FOLD_SAMPLES = 4
DRAWS = 200


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
        names = [name for name in self.replays.candidates if name[0] in sampled]
        if not split:
            return {name: self._whole(name, sampled[name[0]], drawn[0], folds) for name in names}
        rest = {draft: _parts(latency, folds, inside=False) for draft, latency in sampled.items()}
        own = {draft: _parts(latency, folds, inside=True) for draft, latency in sampled.items()}
        return {name: self._split(name, rest[name[0]], own[name[0]], drawn) for name in names}

    def _whole(
        self, name: Candidate, latency: Latency, drawn: LatencyDraws, folds: int
    ) -> FoldTimes:
        """All samples in every fold: one error for all, which does not average out over them."""
        spread = float(np.log(self._drawn(name, latency, drawn)).std())
        return FoldTimes(np.ones(folds), np.ones(folds), np.full(folds, spread * np.sqrt(folds)))

    def _split(
        self,
        name: Candidate,
        rest: Sequence[Latency],
        own: Sequence[Latency],
        drawn: Sequence[LatencyDraws],
    ) -> FoldTimes:
        """Each fold's samples, and the others."""
        whole = self._cost(name, self.latency_by_draft[name[0]])
        logs = [
            np.log(self._drawn(name, part, draws)) for part, draws in zip(own, drawn, strict=True)
        ]
        return FoldTimes(
            np.array([self._cost(name, part) for part in rest]) / whole,
            np.array([self._cost(name, part) for part in own]) / whole,
            np.array([float(log.std()) for log in logs]),
        )

    def _cost(self, name: Candidate, latency: Latency) -> float:
        """Seconds of all the candidate's rounds in target steps, at the medians."""
        costs = round_costs(latency.times, name[1], lookup=name[0] in self.replays.lookups)
        proposals = self.replays.candidates[name].proposals.sum(axis=0)
        return float(proposals @ costs) / latency.times.target_s

    def _drawn(self, name: Candidate, latency: Latency, drawn: LatencyDraws) -> Array:
        """Likewise, at resampled medians, [draws]."""
        costs = drawn.relative_costs(latency, name[1], lookup=name[0] in self.replays.lookups)
        return costs @ self.replays.candidates[name].proposals.sum(axis=0)


def _parts(latency: Latency, folds: int, *, inside: bool) -> list[Latency]:
    """The latency on each fold's samples, or on all but those."""

    def part(timing: StepTiming, fold: int) -> StepTiming:
        kept = [s for i, s in enumerate(timing.samples_s) if (i % folds == fold) == inside]
        return replace(timing, samples_s=tuple(kept))

    return [latency_of([part(t, fold) for t in latency.timings]) for fold in range(folds)]

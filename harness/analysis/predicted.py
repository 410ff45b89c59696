"""Predicted seconds: replayed rounds times what a round costs (`harness.analysis.latency`)."""

from collections.abc import Mapping

from harness.analysis.evidence import Candidate, Evidence, Facts, Timed
from harness.analysis.latency import Latency, break_even, latency_of, round_costs
from harness.analysis.replays import Replays
from harness.analysis.step_folds import SampledSteps
from harness.records import UserError
from harness.stats.intervals import Array
from harness.theory.replay import Replayed
from harness.theory.speedup import StepTimes

__all__ = ["Latency", "alpha_of", "check_times", "evidence_of", "latency_of", "predicted_seconds"]


def check_times(replays: Replays, times_by_draft: Mapping[str, StepTimes]) -> None:
    """Check that every candidate has step times.

    Raises:
        UserError: a draft without, or a K that they do not cover.
    """
    for draft, k in replays.candidates:
        if draft not in times_by_draft:
            raise UserError(f"latency: no step times for draft {draft!r}; time it or type them in")
        times_by_draft[draft].v(k)


def predicted_seconds(
    replays: Replays, times_by_draft: Mapping[str, StepTimes]
) -> Mapping[Candidate, Array]:
    """Decode seconds of every candidate on each prompt, [n] each.

    Every candidate is judged against a target step that was timed beside its own draft; where
    these differ, its seconds are scaled to the first draft's target step, so that a machine whose
    pace changed between drafts does not favour any.

    Raises:
        UserError: as `check_times`.
    """
    check_times(replays, times_by_draft)
    reference = times_by_draft[replays.drafts[0]].target_s
    seconds: dict[Candidate, Array] = {}
    for (draft, k), found in replays.candidates.items():
        times = times_by_draft[draft]
        costs = round_costs(times, k, lookup=draft in replays.lookups)
        seconds[draft, k] = found.proposals @ costs * (reference / times.target_s)
    return seconds


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


def alpha_of(found: Replayed) -> float | None:
    """Alpha over all prompts; None where nothing was judged."""
    return found.alpha if found.judged.sum() > 0.0 else None

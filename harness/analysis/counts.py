"""Sums over generations: what cells and verdicts count from trials."""

from collections.abc import Callable, Sequence

import numpy as np

from harness.records import Trial
from harness.stats.intervals import Array

Field = Callable[[Trial], float]


def decode_s(trial: Trial) -> float:
    """Seconds from the end of every prefill to the last token."""
    return trial.decode_s or 0.0


def request_s(trial: Trial) -> float:
    """Seconds of the whole request: both prefills and the decoding."""
    return (trial.prefill_s or 0.0) + (trial.draft_prefill_s or 0.0) + (trial.decode_s or 0.0)


def new_tokens(trial: Trial) -> float:
    """Tokens emitted."""
    return trial.new_tokens or 0


def accepted(trial: Trial) -> float:
    """Draft tokens kept."""
    return trial.accepted or 0


def judged(trial: Trial) -> float:
    """Draft tokens accepted or rejected: the denominator of alpha."""
    return (trial.accepted or 0) + (trial.rejected or 0)


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Their quotient; None where either is missing or the denominator is 0."""
    return numerator / denominator if numerator is not None and denominator else None


def latest(trials: Sequence[Trial]) -> list[Trial]:
    """One trial per generation, the last recorded: a resumed run's retry replaces the failure.

    Args:
        trials: in the order they were recorded.
    """
    kept = {(t.prompt_set, t.prompt, t.repetition, t.k, t.temperature): t for t in trials}
    return list(kept.values())


def completed(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that finished and emitted something."""
    return [trial for trial in trials if trial.status == "ok" and trial.new_tokens]


def per_prompt(trials: Sequence[Trial], fields: Sequence[Field]) -> dict[tuple[str, str], Array]:
    """For each (prompt set, prompt), in order, its fields summed over repetitions and turns.

    The turns of one conversation share its text, so they are one prompt to every resampling.
    """
    sums: dict[tuple[str, str], Array] = {}
    for trial in sorted(trials, key=lambda trial: (trial.prompt_set, trial.conversation)):
        values = np.array([field(trial) for field in fields], dtype=np.float64)
        name = (trial.prompt_set, trial.conversation)
        sums[name] = sums[name] + values if name in sums else values
    return sums


def acceptance_by_position(trials: Sequence[Trial]) -> tuple[float, ...]:
    """Entry j - 1: share of rounds with at least j text positions left that accepted at least j.

    Args:
        trials: of one K; plain and failed ones are passed over.

    Returns:
        Up to K shares; positions that no round had room for are left out.
    """
    counted = [
        (trial.accepted_lengths, trial.room)
        for trial in completed(trials)
        if trial.accepted_lengths is not None and trial.room is not None
    ]
    if not counted:
        return ()
    lengths = np.sum([lengths for lengths, _ in counted], axis=0)
    room = np.sum([room for _, room in counted], axis=0)
    at_least = lengths[::-1].cumsum()[::-1][1:]
    pairs = zip(at_least, room, strict=True)
    return tuple(float(kept / rounds) for kept, rounds in pairs if rounds)

"""Measured pairs: plain decoding and the chosen K on one prompt, run within moments of each other.

A sweep that measures in looks decides by them (`harness.stats.verdict_interval`): replay says how
many rounds every text takes, and the pairs what such a round costs next to a plain token. That
holds as long as the loop emits the tokens per round that replay expects. Where it does not, the
pairs alone decide, as the cells of a sweep that measures every K do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.analysis.cells import Count, accepted, completed, decode_s, judged, latest, new_tokens
from harness.analysis.predicted import Predicted
from harness.analysis.replayed import Replays, replay_check
from harness.analysis.verdict import Candidate, Evidence, Timed
from harness.records import Cell, Trial, grouped
from harness.stats.jackknife import Array
from harness.stats.verdict_interval import MIN_MEASURED, Pairs

# Standard errors by which the loop and replay may differ in what a round emits and drafts
REPLAY_HOLDS = 3.0


@dataclass(frozen=True)
class Pair:
    """All turns of one conversation, decoded plainly and with the chosen K, in one repetition."""

    name: tuple[str, str]  # prompt set and conversation
    plain: tuple[Trial, ...]
    drafted: tuple[Trial, ...]


def pairs_of(trials: Sequence[Trial], temperature: float, k: int) -> list[Pair]:
    """The pairs that finished on both sides, in the order of the trials, which is that of time."""
    considered = [t for t in latest(trials) if t.temperature == temperature and t.k in (0, k)]
    by_name = grouped(considered, lambda trial: (trial.prompt_set, trial.conversation))
    turns = {name: len({trial.turn for trial in of_name}) for name, of_name in by_name.items()}
    # By when the last of them ran
    done = grouped(
        completed(considered)[::-1], lambda t: ((t.prompt_set, t.conversation), t.repetition)
    )
    pairs: list[Pair] = []
    for (name, _), group in done.items():
        plain, drafted = (tuple(t for t in group if t.k == side) for side in (0, k))
        if len(plain) == len(drafted) == turns[name]:
            pairs.append(Pair(name, plain, drafted))
    return pairs[::-1]


def rounds_as_replayed(pairs: Sequence[Pair], replays: Replays, candidate: Candidate) -> bool:
    """True where rounds of the pairs emit, and draft, as many tokens as replay expects."""
    if candidate not in replays.candidates:
        return False
    trials = [trial for pair in pairs for trial in pair.drafted]
    cell = Cell("all", replays.temperature, candidate.k)
    check = replay_check(cell, trials, replays, candidate)
    if check is None or check.gap_in_standard_errors is None:
        return False
    gaps = (check.gap_in_standard_errors, check.drafted_gap_in_standard_errors or 0.0)
    return max(map(abs, gaps)) <= REPLAY_HOLDS


def measured_pairs(
    pairs: Sequence[Pair], predicted: Predicted, candidate: Candidate
) -> Pairs | None:
    """The pairs of replayed prompts, of a candidate for which replay holds; None if too few."""
    replays, latency = predicted.replays, predicted.latencies[candidate.draft]
    rows = {name: row for row, name in enumerate(replays.names)}
    pairs = [pair for pair in pairs if pair.name in rows]
    names, replayed = tuple(pair.name for pair in pairs), [rows[pair.name] for pair in pairs]
    if len({*names}) < MIN_MEASURED:
        return None
    seconds, rounds, drafted = _sums(
        [pair.drafted for pair in pairs],
        *(decode_s, lambda trial: trial.rounds or 0, lambda trial: trial.drafted or 0),
    )
    plain_s, plain_tokens = _sums([pair.plain for pair in pairs], decode_s, new_tokens)
    if latency.served is not None:  # next to what is predicted, a request's start included
        timed, plain = predicted.evidence.candidates[candidate], predicted.evidence.baseline
        return Pairs(names, seconds, timed.seconds[replayed], plain_s, plain.seconds[replayed])
    # A round costs what the rounds of the prompt's replay do, which may differ in length; where
    # these of the loop drafted more or less, on the line between a round without and one of K
    counts, relative = replays.candidates[candidate], latency.relative(candidate.k)
    each = (counts.proposals[replayed] @ relative) / counts.rounds[replayed]
    more = drafted - rounds * counts.drafted[replayed] / counts.rounds[replayed]
    cost = rounds * each + more * (relative[-1] - relative[0]) / candidate.k
    return Pairs(names, seconds, cost, plain_s, plain_tokens)


def evidence_from_pairs(
    pairs: Sequence[Pair], temperature: float, candidate: Candidate, breakeven_alpha: float | None
) -> Evidence:
    """The evidence of the pairs alone: of each prompt the mean of its pairs."""
    by_name = grouped(pairs, lambda pair: pair.name)
    names = sorted(by_name)
    repeated = np.array([len(by_name[name]) for name in names], dtype=np.float64)
    plain = [[t for pair in by_name[name] for t in pair.plain] for name in names]
    drafted = [[t for pair in by_name[name] for t in pair.drafted] for name in names]
    counts = (decode_s, new_tokens, accepted, judged)
    seconds, tokens, accepted_tokens, judged_tokens = (
        column / repeated for column in _sums(drafted, *counts)
    )
    plain_s, plain_tokens = (column / repeated for column in _sums(plain, decode_s, new_tokens))
    timed = Timed(seconds, tokens, accepted_tokens, judged_tokens, breakeven_alpha)
    return Evidence(temperature, tuple(names), Timed(plain_s, plain_tokens), {candidate: timed})


def _sums(groups: Sequence[Sequence[Trial]], *counts: Count) -> list[Array]:
    """[group] of each count."""
    return [
        np.array([sum(map(count, group)) for group in groups], dtype=np.float64) for count in counts
    ]

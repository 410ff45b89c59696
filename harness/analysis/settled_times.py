"""The time of a server's request, settled over the visits that made it.

A visit sends every request to every server. A low quantile of a request's visits is taken as its
time, by default the lowest tenth (`undisturbed`): what else runs on a machine only adds to it, and
may add to most. Where the machine itself is now slow, now fast, low quantiles vary more than the
median: `least_varying` tells from a run's visits which of them to take. Where a time of decoding is
a request less another for one token, each of the two is settled so, for the lowest differences are
those whose one-token request was disturbed. Such a start may be below 0: the one-token request has
costs that a longer one does not have again.

A low quantile of few visits is higher than that of many. So a K whose server ended early, or
whose requests failed, is compared over the visits that plain decoding shares with it: its time is
that of the shared visits, times what plain decoding took in all of its visits / in the shared ones.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from harness.analysis.cells import latest
from harness.records import GREEDY, Cell, Trial, grouped
from harness.stats.jackknife import Array

# The quantile of a request's visits that is taken as its time, and higher ones that may be
LOWEST, HIGHER = 0.1, (0.25, 0.5)
# A higher one is only chosen where a request has so many visits
ENOUGH_VISITS = 8
# A K that lacks more than this share of the visits that another has is not held against it
MOST_LACKING = 0.1
NO_SHARED_VISIT = "not timed in any visit that timed plain decoding's text"
# A time from those of several visits
Settle = Callable[[Sequence[float]], float]


def undisturbed(seconds: Sequence[float]) -> float:
    """A request's time from that of each visit."""
    return quantile(seconds, LOWEST)


def quantile(values: Sequence[float], share: float) -> float:
    """As numpy's, which takes a hundred times as long for so few values."""
    ordered, place = sorted(values), share * (len(values) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def least_varying(requests: Iterable[Sequence[float]]) -> Settle:
    """The quantile that settles a request's time over visits with the least error.

    An L-estimator whose trimming is chosen by its estimated variance (Jaeckel, Some flexible
    estimates of location, 1971). The error of a quantile is by how much it changes, relatively,
    where its share of the visits changes by a standard deviation; the mean over requests counts.
    Of equal errors the lowest quantile does. A request is the seconds that its visits took.
    """
    made = [seconds for seconds in requests if len(seconds) >= ENOUGH_VISITS]
    if not made:
        return undisturbed

    def error(share: float) -> float:
        changes: list[float] = []
        for seconds in made:
            deviation = np.sqrt(share * (1.0 - share) / len(seconds))
            shares = (max(0.0, share - deviation), share, share + deviation)
            low, middle, high = (quantile(seconds, each) for each in shares)
            changes.append((high - low) / middle)
        return float(np.mean(changes))

    chosen = min((LOWEST, *HIGHER), key=error)
    return lambda seconds: quantile(seconds, chosen)


class Visit(NamedTuple):
    """The time of a request, or a load of them, in one visit."""

    number: int  # of the visit
    place: int  # among all that were stored, in their order
    seconds: float  # of decoding
    one_token_s: float = 0.0  # what was taken off to give them; 0.0 where nothing was
    length: float = 1.0  # by which they are divided


def shared_visits(visits: Iterable[Visit], plain: Iterable[Visit]) -> list[tuple[Visit, Visit]]:
    """The visits of a K, each with that of plain decoding that was made next to it.

    They have one number. A run that was resumed may have several of it; then those go together that
    were stored nearest to each other.
    """
    by_number = grouped(plain, lambda visit: visit.number)
    pairs = [
        (visit, min(by_number[visit.number], key=lambda each: abs(each.place - visit.place)))
        for visit in visits
        if visit.number in by_number
    ]
    pairs.sort(key=lambda pair: -abs(pair[0].place - pair[1].place))
    nearest = {other: visit for visit, other in pairs}
    return [(visit, other) for other, visit in nearest.items()]


def settled_seconds(visits: Sequence[Visit], settle: Settle = undisturbed) -> float:
    """Seconds per length, settled over visits."""
    taken_off = [visit.one_token_s for visit in visits if visit.one_token_s]
    one_token_s = settle(taken_off) if taken_off else 0.0
    requests = [
        (v.seconds + (v.one_token_s - one_token_s if v.one_token_s else 0.0)) / v.length
        for v in visits
    ]
    return max(0.0, settle(requests))


def paired_seconds(
    visits: Sequence[Visit], plain: Sequence[Visit], settle: Settle = undisturbed
) -> float | None:
    """Seconds per length at a K; their ratio to plain decoding's is that of the shared visits.

    `plain` is empty where there is nothing to compare with. None where there are no visits, or
    plain decoding shares none of them.
    """
    if visits and not plain:
        return settled_seconds(visits, settle)
    pairs = shared_visits(visits, plain)
    if not pairs:
        return None
    seconds = settled_seconds([visit for visit, _ in pairs], settle)
    shared = settled_seconds([other for _, other in pairs], settle)
    # Plain decoding's seconds are the same for every K: those of all of its visits
    return seconds * settled_seconds(plain, settle) / shared if shared > 0.0 else seconds


def with_enough_visits(timed: Mapping[int, int]) -> set[int]:
    """The K to choose from, of those that so many visits timed."""
    most = max(timed.values(), default=0)
    return {k for k, visits in timed.items() if most - visits <= MOST_LACKING * most}


def settling(trials: Sequence[Trial]) -> Settle:
    """The function that settles a run's requests over visits, by its greedy ones, which repeat."""
    timed = [trial for trial in trials if _is_timed(trial) and trial.temperature == GREEDY]
    return least_varying(
        [(trial.decode_s or 0.0) + (trial.one_token_s or 0.0) for trial in group]
        for group in grouped(timed, _Asked.of).values()
    )


class _Asked(NamedTuple):
    """A request that is asked in every visit."""

    cell: Cell
    prompt: str

    @classmethod
    def of(cls, trial: Trial) -> "_Asked":
        return cls(trial.cell_key, trial.prompt)


def settled(trials: Sequence[Trial], settle: Settle = undisturbed) -> list[Trial]:
    """One trial per generation, with times that are settled over visits.

    A greedy text is the same in every visit, so one trial stands for all; where rounding makes it
    another one, the commonest counts. Sampled texts differ: each keeps its rounds, at the time per
    round of that prompt's requests, their start among it. A K is timed over the visits that plain
    decoding has too; without any a greedy text has failed, and sampled ones keep the times that
    they took.

    Trials are as they were stored, in their order: of a generation that was stored more than once
    all are timed.
    """
    timed = [(place, trial) for place, trial in enumerate(trials) if _is_timed(trial)]
    sampled = (trial for _, trial in timed if trial.temperature != GREEDY)
    cells = grouped(sampled, lambda trial: (trial.temperature, trial.k))
    lengths = {cell: _Lengths.of(made) for cell, made in cells.items()}
    generations = grouped(latest(trials), _Asked.of)
    texts = {  # by most of those that were timed
        asked: max(alike, key=alike.count, default=None)
        for asked, group in generations.items()
        for alike in [[trial.tokens for trial in group if _is_timed(trial)]]
    }
    visits = {
        asked: _visits(entries, texts[asked], lengths.get((asked.cell.temperature, asked.cell.k)))
        for asked, entries in grouped(timed, lambda entry: _Asked.of(entry[1])).items()
    }
    made: list[Trial] = []
    for asked, group in generations.items():
        cell = asked.cell
        plain = visits.get(asked._replace(cell=replace(cell, k=0)), []) if cell.k else []
        seconds = paired_seconds(visits.get(asked, []), plain, settle)
        length = lengths.get((cell.temperature, cell.k))
        if cell.temperature == GREEDY:
            made.append(_settled(group, texts[asked], seconds))
        elif seconds is None or length is None:
            made += group
        else:
            # Every text at the settled seconds per length
            made += [
                t if t.decode_s is None else replace(t, decode_s=seconds * length(t)) for t in group
            ]
    return made


def _is_timed(trial: Trial) -> bool:
    return trial.status == "ok" and trial.decode_s is not None


def _visits(
    entries: Sequence[tuple[int, Trial]], text: tuple[int, ...] | None, length: "_Lengths | None"
) -> list[Visit]:
    """A request's timed visits; `text`: the greedy one that counts; `length`: of sampled ones."""
    if length is None:
        measured = [(place, trial, 1.0) for place, trial in entries if trial.tokens == text]
    else:
        measured = [(p, trial, length(trial)) for p, trial in entries if trial.decode_s]
        # Divided by less than a round, a text's noise would be most of its seconds per length
        measured = [each for each in measured if each[-1] >= 1.0] or measured
    return [
        Visit(trial.repetition, place, trial.decode_s or 0.0, trial.one_token_s or 0.0, each)
        for place, trial, each in measured
        if each > 0.0
    ]


def _settled(trials: Sequence[Trial], text: tuple[int, ...] | None, seconds: float | None) -> Trial:
    """The trial of the text that counts; the last failure where no visit succeeded."""
    alike = next((t for t in trials if _is_timed(t) and t.tokens == text), None)
    if alike is None:
        return replace(trials[-1], repetition=0)
    if seconds is None:
        return replace(alike, repetition=0, status="failed", error=NO_SHARED_VISIT)
    return replace(alike, repetition=0, decode_s=seconds)


@dataclass(frozen=True)
class _Lengths:
    """The lengths of sampled requests of one K, in rounds."""

    # Whether the server tells rounds; else tokens stand for them, as where it decodes plainly
    told: bool
    # How many rounds a request's start lasts. Without it the lowest time per round would be the
    # longest text's.
    start: float

    @classmethod
    def of(cls, trials: Sequence[Trial]) -> "_Lengths":
        """By the requests of all prompts."""
        told = all(trial.rounds for trial in trials if trial.status == "ok" and trial.new_tokens)
        bare = cls(told, 0.0)
        timed = [trial for trial in trials if trial.decode_s and bare.rounds(trial)]
        rounds = np.array([bare.rounds(trial) for trial in timed], dtype=np.float64)
        if len(set(rounds)) < 2:
            return bare
        net = any(trial.one_token_s is not None for trial in timed)
        start_s, round_s = fit_line(rounds, np.array([trial.decode_s for trial in timed]), net=net)
        return cls(told, start_s / round_s) if round_s > 0.0 else bare

    def rounds(self, trial: Trial) -> int:
        """Without the start."""
        return (trial.rounds if self.told else trial.new_tokens) or 0

    def __call__(self, trial: Trial) -> float:
        """With it; 0.0 where there was no round."""
        rounds = self.rounds(trial)
        return self.start + rounds if rounds else 0.0


# ---- a start, and what each of several costs -----------------------------------------------------


def fit_line(counts: Array, seconds: Array, *, net: bool) -> tuple[float, float]:
    """A start, and what each of [n] counts costs, 0 or more.

    The start is not below 0; with `net` (another request was taken off) start + first count is not.
    """
    start_s, each_s = least_squares(
        np.column_stack([np.ones_like(counts), counts - 1.0 if net else counts]), seconds
    )
    return start_s - each_s if net else start_s, each_s


def least_squares(columns: Array, seconds: Array, known_s: Array | float = 0.0) -> list[float]:
    """The cost of each of the [n, column] counts, 0 or more, errors relative to the [n] seconds.

    Of these some may be known already. What took no time by its clock, whose step may be longer,
    is left out.
    """
    timed = seconds > 0.0
    known_s = np.broadcast_to(known_s, timed.shape)[timed]
    columns, seconds = columns[timed], seconds[timed]
    fitted, _ = nnls(columns / seconds[:, None], 1.0 - known_s / seconds)
    return fitted.tolist()

"""What decoding costs on a server, from requests, and the seconds that follow for others.

A request costs a start and its rounds. Both matter where texts are short: the first round after a
prefill costs more than the others (llama.cpp, for one, builds its graphs anew). A round costs by
how many tokens it drafted, since near the budget some engines draft fewer than K. So a request is a
line in its rounds, and these are fitted by least squares over requests whose replay says how many
rounds there were, and what each drafted. A round that drafted another number of tokens than any
measured K is made of those that are fitted exactly as a prediction makes it (`RoundTimes.parts`).

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
from harness.records import GREEDY, RoundTiming, Trial, grouped
from harness.serving.counting import Counting
from harness.stats.jackknife import Array, Index, Variance, left_out_variance
from harness.theory.replay import Replayed, replay_texts, stacked
from harness.theory.speedup import RoundTimes

# Costs' error is that of leaving out one such part of the requests at a time
PARTS = 8
# The quantile of a request's visits that is taken as its time, and higher ones that may be
UNDISTURBED, HIGHER = 0.1, (0.25, 0.5)
# A higher one is only chosen where a request has so many visits
ENOUGH_VISITS = 8
# A K that lacks more than this share of the visits that another has is not held against it
MOST_LACKING = 0.1
NO_SHARED_VISIT = "not timed in any visit that timed plain decoding's text"
# A time from those of several visits
Settle = Callable[[Sequence[float]], float]


@dataclass(frozen=True, eq=False)
class PlainRequests:
    """What requests that were decoded plainly took.

    Attributes:
        seconds: [n] of decoding.
        tokens: [n] that they emitted.
    """

    seconds: Array
    tokens: Array


@dataclass(frozen=True, eq=False)
class Requests:
    """What requests on a speculating server took.

    Attributes:
        seconds: [n] of decoding.
        counts: their rounds, n texts.
    """

    seconds: Array
    counts: Replayed


@dataclass(frozen=True, eq=False)
class TimedRequests:
    """Requests from which costs are fitted.

    Attributes:
        plain: those that were decoded plainly.
        speculative: the others, by K.
        net: whether another request was taken off each, so that a start may be below 0.
    """

    plain: PlainRequests
    speculative: Mapping[int, Requests]
    net: bool = False

    def __add__(self, other: "TimedRequests") -> "TimedRequests":
        """Both, of the K that either has."""
        speculative = {**other.speculative, **self.speculative}
        for k in other.speculative.keys() & self.speculative.keys():
            parts = self.speculative[k], other.speculative[k]
            seconds = np.concatenate([part.seconds for part in parts])
            speculative[k] = Requests(seconds, stacked([part.counts for part in parts]))
        plain = PlainRequests(
            np.concatenate([self.plain.seconds, other.plain.seconds]),
            np.concatenate([self.plain.tokens, other.plain.tokens]),
        )
        return TimedRequests(plain, speculative, self.net or other.net)

    def without(self, part: int) -> "TimedRequests":
        """The requests but for every `PARTS`th, from this one on."""

        def kept(seconds: Array) -> Index:
            return np.flatnonzero(np.arange(len(seconds)) % PARTS != part)

        plain = kept(self.plain.seconds)
        return TimedRequests(
            PlainRequests(self.plain.seconds[plain], self.plain.tokens[plain]),
            {
                k: Requests(each.seconds[rows], each.counts.rows(rows))
                for k, each in self.speculative.items()
                if len(rows := kept(each.seconds))
            },
            self.net,
        )


@dataclass(frozen=True)
class ServerCosts:
    """What decoding costs on a server.

    Attributes:
        plain_start_s, start_s: of a request beside its rounds, plain and speculative.
        times: of a plain token, and of a round that drafts n tokens.
    """

    plain_start_s: float
    start_s: float
    times: RoundTimes

    def plain_s(self, tokens: Array) -> Array:
        """[n] seconds of requests of so many tokens each, decoded plainly."""
        return self.plain_start_s + tokens * self.times.plain_s

    def speculative_s(self, counts: Replayed) -> Array:
        """[n] seconds of requests whose rounds are expected to be these."""
        return self.start_s + seconds_of_rounds(counts, self.times)

    def speedup(self, tokens: Array, counts: Replayed) -> float:
        """Plain seconds / speculative ones, of such requests together."""
        return float(self.plain_s(tokens).sum() / self.speculative_s(counts).sum())


def seconds_of_rounds(counts: Replayed, times: RoundTimes) -> Array:
    """[n] seconds that the rounds of n texts take, each by how many tokens it drafts."""
    return counts.proposals @ np.array([times.at(n) for n in range(counts.k + 1)])


def speedup_variance(timed: TimedRequests, tokens: Array, counts: Replayed) -> Variance | None:
    """The variance that costs' error gives the logarithm of a predicted speedup, by the jackknife.

    Args:
        timed: requests from which the costs are fitted.
        tokens, counts: the plain tokens and the rounds of the texts that are predicted.

    Returns:
        None where the costs rest on too few requests to do without some.
    """
    fits = [fit_costs(timed.without(part)) for part in range(PARTS)]
    logs = [
        np.log(fit.speedup(tokens, counts))
        for fit in fits
        if fit is not None and fit.times.covers(counts.k)
    ]
    return left_out_variance(np.array(logs), np.ones(PARTS)) if len(logs) == PARTS else None


def fit_costs(timed: TimedRequests) -> ServerCosts | None:
    """Fit costs by least squares, errors relative to a request's time.

    Returns:
        None without requests of two lengths, which tell a start from its rounds, and where they
        were so disturbed that a token or a round would cost nothing.
    """
    plain, speculative = timed.plain, dict(sorted(timed.speculative.items()))
    if len(set(plain.tokens)) < 2 or not speculative:
        return None
    plain_start_s, token_s = fit_line(plain.tokens, plain.seconds, net=timed.net)
    seconds = np.concatenate([each.seconds for each in speculative.values()])
    rounds = [(k, each.counts.proposals[:, None]) for k, each in speculative.items()]
    fitted = fit_rounds([token_s], rounds, np.ones_like(seconds), seconds, net=timed.net)
    return None if fitted is None else ServerCosts(plain_start_s, fitted[0], fitted[1][0])


def fit_line(counts: Array, seconds: Array, *, net: bool) -> tuple[float, float]:
    """A start, and what each of [n] counts costs.

    No start is below 0; where another request was taken off (`net`), none with its first count is.
    """
    start_s, each_s = least_squares(
        np.column_stack([np.ones_like(counts), counts - 1.0 if net else counts]), seconds
    )
    return start_s - each_s if net else start_s, each_s


def fit_rounds(
    plain_s: Sequence[float],
    rounds: Sequence[tuple[int, Array]],
    starts: Array,
    seconds: Array,
    *,
    net: bool = False,
) -> tuple[float, list[RoundTimes]] | None:
    """Fit what a start and rounds cost, in n entries of one request or of several together.

    Args:
        plain_s: [batch] of a plain token, by how many requests are decoded side by side.
        rounds: K of some entries, and [entry, batch, K + 1] their rounds that draft 0..K tokens.
        starts: [n] requests of each entry, in the order of `rounds`.
        seconds: [n] that each took.
        net: whether another request was taken off each: then a start may be below 0, but with the
            cheapest round is not.

    Returns:
        Of a start, and by batch; None where a token or a round would cost nothing.
    """
    ks = sorted({k for k, _ in rounds})
    # Which line a draft shorter than every K lies on depends on the times (`RoundTimes`), so these
    # are fitted twice; by the first ones it lies on that from the plain token.
    table = np.outer(plain_s, [1.0 + k**2 for k in ks])
    start_s, times = 0.0, _times_of(plain_s, ks, table)
    for _ in range(2):
        # [n, batch, 1 + ks] plain steps and rounds of each K
        counts = np.concatenate(
            [
                np.stack([made[:, at] @ _shares(each, k) for at, each in enumerate(times)], axis=1)
                for k, made in rounds
            ]
        )
        columns = np.column_stack([starts, counts[..., 1:].reshape(len(counts), -1)])
        least_s = -min(each_s for _, each_s in times[0].round_s) if net else 0.0
        known_s = counts[..., 0] @ np.array(plain_s) + least_s * starts
        start_s, *rounds_s = least_squares(columns, seconds, known_s)
        start_s += least_s
        if min(*plain_s, *rounds_s) <= 0.0:
            return None
        times = _times_of(plain_s, ks, np.reshape(rounds_s, table.shape))
    return start_s, times


def _times_of(plain_s: Sequence[float], ks: Sequence[int], rounds_s: Array) -> list[RoundTimes]:
    """R by batch, from the [batch, K] seconds of a round."""
    rows = zip(plain_s, rounds_s.tolist(), strict=True)
    return [RoundTimes(token_s, tuple(zip(ks, row, strict=True))) for token_s, row in rows]


def _shares(times: RoundTimes, k: int) -> Array:
    """[k + 1, 1 + ks] how much of R(0) and each timed R a round of n = 0..k drafted tokens is."""
    columns = {n: column for column, n in enumerate([0, *(n for n, _ in times.round_s)])}
    made = np.zeros((k + 1, len(columns)))
    for n in range(k + 1):
        for part, share in times.parts(n):
            made[n, columns[part]] += share
    return made


def least_squares(columns: Array, seconds: Array, known_s: Array | float = 0.0) -> list[float]:
    """What each of the [n, column] counts costs, none below 0, errors relative to the seconds.

    Args:
        columns: how often each thing was done.
        seconds: [n] that it took together.
        known_s: what of these is known already.
    """
    fitted, _ = nnls(columns / seconds[:, None], 1.0 - known_s / seconds)
    return fitted.tolist()


# ---- over visits ---------------------------------------------------------------------------------


def undisturbed(seconds: Sequence[float]) -> float:
    """A request's time from that of each visit."""
    return _quantile(seconds, UNDISTURBED)


def _quantile(values: Sequence[float], share: float) -> float:
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
    Of equal errors the lowest quantile does.

    Args:
        requests: of each, the seconds that its visits took.
    """
    made = [seconds for seconds in requests if len(seconds) >= ENOUGH_VISITS]
    if not made:
        return undisturbed

    def error(share: float) -> float:
        changes: list[float] = []
        for seconds in made:
            deviation = np.sqrt(share * (1.0 - share) / len(seconds))
            shares = (max(0.0, share - deviation), share, share + deviation)
            low, middle, high = np.quantile(seconds, shares)
            changes.append((high - low) / middle)
        return float(np.mean(changes))

    chosen = min((UNDISTURBED, *HIGHER), key=error)
    return lambda seconds: _quantile(seconds, chosen)


class Visit(NamedTuple):
    """What a request, or a load of them, took in one visit.

    Attributes:
        number: of the visit.
        place: among all that were stored, in their order.
        seconds: of decoding.
        one_token_s: what was taken off to give them; 0.0 where nothing was.
        length: by which they are divided.
    """

    number: int
    place: int
    seconds: float
    one_token_s: float = 0.0
    length: float = 1.0


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


def pace_of(visits: Sequence[Visit], settle: Settle = undisturbed) -> float:
    """Seconds per length, settled over visits."""
    one_token_s = settle([visit.one_token_s for visit in visits])
    requests = [(v.seconds + v.one_token_s - one_token_s) / v.length for v in visits]
    return max(0.0, settle(requests))


def compared_pace(
    visits: Sequence[Visit], plain: Sequence[Visit], settle: Settle = undisturbed
) -> float | None:
    """The pace of a K, whose ratio to plain decoding's is that of the visits that they share.

    Returns:
        None where they share none.
    """
    pairs = shared_visits(visits, plain)
    if not pairs:
        return None
    pace = pace_of([visit for visit, _ in pairs], settle)
    shared = pace_of([other for _, other in pairs], settle)
    # Plain decoding's pace is one for every K: that of all of its visits
    return pace * pace_of(plain, settle) / shared if shared > 0.0 else pace


def with_enough_visits(timed: Mapping[int, int]) -> set[int]:
    """The K to choose from, of those that so many visits timed."""
    most = max(timed.values(), default=0)
    return {k for k, visits in timed.items() if most - visits <= MOST_LACKING * most}


def settling(trials: Sequence[Trial]) -> Settle:
    """How a run's requests are settled over visits, as its greedy ones tell: these are alike."""
    timed = [trial for trial in trials if _is_timed(trial) and trial.temperature == GREEDY]
    return least_varying(
        [(trial.decode_s or 0.0) + (trial.one_token_s or 0.0) for trial in group]
        for group in grouped(timed, _Asked.of).values()
    )


class _Asked(NamedTuple):
    """What was asked in every visit."""

    prompt_set: str
    prompt: str
    temperature: float
    k: int

    @classmethod
    def of(cls, trial: Trial) -> "_Asked":
        """By a trial."""
        return cls(trial.prompt_set, trial.prompt, trial.temperature, trial.k)


def settled(trials: Sequence[Trial], settle: Settle = undisturbed) -> list[Trial]:
    """One trial per generation, with times that are settled over visits.

    A greedy text is the same in every visit, so one trial stands for all; where rounding makes it
    another one, the commonest counts. Sampled texts differ: each keeps its rounds, at the pace of
    that prompt's requests, their start among it. A K is timed over the visits that plain decoding
    has too; without any a greedy text has failed, and sampled ones keep the times that they took.

    Args:
        trials: as they were stored, in their order: of a generation that was stored more than once
            all are timed.
        settle: a request's time over its visits.
    """
    timed = [(place, trial) for place, trial in enumerate(trials) if _is_timed(trial)]
    sampled = (trial for _, trial in timed if trial.temperature != GREEDY)
    cells = grouped(sampled, lambda trial: (trial.temperature, trial.k))
    lengths = {cell: _Lengths.of(made) for cell, made in cells.items()}
    generations = grouped(latest(trials), _Asked.of)
    texts = {asked: _commonest(group) for asked, group in generations.items()}
    visits = {
        asked: _visits(entries, texts[asked], lengths.get((asked.temperature, asked.k)))
        for asked, entries in grouped(timed, lambda entry: _Asked.of(entry[1])).items()
    }
    made: list[Trial] = []
    for asked, group in generations.items():
        timed_in, plain_in = visits.get(asked, []), visits.get(asked._replace(k=0), [])
        pace = None
        if timed_in:
            compared = asked.k and plain_in
            pace = (
                compared_pace(timed_in, plain_in, settle) if compared else pace_of(timed_in, settle)
            )
        if asked.temperature == GREEDY:
            made.append(_settled(group, texts[asked], pace))
        else:
            made += _at_pace(group, pace, lengths.get((asked.temperature, asked.k)))
    return made


def _is_timed(trial: Trial) -> bool:
    return trial.status == "ok" and trial.decode_s is not None


def _visits(
    entries: Sequence[tuple[int, Trial]], text: tuple[int, ...] | None, length: "_Lengths | None"
) -> list[Visit]:
    """The visits by which a request is timed, with the place of each trial.

    Args:
        entries: its trials, with their places.
        text: the greedy one that counts.
        length: of sampled ones; None if greedy.
    """
    if length is None:
        measured = [(place, trial, 1.0) for place, trial in entries if trial.tokens == text]
    else:
        measured = [(p, trial, length(trial)) for p, trial in entries if trial.decode_s]
        # Divided by less than a round, a text's noise would be most of its pace
        measured = [each for each in measured if each[-1] >= 1.0] or measured
    return [
        Visit(trial.repetition, place, trial.decode_s or 0.0, trial.one_token_s or 0.0, each)
        for place, trial, each in measured
        if each > 0.0
    ]


def _commonest(trials: Sequence[Trial]) -> tuple[int, ...] | None:
    """The text of most of those that were timed."""
    texts = [trial.tokens for trial in trials if _is_timed(trial)]
    return max(texts, key=texts.count, default=None)


def _settled(trials: Sequence[Trial], text: tuple[int, ...] | None, seconds: float | None) -> Trial:
    """Of one prompt and K, the text that counts; the last failure where no visit succeeded."""
    alike = next((t for t in trials if _is_timed(t) and t.tokens == text), None)
    if alike is None:
        return replace(trials[-1], repetition=0)
    if seconds is None:
        return replace(alike, repetition=0, status="failed", error=NO_SHARED_VISIT)
    return replace(alike, repetition=0, decode_s=seconds)


@dataclass(frozen=True)
class _Lengths:
    """How long sampled requests of one K are, in rounds.

    Attributes:
        told: whether the server tells rounds; else tokens stand for them, as where it decodes
            plainly.
        start: how many rounds a request's start lasts. Without it the lowest time per round would
            be the longest text's.
    """

    told: bool
    start: float

    @classmethod
    def of(cls, trials: Sequence[Trial]) -> "_Lengths":
        """Of all prompts' requests."""
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


def _at_pace(trials: Sequence[Trial], pace: float | None, length: _Lengths | None) -> list[Trial]:
    """Of one prompt and K: every text at the settled pace."""
    if pace is None or length is None:
        return list(trials)
    return [
        trial if trial.decode_s is None else replace(trial, decode_s=pace * length(trial))
        for trial in trials
    ]


def timed_rounds(
    timings: Sequence[RoundTiming], counting: Counting, settle: Settle = undisturbed
) -> TimedRequests | None:
    """Requests of servers that were told to reject every draft, and plain ones next to them.

    Args:
        timings: of one draft and temperature, in the order in which they were stored; each round
            emitted one token.
        counting: of the engine; tells how many tokens each round drafted.
        settle: a request's time over its visits.

    Returns:
        None without any.
    """
    visits: dict[tuple[int, int, int, bool], list[Visit]] = {}
    for place, t in enumerate(timings):
        shortened = t.k > 0 and t.drafted not in (None, t.k * t.rounds)
        visits.setdefault((t.k, t.context_tokens, t.new_tokens, shortened), []).append(
            Visit(t.visit, place, t.seconds, t.one_token_s or 0.0)
        )
    most: dict[int, int] = {}
    for (k, *_), made in visits.items():
        most[k] = max(most.get(k, 0), len(made))
    by_k: dict[int, list[tuple[int, bool, float]]] = {}
    for (k, context, tokens, shortened), made in sorted(visits.items()):
        plain = visits.get((0, context, tokens, False), [])
        seconds = compared_pace(made, plain, settle) if k and plain else pace_of(made, settle)
        # A length that fewer than half of the visits have is an end of text's
        if 2 * len(made) >= most[k] and seconds is not None:
            by_k.setdefault(k, []).append((tokens, shortened, seconds))
    plain = by_k.pop(0, [])
    if not plain or not by_k:
        return None
    return TimedRequests(
        PlainRequests(
            np.array([seconds for *_, seconds in plain]),
            np.array([tokens for tokens, *_ in plain], dtype=np.float64),
        ),
        {
            k: Requests(
                np.array([seconds for *_, seconds in rows]),
                _rejected([(tokens, shortened) for tokens, shortened, _ in rows], k, counting),
            )
            for k, rows in by_k.items()
        },
        net=any(t.one_token_s is not None for t in timings),
    )


def _rejected(texts: Sequence[tuple[int, bool]], k: int, counting: Counting) -> Replayed:
    """The rounds of texts whose every draft was rejected: (tokens, whether the last were cut)."""
    proposed = [
        counting.proposed(k, tokens + counting.first_position) if shortened else np.full(tokens, k)
        for tokens, shortened in texts
    ]
    return replay_texts([np.zeros((tokens, k)) for tokens, _ in texts], proposed, k)

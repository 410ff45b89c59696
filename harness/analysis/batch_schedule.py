"""Which K to serve at which load: throughput by concurrency.

Measured: a load is a group of requests sent together (`harness.measurement.load`), timed as a
whole; its time per returned token is the lower quartile of its visits, for what else runs on a
machine only adds. The throughput ratio of a K is the plain server's seconds per token / this K's,
over the visits that both have: sampled texts of the same requests differ in length between visits
and K. Requests beyond a server's slots wait for one, so such loads say nothing of a batch.

Predicted: tokens per round / R(K, B), over the same of plain decoding, 1 / R(0, B).

    R(K, B)          = B x seconds of a load / its rounds, over its visits as above
    tokens per round = that replay expects of the plain server's texts, the same for every K

R(K, B) is what an iteration of B requests takes in the mean. Prefills are in it, and so are the
slots that stay empty at the end of a load, when no request is left to take them: at every K, plain
decoding included. Rounds are those that the server returned; where it does not tell them, the
tokens that it returned / the tokens per round that replay expects. At temperature 0 all loads have
the same texts, and predicted and measured ratios are equal. Sampled texts are others in every load:
the predicted ratio leaves out how well those of a K happened to be drafted.

The schedule names, for each measured concurrency, the K with the largest predicted throughput, and
which K tie with it: those behind by less than the spread of the visits' ratios between the two. A
load between two measured ones gets the K of the larger. What such a choice loses is found visit by
visit: the K is chosen by the other visits, and held in this one against the K that is fastest over
all of them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from harness.analysis.cells import Weights, few_visits, few_visits_error
from harness.analysis.replayed import as_served
from harness.analysis.request_times import (
    Visit,
    paired_seconds,
    quantile,
    shared_visits,
    with_enough_visits,
)
from harness.records import (
    LoadTiming,
    ResultRow,
    Rule,
    ServerClock,
    TextTrace,
    grouped,
    set_of,
    where,
)
from harness.serving.round_counting import Counting
from harness.summary import LoadCell, Schedule, ScheduleEntry
from harness.theory.replay import replay_texts

# Of a load's visits the quantile that is taken as its time
SETTLE = partial(quantile, share=0.25)
# Processors that others may keep busy while loads are compared by a clock that waits
MOST_OTHERS = 0.1
# A lead that counts where the spread of visits is not known
LEAD = 0.05


@dataclass(frozen=True, order=True)
class LoadKey:
    """Which closed loop: everything but the visit; `budgets` is the sum of the requests'."""

    concurrency: int
    group: str
    k: int
    budgets: int


@dataclass(frozen=True, eq=False)
class ClosedLoad:
    """A closed loop over its visits."""

    key: LoadKey
    full: bool  # whether its requests had their full budgets
    # timings, visits: as stored, and their seconds per returned token
    timings: tuple[LoadTiming, ...]
    visits: tuple[Visit, ...]
    tokens: float  # returned, the mean over the visits
    seconds: float  # for so many tokens, over the visits that plain decoding shares
    # Seconds per token of the plain server's texts at the rounds that replay expects of them, each
    # R(K, B) / B; None where a text was not scored
    expected_token_s: float | None


@dataclass(frozen=True)
class LoadRounds:
    """The rounds of a load; of plain decoding its tokens."""

    expected: float  # by replay of the plain server's texts
    taken: float  # as it returned them; where the server does not tell, by its returned tokens
    tokens: float  # of the plain server's texts, the prefill's among them


# Of a load; None where a text was not scored, requests arrive, or prefills made it all
RoundsOf = Callable[[LoadTiming], LoadRounds | None]
# Text "prompt set/prompt", and its repetition
_Text = tuple[str, int]


def replayed_loads(
    traces: Iterable[TextTrace], rule: Rule | None, counting: Counting | None
) -> RoundsOf:
    """The rounds that replay expects of loads at one temperature.

    Args:
        traces: of the part of each text that rounds emit; those of other K than 0 are passed over.
        rule, counting: the engine's; None where they are not known, and nothing is replayed.
    """
    if rule is None or counting is None:
        return lambda _: None
    prefill = counting.first_position
    by_text = {(f"{t.prompt_set}/{t.prompt}", t.repetition): t for t in traces if t.k == 0}

    def emitted(text: _Text, budget: int) -> int:
        """Tokens that rounds emit of a text under a budget; none where all are the prefill's."""
        trace = by_text.get(text)
        return 0 if trace is None else min(len(trace.tokens), budget - prefill)

    @cache
    def rounds(text: _Text, budget: int, k: int) -> float:
        size = emitted(text, budget)
        if not k or not size:
            return float(size)
        proposed = counting.proposed(k, budget)
        served = as_served([by_text[text]], [size], [proposed], rule, k)
        return float(replay_texts(*served).rounds[0])

    @cache
    def of_load(load: LoadTiming) -> LoadRounds | None:
        # The plain server's text of that visit; greedy ones are stored once
        visits = ((name, load.visit) for name in load.texts)
        texts = [text if text in by_text else (text[0], 0) for text in visits]
        scored = zip(texts, load.returned, strict=True)
        known = all(size <= prefill or text in by_text for text, size in scored)
        if load.concurrency is None or not known:
            return None
        asked = list(zip(texts, load.budgets, strict=True))
        expected = sum(rounds(*each, load.k) for each in asked)
        tokens = sum(emitted(*each) for each in asked)
        told = [each for each in load.rounds if each is not None]
        if load.k and len(told) == len(texts):
            taken = float(sum(told))
        else:
            returned = sum(max(0, size - prefill) for size in load.returned)
            taken = returned * expected / max(tokens, 1)
        if expected <= 0.0 or taken <= 0.0:
            return None
        return LoadRounds(expected, taken, tokens + prefill * len(texts))

    return of_load


# A load with what it took, as it was stored
_Entry = tuple[LoadTiming, Visit]


def closed_loads(
    timings: Iterable[LoadTiming], rounds_of: RoundsOf = lambda _: None
) -> dict[LoadKey, ClosedLoad]:
    """The closed loops of one temperature, from timings in the order in which they were stored.

    Visits are taken together. A K that shares no visit with plain decoding is left out.
    """
    closed = [
        (timing, Visit(timing.visit, place, timing.seconds / sum(timing.returned)))
        for place, timing in enumerate(timings)
        if timing.concurrency is not None
    ]
    stored = grouped(
        closed, lambda e: LoadKey(e[0].concurrency or 0, e[0].group, e[0].k, sum(e[0].budgets))
    )
    most = {
        load: max(key.budgets for key in keys)
        for load, keys in grouped(stored, lambda key: (key.group, key.concurrency)).items()
    }
    loads: dict[LoadKey, ClosedLoad] = {}
    for key, entries in sorted(stored.items()):
        plain_entries = stored.get(replace(key, k=0), [])
        visits, plain = ([visit for _, visit in each] for each in (entries, plain_entries))
        token_s = paired_seconds(visits, plain, SETTLE)
        if token_s is not None:
            tokens = float(np.mean([sum(timing.returned) for timing, _ in entries]))
            loads[key] = ClosedLoad(
                key,
                key.budgets == most[key.group, key.concurrency],
                tuple(timing for timing, _ in entries),
                tuple(visits),
                tokens,
                token_s * tokens,
                _expected_token_s(entries, plain_entries, rounds_of),
            )
    return loads


def _expected_token_s(
    entries: Sequence[_Entry], plain_entries: Sequence[_Entry], rounds_of: RoundsOf
) -> float | None:
    rounds = [each for timing, _ in entries if (each := rounds_of(timing)) is not None]
    if len(rounds) < len(entries):
        return None
    visits, plain = _per_round(entries, rounds_of), _per_round(plain_entries, rounds_of)
    round_s = paired_seconds(visits, plain, SETTLE)
    share = sum(each.expected for each in rounds) / sum(each.tokens for each in rounds)
    return None if round_s is None else round_s * share


def _per_round(entries: Iterable[_Entry], rounds_of: RoundsOf) -> list[Visit]:
    """The visits whose rounds are known, with R(K, B) / B in place of seconds per token."""
    return [
        visit._replace(seconds=timing.seconds / rounds.taken)
        for timing, visit in entries
        if (rounds := rounds_of(timing)) is not None
    ]


# ---- throughput by concurrency, and what to serve ------------------------------------------------


@dataclass(frozen=True)
class LoadResults:
    """Cells, schedules and rows of results.csv of the loads at all temperatures."""

    cells: tuple[LoadCell, ...]
    schedules: tuple[Schedule, ...]
    rows: tuple[ResultRow, ...]
    varying: tuple[LoadCell, ...] = ()


def analyse_loads(
    timings: Sequence[LoadTiming],
    traces: Sequence[TextTrace],
    rule: Rule | None,
    counting: Counting | None,
    engine: str,
    asked: int | None = None,
    weights: Weights = None,
) -> LoadResults:
    """Everything that a server's loads say; no predictions where nothing can be replayed.

    Args:
        timings: in the order in which they were stored.
        traces: of the plain server's texts.
        rule, counting: the engine's; None where they are not known.
        asked: visits that the run asked for, if known.
        weights: of the prompt sets in the workload, see `over_groups`.
    """
    cells: list[LoadCell] = []
    schedules: list[Schedule] = []
    rows: list[ResultRow] = []
    of_one_k = [timing for timing in timings if not timing.varying]
    for temperature in dict.fromkeys(timing.temperature for timing in of_one_k):
        made = [timing for timing in of_one_k if timing.temperature == temperature]
        texts = [trace for trace in traces if trace.temperature == temperature]
        rounds_of = replayed_loads(texts, rule, counting)
        loads = closed_loads(made, rounds_of)
        compared = throughputs(loads)
        totals = over_groups(compared, weights=weights)
        cells += load_cells(made, compared, asked, weights)
        waiting = {cell.concurrency for cell in cells if cell.slots is not None}
        side_by_side = [row for row in totals if row.concurrency not in waiting]
        if side_by_side:
            largest_waits = max(row.concurrency for row in totals) in waiting
            without = without_visits(made, rounds_of, weights)
            schedules.append(schedule(temperature, side_by_side, without, ends=largest_waits))
        for row in over_groups(compared, set_of):  # the halves of a set together
            if row.concurrency > 1:  # the requests that were sent one at a time have that row
                rows.append(_result_row(row, loads, engine, asked))
    varying = varying_cells(timings, counting, asked, weights)
    return LoadResults(tuple(cells), tuple(schedules), tuple(rows), tuple(varying))


def disturbed(timings: Sequence[LoadTiming], clock: ServerClock) -> float | None:
    """Processors that others used while these were timed, where these are too many to compare them.

    The mean. Processor time counts none of theirs.
    """
    known = [(each.others, each.seconds) for each in timings if each.others is not None]
    if not known or clock == "cpu":
        return None
    others, seconds = zip(*known, strict=True)
    mean = float(np.average(others, weights=seconds))
    return mean if mean > MOST_OTHERS else None


def varying_cells(
    timings: Sequence[LoadTiming],
    counting: Counting | None,
    asked: int | None,
    weights: Weights,
) -> Iterator[LoadCell]:
    """Servers whose K changed, each held against plain decoding under the same loads.

    Nothing is predicted of them: replay is of one K.
    """
    servers = dict.fromkeys((t.temperature, t.varying) for t in timings if t.varying)
    for temperature, varying in servers:
        made = [
            timing
            for timing in timings
            if timing.temperature == temperature
            and (timing.varying == varying or not (timing.k or timing.varying))
        ]
        compared = throughputs(closed_loads(made))
        for cell in load_cells(made, compared, asked, weights):
            if cell.k:
                at = {"concurrency": cell.concurrency, "rate": cell.rate, "varying": varying}
                emitted = _emitted_per_round(full_loads(where(made, **at)), counting)
                yield replace(cell, varying=varying, tokens_per_round=emitted)


def _emitted_per_round(loads: Sequence[LoadTiming], counting: Counting | None) -> float | None:
    """Tokens of a round; None where a request's rounds are not known."""
    rounds = [each for load in loads for each in load.rounds]
    if counting is None or None in rounds or not any(rounds):
        return None
    returned = [max(each - counting.first_position, 0) for load in loads for each in load.returned]
    return sum(returned) / sum(each or 0 for each in rounds)


@dataclass(frozen=True)
class Throughput:
    """One K in a closed loop of one group, or of all."""

    concurrency: int
    group: str
    k: int
    tokens: float  # that the plain server returned
    seconds: tuple[float, float]  # of its load and the plain server's for so many tokens, measured
    # Of both, at the rounds that replay expects of the texts; None where these are not known
    predicted_s: tuple[float, float] | None
    by_visit: Mapping[int, tuple[float, float]]  # of both, measured in each visit that timed both

    @property
    def measured(self) -> float:
        """Throughput / plain decoding's."""
        return self.seconds[1] / self.seconds[0]

    @property
    def predicted(self) -> float | None:
        """`measured`, at the expected rounds."""
        return None if self.predicted_s is None else self.predicted_s[1] / self.predicted_s[0]


def throughputs(loads: Mapping[LoadKey, ClosedLoad]) -> list[Throughput]:
    """Every group's closed loops with full budgets, plain ones among them, against plain ones."""
    rows: list[Throughput] = []
    for load in loads.values():
        plain = loads.get(LoadKey(load.key.concurrency, load.key.group, 0, load.key.budgets))
        if not load.full or plain is None:
            continue
        tokens, predicted = plain.tokens, None
        if load.expected_token_s is not None and plain.expected_token_s is not None:
            predicted = (tokens * load.expected_token_s, tokens * plain.expected_token_s)
        rows.append(
            Throughput(
                load.key.concurrency,
                load.key.group,
                load.key.k,
                tokens,
                (load.seconds / load.tokens * tokens, plain.seconds),
                predicted,
                {
                    visit.number: (visit.seconds * tokens, other.seconds * tokens)
                    for visit, other in shared_visits(load.visits, plain.visits)
                },
            )
        )
    return rows


def over_groups(
    rows: Sequence[Throughput],
    name: Callable[[str], str] = lambda _: "all",
    weights: Weights = None,
) -> list[Throughput]:
    """All groups of one name together, by concurrency and K: their seconds added up.

    With `weights` each prompt set counts by its share of the tokens, else as it was sent.
    """
    total: list[Throughput] = []
    cells = grouped(rows, lambda row: (row.concurrency, name(row.group), row.k))
    for (concurrency, group, k), sent in sorted(cells.items()):
        counts = zip(sent, _factors(sent, weights), strict=True)
        parts = [(part, factor) for part, factor in counts if factor > 0.0]
        predicted = [(p.predicted_s, factor) for p, factor in parts if p.predicted_s is not None]
        visits = set.intersection(*(set(part.by_visit) for part, _ in parts))
        total.append(
            Throughput(
                concurrency,
                group,
                k,
                sum(factor * part.tokens for part, factor in parts),
                _added([(part.seconds, factor) for part, factor in parts]),
                _added(predicted) if len(predicted) == len(parts) else None,
                {
                    visit: _added([(part.by_visit[visit], factor) for part, factor in parts])
                    for visit in sorted(visits)
                },
            )
        )
    return total


def _factors(parts: Sequence[Throughput], weights: Weights) -> list[float]:
    """How many times each group counts, as if prompt sets had been sent by their weights."""
    sets = grouped(parts, lambda part: set_of(part.group))
    tokens = {name: sum(part.tokens for part in of_set) for name, of_set in sets.items()}
    names = [set_of(part.group) for part in parts]
    factors = [(weights or {}).get(name, 0.0) / tokens[name] for name in names]
    return factors if any(factors) else [1.0] * len(parts)


def _added(parts: Sequence[tuple[tuple[float, float], float]]) -> tuple[float, float]:
    """The sums of pairs, each counted so many times."""
    return sum(factor * one for (one, _), factor in parts), sum(f * two for (_, two), f in parts)


def spread(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Relative standard deviation of ratios; None of fewer than two."""
    logs = [np.log(one / other) for one, other in pairs]
    return float(np.std(logs, ddof=1)) if len(logs) > 1 else None


def without_visits(
    timings: Sequence[LoadTiming], rounds_of: RoundsOf, weights: Weights = None
) -> dict[int, list[Throughput]]:
    """By visit, the throughputs of all groups that the other visits alone measure and predict.

    Empty of a single visit.
    """
    visits = {timing.visit for timing in timings}
    return {
        visit: over_groups(throughputs(closed_loads(kept, rounds_of)), weights=weights)
        for visit in sorted(visits)
        if (kept := [timing for timing in timings if timing.visit != visit])
    }


def load_cells(
    timings: Sequence[LoadTiming],
    compared: Sequence[Throughput],
    asked: int | None = None,
    weights: Weights = None,
) -> list[LoadCell]:
    """A report's cells of the loads at one temperature: closed loops, then rates.

    `asked` is the number of visits that the run asked for, if known.
    """
    totals = {(row.concurrency, row.k): row for row in over_groups(compared, weights=weights)}
    # A ratio to plain decoding is of neither where either server lets requests wait
    slots = {
        concurrency: min(each.slots for each in made if each.slots is not None)
        for concurrency, made in grouped(timings, lambda t: t.concurrency).items()
        if concurrency and any(0 < (each.slots or 0) < concurrency for each in made)
    }
    cells: list[LoadCell] = []
    for made in by_load(full_loads(timings)):
        first, at = made[0], (made[0].concurrency or 0, made[0].k)
        user_s = np.concatenate([each.user_s for each in made])
        tokens = np.concatenate([each.returned for each in made])
        cell = LoadCell(
            temperature=first.temperature,
            k=first.k,
            concurrency=first.concurrency,
            rate=first.rate,
            requests=len(user_s),
            tokens_per_second=float(tokens.sum()) / sum(each.seconds for each in made),
            ms_per_token=1e3 * float(np.median(user_s / tokens)),
            slots=slots.get(at[0]),
        )
        total = totals.get(at)
        if total is not None:
            cell = replace(
                cell,
                tokens_per_second=total.tokens / total.seconds[0],
                throughput_ratio=total.measured,
                spread=spread(total.by_visit.values()),
                visits=few_visits(len(total.by_visit), asked),
            )
        cells.append(cell)
    return cells


def by_load(timings: Iterable[LoadTiming]) -> list[list[LoadTiming]]:
    """Timings grouped by temperature, load and K, in this order, closed loops first."""

    def load(t: LoadTiming) -> tuple[float, bool, int, float, int]:
        return (t.temperature, t.concurrency is None, t.concurrency or 0, t.rate or 0.0, t.k)

    return [made for _, made in sorted(grouped(timings, load).items())]


def full_loads(timings: Iterable[LoadTiming]) -> list[LoadTiming]:
    """The timings whose requests had their full budgets, of one temperature or several."""

    def requests(t: LoadTiming) -> tuple[float, int, float, str, int]:
        return (t.temperature, t.concurrency or 0, t.rate or 0.0, t.group, t.k)

    full: list[LoadTiming] = []
    for made in grouped(timings, requests).values():
        most = max(sum(each.budgets) for each in made)
        full += [each for each in made if sum(each.budgets) == most]
    return full


def schedule(
    temperature: float,
    totals: Sequence[Throughput],
    without: Mapping[int, Sequence[Throughput]],
    *,
    ends: bool = False,
) -> Schedule:
    """The K of the largest predicted throughput at each measured concurrency.

    Where nothing was predicted, the fastest measured. A K that lacks many visits which another has
    is not named.

    Args:
        totals: the throughputs of all groups.
        without: by visit, what the others alone say of them (`without_visits`).
        ends: whether the largest concurrency is the most that the servers decode side by side, so
            that nothing is known above it.
    """
    by_batch = grouped(totals, lambda row: row.concurrency)
    entries: list[ScheduleEntry] = []
    for at, (concurrency, every) in enumerate(sorted(by_batch.items())):
        rows = _eligible(every)
        best = max(rows, key=_ratio)
        ranked = sorted(rows, key=_ratio, reverse=True)
        ks = {row.k for row in rows}
        chosen_without = {
            visit: max(_eligible(of_batch), key=_ratio).k
            for visit, others in without.items()
            if (of_batch := [r for r in others if r.concurrency == concurrency and r.k in ks])
        }
        entries.append(
            ScheduleEntry(
                low=entries[-1].high + 1 if entries and entries[-1].high else 1,
                high=None if at + 1 == len(by_batch) and not ends else concurrency,
                concurrency=concurrency,
                k=best.k,
                tied=tuple(r.k for r in ranked if r is not best and not _leads(best, r)),
                measured_ratio=best.measured,
                loss=_loss(rows, chosen_without),
            )
        )
    return Schedule(temperature, tuple(entries))


def _eligible(rows: Sequence[Throughput]) -> list[Throughput]:
    """Plain decoding, and the K that enough visits timed."""
    enough = with_enough_visits({row.k: len(row.by_visit) for row in rows if row.k})
    return [row for row in rows if not row.k or row.k in enough]


def _loss(rows: Sequence[Throughput], chosen: Mapping[int, int]) -> float | None:
    """The loss of the chosen K against the fastest of all visits, in visits not chosen by.

    `chosen` is by visit the K that the others choose. None where fewer than two timed every K.
    """
    shared = [visit for visit in chosen if all(visit in row.by_visit for row in rows)]
    if len(shared) < 2:
        return None
    logs = {
        row.k: np.log([row.by_visit[v][1] / row.by_visit[v][0] for v in shared]) for row in rows
    }
    unseen = [logs[chosen[visit]][at] for at, visit in enumerate(shared)]
    return 1.0 - math.exp(np.mean(unseen) - max(np.mean(each) for each in logs.values()))


def _ratio(row: Throughput) -> float:
    return row.measured if row.predicted is None else row.predicted


def _leads(best: Throughput, other: Throughput) -> bool:
    """True where a lead is larger than the spread of visits between the two.

    One visit's spread, not the mean's: a server in use is one visit.
    """
    uncertain = spread(
        (seconds[0], best.by_visit[visit][0])
        for visit, seconds in other.by_visit.items()
        if visit in best.by_visit
    )
    lead = float(np.log(_ratio(best) / _ratio(other)))
    return lead > (LEAD if uncertain is None else uncertain)


# ---- rows of results.csv -------------------------------------------------------------------------


def _result_row(
    row: Throughput, loads: Mapping[LoadKey, ClosedLoad], engine: str, asked: int | None
) -> ResultRow:
    parts = [
        load
        for load in loads.values()
        if load.full
        and (load.key.concurrency, load.key.k) == (row.concurrency, row.k)
        and set_of(load.key.group) == row.group
    ]
    first = parts[0].timings[0]
    visits = [timing for part in parts for timing in part.timings]
    user_ms = np.concatenate([1e3 * np.array(v.user_s) / np.array(v.returned) for v in visits])
    rounds = [_rounds(part) for part in parts]
    lacking = few_visits(len(row.by_visit), asked)
    return ResultRow(
        model=first.model,
        draft=first.draft if row.k else None,
        prompt_set=row.group,
        temperature=first.temperature,
        k=row.k,
        source="measured",
        status="complete" if lacking is None else "partial",
        error=None if lacking is None else few_visits_error(lacking),
        prompts=len({text for part in parts for text in part.timings[0].texts}),
        new_tokens=round(sum(part.tokens for part in parts)),
        rounds=None if None in rounds else sum(each or 0.0 for each in rounds),
        ms_per_token=1e3 * row.concurrency * row.seconds[0] / row.tokens,
        ms_per_token_p50=float(np.percentile(user_ms, 50)),
        ms_per_token_p90=float(np.percentile(user_ms, 90)),
        tokens_per_second=row.tokens / row.seconds[0],
        speedup=row.measured,
        engine=engine,
        concurrency=row.concurrency,
    )


def _rounds(load: ClosedLoad) -> float | None:
    """The mean over visits; None of plain decoding, or where the server does not tell."""
    told = [each for timing in load.timings for each in timing.rounds if each is not None]
    known = load.key.k and len(told) == sum(len(timing.texts) for timing in load.timings)
    return sum(told) / len(load.timings) if known else None

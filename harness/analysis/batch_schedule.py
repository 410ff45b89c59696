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
load between two measured ones gets the K of the larger.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from harness.analysis.cells import few_visits, few_visits_error
from harness.analysis.replayed import as_served
from harness.analysis.settled_times import (
    Visit,
    paired_seconds,
    quantile,
    shared_visits,
    with_enough_visits,
)
from harness.engine_facts.spec import Counting
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
from harness.stats.jackknife import Array, Weights
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
    """The key of a closed loop: everything but the visit."""

    concurrency: int
    group: str
    k: int


@dataclass(frozen=True, eq=False)
class ClosedLoad:
    """A closed loop over its visits."""

    key: LoadKey
    # timings, visits: as stored, and their seconds per returned token
    timings: tuple[LoadTiming, ...]
    visits: tuple[Visit, ...]

    @property
    def tokens(self) -> float:
        """Returned tokens, the mean over the visits."""
        return float(np.mean([sum(timing.returned) for timing in self.timings]))


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
    """Rounds that replay expects of loads, by traces of what rounds emit; none if not known."""
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


def closed_loads(timings: Iterable[LoadTiming]) -> dict[LoadKey, ClosedLoad]:
    """The closed loops of one temperature over their visits; no K that shares none with plain."""
    closed = [
        (timing, Visit(timing.visit, place, timing.seconds / sum(timing.returned)))
        for place, timing in enumerate(timings)
        if timing.concurrency is not None
    ]
    stored = grouped(closed, lambda e: LoadKey(e[0].concurrency or 0, e[0].group, e[0].k))
    loads: dict[LoadKey, ClosedLoad] = {}
    for key, entries in sorted(stored.items()):
        plain = {visit.number for _, visit in stored.get(replace(key, k=0), ())}
        if not plain or not plain.isdisjoint(visit.number for _, visit in entries):
            # Requests for a part of their budgets first
            made = sorted(entries, key=lambda entry: sum(entry[0].budgets))
            loads[key] = ClosedLoad(key, tuple(t for t, _ in made), tuple(v for _, v in made))
    return loads


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
    """Everything that loads say; `traces` are plain decoding's, `asked` the visits asked for."""
    cells, varying = list[LoadCell](), list[LoadCell]()
    schedules, rows = list[Schedule](), list[ResultRow]()
    full = full_loads(timings)
    for temperature, changing in dict.fromkeys((t.temperature, t.varying) for t in full):
        # A server whose K changes is held against plain decoding under the same loads
        at = where(full, temperature=temperature)
        made = [t for t in at if t.varying == changing or not (t.k or t.varying)]
        # Nothing is predicted of it: replay is of one K
        texts = [] if changing else where(traces, temperature=temperature)
        loads = closed_loads(made)
        compared = throughputs(loads, replayed_loads(texts, rule, counting))
        of_loads = load_cells(made, compared, asked, weights)
        if changing:
            varying += [replace(cell, varying=changing) for cell in of_loads if cell.k]
            continue
        cells += of_loads
        totals = over_groups(compared, weights=weights)
        waiting = {cell.concurrency for cell in cells if cell.slots is not None}
        side_by_side = [row for row in totals if row.concurrency not in waiting]
        if side_by_side:
            largest_waits = max(row.concurrency for row in totals) in waiting
            schedules.append(schedule(temperature, side_by_side, ends=largest_waits))
        for row in over_groups(compared, set_of):  # the halves of a set together
            if row.concurrency > 1:  # the requests that were sent one at a time have that row
                rows.append(_result_row(row, loads, engine, asked))
    return LoadResults(tuple(cells), tuple(schedules), tuple(rows), tuple(varying))


def disturbed(timings: Sequence[LoadTiming], clock: ServerClock) -> float | None:
    """Mean processors that others used, where too many to compare loads; not by processor time."""
    known = [(each.others, each.seconds) for each in timings if each.others is not None]
    if not known or clock == "cpu":
        return None
    others, seconds = zip(*known, strict=True)
    mean = float(np.average(others, weights=seconds))
    return mean if mean > MOST_OTHERS else None


@dataclass(frozen=True, eq=False)
class Throughput:
    """One K in closed loops of a group, or all; two seconds: its load's, the plain server's."""

    concurrency: int
    group: str
    k: int
    tokens: float  # that the plain server returned
    seconds: Array  # measured
    predicted_s: Array | None  # at the rounds that replay expects of the texts; None if not known
    by_visit: Mapping[int, Array]  # measured in each visit that timed both

    @property
    def tokens_per_second(self) -> float:
        return float(self.tokens / self.seconds[0])

    @property
    def measured(self) -> float:
        """Throughput / plain decoding's."""
        return float(self.seconds[1] / self.seconds[0])

    @property
    def predicted(self) -> float | None:
        """`measured`, at the expected rounds."""
        seconds = self.predicted_s
        return None if seconds is None else float(seconds[1] / seconds[0])


def throughputs(
    loads: Mapping[LoadKey, ClosedLoad], rounds_of: RoundsOf = lambda _: None
) -> list[Throughput]:
    """Every group's closed loops, plain ones among them, against plain ones."""
    rows: list[Throughput] = []
    for key, load in loads.items():
        plain = loads.get(replace(key, k=0))
        if plain is None:
            continue
        both, tokens = (load, plain), plain.tokens
        measured = [paired_seconds(each.visits, plain.visits, SETTLE) for each in both]
        expected = [_expected_token_s(each, plain, rounds_of) for each in both]
        by_visit = {
            visit.number: tokens * np.array([visit.seconds, other.seconds])
            for visit, other in shared_visits(load.visits, plain.visits)
        }
        seconds = tokens * np.array(measured, dtype=np.float64)
        predicted_s = None if None in expected else tokens * np.array(expected, dtype=np.float64)
        rows.append(
            Throughput(key.concurrency, key.group, key.k, tokens, seconds, predicted_s, by_visit)
        )
    return rows


def _expected_token_s(load: ClosedLoad, plain: ClosedLoad, rounds_of: RoundsOf) -> float | None:
    """R(K, B) / B by the plain server's expected rounds per token; None where not all is scored."""
    rounds = [each for timing in load.timings if (each := rounds_of(timing)) is not None]
    if len(rounds) < len(load.timings):
        return None
    round_s = paired_seconds(_per_round(load, rounds_of), _per_round(plain, rounds_of), SETTLE)
    share = sum(each.expected for each in rounds) / sum(each.tokens for each in rounds)
    return None if round_s is None else round_s * share


def _per_round(load: ClosedLoad, rounds_of: RoundsOf) -> list[Visit]:
    """The visits whose rounds are known, with R(K, B) / B in place of seconds per token."""
    return [
        visit._replace(seconds=timing.seconds / rounds.taken)
        for timing, visit in zip(load.timings, load.visits, strict=True)
        if (rounds := rounds_of(timing)) is not None
    ]


def over_groups(
    rows: Sequence[Throughput],
    name: Callable[[str], str] = lambda _: "all",
    weights: Weights = None,
) -> list[Throughput]:
    """Groups of one name added up, sets by `weights` of the tokens, else as they were sent."""
    total: list[Throughput] = []
    cells = grouped(rows, lambda row: (row.concurrency, name(row.group), row.k))
    for cell, sent in sorted(cells.items()):
        factors = _factors(sent, weights)
        parts = [part for part, factor in zip(sent, factors, strict=True) if factor > 0.0]
        factors = factors[factors > 0.0]
        predicted = [part.predicted_s for part in parts if part.predicted_s is not None]
        visits = set.intersection(*(set(part.by_visit) for part in parts))
        total.append(
            Throughput(
                *cell,
                tokens=float(factors @ [part.tokens for part in parts]),
                seconds=_added(factors, [part.seconds for part in parts]),
                predicted_s=_added(factors, predicted) if len(predicted) == len(parts) else None,
                by_visit={
                    visit: _added(factors, [part.by_visit[visit] for part in parts])
                    for visit in sorted(visits)
                },
            )
        )
    return total


def _factors(parts: Sequence[Throughput], weights: Weights) -> Array:
    """The weight of each group, as if prompt sets had been sent by their weights."""
    sets = grouped(parts, lambda part: set_of(part.group))
    tokens = {name: sum(part.tokens for part in of_set) for name, of_set in sets.items()}
    names = [set_of(part.group) for part in parts]
    factors = np.array([(weights or {}).get(name, 0.0) / tokens[name] for name in names])
    return factors if factors.any() else np.ones(len(parts))


def _added(factors: Array, seconds: Sequence[Array]) -> Array:
    return (factors[:, None] * np.array(seconds)).sum(axis=0)


def spread(pairs: Iterable[Sequence[float] | Array]) -> float | None:
    """Relative standard deviation of ratios; None of fewer than two."""
    logs = [np.log(one / other) for one, other in pairs]
    return float(np.std(logs, ddof=1)) if len(logs) > 1 else None


def load_cells(
    timings: Sequence[LoadTiming],
    compared: Sequence[Throughput],
    asked: int | None = None,
    weights: Weights = None,
) -> list[LoadCell]:
    """Cells of the full loads at one temperature; `asked` are the visits of the run, if known."""
    totals = {(row.concurrency, row.k): row for row in over_groups(compared, weights=weights)}
    # A ratio to plain decoding is of neither where either server lets requests wait
    slots = {
        concurrency: min(each.slots for each in made if each.slots is not None)
        for concurrency, made in grouped(timings, lambda t: t.concurrency).items()
        if concurrency and any(0 < (each.slots or 0) < concurrency for each in made)
    }
    cells: list[LoadCell] = []
    for made in by_load(timings):
        first, at = made[0], (made[0].concurrency or 0, made[0].k)
        tokens = sum(sum(each.returned) for each in made)
        cell = LoadCell(
            temperature=first.temperature,
            k=first.k,
            concurrency=first.concurrency,
            rate=first.rate,
            tokens_per_second=tokens / sum(each.seconds for each in made),
            slots=slots.get(at[0]),
        )
        total = totals.get(at)
        if total is not None:
            cell = replace(
                cell,
                tokens_per_second=total.tokens_per_second,
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

    every = list(timings)
    groups = grouped(every, requests)
    most = {name: max(sum(each.budgets) for each in made) for name, made in groups.items()}
    return [each for each in every if sum(each.budgets) == most[requests(each)]]


def schedule(temperature: float, totals: Sequence[Throughput], *, ends: bool = False) -> Schedule:
    """The K of the largest predicted, else measured, throughput at each measured concurrency.

    A K that lacks many visits which another has is not named. `totals` are of all groups; with
    `ends` servers decode no more side by side, so that nothing is known above.
    """
    by_batch = sorted(grouped(totals, lambda row: row.concurrency).items())
    entries: list[ScheduleEntry] = []
    for concurrency, rows in by_batch:
        enough = with_enough_visits({row.k: len(row.by_visit) for row in rows if row.k})
        named = [row for row in rows if not row.k or row.k in enough]
        best, *others = sorted(named, key=_ratio, reverse=True)
        last = concurrency == by_batch[-1][0]
        entries.append(
            ScheduleEntry(
                low=entries[-1].concurrency + 1 if entries else 1,
                high=None if last and not ends else concurrency,
                concurrency=concurrency,
                k=best.k,
                tied=tuple(row.k for row in others if not _leads(best, row)),
                measured_ratio=best.measured,
            )
        )
    return Schedule(temperature, tuple(entries))


def _ratio(row: Throughput) -> float:
    return row.measured if row.predicted is None else row.predicted


def _leads(best: Throughput, other: Throughput) -> bool:
    """True where a lead exceeds the spread of one visit: a server in use is one visit."""
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
        if (load.key.concurrency, load.key.k) == (row.concurrency, row.k)
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
        ms_per_token=1e3 * row.concurrency / row.tokens_per_second,
        ms_per_token_p50=float(np.percentile(user_ms, 50)),
        ms_per_token_p90=float(np.percentile(user_ms, 90)),
        tokens_per_second=row.tokens_per_second,
        speedup=row.measured,
        engine=engine,
        concurrency=row.concurrency,
    )


def _rounds(load: ClosedLoad) -> float | None:
    """The mean over visits; None of plain decoding, or where the server does not tell."""
    told = [each for timing in load.timings for each in timing.rounds if each is not None]
    known = load.key.k and len(told) == sum(len(timing.texts) for timing in load.timings)
    return sum(told) / len(load.timings) if known else None

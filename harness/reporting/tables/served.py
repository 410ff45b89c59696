"""A server that was measured: cells with their predictions, the gate, costs, load."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

from harness import formatting as fmt
from harness.records import where
from harness.reporting import grid
from harness.reporting.tables.specification import Column, Table, table
from harness.serving.engines import spec_of
from harness.summary import (
    LoadCell,
    Percentiles,
    ScheduleEntry,
    ServedCell,
    ServedGate,
    ServedSummary,
    Summary,
    UserLatency,
)

VISITS: Column[ServedCell | LoadCell | UserLatency] = Column(  # of those that lack some
    "visits", lambda row: row.visits and f"{row.visits.timed} of {row.visits.asked}"
)
Percentile = Literal["p50", "p95", "p99"]
LOSSLESS = {True: "yes", False: "NO", None: None}
GATES: tuple[Column[ServedGate], ...] = (
    Column("temperature", lambda gate: gate.temperature, fmt.temperature, key=True),
    Column("K", lambda gate: gate.k, fmt.count, key=True),
    Column("lossless", lambda gate: LOSSLESS[gate.lossless]),
    Column("texts", lambda gate: gate.texts, fmt.count),
    Column("equal\ntexts", lambda gate: gate.equal_texts, fmt.count),
    Column("ties", lambda gate: gate.tied_texts or None, fmt.count),
    Column("real\ndifferences", lambda gate: gate.differing_texts or None, fmt.count),
    Column("equal\nrounds", lambda gate: gate.equal_rounds, fmt.count),
    Column("z of\nrounds", lambda gate: gate.rounds_z, fmt.deviations),
    Column("z of\ntexts", lambda gate: gate.text_z, fmt.deviations),
    Column("z against\nplain", lambda gate: gate.plain_z, fmt.deviations),
)
USERS_TOKEN = "ms/token\nof a user"
LOADS: tuple[Column[LoadCell], ...] = (
    Column("temperature", lambda cell: cell.temperature, fmt.temperature, key=True),
    Column("concur-\nrency", lambda cell: cell.concurrency, fmt.count, key=True),
    Column("requests\nper second", lambda cell: cell.rate, fmt.rate, key=True),
    Column("K", lambda cell: cell.k, fmt.count, key=True),
    Column("tok/s", lambda cell: cell.tokens_per_second, fmt.rate),
    Column(USERS_TOKEN, lambda cell: cell.ms_per_token, fmt.milliseconds),
    Column("throughput\nratio", lambda cell: cell.throughput_ratio, fmt.speedup),
    Column("spread", lambda cell: cell.spread, fmt.percent),
    Column("slots", lambda cell: cell.slots, fmt.count),
    VISITS,
)


PERCENTILES: tuple[Percentile, ...] = ("p50", "p95", "p99")


class Quantity(NamedTuple):
    """What a user waits for, as its columns are called, and where its percentiles are."""

    title: str
    of: Callable[[UserLatency], Percentiles | None]
    definition: str
    brief: tuple[Percentile, ...]  # those that fit a terminal

    def percentile(self, row: UserLatency, name: Percentile) -> float | None:
        """Of a row, in seconds; None where it is not known."""
        return getattr(self.of(row), name, None)


QUANTITIES = (
    Quantity("TTFT", lambda row: row.first_token, "time to first token", PERCENTILES[:2]),
    Quantity("TPOT", lambda row: row.per_token, "time per output token", PERCENTILES[:2]),
    Quantity("request", lambda row: row.request, "request latency", PERCENTILES),
)


def _percentile(quantity: Quantity, name: Percentile) -> Column[UserLatency]:

    title, term = f"{quantity.title}\n{name}", quantity.definition
    return Column(title, lambda row: quantity.percentile(row, name), fmt.seconds, definition=term)


def _side_by_side(row: UserLatency) -> int | None:
    """Of a load; requests are sent one by one otherwise, but for records of elsewhere."""
    return row.concurrency if row.load or row.concurrency != 1 else None


REQUESTS: tuple[Column[UserLatency], ...] = (
    Column("concur-\nrency", _side_by_side, fmt.count, key=True),
    Column("requests\nper second", lambda row: row.rate, fmt.rate, key=True),
    Column("K", lambda row: row.k, fmt.count, key=True),
    Column("requests", lambda row: row.requests, fmt.count),
)
LATENCIES: tuple[Column[UserLatency], ...] = (
    Column("T", lambda row: row.temperature, fmt.temperature, key=True),
    *REQUESTS,
    *(_percentile(quantity, name) for quantity in QUANTITIES for name in PERCENTILES[:2]),
    Column("within\ngoals", lambda row: row.within_goals, fmt.percent, definition="within goals"),
    Column("queue", lambda row: "grows" if row.queue_grows else None, definition="queue grows"),
    VISITS,
)
# Those that fit a terminal
BRIEF_LATENCIES: tuple[Column[UserLatency], ...] = (
    *REQUESTS,
    *(_percentile(quantity, name) for quantity in QUANTITIES for name in quantity.brief),
    Column("within\ngoals", lambda row: row.within_goals, fmt.percent, definition="within goals"),
    VISITS,
)


class Varied(NamedTuple):
    """A server whose K changed under one load, and the fastest of those with one K there."""

    cell: LoadCell
    fixed: LoadCell | None

    @property
    def rate(self) -> float | None:
        """Of requests that arrive at random."""
        return self.cell.rate

    @property
    def decided(self) -> str:
        """What its K follows."""
        return {"schedule": "schedule", "adaptive": "the engine"}.get(self.cell.varying, "")


Loaded = TypeVar("Loaded", LoadCell, Varied)


def _varied(served: ServedSummary) -> list[Varied]:
    rows: list[Varied] = []
    for cell in served.varying:
        load = {"temperature": cell.temperature, "concurrency": cell.concurrency, "rate": cell.rate}
        known = [each for each in where(served.load, **load) if each.throughput_ratio is not None]
        fixed = max(known, key=lambda each: (each.throughput_ratio or 0.0, each.k), default=None)
        rows.append(Varied(cell, fixed))
    return rows


VARIED: tuple[Column[Varied], ...] = (
    Column("temperature", lambda row: row.cell.temperature, fmt.temperature, key=True),
    Column("concur-\nrency", lambda row: row.cell.concurrency, fmt.count, key=True),
    Column("requests\nper second", lambda row: row.rate, fmt.rate, key=True),
    Column("K by", lambda row: row.decided, key=True),
    Column("tok/s", lambda row: row.cell.tokens_per_second, fmt.rate),
    Column(USERS_TOKEN, lambda row: row.cell.ms_per_token, fmt.milliseconds),
    Column("throughput\nratio", lambda row: row.cell.throughput_ratio, fmt.speedup),
    Column("fastest\none K", lambda row: row.fixed and row.fixed.k, fmt.count),
    Column("its\nratio", lambda row: row.fixed and row.fixed.throughput_ratio, fmt.speedup),
    Column("tokens/round\nmeasured", lambda row: row.cell.tokens_per_round, fmt.decimal),
    Column("spread", lambda row: row.cell.spread, fmt.percent),
    Column("visits", lambda row: VISITS.value(row.cell)),
)


class Scheduled(NamedTuple):
    """One load of a schedule, its temperature, and the throughput ratios measured there by K."""

    temperature: float
    entry: ScheduleEntry
    measured: Mapping[int, float | None]

    @property
    def requests(self) -> str:
        """How many side by side, as "2-4"."""
        low, high = self.entry.low, self.entry.high
        return f"{low} and more" if high is None else f"{low}" if low == high else f"{low}-{high}"

    @property
    def tied(self) -> str | None:
        """The other K that may be as fast, with what was measured of them."""
        return fmt.with_ratios(self.entry.tied, self.measured) or None


SCHEDULE: tuple[Column[Scheduled], ...] = (
    Column("temperature", lambda row: row.temperature, fmt.temperature, key=True),
    Column("requests\nside by side", lambda row: row.requests, key=True),
    Column("K", lambda row: row.entry.k, fmt.count),
    Column("tie with", lambda row: row.tied),
    Column("throughput\nratio", lambda row: row.entry.measured_ratio, fmt.speedup),
    Column("lost to\nthe fastest", lambda row: row.entry.loss, fmt.percent),
)


WAITS = "What a user waits for"
GATE_NOTE = (
    "At temperature 0 texts must be plain decoding's. z of texts: their log-probability under the"
    " target less its expectation, in standard deviations (of K=0 beyond 4: other weights); z"
    " against plain: from plain decoding's texts (beyond 4: not lossless). Rounds test the"
    " draft and its rule."
)
LATENCY_NOTE = (
    "TTFT: until the first token. TPOT: for each token after it. request: until the whole answer."
    " p95 needs 20 requests."
)
LATENCY_CLOCKS = {
    "client": "By the client's clock; TPOT by the server's own, where it tells.",
    "engine": "By the speedups' clock: this run did not store what the client saw.",
}
LOAD_NOTE = (
    "throughput ratio: tokens per second of whole requests, prefills included, / plain decoding's"
    " under the same load. spread: over visits, one standard deviation."
)
LOAD_CLOCK = "All times are the client's."
SCHEDULE_NOTE = (
    "K: by tokens per round of replay / R(K, B), what an iteration took under that load. tie with:"
    " within the spread of visits. lost to the fastest: throughput that a visit loses with the K"
    " that all other visits choose."
)
VARIED_NOTE = (
    "Servers whose K changes while they serve, measured under load next to plain decoding; nothing"
    " is predicted of them, since replay is of one K. fastest one K: of the servers with one K, by"
    " the measured ratio; 0 is plain decoding."
)


def schedule_table(summary: Summary) -> Table:
    """K by load, and the ratio that was measured there."""
    served = summary.served
    rows = [
        Scheduled(each.temperature, entry, served.ratios(each.temperature, entry.concurrency))
        for each in (served.schedules if served else ())
        for entry in each.entries
    ]
    return table(f"K by load{_on(served)}", SCHEDULE, rows, notes=(SCHEDULE_NOTE,))


def waits_table(summary: Summary) -> Table:
    """What users wait for: under load where loads were timed, else one request at a time."""
    served = summary.served
    rows = served.latencies if served else ()
    loaded = where(rows, load=True)
    under = " under load" if loaded else ""
    notes = (LATENCY_NOTE, *dict.fromkeys(LATENCY_CLOCKS[row.clock] for row in rows))
    title = f"{WAITS}{_on(served)}{under}{grid.waited_by(served) if served else ''}"
    return table(title, LATENCIES, loaded or rows, notes=notes)


def brief_waits_table(summary: Summary) -> Table:
    """Of the headline's temperature: plain decoding, and the K of the answer."""
    served, shown = summary.served, grid.marked(summary)
    if served is None or shown is None:
        return table("", BRIEF_LATENCIES, ())
    at = where(served.latencies, load=False, temperature=shown.answer.temperature)
    rows = [row for row in at if row.k in (0, shown.answer.named[1])]
    temperature = f" at temperature {fmt.temperature(shown.answer.temperature)}"
    return table(f"{WAITS}{temperature}{grid.waited_by(served)}", BRIEF_LATENCIES, rows)


def gates_table(summary: Summary) -> Table:
    """Is the server lossless, by temperature and K."""
    gates = summary.served.gates if summary.served else ()
    return table("Is the server lossless?", GATES, gates, notes=(GATE_NOTE,))


def load_tables(summary: Summary) -> list[Table]:
    """Loads by K, and those of servers whose K changes; none of other runs."""
    served = summary.served
    if served is None:
        return []
    name = spec_of(served.engine).title
    lines = (f"Started with: {each.line}" for each in served.varying_commands.values())
    varied_notes = (VARIED_NOTE, *lines)
    return [
        *_loads(f"{name} under load", LOADS, served.load, served, (LOAD_NOTE,)),
        *_loads(f"{name} whose K changes", VARIED, _varied(served), served, varied_notes),
    ]


def _on(served: ServedSummary | None) -> str:
    return f" on {spec_of(served.engine).title}" if served else ""


def _loads(
    title: str,
    columns: Sequence[Column[Loaded]],
    rows: Sequence[Loaded],
    served: ServedSummary,
    notes: Sequence[str],
) -> list[Table]:
    """Loads, in a table for each clock.

    By processor time nothing is told of a user, nor of requests that arrive at random.
    """
    if served.clock != "cpu":
        return [table(title, columns, rows, notes=(*notes, LOAD_CLOCK))]
    closed = [row for row in rows if row.rate is None]
    arriving = [row for row in rows if row.rate is not None]
    of_server = [column for column in columns if column.title != USERS_TOKEN]
    return [
        table(f"{title}{grid.timed_by(served)}", of_server, closed, notes=notes),
        table(
            f"{title}, requests at random{grid.waited_by(served)}", columns, arriving, notes=notes
        ),
    ]

"""Tables of a measured server: losslessness, loads, latencies, and K by load."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from harness import formatting as fmt
from harness.engine_facts.engines import spec_of
from harness.records import where
from harness.reporting.tables.specification import Column, Table, table
from harness.summary import (
    LoadCell,
    Percentiles,
    ScheduleEntry,
    ServedGate,
    ServedSummary,
    Summary,
    UserLatency,
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


class Quantity(NamedTuple):
    """A latency that users see: the title of its columns, and its percentiles."""

    title: str
    of: Callable[[UserLatency], Percentiles | None]
    definition: str

    def percentile(self, row: UserLatency, name: Percentile) -> float | None:
        """The percentile of a row in seconds; None where it is not known."""
        return getattr(self.of(row), name, None)


QUANTITIES = (
    Quantity("TTFT", lambda row: row.first_token, "time to first token"),
    Quantity("TPOT", lambda row: row.per_token, "time per output token"),
    Quantity("request", lambda row: row.request, "request latency"),
)


class Loaded(NamedTuple):
    """One K under a load, or at one request at a time: its throughput and its latencies."""

    cell: LoadCell | None  # None at one request at a time
    waits: UserLatency | None  # None of a server whose K changes

    @property
    def of(self) -> LoadCell | UserLatency:
        """The record that has the temperature, the load and the K."""
        known = self.cell or self.waits
        assert known is not None
        return known

    @property
    def concurrency(self) -> int | None:
        """Requests side by side; None where requests were sent one by one, or at a rate."""
        alone = self.cell is None and self.of.concurrency == 1
        return None if alone else self.of.concurrency


# What changes the K of a server, up to the one that is shown
CHANGED_BY = {"schedule": "schedule", "adaptive": "the engine"}


def _visits(cell: LoadCell | None) -> str | None:
    """The visits of a load as "2 of 3"; None where none is lacking."""
    visits = cell and cell.visits
    return visits and f"{visits.timed} of {visits.asked}"


def _percentile(quantity: Quantity, name: Percentile) -> Column[Loaded]:
    return Column(
        f"{quantity.title}\n{name}",
        lambda row: row.waits and quantity.percentile(row.waits, name),
        fmt.seconds,
        definition=quantity.definition,
    )


LOADS: tuple[Column[Loaded], ...] = (
    Column("T", lambda row: row.of.temperature, fmt.temperature, key=True),
    Column("concur-\nrency", lambda row: row.concurrency, fmt.count, key=True),
    Column("requests\nper second", lambda row: row.of.rate, fmt.rate, key=True),
    Column("K", lambda row: row.of.k, fmt.count, key=True),
    Column("K by", lambda row: row.cell and CHANGED_BY.get(row.cell.varying), key=True),
    Column("tok/s", lambda row: row.cell and row.cell.tokens_per_second, fmt.rate),
    Column("throughput\nratio", lambda row: row.cell and row.cell.throughput_ratio, fmt.speedup),
    Column("spread", lambda row: row.cell and row.cell.spread, fmt.percent),
    Column("requests", lambda row: row.waits and row.waits.requests, fmt.count),
    *(_percentile(quantity, name) for quantity in QUANTITIES for name in ("p50", "p95")),
    Column(
        "queue",
        lambda row: "grows" if row.waits and row.waits.queue_grows else None,
        definition="queue grows",
    ),
    Column("slots", lambda row: row.cell and row.cell.slots, fmt.count),
    Column("visits", lambda row: _visits(row.cell)),
)


class Scheduled(NamedTuple):
    """One load of a schedule, its temperature, and the measured throughput ratios by K."""

    temperature: float
    entry: ScheduleEntry
    measured: Mapping[int, float | None]

    @property
    def requests(self) -> str:
        """The requests side by side, as "2-4"."""
        low, high = self.entry.low, self.entry.high
        return f"{low} and more" if high is None else f"{low}" if low == high else f"{low}-{high}"

    @property
    def tied(self) -> str | None:
        return fmt.with_ratios(self.entry.tied, self.measured) or None


SCHEDULE: tuple[Column[Scheduled], ...] = (
    Column("temperature", lambda row: row.temperature, fmt.temperature, key=True),
    Column("requests\nside by side", lambda row: row.requests, key=True),
    Column("K", lambda row: row.entry.k, fmt.count),
    Column("tie with", lambda row: row.tied),
    Column("throughput\nratio", lambda row: row.entry.measured_ratio, fmt.speedup),
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
    "client": "Waits are by the client's clock; TPOT by the server's own, where it tells.",
    "engine": "Waits are by the speedups' clock: this run did not store what the client saw.",
}
LOAD_NOTE = (
    "throughput ratio: tokens per second of whole requests, prefills included, / plain decoding's"
    " under the same load. spread: over visits, one standard deviation."
)
CPU_NOTE = "tok/s and ratios are by processor time, at a rate of requests by the clock."
SCHEDULE_NOTE = (
    "K: by tokens per round of replay / R(K, B), what an iteration took under that load. tie with:"
    " within the spread of visits."
)
VARIED_NOTE = "K by: of a server whose K changes while it serves; K is then its largest."


def schedule_table(summary: Summary) -> Table:
    served = summary.served
    if served is None:
        return table("K by load", SCHEDULE, ())
    rows = [
        Scheduled(each.temperature, entry, served.ratios(each.temperature, entry.concurrency))
        for each in served.schedules
        for entry in each.entries
    ]
    return table(f"K by load{_on_engine(served)}", SCHEDULE, rows, notes=(SCHEDULE_NOTE,))


def waits_table(summary: Summary) -> Table:
    """The latencies at one request at a time, where no loads were timed."""
    served = summary.served
    rows = served.latencies if served and not served.load else ()
    return table(f"{WAITS}{_on_engine(served)}", LOADS, _alone(rows), notes=_latency_notes(rows))


def _alone(rows: Sequence[UserLatency]) -> list[Loaded]:
    return [Loaded(None, row) for row in where(rows, load=False)]


def _latency_notes(rows: Sequence[UserLatency]) -> list[str]:
    return [LATENCY_NOTE, *dict.fromkeys(LATENCY_CLOCKS[row.clock] for row in rows)]


def gates_table(summary: Summary) -> Table:
    gates = summary.served.gates if summary.served else ()
    return table("Is the server lossless?", GATES, gates, notes=(GATE_NOTE,))


def load_table(summary: Summary) -> Table:
    """Throughput and latencies by load and K, of servers whose K changes, too."""
    served = summary.served
    if served is None:
        return table("Under load", LOADS, ())
    name, waits = spec_of(served.engine).title, where(served.latencies, load=True)
    by_load = {(row.temperature, row.concurrency, row.rate, row.k): row for row in waits}
    rows = [
        *(
            Loaded(cell, by_load.get((cell.temperature, cell.concurrency, cell.rate, cell.k)))
            for cell in served.load
        ),
        *(Loaded(cell, None) for cell in served.varying),
    ]
    notes = (
        LOAD_NOTE,
        CPU_NOTE if served.clock == "cpu" else "",
        *(_latency_notes(waits) if waits else ()),
        VARIED_NOTE if served.varying else "",
        *(f"Started with: {each.line}" for each in served.varying_commands.values()),
    )
    return table(f"{name} under load", LOADS, rows, notes=notes)


def _on_engine(served: ServedSummary | None) -> str:
    return f" on {spec_of(served.engine).title}" if served else ""

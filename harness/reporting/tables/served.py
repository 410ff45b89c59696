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
    ServedCosts,
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
CELLS: tuple[Column[ServedCell], ...] = (
    Column("prompt set", lambda cell: cell.prompt_set, key=True),
    Column("temperature", lambda cell: cell.temperature, fmt.temperature, key=True),
    Column("K", lambda cell: cell.k, fmt.count, key=True),
    Column("measured\nspeedup", lambda cell: cell.speedup, fmt.speedup),
    Column("predicted\nspeedup", lambda cell: cell.predicted, fmt.speedup),
    Column("prediction\nerror", lambda cell: cell.error, fmt.signed_percent),
    Column("predicted by\nthe harness's loop", lambda cell: cell.own_predicted, fmt.speedup),
    Column("its\nerror", lambda cell: cell.own_error, fmt.signed_percent),
    Column("tokens/round\nmeasured", lambda cell: cell.tokens_per_round, fmt.decimal),
    Column("tokens/round\nreplayed", lambda cell: cell.replayed_tokens_per_round, fmt.decimal),
    VISITS,
)
# Those that fit a terminal
BRIEF_CELLS = tuple(c for c in CELLS if not c.title.startswith(("its", "tokens/round")))
GATES: tuple[Column[ServedGate], ...] = (
    Column("temperature", lambda gate: gate.temperature, fmt.temperature, key=True),
    Column("K", lambda gate: gate.k, fmt.count, key=True),
    Column("lossless", lambda gate: LOSSLESS[gate.lossless]),
    Column("texts", lambda gate: gate.texts, fmt.count),
    Column("equal\ntexts", lambda gate: gate.equal_texts, fmt.count),
    Column("ties", lambda gate: gate.tied_texts or None, fmt.count),
    Column("real\ndifferences", lambda gate: gate.differing_texts or None, fmt.count),
    Column("equal\nrounds", lambda gate: gate.equal_rounds, fmt.count),
    Column("equal\ndrafted", lambda gate: gate.equal_drafted, fmt.count),
    Column("rounds", lambda gate: gate.rounds, fmt.count),
    Column("rounds\nreplayed", lambda gate: gate.expected_rounds, fmt.count),
    Column("z of\nrounds", lambda gate: gate.rounds_z, fmt.deviations),
    Column("nats per\ntoken", lambda gate: gate.nats_per_token, fmt.decimal),
    Column("nats\nexpected", lambda gate: gate.expected_nats_per_token, fmt.decimal),
    Column("z of\ntexts", lambda gate: gate.text_z, fmt.deviations),
    Column("z against\nplain", lambda gate: gate.plain_z, fmt.deviations),
)
COSTS: tuple[Column[ServedCosts], ...] = (
    Column("temperature", lambda costs: costs.temperature, fmt.temperature, key=True),
    Column("plain token\nms", lambda costs: costs.plain_s, fmt.in_ms),
    Column("plain start\nms", lambda costs: costs.plain_start_s, fmt.in_ms),
    Column("its\nerror ms", lambda costs: costs.plain_start_error_s, fmt.in_ms, definition="start"),
    Column("start\nms", lambda costs: costs.start_s, fmt.in_ms),
    Column("error of\nstart ms", lambda costs: costs.start_error_s, fmt.in_ms, definition="start"),
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
    Column("predicted\nratio", lambda cell: cell.predicted_ratio, fmt.speedup),
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
    *(_percentile(quantity, name) for quantity in QUANTITIES for name in PERCENTILES),
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
    Column("predicted\nratio", lambda row: row.entry.predicted_ratio, fmt.speedup),
    Column("throughput\nratio", lambda row: row.entry.measured_ratio, fmt.speedup),
    Column("lost to\nthe fastest", lambda row: row.entry.loss, fmt.percent),
)


WAITS = "What a user waits for"
CELL_NOTE = (
    "Predicted: tokens per round by replay of the plain server's texts, and what a request's start"
    " and its rounds take on this server, {source}. None uses the requests of its own cell."
)
SOURCES = {
    "synthetic": (
        "from the requests of the other prompt sets and from servers that reject every draft"
    ),
    "other_sets": "from the requests of the other prompt sets",
}
SAMPLES_NOTE = (
    "tokens/round replayed: of plain decoding's texts; measured: of the texts of that K, which are"
    ' other samples above temperature 0. "Is the server lossless?" compares each text with its own'
    " replay."
)
OWN_NOTE = (
    "predicted by the harness's loop: with the round times of that loop on this device in place of"
    " the server's."
)
GATE_NOTES = (
    "At temperature 0 texts must be plain decoding's. Above it, z of texts: log-probability of the"
    " texts under the target less its expectation, in standard deviations; of K=0 beyond 4 the"
    " plain server has other weights. z against plain: from plain decoding's texts; beyond 4 that K"
    " is not lossless. Rounds test the draft and its rule, not the texts; they have a z where a"
    " draft is sampled.",
)
COST_NOTE = (
    "start: what a request costs besides its prefill and its rounds, fitted over all requests;"
    " error: its standard error over prompts. Starts within two of these do not differ. What a"
    " round costs is R(K), in the table of rounds."
)
CLOCKS = {
    "engine": "Times are by the server's own clock.",
    "cpu": (
        "Times are processor seconds of the server's process: steadier than a clock on a shared"
        " machine, and not what a user waits for."
    ),
}
LATENCY_NOTE = (
    "TTFT: until the first token. TPOT: for each token after it, over the request. request: until"
    " the whole answer. A request is one prompt in one visit; p95 needs 20 of them, p99 100."
)
LATENCY_CLOCKS = {
    "client": "All are by the client's clock, whatever clock the run's speedups are by; TPOT by the"
    " server's own clock, where it tells.",
    "engine": "All are by the speedups' clock: this run did not store what the client saw.",
}
LOAD_NOTE = (
    "throughput ratio: tokens per second of whole requests, prefills included, / plain decoding's"
    " under the same load. predicted ratio: the same at the rounds that replay expects. spread: of"
    " the throughput ratio over visits, one standard deviation. Requests that arrive at a rate find"
    " an empty server at first; at a rate beyond the tok/s of requests side by side they wait ever"
    " longer."
)
LOAD_CLOCK = "All times are the client's."
SCHEDULE_NOTE = (
    "K: that of the largest predicted ratio, tokens per round by replay / R(K, B) over plain"
    " decoding's, with R(K, B) what an iteration took under that load. tie with: K whose distance"
    " is within the spread of visits, so that another run may rank them otherwise. A load between"
    " two measured ones gets the K of the larger. lost to the fastest: with K chosen by all other"
    " visits, the share of throughput that a visit loses to the K that is fastest over all visits."
)
VARIED_NOTE = (
    "Servers whose K changes while they serve, measured under load next to plain decoding; nothing"
    " is predicted of them, since replay is of one K. fastest one K: of the servers with one K, by"
    " the measured ratio; 0 is plain decoding."
)


def brief_tables(summary: Summary) -> list[Table]:
    """Of the tables, in the columns that fit a terminal: K by load, latencies, cells."""
    served, shown = summary.served, grid.marked(summary)
    if served is None:
        return []
    cells, by_load, *_ = served_tables(summary)
    waits = () if shown is None else grid.latencies(served, shown.row.answer)
    at = f" at temperature {fmt.temperature(waits[0].temperature)}" if waits else ""
    title = f"{WAITS}{at}{grid.waited_by(served)}"
    return [
        *([by_load] if served.schedules else []),
        table(title, BRIEF_LATENCIES, waits),
        table(cells.title, BRIEF_CELLS, served.cells),
    ]


def served_tables(summary: Summary) -> list[Table]:
    """Everything on the server, most important first; none of other runs."""
    served = summary.served
    if served is None:
        return []
    name = spec_of(served.engine).title
    source = next((SOURCES[costs.source] for costs in served.costs), "")
    predicted = any(cell.predicted is not None for cell in served.cells)

    notes = (
        CELL_NOTE.format(source=source) if predicted else "",
        SAMPLES_NOTE if any(cell.temperature for cell in served.cells) and predicted else "",
        OWN_NOTE if any(cell.own_error is not None for cell in served.cells) else "",
        CLOCKS[served.clock],
    )
    scheduled = [
        Scheduled(each.temperature, entry, served.ratios(each.temperature, entry.concurrency))
        for each in served.schedules
        for entry in each.entries
    ]
    alone, loaded = (where(served.latencies, load=load) for load in (False, True))
    clocks = dict.fromkeys(LATENCY_CLOCKS[row.clock] for row in served.latencies)
    waits_notes = (LATENCY_NOTE, *clocks)
    lines = (f"Started with: {each.line}" for each in served.varying_commands.values())
    varied_notes = (VARIED_NOTE, *lines)
    timed, waited = grid.timed_by(served), grid.waited_by(served)
    return [
        table(f"Predicted and measured on {name}", CELLS, served.cells, notes=notes),
        table(f"K by load on {name}", SCHEDULE, scheduled, notes=(SCHEDULE_NOTE,)),
        table(f"{WAITS} on {name}{waited}", LATENCIES, alone, notes=waits_notes),
        table("Is the server lossless?", GATES, served.gates, notes=GATE_NOTES),
        table(f"What requests cost on {name}{timed}", COSTS, served.costs, notes=(COST_NOTE,)),
        *_loads(f"{name} under load", LOADS, served.load, served, (LOAD_NOTE,)),
        *_loads(f"{name} whose K changes", VARIED, _varied(served), served, varied_notes),
        table(f"{WAITS} on {name} under load{waited}", LATENCIES, loaded, notes=waits_notes),
    ]


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

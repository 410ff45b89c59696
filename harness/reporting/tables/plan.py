"""A plan: what each choice holds, what users wait for by rate, and the error of the simulation."""

from collections.abc import Callable

from harness import formatting as fmt
from harness.reporting.sentences.plan import named, whether_served
from harness.reporting.tables.specification import Column, Table, columns_by, table
from harness.summary import Percentiles, Plan, PlanCheck, PlanChoice, PlanPoint, Summary


def _wait(name: str) -> Callable[[PlanChoice], fmt.Bounded]:
    """The ms of a wait at the asked rate, with its interval."""

    def value(choice: PlanChoice) -> fmt.Bounded:
        ends = (getattr(choice.at_rate, f"{name}{end}_s", None) for end in ("", "_lo", "_hi"))
        wait, lo, hi = (None if seconds is None else 1e3 * seconds for seconds in ends)
        return wait, lo, hi

    return value


CHOICES: tuple[Column[PlanChoice], ...] = (
    Column("choice", named, key=True),
    Column("served", lambda choice: whether_served(choice) or None),
    Column("cards", lambda choice: choice.cards, fmt.count),
    Column("largest rate\n[lo, hi]", lambda c: fmt.bounded(c, "largest_rate"), fmt.with_bounds),
    Column("rate ratio\n[lo, hi]", lambda c: fmt.bounded(c, "rate_ratio"), fmt.speedup),
    Column("TPOT, ms\n[lo, hi]", _wait("tpot"), fmt.with_bounds, definition="planned wait"),
    Column("TTFT, ms\n[lo, hi]", _wait("ttft"), fmt.with_bounds, definition="planned wait"),
    Column("capacity\n[lo, hi]", lambda c: fmt.bounded(c, "capacity"), fmt.with_bounds),
    Column("K by number\nactive", lambda c: ", ".join(map(str, c.ks)) or None, flexible=True),
    Column("USD\nper hour", lambda c: c.usd_per_hour, fmt.dollars, definition="fleet cost"),
    Column(
        "USD per\n10^6 tokens",
        lambda choice: choice.usd_per_million_tokens,
        fmt.dollars,
        definition="fleet cost",
    ),
)
BRIEF = (*CHOICES[:5], *CHOICES[7:8], *CHOICES[9:])  # those that fit a terminal


def _load(check: PlanCheck) -> str:
    if check.rate is not None:
        return f"{check.rate:.3g} requests/s"
    return f"{check.concurrency} in flight"


Waits = Callable[[PlanCheck], Percentiles | None]


def _waits(title: str, measured: Waits, simulated: Waits, name: str) -> list[Column[PlanCheck]]:
    """Both percentiles of a wait, each measured and simulated."""
    return [
        Column(
            f"{start}{title}\n{at}",
            lambda check, of=of, at=at: getattr(of(check), at, None),
            fmt.seconds,
            definition=name,
        )
        for at in ("p50", "p95")
        for start, of in (("", measured), ("simulated ", simulated))
    ]


CHECKS: tuple[Column[PlanCheck], ...] = (
    Column("load", _load, key=True),
    Column("K", lambda check: check.k, fmt.count, key=True),
    Column("requests", lambda check: check.requests, fmt.count),
    Column("tok/s", lambda check: check.tokens_per_second, fmt.rate),
    Column("simulated\ntok/s", lambda check: check.simulated_tokens_per_second, fmt.rate),
    *_waits(
        "TPOT",
        lambda check: check.per_token,
        lambda check: check.simulated_per_token,
        "time per output token",
    ),
    *_waits(
        "TTFT",
        lambda check: check.first_token,
        lambda check: check.simulated_first_token,
        "time to first token",
    ),
)
NOTE = (
    "largest rate: requests per second of one card at which the goal is met; rate ratio: to plain"
    " decoding's, on the same requests and arrivals. TPOT and TTFT: p{percentile:g} at"
    " {rate:.3g} requests/s on one card; empty beyond its capacity. Intervals: 95 %, over prompts"
    " (and costs, fitted on them) and arrivals. Not on this engine: it has no K by load, or not for"
    " drafts of this kind. A server that has a draft reads prompts with it at K = 0 too, so that it"
    " waits longer than one without."
)
SIMULATED_NOTE = (
    "Simulated: {seeds} sequences of {requests} requests of {prompts} prompts, {tokens:.0f} tokens"
    " each, {arrivals}, {slots} slots a card, temperature {temperature:g}. The fleet splits its"
    " requests between the cards at random."
)
ARRIVALS = {
    "poisson": "which arrive at random (Poisson)",
    "recorded": "which arrive with the gaps of the recorded ones",
}
RATES_NOTE = "Empty beyond a choice's capacity, where its queue grows without end."
CHECKS_NOTE = (
    "Each load of the run, and a simulation of the same requests at costs fitted on the loads of"
    " the other prompts. By the server's clock it is simulated as fast as the machine was then: by"
    " what the plain server decoded alone before and after the load."
)


def brief_table(summary: Summary) -> Table:
    """The choices, in the columns that fit a terminal."""
    plan = summary.plan
    return table("What each choice holds", BRIEF, plan.choices if plan else (), best=_best(plan))


def choices_table(summary: Summary) -> list[Table]:
    """What each choice holds; none of other runs."""
    plan = summary.plan
    if plan is None:
        return []
    notes = (
        NOTE.format(percentile=plan.percentile, rate=plan.rate),
        SIMULATED_NOTE.format(**{**vars(plan), "arrivals": ARRIVALS[plan.arrivals]}),
    )
    return [table("What each choice holds", CHOICES, plan.choices, best=_best(plan), notes=notes)]


def waits_tables(summary: Summary) -> list[Table]:
    """What users wait for by rate, and the error of the simulation; none of other runs."""
    plan = summary.plan
    if plan is None:
        return []
    return [
        _by_rate(plan, "TPOT", lambda point: point.tpot_s),
        _by_rate(plan, "TTFT", lambda point: point.ttft_s),
        table("Measured and simulated", CHECKS, plan.checks, notes=(CHECKS_NOTE,)),
    ]


def _best(plan: Plan | None) -> Callable[[PlanChoice], bool]:
    return lambda choice: plan is not None and choice == plan.best


def _by_rate(plan: Plan, title: str, value: Callable[[PlanPoint], float]) -> Table:
    """A row for each rate that several choices were simulated at, a column for each choice."""
    waits = {(named(c), point.rate): value(point) for c in plan.choices for point in c.points}
    counts = [rate for _, rate in waits]
    rates = sorted({rate for rate in counts if counts.count(rate) > 1})
    columns: tuple[Column[float], ...] = (
        Column("requests\nper second", lambda rate: rate, fmt.decimal, key=True),
        *columns_by(
            [named(choice) for choice in plan.choices],
            "{}",
            lambda rate, name: waits.get((name, rate)),
            fmt.seconds,
            definition="planned wait",
        ),
    )
    name = f"p{plan.percentile:g} {title} by rate on one card"
    return table(name, columns, rates, notes=(RATES_NOTE,))

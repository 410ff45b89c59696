"""The table of a plan: the rate that each choice serves, and its cards."""

from collections.abc import Callable

from harness import formatting as fmt
from harness.reporting.sentences.plan import banner, named, whether_served
from harness.reporting.tables.specification import Column, Table, table
from harness.summary import Plan, PlanChoice, Summary


def _wait(name: str) -> Callable[[PlanChoice], fmt.Bounded]:
    """The value of a latency's column: ms at the asked rate, with its interval."""

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
BRIEF = (*CHOICES[:5], *CHOICES[7:8], *CHOICES[9:])  # the columns that fit a terminal


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


def brief_table(summary: Summary) -> Table:
    plan = summary.plan
    # No choice is named where other work disturbed the loads
    choices = plan.choices if plan and banner(summary) is None else ()
    return table("What each choice holds", BRIEF, choices, best=_best(plan))


def choices_table(summary: Summary) -> Table:
    """The choices with their rates, latencies and cards; empty for a run that is not a plan."""
    plan, title = summary.plan, "What each choice holds"
    if plan is None or banner(summary) is not None:
        return table(title, CHOICES, ())
    notes = (
        NOTE.format(percentile=plan.percentile, rate=plan.rate),
        SIMULATED_NOTE.format(**{**vars(plan), "arrivals": ARRIVALS[plan.arrivals]}),
    )
    return table(title, CHOICES, plan.choices, best=_best(plan), notes=notes)


def _best(plan: Plan | None) -> Callable[[PlanChoice], bool]:
    return lambda choice: plan is not None and choice == plan.best

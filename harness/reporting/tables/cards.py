"""A target on several cards, measured or modelled from data sheets, and the cost of a run."""

from collections.abc import Sequence

from harness import formatting as fmt
from harness.records import grouped
from harness.reporting import grid
from harness.reporting.tables.specification import Column, Table, table
from harness.summary import CardRow, Summary
from harness.theory.card_model import PlannedCard, PlanRequest
from harness.theory.cost import ALPHA, LOAD_BYTES_PER_S, SECONDS_PER_LAYER, START_S, Estimate


def _serve(row: CardRow) -> str:
    draft = f"{row.draft} K={row.k}"
    if row.decision == "speculate":
        return draft
    if row.decision in ("undecided", "not_measured"):
        return f"plain ({grid.DECISIONS[row.decision]}: {draft})"
    return "plain"


CARDS: tuple[Column[CardRow], ...] = (
    Column("place", lambda row: row.place, fmt.count, key=True),
    Column("card", lambda row: row.card, key=True),
    Column("serve", _serve),
    Column("speedup\n[lo, hi]", fmt.bounded, fmt.speedup),
    Column("ms/\ntoken", lambda row: row.seconds_per_token, fmt.in_ms),
    Column("plain\nms/token", lambda row: row.plain_s, fmt.in_ms),
    Column("USD per\n10^6 tokens", lambda row: row.usd_per_million_tokens, fmt.dollars),
    Column("plain USD per\n10^6 tokens", lambda row: row.plain_usd_per_million_tokens, fmt.dollars),
    Column("USD per\nhour", lambda row: row.price_per_hour_usd, fmt.dollars),
    Column("rented", lambda row: row.rented_s, fmt.seconds),
    Column("spent", lambda row: row.spent_usd, fmt.dollars),
    Column("device", lambda row: row.device),
)
PLACE_NOTE = (
    "place: by USD per 10^6 tokens, of one sequence at a time; by ms/token where a card has no"
    " price. A server that batches pays less for a token, and gains less from speculation."
)
SERVE_NOTE = (
    "serve: the card's own verdict; plain where it does not pay. The verdict"
    " of this report is that of {card}."
)
SPENT_NOTE = "rented, spent: of the containers that measured this, at the card's price alone."
BRIEF = ("card", "fits", "c", "best K", "speedup")  # endings of the titles in the brief table
MODELLED_NOTES = (
    "modelled, not measured: every forward at the longer of bytes read / bandwidth and operations /"
    " bf16 rate (both from the data sheet), experts touched under uniform routing. Engines are"
    " slower, small drafts most of all, so speedups are upper bounds at that alpha.",
    "fits: weights and caches of both models in 90 % of the memory; cards needed by memory alone."
    " USD: per 10^6 tokens of all sequences together, the card's price alone.",
    "stops at: the batch (1, 2, 4, ...) from which on no K pays, of those that fit, up to 1024.",
)


def card_tables(summary: Summary) -> list[Table]:
    """The measured cards, best first, a table for each temperature."""
    notes = [PLACE_NOTE, *(SERVE_NOTE.format(card=row.card) for row in summary.cards[:1])]
    if any(row.rented_s is not None for row in summary.cards):
        notes.append(SPENT_NOTE)
    ranked = grouped(summary.cards, lambda row: row.temperature)
    return [
        table(
            f"Which card, temperature {fmt.temperature(temperature)}",
            CARDS,
            rows,
            best=lambda row: row.place == 1,
            notes=notes,
        )
        for temperature, rows in ranked.items()
    ]


def cards_table(
    cards: Sequence[PlannedCard], request: PlanRequest, chosen: str | None, *, brief: bool
) -> Table:
    """The pair on cards, modelled from data sheets.

    `chosen` is the card that gpu= names, which is marked. With `brief` only c and the gains stay.
    """
    columns: tuple[Column[PlannedCard], ...] = (
        Column("card", lambda p: f"{p.card} (gpu=)" if p.card == chosen else p.card, key=True),
        Column("fits", lambda plan: "yes" if plan.fits else f"no ({plan.cards_needed} cards)"),
        Column("needed", lambda plan: plan.needed_bytes, lambda size: f"{size / 1e9:,.3g} GB"),
        Column("target\nms", lambda plan: plan.target_ms, fmt.milliseconds),
        Column("draft\nms", lambda plan: plan.draft_ms, fmt.milliseconds),
        Column("c", lambda plan: plan.c, lambda c: fmt.decimal(c, 3)),
        Column(f"v(K={max(request.ks)})", lambda plan: plan.v, fmt.decimal),
        Column("USD,\nplain", lambda plan: plan.usd_per_million_tokens, fmt.dollars),
        *(column for n, alpha in enumerate(request.alphas) for column in _gain_columns(n, alpha)),
    )
    if brief:
        columns = tuple(column for column in columns if column.title.endswith(BRIEF))
    several = f" x {request.batch} sequences" if request.batch > 1 else ""
    dtype = "bf16" if request.bytes_per_parameter == 2 else "float32"
    title = f"Cards (modelled): {request.context_tokens} tokens of context{several}, {dtype}"
    return table(title, columns, cards, notes=MODELLED_NOTES)


def _gain_columns(index: int, alpha: float) -> tuple[Column[PlannedCard], ...]:
    """The columns of the gains from speculation on each card at one alpha."""
    at = f"alpha {alpha:g}:\n"

    def stops_at(plan: PlannedCard) -> float | str | None:
        stops = plan.gains[index].stops_at_batch or f"> {plan.largest_batch}"
        return stops if plan.sequences else None

    return (
        Column(f"{at}best K", lambda plan: plan.gains[index].k, fmt.count),
        Column(f"{at}speedup", lambda plan: plan.gains[index].speedup, fmt.speedup),
        Column(f"{at}USD", lambda plan: plan.gains[index].usd_per_million_tokens, fmt.dollars),
        Column(f"{at}stops at", stops_at, fmt.count),
    )


COST_NOTE = (
    "Time and cost are modelled, not measured. From: every forward at its floor (bytes read /"
    f" bandwidth); to: {SECONDS_PER_LAYER * 1e3:g} ms a layer, an engine that launches kernels one"
    f" by one. Both: alpha {ALPHA:g} (assumed), every text as long as its budget,"
    f" {START_S:.0f} s to start and weights at {LOAD_BYTES_PER_S / 1e9:g} GB/s (assumed)."
    " Prices: conf/gpu, the card alone."
)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f}" if seconds < 600 else f"{seconds / 60:.0f}"


COSTS: tuple[Column[Estimate], ...] = (
    Column("card", lambda row: row.card, key=True),
    Column(
        "time",
        lambda row: (row.low_s, row.low_s, row.high_s) if row.fits else "does not fit",
        lambda low, _, high: f"{_minutes(low)} to {_minutes(high)} min",
    ),
    Column(
        "cost",
        lambda row: (row.low_usd, row.low_usd, row.high_usd) if row.fits else None,
        lambda low, _, high: f"{fmt.dollars(low)} to {fmt.dollars(high)}",
    ),
    Column("price an hour", lambda row: row.price_per_hour, fmt.dollars),
)


def cost_table(estimates: Sequence[Estimate]) -> Table:
    """The modelled time and cost of a run, a row for each card, cheapest first."""
    return table("Time and cost (modelled)", COSTS, estimates, notes=(COST_NOTE,))

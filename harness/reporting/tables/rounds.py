"""A round in parts, and the fall from the ideal speedup to the measured one."""

from harness.reporting import formatting as fmt
from harness.reporting.tables.specification import Column, Table, table
from harness.summary import RoundBreakdown, Summary, WaterfallStep

MOST_UNEXPLAINED = 0.03
CAUSES = {"plain_overhead": "plain decoding's own overhead"}
FALL: tuple[Column[tuple[str, WaterfallStep]], ...] = (
    Column("cause", lambda named: named[0], key=True),
    Column("speedup", lambda named: named[1].speedup, fmt.speedup),
    Column(
        "factor",
        lambda named: None if named[1].cause == "ideal" else named[1].factor,
        lambda factor: fmt.decimal(factor, 3),
    ),
)
PARTS_NOTE = (
    "each part was timed alone, and whole rounds of the real loop next to them: the same rounds in"
    " the same run; means over the fastest quarter of them, ms, since a machine only ever adds."
)
TOGETHER_NOTE = (
    "verify + accept is one recorded graph: the two run as one launch, and cannot be timed apart."
)


def fastest_round(summary: Summary) -> RoundBreakdown | None:
    """The K whose rounds were fastest: the one that the waterfall is of."""
    return max(summary.rounds, key=lambda entry: entry.speedup, default=None)


def named_waterfall(entry: RoundBreakdown) -> list[tuple[str, WaterfallStep]]:
    """Each step of the waterfall with its cause in words."""
    verify = next((p.name for p in entry.parts if p.name.startswith("verify")), "verify")
    causes = CAUSES | {
        "verify": f"{verify} costs {{}} steps",
        "acceptance": f"{{}} tokens a round, not {entry.k + 1}",
    }
    return [
        (causes.get(step.cause, step.cause).format(fmt.decimal(step.value)), step)
        for step in entry.waterfall
    ]


def waterfall_table(summary: Summary) -> Table:
    """From ideal to measured, for the K whose rounds were fastest."""
    entry = fastest_round(summary)
    if entry is None:
        return table("", FALL, ())
    notes = (
        "each row puts in one more thing that was measured; the factor is what it brought. The last"
        " row is the measured speedup.",
        f"over {entry.rounds} rounds, of the first tokens after the run's prompts: for the"
        " acceptance of a workload run a sweep.",
    )
    title = f"From the ideal speedup to the measured one, K = {entry.k}"
    return table(title, FALL, named_waterfall(entry), notes=notes)


def parts_table(summary: Summary) -> Table:
    """One row per K, one column per part."""
    names = dict.fromkeys(part.name for entry in summary.rounds for part in entry.parts)
    columns: tuple[Column[RoundBreakdown], ...] = (
        Column("K", lambda entry: entry.k, fmt.count, key=True),
        *(_part(name) for name in names),
        Column("unex-\nplained ms", lambda entry: entry.unexplained_s, fmt.in_ms),
        Column("unexplained,\nshare", lambda entry: entry.unexplained_share, fmt.percent),
        Column("whole\nround ms", lambda entry: entry.round_s, fmt.in_ms),
        Column("rounds\ntimed", lambda entry: entry.rounds, fmt.count),
        Column("tokens\nper round", lambda entry: entry.tokens_per_round, fmt.decimal),
        Column("measured\nspeedup", lambda entry: entry.speedup, fmt.speedup),
    )
    notes = [PARTS_NOTE]
    if summary.rounds:
        first = summary.rounds[0]
        notes.append(
            f"plain decoding, timed in between: {fmt.in_ms(first.plain_s)} ms a token, of which the"
            f" bare target step is {fmt.in_ms(first.step_s)} ms."
        )
    if "verify + accept" in names:
        notes.append(TOGETHER_NOTE)
    wide = [e for e in summary.rounds if abs(e.unexplained_share) > MOST_UNEXPLAINED]
    if wide:
        shares = ", ".join(f"K={e.k} {fmt.percent(e.unexplained_share)}" for e in wide)
        notes.append(
            f"unexplained beyond {100 * MOST_UNEXPLAINED:.0f} % of the round at {shares}: a busy"
            " machine, or work of the loop that no part stands for."
        )
    return table("What a round is made of", columns, summary.rounds, notes=notes)


def _part(name: str) -> Column[RoundBreakdown]:
    return Column(
        f"{name}\nms",
        lambda entry: next((part.seconds for part in entry.parts if part.name == name), None),
        fmt.in_ms,
        definition="ms",
    )

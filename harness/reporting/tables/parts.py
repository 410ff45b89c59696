"""A round in parts, and the fall from the ideal speedup to the measured one."""

from collections.abc import Sequence

from harness.analysis.waterfall import (
    MOST_UNEXPLAINED,
    TOGETHER,
    RoundParts,
    headline_round,
    round_parts,
    waterfall,
)
from harness.records import PartTiming
from harness.reporting import formatting as fmt
from harness.reporting.tables.model import Column, Row, Table

PARTS_NOTE = (
    "each part timed on its own, whole rounds of the real loop beside them, the same rounds in the"
    " same run; means over the fastest quarter of them, ms, since a machine only ever adds."
)
TOGETHER_NOTE = (
    "verify + accept is one recorded graph: the two run as one launch, and cannot be timed apart."
)
FALL_COLUMNS = (
    Column("", "left", key=True),
    Column("speedup"),
    Column("factor"),
)


def parts_table(timings: Sequence[PartTiming]) -> Table | None:
    """One row per part, one column per K; None where parts were not timed."""
    rounds = round_parts(timings)
    if not rounds:
        return None
    names = list(dict.fromkeys(name for entry in rounds for name, _ in entry.parts))
    rows = [
        *(Row((name, *(fmt.milliseconds(e.part(name)) for e in rounds))) for name in names),
        Row(("unexplained", *(fmt.milliseconds(e.unexplained_ms) for e in rounds))),
        Row(("whole round", *(fmt.milliseconds(e.round_ms) for e in rounds))),
        Row(("unexplained, share", *(fmt.percent(e.unexplained_share) for e in rounds))),
        Row(("rounds timed", *(str(e.rounds) for e in rounds))),
        Row(("tokens per round", *(fmt.decimal(e.tokens_per_round) for e in rounds))),
        Row(("measured speedup", *(fmt.speedup(e.speedup) for e in rounds))),
    ]
    columns = (
        Column("part", "left", key=True),
        *(Column(f"K={e.k}\nms", means="ms") for e in rounds),
    )
    together = (TOGETHER_NOTE,) if TOGETHER in names else ()
    notes = (PARTS_NOTE, _plain_note(rounds[0]), *together, *_wide(rounds))
    return Table("What a round is made of", columns, tuple(rows), notes)


def _plain_note(entry: RoundParts) -> str:
    return (
        f"plain decoding beside them: {fmt.milliseconds(entry.plain_ms)} ms a token, of which the"
        f" bare target step is {fmt.milliseconds(entry.step_ms)} ms."
    )


def _wide(rounds: Sequence[RoundParts]) -> tuple[str, ...]:
    wide = [e for e in rounds if abs(e.unexplained_share) > MOST_UNEXPLAINED]
    if not wide:
        return ()
    shares = ", ".join(f"K={e.k} {fmt.percent(e.unexplained_share)}" for e in wide)
    return (
        f"unexplained beyond {100 * MOST_UNEXPLAINED:.0f} % of the round at {shares}: a busy"
        " machine, or work of the loop that no part stands for.",
    )


def waterfall_table(timings: Sequence[PartTiming]) -> Table | None:
    """From ideal to measured, for the K whose rounds were fastest."""
    entry = headline_round(round_parts(timings))
    if entry is None:
        return None
    rows = tuple(
        Row((fall.cause, fmt.speedup(fall.speedup), fmt.decimal(fall.factor, 3) if index else ""))
        for index, fall in enumerate(waterfall(entry))
    )
    last = Row(("measured", fmt.speedup(entry.speedup), ""), best=True)
    notes = (
        "each row puts in one more thing that was measured; the factor is what it brought.",
        f"over {entry.rounds} rounds, of the first tokens after the run's prompts: for the"
        " acceptance of a workload run a sweep.",
    )
    title = f"From the ideal speedup to the measured one, K = {entry.k}"
    return Table(title, FALL_COLUMNS, (*rows, last), notes)

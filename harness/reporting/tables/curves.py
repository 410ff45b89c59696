"""How steps and verifies grow with context and batch, and where speculation stops paying."""

from collections.abc import Mapping, Sequence
from typing import Any

from harness.analysis.batching import (
    BatchGain,
    StoppingBatch,
    batch_gains,
    batch_times,
    stopping_batches,
)
from harness.records import LatencyRow
from harness.reporting import formatting as fmt
from harness.reporting.tables.model import Column, Row, Table

CURVE_NOTE = (
    "v(n): a target forward over n positions / a target step of the same context and batch."
)
GAIN_NOTE = (
    "predicted from the timed steps: tokens per round (iid) / (K c + v) at the best K; K 0: do not"
    " speculate. All sequences are taken to advance alike; a batch whose sequences wait for one"
    " another does worse."
)
GAIN_COLUMNS = (
    Column("context", key=True),
    Column("alpha", key=True),
    Column("batch", key=True),
    Column("c"),
    Column("v"),
    Column("best\nK"),
    Column("speedup"),
    Column("tok/s,\nplain"),
    Column("tok/s,\nbest K"),
)


def curve_table(
    latency: Sequence[LatencyRow], skipped: Sequence[Mapping[str, Any]] = ()
) -> Table | None:
    """One row per timed context and batch: both steps, MBU, c and the verify curve."""
    cells = batch_times(latency)
    if len(cells) < 2 and not skipped:
        return None
    widest = max((len(times.verify_s) for times in cells.values()), default=0)
    columns = (
        Column("context", key=True),
        Column("batch", key=True),
        Column("target\nstep ms"),
        Column("draft\nstep ms"),
        Column("target\nMBU"),
        Column("draft\nMBU"),
        Column("c"),
        *(Column(f"v({n})") for n in range(2, widest + 1)),
    )
    mbu = {(r.role, r.context_tokens, r.batch): r.mbu for r in latency if r.kind == "step"}
    rows = tuple(
        Row(
            (
                fmt.count(context),
                str(batch),
                fmt.milliseconds(1e3 * times.target_s),
                fmt.milliseconds(1e3 * times.draft_s),
                fmt.decimal(mbu.get(("target", context, batch))),
                fmt.decimal(mbu.get(("draft", context, batch))),
                fmt.decimal(times.c),
                *(
                    fmt.decimal(times.v(n - 1)) if times.covers(n - 1) else fmt.EMPTY
                    for n in range(2, widest + 1)
                ),
            )
        )
        for (context, batch), times in cells.items()
    )
    notes = (CURVE_NOTE, *_skipped(skipped))
    return Table("Steps and verifies by context and batch", columns, rows, notes)


def _skipped(skipped: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The cells that were not timed, those of one reason together."""
    reasons: dict[str, list[str]] = {}
    for cell in skipped:
        where = f"{cell['context_tokens']} x {cell['batch']}"
        reasons.setdefault(str(cell["reason"]), []).append(where)
    return tuple(
        f"not timed (context x batch {', '.join(cells)}): {reason}."
        for reason, cells in reasons.items()
    )


def batch_table(latency: Sequence[LatencyRow], alphas: Sequence[float]) -> Table | None:
    """The best K and its predicted speedup by batch; None where one batch was timed."""
    gains = batch_gains(latency, alphas)
    stops = stopping_batches(gains)
    if not stops:
        return None
    several = {stop.context_tokens for stop in stops}
    shown = sorted(
        (gain for gain in gains if gain.context_tokens in several),
        key=lambda gain: (gain.context_tokens, gain.alpha, gain.batch),
    )
    rows = tuple(Row(_gain_cells(gain)) for gain in shown)
    notes = (GAIN_NOTE, _v_note(shown), *map(_stop_sentence, stops))
    return Table("Predicted speedup by batch", GAIN_COLUMNS, rows, notes)


def _stop_sentence(stop: StoppingBatch) -> str:
    where = f"{stop.context_tokens} tokens of context, alpha {stop.alpha:g}: speculation"
    if stop.pays_up_to is None:
        return f"{where} pays at no batch that was timed."
    but = f" (not at batch {', '.join(map(str, stop.not_at))})" if stop.not_at else ""
    if stop.stops_at is not None:
        return f"{where} stops paying at batch {stop.stops_at}, after {stop.pays_up_to}{but}."
    return f"{where} pays up to batch {stop.pays_up_to}, the largest that was timed{but}."


def _v_note(gains: Sequence[BatchGain]) -> str:
    largest = max(gain.largest_k for gain in gains)
    return f"v: of a verify of {largest + 1} positions, K = {largest}."


def _gain_cells(gain: BatchGain) -> tuple[str, ...]:
    return (
        fmt.count(gain.context_tokens),
        f"{gain.alpha:g}",
        str(gain.batch),
        fmt.decimal(gain.c),
        fmt.decimal(gain.v),
        str(gain.k),
        fmt.speedup(gain.speedup),
        fmt.rate(gain.tokens_per_second),
        fmt.rate(gain.speculative_tokens_per_second),
    )

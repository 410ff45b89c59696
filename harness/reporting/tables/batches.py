"""How steps and verifies grow with context and batch, and where speculation stops paying."""

from harness.reporting import formatting as fmt
from harness.reporting.tables.specification import Column, Table, table
from harness.summary import BatchGain, StepCurve, StoppingBatch, Summary

GAINS: tuple[Column[BatchGain], ...] = (
    Column("context", lambda gain: gain.context_tokens, fmt.count, key=True),
    Column("alpha", lambda gain: gain.alpha, lambda alpha: f"{alpha:g}", key=True),
    Column("batch", lambda gain: gain.batch, fmt.count, key=True),
    Column("c", lambda gain: gain.c, fmt.decimal),
    Column("v", lambda gain: gain.v, fmt.decimal),
    Column("best\nK", lambda gain: gain.k, fmt.count),
    Column("speedup", lambda gain: gain.speedup, fmt.speedup),
    Column("tok/s,\nplain", lambda gain: gain.tokens_per_second, fmt.rate),
    Column("tok/s,\nbest K", lambda gain: gain.speculative_tokens_per_second, fmt.rate),
)
CURVE_NOTE = (
    "v(n): a target forward over n positions / a target step of the same context and batch."
)
GAIN_NOTE = (
    "predicted from the timed steps: tokens per round (iid) / (K c + v) at the best K; K 0: do not"
    " speculate. All sequences are taken to advance alike; a batch whose sequences wait for one"
    " another does worse."
)


def curve_table(summary: Summary) -> Table:
    """One row per timed context and batch, where there are several: both steps and the curve."""
    curves = summary.step_curves
    if len(curves) < 2 and not summary.skipped_cells:
        curves = ()
    longest = max((len(curve.verify_s) for curve in curves), default=0)
    columns: tuple[Column[StepCurve], ...] = (
        Column("context", lambda curve: curve.context_tokens, fmt.count, key=True),
        Column("batch", lambda curve: curve.batch, fmt.count, key=True),
        Column("target\nstep ms", lambda curve: curve.target_step_s, fmt.in_ms),
        Column("draft\nstep ms", lambda curve: curve.draft_step_s, fmt.in_ms),
        Column("target\nMBU", lambda curve: curve.target_mbu, fmt.decimal),
        Column("draft\nMBU", lambda curve: curve.draft_mbu, fmt.decimal),
        Column("c", lambda curve: curve.c, fmt.decimal),
        *(_v(n) for n in range(2, longest + 1)),
    )
    skipped: dict[str, list[str]] = {}
    for cell in summary.skipped_cells:
        skipped.setdefault(cell.reason, []).append(f"{cell.context_tokens} x {cell.batch}")
    not_timed = (
        f"not timed (context x batch {', '.join(cells)}): {reason}."
        for reason, cells in skipped.items()
    )
    title = "Steps and verifies by context and batch"
    return table(title, columns, curves, notes=(CURVE_NOTE, *not_timed))


def batch_table(summary: Summary) -> Table:
    """The best K and its predicted speedup by batch, where several were timed."""
    contexts = {stop.context_tokens for stop in summary.stopping_batches}
    gains = sorted(
        (gain for gain in summary.batch_gains if gain.context_tokens in contexts),
        key=lambda gain: (gain.context_tokens, gain.alpha, gain.batch),
    )
    largest = max((gain.largest_k for gain in gains), default=0)
    v_note = f"v: of a verify of {largest + 1} positions, K = {largest}."
    stops = map(_stop_sentence, summary.stopping_batches)
    return table("Predicted speedup by batch", GAINS, gains, notes=(GAIN_NOTE, v_note, *stops))


def _v(n: int) -> Column[StepCurve]:
    return Column(
        f"v({n})",
        lambda curve: (
            curve.verify_s[n - 1] / curve.target_step_s if n <= len(curve.verify_s) else None
        ),
        fmt.decimal,
        definition="v(n)",
    )


def _stop_sentence(stop: StoppingBatch) -> str:
    where = f"{stop.context_tokens} tokens of context, alpha {stop.alpha:g}: speculation"
    if stop.pays_up_to is None:
        return f"{where} pays at no batch that was timed."
    but = f" (not at batch {', '.join(map(str, stop.not_at))})" if stop.not_at else ""
    if stop.stops_at is not None:
        return f"{where} stops paying at batch {stop.stops_at}, after {stop.pays_up_to}{but}."
    return f"{where} pays up to batch {stop.pays_up_to}, the largest that was timed{but}."

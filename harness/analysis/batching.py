"""What speculation gains by batch size, from measured steps, and where it stops paying.

Sequences side by side share the reading of the weights, which is what speculation lives off: the
more of them, the more a drafted position costs. At each batch the formulas are the same, with c and
v(K) of that batch. All sequences are taken to advance by the same expected tokens per round; a
batched engine whose sequences wait for one another does worse.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.records import LatencyRow
from harness.theory.speedup import StepTimes, best_k


@dataclass(frozen=True)
class BatchGain:
    """The best K at one context, batch and alpha.

    Attributes:
        context_tokens, batch: of the timed steps.
        alpha: assumed.
        c: draft step / target step at this batch.
        k, speedup: the best K and its speedup; 0 and 1 where speculation does not pay.
        largest_k, v: verify of largest_k + 1 positions / target step.
        tokens_per_second: of all sequences together, plain.
        speculative_tokens_per_second: the same at the best K.
    """

    context_tokens: int
    batch: int
    alpha: float
    c: float
    k: int
    speedup: float
    largest_k: int
    v: float
    tokens_per_second: float
    speculative_tokens_per_second: float


@dataclass(frozen=True)
class StoppingBatch:
    """Where speculation stops paying along the batches that were timed.

    Attributes:
        context_tokens, alpha: where.
        pays_up_to: the largest timed batch at which it pays; None if it pays at none.
        stops_at: the next larger timed batch; None if it pays at the largest.
        not_at: smaller batches at which it does not pay.
    """

    context_tokens: int
    alpha: float
    pays_up_to: int | None
    stops_at: int | None
    not_at: tuple[int, ...]


def batch_times(rows: Iterable[LatencyRow]) -> dict[tuple[int, int], StepTimes]:
    """Step times by (context_tokens, batch), where both models' steps were timed.

    Verifies count up to the first n that is missing.
    """
    cells: dict[tuple[int, int], dict[tuple[str, str, int], float]] = {}
    for row in rows:
        if row.kind != "prefill":
            cell = cells.setdefault((row.context_tokens, row.batch), {})
            cell[row.role, row.kind, row.tokens] = row.median_ms / 1e3
    times: dict[tuple[int, int], StepTimes] = {}
    for where, cell in sorted(cells.items()):
        draft, target = cell.get(("draft", "step", 1)), cell.get(("target", "step", 1))
        verify: list[float] = []
        while (found := cell.get(("target", "verify", len(verify) + 1))) is not None:
            verify.append(found)
        if draft is not None and target is not None and len(verify) > 1:
            times[where] = StepTimes(draft, target, tuple(verify))
    return times


def batch_gains(rows: Iterable[LatencyRow], alphas: Sequence[float]) -> list[BatchGain]:
    """The best K at every timed context and batch, for each alpha."""
    gains: list[BatchGain] = []
    for (context, batch), times in batch_times(rows).items():
        largest = len(times.verify_s) - 1
        verify = {k: times.v(k) for k in range(1, largest + 1)}
        for alpha in alphas:
            k, gain = best_k(alpha, list(verify), times.c, verify)
            plain = batch / times.target_s
            gains.append(
                BatchGain(
                    context_tokens=context,
                    batch=batch,
                    alpha=alpha,
                    c=times.c,
                    k=k,
                    speedup=gain,
                    largest_k=largest,
                    v=verify[largest],
                    tokens_per_second=plain,
                    speculative_tokens_per_second=plain * gain,
                )
            )
    return gains


def stopping_batches(gains: Sequence[BatchGain]) -> list[StoppingBatch]:
    """For each context and alpha with several batches: up to which of them speculation pays."""
    stops: list[StoppingBatch] = []
    for context, alpha in dict.fromkeys((gain.context_tokens, gain.alpha) for gain in gains):
        line = sorted(
            (gain for gain in gains if (gain.context_tokens, gain.alpha) == (context, alpha)),
            key=lambda gain: gain.batch,
        )
        if len(line) < 2:
            continue
        paying = [gain.batch for gain in line if gain.k > 0]
        up_to = paying[-1] if paying else None
        above = [gain.batch for gain in line if gain.batch > (up_to or 0)]
        below = tuple(gain.batch for gain in line if gain.k == 0 and gain.batch < (up_to or 0))
        stop = above[0] if above else None
        stops.append(StoppingBatch(context, alpha, up_to, stop, below))
    return stops

"""Which times cannot be right.

Steps: both the measurement, which repeats them, and a report ask. A verify computes at least what
a step computes, and a longer verify at least what a shorter one does; a bare step, a verify of one
position and a token of plain decoding are the same forward. Times that say otherwise, beyond their
noise, were disturbed.

Samples of one repetition were taken within moments of one another, so two forwards are compared by
the median of their paired ratios. Its bound is that of the sign test, which assumes nothing of the
distribution (Conover, "Practical Nonparametric Statistics", 1999, section 3.2).

Cells: a round takes at least as long as a plain token, so its tokens are the most that it gains.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from scipy.special import bdtr

from harness.records import ResultRow, StepTiming, grouped
from harness.summary import Doubt, Unstable

# One-sided, of a bound: a profile compares dozens of forwards
CONFIDENCE = 0.995
# Smaller differences are no reason to time again, however certain
LEAST_EFFECT = 0.02
# How far a step may be from a plain token, which the loop's own work makes slower
LOOP_SHARE = 0.15
# How far noise lifts a speedup above the tokens of a round
NOISE = 1.2

# ---- steps ---------------------------------------------------------------------------------------


def unstable_steps(
    timings: Sequence[StepTiming], plain_s: float | None = None
) -> tuple[Unstable, ...]:
    """The target's forwards that cannot be right; `plain_s`: R(0), against the first steps."""
    forwards = (t for t in timings if t.role == "target" and t.kind != "prefill")
    groups = grouped(forwards, lambda t: (t.context_tokens, t.batch, t.beside))
    unstable: list[Unstable] = []
    for number, timed in enumerate(groups.values()):
        group = {0 if t.kind == "step" else t.tokens: t for t in timed}
        step = group.get(0)
        if step is None:
            continue
        ratio = float(np.median(step.samples_s)) / plain_s if plain_s and number == 0 else 1.0
        if abs(ratio - 1.0) > LOOP_SHARE:
            unstable.append(_unstable("step_unlike_plain_token", ratio, step))
        unstable += _verifies([group[positions] for positions in sorted(group)])
    return tuple(unstable)


def _verifies(forwards: Sequence[StepTiming]) -> list[Unstable]:
    """The verifies of rising length that are unlike the step, below it, or below a shorter one."""
    step, *verifies = forwards
    unstable: list[Unstable] = []
    slowest = step
    for verify in verifies:
        if verify.tokens == 1:
            ratio, inverse = _below(verify, step), _below(step, verify)
            ratio = 1.0 / inverse if inverse else ratio
            unstable += [] if ratio is None else [_unstable("verify_unlike_step", ratio, verify)]
            continue
        for reason, other in (("verify_below_step", step), ("verify_falls", slowest)):
            ratio = _below(verify, other)
            if ratio is not None:
                unstable.append(_unstable(reason, ratio, verify))
                break
        if np.median(verify.samples_s) > np.median(slowest.samples_s):
            slowest = verify
    return unstable


def _below(one: StepTiming, other: StepTiming) -> float | None:
    """The median ratio of two forwards' times, where it is below 1 beyond its noise."""
    count = min(len(one.samples_s), len(other.samples_s))
    seconds = np.array([one.samples_s[:count], other.samples_s[:count]])
    if seconds.min() <= 0.0:  # a clock too coarse for one forward tells no ratio
        return None
    ratios = np.sort(seconds[0] / seconds[1])
    rank = int((bdtr(np.arange(count + 1), count, 0.5) >= CONFIDENCE).argmax())
    if rank >= count or ratios[rank] >= 1.0:
        return None
    ratio = float(np.median(ratios))
    return ratio if ratio < 1.0 - LEAST_EFFECT else None


def _unstable(reason: str, value: float, timing: StepTiming) -> Unstable:
    kind = "step" if timing.kind == "step" else "verify"
    where = (timing.context_tokens, timing.batch)
    return Unstable(reason, value, "target", kind, timing.tokens, *where)  # type: ignore[arg-type]


# ---- cells ---------------------------------------------------------------------------------------


def impossible(cells: Sequence[Unstable], temperature: float) -> Doubt | None:
    """Why no verdict of a temperature can rest on what was measured; None where it can."""
    wrong = [cell for cell in cells if cell.kind == "cell" and cell.temperature == temperature]
    if not wrong:
        return None
    worst = max(wrong, key=lambda cell: cell.value)
    values = {"k": worst.tokens, "speedup": worst.value, "prompt_set": worst.prompt_set}
    return "impossible_speedup", {**values}


def unstable_cells(rows: Sequence[ResultRow]) -> Iterator[Unstable]:
    """The measured cells whose speedup is far above their tokens per round, or above K + 1."""
    for row in rows:
        most = min(row.k + 1, NOISE * (row.tokens_per_round or np.inf))
        if row.source == "measured" and row.k and (row.speedup or 0.0) > most:
            yield Unstable(
                "speedup_above_most",
                row.speedup or 0.0,
                "target",
                "cell",
                row.k,
                prompt_set=row.prompt_set,
                temperature=row.temperature,
            )

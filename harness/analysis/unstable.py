"""Which step times cannot be right: both the measurement, which repeats them, and a report ask.

A verify computes at least what a step computes, and a longer verify at least what a shorter one
does; a bare step and a token of plain decoding are the same forward. Times that say otherwise,
beyond their noise, were disturbed.

Samples of one repetition were taken within moments of one another, so two forwards are compared by
the median of their paired ratios. Its bound is that of the sign test, which assumes nothing of the
distribution (Conover, "Practical Nonparametric Statistics", 1999, section 3.2).
"""

from collections.abc import Sequence

import numpy as np
from scipy.stats import binom

from harness.records import StepTiming
from harness.summary import Unstable

# One-sided, of a bound: a profile compares dozens of forwards
CONFIDENCE = 0.995
# Smaller differences are no reason to time again, however certain
LEAST_EFFECT = 0.02
# How far a step may be from a plain token, which the loop's own work makes slower
LOOP_SHARE = 0.15


def unstable_steps(
    timings: Sequence[StepTiming], plain_s: float | None = None
) -> tuple[Unstable, ...]:
    """The target's forwards whose times cannot be right.

    Args:
        timings: of any models, contexts and batches; only forwards of one context, batch and
            pairing are compared.
        plain_s: R(0), held against the steps of the first context and batch; None if unknown.
    """
    groups: dict[tuple[int, int, str | None], dict[int, StepTiming]] = {}
    for timing in timings:
        if timing.role == "target" and timing.kind != "prefill":
            positions = 0 if timing.kind == "step" else timing.tokens
            key = (timing.context_tokens, timing.batch, timing.beside)
            groups.setdefault(key, {})[positions] = timing
    unstable: list[Unstable] = []
    for number, group in enumerate(groups.values()):
        step = group.get(0)
        if step is None:
            continue
        ratio = float(np.median(step.samples_s)) / plain_s if plain_s and number == 0 else 1.0
        if abs(ratio - 1.0) > LOOP_SHARE:
            unstable.append(_unstable("step_unlike_plain_token", ratio, step))
        unstable += _verifies([group[positions] for positions in sorted(group)])
    return tuple(unstable)


def _verifies(forwards: Sequence[StepTiming]) -> list[Unstable]:
    """Of a step and verifies of rising length: those below the step, or below a shorter one."""
    step, *verifies = forwards
    unstable: list[Unstable] = []
    slowest = step
    for verify in verifies:
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
    ratios = np.sort(np.array(one.samples_s[:count]) / np.array(other.samples_s[:count]))
    rank = int(binom.ppf(CONFIDENCE, count, 0.5))
    if rank >= count or ratios[rank] >= 1.0:
        return None
    ratio = float(np.median(ratios))
    return ratio if ratio < 1.0 - LEAST_EFFECT else None


def _unstable(reason: str, value: float, timing: StepTiming) -> Unstable:
    kind = "step" if timing.kind == "step" else "verify"
    where = (timing.context_tokens, timing.batch)
    return Unstable(reason, value, "target", kind, timing.tokens, *where)  # type: ignore[arg-type]

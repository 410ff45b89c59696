"""A verdict from numbers that were given: an acceptance and two latencies of somewhere else.

The arithmetic is exact, and nobody knows how sure the numbers are: a rate without its rounds and a
latency without its samples have no interval. A speedup within NEAR of 1 is therefore undecided,
whatever its second digit says.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from harness.records import Decision, Verdict

NEAR = 0.05


@dataclass(frozen=True)
class Given:
    """What is known of one K.

    Attributes:
        speedup: tokens_per_round / (K c + v), or the server's own where it measured one.
        alpha: accepted / (accepted + rejected), or its iid equivalent.
        breakeven_alpha: None where even alpha = 1 loses.
        measured: whether the speedup is the server's own.
    """

    speedup: float
    alpha: float | None
    breakeven_alpha: float | None
    measured: bool = False


def decide_given(by_k: Mapping[int, Given]) -> Verdict | None:
    """What to do, from the speedup of each K; None where there is none.

    The draft, the prompts and the temperature are whatever the numbers came from.
    """
    if not by_k:
        return None
    k = max(by_k, key=lambda number: (by_k[number].speedup, -number))
    best = by_k[k]
    decision: Decision = "undecided"
    if abs(best.speedup - 1.0) > NEAR:
        decision = "speculate" if best.speedup > 1.0 else "does_not_pay"
    how = "measured by the server" if best.measured else "by arithmetic"
    reason = f"the best is K={k} at {best.speedup:.2f}x {how}"
    if decision != "speculate" and best.alpha is not None:
        reason += f"; {_needs(k, best)}"
    if decision == "undecided":
        reason += f"; within {NEAR:.0%} of 1, which numbers without an interval cannot tell from it"
    served = 0 if decision == "does_not_pay" else k
    return Verdict(decision, None, served, None, "all", best.speedup, None, None, reason)


def _needs(k: int, best: Given) -> str:
    if best.breakeven_alpha is None:
        return f"at K={k} even alpha = 1 loses"
    return f"K={k} needs alpha >= {best.breakeven_alpha:.2f} and has {best.alpha:.2f}"

"""Why a verdict is what it is, and what would change it: counterfactuals, one factor at a time.

speedup = tokens_per_round / (K c + v(K)), so speculation loses because too little is accepted, the
draft is too slow (c), the verify too dear (v), or because steps are not the models' own time at
all: a step that is bound by launches makes c a property of the engine. Each factor is set to what
it would have to be, or could be, with the others left as they were measured.

A break-even alpha is compared with alpha alone, never with an acceptance_rate at K > 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from harness.records import Decision
from harness.theory.acceptance import expected_tokens_per_round
from harness.theory.roofline import LAUNCH_BOUND_MBU
from harness.theory.speedup import break_even_alpha, speedup_from_tokens_per_round

Factor = Literal["acceptance", "draft too slow", "verify too dear", "launch-bound engine"]


@dataclass(frozen=True)
class Floors:
    """The memory floors of the two steps, seconds: the shortest they could be on this device."""

    draft_s: float
    target_s: float

    @property
    def c(self) -> float:
        """Their ratio."""
        return self.draft_s / self.target_s


@dataclass(frozen=True)
class Case:
    """The numbers that a verdict rests on, for its draft, on the workload it is for.

    Attributes:
        k: the K chosen, or the best-looking one where none pays.
        alpha: measured at that K.
        tokens_per_round: by K, measured or replayed; holds `k`.
        draft_s, target_s: one step each.
        v: by K, verify / target step.
        floors: None where no bandwidth or architecture is known.
    """

    k: int
    alpha: float
    tokens_per_round: Mapping[int, float]
    draft_s: float
    target_s: float
    v: Mapping[int, float]
    floors: Floors | None = None

    @property
    def c(self) -> float:
        """Draft step / target step."""
        return self.draft_s / self.target_s

    @property
    def speedup(self) -> float:
        """What step times and tokens per round promise at `k`."""
        return speedup_from_tokens_per_round(
            self.tokens_per_round[self.k], self.k, self.c, self.v[self.k]
        )

    @property
    def launch_bound(self) -> bool:
        """Whether the draft's or the target's step takes far longer than its bytes need."""
        if self.floors is None:
            return False
        shares = (self.floors.draft_s / self.draft_s, self.floors.target_s / self.target_s)
        return min(shares) < LAUNCH_BOUND_MBU


def alpha_needed(case: Case) -> float | None:
    """The alpha that breaks even at this K, c and v; None where even alpha = 1 loses."""
    return break_even_alpha(case.k, case.c, case.v[case.k])


def c_allowed(case: Case) -> float:
    """The largest c at which these tokens per round break even; negative where none does."""
    return (case.tokens_per_round[case.k] - case.v[case.k]) / case.k


def v_allowed(case: Case) -> float:
    """The dearest verify, in target steps, at which these tokens per round break even."""
    return case.tokens_per_round[case.k] - case.k * case.c


def with_cheap_verify(case: Case) -> float:
    """The speedup if a verify cost one step."""
    return speedup_from_tokens_per_round(case.tokens_per_round[case.k], case.k, case.c)


def at_the_floor(case: Case) -> tuple[int, float] | None:
    """The best (K, speedup) with both steps at their memory floors and v = 1; None if unknown."""
    if case.floors is None:
        return None
    c = case.floors.c
    gains = {
        k: speedup_from_tokens_per_round(tokens, k, c)
        for k, tokens in case.tokens_per_round.items()
    }
    best = max(gains, key=lambda k: gains[k])
    return best, gains[best]


def factors(case: Case) -> tuple[Factor, ...]:
    """What alone would turn a loss into a gain, the most telling first; empty if it gains.

    An engine that is bound by launches comes first, since c and v are then not the models'. Then a
    verify at the price of a step, then the draft and the acceptance, of which one is as good as the
    other on paper: the draft is named if it is more than a fifth of the target's step.
    """
    if case.speedup > 1:
        return ()
    found: list[Factor] = []
    floor = at_the_floor(case)
    if case.launch_bound and floor is not None and floor[1] > 1:
        found.append("launch-bound engine")
    if with_cheap_verify(case) > 1:
        found.append("verify too dear")
    if c_allowed(case) > 0 and case.c > SLOW_DRAFT:
        found.append("draft too slow")
    if alpha_needed(case) is not None:
        found.append("acceptance")
    return tuple(found)


# The rule of thumb of the engines' own documents: a draft five times as fast as its target
SLOW_DRAFT = 0.2


def advice(decision: Decision, case: Case) -> tuple[str, ...]:
    """The reasons and what would change the verdict, as clauses without a full stop.

    Args:
        decision: the verdict's.
        case: its numbers.
    """
    if decision == "does_not_pay" and case.speedup > 1:
        return (_besides_the_forwards(case), *_engine(case))
    if decision == "speculate" or case.speedup > 1:
        return (_headroom(case), *_engine(case))
    named = factors(case)
    lead = (f"what stands in the way: {', '.join(named)}",) if named else ()
    return (*lead, _acceptance(case), *_draft(case), *_verify(case), *_engine(case))


def _headroom(case: Case) -> str:
    needed = alpha_needed(case)
    if needed is None or case.speedup <= 1:
        alone = f"step times and tokens per round alone give {case.speedup:.2f}x at K={case.k}"
        return f"{alone}, less than the verdict: mind the interval"
    if needed >= case.alpha:
        return (
            f"no margin at K={case.k}: an alpha of {needed:.2f} breaks even on text that is "
            f"evenly hard; measured {case.alpha:.2f}"
        )
    floor = f"speculation gains while alpha stays above {needed:.2f} at K={case.k}"
    return f"{floor}; measured {case.alpha:.2f}"


def _besides_the_forwards(case: Case) -> str:
    """A loss that step times do not explain: the rest of a round, or sets weighed unequally."""
    return (
        f"step times and tokens per round alone would give {case.speedup:.2f}x at K={case.k}; what "
        "a round does besides its forwards (sampling, acceptance, rewinding), or the weights of "
        "the prompt sets, cost more than that"
    )


def _acceptance(case: Case) -> str:
    needed = alpha_needed(case)
    if needed is None:
        ceiling = speedup_from_tokens_per_round(case.k + 1.0, case.k, case.c, case.v[case.k])
        return f"no acceptance is enough at K={case.k}: even alpha = 1 gives {ceiling:.2f}x"
    if needed <= case.alpha:
        return (
            f"alpha is {case.alpha:.2f} at K={case.k}, where {needed:.2f} breaks even on text that "
            "is evenly hard; hard stretches and cut rounds cost the rest"
        )
    return f"needs alpha >= {needed:.2f} at K={case.k}; measured {case.alpha:.2f}"


def _draft(case: Case) -> tuple[str, ...]:
    if case.speedup > 1:
        return ()
    allowed = c_allowed(case)
    if allowed <= 0:
        return (
            "no draft is fast enough for this acceptance: the verify alone costs what it gains",
        )
    return (f"or a draft step of at most {allowed:.2f} of a target step; it is {case.c:.2f}",)


def _verify(case: Case) -> tuple[str, ...]:
    cheap = with_cheap_verify(case)
    if case.speedup > 1 or cheap <= 1:
        return ()
    return (
        f"the verify of {case.k + 1} positions costs {case.v[case.k]:.2f} steps; at one step it "
        f"would be {cheap:.2f}x",
    )


def _engine(case: Case) -> tuple[str, ...]:
    floor = at_the_floor(case)
    if floor is None or case.floors is None or not case.launch_bound:
        return ()
    k, gain = floor
    would = f"K={k} would give {gain:.2f}x" if gain > 1 else "no K would pay either"
    return (
        f"the step ratio c is {case.c:.2f} because steps are launch-bound (memory floors are "
        f"{case.floors.draft_s / case.draft_s:.0%} of the draft's step and "
        f"{case.floors.target_s / case.target_s:.0%} of the target's); at the memory floor it "
        f"would be {case.floors.c:.2f} and {would}",
    )


def tokens_per_round_of_alpha(alpha: float, ks: tuple[int, ...]) -> dict[int, float]:
    """Tokens per round of the iid model at each K, where only an alpha is known."""
    return {k: expected_tokens_per_round(alpha, k) for k in ks}

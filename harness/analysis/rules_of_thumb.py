"""Rules of thumb in circulation, each beside what was measured; they are shown, never obeyed.

The rules are a Rust engine's documentation (draft five, better ten times as fast; 5 to 20 % of the
parameters; same vocabulary; K = 2 at low acceptance, 4 by default, 8 above 75 %, 16 above 85 %; a
warning under 40 %). That warning counts accepted / emitted, a third rate beside acceptance_rate and
alpha (harness/reporting/metrics.md).
"""

from dataclasses import dataclass

from harness.theory.acceptance import accepted_over_emitted

LEAST_STEP_RATIO, IDEAL_STEP_RATIO = 5.0, 10.0
PARAMETER_SHARE = (0.05, 0.20)
WARNING = 0.40
# acceptance_rate from which on a K is suggested; below WARNING it is 2
SUGGESTED_K = ((0.85, 16), (0.75, 8), (WARNING, 4))


@dataclass(frozen=True)
class Thumb:
    """One rule beside the measurement.

    Attributes:
        rule: as it is given.
        value: this pair's.
        met: None where it cannot be told.
        instead: what the measurement says.
    """

    rule: str
    value: str
    met: bool | None
    instead: str


def suggested_k(acceptance_rate: float) -> int:
    """The K that the rule names for this acceptance_rate."""
    return next((k for bound, k in SUGGESTED_K if acceptance_rate >= bound), 2)


def rules_of_thumb(
    *,
    step_ratio: float | None,
    parameter_share: float | None,
    same_vocabulary: bool | None,
    k: int,
    decided_k: int | None,
    acceptance_rate: float | None,
    tokens_per_round: float | None,
    breakeven_alpha: float | None,
    alpha: float | None,
    speedup: float | None,
) -> tuple[Thumb, ...]:
    """Every rule that the numbers can be held against.

    Args:
        step_ratio: target step / draft step.
        parameter_share: draft's parameters / target's.
        same_vocabulary: None where tokenizers were not compared (dummy weights).
        k: the K that the numbers are of.
        decided_k: the verdict's; 0 is not to speculate, None is undecided.
        acceptance_rate: at `k`.
        tokens_per_round: at `k`.
        breakeven_alpha: at `k`; None where even alpha = 1 loses.
        alpha: at `k`.
        speedup: at `k`.
    """
    needs = "none" if breakeven_alpha is None else f"{breakeven_alpha:.2f}"
    gain = "-" if speedup is None else f"{speedup:.2f}x"
    found = {None: "undecided", 0: "do not speculate"}.get(decided_k, f"K={decided_k}")
    thumbs: list[Thumb] = []
    if step_ratio is not None:
        low, high = PARAMETER_SHARE
        thumbs.append(
            Thumb(
                f"draft at least {LEAST_STEP_RATIO:g}x as fast, ideally {IDEAL_STEP_RATIO:g}x",
                f"{step_ratio:.1f}x",
                step_ratio >= LEAST_STEP_RATIO,
                f"break-even alpha at K={k} is {needs}",
            )
        )
        if parameter_share is not None:
            thumbs.append(
                Thumb(
                    f"draft of {low:.0%} to {high:.0%} of the target's parameters",
                    f"{parameter_share:.0%}",
                    low <= parameter_share <= high,
                    f"its step is {1 / step_ratio:.0%} of the target's",
                )
            )
    told = "not compared" if same_vocabulary is None else "yes" if same_vocabulary else "no"
    thumbs.append(
        Thumb("same vocabulary", told, same_vocabulary, "checked on encodings, not on sizes")
    )
    if acceptance_rate is not None:
        asked = suggested_k(acceptance_rate)
        thumbs.append(
            Thumb(
                "K by acceptance_rate: 2 low, 4 default, 8 above 75 %, 16 above 85 %",
                f"{acceptance_rate:.0%} at K={k}, so K={asked}",
                None if decided_k is None else asked == decided_k,
                f"the verdict is {found}",
            )
        )
    if tokens_per_round is not None and tokens_per_round >= 1:
        share = accepted_over_emitted(tokens_per_round)
        measured = "-" if alpha is None else f"{alpha:.2f}"
        thumbs.append(
            Thumb(
                "at least 40 % accepted / emitted",
                f"{share:.0%}",
                share >= WARNING,
                f"alpha {measured} against a break-even of {needs}; speedup {gain}",
            )
        )
    return tuple(thumbs)

"""The factors behind a verdict, and what would change it; rules of thumb of a break-even."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from harness import formatting as fmt
from harness.reporting import grid
from harness.reporting.sentences import as_sentence, served
from harness.summary import Explanation, RuleOfThumb, Summary

_FACTORS = {
    "acceptance": "acceptance",
    "slow_draft": "slow draft",
    "expensive_verify": "expensive verify",
    "slow_loop": "slow loop",
    "launch_bound_engine": "launch-bound engine",
}
_UNSERVED = {None: "undecided", 0: "do not speculate"}


def explanation(summary: Summary) -> tuple[str, ...]:
    """The factors behind the run's verdict, and what would change it, as sentences.

    Where the headline is of another engine, the first sentence names the engine that is explained.
    """
    entry, shown = summary.explanation, grid.marked(summary)
    if entry is None:
        return served.reasons(summary)
    first, *others = _because(entry)
    own = grid.own_answer(summary, entry.temperature)
    if shown is not None and own is not None and own is not shown.answer:
        temperature = fmt.temperature(entry.temperature)
        first = f"{grid.at_place(own)}, temperature {temperature}: {first}"
    return tuple(as_sentence(clause) for clause in (first, *others))


def _because(entry: Explanation) -> Iterator[str]:
    if entry.decision == "does_not_pay" and entry.speedup > 1:
        yield (
            f"round times and tokens per round would give {entry.speedup:.2f}x at K={entry.k}, more"
            " than was measured: mind the interval"
        )
    elif entry.decision == "speculate" or entry.speedup > 1:
        yield _margin(entry)
    else:
        yield from _obstacles(entry)
    if entry.launch_bound and entry.floor_c is not None:
        yield (
            f"steps are launch-bound (memory floors are {entry.draft_floor_share:.0%} of the"
            f" draft's step and {entry.target_floor_share:.0%} of the target's): with both steps at"
            f" the memory floor c would be about {entry.floor_c:.2f} (here {entry.c:.2f})"
        )


def _margin(entry: Explanation) -> str:
    k, alpha, needed = entry.k, entry.alpha, entry.breakeven_alpha
    if needed is None or entry.speedup <= 1:
        return (
            f"round times and tokens per round give {entry.speedup:.2f}x at K={k}, less than"
            " the verdict: mind the interval"
        )
    if needed >= alpha:
        return (
            f"no margin at K={k}: an alpha of {needed:.2f} breaks even on text that is evenly hard;"
            f" here it is {alpha:.2f}"
        )
    here = f"here it is {alpha:.2f}"
    return f"speculation gains while alpha stays above {needed:.2f} at K={k}; {here}"


def _acceptance_needed(entry: Explanation) -> str:
    k, alpha, needed = entry.k, entry.alpha, entry.breakeven_alpha
    if needed is None:
        return f"no acceptance is enough at K={k}: even alpha = 1 gives {entry.ceiling:.2f}x"
    if needed <= alpha:
        return (
            f"alpha is {alpha:.2f} at K={k}, where {needed:.2f} breaks even on text that is evenly"
            " hard; hard stretches and cut rounds cost the rest"
        )
    return f"needs alpha >= {needed:.2f} at K={k}; here it is {alpha:.2f}"


def _obstacles(entry: Explanation) -> Iterator[str]:
    """The factors that prevent a gain, one clause for each."""
    if entry.factors:
        yield f"what prevents a gain: {', '.join(_FACTORS[factor] for factor in entry.factors)}"
    yield _acceptance_needed(entry)
    if entry.c_allowed > 0:
        yield (
            f"or a draft step of at most {entry.c_allowed:.2f} of a target step; it is"
            f" {entry.c:.2f}"
        )
    else:
        yield "no draft is fast enough for this acceptance: the verify alone costs what it gains"
    if entry.speedup_at_v1 > 1:
        yield (
            f"the verify of {entry.k + 1} positions costs {entry.v:.2f} steps; at one step it would"
            f" be {entry.speedup_at_v1:.2f}x"
        )
    if "slow_loop" in entry.factors:
        yield (
            f"a round takes {entry.loop:.2f} target steps besides its forwards (accepting,"
            f" sampling, host work); without them it would be {entry.speedup_without_loop:.2f}x"
        )


class RuleText(NamedTuple):
    """A rule of thumb, the given number under it, and the result of the arithmetic."""

    rule: str
    value: str
    result: str


def rule_of_thumb(entry: RuleOfThumb) -> RuleText:
    """The texts of one rule of thumb."""
    values: Any = entry.values
    value = entry.value
    if entry.code == "step_ratio":
        return RuleText(
            f"draft at least {values['least']:g}x as fast, ideally {values['ideal']:g}x",
            f"{value:.1f}x",
            f"break-even alpha at K={values['k']} is {_or_none(values['breakeven_alpha'])}",
        )
    if entry.code == "suggested_k":
        k = values["verdict_k"]
        return RuleText(
            "K by acceptance_rate: 2 low, 4 default, 8 above 75 %, 16 above 85 %",
            f"{value:.0%} at K={values['k']}, so K={values['suggested_k']}",
            f"the verdict is {_UNSERVED.get(k, f'K={k}')}",
        )
    alpha = fmt.decimal(values["alpha"])
    return RuleText(
        f"at least {100 * values['least']:.0f} % accepted / emitted",
        f"{value:.0%}",
        f"alpha {alpha} against a break-even of {_or_none(values['breakeven_alpha'])};"
        f" speedup {fmt.speedup(values['speedup'])}",
    )


def _or_none(alpha: float | None) -> str:
    return fmt.NO_ROOT if alpha is None else f"{alpha:.2f}"

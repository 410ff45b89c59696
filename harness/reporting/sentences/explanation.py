"""What prevents a gain, and what would change it; rules of thumb of a break-even."""

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
}
_UNSERVED = {None: "undecided", 0: "do not speculate"}


def explanation(summary: Summary) -> tuple[str, ...]:
    """What prevents a gain of the run's draft, and what would change it, as sentences.

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
    return tuple(map(as_sentence, (first, *others)))


def _because(entry: Explanation) -> Iterator[str]:
    if entry.factors:
        factors = ", ".join(_FACTORS[factor] for factor in entry.factors)
        yield f"what prevents a gain at K={entry.k}: {factors}"
    if entry.largest_c > 0:
        yield (
            f"with a draft step of {entry.largest_c:.2f} of a target step this acceptance would"
            f" break even; it is {entry.c:.2f}"
        )
    else:
        yield "no draft is fast enough for this acceptance: the verify alone costs what it gains"


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

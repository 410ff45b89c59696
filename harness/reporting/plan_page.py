"""The part of a plan's page that the reader moves: rate and goal over what was simulated.

Analysis wrote what users wait for by rate and choice; `plan.js` finds on it, for another rate and
goal, the largest rate of each choice and the cards, as `harness.analysis.planning` does for those
that were asked for. Without script the report's tables say the latter.
"""

import json
from dataclasses import dataclass

from harness.reporting.formatting import COLOURS
from harness.reporting.sentences.plan import named, whether_served
from harness.summary import Percentiles, Plan, PlanCheck


@dataclass(frozen=True)
class PlanPage:
    """What the template needs."""

    table: str  # JSON for the script
    rate: str  # asked for, as it is shown first
    goals: tuple[tuple[str, str, str], ...]  # name of the field, title, first value or ""
    measured: bool  # whether some waits were measured at a rate


def plan_page(plan: Plan) -> PlanPage:
    """Of a plan."""
    percentile = f"p{plan.percentile:g}"
    colours = {named(choice): COLOURS[n % len(COLOURS)] for n, choice in enumerate(plan.choices)}
    of_k = {choice.k: named(choice) for choice in plan.choices[::-1] if choice.policy == "fixed"}
    measured = [
        [check.rate, *waits, colours[of_k[check.k]]]
        for check in plan.checks
        if check.rate is not None and (waits := _measured(check, plan.percentile)) is not None
    ]
    table = {
        "percentile": plan.percentile,
        "choices": [
            {
                "name": named(choice),
                "plain": choice is plan.plain,
                "open": choice in plan.servable,
                "state": whether_served(choice),
                "colour": colours[named(choice)],
                "points": [_short(each.rate, each.tpot_s, each.ttft_s) for each in choice.points],
            }
            for choice in plan.choices
        ],
        "measured": measured,
    }
    goals = (("tpot", "TPOT", plan.tpot_s), ("ttft", "TTFT", plan.ttft_s))
    return PlanPage(
        json.dumps(table, separators=(",", ":")),
        f"{plan.rate:g}",
        tuple(
            (name, f"{percentile} {title}", "" if value is None else f"{1e3 * value:g}")
            for name, title, value in goals
        ),
        bool(measured),
    )


def _short(rate: float, tpot_s: float, ttft_s: float) -> list[float]:
    """The rate, and both waits in ms, to five digits."""
    return [float(f"{value:.5g}") for value in (rate, 1e3 * tpot_s, 1e3 * ttft_s)]


def _measured(check: PlanCheck, percentile: float) -> list[float] | None:
    """TPOT and TTFT in ms; None where that percentile was not measured."""

    def value(waits: Percentiles | None) -> float | None:
        return waits and {50.0: waits.p50, 95.0: waits.p95}.get(float(percentile))

    tpot_s, ttft_s = value(check.per_token), value(check.first_token)
    return None if tpot_s is None or ttft_s is None else _short(0.0, tpot_s, ttft_s)[1:]

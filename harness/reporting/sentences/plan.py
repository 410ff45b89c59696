"""The sentences of a plan: the choice that meets the goal, its cards, and what one card serves."""

from collections.abc import Iterator

import numpy as np

from harness import formatting as fmt
from harness.records import first
from harness.summary import Plan, PlanChoice, Summary

BY_LOAD = "K by load"
PLAIN = "no draft"


def named(choice: PlanChoice) -> str:
    """The name of a choice in a table, as "tiny_good K=2"."""
    if choice.draft is None:
        return PLAIN
    return f"{choice.draft} {BY_LOAD if choice.policy == 'by_load' else f'K={choice.k}'}"


def whether_served(choice: PlanChoice) -> str:
    """The reason why a choice cannot be served; "" where the engine can be started with it."""
    return "" if choice.on_engine else "not on this engine"


def goal(plan: Plan) -> str:
    """The latency goal, as "p95 TPOT <= 30 ms and TTFT <= 500 ms"."""
    parts = (("TPOT", plan.tpot_s), ("TTFT", plan.ttft_s))
    goals = [f"{name} <= {fmt.seconds(value)}" for name, value in parts if value is not None]
    return f"p{plan.percentile:g} {' and '.join(goals)}"


def banner(summary: Summary) -> str | None:
    """The warning not to act on the plan, where other work disturbed the loads; else None."""
    caveat = first(summary.caveats, code="loads_disturbed")
    if caveat is None:
        return None
    return (
        "NO CHOICE TO ACT ON: other programs slowed the loads of the server run (they took"
        f" {caveat.values['others']:.2f} processors), so no K is named. Repeat that run on a quiet"
        " machine, then plan again."
    )


def verdicts(plan: Plan, *, disturbed: bool = False) -> tuple[str, ...]:
    """The choice, what one card serves, the rate at which speculation stops paying, the errors.

    Nothing of it where other work disturbed the loads: the banner says so.
    """
    return () if disturbed else (_choice(plan), *_details(plan))


def _choice(plan: Plan) -> str:
    """The choice for the whole rate, with its cards.

    "At 20.0 requests/s and p95 TPOT <= 30 ms: tiny_good at K=2 on 2 cards; without a draft 3."
    """
    best, plain, asked = plan.best, plan.plain, f"At {_rate(plan.rate)} and {goal(plan)}"
    if best is None:
        return _missed(plan)
    if best is not plain:
        without = "no number meets it" if plain.cards is None else f"{plain.cards}"
        if plain.cards == best.cards:
            without = "as many"
        return f"{asked}: {_draft_and_k(best)} on {_cards(best)}; without a draft {without}."
    able = [each for each in plan.servable if each.drafts and each.cards is not None]
    if not able:
        return f"{asked}: {PLAIN}, on {_cards(best)}; with one no number meets it."
    other = min(able, key=lambda each: (each.cards, -each.largest_rate))
    also = "as many" if other.cards == best.cards else f"{other.cards}"
    return f"{asked}: {PLAIN}, on {_cards(best)}; {_draft_and_k(other)} needs {also}."


def _missed(plan: Plan) -> str:
    """The choice that comes closest to a goal that none meets, and by how much it misses it."""
    closest = plan.closest
    point = closest.points[0]
    above = fmt.percent(plan.excess(point) - 1.0)
    waits = f"TPOT {fmt.seconds(point.tpot_s)}, TTFT {fmt.seconds(point.ttft_s)}"
    return (
        f"Nothing meets {goal(plan)}, on any number of cards: {_draft_and_k(closest)} comes"
        f" closest, {above} above it at {_rate(point.rate)} a card ({waits})."
    )


def _draft_and_k(choice: PlanChoice) -> str:
    """A choice in a sentence, as "tiny_good at K=2"."""
    if choice.draft is None:
        return PLAIN
    how = f"with {BY_LOAD}" if choice.policy == "by_load" else f"at K={choice.k}"
    return f"{choice.draft} {how}"


def _cards(choice: PlanChoice) -> str:
    return f"{choice.cards} {'card' if choice.cards == 1 else 'cards'}"


def _rate(value: float) -> str:
    return f"{value:.3g} requests/s"


def _details(plan: Plan) -> Iterator[str]:
    best, plain = plan.best, plan.plain
    if best is not None:
        rate = _about(best.largest_rate, best.largest_rate_lo, best.largest_rate_hi)
        text = f"One card holds {rate} requests/s with {_draft_and_k(best)}"
        if best is plain:
            text = f"One card holds {rate} requests/s without a draft"
        elif best.rate_ratio is not None:
            text += f", {fmt.gain(best, 'rate_ratio')} what it holds without a draft"
        most = _about(best.capacity, best.capacity_lo, best.capacity_hi)
        yield f"{text}; with all {plan.slots} slots taken it ends {most} a second."
    stops = plan.stops_paying
    if stops is None:
        yield "At every simulated rate some K has a shorter TPOT than plain decoding."
    elif stops == plain.points[0].rate:
        yield "Plain decoding has the shortest TPOT from the least simulated rate on."
    else:
        yield f"From {_rate(stops)} a card on plain decoding has the shortest TPOT."
    yield from _simulation_errors(plan)


def _about(value: float, low: float | None, high: float | None) -> str:
    """A rate in three digits, to which costs are known at most, with its interval if any."""
    return f"{value:.3g}" + ("" if low is None or high is None else f" [{low:.3g}, {high:.3g}]")


def _simulation_errors(plan: Plan) -> Iterator[str]:
    """The errors of simulated loads against the measured ones."""
    checks = plan.checks
    if not checks:
        return
    pairs: dict[str, list[tuple[float | None, float | None]]] = {
        "tokens per second": [
            (each.simulated_tokens_per_second, each.tokens_per_second) for each in checks
        ]
    }
    for title, waits in (
        ("TPOT", [(each.simulated_per_token, each.per_token) for each in checks]),
        ("TTFT", [(each.simulated_first_token, each.first_token) for each in checks]),
    ):
        both = [(one, other) for one, other in waits if one is not None and other is not None]
        pairs[f"{title} p50"] = [(one.p50, other.p50) for one, other in both]
        pairs[f"{title} p95"] = [(one.p95, other.p95) for one, other in both]
    ratios = {
        name: [one / other for one, other in each if one is not None and other]
        for name, each in pairs.items()
    }
    known = ((name, each) for name, each in ratios.items() if each)
    errors = ", ".join(f"{name} {_median_and_largest(each)}" for name, each in known)
    yield (
        f"Measured loads, simulated at what other prompts cost ({len(checks)} cells), median and"
        f" largest error: {errors}."
    )


def _median_and_largest(ratios: list[float]) -> str:
    errors = np.abs(np.array(ratios) - 1.0)
    return f"{fmt.percent(float(np.median(errors)))} and {fmt.percent(float(errors.max()))}"

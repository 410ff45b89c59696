"""Caveats on a plan: what was simulated and lies outside of what its server run measured."""

from collections.abc import Iterator
from math import ceil

from harness.analysis.caveats.record import Quoted, caveat
from harness.storage.manifest import PlannedServer
from harness.summary import Plan, Values

# By how much a text may be longer than those of the loads
CONTEXT_SLACK = 0.1
# Simulated requests beyond a percentile, with which largest rates err by 2 % (docs/LOG.md)
LEAST_BEYOND = 100


def _say_plan_not_measured(values: Quoted) -> str:
    parts: list[str] = []
    if values["rate"] is not None:
        known = values["largest_rate"]
        above = "at any rate" if known is None else f"at more than {known:g} requests/s"
        parts.append(f"waits {above} are simulated alone (rate=[...] in the server run)")
    if values["slots"] is not None:
        parts.append(
            "loads at a rate ran on servers of {slots} slots and are not used: what requests cost"
            " there is known for up to {slots_timed} side by side (concurrency=[1,2,4,{slots}] in"
            " the server run)".format(**values)
        )
    if values["context"] is not None:
        parts.append(
            "the longest text has {context} tokens with its prompt, the longest under load"
            " {context_timed}".format(**values)
        )
    if values["mean_prompts"]:
        parts.append(
            "no prefills of two lengths were timed, so every prompt costs the mean and high"
            " percentiles of TTFT are too low"
        )
    return f"planned and not measured: {'; '.join(parts)}"


@caveat("note", _say_plan_not_measured)
def plan_not_measured(server: PlannedServer, plan: Plan) -> Iterator[Values]:
    """What is planned and was not measured; each None, or False, where it was.

    rate: a larger one than any that was measured (largest_rate; None: none was). slots: of loads at
    a rate, other than this plan's; slots_timed: up to which costs are known. context: of the
    longest text; context_timed: of the loads' longest. mean_prompts: whether what a prompt's length
    costs is not known.
    """
    planned_rate = max((each.largest_rate for each in plan.servable), default=0.0)
    beyond = planned_rate > (server.largest_rate or 0.0)
    slots = ", ".join(map(str, server.other_slots)) or None
    longer = server.context > (1.0 + CONTEXT_SLACK) * server.context_timed
    if beyond or slots or longer or not server.prompts_priced:
        yield {
            "rate": planned_rate if beyond else None,
            "largest_rate": server.largest_rate,
            "slots": slots,
            "slots_timed": server.slots_timed,
            "context": server.context if longer else None,
            "context_timed": server.context_timed,
            "mean_prompts": not server.prompts_priced,
        }


@caveat(
    "note",
    "only {beyond} simulated requests are beyond p{percentile:g}: near a card's capacity TTFT"
    " comes out too low, and the largest rate too high; give requests={requests}",
)
def plan_few_beyond(plan: Plan, counted_share: float) -> Iterator[Values]:
    """That few simulated requests wait longer than the percentile; requests: that are enough."""
    beyond = (1.0 - plan.percentile / 100.0) * counted_share * plan.seeds * plan.requests
    if beyond < LEAST_BEYOND - 1e-9:
        needed = 100 * ceil(plan.requests * LEAST_BEYOND / beyond / 100.0 - 1e-9)
        yield {"percentile": plan.percentile, "beyond": round(beyond), "requests": needed}

"""A plan: what users wait for by the rate of requests, against the goal."""

from harness.reporting.plots import style
from harness.reporting.sentences.plan import named
from harness.summary import Summary

CAPTION = (
    "p{percentile:g} of what users wait for on one card, by the rate of requests; dashed: the goal"
)
UNDER = "simulated; a line ends near what the card can serve at most, and is cut far above the goal"
# What is far above a goal is cut off
HIGHEST = 3.0


def draw_by_rate(summary: Summary, across: int) -> style.Plot | None:
    """A panel for each goal, a line for each choice; None of other runs."""
    plan = summary.plan
    if plan is None:
        return None
    goals = [
        (title, goal) for title, goal in (("TPOT", plan.tpot_s), ("TTFT", plan.ttft_s)) if goal
    ]
    figure, axes = style.panels(len(goals), across, width=5.0, y="ms", share_y=False)
    for panel, (title, goal) in zip(axes, goals, strict=True):
        highest = 0.0
        for index, choice in enumerate(plan.choices):
            values = [
                1e3 * (point.tpot_s if title == "TPOT" else point.ttft_s) for point in choice.points
            ]
            rates = [point.rate for point in choice.points]
            panel.plot(rates, values, label=named(choice), markevery=3, **style.look(index))
            highest = max(highest, *values)
        panel.axhline(1e3 * goal, color=style.GREY, linewidth=1.2, linestyle=style.DASHED)
        panel.set_ylim(0.0, 1.05 * max(1e3 * goal, min(highest, HIGHEST * 1e3 * goal)))
        panel.set_xlim(left=0.0)
        panel.set_xlabel("requests per second")
        panel.set_title(title)
    caption = CAPTION.format(percentile=plan.percentile)
    return style.plot("latency_by_rate.svg", caption, figure, UNDER)

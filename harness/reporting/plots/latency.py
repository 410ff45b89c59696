"""Plots of verify curves, of a server's throughput and latency by load, and of a plan's latency."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from harness import formatting as fmt
from harness.records import grouped, where
from harness.reporting.plots import style
from harness.reporting.sentences.plan import named
from harness.reporting.tables import stability
from harness.reporting.tables.served import QUANTITIES, Percentile
from harness.summary import LoadCell, ServedSummary, StepCurve, Summary, UserLatency

CURVES_CAPTION = "v(n) = target forward over n positions / target step, by context and batch"
CURVES_UNDER = "dashed: v = 1, a verify that costs one step, as most calculators assume"
POSITIONS = "n (positions in one target forward)"


def draw_verify_curves(summary: Summary) -> style.Plot | None:
    """A panel per context, a line per batch; None where no verifies were timed."""
    if not summary.step_curves:
        return None
    panels = grouped(summary.step_curves, lambda curve: curve.context_tokens)
    batches = sorted({curve.batch for curve in summary.step_curves})
    figure, axes = style.panels(len(panels), y="v(n)")
    for panel, (context, curves) in zip(axes, panels.items(), strict=True):
        for curve in curves:
            look = style.look(batches.index(curve.batch))
            v = {
                n: seconds / curve.target_step_s
                for n, seconds in enumerate(curve.verify_s, start=1)
                if not _unstable(summary, curve, n)
            }
            panel.plot(list(v), list(v.values()), label=f"batch {curve.batch}", **look)
        panel.axhline(1.0, color=style.GREY, linewidth=1.0, linestyle=style.DASHED)
        panel.set_xlabel(POSITIONS)
        panel.set_title(f"{context} tokens of context")
    axes[0].set_ylim(bottom=0.0)
    return style.plot("verify_curves.svg", CURVES_CAPTION, figure, CURVES_UNDER)


def _unstable(summary: Summary, curve: StepCurve, n: int) -> bool:
    """True where v(n), or the step that it is divided by, is a timing that cannot be right."""
    timed = (curve.context_tokens, curve.batch)
    return any(
        stability.of_step(summary, "target", kind, *timed, tokens) is not None
        for kind, tokens in (("verify", n), ("step", 1))
    )


LOAD_CAPTION = "Throughput of the server and what its users wait, by load and K: {waits}"
LOAD_UNDER = (
    "throughput: tokens per second of all requests{clock}; TTFT: until the first token, TPOT: each"
    " token after it, {waits}"
)
# Percentiles of the slowest requests; the first one is shown that any load has enough requests for
TAILS: tuple[Percentile, ...] = ("p99", "p95")
MOST_WAITS = 2  # quantities of `QUANTITIES` that are drawn
Points = dict[int, dict[float, float]]  # by K and load


class _Sent(NamedTuple):
    """The temperature of a load's requests, and the unit that the load is counted in."""

    temperature: float
    counts: str


class _Panel(NamedTuple):
    """One quantity against the loads of one way of sending requests."""

    title: str
    unit: str
    sent: _Sent
    values: Points
    slowest: Points  # the percentile of the slowest requests; empty for throughput


def draw_load(summary: Summary) -> style.Plot | None:
    """Panels of throughput and latency by temperature and way of sending requests.

    Each panel has a line per K. Latencies are p50 and p99; with too few requests p95, or p50 alone.
    None without two loads to compare.
    """
    served = summary.served
    if served is None:
        return None
    waits = where(served.latencies, load=True)
    known = [(quantity, row) for quantity in QUANTITIES for row in waits]
    tail: Percentile | None = next(
        (name for name in TAILS if any(q.percentile(row, name) for q, row in known)), None
    )
    made = list(_panels(served, waits, tail))
    if not made:
        return None
    figure, axes = style.panels(len(made), share_y=False)
    ks = sorted({cell.k for cell in served.load})
    for axis, panel in zip(axes, made, strict=True):
        for k, points in sorted(panel.values.items()):
            look = style.look(ks.index(k))
            label = f"K={k}" if k else "plain decoding"
            axis.plot([*points], [*points.values()], label=label, **look)
            slow = panel.slowest.get(k, {})
            dashed = {"linestyle": style.DASHED, "markerfacecolor": "white"}
            axis.plot([*slow], [*slow.values()], **look, **dashed)
        loads = sorted({load for points in panel.values.values() for load in points})
        style.ticks(axis, loads, panel.sent.counts, log=True)
        axis.set_title(f"{panel.title}, temperature {fmt.temperature(panel.sent.temperature)}")
        axis.set_ylabel(panel.unit)
        axis.set_ylim(bottom=0.0)
    waited = f"p50 as a line, {tail} dashed" if tail else "p50"
    clock = " by the server's processor time" if served.clock == "cpu" else ""
    under = LOAD_UNDER.format(clock=clock, waits=waited)
    return style.plot("load.svg", LOAD_CAPTION.format(waits=waited), figure, under)


def _panels(
    served: ServedSummary, waits: list[UserLatency], tail: Percentile | None
) -> Iterator[_Panel]:
    quantities = [each for each in QUANTITIES if any(map(each.of, waits))][:MOST_WAITS]
    for sent, cells in grouped(served.load, _sent).items():
        if len({_amount(cell) for cell in cells}) < 2:
            continue
        throughput = _points_by_k((cell, cell.tokens_per_second) for cell in cells)
        yield _Panel("throughput", "tok/s", sent, throughput, {})
        rows = [row for row in waits if _sent(row) == sent]
        for quantity in quantities:
            medians = _points_by_k((row, quantity.percentile(row, "p50")) for row in rows)
            slowest = _points_by_k((row, tail and quantity.percentile(row, tail)) for row in rows)
            if medians:
                yield _Panel(quantity.title, "ms", sent, medians, slowest)


def _sent(load: LoadCell | UserLatency) -> _Sent:
    closed = load.concurrency is not None
    return _Sent(load.temperature, "requests side by side" if closed else "requests per second")


def _amount(load: LoadCell | UserLatency) -> float:
    return load.concurrency or load.rate or 0.0


def _points_by_k(values: Iterable[tuple[LoadCell | UserLatency, float | None]]) -> Points:
    """The known values by K and load; latencies in milliseconds."""
    points: Points = {}
    for load, value in values:
        if value is not None:
            scale = 1e3 if isinstance(load, UserLatency) else 1.0
            points.setdefault(load.k, {})[_amount(load)] = scale * value
    return points


PLAN_CAPTION = (
    "p{percentile:g} of what users wait for on one card, by the rate of requests; dashed: the goal"
)
PLAN_UNDER = (
    "simulated; a line ends near what the card can serve at most, and is cut far above the goal"
)
HIGHEST = 3.0  # latencies above so many times the goal are cut off


def draw_plan(summary: Summary) -> style.Plot | None:
    """A panel for each goal with a line for each choice; None for a run that is not a plan."""
    plan = summary.plan
    if plan is None:
        return None
    goals = [(name, goal) for name, goal in (("TPOT", plan.tpot_s), ("TTFT", plan.ttft_s)) if goal]
    figure, axes = style.panels(len(goals), width=5.0, y="ms", share_y=False)
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
    caption = PLAN_CAPTION.format(percentile=plan.percentile)
    return style.plot("latency_by_rate.svg", caption, figure, PLAN_UNDER)

"""How the verdict's speedup went over time, for the page over all runs of a results folder."""

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num

from harness.reporting import wording
from harness.reporting.content import measured_with
from harness.reporting.plots import style
from harness.reporting.reading import door_of, summary_of

if TYPE_CHECKING:
    from harness.storage import StoredRun

CAPTION = (
    "The verdict's speedup of each complete run over time, with its interval, one series per"
    " target, draft and device; the line at 1 is no speculation"
)
_DAY = 1.0


class Point(NamedTuple):
    """One run: its series, when, and its speedup with the interval."""

    series: str
    when: float
    speedup: float
    low: float | None
    high: float | None


def draw(runs: Sequence["StoredRun"]) -> style.Plot | None:
    """Every complete run that has a speedup; None where there is none."""
    points = sorted(point for run in runs if (point := _point(run)) is not None)
    if not points:
        return None
    figure, (axes,) = style.panels(1, width=7.5, height=3.4)
    first, last = min(p.when for p in points), max(p.when for p in points)
    room = max(0.06 * (last - first), 0.02 * _DAY)
    axes.set_xlim(first - room, last + room)
    known = [value for p in points for value in (p.speedup, p.low, p.high) if value is not None]
    axes.set_ylim(0.0, max(1.25, *known) * 1.08)
    axes.plot(axes.get_xlim(), [1.0, 1.0], color=style.INK, linewidth=1.2, linestyle=(0, (5, 3)))
    labels = []
    for index, name in enumerate(dict.fromkeys(point.series for point in points)):
        mine = [point for point in points if point.series == name]
        colour = style.COLOURS[index % len(style.COLOURS)]
        values = [point.speedup for point in mine]
        bars = style.whiskers(values, [p.low for p in mine], [p.high for p in mine])
        marker = style.MARKERS[index % len(style.MARKERS)]
        when = [point.when for point in mine]
        axes.errorbar(when, values, yerr=bars, color=colour, marker=marker, capsize=3)
        labels.append(style.Label(values[-1], last + 0.3 * room, name, colour))
    style.direct_labels(axes, labels)
    locator = AutoDateLocator(minticks=2, maxticks=7)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    axes.set_ylabel("speedup")
    return style.Plot("trend.svg", CAPTION, style.svg(figure))


def _point(run: "StoredRun") -> Point | None:
    verdict = summary_of(run).get("verdict") or {}
    when = _time(run.manifest.get("created_utc"))
    if verdict.get("speedup") is None or when is None or wording.status(run):
        return None
    own = run.config.get("model") or {}
    device = dict(measured_with(run)[0]).get("device", "")
    told = "" if door_of(run) == "sweep" else door_of(run)  # an audition's speedup is predicted
    names = (own.get("name") or "", verdict.get("draft") or "", device, told)
    return Point(
        ", ".join(str(name) for name in names if name),
        when,
        verdict["speedup"],
        verdict.get("speedup_lo"),
        verdict.get("speedup_hi"),
    )


def _time(stored: object) -> float | None:
    try:
        return float(date2num(datetime.fromisoformat(str(stored))))
    except ValueError:
        return None

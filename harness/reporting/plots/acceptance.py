"""acceptance_by_position.svg and acceptance_vs_temperature.svg."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.axes import Axes

from harness.analysis.cells import acceptance_by_position, latest
from harness.records import ResultRow, Trial
from harness.reporting import formatting as fmt
from harness.reporting.plots import style
from harness.reporting.reading import drafts_of, ran, results_of, summary_of

if TYPE_CHECKING:
    from harness.storage import StoredRun

POSITION_CAPTION = "Share of rounds in which at least j draft tokens were accepted, j = 1..K"
TEMPERATURE_CAPTION = "acceptance_rate against temperature, one line per K, by prompt set"
TEMPERATURE_UNDER = "acceptance_rate is accepted / drafted: it falls with K by construction"
SHADES = ("#440154", "#31688e", "#1f7f6b", "#4f8a10", "#946c00", "#b03a2e")


class Curve(NamedTuple):
    """acceptance_by_position of one prompt set, or of one draft: shares[j - 1], j = 1..K."""

    name: str
    temperature: float
    k: int
    shares: Sequence[float]


def draw_by_position(run: "StoredRun") -> style.Plot | None:
    """One panel per temperature; None without rounds.

    A curve is a prompt set at the largest K that was run; where drafts were replayed and nothing
    was run, a curve is a draft at its best K.
    """
    curves = _curves_of_trials(run) or _curves_of_summary(run)
    if not curves:
        return None
    k = max(curve.k for curve in curves)
    one_k = all(curve.k == k for curve in curves)
    temperatures = sorted({curve.temperature for curve in curves})
    found = [curve.name for curve in curves]
    names = list(dict.fromkeys(name for name in (*drafts_of(run), *found) if name in found))
    figure, axes = style.panels(len(temperatures))
    for panel, temperature in zip(axes, temperatures, strict=True):
        mine = [curve for curve in curves if curve.temperature == temperature]
        panel.set_ylim(0.0, 1.04)
        panel.set_xlim(1 - 0.06 * k, k + 0.06 * k)
        style.number_axis(panel, _ticks(k), "draft position j")
        _positions(panel, mine, names, name_k=not one_k)
        at_k = f", K={k}" if one_k else ""
        panel.set_title(f"temperature {fmt.temperature(temperature)}{at_k}", loc="left")
    axes[0].set_ylabel("rounds that accept at least j")
    _share_axis(axes[0])
    return style.Plot("acceptance_by_position.svg", POSITION_CAPTION, style.svg(figure))


def draw_by_temperature(run: "StoredRun") -> style.Plot | None:
    """One panel per prompt set, one line per K; None with fewer than two temperatures."""
    rows = [row for row in ran(results_of(run)) if row.k > 0 and row.acceptance_rate is not None]
    temperatures = sorted({row.temperature or 0.0 for row in rows})
    if len(temperatures) < 2:
        return None
    cells = list(dict.fromkeys((row.draft, row.prompt_set) for row in rows))
    several = len({draft for draft, _ in cells}) > 1
    figure, axes = style.panels(len(cells))
    for panel, (draft, prompt_set) in zip(axes, cells, strict=True):
        mine = [row for row in rows if (row.draft, row.prompt_set) == (draft, prompt_set)]
        span = temperatures[-1] - temperatures[0]
        panel.set_ylim(0.0, 1.04)
        panel.set_xlim(temperatures[0] - 0.06 * span, temperatures[-1] + 0.06 * span)
        style.number_axis(panel, temperatures, "temperature")
        _lines(panel, mine)
        name = f"{prompt_set or 'all'} prompts"
        panel.set_title(f"{draft}, {name}" if several else name, loc="left")
    axes[0].set_ylabel("acceptance_rate")
    _share_axis(axes[0])
    style.caption_under(figure, TEMPERATURE_UNDER)
    return style.Plot("acceptance_vs_temperature.svg", TEMPERATURE_CAPTION, style.svg(figure))


def _curves_of_trials(run: "StoredRun") -> list[Curve]:
    """A curve per prompt set and temperature, at the largest K."""
    trials = [trial for trial in latest(run.trials) if trial.k > 0 and trial.accepted_lengths]
    k = max((trial.k for trial in trials), default=0)
    groups: dict[tuple[str, float], list[Trial]] = {}
    for trial in trials:
        if trial.k == k:
            groups.setdefault((trial.prompt_set, trial.temperature), []).append(trial)
    return [
        Curve(name, temperature, k, shares)
        for (name, temperature), mine in groups.items()
        if (shares := acceptance_by_position(mine))
    ]


def _curves_of_summary(run: "StoredRun") -> list[Curve]:
    """A curve per draft and temperature, as replayed."""
    return [
        Curve(
            fmt.text(entry.get("draft")),
            float(entry.get("temperature") or 0.0),
            int(entry.get("k") or len(entry["positions"])),
            tuple(share for share in entry["positions"] if share is not None),
        )
        for entry in summary_of(run).get("acceptance_by_position") or ()
        if entry.get("positions")
    ]


def _positions(axes: Axes, curves: Sequence[Curve], names: Sequence[str], *, name_k: bool) -> None:
    """The curves of one panel, each named where the longest of them ends."""
    labels = []
    end = max(len(curve.shares) for curve in curves)
    for curve in curves:
        index = names.index(curve.name)
        colour = style.COLOURS[index % len(style.COLOURS)]
        marker = style.MARKERS[index % len(style.MARKERS)]
        last = len(curve.shares)
        axes.plot(range(1, last + 1), curve.shares, color=colour, marker=marker)
        level = [curve.shares[-1], curve.shares[-1]]
        axes.plot([last, end], level, color=colour, linewidth=1.0, linestyle=":")
        name = f"{curve.name}, K={curve.k}" if name_k else curve.name
        labels.append(style.Label(curve.shares[-1], end, name, colour))
    style.direct_labels(axes, labels)


def _lines(axes: Axes, rows: Sequence[ResultRow]) -> None:
    labels = []
    ks = sorted({row.k for row in rows})
    for index, k in enumerate(ks):
        mine = sorted((row for row in rows if row.k == k), key=lambda row: row.temperature or 0.0)
        colour = SHADES[index % len(SHADES)]
        temperatures = [row.temperature or 0.0 for row in mine]
        values = [row.acceptance_rate or 0.0 for row in mine]
        marker = style.MARKERS[index % len(style.MARKERS)]
        axes.plot(temperatures, values, color=colour, marker=marker)
        labels.append(style.Label(values[-1], temperatures[-1], f"K={k}", colour))
    style.direct_labels(axes, labels)


def _ticks(k: int) -> list[int]:
    """Positions 1..K, thinned from 12 on."""
    step = 1 if k <= 12 else 2 if k <= 24 else 4
    return list(range(1, k + 1, step))


def _share_axis(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")

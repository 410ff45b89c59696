"""acceptance_by_position.svg and acceptance_vs_temperature.svg."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from harness.records import ResultRow, Trial
from harness.reporting import formatting as fmt
from harness.reporting.plots import style
from harness.reporting.reading import results_of
from harness.theory.cells import acceptance_by_position
from harness.theory.counts import latest

if TYPE_CHECKING:
    from harness.storage import StoredRun

POSITION_CAPTION = "Share of rounds in which at least j draft tokens were accepted, j = 1..K"
TEMPERATURE_CAPTION = "acceptance_rate against temperature, one line per K, by prompt set"
TEMPERATURE_UNDER = "acceptance_rate is accepted / drafted: it falls with K by construction"
SHADES = ("#440154", "#31688e", "#1f7f6b", "#4f8a10", "#946c00", "#b03a2e")


def draw_by_position(run: "StoredRun") -> style.Plot | None:
    """One panel per temperature at the largest K that was run; None without such rounds."""
    trials = [trial for trial in latest(run.trials) if trial.k > 0 and trial.accepted_lengths]
    if not trials:
        return None
    k = max(trial.k for trial in trials)
    trials = [trial for trial in trials if trial.k == k]
    temperatures = sorted({trial.temperature for trial in trials})
    sets = list(dict.fromkeys(trial.prompt_set for trial in trials))
    figure, axes = style.panels(len(temperatures))
    for panel, temperature in zip(axes, temperatures, strict=True):
        mine = [trial for trial in trials if trial.temperature == temperature]
        panel.set_ylim(0.0, 1.04)
        panel.set_xlim(1 - 0.06 * k, k + 0.06 * k)
        style.number_axis(panel, _ticks(k), "draft position j")
        _positions(panel, mine, sets)
        panel.set_title(f"temperature {fmt.temperature(temperature)}, K={k}", loc="left")
    axes[0].set_ylabel("rounds that accept at least j")
    _share_axis(axes[0])
    return style.Plot("acceptance_by_position.svg", POSITION_CAPTION, style.svg(figure))


def draw_by_temperature(run: "StoredRun") -> style.Plot | None:
    """One panel per prompt set, one line per K; None with fewer than two temperatures."""
    rows = [
        row
        for row in results_of(run)
        if row.k > 0 and row.source != "theory" and row.acceptance_rate is not None
    ]
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
    style.caption_under(
        figure, "acceptance_rate is accepted / drafted: it falls with K by construction"
    )
    return style.Plot("acceptance_vs_temperature.svg", TEMPERATURE_CAPTION, style.svg(figure))


def _positions(axes: Axes, trials: Sequence[Trial], sets: Sequence[str]) -> None:
    labels = []
    for index, prompt_set in enumerate(sets):
        mine = [trial for trial in trials if trial.prompt_set == prompt_set]
        shares = acceptance_by_position(mine)
        if not shares:
            continue
        colour = style.COLOURS[index % len(style.COLOURS)]
        marker = style.MARKERS[index % len(style.MARKERS)]
        axes.plot(range(1, len(shares) + 1), shares, color=colour, marker=marker)
        labels.append(style.Label(shares[-1], len(shares), prompt_set, colour))
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

"""Plots as SVG files, one module a plot; a plot whose data is missing is not drawn.

To add one: a module with `draw(run) -> style.Plot | None`, named in `PLOTS` or, for auditions, in
`AUDITION_PLOTS`; its file name goes into `NAMES`.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from harness.reporting import files
from harness.reporting.plots import (
    acceptance,
    batches,
    breakeven,
    category,
    leaderboard,
    speedup,
    speedup_by_k,
    style,
    verify_cost,
    waterfall,
)
from harness.reporting.reading import door_of
from harness.storage.files import directory

if TYPE_CHECKING:
    from harness.storage import StoredRun

PLOTS = (
    speedup.draw,
    breakeven.draw,
    acceptance.draw_by_position,
    acceptance.draw_by_temperature,
    verify_cost.draw,
)
PROFILE_PLOTS = (waterfall.draw, verify_cost.draw, batches.draw_curves, batches.draw)
# Many drafts in one plot, where the others have one panel a draft.
AUDITION_PLOTS = (
    leaderboard.draw,
    speedup_by_k.draw,
    category.draw,
    acceptance.draw_by_position,
    verify_cost.draw,
)
# Only what earlier renderings may have left is removed; a file of the user's stays.
NAMES = (
    "speedup_vs_k.svg",
    "breakeven_vs_measured.svg",
    "acceptance_by_position.svg",
    "acceptance_vs_temperature.svg",
    "verify_cost.svg",
    "leaderboard.svg",
    "speedup_by_k.svg",
    "acceptance_by_category.svg",
    "waterfall.svg",
    "verify_curves.svg",
    "speedup_by_batch.svg",
)


def draw(run: "StoredRun", folder: Path) -> tuple[tuple[str, str], ...]:
    """Write every plot that the run has data for.

    Args:
        run: what was stored.
        folder: where the files go, directly under the run folder.

    Returns:
        (file relative to the run folder, caption) of each plot written, in reading order.

    Raises:
        UserError: the folder is a link out of the run.
        OSError: it cannot be written.
    """
    makers = {"audition": AUDITION_PLOTS, "profile": PROFILE_PLOTS}.get(door_of(run), PLOTS)
    with style.styled():
        drawn = [plot for make in makers if (plot := make(run)) is not None]
    directory(folder)
    for name in set(NAMES) - {plot.name for plot in drawn}:
        (folder / name).unlink(missing_ok=True)
    for plot in drawn:
        files.write(folder / plot.name, plot.svg)
    return tuple((f"{folder.name}/{plot.name}", plot.caption) for plot in drawn)

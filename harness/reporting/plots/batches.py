"""speedup_by_batch.svg and verify_curves.svg: what side by side sequences leave to gain."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from harness.analysis.batching import BatchGain, batch_gains, batch_times, stopping_batches
from harness.reporting.plots import style
from harness.reporting.reading import latency_of

if TYPE_CHECKING:
    from harness.storage import StoredRun

CAPTION = "Predicted speedup at the best K by batch size, for each alpha, from the timed steps"
UNDER = "at a point: its best K; on the dashed line: do not speculate"
CURVES_CAPTION = "v(n) = target forward over n positions / target step, by context and batch"
CURVES_UNDER = "dashed: v = 1, a verify that costs one step, as most calculators assume"


def draw(run: "StoredRun") -> style.Plot | None:
    """A panel per context, a line per alpha; None where one batch alone was timed."""
    gains = batch_gains(latency_of(run), [float(a) for a in run.config.get("alpha") or ()])
    contexts = list(dict.fromkeys(stop.context_tokens for stop in stopping_batches(gains)))
    if not contexts:
        return None
    figure, axes = style.panels(len(contexts))
    axes[0].set_ylim(0.0, 1.15 * max(gain.speedup for gain in gains))
    for panel, context in zip(axes, contexts, strict=True):
        _gains(panel, [gain for gain in gains if gain.context_tokens == context])
        panel.set_title(f"{context} tokens of context", loc="left")
    axes[0].set_ylabel("predicted speedup")
    style.caption_under(figure, UNDER)
    return style.Plot("speedup_by_batch.svg", CAPTION, style.svg(figure))


def _gains(axes: Axes, gains: Sequence[BatchGain]) -> None:
    labels: list[style.Label] = []
    batches = sorted({gain.batch for gain in gains})
    for index, alpha in enumerate(sorted({gain.alpha for gain in gains})):
        line = sorted((g for g in gains if g.alpha == alpha), key=lambda gain: gain.batch)
        colour = style.COLOURS[index % len(style.COLOURS)]
        marker = style.MARKERS[index % len(style.MARKERS)]
        axes.plot([g.batch for g in line], [g.speedup for g in line], f"{marker}-", color=colour)
        for gain in line:
            axes.annotate(
                f"K={gain.k}",
                (gain.batch, gain.speedup),
                xytext=(0, 6),
                textcoords="offset points",
                ha="center",
                fontsize=9.5,
                color=colour,
            )
        end = 1.3 * batches[-1]
        labels.append(style.Label(line[-1].speedup, end, f"alpha {alpha:g}", colour))
    axes.axhline(1.0, color=style.GREY, linewidth=1.0, linestyle=(0, (4, 3)), zorder=0)
    style.k_axis(axes, batches, label="batch (sequences side by side)")
    style.direct_labels(axes, labels)


def draw_curves(run: "StoredRun") -> style.Plot | None:
    """A panel per context, a line per batch; None where a single context and batch was timed."""
    cells = batch_times(latency_of(run))
    if len(cells) < 2:
        return None
    contexts = sorted({context for context, _ in cells})
    figure, axes = style.panels(len(contexts))
    axes[0].set_ylim(0.0, 1.1 * max(max(t.verify_s) / t.target_s for t in cells.values()))
    for panel, context in zip(axes, contexts, strict=True):
        labels: list[style.Label] = []
        for index, (batch, times) in enumerate(
            (batch, times) for (own, batch), times in cells.items() if own == context
        ):
            colour = style.COLOURS[index % len(style.COLOURS)]
            ns = list(range(1, len(times.verify_s) + 1))
            ratios = [times.v(n - 1) for n in ns]
            panel.plot(ns, ratios, f"{style.MARKERS[index % 6]}-", color=colour, markersize=4)
            labels.append(style.Label(ratios[-1], ns[-1], f"batch {batch}", colour))
        panel.axhline(1.0, color=style.GREY, linewidth=1.0, linestyle=(0, (4, 3)), zorder=0)
        style.direct_labels(panel, labels)
        panel.set_xlabel("n (positions in one target forward)")
        panel.set_title(f"{context} tokens of context", loc="left")
    axes[0].set_ylabel("v(n)")
    style.caption_under(figure, CURVES_UNDER)
    return style.Plot("verify_curves.svg", CURVES_CAPTION, style.svg(figure))

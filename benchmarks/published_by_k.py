"""Published acceptance lengths and throughputs by K, against what the harness's formulas give.

    python benchmarks/published_by_k.py

Prints three tables in markdown, from the files of `benchmarks/published/`. None of the sources
publishes texts, so nothing can be replayed; what can be computed from one part of a table is
compared with the rest of it.

Acceptance lengths by K: the iid model's from the length at K = 1; and the length at K from those at
K - 1 and below, the conditional acceptance of the last position going on. Where drafts are
the same at every K, a longer chain never needs more rounds, so that lengths cannot fall with K.

K by batch: acceptance does not depend on the batch, round times do. The lengths are the iid model's
of one alpha: that at which the throughputs of the smallest batch are best explained by round times
on a line in K. At every other batch the round times of the smallest and the largest K give the line
(`RoundTimes`), and so the throughput at each K in between and the best K. What one loses by serving
that K is the figure that counts.

MTP by task: round times are tokens per round over tokens per second. Those of a K follow from the
line through the others; those of one task, on another task, turn a throughput into a length, which
may not exceed K + 1.
"""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

from harness.theory.acceptance import alpha_from_tokens_per_round, expected_tokens_per_round
from harness.theory.speedup import RoundTimes

FOLDER = Path(__file__).parent / "published"
Row = Mapping[str, str]


def main() -> None:
    """Print the three tables."""
    for lines in (lengths_by_k(), k_by_batch(), mtp_by_task()):
        print("\n".join([*lines, ""]))


def rows_of(name: str) -> list[Row]:
    """The rows of a file."""
    with (FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def grouped(rows: Sequence[Row], *columns: str) -> dict[tuple[str, ...], list[Row]]:
    """The rows by what these columns say, in the file's order."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in columns), []).append(row)
    return groups


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table and an empty line."""
    yield from (f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))
    yield ""


def compared(predicted: float, measured: float) -> tuple[str, str]:
    """A predicted length and its error."""
    return f"{predicted:.2f}", percent(predicted / measured - 1)


def percent(share: float) -> str:
    """A share of 1 with its sign; no sign where it rounds to 0."""
    return f"{round(100 * share, 1) + 0.0:+.1f} %".replace("+0.0", "0.0")


def line_through(times: Mapping[int, float], *, without: int | None = None) -> np.poly1d:
    """Round times by K as a straight line, by least squares."""
    ks = [k for k in times if k != without]
    return np.poly1d(np.polyfit(ks, [times[k] for k in ks], 1))


# ---- acceptance lengths by K ---------------------------------------------------------------------


def lengths_by_k() -> Iterator[str]:
    """Lengths of one draft at every K, each from those at smaller K."""
    columns = ("target", "draft", "workload", "K", "published", "gain over K - 1", "implied alpha")
    predictions = ("iid from K = 1", "error", "continued from K - 1", "error")
    table: list[list[str]] = []
    falls: list[str] = []
    errors: dict[str, list[float]] = {"iid": [], "continued": []}
    rows = rows_of("chains_by_k")
    for (target, draft, work, thinking), group in grouped(
        rows, "target", "draft", "workload", "thinking"
    ).items():
        name = f"{work}, thinking {thinking}"
        lengths = [1.0, *(float(row["acceptance_length"]) for row in group)]
        gains = np.diff(lengths)
        for k in range(1, len(lengths)):
            said = [target, draft, name, str(k), f"{lengths[k]:.2f}", f"{gains[k - 1]:.2f}"]
            said.append(f"{alpha_from_tokens_per_round(lengths[k], k):.2f}")
            predicted = [math.nan, math.nan]
            if k > 1:
                predicted[0] = expected_tokens_per_round(lengths[1] - 1, k)
                before = gains[k - 3] if k > 2 else 1.0
                predicted[1] = lengths[k - 1] + gains[k - 2] * min(1.0, gains[k - 2] / before)
                for kind, value in zip(errors.values(), predicted, strict=True):
                    kind.append(abs(value / lengths[k] - 1))
            cells = [compared(value, lengths[k]) if k > 1 else ("-", "-") for value in predicted]
            table.append([*said, *cells[0], *cells[1]])
            if gains[k - 1] < 0:
                falls.append(f"{name}: {lengths[k]:.2f} at K = {k} after {lengths[k - 1]:.2f}")
    yield f"Acceptance lengths by K, of {rows[0]['source']}, temperature {rows[0]['temperature']}:"
    yield ""
    yield from markdown([*columns, *predictions], table)
    median = {kind: 100 * float(np.median(values)) for kind, values in errors.items()}
    yield (
        f"With one alpha for all positions, that of K = 1, the median error is"
        f" {median['iid']:.1f} %"
        f" and the largest {100 * max(errors['iid']):.1f} %: acceptance falls with the position in"
        " the round, so that alpha promises too much for a larger K. Continued by one position, the"
        f" median error is {median['continued']:.1f} % and the largest"
        f" {100 * max(errors['continued']):.1f} %. Where drafts are the same at every K, lengths"
        f" cannot fall with K. They fall here ({'; '.join(falls)}): that is sampling error, or the"
        " draft of that K is another. It cannot be decided, for the counts behind the lengths are"
        " not published."
    )


# ---- K by batch ----------------------------------------------------------------------------------


def k_by_batch() -> Iterator[str]:
    """The best K by batch, from the smallest and the largest K that were measured there."""
    columns = ("target", "batch", "best K published", "best K predicted")
    more = ("throughput lost by serving it", "K predicted", "median error", "largest")
    table: list[list[str]] = []
    errors: list[float] = []
    losses: list[float] = []
    alphas: list[str] = []
    rows = rows_of("k_by_batch")
    first = min(int(row["batch"]) for row in rows)
    for (target,), group in grouped(rows, "target").items():
        measured = {
            int(batch): {int(row["K"]): float(row["tokens_per_second"]) for row in of_batch}
            for (batch,), of_batch in grouped(group, "batch").items()
        }
        alpha = implied_alpha(measured[first])
        alphas.append(f"{alpha:.2f} for {target}")
        for batch, by_k in measured.items():
            if batch == first:
                continue
            predicted = throughputs(by_k, alpha)
            between = sorted(by_k)[1:-1]
            off = [abs(predicted[k] / by_k[k] - 1) for k in between]
            best, chosen = (
                max(by_k, key=by_k.__getitem__),
                max(predicted, key=predicted.__getitem__),
            )
            loss = 1 - by_k[chosen] / by_k[best]
            errors += off
            losses.append(loss)
            table.append(
                [
                    *(target, str(batch), str(best), str(chosen)),
                    f"{100 * loss:.1f} %",
                    f"{between[0]}-{between[-1]}",
                    f"{100 * float(np.median(off)):.1f} %",
                    f"{100 * max(off):.1f} %",
                ]
            )
    yield f"Throughput by K and batch, of {rows[0]['source']}:"
    yield ""
    yield from markdown([*columns, *more], table)
    yield (
        f"Median error {100 * float(np.median(errors)):.1f} %, largest {100 * max(errors):.1f} %"
        f" over {len(errors)} throughputs; the predicted best K loses at most"
        f" {100 * max(losses):.1f} % of the best throughput. The alphas are those that batch"
        f" {first} implies, {' and '.join(alphas)}. They and speedups cannot be checked: acceptance"
        " lengths, and throughputs without a draft, are not published."
    )


def implied_alpha(by_k: Mapping[int, float]) -> float:
    """The alpha whose round times, lengths over throughputs, lie best on a line in K."""

    def residual(alpha: float) -> float:
        times = round_times(by_k, alpha)
        line = line_through(times)
        return sum((line(k) / seconds - 1) ** 2 for k, seconds in times.items())

    found: Any = minimize_scalar(residual, bounds=(0.05, 0.99), method="bounded")
    return float(found.x)


def round_times(by_k: Mapping[int, float], alpha: float) -> dict[int, float]:
    """Round times by K, per request in the batch."""
    return {k: expected_tokens_per_round(alpha, k) / rate for k, rate in by_k.items()}


def throughputs(by_k: Mapping[int, float], alpha: float) -> dict[int, float]:
    """Those of all K, from the round times of the smallest and the largest."""
    times = round_times(by_k, alpha)
    ends = tuple((k, times[k]) for k in (min(times), max(times)))
    line = RoundTimes(plain_s=math.nan, round_s=ends)
    return {k: expected_tokens_per_round(alpha, k) / line.at(k) for k in by_k}


# ---- MTP by task ---------------------------------------------------------------------------------


def mtp_by_task() -> Iterator[str]:
    """Throughput of a task with known lengths from the other K; lengths of one without."""
    rows = rows_of("mtp_by_task")
    tasks = {
        task: {int(row["n"]): row for row in of_task}
        for (task,), of_task in grouped(rows, "task").items()
    }
    known = next(name for name, by_k in tasks.items() if by_k[1]["acceptance_length"])
    lengths = {k: float(row["acceptance_length"]) for k, row in tasks[known].items() if k}
    speed = {
        task: {k: float(row["tokens_per_second"]) for k, row in by_k.items()}
        for task, by_k in tasks.items()
    }
    plain = speed[known][0]
    cost = {k: lengths[k] * plain / speed[known][k] for k in lengths}
    table: list[list[str]] = []
    errors: list[float] = []
    for k, length in lengths.items():
        predicted = length * plain / float(line_through(cost, without=k)(k))
        iid = compared(expected_tokens_per_round(lengths[1] - 1, k), length)
        errors.append(predicted / speed[known][k] - 1)
        table.append(
            [
                *(known, str(k), f"{length:.2f}", *(iid if k > 1 else ("-", "-"))),
                *(f"{cost[k]:.2f}", f"{speed[known][k]:.1f}", f"{predicted:.1f}"),
                percent(errors[-1]),
            ]
        )
    others: list[str] = []
    for task, by_k in speed.items():
        if task == known:
            continue
        implied = {k: by_k[k] / by_k[0] * cost[k] for k in cost}
        for k, length in implied.items():
            predicted = expected_tokens_per_round(min(1.0, implied[1] - 1), k) * by_k[0] / cost[k]
            said = (f"{predicted:.1f}", percent(predicted / by_k[k] - 1)) if k > 1 else ("-", "-")
            implied_length, of_known = f"{length:.2f} implied", f"{cost[k]:.2f} of {known}"
            rate = f"{by_k[k]:.1f}"
            table.append([task, str(k), implied_length, "-", "-", of_known, rate, *said])
        within = all(1 <= length <= k + 1 for k, length in implied.items())
        others.append(
            f"The lengths of {task} are not published. Those that the round times of {known} imply"
            f" are {'possible' if within else 'impossible'} (at most K + 1); its throughputs are"
            " predicted with the alpha of the one at K = 1"
        )
    columns = ("task", "K", "length", "iid from K = 1", "error", "round / plain token")
    yield f"MTP by task, of {rows[0]['source']}, {rows[0]['target']} on {rows[0]['engine']}:"
    yield ""
    yield from markdown([*columns, "tokens/s published", "predicted", "error"], table)
    yield (
        f"The throughputs of {known} are predicted from the round times of the other two K: the"
        f" largest error is {100 * max(abs(error) for error in errors):.1f} %. {'. '.join(others)}."
        " Whether the error is of the alpha or of the round times cannot be decided: with experts"
        " on a CPU a verify reads the experts of all its positions, which are others on another"
        " text."
    )


if __name__ == "__main__":
    main()

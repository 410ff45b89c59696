"""Predictions are as uncertain as the cells that the same run measured say."""

from dataclasses import replace

import numpy as np
import pytest
from runs import FROZEN, analysed

from harness.analysis import analyse
from harness.analysis.caveats.timing import predictions_off
from harness.analysis.cells import Gap, PredictionError, prediction_errors
from harness.records import Cell
from harness.reporting.sentences.run import caveat
from harness.stats.jackknife import Variance, half_width, joined
from harness.storage import StoredRun, load
from harness.summary import Summary


def gap(value: float, error: float) -> Gap:
    return Gap(value, Variance(np.array(error**2), np.array(10.0)))


def error_of(values: list[float], error: float) -> PredictionError:
    cells = [Cell(name, 0.0, k) for k in (1, 2, 4, 8) for name in ("easy", "hard")]
    gaps = {cell: gap(value, error) for cell, value in zip(cells, values, strict=True)}
    return prediction_errors({**gaps, Cell("easy", 1.0, 16): None})[0.0]


def test_gaps_that_their_own_errors_explain_add_little_and_say_nothing() -> None:
    found = error_of((0.02 * np.random.default_rng(1).standard_normal(8)).tolist(), 0.02)
    assert found.variance.value**0.5 < 0.02
    assert [*predictions_off.of({0.0: found})] == []
    assert prediction_errors({Cell("easy", 0.0, 4): None}) == {}


def test_what_gaps_exceed_their_own_errors_by_is_added_to_every_prediction() -> None:
    rng, held, widths = np.random.default_rng(2), [], []
    for _ in range(400):
        off = np.repeat(0.06 * rng.standard_normal(4), 2)  # a K's rounds, in both sets
        found = error_of((off + 0.02 * rng.standard_normal(8)).tolist(), 0.02)
        other = 0.06 * rng.standard_normal() + 0.02 * rng.standard_normal()
        own = Variance(np.array(0.02**2), np.array(10.0))
        widths.append(float(half_width(joined([own, found.variance]), 0.95)))
        held.append(abs(other) < widths[-1])
    assert 0.9 < np.mean(held) < 0.98
    off = error_of([0.12, 0.1, -0.09, -0.11, 0.05, 0.08, 0.12, 0.1], 0.02)
    (said,) = predictions_off.of({0.0: off})
    assert (said.values["outside"], said.values["cells"], said.values["k"]) == (8, 8, 1)
    assert "outside their predictions' intervals: 8 of 8 at temperature 0" in caveat(said)


def slower(run: StoredRun, factor: float) -> Summary:
    """What a run would say had every speculative generation taken so much longer."""
    trials = tuple(
        replace(t, decode_s=t.decode_s * factor) if t.k and t.decode_s is not None else t
        for t in run.trials
    )
    made = replace(run, trials=trials)
    made.__dict__["traces"] = run.traces
    return analyse(made)


# A server's predictions follow the requests of its other prompt sets half of the way, and this run
# has too few prompts for intervals
@pytest.mark.parametrize(("kind", "factor", "rows"), [("sweep", 1.3, 12), ("server", 2.0, 0)])
def test_predictions_are_widened_where_every_measurement_says_otherwise(
    kind: str, factor: float, rows: int
) -> None:
    off, as_stored = slower(load(FROZEN / kind), factor), analysed(kind)
    said = [each.values["error"] for each in off.caveats if each.code == "predictions_off"]
    assert said
    assert all(0.5 * np.log(factor) < error < 1.3 * np.log(factor) for error in said)
    bounded, wider = 0, 0
    measured = {
        (row.prompt_set, row.temperature, row.k): row.speedup
        for row in off.results
        if row.source == "measured"
    }
    for before, after in zip(as_stored.results, off.results, strict=True):
        bounds = after.speedup_lo, after.speedup_hi, before.speedup_lo, before.speedup_hi
        known = [bound for bound in bounds if bound is not None]
        if after.source != "replayed" or len(known) < 4:
            continue
        bounded, (lo, hi, lo_before, hi_before) = bounded + 1, known
        wider += hi / lo > 1.2 * hi_before / lo_before
        assert lo < (measured[after.prompt_set, after.temperature, after.k] or 0.0) < hi
    assert (bounded, wider) == (rows, rows)

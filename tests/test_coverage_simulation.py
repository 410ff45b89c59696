"""Intervals and verdicts against simulated reports whose truth is known.

CI size; benchmarks/interval_coverage.py runs the same with thousands of reports. The bounds are
what the benchmark must reach, less three standard errors of the smaller simulation.
"""

import pytest
from simulated_reports import GAIN, NULL, WORLDS, reports

REPORTS = 8


def slack(share, simulations):
    return 3.0 * (share * (1.0 - share) / simulations) ** 0.5


@pytest.fixture(scope="module")
def nulls():
    """Every world at 24 prompts."""
    counts = [reports(world, NULL, 24, REPORTS, 1) for world in WORLDS]
    return sum(counts[1:], counts[0])


def test_intervals_cover_the_truth_as_often_as_they_say(nulls):
    for kind in ("cells", "alphas"):
        share = nulls[f"{kind} covered"] / nulls["cells"]
        assert 0.92 - slack(0.08, nulls["cells"]) < share
        assert share < 0.995, "an interval that is never wrong is too wide"
    for scope in ("workload", "set"):
        number = nulls[f"{scope} intervals"]
        covered, level = nulls[f"{scope} covered"] / number, nulls[f"{scope} level"] / number
        assert covered > level - 0.02 - slack(0.04, number)


def test_reports_seldom_speculate_where_nothing_is_to_be_gained(nulls):
    wrong = nulls["reports with speculate"] / nulls["reports"]
    assert wrong <= 0.05 + slack(0.05, nulls["reports"])


def test_a_real_gain_is_found():
    counts = reports("plain", 1.25 * GAIN, 24, 5, 1)
    assert counts["workload speculate"] >= 0.8 * counts["workload verdicts"]
    assert counts["reports with does_not_pay"] == 0

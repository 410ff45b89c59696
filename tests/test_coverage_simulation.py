"""Intervals and verdicts against simulated workloads whose truth is known.

CI size; benchmarks/interval_coverage.py runs the same with thousands of workloads. The bounds are
what the benchmark must reach, less three standard errors of the smaller simulation.
"""

import pytest
from workloads import (
    Steps,
    coverage,
    decisions,
    null_steps,
    population_replays,
)


def slack(share, simulations):
    return 3.0 * (share * (1.0 - share) / simulations) ** 0.5


@pytest.fixture(scope="module")
def replays():
    return population_replays(0, 800)


def test_intervals_of_replayed_speedups_and_alphas_cover_at_24_prompts(replays):
    simulations = 120
    speedup, alpha = coverage(replays, [24], simulations, draws=1000)[24]
    # Candidates of one workload are not independent, so the simulations are what is counted.
    assert speedup > 0.92 - slack(0.08, simulations)
    assert alpha > 0.92 - slack(0.08, simulations)
    assert speedup < 0.995, "an interval that is never wrong is too wide"


def test_the_selection_over_all_drafts_and_k_seldom_speculates_on_a_null(replays):
    simulations = 60
    counts = decisions(replays, null_steps(replays), 24, simulations)
    assert counts["speculate"] <= simulations * (0.05 + slack(0.05, simulations))


def test_step_times_taken_as_exact_would_speculate_on_nulls_more_often(replays):
    """The reason why the samples of the step times are dealt into the folds as well."""
    steps = null_steps(replays)
    exact = decisions(replays, steps, 48, 30, sampled=False)["speculate"]
    assert exact > decisions(replays, steps, 48, 30)["speculate"] + 1


def test_a_real_gain_is_found(replays):
    verify = tuple(1.0 + 0.02 * n for n in range(9))
    steps = {draft: Steps(0.25, 1.0, verify) for draft in replays.drafts}
    counts = decisions(replays, steps, 24, 15)
    assert counts["speculate"] >= 12

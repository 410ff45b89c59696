"""A snapshot: greedy texts compared with plain decoding's, and tests of distributions."""

from harness.analysis.caveats import of_setup
from harness.analysis.caveats.texts import routing_ties
from harness.analysis.cells import measured_rows
from harness.analysis.failures import failures
from harness.analysis.lossless import text_checks
from harness.analysis.setup import Setup, run_facts
from harness.summary import DistributionTest, Summary


def analyse_snapshot(setup: Setup) -> Summary:
    """The comparisons and tests of a snapshot, and what was decoded."""
    run = setup.run
    checks = text_checks(run.trials, run.checks)
    tests = tuple(check for check in run.checks if isinstance(check, DistributionTest))
    rows = measured_rows(run.trials, model=setup.model, draft=setup.draft, times={})
    return Summary(
        run=run_facts(setup, rows),
        failures=failures(setup, checks=checks, tests=tests),
        caveats=(*of_setup(setup), *routing_ties.of(checks)),
        results=tuple(rows),
        text_checks=tuple(checks),
        distribution_tests=tests,
    )

"""Does speculation leave the output unchanged? Texts at T = 0, distributions at T > 0."""

from dataclasses import replace
from typing import Any, cast

from harness.commands.checks import check_run
from harness.commands.dry_run import print_snapshot
from harness.commands.pair import Pair, open_pair
from harness.commands.progress import progress
from harness.commands.requests import check_texts, request, run_requests, with_turns
from harness.commands.run_lifecycle import (
    Outcome,
    begin,
    concluded,
    load_prompts,
    measuring,
    resumed,
    unless_broken,
)
from harness.commands.tasks import Task, snapshot_tasks
from harness.config import SnapshotConfig
from harness.measurement.lossless import distribution_tests
from harness.records import GREEDY, NotMeasured, UserError
from harness.stats.jackknife import holm
from harness.storage import RunFolder
from harness.summary import CheckResult, DistributionTest

# A distribution differs where its p-value, by Holm's method over all tests, is below this.
SIGNIFICANCE = 1e-3


def run(config: SnapshotConfig) -> Outcome:
    """Compare texts and distributions; status 1 where anything is FAIL or did not complete."""
    if not any(config.k):
        raise UserError(f"k={config.k}: a snapshot needs a K of at least 1")
    prompts = load_prompts(config)
    check_run(config, prompts, [config.draft])
    if config.dry_run:
        print_snapshot(config, prompts)
        return Outcome(None)
    folder = resumed(config, "snapshot")
    pair = open_pair(config, prompts)
    folder = begin(config, "snapshot", folder, pair.describe())
    with measuring(folder, pair.target_model.device):
        pair = with_turns(folder, pair, config)
        tasks = snapshot_tasks(pair.prompts, config)
        requests = [request(pair, config, task) for task in tasks]
        models = (pair.target_model, pair.drafting)
        trials = run_requests(folder, requests, lambda _: models, "generating")
        check_texts(folder, trials, pair, config, _tests(folder, pair, config))
    return concluded(folder, verbose=config.verbose)


def _tests(folder: RunFolder, pair: Pair, config: SnapshotConfig) -> list[DistributionTest]:
    """One test per temperature, K and offset, with Holm's result over all of them.

    A cell that meets logits that are not finite is noted in the manifest. One bin can show a token
    outside the support, nothing else, so that it leaves a distribution untested.
    """
    sampled = [value for value in config.temperature if value != GREEDY]
    cells = [(k, value) for value in sampled for k in config.speculative_ks]
    tests: list[DistributionTest] = []
    with progress("drawing", len(cells)) as tick:
        for k, temperature in cells:
            cell = NotMeasured("distribution_test", k=k, temperature=temperature)
            with unless_broken(folder, cell):
                tests += _cell_tests(pair, config, k, temperature)
            tick()
    for place, adjusted in enumerate(holm([test.p_value for test in tests])):
        passed: CheckResult = "PASS" if tests[place].bins > 1 else "UNTESTED"
        result = "FAIL" if (adjusted or 0.0) < SIGNIFICANCE else passed
        tests[place] = replace(tests[place], result=result)
    return tests


def _cell_tests(
    pair: Pair, config: SnapshotConfig, k: int, temperature: float
) -> list[DistributionTest]:
    asked = request(pair, config, Task(pair.prompts[0], temperature, k, 0))
    drafting = pair.drafting
    draft = cast("Any", drafting(asked) if callable(drafting) else drafting)
    return distribution_tests(
        pair.target_model,
        draft,
        [entry.tokens for entry in pair.prompts],
        num_draft_tokens=k,
        sampling=asked.sampling,
        rule=asked.rule,
        draws=config.draws,
        seed=config.seed,
    )

"""Profiles: how fast each model is here, and the most that speculation could gain.

Single steps, curves over contexts and batches, rounds, and plain decoding with each model.
"""

from collections.abc import Callable
from itertools import product

from harness.analysis.round_costs import merged
from harness.analysis.unstable import unstable_steps
from harness.commands.checks import beyond, check_run
from harness.commands.dry_run import print_profile
from harness.commands.pair import ModelPair, open_pair
from harness.commands.progress import progress
from harness.commands.requests import request, run_requests, with_turns
from harness.commands.run_lifecycle import (
    Outcome,
    begin,
    concluded,
    load_prompts,
    measuring,
    resumed,
)
from harness.commands.tasks import profile_tasks
from harness.commands.timing import measure_steps, visits_of_pair
from harness.config import ProfileConfig
from harness.measurement import step_times
from harness.measurement.generations import Request
from harness.measurement.round_times import RoundVisits
from harness.models.cached import CachedModel
from harness.models.memory import check_fits
from harness.records import GREEDY, SkippedCell, StepTiming, UserError
from harness.storage import RunFolder

AUTO_CONTEXTS = (128, 512, 2048)
AUTO_BATCHES = (1, 4, 16)
# Time budget of the curves where no contexts or batches are given, seconds
AUTO_SECONDS = 45.0
# Time budget of capturing and compiling their CUDA graphs, in addition to it
AUTO_RECORDING_SECONDS = 300.0


def run(config: ProfileConfig) -> Outcome:
    """Time the steps of both models, decode plainly with each; status 1 where that failed."""
    prompts = load_prompts(config)
    check_run(config, prompts, [config.draft])
    if config.dry_run:
        print_profile(config, prompts)
        return Outcome(None)
    folder = resumed(config, "profile")
    pair = open_pair(config, prompts)
    assert isinstance(pair, ModelPair)  # other kinds are refused
    folder = begin(config, "profile", folder, pair.describe())
    with measuring(folder, pair.target_model.device):
        pair = with_turns(folder, pair, config)
        visits = visits_of_pair(folder, pair, config, [GREEDY])
        visits.begin()
        _measure(folder, pair, config, visits)
        requests, models = _plain_requests(pair, config)
        run_requests(
            folder, requests, lambda entry: (models[entry.cell], None), "decoding", visits.up_to
        )
    return concluded(folder, verbose=config.verbose)


def _plain_requests(
    pair: ModelPair, config: ProfileConfig
) -> tuple[list[Request], dict[str, CachedModel]]:
    requests: dict[str, Request] = {}
    models: dict[str, CachedModel] = {}
    for task in profile_tasks(pair.prompts, config):
        for loaded, model in pair.opened.values():
            made = request(pair, config, task, loaded)
            requests.setdefault(made.cell, made)  # a self-draft is one model
            models.setdefault(made.cell, model)
    return [*requests.values()], models


def _measure(
    folder: RunFolder, pair: ModelPair, config: ProfileConfig, visits: RoundVisits
) -> None:
    """Time steps and curves, unless the folder has them; some of the `visits` lie between them."""
    timings = measure_steps(folder, pair, config)
    visits.up_to(0.25)
    # An interrupted run may have noted its curves in the manifest but not stored them
    expected = folder.manifest.timed_forwards
    if folder.manifest.skipped_cells is None or expected not in (None, len(timings)):
        timed, skipped = _time_curves(pair, config)
        timings = merged([*timings, *timed])
        folder.note(skipped_cells=skipped, timed_forwards=len(timings))
        folder.write_timings(timings)
    visits.up_to(0.5)


def _time_curves(
    pair: ModelPair, config: ProfileConfig
) -> tuple[list[StepTiming], list[SkippedCell]]:
    contexts = AUTO_CONTEXTS if config.contexts == "auto" else config.contexts
    batches = AUTO_BATCHES if config.batches == "auto" else config.batches
    cells = sorted(product(contexts, batches), key=lambda cell: cell[::-1])  # cheapest first
    auto = config.contexts == "auto" and config.batches == "auto"
    visits = step_times.CURVE_VISITS * len(cells)
    with progress(step_times.TIMING_CURVES, visits) as tick:
        return step_times.time_curves(
            pair.timed,
            max(config.k),
            cells,
            refused=_refusal(pair, config),
            budget_s=AUTO_SECONDS if auto else None,
            recording_budget_s=AUTO_RECORDING_SECONDS if auto else None,
            doubtful=lambda timings: bool(unstable_steps(timings)),
            tick=tick,
            say=tick.say,
        )


def _refusal(pair: ModelPair, config: ProfileConfig) -> Callable[[int, int], str | None]:
    """The reason why a cell must not be tried, or None."""
    needs = [one for one in (pair.target.memory_need, pair.draft.memory_need) if one is not None]

    def refused(context: int, batch: int) -> str | None:
        for model in (pair.target_model, pair.draft_model):
            if model.rewinding != "crop":
                return "a recurrent state cannot be rewound for several sequences"
        for loaded in (pair.target, pair.draft):
            if reason := beyond(loaded, context, max(config.k)):
                return reason
        try:
            check_fits(needs, context + max(config.k) + 1, batch=batch, loaded=True)
        except UserError as error:
            return str(error)
        return None

    return refused

"""One pair, measured: step times, then K x temperature x prompt sets, then the verdict.

With `until=decided` the K that is best by replay is measured, until every verdict is decided
(`harness.commands.sweep_looks`); with `until=all` every K is, on every prompt.

Greedy texts of speculation are compared with those of plain decoding: a pair that changes them gets
no verdict. The texts of plain decoding are the target's own, so the draft scores them too, and
every cell is replayed next to its measurement, early stops included. With `mode=replay` only the
texts are generated, in batches, and no speculative generation is run. With `latency_from` rounds
are those of another engine, and nothing is timed here.
"""

from time import monotonic

from harness.commands.checks import Problems, check_run
from harness.commands.completions import check_texts, completions, score_pair, with_turns
from harness.commands.dry_run import print_sweep
from harness.commands.other_runs import check_draft_of, check_target_of, costs_of_sweep
from harness.commands.pair import Pair, open_pair
from harness.commands.requests import models_of, requests_of, run_requests
from harness.commands.run_lifecycle import (
    Outcome,
    begin,
    concluded,
    load_prompts,
    measuring,
    resumed,
)
from harness.commands.run_time import RunTime, Stopwatch, said_beforehand
from harness.commands.sweep_looks import measure_in_looks
from harness.commands.tasks import replayed_prompts, sweep_tasks
from harness.commands.timing import measure_steps, visits_of_pair
from harness.config import SweepConfig, rates_for
from harness.measurement.round_times import RoundVisits
from harness.storage import RunFolder
from harness.storage.manifest import SyntheticAcceptance


def run(config: SweepConfig) -> Outcome:
    """Measure the grid; status 1 where a generation failed or speculation changed a greedy text."""
    begun = monotonic()
    prompts = replayed_prompts(load_prompts(config), config)
    problems = Problems()
    costs = problems.of(costs_of_sweep, config)
    check_run(config, prompts, [config.draft], problems)
    if config.dry_run:
        print_sweep(config, prompts)
        return Outcome(None)
    folder = resumed(config, "sweep")
    pair = open_pair(config, prompts)
    described = pair.describe()
    check_target_of(costs, config.model, described.models["target"])
    entry = described.models.get("draft")
    check_draft_of(costs, config.draft.name, config.draft.kind, entry, config.temperature)
    folder = begin(config, "sweep", folder, described)
    if costs is not None:
        folder.note(engine_costs=costs)
    if (acceptance := config.decode.acceptance) is not None:
        folder.note(
            synthetic_acceptance=[
                SyntheticAcceptance(name, float(temperature), k, rates_for(acceptance, k))
                for name in dict.fromkeys(prompt.prompt_set for prompt in prompts)
                for temperature in config.temperature
                for k in config.speculative_ks
            ]
        )
    said = said_beforehand(config, [config.draft], prompts)
    with measuring(folder, pair.target_model.device):
        pair = with_turns(folder, pair, config)
        if config.mode == "replay" or 0.0 not in config.temperature:  # no greedy texts to compare
            pair.check_lengths()
        if costs is None:
            _measure(folder, pair, config, said, begun)
        else:  # nothing is timed here
            completions(folder, pair, config)
            score_pair(folder, pair, config)
    return concluded(folder, verbose=config.verbose)


def _measure(
    folder: RunFolder, pair: Pair, config: SweepConfig, said: RunTime | None, begun: float
) -> None:
    """Time rounds and steps, and measure the cells among them."""
    in_looks, watch = config.until == "decided", Stopwatch(folder, config.budget_s, begun)
    visits = visits_of_pair(folder, pair, config, config.temperature, in_looks=in_looks)
    visits.begin()
    measure_steps(folder, pair, config)
    if in_looks:
        measure_in_looks(folder, pair, config, visits, watch, said)
    else:
        _measure_all(folder, pair, config, visits)


def _measure_all(folder: RunFolder, pair: Pair, config: SweepConfig, visits: RoundVisits) -> None:
    """Every cell, or with mode=replay the texts alone, and their scores."""
    synthetic = config.decode.acceptance is not None
    if config.mode == "replay":
        visits.up_to(0.5)
        completions(folder, pair, config)
    else:
        requests = requests_of(pair, config, sweep_tasks(pair.prompts, config).measured)
        models = models_of(folder, pair, config)
        trials = run_requests(folder, requests, models, "generating", visits.up_to)
        if not synthetic:  # else the texts are not the target's
            check_texts(folder, trials, pair, config)
    # How far a draft drafts off the text is not replayed with a penalty
    if not synthetic and not (config.decode.penalises and config.thresholds):
        score_pair(folder, pair, config)
    visits.up_to(1.0)

"""How fast is each model here, and what could speculation gain at most?"""

from collections.abc import Sequence
from dataclasses import replace

from harness import prompts as prompt_sets
from harness.analysis import told
from harness.analysis.cells import measured_rows
from harness.analysis.latency import reference, step_times
from harness.analysis.waterfall import RoundParts, round_parts
from harness.commands import execute, physics
from harness.commands.outcome import Outcome
from harness.commands.pair import Pair, open_configured
from harness.commands.plan import print_profile_plan
from harness.commands.planned import modelled_cards, print_cards
from harness.commands.requests import request
from harness.commands.running import concluded, running
from harness.commands.texts import with_pair_turns
from harness.config import ProfileConfig
from harness.measurement.generations import Request
from harness.models.cached import CachedModel
from harness.records import ResultRow, StepTiming, Summary, Trial
from harness.reporting.reading import latency_of
from harness.reporting.tables.bounds import bound_sentences
from harness.storage import RunFolder, StoredRun, load
from harness.summary import StepBound
from harness.theory.roofline import shortest_context, step_bounds
from harness.theory.speedup import StepTimes, ideal_speedup

GREEDY = 0.0


def run(config: ProfileConfig) -> Outcome:
    """Time the steps of both models, decode plainly with each, store and show the ceilings.

    Returns:
        The run folder; status 1 where a generation failed.

    Raises:
        UserError: a value, a model, a prompt or a folder that cannot be used.
    """
    if config.dry_run:
        print_profile_plan(config, prompt_sets.load(config.prompts))
        print_cards(config)
        return Outcome(None)
    resumed = execute.resumed(config, "profile")
    pair = open_configured(config)
    physics.curve_cells(
        pair, config
    )  # typed ones that cannot be are refused before a folder is made
    folder = resumed or execute.create(config, "profile")
    execute.note_or_check(folder, pair.describe(), config.seed)
    with running(folder):
        pair = with_pair_turns(folder, pair, config)
        timings = physics.measure(folder, pair, config)
        requests, models = _plan(pair, config)
        trials = execute.run_requests(
            folder, requests, lambda entry: (models[entry.cell], None), "decoding"
        )
    return concluded(folder, lambda: finish_profile(folder, config, timings, trials))


def _plan(pair: Pair, config: ProfileConfig) -> tuple[list[Request], dict[str, CachedModel]]:
    """Plain decoding with each model on every prompt, side by side, and who decodes what."""
    requests: list[Request] = []
    models: dict[str, CachedModel] = {}
    players = ((pair.target, pair.target_model), (pair.draft, pair.draft_model))
    for repetition in range(config.repetitions):
        for entry in pair.prompts:
            for loaded, model in players:
                made = request(pair, config, entry, 0, GREEDY, repetition, decoder=loaded)
                if made.cell not in models:  # a self-draft is one model
                    requests.append(made)
                    models[made.cell] = model
    return requests, models


def finish_profile(
    folder: RunFolder,
    config: ProfileConfig,
    timings: Sequence[StepTiming],
    trials: Sequence[Trial],
) -> Summary:
    """Derive results.csv and summary.json and write them; a model without trials has no row."""
    times, stored = step_times(timings), load(folder.path)
    measured = [
        row for conf in (config.model, config.draft) for row in _plain_row(trials, conf.name)
    ]
    folder.write_results([*measured, *_ceilings(config, times)])
    bounds = step_bounds(latency_of(stored))
    rounds = round_parts(stored.parts)
    summary = Summary(
        verdict=None,
        failures=(*told.failures(trials), *told.not_measured(stored.manifest)),
        caveats=(
            *told.caveats(stored, measured, reference(timings)),
            *bound_sentences(bounds, times.c),
        ),
        headline={**told.headline(timings), **_physics_headline(stored, bounds, rounds)},
    )
    planned = modelled_cards(config, folder.manifest.get("models"))
    folder.write_summary(
        summary,
        {"modelled_cards": planned, "skipped_cells": folder.manifest.get("skipped_cells")},
    )
    return summary


def _physics_headline(
    stored: StoredRun, bounds: Sequence[StepBound], rounds: Sequence[RoundParts]
) -> dict[str, told.Number]:
    """The bandwidth and what it makes of the steps, where they were timed."""
    numbers: dict[str, told.Number] = {}
    bandwidth = stored.manifest.get("bandwidth") or {}
    if bandwidth:
        numbers[f"{bandwidth['source']}_bandwidth_gb_s"] = bandwidth["gb_s"]
    for bound in shortest_context(bounds):
        numbers[f"{bound.role}_mbu"] = bound.mbu
        numbers[f"{bound.role}_step_overhead_share"] = bound.overhead_share
    if rounds:
        numbers["largest_unexplained_share"] = max(
            (entry.unexplained_share for entry in rounds), key=abs
        )
    return numbers


def _plain_row(trials: Sequence[Trial], model: str) -> list[ResultRow]:
    """One row for a model over all prompt sets together; none where it decoded nothing."""
    own = [
        replace(trial, prompt_set="all", prompt=f"{trial.prompt_set}/{trial.prompt}")
        for trial in trials
        if trial.model == model
    ]
    rows = measured_rows(own, model=model, draft="", times=None)
    return [replace(row, draft=None) for row in rows]


def _ceilings(config: ProfileConfig, times: StepTimes) -> list[ResultRow]:
    """For each K: the speedup if all of the draft were accepted, and the alpha that breaks even."""
    return [
        ResultRow(
            model=config.model.name,
            draft=config.draft.name,
            prompt_set=None,
            temperature=None,
            k=k,
            source="theory",
            status="complete",
            alpha=1.0,
            tokens_per_round=k + 1.0,
            ms_per_token=1e3 * times.round_s(k) / (k + 1),
            tokens_per_second=(k + 1) / times.round_s(k),
            speedup=ideal_speedup(k, times.c, times.v(k)),
            breakeven_alpha=times.break_even_alpha(k),
        )
        for k in range(1, max(config.k) + 1)
    ]

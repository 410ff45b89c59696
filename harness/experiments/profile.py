"""How fast is each model here, and what could speculation gain at most?"""

from collections.abc import Sequence
from dataclasses import replace

from harness import prompts as prompt_sets
from harness import reporting
from harness.config import ProfileConfig
from harness.experiments import execute, finish
from harness.experiments.outcome import Outcome
from harness.experiments.pair import Pair, open_configured
from harness.experiments.plan import print_plan
from harness.experiments.requests import request
from harness.experiments.running import running
from harness.experiments.validate import validated
from harness.measurement.trials import Request
from harness.models.cached import CachedModel
from harness.records import ResultRow, StepTiming, Summary, Trial
from harness.storage import RunFolder, load
from harness.theory.cells import measured_rows
from harness.theory.speedup import StepTimes, ideal_speedup
from harness.theory.steps import step_times

GREEDY = 0.0


def run(config: ProfileConfig) -> Outcome:
    """Time the steps of both models, decode plainly with each, store and show the ceilings.

    Returns:
        The run folder; status 1 where a generation failed.

    Raises:
        UserError: a value, a model, a prompt or a folder that cannot be used.
    """
    validated(config)
    if config.dry_run:
        print_plan(config, prompt_sets.load(config.prompts), [GREEDY])
        return Outcome(None)
    resumed = execute.resumed(config, "profile")
    pair = open_configured(config)
    folder = resumed or execute.create(config, "profile")
    execute.note_or_check(folder, pair.describe(), config.seed)
    with running(folder):
        timings = execute.measure_steps(folder, pair, config)
        requests, models = _plan(pair, config)
        trials = execute.run_requests(
            folder, requests, lambda entry: (models[entry.cell], None), "decoding"
        )
        summary = _store(folder, config, timings, trials)
    folder.update_manifest({"status": "failed" if summary.failures else "complete"})
    stored = load(folder.path)
    reporting.render(stored)
    reporting.show(stored)
    return Outcome(folder.path, 1 if summary.failures else 0)


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


def _store(
    folder: RunFolder,
    config: ProfileConfig,
    timings: Sequence[StepTiming],
    trials: Sequence[Trial],
) -> Summary:
    times = step_times(timings)
    measured = [_plain_row(trials, conf.name) for conf in (config.model, config.draft)]
    folder.write_results([*measured, *_ceilings(config, times)])
    summary = Summary(
        verdict=None,
        failures=tuple(finish.failures(trials)),
        caveats=tuple(finish.caveats(load(folder.path), measured, timings)),
        headline=finish.headline(timings),
    )
    folder.write_summary(summary)
    return summary


def _plain_row(trials: Sequence[Trial], model: str) -> ResultRow:
    """One row for a model over all prompt sets together."""
    own = [
        replace(trial, prompt_set="all", prompt=f"{trial.prompt_set}/{trial.prompt}")
        for trial in trials
        if trial.model == model
    ]
    return replace(measured_rows(own, model=model, draft="", times=None)[0], draft=None)


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

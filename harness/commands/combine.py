"""Finished auditions of one target on several cards, put together: what does a token cost on each?

The result is an audition run of the best card, with the ranking of all cards in its manifest. No
model is loaded.
"""

from collections.abc import Sequence
from dataclasses import asdict

from harness.analysis import analyse
from harness.analysis.cards import rank_cards
from harness.commands.run_lifecycle import Outcome, concluded, running
from harness.config import AuditionConfig
from harness.records import Failure, UserError
from harness.storage import RunFolder, load

KEPT = ("environment", "models", "prompts", "prompts_sha256", "seed")


def run(config: AuditionConfig, failures: Sequence[Failure] = ()) -> Outcome:
    """Rank the cards of the runs that `combine` names; store, render and show the ranking.

    Args:
        config: only `combine` and `results_root` matter; all else is the runs' own.
        failures: of machines that brought nothing back.

    Returns:
        The combined run; status 1 where a run, or a draft in one, failed.

    Raises:
        UserError: a folder that is no finished audition, or runs that are not of one audition.
    """
    if not config.combine:
        raise UserError("combine=[]: name at least one audition's folder")
    runs = [load(folder) for folder in config.combine]
    summaries = [analyse(run) for run in runs]
    ranked = rank_cards(runs, summaries)
    best = runs[ranked.best]
    others = [
        Failure(f"{run.folder.name}: {failure.where}", failure.error)
        for run, summary in zip(runs, summaries, strict=True)
        for failure in summary.failures
    ]
    failed = [asdict(failure) for failure in (*others, *failures)]
    settings = {"combine": list(config.combine), "results_root": config.results_root}
    folder = RunFolder.create(
        config.results_root,
        "audition",
        [best.config["model"]["name"], "cards"],
        {**best.config, **settings, "resume": None},
    )
    with running(folder):
        folder.update_manifest(
            {
                **{key: best.manifest.get(key) for key in KEPT},
                "combined": [run.folder.name for run in runs],
                "cards": [asdict(row) for row in ranked.cards],
                "card_drafts": [asdict(row) for row in ranked.drafts],
                "audition": {**(best.manifest.get("audition") or {}), "failures": failed},
            }
        )
        for trial in best.trials:
            if trial.status == "ok":  # what failed is noted above
                folder.append_trial(trial)
        folder.write_traces(best.traces)
        folder.write_latency(summaries[ranked.best].latency, best.timings)
    return concluded(folder)

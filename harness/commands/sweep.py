"""One pair, measured: step times, then K x temperature x prompt sets, then the verdict.

Greedy texts of speculation are compared with those of plain decoding: a pair that changes them gets
no verdict. The texts of plain decoding are the target's own, so the draft scores them too, and
every cell is replayed beside its measurement. With `mode=replay` only the texts are generated, in
batches, and no speculative generation is run.
"""

from collections.abc import Sequence

from harness import prompts as prompt_sets
from harness.analysis.finish import finish_sweep
from harness.commands import execute, physics
from harness.commands.greedy import GreedyText
from harness.commands.imposed import as_stored, imposed_rates, stored_rates
from harness.commands.outcome import Outcome
from harness.commands.pair import check_lengths, open_configured
from harness.commands.plan import print_plan
from harness.commands.requests import plan
from harness.commands.running import concluded, running, unless_broken
from harness.commands.texts import (
    compare_greedy,
    score_pair,
    with_pair_turns,
    write_pair_texts,
)
from harness.config import SweepConfig
from harness.storage import load


def run(config: SweepConfig) -> Outcome:
    """Measure a pair over the grid and store, render and show what came out.

    Returns:
        The run folder; status 1 where a generation failed, or a greedy text is not the target's.

    Raises:
        UserError: a value, a model, a prompt or a folder that cannot be used.
    """
    if config.dry_run:
        print_plan(config, prompt_sets.load(config.prompts), config.temperature)
        return Outcome(None)
    resumed = execute.resumed(config, "sweep")
    imposed = stored_rates(load(resumed.path)) if resumed else {}
    imposed = imposed or imposed_rates(config, prompt_sets.load(config.prompts))
    pair = open_configured(config)
    folder = resumed or execute.create(config, "sweep")
    execute.note_or_check(folder, pair.describe(), config.seed)
    if imposed:
        folder.update_manifest({"imposed_acceptance": as_stored(imposed)})
    with running(folder):
        pair = with_pair_turns(folder, pair, config)
        if config.mode == "replay" or 0.0 not in config.temperature:  # no greedy texts to compare
            check_lengths(pair, config)
        physics.measure_steps(folder, pair, config)
        texts: Sequence[GreedyText] = ()
        if config.mode == "replay":
            write_pair_texts(folder, pair, config)
        else:
            requests = plan(pair, config, config.k, config.temperature, imposed)
            models = (pair.target_model, pair.draft_model)
            trials = execute.run_requests(folder, requests, lambda _: models, "generating")
            if not imposed:  # else the texts are not the target's
                texts = compare_greedy(trials, pair, config.decode.repetition_penalty)
        if not imposed and config.decode.stop == "none":
            with unless_broken(folder, "the draft's scores of the target's text"):
                score_pair(folder, pair, config)
    return concluded(folder, lambda: finish_sweep(folder, load(folder.path), texts))

"""Compare every speculative greedy text with the plain one of its prompt; stored in checks.jsonl.

In a run at temperature 0 the k = 0 trial of a prompt is the plain text, and speculation must emit
the same. Where it does not, only the models can tell whether that is a tie within rounding
(`harness.measurement.lossless`).
"""

from collections.abc import Sequence

from harness.analysis.lossless import with_plain
from harness.commands.pair import Pair
from harness.config import SnapshotConfig, SweepConfig
from harness.measurement.lossless import compare_texts
from harness.records import Trial
from harness.storage import RunFolder
from harness.summary import DistributionTest, TextCheck


def check_texts(
    folder: RunFolder,
    trials: Sequence[Trial],
    pair: Pair,
    config: SweepConfig | SnapshotConfig,
    tests: Sequence[DistributionTest] = (),
) -> list[TextCheck]:
    """Compare the greedy texts and store the comparisons, with a snapshot's tests after them."""
    prompts = {(e.prompt.prompt_set, e.prompt.id): e.tokens for e in pair.prompts}
    checks: list[TextCheck] = []
    for trial, plain in with_plain(trials):
        comparison = compare_texts(
            pair.target_model,
            prompts[trial.prompt_set, trial.prompt],
            plain.tokens or (),
            trial.tokens or (),
            trial.k,
            pair.target.network.dtype,
            config.decode.repetition_penalty,
        )
        checks.append(
            TextCheck(
                trial.prompt_set,
                trial.prompt,
                trial.repetition,
                trial.k,
                **comparison._asdict(),
                acceptance_rate=(trial.accepted or 0) / trial.drafted if trial.drafted else None,
            )
        )
    folder.write_checks([*checks, *tests])
    return checks

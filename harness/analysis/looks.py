"""A run that is measured in looks: which K to measure, and whether to go on.

A sweep decodes every prompt plainly and replays it at every K. It then measures one K, the best by
replay, next to plain decoding, and looks at its verdicts four times on the way
(`harness.stats.two_phase`). What decides here is what decides in the report, so that a run that
stopped because everything was decided is one whose report decides everything.
"""

from dataclasses import replace

from harness.analysis.setup import Setup
from harness.analysis.sweep_and_audition import MeasuredSweep
from harness.analysis.verdict import settled
from harness.storage import StoredRun
from harness.summary import VerdictReason

# Of what is undecided, what no further pair of the same prompts would change
FIXED: frozenset[VerdictReason] = frozenset(
    ("too_few_prompts", "too_few_in_set", "no_complete_prompt", "greedy_texts_differ")
)


def choice(run: StoredRun, temperature: float) -> int | None:
    """The K to measure at a temperature: the best on the whole workload, by replay.

    The traces of the run say how many rounds each K takes, its timed rounds what a round costs. All
    prompts that were decoded plainly count, and none of the measured pairs.

    Args:
        run: with traces, and visits of round times (`harness.storage.load`).
        temperature: one of the run's.

    Returns:
        None where nothing was replayed or no round was timed at this temperature.
    """
    sweep = MeasuredSweep(Setup(run))
    ranking = sweep.ranking(sweep.setup.rule, temperature)
    if ranking is None:
        return None
    speedups = ranking.evidence.speedups(sweep.setup.weights)
    return max(speedups, key=speedups.__getitem__).k


def decided(run: StoredRun, look: int) -> bool:
    """Whether every question of the run is decided after so many looks.

    The questions are those that the report answers with measured pairs: the whole workload and each
    of its prompt sets, at every temperature. The bounds are those of this look. A report of a run
    whose manifest carries the same number of looks says the same.

    Args:
        run: with traces, round times and the trials so far.
        look: 1 to 4, of four.
    """
    looks = run.manifest.looks
    if looks is None:
        return False
    made = replace(run.manifest, looks=replace(looks, made=look))
    sweep = MeasuredSweep(Setup(replace(run, manifest=made)))
    return bool(sweep.answered) and all(
        settled(answer) or (entry.question.evidence.pairs is not None and answer.reason in FIXED)
        for entry in sweep.answered
        for answer in (entry.workload, *entry.sets)
    )

"""A run that is measured in looks: which K to measure, and whether to go on.

A sweep decodes every prompt plainly and replays it at every K. It then measures one K, the best by
replay, next to plain decoding, and looks at its verdicts four times on the way
(`harness.stats.two_phase`). What decides here is what decides in the report, so that a run that
stopped because everything was decided is one whose report decides everything.

A server run does without looks, but chooses its K likewise, of the few whose servers it starts.
"""

from collections.abc import Sequence
from dataclasses import replace

from harness.analysis.server_run import ServedRun
from harness.analysis.setup import Setup
from harness.analysis.sweep_and_audition import MeasuredSweep
from harness.analysis.verdict import settled
from harness.storage import StoredRun
from harness.storage.manifest import ChosenK
from harness.summary import VerdictReason

# Of the best predicted speedup, so much less at most may be the best, by the error of a line over K
NEAR_BEST = 0.06
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


# ---- servers -------------------------------------------------------------------------------------


def k_between(run: StoredRun) -> int | None:
    """The K, neither the smallest nor the largest, whose rounds are to be priced too.

    The round times of these two give every other K's, on a line, about 2 % off and up to 6 %
    (docs/validation.md). So it is a K between them that may be the best of all, at the first
    temperature that has one.

    Args:
        run: a server run with plain texts, their traces and probes of both.

    Returns:
        None where one of these two is clearly the best at every temperature, or nothing can tell.
    """
    served = ServedRun(Setup(run))
    for temperature in served.temperatures:
        speedups = served.predicted_speedups(temperature)
        least = (1.0 - NEAR_BEST) * max(speedups.values(), default=0.0)
        near = [k for k in sorted(speedups)[1:-1] if speedups[k] >= least]
        if near:
            return max(near, key=speedups.__getitem__)
    return None


def best_started(run: StoredRun, started: Sequence[int]) -> tuple[ChosenK, ...]:
    """The K to measure at every temperature: by replay, the best of those that have a server.

    Args:
        run: as of `k_between`, with probes of every K in `started`.
        started: the K.

    Returns:
        Empty where their requests do not tell what rounds cost, or no text was replayed.
    """
    served = ServedRun(Setup(run))
    chosen: list[ChosenK] = []
    for temperature in served.setup.temperatures:
        speedups = served.predicted_speedups(temperature)
        if not speedups.keys() >= {*started}:
            return ()
        chosen.append(ChosenK(temperature, max(started, key=speedups.__getitem__)))
    return tuple(chosen)

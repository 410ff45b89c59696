"""A run that is measured in looks: which K to measure, and whether to go on.

A sweep decodes every prompt plainly and replays it at every K. It then measures one K, the best by
replay, next to plain decoding, and looks at its verdicts four times on the way
(`harness.stats.two_phase`). What decides here is what decides in the report, so that a run that
stopped because everything was decided is one whose report decides everything.
"""

from harness.storage import StoredRun


def choice(run: StoredRun, temperature: float) -> int | None:
    """The K to measure at a temperature: the best on the whole workload, by replay.

    The traces of the run say how many rounds each K takes, its timed rounds what a round costs. All
    prompts that were decoded plainly count, none of the measured pairs does, so that the choice
    is the same at every look and when a run is resumed.

    Args:
        run: with traces, and visits of round times (`harness.storage.load`).
        temperature: one of the run's.

    Returns:
        None where nothing was replayed or no round was timed at this temperature.
    """
    raise NotImplementedError


def decided(run: StoredRun, look: int) -> bool:
    """Whether every question of the run is decided after so many looks.

    The questions are those that the report answers with measured pairs: the whole workload and each
    of its prompt sets, at every temperature. The bounds are those of this look. A report of a run
    whose manifest carries the same number of looks says the same.

    Args:
        run: with traces, round times and the trials so far.
        look: 1 to 4, of four.
    """
    raise NotImplementedError

"""Simulated sweeps of one draft at eight K, in two phases.

For benchmarks/verdict_power.py and the tests of two-phase verdicts. A report has two temperatures
of two prompt sets. N prompts are decoded plainly and replayed, and the best K is measured on a part
of them next to plain decoding, in looks.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from simulated_reports import (
    CANDIDATES,
    ERROR,
    GAIN,
    KS,
    NULL,
    SETS,
    TEMPERATURES,
    World,
    counted,
    evidence_of,
    texts,
    timing,
    verdict_on,
    visits,
)

from harness.analysis.verdict import SETS_SHARE, Evidence, closed, in_turn
from harness.stats.verdict_interval import LOOKS, Pairs, look_shares
from harness.summary import Answer

BIASED = "R biased 3 %"
WORLDS = {
    "plain": World(),
    "heavy tails": World(tails=True, outliers=0.01),
    "drift alike": World(drift=0.03),
    "drift on speculation only": World(speculative_drift=0.013),
    "uneven texts": World(lengths=1.2),
    "spread x2": World(spread=0.3),
    BIASED: World(),
}
TRUTHS = {"near ties": NULL[:KS], "1.10x": GAIN[:KS], "1.20x": GAIN[:KS] * 1.2 / 1.1}
# By how much the round times of the visits are too low, where they are biased; their scatter
BIAS, SCATTER = 0.03, 0.02


@dataclass(frozen=True)
class Design:
    """How many prompts of a temperature are decoded plainly, and how many of them measured."""

    prompts: int
    measured: int


def two_phases(
    rng: np.random.Generator, name: str, design: Design, truth, temperature: float
) -> Evidence:
    """Every prompt replayed, and all pairs of the best K."""
    tokens, seconds = texts(rng, WORLDS[name], design.prompts, truth)
    relative, errors = visits(rng, SCATTER, 1)
    predicted = seconds * ((1.0 - (BIAS if name == BIASED else 0.0)) * relative[:, None])
    replayed = evidence_of(tokens, np.concatenate([tokens[None], predicted]), errors, temperature)
    best = int(np.argmax(replayed.workload(None).log_speedups.value))
    rows = rng.permutation(design.prompts)[: design.measured]
    plain_s, measured_s = timing(rng, WORLDS[name], (2, len(rows)))
    pairs = Pairs(
        prompts=tuple(replayed.names[row] for row in rows),
        seconds=seconds[best, rows] * measured_s,
        cost=predicted[best, rows],
        plain_s=tokens[rows] * plain_s,
        plain_tokens=tokens[rows],
    )
    return replace(replayed, named=CANDIDATES[best], pairs=pairs)


def at_look(evidence: Evidence, look: int) -> Evidence:
    """With the pairs that were measured by a look."""
    pairs = evidence.pairs
    assert pairs is not None
    number = math.ceil(len(pairs.prompts) * look / LOOKS)
    columns = (pairs.prompts, pairs.seconds, pairs.cost, pairs.plain_s, pairs.plain_tokens)
    made = Pairs(*(column[:number] for column in columns))
    return replace(evidence, pairs=made, looks=look_shares(look))


def in_looks(of_temperatures: Sequence[Evidence]) -> tuple[list[list[Answer]], float]:
    """By temperature, the verdicts of the look after which it ends; how many it was on average."""
    verdicts, looks = zip(*map(_of_last_look, of_temperatures), strict=True)
    return [*verdicts], float(np.mean(looks))


def _of_last_look(evidence: Evidence) -> tuple[list[Answer], int]:
    """The verdicts at one temperature, and the look that they are of."""
    for look in range(1, LOOKS + 1):
        on = partial(verdict_on, at_look(evidence, look))
        if look == LOOKS or closed(on("all", ERROR * (1.0 - SETS_SHARE))):
            return [*in_turn(on, SETS, ERROR)], look
    raise AssertionError("the last look ends it")


def simulated(world: str, truth: str, design: Design, number: int, seed: Sequence[int]) -> Counter:
    """So many reports, counted.

    Args:
        world, truth: of WORLDS and TRUTHS.
        design: of each temperature.
        number: of reports.
        seed: of all of them.
    """
    rng = np.random.default_rng(seed)
    counts: Any = Counter()  # of numbers that are not whole, too
    true = TRUTHS[truth]
    for _ in range(number):
        replays = [two_phases(rng, world, design, true, at) for at in TEMPERATURES]
        verdicts, look = in_looks(replays)
        counts.update(counted(verdicts, true))
        counts["looks"] += look
        error = ERROR * (1.0 - SETS_SHARE)
        without_looks = [verdict_on(replayed, "all", error).speculates for replayed in replays]
        counts["workload without looks"] += sum(without_looks)
    return counts

"""What each engine gained from one pair: the measured speedups of several runs side by side.

With one pair, one machine and hard prompts K = 4 was 1.05x on vLLM and 0.70x on llama.cpp
(docs/validation.md). So runs of servers, and sweeps of our own loop, are put into one list: by run,
temperature and K, the speedup of the whole workload against the same engine's plain decoding, with
its interval over prompts, on those that were timed both plainly and at that K. Loads of several
requests side by side follow, whose speedup is a ratio of throughputs without an interval.
"""

import math
from collections.abc import Iterator

import numpy as np

from harness.analysis.cells import latest, paired_sums, timed
from harness.analysis.lossless import distrust, text_checks
from harness.analysis.server_texts import ServedTexts
from harness.analysis.setup import Setup
from harness.records import GREEDY, Trial, grouped
from harness.serving.engines import OWN
from harness.stats.jackknife import exponential, log_speedup
from harness.summary import EngineRow, ServedSummary


def engine_of(setup: Setup) -> tuple[str, str | None]:
    """Which engine a run measured, and its version; our own loop has none."""
    engine = setup.engine
    if engine is None or engine.name == OWN.name:
        return OWN.name, None
    return engine.name, engine.version


def timed_trials(setup: Setup) -> list[Trial]:
    """Each generation once; those of a server at the time that its visits settle."""
    if setup.engine is not None:
        return ServedTexts(setup).settled
    return latest(timed(setup.run.trials))


def not_lossless(setup: Setup, served: ServedSummary | None) -> set[tuple[float, int]]:
    """The (temperature, K) at which a run's speculation changed what is generated."""
    if served is not None:
        return {(gate.temperature, gate.k) for gate in served.gates if gate.lossless is False}
    doubtful = distrust(text_checks(setup.run.trials, setup.run.checks)) is not None
    return {(GREEDY, k) for k in setup.ks} if doubtful else set()


def engine_rows(name: str, setup: Setup, served: ServedSummary | None) -> Iterator[EngineRow]:
    """A measured run's speedups by temperature and K, then those under load.

    Args:
        name: of the run.
        setup: of the run.
        served: what it says of its server; None of our own loop's sweep.
    """
    engine, version = engine_of(setup)
    changed = not_lossless(setup, served)

    def row(
        temperature: float,
        k: int,
        concurrency: int,
        *speedup: float | None,
        prompts: int | None = None,
    ) -> EngineRow:
        return EngineRow(
            name,
            engine,
            version,
            setup.draft,
            temperature,
            k,
            concurrency,
            *speedup,
            lossless=(temperature, k) not in changed,
            prompts=prompts,
        )

    trials = timed_trials(setup)
    alone = max((trial.concurrency for trial in trials), default=1)
    for temperature in setup.temperatures:
        of_k = grouped((t for t in trials if t.temperature == temperature), lambda trial: trial.k)
        every_set = {trial.prompt_set for trial in of_k.get(0, ())}
        for k in sorted(of_k.keys() - {0}):
            # A sweep that ends with its verdicts (until=decided) times most K on a few prompts,
            # with as many repetitions as these needed
            sums = paired_sums(of_k[k], of_k.get(0, ()))
            sets = [prompt_set for prompt_set, _ in sums]
            if not sums or {*sets} != every_set:  # not the whole workload
                continue
            plain_s, plain_tokens, seconds, tokens = np.array([*sums.values()]).T
            estimate = log_speedup(plain_s, plain_tokens, seconds, tokens, sets, setup.weights)
            bounds = exponential(estimate.interval()) or (None, None)
            yield row(temperature, k, alone, math.exp(estimate.value), *bounds, prompts=len(sums))
    for load in served.load if served else ():
        if load.k and (load.concurrency or 0) > 1 and load.slots is None:
            yield row(load.temperature, load.k, load.concurrency or 0, load.throughput_ratio)

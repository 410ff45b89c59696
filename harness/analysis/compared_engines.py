"""What each engine gained from one pair: the measured speedups of several runs side by side.

With one pair, one machine and hard prompts K = 4 was 1.05x on vLLM and 0.70x on llama.cpp
(docs/validation.md). So runs of servers, and sweeps of our own loop, are put into one list: by run,
temperature and K, the speedup of the whole workload against the same engine's plain decoding, with
its interval over prompts. Loads of several requests side by side follow, whose speedup is a ratio
of throughputs without an interval.
"""

from collections.abc import Iterator

from harness.analysis.cells import completed, latest, timed
from harness.analysis.lossless import distrust, text_checks
from harness.analysis.server_texts import ServedTexts
from harness.analysis.setup import Setup
from harness.analysis.verdict import evidence_from_trials
from harness.records import GREEDY, Trial
from harness.serving.engines import OWN
from harness.stats.jackknife import speedup_interval
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

    def row(temperature: float, k: int, concurrency: int, *speedup: float | None) -> EngineRow:
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
        )

    trials = timed_trials(setup)
    alone = max((trial.concurrency for trial in trials), default=1)
    for temperature in setup.temperatures:
        done = [trial for trial in completed(trials) if trial.temperature == temperature]
        if any(trial.decode_s is None for trial in done):  # records without a time of decoding
            continue
        evidence = evidence_from_trials(
            trials, draft=setup.draft, temperature=temperature, times=None
        )
        plain = evidence.baseline
        for candidate, speedup in evidence.speedups(setup.weights).items():
            timed = evidence.candidates[candidate]
            interval = speedup_interval(
                plain.seconds,
                plain.tokens,
                timed.seconds,
                timed.tokens,
                evidence.prompt_sets,
                setup.weights,
            )
            bounds = (None, None) if interval is None else interval
            yield row(temperature, candidate.k, alone, speedup, *bounds)
    for load in served.load if served else ():
        if load.k and (load.concurrency or 0) > 1 and load.slots is None:
            yield row(load.temperature, load.k, load.concurrency or 0, load.throughput_ratio)

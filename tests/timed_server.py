"""The stored server run, had its loads cost what is known: by its servers' own clock."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from shutil import copytree

import numpy as np
from runs import FROZEN

from harness.analysis.iteration_costs import IterationCosts, Starts
from harness.analysis.plan import caveats_of, plan_from
from harness.analysis.plan_simulation import simulated_plan
from harness.analysis.planned_server import Server
from harness.config import PlanConfig
from harness.records import LoadTiming
from harness.simulation import Served, sent_at_once, simulate
from harness.storage import RunFolder, StoredRun, load
from harness.summary import Caveat, Plan
from harness.theory.speedup import BatchTimes, RoundTimes

KS = (0, 1, 2, 4)
RATE = 10.0


def known_costs() -> IterationCosts:
    """A verify that gets expensive with the batch: K pays alone, and not four at a time."""
    times = {
        batch: RoundTimes(
            (3 + 0.5 * batch) * 1e-3,
            tuple((k, (3 + 0.5 * batch + 0.65 * k + 0.15 * k * batch**2) * 1e-3) for k in KS[1:]),
        )
        for batch in (1, 2, 3, 4)
    }
    plain, speculative = (
        Starts(4e-3, 1e-4, mixed_s=(2e-3, 1e-3)),
        Starts(5e-3, 1.2e-4, mixed_s=(2e-3, 1e-3)),
    )
    return IterationCosts(BatchTimes(times), plain, speculative, client_s=1e-3)


@cache
def told(timing: LoadTiming, done: Served) -> LoadTiming:
    """A load that took what was simulated, by the client's and the server's clock."""
    decode_s = done.ended_s - done.first_s
    return replace(
        timing,
        seconds=float(done.ended_s.max()),
        user_s=tuple((done.ended_s - done.arrived_s + done.client_s).tolist()),
        user_decode_s=tuple(decode_s.tolist()),
        user_prefill_s=tuple((done.first_s - done.entered_s).tolist()),
    )


@cache
def timed() -> StoredRun:
    """The stored run, had its loads cost these.

    And had the greedy requests of its largest loops arrived at random, too.
    """
    run = load(FROZEN / "server")
    engine = run.manifest.engine
    assert engine is not None
    commands = tuple(replace(each, line=f"{each.line} --kv-unified") for each in engine.commands)
    engine = replace(engine, commands=commands, clock="engine")
    run = replace(run, manifest=replace(run.manifest, engine=engine))
    servers = {each: Server.of(run, each) for each in (0.0, 1.0)}
    random = np.random.default_rng(5)

    def priced(timing: LoadTiming) -> LoadTiming:
        sent = servers[timing.temperature].returned(timing)
        assert sent is not None
        costs = known_costs().priced(4, max(KS))[min(timing.k, 1)]
        arrivals = timing.due_s or sent_at_once(len(sent), timing.concurrency)
        done = simulate(sent, arrivals, costs, [timing.k], timing.concurrency)
        return told(timing, done)

    arriving = [
        replace(timing, concurrency=None, rate=RATE, due_s=due_s, sent_s=due_s)
        for timing in run.loads
        if (timing.temperature, timing.concurrency) == (0.0, 4)
        for due_s in [tuple(np.cumsum(random.exponential(1 / RATE, len(timing.texts))).tolist())]
    ]
    return replace(run, loads=tuple(priced(timing) for timing in (*run.loads, *arriving)))


def stored_timed(root: Path, *, rates: bool = True) -> Path:
    """A folder with that run, with its loads at a rate or without."""
    made, folder = timed(), Path(copytree(FROZEN / "server", root / "timed_server"))
    (folder / "loads.jsonl").unlink()
    writing = RunFolder(folder, load(folder).manifest)
    writing.loads.append(*(each for each in made.loads if rates or not each.rate))
    writing.note(engine=made.manifest.engine)
    return folder


def plan_of(
    run: StoredRun,
    config: PlanConfig,
    *,
    recorded: Sequence[float] | None = None,
    price: float | None = None,
) -> tuple[Plan, tuple[Caveat, ...]]:
    """What a plan of a server run comes to, and what to mind of it."""
    server, simulated = simulated_plan(run, config, recorded=recorded)
    server = replace(server, price_per_hour_usd=price)
    arrivals = None if recorded is None else "a file with these"
    plan = plan_from(server, simulated, {**asdict(config), "arrivals": arrivals})
    return plan, tuple(caveats_of(server, plan))

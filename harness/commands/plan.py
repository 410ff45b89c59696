"""A latency goal at a rate of requests, by what a stored server run says; no model is loaded."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from harness.analysis import analyse
from harness.analysis.plan_simulation import simulated_plan
from harness.analysis.planned_server import Server
from harness.analysis.setup import Setup, price_per_hour
from harness.commands.dry_run import ROWS, card_of
from harness.commands.progress import progress
from harness.commands.run_lifecycle import Outcome, shown
from harness.config import PlanConfig
from harness.measurement.environment import describe_host
from harness.prompts.log import time_stamps
from harness.records import UserError
from harness.reporting.console import print_table, standard_output
from harness.reporting.tables.specification import table
from harness.storage import RunFolder, StoredRun, check_writable, load
from harness.theory.roofline import is_card

# Of a card's capacity, the rate that a server run is asked to measure
MEASURED_SHARE = 0.6


def run(config: PlanConfig) -> Outcome:
    """Simulate every choice, store what users wait for as a run, and show the plan."""
    check_writable(config.results_root)
    with progress("reading the run"):
        stored = load(config.run)
        recorded = None if config.arrivals is None else recorded_times(config.arrivals)
    if config.dry_run:
        _print_known(stored, config, recorded)
        return Outcome(None)
    price, other_device = _price(config, stored)
    with progress("simulating the choices") as bar:
        server, simulated = simulated_plan(
            stored, config, recorded=recorded, expect=bar.expect, tick=bar
        )
    names = [stored.config["model"]["name"], server.draft]
    folder = RunFolder.create(config.results_root, "plan", names, asdict(config))
    folder.simulated.append(*simulated)
    planned = replace(server, price_per_hour_usd=price, other_device=other_device)
    folder.note(planned=planned, environment=describe_host(), status="complete")
    summary = analyse(load(folder.path))
    folder.write_summary(summary)
    return shown(summary, folder.path, verbose=config.verbose)


def _print_known(stored: StoredRun, config: PlanConfig, recorded: Sequence[float] | None) -> None:
    """Print the server as its run measured it, and the sequences that would be simulated.

    What is missing has the command that measures it; without R(K, B) a plan is refused.
    """
    server = Server.of(stored, config.temperature[0] if config.temperature else None)
    setup, by_length = server.served.setup, server.costs.plain.token_s
    side_by_side = sorted({each.concurrency for each in server.loads})
    arrivals = "Poisson" if recorded is None else f"with the gaps of {len(recorded)} recorded ones"
    rows = {
        "server run": str(stored.folder),
        "draft": setup.draft,
        "K, without a draft at 0": ", ".join(map(str, server.ks)),
        "requests side by side, timed": ", ".join(map(str, side_by_side)),
        "texts, scored": str(len(server.traces)),
        "a prompt's prefill": "by its length" if by_length else "the mean",
        "simulated": f"{config.seeds} sequences of {config.requests} requests, arrivals {arrivals}",
    }
    if not any(each.rate for each in setup.run.loads):
        tokens = float(np.mean([len(trace.tokens) for trace in server.traces]))
        most = server.slots / (tokens * server.costs.times.plain.at(0, server.slots))
        change = f"rate=[{min(config.rate, MEASURED_SHARE * most):.2g}]"
        command = setup.command_line(change) or f"the server run's command with {change}"
        rows["missing: waits at a rate"] = f"to prove the simulation: {command}"
    if not by_length:
        rows["missing: prompts of two lengths"] = (
            "the server run again, on prompts that differ in length (prompts.files=)"
        )
    print_table(table("Plan (nothing is simulated)", ROWS, [*rows.items()]), standard_output())


def recorded_times(file: str) -> list[float]:
    """The time stamps of a file, a number of seconds a line, or a log of requests, ascending."""
    where = f"arrivals={file}"
    times: list[float] = []
    for number, value in _stamps(Path(file), where):
        if times and value < times[-1]:
            raise UserError(
                f"{where}, line {number}: {value:g} comes after {times[-1]:g}; sort the file"
            )
        times.append(value)
    if len(times) < 2 or times[0] == times[-1]:
        raise UserError(f"{where}: needs at least two times that differ")
    return times


def _stamps(file: Path, where: str) -> Iterator[tuple[int, float]]:
    try:
        with file.open(encoding="utf-8") as lines:
            first = next((line for line in lines if line.strip()), "")
            if not first.lstrip().startswith("{"):
                lines.seek(0)
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield number, _seconds(line.strip(), f"{where}, line {number}")
                return
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{where}: cannot be read; give a text file of numbers, or a log of requests"
        ) from error
    yield from time_stamps(file, where)


def _seconds(text: str, where: str) -> float:
    with suppress(ValueError):
        if math.isfinite(value := float(text)):
            return value
    raise UserError(f"{where}: {text[:40]!r} is no time in seconds")


def _price(config: PlanConfig, stored: StoredRun) -> tuple[float | None, str | None]:
    if config.gpu is None:
        return price_per_hour(Setup(stored)), None
    card = card_of(config.gpu)
    machine = stored.manifest.environment
    if is_card(card.name, card.memory_gb, machine.device_name, machine.device_memory_bytes):
        return card.price_per_hour_usd, None
    return None, machine.device_name or "another device"

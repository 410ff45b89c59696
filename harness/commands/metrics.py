"""The counters of a server that serves others, scraped twice: a run."""

import time
from dataclasses import asdict

from harness.analysis.breakeven import MeasuredInputs, from_run
from harness.analysis.counters import counted_between
from harness.analysis.server_costs import ServerCosts
from harness.analysis.server_predictions import costs_of
from harness.commands.breakeven import latency_of_run
from harness.commands.progress import progress
from harness.commands.run_lifecycle import Outcome, concluded
from harness.config import ReportConfig
from harness.engine_facts.engines import spec_of
from harness.engines.adapters import api_key
from harness.engines.http_client import WantedModel
from harness.engines.running import CountingServer
from harness.measurement.environment import describe_host
from harness.records import GREEDY, Scrape, ServingEngine, UserError
from harness.storage import RunFolder, load
from harness.storage.manifest import SERVER

# Between the two scrapes
INTERVAL_S = 60.0


def run(config: ReportConfig) -> Outcome:
    """Scrape the server, say what it did in between, and store the scrapes as a run.

    Raises:
        UserError: a run without times, no server or one without counters or speculation, one that
            was restarted, or no round between two scrapes.
    """
    # Refused before anybody waits
    inputs = MeasuredInputs()
    if config.latency_from is not None:
        inputs = _times_of_run(config.latency_from, config.temperature)
    with progress("asking who answers"):
        server = CountingServer(
            *(str(config.metrics), api_key(config.api_key_env)), WantedModel(config.served_name)
        )
    _check_drafts(server, server.first)
    with progress(f"waiting {INTERVAL_S:g} s for what {server.where.partition('=')[2]} serves"):
        time.sleep(INTERVAL_S)
    last = server.scrape()
    _check_counted(server, last)
    folder = _folder(config, server, inputs)
    folder.scrapes.append(server.first, last)
    return concluded(folder, verbose=config.verbose)


def _check_drafts(server: CountingServer, last: Scrape) -> None:
    """Refuse a server without speculation, or without its counter, since it was started."""
    server.check_rounds()
    title = spec_of(server.engine).title
    plain = last.k == 0 or (last.k is None and not last.accepted_at and last.tokens > 0)
    if plain and not last.rounds:
        raise UserError(
            f"{server.where}: this {title} has not drafted a token in the"
            f" {last.tokens:,} that it generated; it drafts if it is started with"
            f" {server.names.drafts_with}, and then shows {server.names.rounds}"
        )


def _check_counted(server: CountingServer, last: Scrape) -> None:
    """Refuse scrapes that say nothing of what happened between them."""
    counted = counted_between(server.first, last)
    if counted is None:
        raise UserError(
            f"{server.where}: its counters are lower than {last.at_s:.0f} s before, so it"
            " was restarted meanwhile; ask again"
        )
    if not counted.rounds:
        _check_drafts(server, last)
        raise UserError(
            f"{server.where}: no round was counted within {last.at_s:.0f} s; ask while it serves"
            " requests" + (", which it counts when they end" if server.names.at_end else "")
        )


def _folder(config: ReportConfig, server: CountingServer, inputs: MeasuredInputs) -> RunFolder:
    name = server.model.rpartition("/")[2].removesuffix(".gguf") or server.engine
    settings = {
        "metrics": config.metrics,
        "latency_from": config.latency_from,
        "results_root": config.results_root,
        "seed": config.seed,
        "model": {"name": name},
        "engine": server.engine,
    }
    folder = RunFolder.create(config.results_root, "metrics", [name], settings)
    spec = spec_of(server.engine)
    engine = ServingEngine(
        name=server.engine,
        version=server.version,
        first_position=spec.counting and spec.counting.first_position,
        shortens_last_draft=spec.counting and spec.counting.shortens_last_draft,
        urls=(server.where.partition("=")[2],),
    )
    given = {name: value for name, value in asdict(inputs).items() if value}
    folder.note(environment=describe_host(), engine=engine, inputs=given)
    return folder


# ---- times of rounds -----------------------------------------------------------------------------


def _times_of_run(name: str, temperature: list[float] | None) -> MeasuredInputs:
    """R of a server run, or of one that timed rounds of our own loop."""
    run = load(name)
    if run.door != SERVER:
        latency = latency_of_run(name)
        return from_run(name, latency, range(1, latency.rounds.largest + 1))
    at = [float(value) for value in temperature or run.config.get("temperature") or [GREEDY]]
    if temperature is not None and len(temperature) > 1:
        raise UserError("temperature: a server is priced at one; give that of its requests")
    costs = costs_of(run, at[:1], ())
    timed = min(costs.at, key=lambda each: abs(each.costs.temperature - at[0]))
    times = ServerCosts.of(timed.costs).times
    return MeasuredInputs(
        plain_ms=1e3 * times.plain_s,
        round_ms={k: 1e3 * seconds for k, seconds in times.round_s if k},
    )

"""Records of requests that were served elsewhere, or a server's counters, scraped twice: a run."""

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

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
from harness.engines.protocol import Completion
from harness.engines.running import CountingServer
from harness.engines.stored_answers import PROMPT_SET, FailedAnswerError, imported, record_of
from harness.measurement.environment import describe_host
from harness.records import GREEDY, Scrape, ServingEngine, UserError
from harness.storage import RunFolder, load
from harness.storage.manifest import SERVER

# Between the two scrapes
INTERVAL_S = 60.0

_log = logging.getLogger(__name__)


# ---- records -------------------------------------------------------------------------------------


def import_records(config: ReportConfig) -> Outcome:
    asked = config.temperature or [None]
    if len(asked) > 1:
        listed = ",".join(f"{temperature:g}" for temperature in asked if temperature is not None)
        raise UserError(f"temperature=[{listed}]: records= are of one temperature; give that one")
    with progress("reading the records"):
        files = {file: list(read_records(file)) for file in config.records}
    found = imported(files, config.k, asked[0])
    ks = sorted({trial.k for trial in found.trials})
    settings = {
        "records": list(config.records),
        "results_root": config.results_root,
        "seed": config.seed,
        "model": {"name": found.model},
        "draft": {"name": "draft"},
        "engine": found.engine.name,
        "k": [k for k in ks if k],
        "temperature": [found.temperature],
        "new_tokens": max((trial.new_tokens or 0) + 1 for trial in found.trials),
    }
    folder = RunFolder.create(config.results_root, "server", [found.model, "records"], settings)
    prompts = {trial.prompt for trial in found.trials}
    folder.note(
        environment=describe_host(),
        prompts={PROMPT_SET: len(prompts)},
        engine=found.engine,
        records={file: len(records) for file, records in files.items()},
    )
    for trial in found.trials:
        folder.trials.append(trial)
    return concluded(folder, verbose=config.verbose)


def read_records(file: str) -> Iterator[Completion]:
    """The records of a file: one JSON object per line, one alone, or one JSON array of them.

    Failed requests are left out and counted. A record that does not say its prompt has its place
    in the file instead, failed ones included.

    Raises:
        UserError: it cannot be read, or holds something else, or nothing, or most requests failed.
    """
    where = f"records={file}"
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{where}: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: cannot be read as text; give JSON, an object a line") from error
    count, failed = 0, list[str]()
    for place, entry in _entries(text, where):
        count += 1
        try:
            record = record_of(entry, place)
        except FailedAnswerError as error:
            failed.append(str(error))
        else:
            yield replace(record, prompt=record.prompt or str(count))
    if not count:
        raise UserError(f"{where}: no request in it")
    if len(failed) > count / 2:
        raise UserError(f"{len(failed)} of {count} requests failed; the first: {failed[0]}")
    if failed:
        _log.warning("%d of %d requests failed; the first: %s", len(failed), count, failed[0])


def _entries(text: str, where: str) -> Iterator[tuple[str, Mapping[str, Any] | str]]:
    numbered: list[tuple[str, Any]] = []
    array = text.lstrip().startswith("[")
    if array:
        entries = enumerate(_parsed(text, where), start=1)
        numbered = [(f"{where}, entry {number}", entry) for number, entry in entries]
    elif "\n" in text.strip():
        with suppress(UserError):  # one object, over several lines
            numbered = [(where, _parsed(text, where))]
    if not numbered and not array:
        for number, line in enumerate(map(str.strip, text.split("\n")), start=1):
            place = f"{where}, line {number}"
            if line:  # of plain text, as of a proxy's error, it is that text
                numbered.append((place, _parsed(line, place) if line[0] in '{["' else line))
    for place, entry in numbered:
        if not isinstance(entry, dict | str):
            raise UserError(f"{place}: not a JSON object")
        yield place, entry


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not JSON ({error}); give one object per request") from error


# ---- counters ------------------------------------------------------------------------------------


def read_counters(config: ReportConfig) -> Outcome:
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
            str(config.metrics), api_key(config.api_key_env), WantedModel(config.served_name)
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
    kept = ("metrics", "latency_from", "results_root", "seed")
    settings = {key: getattr(config, key) for key in kept}
    settings |= {"model": {"name": name}, "engine": server.engine}
    folder = RunFolder.create(config.results_root, "metrics", [name], settings)
    counting = spec_of(server.engine).counting
    engine = ServingEngine(
        name=server.engine,
        version=server.version,
        first_position=counting and counting.first_position,
        shortens_last_draft=counting and counting.shortens_last_draft,
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

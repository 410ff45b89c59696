"""Costs of a server run's requests, as other runs use them to price drafts.

`harness.analysis.engine_costs` makes a draft's round times of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from harness.analysis.engine_costs import nearest
from harness.analysis.server_lossless import failed_gates
from harness.analysis.server_predictions import (
    TimedServer,
    recorded,
    served_rows,
    timed_server,
)
from harness.analysis.server_texts import served_texts
from harness.analysis.setup import Setup
from harness.command_words import as_typed
from harness.records import GREEDY, UserError, where
from harness.storage import StoredRun
from harness.storage.manifest import CostsAt, EngineCosts, ModelEntry


def costs_of(run: StoredRun, temperatures: Sequence[float], ks: Sequence[int]) -> EngineCosts:
    """The costs of decoding on the engine of a server run.

    To price rounds of `ks` at `temperatures`, where rounds that sample stand for each other.

    Raises:
        UserError: it timed too little, does not say how its engine accepts or counts, or that
            engine is not lossless there.
    """
    setup, key = Setup(run), as_typed("latency_from", run.folder)
    if setup.engine is None or not run.trials:
        raise UserError(f"{key}: no request of that run was answered; name another one")
    texts, engine = served_texts(setup), setup.engine
    if engine.rule is None or texts.counting is None:
        raise UserError(
            f"{key}: {engine.name} does not say how it accepts drafts and counts rounds, so none"
            " can be predicted there"
        )
    server = timed_server(texts)
    at = tuple(_costs_at(server))
    if not at and not failed_gates(server.gates):
        raise UserError(
            f"{key}: it has too few requests to tell what a round costs there, and how well that"
            " is known; name a run with more prompts"
        )
    draft, conf = setup.described_draft(setup.draft).entries, setup.conf("draft")
    identity = {"id": conf.get("id"), "kind": conf.get("kind") or "model"}
    target_id = setup.conf("model").get("id")
    costs = EngineCosts(
        run=str(run.folder),
        engine=replace(engine, commands=()),
        device=setup.environment.device_name if engine.started else None,
        visits=len({trial.repetition for trial in texts.trials}),
        target=ModelEntry.of({"name": setup.model, **setup.target.entries, "id": target_id}),
        draft=ModelEntry.of({"name": setup.draft, **draft, **identity}),
        bytes_factor=_bytes_factor(setup),
        at=at,
    )
    problems = [*_not_timed(costs, server, temperatures, ks)]
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return costs


def _not_timed(
    costs: EngineCosts, server: TimedServer, temperatures: Sequence[float], ks: Sequence[int]
) -> Iterator[str]:
    """A line for each asked temperature or K whose costs the run does not tell."""
    key, most = as_typed("latency_from", costs.run), max(ks, default=0)
    for temperature in temperatures:
        unlike = _changes_texts(server, temperature)
        if unlike is not None:
            yield (
                f"{key}: at temperature={unlike:g} that server's texts are not plain decoding's;"
                " leave the temperature out, or name another run"
            )
            continue
        try:
            timed = nearest(costs, temperature)
        except UserError as error:
            yield from error.lines
            continue
        known = sorted(k for k in timed.costs.round_s if k)
        if most > max(known):
            yield (
                f"{key}: rounds of K = {', '.join(map(str, known))} were timed there, not of"
                f" K = {most}; give k=[{','.join(map(str, known))}]"
            )


def _costs_at(server: TimedServer) -> Iterator[CostsAt]:
    """By temperature, where how well they are known can be told."""
    errors = served_rows(server).errors
    for temperature, costs in server.costs_by_temperature.items():
        if server.without[temperature]:
            every = (costs, *server.without[temperature])
            stored, *without = (recorded(server, temperature, each) for each in every)
            at = CostsAt(stored, tuple(without))
            if temperature in errors:
                error = errors[temperature].variance
                at = replace(at, error=float(error.value), error_degrees=float(error.degrees))
            yield at


def _changes_texts(server: TimedServer, temperature: float) -> float | None:
    """The nearest temperature that was measured, where the server changes texts at it."""
    known = server.texts.temperatures
    alike = [each for each in known if (each > GREEDY) == (temperature > GREEDY)]
    nearest = min(alike, key=lambda each: abs(each - temperature), default=GREEDY)
    return nearest if where(failed_gates(server.gates), temperature=nearest) else None


def _bytes_factor(setup: Setup) -> float:
    assert setup.engine is not None
    served = {each.k: each.weights_bytes or 0 for each in setup.engine.commands}
    of_target = served.get(0, 0)
    of_draft = max(served.values(), default=0) - of_target
    loaded = setup.target.weights_bytes or 0
    loaded_draft = setup.described_draft(setup.draft).weights_bytes or 0
    if 0 in (of_target, loaded, loaded_draft) or of_draft <= 0:
        return 1.0
    return (of_draft / of_target) / (loaded_draft / loaded)

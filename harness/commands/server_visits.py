"""Visits to servers: every request that a run folder lacks is sent, and its answer stored.

A request is a line of trials.jsonl as soon as its answer is there, so a run that is stopped
continues where it was. A server that dies costs its own cells, and `resume=` asks it again.
Requests side by side, on servers that have room for them, are stored visit by visit in loads.jsonl.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from harness.commands.progress import progress
from harness.commands.run_lifecycle import NOT_MEASURED
from harness.commands.server_requests import (
    Role,
    Task,
    Workload,
    load_slots,
    tasks_of,
    waiting_of,
)
from harness.commands.server_start import (
    check_card,
    check_model,
    check_vocabulary,
    is_synthetic,
    note_engine,
    settle_threads,
    side_by_side,
    started,
)
from harness.engines.adapters import Adapter
from harness.engines.protocol import Completion, Server, ServerDiedError
from harness.measurement.clock import undisturbed
from harness.measurement.generations import Request
from harness.measurement.load import Load, groups_of, load_visit
from harness.measurement.served import ask
from harness.records import in_one_line
from harness.storage import RunFolder


def measure(folder: RunFolder, work: Workload, adapter: Adapter) -> None:
    """Ask the servers for what the folder lacks."""
    tasks = list(tasks_of(work, synthetic=is_synthetic(work.config, adapter)))
    waiting = waiting_of(folder, tasks)
    roles = sorted({task.role for task in waiting}, key=lambda role: (role.rejects, role.k))
    _forget_failures(folder)
    if not roles:
        return
    settle_threads(folder, work, adapter)
    check_card(folder, work, adapter, roles)
    for group in side_by_side(roles, work, adapter):
        with started(folder, work, adapter, group, slots=1) as servers:
            for role, server in servers.items():
                check_vocabulary(server, work.vocabulary.tokenizer, work.conversations)
                if not role.rejects:
                    check_model(server, work, adapter)
                    note_engine(folder, work, adapter, server)
            _visit(folder, work, servers, [task for task in waiting if task.role in servers])


def _visit(
    folder: RunFolder, work: Workload, servers: Mapping[Role, Server], tasks: Sequence[Task]
) -> None:
    """Send every request, store each answer; a server that dies is asked no more.

    Raises:
        ServerDiedError: the one that decodes plainly, without which nothing can be compared.
    """
    dead: dict[Role, str] = {}

    def died(role: Role, error: ServerDiedError, left: Sequence[Task]) -> None:
        dead[role] = in_one_line(error)
        _note_death(folder, role, dead[role], left)
        if role == Role(0):
            raise ServerDiedError(f"{error}; what was measured is stored, resume={folder.path}")

    longest = max(work.prompts, key=lambda entry: len(entry.tokens))
    with progress("warming the servers up", len(servers)) as tick:
        for role, server in servers.items():
            try:
                for temperature in work.config.temperature:
                    _warm_up(server, work.request(longest, temperature, role.k, 0), work)
            except ServerDiedError as error:
                died(role, error, [task for task in tasks if task.role == role])
            tick()
    with progress("asking the servers", len(tasks)) as tick, undisturbed():
        for number, task in enumerate(tasks):
            if task.role not in dead:
                try:
                    _ask(folder, work, servers[task.role], task)
                except ServerDiedError as error:
                    died(task.role, error, [t for t in tasks[number:] if t.role == task.role])
            tick()


def _warm_up(server: Server, longest: Request, work: Workload) -> None:
    """Send the longest request, so that what a server cannot do shows before anything is stored."""

    def generate(request: Request, budget: int) -> Completion:
        return server.generate(request.tokens, request.sampling, request.seed, budget)

    if generate(longest, longest.budget).decode_s is None:
        # Its prefills are timed by requests for one token, and it may keep those that it has seen
        for entry in work.prompts:
            generate(replace(longest, tokens=entry.tokens), 1)


def _ask(folder: RunFolder, work: Workload, server: Server, task: Task) -> None:
    """Send one request and store what came of it."""
    clock = work.clock
    served = ask(server, task.request, task.visit, clock)
    facts = server.facts
    if task.file == "trials":
        folder.trials.append(served.trial(facts, clock))
    elif task.file == "starts":
        folder.starts.append(served.trial(facts, clock))
    elif served.completion.returned > facts.first_position:  # else there was no round
        folder.rounds.append(served.rejected_rounds(facts, clock, work.config.draft.name))


def _note_death(folder: RunFolder, role: Role, error: str, left: Sequence[Task]) -> None:
    """Store that a server's remaining requests of this visit failed, so that its cells say so."""
    if role.rejects:
        notes = folder.manifest.get(NOT_MEASURED) or {}
        folder.update_manifest({NOT_MEASURED: {**notes, _rounds_of(role): error}})
        return
    for task in left:
        if task.file == "trials" and task.visit == left[0].visit:
            folder.trials.append(task.request.as_trial(status="failed", error=error))


def _forget_failures(folder: RunFolder) -> None:
    """Forget the rejecting servers that died in the attempt that this one resumes."""
    notes = folder.manifest.get(NOT_MEASURED) or {}
    kept = {what: why for what, why in notes.items() if not what.startswith("rounds at ")}
    if kept != notes:
        folder.update_manifest({NOT_MEASURED: kept})


def _rounds_of(role: Role) -> str:
    return f"rounds at {role}"


# ---- requests side by side ---------------------------------------------------------------------


def measure_loads(folder: RunFolder, work: Workload, adapter: Adapter) -> None:
    """Put requests side by side on servers that have room for them, visit by visit."""
    config = work.config
    loads = [Load(rate=config.rate)] if config.rate else []
    if max(config.concurrency) > 1:
        loads += [Load(concurrency=level) for level in config.concurrency]
    stored = {(timing.visit, timing.temperature, timing.k) for timing in folder.loads.read()}
    visits = [
        (visit, temperature)
        for visit in range(config.repetitions)
        for temperature in config.temperature
    ]
    if not loads:
        return
    slots = load_slots(config)
    roles = [Role(k) for k in work.ks]
    for group in side_by_side(roles, work, adapter):
        # Plain decoding stands in each group, to be compared with within moments
        compared = [role.k for role in group if role.k] or [0]
        waiting = [each for each in visits if any((*each, k) not in stored for k in compared)]
        if not waiting:
            continue
        with started(folder, work, adapter, group, slots=slots) as by_role:
            servers = {role.k: server for role, server in by_role.items()}
            with progress("requests side by side", len(waiting)) as tick, undisturbed():
                for visit, temperature in waiting:
                    random = np.random.default_rng((config.seed, visit))
                    requests = [work.request(e, temperature, 0, visit) for e in work.prompts]
                    requests = [replace(each, draft=config.draft.name) for each in requests]
                    groups = groups_of(requests, slots)
                    # Stored together: half a visit compares nothing
                    done = [*load_visit(servers, groups, loads, visit, random, work.clock)]
                    folder.loads.append(*done)
                    tick()

"""Visits to servers: every request that a run folder lacks is sent, and its answer stored.

A request is a line of trials.jsonl as soon as its answer is there, so a run that is stopped
continues where it was. Requests side by side, on servers that have room for them, are stored visit
by visit in loads.jsonl.

What fails costs as little as it can. A request that has no answer, though it was repeated, is its
own trial, failed. A server that ends or hangs, or fails at request after request, is asked no more:
the rest of its K is lost, and with the one that decodes plainly the visits end, for nothing can be
compared any more. What was measured is analysed and reported all the same, and `resume=` asks for
the rest. Only before anything is measured is an error the end of the run.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from harness.analysis.looks import best_started, to_start
from harness.commands.progress import progress
from harness.commands.run_lifecycle import resumable
from harness.commands.server_requests import (
    Role,
    Task,
    Workload,
    chosen_tasks,
    load_slots,
    plain_tasks,
    probe_tasks,
    tasks_of,
    varying_roles,
    waiting_of,
)
from harness.commands.server_start import (
    all_stay,
    check_card,
    check_model,
    check_vocabulary,
    every_k,
    is_synthetic,
    note_engine,
    settle_threads,
    side_by_side,
    started,
)
from harness.commands.server_structured import measure_structured
from harness.engines.adapters import Adapter
from harness.engines.protocol import (
    RefusedError,
    RequestFailedError,
    Server,
    ServerDiedError,
)
from harness.measurement.clock import undisturbed
from harness.measurement.generations import Request
from harness.measurement.load import Load, LoadFailedError, groups_of, load_visit, warm_up
from harness.measurement.server_request import ask
from harness.records import (
    LoadTiming,
    Measurement,
    NotMeasured,
    RoundTiming,
    Trial,
    UserError,
    in_one_line,
)
from harness.storage import RunFolder, load
from harness.storage.manifest import ServedKs, WhyAll

_log = logging.getLogger(__name__)
PLAIN = Role(0)
# Requests of a server without an answer, one after the other, after which it is asked no more; and
# visits under load
FAILED_IN_A_ROW, FAILED_VISITS = 3, 2
# The lowest status of an error that is the server's and not the request's
SERVER_ERROR = 500
# How what a server did not answer is noted: tasks that are no trials, by their file, and loads
NOTES: Mapping[str, Measurement] = {
    "rounds": "server_rounds",
    "starts": "server_starts",
    "probes": "server_rounds",
}
LOADS: Measurement = "server_loads"
WHY_ALL: Mapping[WhyAll, str] = {
    "server_failed": "a server that was to tell what its rounds cost failed",
    "no_costs": "few requests do not tell what rounds cost here",
}


def measure(folder: RunFolder, work: Workload, adapter: Adapter, score: Callable[[], None]) -> None:
    """Ask the servers for what the folder lacks: one at a time, then side by side.

    Args:
        score: scores the texts that are stored, by which a run that measures one K chooses it.

    Raises:
        UserError: the servers are not what was asked for, or do not start, and nothing is measured.
    """
    failures, going = Failures(folder, work), True
    if not every_k(folder, work.config):
        going = _measure_chosen(_Visits(folder, work, adapter, failures), score)
        if every_k(folder, work.config):
            failures = Failures(folder, work)  # what failed is asked for again
    if going and every_k(folder, work.config):
        tasks = tasks_of(work, synthetic=is_synthetic(work.config, adapter))
        going = _measure_visits(_Visits(folder, work, adapter, failures), tasks)
    if going:
        measure_loads(folder, work, adapter, failures)
        measure_structured(folder, work, adapter, failures.dead)
    failures.say()


class Failures:
    """What servers did not answer: stored, so that cells say so, and said at the end."""

    def __init__(self, folder: RunFolder, work: Workload) -> None:
        self._folder = folder
        self.dead: set[Role] = set()
        self._first: dict[Role, str] = {}
        self._number: Counter[Role] = Counter()
        roles = [Role(k, rejects) for k in work.ks for rejects in (False, True)]
        roles += varying_roles(work.config)
        retried = [_missing(role, what) for role in roles for what in (*NOTES.values(), LOADS)]
        folder.note_not_measured(retried=retried)

    def of_task(self, task: Task, error: UserError) -> None:
        """A request has no answer."""
        line = self._count(task.role, error)
        if task.file == "trials":
            self._folder.trials.append(task.request.as_trial(status="failed", error=line))
        else:
            self._folder.note_not_measured(_missing(task.role, NOTES[task.file], line))

    def of_server(self, role: Role, error: UserError, left: Sequence[Task]) -> None:
        """A server is asked no more: what is lost with it is marked as failed.

        Its own tasks are, and all with the one that decodes plainly, for they are not compared with
        anything any more: of each K the trials of one visit, and notes.
        """
        line = self._count(role, error)
        lost = [
            task
            for task in left
            if task.role == role or (role == PLAIN and task.role not in self.dead)
        ]
        self.dead.add(role)
        visits: dict[Role, int] = {}
        for task in lost:
            if task.file == "trials" and task.visit == visits.setdefault(task.role, task.visit):
                self._folder.trials.append(task.request.as_trial(status="failed", error=line))
        notes = (_missing(task.role, NOTES[task.file], line) for task in lost if task.file in NOTES)
        self._folder.note_not_measured(*dict.fromkeys(notes))

    def of_load(self, role: Role, error: UserError) -> None:
        """A server did not answer under load."""
        self._folder.note_not_measured(_missing(role, LOADS, self._count(role, error)))

    def say(self) -> None:
        """One line on standard error, where anything failed."""
        if not self._first:
            return
        roles = "; ".join(
            f"{role}: {self._number[role]} times, first: {line}"
            for role, line in self._first.items()
        )
        _log.warning(
            "servers did not answer: %s; what was measured is stored, resume=%s asks for the rest",
            roles,
            self._folder.path,
        )

    def _count(self, role: Role, error: UserError) -> str:
        line = in_one_line(error)
        self._number[role] += 1
        self._first.setdefault(role, line)
        return line


def _missing(role: Role, what: Measurement, error: str = "") -> NotMeasured:
    return NotMeasured(what, error, k=role.k, rejects=role.rejects, varying=role.varying)


# ---- one K, that replay chooses ----------------------------------------------------------------


@dataclass
class _Answering:
    """Servers that answer, until their stack is closed."""

    stack: ExitStack
    servers: dict[Role, Server] = field(default_factory=dict[Role, Server])


@dataclass(frozen=True)
class _Visits:
    """What all visits of a run have in common.

    Attributes:
        kept: where all servers fit side by side, those that stay for further tasks.
    """

    folder: RunFolder
    work: Workload
    adapter: Adapter
    failures: Failures
    kept: _Answering | None = None


def _measure_chosen(visits: _Visits, score: Callable[[], None]) -> bool:
    """Choose a K and measure it, or note in the manifest why every K is to be measured.

    Returns:
        Whether plain decoding is still there to be compared with.
    """
    folder, work, adapter = visits.folder, visits.work, visits.adapter
    with ExitStack() as stack:
        visits = replace(visits, kept=_Answering(stack) if all_stay(work, adapter) else None)
        chosen = folder.manifest.served_ks
        if chosen is None:
            chosen = _choose(visits, score)
            if chosen is None:
                return False
            folder.note(served_ks=chosen)
            if chosen.why_all is not None:
                _log.warning("every K is measured: %s", WHY_ALL[chosen.why_all])
                engine, synthetic = folder.manifest.engine, is_synthetic(work.config, adapter)
                folder.note(engine=engine and replace(engine, synthetic=synthetic))
                return True
        return _measure_visits(visits, chosen_tasks(work, chosen))


def _choose(visits: _Visits, score: Callable[[], None]) -> ServedKs | None:
    """Price the rounds of few K, by which the fastest is found, and choose it.

    None where plain decoding is not there any more.
    """
    folder, work, failures = visits.folder, visits.work, visits.failures
    if not _measure_visits(visits, plain_tasks(work)):
        return None
    ks, started = sorted(work.ks[1:]), tuple[int, ...]()
    # What a run that is resumed had begun is completed first
    more = tuple(dict.fromkeys(trial.k for trial in folder.probes.read() if trial.k))
    while more := more or to_start(load(folder.path), ks, started):
        started += more
        if not _measure_visits(visits, probe_tasks(work, more)):
            return None
        if failures.dead:
            return ServedKs(started, why_all="server_failed")
        score()
        more = ()
    chosen = best_started(load(folder.path), started)
    return ServedKs(started, chosen, None if chosen else "no_costs")


# ---- one at a time -----------------------------------------------------------------------------


def _measure_visits(visits: _Visits, tasks: Iterable[Task]) -> bool:
    """Send what is lacking of some tasks; whether plain decoding is still there to compare with."""
    folder, work, adapter, kept = visits.folder, visits.work, visits.adapter, visits.kept
    waiting = waiting_of(folder, list(tasks))
    roles = sorted({task.role for task in waiting}, key=lambda role: (role.rejects, role.k))
    if not roles:
        return True
    with resumable(folder):
        settle_threads(folder, work, adapter)
        check_card(folder, work, adapter, roles)
    begun: set[Role] = set()
    for group in side_by_side(roles, work, adapter) if kept is None else [roles]:
        begun |= {*group}
        of_group = [task for task in waiting if task.role in group]
        later = [task for task in waiting if task.role not in begun]
        with ExitStack() as of_group_alone:
            servers = _Answering(of_group_alone) if kept is None else kept
            _open(visits, servers, group, [*of_group, *later])
            if PLAIN in visits.failures.dead:
                return False
            asked = {role: servers.servers[role] for role in group if role in servers.servers}
            if not _visit(visits, asked, [task for task in of_group if task.role in asked], later):
                return False
    return True


def _open(visits: _Visits, kept: _Answering, roles: Sequence[Role], left: Sequence[Task]) -> None:
    """Start those of some servers that do not answer yet, and check that they are what was asked.

    One that is of no use is left out, with what is `left` of its tasks.

    Raises:
        UserError: there is such a one, and nothing is measured.
    """
    folder, work, adapter = visits.folder, visits.work, visits.adapter
    new, servers = [role for role in roles if role not in kept.servers], kept.servers

    def left_out(role: Role, error: UserError) -> bool:
        """Whether what is measured is worth going on without this server."""
        if not any(trial.status == "ok" for trial in folder.trials.read()):
            return False
        visits.failures.of_server(role, error, left)
        return True

    if new:
        beside = len(servers)
        opened = started(folder, work, adapter, new, slots=1, left_out=left_out, beside=beside)
        with resumable(folder):
            servers.update(kept.stack.enter_context(opened))
    if PLAIN in visits.failures.dead:
        return
    with progress("checking the servers", len(new)) as tick:
        for role in [role for role in new if role in servers]:
            with resumable(folder):
                try:
                    check_vocabulary(servers[role], work.vocabulary.tokenizer, work.conversations)
                    if not role.rejects:
                        check_model(servers[role], work, adapter)
                except (ServerDiedError, RequestFailedError, RefusedError) as error:
                    if not left_out(role, error):
                        raise
                    del servers[role]
            if role in servers and not role.rejects:
                note_engine(folder, work, adapter, servers[role])
            tick()


def _visit(
    visits: _Visits, servers: Mapping[Role, Server], tasks: Sequence[Task], later: Sequence[Task]
) -> bool:
    """Send every request, store each answer; a server that dies is asked no more.

    `later` are those of servers that are still to be started.

    Returns:
        Whether the one that decodes plainly is there to the end.

    Raises:
        UserError: a server is not what was asked for, or cannot do what it will be asked for.
    """
    folder, work, failures = visits.folder, visits.work, visits.failures
    dead, in_a_row = failures.dead, Counter[Role]()
    by_length = sorted(work.prompts, key=lambda entry: len(entry.tokens))
    typical = by_length[len(by_length) // 2]
    with progress("warming the servers up", len(servers)) as tick:
        for role, server in servers.items():
            failed: UserError | None = None
            with resumable(folder):
                try:
                    for temperature in work.config.temperature:
                        _warm_up(server, work.request(typical, temperature, role.k, 0), work)
                except (ServerDiedError, RequestFailedError) as error:
                    failed = error
            if failed is not None:
                failures.of_server(role, failed, [*tasks, *later])
            tick()
    sizes = [len(task.request.tokens) + task.request.budget for task in tasks]
    with progress("asking the servers", len(tasks), sizes=sizes) as tick, undisturbed():
        for number, task in enumerate(tasks):
            if PLAIN in dead:
                return False
            if task.role not in dead:
                try:
                    line = _ask(work, servers[task.role], task)
                except ServerDiedError as error:
                    failures.of_server(task.role, error, [*tasks[number:], *later])
                except (RequestFailedError, RefusedError) as error:
                    failures.of_task(task, error)
                    # What is refused may be the request's fault, as a prompt that is too long is
                    refused = isinstance(error, RefusedError) and error.status < SERVER_ERROR
                    in_a_row[task.role] += not refused
                    if in_a_row[task.role] == FAILED_IN_A_ROW:
                        left = [*tasks[number + 1 :], *later]
                        failures.of_server(task.role, error, left)
                except UserError:  # it is not what was asked for
                    with resumable(folder):
                        raise
                else:
                    in_a_row[task.role] = 0
                    if line is not None:
                        getattr(folder, task.file).append(line)
            tick()
    return PLAIN not in dead


def _warm_up(server: Server, typical: Request, work: Workload) -> None:
    """Send a request of median length, so that what a server cannot do shows before any is stored.

    A longer one may be too long for it: that is a failure of its own.
    """
    if server.generate(typical.asked).decode_s is None:
        # Its prefills are timed by requests for one token, and it may keep those that it has seen
        for entry in work.prompts:
            with suppress(RefusedError):
                server.generate(typical.asked._replace(prompt=entry.tokens, budget=1))


def _ask(work: Workload, server: Server, task: Task) -> Trial | RoundTiming | None:
    """Send one request; what there is to store of it, None where it had no round."""
    clock, facts = work.clock, server.facts
    served = ask(server, task.request, task.visit, clock)
    if task.file != "rounds":
        return served.trial(facts, clock)
    if served.completion.returned <= facts.first_position:
        return None
    return served.rejected_rounds(facts, clock, work.config.draft.name)


# ---- requests side by side ---------------------------------------------------------------------


def measure_loads(folder: RunFolder, work: Workload, adapter: Adapter, failures: Failures) -> None:
    """Put requests side by side on servers that have room for them, visit by visit."""
    config = work.config
    loads = [Load(rate=rate) for rate in config.rate or ()]
    if max(config.concurrency) > 1:
        loads += [Load(concurrency=level) for level in config.concurrency]
    if not loads:
        return
    stored = {
        (timing.visit, timing.temperature, timing.k, timing.varying)
        for timing in folder.loads.read()
    }
    visits = [*product(range(config.repetitions), config.temperature)]
    roles = [Role(k) for k in work.ks if Role(k) not in failures.dead]
    groups_of_roles = [*side_by_side(roles, work, adapter)]
    for role in varying_roles(config):  # whose K may be one that is measured, too
        groups = side_by_side([PLAIN, role], work, adapter)
        groups_of_roles += [group for group in groups if role in group]

    def left_out(role: Role, error: UserError) -> bool:
        failures.of_load(role, error)
        return True

    slots = load_slots(config)
    for group in groups_of_roles:
        # Plain decoding stands in each group, to be compared with within moments, unless servers
        # run one after the other
        compared = [(role.k, role.varying) for role in group if role.k] or [(0, "")]
        waiting = [each for each in visits if any((*each, *c) not in stored for c in compared)]
        if not waiting:
            continue
        with started(folder, work, adapter, group, slots=slots, left_out=left_out) as servers:
            # No request was sent to these alone
            varying = [role for role in servers if role.varying]
            if all(_completes(work, adapter, role, servers[role], failures) for role in varying):
                _visit_under_load(folder, work, servers, loads, waiting, failures)


def _visit_under_load(
    folder: RunFolder,
    work: Workload,
    by_role: Mapping[Role, Server],
    loads: Sequence[Load],
    waiting: Sequence[tuple[int, float]],
    failures: Failures,
) -> None:
    """Make the visits, each at a temperature, that wait for servers of different K.

    Half a visit compares nothing: where a server fails, the others make it again without that one,
    unless it is the one that decodes plainly.
    """
    roles, slots = {role.k: role for role in by_role}, load_slots(work.config)
    servers = {role.k: server for role, server in by_role.items()}
    needed = {0} & servers.keys()
    failed: Counter[int] = Counter()
    warm: set[tuple[int, float]] = set()
    with progress(str(loads[0])) as bar, undisturbed():
        for visit, temperature in waiting:
            requests = [work.request(e, temperature, 0, visit) for e in work.prompts]
            requests = [replace(each, draft=work.config.draft.name) for each in requests]
            groups, asked = groups_of(requests, slots), dict(servers)
            while asked and needed <= asked.keys():
                labels = [
                    str(load)
                    for load in loads
                    for _ in range(load.timings(len(groups), len(asked)))
                ]
                if bar.total is None:
                    bar.expect(len(labels) * len(waiting))
                random, done = np.random.default_rng((work.config.seed, visit)), list[LoadTiming]()
                try:
                    for k in [k for k in asked if (k, temperature) not in warm]:
                        bar.say(f"warming up the server at K={k}")
                        warm_up(k, asked[k], groups, slots)
                        warm.add((k, temperature))
                    timings = load_visit(asked, groups, loads, visit, random, work.clock)
                    for label in labels:
                        bar.say(label)
                        done.append(next(timings))
                        bar()
                except LoadFailedError as error:
                    failures.of_load(roles[error.k], error)
                    failed[error.k] += 1
                    del asked[error.k]
                    if error.died or failed[error.k] == FAILED_VISITS:
                        del servers[error.k]
                else:
                    folder.loads.append(
                        *(replace(each, varying=roles[each.k].varying) for each in done)
                    )
                    break


def _completes(
    work: Workload, adapter: Adapter, role: Role, server: Server, failures: Failures
) -> bool:
    """Whether a server reads and completes texts as the target does; else that is noted."""
    with progress(f"checking the texts at {role}"):
        try:
            check_vocabulary(server, work.vocabulary.tokenizer, work.conversations)
            check_model(server, work, adapter)
        except UserError as error:
            failures.of_load(role, error)
            return False
    return True

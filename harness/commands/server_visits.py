"""Visits to servers: every request that a run folder lacks is sent, and its answer stored.

A request is a line of trials.jsonl as soon as its answer is there, so a run that is stopped
continues where it was. Requests side by side come last, stored visit by visit in loads.jsonl.

What fails costs as little as it can. A request that has no answer, though it was repeated, is its
own trial, failed. A server that ends or hangs, or fails at request after request, is asked no more:
the rest of its K is lost, and with the one that decodes plainly the visits end, for nothing can be
compared any more. What was measured is analysed and reported all the same, and `resume=` asks for
the rest. Only before anything is measured is an error the end of the run.
"""

import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from time import monotonic

import numpy as np

from harness.analysis.looks import best_started, decided, to_start
from harness.commands.progress import progress, say
from harness.commands.run_lifecycle import answer_so_far, resumable
from harness.commands.run_time import Stopwatch, about
from harness.commands.server_judging import judge_greedy_texts, judge_the_rest, score
from harness.commands.server_plan import WARM_TOKENS, planned
from harness.commands.server_requests import Failures, Task, Workload, waiting_of
from harness.commands.server_start import (
    all_stay,
    asks_everything,
    check_card,
    check_vocabulary,
    every_k,
    note_engine,
    settle_threads,
    side_by_side,
    started,
    stay,
    times_rejecting,
)
from harness.commands.tasks import (
    PLAIN,
    Role,
    chosen_tasks,
    every_k_tasks,
    everything,
    load_slots,
    plain_tasks,
    probe_tasks,
    prompts_at,
    server_tasks,
    varying_roles,
)
from harness.engines import turns
from harness.engines.protocol import (
    RefusedError,
    RequestFailedError,
    Server,
    ServerDiedError,
    TokensLostError,
)
from harness.measurement.clock import undisturbed
from harness.measurement.load import Load, LoadFailedError, groups_of, load_visit, warm_up
from harness.measurement.server_request import ask
from harness.records import LoadTiming, RoundTiming, Trial, UserError, grouped
from harness.stats.verdict_interval import LOOKS
from harness.storage import RunFolder, load
from harness.storage.manifest import Ended, ServedKs, WhyAll

_log = logging.getLogger(__name__)
Line = Trial | RoundTiming | None  # what is stored of an answer
# Requests of a server without an answer, one after the other, after which it is asked no more
FAILED_IN_A_ROW = 3
# The lowest status of an error that is the server's and not the request's
SERVER_ERROR = 500
# Visits of a server under load without an answer after which it is asked no more
FAILED_VISITS = 2
WHY_ALL: Mapping[WhyAll, str] = {
    "server_failed": "a server that was to tell what its rounds cost failed",
    "no_costs": "few requests do not tell what rounds cost here",
}
# Visits after a part of which a run that measures every K gives its first answer
FIRST_PART = 4


def measure(folder: RunFolder, work: Workload) -> Workload:
    """Ask the servers for what the folder lacks: one at a time, then side by side.

    Returns:
        The workload as it was asked for: less of it, where all would have taken too long.

    Raises:
        UserError: the servers are not what was asked for, or do not start, and nothing is measured.
    """
    watch, going = Stopwatch(folder, work.config.budget_s), True
    with resumable(folder):
        settle_threads(folder, work)
    work = planned(folder, work, watch)
    visits = _Visits(folder, work, Failures(folder, work), watch)
    visits = replace(visits, before=visits.answered())
    if not every_k(folder, work.config):
        going = _measure_chosen(visits)
        if every_k(folder, work.config):  # what failed is asked for again
            visits = replace(visits, failures=Failures(folder, work))
    if going and every_k(folder, work.config):
        going = _measure_every_k(visits)
    if going:
        judge_the_rest(folder, work)
        measure_loads(folder, work, visits.failures)
    return work


# ---- one K, that replay chooses ----------------------------------------------------------------


@dataclass
class _Answering:
    """Servers that answer, until their stack is closed."""

    stack: ExitStack
    servers: dict[Role, Server] = field(default_factory=dict[Role, Server])
    request_s: float = 0.0  # about as long as the plain one decodes for a whole budget


@dataclass(frozen=True)
class _Visits:
    """The run that visits are made in."""

    folder: RunFolder
    work: Workload
    failures: Failures
    watch: Stopwatch
    kept: _Answering | None = None  # servers that stay for further tasks, where all fit
    begun: float = field(default_factory=monotonic)
    before: int = 0  # answers that were stored before these visits

    def answer(self, label: str) -> None:
        """Score what is stored, and say and store what follows from it."""
        score(self.folder, self.work)
        answer_so_far(self.folder, label)

    def answered(self) -> int:
        files = self.folder.probes, self.folder.starts, self.folder.trials
        return sum(len(lines.read()) for lines in files)

    def say_left(self, least: float, most: float) -> None:
        """Say how long so many requests take, at the pace of those before, with their scores."""
        number = self.answered() - self.before
        if number <= 0:  # of a run that goes on
            return
        request_s = (monotonic() - self.begun) / number
        least_s, most_s = (min(request_s * each, self.watch.left_s) for each in (least, most))
        say(f"left: {about(least_s, most_s)}")


def _measure_chosen(visits: _Visits) -> bool:
    """Choose a K and measure it, or note in the manifest why every K is to be measured.

    Returns, as all that measure do, whether plain decoding is still there to be compared with.
    """
    folder, work = visits.folder, visits.work
    with ExitStack() as stack:
        visits = replace(visits, kept=_Answering(stack) if all_stay(work) else None)
        chosen = folder.manifest.served_ks
        if chosen is None:
            chosen = _choose(visits)
            if chosen is None:
                return False
            folder.note(served_ks=chosen)
            if chosen.why_all is not None:
                _log.warning("every K is measured: %s", WHY_ALL[chosen.why_all])
                engine, synthetic = folder.manifest.engine, times_rejecting(folder, work)
                folder.note(engine=engine and replace(engine, synthetic=synthetic))
                return True
        return _measure_looks(visits, chosen)


def _choose(visits: _Visits) -> ServedKs | None:
    """Price the rounds of few K and choose the fastest; None without plain decoding."""
    folder, work, failures = visits.folder, visits.work, visits.failures
    ks, started = sorted(work.ks[1:]), tuple[int, ...]()
    temperatures = work.config.temperature
    # What a run that is resumed had begun is completed first
    more = tuple(dict.fromkeys(trial.k for trial in folder.probes.read() if trial.k))
    while more := more or to_start(load(folder.path), ks, started):
        # The first temperature's answer is the first one
        apart = [temperatures] if started else [temperatures[:1], temperatures[1:]]
        for some in filter(None, apart):
            tasks = probe_tasks(work.config, work.prompts, more, work.of_each_set, some)
            if not _measure_visits(visits, work.tasks(tasks)):
                return None
            if failures.dead and asks_everything(folder):
                return ServedKs((*started, *more), why_all="server_failed")
            if some == temperatures[:1] and not started:
                visits.answer("first answer")
                _say_left_of_all(visits)
        # Every text by replay, where there is time for more than it takes to measure them
        if not started and asks_everything(folder):
            texts = work.tasks(plain_tasks(work.config, work.prompts))
            if not _measure_visits(visits, texts):
                return None
        started += tuple(k for k in more if Role(k) not in failures.dead)
        ks = [k for k in ks if Role(k) not in failures.dead]
        if not started:
            return ServedKs((), why_all="server_failed")
        score(folder, work)
        more = ()
    chosen = best_started(load(folder.path), started)
    return ServedKs(started, chosen, None if chosen else "no_costs")


def _say_left_of_all(visits: _Visits) -> None:
    """Say how long the rest of a run that has just begun takes."""
    work = visits.work
    asked = visits.folder.manifest.asked_less or everything(work.config, work.prompts)
    tasks = server_tasks(asked, work.config, work.prompts)
    before = len(tasks.choosing) + len(tasks.plain) - visits.answered()
    measured = len(tasks.measured)
    visits.say_left(before + measured / LOOKS, before + measured)


def _measure_looks(visits: _Visits, chosen: ServedKs) -> bool:
    """Measure the chosen K in looks, until they decide or the time is spent."""
    folder, work, watch = visits.folder, visits.work, visits.watch
    tasks = work.tasks(chosen_tasks(work.config, work.prompts, chosen))
    blocks = [*grouped(tasks, lambda task: task.request.key).items()]
    if visits.kept is None:  # servers that would be started again for each look
        return _measure_visits(visits, [task for _, part in blocks for task in part])
    waiting = len(waiting_of(folder, tasks))
    visits.say_left(waiting / LOOKS, waiting)
    begun = monotonic()
    number, repetitions = len(blocks), work.config.repetitions
    for look in range(1, LOOKS + 1):
        done = {each.temperature for each in chosen.chosen if (each.looks or LOOKS) < look}
        end = prompts_at(number, look)
        if repetitions >= LOOKS:  # whole visits
            end = prompts_at(repetitions, look) * number // repetitions
        part = [task for key, ts in blocks[:end] if key.temperature not in done for task in ts]
        if not _measure_visits(visits, part):
            return False
        ended: Ended | None = "budget" if watch.left_s < 0 else None
        ended = "prompts" if look == LOOKS and ended is None else ended
        if chosen.made < look:
            score(folder, work)
            noted = chosen.closed(decided(load(folder.path), look), look)
            if all(each.looks for each in noted) and ended is None:
                ended = "decided"
            chosen = replace(chosen, chosen=noted, made=look)
        mean_s = (monotonic() - begun) / look
        if ended is None and mean_s > watch.left_s:
            ended = "budget"
        chosen = replace(chosen, ended=ended)
        folder.note(served_ks=chosen)
        if ended is not None:
            break
        answer_so_far(folder, f"answer after look {look} of {LOOKS}")
    return True


def _measure_every_k(visits: _Visits) -> bool:
    """Measure every K on every prompt; where all servers stay, with answers on the way."""
    work = visits.work
    rejecting = times_rejecting(visits.folder, work)
    tasks = work.tasks(every_k_tasks(work.config, work.prompts, rejecting=rejecting))
    roles = {task.role for task in tasks}
    if not stay(work) or len(side_by_side(sorted(roles), work)) > 1:
        return _measure_visits(visits, tasks)
    by_visit = [*grouped(tasks, lambda task: task.visit).values()]
    blocks = [*grouped(by_visit[0], lambda task: task.request.key).values()]
    first = [task for block in blocks[: math.ceil(len(blocks) / FIRST_PART)] for task in block]
    with ExitStack() as stack:
        visits = replace(visits, kept=_Answering(stack))
        for number, part in enumerate([first, *by_visit]):
            if visits.watch.left_s < 0:
                break
            if not _measure_visits(visits, part):
                return False
            visits.answer(f"answer after visit {number}" if number else "first answer")
    return True


# ---- one at a time -----------------------------------------------------------------------------


def _measure_visits(visits: _Visits, tasks: Sequence[Task]) -> bool:
    """Send what is lacking of some tasks."""
    folder, work, kept = visits.folder, visits.work, visits.kept
    waiting = waiting_of(folder, tasks)
    roles = sorted({task.role for task in waiting}, key=lambda role: (role.rejects, role.k))
    if not roles:
        return True
    with resumable(folder):
        check_card(folder, work, roles)
    begun: set[Role] = set()
    for group in side_by_side(roles, work) if kept is None else [roles]:
        begun |= {*group}
        of_group = [task for task in waiting if task.role in group]
        later = [task for task in waiting if task.role not in begun]
        with ExitStack() as of_group_alone:
            servers = _Answering(of_group_alone) if kept is None else kept
            _open(visits, servers, group, [*of_group, *later])
            if PLAIN in visits.failures.dead:
                return False
            asked = [task for task in of_group if task.role in servers.servers]
            if not _visit(visits, servers, asked, later):
                return False
    return True


def _open(visits: _Visits, kept: _Answering, roles: Sequence[Role], left: Sequence[Task]) -> None:
    """Start those of some servers that do not answer yet, and check that they are what was asked.

    One that is of no use is left out, with what is `left` of its tasks.

    Raises:
        UserError: there is such a one, and nothing is measured.
    """
    folder, work, servers = visits.folder, visits.work, kept.servers
    new = [role for role in roles if role not in servers]
    measured = any(trial.status == "ok" for trial in (*folder.trials.read(), *folder.probes.read()))
    lost: list[UserError] = []

    def left_out(role: Role, error: UserError) -> bool:
        """True where the run goes on without this server."""
        lost.append(error)
        if not measured and (role == PLAIN or len(lost) == len([r for r in new if r != PLAIN])):
            return False
        visits.failures.of_server(role, error, left)
        return True

    if new:
        opened = started(folder, work, new, slots=1, left_out=left_out)
        with resumable(folder):
            servers.update(kept.stack.enter_context(opened))
    if PLAIN in visits.failures.dead:
        return
    with progress("checking the servers", len(new)) as tick:
        for role in [role for role in new if role in servers]:
            with resumable(folder):
                try:
                    check_vocabulary(servers[role], work.vocabulary.tokenizer, work.conversations)
                except (ServerDiedError, RequestFailedError, RefusedError) as error:
                    if not left_out(role, error):
                        raise
                    del servers[role]
            if role in servers and not role.rejects:
                note_engine(folder, work, servers[role])
            tick()
    with progress("warming the servers up", len(new)) as tick:
        for role in [role for role in new if role in servers]:
            with resumable(folder):
                try:
                    for temperature in work.config.temperature:
                        token_s = _warm_up(servers[role], work, temperature)
                        if role == PLAIN:
                            kept.request_s = token_s * work.config.new_tokens
                except (ServerDiedError, RequestFailedError) as error:
                    visits.failures.of_server(role, error, left)
            tick()


def _visit(
    visits: _Visits, answering: _Answering, tasks: Sequence[Task], later: Sequence[Task]
) -> bool:
    """Send every request, store each answer; a server that dies is asked no more.

    `later` are those of servers that are still to be started.

    Raises:
        UserError: a server is not what was asked for, or cannot do what it will be asked for.
    """
    folder, work, failures = visits.folder, visits.work, visits.failures
    dead, in_a_row, last = failures.dead, Counter[Role](), None
    sizes = [len(task.request.tokens) + task.request.budget for task in tasks]
    with progress("asking the servers", len(tasks), sizes=sizes) as tick, undisturbed():
        answers = _Answers(work, answering, tasks)
        for number, task in enumerate(tasks):
            if PLAIN in dead:
                return False
            if visits.watch.left_s < 0 and task.compared != last:
                break  # between what is compared with each other
            last = task.compared
            if task.role not in dead:
                try:
                    line = answers.of(task, dead)
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
    if PLAIN not in dead:
        judge_greedy_texts(folder, work, answering.servers)
    return PLAIN not in dead


def _warm_up(server: Server, work: Workload, temperature: float) -> float:
    """Send a request of median length, so that the first timed one is no start.

    Returns seconds of a token by the server's own clock; 0 where it does not tell.
    """
    asked = work.request(work.median, temperature, server.k, 0).asked
    asked = asked._replace(budget=min(WARM_TOKENS, work.config.new_tokens))
    done = server.generate(asked)
    if done.decode_s is None:
        # Its prefills are timed by requests for one token, and it may keep those that it has seen
        for entry in work.prompts:
            with suppress(RefusedError):  # of one that is too long, a failure of its own
                server.generate(asked._replace(prompt=entry.tokens, budget=1))
    return (done.decode_s or 0.0) / max(1, done.returned - 1)


class _Answers:
    """Answers to tasks, in their order: each is asked for alone, or in turns with its like.

    What is compared with each other takes turns, a request for each server, where requests last for
    some slices (`harness.engines.turns`) and all of their servers can be paused.
    """

    def __init__(self, work: Workload, answering: _Answering, tasks: Sequence[Task]) -> None:
        self._work, self._servers = work, answering.servers
        self._futures: dict[int, Future[Line]] = {}
        self._together: dict[int, Sequence[Task]] = {}
        if answering.request_s < turns.LEAST_S or work.clock != "engine":
            return
        for compared in grouped(tasks, lambda task: task.compared).values():
            for together in grouped(compared, lambda task: task.request.budget).values():
                self._together |= {id(task): together for task in together}

    def of(self, task: Task, dead: Collection[Role]) -> Line:
        """The line to store of its answer; raises as `Server.generate` does."""
        if id(task) not in self._futures and id(task) in self._together:
            self._ask_in_turns([each for each in self._together[id(task)] if each.role not in dead])
        future = self._futures.pop(id(task), None)
        return self._ask(task) if future is None else future.result()

    def _ask_in_turns(self, tasks: Sequence[Task]) -> None:
        given = [self._servers[task.role].turn(len(tasks)) for task in tasks]
        turned = [turn for turn in given if turn is not None]
        if len(turned) < len(tasks) or len(tasks) == 1:
            return
        asks = [
            (turn, partial(self._ask, task, turn)) for task, turn in zip(tasks, turned, strict=True)
        ]
        answers = turns.in_turns(asks)
        if any(isinstance(answer.exception(), TokensLostError) for answer in answers):
            # All of them again, each alone: what is compared is timed alike
            for task in tasks:
                del self._together[id(task)]
            return
        self._futures |= zip(map(id, tasks), answers, strict=True)

    def _ask(self, task: Task, turn: turns.Turn | None = None) -> Line:
        return _ask(self._work, self._servers[task.role], task, turn)


def _ask(work: Workload, server: Server, task: Task, turn: turns.Turn | None = None) -> Line:
    """Send one request; the line to store of its answer, None where it had no round.

    In turns, requests are long, and reading a prompt may take longer than the answer. So a request
    for a part of the budget uses the prompt that its server has just read for the whole one: only
    its decoding is compared. Short requests are not sent so, because their costs include a start,
    which a cached prompt makes shorter.
    """
    clock, facts = work.clock, server.facts
    again = turn is not None and task.file == "starts"
    served = ask(server, task.request, task.visit, clock, turn, cached=again)
    if task.file != "rounds":
        return served.trial(facts, clock)
    if served.completion.returned <= facts.first_position:
        return None
    return served.rejected_rounds(facts, clock, work.config.draft.name)


# ---- side by side --------------------------------------------------------------------------------


def measure_loads(folder: RunFolder, work: Workload, failures: Failures) -> None:
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
    groups_of_roles = side_by_side(roles, work)
    for role in varying_roles(config):  # whose K may be one that is measured, too
        groups_of_roles += [each for each in side_by_side([PLAIN, role], work) if role in each]

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
        with started(folder, work, group, slots=slots, left_out=left_out) as servers:
            # No request was sent to these alone
            varying = [role for role in servers if role.varying]
            if all(_completes(work, role, servers[role], failures) for role in varying):
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
                if bar.total is None:
                    number = sum(load.timings(len(groups), len(asked)) for load in loads)
                    bar.expect(number * len(waiting))
                random, done = np.random.default_rng((work.config.seed, visit)), list[LoadTiming]()
                try:
                    for k in [k for k in asked if (k, temperature) not in warm]:
                        bar.say(f"warming up the server at K={k}")
                        warm_up(k, asked[k], groups, slots)
                        warm.add((k, temperature))
                    how = (loads, visit, random, work.clock)
                    for timing in load_visit(asked, groups, *how, say=bar.say):
                        done.append(timing)
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


def _completes(work: Workload, role: Role, server: Server, failures: Failures) -> bool:
    """True where a server decodes ids as the target's tokenizer does; else that is noted."""
    with progress(f"checking the texts at {role}"):
        try:
            check_vocabulary(server, work.vocabulary.tokenizer, work.conversations)
        except UserError as error:
            failures.of_load(role, error)
            return False
    return True

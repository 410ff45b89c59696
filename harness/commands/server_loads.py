"""Requests side by side on servers with room for them, stored visit by visit in loads.jsonl."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from harness.commands.progress import progress
from harness.commands.server_requests import Failures, Workload
from harness.commands.server_start import check_vocabulary, side_by_side, started
from harness.commands.tasks import PLAIN, Role, load_slots, varying_roles
from harness.engines.protocol import Server
from harness.measurement.clock import undisturbed
from harness.measurement.load import Load, LoadFailedError, groups_of, load_visit, warm_up
from harness.records import LoadTiming, UserError
from harness.storage import RunFolder

# Visits of a server without an answer after which it is asked no more
FAILED_VISITS = 2


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


def _completes(work: Workload, role: Role, server: Server, failures: Failures) -> bool:
    """True where a server decodes ids as the target's tokenizer does; else that is noted."""
    with progress(f"checking the texts at {role}"):
        try:
            check_vocabulary(server, work.vocabulary.tokenizer, work.conversations)
        except UserError as error:
            failures.of_load(role, error)
            return False
    return True

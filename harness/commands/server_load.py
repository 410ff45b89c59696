"""Requests side by side on servers that have room for them: loads.jsonl, visit by visit."""

from dataclasses import replace

import numpy as np

from harness.commands.progress import progress
from harness.commands.server_requests import Role, Workload, load_slots
from harness.commands.server_start import side_by_side, started
from harness.engines.adapters import Adapter
from harness.measurement.clock import undisturbed
from harness.measurement.load import Load, groups_of, load_visit
from harness.storage import RunFolder


def measure_loads(folder: RunFolder, work: Workload, adapter: Adapter) -> None:
    """Put requests side by side on servers that have room for them, visit by visit."""
    config = work.config
    loads = [Load(rate=config.rate)] if config.rate else []
    if max(config.concurrency) > 1:
        loads += [Load(concurrency=level) for level in config.concurrency]
    stored = {(timing.visit, timing.temperature, timing.k) for timing in folder.loads()}
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
                    folder.append_loads(done)
                    tick()

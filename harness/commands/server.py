"""A pair on the engine that will serve it: every K on live servers, then the verdict.

What the servers are asked for is in `server_requests`, how they are started or attached to in
`server_start`, the single requests in `server_visits`, requests side by side in `server_load`, and
what becomes of the returned texts in `server_texts`.
"""

from harness.commands.dry_run import print_server_plan
from harness.commands.other_runs import stored_own_rounds
from harness.commands.run_lifecycle import (
    Outcome,
    concluded,
    create,
    load_prompts,
    measuring,
    note_or_check,
    resumed,
)
from harness.commands.server_load import measure_loads
from harness.commands.server_requests import open_workload
from harness.commands.server_start import is_synthetic, states_of_addresses, try_addresses
from harness.commands.server_texts import judge
from harness.commands.server_visits import measure
from harness.commands.time_rounds import time_own_loop
from harness.config import ServerConfig
from harness.engines.adapters import adapter_of
from harness.engines.process import check_port_free

COMMAND = "server"


def run(config: ServerConfig) -> Outcome:
    """Measure the grid on the engine; status 1 where a server failed or changed a greedy text."""
    prompts = load_prompts(config)
    adapter = adapter_of(config)
    if config.dry_run:
        states = states_of_addresses(config, adapter)
        print_server_plan(config, prompts, states, synthetic=is_synthetic(config, adapter))
        return Outcome(None)
    folder = resumed(config, COMMAND)
    own_rounds = stored_own_rounds(config)
    # Before weights are loaded and a folder is made
    if config.url is not None:
        try_addresses(config, adapter, prompts)
    else:
        adapter.check(config)
        if config.port is not None:
            check_port_free(config.port)
    work = open_workload(config, prompts)
    folder = folder or create(config, COMMAND)
    note_or_check(folder, work.describe(), config.seed)
    with measuring(folder, work.device):
        work = work.with_turns(folder)
        measure(folder, work, adapter)
        measure_loads(folder, work, adapter)
        if work.pair is not None:
            judge(folder, work, work.pair)
            if config.engine != "own":
                time_own_loop(folder, work.pair, config, own_rounds)
    return concluded(folder, verbose=config.verbose)

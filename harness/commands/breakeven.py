"""The arithmetic alone: from two latencies to speedups, without a model and without torch.

Latencies and acceptance are typed in, or come from a server's files (`server_files`);
`harness.analysis.breakeven` does the arithmetic.
"""

from collections.abc import Iterator
from dataclasses import asdict

from harness.analysis.breakeven import iid_rows, inputs_of, measured_rows
from harness.commands.run_lifecycle import Outcome, concluded
from harness.commands.server_files import measured_inputs
from harness.config import BreakevenConfig
from harness.measurement.environment import describe_host
from harness.records import LatencyRow
from harness.storage import RunFolder
from harness.theory.speedup import StepTimes


def run(config: BreakevenConfig) -> Outcome:
    """Computes every row, stores the run and prints it.

    Raises:
        UserError: a latency <= 0, too few verify times for the largest K, a rate outside [0, 1], or
            a file that cannot be used.
    """
    measured = measured_inputs(config)
    from_files = {key: value for key, value in asdict(measured).items() if value}
    inputs = inputs_of({**asdict(config), **from_files})
    for _ in (*iid_rows(inputs), *measured_rows(inputs)):
        pass  # refuses what cannot be before a folder is made
    folder = RunFolder.create(config.results_root, "breakeven", (), asdict(config))
    folder.write_latency(list(_typed_latency(inputs.times)), ())
    folder.update_manifest({"environment": describe_host(), "inputs": from_files})
    return concluded(folder)


def _typed_latency(times: StepTimes) -> Iterator[LatencyRow]:
    """Latencies that were typed, not measured: no samples stand behind them."""
    steps = [("draft", "step", 1, times.draft_s), ("target", "step", 1, times.target_s)]
    steps += [("target", "verify", n, value) for n, value in enumerate(times.verify_s, start=1)]
    for role, kind, tokens, seconds in steps:
        ms = 1e3 * seconds
        yield LatencyRow(role, "", kind, tokens, 0, 1, ms, ms, ms, samples=0)

"""Break-even and speedups from two latencies, without a model and without torch.

Latencies and acceptance are typed in, or come from a run's round times or from what
`vllm bench serve --save-result` wrote. Its fields, as vLLM computes them from its counters
over the benchmark (vllm/benchmarks/serve.py):

    spec_decode_acceptance_rate                100 x accepted / drafted, percent
    spec_decode_acceptance_length              1 + accepted / drafts
    spec_decode_num_drafts                     rounds
    spec_decode_draft_tokens                   drafted
    spec_decode_accepted_tokens                accepted
    spec_decode_per_position_acceptance_rates  accepted at position j / drafts: shares, not percent
    completed                                  requests that were answered
    mean_tpot_ms                               (latency - TTFT) / (output tokens - 1), per request

The fields of speculation are those of vLLM 0.14 or later, where the server speculates. Another
program's field of acceptance is not read, but it shows that the server speculated.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.analysis.breakeven import (
    MeasuredInputs,
    ServerBenchmark,
    from_run,
    inputs_of,
    with_acceptance,
    with_baseline,
)
from harness.analysis.round_costs import Latency, latency_of_draft
from harness.command_words import as_typed
from harness.commands.run_lifecycle import Outcome, concluded
from harness.config import BreakevenConfig
from harness.measurement.environment import describe_host
from harness.records import GREEDY, UserError
from harness.storage import RunFolder, load
from harness.theory.acceptance import (
    acceptance_rate_from_positions,
    mean_acceptance_length_from_positions,
)

# Sources of one number, of which one is given
ONE_OF = (
    ("acceptance_rate", "acceptance_by_position", "acceptance_from"),
    ("target_ms", "baseline_from", "latency_from"),
    ("draft_ms", "latency_from"),
    ("verify_ms", "latency_from"),
)
RATE, LENGTH = "spec_decode_acceptance_rate", "spec_decode_acceptance_length"
DRAFTS, DRAFTED = "spec_decode_num_drafts", "spec_decode_draft_tokens"
ACCEPTED = "spec_decode_accepted_tokens"
POSITIONS = "spec_decode_per_position_acceptance_rates"
TPOT = ("mean_tpot_ms", "median_tpot_ms")
# Fields of one file must agree within 2 %: they are rounded.
TOLERANCE = 0.02
# The name of a field of acceptance in the results of other programs
OF_DRAFTS = re.compile(r"accept|draft", re.IGNORECASE)
# SGLang's (bench_serving.py): tokens per round, without K
SGLANG_LENGTH = "accept_length"
# A share where percent belong makes K a hundred times what it was.
MOST_K = 64


def run(config: BreakevenConfig) -> Outcome:
    measured = measured_inputs(config)
    inputs_of(config, measured)  # refuses what cannot be before a folder is made
    stored = {
        name: value for name, value in asdict(measured).items() if value or name == "requests"
    }
    folder = RunFolder.create(config.results_root, "breakeven", (), asdict(config))
    folder.write_timings(())  # none stand behind times that are typed
    folder.note(environment=describe_host(), inputs=stored)
    return concluded(folder, verbose=config.verbose)


# ---- files of a server or a run ------------------------------------------------------------------


def measured_inputs(config: BreakevenConfig) -> MeasuredInputs:
    """Read the files that the configuration names: one source of each number."""
    for keys in ONE_OF:
        given = [key for key in keys if getattr(config, key) is not None]
        if len(given) > 1:
            raise UserError(f"{given[0]} and {given[1]}: give one of the two")
    inputs, baseline = MeasuredInputs(), None
    if config.latency_from is not None:
        run = config.latency_from
        inputs = from_run(run, latency_of_run(run), config.k)
    if config.baseline_from is not None:
        baseline = read_benchmark("baseline_from", config.baseline_from)
        inputs = with_baseline(inputs, baseline)
    keys = ("draft_ms", "target_ms")
    missing = [k for k in keys if getattr(config, k) is None and getattr(inputs, k) is None]
    if missing:
        give = " ".join(f"{key}=..." for key in missing)
        raise UserError(f"{missing[0]}: no value and no default; give {give} (or latency_from=RUN)")
    if config.acceptance_from is not None:
        speculative = read_benchmark("acceptance_from", config.acceptance_from)
        inputs = with_acceptance(inputs, speculative, config.k, baseline)
    return inputs


def latency_of_run(folder: str) -> Latency:
    """Round and step times of a run with one draft, greedy where it timed greedy rounds."""
    run, key = load(folder), as_typed("latency_from", folder)
    drafts = sorted({timing.model for timing in run.timings if timing.role == "draft"})
    if not drafts or not any(timing.role == "target" for timing in run.timings):
        raise UserError(f"{key}: no step times there; name a profile or a sweep")
    if len(drafts) > 1:
        raise UserError(f"{key}: times of {', '.join(drafts)}; name a run with one draft")
    latency = latency_of_draft(run, drafts[0], GREEDY)
    assert latency is not None  # its steps were timed
    return latency


def read_benchmark(key: str, file: str) -> ServerBenchmark:
    """Read what `vllm bench serve --save-result` wrote to the file that setting `key` names."""
    where = f"{key}={file}"
    try:
        fields = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{where}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise UserError(f"{where}: not a JSON object; give one benchmark's result")
    positions = _positions(where, fields)
    k, rate = _acceptance(where, fields, positions)
    if k is None:
        _check_plain(key, where, fields)
    tpot_ms = next((_number(where, fields, name) for name in TPOT if fields.get(name)), None)
    if k is None and tpot_ms is None:
        raise UserError(
            f"{where}: has neither {TPOT[0]} nor {RATE}; give what vllm bench serve --save-result"
            " writes"
        )
    concurrency = fields.get("max_concurrency")
    return ServerBenchmark(
        file=file,
        k=k,
        positions=positions,
        acceptance_rate=rate,
        seconds_per_token=None if tpot_ms is None else tpot_ms / 1e3,
        concurrency=concurrency if isinstance(concurrency, int) else None,
        failed=int(fields.get("failed") or 0),
        requests=int(_number(where, fields, "completed")) if "completed" in fields else None,
    )


def _check_plain(key: str, where: str, fields: Mapping[str, Any]) -> None:
    """Refuse a file without vLLM's fields of speculation whose server speculated all the same."""
    for name, value in fields.items():
        counted = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        if not (counted and OF_DRAFTS.search(name)):
            continue
        give = "a file of a server that did not"
        if key == "acceptance_from":
            rate = f"({value:g} - 1) / K" if name == SGLANG_LENGTH else "RATE"
            give = f"k=[K] acceptance_rate={rate} in its place, with the K that was served"
        raise UserError(
            f"{where}: that server speculated ({name}={value:g}), but the file has no {RATE} and no"
            f" other field of vllm bench serve, from which K is read; give {give}"
        )


def _number(where: str, fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
        return float(value)
    raise UserError(f"{where}: {name}={value!r} is not a number of 0 or more")


def _positions(where: str, fields: Mapping[str, Any]) -> tuple[float, ...]:
    shares = fields.get(POSITIONS) or []
    if not isinstance(shares, list):
        raise UserError(f"{where}: {POSITIONS} is not a list")
    if not shares:
        return ()
    try:
        acceptance_rate_from_positions(shares)
    except UserError as error:
        reason = str(error).removeprefix("acceptance_by_position").lstrip(":=")
        raise UserError(f"{where}: {POSITIONS}={reason.strip()}") from error
    return tuple(float(value) for value in shares)


def _acceptance(
    where: str, fields: Mapping[str, Any], positions: tuple[float, ...]
) -> tuple[int | None, float | None]:
    """K and acceptance_rate, by the first of positions, counts, rate and length that is whole."""
    names = (DRAFTS, DRAFTED, ACCEPTED, RATE, LENGTH)
    numbers = {name: _number(where, fields, name) for name in names if name in fields}
    percent, reported = numbers.get(RATE), numbers.get(LENGTH)
    if percent is not None and percent > 100:
        raise UserError(f"{where}: {RATE}={percent:g} is not a percentage")
    if positions:
        k, length = len(positions), mean_acceptance_length_from_positions(positions)
    elif numbers.get(DRAFTS) and numbers.get(DRAFTED) and ACCEPTED in numbers:
        k = math.ceil(numbers[DRAFTED] / numbers[DRAFTS] - 1e-9)
        length = 1.0 + numbers[ACCEPTED] / numbers[DRAFTS]
    elif percent and reported:
        drafted = (reported - 1.0) / (percent / 100.0)
        k, length = round(drafted), reported
        if not 1 <= k <= MOST_K or abs(drafted - k) > TOLERANCE * drafted:
            raise UserError(
                f"{where}: {RATE}={percent:g} (percent) and {LENGTH}={length:g} give"
                f" K={drafted:.4g}, which is not a whole number from 1 to {MOST_K}"
            )
    elif numbers:
        lacking = ", ".join(name for name in names if not numbers.get(name))
        raise UserError(f"{where}: no {POSITIONS}, and without it {lacking} would be needed")
    else:
        return None, None
    rate = (length - 1.0) / k
    if not 0.0 <= rate <= 1.0 + TOLERANCE:
        raise UserError(f"{where}: {length - 1:g} tokens accepted of {k} drafted per round")
    if reported is not None and abs(reported - length) > TOLERANCE * length:
        raise UserError(
            f"{where}: {LENGTH}={reported:g} does not agree with the {length:.3f} that its other"
            " fields give"
        )
    return k, min(rate, 1.0)

"""What `vllm bench serve --save-result` writes: acceptance and time per output token.

The fields, as vLLM computes them from its counters over the benchmark (vllm/benchmarks/serve.py):

    spec_decode_acceptance_rate                100 x accepted / drafted, percent
    spec_decode_acceptance_length              1 + accepted / drafts
    spec_decode_num_drafts                     rounds
    spec_decode_draft_tokens                   drafted
    spec_decode_accepted_tokens                accepted
    spec_decode_per_position_acceptance_rates  accepted at position j / drafts: shares, not percent
    mean_tpot_ms                               (latency - TTFT) / (output tokens - 1), per request

A server without speculation writes the last one only.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.records import UserError
from harness.theory.acceptance import (
    acceptance_rate_from_positions,
    mean_acceptance_length_from_positions,
)

PREFIX = "spec_decode_"
RATE, LENGTH = f"{PREFIX}acceptance_rate", f"{PREFIX}acceptance_length"
DRAFTS, DRAFTED = f"{PREFIX}num_drafts", f"{PREFIX}draft_tokens"
ACCEPTED, POSITIONS = f"{PREFIX}accepted_tokens", f"{PREFIX}per_position_acceptance_rates"
TPOT = ("mean_tpot_ms", "median_tpot_ms")
# Two roundings of one number; more is two numbers.
TOLERANCE = 0.02
# A share where percent belong makes K a hundred times what it was.
MOST_K = 64


@dataclass(frozen=True)
class Bench:
    """One benchmark's file.

    Attributes:
        file: where it was read.
        k: num_speculative_tokens; None where the server did not speculate.
        positions: acceptance by position, K shares; empty where the file has none.
        acceptance_rate: accepted / drafted, a share.
        tpot_ms: milliseconds per output token; None where the file has none.
        concurrency: most requests at once; None where the client did not limit them.
        failed: requests that failed.
    """

    file: str
    k: int | None
    positions: tuple[float, ...]
    acceptance_rate: float | None
    tpot_ms: float | None
    concurrency: int | None
    failed: int


def read_bench(key: str, file: str) -> Bench:
    """Read a benchmark's file.

    Args:
        key: the setting that named it, for messages.
        file: its path.

    Raises:
        UserError: not a file, not JSON, not such a benchmark, or numbers that cannot be.
    """
    where = f"{key}={file}"
    found = _json(where, Path(file))
    positions = _positions(where, found)
    k, rate = _acceptance(where, found, positions)
    tpot = next((_number(where, found, name) for name in TPOT if found.get(name)), None)
    if k is None and tpot is None:
        raise UserError(
            f"{where}: has neither {TPOT[0]} nor {RATE}; give what vllm bench serve --save-result"
            " writes"
        )
    concurrency = found.get("max_concurrency")
    return Bench(
        file=file,
        k=k,
        positions=positions,
        acceptance_rate=rate,
        tpot_ms=tpot,
        concurrency=concurrency if isinstance(concurrency, int) else None,
        failed=int(found.get("failed") or 0),
    )


def _json(where: str, file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{where}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error})") from error
    if not isinstance(found, dict):
        raise UserError(f"{where}: not a JSON object; give one benchmark's result")
    return found


def _number(where: str, found: Mapping[str, Any], name: str) -> float:
    value = found.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
        return float(value)
    raise UserError(f"{where}: {name}={value!r} is not a number of 0 or more")


def _positions(where: str, found: Mapping[str, Any]) -> tuple[float, ...]:
    given = found.get(POSITIONS) or []
    if not isinstance(given, list):
        raise UserError(f"{where}: {POSITIONS} is not a list")
    if not given:
        return ()
    try:
        acceptance_rate_from_positions(given)
    except UserError as error:
        told = str(error).removeprefix("acceptance_by_position").lstrip(":=")
        raise UserError(f"{where}: {POSITIONS}={told.strip()}") from error
    return tuple(float(value) for value in given)


def _acceptance(
    where: str, found: Mapping[str, Any], positions: tuple[float, ...]
) -> tuple[int | None, float | None]:
    """K and acceptance_rate, by the first of positions, counts, rate and length that is whole."""
    counts, shown = (DRAFTS, DRAFTED, ACCEPTED), (RATE, LENGTH)
    numbers = {name: _number(where, found, name) for name in (*counts, *shown) if name in found}
    if RATE in numbers and numbers[RATE] > 100:
        raise UserError(f"{where}: {RATE}={numbers[RATE]:g} is not a percentage")
    if positions:
        k, length = len(positions), mean_acceptance_length_from_positions(positions)
    elif all(numbers.get(name) for name in (DRAFTS, DRAFTED)) and ACCEPTED in numbers:
        k = math.ceil(numbers[DRAFTED] / numbers[DRAFTS] - 1e-9)
        length = 1.0 + numbers[ACCEPTED] / numbers[DRAFTS]
    elif all(numbers.get(name) for name in shown):
        k, length = _from_rate(where, numbers[RATE], numbers[LENGTH]), numbers[LENGTH]
    elif numbers:
        lacking = [name for name in (*counts, *shown) if not numbers.get(name)]
        raise UserError(
            f"{where}: no {POSITIONS}, and without it {', '.join(lacking)} would be needed"
        )
    else:
        return None, None
    rate = (length - 1.0) / k
    if not 0.0 <= rate <= 1.0 + TOLERANCE:
        raise UserError(f"{where}: {length - 1:g} tokens accepted of {k} drafted per round")
    if LENGTH in numbers and abs(numbers[LENGTH] - length) > TOLERANCE * length:
        raise UserError(
            f"{where}: {LENGTH}={numbers[LENGTH]:g} does not agree with the {length:.3f} that its"
            " other fields give"
        )
    return k, min(rate, 1.0)


def _from_rate(where: str, percent: float, length: float) -> int:
    """K where only the two derived numbers are there: accepted per round / accepted per draft."""
    k = (length - 1.0) / (percent / 100.0)
    if not 1 <= round(k) <= MOST_K or abs(k - round(k)) > TOLERANCE * k:
        raise UserError(
            f"{where}: {RATE}={percent:g} (percent) and {LENGTH}={length:g} give K={k:.4g}, which"
            f" is not a whole number from 1 to {MOST_K}"
        )
    return round(k)
